//! Takes values that other code has written to the 16-bit copy of a parameter into the f32 parameter.
//!
//! | copy | an element of the parameter stays if |
//! |---|---|
//! | bf16 | its bits are at most half a unit from those of the copy: ties may have been rounded either way |
//! | f16 | it rounds to the copy, ties to even |
//! | both | it and the copy are NaN |
//!
//! Every other element becomes that element of the copy, widened exactly. Hardly any block has such an element, so the
//! pass only reads: vectors tell for a whole block whether an element may differ, and such a block is compared exactly.

use std::marker::PhantomData;

use super::chunk_loop::CHUNK;
use super::dispatch::Kernel;
use super::element::{Bf16, Element, F16};
use super::float_mode::IeeeMode;
use super::spans::AHEAD;
use super::tensor::Tensor;
use super::vector::{Body, Vector};
use crate::dtype::{Dtype, FloatsMut, bf16, f16};

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

fn run<C: Half>(kernel: Kernel, tensor: &mut Tensor<'_>) {
    let n = tensor.len();
    let Some(from) = tensor.param_copy.as_mut().map(FloatsMut::address) else { return };
    // Only an f32 parameter has a copy: `Tensor::new` refuses other combinations.
    let take =
        Take::<C> { from: from.cast(), to: tensor.states.param.address().cast(), n, element: PhantomData };
    let _mode = IeeeMode::enter();
    // SAFETY: both spans have n elements of these types, and the tensor borrows both exclusively.
    unsafe { kernel.run(take) };
}

/// A 16-bit element type.
trait Half: Element<Raw = u16> {
    /// Bits above the lower 16 in each lane in which `param` may differ from the words `copy`.
    ///
    /// # Safety
    /// Same contract as [`Vector`].
    unsafe fn differ<V: Vector>(param: V, copy: V::Bits) -> V::Bits;
    /// The new value of an element; `None` if it stays.
    fn taken(param: f32, copy: u16) -> Option<f32>;
}

impl Half for Bf16 {
    #[inline(always)]
    unsafe fn differ<V: Vector>(param: V, copy: V::Bits) -> V::Bits {
        // SAFETY: the caller upholds the callees' contract.
        unsafe {
            let apart = V::bits_sub(param.to_bits(), V::bits_shl(copy, V::bits_splat(16)));
            V::bits_add(apart, V::bits_splat(0x8000))
        }
    }

    fn taken(param: f32, copy: u16) -> Option<f32> {
        let value = bf16::from_bits(copy).to_f32();
        let apart = param.to_bits().wrapping_sub(u32::from(copy) << 16) as i32;
        let stays = apart.unsigned_abs() <= 0x8000 || (param.is_nan() && value.is_nan());
        (!stays).then_some(value)
    }
}

impl Half for F16 {
    #[inline(always)]
    unsafe fn differ<V: Vector>(param: V, copy: V::Bits) -> V::Bits {
        // SAFETY: the caller upholds the callees' contract.
        unsafe { V::bits_shl(V::bits_xor(param.round_f16(), copy), V::bits_splat(16)) }
    }

    fn taken(param: f32, copy: u16) -> Option<f32> {
        let value = f16::from_bits(copy);
        let stays = f16::from_f32(param).to_bits() == copy || (param.is_nan() && value.is_nan());
        (!stays).then(|| value.to_f32())
    }
}

struct Take<C: Half> {
    from: *const u16,
    to: *mut f32,
    n: usize,
    element: PhantomData<C>,
}

/// Elements of which one test tells whether any differs.
const BLOCK: usize = 256;

impl<C: Half> Body for Take<C> {
    #[inline(always)]
    unsafe fn run<V: Vector>(self) -> f64 {
        let mut start = 0;
        while start < self.n {
            let end = self.n.min(start + BLOCK);
            let mut at = start;
            // SAFETY: every group lies below n.
            unsafe {
                let mut differ = V::bits_splat(0);
                while at + V::LANES <= end {
                    V::prefetch(self.to.wrapping_add(at + AHEAD).cast());
                    let copy = V::load_bits16(self.from.add(at));
                    differ = V::bits_or(differ, C::differ(V::load_f32(self.to.add(at)), copy));
                    at += V::LANES;
                }
                V::prefetch(self.from.wrapping_add(start + 2 * AHEAD).cast());
                let exact = if V::within(differ, 0xffff, differ, 0xffff) { at } else { start };
                self.take(exact, end);
            }
            start = end;
        }
        0.0
    }
}

impl<C: Half> Take<C> {
    /// Compares elements one by one.
    ///
    /// # Safety
    /// `start <= end <= n`.
    #[inline(always)]
    unsafe fn take(&self, start: usize, end: usize) {
        for at in start..end {
            // SAFETY: the caller's promise.
            unsafe {
                if let Some(value) = C::taken(self.to.add(at).read(), self.from.add(at).read()) {
                    self.to.add(at).write(value);
                }
            }
        }
    }
}
