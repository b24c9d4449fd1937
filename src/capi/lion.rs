//! Lion.
#![allow(non_camel_case_types)]

use super::guard::guard;
use super::record::{self, Record};
use super::status::spw_status;
use super::tensor::{self, spw_step_stats, spw_tensor};
use crate::error::Result;
use crate::kernel::LionRule;
use crate::optim::lion::{self, LionOptions};
use crate::optim::spread::Job;

/// Hyper-parameters of a Lion step. Fill the struct with `spw_lion_options_init`, then change fields as needed.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct spw_lion_options {
    /// `sizeof(spw_lion_options)`
    pub struct_size: u32,
    /// 0
    pub reserved: u32,
    /// Learning rate, finite and >= 0.
    pub lr: f64,
    /// Weight of exp_avg in the update direction, in [0, 1).
    pub beta1: f64,
    /// Decay factor of exp_avg, in [0, 1).
    pub beta2: f64,
    /// Decoupled weight decay, finite and >= 0.
    pub weight_decay: f64,
    /// Factor on the gradient, rounded to f32.
    pub grad_scale: f64,
}

// SAFETY: numbers without padding.
unsafe impl Record for spw_lion_options {
    const FIRST_SIZE: usize = 48;
    const NAME: &'static str = "spw_lion_options";
}

/// Writes the paper's defaults: lr 1e-4, beta 0.9 and 0.99, no decay, grad_scale 1. `struct_size` is
/// `sizeof(spw_lion_options)`.
///
/// # Safety
/// `options` points to `struct_size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_lion_options_init(
    options: *mut spw_lion_options,
    struct_size: usize,
) -> spw_status {
    guard(|| {
        let LionOptions { lr, beta1, beta2, weight_decay, grad_scale } = LionOptions::default();
        let value =
            spw_lion_options { struct_size: 0, reserved: 0, lr, beta1, beta2, weight_decay, grad_scale };
        // SAFETY: the caller meets the callee's requirements.
        unsafe { record::init(&value, options, struct_size, "options") }
    })
}

/// Does one Lion step of every tensor (Chen et al. 2023, Algorithm 2). The sign of zero is zero; exp_avg_sq is NULL.
///
///     g = grad * grad_scale
///     p = p - lr * weight_decay * p - lr * sign(beta1 * m + (1 - beta1) * g)
///     m = beta2 * m + (1 - beta2) * g
///
/// Arguments, determinism, threads and errors are those of `spw_adam_step`.
///
/// # Safety
/// As `spw_adam_step`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_lion_step(
    options: *const spw_lion_options,
    tensors: *const spw_tensor,
    count: usize,
    stats: *mut spw_step_stats,
) -> spw_status {
    guard(|| {
        // SAFETY: the caller meets the callees' requirements.
        unsafe {
            record::check_output(stats, "stats")?;
            let mut jobs = jobs(options, tensors, count)?;
            let seen = lion::step(&mut jobs, !stats.is_null())?;
            tensor::write_stats(seen, stats)
        }
    })
}

pub(super) fn rule(options: &LionOptions) -> Result<LionRule> {
    options.rule().map_err(|error| error.within("options."))
}

/// Reads the tensors of a call with their coefficients.
///
/// # Safety
/// As `spw_adam_step`.
pub(super) unsafe fn jobs<'a>(
    options: *const spw_lion_options,
    tensors: *const spw_tensor,
    count: usize,
) -> Result<Vec<Job<'a, LionRule>>> {
    // SAFETY: the caller meets the callees' requirements.
    unsafe {
        let own = |own: *const std::ffi::c_void| rule(&parse(own.cast())?);
        tensor::jobs(tensors, count, &rule(&parse(options)?)?, own)
    }
}

/// # Safety
/// `options` is NULL or points to a struct of `struct_size` bytes.
pub(super) unsafe fn parse(options: *const spw_lion_options) -> Result<LionOptions> {
    // SAFETY: the caller meets the callee's requirements.
    let raw = unsafe { record::read(options, "options") }?;
    record::zero("options.reserved", raw.reserved)?;
    let spw_lion_options { lr, beta1, beta2, weight_decay, grad_scale, .. } = raw;
    Ok(LionOptions { lr, beta1, beta2, weight_decay, grad_scale })
}
