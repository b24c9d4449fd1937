//! The committed PTX, interpreted thread by thread, is bitwise equal to the CPU's kernels, over the values of the
//! kernels' own checker.
//!
//! Covered:
//! - every element type, weight decay mode, shadow, copy and sum of squares; the inverse
//! - lengths around every group, round and tile boundary; aligned and unaligned addresses
//! - memory beside the spans stays unchanged
//! - modified (broken) kernels are detected

use std::sync::Arc;

use super::sample::{Dtypes, LENGTHS, Span, adam_rule, all_dtypes, start_of, tensor_of, values};
use super::{device, foreign};
use crate::dtype::{Dtype, Floats, FloatsMut};
use crate::gpu::device::Device;
use crate::gpu::kernels::{
    ADAM, CAST, DeviceFloats, DeviceStates, DeviceTensor, Fold, Kernels, NARROW, SEGMENT,
};
use crate::gpu::list::Job;
use crate::gpu::memory::{DeviceMemory, DeviceSpan, HostSpan, Registry};
use crate::gpu::steps::Steps;
use crate::gpu::stream::Stream;
use crate::kernel::squares::{self, TILE, tree_sum};
use crate::kernel::{AdamRule, CHUNK, Optimizer, WeightDecay};
use crate::optim::{self, StepStats};
use crate::pool::pinned;
use crate::pool::region::Backing;
use sampled::Sample;

const BOTH: [bool; 2] = [false, true];
const DECAYS: [WeightDecay; 3] = [WeightDecay::None, WeightDecay::L2, WeightDecay::Decoupled];

/// A device with its kernels, and page-locked memory for copies to and from it.
pub(super) struct Bench {
    pub(super) device: Arc<Device>,
    pub(super) kernels: Arc<Kernels>,
    pub(super) steps: Steps,
    pub(super) stream: Stream,
    staging: HostSpan,
    address: usize,
}

const STAGING: usize = 8 << 20;

impl Bench {
    pub(super) fn new(ordinal: u32) -> Bench {
        Bench::with(ordinal, [CAST, ADAM, NARROW])
    }

    /// With other PTX texts.
    pub(super) fn with(ordinal: u32, texts: [&str; 3]) -> Bench {
        let device = device(ordinal);
        let mut kernels = Kernels::compile(&device, texts).unwrap();
        kernels.most_blocks = 8;
        let kernels = Arc::new(kernels);
        let steps = Steps::new(&device, &kernels).unwrap();
        let stream = Stream::new(&device).unwrap();
        let span = pinned::alloc(STAGING, Backing::default()).unwrap();
        let staging = Registry::new(&device).host(span, "staging").unwrap();
        Bench { device, kernels, steps, stream, staging, address: span.address() }
    }

    pub(super) fn upload(&self, bytes: &[u8], to: DeviceSpan) {
        for (index, chunk) in bytes.chunks(STAGING).enumerate() {
            self.staging.span().write(chunk);
            let to = to.part((index * STAGING) as u64, chunk.len() as u64);
            self.stream.upload(&self.staging.part(0, chunk.len()), to).unwrap();
            self.stream.synchronize().unwrap();
        }
    }

    pub(super) fn download(&self, from: DeviceSpan) -> Vec<u8> {
        let bytes = from.bytes() as usize;
        let mut all = Vec::with_capacity(bytes);
        for start in (0..bytes).step_by(STAGING) {
            let part = STAGING.min(bytes - start);
            self.stream.download(from.part(start as u64, part as u64), &self.staging.part(0, part)).unwrap();
            self.stream.synchronize().unwrap();
            all.extend(self.staging.part(0, part).span().to_vec());
        }
        all
    }

    /// Copies a span with its canaries to device memory, with values aligned to 16 bytes or only to their size.
    pub(super) fn place(&self, span: &mut Span, aligned: bool) -> Placed {
        let dtype = span.inner().dtype();
        let (n, size) = (span.inner().len(), dtype.size());
        let inside = span.inner().address() as usize;
        let all = span.bytes_mut();
        let margin = inside - all.as_ptr() as usize;
        let pad = (16 - margin % 16) % 16 + if aligned { 0 } else { size };
        let memory = DeviceMemory::new(&self.device, (pad + all.len()) as u64).unwrap();
        let whole = memory.span().part(pad as u64, all.len() as u64);
        self.upload(all, whole);
        let values = DeviceFloats::new(whole.part(margin as u64, (n * size) as u64), dtype, "span").unwrap();
        Placed { _memory: memory, whole, values }
    }

    pub(super) fn fetch(&self, from: &Placed, to: &mut Span) {
        to.bytes_mut().copy_from_slice(&self.download(from.whole));
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        pinned::free(self.address).unwrap();
    }
}

pub(super) struct Placed {
    _memory: DeviceMemory,
    whole: DeviceSpan,
    pub(super) values: DeviceFloats,
}

pub(super) fn states(spans: &[Placed]) -> DeviceStates {
    DeviceStates { param: spans[0].values, exp_avg: spans[1].values, exp_avg_sq: spans[2].values }
}

pub(super) fn bits(spans: &[Span; 4]) -> [Vec<u32>; 4] {
    spans.each_ref().map(Span::bits)
}

/// Runs one case on both sides and returns the differences as text.
fn compare(
    bench: &Bench,
    rule: AdamRule,
    dtypes: Dtypes,
    n: usize,
    special: bool,
    aligned: bool,
) -> Vec<String> {
    let kernel = optim::kernel().unwrap();
    let (start, mut grad) = start_of(dtypes, n, special);
    let mut expected = start.clone();
    let sum = rule.step(kernel, tensor_of(&mut expected, &mut grad, dtypes), true).unwrap();

    let mut faults = Vec::new();
    let mut got = start.clone();
    let placed: Vec<Placed> = got.iter_mut().map(|span| bench.place(span, aligned)).collect();
    let device_grad = bench.place(&mut grad, aligned);
    let tensor =
        DeviceTensor::new(states(&placed), device_grad.values, dtypes.copy.map(|_| placed[3].values));
    let found = bench.steps.adam(&[Job { rule, tensor }], foreign(&bench.stream), true).unwrap().sum_squares;
    if found.to_bits() != StepStats::of(sum).sum_squares.to_bits() {
        faults.push(format!("sum {found} != {sum}"));
    }
    placed.iter().zip(&mut got).for_each(|(placed, span)| bench.fetch(placed, span));
    if bits(&got) != bits(&expected) {
        faults.push("step".to_string());
    }

    // With a shadow, the new states are the same and the old states stay unchanged.
    let mut old = start.clone();
    let before: Vec<Placed> = old.iter_mut().map(|span| bench.place(span, aligned)).collect();
    let shadowed = DeviceTensor { states: states(&before), shadow: Some(states(&placed)), ..tensor };
    bench.kernels.adam(&bench.stream, &rule, &shadowed).unwrap();
    placed.iter().zip(&mut got).for_each(|(placed, span)| bench.fetch(placed, span));
    before.iter().zip(&mut old).take(3).for_each(|(placed, span)| bench.fetch(placed, span));
    if bits(&got) != bits(&expected) || bits(&old)[..3] != bits(&start)[..3] {
        faults.push("shadow".to_string());
    }

    faults
        .into_iter()
        .map(|what| format!("{:?} {dtypes:?} n={n} special={special} aligned={aligned}: {what}", rule.decay))
        .collect()
}

#[test]
fn stochastic_rounding_on_the_gpu_has_the_bits_of_the_processor() {
    let bench = Bench::new(41);
    let rule = AdamRule { stochastic: Some(0xfeed_5eed_0123_4567), ..adam_rule(WeightDecay::Decoupled) };
    let dtypes = all_dtypes().into_iter().filter(|of| of.param == Dtype::F32 && of.state == Dtype::Bf16);
    let cases: Vec<_> = dtypes
        .flat_map(|dtypes| LENGTHS.map(|n| (dtypes, n)))
        .flat_map(|(dtypes, n)| BOTH.map(|special| (dtypes, n, special)))
        .flat_map(|(dtypes, n, special)| BOTH.map(|aligned| (dtypes, n, special, aligned)))
        .collect();
    assert_eq!(cases.len(), 4 * LENGTHS.len() * 2 * 2);
    for (dtypes, n, special, aligned) in Sample::new().of(60, cases) {
        assert_eq!(compare(&bench, rule, dtypes, n, special, aligned), [""; 0]);
    }
}

#[test]
fn adam_on_the_gpu_has_the_bits_of_the_processor() {
    let bench = Bench::new(0);
    let mut cases = Vec::new();
    for (dtypes, decay) in all_dtypes().into_iter().flat_map(|dtypes| DECAYS.map(|decay| (dtypes, decay))) {
        for (n, special) in LENGTHS.into_iter().flat_map(|n| BOTH.map(|special| (n, special))) {
            cases.push((dtypes, decay, n, special, true));
            if decay == WeightDecay::L2 && n < 300 {
                cases.push((dtypes, decay, n, special, false));
            }
        }
    }
    assert_eq!(cases.len(), 17 * (3 * LENGTHS.len() * 2 + 14 * 2));
    for (dtypes, decay, n, special, aligned) in Sample::new().of(300, cases) {
        assert_eq!(compare(&bench, adam_rule(decay), dtypes, n, special, aligned), [""; 0]);
    }
    fakecuda::with(0, |gpu| {
        assert_eq!(gpu.races(), [""; 0]);
        assert_eq!((gpu.pageable_copies, &gpu.queues.failures[..]), (0, &[][..]));
    });
}

/// The PTX with one change: in `kernel`, the `nth` line that contains `words` is replaced.
fn mutant(kernel: &str, words: &str, nth: usize, change: fn(&str, &[&str]) -> String) -> String {
    let (before, inside) = ADAM.split_at(ADAM.find(&format!(".entry {kernel}(")).unwrap());
    let hit = inside.match_indices(words).nth(nth).unwrap().0;
    let start = inside[..hit].rfind('\n').unwrap() + 1;
    let line = inside[start..].lines().next().unwrap();
    let (_, operands) = line.trim_end_matches(';').split_once(char::is_whitespace).unwrap();
    let operands: Vec<&str> = operands.split(',').map(str::trim).collect();
    format!("{before}{}{}{}", &inside[..start], change(line, &operands), &inside[start + line.len()..])
}

#[test]
fn kernels_that_round_otherwise_are_found() {
    let kernel = "spw_adam_f32_f32_bf16_bf16";
    let text = &ADAM[ADAM.find(&format!(".entry {kernel}(")).unwrap()..];
    let count = text[..text.find("\nret;").unwrap()].matches("fma.rn.f32").count();
    assert_eq!(count, 6 * 9, "six for each of eight elements, and for the one of the rest");
    let mut mutants: Vec<(String, String)> = Vec::new();
    for nth in 0..count {
        // The code that a compiler emits for a product and a sum that it must not fuse.
        let split = mutant(kernel, "fma.rn.f32", nth, |_, operands| {
            let [to, a, b, c] = operands else { panic!("{operands:?}") };
            assert_ne!(to, c);
            format!("mul.rn.f32 {to}, {a}, {b};\nadd.rn.f32 {to}, {to}, {c};")
        });
        mutants.push((format!("fma {nth} in two"), split));
    }
    let quotient =
        mutant(kernel, "div.rn.f32", 0, |_, o| format!("div.rn.f32 {}, {}, {};", o[0], o[2], o[1]));
    mutants.push(("quotient upside down".to_string(), quotient));
    let cut = mutant(kernel, ", 32767;", 0, |line, _| line.replace("32767", "0"));
    mutants.push(("a copy cut off, not rounded".to_string(), cut));
    let alone =
        mutant(kernel, "shfl.sync", 0, |_, o| format!("mov.b32 {}, 0;", o[0].split_once('|').unwrap().0));
    mutants.push(("a lane left out of the sum".to_string(), alone));
    let dtypes = all_dtypes()
        .into_iter()
        .find(|d| d.param == Dtype::F32 && d.grad == Dtype::Bf16 && d.copy == Some(Dtype::Bf16))
        .unwrap();
    // Coefficients near one: with a small term, the extra rounding of a mutant would be too small to detect.
    let coarse = AdamRule {
        beta1: 0.6,
        one_minus_beta1: 0.4,
        beta2: 0.7,
        one_minus_beta2: 0.3,
        inv_sqrt_correction2: 1.3,
        eps: 0.1,
        step_size: -0.8,
        decay_factor: 0.37,
        stochastic: None,
        ..adam_rule(WeightDecay::None)
    };
    for (what, text) in Sample::new().of(12, mutants) {
        assert_ne!(text, ADAM, "{what}");
        let bench = Bench::with(1, [CAST, &text, NARROW]);
        let mut kinds = DECAYS.into_iter().flat_map(|decay| [(decay, true), (decay, false)]);
        let found = kinds.any(|(decay, aligned)| {
            !compare(&bench, AdamRule { decay, ..coarse }, dtypes, 4099, false, aligned).is_empty()
        });
        assert!(found, "not found: {what}");
    }
}

/// f32 values with every upper half, and lower halves around a tie.
fn every_rounding() -> Vec<f32> {
    let lows = [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff];
    let mut floats: Vec<f32> = (0..=u16::MAX)
        .flat_map(|high| lows.map(|low: u32| f32::from_bits(u32::from(high) << 16 | low)))
        .collect();
    floats.truncate(floats.len() - 3);
    floats
}

/// `floats` rounded to 16 bits by the GPU.
fn narrowed(bench: &Bench, floats: &[f32], dtype: Dtype) -> Span {
    let mut wide = Span::of(Dtype::F32, floats);
    let mut narrow = Span::of(dtype, &vec![0.0; floats.len()]);
    let (from, to) = (bench.place(&mut wide, true), bench.place(&mut narrow, true));
    bench.kernels.cast(&bench.stream, from.values, to.values).unwrap();
    bench.fetch(&to, &mut narrow);
    narrow
}

#[test]
fn casts_of_every_pattern_have_the_bits_of_the_processor() {
    let bench = Bench::new(2);
    let floats = every_rounding();
    for dtype in [Dtype::F16, Dtype::Bf16] {
        let narrow = narrowed(&bench, &floats, dtype);
        assert!(narrow.bits() == Span::of(dtype, &floats).bits(), "to {}", dtype.name());

        let mut every = Span::of(dtype, &vec![0.0; 1 << 16]);
        match every.inner() {
            FloatsMut::F16(s) => {
                s.iter_mut().zip(0..=u16::MAX).for_each(|(x, bits)| *x = crate::dtype::f16::from_bits(bits))
            }
            FloatsMut::Bf16(s) => {
                s.iter_mut().zip(0..=u16::MAX).for_each(|(x, bits)| *x = crate::dtype::bf16::from_bits(bits))
            }
            FloatsMut::F32(_) => unreachable!(),
        }
        for aligned in [true, false] {
            let mut back = Span::of(Dtype::F32, &vec![0.0; 1 << 16]);
            let (from, to) = (bench.place(&mut every, aligned), bench.place(&mut back, true));
            bench.kernels.cast(&bench.stream, from.values, to.values).unwrap();
            bench.fetch(&to, &mut back);
            assert!(back.bits() == Span::of(Dtype::F32, &every.values()).bits(), "from {}", dtype.name());
        }
    }
    let ties = CAST.replace(", 32767;", ", 32768;");
    assert_ne!(ties, CAST);
    let narrow = narrowed(&Bench::with(5, [&ties, ADAM, NARROW]), &floats, Dtype::Bf16);
    assert!(narrow.bits() != Span::of(Dtype::Bf16, &floats).bits(), "ties away from zero are not found");
}

#[test]
fn sums_of_squares_meet_in_the_tree_of_the_processor() {
    let bench = Bench::new(3);
    let rule = AdamRule { grad_scale: 0.37, ..adam_rule(WeightDecay::None) };
    for (n, dtype) in
        [(33 * TILE + 5, Dtype::F32), (1025 * TILE, Dtype::Bf16), (16 * TILE, Dtype::F16), (1, Dtype::F32)]
    {
        let mut grad = Span::of(dtype, &values(n, false, 9, false));
        let placed = bench.place(&mut grad, true);
        let same = DeviceStates { param: placed.values, exp_avg: placed.values, exp_avg_sq: placed.values };
        let tensor = DeviceTensor::new(same, placed.values, None);
        let found = bench.steps.measure(&[Job { rule, tensor }]).unwrap();
        let floats = match grad.inner() {
            FloatsMut::F32(s) => Floats::F32(s),
            FloatsMut::F16(s) => Floats::F16(s),
            FloatsMut::Bf16(s) => Floats::Bf16(s),
        };
        let expected = crate::optim::grad::stats(floats, rule.grad_scale).unwrap();
        assert_eq!(found.sum_squares.to_bits(), expected.sum_squares.to_bits(), "{n} {}", dtype.name());
    }
    for tiles in (1..70).chain([255, 256, 257, 511, 1023, 1024, 1025, 5000]) {
        let terms: Vec<f64> = (0..tiles).map(|i| 1.0 / f64::from(i as u32 + 3)).collect();
        let bytes: Vec<u8> = terms.iter().flat_map(|term| term.to_ne_bytes()).collect();
        let count = (tiles as u64).div_ceil(SEGMENT);
        let memory = DeviceMemory::new(&bench.device, bytes.len() as u64 + count * 8).unwrap();
        let [sums, out] = [(0, bytes.len() as u64), (bytes.len() as u64, count * 8)]
            .map(|(from, bytes)| memory.span().part(from, bytes));
        bench.upload(&bytes, sums);
        let (sums, end) = (sums.address(), out.address());
        let fold = Fold { segments: 0, tiles: tiles as u64, count, sums, out: end };
        // SAFETY: the memory has room for the tiles and the segments.
        unsafe { bench.kernels.fold(&bench.stream, fold) }.unwrap();
        let words = bench.download(out);
        let words = words.chunks(8).map(|word| f64::from_ne_bytes(word.try_into().unwrap()));
        let found = squares::sum(&words.collect::<Vec<f64>>());
        assert_eq!(found.to_bits(), tree_sum(&terms).to_bits(), "{tiles} tiles");
    }
    const { assert!(CHUNK.is_multiple_of(TILE)) }
}

#[test]
fn tensors_that_do_not_fit_together_are_refused() {
    let bench = Bench::new(4);
    let memory = DeviceMemory::new(&bench.device, 4096).unwrap();
    let floats = |dtype, n: u64| DeviceFloats::new(memory.span().part(0, n * 4), dtype, "x").unwrap();
    let state = floats(Dtype::F32, 8);
    let states = DeviceStates { param: state, exp_avg: state, exp_avg_sq: state };
    let good = DeviceTensor::new(states, state, None);
    let rule = adam_rule(WeightDecay::None);
    let short = DeviceTensor { grad: floats(Dtype::F32, 7), ..good };
    let odd = DeviceTensor { states: DeviceStates { param: floats(Dtype::F16, 4), ..states }, ..good };
    let shadow =
        DeviceTensor { shadow: Some(DeviceStates { param: floats(Dtype::F32, 9), ..states }), ..good };
    for (tensor, argument) in [(short, "grad"), (odd, "no GPU kernel"), (shadow, "shadow")] {
        let message = bench.kernels.adam(&bench.stream, &rule, &tensor).unwrap_err().to_string();
        assert!(message.contains(argument), "{message}");
        let jobs = [good, tensor].map(|tensor| Job { rule, tensor });
        let message = bench.steps.adam(&jobs, foreign(&bench.stream), false).unwrap_err().to_string();
        assert!(message.contains(argument), "{message}");
        fakecuda::with(4, |gpu| assert_eq!(gpu.queued_kernels(), 0));
    }
    assert!(bench.kernels.cast(&bench.stream, state, floats(Dtype::F16, 3)).is_err());
    assert!(bench.kernels.cast(&bench.stream, state, state).is_err());
    assert!(DeviceFloats::new(memory.span().part(1, 8), Dtype::F32, "x").is_err());
}
