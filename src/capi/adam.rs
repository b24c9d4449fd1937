//! Adam and AdamW: one call for any number of tensors, and an object that counts the steps.
#![allow(non_camel_case_types)]

use super::guard::guard;
use super::library::out;
use super::record::{self, Record};
use super::status::spw_status;
use super::tensor::{self, spw_step_stats, spw_tensor};
use crate::error::{Error, Result};
use crate::kernel::AdamRule;
use crate::optim::adam::{self, AdamOptions};
use crate::optim::spread::Job;

/// Where weight decay enters. Passed as `uint32_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub enum spw_weight_decay {
    /// Into the parameter (AdamW).
    SPW_WEIGHT_DECAY_DECOUPLED = 0,
    /// Into the gradient (Adam, L2).
    SPW_WEIGHT_DECAY_L2 = 1,
}

/// Hyper-parameters of one Adam step. Fill it with `spw_adam_options_init`, then change what differs.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct spw_adam_options {
    /// `sizeof(spw_adam_options)`
    pub struct_size: u32,
    /// An `spw_weight_decay`.
    pub weight_decay_mode: u32,
    /// Number of this step, from 1. An `spw_adam` object counts by itself and starts after `step - 1`.
    pub step: u64,
    /// Learning rate, finite and >= 0.
    pub lr: f64,
    /// Decay of exp_avg, in [0, 1).
    pub beta1: f64,
    /// Decay of exp_avg_sq, in [0, 1).
    pub beta2: f64,
    /// Added to the denominator, finite and >= 0.
    pub eps: f64,
    /// Weight decay, finite and >= 0; 0 leaves it out.
    pub weight_decay: f64,
    /// Factor on the gradient (1 / loss scale times clip coefficient), rounded to f32.
    pub grad_scale: f64,
    /// 1 leaves the division by 1 - beta^t out, 0 does it.
    pub no_bias_correction: u32,
    /// 0
    pub reserved: u32,
}

// SAFETY: numbers without padding.
unsafe impl Record for spw_adam_options {
    const FIRST_SIZE: usize = 72;
    const NAME: &'static str = "spw_adam_options";
}

/// An Adam optimizer that keeps its hyper-parameters and counts its steps.
pub struct spw_adam {
    options: AdamOptions,
}

/// Fills in the defaults of `torch.optim.AdamW` without weight decay: lr 1e-3, beta 0.9 and 0.999, eps 1e-8, step 1,
/// grad_scale 1, decoupled. `struct_size` is `sizeof(spw_adam_options)`.
///
/// # Safety
/// `options` points to `struct_size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_adam_options_init(
    options: *mut spw_adam_options,
    struct_size: usize,
) -> spw_status {
    guard(|| {
        let defaults = AdamOptions::default();
        let value = spw_adam_options {
            struct_size: 0,
            weight_decay_mode: spw_weight_decay::SPW_WEIGHT_DECAY_DECOUPLED as u32,
            step: defaults.step,
            lr: defaults.lr,
            beta1: defaults.beta1,
            beta2: defaults.beta2,
            eps: defaults.eps,
            weight_decay: defaults.weight_decay,
            grad_scale: defaults.grad_scale,
            no_bias_correction: 0,
            reserved: 0,
        };
        // SAFETY: the caller's promise is the callee's.
        unsafe { record::init(&value, options, struct_size, "options") }
    })
}

/// One step of every tensor, in one pass over their memory (SuperOffload section 4.6, "GraceAdam"):
///
///     g = grad * grad_scale                       (+ weight_decay * p for L2)
///     m = beta1 * m + (1 - beta1) * g
///     v = beta2 * v + (1 - beta2) * g * g
///     p = p - lr * weight_decay * p               (decoupled)
///     p = p - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
///
/// in f32 with fused multiply-adds: the same bits on every processor, for every number of threads and however a
/// parameter is cut into tensors. With `stats` not NULL the norm and finiteness of the scaled gradients come
/// out of the same pass. Tensors of one call must not overlap. Several threads may call this at the same time.
///
/// # Safety
/// `tensors` points to `count` structs, `struct_size` bytes apart, whose spans nobody else uses during the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_adam_step(
    options: *const spw_adam_options,
    tensors: *const spw_tensor,
    count: usize,
    stats: *mut spw_step_stats,
) -> spw_status {
    guard(|| {
        // SAFETY: the caller's promise is the callee's.
        unsafe { step(&parse(options)?, tensors, count, stats) }
    })
}

/// Makes an optimizer object. Free it with `spw_adam_close`. One object, one thread at a time.
///
/// # Safety
/// `options` points to a struct of `struct_size` bytes, `adam_out` to a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_adam_open(
    options: *const spw_adam_options,
    adam_out: *mut *mut spw_adam,
) -> spw_status {
    guard(|| {
        let adam_out = out(adam_out, "adam_out")?;
        // SAFETY: the caller's promise is the callee's.
        let options = unsafe { parse(options) }?;
        rule(&options)?;
        // SAFETY: not NULL, and the caller's promise.
        unsafe { adam_out.write(Box::into_raw(Box::new(spw_adam { options }))) };
        Ok(())
    })
}

/// Changes the learning rate from the next step on.
#[unsafe(no_mangle)]
pub extern "C" fn spw_adam_set_lr(adam: Option<&mut spw_adam>, lr: f64) -> spw_status {
    guard(|| {
        let adam = object(adam)?;
        let options = AdamOptions { lr, ..adam.options };
        rule(&options)?;
        adam.options = options;
        Ok(())
    })
}

/// The next step of every tensor, as `spw_adam_step`; the count goes up by one if it succeeds.
///
/// # Safety
/// As `spw_adam_step`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_adam_advance(
    adam: Option<&mut spw_adam>,
    tensors: *const spw_tensor,
    count: usize,
    stats: *mut spw_step_stats,
) -> spw_status {
    guard(|| {
        let adam = object(adam)?;
        // SAFETY: the caller's promise is the callee's.
        unsafe { step(&adam.options, tensors, count, stats) }?;
        adam.options.step = adam.options.step.saturating_add(1);
        Ok(())
    })
}

/// Number of steps done.
///
/// # Safety
/// `step_out` points to a u64.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_adam_step_count(adam: Option<&spw_adam>, step_out: *mut u64) -> spw_status {
    guard(|| {
        let step_out = out(step_out, "step_out")?;
        let adam = adam.ok_or_else(|| Error::invalid("adam", "is NULL"))?;
        // SAFETY: not NULL, and the caller's promise.
        unsafe { step_out.write(adam.options.step - 1) };
        Ok(())
    })
}

/// Frees the object. NULL does nothing.
#[unsafe(no_mangle)]
pub extern "C" fn spw_adam_close(adam: Option<Box<spw_adam>>) -> spw_status {
    guard(|| {
        drop(adam);
        Ok(())
    })
}

fn object(adam: Option<&mut spw_adam>) -> Result<&mut spw_adam> {
    adam.ok_or_else(|| Error::invalid("adam", "is NULL"))
}

unsafe fn step(
    options: &AdamOptions,
    tensors: *const spw_tensor,
    count: usize,
    stats: *mut spw_step_stats,
) -> Result<()> {
    // SAFETY: the caller's promise is the callees'.
    unsafe {
        record::check_output(stats, "stats")?;
        let own = |own: *const std::ffi::c_void| rule(&parse(own.cast())?);
        let mut jobs = tensor::jobs(tensors, count, &rule(options)?, own)?;
        let seen = adam::step(&mut jobs, !stats.is_null())?;
        tensor::write_stats(seen, stats)
    }
}

pub(super) fn rule(options: &AdamOptions) -> Result<AdamRule> {
    options.rule().map_err(|error| error.within("options."))
}

/// The tensors of a call with their coefficients.
///
/// # Safety
/// As `spw_adam_step`.
pub(super) unsafe fn jobs<'a>(
    options: *const spw_adam_options,
    tensors: *const spw_tensor,
    count: usize,
) -> Result<Vec<Job<'a, AdamRule>>> {
    // SAFETY: the caller's promise is the callees'.
    unsafe {
        let own = |own: *const std::ffi::c_void| rule(&parse(own.cast())?);
        tensor::jobs(tensors, count, &rule(&parse(options)?)?, own)
    }
}

/// Refuses options that no step can follow, those of the call and those of each tensor.
pub(super) unsafe fn check(options: *const spw_adam_options, tensors: &[spw_tensor]) -> Result<()> {
    // SAFETY: the caller's promise is the callee's.
    let parsed = |options: *const spw_adam_options| rule(&unsafe { parse(options) }?);
    parsed(options)?;
    for (index, tensor) in tensors.iter().enumerate().filter(|(_, tensor)| !tensor.options.is_null()) {
        parsed(tensor.options.cast()).map_err(|error| error.within(&format!("tensors[{index}].")))?;
    }
    Ok(())
}

/// The coefficients of an array of options.
///
/// # Safety
/// `options` points to `count` structs, `struct_size` bytes apart.
pub(super) unsafe fn rules(options: *const spw_adam_options, count: usize) -> Result<Vec<AdamRule>> {
    // SAFETY: the caller's promise is the callee's.
    let all = unsafe { record::read_all(options, count, "options") }?;
    all.iter().map(|raw| rule(&parse_raw(raw)?)).collect()
}

/// # Safety
/// `options` is NULL or points to a struct of `struct_size` bytes.
pub(super) unsafe fn parse(options: *const spw_adam_options) -> Result<AdamOptions> {
    // SAFETY: the caller's promise is the callee's.
    parse_raw(&unsafe { record::read(options, "options") }?)
}

fn parse_raw(raw: &spw_adam_options) -> Result<AdamOptions> {
    record::zero("options.reserved", raw.reserved)?;
    Ok(AdamOptions {
        decoupled: !record::flag("options.weight_decay_mode", raw.weight_decay_mode)?,
        step: raw.step,
        lr: raw.lr,
        beta1: raw.beta1,
        beta2: raw.beta2,
        eps: raw.eps,
        weight_decay: raw.weight_decay,
        grad_scale: raw.grad_scale,
        bias_correction: !record::flag("options.no_bias_correction", raw.no_bias_correction)?,
    })
}
