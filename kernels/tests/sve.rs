//! The two variants of SVE write logs of the same format.

use spillway_kernels::dtype::{Floats, FloatsMut};
use spillway_kernels::{AdamRule, Kernel, Optimizer, States, Tensor, WeightDecay, log_bytes, log_used_of};

const RULE: AdamRule = AdamRule {
    decay: WeightDecay::Decoupled,
    grad_scale: 0.5,
    beta1: 0.9,
    one_minus_beta1: 0.1,
    beta2: 0.99,
    one_minus_beta2: 0.01,
    inv_sqrt_correction2: 2.0,
    eps: 1e-8,
    step_size: -1e-2,
    decay_factor: -1e-4,
    stochastic: None,
};

/// Differences of every width, and moments of zeros, in full groups and in a partial one.
fn start() -> ([Vec<f32>; 3], Vec<f32>) {
    let values = |seed: u32, sign: f32| -> Vec<f32> {
        let value = |i: u32| {
            let bits = (i * 7 + seed).wrapping_mul(2_654_435_761) >> 8;
            let scale = [1.0, 1e-3, 1e-6, 1e12][(i / 16 % 4) as usize];
            sign * bits as f32 / 1e8 * scale
        };
        (0..1000).map(value).collect()
    };
    let moments = |seed: u32, sign: f32| -> Vec<f32> {
        let values = values(seed, sign).into_iter().enumerate();
        values.map(|(i, value)| if i / 16 % 5 == 2 { 0.0 } else { value }).collect()
    };
    ([values(1, 1.0), moments(2, -1.0), moments(3, 1.0)], values(4, 1.0))
}

fn tensor<'a>(states: &'a mut [Vec<f32>; 3], grad: &'a [f32], log: &'a mut [u8]) -> Tensor<'a> {
    let [param, exp_avg, exp_avg_sq] = states.each_mut().map(|span| FloatsMut::F32(span));
    let states = States { param, exp_avg: Some(exp_avg), exp_avg_sq: Some(exp_avg_sq) };
    Tensor::new(states, Floats::F32(grad), None).unwrap().with_log(log).unwrap()
}

#[test]
fn both_variants_write_the_same_logs_and_read_each_others() {
    let (before, grad) = start();
    let kernels: Vec<Kernel> = Kernel::all().filter(|kernel| kernel.name().starts_with("sve")).collect();
    for (writer, reader) in kernels.iter().flat_map(|w| kernels.iter().map(move |r| (*w, *r))) {
        let mut log = vec![0; log_bytes(grad.len())];
        let mut states = before.clone();
        RULE.step(writer, tensor(&mut states, &grad, &mut log), false).unwrap();
        assert!(log_used_of(&log, grad.len()) > grad.len() as u64 / 2);
        RULE.undo(reader, tensor(&mut states, &grad, &mut log), None).unwrap();
        assert_eq!(states, before, "{} undone by {}", writer.name(), reader.name());
    }
}
