//! The interleaved update: CPU and GPU step different subgroups at the same time, on a backend.
//!
//! [`spillway_planner::interleave`] decides which commands are enqueued in which order; this module runs
//! them.
//!
//! | file | holds |
//! |---|---|
//! | [`machine`] | the state machine of the calls: no commands, no threads, no clock |
//! | [`calls`] | the commands that each call emits, and the locks meanwhile |
//! | [`engine`] | the state machine on a backend, with threads for the CPU's and the GPU's part of a step |
//! | [`host`] | the backend without a device: its lanes are threads, its kernels are the CPU's |
//! | [`device`], [`device_memory`] | the backend on a GPU: its streams, events, and device and host arrays |
//! | `arrays` | what the arrays of both backends have in common |
//! | `lanes` | host threads and events that behave like the streams and events of a device |
//! | [`recalibrate`] | rates from the timings of every step; when to change the plan |
//! | [`trace`] | a timeline of one step |
#![forbid(unsafe_code)]

mod arrays;
pub mod calls;
pub mod device;
pub mod device_memory;
pub mod engine;
pub mod host;
mod lanes;
pub mod machine;
pub mod recalibrate;
pub mod trace;

#[cfg(test)]
mod tests;

use std::sync::Arc;

use crate::error::Result;
use crate::gpu::stream::ForeignStream;
use crate::kernel::AdamRule;
use spillway_planner::interleave::placements::Plan;
use spillway_planner::interleave::schedule::{Command, Lane, LaneEvent, Work};

/// One piece of work and when it ran, in seconds since the backend was created.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Timing {
    /// The lane that ran the work.
    pub lane: Lane,
    /// The work.
    pub work: Work,
    /// Start, in seconds.
    pub start: f64,
    /// End, in seconds.
    pub end: f64,
}

/// The framework's stream. `None` where the framework has no stream: its work is then complete when it makes a call.
pub type Model = Option<ForeignStream>;

/// Runs the commands of a schedule. Thread-safe, but commands of one lane come from one thread at a time.
pub trait Backend: Send + Sync {
    /// Enqueues a command. A command on [`Lane::Cpu`] or [`Lane::Caller`] is complete when the call returns. `model` is
    /// the stream of [`Lane::Model`] for this command.
    fn play(&self, command: Command, model: Model) -> Result<()>;

    /// Checks that the backend can run this plan, and allocates what its steps need. Returns the plan, in which a
    /// subgroup without GPU memory is on the CPU. The plan has the backend's number of subgroups.
    fn accepts(&self, plan: Plan) -> Result<Plan> {
        Ok(plan)
    }

    /// Bytes of GPU memory that residents and slots may take: those that are free now, less a reserve for the framework.
    /// `None` without a GPU, and if subgroups cannot be resident.
    fn room(&self) -> Result<Option<u64>> {
        Ok(None)
    }

    /// Sets the coefficients of each subgroup for updates enqueued from now on. A single entry applies to all
    /// subgroups.
    fn begin(&self, rules: Arc<[AdamRule]>) -> Result<()>;

    /// True if the last record of the event is reached, or the event was never recorded.
    fn reached(&self, event: LaneEvent) -> Result<bool>;

    /// Takes the timings of work that ended since the last call.
    fn timings(&self) -> Vec<Timing>;
}
