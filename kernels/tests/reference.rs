//! Compares every kernel that this processor supports with an independent reference in this file.
//!
//! The comparison is bit for bit. It covers every optimizer, its undo and redo from the log, the shadow, and every
//! combination of element types. It also covers lengths around every lane and tile edge; denormal, huge, zero, Inf and
//! NaN inputs; and the sum of squares. Memory outside the spans must not change, and the caller's float mode must have
//! no influence. (All NaNs of f32 compare equal, whatever their payload.)

use std::io::Write;

use crate::sample::*;
use crate::{emulated, kernels};
use sampled::Sample;
use spillway_kernels::dtype::Dtype;
use spillway_kernels::inside::MAX_LANES;
use spillway_kernels::*;

/// Lengths whose step is also rolled back; with all lengths, an emulator would take minutes.
const UNDONE: [usize; 16] = [0, 1, 2, 7, 8, 9, 15, 16, 17, 31, 33, 255, 256, 257, 1000, 4097];
/// One step of one element, in plain f32.
type Reference = fn(&Inputs, p: f32, m: f32, v: f32, grad: f32) -> (f32, f32, f32);

fn adam_none(i: &Inputs, p: f32, m: f32, v: f32, grad: f32) -> (f32, f32, f32) {
    adam_core(i, p, m, v, grad * i.scale)
}

fn adam_l2(i: &Inputs, p: f32, m: f32, v: f32, grad: f32) -> (f32, f32, f32) {
    adam_core(i, p, m, v, p.mul_add(i.decay, grad * i.scale))
}

fn adam_decoupled(i: &Inputs, p: f32, m: f32, v: f32, grad: f32) -> (f32, f32, f32) {
    adam_core(i, p.mul_add(-i.lr * i.decay, p), m, v, grad * i.scale)
}

fn adam_core(i: &Inputs, p: f32, m: f32, v: f32, g: f32) -> (f32, f32, f32) {
    let m = g.mul_add(1.0 - i.b1, m * i.b1);
    let v = (g * g).mul_add(1.0 - i.b2, v * i.b2);
    let d = v.sqrt().mul_add(i.inv_sqrt_correction2, i.eps);
    ((m / d).mul_add(-i.lr / i.correction1, p), m, v)
}

fn adagrad(i: &Inputs, p: f32, m: f32, v: f32, grad: f32) -> (f32, f32, f32) {
    let g = p.mul_add(i.decay, grad * i.scale);
    let v = g.mul_add(g, v);
    ((g / (v.sqrt() + i.eps)).mul_add(-i.lr, p), m, v)
}

fn lion(i: &Inputs, p: f32, m: f32, v: f32, grad: f32) -> (f32, f32, f32) {
    let g = grad * i.scale;
    let c = g.mul_add(1.0 - i.b1, m * i.b1);
    let p = p.mul_add(-i.lr * i.decay, p);
    let sign = if c == 0.0 || c.is_nan() { c } else { i.lr.copysign(c) };
    (p - sign, g.mul_add(1.0 - i.b2, m * i.b2), v)
}

/// Lion with two equal betas.
fn signum(i: &Inputs, p: f32, m: f32, v: f32, grad: f32) -> (f32, f32, f32) {
    let m = (grad * i.scale).mul_add(1.0 - i.b1, m * i.b1);
    let p = p.mul_add(-i.lr * i.decay, p);
    let sign = if m == 0.0 || m.is_nan() { m } else { i.lr.copysign(m) };
    (p - sign, m, v)
}

/// The summation tree of `squares`, written out.
pub fn reference_sum(grads: &[f32]) -> f64 {
    fn tree(tiles: &[f64]) -> f64 {
        match tiles.len() {
            0 => 0.0,
            1 => tiles[0],
            n => {
                let left = n.next_power_of_two() / 2;
                tree(&tiles[..left]) + tree(&tiles[left..])
            }
        }
    }
    let tile = |tile: &[f32]| {
        let mut lanes = [0f64; 256];
        tile.iter().enumerate().for_each(|(i, g)| lanes[i % 256] += f64::from(*g) * f64::from(*g));
        for half in [128, 64, 32, 16, 8, 4, 2, 1] {
            (0..half).for_each(|j| lanes[j] += lanes[j + half]);
        }
        lanes[0]
    };
    tree(&grads.chunks(4096).map(tile).collect::<Vec<f64>>())
}

pub fn same_f64(a: f64, b: f64) -> bool {
    a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan())
}

/// Runs `rule` on every kernel, type combination, length and kind of value.
fn check<O: Optimizer>(name: &str, rule: O, reference: Reference) -> usize {
    let (mut cases, mut sample) = (0, Sample::new());
    for dtypes in all_dtypes() {
        for (n, special) in
            crate::cases(&mut sample, LENGTHS.into_iter().flat_map(|n| [(n, false), (n, true)]))
        {
            let (start, mut grad) = start_of(dtypes, n, special);
            let (expected, sum) = expect(&start, &grad, dtypes, reference);
            for kernel in kernels() {
                for squares in [true, false] {
                    let mut spans = start.clone();
                    let got = run(kernel, rule, &mut spans, &mut grad, dtypes, squares);
                    let what = format!("{name} {} {dtypes:?} n={n} special={special}", kernel.name());
                    for (span, expected) in spans.iter().zip(&expected) {
                        assert_eq!(span.bits(), *expected, "{what}");
                    }
                    assert!(same_f64(got, if squares { sum } else { 0.0 }), "{what}: sum {got} != {sum}");
                    cases += 1;
                }
                if UNDONE.contains(&n) {
                    let what = format!("{name} {} {dtypes:?} n={n}", kernel.name());
                    check_undo(kernel, rule, &start, &mut grad, dtypes, &what);
                }
            }
        }
    }
    cases
}

/// A logged step has the bits of a plain step. Its undo restores the bits of the start, and its redo gives the bits of
/// a plain step with the other factor. A step into a shadow leaves the start unchanged. Returns the bytes of the log.
pub fn check_undo<O: Optimizer>(
    kernel: Kernel,
    rule: O,
    start: &[Span; 4],
    grad: &mut Span,
    dtypes: Dtypes,
    what: &str,
) -> usize {
    let n = grad.values().len();
    let bits = |spans: &[Span; 4]| spans.each_ref().map(|span| span.bits());
    let mut plain = start.clone();
    let sum = run(kernel, rule, &mut plain, grad, dtypes, true);

    let mut log = vec![0xa5; log_bytes(n)];
    let mut logged = start.clone();
    let tensor = tensor_of(&mut logged, grad, dtypes).with_log(&mut log).unwrap();
    assert!(same_f64(rule.step(kernel, tensor, true).unwrap(), sum), "{what}: logged sum");
    assert_eq!(bits(&logged), bits(&plain), "{what}: logged step");
    let used = log_used_of(&log, n) as usize;
    assert!((n / 2..=log.len()).contains(&used), "{what}: {used} bytes used of {}", log.len());

    let mut undone = logged.clone();
    rule.undo(kernel, tensor_of(&mut undone, grad, dtypes).with_log(&mut log).unwrap(), None).unwrap();
    assert_eq!(bits(&undone)[..3], bits(start)[..3], "{what}: undo");
    let mut redone = logged;
    rule.undo(kernel, tensor_of(&mut redone, grad, dtypes).with_log(&mut log).unwrap(), Some(INPUTS.scale))
        .unwrap();
    assert_eq!(bits(&redone), bits(&plain), "{what}: redo");

    let mut old = start.clone();
    let mut shadow = start.clone();
    let [p, m, v, _] = &mut shadow;
    let states = States { param: p.inner(), exp_avg: Some(m.inner()), exp_avg_sq: Some(v.inner()) };
    rule.step(kernel, tensor_of(&mut old, grad, dtypes).with_shadow(states).unwrap(), false).unwrap();
    assert_eq!(bits(&old)[..3], bits(start)[..3], "{what}: shadowed step");
    assert_eq!(bits(&shadow)[..3], bits(&plain)[..3], "{what}: shadow");
    used
}

#[test]
fn moments_of_zeros_are_restored_with_their_signs_on_every_kernel() {
    for dtypes in all_dtypes() {
        // Around every edge of a group and its first element, and a few groups with a part of one.
        for (n, special) in [1, 7, 16, 17, 33, 257].into_iter().flat_map(|n| [(n, false), (n, true)]) {
            let (model, mut grad) = start_of(dtypes, n, special);
            // No moment differs from zero, or one of them in one element.
            let one = [1, 2].into_iter().flat_map(|span| [0, n / 2, n - 1].map(|at| Some((span, at))));
            for odd in one.chain([None]) {
                let mut start = model.clone();
                for span in [1, 2] {
                    let mut zeros = vec![0.0; n];
                    if let Some((_, at)) = odd.filter(|(odd, _)| *odd == span) {
                        zeros[at] = -0.0;
                    }
                    start[span] = Span::of(dtypes.state, &zeros);
                }
                for kernel in kernels() {
                    for decay in [WeightDecay::L2, WeightDecay::Decoupled] {
                        let what = format!("{} {decay:?} {dtypes:?} n={n} {odd:?}", kernel.name());
                        let used = check_undo(kernel, adam_rule(decay), &start, &mut grad, dtypes, &what);
                        // The parameter takes at most four bytes, and a group one more.
                        let most = 5 * n.next_multiple_of(MAX_LANES);
                        assert!(odd.is_some() || used <= most, "{what}: {used} bytes");
                    }
                }
            }
        }
    }
}

fn expect(start: &[Span; 4], grad: &Span, dtypes: Dtypes, reference: Reference) -> (Vec<Vec<u32>>, f64) {
    let [p, m, v, _] = start.clone().map(|span| span.values());
    let grads = grad.values();
    let stepped: Vec<(f32, f32, f32)> =
        (0..p.len()).map(|i| reference(&INPUTS, p[i], m[i], v[i], grads[i])).collect();
    let column = |dtype, pick: fn(&(f32, f32, f32)) -> f32| {
        Span::of(dtype, &stepped.iter().map(pick).collect::<Vec<f32>>()).bits()
    };
    let copy = match dtypes.copy {
        Some(dtype) => column(dtype, |s| s.0),
        None => start[3].bits(),
    };
    let expected = vec![
        column(dtypes.param, |s| s.0),
        column(dtypes.state, |s| s.1),
        column(dtypes.state, |s| s.2),
        copy,
    ];
    let scaled: Vec<f32> = grads.iter().map(|g| g * INPUTS.scale).collect();
    (expected, reference_sum(&scaled))
}

fn run<O: Optimizer>(
    kernel: Kernel,
    rule: O,
    spans: &mut [Span; 4],
    grad: &mut Span,
    dtypes: Dtypes,
    squares: bool,
) -> f64 {
    rule.step(kernel, tensor_of(spans, grad, dtypes), squares).unwrap()
}

#[test]
fn every_kernel_has_the_bits_of_the_reference() {
    let mut cases = 0;
    cases += check("adam", adam_rule(WeightDecay::None), adam_none);
    cases += check("adam l2", adam_rule(WeightDecay::L2), adam_l2);
    cases += check("adamw", adam_rule(WeightDecay::Decoupled), adam_decoupled);
    let i = &INPUTS;
    let rule = AdagradRule { grad_scale: i.scale, step_size: -i.lr, eps: i.eps, weight_decay: i.decay };
    cases += check("adagrad", rule, adagrad);
    let rule = LionRule {
        grad_scale: i.scale,
        lr: i.lr,
        beta1: i.b1,
        one_minus_beta1: 1.0 - i.b1,
        beta2: i.b2,
        one_minus_beta2: 1.0 - i.b2,
        decay_factor: -i.lr * i.decay,
    };
    cases += check("lion", rule, lion);
    cases += check("signum", LionRule { beta2: i.b1, one_minus_beta2: 1.0 - i.b1, ..rule }, signum);
    let each = cases / kernels().len();
    assert!(emulated() || each == 6 * all_dtypes().len() * LENGTHS.len() * 2 * 2, "{each}");
    let kernels: Vec<&str> = kernels().into_iter().map(Kernel::name).collect();
    // Writes past the capture of the test harness, so that the output on any machine shows which kernels ran.
    writeln!(std::io::stdout(), "{each} cases on each of {}", kernels.join(", ")).unwrap();
}

#[test]
fn sixteen_bit_values_of_every_pattern_widen_and_round_alike_on_every_kernel() {
    let floats: Vec<f32> = (0..=u16::MAX)
        .flat_map(|high| {
            [0x0000u32, 0x0001, 0x7fff, 0x8000, 0x8001, 0xffff].map(|low| u32::from(high) << 16 | low)
        })
        .map(f32::from_bits)
        .collect();
    for kernel in kernels() {
        for (chunk, copy) in
            floats.chunks(CHUNK).flat_map(|chunk| [(chunk, Dtype::F16), (chunk, Dtype::Bf16)])
        {
            let zeros = vec![0.0; chunk.len()];
            let mut spans = [
                Span::of(Dtype::F32, chunk),
                Span::of(Dtype::F32, &zeros),
                Span::of(Dtype::F32, &zeros),
                Span::of(copy, &zeros),
            ];
            let rule = LionRule {
                grad_scale: 1.0,
                lr: 0.0,
                beta1: 0.0,
                one_minus_beta1: 1.0,
                beta2: 0.0,
                one_minus_beta2: 1.0,
                decay_factor: 0.0,
            };
            let dtypes = Dtypes { param: Dtype::F32, state: Dtype::F32, grad: Dtype::F32, copy: Some(copy) };
            run(kernel, rule, &mut spans, &mut Span::of(Dtype::F32, &zeros), dtypes, false);
            assert_eq!(spans[3].bits(), Span::of(copy, &spans[0].values()).bits(), "{}", kernel.name());
        }
    }
}

/// The float modes that a library built with -ffast-math sets in a thread, and rounding toward zero.
#[cfg(target_arch = "x86_64")]
const FOREIGN_MODES: [u64; 2] = [0x9fc0, 0x7f80];
#[cfg(target_arch = "aarch64")]
const FOREIGN_MODES: [u64; 2] = [1 << 24, 3 << 22];

/// Setting a reserved bit ends the process.
#[cfg(target_arch = "x86_64")]
#[test]
fn reserved_bits_of_a_float_mode_are_left_out() {
    let saved = float_mode::read();
    float_mode::write(saved | 0xffff << 16);
    let found = float_mode::read();
    float_mode::write(saved);
    assert_eq!(found, saved);
}

#[test]
fn the_float_mode_of_the_caller_changes_no_bit_and_stays_set() {
    let dtypes = Dtypes { param: Dtype::F32, state: Dtype::F32, grad: Dtype::F32, copy: Some(Dtype::Bf16) };
    let tiny: Vec<f32> = (1..5000u32).map(f32::from_bits).collect();
    let saved = float_mode::read();
    for kernel in kernels() {
        let bits = |caller: u64| {
            let mut spans =
                [Dtype::F32, Dtype::F32, Dtype::F32, Dtype::Bf16].map(|dtype| Span::of(dtype, &tiny));
            let mut grad = Span::of(Dtype::F32, &tiny);
            float_mode::write(caller);
            let sum = run(kernel, adam_rule(WeightDecay::L2), &mut spans, &mut grad, dtypes, true);
            let after = float_mode::read();
            float_mode::write(saved);
            assert_eq!(after, caller, "{}", kernel.name());
            (spans.map(|span| span.bits()), sum.to_bits())
        };
        for mode in FOREIGN_MODES {
            assert!(bits(saved) == bits(mode), "{} in mode {mode:#x}", kernel.name());
        }
    }
}
