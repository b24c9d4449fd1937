//! The commands of one step: what is enqueued on which lane, and the events that order lanes among each other.
//!
//! A lane does its work in the order in which it is given. `Record` marks the end of what its lane was given so far;
//! `Wait` holds back what its lane is given next until the last record of the event before the wait, and does nothing
//! for an event that was never recorded, as CUDA has it. On [`Lane::Cpu`] and [`Lane::Caller`], which are threads
//! of the host, work is done and waits block at once. So a step needs no memory of the steps before it: the
//! events carry it.
//!
//! - The GPU's part is enqueued in [`pieces`](super::pieces), beside the CPU's; none of it waits for the host.
//! - The CPU thread works through [`cpu_part`], subgroup by subgroup, and enqueues the uploads itself.
//! - Copies of states are cut into chunks, so that an upload, which is one copy, gets in between them on the one engine of
//!   its direction: the CPU stands still when both staging buffers wait.
//! - Prefetch, flush and upload have a lane each, residents have their own, which fills the GPU's idle time.
//! - A flush may go on into the next iteration; whatever needs it waits for `Home`.
#![forbid(unsafe_code)]

use super::sites::{Plan, Site};
use super::{GpuGrads, Shape, Wire};
use crate::error::Result;

/// Number of chunk buffers for gradients, and of staging buffers for 16-bit parameters.
pub const PAIR: usize = 2;

/// What does work in order: streams of the device, and two threads of the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Lane {
    /// The framework's forward and backward pass.
    Model,
    /// Widens gradients on the GPU.
    Cast,
    /// Gradients out, and flushes.
    D2h,
    /// Prefetches.
    H2d,
    /// Updates of fetched subgroups.
    Gpu,
    /// Updates of residents.
    Resident,
    /// 16-bit parameters of CPU subgroups to the GPU.
    Upload,
    /// The host thread that updates CPU subgroups.
    Cpu,
    /// The host thread that calls.
    Caller,
}

impl Lane {
    /// All of them, in the order of their numbers.
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

/// A point that lanes wait for. Indices are subgroups, slots, or one of a pair of buffers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Event {
    /// The gradient of a subgroup is there; recorded by the framework.
    Grad(usize),
    /// Forward and backward no longer read the 16-bit parameters of a subgroup; recorded by the framework.
    ParamFree(usize),
    /// A chunk buffer holds widened gradients.
    ChunkFull(usize),
    /// A chunk buffer may be overwritten.
    ChunkFree(usize),
    /// The gradient of a subgroup is in host memory.
    GradHome(usize),
    /// A slot holds the state of a subgroup.
    SlotFull(usize),
    /// The subgroup in a slot is updated.
    SlotDone(usize),
    /// One array of a slot is flushed; the next one may come in while the others still leave.
    SlotFree(usize, State),
    /// The state of a subgroup is in host memory.
    Home(usize),
    /// The state of a new resident is on the GPU.
    Settled(usize),
    /// A staging buffer may be overwritten.
    StageFree(usize),
    /// The 16-bit parameters of a subgroup are new.
    Ready(usize),
}

/// Why a wait is there. The first thirteen have the numbers of the written schedule; the others belong to changes of
/// residents, to gradients that are fetched, and to
/// checkpoints.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Edge {
    /// 0: a gradient leaves after it is made.
    GradBeforeOut = 0,
    /// 1: a chunk is widened into a buffer that was copied out.
    ChunkFreeBeforeCast = 1,
    /// 2: a chunk is copied out after it was widened.
    CastBeforeOut = 2,
    /// 3: the GPU updates after the gradient is made.
    GradBeforeStep = 3,
    /// 4: a slot is filled after its last state was flushed.
    SlotFreeBeforeFetch = 4,
    /// 5: a state is fetched after its last flush.
    HomeBeforeFetch = 5,
    /// 6: the GPU updates what has been fetched.
    FetchBeforeStep = 6,
    /// 7: a slot is flushed after its update.
    StepBeforeFlush = 7,
    /// 8: the CPU updates after the gradient is home.
    GradHomeBeforeStep = 8,
    /// 9: the CPU updates a state after its last flush.
    HomeBeforeStep = 9,
    /// 10: parameters are staged in a buffer that was uploaded.
    StageFreeBeforeStep = 10,
    /// 11: 16-bit parameters are written when nobody reads the old ones.
    ReadBeforeWrite = 11,
    /// 12: the next forward pass reads new parameters.
    ReadyBeforeRead = 12,
    /// A fetched gradient is home first.
    GradHomeBeforeFetch = 13,
    /// A resident is updated once its state is there.
    SettledBeforeStep = 14,
    /// A resident leaves after its last update.
    ReadyBeforeEvict = 15,
    /// The caller reads host state after the last flush.
    HomeBeforeRead = 16,
    /// The thread that enqueues waits for room on the device; this orders nothing.
    RoomBeforeEnqueue = 17,
    /// A resident that leaves without an update has come whole.
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
pub enum State {
    /// First moment.
    ExpAvg = 0,
    /// Second moment.
    ExpAvgSq = 1,
    /// Master parameter.
    Param = 2,
}

/// In the order in which they are copied.
pub const STATES: [State; 3] = [State::ExpAvg, State::ExpAvgSq, State::Param];

/// Part of a subgroup, in parameters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Part {
    /// The first.
    pub from: u64,
    /// How many.
    pub len: u64,
}

/// What a lane does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs, reason = "fields say what they are: a subgroup, part of it, and the buffers it meets")]
pub enum Work {
    /// Widens part of a gradient into a chunk buffer.
    Cast { subgroup: usize, part: Part, buffer: usize },
    /// Copies part of a gradient home, from a chunk buffer, or as it is if there is none.
    GradOut { subgroup: usize, part: Part, buffer: Option<usize> },
    /// Copies part of a state into a slot.
    Prefetch { subgroup: usize, slot: usize, state: State, part: Part },
    /// Copies part of a gradient from the host into a slot.
    FetchGrad { subgroup: usize, slot: usize, part: Part },
    /// Updates the subgroup in a slot; writes its 16-bit parameters.
    GpuStep { subgroup: usize, slot: usize },
    /// Copies part of a state from a slot home.
    Flush { subgroup: usize, slot: usize, state: State, part: Part },
    /// Updates a resident; writes its 16-bit parameters.
    ResidentStep { subgroup: usize },
    /// Copies part of the state of a new resident to the GPU.
    Admit { subgroup: usize, state: State, part: Part },
    /// Copies part of the state of a former resident home.
    Evict { subgroup: usize, state: State, part: Part },
    /// Updates a subgroup in host memory and rounds its parameters into a staging buffer.
    CpuStep { subgroup: usize, stage: usize },
    /// Copies a staging buffer over 16-bit parameters on the GPU.
    Upload { subgroup: usize, stage: usize },
}

impl Work {
    /// The subgroup it is done for.
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

    /// The part of a copy whose parts follow one another on their lane without a wait between them: one stretch of time.
    pub const fn stretch(&mut self) -> Option<&mut Part> {
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

/// One thing to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Command {
    /// Hold back what the lane is given next.
    Wait(Lane, Event, Edge),
    /// Mark the end of what the lane was given.
    Record(Lane, Event),
    /// Do this.
    Run(Lane, Work),
}

use Command::{Record, Run, Wait};

/// Takes commands one by one.
pub trait Sink: FnMut(Command) -> Result<()> {}
impl<F: FnMut(Command) -> Result<()>> Sink for F {}

/// Sends a gradient home during backward: of CPU subgroups, and of all that are fetched again.
pub fn gradient_out(shape: &Shape, plan: &Plan, subgroup: usize, emit: &mut impl Sink) -> Result<()> {
    let goes_home = match plan.site(subgroup) {
        Site::Cpu => true,
        Site::Gpu => shape.gpu_grads == GpuGrads::Fetched,
        Site::Resident => false,
    };
    if !goes_home {
        return Ok(());
    }
    match shape.wire {
        Wire::Delivered => return emit(Record(Lane::Model, Event::GradHome(subgroup))),
        Wire::Native => {
            emit(Wait(Lane::D2h, Event::Grad(subgroup), Edge::GradBeforeOut))?;
            for part in parts(shape, subgroup) {
                emit(Run(Lane::D2h, Work::GradOut { subgroup, part, buffer: None }))?;
            }
        }
        Wire::F32 => {
            emit(Wait(Lane::Cast, Event::Grad(subgroup), Edge::GradBeforeOut))?;
            for (nth, part) in parts(shape, subgroup).enumerate() {
                let buffer = nth % PAIR;
                emit(Wait(Lane::Cast, Event::ChunkFree(buffer), Edge::ChunkFreeBeforeCast))?;
                emit(Run(Lane::Cast, Work::Cast { subgroup, part, buffer }))?;
                emit(Record(Lane::Cast, Event::ChunkFull(buffer)))?;
                emit(Wait(Lane::D2h, Event::ChunkFull(buffer), Edge::CastBeforeOut))?;
                emit(Run(Lane::D2h, Work::GradOut { subgroup, part, buffer: Some(buffer) }))?;
                emit(Record(Lane::D2h, Event::ChunkFree(buffer)))?;
            }
        }
    }
    emit(Record(Lane::D2h, Event::GradHome(subgroup)))
}

/// Moves the states of subgroups that become residents, or cease to be, between two plans.
pub fn change_residents(shape: &Shape, from: &Plan, to: &Plan, emit: &mut impl Sink) -> Result<()> {
    for subgroup in 0..shape.count() {
        let (was, is) = (from.site(subgroup) == Site::Resident, to.site(subgroup) == Site::Resident);
        if was && !is {
            emit(Wait(Lane::D2h, Event::Settled(subgroup), Edge::SettledBeforeEvict))?;
            emit(Wait(Lane::D2h, Event::Ready(subgroup), Edge::ReadyBeforeEvict))?;
            each_state(shape, subgroup, |state, part| {
                emit(Run(Lane::D2h, Work::Evict { subgroup, state, part }))
            })?;
            emit(Record(Lane::D2h, Event::Home(subgroup)))?;
        }
        if is && !was {
            emit(Wait(Lane::H2d, Event::Home(subgroup), Edge::HomeBeforeFetch))?;
            each_state(shape, subgroup, |state, part| {
                emit(Run(Lane::H2d, Work::Admit { subgroup, state, part }))
            })?;
            emit(Record(Lane::H2d, Event::Settled(subgroup)))?;
        }
    }
    Ok(())
}

/// What the CPU thread does for the `nth` CPU subgroup of a step.
pub fn cpu_part(nth: usize, subgroup: usize, emit: &mut impl Sink) -> Result<()> {
    let stage = nth % PAIR;
    emit(Wait(Lane::Cpu, Event::GradHome(subgroup), Edge::GradHomeBeforeStep))?;
    emit(Wait(Lane::Cpu, Event::Home(subgroup), Edge::HomeBeforeStep))?;
    emit(Wait(Lane::Cpu, Event::StageFree(stage), Edge::StageFreeBeforeStep))?;
    emit(Run(Lane::Cpu, Work::CpuStep { subgroup, stage }))?;
    emit(Wait(Lane::Upload, Event::ParamFree(subgroup), Edge::ReadBeforeWrite))?;
    emit(Run(Lane::Upload, Work::Upload { subgroup, stage }))?;
    emit(Record(Lane::Upload, Event::StageFree(stage)))?;
    emit(Record(Lane::Upload, Event::Ready(subgroup)))
}

/// Lets `reader` read the new 16-bit parameters of a subgroup. The CPU thread is past it, if it is the CPU's.
pub fn publish(subgroup: usize, reader: Lane, emit: &mut impl Sink) -> Result<()> {
    emit(Wait(reader, Event::Ready(subgroup), Edge::ReadyBeforeRead))
}

/// Lets the caller read the state of a subgroup in host memory.
pub fn drain(subgroup: usize, emit: &mut impl Sink) -> Result<()> {
    emit(Wait(Lane::Caller, Event::Home(subgroup), Edge::HomeBeforeRead))
}

fn each_state(shape: &Shape, subgroup: usize, mut copy: impl FnMut(State, Part) -> Result<()>) -> Result<()> {
    STATES.into_iter().try_for_each(|state| parts(shape, subgroup).try_for_each(|part| copy(state, part)))
}

/// The chunks of a subgroup.
pub fn parts(shape: &Shape, subgroup: usize) -> impl Iterator<Item = Part> + use<> {
    let (size, chunk) = (shape.sizes[subgroup], shape.chunk);
    (0..size.div_ceil(chunk)).map(move |nth| {
        let from = nth * chunk;
        Part { from, len: chunk.min(size - from) }
    })
}
