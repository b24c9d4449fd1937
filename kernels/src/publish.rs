//! Writes the 16-bit copy of a parameter without a step, for a step that withheld its copy.

use std::marker::PhantomData;

use super::chunk_loop::{Access, CHUNK, ChunkLoop, Op};
use super::dispatch::Kernel;
use super::element::{Bf16, Element, F16, F32};
use super::float_mode::IeeeMode;
use super::spans::{AHEAD, Spans, store_maybe_nt};
use super::tensor::Tensor;
use super::vector::Vector;
use crate::dtype::Dtype;

/// Writes the new parameters of one chunk to its param_copy, with the same bits that a step writes. Does nothing for a
/// tensor without a param_copy. Panics if the tensor has more than [`CHUNK`] elements.
pub fn publish(kernel: Kernel, mut tensor: Tensor<'_>) {
    assert!(tensor.len() <= CHUNK, "a chunk is at most {CHUNK} elements");
    // Only an f32 parameter has a copy: `Tensor::new` refuses other combinations.
    match tensor.copy_dtype() {
        Some(Dtype::F16) => run::<F16>(kernel, &mut tensor),
        Some(Dtype::Bf16) => run::<Bf16>(kernel, &mut tensor),
        Some(Dtype::F32) | None => {}
    }
}

fn run<C: Element>(kernel: Kernel, tensor: &mut Tensor<'_>) {
    let n = tensor.len();
    let spans = Spans::<F32, F32, F32, C>::of(tensor);
    let op = Publish::<C> {
        from: spans.after().param,
        to: spans.param_copy,
        streamed: spans.streamed_copy(),
        element: PhantomData,
    };
    let _mode = IeeeMode::enter();
    // SAFETY: both spans have n elements of these types.
    unsafe { kernel.run(ChunkLoop::<_, false> { op, n }) };
}

struct Publish<C: Element> {
    from: *const f32,
    to: *mut C::Raw,
    streamed: bool,
    element: PhantomData<C>,
}

impl<C: Element> Op for Publish<C> {
    #[inline(always)]
    unsafe fn apply<V: Vector, A: Access>(&mut self, at: usize, access: A) -> V {
        // SAFETY: the caller's contract covers every call below.
        unsafe {
            V::prefetch(self.from.wrapping_add(at + AHEAD).cast());
            let param = access.load::<F32, V>(self.from.add(at));
            store_maybe_nt::<C, V, A>(access, self.streamed, param, self.to.add(at));
            param
        }
    }

    #[inline(always)]
    unsafe fn finish<V: Vector>(&mut self) {
        if self.streamed {
            // SAFETY: the caller upholds the callee's contract.
            unsafe { V::fence() }
        }
    }
}
