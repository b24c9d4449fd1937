//! Takes values that other code has written to the 16-bit copy of a parameter into the f32 parameter.
//!
//! An element of the parameter stays if it rounds to its element of the copy, or if both are NaN. Else it becomes that
//! element of the copy, widened exactly. Almost all groups have no such element, so the pass only reads.

use std::marker::PhantomData;

use super::chunk_loop::{Access, CHUNK, ChunkLoop, MAX_LANES, Op};
use super::dispatch::Kernel;
use super::element::{Bf16, Element, F16, F32};
use super::float_mode::IeeeMode;
use super::spans::AHEAD;
use super::tensor::Tensor;
use super::vector::Vector;
use crate::dtype::{Dtype, FloatsMut};

/// Takes the written elements of one chunk of a tensor whose copy counts (see [`Tensor::with_copy_taken`]). Does nothing
/// for other tensors. Panics if the tensor has more than [`CHUNK`] elements.
pub fn take_copy(kernel: Kernel, tensor: &mut Tensor<'_>) {
    if !tensor.takes_copy() {
        return;
    }
    assert!(tensor.len() <= CHUNK, "a chunk is at most {CHUNK} elements");
    match tensor.copy_dtype() {
        Some(Dtype::F16) => run::<F16>(kernel, tensor),
        Some(Dtype::Bf16) => run::<Bf16>(kernel, tensor),
        Some(Dtype::F32) | None => {}
    }
}

fn run<C: Element>(kernel: Kernel, tensor: &mut Tensor<'_>) {
    let n = tensor.len();
    let Some(from) = tensor.param_copy.as_mut().map(FloatsMut::address) else { return };
    // Only an f32 parameter has a copy: `Tensor::new` refuses other combinations.
    let op = Take::<C> { from: from.cast(), to: tensor.states.param.address().cast(), element: PhantomData };
    let _mode = IeeeMode::enter();
    // SAFETY: both spans have n elements of these types, and the tensor borrows both exclusively.
    unsafe { kernel.run(ChunkLoop::<_, false> { op, n }) };
}

struct Take<C: Element> {
    from: *const C::Raw,
    to: *mut f32,
    element: PhantomData<C>,
}

impl<C: Element> Op for Take<C> {
    #[inline(always)]
    unsafe fn apply<V: Vector, A: Access>(&mut self, at: usize, access: A) -> V {
        // SAFETY: the caller's contract covers every call below.
        unsafe {
            V::prefetch(self.to.wrapping_add(at + AHEAD).cast());
            V::prefetch(self.from.wrapping_add(at + AHEAD).cast());
            let param = access.load::<F32, V>(self.to.add(at));
            let copy = access.load_bits::<C, V>(self.from.add(at));
            let differ = V::bits_xor(C::encode::<V>(param), copy);
            if !V::within(differ, 0, differ, 0) {
                let mut differs = [0_u32; MAX_LANES];
                let mut values = [0.0_f32; MAX_LANES];
                V::store_bits32(differ, differs.as_mut_ptr());
                V::store_f32(C::decode::<V>(copy), values.as_mut_ptr());
                self.take(at, &differs, &values);
            }
            param
        }
    }
}

impl<C: Element> Take<C> {
    /// Takes the values of the lanes that differ. Lanes outside the group never do: there both numbers are zero.
    ///
    /// # Safety
    /// The lanes that differ are elements of the parameter, from element `at` on.
    #[cold]
    #[inline(never)]
    unsafe fn take(&self, at: usize, differs: &[u32; MAX_LANES], values: &[f32; MAX_LANES]) {
        for (lane, (_, value)) in
            differs.iter().zip(values).enumerate().filter(|(_, (differs, _))| **differs != 0)
        {
            // SAFETY: the caller's promise.
            let param = unsafe { &mut *self.to.add(at + lane) };
            if !(param.is_nan() && value.is_nan()) {
                *param = *value;
            }
        }
    }
}
