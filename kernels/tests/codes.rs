//! 8-bit moments: codes and scales on every kernel are those of plain formulas in this file, and a step is that of the
//! decoded moments.

use crate::sample::*;
use crate::{cases, kernels};
use sampled::Sample;
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

/// d of the definition.
fn offset(moment: Moment) -> f32 {
    if moment == Moment::First { 2f32.powi(-8) } else { 2f32.powi(-16) }
}

/// The value of the largest code in units of the scale.
fn top(moment: Moment) -> f32 {
    unit(moment, if moment == Moment::First { 127 } else { 255 })
}

/// The value of a byte in units of the scale.
fn unit(moment: Moment, byte: u8) -> f32 {
    let (code, sign) = match moment {
        Moment::First => (byte & 0x7f, if byte >= 0x80 { -1.0 } else { 1.0 }),
        Moment::Second => (byte, 1.0),
    };
    let d = offset(moment);
    // 16 equal steps from each power of two to the next.
    let (octave, step) = (i32::from(code) / 16, f32::from(code % 16));
    (d * 2f32.powi(octave) * (1.0 + step / 16.0) - d) * sign
}

/// What stochastic rounding adds to the bits of element `index`.
fn noise(moment: Moment, index: usize) -> u32 {
    let random = crate::stochastic::random(KEY, index as u64);
    if moment == Moment::First { (random & 0x3fff) << 5 } else { random >> 18 << 5 }
}

/// Codes and scales by the definition, element by element.
fn reference(moment: Moment, values: &[f32], random: bool) -> Owned {
    let mut expected = Owned::zeros(values.len());
    for (block, values) in values.chunks(BLOCK).enumerate() {
        let is_wrong = |x: &f32| x.is_nan() || (moment == Moment::Second && *x < 0.0);
        let limit = 2f32.powi(126) * top(moment);
        let limited: Vec<f32> =
            values.iter().map(|x| if x.abs() > limit { limit.copysign(*x) } else { *x }).collect();
        let largest = limited.iter().fold(0.0, |a: f32, b| a.max(b.abs()));
        let scale = match largest {
            0.0 => 0.0,
            largest => {
                let bits = (largest / top(moment)).max(f32::MIN_POSITIVE).to_bits();
                f32::from_bits((bits - 16).next_multiple_of(1 << 16))
            }
        };
        if values.iter().any(is_wrong) {
            expected.scales[block] = bf16::from_bits(0x7fc0);
            expected.codes[block * BLOCK..][..values.len()].fill(0);
            continue;
        }
        expected.scales[block] = bf16::from_f32(scale);
        for (at, value) in limited.iter().enumerate() {
            let index = block * BLOCK + at;
            let d = offset(moment);
            let factor = if scale == 0.0 { 0.0 } else { 1.0 / scale };
            let sum = value.abs().mul_add(factor, d);
            let added = if random { noise(moment, index) } else { 1 << 18 };
            let code = ((sum.to_bits() - d.to_bits() + added) / (1 << 19)) as u8;
            expected.codes[index] = match moment {
                Moment::First => code | u8::from(value.is_sign_negative()) << 7,
                Moment::Second => code.max(u8::from(*value != 0.0)),
            };
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
                    let mut numbers = vec![0; n];
                    RandomBits::new(KEY, 0).fill(kernel, &mut numbers);
                    let numbers = random.then_some(&numbers[..]);
                    let mut found = Owned::zeros(n);
                    found.lend().encode(kernel, moment, &values, numbers);
                    assert_eq!(found.codes, expected.codes, "{what}");
                    let scales = |owned: &Owned| owned.scales.iter().map(|s| s.to_bits()).collect::<Vec<_>>();
                    assert_eq!(scales(&found), scales(&expected), "{what}");
                    let decoded = found.values(kernel, moment);
                    let scalar = expected.values(Kernel::named("scalar").unwrap(), moment);
                    for (index, (found, scalar)) in decoded.iter().zip(&scalar).enumerate() {
                        let scale = expected.scales[index / BLOCK].to_f32();
                        let value = unit(moment, expected.codes[index]) * scale;
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

/// A decoded value is off by 1/32 of itself and of the offset at most; a second moment above zero does not become zero.
#[test]
fn a_value_is_off_by_half_a_step_at_most() {
    for moment in [Moment::First, Moment::Second] {
        for seed in 0..50 {
            let values = values(1 << 12, false, seed, moment == Moment::Second);
            for kernel in kernels() {
                let decoded = Owned::of(kernel, moment, &values).values(kernel, moment);
                for (values, decoded) in values.chunks(BLOCK).zip(decoded.chunks(BLOCK)) {
                    let largest = values.iter().fold(0.0, |a: f32, b| a.max(b.abs()));
                    let scale = f64::from(largest) / 0.964 * (1.0 + 1.0 / 128.0);
                    for (value, decoded) in values.iter().zip(decoded) {
                        let small = scale * f64::from(offset(moment)) / 16.0;
                        let half = f64::from(value.abs()) / 32.0 + small / 2.0;
                        let bound = if moment == Moment::Second { half.max(small) } else { half };
                        let error = (f64::from(*decoded) - f64::from(*value)).abs();
                        assert!(error <= bound * 1.001, "{moment:?}: {value} {decoded} {largest}");
                        assert!(moment == Moment::First || (*value == 0.0) == (*decoded == 0.0), "{value}");
                    }
                }
            }
        }
    }
}

/// Encoding what codes stand for keeps codes and scale: with the largest code in each block at once, else after some times
/// in which no scale grows.
#[test]
fn codes_of_decoded_codes_are_the_same() {
    let kernel = Kernel::all().next().unwrap();
    for moment in [Moment::First, Moment::Second] {
        for scale in (0x0080..=0x7e80).map(bf16::from_bits) {
            let mut owned = Owned::zeros(BLOCK);
            for (at, code) in owned.codes[..BLOCK].iter_mut().enumerate() {
                *code = (at * 8 + usize::from(scale.to_bits() % 8)) as u8;
            }
            owned.codes[5] = if moment == Moment::First { 127 } else { 255 };
            owned.scales[0] = scale;
            // Minus zero stays minus zero.
            let values = owned.values(kernel, moment);
            let again = Owned::of(kernel, moment, &values);
            assert_eq!((&again.codes, again.scales[0]), (&owned.codes, scale), "{moment:?} {scale}");
        }
        let mut owned = Owned::of(kernel, moment, &values(BLOCK, false, 3, true));
        for _ in 0..100 {
            let before = owned.scales[0];
            owned = Owned::of(kernel, moment, &owned.values(kernel, moment));
            assert!(owned.scales[0] <= before);
        }
        assert_eq!(Owned::of(kernel, moment, &owned.values(kernel, moment)), owned);
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
            let mut numbers = [0; BLOCK];
            RandomBits::new(stochastic_key(7, round), 0).fill(kernel, &mut numbers);
            owned.lend().encode(kernel, moment, &values, Some(&numbers));
            for (sum, value) in sums.iter_mut().zip(owned.values(kernel, moment)) {
                *sum += f64::from(value) / rounds as f64;
            }
        }
        let scale = f64::from(Owned::of(kernel, moment, &values).scales[0].to_f32());
        for (sum, value) in sums.iter().zip(values.iter().copied().map(f64::from)) {
            let small = scale * f64::from(offset(moment)) / 16.0;
            let step = value / 16.0 + small;
            // Below one code a second moment is rounded up only.
            let bound = if moment == Moment::Second && value < small { small } else { 0.02 * step };
            assert!((sum - value).abs() <= bound, "{moment:?}: {sum} for {value}");
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
    let mut sample = Sample::new();
    for dtypes in combinations() {
        let lengths = LENGTHS.into_iter().filter(|n| *n > 0).flat_map(|n| [(n, false), (n, true)]);
        for (n, special) in cases(&mut sample, lengths) {
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

fn recorded<'a>(
    param: &'a mut [f32],
    codes: &'a mut [Owned; 2],
    grad: &'a [f32],
    log: &'a mut [u8],
) -> Tensor<'a> {
    let tensor = Tensor::new(only(param), Floats::F32(grad), None).unwrap();
    let codes = codes.each_mut().map(|codes| Some(codes.lend()));
    tensor.with_codes(codes).unwrap().with_log(log).unwrap()
}

/// A recorded step is rolled back to every bit, and repeated with another factor.
#[test]
fn a_recorded_step_is_rolled_back_and_repeated() {
    let rule = AdamRule { stochastic: Some(KEY), ..adam_rule(WeightDecay::Decoupled) };
    for n in [1, 31, 33, 4097, CHUNK] {
        let grad = values(n, false, 4, false);
        let start = values(n, false, 1, false);
        for kernel in kernels() {
            let moments = [(Moment::First, 2, false), (Moment::Second, 3, true)];
            let before = moments
                .map(|(moment, seed, positive)| Owned::of(kernel, moment, &values(n, false, seed, positive)));
            let mut log = vec![0; log_bytes(n)];
            let (mut param, mut codes) = (start.clone(), before.clone());
            rule.step(kernel, recorded(&mut param, &mut codes, &grad, &mut log), false).unwrap();
            assert_ne!(param, start);
            rule.undo(kernel, recorded(&mut param, &mut codes, &grad, &mut log), None).unwrap();
            let same = |one: &[Owned; 2], other: &[Owned; 2]| {
                one.iter()
                    .zip(other)
                    .all(|(one, other)| one.codes == other.codes && one.scales == other.scales)
            };
            assert!(param == start && same(&codes, &before), "{} {n}", kernel.name());
            rule.step(kernel, recorded(&mut param, &mut codes, &grad, &mut log), false).unwrap();
            rule.undo(kernel, recorded(&mut param, &mut codes, &grad, &mut log), Some(0.25)).unwrap();
            let (mut expected, mut moments) = (start.clone(), before.clone());
            let other = recorded(&mut expected, &mut moments, &grad, &mut log);
            AdamRule { grad_scale: 0.25, ..rule }.step(kernel, other, false).unwrap();
            assert!(param == expected && same(&codes, &moments), "{} {n}", kernel.name());
        }
    }
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

    // Without a log, and with one that has no values.
    let mut second = Owned::zeros(n);
    let mut log = vec![0; log_bytes(n)];
    for log in [None, Some(&mut log)] {
        let tensor = Tensor::new(only(&mut param), Floats::F32(&grad), None).unwrap();
        let tensor = tensor.with_codes([Some(first.lend()), Some(second.lend())]).unwrap();
        let tensor = match log {
            Some(log) => tensor.with_log(log).unwrap(),
            None => tensor,
        };
        let error = adam_rule(WeightDecay::None).undo(kernel, tensor, None).unwrap_err().to_string();
        assert!(error.contains("8-bit moments") && error.contains("from a log only"), "{error}");
    }

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
