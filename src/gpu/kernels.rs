//! The kernels of kernels/*.cu, bitwise equal to the CPU's kernels, and the layouts that they read.
//!
//! Every launch is asynchronous: the caller keeps the memory alive until an event recorded behind the launch is done.

use std::collections::HashMap;
use std::ffi::c_void;
use std::fmt;
use std::sync::Arc;

use super::device::Device;
use super::memory::DeviceSpan;
use super::module::{Function, Module};
use super::stream::Stream;
use crate::dtype::Dtype;
use crate::error::{Error, Result};
use crate::kernel::squares::TILE;
use crate::kernel::{AdamRule, BLOCK, WeightDecay};

pub(super) const CAST: &str = include_str!("../../kernels/cast.ptx");
pub(super) const ADAM: &str = include_str!("../../kernels/adam.ptx");
pub(super) const NARROW: &str = include_str!("../../kernels/narrow.ptx");
const THREADS: u32 = 256;
const WARPS: u64 = THREADS as u64 / 32;
/// The launch limit. A launch has as many blocks as there is work, so that the device balances them dynamically.
const MOST_BLOCKS: u32 = i32::MAX as u32;
/// Most parameters of a kernel.
const MOST_PARAMETERS: usize = 5;
/// Tiles whose sums one warp of `spw_fold` adds to one: a power of two.
pub(super) const SEGMENT: u64 = 256;
/// Tiles that share an entry of [`Batch::starts`].
pub(super) const SHARE: u64 = 8;

/// The kernels, compiled for one device.
#[derive(Debug)]
pub struct Kernels {
    functions: HashMap<KernelName, Function>,
    /// Smaller in tests, so that each warp processes many tiles.
    pub(super) most_blocks: u32,
    _modules: [Module; 3],
}

/// A kernel as a launch names it: what it does, and the types of its arrays. Text is made of it in messages only.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct KernelName {
    kind: &'static str,
    types: [Option<Dtype>; 4],
}

impl KernelName {
    /// The kinds. A name that begins with another name stands before that one.
    const KINDS: [&'static str; 8] =
        ["adam_stochastic", "adam", "cast", "squares", "fold", "split_coded", "split", "coded"];

    fn of<const N: usize>(kind: &'static str, types: [Dtype; N]) -> KernelName {
        KernelName { kind, types: std::array::from_fn(|at| types.get(at).copied()) }
    }

    /// The step of a tensor.
    pub(super) fn adam(rule: &AdamRule, tensor: &DeviceTensor) -> KernelName {
        let DeviceStates { param, exp_avg, .. } = tensor.states;
        let (state, grad) = (exp_avg.dtype, tensor.grad.dtype);
        let (mut kernel, copies) = match (tensor.narrow.low, tensor.narrow.codes) {
            (Some(_), Some(_)) => return KernelName::of("split_coded", [grad]),
            (Some(_), None) => return KernelName::of("split", [state, grad]),
            (None, Some(_)) => (KernelName::of("coded", [grad]), 1),
            (None, None) if rule.stochastic.is_some() => {
                (KernelName::of("adam_stochastic", [param.dtype, state, grad]), 3)
            }
            (None, None) => (KernelName::of("adam", [param.dtype, state, grad]), 3),
        };
        kernel.types[copies] = tensor.param_copy.map(|copy| copy.dtype);
        kernel
    }

    /// The sums of squares of a gradient.
    pub(super) fn squares(grad: Dtype) -> KernelName {
        KernelName::of("squares", [grad])
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
    /// No elements.
    pub const EMPTY: DeviceFloats = DeviceFloats { span: DeviceSpan::EMPTY, dtype: Dtype::F32 };

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
    /// The arrays of narrow states.
    pub narrow: DeviceNarrow,
}

/// What a split master and 8-bit moments have beside the arrays of other states. Such states have no shadow.
#[derive(Debug, Clone, Copy, Default)]
pub struct DeviceNarrow {
    /// The low bits of a split master, whose upper bits are the bf16 parameter.
    pub low: Option<DeviceLow>,
    /// 8-bit moments. The moments of the tensor's [`DeviceStates`] are empty then.
    pub codes: Option<[DeviceCodes; 2]>,
}

/// An 8-bit moment.
#[derive(Debug, Clone, Copy)]
pub struct DeviceCodes {
    /// A byte for each element.
    pub codes: DeviceSpan,
    /// A bf16 for each block of codes.
    pub scales: DeviceFloats,
}

/// The low bits of a split master.
#[derive(Debug, Clone, Copy)]
pub struct DeviceLow {
    /// 16 bits for each element.
    pub bits: DeviceFloats,
    /// A word for each tile, by which a step sees what other code has written; `None`: the low bits count.
    pub sums: Option<DeviceSpan>,
}

impl DeviceNarrow {
    /// Refuses arrays that do not belong to a parameter of `n` elements.
    fn check(&self, n: u64) -> Result<()> {
        let fits = |name, elements: u64, wanted: u64| match elements == wanted {
            true => Ok(()),
            false => Err(Error::invalid(name, format!("has {elements} elements, but must have {wanted}"))),
        };
        if let Some(low) = &self.low {
            fits("param_low", low.bits.len(), n)?;
            if let Some(sums) = low.sums {
                fits("low_sums", sums.bytes() / SUM_BYTES, n.div_ceil(TILE as u64))?;
            }
        }
        for (moment, names) in self.codes.iter().flatten().zip(CODES) {
            fits(names[0], moment.codes.bytes(), n)?;
            fits(names[1], moment.scales.len(), n.div_ceil(BLOCK as u64))?;
        }
        Ok(())
    }
}

/// The arguments of each 8-bit moment.
const CODES: [[&str; 2]; 2] = [["exp_avg", "exp_avg_scale"], ["exp_avg_sq", "exp_avg_sq_scale"]];
/// Bytes of the sum of a tile.
const SUM_BYTES: u64 = size_of::<u64>() as u64;

impl DeviceTensor {
    /// A tensor without shadow and narrow states.
    pub fn new(states: DeviceStates, grad: DeviceFloats, param_copy: Option<DeviceFloats>) -> DeviceTensor {
        DeviceTensor { states, shadow: None, grad, param_copy, narrow: DeviceNarrow::default() }
    }

    /// Refuses arrays that do not belong together.
    pub(super) fn check(&self) -> Result<()> {
        let n = self.states.param.len();
        let is_coded = self.narrow.codes.is_some();
        let floats = |moment| (!is_coded).then_some(moment);
        let others = [
            ("grad", Some(self.grad)),
            ("exp_avg", floats(self.states.exp_avg)),
            ("exp_avg_sq", floats(self.states.exp_avg_sq)),
            ("param_copy", self.param_copy),
        ];
        self.narrow.check(n)?;
        self.check_narrow()?;
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

    /// Refuses narrow states of other types than the kernels have.
    fn check_narrow(&self) -> Result<()> {
        let DeviceNarrow { low, codes } = &self.narrow;
        if self.shadow.is_some() && (low.is_some() || codes.is_some()) {
            return Err(Error::invalid("shadow", "must be NULL: narrow states have no shadow"));
        }
        let param = self.states.param.dtype;
        if low.is_some() && (param != Dtype::Bf16 || self.param_copy.is_some()) {
            return Err(Error::invalid("param_low", "needs a bf16 param and no param_copy"));
        }
        if codes.is_some() && low.is_none() && param != Dtype::F32 {
            let reason = format!(
                "8-bit moments on a GPU need an f32 param, or a bf16 param with param_low; this param is {}",
                param.name()
            );
            return Err(Error::Unsupported(reason));
        }
        Ok(())
    }

    /// The addresses that the step reads and writes, in the order of a [`Row`].
    fn addresses(&self) -> ([u64; 3], [u64; 3]) {
        let DeviceNarrow { low, codes } = &self.narrow;
        let mut from = self.states.addresses();
        let mut to = self.shadow.unwrap_or(self.states).addresses();
        if let Some(low) = low {
            to[0] = low.bits.span.address();
        }
        for (at, moment) in codes.iter().flatten().enumerate() {
            from[at + 1] = moment.codes.address();
            to[at + 1] = moment.scales.span.address();
        }
        (from, to)
    }
}

/// Coefficients in the layout that the kernels read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(C)]
pub(super) struct Rule(pub(super) [u32; 14]);

impl From<&AdamRule> for Rule {
    fn from(rule: &AdamRule) -> Rule {
        let key = rule.stochastic.unwrap_or_default();
        let mask = |line: WeightDecay| if rule.decay == line { u32::MAX } else { 0 };
        Rule([
            mask(WeightDecay::L2),
            mask(WeightDecay::Decoupled),
            rule.grad_scale.to_bits(),
            rule.beta1.to_bits(),
            rule.one_minus_beta1.to_bits(),
            rule.beta2.to_bits(),
            rule.one_minus_beta2.to_bits(),
            rule.inv_sqrt_correction2.to_bits(),
            rule.eps.to_bits(),
            rule.step_size.to_bits(),
            rule.decay_factor.to_bits(),
            key as u32,
            (key >> 32) as u32,
            rule.stochastic.is_some().into(),
        ])
    }
}

/// A tensor in the layout that the kernels read.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub(super) struct Row {
    from: [u64; 3],
    /// Of narrow states: the low bits, and the scales of both moments.
    to: [u64; 3],
    grad: u64,
    /// 0 without a copy. Of a split master: the sums of its tiles, 0 without them.
    copy: u64,
    elements: u64,
    /// Tiles of all rows before this one.
    pub(super) first: u64,
    rule: u64,
}

impl Row {
    /// Words of a row.
    pub(super) const WORDS: usize = 11;

    /// The row of `tensor`, which has passed its check. `rule`: the number of its coefficients.
    pub(super) fn new(tensor: &DeviceTensor, first: u64, rule: u64) -> Row {
        let (from, to) = tensor.addresses();
        let sums = tensor.narrow.low.and_then(|low| low.sums).map_or(0, |sums| sums.address());
        Row {
            from,
            to,
            grad: tensor.grad.span.address(),
            copy: tensor.param_copy.map_or(sums, |copy| copy.span.address()),
            elements: tensor.grad.len(),
            first,
            rule,
        }
    }

    /// The row behind the last one.
    pub(super) fn end(first: u64) -> Row {
        Row { first, ..Row::default() }
    }

    /// Address of the parameter that the step writes.
    pub(super) fn target(&self) -> u64 {
        self.to[0]
    }

    /// Number of tiles.
    pub(super) fn tiles(&self) -> u64 {
        self.elements.div_ceil(TILE as u64)
    }

    /// The row as it lies in memory.
    pub(super) fn words(&self) -> [u64; Row::WORDS] {
        let ([a, b, c], [d, e, f]) = (self.from, self.to);
        [a, b, c, d, e, f, self.grad, self.copy, self.elements, self.first, self.rule]
    }
}

/// The parameter of a step: its tensors, of one kernel. Addresses are of device memory.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(super) struct Batch {
    /// The only row, if `rows` is 0.
    pub(super) row: Row,
    /// All rows of the table, and one more for the end of the last one.
    pub(super) rows: u64,
    /// For every [`SHARE`] tiles, the row of the first one, as u32.
    pub(super) starts: u64,
    /// The tiles of this launch.
    pub(super) begin: u64,
    /// The tile after them.
    pub(super) end: u64,
    /// Receives one sum of squares per tile, or 0.
    pub(super) tiles: u64,
    /// The coefficients of all rows, or 0 if all have `rule`.
    pub(super) rules: u64,
    /// The coefficients.
    pub(super) rule: Rule,
}

impl Batch {
    /// A batch of one row, without sums.
    pub(super) fn of_row(row: Row, rule: Rule) -> Batch {
        Batch { row, rows: 0, starts: 0, begin: 0, end: row.tiles(), tiles: 0, rules: 0, rule }
    }
}

const _: () = assert!(size_of::<Row>() == Row::WORDS * 8 && size_of::<Batch>() == 192);

/// The parameters of a fold.
#[derive(Debug, Clone, Copy)]
pub(super) struct Fold {
    /// First tile and number of tiles of each segment. 0: the segments are those of one row.
    pub(super) segments: u64,
    /// Number of tiles.
    pub(super) tiles: u64,
    /// Number of segments.
    pub(super) count: u64,
    /// One sum per tile.
    pub(super) sums: u64,
    /// Receives one sum per segment.
    pub(super) out: u64,
}

impl Kernels {
    /// Compiles the kernels; the driver caches the result for later processes.
    pub fn load(device: &Arc<Device>) -> Result<Kernels> {
        Kernels::compile(device, [CAST, ADAM, NARROW])
    }

    /// As [`Kernels::load`], from other PTX texts.
    pub(super) fn compile(device: &Arc<Device>, texts: [&str; 3]) -> Result<Kernels> {
        let [cast, adam, narrow] = texts;
        let modules = [
            Module::load(device, "cast.ptx", cast)?,
            Module::load(device, "adam.ptx", adam)?,
            Module::load(device, "narrow.ptx", narrow)?,
        ];
        let mut functions = HashMap::new();
        for (module, text) in modules.iter().zip(texts) {
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
        let mut zeros = [0_u64; size_of::<Batch>() / size_of::<u64>()];
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

    /// Enqueues one Adam step of one tensor.
    pub fn adam(&self, stream: &Stream, rule: &AdamRule, tensor: &DeviceTensor) -> Result<()> {
        tensor.check()?;
        let function = self.function(KernelName::adam(rule, tensor))?;
        let row = Row::new(tensor, 0, 0);
        // SAFETY: the arrays of the row have its number of elements.
        unsafe { self.run(function, stream, Batch::of_row(row, rule.into())) }
    }

    /// Enqueues a step or its sums of squares.
    ///
    /// # Safety
    /// `function` is such a kernel, for the types of the rows of the batch. The arrays of each row have its number of
    /// elements. The table of the batch is valid in order on `stream`.
    pub(super) unsafe fn run(&self, function: Function, stream: &Stream, mut batch: Batch) -> Result<()> {
        let work = batch.end - batch.begin;
        // SAFETY: the kernel's parameter, and the caller's promise.
        unsafe { self.launch(function, stream, work, [address(&mut batch)]) }
    }

    /// Adds the sums of the tiles of each segment.
    ///
    /// # Safety
    /// Every address of `fold` is 0, or memory that is large enough and valid in order on `stream`.
    pub(super) unsafe fn fold(&self, stream: &Stream, fold: Fold) -> Result<()> {
        let function = self.function(KernelName::of("fold", []))?;
        let Fold { mut segments, mut tiles, mut count, mut sums, mut out } = fold;
        let arguments = [
            address(&mut segments),
            address(&mut tiles),
            address(&mut count),
            address(&mut sums),
            address(&mut out),
        ];
        // SAFETY: the kernel's parameters, in order, and the caller's promise.
        unsafe { self.launch(function, stream, count, arguments) }
    }

    /// The kernel of this name. Errors: there is none for these types.
    pub(super) fn function(&self, kernel: KernelName) -> Result<Function> {
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
