//! One recorded step, which can be rolled back, repeated with another gradient scale, or kept.
//!
//! Invariants:
//! - All checks of a new step come before the earlier step is forgotten.
//! - A step is recorded only after it was done. Whatever ends it also trims the memory of its log.
//! - The log belongs to the step that is recorded, in the order of its tensors.
#![forbid(unsafe_code)]

use super::parallel::{self, Job};
use super::{StepStats, processor, undo};
use crate::error::{Error, Result};
use crate::kernel::{AdagradRule, AdamRule, LionRule, Optimizer, Tensor, log_bytes};
use crate::stats;
use crate::sys::reserve::Reserve;
use crate::sys::try_vec;

/// The tensors of one call. Their owner lends them for each pass over their memory.
pub trait Tensors {
    /// Elements of each tensor that is not empty.
    fn lengths(&self) -> impl Iterator<Item = usize>;

    /// Fails for a tensor without shadow spans if `wanted`, or with shadow spans if not.
    fn check_shadows(&self, wanted: bool) -> Result<()>;

    /// True if the tensors have the number, lengths and types of `other`.
    fn same_shape(&self, other: &Self) -> bool;

    /// The tensors that are not empty, each with its index in the call.
    fn lend(&mut self) -> Result<Vec<(usize, Tensor<'_>)>>;
}

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
pub struct Recording<T> {
    memory: Memory,
    /// Most tensors of one step.
    capacity: usize,
    step: Option<Step<T>>,
    /// Checksum of the spans after a sealed step. Its rollback names the spans again, and they may have moved.
    seal: u64,
}

enum Memory {
    Arithmetic,
    Delta(Reserve),
    Shadow,
}

/// The tensors of the recorded step, and their coefficients.
pub enum Step<T> {
    /// A step of Adam.
    Adam(T, Vec<AdamRule>),
    /// A step of Adagrad.
    Adagrad(T, Vec<AdagradRule>),
    /// A step of Lion.
    Lion(T, Vec<LionRule>),
}

/// An optimizer whose steps can be recorded.
pub trait Recorded: Optimizer {
    /// The step of `tensors` with these coefficients.
    fn recorded<T>(tensors: T, rules: Vec<Self>) -> Step<T>;
}

impl Recorded for AdamRule {
    fn recorded<T>(tensors: T, rules: Vec<Self>) -> Step<T> {
        Step::Adam(tensors, rules)
    }
}

impl Recorded for AdagradRule {
    fn recorded<T>(tensors: T, rules: Vec<Self>) -> Step<T> {
        Step::Adagrad(tensors, rules)
    }
}

impl Recorded for LionRule {
    fn recorded<T>(tensors: T, rules: Vec<Self>) -> Step<T> {
        Step::Lion(tensors, rules)
    }
}

impl<T: Tensors> Recording<T> {
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

    /// Does a step of `jobs`, which are those of `tensors`, and records it. The earlier step becomes permanent.
    pub fn record<R: Recorded>(
        &mut self,
        jobs: Vec<Job<'_, R>>,
        tensors: T,
        step: impl FnOnce(&mut [Job<'_, R>]) -> Result<StepStats>,
    ) -> Result<StepStats> {
        if jobs.len() > self.capacity {
            let reason = format!(
                "is {}, but the recording has room for {}; raise options.tensors",
                jobs.len(),
                self.capacity
            );
            return Err(Error::invalid("count", reason));
        }
        tensors.check_shadows(matches!(self.memory, Memory::Shadow))?;
        let rules = jobs.iter().map(|job| job.optimizer).collect();
        if let Memory::Delta(log) = &mut self.memory
            && undo::log_bytes_of(&jobs) > log.bytes_mut().len()
        {
            return Err(undo::no_room());
        }
        processor::kernel()?;
        self.forget();
        let mut jobs = attach(jobs, &mut self.memory)?;
        let seen = step(&mut jobs)?;
        drop(jobs);
        self.step = Some(R::recorded(tensors, rules));
        Ok(seen)
    }

    /// Does an Adam step of one tensor and records it, with a checksum for [`Recording::rollback_sealed`].
    pub fn record_sealed(&mut self, jobs: Vec<Job<'_, AdamRule>>, tensors: T) -> Result<()> {
        let mut seal = 0;
        self.record(jobs, tensors, |jobs| {
            for job in jobs.iter_mut() {
                seal = undo::step_sealed(job)?;
            }
            stats::ADAM.add(parallel::elements(jobs));
            Ok(StepStats::default())
        })?;
        self.seal = seal;
        Ok(())
    }

    /// Rolls back the sealed step at the present address of its tensor. `jobs` are those of `tensors`. Returns false
    /// and changes nothing if another step is recorded, or if the spans are not as the step left them.
    pub fn rollback_sealed(&mut self, mut jobs: Vec<Job<'_, AdamRule>>, present: T) -> Result<bool> {
        let (Some(Step::Adam(tensors, rules)), Some(job)) = (&mut self.step, jobs.first_mut()) else {
            return Ok(jobs.is_empty());
        };
        let same = rules[..] == [job.optimizer] && tensors.same_shape(&present);
        if !same || undo::seal(job)? != self.seal {
            return Ok(false);
        }
        drop(jobs);
        *tensors = present;
        self.rollback(None)?;
        Ok(true)
    }

    /// Rolls back the recorded step, and repeats it if there is another gradient scale.
    pub fn rollback(&mut self, redo_scale: Option<f32>) -> Result<()> {
        let step = self.step.as_mut().ok_or_else(|| Error::invalid("undo", "has no recorded step"))?;
        match step {
            Step::Adam(tensors, rules) => rollback(tensors, rules, &mut self.memory, redo_scale),
            Step::Adagrad(tensors, rules) => rollback(tensors, rules, &mut self.memory, redo_scale),
            Step::Lion(tensors, rules) => rollback(tensors, rules, &mut self.memory, redo_scale),
        }?;
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
            (Some(step), Memory::Delta(log)) => undo::log_used(log, step.tensors().lengths()),
            _ => 0,
        }
    }

    /// Drops the recorded step, and log memory beyond what steps usually need.
    fn forget(&mut self) {
        if let (Some(step), Memory::Delta(log)) = (self.step.take(), &mut self.memory) {
            undo::trim(log, step.tensors().lengths());
        }
    }
}

impl<T> Step<T> {
    fn tensors(&self) -> &T {
        let (Step::Adam(tensors, _) | Step::Adagrad(tensors, _) | Step::Lion(tensors, _)) = self;
        tensors
    }
}

fn rollback<R: Optimizer, T: Tensors>(
    tensors: &mut T,
    rules: &[R],
    memory: &mut Memory,
    redo_scale: Option<f32>,
) -> Result<()> {
    let shadow = matches!(memory, Memory::Shadow);
    if shadow && redo_scale.is_none() {
        return Ok(());
    }
    let lent = tensors.lend()?;
    let mut jobs = try_vec::with_capacity("listing the tensors", lent.len())?;
    for ((index, tensor), rule) in lent.into_iter().zip(rules) {
        let mut job = Job { optimizer: *rule, tensor };
        if matches!(memory, Memory::Arithmetic) {
            undo::check_reversible(&mut job).map_err(|error| error.within(&format!("tensors[{index}].")))?;
        }
        jobs.push(job);
    }
    let mut jobs = attach(jobs, memory)?;
    match redo_scale.filter(|_| shadow) {
        Some(scale) => undo::step_again(&mut jobs, scale),
        None => undo::undo(&mut jobs, redo_scale),
    }
}

/// Attaches each tensor's part of the log.
fn attach<'a, R>(jobs: Vec<Job<'a, R>>, memory: &'a mut Memory) -> Result<Vec<Job<'a, R>>> {
    match memory {
        Memory::Delta(log) => undo::attach(jobs, log.bytes_mut()),
        _ => Ok(jobs),
    }
}
