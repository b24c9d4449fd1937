//! The precision of rolling a step back. The log restores the same bits after a million cycles on every kernel. The
//! inverse formula stays within the errors that spillway/undo.h documents.

use std::io::Write;

use crate::{emulated, kernels};
use spillway_kernels::dtype::{Floats, FloatsMut};
use spillway_kernels::*;

/// Two vectors of the widest kernel and a partial one.
const BLOCK: usize = 37;

/// A pseudo-random sequence that does not repeat within this test.
struct Random(u64);

impl Random {
    fn bits(&mut self) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as u32 ^ ((self.0 >> 2) as u32) << 31
    }

    /// A number from an almost normal distribution of variance one.
    fn bell(&mut self) -> f32 {
        let sum: f32 = (0..4).map(|_| (self.bits() >> 8) as f32 / (1 << 24) as f32 - 0.5).sum();
        sum * 3f32.sqrt()
    }
}

/// The kinds of gradients: those that training produces, and those that it must never produce.
#[derive(Debug, Clone, Copy)]
enum Kind {
    Bell,
    Spikes,
    Sparse,
    Denormal,
    Huge,
    AnyBits,
    InfAndNan,
}

const KINDS: [Kind; 7] =
    [Kind::Bell, Kind::Spikes, Kind::Sparse, Kind::Denormal, Kind::Huge, Kind::AnyBits, Kind::InfAndNan];

fn gradient(kind: Kind, n: usize, random: &mut Random) -> Vec<f32> {
    let one = |at: usize, random: &mut Random| {
        let (bell, bits) = (random.bell() * 1e-3, random.bits());
        match kind {
            Kind::Bell => bell,
            Kind::Spikes if bits.is_multiple_of(8) => bell * 1000.0,
            Kind::Spikes => bell,
            Kind::Sparse if bits.is_multiple_of(10) => bell,
            Kind::Sparse => 0.0,
            Kind::Denormal => f32::from_bits(bits & 0x807f_ffff),
            Kind::Huge => bell * 1e36,
            Kind::AnyBits => f32::from_bits(bits),
            Kind::InfAndNan => [bell, f32::INFINITY, f32::NAN, f32::NEG_INFINITY][at % 4],
        }
    };
    (0..n).map(|at| one(at, random)).collect()
}

#[derive(Clone)]
struct Model {
    param: Vec<f32>,
    exp_avg: Vec<f32>,
    exp_avg_sq: Vec<f32>,
}

impl Model {
    fn new(n: usize, random: &mut Random) -> Model {
        let param = (0..n).map(|_| random.bell() * 0.02).collect();
        Model { param, exp_avg: vec![0.0; n], exp_avg_sq: vec![0.0; n] }
    }

    fn tensor<'a>(&'a mut self, grad: &'a [f32]) -> Tensor<'a> {
        let states = States {
            param: FloatsMut::F32(&mut self.param),
            exp_avg: Some(FloatsMut::F32(&mut self.exp_avg)),
            exp_avg_sq: Some(FloatsMut::F32(&mut self.exp_avg_sq)),
        };
        Tensor::new(states, Floats::F32(grad), None).unwrap()
    }

    fn bits(&self) -> Vec<u32> {
        let all = self.param.iter().chain(&self.exp_avg).chain(&self.exp_avg_sq);
        all.map(|x| x.to_bits()).collect()
    }
}

fn adam(decay: WeightDecay, step: i32, bias_correction: bool) -> AdamRule {
    let (b1, b2) = (0.9f64, 0.999f64);
    let (c1, c2) = if bias_correction { (1.0 - b1.powi(step), 1.0 - b2.powi(step)) } else { (1.0, 1.0) };
    AdamRule {
        decay,
        grad_scale: 1.0,
        beta1: b1 as f32,
        one_minus_beta1: (1.0 - b1) as f32,
        beta2: b2 as f32,
        one_minus_beta2: (1.0 - b2) as f32,
        inv_sqrt_correction2: (1.0 / c2.sqrt()) as f32,
        eps: 1e-8,
        step_size: (-1e-3 / c1) as f32,
        decay_factor: if decay == WeightDecay::L2 { 0.01 } else { -1e-5 },
        stochastic: None,
    }
}

const LION: LionRule = LionRule {
    grad_scale: 1.0,
    lr: 1e-4,
    beta1: 0.9,
    one_minus_beta1: 0.1,
    beta2: 0.99,
    one_minus_beta2: 0.01,
    decay_factor: -1e-6,
};
const SIGNUM: LionRule = LionRule { beta2: LION.beta1, one_minus_beta2: LION.one_minus_beta1, ..LION };
const ADAGRAD: AdagradRule = AdagradRule { grad_scale: 1.0, step_size: -1e-2, eps: 1e-10, weight_decay: 0.1 };

/// Steps and rolls back `cycles` times over `rules` and gradients of every kind; the bits must equal
/// those of the start.
fn cycle<R: Optimizer>(kernel: Kernel, rules: &[R], cycles: usize) {
    let mut random = Random(7);
    let grads: Vec<Vec<f32>> =
        (0..13 * KINDS.len()).map(|i| gradient(KINDS[i % KINDS.len()], BLOCK, &mut random)).collect();
    let mut model = Model::new(BLOCK, &mut random);
    for _ in 0..20 {
        let grad = gradient(Kind::Bell, BLOCK, &mut random);
        rules[0].step(kernel, model.tensor(&grad), false).unwrap();
    }
    let start = model.bits();
    let mut log = vec![0; log_bytes(BLOCK)];
    for at in 0..cycles {
        let (rule, grad) = (rules[at % rules.len()], &grads[at % grads.len()]);
        rule.step(kernel, model.tensor(grad).with_log(&mut log).unwrap(), false).unwrap();
        rule.undo(kernel, model.tensor(grad).with_log(&mut log).unwrap(), None).unwrap();
        if at % 9973 == 0 {
            assert!(model.bits() == start, "{}: cycle {at}", kernel.name());
        }
    }
    assert!(model.bits() == start, "{}", kernel.name());
}

/// Steps a model whose moments are zeros, and rolls it back. Returns the bytes of the log per element.
fn first_step<R: Optimizer>(kernel: Kernel, rule: &R, grad: &[f32], random: &mut Random) -> f64 {
    let mut model = Model::new(grad.len(), random);
    let start = model.bits();
    let mut log = vec![0; log_bytes(grad.len())];
    rule.step(kernel, model.tensor(grad).with_log(&mut log).unwrap(), false).unwrap();
    let used = log_used_of(&log, grad.len());
    rule.undo(kernel, model.tensor(grad).with_log(&mut log).unwrap(), None).unwrap();
    assert!(model.bits() == start, "{}", kernel.name());
    used as f64 / grad.len() as f64
}

#[test]
fn the_log_of_a_first_step_has_no_moments_on_every_kernel() {
    let mut random = Random(3);
    for kernel in kernels() {
        for kind in KINDS {
            let grad = gradient(kind, 1000 * BLOCK, &mut random);
            let bytes = [
                first_step(kernel, &adam(WeightDecay::Decoupled, 1, true), &grad, &mut random),
                // A step as large as the parameters leaves no digits of them.
                first_step(kernel, &AdagradRule { step_size: -1e-5, ..ADAGRAD }, &grad, &mut random),
                first_step(kernel, &LION, &grad, &mut random),
            ];
            // One byte per parameter, and one of each group, which has one element at least. No inverse formula finds a
            // parameter that a gradient of any size has moved: it takes four bytes.
            let most = if matches!(kind, Kind::Bell | Kind::Sparse) { 2.1 } else { 5.01 };
            assert!(bytes.into_iter().all(|bytes| bytes < most), "{} {kind:?}: {bytes:?}", kernel.name());
        }
    }
}

#[test]
fn a_million_cycles_leave_the_bits_on_every_kernel() {
    const DECAYS: [WeightDecay; 3] = [WeightDecay::None, WeightDecay::L2, WeightDecay::Decoupled];
    let rules: Vec<AdamRule> = DECAYS
        .into_iter()
        .flat_map(|decay| {
            [1, 2, 3, 1000, 100_000].map(|step| [adam(decay, step, true), adam(decay, step, false)])
        })
        .flatten()
        .collect();
    // An emulated processor takes minutes for the work of one second.
    let fewer = if emulated() { 200 } else { 1 };
    for kernel in kernels() {
        cycle(kernel, &rules, 1_000_000 / fewer);
        cycle(kernel, &[ADAGRAD], 100_000 / fewer);
        cycle(kernel, &[LION, SIGNUM], 100_000 / fewer);
    }
}

/// Distance in units in the last place: neighbouring floats are one unit apart.
fn ulps(a: f32, b: f32) -> u32 {
    let ordered = |x: f32| {
        let bits = x.to_bits() as i32;
        i64::from(if bits < 0 { i32::MIN.wrapping_sub(bits) } else { bits })
    };
    u32::try_from((ordered(a) - ordered(b)).abs()).unwrap_or(u32::MAX)
}

/// The errors of a formula.
struct Misses {
    /// Units in the last place: the median, and the 99.9th percentile.
    median: u32,
    permille: u32,
    /// The largest error, in units in the last place of the larger of two numbers: the value and its
    /// change by the step.
    worst: f32,
}

impl Misses {
    fn of(before: &[f32], stepped: &[f32], after: &[f32]) -> Misses {
        let mut all: Vec<u32> = before.iter().zip(after).map(|(a, b)| ulps(*a, *b)).collect();
        all.sort_unstable();
        let unit = |x: f32| (f32::from_bits(x.to_bits() + 1) - x).max(f32::from_bits(1));
        let worst =
            before.iter().zip(stepped).zip(after).map(|((before, stepped), after)| {
                (after - before).abs() / unit(before.abs().max(stepped.abs()))
            });
        Misses {
            median: all[all.len() / 2],
            permille: all[all.len() * 999 / 1000],
            worst: worst.fold(0.0, f32::max),
        }
    }
}

#[test]
fn the_inverse_formula_misses_by_what_the_header_says() {
    let n = if emulated() { 6_000 } else { 60_000 };
    let kernel = kernels()[0];
    let mut lines = String::new();
    let kinds = [Kind::Bell, Kind::Spikes, Kind::Sparse, Kind::Denormal];
    for (kind, last) in kinds.map(|kind| (kind, 100)).into_iter().chain([(Kind::Bell, 1)]) {
        let mut random = Random(11);
        let mut model = Model::new(n, &mut random);
        for t in 1..last {
            let grad = gradient(if t % 2 == 0 { Kind::Bell } else { kind }, n, &mut random);
            adam(WeightDecay::Decoupled, t, true).step(kernel, model.tensor(&grad), false).unwrap();
        }
        let rule = adam(WeightDecay::Decoupled, last, true);
        let (before, grad) = (model.clone(), gradient(kind, n, &mut random));
        rule.step(kernel, model.tensor(&grad), false).unwrap();
        let stepped = model.clone();
        rule.undo(kernel, model.tensor(&grad), None).unwrap();
        lines += &format!("{kind:?}, step {last}:");
        for (name, before, stepped, after) in [
            ("param", &before.param, &stepped.param, &model.param),
            ("exp_avg", &before.exp_avg, &stepped.exp_avg, &model.exp_avg),
            ("exp_avg_sq", &before.exp_avg_sq, &stepped.exp_avg_sq, &model.exp_avg_sq),
        ] {
            let Misses { median, permille, worst } = Misses::of(before, stepped, after);
            lines += &format!(" {name} {median} {permille} {worst:.1}");
            assert!(worst <= 2.0, "{kind:?}, step {last}: {name} misses by {worst}");
            assert!(name != "exp_avg_sq" || model.exp_avg_sq.iter().all(|v| *v >= 0.0), "{kind:?}");
            assert!(median == 0 || last == 1, "{kind:?}: {name} {median}");
        }
        lines += "\n";
    }
    writeln!(std::io::stdout(), "{lines}").unwrap();
}

#[test]
fn a_log_splits_into_the_logs_of_its_parts() {
    for n in [1, CHUNK - 1, CHUNK, CHUNK + 1, 7 * CHUNK, 7 * CHUNK + 3] {
        for mid in (0..n).step_by(CHUNK) {
            assert_eq!(log_bytes(n), log_bytes(mid) + log_bytes(n - mid), "{n} at {mid}");
        }
    }
}
