//! The 16-bit copy of a parameter without a step: what a step that kept it back writes later.

use std::marker::PhantomData;

use super::element::{Bf16, Element, F16, F32};
use super::float_mode::IeeeMode;
use super::select::Kernel;
use super::tensor::{Spans, Tensor};
use super::vector::Vector;
use super::walk::{Access, CHUNK, Op, Walk};
use crate::dtype::Dtype;

/// Writes the parameters of one chunk to its param_copy, with the bits that a step would have written; nothing without
/// a param_copy.
pub fn publish(kernel: Kernel, mut tensor: Tensor<'_>) {
    assert!(tensor.len() <= CHUNK, "a chunk is at most {CHUNK} elements");
    // Only an f32 parameter has a copy (`Tensor::new` knows the combinations).
    match tensor.copy_dtype() {
        Some(Dtype::F16) => run::<F16>(kernel, &mut tensor),
        Some(Dtype::Bf16) => run::<Bf16>(kernel, &mut tensor),
        Some(Dtype::F32) | None => {}
    }
}

fn run<C: Element>(kernel: Kernel, tensor: &mut Tensor<'_>) {
    let n = tensor.len();
    let spans = Spans::<F32, F32, F32, C>::of(tensor);
    let op = Publish::<C> { from: spans.after().param, to: spans.param_copy, element: PhantomData };
    let _mode = IeeeMode::enter();
    // SAFETY: both spans have n elements of these types.
    unsafe { kernel.run(Walk::<_, false> { op, n }) };
}

struct Publish<C: Element> {
    from: *const f32,
    to: *mut C::Raw,
    element: PhantomData<C>,
}

impl<C: Element> Op for Publish<C> {
    #[inline(always)]
    unsafe fn apply<V: Vector, A: Access>(&mut self, at: usize, access: A) -> V {
        // SAFETY: the caller's promise covers every line.
        unsafe {
            let param = access.load::<F32, V>(self.from.add(at));
            access.store::<C, V>(param, self.to.add(at));
            param
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tensor::States;
    use super::*;
    use crate::dtype::{Floats, FloatsMut, bf16, f16};

    /// What the half crate makes of a number, with one NaN for all.
    fn expected(param: &[f32]) -> (Vec<u16>, Vec<u16>) {
        let f16_of = |x: &f32| if x.is_nan() { 0x7e00 } else { f16::from_f32(*x).to_bits() };
        let bf16_of = |x: &f32| if x.is_nan() { 0x7fc0 } else { bf16::from_f32(*x).to_bits() };
        (param.iter().map(f16_of).collect(), param.iter().map(bf16_of).collect())
    }

    #[test]
    fn copies_are_rounded_as_a_step_rounds_them_on_every_kernel_and_at_every_edge() {
        let pattern = |i: usize| f32::from_bits((i as u32).wrapping_mul(0x9e37_79b9).rotate_left(7));
        for n in [0, 1, 7, 15, 16, 17, 255, 4097, CHUNK] {
            let mut param: Vec<f32> = (0..n).map(pattern).collect();
            let (halves, brains) = expected(&param);
            let grad = vec![0.0; n];
            for kernel in Kernel::all() {
                let mut run = |copy: FloatsMut<'_>| {
                    let param = FloatsMut::F32(&mut param);
                    let states = States { param, exp_avg: None, exp_avg_sq: None };
                    publish(kernel, Tensor::new(states, Floats::F32(&grad), Some(copy)).unwrap());
                };
                let (mut half, mut brain) = (vec![f16::ONE; n + 1], vec![bf16::ONE; n + 1]);
                run(FloatsMut::F16(&mut half[..n]));
                run(FloatsMut::Bf16(&mut brain[..n]));
                let bits = (half.iter().map(|x| x.to_bits()), brain.iter().map(|x| x.to_bits()));
                assert!(bits.0.eq(halves.iter().copied().chain([f16::ONE.to_bits()])), "{kernel:?}, {n}");
                assert!(bits.1.eq(brains.iter().copied().chain([bf16::ONE.to_bits()])), "{kernel:?}, {n}");
            }
        }
    }
}
