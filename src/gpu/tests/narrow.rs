//! The kernels of split masters and 8-bit moments, interpreted thread by thread, have the bits of the CPU's kernels.
//!
//! Covered:
//! - every kernel of narrow.ptx, weight decay mode and rounding; tiles that other code has written, and sums of no tile
//! - codes and scales of every kind; lengths around every group, block, round and tile; aligned and unaligned addresses
//! - memory beside the spans stays unchanged
//! - modified (broken) kernels are detected

use std::collections::BTreeSet;

use super::bits::Bench;
use super::foreign;
use super::sample::{LENGTHS, adam_rule, values};
use crate::dtype::{Dtype, Floats, FloatsMut, bf16, f16};
use crate::gpu::kernels::{
    ADAM, CAST, DeviceCodes, DeviceFloats, DeviceLow, DeviceNarrow, DeviceStates, DeviceTensor, NARROW,
};
use crate::gpu::list::Job;
use crate::gpu::memory::{DeviceMemory, DeviceSpan};
use crate::kernel::squares::TILE;
use crate::kernel::{AdamRule, BLOCK, Codes, Optimizer, States, Tensor, WeightDecay};
use crate::optim::{self, StepStats};

/// Bytes around each array, which nothing may write.
const MARGIN: usize = 64;
const CANARY: u8 = 0xa5;

/// What a kernel steps.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Kind {
    /// The type of the copy beside an f32 parameter, or a split master.
    master: Master,
    /// `None`: codes.
    moments: Option<Dtype>,
    grad: Dtype,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Master {
    Whole(Option<Dtype>),
    Split { sums: bool },
}

fn kinds() -> Vec<Kind> {
    let wholes = [None, Some(Dtype::F16), Some(Dtype::Bf16)].into_iter().flat_map(|copy| {
        [Dtype::F32, Dtype::F16, Dtype::Bf16].map(|grad| Kind {
            master: Master::Whole(copy),
            moments: None,
            grad,
        })
    });
    let splits = [None, Some(Dtype::F32), Some(Dtype::Bf16)].into_iter().flat_map(|moments| {
        [(Dtype::F32, true), (Dtype::Bf16, true), (Dtype::Bf16, false)].map(|(grad, sums)| Kind {
            master: Master::Split { sums },
            moments,
            grad,
        })
    });
    wholes.chain(splits).collect()
}

/// The arrays of a tensor as bytes, in this order: param, low bits, sums, copy, the moments, their scales, the gradient.
#[derive(Clone, PartialEq)]
struct Arrays([Vec<u8>; 9]);

const NAMES: [&str; 9] = [
    "param",
    "param_low",
    "low_sums",
    "param_copy",
    "exp_avg",
    "exp_avg_sq",
    "exp_avg_scale",
    "exp_avg_sq_scale",
    "grad",
];

impl Arrays {
    fn of(kind: Kind, n: usize, special: bool) -> Arrays {
        let random = |seed| values(n, false, seed, false).iter().map(|x| x.to_bits()).collect::<Vec<u32>>();
        let mut arrays = Arrays(Default::default());
        let param = values(n, special, 1, false);
        match kind.master {
            Master::Whole(copy) => {
                arrays.0[0] = bytes_of(Dtype::F32, &param);
                arrays.0[3] = copy.map_or(Vec::new(), |dtype| bytes_of(dtype, &vec![0.0; n]));
            }
            Master::Split { sums } => {
                arrays.0[0] = bytes_of(Dtype::Bf16, &param);
                arrays.0[1] = random(5).iter().flat_map(|x| (*x as u16).to_le_bytes()).collect();
                let tiles = if sums { n.div_ceil(TILE) } else { 0 };
                // The second tile was written by other code; nothing is known of the others.
                arrays.0[2] =
                    (0..tiles).flat_map(|tile| u64::from(tile == 1).wrapping_mul(77).to_le_bytes()).collect();
            }
        }
        for (place, seed) in [(4, 2), (5, 3)] {
            match kind.moments {
                Some(dtype) => arrays.0[place] = bytes_of(dtype, &values(n, special, seed, place == 5)),
                None => {
                    arrays.0[place] = random(seed).iter().map(|x| (x >> 7) as u8).collect();
                    arrays.0[place + 2] =
                        bytes_of(Dtype::Bf16, &values(n.div_ceil(BLOCK), special, seed + 10, true));
                }
            }
        }
        arrays.0[8] = bytes_of(kind.grad, &values(n, special, 4, false));
        arrays
    }

    /// Steps on the processor.
    fn step(&mut self, kind: Kind, rule: AdamRule, n: usize) -> StepStats {
        let [param, low, sums, copy, first, second, first_scales, second_scales, grad] =
            self.0.each_mut().map(Vec::as_mut_slice);
        let dtype = if matches!(kind.master, Master::Split { .. }) { Dtype::Bf16 } else { Dtype::F32 };
        let grad = match floats(kind.grad, grad) {
            FloatsMut::F32(s) => Floats::F32(s),
            FloatsMut::F16(s) => Floats::F16(s),
            FloatsMut::Bf16(s) => Floats::Bf16(s),
        };
        let (mut moments, mut codes) = ([None, None], [None, None]);
        for (at, (moment, scales)) in [(first, first_scales), (second, second_scales)].into_iter().enumerate()
        {
            match kind.moments {
                Some(dtype) => moments[at] = Some(floats(dtype, moment)),
                None => codes[at] = Some(Codes { codes: moment, scales: words(scales) }),
            }
        }
        let [exp_avg, exp_avg_sq] = moments;
        let states = States { param: floats(dtype, param), exp_avg, exp_avg_sq };
        let mut tensor = match kind.master {
            Master::Whole(copied) => {
                Tensor::new(states, grad, copied.map(|dtype| floats(dtype, copy))).unwrap()
            }
            Master::Split { sums: false } => Tensor::new_split(states, grad, words(low)).unwrap(),
            Master::Split { sums: true } => {
                Tensor::new_split(states, grad, words(low)).unwrap().with_low_sums(words(sums)).unwrap()
            }
        };
        if kind.moments.is_none() {
            tensor = tensor.with_codes(codes).unwrap();
        }
        assert_eq!(tensor.len(), n);
        StepStats::of(rule.step(optim::kernel().unwrap(), tensor, true).unwrap())
    }

    /// The bit patterns. All NaNs of f32 parameters and moments have one pattern.
    fn bits(&self, kind: Kind) -> Arrays {
        let mut same = self.clone();
        let is_f32 = |place: usize| match place {
            0 => matches!(kind.master, Master::Whole(_)),
            4 | 5 => kind.moments == Some(Dtype::F32),
            _ => false,
        };
        for place in (0..NAMES.len()).filter(|place| is_f32(*place)) {
            for word in same.0[place].chunks_exact_mut(4) {
                if f32::from_le_bytes([word[0], word[1], word[2], word[3]]).is_nan() {
                    word.copy_from_slice(&0x7fc0_0000_u32.to_le_bytes());
                }
            }
        }
        same
    }
}

fn bytes_of(dtype: Dtype, values: &[f32]) -> Vec<u8> {
    let two = |bits: u16| bits.to_le_bytes();
    match dtype {
        Dtype::F32 => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
        Dtype::F16 => values.iter().flat_map(|x| two(f16::from_f32(*x).to_bits())).collect(),
        Dtype::Bf16 => values.iter().flat_map(|x| two(bf16::from_f32(*x).to_bits())).collect(),
    }
}

/// Bytes as words of another size. The allocator aligns vectors to 16 bytes.
fn words<T>(bytes: &mut [u8]) -> &mut [T] {
    // SAFETY: every bit pattern is a T, which is an integer or a float.
    let ([], words, []) = (unsafe { bytes.align_to_mut() }) else { panic!("bytes of whole words") };
    words
}

fn floats(dtype: Dtype, bytes: &mut [u8]) -> FloatsMut<'_> {
    match dtype {
        Dtype::F32 => FloatsMut::F32(words(bytes)),
        Dtype::F16 => FloatsMut::F16(words(bytes)),
        Dtype::Bf16 => FloatsMut::Bf16(words(bytes)),
    }
}

/// An array in device memory, with canaries around it.
struct Placed {
    _memory: DeviceMemory,
    whole: DeviceSpan,
    span: DeviceSpan,
}

impl Placed {
    /// `shift` bytes off an aligned address.
    fn new(bench: &Bench, bytes: &[u8], shift: usize) -> Placed {
        let all = [&[CANARY; MARGIN][..], bytes, &[CANARY; MARGIN]].concat();
        let memory = DeviceMemory::new(&bench.device, (shift + all.len()) as u64).unwrap();
        let whole = memory.span().part(shift as u64, all.len() as u64);
        bench.upload(&all, whole);
        let span = whole.part(MARGIN as u64, bytes.len() as u64);
        Placed { _memory: memory, whole, span }
    }

    fn bytes(&self, bench: &Bench) -> Vec<u8> {
        let all = bench.download(self.whole);
        let (before, rest) = all.split_at(MARGIN);
        let (own, after) = rest.split_at(rest.len() - MARGIN);
        assert!(before.iter().chain(after).all(|byte| *byte == CANARY), "memory beside an array was written");
        own.to_vec()
    }
}

/// Steps on the GPU.
fn step_on_gpu(
    bench: &Bench,
    arrays: &Arrays,
    kind: Kind,
    rule: AdamRule,
    aligned: bool,
) -> (Arrays, StepStats) {
    let is_split = matches!(kind.master, Master::Split { .. });
    let shift = |place: usize| match (aligned, place) {
        (true, _) => 0,
        (false, 2) => 8,
        (false, 4 | 5) if kind.moments.is_none() => 1,
        (false, 0 | 8) => 4,
        (false, _) => 2,
    };
    // f32 arrays are aligned to four bytes.
    let shift = |place: usize| match (kind.moments, place) {
        (Some(Dtype::F32), 4 | 5) => 2 * shift(place),
        _ => shift(place),
    };
    let placed: Vec<Placed> =
        arrays.0.iter().enumerate().map(|(place, bytes)| Placed::new(bench, bytes, shift(place))).collect();
    let of = |place: usize, dtype| DeviceFloats::new(placed[place].span, dtype, NAMES[place]).unwrap();
    let moment = |place: usize| kind.moments.map_or(DeviceFloats::EMPTY, |dtype| of(place, dtype));
    let states = DeviceStates {
        param: of(0, if is_split { Dtype::Bf16 } else { Dtype::F32 }),
        exp_avg: moment(4),
        exp_avg_sq: moment(5),
    };
    let copy = match kind.master {
        Master::Whole(copy) => copy.map(|dtype| of(3, dtype)),
        Master::Split { .. } => None,
    };
    let sums = (kind.master == Master::Split { sums: true }).then(|| placed[2].span);
    let coded = |place: usize| DeviceCodes { codes: placed[place].span, scales: of(place + 2, Dtype::Bf16) };
    let narrow = DeviceNarrow {
        low: is_split.then(|| DeviceLow { bits: of(1, Dtype::Bf16), sums }),
        codes: kind.moments.is_none().then(|| [coded(4), coded(5)]),
    };
    let tensor = DeviceTensor { narrow, ..DeviceTensor::new(states, of(8, kind.grad), copy) };
    let stats = bench.steps.adam(&[Job { rule, tensor }], foreign(&bench.stream), true).unwrap();
    let mut after = Arrays(Default::default());
    after.0.iter_mut().zip(&placed).for_each(|(bytes, placed)| *bytes = placed.bytes(bench));
    (after, stats)
}

/// Runs one case on both sides and returns the differences as text. Two steps: the second one has the sums of the first.
fn compare(bench: &Bench, kind: Kind, rule: AdamRule, n: usize, special: bool, aligned: bool) -> Vec<String> {
    let mut faults = Vec::new();
    let mut expected = Arrays::of(kind, n, special);
    let mut got = expected.clone();
    for step in 1..=2 {
        let wanted = expected.step(kind, rule, n);
        let found;
        (got, found) = step_on_gpu(bench, &got, kind, rule, aligned);
        if found.sum_squares.to_bits() != wanted.sum_squares.to_bits() {
            faults.push(format!("step {step}: sum {} != {}", found.sum_squares, wanted.sum_squares));
        }
        for (name, (own, other)) in NAMES.iter().zip(got.bits(kind).0.iter().zip(&expected.bits(kind).0)) {
            if let Some(at) = own.iter().zip(other).position(|(a, b)| a != b) {
                faults
                    .push(format!("step {step}: {name} differs at byte {at}: {} != {}", own[at], other[at]));
            }
        }
        if !faults.is_empty() {
            break;
        }
    }
    let stochastic = rule.stochastic.is_some();
    faults
        .into_iter()
        .map(|what| {
            format!(
                "{kind:?} {:?} stochastic={stochastic} n={n} special={special} aligned={aligned}: {what}",
                rule.decay
            )
        })
        .collect()
}

/// The rules of a kind: each decay, and rounding at random where the moments are rounded.
fn rules(kind: Kind) -> Vec<AdamRule> {
    let mut rules: Vec<AdamRule> =
        [WeightDecay::None, WeightDecay::L2, WeightDecay::Decoupled].map(adam_rule).to_vec();
    if kind.moments != Some(Dtype::F32) {
        rules.push(AdamRule { stochastic: Some(0xfeed_5eed_0123_4567), ..rules[2] });
    }
    rules
}

#[test]
fn narrow_states_on_the_gpu_have_the_bits_of_the_processor() {
    let bench = Bench::new(91);
    let mut cases = 0;
    for kind in kinds() {
        for (number, rule) in rules(kind).into_iter().enumerate() {
            for (n, special) in LENGTHS.into_iter().flat_map(|n| [(n, false), (n, true)]) {
                // The lengths of several tiles for one rule of each kind: the interpreter steps 10,000 elements a second.
                if n > 1000 && number + 1 != rules(kind).len() {
                    continue;
                }
                for aligned in [true, false] {
                    assert_eq!(compare(&bench, kind, rule, n, special, aligned), [""; 0]);
                    cases += 1;
                }
            }
        }
    }
    assert!(cases > 3000, "{cases} cases");
    fakecuda::with(91, |gpu| assert_eq!((gpu.races().len(), gpu.queues.failures.len()), (0, 0)));
}

#[test]
fn every_kernel_of_narrow_states_is_compared() {
    let names: BTreeSet<&str> = NARROW
        .lines()
        .filter_map(|line| line.strip_prefix(".visible .entry ").and_then(|rest| rest.strip_suffix('(')))
        .collect();
    let compared = kinds().into_iter().map(|kind| {
        let copy = |copy: Option<Dtype>| copy.map_or(String::new(), |dtype| format!("_{}", dtype.name()));
        match (kind.master, kind.moments) {
            (Master::Whole(copied), _) => format!("spw_coded_{}{}", kind.grad.name(), copy(copied)),
            (Master::Split { .. }, None) => format!("spw_split_coded_{}", kind.grad.name()),
            (Master::Split { .. }, Some(dtype)) => {
                format!("spw_split_{}_{}", dtype.name(), kind.grad.name())
            }
        }
    });
    assert_eq!(compared.collect::<BTreeSet<_>>(), names.into_iter().map(str::to_string).collect());
}

#[test]
fn broken_kernels_of_narrow_states_are_found() {
    let kind = Kind { master: Master::Split { sums: true }, moments: None, grad: Dtype::Bf16 };
    let (before, inside) = NARROW.split_at(NARROW.find(".entry spw_split_coded_bf16(").unwrap());
    let end = inside.find("\nret;").unwrap();
    let (own, rest) = inside.split_at(end);
    let changes = [
        ("a share of the largest magnitude left out", "shfl.sync.bfly.b32", "shfl.sync.down.b32"),
        ("the offset of a moment", "0f3B800000", "0f3B000000"),
        ("a borrow of the low bits", ", 15;", ", 14;"),
        ("the upper half of the term of a stripe", "mul.hi.u64", "mul.lo.u64"),
        ("random bits of the other moment", ", 13;", ", 12;"),
    ];
    for (what, from, to) in changes {
        let broken = own.replace(from, to);
        assert_ne!(broken, own, "{what}");
        let text = format!("{before}{broken}{rest}");
        let bench = Bench::with(92, [CAST, ADAM, &text]);
        let found =
            rules(kind).into_iter().any(|rule| !compare(&bench, kind, rule, 4099, false, true).is_empty());
        assert!(found, "not found: {what}");
    }
}
