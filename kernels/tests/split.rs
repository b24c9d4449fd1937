//! Steps of split masters: on every kernel, parameter and low bits are those of the same step of an f32 parameter.

use crate::kernels;
use crate::sample::*;
use spillway_kernels::dtype::{Dtype, Floats, FloatsMut, bf16};
use spillway_kernels::*;

const LION: LionRule = LionRule {
    grad_scale: 0.37,
    lr: 1e-4,
    beta1: 0.9,
    one_minus_beta1: 0.1,
    beta2: 0.99,
    one_minus_beta2: 0.01,
    decay_factor: -1e-5,
};
/// Canary words before and after the low bits.
const MARGIN: usize = 19;
const CANARY: u16 = 0xdead;

/// The bf16 number nearest to a master, ties away from zero, and the lower half of the master. Found by comparing the
/// distances to both neighbours in f64.
fn split(master: f32) -> (u16, u16) {
    if master.is_nan() {
        return (0x7fc0, 0);
    }
    let (below, low) = ((master.to_bits() >> 16) as u16, master.to_bits() as u16);
    let wide = |bits: u16| match bits & 0x7fff {
        // The number that would follow the largest finite one.
        0x7f80 => 2f64.powi(128).copysign(if bits == 0x7f80 { 1.0 } else { -1.0 }),
        _ => f64::from(f32::from_bits(u32::from(bits) << 16)),
    };
    let distance = |bits: u16| (f64::from(master) - wide(bits)).abs();
    let nearest = master.is_infinite() || distance(below) < distance(below + 1);
    (if nearest { below } else { below + 1 }, low)
}

struct Low(Vec<u16>);

impl Low {
    fn of(words: impl Iterator<Item = u16>) -> Low {
        let margin = || std::iter::repeat_n(CANARY, MARGIN);
        Low(margin().chain(words).chain(margin()).collect())
    }

    fn inner(&mut self) -> &mut [u16] {
        let end = self.0.len() - MARGIN;
        &mut self.0[MARGIN..end]
    }
}

fn shared<'a>(span: &'a mut Span) -> Floats<'a> {
    match span.inner() {
        FloatsMut::F32(s) => Floats::F32(s),
        FloatsMut::F16(s) => Floats::F16(s),
        FloatsMut::Bf16(s) => Floats::Bf16(s),
    }
}

fn tensor_with<'a>(spans: &'a mut [Span; 3], grad: &'a mut Span, low: &'a mut Low) -> Tensor<'a> {
    let [p, m, v] = spans;
    let states = States { param: p.inner(), exp_avg: Some(m.inner()), exp_avg_sq: Some(v.inner()) };
    Tensor::new_split(states, shared(grad), low.inner()).unwrap()
}

/// Steps an f32 parameter with the scalar kernel and the split one with every kernel, and compares all bits.
fn compare<R: Optimizer>(rule: R, state: Dtype, grad: Dtype, n: usize, special: bool) {
    let dtypes = Dtypes { param: Dtype::F32, state, grad, copy: None };
    let (start, mut grad) = start_of(dtypes, n, special);
    let mut expected = start.clone();
    let scalar = Kernel::named("scalar").unwrap();
    let squares = rule.step(scalar, tensor_of(&mut expected, &mut grad, dtypes), true).unwrap();
    let after: Vec<(u16, u16)> = expected[0].values().into_iter().map(split).collect();
    let before: Vec<(u16, u16)> = start[0].values().into_iter().map(split).collect();
    for kernel in kernels() {
        for with_squares in [false, true] {
            let what = format!("{} {dtypes:?} n={n} special={special}", kernel.name());
            let mut low = Low::of(before.iter().map(|(_, low)| *low));
            let mut spans = [Span::of(Dtype::Bf16, &vec![0.0; n]), start[1].clone(), start[2].clone()];
            let FloatsMut::Bf16(param) = spans[0].inner() else { unreachable!("a bf16 span") };
            param.iter_mut().zip(&before).for_each(|(param, (high, _))| *param = bf16::from_bits(*high));
            let sum = rule.step(kernel, tensor_with(&mut spans, &mut grad, &mut low), with_squares).unwrap();
            let FloatsMut::Bf16(param) = spans[0].inner() else { unreachable!("a bf16 span") };
            let found: Vec<(u16, u16)> =
                param.iter().zip(low.inner()).map(|(high, low)| (high.to_bits(), *low)).collect();
            assert_eq!(found, after, "{what}");
            assert_eq!(spans[1].bits(), expected[1].bits(), "{what}: exp_avg");
            assert_eq!(spans[2].bits(), expected[2].bits(), "{what}: exp_avg_sq");
            assert!(low.0[..MARGIN].iter().chain(&low.0[n + MARGIN..]).all(|word| *word == CANARY), "{what}");
            if with_squares {
                assert_eq!(sum.is_nan(), squares.is_nan(), "{what}");
                assert!(sum.is_nan() || sum.to_bits() == squares.to_bits(), "{what}");
            }
        }
    }
}

#[test]
fn every_kernel_has_the_bits_of_an_f32_parameter() {
    let adagrad = AdagradRule { grad_scale: 0.37, step_size: -1e-2, eps: 1e-10, weight_decay: 0.1 };
    for state in [Dtype::F32, Dtype::Bf16] {
        for grad in [Dtype::F32, Dtype::Bf16] {
            for (n, special) in LENGTHS.into_iter().flat_map(|n| [(n, false), (n, true)]) {
                for decay in [WeightDecay::None, WeightDecay::L2, WeightDecay::Decoupled] {
                    compare(adam_rule(decay), state, grad, n, special);
                }
                compare(adagrad, state, grad, n, special);
                compare(LION, state, grad, n, special);
                if state == Dtype::Bf16 {
                    let rule = AdamRule { stochastic: Some(11), ..adam_rule(WeightDecay::Decoupled) };
                    compare(rule, state, grad, n, special);
                }
            }
        }
    }
}

/// A step that leaves the parameter as it is: its result shows the join and the split.
fn unchanged(kernel: Kernel, param: &mut [bf16], low: &mut [u16]) {
    let n = param.len();
    let (mut m, mut v, grad) = (vec![0.0; n], vec![1.0; n], vec![0.0; n]);
    let states = States {
        param: FloatsMut::Bf16(param),
        exp_avg: Some(FloatsMut::F32(&mut m)),
        exp_avg_sq: Some(FloatsMut::F32(&mut v)),
    };
    let tensor = Tensor::new_split(states, Floats::F32(&grad), low).unwrap();
    adam_rule(WeightDecay::None).step(kernel, tensor, false).unwrap();
}

#[test]
fn every_lower_half_comes_back_for_every_kind_of_upper_half() {
    let uppers = [0, 1, 0x7f, 0x80, 0x3f80, 0x3f81, 0x7f7e, 0x7f7f, 0x8000, 0x8001, 0xbf80, 0xff7f];
    for kernel in kernels() {
        for upper in uppers {
            let masters: Vec<f32> = (0..1u32 << 16).map(|low| f32::from_bits(upper << 16 | low)).collect();
            let expected: Vec<(u16, u16)> = masters.iter().copied().map(split).collect();
            let mut param: Vec<bf16> = expected.iter().map(|(high, _)| bf16::from_bits(*high)).collect();
            let mut low: Vec<u16> = expected.iter().map(|(_, low)| *low).collect();
            unchanged(kernel, &mut param, &mut low);
            let found: Vec<(u16, u16)> =
                param.iter().zip(&low).map(|(param, low)| (param.to_bits(), *low)).collect();
            assert!(found == expected, "{} {upper:#06x}", kernel.name());
        }
    }
}

#[test]
fn a_parameter_with_the_low_bits_of_another_master_stays_within_half_a_unit() {
    for kernel in kernels() {
        for value in [0.0, -0.0, 1.0, -1.0, 3.0e38, 1.0e-38] {
            let mut param = vec![bf16::from_f32(value); 1 << 16];
            let mut low: Vec<u16> = (0..=u16::MAX).collect();
            let before = param[0];
            unchanged(kernel, &mut param, &mut low);
            assert!(
                param.iter().all(|param| param.to_f32() == before.to_f32() || before.to_f32() == 0.0),
                "{} {value}",
                kernel.name()
            );
            assert!(param.iter().all(|param| param.to_f32().abs() <= before.to_f32().abs() + 1e-40));
        }
    }
}

#[test]
fn steps_that_are_recorded_or_undone_and_other_types_are_refused() {
    let (kernel, n) = (kernels()[0], 16);
    let dtypes = Dtypes { param: Dtype::F32, state: Dtype::F32, grad: Dtype::F32, copy: None };
    let (start, mut grad) = start_of(dtypes, n, false);
    let mut spans = [Span::of(Dtype::Bf16, &vec![0.0; n]), start[1].clone(), start[2].clone()];
    let (mut low, mut log) = (Low::of(std::iter::repeat_n(0, n)), vec![0; log_bytes(n)]);
    let words = "cannot be recorded or undone";

    let undone = LION.undo(kernel, tensor_with(&mut spans, &mut grad, &mut low), None);
    assert!(undone.unwrap_err().to_string().contains(words));
    let logged = tensor_with(&mut spans, &mut grad, &mut low).with_log(&mut log).unwrap();
    assert!(LION.step(kernel, logged, false).unwrap_err().to_string().contains(words));

    let mut refuse = |param: Dtype, low: &mut [u16]| {
        let mut param = Span::of(param, &vec![0.0; n]);
        let states = States { param: param.inner(), exp_avg: None, exp_avg_sq: None };
        Tensor::new_split(states, shared(&mut grad), low).unwrap_err().to_string()
    };
    assert!(refuse(Dtype::Bf16, &mut [0; 15]).contains("param_low"));
    assert!(refuse(Dtype::F16, &mut [0; 16]).contains("param_low needs a bf16 param"));
}
