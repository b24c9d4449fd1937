//! `spillway bench adam`: the speed of each kernel relative to the memory bandwidth.
//!
//! The reference is a stream that reads and writes the same four arrays with one addition each, on the same threads and
//! with the same vector unit. Kernel and reference alternate, so that drift of the machine's speed affects both; both
//! figures of a ratio are of one round.
#![forbid(unsafe_code)]

use std::ops::{Deref, DerefMut};
use std::time::Instant;

use spillway::dtype::{Floats, FloatsMut, bf16};
use spillway::error::Result;
use spillway::kernel::{Kernel, Optimizer, States, StreamRule, Tensor};
use spillway::optim::adam::AdamOptions;
use spillway::optim::parallel::{Job, step_on};

use super::measurement::{Better, Row, ratios};
use super::memory;
use super::output::{Output, Session};
use super::report::{Column, parse_count};

#[derive(clap::Args)]
pub struct Options {
    #[command(flatten)]
    output: Output,
    /// Parameters of each measurement, with Ki or Mi; each parameter takes 20 bytes of memory.
    #[arg(long, value_delimiter = ',', default_value = "4Ki,64Ki,1Mi,16Mi,100Mi", value_parser = parse_count)]
    sizes: Vec<usize>,
    /// Kernels to run; default: all.
    #[arg(long, value_delimiter = ',')]
    kernels: Vec<String>,
    /// Number of rounds; each runs kernel and reference once.
    #[arg(long, default_value_t = 9, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
}

/// Bytes per parameter of an Adam step in f32: reads p, g, m, v and writes p, m, v.
const F32_BYTES: f64 = 28.0;
/// Bytes per parameter of the fused step: it reads a bf16 gradient, and also writes a bf16 copy of the parameter.
const FUSED_BYTES: f64 = 28.0;

const COLUMNS: &[Column] = &[
    Column::case("parameters", "parameters", 10),
    Column::case("kernel", "kernel", 7),
    Column::case("work", "work", 5),
    Column::median("ns/param", "ns_per_parameter", 8, 3),
    Column::median("GB/s", "gb_per_s", 7, 1),
    Column::median("limit", "limit_gb_per_s", 7, 1),
    Column::median("ratio", "ratio_to_limit", 6, 3),
    Column::spread(3),
];

pub fn run(options: &Options) -> Result<()> {
    let named =
        options.kernels.iter().map(|name| Ok(Kernel::named(name)?)).collect::<Result<Vec<Kernel>>>()?;
    let kernels = if named.is_empty() { Kernel::all().collect() } else { named };
    for &size in &options.sizes {
        memory::require("--sizes", size, Arrays::BYTES)?;
    }
    let stages = options.sizes.len() * kernels.len() * 2;
    let settings = [("rounds", options.rounds.into())];
    let mut session = Session::begin(&options.output, "adam", settings, COLUMNS, stages)?;
    for &size in &options.sizes {
        let mut arrays = Arrays::new(size);
        for &kernel in &kernels {
            for case in [Case::F32, Case::Fused] {
                session.progress().begin(&format!("{} on {size} parameters", kernel.name()));
                session.row(measure(kernel, &mut arrays, case, options.rounds)?)?;
                session.progress().end();
            }
        }
    }
    session.finish()
}

/// Arrays that a step reads and writes beside parameter and states.
#[derive(Clone, Copy, PartialEq)]
pub enum Case {
    /// An f32 gradient.
    F32,
    /// A bf16 gradient in and a bf16 copy of the parameter out.
    Fused,
    /// A bf16 gradient in; the 16-bit copy is written only after the step is final.
    KeptBack,
}

/// The four arrays, and the 16-bit gradient and copy of the fused case.
pub struct Arrays {
    param: Aligned<f32>,
    grad: Aligned<f32>,
    exp_avg: Aligned<f32>,
    exp_avg_sq: Aligned<f32>,
    grad16: Aligned<bf16>,
    copy16: Aligned<bf16>,
}

/// Elements aligned to a cache line, like a framework's tensors.
struct Aligned<T> {
    elements: Vec<T>,
    start: usize,
}

impl<T: Copy + Default> Aligned<T> {
    fn new(n: usize, value: impl Fn(usize) -> T) -> Self {
        let mut elements: Vec<T> = Vec::with_capacity(n + LINE / size_of::<T>());
        let start = elements.as_ptr().align_offset(LINE);
        elements.resize(start, T::default());
        elements.extend((0..n).map(value));
        Aligned { elements, start }
    }
}

impl<T> Deref for Aligned<T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        &self.elements[self.start..]
    }
}

impl<T> DerefMut for Aligned<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        &mut self.elements[self.start..]
    }
}

/// Bytes of a cache line.
const LINE: usize = 64;

impl Arrays {
    /// Bytes of memory per parameter.
    pub const BYTES: u64 = 20;

    pub fn new(n: usize) -> Self {
        let ramp = |i: usize, scale: f32| ((i % 1021) as f32 - 510.0) * scale;
        Arrays {
            param: Aligned::new(n, |i| ramp(i, 1e-3)),
            grad: Aligned::new(n, |i| ramp(i, 1e-5)),
            exp_avg: Aligned::new(n, |i| ramp(i, 1e-6)),
            exp_avg_sq: Aligned::new(n, |i| ramp(i, 1e-5).powi(2)),
            grad16: Aligned::new(n, |i| bf16::from_f32(ramp(i, 1e-5))),
            copy16: Aligned::new(n, |_| bf16::ZERO),
        }
    }

    pub fn tensor(&mut self, case: Case) -> Result<Tensor<'_>> {
        let grad = if case == Case::F32 { Floats::F32(&self.grad) } else { Floats::Bf16(&self.grad16) };
        let copy = (case == Case::Fused).then_some(FloatsMut::Bf16(&mut self.copy16));
        let states = States {
            param: FloatsMut::F32(&mut self.param),
            exp_avg: Some(FloatsMut::F32(&mut self.exp_avg)),
            exp_avg_sq: Some(FloatsMut::F32(&mut self.exp_avg_sq)),
        };
        Ok(Tensor::new(states, grad, copy)?)
    }

    /// The parameter and the states, without gradient and copy.
    pub fn states(&mut self) -> States<'_> {
        States {
            param: FloatsMut::F32(&mut self.param),
            exp_avg: Some(FloatsMut::F32(&mut self.exp_avg)),
            exp_avg_sq: Some(FloatsMut::F32(&mut self.exp_avg_sq)),
        }
    }

    /// Random gradients: normally distributed around a scale of each element.
    pub fn refresh_grad(&mut self, seed: u32) {
        let mut state = u64::from(seed).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        for (i, (grad, grad16)) in self.grad.iter_mut().zip(&mut *self.grad16).enumerate() {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let uniform = |bits: u64| (bits & 0xffff) as f32 / 32768.0 - 1.0;
            let bell = uniform(state >> 16) + uniform(state >> 32) + uniform(state >> 48);
            *grad = bell * 1e-3 / (1 + i % 7) as f32;
            *grad16 = bf16::from_f32(*grad);
        }
    }
}

fn measure(kernel: Kernel, arrays: &mut Arrays, case: Case, rounds: u32) -> Result<Row> {
    let parameters = arrays.param.len();
    // Small arrays are stepped several times per timing, to exceed the resolution of the clock.
    let repeats = ((4 << 20) / parameters.max(1)).max(1);
    let adam = AdamOptions { weight_decay: 0.01, step: 10, ..Default::default() }.rule()?;
    let mut seconds = Vec::new();
    let mut limits = Vec::new();
    for round in 0..=rounds {
        let step = time(kernel, arrays, adam, case, repeats)?;
        let limit = time(kernel, arrays, StreamRule, Case::F32, repeats)?;
        if round > 0 {
            seconds.push(step);
            limits.push(limit);
        }
    }
    let bytes = if case == Case::F32 { F32_BYTES } else { FUSED_BYTES };
    let count = (parameters * repeats) as f64;
    let rates = |seconds: &[f64], bytes: f64| seconds.iter().map(|s| bytes * count / s / 1e9).collect();
    let nanoseconds: Vec<f64> = seconds.iter().map(|s| s * 1e9 / count).collect();
    let (own, limit): (Vec<f64>, Vec<f64>) = (rates(&seconds, bytes), rates(&limits, F32_BYTES));
    Ok(Row::new("ratio_to_limit", Better::Higher)
        .case("parameters", parameters)
        .case("kernel", kernel.name())
        .case("work", if case == Case::F32 { "f32" } else { "fused" })
        .figure("ns_per_parameter", &nanoseconds)
        .figure("gb_per_s", &own)
        .figure("limit_gb_per_s", &limit)
        .figure("ratio_to_limit", &ratios(&own, &limit)))
}

fn time<O: Optimizer>(
    kernel: Kernel,
    arrays: &mut Arrays,
    optimizer: O,
    case: Case,
    repeats: usize,
) -> Result<f64> {
    let mut jobs = [Job { optimizer, tensor: arrays.tensor(case)? }];
    let start = Instant::now();
    for _ in 0..repeats {
        step_on(kernel, &mut jobs, case != Case::F32)?;
    }
    Ok(start.elapsed().as_secs_f64())
}
