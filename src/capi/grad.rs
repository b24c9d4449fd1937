//! Gradient statistics without a step.

use std::ffi::c_void;

use super::guard::guard;
use super::library::out;
use super::record;
use super::status::spw_status;
use super::tensor::{self, spw_step_stats};
use crate::error::Error;
use crate::optim::StepStats;
use crate::optim::grad;

/// Computes the sum of squares and the finiteness of `grad * scale`, for example for gradient clipping. `grad` has `n`
/// elements of `dtype` (an `spw_dtype`); `n` may be 0. `sum_squares` has the same bits as the statistics of a step of
/// the same tensor. Thread-safe.
///
/// # Safety
/// `grad` points to `n` elements, `stats` to a struct of `struct_size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_grad_stats(
    grad: *const c_void,
    dtype: u32,
    n: u64,
    scale: f64,
    stats: *mut spw_step_stats,
) -> spw_status {
    guard(|| {
        let stats = out(stats, "stats")?;
        if !(scale as f32).is_finite() {
            return Err(Error::invalid("scale", format!("{scale} is not a finite f32")));
        }
        let dtype = tensor::parse_dtype(dtype, "dtype")?;
        // SAFETY: the caller meets the callees' requirements.
        unsafe {
            record::check_output(stats, "stats")?;
            let seen = match n {
                0 => StepStats::default(),
                _ => grad::stats(tensor::span(grad, dtype, n, "grad")?, scale as f32)?,
            };
            tensor::write_stats(seen, stats)
        }
    })
}
