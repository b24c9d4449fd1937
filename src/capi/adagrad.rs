//! Adagrad.
#![allow(non_camel_case_types)]

use super::guard::guard;
use super::record::{self, Record};
use super::status::spw_status;
use super::tensor::{self, spw_step_stats, spw_tensor};
use crate::error::Result;
use crate::kernel::AdagradRule;
use crate::optim::adagrad::{self, AdagradOptions};
use crate::optim::spread::Job;

/// Hyper-parameters of one Adagrad step. Fill the struct with `spw_adagrad_options_init`, then change fields as needed.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct spw_adagrad_options {
    /// `sizeof(spw_adagrad_options)`
    pub struct_size: u32,
    /// 0
    pub reserved: u32,
    /// Number of this step, counted from 1. Used only with lr_decay.
    pub step: u64,
    /// Learning rate, finite and >= 0.
    pub lr: f64,
    /// The learning rate of step t is lr / (1 + (t - 1) * lr_decay).
    pub lr_decay: f64,
    /// Added to the denominator, finite and >= 0.
    pub eps: f64,
    /// L2 weight decay, finite and >= 0.
    pub weight_decay: f64,
    /// Factor on the gradient, rounded to f32.
    pub grad_scale: f64,
}

// SAFETY: numbers without padding.
unsafe impl Record for spw_adagrad_options {
    const FIRST_SIZE: usize = 56;
    const NAME: &'static str = "spw_adagrad_options";
}

/// Writes the defaults of `torch.optim.Adagrad`: lr 1e-2, eps 1e-10, no decay, step 1, grad_scale 1. `struct_size` is
/// `sizeof(spw_adagrad_options)`.
///
/// # Safety
/// `options` points to `struct_size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_adagrad_options_init(
    options: *mut spw_adagrad_options,
    struct_size: usize,
) -> spw_status {
    guard(|| {
        let AdagradOptions { step, lr, lr_decay, eps, weight_decay, grad_scale } = AdagradOptions::default();
        let value = spw_adagrad_options {
            struct_size: 0,
            reserved: 0,
            step,
            lr,
            lr_decay,
            eps,
            weight_decay,
            grad_scale,
        };
        // SAFETY: the caller meets the callee's requirements.
        unsafe { record::init(&value, options, struct_size, "options") }
    })
}

/// Does one Adagrad step of every tensor (Duchi et al. 2011, as `torch.optim.Adagrad`). exp_avg_sq holds the running
/// sum v of squares; exp_avg is NULL.
///
///     g = grad * grad_scale + weight_decay * p
///     v = v + g * g
///     p = p - lr / (1 + (t - 1) * lr_decay) * g / (sqrt(v) + eps)
///
/// Arguments, determinism, threads and errors are those of `spw_adam_step`.
///
/// # Safety
/// As `spw_adam_step`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_adagrad_step(
    options: *const spw_adagrad_options,
    tensors: *const spw_tensor,
    count: usize,
    stats: *mut spw_step_stats,
) -> spw_status {
    guard(|| {
        // SAFETY: the caller meets the callees' requirements.
        unsafe {
            record::check_output(stats, "stats")?;
            let mut jobs = jobs(options, tensors, count)?;
            let seen = adagrad::step(&mut jobs, !stats.is_null())?;
            tensor::write_stats(seen, stats)
        }
    })
}

pub(super) fn rule(options: &AdagradOptions) -> Result<AdagradRule> {
    options.rule().map_err(|error| error.within("options."))
}

/// Reads the tensors of a call with their coefficients.
///
/// # Safety
/// As `spw_adam_step`.
pub(super) unsafe fn jobs<'a>(
    options: *const spw_adagrad_options,
    tensors: *const spw_tensor,
    count: usize,
) -> Result<Vec<Job<'a, AdagradRule>>> {
    // SAFETY: the caller meets the callees' requirements.
    unsafe {
        let own = |own: *const std::ffi::c_void| rule(&parse(own.cast())?);
        tensor::jobs(tensors, count, &rule(&parse(options)?)?, own)
    }
}

/// # Safety
/// `options` is NULL or points to a struct of `struct_size` bytes.
pub(super) unsafe fn parse(options: *const spw_adagrad_options) -> Result<AdagradOptions> {
    // SAFETY: the caller meets the callee's requirements.
    let raw = unsafe { record::read(options, "options") }?;
    record::zero("options.reserved", raw.reserved)?;
    let spw_adagrad_options { step, lr, lr_decay, eps, weight_decay, grad_scale, .. } = raw;
    Ok(AdagradOptions { step, lr, lr_decay, eps, weight_decay, grad_scale })
}
