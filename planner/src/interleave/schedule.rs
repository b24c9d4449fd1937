//! The commands of one step: the work on each lane, and the events that order the lanes.
//!
//! A lane executes its commands in the order in which they are enqueued. The event semantics are those of CUDA:
//! - `Record` marks the point after all commands that the lane has so far.
//! - `Wait` delays the later commands of the lane until the most recent record of the event completes. For an event
//!   that was never recorded, `Wait` does nothing.
//!
//! [`Lane::Cpu`] and [`Lane::Caller`] are host threads: they do their work and block in waits immediately. The events
//! carry all dependencies on earlier steps, so the planner keeps no state between steps.
//!
//! - The GPU commands are enqueued in [`pieces`](super::pieces), concurrently with the CPU updates. They never wait for
//!   CPU updates.
//! - The CPU thread runs [`cpu_part`] for each CPU subgroup, and enqueues the uploads itself.
//! - An upload shares the copy engine with the prefetches, in the order in which both are enqueued. The CPU is idle while
//!   both staging buffers wait for their upload, so few prefetches are queued at a time.
//! - Prefetch, flush, upload and the updates of residents have separate lanes. Residents fill the idle time of the GPU.
//! - A flush may continue into the next iteration. Commands that need its result wait for [`LaneEvent::Home`].
#![forbid(unsafe_code)]

use super::placements::{Placement, Plan};
use super::{GpuGrads, Shape, TransferDtype};

/// Number of chunk buffers for gradients, and of staging buffers for 16-bit parameters.
pub const PAIR: usize = 2;

/// An in-order queue of work: a stream of the device, or one of two host threads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Lane {
    /// The framework's forward and backward pass.
    Model,
    /// Widens gradients on the GPU.
    Cast,
    /// Copies to the host: gradients, flushes and evictions.
    D2h,
    /// Copies to the device: prefetches and new residents.
    H2d,
    /// Updates of fetched subgroups.
    Gpu,
    /// Updates of residents.
    Resident,
    /// Copies 16-bit parameters of CPU subgroups to the GPU.
    Upload,
    /// The host thread that updates CPU subgroups.
    Cpu,
    /// The host thread that calls the library.
    Caller,
}

impl Lane {
    /// All lanes, in the order of their discriminants.
    pub const ALL: [Lane; 9] = [
        Lane::Model,
        Lane::Cast,
        Lane::D2h,
        Lane::H2d,
        Lane::Gpu,
        Lane::Resident,
        Lane::Upload,
        Lane::Cpu,
        Lane::Caller,
    ];

    /// Short name, for traces and messages.
    pub const fn name(self) -> &'static str {
        match self {
            Lane::Model => "model",
            Lane::Cast => "cast",
            Lane::D2h => "device to host",
            Lane::H2d => "host to device",
            Lane::Gpu => "GPU update",
            Lane::Resident => "GPU residents",
            Lane::Upload => "parameter upload",
            Lane::Cpu => "CPU update",
            Lane::Caller => "caller",
        }
    }
}

/// An event that lanes wait for. The index is a subgroup, a slot, or a buffer of a pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum LaneEvent {
    /// The gradient of a subgroup is complete. The framework records it.
    Grad(usize),
    /// Forward and backward no longer read the 16-bit parameters of a subgroup. The framework records it.
    ParamFree(usize),
    /// A chunk buffer holds widened gradients.
    ChunkFull(usize),
    /// A chunk buffer may be overwritten.
    ChunkFree(usize),
    /// The gradient of a subgroup is in host memory.
    GradHome(usize),
    /// A slot holds an array of the state of a subgroup; with the last array, all that the update needs.
    Fetched(usize, StateArray),
    /// The subgroup in a slot is updated.
    SlotDone(usize),
    /// One array of a slot is flushed. The same array of the next subgroup may be fetched while the others are flushed.
    SlotFree(usize, StateArray),
    /// The state of a subgroup is in host memory.
    Home(usize),
    /// The state of a new resident is on the GPU.
    Settled(usize),
    /// A staging buffer may be overwritten.
    StageFree(usize),
    /// The 16-bit parameters of a subgroup are updated.
    Ready(usize),
}

/// The reason for a wait. The first thirteen edges have the numbers of the written schedule. The others order changes
/// of residents, fetched gradients, checkpoints, and the room in the device queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Edge {
    /// 0: a gradient is copied to the host after it is complete.
    GradBeforeOut = 0,
    /// 1: a chunk is widened into a buffer after the previous chunk in the buffer was copied to the host.
    ChunkFreeBeforeCast = 1,
    /// 2: a chunk is copied to the host after it was widened.
    CastBeforeOut = 2,
    /// 3: the GPU updates a subgroup after its gradient is complete.
    GradBeforeStep = 3,
    /// 4: a slot is filled after its previous state was flushed.
    SlotFreeBeforeFetch = 4,
    /// 5: a state is fetched after its last flush.
    HomeBeforeFetch = 5,
    /// 6: the GPU updates a slot after its fetch.
    FetchBeforeStep = 6,
    /// 7: a slot is flushed after its update.
    StepBeforeFlush = 7,
    /// 8: the CPU updates a subgroup after its gradient is in host memory.
    GradHomeBeforeStep = 8,
    /// 9: the CPU updates a state after its last flush.
    HomeBeforeStep = 9,
    /// 10: the CPU overwrites a staging buffer after its last upload.
    StageFreeBeforeStep = 10,
    /// 11: 16-bit parameters are overwritten after forward and backward have read the old ones.
    ReadBeforeWrite = 11,
    /// 12: the next forward pass reads parameters after they are updated.
    ReadyBeforeRead = 12,
    /// 13: a gradient is fetched after it is in host memory.
    GradHomeBeforeFetch = 13,
    /// 14: a resident is updated after its state was copied to the GPU.
    SettledBeforeStep = 14,
    /// 15: a resident is evicted after its last update.
    ReadyBeforeEvict = 15,
    /// 16: the caller reads host state after the last flush.
    HomeBeforeRead = 16,
    /// 17: the enqueueing thread waits for room in the device queue. This edge limits the queue; no data depends on it.
    RoomBeforeEnqueue = 17,
    /// 18: a resident without an update since it was admitted is evicted after its state was copied completely.
    SettledBeforeEvict = 18,
}

/// The numbered edges of the schedule.
pub const NUMBERED_EDGES: [Edge; 13] = [
    Edge::GradBeforeOut,
    Edge::ChunkFreeBeforeCast,
    Edge::CastBeforeOut,
    Edge::GradBeforeStep,
    Edge::SlotFreeBeforeFetch,
    Edge::HomeBeforeFetch,
    Edge::FetchBeforeStep,
    Edge::StepBeforeFlush,
    Edge::GradHomeBeforeStep,
    Edge::HomeBeforeStep,
    Edge::StageFreeBeforeStep,
    Edge::ReadBeforeWrite,
    Edge::ReadyBeforeRead,
];

/// One of the f32 arrays of a subgroup's state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum StateArray {
    /// First moment.
    ExpAvg = 0,
    /// Second moment.
    ExpAvgSq = 1,
    /// Master parameter.
    Param = 2,
}

/// The arrays of a state, in the order in which they are copied.
pub const STATES: [StateArray; 3] = [StateArray::ExpAvg, StateArray::ExpAvgSq, StateArray::Param];

/// A range of the parameters of a subgroup.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ParamRange {
    /// Index of the first parameter.
    pub from: u64,
    /// Number of parameters.
    pub len: u64,
}

/// Work of a lane.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs, reason = "fields say what they are: a subgroup, part of it, and the buffers it meets")]
pub enum Work {
    /// Widens part of a gradient into a chunk buffer.
    Cast { subgroup: usize, part: ParamRange, buffer: usize },
    /// Copies part of a gradient to the host: from a chunk buffer, or unchanged if `buffer` is `None`.
    GradOut { subgroup: usize, part: ParamRange, buffer: Option<usize> },
    /// Copies part of a state into a slot.
    Prefetch { subgroup: usize, slot: usize, state: StateArray, part: ParamRange },
    /// Copies part of a gradient from the host into a slot.
    FetchGrad { subgroup: usize, slot: usize, part: ParamRange },
    /// Updates the subgroup in a slot, and writes its 16-bit parameters.
    GpuStep { subgroup: usize, slot: usize },
    /// Copies part of a state from a slot to host memory.
    Flush { subgroup: usize, slot: usize, state: StateArray, part: ParamRange },
    /// Updates a resident, and writes its 16-bit parameters.
    ResidentStep { subgroup: usize },
    /// Copies part of the state of a new resident to the GPU.
    Admit { subgroup: usize, state: StateArray, part: ParamRange },
    /// Copies part of the state of a former resident to host memory.
    Evict { subgroup: usize, state: StateArray, part: ParamRange },
    /// Updates a subgroup in host memory and rounds its parameters into a staging buffer.
    CpuStep { subgroup: usize, stage: usize },
    /// Copies a staging buffer to the 16-bit parameters on the GPU.
    Upload { subgroup: usize, stage: usize },
}

impl Work {
    /// The subgroup that the work belongs to.
    pub const fn subgroup(self) -> usize {
        match self {
            Work::Cast { subgroup, .. }
            | Work::GradOut { subgroup, .. }
            | Work::Prefetch { subgroup, .. }
            | Work::FetchGrad { subgroup, .. }
            | Work::GpuStep { subgroup, .. }
            | Work::Flush { subgroup, .. }
            | Work::ResidentStep { subgroup }
            | Work::Admit { subgroup, .. }
            | Work::Evict { subgroup, .. }
            | Work::CpuStep { subgroup, .. }
            | Work::Upload { subgroup, .. } => subgroup,
        }
    }

    /// The part of a copy whose chunks follow each other on the lane without a wait in between; `None` for other work.
    /// Such chunks form one span of time.
    pub const fn stretch(&mut self) -> Option<&mut ParamRange> {
        match self {
            Work::GradOut { part, buffer: None, .. }
            | Work::Prefetch { part, .. }
            | Work::FetchGrad { part, .. }
            | Work::Flush { part, .. }
            | Work::Admit { part, .. }
            | Work::Evict { part, .. } => Some(part),
            _ => None,
        }
    }

    /// Short name, for traces.
    pub const fn name(self) -> &'static str {
        match self {
            Work::Cast { .. } => "widen gradient",
            Work::GradOut { .. } => "gradient out",
            Work::Prefetch { .. } => "prefetch",
            Work::FetchGrad { .. } => "fetch gradient",
            Work::GpuStep { .. } => "GPU step",
            Work::Flush { .. } => "flush",
            Work::ResidentStep { .. } => "resident step",
            Work::Admit { .. } => "admit",
            Work::Evict { .. } => "evict",
            Work::CpuStep { .. } => "CPU step",
            Work::Upload { .. } => "upload",
        }
    }
}

/// One command of a schedule.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Command {
    /// Delays the later commands of the lane until the event. The edge is the reason.
    Wait(Lane, LaneEvent, Edge),
    /// Records the event after all commands that the lane has so far.
    Record(Lane, LaneEvent),
    /// Does the work on the lane.
    Run(Lane, Work),
}

use Command::{Record, Run, Wait};

/// A consumer of commands, called once per command in order.
/// An error of the consumer ends the schedule, and is returned.
pub trait Sink<E>: FnMut(Command) -> Result<(), E> {}
impl<E, F: FnMut(Command) -> Result<(), E>> Sink<E> for F {}

/// Copies the gradient of a subgroup to the host during backward: for CPU subgroups, and for GPU subgroups with
/// [`GpuGrads::Fetched`]. Does nothing for other subgroups.
pub fn gradient_out<E>(
    shape: &Shape,
    plan: &Plan,
    subgroup: usize,
    emit: &mut impl Sink<E>,
) -> Result<(), E> {
    let goes_home = match plan.placement(subgroup) {
        Placement::Cpu => true,
        Placement::Gpu => shape.gpu_grads == GpuGrads::Fetched,
        Placement::Resident => false,
    };
    if !goes_home {
        return Ok(());
    }
    match shape.transfer_dtype {
        TransferDtype::Delivered => return emit(Record(Lane::Model, LaneEvent::GradHome(subgroup))),
        TransferDtype::Native => {
            emit(Wait(Lane::D2h, LaneEvent::Grad(subgroup), Edge::GradBeforeOut))?;
            for part in parts(shape, subgroup) {
                emit(Run(Lane::D2h, Work::GradOut { subgroup, part, buffer: None }))?;
            }
        }
        TransferDtype::F32 => {
            emit(Wait(Lane::Cast, LaneEvent::Grad(subgroup), Edge::GradBeforeOut))?;
            for (nth, part) in parts(shape, subgroup).enumerate() {
                let buffer = nth % PAIR;
                emit(Wait(Lane::Cast, LaneEvent::ChunkFree(buffer), Edge::ChunkFreeBeforeCast))?;
                emit(Run(Lane::Cast, Work::Cast { subgroup, part, buffer }))?;
                emit(Record(Lane::Cast, LaneEvent::ChunkFull(buffer)))?;
                emit(Wait(Lane::D2h, LaneEvent::ChunkFull(buffer), Edge::CastBeforeOut))?;
                emit(Run(Lane::D2h, Work::GradOut { subgroup, part, buffer: Some(buffer) }))?;
                emit(Record(Lane::D2h, LaneEvent::ChunkFree(buffer)))?;
            }
        }
    }
    emit(Record(Lane::D2h, LaneEvent::GradHome(subgroup)))
}

/// Moves the states of subgroups that become residents, or stop being residents, from plan `from` to plan `to`.
pub fn change_residents<E>(shape: &Shape, from: &Plan, to: &Plan, emit: &mut impl Sink<E>) -> Result<(), E> {
    for subgroup in 0..shape.count() {
        let (was, is) =
            (from.placement(subgroup) == Placement::Resident, to.placement(subgroup) == Placement::Resident);
        if was && !is {
            emit(Wait(Lane::D2h, LaneEvent::Settled(subgroup), Edge::SettledBeforeEvict))?;
            emit(Wait(Lane::D2h, LaneEvent::Ready(subgroup), Edge::ReadyBeforeEvict))?;
            each_state(shape, subgroup, |state, part| {
                emit(Run(Lane::D2h, Work::Evict { subgroup, state, part }))
            })?;
            emit(Record(Lane::D2h, LaneEvent::Home(subgroup)))?;
        }
        if is && !was {
            emit(Wait(Lane::H2d, LaneEvent::Home(subgroup), Edge::HomeBeforeFetch))?;
            each_state(shape, subgroup, |state, part| {
                emit(Run(Lane::H2d, Work::Admit { subgroup, state, part }))
            })?;
            emit(Record(Lane::H2d, LaneEvent::Settled(subgroup)))?;
        }
    }
    Ok(())
}

/// The commands of the CPU thread for the `nth` CPU subgroup of a step.
pub fn cpu_part<E>(nth: usize, subgroup: usize, emit: &mut impl Sink<E>) -> Result<(), E> {
    let stage = nth % PAIR;
    emit(Wait(Lane::Cpu, LaneEvent::GradHome(subgroup), Edge::GradHomeBeforeStep))?;
    emit(Wait(Lane::Cpu, LaneEvent::Home(subgroup), Edge::HomeBeforeStep))?;
    emit(Wait(Lane::Cpu, LaneEvent::StageFree(stage), Edge::StageFreeBeforeStep))?;
    emit(Run(Lane::Cpu, Work::CpuStep { subgroup, stage }))?;
    emit(Wait(Lane::Upload, LaneEvent::ParamFree(subgroup), Edge::ReadBeforeWrite))?;
    emit(Run(Lane::Upload, Work::Upload { subgroup, stage }))?;
    emit(Record(Lane::Upload, LaneEvent::StageFree(stage)))?;
    emit(Record(Lane::Upload, LaneEvent::Ready(subgroup)))
}

/// Makes `reader` wait for the updated 16-bit parameters of a subgroup. For a CPU subgroup, the caller must first wait
/// until the CPU thread has enqueued the upload.
pub fn publish<E>(subgroup: usize, reader: Lane, emit: &mut impl Sink<E>) -> Result<(), E> {
    emit(Wait(reader, LaneEvent::Ready(subgroup), Edge::ReadyBeforeRead))
}

/// Makes the caller wait until the state of a subgroup is in host memory.
pub fn drain<E>(subgroup: usize, emit: &mut impl Sink<E>) -> Result<(), E> {
    emit(Wait(Lane::Caller, LaneEvent::Home(subgroup), Edge::HomeBeforeRead))
}

fn each_state<E>(
    shape: &Shape,
    subgroup: usize,
    mut copy: impl FnMut(StateArray, ParamRange) -> Result<(), E>,
) -> Result<(), E> {
    STATES.into_iter().try_for_each(|state| parts(shape, subgroup).try_for_each(|part| copy(state, part)))
}

/// The chunks of a subgroup.
pub fn parts(shape: &Shape, subgroup: usize) -> impl Iterator<Item = ParamRange> + use<> {
    let (size, chunk) = (shape.sizes[subgroup], shape.chunk);
    (0..size.div_ceil(chunk)).map(move |nth| {
        let from = nth * chunk;
        ParamRange { from, len: chunk.min(size - from) }
    })
}
