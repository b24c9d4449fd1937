//! Steps that can be taken back: the recording of one step, its undo, its redo.
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
use crate::kernel::{AdagradRule, AdamRule, LionRule, Rule, log_bytes, log_used_of};
use crate::optim::spread::Job;
use crate::optim::{StepStats, undo};
use crate::sys::reserve::Reserve;

/// How a step is taken back. Passed as `uint32_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub enum spw_undo_mode {
    /// By the inverse formula (SuperOffload section 4.4, SysX section 4.3): no memory, but old values come back
    /// only within a few units in the last place, exp_avg and exp_avg_sq worse after a large gradient. Gradients
    /// with Inf or NaN are refused.
    SPW_UNDO_ARITHMETIC = 0,
    /// To the bit, by a log of the differences to the inverse formula: about 2 bytes per parameter, 13 in a step
    /// where nothing can be predicted (the first, or one with Inf everywhere).
    SPW_UNDO_DELTA = 1,
}

/// What a recording has room for.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct spw_undo_options {
    /// `sizeof(spw_undo_options)`
    pub struct_size: u32,
    /// An `spw_undo_mode`.
    pub mode: u32,
    /// Most elements of one step, all tensors together.
    pub elements: u64,
    /// Most tensors of one step.
    pub tensors: u64,
}

// SAFETY: integers without padding.
unsafe impl Record for spw_undo_options {
    const FIRST_SIZE: usize = 24;
    const NAME: &'static str = "spw_undo_options";
}

/// The recording of one step.
pub struct spw_undo {
    /// None in arithmetic mode.
    log: Option<Reserve>,
    tensors: usize,
    step: Option<Step>,
}

/// What was stepped, and with which coefficients.
enum Step {
    Adam(Vec<spw_tensor>, Vec<AdamRule>),
    Adagrad(Vec<spw_tensor>, Vec<AdagradRule>),
    Lion(Vec<spw_tensor>, Vec<LionRule>),
}

/// Makes a recording. Its log takes addresses now (13 bytes per element) and memory page by page as steps need it. One
/// object, one thread at a time.
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
        // SAFETY: the caller's promise is the callee's.
        let options = unsafe { record::read(options, "options") }?;
        let (elements, tensors) = (options.elements as usize, options.tensors as usize);
        if options.elements > LIMIT || options.tensors > LIMIT {
            return Err(Error::invalid("options.elements", "and options.tensors are at most 2^48"));
        }
        let log = match record::flag("options.mode", options.mode)? {
            // A tensor wastes less than one more small tensor's log.
            true => Some(Reserve::new(log_bytes(elements) + tensors * log_bytes(1))?),
            false => None,
        };
        // SAFETY: not NULL, and the caller's promise.
        unsafe { undo_out.write(Box::into_raw(Box::new(spw_undo { log, tensors, step: None }))) };
        Ok(())
    })
}

const LIMIT: u64 = 1 << 48;

/// `spw_adam_step`, recorded in `undo`, which forgets the step it held. It remembers the tensors' addresses: until
/// the step is forgotten, the spans stay where they are and only spillway writes to them, gradients included.
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
        // SAFETY: the caller's promise is the callees'.
        unsafe {
            record::check_output(stats, "stats")?;
            let jobs = adam::jobs(options, tensors, count)?;
            let seen =
                undo.step(jobs, tensors, count, Step::Adam, |jobs| crate::optim::adam::step(jobs, true))?;
            tensor::write_stats(seen, stats)
        }
    })
}

/// `spw_adagrad_step`, recorded as `spw_undo_adam_step`.
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
        // SAFETY: the caller's promise is the callees'.
        unsafe {
            record::check_output(stats, "stats")?;
            let jobs = adagrad::jobs(options, tensors, count)?;
            let seen = undo
                .step(jobs, tensors, count, Step::Adagrad, |jobs| crate::optim::adagrad::step(jobs, true))?;
            tensor::write_stats(seen, stats)
        }
    })
}

/// `spw_lion_step`, recorded as `spw_undo_adam_step`.
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
        // SAFETY: the caller's promise is the callees'.
        unsafe {
            record::check_output(stats, "stats")?;
            let jobs = lion::jobs(options, tensors, count)?;
            let seen =
                undo.step(jobs, tensors, count, Step::Lion, |jobs| crate::optim::lion::step(jobs, true))?;
            tensor::write_stats(seen, stats)
        }
    })
}

/// Takes the recorded step back and forgets it: param, exp_avg and exp_avg_sq have the bits from before the step
/// (arithmetic mode: nearly), and param_copy those of the restored param rounded. Without a recorded step it is
/// SPW_ERR_INVALID_ARGUMENT.
///
/// # Safety
/// The recorded spans are as the step left them.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_undo_rollback(undo: Option<&mut spw_undo>) -> spw_status {
    guard(|| {
        // SAFETY: the caller's promise is the callee's.
        unsafe { object(undo)?.back(None) }
    })
}

/// Takes the recorded step back and does it again with `grad_scale` in place of its factor on the gradient, in one pass
/// over memory; then forgets it. The result has the bits of stepping with `grad_scale` in the first place.
///
/// # Safety
/// As `spw_undo_rollback`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_undo_redo(undo: Option<&mut spw_undo>, grad_scale: f64) -> spw_status {
    guard(|| {
        if !(grad_scale as f32).is_finite() {
            return Err(Error::invalid("grad_scale", format!("{grad_scale} is not a finite f32")));
        }
        // SAFETY: the caller's promise is the callee's.
        unsafe { object(undo)?.back(Some(grad_scale as f32)) }
    })
}

/// Forgets the recorded step, which then stands; without one it does nothing. The log's memory is kept for the next
/// step, or given back to the system if `release_memory` is 1.
#[unsafe(no_mangle)]
pub extern "C" fn spw_undo_commit(undo: Option<&mut spw_undo>, release_memory: u32) -> spw_status {
    guard(|| {
        let undo = object(undo)?;
        let release = record::flag("release_memory", release_memory)?;
        undo.step = None;
        if let Some(log) = undo.log.as_mut().filter(|_| release) {
            log.release();
        }
        Ok(())
    })
}

/// Bytes of log that the recorded step uses; 0 without one.
///
/// # Safety
/// `bytes_out` points to a u64.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_undo_log_bytes(undo: Option<&mut spw_undo>, bytes_out: *mut u64) -> spw_status {
    guard(|| {
        let bytes_out = out(bytes_out, "bytes_out")?;
        let bytes = object(undo)?.log_used();
        // SAFETY: not NULL, and the caller's promise.
        unsafe { bytes_out.write(bytes) };
        Ok(())
    })
}

/// Frees the recording; its step stands. NULL does nothing.
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
    /// Steps `jobs` with the log attached, and remembers them.
    unsafe fn step<'a, R: Rule>(
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
        // SAFETY: the caller's promise is the callee's.
        let raw = unsafe { tensor::read_all(tensors, count) }?;
        let rules = jobs.iter().map(|job| job.optimizer).collect();
        self.step = None;
        let mut jobs = attach(jobs, self.log.as_mut())?;
        let seen = step(&mut jobs)?;
        drop(jobs);
        let raw = raw.into_iter().filter(|tensor| tensor.n > 0).collect();
        self.step = Some(remember(raw, rules));
        Ok(seen)
    }

    /// Takes the recorded step back, and does it again with another factor if there is one.
    unsafe fn back(&mut self, again: Option<f32>) -> Result<()> {
        let step = self.step.as_ref().ok_or_else(|| Error::invalid("undo", "holds no recorded step"))?;
        // SAFETY: the caller's promise is the callee's.
        unsafe {
            match step {
                Step::Adam(tensors, rules) => back(tensors, rules, self.log.as_mut(), again),
                Step::Adagrad(tensors, rules) => back(tensors, rules, self.log.as_mut(), again),
                Step::Lion(tensors, rules) => back(tensors, rules, self.log.as_mut(), again),
            }?;
        }
        self.step = None;
        Ok(())
    }

    fn log_used(&mut self) -> u64 {
        let (Some(step), Some(log)) = (&self.step, &mut self.log) else { return 0 };
        let (Step::Adam(tensors, _) | Step::Adagrad(tensors, _) | Step::Lion(tensors, _)) = step;
        let mut rest: &[u8] = log.bytes_mut();
        let mut used = 0;
        for tensor in tensors {
            let (log, after) = rest.split_at(log_bytes(tensor.n as usize));
            used += log_used_of(log, tensor.n as usize);
            rest = after;
        }
        used
    }
}

unsafe fn back<R: Rule>(
    tensors: &[spw_tensor],
    rules: &[R],
    log: Option<&mut Reserve>,
    again: Option<f32>,
) -> Result<()> {
    // SAFETY: the caller's promise is the callee's.
    let jobs = unsafe { tensor::jobs(tensors.as_ptr(), tensors.len(), &(), |_| Ok(())) }?;
    let jobs = jobs.into_iter().zip(rules).map(|(job, rule)| Job { optimizer: *rule, tensor: job.tensor });
    undo::undo(&mut attach(jobs.collect(), log)?, again)
}

/// Gives each tensor its part of the log.
fn attach<'a, R>(jobs: Vec<Job<'a, R>>, log: Option<&'a mut Reserve>) -> Result<Vec<Job<'a, R>>> {
    let Some(log) = log else { return Ok(jobs) };
    let mut rest = log.bytes_mut();
    let attached = jobs.into_iter().map(|job| {
        let wanted = log_bytes(job.tensor.len());
        let (mine, after) = std::mem::take(&mut rest)
            .split_at_mut_checked(wanted)
            .ok_or_else(|| Error::invalid("tensors", "have more elements than the recording has room for"))?;
        rest = after;
        Ok(Job { optimizer: job.optimizer, tensor: job.tensor.with_log(mine)? })
    });
    attached.collect()
}
