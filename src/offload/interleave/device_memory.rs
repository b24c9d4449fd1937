//! The arrays of the interleaved update in device and host memory, and what each piece of work does to them.
#![forbid(unsafe_code)]

use std::sync::Arc;

use super::arrays;
use crate::dtype::Dtype;
use crate::error::{Error, GpuKind, Result};
use crate::gpu::device::Device;
use crate::gpu::kernels::{DeviceFloats, DeviceStates, DeviceTensor, Kernels};
use crate::gpu::memory::{DeviceMemory, HostSpan, Registry};
use crate::gpu::stream::Stream;
use crate::kernel::AdamRule;
use crate::log::{self, Level};
use crate::pool::buffer::Buffer;
use crate::sys::deferred::Deferred;
use crate::sys::shared_slice::SharedSlice;
use crate::sys::sync::Lock;
use spillway_planner::interleave::memory::RESERVE;
use spillway_planner::interleave::placements::{Placement, Plan};
use spillway_planner::interleave::schedule::{PAIR, ParamRange, StateArray, Work};
use spillway_planner::interleave::{GpuGrads, Shape, TransferDtype};

/// Bytes of an f32.
const WORD: u64 = 4;

/// An array in pinned host memory, used by copies and by the CPU.
#[derive(Debug)]
pub struct Pinned {
    pub(super) span: HostSpan,
    floats: SharedSlice,
    /// The memory, unless the caller owns it. The registration in `span` keeps it mapped, too.
    _buffer: Option<Buffer>,
}

impl Pinned {
    /// Wraps the caller's pinned memory. Errors: the memory is not aligned to `dtype`.
    pub fn from_span(span: HostSpan, dtype: Dtype, argument: &'static str) -> Result<Pinned> {
        let floats = SharedSlice::from_span(span.span(), dtype)
            .ok_or_else(|| Error::invalid(argument, format!("is not aligned to {}", dtype.name())))?;
        Ok(Pinned { span, floats, _buffer: None })
    }

    pub(super) fn new(registry: &Registry, dtype: Dtype, len: u64) -> Result<Pinned> {
        let bytes = (len * dtype.size() as u64).max(1) as usize;
        let buffer = Buffer::open(bytes, registry.device().backing())?;
        let memory = buffer.transfer(0, len as usize * dtype.size());
        let pinned = Pinned::from_span(registry.host(memory, "buffer")?, dtype, "buffer")?;
        Ok(Pinned { _buffer: Some(buffer), ..pinned })
    }

    fn part(&self, part: ParamRange) -> HostSpan {
        let size = self.floats.dtype().size();
        self.span.part(part.from as usize * size, part.len as usize * size)
    }
}

/// Where the framework leaves a gradient.
#[derive(Debug)]
pub enum Grad {
    /// In the framework's device memory.
    Device(DeviceFloats),
    /// In pinned host memory, transferred by the caller, and in device memory for updates on the GPU.
    Delivered {
        /// Read by updates on the GPU.
        device: DeviceFloats,
        /// Read by updates on the CPU.
        host: Pinned,
    },
    /// In pinned host memory only. The GPU fetches it from there; subgroups cannot be resident.
    Home(Pinned),
}

/// The arrays of one subgroup.
#[derive(Debug)]
pub struct Subgroup {
    /// First moment, second moment, parameter: f32.
    pub states: [Pinned; 3],
    /// The gradient.
    pub grad: Grad,
    /// The 16-bit parameter that the model uses, in device memory.
    pub copy: Option<DeviceFloats>,
}

impl Subgroup {
    fn on_device(&self) -> Result<DeviceFloats> {
        match &self.grad {
            Grad::Device(device) | Grad::Delivered { device, .. } => Ok(*device),
            Grad::Home(_) => Err(Error::invalid("grad", "is not in device memory")),
        }
    }

    fn grad_dtype(&self) -> Dtype {
        match &self.grad {
            Grad::Device(device) | Grad::Delivered { device, .. } => device.dtype(),
            Grad::Home(host) => host.floats.dtype(),
        }
    }
}

/// Device memory for the three states of a subgroup, one after the other, and optionally for a gradient.
struct DeviceSlot {
    memory: DeviceMemory,
    stride: u64,
    grad: Dtype,
}

impl DeviceSlot {
    fn new(device: &Arc<Device>, len: u64, grad: Option<Dtype>) -> Result<DeviceSlot> {
        // Kernels require an alignment of 16 bytes; the driver aligns the start.
        let stride = (len * WORD).next_multiple_of(256);
        let extra = grad.map_or(0, |dtype| len * dtype.size() as u64);
        let memory = DeviceMemory::new(device, 3 * stride + extra)?;
        Ok(DeviceSlot { memory, stride, grad: grad.unwrap_or(Dtype::F32) })
    }

    fn state(&self, state: StateArray, part: ParamRange) -> Result<DeviceFloats> {
        let from = state as u64 * self.stride + part.from * WORD;
        DeviceFloats::new(self.memory.span().part(from, part.len * WORD), Dtype::F32, "slot")
    }

    fn grad(&self, part: ParamRange) -> Result<DeviceFloats> {
        let size = self.grad.size() as u64;
        let span = self.memory.span().part(3 * self.stride + part.from * size, part.len * size);
        DeviceFloats::new(span, self.grad, "slot")
    }

    fn states(&self, len: u64) -> Result<DeviceStates> {
        let whole = ParamRange { from: 0, len };
        Ok(DeviceStates {
            exp_avg: self.state(StateArray::ExpAvg, whole)?,
            exp_avg_sq: self.state(StateArray::ExpAvgSq, whole)?,
            param: self.state(StateArray::Param, whole)?,
        })
    }
}

/// All arrays that lanes read and write.
pub struct Memory {
    device: Arc<Device>,
    kernels: Arc<Kernels>,
    registry: Arc<Registry>,
    shape: Shape,
    subgroups: Vec<Subgroup>,
    /// Element type of gradients in host memory that Spillway allocated.
    sent: Dtype,
    host_grads: Vec<Deferred<Pinned>>,
    stages: [Deferred<Pinned>; PAIR],
    slots: Vec<Deferred<DeviceSlot>>,
    chunks: [Deferred<DeviceMemory>; PAIR],
    residents: Vec<Deferred<DeviceSlot>>,
    /// Memory of former residents that copies to the host may still read. Freeing it earlier would make the driver wait
    /// for all streams. The lock is held while the driver frees: a change of the plan needs the memory, and nothing else
    /// takes the lock but another free.
    evicted: Lock<Vec<(usize, Arc<DeviceSlot>)>>,
}

impl Memory {
    /// Checks that all arrays match `shape`. Internal buffers are allocated at their first use.
    pub fn new(
        device: &Arc<Device>,
        kernels: &Arc<Kernels>,
        registry: &Arc<Registry>,
        shape: &Shape,
        subgroups: Vec<Subgroup>,
    ) -> Result<Memory> {
        let grad = check(shape, &subgroups)?;
        if shape.transfer_dtype == TransferDtype::F32 && grad == Dtype::F32 {
            return Err(Error::invalid(
                "transfer_dtype",
                "is f32, but the gradients are f32 already; use native",
            ));
        }
        let deferred = |count: usize| (0..count).map(|_| Deferred::new()).collect();
        Ok(Memory {
            device: Arc::clone(device),
            kernels: Arc::clone(kernels),
            registry: Arc::clone(registry),
            sent: if shape.transfer_dtype == TransferDtype::F32 { Dtype::F32 } else { grad },
            host_grads: (0..shape.count()).map(|_| Deferred::new()).collect(),
            stages: [(); PAIR].map(|()| Deferred::new()),
            slots: deferred(shape.slots),
            chunks: [(); PAIR].map(|()| Deferred::new()),
            residents: deferred(shape.count()),
            evicted: Lock::default(),
            shape: shape.clone(),
            subgroups,
        })
    }

    /// Bytes of device memory that are free now, less the reserve of the framework; `None` if a subgroup cannot be
    /// resident because its gradient is not in device memory.
    pub fn room(&self) -> Result<Option<u64>> {
        if self.subgroups.iter().any(|subgroup| subgroup.on_device().is_err()) {
            return Ok(None);
        }
        let (free, all) = self.device.memory()?;
        Ok(Some(free.saturating_sub(all / RESERVE)))
    }

    /// Refuses residents whose gradients are not in device memory, and allocates the slots and residents of the plan.
    /// An allocation in the middle of a step would stall the GPU, and its failure would end the step. Another process
    /// or the framework may have taken the memory: subgroups without memory are then on the CPU.
    pub fn accepts(&self, plan: Plan) -> Result<Plan> {
        let without_device_grad =
            plan.on(Placement::Resident).find(|subgroup| self.subgroups[*subgroup].on_device().is_err());
        if let Some(subgroup) = without_device_grad {
            let reason =
                format!("makes subgroup {subgroup} resident, but its gradient is not in device memory");
            return Err(Error::invalid("plan", reason));
        }
        let fetched = plan.count_on(Placement::Gpu);
        let slots = fetched.min(self.slots.len());
        let mut has_slots = true;
        for slot in 0..slots {
            has_slots = has_slots && fits(self.slot(slot))?;
        }
        let mut placements = plan.placements().to_vec();
        let mut has_room = true;
        // The gradients of the last subgroups arrive last, so they are the first to be resident.
        for (subgroup, placement) in placements.iter_mut().enumerate().rev() {
            let stays = match placement {
                Placement::Cpu => true,
                Placement::Gpu => has_slots,
                Placement::Resident => {
                    has_room = has_room && fits(self.resident(subgroup))?;
                    has_room
                }
            };
            if !stays {
                *placement = Placement::Cpu;
            }
        }
        let taken = Plan::of(placements);
        let (wanted, found) =
            (plan.count() - plan.count_on(Placement::Cpu), taken.count() - taken.count_on(Placement::Cpu));
        if found < wanted {
            let text = format!(
                "interleaved update: the memory of GPU {} holds {found} of the {wanted} subgroups that the plan places \
                 there; the others step on the CPU",
                self.device.ordinal()
            );
            log::write(Level::Warn, &text);
        }
        Ok(taken)
    }

    /// Number of elements of a subgroup.
    pub fn size(&self, subgroup: usize) -> u64 {
        self.shape.sizes[subgroup]
    }

    /// Enqueues a piece of work on a stream. Errors: the work belongs to the CPU.
    pub fn enqueue(&self, stream: &Stream, work: Work, rules: &[AdamRule]) -> Result<()> {
        let own = &self.subgroups[work.subgroup()];
        match work {
            Work::Cast { part, buffer, .. } => self.kernels.cast(
                stream,
                own.on_device()?.part(part.from, part.len),
                self.chunk(buffer, part)?,
            ),
            Work::GradOut { subgroup, part, buffer: Some(buffer) } => {
                stream.download(self.chunk(buffer, part)?.span(), &self.host_grad(subgroup)?.part(part))
            }
            Work::GradOut { subgroup, part, buffer: None } => {
                let from = own.on_device()?.part(part.from, part.len);
                stream.download(from.span(), &self.host_grad(subgroup)?.part(part))
            }
            Work::Prefetch { slot, state, part, .. } => stream
                .upload(&own.states[state as usize].part(part), self.slot(slot)?.state(state, part)?.span()),
            Work::Flush { slot, state, part, .. } => stream.download(
                self.slot(slot)?.state(state, part)?.span(),
                &own.states[state as usize].part(part),
            ),
            Work::FetchGrad { subgroup, slot, part } => {
                let to = self.slot(slot)?.grad(part)?.span();
                match &own.grad {
                    Grad::Delivered { host, .. } | Grad::Home(host) => stream.upload(&host.part(part), to),
                    Grad::Device(_) => stream.upload(&self.host_grad(subgroup)?.part(part), to),
                }
            }
            Work::Admit { subgroup, state, part } => {
                let to = self.resident(subgroup)?.state(state, part)?.span();
                stream.upload(&own.states[state as usize].part(part), to)
            }
            Work::Evict { subgroup, state, part } => self.evict(stream, subgroup, state, part),
            Work::GpuStep { subgroup, slot } => self.gpu_step(stream, subgroup, slot, rules),
            Work::ResidentStep { subgroup } => {
                self.step(stream, subgroup, &*self.resident(subgroup)?, own.on_device()?, rules)
            }
            Work::Upload { stage, .. } => match own.copy {
                Some(copy) => {
                    let whole = ParamRange { from: 0, len: copy.len() };
                    stream.upload(&self.stage(stage, copy.dtype())?.part(whole), copy.span())
                }
                None => Ok(()),
            },
            Work::CpuStep { .. } => {
                Err(Error::Unsupported("a step on the CPU cannot run on a stream".into()))
            }
        }
    }

    /// Updates a subgroup on the calling thread. Errors: the work belongs to the GPU.
    pub fn step_on_cpu(&self, work: Work, rules: &[AdamRule]) -> Result<()> {
        let Work::CpuStep { subgroup, stage } = work else {
            return Err(Error::Unsupported("work of the GPU cannot run on a CPU thread".into()));
        };
        let own = &self.subgroups[subgroup];
        let len = self.shape.sizes[subgroup] as usize;
        if len == 0 {
            return Ok(());
        }
        let late;
        let grad = match &own.grad {
            Grad::Delivered { host, .. } | Grad::Home(host) => host,
            Grad::Device(_) => {
                late = self.host_grad(subgroup)?;
                &*late
            }
        };
        let stage = own.copy.map(|copy| self.stage(stage, copy.dtype())).transpose()?;
        let states = own.states.each_ref().map(|state| &state.floats);
        let copy = stage.as_ref().map(|stage| &stage.floats);
        arrays::step(arrays::rule_of(rules, subgroup)?, len, states, &grad.floats, copy)
    }

    fn gpu_step(&self, stream: &Stream, subgroup: usize, slot: usize, rules: &[AdamRule]) -> Result<()> {
        let slot = self.slot(slot)?;
        let grad = match self.shape.gpu_grads {
            GpuGrads::Kept => self.subgroups[subgroup].on_device()?,
            GpuGrads::Fetched => slot.grad(self.whole(subgroup))?,
        };
        self.step(stream, subgroup, &slot, grad, rules)
    }

    fn step(
        &self,
        stream: &Stream,
        subgroup: usize,
        at: &DeviceSlot,
        grad: DeviceFloats,
        rules: &[AdamRule],
    ) -> Result<()> {
        if self.shape.sizes[subgroup] == 0 {
            return Ok(());
        }
        let states = at.states(self.shape.sizes[subgroup])?;
        let tensor = DeviceTensor::new(states, grad, self.subgroups[subgroup].copy);
        self.kernels.adam(stream, &arrays::rule_of(rules, subgroup)?, &tensor)
    }

    /// Copies a part of a resident's state to host memory. After the last part the resident's memory is kept in
    /// `evicted` until all copies are complete.
    fn evict(&self, stream: &Stream, subgroup: usize, state: StateArray, part: ParamRange) -> Result<()> {
        let home = self.subgroups[subgroup].states[state as usize].part(part);
        stream.download(self.resident(subgroup)?.state(state, part)?.span(), &home)?;
        if state == StateArray::Param && part.from + part.len == self.shape.sizes[subgroup] {
            let gone = self.residents[subgroup].take();
            self.evicted.lock().extend(gone.map(|slot| (subgroup, slot)));
        }
        Ok(())
    }

    /// Frees the memory of former residents for which `home` returns true: their states have reached host memory.
    pub fn free_evicted(&self, home: impl Fn(usize) -> Result<bool>) -> Result<()> {
        let mut evicted = self.evicted.lock();
        let mut at = 0;
        while let Some((subgroup, _)) = evicted.get(at) {
            if home(*subgroup)? { drop(evicted.swap_remove(at)) } else { at += 1 }
        }
        Ok(())
    }

    fn whole(&self, subgroup: usize) -> ParamRange {
        ParamRange { from: 0, len: self.shape.sizes[subgroup] }
    }

    fn host_grad(&self, subgroup: usize) -> Result<Arc<Pinned>> {
        let make = || Pinned::new(&self.registry, self.sent, self.shape.sizes[subgroup]);
        self.host_grads[subgroup].get(make)
    }

    fn stage(&self, stage: usize, dtype: Dtype) -> Result<Arc<Pinned>> {
        self.stages[stage].get(|| Pinned::new(&self.registry, dtype, self.shape.largest()))
    }

    fn slot(&self, slot: usize) -> Result<Arc<DeviceSlot>> {
        let grad = (self.shape.gpu_grads == GpuGrads::Fetched).then_some(self.sent);
        self.slots[slot].get(|| DeviceSlot::new(&self.device, self.shape.largest(), grad))
    }

    fn resident(&self, subgroup: usize) -> Result<Arc<DeviceSlot>> {
        self.residents[subgroup].get(|| DeviceSlot::new(&self.device, self.shape.sizes[subgroup], None))
    }

    fn chunk(&self, buffer: usize, part: ParamRange) -> Result<DeviceFloats> {
        let most = self.shape.chunk.min(self.shape.largest()) * WORD;
        let memory = self.chunks[buffer].get(|| DeviceMemory::new(&self.device, most))?;
        DeviceFloats::new(memory.span().part(0, part.len * WORD), Dtype::F32, "chunk")
    }
}

/// False if the device has no memory for an allocation. Errors: all others.
fn fits<T>(taken: Result<T>) -> Result<bool> {
    match taken {
        Ok(_) => Ok(true),
        Err(Error::Gpu(error)) if error.kind == GpuKind::OutOfMemory => Ok(false),
        Err(error) => Err(error),
    }
}

/// Checks that the arrays match `shape`, and returns the element type of all gradients.
fn check(shape: &Shape, subgroups: &[Subgroup]) -> Result<Dtype> {
    let grad = subgroups.first().map_or(Dtype::Bf16, Subgroup::grad_dtype);
    let copy = subgroups.first().and_then(|subgroup| subgroup.copy).map(|copy| copy.dtype());
    arrays::check(shape, subgroups, |subgroup, size| {
        let fits =
            |pinned: &Pinned, dtype| pinned.floats.dtype() == dtype && pinned.floats.len() as u64 == size;
        if !subgroup.states.iter().all(|state| fits(state, Dtype::F32)) {
            return Some("states");
        }
        let delivered = match &subgroup.grad {
            Grad::Delivered { host, .. } => {
                fits(host, grad) && shape.transfer_dtype == TransferDtype::Delivered
            }
            Grad::Device(_) => shape.transfer_dtype != TransferDtype::Delivered,
            Grad::Home(host) => {
                fits(host, grad)
                    && shape.transfer_dtype == TransferDtype::Delivered
                    && shape.gpu_grads == GpuGrads::Fetched
            }
        };
        let other = |device: DeviceFloats| device.dtype() != grad || device.len() != size;
        if !delivered || subgroup.on_device().is_ok_and(other) {
            return Some("grad");
        }
        let copied = subgroup.copy;
        let differs =
            copied.map(|copy| copy.dtype()) != copy || copied.is_some_and(|copy| copy.len() != size);
        differs.then_some("copy")
    })?;
    Ok(grad)
}
