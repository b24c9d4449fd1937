//! Compares stochastic rounding on every kernel with an independent reference in this file, and checks its statistics.

use crate::kernels;
use crate::reference::check_undo;
use crate::sample::*;
use spillway_kernels::dtype::{Dtype, Floats, FloatsMut, bf16};
use spillway_kernels::*;

const KEY: u64 = 0x0123_4567_89ab_cdef;
const DTYPES: [(Dtype, Option<Dtype>); 4] = [
    (Dtype::F32, None),
    (Dtype::F32, Some(Dtype::Bf16)),
    (Dtype::Bf16, None),
    (Dtype::Bf16, Some(Dtype::Bf16)),
];

fn rule() -> AdamRule {
    AdamRule { stochastic: Some(KEY), ..adam_rule(WeightDecay::Decoupled) }
}

fn split_mix(seed: u64) -> u64 {
    let mut z = u128::from(seed) + 0x9e37_79b9_7f4a_7c15;
    for (shift, factor) in [(30, 0xbf58_476d_1ce4_e5b9u128), (27, 0x94d0_49bb_1331_11eb)] {
        z &= u128::from(u64::MAX);
        z = (z ^ (z >> shift)) * factor;
    }
    let z = z as u64;
    z ^ (z >> 31)
}

/// The random bits of element `index`.
pub fn random(key: u64, index: u64) -> u32 {
    let keys = split_mix(key ^ (index >> 32));
    let mut x = (index as u32) ^ (keys as u32);
    x = (x ^ (x >> 17)).wrapping_mul(0xed5a_d4bb).wrapping_add((keys >> 32) as u32);
    x = (x ^ (x >> 11)).wrapping_mul(0xac4c_1b51);
    x = (x ^ (x >> 15)).wrapping_mul(0x3184_8bab);
    x ^ (x >> 14)
}

/// One of the two bf16 neighbours of `x`: the one farther from zero if the distance of `x` from the other, in units of
/// 2^-16 of the gap, and the random number reach 2^16.
fn rounded(x: f32, random: u32) -> u32 {
    if x.is_nan() {
        return 0x7fc0;
    }
    let (near, rest) = (x.to_bits() >> 16, x.to_bits() & 0xffff);
    if x.is_finite() && rest + random >= 1 << 16 { near + 1 } else { near }
}

#[test]
fn every_kernel_has_the_bits_of_the_reference() {
    for (grad, copy) in DTYPES {
        let dtypes = Dtypes { param: Dtype::F32, state: Dtype::Bf16, grad, copy };
        // A step with f32 states has the values before they are rounded.
        let exact_types = Dtypes { state: Dtype::F32, ..dtypes };
        for (n, special) in LENGTHS.into_iter().flat_map(|n| [(n, false), (n, true)]) {
            let (start, mut grad) = start_of(dtypes, n, special);
            let scalar = Kernel::named("scalar").unwrap();
            let mut exact = start.each_ref().map(|span| Span::of(Dtype::F32, &span.values()));
            exact[3] = start[3].clone();
            adam_rule(WeightDecay::Decoupled)
                .step(scalar, tensor_of(&mut exact, &mut grad, exact_types), false)
                .unwrap();
            let expected = |state: usize, shift: u32| -> Vec<u32> {
                let one = |(i, x): (usize, &f32)| rounded(*x, random(KEY, i as u64) >> shift & 0xffff);
                exact[state].values().iter().enumerate().map(one).collect()
            };
            for kernel in kernels() {
                let what = format!("{} {dtypes:?} n={n} special={special}", kernel.name());
                let mut spans = start.clone();
                rule().step(kernel, tensor_of(&mut spans, &mut grad, dtypes), false).unwrap();
                assert_eq!(spans[0].bits(), exact[0].bits(), "{what}: param");
                assert_eq!(spans[3].bits(), exact[3].bits(), "{what}: copy");
                for (state, shift) in [(1, 0), (2, 16)] {
                    let found: Vec<u32> = spans[state].values().iter().map(|x| x.to_bits() >> 16).collect();
                    assert_eq!(found, expected(state, shift), "{what}: state {state}");
                    assert_eq!(spans[state].bits().len(), start[state].bits().len());
                }
                check_undo(kernel, rule(), &start, &mut grad, dtypes, &what);
            }
        }
    }
}

/// Moments of a tensor, the states that a step with a zero gradient and this key leaves.
fn decayed(key: u64, start: f32, n: usize) -> [Vec<bf16>; 2] {
    let mut param = vec![0.0; n];
    let grad = vec![0.0; n];
    let mut states = [vec![bf16::from_f32(start); n], vec![bf16::from_f32(start); n]];
    let [m, v] = &mut states;
    let states_of = States {
        param: FloatsMut::F32(&mut param),
        exp_avg: Some(FloatsMut::Bf16(m)),
        exp_avg_sq: Some(FloatsMut::Bf16(v)),
    };
    let tensor = Tensor::new(states_of, Floats::F32(&grad), None).unwrap();
    let rule = AdamRule { stochastic: Some(key), beta1: 0.999, beta2: 0.999, ..adam_rule(WeightDecay::None) };
    rule.step(kernels()[0], tensor, false).unwrap();
    states
}

#[test]
fn parts_of_a_tensor_have_the_bits_of_the_whole() {
    let n = 4096 * 3 + 77;
    let dtypes = Dtypes { param: Dtype::F32, state: Dtype::Bf16, grad: Dtype::F32, copy: None };
    let (start, mut grad) = start_of(dtypes, n, false);
    for kernel in kernels() {
        let (mut whole, mut parts) = (start.clone(), start.clone());
        rule().step(kernel, tensor_of(&mut whole, &mut grad, dtypes), false).unwrap();
        let (first, rest) = tensor_of(&mut parts, &mut grad, dtypes).split_at(4096);
        let (second, third) = rest.split_at(8192);
        for part in [third, first, second] {
            rule().step(kernel, part, false).unwrap();
        }
        for (whole, part) in whole.iter().zip(&parts) {
            assert_eq!(whole.bits(), part.bits(), "{}", kernel.name());
        }
    }
}

#[test]
fn a_value_is_rounded_up_as_often_as_its_distance_says() {
    // 0.999 of this value lies 1 - 0.744 = 0.256 units below it.
    let (start, n) = (1.0 + 1.0 / 128.0, CHUNK);
    let exact = f64::from(start * 0.999f32);
    for step in 1..20 {
        for (state, values) in decayed(stochastic_key(7, step), start, n).iter().enumerate() {
            let mean = values.iter().map(|x| x.to_f64()).sum::<f64>() / n as f64;
            // A unit is 2^-7; the mean of n values has a standard deviation of at most half a unit over sqrt(n).
            let deviation = 0.5 / 128.0 / (n as f64).sqrt();
            assert!(
                (mean - exact).abs() < 5.0 * deviation,
                "step {step}, state {state}: {mean}, not {exact}"
            );
        }
    }
}

/// Correlation of two sequences of +1 and -1.
fn correlation(one: impl Iterator<Item = bool>, other: impl Iterator<Item = bool>, n: usize) -> f64 {
    one.zip(other).map(|(a, b)| if a == b { 1.0 } else { -1.0 }).sum::<f64>() / n as f64
}

#[test]
fn choices_of_neighbours_states_steps_and_seeds_are_independent() {
    // The value halfway between two bf16 numbers after the decay of 0.999 and rounding to f32.
    let (start, n) = (1.0 + 4.0 / 128.0, CHUNK);
    let up = |key| {
        decayed(key, start, n).map(|values| values.iter().map(|x| x.to_f32() >= start).collect::<Vec<_>>())
    };
    let [m, v] = up(stochastic_key(7, 1));
    let share = m.iter().filter(|up| **up).count() as f64 / n as f64;
    let mut others = vec![("exp_avg_sq", v)];
    others.push(("the next step", up(stochastic_key(7, 2))[0].clone()));
    others.push(("the next seed", up(stochastic_key(8, 1))[0].clone()));
    others.push(("a seed with another high bit", up(stochastic_key(7 | 1 << 63, 1))[0].clone()));
    for by in [1, 2, 3, 4, 7, 8, 16, 31, 32, 64, 255, 256, 1024, 4096] {
        others.push(("a later element", m.iter().cycle().skip(by).take(n).copied().collect()));
    }
    let expected = (2.0 * share - 1.0).powi(2);
    for (what, other) in others {
        let found = correlation(m.iter().copied(), other.into_iter(), n);
        // Five standard deviations of n independent pairs.
        assert!((found - expected).abs() < 5.0 / (n as f64).sqrt(), "{what}: {found}, not {expected}");
    }
}

#[test]
fn the_random_bits_are_uniform() {
    // Pearson's test over 256 buckets for each byte: 255 degrees of freedom, 5 standard deviations of sqrt(510).
    for (seed, step) in [(0, 1), (0, 2), (1, 1), (u64::MAX, 1 << 40)] {
        let key = stochastic_key(seed, step);
        for shift in [0, 8, 16, 24] {
            let mut buckets = [0u32; 256];
            let n = 1u64 << 20;
            (0..n).for_each(|i| buckets[(random(key, i) >> shift & 0xff) as usize] += 1);
            let mean = n as f64 / 256.0;
            let chi: f64 = buckets.iter().map(|count| (f64::from(*count) - mean).powi(2) / mean).sum();
            assert!(
                (chi - 255.0).abs() < 5.0 * 510f64.sqrt(),
                "seed {seed}, step {step}, byte {shift}: {chi}"
            );
        }
    }
}

#[test]
fn other_types_are_refused() {
    let dtypes = Dtypes { param: Dtype::F32, state: Dtype::F32, grad: Dtype::F32, copy: None };
    let (mut spans, mut grad) = start_of(dtypes, 16, false);
    let error = rule().step(kernels()[0], tensor_of(&mut spans, &mut grad, dtypes), false).unwrap_err();
    assert!(
        error
            .to_string()
            .contains("stochastic rounding needs an f32 param with bf16 states or 8-bit moments"),
        "{error}"
    );
}
