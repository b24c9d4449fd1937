//! A step can write its shadow, its 16-bit copy or its log past the caches. Such a step writes the same bytes as one
//! through the caches, and no others; its log rolls the step back.

use crate::{cases, kernels};
use sampled::Sample;
use spillway_kernels::dtype::{Dtype, Floats, FloatsMut};
use spillway_kernels::*;

/// Lengths around whole vectors, whole cache lines and whole batches of a log.
const LENGTHS: [usize; 12] = [1, 15, 16, 17, 63, 64, 1000, 4096, 4097, 20001, 20016, CHUNK];
const CANARY: u8 = 0xc5;

#[derive(Clone, Copy)]
#[repr(align(64))]
struct Line([u8; 64]);

/// Bytes that begin at a cache line, with a line of canaries on either side.
#[derive(Clone)]
struct Span(Vec<Line>, usize);

impl Span {
    fn new(bytes: usize) -> Span {
        Span(vec![Line([CANARY; 64]); bytes.div_ceil(64) + 2], bytes)
    }

    /// Random finite bit patterns; those of a second moment have no sign.
    fn random(dtype: Dtype, n: usize, seed: u32, positive: bool) -> Span {
        let mut span = Span::new(n * dtype.size());
        let (mut state, size) = (seed | 1, dtype.size());
        let highest = if positive { 0x3f } else { 0xbf };
        for at in 0..span.1 {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let byte = (state >> 24) as u8;
            span.bytes()[at] = if at % size == size - 1 { byte & highest } else { byte };
        }
        span
    }

    fn bytes(&mut self) -> &mut [u8] {
        let all = self.0.as_mut_ptr().cast::<u8>();
        // SAFETY: the lines after the first hold at least self.1 bytes.
        unsafe { std::slice::from_raw_parts_mut(all.add(64), self.1) }
    }

    fn floats(&mut self, dtype: Dtype) -> FloatsMut<'_> {
        fn slice<T>(bytes: &mut [u8]) -> &mut [T] {
            // SAFETY: aligned to a cache line, whole elements, and every bit pattern is a value.
            unsafe { std::slice::from_raw_parts_mut(bytes.as_mut_ptr().cast(), bytes.len() / size_of::<T>()) }
        }
        match dtype {
            Dtype::F32 => FloatsMut::F32(slice(self.bytes())),
            Dtype::F16 => FloatsMut::F16(slice(self.bytes())),
            Dtype::Bf16 => FloatsMut::Bf16(slice(self.bytes())),
        }
    }

    fn has_its_canaries(&self) -> bool {
        let bytes = self.0.iter().flat_map(|line| line.0).enumerate();
        bytes.filter(|(at, _)| *at < 64 || *at >= 64 + self.1).all(|(_, byte)| byte == CANARY)
    }
}

fn all_dtypes() -> impl Iterator<Item = Dtypes> {
    const ALL: [Dtype; 3] = [Dtype::F32, Dtype::F16, Dtype::Bf16];
    const COPIES: [Option<Dtype>; 3] = [None, Some(Dtype::F16), Some(Dtype::Bf16)];
    (0..81)
        .map(|i| Dtypes {
            param: ALL[i % 3],
            state: ALL[i / 3 % 3],
            grad: ALL[i / 9 % 3],
            copy: COPIES[i / 27],
        })
        // The types of gradient and copy are independent, so copies are tested with one gradient type.
        .filter(|dtypes| dtypes.copy.is_none() || dtypes.grad == Dtype::Bf16)
        .filter(|dtypes| supported(*dtypes))
}

fn states<'a>([p, m, v]: &'a mut [Span; 3], dtypes: Dtypes) -> States<'a> {
    States {
        param: p.floats(dtypes.param),
        exp_avg: Some(m.floats(dtypes.state)),
        exp_avg_sq: Some(v.floats(dtypes.state)),
    }
}

/// Either large enough that everything is streamed, or too small for streaming.
fn tensor<'a>(
    spans: &'a mut [Span; 3],
    copy: &'a mut Span,
    grad: &'a mut Span,
    dtypes: Dtypes,
    streamed: bool,
) -> Tensor<'a> {
    let grad = match grad.floats(dtypes.grad) {
        FloatsMut::F32(s) => Floats::F32(s),
        FloatsMut::F16(s) => Floats::F16(s),
        FloatsMut::Bf16(s) => Floats::Bf16(s),
    };
    let copy = dtypes.copy.map(|dtype| copy.floats(dtype));
    let mut tensor = Tensor::new(states(spans, dtypes), grad, copy).unwrap();
    tensor.set_total_elements(if streamed { usize::MAX } else { 0 });
    tensor
}

#[test]
fn streamed_logs_and_shadows_have_the_bytes_of_stored_ones() {
    let rule = AdamRule {
        decay: WeightDecay::Decoupled,
        grad_scale: 0.5,
        beta1: 0.9,
        one_minus_beta1: 0.1,
        beta2: 0.99,
        one_minus_beta2: 0.01,
        inv_sqrt_correction2: 1.5,
        eps: 1e-8,
        step_size: -0.1,
        decay_factor: -0.01,
        stochastic: None,
    };
    let mut sample = Sample::new();
    for (kernel, dtypes) in
        kernels().into_iter().flat_map(|kernel| all_dtypes().map(move |types| (kernel, types)))
    {
        for n in cases(&mut sample, LENGTHS) {
            let what = format!("{} {dtypes:?} n={n}", kernel.name());
            let start = [(dtypes.param, false), (dtypes.state, false), (dtypes.state, true)];
            let start: [Span; 3] = std::array::from_fn(|i| Span::random(start[i].0, n, i as u32, start[i].1));
            let mut grad = Span::random(dtypes.grad, n, 9, false);
            let both = [false, true].map(|streamed| {
                let copy = Span::new(dtypes.copy.map_or(0, |copy| n * copy.size()));
                let mut copies = [(); 4].map(|()| copy.clone());
                let [ahead, stepped, back, later] = &mut copies;

                let (mut old, mut shadow) = (start.clone(), start.clone().map(|span| Span::new(span.1)));
                let into_shadow = tensor(&mut old, ahead, &mut grad, dtypes, streamed);
                rule.step(kernel, into_shadow.with_shadow(states(&mut shadow, dtypes)).unwrap(), false)
                    .unwrap();

                let (mut new, mut log) = (start.clone(), Span::new(log_bytes(n)));
                let recorded = tensor(&mut new, stepped, &mut grad, dtypes, streamed);
                rule.step(kernel, recorded.with_log(log.bytes()).unwrap(), true).unwrap();
                publish(kernel, tensor(&mut new, later, &mut grad, dtypes, streamed));
                let used = inside::log_used(log.bytes()) as usize;
                let mut undone = new.clone();
                let undo = tensor(&mut undone, back, &mut grad, dtypes, streamed);
                rule.undo(kernel, undo.with_log(log.bytes()).unwrap(), None).unwrap();
                for (span, start) in undone.iter_mut().chain(&mut old).zip(start.iter().cycle()) {
                    assert!(span.bytes() == start.clone().bytes(), "{what}: undone");
                }
                let mut all: Vec<Span> = shadow.into_iter().chain(new).chain(copies).chain([log]).collect();
                assert!(all.iter().all(Span::has_its_canaries), "{what}: canaries");
                all[10].1 = used;
                all.iter_mut().map(|span| span.bytes().to_vec()).collect::<Vec<Vec<u8>>>()
            });
            assert!(both[0] == both[1], "{what}");
            assert!(both[0][..3] == both[0][3..6], "{what}: shadow");
            let [ahead, stepped, _, later] = &both[0][6..10] else { unreachable!() };
            assert!(ahead == stepped && later == stepped, "{what}: copies");
        }
    }
}
