//! 8-bit moments: codes and scales on every kernel are those of plain formulas in this file, and a step is that of the
//! decoded moments.

use crate::kernels;
use crate::sample::*;
use spillway_kernels::dtype::{Dtype, Floats, FloatsMut, bf16};
use spillway_kernels::*;

const KEY: u64 = 0x0123_4567_89ab_cdef;
/// Canaries after the codes and after the scales.
const CANARIES: usize = 40;

/// Codes with scales, and canaries after both.
#[derive(Debug, Clone, PartialEq)]
struct Owned {
    n: usize,
    codes: Vec<u8>,
    scales: Vec<bf16>,
}

impl Owned {
    fn zeros(n: usize) -> Owned {
        let scales = vec![bf16::from_bits(0x4dad); n.div_ceil(BLOCK) + CANARIES];
        Owned { n, codes: vec![0xda; n + CANARIES], scales }
    }

    fn of(kernel: Kernel, moment: Moment, values: &[f32]) -> Owned {
        let mut owned = Owned::zeros(values.len());
        owned.lend().encode(kernel, moment, values, None);
        owned
    }

    fn lend(&mut self) -> Codes<'_> {
        let blocks = self.n.div_ceil(BLOCK);
        Codes { codes: &mut self.codes[..self.n], scales: &mut self.scales[..blocks] }
    }

    fn values(&mut self, kernel: Kernel, moment: Moment) -> Vec<f32> {
        let mut values = vec![f32::NAN; self.n];
        self.lend().decode(kernel, moment, &mut values);
        values
    }
}

fn most(moment: Moment) -> f32 {
    if moment == Moment::First { 127.0 } else { 255.0 }
}

fn root(moment: Moment, value: f32) -> f32 {
    if moment == Moment::First { value.abs().sqrt() } else { value.sqrt() }
}

/// The number between -1/2 and 1/2 by which stochastic rounding moves element `index`.
fn dither(moment: Moment, index: usize) -> f32 {
    let random = crate::stochastic::random(KEY, index as u64);
    let byte = random >> if moment == Moment::First { 8 } else { 24 };
    (f32::from(byte as u8) * 2.0 + 1.0) / 512.0 - 0.5
}

/// Codes and scales by the definition, element by element.
fn reference(moment: Moment, values: &[f32], random: bool) -> Owned {
    let mut expected = Owned::zeros(values.len());
    for (block, values) in values.chunks(BLOCK).enumerate() {
        let roots: Vec<f32> = values.iter().map(|value| root(moment, *value)).collect();
        let largest =
            roots.iter().fold(0.0, |a: f32, b| if b.is_nan() || a.is_nan() { f32::NAN } else { a.max(*b) });
        let scale = match largest {
            0.0 => 0.0,
            largest if !largest.is_finite() => f32::NAN,
            largest => f32::from_bits((largest.to_bits() - 16 + 0xffff) & 0xffff_0000),
        };
        expected.scales[block] = if scale.is_nan() { bf16::from_bits(0x7fc0) } else { bf16::from_f32(scale) };
        for (at, (value, root)) in values.iter().zip(roots).enumerate() {
            let index = block * BLOCK + at;
            let factor = if scale == 0.0 { 0.0 } else { most(moment) / scale };
            let c = match random {
                false => (root * factor).round_ties_even(),
                true => root.mul_add(factor, dither(moment, index)).round_ties_even(),
            };
            let code = match moment {
                _ if scale.is_nan() => {
                    if moment == Moment::First {
                        128
                    } else {
                        0
                    }
                }
                Moment::First => (128.0 + c.copysign(*value)) as u8,
                Moment::Second => (c as u8).max(u8::from(*value != 0.0)),
            };
            expected.codes[index] = code;
        }
    }
    expected
}

#[test]
fn every_kernel_has_the_codes_of_the_definition() {
    for moment in [Moment::First, Moment::Second] {
        for (n, special) in LENGTHS.into_iter().flat_map(|n| [(n, false), (n, true)]) {
            let positive = moment == Moment::Second && !special;
            let values = values(n, special, 5, positive);
            for random in [false, true] {
                let mut expected = reference(moment, &values, random);
                for kernel in kernels() {
                    let what =
                        format!("{} {moment:?} n={n} special={special} random={random}", kernel.name());
                    let bits = random.then(|| RandomBits::new(KEY, 0));
                    let mut found = Owned::zeros(n);
                    found.lend().encode(kernel, moment, &values, bits);
                    assert_eq!(found.codes, expected.codes, "{what}");
                    let scales = |owned: &Owned| owned.scales.iter().map(|s| s.to_bits()).collect::<Vec<_>>();
                    assert_eq!(scales(&found), scales(&expected), "{what}");
                    let decoded = found.values(kernel, moment);
                    let scalar = expected.values(Kernel::named("scalar").unwrap(), moment);
                    for (index, (found, scalar)) in decoded.iter().zip(&scalar).enumerate() {
                        let scale = expected.scales[index / BLOCK].to_f32();
                        let code = f32::from(expected.codes[index]);
                        let c = if moment == Moment::First { code - 128.0 } else { code };
                        let y = c * (scale / most(moment));
                        let value = if moment == Moment::First { y * y.abs() } else { y * y };
                        assert_eq!(found.is_nan(), value.is_nan(), "{what}");
                        assert!(
                            value.is_nan() || found.to_bits() == value.to_bits(),
                            "{what}: {found} {value}"
                        );
                        assert!(value.is_nan() || scalar.to_bits() == value.to_bits(), "{what}");
                    }
                }
            }
        }
    }
}

/// The root of a decoded value is at most half a code from the root of the value; one bf16 unit is 1/128.
#[test]
fn a_root_is_off_by_half_a_code_at_most() {
    for moment in [Moment::First, Moment::Second] {
        for seed in 0..50 {
            let values = values(1 << 12, false, seed, moment == Moment::Second);
            for kernel in kernels() {
                let decoded = Owned::of(kernel, moment, &values).values(kernel, moment);
                for (values, decoded) in values.chunks(BLOCK).zip(decoded.chunks(BLOCK)) {
                    let largest = values.iter().map(|value| root(moment, *value)).fold(0.0, f32::max);
                    let half = f64::from(largest) * (1.0 + 1.0 / 128.0) * 0.5001 / f64::from(most(moment));
                    for (value, decoded) in values.iter().zip(decoded) {
                        let signed = |x: f32| f64::from(root(moment, x).copysign(x));
                        // A second moment below half a code becomes one code.
                        let bound =
                            if moment == Moment::Second && signed(*value) < half { 2.0 * half } else { half };
                        assert!((signed(*decoded) - signed(*value)).abs() <= bound, "{value} {decoded}");
                        assert!(
                            moment == Moment::First || (*value == 0.0) == (*decoded == 0.0),
                            "{value} {decoded}"
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn stochastic_rounding_keeps_the_mean() {
    let kernel = Kernel::all().next().unwrap();
    for moment in [Moment::First, Moment::Second] {
        let values = values(BLOCK, false, 9, true);
        let mut sums = [0.0; BLOCK];
        let rounds = 20_000;
        for round in 0..rounds {
            let mut owned = Owned::zeros(BLOCK);
            let random = RandomBits::new(stochastic_key(7, round), 0);
            owned.lend().encode(kernel, moment, &values, Some(random));
            let scale = f64::from(owned.scales[0].to_f32());
            for (sum, code) in sums.iter_mut().zip(&owned.codes) {
                let c = if moment == Moment::First { f64::from(*code) - 128.0 } else { f64::from(*code) };
                *sum += c * scale / f64::from(most(moment)) / rounds as f64;
            }
        }
        let scale = f64::from(Owned::of(kernel, moment, &values).scales[0].to_f32());
        for (sum, value) in sums.iter().zip(&values) {
            let expected = f64::from(root(moment, *value));
            let code = scale / f64::from(most(moment));
            // Below one code a second moment is rounded up only.
            let bound = if moment == Moment::Second && expected < code { 1.0 } else { 0.02 };
            assert!((sum - expected).abs() <= bound * code, "{moment:?}: {sum} for {expected}");
        }
    }
}

/// Types of a step with 8-bit moments: those with f32 moments.
fn combinations() -> impl Iterator<Item = Dtypes> {
    all_dtypes().into_iter().filter(|dtypes| dtypes.state == Dtype::F32)
}

fn tensor_with_codes<'a>(
    spans: &'a mut [Span; 4],
    grad: &'a mut Span,
    dtypes: Dtypes,
    codes: &'a mut [Owned; 2],
) -> Tensor<'a> {
    let [p, _, _, copy] = spans;
    let grad = match grad.inner() {
        FloatsMut::F32(s) => Floats::F32(s),
        FloatsMut::F16(s) => Floats::F16(s),
        FloatsMut::Bf16(s) => Floats::Bf16(s),
    };
    let copy = dtypes.copy.map(|_| copy.inner());
    let states = States { param: p.inner(), exp_avg: None, exp_avg_sq: None };
    let [first, second] = codes.each_mut().map(|codes| Some(codes.lend()));
    Tensor::new(states, grad, copy).unwrap().with_codes([first, second]).unwrap()
}

/// A step with 8-bit moments is a step of the decoded ones, whose results are encoded.
fn compare<R: Optimizer>(rule: R, exact: R, dtypes: Dtypes, n: usize, special: bool, random: bool) {
    let scalar = Kernel::named("scalar").unwrap();
    let (start, mut grad) = start_of(dtypes, n, special);
    let moments = [Moment::First, Moment::Second];
    let mut codes = [0, 1].map(|i| Owned::of(scalar, moments[i], &start[1 + i].values()));
    let mut expected = start.clone();
    for i in [0, 1] {
        expected[1 + i] = Span::of(Dtype::F32, &codes[i].values(scalar, moments[i]));
    }
    let squares = exact.step(scalar, tensor_of(&mut expected, &mut grad, dtypes), true).unwrap();
    let after = [0, 1].map(|i| reference(moments[i], &expected[1 + i].values(), random));
    for kernel in kernels() {
        let what = format!("{} {dtypes:?} n={n} special={special} random={random}", kernel.name());
        let (mut spans, mut codes) = (start.clone(), codes.clone());
        let tensor = tensor_with_codes(&mut spans, &mut grad, dtypes, &mut codes);
        let sum = rule.step(kernel, tensor, true).unwrap();
        assert_eq!(spans[0].bits(), expected[0].bits(), "{what}: param");
        assert_eq!(spans[3].bits(), expected[3].bits(), "{what}: copy");
        for (found, expected) in codes.iter().zip(&after) {
            assert_eq!(found.codes, expected.codes, "{what}");
            let scales = |owned: &Owned| owned.scales.iter().map(|s| s.to_bits()).collect::<Vec<_>>();
            assert_eq!(scales(found), scales(expected), "{what}");
        }
        assert!(sum.to_bits() == squares.to_bits() || (sum.is_nan() && squares.is_nan()), "{what}");
    }
}

#[test]
fn a_step_is_that_of_the_decoded_moments() {
    for dtypes in combinations() {
        for (n, special) in LENGTHS.into_iter().filter(|n| *n > 0).flat_map(|n| [(n, false), (n, true)]) {
            let decays = [WeightDecay::None, WeightDecay::L2, WeightDecay::Decoupled];
            for rule in decays.map(adam_rule) {
                compare(rule, rule, dtypes, n, special, false);
            }
            let rule = adam_rule(WeightDecay::Decoupled);
            compare(AdamRule { stochastic: Some(KEY), ..rule }, rule, dtypes, n, special, true);
        }
    }
}

#[test]
fn a_rule_with_one_moment_needs_and_writes_that_one_only() {
    let n = 5000;
    let lion = LionRule {
        grad_scale: 0.37,
        lr: 1e-4,
        beta1: 0.9,
        one_minus_beta1: 0.1,
        beta2: 0.99,
        one_minus_beta2: 0.01,
        decay_factor: -1e-5,
    };
    let adagrad = AdagradRule { grad_scale: 0.37, step_size: -1e-2, eps: 1e-10, weight_decay: 0.1 };
    let grad = values(n, false, 4, false);
    for kernel in kernels() {
        let mut param = [(); 2].map(|()| values(n, false, 1, false));
        let mut first = Owned::of(kernel, Moment::First, &values(n, false, 2, false));
        let mut plain = first.values(kernel, Moment::First);
        let [coded, exact] = &mut param;
        let states = States { param: FloatsMut::F32(coded), exp_avg: None, exp_avg_sq: None };
        let tensor = Tensor::new(states, Floats::F32(&grad), None).unwrap();
        let tensor = tensor.with_codes([Some(first.lend()), None]).unwrap();
        lion.step(kernel, tensor, false).unwrap();
        let states = States {
            param: FloatsMut::F32(exact),
            exp_avg: Some(FloatsMut::F32(&mut plain)),
            exp_avg_sq: None,
        };
        lion.step(kernel, Tensor::new(states, Floats::F32(&grad), None).unwrap(), false).unwrap();
        assert_eq!(param[0], param[1], "{}", kernel.name());
        assert_eq!(first.codes, reference(Moment::First, &plain, false).codes, "{}", kernel.name());

        let states = States { param: FloatsMut::F32(&mut param[0]), exp_avg: None, exp_avg_sq: None };
        let tensor = Tensor::new(states, Floats::F32(&grad), None).unwrap();
        let tensor = tensor.with_codes([Some(first.lend()), None]).unwrap();
        let error = adagrad.step(kernel, tensor, false).unwrap_err().to_string();
        assert!(error.contains("exp_avg_sq"), "{error}");
    }
}

/// A split master with 8-bit moments has the bits of an f32 master with the same moments.
#[test]
fn a_split_master_steps_as_an_f32_master() {
    let rule = adam_rule(WeightDecay::Decoupled);
    for n in [1, 31, 4097, 70_000] {
        let grad: Vec<bf16> = values(n, false, 4, false).into_iter().map(bf16::from_f32).collect();
        let start: Vec<bf16> = values(n, false, 1, false).into_iter().map(bf16::from_f32).collect();
        for kernel in kernels() {
            let codes = [Moment::First, Moment::Second]
                .map(|moment| Owned::of(kernel, moment, &values(n, false, 2, moment == Moment::Second)));
            let (mut param, mut low, mut sums) =
                (start.clone(), vec![0; n], vec![0; n.div_ceil(squares::TILE)]);
            let mut master: Vec<f32> = start.iter().map(|x| x.to_f32()).collect();
            let (mut split, mut whole) = (codes.clone(), codes.clone());
            for _ in 0..3 {
                let states = States { param: FloatsMut::Bf16(&mut param), exp_avg: None, exp_avg_sq: None };
                let tensor = Tensor::new_split(states, Floats::Bf16(&grad), &mut low).unwrap();
                let [first, second] = split.each_mut().map(|codes| Some(codes.lend()));
                let tensor = tensor.with_low_sums(&mut sums).unwrap().with_codes([first, second]).unwrap();
                step_in_chunks(rule, kernel, tensor);
                let states = States { param: FloatsMut::F32(&mut master), exp_avg: None, exp_avg_sq: None };
                let [first, second] = whole.each_mut().map(|codes| Some(codes.lend()));
                let tensor = Tensor::new(states, Floats::Bf16(&grad), None).unwrap();
                step_in_chunks(rule, kernel, tensor.with_codes([first, second]).unwrap());
            }
            assert_eq!(split, whole, "{} n={n}", kernel.name());
            let joined = param.iter().zip(&low).zip(&master).all(|((high, low), master)| {
                let (bits, low) = (master.to_bits(), u32::from(*low));
                bits & 0xffff == low && u32::from(high.to_bits()) == bits.wrapping_add(0x8000) >> 16
            });
            assert!(joined, "{} n={n}", kernel.name());
        }
    }
}

fn step_in_chunks(rule: AdamRule, kernel: Kernel, mut tensor: Tensor<'_>) {
    while tensor.len() > CHUNK {
        let (chunk, rest) = tensor.split_at(CHUNK);
        rule.step(kernel, chunk, true).unwrap();
        tensor = rest;
    }
    rule.step(kernel, tensor, true).unwrap();
}

fn only(param: &mut [f32]) -> States<'_> {
    States { param: FloatsMut::F32(param), exp_avg: None, exp_avg_sq: None }
}

#[test]
fn what_cannot_be_done_is_refused_by_name() {
    let n = 64;
    let kernel = Kernel::all().next().unwrap();
    let mut param = vec![1.0; n];
    let mut first = Owned::zeros(n);
    let mut second = Owned::zeros(n - 1);
    let grad = vec![0.0; n];
    let tensor = Tensor::new(only(&mut param), Floats::F32(&grad), None).unwrap();
    let error = tensor.with_codes([Some(first.lend()), Some(second.lend())]).unwrap_err().to_string();
    assert!(error.contains("exp_avg_sq") && error.contains("63 codes"), "{error}");

    let mut second = Owned::zeros(n);
    let mut log = vec![0; log_bytes(n)];
    let rule = adam_rule(WeightDecay::None);
    let tensor = Tensor::new(only(&mut param), Floats::F32(&grad), None).unwrap();
    let tensor = tensor.with_codes([Some(first.lend()), Some(second.lend())]).unwrap();
    let error = rule.step(kernel, tensor.with_log(&mut log).unwrap(), false).unwrap_err().to_string();
    assert!(error.contains("8-bit moments") && error.contains("recorded"), "{error}");
    let tensor = Tensor::new(only(&mut param), Floats::F32(&grad), None).unwrap();
    let tensor = tensor.with_codes([Some(first.lend()), Some(second.lend())]).unwrap();
    assert!(rule.undo(kernel, tensor, None).is_err());

    let mut moments = [vec![0.0; n], vec![0.0; n]];
    let [m, v] = &mut moments;
    let states = States {
        param: FloatsMut::F32(&mut param),
        exp_avg: Some(FloatsMut::F32(m)),
        exp_avg_sq: Some(FloatsMut::F32(v)),
    };
    let tensor = Tensor::new(states, Floats::F32(&grad), None).unwrap();
    assert!(tensor.with_codes([Some(first.lend()), None]).is_err());
}
