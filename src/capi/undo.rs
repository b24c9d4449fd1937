//! Reversible steps: recording one step, rolling it back, redoing it.
#![allow(non_camel_case_types)]

use super::adagrad::{self, spw_adagrad_options};
use super::adam::{self, spw_adam_options};
use super::guard::guard;
use super::library::out;
use super::lion::{self, spw_lion_options};
use super::record::{self, Record};
use super::status::spw_status;
use super::tensor::{self, spw_step_stats, spw_tensor};
use crate::error::{Error, Result};
use crate::kernel::{AdagradRule, AdamRule, LionRule, Rule, log_bytes};
use crate::optim::spread::Job;
use crate::optim::{StepStats, undo};
use crate::sys::reserve::Reserve;
use crate::sys::room;

/// How a recorded step is rolled back. Passed as `uint32_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub enum spw_undo_mode {
    /// Approximately, by the inverse formula (SuperOffload section 4.4, SysX section 4.3), without extra memory. With
    /// Adam in f32, most old values come back exactly. The others differ by at most 2 units in the last place of the
    /// larger of the old and the new value. Old values 2^24 times smaller than the new ones are lost, for example the
    /// zero states before step 1. exp_avg_sq never becomes negative. Inf or NaN in a scaled gradient, param or state is
    /// an error, and nothing is changed.
    SPW_UNDO_ARITHMETIC = 0,
    /// Bit-exactly, from a log of the differences to the inverse formula. The log takes about 1.2 bytes per element in
    /// steady state, 9 at step 1, and never more than 13. Once the step is rolled back, redone or committed, log memory
    /// beyond 3 bytes per element returns to the system.
    SPW_UNDO_DELTA = 1,
    /// Bit-exactly and in constant time. The step reads one set of spans and writes another set, which the tensors name
    /// in their shadow fields. `spw_undo_rollback` says which set is current afterwards.
    SPW_UNDO_SHADOW = 2,
}

/// Mode and capacity of a recording.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct spw_undo_options {
    /// `sizeof(spw_undo_options)`
    pub struct_size: u32,
    /// An `spw_undo_mode`.
    pub mode: u32,
    /// Maximum number of elements of one step, all tensors together. Used only with SPW_UNDO_DELTA.
    pub elements: u64,
    /// Maximum number of tensors of one step.
    pub tensors: u64,
}

// SAFETY: integers without padding.
unsafe impl Record for spw_undo_options {
    const FIRST_SIZE: usize = 24;
    const NAME: &'static str = "spw_undo_options";
}

/// Records one step, so that it can be rolled back.
pub struct spw_undo {
    mode: Mode,
    tensors: usize,
    pub(super) step: Option<Step>,
    /// Checksum of the spans after a DeepSpeed step. Its rollback names the spans again, and they may have moved.
    pub(super) seal: u64,
}

enum Mode {
    Arithmetic,
    Delta(Reserve),
    Shadow,
}

/// The tensors of the recorded step, and their coefficients.
pub(super) enum Step {
    Adam(Vec<spw_tensor>, Vec<AdamRule>),
    Adagrad(Vec<spw_tensor>, Vec<AdagradRule>),
    Lion(Vec<spw_tensor>, Vec<LionRule>),
}

/// Creates a recording. SPW_UNDO_DELTA reserves 13 bytes of address space per element now, and takes memory page by
/// page as steps need it. Free the recording with `spw_undo_close`. One thread at a time may use an object.
///
/// # Safety
/// `options` points to a struct of `struct_size` bytes, `undo_out` to a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_undo_open(
    options: *const spw_undo_options,
    undo_out: *mut *mut spw_undo,
) -> spw_status {
    guard(|| {
        let undo_out = out(undo_out, "undo_out")?;
        // SAFETY: the caller meets the callee's requirements.
        let options = unsafe { record::read(options, "options") }?;
        let (elements, tensors) = (options.elements as usize, options.tensors as usize);
        if options.elements > LIMIT || options.tensors > LIMIT {
            return Err(Error::invalid("options.elements", "and options.tensors are at most 2^48"));
        }
        let mode = match options.mode {
            0 => Mode::Arithmetic,
            // `log_bytes(1)` bounds what each further tensor wastes by rounding.
            1 => Mode::Delta(Reserve::new(log_bytes(elements) + tensors * log_bytes(1))?),
            2 => Mode::Shadow,
            other => {
                return Err(Error::invalid("options.mode", format!("{other} is not an spw_undo_mode")));
            }
        };
        // SAFETY: not NULL, and valid by the caller's promise.
        unsafe { undo_out.write(Box::into_raw(Box::new(spw_undo { mode, tensors, step: None, seal: 0 }))) };
        Ok(())
    })
}

const LIMIT: u64 = 1 << 48;

/// Does `spw_adam_step` and records it in `undo`, which forgets its earlier step. Until this step is rolled back,
/// redone or committed, the spans must not move, and only Spillway may write to them, gradients included. In mode
/// SPW_UNDO_SHADOW every tensor must have shadow spans; in the other modes no tensor may. A step with more elements or
/// tensors than the recording's capacity is an error. Statistics are computed if `stats` is not NULL.
///
/// # Safety
/// As `spw_adam_step`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_undo_adam_step(
    undo: Option<&mut spw_undo>,
    options: *const spw_adam_options,
    tensors: *const spw_tensor,
    count: usize,
    stats: *mut spw_step_stats,
) -> spw_status {
    guard(|| {
        let undo = object(undo)?;
        // SAFETY: the caller meets the callees' requirements.
        unsafe {
            record::check_output(stats, "stats")?;
            let squares = !stats.is_null();
            let jobs = adam::jobs(options, tensors, count)?;
            let seen =
                undo.step(jobs, tensors, count, Step::Adam, |jobs| crate::optim::adam::step(jobs, squares))?;
            tensor::write_stats(seen, stats)
        }
    })
}

/// Does `spw_adagrad_step` and records it, as `spw_undo_adam_step`.
///
/// # Safety
/// As `spw_adam_step`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_undo_adagrad_step(
    undo: Option<&mut spw_undo>,
    options: *const spw_adagrad_options,
    tensors: *const spw_tensor,
    count: usize,
    stats: *mut spw_step_stats,
) -> spw_status {
    guard(|| {
        let undo = object(undo)?;
        // SAFETY: the caller meets the callees' requirements.
        unsafe {
            record::check_output(stats, "stats")?;
            let squares = !stats.is_null();
            let jobs = adagrad::jobs(options, tensors, count)?;
            let seen = undo.step(jobs, tensors, count, Step::Adagrad, |jobs| {
                crate::optim::adagrad::step(jobs, squares)
            })?;
            tensor::write_stats(seen, stats)
        }
    })
}

/// Does `spw_lion_step` and records it, as `spw_undo_adam_step`.
///
/// # Safety
/// As `spw_adam_step`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_undo_lion_step(
    undo: Option<&mut spw_undo>,
    options: *const spw_lion_options,
    tensors: *const spw_tensor,
    count: usize,
    stats: *mut spw_step_stats,
) -> spw_status {
    guard(|| {
        let undo = object(undo)?;
        // SAFETY: the caller meets the callees' requirements.
        unsafe {
            record::check_output(stats, "stats")?;
            let squares = !stats.is_null();
            let jobs = lion::jobs(options, tensors, count)?;
            let seen =
                undo.step(jobs, tensors, count, Step::Lion, |jobs| crate::optim::lion::step(jobs, squares))?;
            tensor::write_stats(seen, stats)
        }
    })
}

/// Rolls back the recorded step and forgets it. param, exp_avg and exp_avg_sq get the bits from before the step
/// (SPW_UNDO_ARITHMETIC: approximately). param_copy gets the restored param, rounded. Without a recorded step the call
/// is SPW_ERR_INVALID_ARGUMENT.
///
/// In mode SPW_UNDO_SHADOW the call writes no tensor, since the step changed only the shadow spans. The caller
/// continues with the tensors' own spans. After `spw_undo_commit` instead, the shadow spans are the current set: the
/// next step names them as param, exp_avg and exp_avg_sq, and the former ones as shadow. No data is copied in either
/// case. param_copy holds the parameters that the step wrote, so a caller that may roll back also keeps two copies of
/// it.
///
/// If a framework's tensors cannot change their address, the caller has three choices:
///
/// - Let the tensors be current after every other step only.
/// - Copy the current set back before each use of the tensors, at 0.9 of the time of a step.
/// - Record with SPW_UNDO_DELTA instead.
///
/// # Safety
/// The recorded spans are as the step left them.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_undo_rollback(undo: Option<&mut spw_undo>) -> spw_status {
    guard(|| {
        // SAFETY: the caller meets the callee's requirements.
        unsafe { object(undo)?.back(None) }
    })
}

/// Rolls back the recorded step and repeats it with `grad_scale` in place of its factor on the gradient, in one pass
/// over memory. Then it forgets the step. The result has the bits of a single step with `grad_scale`
/// (SPW_UNDO_ARITHMETIC: approximately). In mode SPW_UNDO_SHADOW the result is in the shadow spans, as after the step
/// and `spw_undo_commit`. A `grad_scale` that is not a finite f32 is an error.
///
/// # Safety
/// As `spw_undo_rollback`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_undo_redo(undo: Option<&mut spw_undo>, grad_scale: f64) -> spw_status {
    guard(|| {
        if !(grad_scale as f32).is_finite() {
            return Err(Error::invalid("grad_scale", format!("{grad_scale} is not a finite f32")));
        }
        // SAFETY: the caller meets the callee's requirements.
        unsafe { object(undo)?.back(Some(grad_scale as f32)) }
    })
}

/// Forgets the recorded step, which becomes permanent. Without a recorded step it does nothing. With `release_memory` 0
/// the log keeps up to 3 bytes per element for the next step; with 1 it returns all memory to the system.
#[unsafe(no_mangle)]
pub extern "C" fn spw_undo_commit(undo: Option<&mut spw_undo>, release_memory: u32) -> spw_status {
    guard(|| {
        let undo = object(undo)?;
        let release = record::flag("release_memory", release_memory)?;
        undo.forget();
        if let (Mode::Delta(log), true) = (&mut undo.mode, release) {
            log.release();
        }
        Ok(())
    })
}

/// Writes the bytes of log that the recorded step uses; 0 without a recorded step or a log.
///
/// # Safety
/// `bytes_out` points to a u64.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_undo_log_bytes(undo: Option<&mut spw_undo>, bytes_out: *mut u64) -> spw_status {
    guard(|| {
        let bytes_out = out(bytes_out, "bytes_out")?;
        let bytes = object(undo)?.log_used();
        // SAFETY: not NULL, and valid by the caller's promise.
        unsafe { bytes_out.write(bytes) };
        Ok(())
    })
}

/// Frees the recording. Its step becomes permanent. NULL does nothing.
#[unsafe(no_mangle)]
pub extern "C" fn spw_undo_close(undo: Option<Box<spw_undo>>) -> spw_status {
    guard(|| {
        drop(undo);
        Ok(())
    })
}

fn object(undo: Option<&mut spw_undo>) -> Result<&mut spw_undo> {
    undo.ok_or_else(|| Error::invalid("undo", "is NULL"))
}

impl spw_undo {
    /// Does a step of `jobs` with the log attached, and records it.
    pub(super) unsafe fn step<'a, R: Rule>(
        &'a mut self,
        jobs: Vec<Job<'a, R>>,
        tensors: *const spw_tensor,
        count: usize,
        remember: impl FnOnce(Vec<spw_tensor>, Vec<R>) -> Step,
        step: impl FnOnce(&mut [Job<'_, R>]) -> Result<StepStats>,
    ) -> Result<StepStats> {
        if jobs.len() > self.tensors {
            return Err(Error::invalid(
                "count",
                format!("is {count}, the recording has room for {}", self.tensors),
            ));
        }
        // SAFETY: the caller meets the callee's requirements.
        let raw = unsafe { tensor::read_all(tensors, count) }?;
        tensor::check_shadows(&raw, matches!(self.mode, Mode::Shadow))?;
        let rules = jobs.iter().map(|job| job.optimizer).collect();
        // All checks come before the earlier step is forgotten.
        self.check_room(&jobs)?;
        crate::optim::processor::kernel()?;
        self.forget();
        let mut jobs = attach(jobs, &mut self.mode)?;
        let seen = step(&mut jobs)?;
        drop(jobs);
        self.step = Some(remember(raw, rules));
        Ok(seen)
    }

    fn check_room<R>(&mut self, jobs: &[Job<'_, R>]) -> Result<()> {
        let Mode::Delta(log) = &mut self.mode else { return Ok(()) };
        match undo::log_bytes_of(jobs) <= log.bytes_mut().len() {
            true => Ok(()),
            false => Err(undo::no_room()),
        }
    }

    /// Rolls back the recorded step, and repeats it if there is another factor.
    pub(super) unsafe fn back(&mut self, again: Option<f32>) -> Result<()> {
        let step = self.step.as_ref().ok_or_else(|| Error::invalid("undo", "holds no recorded step"))?;
        // SAFETY: the caller meets the callee's requirements.
        unsafe {
            match step {
                Step::Adam(tensors, rules) => back(tensors, rules, &mut self.mode, again),
                Step::Adagrad(tensors, rules) => back(tensors, rules, &mut self.mode, again),
                Step::Lion(tensors, rules) => back(tensors, rules, &mut self.mode, again),
            }?;
        }
        self.forget();
        Ok(())
    }

    /// Drops the recorded step, and log memory beyond what steps usually need.
    fn forget(&mut self) {
        if let (Some(step), Mode::Delta(log)) = (self.step.take(), &mut self.mode) {
            undo::trim(log, step.lengths());
        }
    }

    fn log_used(&mut self) -> u64 {
        match (&self.step, &mut self.mode) {
            (Some(step), Mode::Delta(log)) => undo::log_used(log, step.lengths()),
            _ => 0,
        }
    }
}

impl Step {
    /// Element counts of the tensors that are not empty.
    fn lengths(&self) -> impl Iterator<Item = usize> {
        let (Step::Adam(tensors, _) | Step::Adagrad(tensors, _) | Step::Lion(tensors, _)) = self;
        tensors.iter().map(|tensor| tensor.n as usize).filter(|n| *n > 0)
    }
}

unsafe fn back<R: Rule>(
    tensors: &[spw_tensor],
    rules: &[R],
    mode: &mut Mode,
    again: Option<f32>,
) -> Result<()> {
    let shadow = matches!(mode, Mode::Shadow);
    if shadow && again.is_none() {
        return Ok(());
    }
    // SAFETY: the caller meets the callee's requirements.
    let spans = unsafe { tensor::spans(tensors) }?;
    let mut jobs = room::for_count("listing the tensors", tensors.len())?;
    for ((index, tensor), rule) in spans.zip(rules) {
        let mut job = Job { optimizer: *rule, tensor: tensor? };
        if matches!(mode, Mode::Arithmetic) {
            undo::check_reversible(&mut job).map_err(|error| tensor::at(index, error))?;
        }
        jobs.push(job);
    }
    let mut jobs = attach(jobs, mode)?;
    match again.filter(|_| shadow) {
        Some(scale) => undo::step_again(&mut jobs, scale),
        None => undo::undo(&mut jobs, again),
    }
}

/// Attaches each tensor's part of the log.
fn attach<'a, R>(jobs: Vec<Job<'a, R>>, mode: &'a mut Mode) -> Result<Vec<Job<'a, R>>> {
    match mode {
        Mode::Delta(log) => undo::attach(jobs, log.bytes_mut()),
        _ => Ok(jobs),
    }
}
