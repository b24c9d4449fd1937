//! The kernels of kernels/*.cu, bitwise equal to the CPU's kernels.
//!
//! Every launch is asynchronous: the caller keeps the memory alive until an event recorded behind the launch is done.

use std::collections::HashMap;
use std::ffi::c_void;
use std::fmt;
use std::sync::Arc;

use super::device::Device;
use super::memory::{DeviceMemory, DeviceSpan};
use super::module::{Function, Module};
use super::stream::Stream;
use crate::dtype::Dtype;
use crate::error::{Error, Result};
use crate::kernel::squares::TILE;
use crate::kernel::{AdamRule, WeightDecay};

pub(super) const CAST: &str = include_str!("../../kernels/cast.ptx");
pub(super) const ADAM: &str = include_str!("../../kernels/adam.ptx");
const THREADS: u32 = 256;
const WARPS: u64 = THREADS as u64 / 32;
/// The launch limit. A launch has as many blocks as there is work, so that the device balances them dynamically.
const MOST_BLOCKS: u32 = i32::MAX as u32;
/// Most parameters of a kernel.
const MOST_PARAMETERS: usize = 7;
/// Number of sums that one warp of `spw_tree` adds to one.
const BRANCHES: u64 = 32;

/// The kernels, compiled for one device.
#[derive(Debug)]
pub struct Kernels {
    functions: HashMap<KernelName, Function>,
    /// Smaller in tests, so that each warp processes many tiles.
    pub(super) most_blocks: u32,
    _modules: [Module; 2],
}

/// A kernel as a launch names it: what it does, and the types of its arrays. Text is made of it in messages only.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct KernelName {
    kind: &'static str,
    types: [Option<Dtype>; 4],
}

impl KernelName {
    /// The kinds. A name that begins with another name stands before that one.
    const KINDS: [&'static str; 5] = ["adam_stochastic", "adam", "cast", "squares", "tree"];

    fn of<const N: usize>(kind: &'static str, types: [Dtype; N]) -> KernelName {
        KernelName { kind, types: std::array::from_fn(|at| types.get(at).copied()) }
    }

    /// The kernel with this name in the PTX: `spw_KIND_TYPE_TYPE`.
    fn parse(name: &str) -> Option<KernelName> {
        let rest = name.strip_prefix("spw_")?;
        let kind = KernelName::KINDS.into_iter().find(|kind| rest.starts_with(kind))?;
        let named =
            |word| [Dtype::F32, Dtype::F16, Dtype::Bf16].into_iter().find(|dtype| dtype.name() == word);
        let mut words = rest[kind.len()..].split('_').skip(1);
        Some(KernelName { kind, types: std::array::from_fn(|_| words.next().and_then(named)) })
    }
}

impl fmt::Display for KernelName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "spw_{}", self.kind)?;
        self.types.iter().flatten().try_for_each(|dtype| write!(f, "_{}", dtype.name()))
    }
}

/// An array of elements in device memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceFloats {
    span: DeviceSpan,
    dtype: Dtype,
}

impl DeviceFloats {
    /// All of `span` as elements. Errors: address or length is not a multiple of the element size.
    pub fn new(span: DeviceSpan, dtype: Dtype, argument: &'static str) -> Result<DeviceFloats> {
        let size = dtype.size() as u64;
        if !span.address().is_multiple_of(size) || !span.bytes().is_multiple_of(size) {
            let reason = format!("{:#x} is not aligned to {size} bytes ({})", span.address(), dtype.name());
            return Err(Error::invalid(argument, reason));
        }
        Ok(DeviceFloats { span, dtype })
    }

    /// Number of elements.
    pub fn len(&self) -> u64 {
        self.span.bytes() / self.dtype.size() as u64
    }

    /// True for no elements.
    pub fn is_empty(&self) -> bool {
        self.span.bytes() == 0
    }

    /// Element type.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// The bytes of the array.
    pub fn span(&self) -> DeviceSpan {
        self.span
    }

    /// The `n` elements that begin at element `from`.
    pub fn part(&self, from: u64, n: u64) -> DeviceFloats {
        let size = self.dtype.size() as u64;
        DeviceFloats { span: self.span.part(from * size, n * size), dtype: self.dtype }
    }
}

/// Parameter and moments in device memory.
#[derive(Debug, Clone, Copy)]
pub struct DeviceStates {
    /// The parameter.
    pub param: DeviceFloats,
    /// First moment.
    pub exp_avg: DeviceFloats,
    /// Second moment.
    pub exp_avg_sq: DeviceFloats,
}

impl DeviceStates {
    fn addresses(&self) -> [u64; 3] {
        [self.param, self.exp_avg, self.exp_avg_sq].map(|floats| floats.span.address())
    }

    fn shape(&self) -> [(Dtype, u64); 3] {
        [self.param, self.exp_avg, self.exp_avg_sq].map(|floats| (floats.dtype, floats.len()))
    }
}

/// The arrays of one step. All have the same number of elements.
#[derive(Debug, Clone, Copy)]
pub struct DeviceTensor {
    /// Read by the step; also written unless there is a shadow.
    pub states: DeviceStates,
    /// Receives the new states. The old states stay unchanged, so that a rollback only discards the shadow.
    pub shadow: Option<DeviceStates>,
    /// The gradient.
    pub grad: DeviceFloats,
    /// Receives the new parameter in 16 bits.
    pub param_copy: Option<DeviceFloats>,
}

impl DeviceTensor {
    fn check(&self) -> Result<()> {
        let n = self.states.param.len();
        let others = [
            ("grad", Some(self.grad)),
            ("exp_avg", Some(self.states.exp_avg)),
            ("exp_avg_sq", Some(self.states.exp_avg_sq)),
            ("param_copy", self.param_copy),
        ];
        let [exp_avg, exp_avg_sq] = [self.states.exp_avg, self.states.exp_avg_sq].map(|floats| floats.dtype);
        if exp_avg != exp_avg_sq {
            let reason = format!(
                "is {}, but exp_avg is {}; both must have the same type",
                exp_avg_sq.name(),
                exp_avg.name()
            );
            return Err(Error::invalid("exp_avg_sq", reason));
        }
        for (name, floats) in others {
            if let Some(len) = floats.map(|floats| floats.len()).filter(|len| *len != n) {
                return Err(Error::invalid(name, format!("has {len} elements, but param has {n}")));
            }
        }
        match self.shadow.is_none_or(|shadow| shadow.shape() == self.states.shape()) {
            true => Ok(()),
            false => Err(Error::invalid("shadow", "must have the same types and lengths as the states")),
        }
    }
}

/// Coefficients in the layout that the kernels read.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct Rule {
    l2: u32,
    decoupled: u32,
    grad_scale: f32,
    beta1: f32,
    one_minus_beta1: f32,
    beta2: f32,
    one_minus_beta2: f32,
    inv_sqrt_correction2: f32,
    eps: f32,
    step_size: f32,
    decay_factor: f32,
    key: [u32; 2],
}

impl From<&AdamRule> for Rule {
    fn from(rule: &AdamRule) -> Rule {
        let key = rule.stochastic.unwrap_or_default();
        let mask = |line: WeightDecay| if rule.decay == line { u32::MAX } else { 0 };
        Rule {
            l2: mask(WeightDecay::L2),
            decoupled: mask(WeightDecay::Decoupled),
            grad_scale: rule.grad_scale,
            beta1: rule.beta1,
            one_minus_beta1: rule.one_minus_beta1,
            beta2: rule.beta2,
            one_minus_beta2: rule.one_minus_beta2,
            inv_sqrt_correction2: rule.inv_sqrt_correction2,
            eps: rule.eps,
            step_size: rule.step_size,
            decay_factor: rule.decay_factor,
            key: [key as u32, (key >> 32) as u32],
        }
    }
}

/// Device memory for the sums of squares of a step: one per tile, and one per node of each level of the tree above.
#[derive(Debug)]
pub struct Sums {
    pub(super) memory: DeviceMemory,
    elements: u64,
}

impl Sums {
    /// Allocates space for up to `elements` elements.
    pub fn new(device: &Arc<Device>, elements: u64) -> Result<Sums> {
        let mut bytes = size_of::<f64>() as u64;
        let mut sums = elements.div_ceil(TILE as u64);
        while sums > 0 {
            bytes += sums * size_of::<f64>() as u64;
            sums = if sums > 1 { sums.div_ceil(BRANCHES) } else { 0 };
        }
        Ok(Sums { memory: DeviceMemory::new(device, bytes)?, elements })
    }

    /// Number of elements that the sums have space for.
    pub fn elements(&self) -> u64 {
        self.elements
    }

    fn first(&self, n: u64) -> Result<u64> {
        match n <= self.elements {
            true => Ok(self.memory.span().address()),
            false => Err(Error::invalid(
                "sums",
                format!("has room for {} elements, but {n} are needed", self.elements),
            )),
        }
    }
}

impl Kernels {
    /// Compiles the kernels; the driver caches the result for later processes.
    pub fn load(device: &Arc<Device>) -> Result<Kernels> {
        Kernels::compile(device, CAST, ADAM)
    }

    /// As [`Kernels::load`], from other PTX texts.
    pub(super) fn compile(device: &Arc<Device>, cast: &str, adam: &str) -> Result<Kernels> {
        let modules = [Module::load(device, "cast.ptx", cast)?, Module::load(device, "adam.ptx", adam)?];
        let mut functions = HashMap::new();
        for (module, text) in modules.iter().zip([cast, adam]) {
            for line in text.lines() {
                let name = line.strip_prefix(".visible .entry ").and_then(|rest| rest.strip_suffix('('));
                if let Some((name, kernel)) = name.and_then(|name| Some((name, KernelName::parse(name)?))) {
                    functions.insert(kernel, module.function(name)?);
                }
            }
        }
        let kernels = Kernels { functions, most_blocks: MOST_BLOCKS, _modules: modules };
        kernels.run_empty(device)?;
        Ok(kernels)
    }

    /// Runs each kernel once, on no elements. The driver may load the code of a kernel at its first launch only, which takes
    /// memory and waits for the device: not in the middle of a step.
    fn run_empty(&self, device: &Arc<Device>) -> Result<()> {
        let stream = Stream::new(device)?;
        // As long as the longest parameter, and 0 in every one.
        let mut zeros = [0_u64; 16];
        for function in self.functions.values() {
            let mut arguments = [zeros.as_mut_ptr().cast::<c_void>(); MOST_PARAMETERS];
            // SAFETY: no kernel has more or longer parameters; with 0 elements a kernel accesses no memory.
            unsafe { function.launch(&stream, 1, 32, &mut arguments) }?;
        }
        stream.synchronize()
    }

    /// Converts all of `from` to the type of `to`. One of them is f32, the other has 16 bits.
    pub fn cast(&self, stream: &Stream, from: DeviceFloats, to: DeviceFloats) -> Result<()> {
        if from.len() != to.len() {
            return Err(Error::invalid(
                "to",
                format!("has {} elements, but from has {}", to.len(), from.len()),
            ));
        }
        let function = self.function(KernelName::of("cast", [from.dtype, to.dtype]))?;
        let (mut source, mut target, mut n) = (from.span.address(), to.span.address(), from.len());
        let arguments = [address(&mut source), address(&mut target), address(&mut n)];
        // SAFETY: the kernel's parameters, in order; both spans have n elements.
        unsafe { self.launch(function, stream, n.div_ceil(TILE as u64), arguments) }
    }

    /// Sums the squares of `grad * scale`, bitwise equal to `optim::grad::stats`. Returns the location of the f64
    /// result, valid in order on `stream`; `None` for no elements.
    pub fn squares(
        &self,
        stream: &Stream,
        grad: DeviceFloats,
        scale: f32,
        sums: &Sums,
    ) -> Result<Option<DeviceSpan>> {
        let function = self.function(KernelName::of("squares", [grad.dtype]))?;
        let (mut source, mut n) = (grad.span.address(), grad.len());
        let (mut scale, mut tiles) = (scale, sums.first(n)?);
        let arguments = [address(&mut source), address(&mut scale), address(&mut n), address(&mut tiles)];
        // SAFETY: the kernel's parameters, in order; `grad` has n elements, and `sums` has space for their tiles.
        unsafe { self.launch(function, stream, n.div_ceil(TILE as u64), arguments) }?;
        self.tree(stream, n, sums)
    }

    /// Enqueues one Adam step. With `sums` also the sum of squares of the scaled gradient, as in [`Kernels::squares`].
    pub fn adam(
        &self,
        stream: &Stream,
        rule: &AdamRule,
        tensor: &DeviceTensor,
        sums: Option<&Sums>,
    ) -> Result<Option<DeviceSpan>> {
        let function = self.adam_function(rule, tensor)?;
        let mut n = tensor.grad.len();
        let mut rule = Rule::from(rule);
        let mut from = tensor.states.addresses();
        let mut to = tensor.shadow.unwrap_or(tensor.states).addresses();
        let mut grad = tensor.grad.span.address();
        let mut copy = tensor.param_copy.map_or(0, |copy| copy.span.address());
        let mut tiles = sums.map_or(Ok(0), |sums| sums.first(n))?;
        let arguments = [
            address(&mut rule),
            address(&mut from),
            address(&mut to),
            address(&mut grad),
            address(&mut copy),
            address(&mut n),
            address(&mut tiles),
        ];
        // SAFETY: the kernel's parameters, in order; all spans have n elements, and `sums` has space for their tiles.
        unsafe { self.launch(function, stream, n.div_ceil(TILE as u64), arguments) }?;
        sums.map_or(Ok(None), |sums| self.tree(stream, n, sums))
    }

    /// Returns Ok if [`Kernels::adam`] would accept this tensor, and its error otherwise.
    pub fn accepts(&self, rule: &AdamRule, tensor: &DeviceTensor) -> Result<()> {
        self.adam_function(rule, tensor).map(drop)
    }

    fn adam_function(&self, rule: &AdamRule, tensor: &DeviceTensor) -> Result<Function> {
        tensor.check()?;
        let kind = if rule.stochastic.is_some() { "adam_stochastic" } else { "adam" };
        let DeviceStates { param, exp_avg, .. } = tensor.states;
        let mut kernel = KernelName::of(kind, [param.dtype, exp_avg.dtype, tensor.grad.dtype]);
        kernel.types[3] = tensor.param_copy.map(|copy| copy.dtype);
        self.function(kernel)
    }

    /// Adds the sums of the tiles of `n` elements, level by level.
    pub(super) fn tree(&self, stream: &Stream, n: u64, sums: &Sums) -> Result<Option<DeviceSpan>> {
        let function = self.function(KernelName::of("tree", []))?;
        let (mut count, mut from) = (n.div_ceil(TILE as u64), 0);
        if count == 0 {
            return Ok(None);
        }
        let word = size_of::<f64>() as u64;
        while count > 1 {
            let to = from + count * word;
            let (mut source, mut target) =
                (sums.memory.span().address() + from, sums.memory.span().address() + to);
            let groups = count.div_ceil(BRANCHES);
            let arguments = [address(&mut source), address(&mut count), address(&mut target)];
            // SAFETY: the kernel's parameters, in order; each level lies behind its input, as counted in `Sums::new`.
            unsafe { self.launch(function, stream, groups, arguments) }?;
            (count, from) = (groups, to);
        }
        Ok(Some(sums.memory.span().part(from, word)))
    }

    fn function(&self, kernel: KernelName) -> Result<Function> {
        let found = self.functions.get(&kernel).copied();
        found.ok_or_else(|| {
            Error::Unsupported(format!("unsupported combination of types: there is no GPU kernel {kernel}"))
        })
    }

    /// Launches a kernel with one warp per unit of `work`, up to `most_blocks` blocks. A no-op without work.
    ///
    /// # Safety
    /// As [`Function::launch`].
    unsafe fn launch<const N: usize>(
        &self,
        function: Function,
        stream: &Stream,
        work: u64,
        mut arguments: [*mut c_void; N],
    ) -> Result<()> {
        if work == 0 {
            return Ok(());
        }
        let blocks = work.div_ceil(WARPS).min(self.most_blocks.into()) as u32;
        // SAFETY: the caller's promise; `self` keeps the module loaded.
        unsafe { function.launch(stream, blocks, THREADS, &mut arguments) }
    }
}

fn address<T>(value: &mut T) -> *mut c_void {
    (&raw mut *value).cast()
}
