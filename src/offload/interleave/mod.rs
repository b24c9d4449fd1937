//! The interleaved update of CPU and GPU, played on a backend.
//!
//! [`plan::interleave`](crate::plan::interleave) says what is enqueued in which order; here it happens.
//!
//! | file | holds |
//! |---|---|
//! | [`machine`] | which calls may follow which, and the commands that each emits: no thread, no clock |
//! | [`engine`] | the machine on a backend, with a thread for each part of a step |
//! | [`host`] | the backend without a device: its lanes are threads, its kernels those of the CPU |
//! | [`device`], [`device_memory`] | the backend on a GPU: its streams and events, and the arrays on both sides |
//! | `lanes` | threads and events of the host that behave like streams and events of a device |
//! | [`recalibrate`] | rates from the timings of every step, and when a new plan is worth it |
//! | [`trace`] | a step as a picture |
//! | `races` | the backend that looks for missing order, by vector clocks (tests) |
#![forbid(unsafe_code)]

pub mod device;
pub mod device_memory;
pub mod engine;
pub mod host;
mod lanes;
pub mod machine;
pub mod recalibrate;
pub mod trace;

#[cfg(test)]
mod races;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use crate::error::Result;
use crate::gpu::stream::ForeignStream;
use crate::kernel::AdamRule;
use crate::plan::interleave::schedule::{Command, Event, Lane, Work};
use crate::plan::interleave::sites::Plan;

/// One piece of work and when it ran, in seconds since the backend was made.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Timing {
    /// On which lane.
    pub lane: Lane,
    /// What.
    pub work: Work,
    /// From.
    pub start: f64,
    /// To.
    pub end: f64,
}

/// The framework's stream; `None` where it has none, and what it does is done when it says so.
pub type Model = Option<ForeignStream>;

/// What the schedule runs on. Any thread may call; commands of one lane come from one thread at a time.
pub trait Backend: Send + Sync {
    /// Enqueues a command. On [`Lane::Cpu`] and [`Lane::Caller`] it is done when the call returns. `model` is what
    /// [`Lane::Model`] is for this command.
    fn play(&self, command: Command, model: Model) -> Result<()>;

    /// Whether it can play this plan, of as many subgroups as it has; makes the room that its steps need.
    fn accepts(&self, _: &Plan) -> Result<()> {
        Ok(())
    }

    /// Coefficients of each subgroup for the updates that are enqueued from now on; one entry stands for all.
    fn begin(&self, rules: Arc<[AdamRule]>) -> Result<()>;

    /// True if the last record of the event is reached, or there is none.
    fn reached(&self, event: Event) -> Result<bool>;

    /// What ran since the last call.
    fn timings(&self) -> Vec<Timing>;
}

impl Backend for Box<dyn Backend> {
    fn play(&self, command: Command, model: Model) -> Result<()> {
        self.as_ref().play(command, model)
    }

    fn accepts(&self, plan: &Plan) -> Result<()> {
        self.as_ref().accepts(plan)
    }

    fn begin(&self, rules: Arc<[AdamRule]>) -> Result<()> {
        self.as_ref().begin(rules)
    }

    fn reached(&self, event: Event) -> Result<bool> {
        self.as_ref().reached(event)
    }

    fn timings(&self) -> Vec<Timing> {
        self.as_ref().timings()
    }
}
