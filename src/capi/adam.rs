//! Adam and AdamW: one call for any number of tensors, and an object that counts its steps.
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

/// How weight decay is applied. Passed as `uint32_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub enum spw_weight_decay {
    /// Subtracted from the parameter (AdamW).
    SPW_WEIGHT_DECAY_DECOUPLED = 0,
    /// Added to the gradient (Adam with L2).
    SPW_WEIGHT_DECAY_L2 = 1,
}

/// Hyper-parameters of one Adam step. Fill the struct with `spw_adam_options_init`, then change fields as needed.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct spw_adam_options {
    /// `sizeof(spw_adam_options)`
    pub struct_size: u32,
    /// An `spw_weight_decay`.
    pub weight_decay_mode: u32,
    /// Number t of this step, counted from 1. An `spw_adam` object counts its own steps, and its first step has this
    /// number.
    pub step: u64,
    /// Learning rate, finite and >= 0.
    pub lr: f64,
    /// Decay factor of exp_avg, in [0, 1).
    pub beta1: f64,
    /// Decay factor of exp_avg_sq, in [0, 1).
    pub beta2: f64,
    /// Added to the denominator, finite and >= 0.
    pub eps: f64,
    /// Weight decay, finite and >= 0; 0 disables it.
    pub weight_decay: f64,
    /// Factor on the gradient (1 / loss scale times clip coefficient), rounded to f32.
    pub grad_scale: f64,
    /// 1 disables bias correction, the division by 1 - beta^t; 0 enables it.
    pub no_bias_correction: u32,
    /// 0
    pub reserved: u32,
}

// SAFETY: numbers without padding.
unsafe impl Record for spw_adam_options {
    const FIRST_SIZE: usize = 72;
    const NAME: &'static str = "spw_adam_options";
}

/// An Adam optimizer that stores its hyper-parameters and counts its steps.
pub struct spw_adam {
    options: AdamOptions,
}

/// Writes the defaults of `torch.optim.AdamW` without weight decay: lr 1e-3, beta 0.9 and 0.999, eps 1e-8, step 1,
/// grad_scale 1, decoupled decay. `struct_size` is `sizeof(spw_adam_options)`.
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
        // SAFETY: the caller meets the callee's requirements.
        unsafe { record::init(&value, options, struct_size, "options") }
    })
}

/// Does one Adam or AdamW step of `count` tensors, in one pass over their memory (SuperOffload section 4.6,
/// "GraceAdam"):
///
///     g = grad * grad_scale                       (+ weight_decay * p for L2)
///     m = beta1 * m + (1 - beta1) * g
///     v = beta2 * v + (1 - beta2) * g * g
///     p = p - lr * weight_decay * p               (decoupled)
///     p = p - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
///
/// The arithmetic is f32 with fused multiply-adds. The results have the same bits on every processor and for every
/// number of threads, however a parameter is divided into tensors. If `stats` is not NULL, the same pass computes the
/// sum of squares and the finiteness of the scaled gradients. Tensors of one call must not overlap. Thread-safe.
///
/// # Safety
/// `tensors` points to `count` structs, `struct_size` bytes apart. No other thread uses their spans during the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_adam_step(
    options: *const spw_adam_options,
    tensors: *const spw_tensor,
    count: usize,
    stats: *mut spw_step_stats,
) -> spw_status {
    guard(|| {
        // SAFETY: the caller meets the callee's requirements.
        unsafe { step(&parse(options)?, tensors, count, stats) }
    })
}

/// Creates an optimizer object. Free it with `spw_adam_close`. One thread at a time may use an object.
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
        // SAFETY: the caller meets the callee's requirements.
        let options = unsafe { parse(options) }?;
        rule(&options)?;
        // SAFETY: not NULL, and valid by the caller's promise.
        unsafe { adam_out.write(Box::into_raw(Box::new(spw_adam { options }))) };
        Ok(())
    })
}

/// Sets the learning rate of the next and later steps.
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

/// Does the next step of every tensor, as `spw_adam_step`. The step count increases by one if the call succeeds.
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
        // SAFETY: the caller meets the callee's requirements.
        unsafe { step(&adam.options, tensors, count, stats) }?;
        adam.options.step = adam.options.step.saturating_add(1);
        Ok(())
    })
}

/// Writes the number of steps done. It begins at `options.step - 1`.
///
/// # Safety
/// `step_out` points to a u64.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_adam_step_count(adam: Option<&spw_adam>, step_out: *mut u64) -> spw_status {
    guard(|| {
        let step_out = out(step_out, "step_out")?;
        let adam = adam.ok_or_else(|| Error::invalid("adam", "is NULL"))?;
        // SAFETY: not NULL, and valid by the caller's promise.
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
    // SAFETY: the caller meets the callees' requirements.
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

/// Reads the tensors of a call with their coefficients.
///
/// # Safety
/// As `spw_adam_step`.
pub(super) unsafe fn jobs<'a>(
    options: *const spw_adam_options,
    tensors: *const spw_tensor,
    count: usize,
) -> Result<Vec<Job<'a, AdamRule>>> {
    // SAFETY: the caller meets the callees' requirements.
    unsafe {
        let own = |own: *const std::ffi::c_void| rule(&parse(own.cast())?);
        tensor::jobs(tensors, count, &rule(&parse(options)?)?, own)
    }
}

/// Rejects invalid options, both those of the call and those of each tensor.
pub(super) unsafe fn check(options: *const spw_adam_options, tensors: &[spw_tensor]) -> Result<()> {
    // SAFETY: the caller meets the callee's requirements.
    let parsed = |options: *const spw_adam_options| rule(&unsafe { parse(options) }?);
    parsed(options)?;
    for (index, tensor) in tensors.iter().enumerate().filter(|(_, tensor)| !tensor.options.is_null()) {
        parsed(tensor.options.cast()).map_err(|error| error.within(&format!("tensors[{index}].")))?;
    }
    Ok(())
}

/// Reads an array of options as coefficients.
///
/// # Safety
/// `options` points to `count` structs, `struct_size` bytes apart.
pub(super) unsafe fn rules(options: *const spw_adam_options, count: usize) -> Result<Vec<AdamRule>> {
    // SAFETY: the caller meets the callee's requirements.
    let all = unsafe { record::read_all(options, count, "options") }?;
    all.iter().map(|raw| rule(&parse_raw(raw)?)).collect()
}

/// # Safety
/// `options` is NULL or points to a struct of `struct_size` bytes.
pub(super) unsafe fn parse(options: *const spw_adam_options) -> Result<AdamOptions> {
    // SAFETY: the caller meets the callee's requirements.
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
