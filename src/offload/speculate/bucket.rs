//! The tensors of one bucket, and what each task does to them.
#![forbid(unsafe_code)]

use super::round::Task;
use crate::error::Result;
use crate::kernel::{Kernel, LentTensor};
use crate::optim::lent::Lent;
use crate::optim::parallel::{self, Job};
use crate::optim::{self, Family, StepStats, undo};
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

/// How a bucket's step before the verdict is rolled back, exactly to the bit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Undo {
    /// From a log of the residuals that the inverse formula misses.
    Delta,
    /// From the old values, which are kept: steps write to the tensors' shadows.
    Shadow,
    /// Not at all, and without memory: buckets are measured before the verdict, and step once after it.
    None,
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

/// State that a bucket index keeps from round to round: the rollback log of its last step.
#[derive(Debug, Default)]
pub struct Recording {
    log: Option<Reserve>,
    room: usize,
    kernel: Option<Kernel>,
}

impl Recording {
    fn begin(&mut self, bytes: usize) -> Result<Kernel> {
        let kernel = optim::kernel()?;
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
        self.kernel.map_or_else(optim::kernel, Ok)
    }

    fn forget(&mut self, lengths: Vec<usize>) {
        if let Some(log) = &mut self.log {
            undo::trim(log, lengths.into_iter());
        }
    }
}

/// A bucket of tensors that step with the optimizer `O`. Committed steps are counted.
pub struct Tensors<O> {
    lent: Lent<O>,
    undo: Undo,
    publish: Publish,
}

impl<O: Family> Tensors<O> {
    /// A bucket of these tensors. Errors: a tensor has shadow spans and `undo` uses none, or the reverse; what was written
    /// to a copy counts, but the step withholds the copy.
    pub fn new(lent: Lent<O>, undo: Undo, publish: Publish) -> Result<Self> {
        lent.check_shadows(undo == Undo::Shadow)?;
        if publish == Publish::Final {
            lent.check_copies_only_written()?;
        }
        Ok(Tensors { lent, undo, publish })
    }

    /// The tensors, with their 16-bit copies only if wanted.
    fn lend(&mut self, copies: bool) -> Result<Vec<Job<'_, O>>> {
        if copies { self.lent.lend() } else { self.lent.lend_by(LentTensor::borrow_without_copy) }
    }

    /// True if speculative steps write 16-bit copies.
    fn publishes_early(&self) -> bool {
        self.publish != Publish::Final
    }

    fn speculate(&mut self, recording: &mut Recording) -> Result<StepStats> {
        let early = self.publishes_early();
        let undo = self.undo;
        let mut jobs = self.lend(early)?;
        match undo {
            Undo::Shadow => parallel::step_all(&mut jobs, true),
            Undo::Delta => {
                let kernel = recording.begin(undo::log_bytes_of(&jobs))?;
                parallel::step_on(kernel, &mut undo::attach(jobs, recording.bytes())?, true)
            }
            Undo::None => parallel::measure(&mut jobs),
        }
    }

    fn step(&mut self, factor: f32) -> Result<()> {
        let mut jobs = self.lend(true)?;
        undo::step_again(&mut jobs, factor)?;
        O::COUNTER.add(parallel::elements(&jobs));
        Ok(())
    }

    fn redo(&mut self, recording: &mut Recording, factor: f32) -> Result<()> {
        match self.undo {
            Undo::Shadow | Undo::None => self.step(factor),
            Undo::Delta => {
                let elements = self.undo_recorded(recording, true, Some(factor))?;
                O::COUNTER.add(elements);
                Ok(())
            }
        }
    }

    fn rollback(&mut self, recording: &mut Recording) -> Result<()> {
        let early = self.publishes_early();
        match self.undo {
            // The old values are still in place, but speculation has overwritten their copies.
            Undo::Shadow if early => {
                parallel::publish(&mut self.lent.lend_by(LentTensor::borrow_without_shadow)?)
            }
            Undo::Shadow | Undo::None => Ok(()),
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
        let jobs = self.lend(copies)?;
        let (lengths, elements) = (lengths(&jobs), parallel::elements(&jobs));
        undo::undo_on(kernel, &mut undo::attach(jobs, recording.bytes())?, redo_scale)?;
        recording.forget(lengths);
        Ok(elements)
    }

    fn commit(&mut self, recording: &mut Recording) -> Result<()> {
        let early = self.publishes_early();
        let mut jobs = self.lend(true)?;
        if !early {
            parallel::publish(&mut jobs)?;
        }
        O::COUNTER.add(parallel::elements(&jobs));
        recording.forget(lengths(&jobs));
        Ok(())
    }
}

fn lengths<O>(jobs: &[Job<'_, O>]) -> Vec<usize> {
    jobs.iter().map(|job| job.tensor.len()).collect()
}

impl<O: Family> Bucket for Tensors<O> {
    fn run(&mut self, task: Task, recording: &mut Recording) -> Result<StepStats> {
        match task {
            Task::Measure => return parallel::measure(&mut self.lend(false)?),
            Task::Speculate => return self.speculate(recording),
            Task::Pass => {}
            Task::Commit => self.commit(recording)?,
            Task::Rollback => self.rollback(recording)?,
            Task::Redo(factor) => self.redo(recording, factor)?,
            Task::Step(factor) => self.step(factor)?,
        }
        Ok(StepStats::default())
    }

    fn speculates(&self) -> bool {
        self.undo != Undo::None
    }
}
