//! Steps of split masters: on every kernel, parameter and low bits are those of the same step of an f32 parameter.

use crate::sample::*;
use crate::{cases, kernels};
use sampled::Sample;
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
    let mut sample = Sample::new();
    for state in [Dtype::F32, Dtype::Bf16] {
        for grad in [Dtype::F32, Dtype::Bf16] {
            for (n, special) in cases(&mut sample, LENGTHS.into_iter().flat_map(|n| [(n, false), (n, true)]))
            {
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
fn an_undo_without_a_log_and_other_types_are_refused() {
    let (kernel, n) = (kernels()[0], 16);
    let dtypes = Dtypes { param: Dtype::F32, state: Dtype::F32, grad: Dtype::F32, copy: None };
    let (start, mut grad) = start_of(dtypes, n, false);
    let mut spans = [Span::of(Dtype::Bf16, &vec![0.0; n]), start[1].clone(), start[2].clone()];
    let mut low = Low::of(std::iter::repeat_n(0, n));
    let undone = LION.undo(kernel, tensor_with(&mut spans, &mut grad, &mut low), None);
    assert!(undone.unwrap_err().to_string().contains("from a log only"));

    let mut refuse = |param: Dtype, low: &mut [u16]| {
        let mut param = Span::of(param, &vec![0.0; n]);
        let states = States { param: param.inner(), exp_avg: None, exp_avg_sq: None };
        Tensor::new_split(states, shared(&mut grad), low).unwrap_err().to_string()
    };
    assert!(refuse(Dtype::Bf16, &mut [0; 15]).contains("param_low"));
    assert!(refuse(Dtype::F16, &mut [0; 16]).contains("param_low needs a bf16 param"));
}

/// Steps bf16 parameters with low bits, and sums if there are any.
fn stepped(kernel: Kernel, param: &mut [bf16], low: &mut [u16], sums: Option<&mut [u64]>, squares: bool) {
    let n = param.len();
    let (mut m, mut v) = (vec![0.5; n], vec![1.0; n]);
    let grad: Vec<f32> = (0..n).map(|index| (index % 7) as f32 - 3.0).collect();
    let states = States {
        param: FloatsMut::Bf16(param),
        exp_avg: Some(FloatsMut::F32(&mut m)),
        exp_avg_sq: Some(FloatsMut::F32(&mut v)),
    };
    let tensor = Tensor::new_split(states, Floats::F32(&grad), low).unwrap();
    let tensor = match sums {
        Some(sums) => tensor.with_low_sums(sums).unwrap(),
        None => tensor,
    };
    adam_rule(WeightDecay::Decoupled).step(kernel, tensor, squares).unwrap();
}

#[test]
fn low_bits_of_tiles_that_other_code_has_written_count_as_zero_on_every_kernel() {
    const TILE: usize = squares::TILE;
    for n in [1, 7, 8, 15, 16, 17, 100, TILE - 1, TILE, TILE + 1, TILE + 17, 3 * TILE + 9, CHUNK] {
        let number = |at: usize| bf16::from_f32((at % 1009) as f32 / 1009.0 + 0.5);
        let start: Vec<bf16> = (0..n).map(number).collect();
        let low: Vec<u16> = (0..n).map(|at| (at as u16).wrapping_mul(0x9e37)).collect();
        let mut known: Option<Vec<u64>> = None;
        for (kernel, squares) in kernels().into_iter().flat_map(|kernel| [(kernel, false), (kernel, true)]) {
            let what = format!("{} n={n}", kernel.name());
            let (mut plain, mut plain_low) = (start.clone(), low.clone());
            let (mut summed, mut summed_low) = (start.clone(), low.clone());
            let mut sums = vec![0; n.div_ceil(TILE)];
            // Without a sum the low bits count, and without a write too.
            for _ in 0..3 {
                stepped(kernel, &mut plain, &mut plain_low, None, squares);
                stepped(kernel, &mut summed, &mut summed_low, Some(&mut sums), squares);
                assert!(plain == summed && plain_low == summed_low, "{what}");
            }
            assert!(sums.iter().all(|sum| *sum != 0), "{what}");
            let expected = known.get_or_insert_with(|| sums.clone());
            assert_eq!(sums, *expected, "{what}: the sums are the same on every kernel");

            for at in
                [0, n / 2, n.saturating_sub(1), TILE - 1, TILE, 3 * TILE].into_iter().filter(|at| *at < n)
            {
                let word = bf16::from_bits(summed[at].to_bits() ^ 0x8000);
                (plain[at], summed[at]) = (word, word);
                let tile = at / TILE * TILE;
                plain_low[tile..n.min(tile + TILE)].fill(0);
                // A call without a step finds the same low bits and sums.
                let (mut settled, mut settled_sums) = (summed_low.clone(), sums.clone());
                settle_low_bits(&summed, &mut settled, &mut settled_sums);
                assert!(settled == plain_low, "{what} at {at}");
                settle_low_bits(&summed, &mut settled, &mut settled_sums);
                assert!(settled == plain_low, "{what} at {at}");

                stepped(kernel, &mut plain, &mut plain_low, None, squares);
                stepped(kernel, &mut summed, &mut summed_low, Some(&mut sums), squares);
                assert!(plain == summed && plain_low == summed_low, "{what} at {at}");
                let before = sums.clone();
                settle_low_bits(&summed, &mut summed_low, &mut sums);
                assert!(
                    sums == before && summed_low == plain_low,
                    "{what} at {at}: sums of what the step wrote"
                );
            }
        }
    }
}

#[test]
fn sums_change_with_exchanges_and_signs() {
    let tile: Vec<bf16> =
        (0..squares::TILE).map(|at| bf16::from_bits((at as u16).wrapping_mul(0x9e37))).collect();
    let sum = |param: &[bf16]| {
        let mut sums = [0];
        settle_low_bits(param, &mut vec![0; param.len()], &mut sums);
        sums[0]
    };
    let known = sum(&tile);
    let differs = |name: &str, change: &dyn Fn(&mut [bf16])| {
        let mut other = tile.clone();
        change(&mut other);
        assert_ne!(sum(&other), known, "{name}");
    };
    let negate = |word: &mut bf16| *word = bf16::from_bits(word.to_bits() ^ 0x8000);
    for distance in [1, 3, 4, 7, 8, 16, 32, 64, 1024] {
        differs("exchange", &|param| param.swap(100, 100 + distance));
        differs("two signs", &|param| [100, 100 + distance].iter().for_each(|at| negate(&mut param[*at])));
        differs("rotation", &|param| param.rotate_left(distance));
    }
    differs("all signs", &|param| param.iter_mut().for_each(negate));
    differs("reversal", &|param| param.reverse());
    for at in 0..tile.len() {
        differs("one bit", &|param| param[at] = bf16::from_bits(param[at].to_bits() ^ 1 << (at % 16)));
    }
}

#[test]
fn sums_are_refused_without_low_bits_and_in_another_number() {
    let (mut param, grad) = (vec![0.0f32; 16], vec![0.0f32; 16]);
    let states = States { param: FloatsMut::F32(&mut param), exp_avg: None, exp_avg_sq: None };
    let whole = Tensor::new(states, Floats::F32(&grad), None).unwrap();
    assert!(whole.with_low_sums(&mut [0]).unwrap_err().to_string().contains("param_low is NULL"));
    let (mut param, mut low) = (vec![bf16::ONE; 16], [0; 16]);
    let states = States { param: FloatsMut::Bf16(&mut param), exp_avg: None, exp_avg_sq: None };
    let split = Tensor::new_split(states, Floats::F32(&grad), &mut low).unwrap();
    assert!(split.with_low_sums(&mut [0; 2]).unwrap_err().to_string().contains("low_sums"));
}
