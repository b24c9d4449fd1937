//! 16-bit copies that are written without a step are rounded like the half crate rounds.

use crate::kernels;
use spillway_kernels::dtype::{Floats, FloatsMut, bf16, f16};
use spillway_kernels::{CHUNK, States, Tensor, publish};

/// The number as the half crate converts it, with one pattern for every NaN.
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
        for kernel in kernels() {
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
