//! A stage and its calls.
//!
//! Invariants:
//! - One job is open per stage: from its submission to its verdict.
//! - A stage that is dropped rolls its open job back before the drop returns.
//! - Tasks run on the cores that [`super::cores`] gives, except those that touch no tensor.
#![forbid(unsafe_code)]

use std::time::Duration;

use super::cores::with_cores;
use super::target::{Published, Target};
use crate::error::{Result, Rounds};
use crate::offload::speculate::{Bucket, Clip, Engine, Progress, Publish, Recording, Task, Verdict};
use crate::optim::StepStats;
use crate::sys::event::Event;

/// The only bucket of a stage's engine.
const ONLY: u32 = 0;

/// How a stage runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Options {
    /// A stage of a higher priority gets free cores first.
    pub priority: i32,
    /// Most cores of a task; 0 for all of the pool.
    pub cores: usize,
    /// When the 16-bit copies are written.
    pub publish: Publish,
}

/// An asynchronous optimizer job. Thread-safe.
pub struct Stage {
    engine: Engine,
    options: Options,
}

impl Stage {
    /// Starts a stage. Errors: no memory or no thread.
    pub fn open(options: Options) -> Result<Stage> {
        Ok(Stage { engine: Engine::open(1, options.publish, Rounds::Job)?, options })
    }

    /// Returns Ok if `submit` would accept a job now.
    pub fn begin(&self, grad_scale: f64) -> Result<()> {
        self.engine.begin(Clip::new(0.0, grad_scale)?)
    }

    /// Gives the job that [`Stage::begin`] opened its work, which starts once `event` has happened, or at once. Errors:
    /// the target cannot be claimed; roll back then.
    pub fn submit(&self, work: Box<dyn Bucket>, event: Option<Event>, target: Option<Target>) -> Result<()> {
        let publish = self.options.publish;
        let work = match target {
            Some(target) => Box::new(Published::new(work, publish, target.reserve()?)),
            None => work,
        };
        self.engine.submit(ONLY, Box::new(Scheduled { work, options: self.options }), event)
    }

    /// Waits until the tensors are stepped, and returns the statistics of their gradients: the local result.
    pub fn wait(&self, timeout: Option<Duration>) -> Result<StepStats> {
        self.engine.local_result(timeout)
    }

    /// Gives the verdict of all stages and processes.
    pub fn resolve(&self, verdict: Verdict) -> Result<()> {
        self.engine.resolve_as(verdict).map(drop)
    }

    /// Rolls an open job back, whatever its state; a no-op without an open job.
    pub fn rollback(&self) -> Result<()> {
        self.engine.abort()
    }

    /// Waits until the job is over, and returns its error if it failed. A job that failed before or during the wait needs
    /// no verdict: it is rolled back.
    pub fn finish(&self, timeout: Option<Duration>) -> Result<()> {
        self.engine.finish_or_abort(timeout)
    }

    /// State of the job.
    pub fn progress(&self) -> Result<Progress> {
        self.engine.progress(ONLY)
    }

    /// When the 16-bit copies are written.
    pub fn publish(&self) -> Publish {
        self.options.publish
    }
}

/// Work that takes cores for every task that touches tensors.
struct Scheduled {
    work: Box<dyn Bucket>,
    options: Options,
}

impl Bucket for Scheduled {
    fn run(&mut self, task: Task, recording: &mut Recording) -> Result<StepStats> {
        // A commit of copies that are written already runs on the caller's thread.
        let light = task == Task::Pass || task == Task::Commit && self.options.publish != Publish::Final;
        if light {
            return self.work.run(task, recording);
        }
        let Options { priority, cores, .. } = self.options;
        with_cores(priority, cores, || self.work.run(task, recording))?
    }

    fn speculates(&self) -> bool {
        self.work.speculates()
    }
}
