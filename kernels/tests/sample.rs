//! The inputs of all kernel tests: values of all kinds, spans with canaries around them, all types and lengths.

use spillway_kernels::dtype::{Dtype, Floats, FloatsMut, bf16, f16};
use spillway_kernels::{AdamRule, WeightDecay};
pub use spillway_kernels::{Dtypes, supported};
use spillway_kernels::{States, Tensor};

/// Lengths around every edge of lanes, groups and tiles.
pub const LENGTHS: [usize; 19] =
    [0, 1, 2, 7, 8, 9, 15, 16, 17, 31, 33, 255, 256, 257, 1000, 4095, 4096, 4097, 9001];
/// Canary elements before and after every span.
const MARGIN: usize = 19;

/// Coefficients, with the names that the formulas use.
#[derive(Clone, Copy)]
pub struct Inputs {
    pub scale: f32,
    pub lr: f32,
    pub b1: f32,
    pub b2: f32,
    pub eps: f32,
    pub decay: f32,
    pub correction1: f32,
    pub inv_sqrt_correction2: f32,
}

pub const INPUTS: Inputs = Inputs {
    scale: 0.37,
    lr: 1e-2,
    b1: 0.9,
    b2: 0.999,
    eps: 1e-8,
    decay: 0.1,
    correction1: 0.271,
    inv_sqrt_correction2: 18.27,
};

pub fn adam_rule(decay: WeightDecay) -> AdamRule {
    let i = &INPUTS;
    AdamRule {
        decay,
        grad_scale: i.scale,
        beta1: i.b1,
        one_minus_beta1: 1.0 - i.b1,
        beta2: i.b2,
        one_minus_beta2: 1.0 - i.b2,
        inv_sqrt_correction2: i.inv_sqrt_correction2,
        eps: i.eps,
        step_size: -i.lr / i.correction1,
        decay_factor: if decay == WeightDecay::Decoupled { -i.lr * i.decay } else { i.decay },
        stochastic: None,
    }
}

/// One span in memory as bit patterns, with canaries around it.
#[derive(Clone)]
pub struct Span {
    dtype: Dtype,
    wide: Vec<f32>,
    half: Vec<f16>,
    brain: Vec<bf16>,
}

impl Span {
    pub fn of(dtype: Dtype, values: &[f32]) -> Span {
        let margin = || std::iter::repeat_n(-77.0f32, MARGIN);
        let all: Vec<f32> = margin().chain(values.iter().copied()).chain(margin()).collect();
        let (mut wide, mut half, mut brain) = (Vec::new(), Vec::new(), Vec::new());
        match dtype {
            Dtype::F32 => wide = all,
            Dtype::F16 => half = all.iter().map(|x| to_f16(*x)).collect(),
            Dtype::Bf16 => brain = all.iter().map(|x| to_bf16(*x)).collect(),
        }
        Span { dtype, wide, half, brain }
    }

    pub fn inner(&mut self) -> FloatsMut<'_> {
        fn cut<T>(all: &mut [T]) -> &mut [T] {
            let end = all.len() - MARGIN;
            &mut all[MARGIN..end]
        }
        match self.dtype {
            Dtype::F32 => FloatsMut::F32(cut(&mut self.wide)),
            Dtype::F16 => FloatsMut::F16(cut(&mut self.half)),
            Dtype::Bf16 => FloatsMut::Bf16(cut(&mut self.brain)),
        }
    }

    pub fn values(&self) -> Vec<f32> {
        let all: Vec<f32> = match self.dtype {
            Dtype::F32 => self.wide.clone(),
            Dtype::F16 => self.half.iter().map(|x| x.to_f32()).collect(),
            Dtype::Bf16 => self.brain.iter().map(|x| x.to_f32()).collect(),
        };
        all[MARGIN..all.len() - MARGIN].to_vec()
    }

    #[allow(dead_code, reason = "the GPU's tests use it, the kernels' do not")]
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        let (start, bytes) = match self.dtype {
            Dtype::F32 => (self.wide.as_mut_ptr().cast(), size_of_val(&self.wide[..])),
            Dtype::F16 => (self.half.as_mut_ptr().cast(), size_of_val(&self.half[..])),
            Dtype::Bf16 => (self.brain.as_mut_ptr().cast(), size_of_val(&self.brain[..])),
        };
        // SAFETY: the whole vector, borrowed with self; floats have no padding, and every bit pattern is a float.
        unsafe { std::slice::from_raw_parts_mut(start, bytes) }
    }

    /// The bit patterns, canaries included. Every NaN of f32 becomes one pattern; NaNs of 16-bit types stay unchanged.
    pub fn bits(&self) -> Vec<u32> {
        let one_nan = |x: &f32| if x.is_nan() { 0x7fc0_0000 } else { x.to_bits() };
        match self.dtype {
            Dtype::F32 => self.wide.iter().map(one_nan).collect(),
            Dtype::F16 => self.half.iter().map(|x| x.to_bits().into()).collect(),
            Dtype::Bf16 => self.brain.iter().map(|x| x.to_bits().into()).collect(),
        }
    }
}

fn to_f16(x: f32) -> f16 {
    if x.is_nan() { f16::from_bits(0x7e00) } else { f16::from_f32(x) }
}

fn to_bf16(x: f32) -> bf16 {
    if x.is_nan() { bf16::from_bits(0x7fc0) } else { bf16::from_f32(x) }
}

/// Normal values, or a mixture that combines every kind of special value with every other kind.
pub fn values(n: usize, special: bool, seed: u64, positive: bool) -> Vec<f32> {
    const SPECIAL: [u32; 13] = [
        0,
        0x8000_0000,
        1,
        0x8000_0001,
        0x007f_ffff,
        0x0080_0000,
        0x7f7f_ffff,
        0xff7f_ffff,
        0x7f80_0000,
        0xff80_0000,
        0x7fc0_0000,
        0x3f80_8000,
        0x477f_f000,
    ];
    let mut state = seed;
    let mut next = move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as u32
    };
    let one = |_| {
        let (kind, bits) = (next(), next());
        let x = match (special, kind % 3) {
            (true, 0) => f32::from_bits(SPECIAL[bits as usize % SPECIAL.len()]),
            (true, 1) => f32::from_bits(bits << 1 | kind >> 30),
            _ => (bits as f32 / (1u32 << 30) as f32 - 1.0) * [1.0, 1e-3, 1e-6][kind as usize % 3],
        };
        if positive { x.abs() } else { x }
    };
    (0..n).map(one).collect()
}

pub fn all_dtypes() -> Vec<Dtypes> {
    const ALL: [Dtype; 3] = [Dtype::F32, Dtype::F16, Dtype::Bf16];
    let copies = || ALL.into_iter().map(Some).chain([None]);
    let all = ALL.into_iter().flat_map(|param| {
        ALL.into_iter().flat_map(move |state| {
            ALL.into_iter()
                .flat_map(move |grad| copies().map(move |copy| Dtypes { param, state, grad, copy }))
        })
    });
    all.filter(|dtypes| supported(*dtypes)).collect()
}

pub fn tensor_of<'a>(spans: &'a mut [Span; 4], grad: &'a mut Span, dtypes: Dtypes) -> Tensor<'a> {
    let [p, m, v, copy] = spans;
    let grad = match grad.inner() {
        FloatsMut::F32(s) => Floats::F32(s),
        FloatsMut::F16(s) => Floats::F16(s),
        FloatsMut::Bf16(s) => Floats::Bf16(s),
    };
    let copy = dtypes.copy.map(|_| copy.inner());
    let states = States { param: p.inner(), exp_avg: Some(m.inner()), exp_avg_sq: Some(v.inner()) };
    Tensor::new(states, grad, copy).unwrap()
}

/// Parameter, exp_avg, exp_avg_sq and the 16-bit copy of one case, and its gradient.
pub fn start_of(dtypes: Dtypes, n: usize, special: bool) -> ([Span; 4], Span) {
    let states = [
        Span::of(dtypes.param, &values(n, special, 1, false)),
        Span::of(dtypes.state, &values(n, special, 2, false)),
        Span::of(dtypes.state, &values(n, special, 3, true)),
        Span::of(dtypes.copy.unwrap_or(Dtype::F32), &vec![0.0; n]),
    ];
    (states, Span::of(dtypes.grad, &values(n, special, 4, false)))
}
