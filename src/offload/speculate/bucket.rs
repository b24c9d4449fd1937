//! The tensors of one bucket, and what each task does to them.
#![forbid(unsafe_code)]

use std::marker::PhantomData;

use super::round::Task;
use crate::error::Result;
use crate::kernel::{Kernel, Optimizer};
use crate::optim::parallel::{self, Job};
use crate::optim::{StepStats, processor, undo};
use crate::stats::OptimizerCounter;
use crate::sys::reserve::Reserve;

/// When the 16-bit copies of parameters are written, and when readers may use them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Publish {
    /// Written once, when the bucket is final. Until then readers may use the old copies.
    Final,
    /// Written by every step; valid when the bucket is final.
    Staged,
    /// Written by every step; valid at once, but a rollback may replace them.
    Speculative,
}

/// How a bucket's step is rolled back, exactly to the bit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Undo {
    /// From a log of the residuals that the inverse formula misses.
    Delta,
    /// From the old values, which are kept: steps write to the tensors' shadows.
    Shadow,
}

/// A bucket as the engine drives it. A task that fails before its first write may be retried; a task that panics leaves
/// the bucket's values undefined.
pub trait Bucket: Send {
    /// Runs a task. The statistics are meaningful for `Measure` and `Speculate` only.
    fn run(&mut self, task: Task, recording: &mut Recording) -> Result<StepStats>;

    /// False for a bucket that is only measured before the verdict, and steps once after it.
    fn speculates(&self) -> bool {
        true
    }
}

/// Lends tensors for the duration of one pass over them.
pub trait Lender<O>: Send {
    /// The tensors with their optimizers, and with 16-bit copies and shadows only if requested.
    fn lend(&mut self, copies: bool, shadows: bool) -> Result<Vec<Job<'_, O>>>;
}

/// State that a bucket index keeps from round to round: the rollback log of its last step.
#[derive(Debug, Default)]
pub struct Recording {
    log: Option<Reserve>,
    room: usize,
    kernel: Option<Kernel>,
}

impl Recording {
    fn begin(&mut self, bytes: usize) -> Result<Kernel> {
        let kernel = processor::kernel()?;
        if self.log.is_none() || self.room < bytes {
            // Frees the old log first: both logs at once could exceed a limit on address space.
            self.log = None;
            self.log = Some(Reserve::new(bytes)?);
            self.room = bytes;
        }
        self.kernel = Some(kernel);
        Ok(kernel)
    }

    fn bytes(&mut self) -> &mut [u8] {
        self.log.as_mut().map_or(&mut [], Reserve::bytes_mut)
    }

    /// The kernel that wrote the log; only this kernel can read it.
    fn kernel(&self) -> Result<Kernel> {
        self.kernel.map_or_else(processor::kernel, Ok)
    }

    fn forget(&mut self, lengths: Vec<usize>) {
        if let Some(log) = &mut self.log {
            undo::trim(log, lengths.into_iter());
        }
    }
}

/// A bucket of tensors that step with the optimizer `O`.
pub struct Tensors<O, L> {
    lender: L,
    undo: Undo,
    publish: Publish,
    counter: &'static OptimizerCounter,
    optimizer: PhantomData<fn() -> O>,
}

impl<O: Optimizer, L: Lender<O>> Tensors<O, L> {
    /// A bucket of the tensors that `lender` lends. `counter` counts the elements of committed steps.
    pub fn new(lender: L, undo: Undo, publish: Publish, counter: &'static OptimizerCounter) -> Self {
        Tensors { lender, undo, publish, counter, optimizer: PhantomData }
    }

    /// True if speculative steps write 16-bit copies.
    fn publishes_early(&self) -> bool {
        self.publish != Publish::Final
    }

    fn speculate(&mut self, recording: &mut Recording) -> Result<StepStats> {
        let early = self.publishes_early();
        let mut jobs = self.lender.lend(early, true)?;
        match self.undo {
            Undo::Shadow => parallel::step_all(&mut jobs, true),
            Undo::Delta => {
                let kernel = recording.begin(undo::log_bytes_of(&jobs))?;
                parallel::step_on(kernel, &mut undo::attach(jobs, recording.bytes())?, true)
            }
        }
    }

    fn step(&mut self, factor: f32) -> Result<()> {
        let mut jobs = self.lender.lend(true, true)?;
        undo::step_again(&mut jobs, factor)?;
        self.counter.add(parallel::elements(&jobs));
        Ok(())
    }

    fn redo(&mut self, recording: &mut Recording, factor: f32) -> Result<()> {
        match self.undo {
            Undo::Shadow => self.step(factor),
            Undo::Delta => {
                let elements = self.undo_recorded(recording, true, Some(factor))?;
                self.counter.add(elements);
                Ok(())
            }
        }
    }

    fn rollback(&mut self, recording: &mut Recording) -> Result<()> {
        let early = self.publishes_early();
        match self.undo {
            // The old values are still in place, but speculation has overwritten their copies.
            Undo::Shadow if early => parallel::publish(&mut self.lender.lend(true, false)?),
            Undo::Shadow => Ok(()),
            Undo::Delta => self.undo_recorded(recording, early, None).map(drop),
        }
    }

    /// Undoes the logged step, and steps again with the factor `redo_scale` if given; returns the number of elements.
    fn undo_recorded(
        &mut self,
        recording: &mut Recording,
        copies: bool,
        redo_scale: Option<f32>,
    ) -> Result<usize> {
        let kernel = recording.kernel()?;
        let jobs = self.lender.lend(copies, true)?;
        let (lengths, elements) = (lengths(&jobs), parallel::elements(&jobs));
        undo::undo_on(kernel, &mut undo::attach(jobs, recording.bytes())?, redo_scale)?;
        recording.forget(lengths);
        Ok(elements)
    }

    fn commit(&mut self, recording: &mut Recording) -> Result<()> {
        let early = self.publishes_early();
        let mut jobs = self.lender.lend(true, true)?;
        if !early {
            parallel::publish(&mut jobs)?;
        }
        self.counter.add(parallel::elements(&jobs));
        recording.forget(lengths(&jobs));
        Ok(())
    }
}

fn lengths<O>(jobs: &[Job<'_, O>]) -> Vec<usize> {
    jobs.iter().map(|job| job.tensor.len()).collect()
}

impl<O: Optimizer, L: Lender<O>> Bucket for Tensors<O, L> {
    fn run(&mut self, task: Task, recording: &mut Recording) -> Result<StepStats> {
        match task {
            Task::Measure => return parallel::measure(&mut self.lender.lend(false, true)?),
            Task::Speculate => return self.speculate(recording),
            Task::Pass => {}
            Task::Commit => self.commit(recording)?,
            Task::Rollback => self.rollback(recording)?,
            Task::Redo(factor) => self.redo(recording, factor)?,
            Task::Step(factor) => self.step(factor)?,
        }
        Ok(StepStats::default())
    }
}
