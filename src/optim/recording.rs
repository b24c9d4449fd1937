//! One recorded step, which can be rolled back, repeated with another gradient scale, or kept.
//!
//! Invariants:
//! - All checks of a new step come before the earlier step is forgotten.
//! - A step is recorded only after it was done. Whatever ends it also trims the memory of its log.
//! - The log belongs to the step that is recorded, in the order of its tensors.
#![forbid(unsafe_code)]

use super::lent::Lent;
use super::optimizers::{Family, RecordedStep, WithTensors};
use super::parallel::{self, Job};
use super::step_stats::StepStats;
use super::undo;
use crate::error::{Error, Result};
use crate::kernel::{AdamRule, Optimizer, log_bytes, needs_a_log};
use crate::sys::reserve::Reserve;

/// How a step is rolled back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Approximately, by the inverse formula.
    Arithmetic,
    /// Bit-exactly, from a log of at most this many elements.
    Delta {
        /// Elements of all tensors of one step.
        elements: usize,
    },
    /// Bit-exactly: the step writes the tensors' shadows.
    Shadow,
}

/// Records one step.
pub struct Recording {
    memory: Memory,
    /// Most tensors of one step.
    capacity: usize,
    step: Option<RecordedStep>,
    /// Checksum of the spans after a sealed step. Its rollback names the spans again, and they may have moved.
    seal: u64,
}

enum Memory {
    Arithmetic,
    Delta(Reserve),
    Shadow,
}

impl Recording {
    /// A recording for steps of at most `capacity` tensors. Reserves address space for the log.
    pub fn new(mode: Mode, capacity: usize) -> Result<Self> {
        let memory = match mode {
            Mode::Arithmetic => Memory::Arithmetic,
            // `log_bytes(1)` bounds what each further tensor wastes by rounding.
            Mode::Delta { elements } => {
                Memory::Delta(Reserve::new(log_bytes(elements) + capacity * log_bytes(1))?)
            }
            Mode::Shadow => Memory::Shadow,
        };
        Ok(Recording { memory, capacity, step: None, seal: 0 })
    }

    /// Does `step` with the jobs of `tensors`, and records it. The earlier step becomes permanent.
    pub fn record<R: Family>(
        &mut self,
        mut tensors: Lent<R>,
        step: impl FnOnce(&mut [Job<'_, R>]) -> Result<StepStats>,
    ) -> Result<StepStats> {
        if tensors.count() > self.capacity {
            let reason = format!(
                "is {}, but the recording has room for {}; raise options.tensors",
                tensors.count(),
                self.capacity
            );
            return Err(Error::invalid("count", reason));
        }
        tensors.check_shadows(matches!(self.memory, Memory::Shadow))?;
        let jobs = tensors.lend()?;
        if let Memory::Delta(log) = &mut self.memory
            && undo::log_bytes_of(&jobs) > log.bytes_mut().len()
        {
            return Err(undo::no_room());
        }
        if matches!(self.memory, Memory::Arithmetic) && jobs.iter().any(|job| job.tensor.keeps_values()) {
            return Err(needs_a_log().into());
        }
        super::kernel()?;
        self.forget();
        let mut jobs = attach(jobs, &mut self.memory)?;
        let seen = step(&mut jobs)?;
        drop(jobs);
        self.step = Some(R::RECORDED(tensors));
        Ok(seen)
    }

    /// Does an Adam step of one tensor and records it, with a checksum for [`Recording::rollback_sealed`].
    pub fn record_sealed(&mut self, tensors: Lent<AdamRule>) -> Result<()> {
        let mut seal = 0;
        self.record(tensors, |jobs| {
            for job in jobs.iter_mut() {
                seal = undo::step_sealed(job)?;
            }
            AdamRule::COUNTER.add(parallel::elements(jobs));
            Ok(StepStats::default())
        })?;
        self.seal = seal;
        Ok(())
    }

    /// Rolls back the sealed step of one tensor, which is now at the address in `present`. Returns whether the
    /// rollback was exact. `None`, and nothing is changed, if another step is recorded, or if the spans are not as the
    /// step left them.
    pub fn rollback_sealed(&mut self, mut present: Lent<AdamRule>) -> Result<Option<bool>> {
        let nothing = (present.count() == 0).then_some(true);
        let Some(RecordedStep::Adam(tensors)) = &mut self.step else { return Ok(nothing) };
        // Before the seal, which costs a pass over the memory.
        if !tensors.is_alike(&present) {
            return Ok(nothing);
        }
        for job in &mut present.lend()? {
            if undo::seal(job)? != self.seal {
                return Ok(None);
            }
        }
        *tensors = present;
        self.rollback(None)?;
        Ok(Some(!matches!(self.memory, Memory::Arithmetic)))
    }

    /// Rolls back the recorded step, and repeats it if there is another gradient scale.
    pub fn rollback(&mut self, redo_scale: Option<f32>) -> Result<()> {
        let step = self.step.as_mut().ok_or_else(|| Error::invalid("undo", "has no recorded step"))?;
        step.with(Rollback { memory: &mut self.memory, redo_scale })?;
        self.forget();
        Ok(())
    }

    /// Makes the recorded step permanent. With `release`, returns the memory of the log to the system.
    pub fn commit(&mut self, release: bool) {
        self.forget();
        if let (Memory::Delta(log), true) = (&mut self.memory, release) {
            log.release();
        }
    }

    /// Bytes of log that the recorded step uses.
    pub fn log_used(&mut self) -> u64 {
        match (&self.step, &mut self.memory) {
            (Some(step), Memory::Delta(log)) => undo::log_used(log, step.lengths().into_iter()),
            _ => 0,
        }
    }

    /// Drops the recorded step, and log memory beyond what steps usually need.
    fn forget(&mut self) {
        if let (Some(step), Memory::Delta(log)) = (self.step.take(), &mut self.memory) {
            undo::trim(log, step.lengths().into_iter());
        }
    }
}

struct Rollback<'a> {
    memory: &'a mut Memory,
    redo_scale: Option<f32>,
}

impl WithTensors for Rollback<'_> {
    fn with<R: Optimizer>(self, tensors: &mut Lent<R>) -> Result<()> {
        let Rollback { memory, redo_scale } = self;
        let shadow = matches!(memory, Memory::Shadow);
        if shadow && redo_scale.is_none() {
            return Ok(());
        }
        let mut jobs = tensors.lend()?;
        if matches!(memory, Memory::Arithmetic) {
            let irreversible = |job: &mut Job<'_, R>| undo::check_reversible(job).err();
            let found =
                jobs.iter_mut().enumerate().find_map(|(index, job)| Some((index, irreversible(job)?)));
            if let Some((index, error)) = found {
                drop(jobs);
                return Err(tensors.named(index, error));
            }
        }
        let mut jobs = attach(jobs, memory)?;
        match redo_scale.filter(|_| shadow) {
            Some(scale) => undo::step_again(&mut jobs, scale),
            None => undo::undo(&mut jobs, redo_scale),
        }
    }
}

/// Attaches each tensor's part of the log.
fn attach<'a, R>(jobs: Vec<Job<'a, R>>, memory: &'a mut Memory) -> Result<Vec<Job<'a, R>>> {
    match memory {
        Memory::Delta(log) => undo::attach(jobs, log.bytes_mut()),
        _ => Ok(jobs),
    }
}
