//! The backend without a device: its lanes are threads, its "device memory" is plain memory, its kernels are the CPU's.
//! The CPU's kernels give the same bits as the GPU's.
//!
//! Every array is borrowed through [`SharedSlice`], which checks readers and writers at run time. Missing order in the
//! schedule is therefore an error and not a wrong number.
#![forbid(unsafe_code)]

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use super::arrays;
use super::lanes::Lanes;
use super::{Backend, Model, Timing};
use crate::dtype::{Dtype, Floats, FloatsMut, bf16, f16};
use crate::error::{Error, Result};
use crate::kernel::AdamRule;
use crate::sys::deferred::Deferred;
use crate::sys::shared_slice::SharedSlice;
use crate::sys::sync::Lock;
use spillway_planner::interleave::schedule::{Command, Lane, LaneEvent, PAIR, ParamRange, StateArray, Work};
use spillway_planner::interleave::{GpuGrads, Shape, TransferDtype};

/// The arrays of one subgroup.
#[derive(Debug)]
pub struct Subgroup {
    /// First moment, second moment, parameter: f32, in host memory.
    pub states: [Arc<SharedSlice>; 3],
    /// The gradient that the framework produces.
    pub grad: Arc<SharedSlice>,
    /// The 16-bit parameter that the model uses; `None` if the model uses the f32 parameter.
    pub copy: Option<Arc<SharedSlice>>,
}

/// Lanes that run on threads of this backend.
const THREADS: [Lane; 6] = [Lane::Cast, Lane::D2h, Lane::H2d, Lane::Gpu, Lane::Resident, Lane::Upload];

/// Maximum number of timings kept for a caller that never reads them.
const MAX_TIMINGS: usize = 1 << 16;

/// A simulated device, made of threads.
pub struct Host {
    // Dropped first, since its threads use the memory.
    lanes: Lanes,
    memory: Arc<Memory>,
    rules: Lock<Arc<[AdamRule]>>,
    log: Arc<Lock<Vec<Timing>>>,
    opened: Instant,
}

impl Host {
    /// A simulated device for these subgroups. Errors: an array's length or type differs from `shape`.
    pub fn new(shape: &Shape, subgroups: Vec<Subgroup>) -> Result<Host> {
        shape.check()?;
        Ok(Host {
            lanes: Lanes::start(&THREADS)?,
            memory: Arc::new(Memory::new(shape, subgroups)?),
            rules: Lock::new(Arc::new([])),
            log: Arc::default(),
            opened: Instant::now(),
        })
    }

    fn run(&self, lane: Lane, work: Work) -> Result<()> {
        let rules = Arc::clone(&self.rules.lock());
        let (memory, log, opened) = (Arc::clone(&self.memory), Arc::clone(&self.log), self.opened);
        self.lanes.run(lane, move || {
            let start = opened.elapsed().as_secs_f64();
            memory.execute(work, &rules)?;
            let end = opened.elapsed().as_secs_f64();
            let mut log = log.lock();
            if log.len() < MAX_TIMINGS {
                log.push(Timing { lane, work, start, end });
            }
            Ok(())
        })
    }
}

impl Backend for Host {
    fn play(&self, command: Command, _: Model) -> Result<()> {
        match command {
            Command::Wait(lane, event, _) => self.lanes.wait(lane, event),
            Command::Record(lane, event) => self.lanes.record(lane, event),
            Command::Run(lane, work) => self.run(lane, work),
        }
    }

    fn begin(&self, rules: Arc<[AdamRule]>) -> Result<()> {
        *self.rules.lock() = rules;
        Ok(())
    }

    fn reached(&self, event: LaneEvent) -> Result<bool> {
        self.lanes.reached(event)
    }

    fn timings(&self) -> Vec<Timing> {
        std::mem::take(&mut self.log.lock())
    }
}

/// An array that is allocated at its first use.
#[derive(Debug)]
struct DeferredArray {
    dtype: Dtype,
    len: usize,
    array: Deferred<SharedSlice>,
}

impl DeferredArray {
    fn new(dtype: Dtype, len: u64) -> DeferredArray {
        DeferredArray { dtype, len: len as usize, array: Deferred::new() }
    }

    fn get(&self) -> Result<Arc<SharedSlice>> {
        self.array.get(|| SharedSlice::zeroed(self.dtype, self.len))
    }
}

struct HostSlot {
    states: [DeferredArray; 3],
    grad: DeferredArray,
}

/// All arrays that lanes read and write.
struct Memory {
    shape: Shape,
    subgroups: Vec<Subgroup>,
    host_grads: Vec<DeferredArray>,
    residents: Vec<[DeferredArray; 3]>,
    slots: Vec<HostSlot>,
    chunks: [DeferredArray; PAIR],
    stages: [DeferredArray; PAIR],
}

impl Memory {
    fn new(shape: &Shape, subgroups: Vec<Subgroup>) -> Result<Memory> {
        let grad = check(shape, &subgroups)?;
        let copy = subgroups
            .iter()
            .find_map(|subgroup| subgroup.copy.as_ref())
            .map_or(Dtype::Bf16, |copy| copy.dtype());
        let sent = if shape.transfer_dtype == TransferDtype::F32 { Dtype::F32 } else { grad };
        let deferred = |dtype, len| DeferredArray::new(dtype, len);
        let states = |len| [0, 1, 2].map(|_| deferred(Dtype::F32, len));
        let largest = shape.largest();
        let slot = |_| HostSlot { states: states(largest), grad: deferred(sent, largest) };
        Ok(Memory {
            host_grads: shape.sizes.iter().map(|len| deferred(sent, *len)).collect(),
            residents: shape.sizes.iter().map(|len| states(*len)).collect(),
            slots: (0..shape.slots).map(slot).collect(),
            chunks: [0; PAIR].map(|_| deferred(Dtype::F32, largest.min(shape.chunk))),
            stages: [0; PAIR].map(|_| deferred(copy, largest)),
            shape: shape.clone(),
            subgroups,
        })
    }

    fn execute(&self, work: Work, rules: &[AdamRule]) -> Result<()> {
        match work {
            Work::Cast { subgroup, part, buffer } => {
                copy(&self.subgroups[subgroup].grad, range(part), &*self.chunks[buffer].get()?, first(part))
            }
            Work::GradOut { subgroup, part, buffer: Some(buffer) } => copy(
                &*self.chunks[buffer].get()?,
                first(part),
                &*self.host_grads[subgroup].get()?,
                range(part),
            ),
            Work::GradOut { subgroup, part, buffer: None } => {
                let home = self.host_grads[subgroup].get()?;
                copy(&self.subgroups[subgroup].grad, range(part), &home, range(part))
            }
            Work::Prefetch { subgroup, slot, state, part } => {
                let slot = self.slots[slot].states[state as usize].get()?;
                copy(&self.subgroups[subgroup].states[state as usize], range(part), &slot, range(part))
            }
            Work::Flush { subgroup, slot, state, part } => {
                let slot = self.slots[slot].states[state as usize].get()?;
                copy(&slot, range(part), &self.subgroups[subgroup].states[state as usize], range(part))
            }
            Work::FetchGrad { subgroup, slot, part } => self.on_host(subgroup, |from| {
                copy(from, range(part), &*self.slots[slot].grad.get()?, range(part))
            }),
            Work::Admit { subgroup, state, part } => {
                let home = &self.subgroups[subgroup].states[state as usize];
                copy(home, range(part), &*self.residents[subgroup][state as usize].get()?, range(part))
            }
            Work::Evict { subgroup, state, part } => self.evict(subgroup, state, part),
            Work::GpuStep { subgroup, slot } => self.gpu_step(subgroup, slot, rules),
            Work::ResidentStep { subgroup } => {
                let [m, v, p] = &self.residents[subgroup];
                let own = &self.subgroups[subgroup];
                let states = [&*m.get()?, &*v.get()?, &*p.get()?];
                self.step(subgroup, states, &own.grad, own.copy.as_deref(), rules)
            }
            Work::CpuStep { subgroup, stage } => {
                let own = &self.subgroups[subgroup];
                let stage = own.copy.as_ref().map(|_| self.stages[stage].get()).transpose()?;
                self.on_host(subgroup, |grad| {
                    self.step(
                        subgroup,
                        own.states.each_ref().map(|state| &**state),
                        grad,
                        stage.as_deref(),
                        rules,
                    )
                })
            }
            Work::Upload { subgroup, stage } => match &self.subgroups[subgroup].copy {
                Some(to) => copy(&*self.stages[stage].get()?, 0..to.len(), to, 0..to.len()),
                None => Ok(()),
            },
        }
    }

    /// Calls `use_grad` with the gradient in host memory.
    fn on_host(&self, subgroup: usize, use_grad: impl FnOnce(&SharedSlice) -> Result<()>) -> Result<()> {
        match self.shape.transfer_dtype {
            TransferDtype::Delivered => use_grad(&self.subgroups[subgroup].grad),
            TransferDtype::F32 | TransferDtype::Native => use_grad(&*self.host_grads[subgroup].get()?),
        }
    }

    fn gpu_step(&self, subgroup: usize, slot: usize, rules: &[AdamRule]) -> Result<()> {
        let own = &self.subgroups[subgroup];
        let HostSlot { states: [m, v, p], grad } = &self.slots[slot];
        let states = [&*m.get()?, &*v.get()?, &*p.get()?];
        match self.shape.gpu_grads {
            GpuGrads::Kept => self.step(subgroup, states, &own.grad, own.copy.as_deref(), rules),
            GpuGrads::Fetched => self.step(subgroup, states, &*grad.get()?, own.copy.as_deref(), rules),
        }
    }

    fn evict(&self, subgroup: usize, state: StateArray, part: ParamRange) -> Result<()> {
        let resident = &self.residents[subgroup][state as usize];
        copy(&*resident.get()?, range(part), &self.subgroups[subgroup].states[state as usize], range(part))?;
        if part.from + part.len == self.shape.sizes[subgroup] {
            drop(resident.array.take());
        }
        Ok(())
    }

    /// One Adam update of a subgroup. The arrays may be longer than the subgroup.
    fn step(
        &self,
        subgroup: usize,
        states: [&SharedSlice; 3],
        grad: &SharedSlice,
        copy: Option<&SharedSlice>,
        rules: &[AdamRule],
    ) -> Result<()> {
        let len = self.shape.sizes[subgroup] as usize;
        arrays::step(arrays::rule_of(rules, subgroup)?, len, states, grad, copy)
    }
}

/// Checks that the arrays match `shape`, and returns the element type of all gradients.
fn check(shape: &Shape, subgroups: &[Subgroup]) -> Result<Dtype> {
    let grad = subgroups.first().map_or(Dtype::F32, |subgroup| subgroup.grad.dtype());
    let copy = subgroups.first().and_then(|subgroup| subgroup.copy.as_deref()).map(SharedSlice::dtype);
    arrays::check(shape, subgroups, |subgroup, size| {
        let long = |array: &SharedSlice| array.len() as u64 == size;
        let fits = |array: &SharedSlice, dtype| array.dtype() == dtype && long(array);
        let own = subgroup.copy.as_deref();
        if !subgroup.states.iter().all(|state| fits(state, Dtype::F32)) {
            return Some("states");
        }
        if !fits(&subgroup.grad, grad) {
            return Some("grad");
        }
        (own.map(SharedSlice::dtype) != copy || !own.is_none_or(long)).then_some("copy")
    })?;
    Ok(grad)
}

fn range(part: ParamRange) -> Range<usize> {
    part.from as usize..(part.from + part.len) as usize
}

fn first(part: ParamRange) -> Range<usize> {
    0..part.len as usize
}

/// Copies a range of one array over a range of another; converts 16-bit elements to f32 if the types differ.
fn copy(from: &SharedSlice, source: Range<usize>, to: &SharedSlice, target: Range<usize>) -> Result<()> {
    let (from, mut to) = (from.read()?, to.write()?);
    match (from.floats(), to.floats()) {
        (Floats::F32(from), FloatsMut::F32(to)) => to[target].copy_from_slice(&from[source]),
        (Floats::F16(from), FloatsMut::F16(to)) => to[target].copy_from_slice(&from[source]),
        (Floats::Bf16(from), FloatsMut::Bf16(to)) => to[target].copy_from_slice(&from[source]),
        (Floats::F16(from), FloatsMut::F32(to)) => widen(&from[source], &mut to[target], f16::to_f32),
        (Floats::Bf16(from), FloatsMut::F32(to)) => widen(&from[source], &mut to[target], bf16::to_f32),
        _ => return Err(Error::Unsupported("a copy to a narrower type is not supported".into())),
    }
    Ok(())
}

fn widen<T: Copy>(from: &[T], to: &mut [f32], to_f32: fn(T) -> f32) {
    from.iter().zip(to).for_each(|(from, to)| *to = to_f32(*from));
}
