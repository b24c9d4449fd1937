//! Gradient statistics without a step.

use std::ffi::c_void;

use crate::capi::abi_struct;
use crate::capi::base::spw_status;
use crate::capi::guard::guard;
use crate::capi::optim::tensor::{self, spw_step_stats};
use crate::capi::output::required;
use crate::error::Error;
use crate::optim::StepStats;
use crate::optim::grad;

/// Computes the sum of squares and the finiteness of `grad * scale`, for example for gradient clipping. `grad` has `n`
/// elements of `dtype` (an `spw_dtype`); `n` may be 0. `sum_squares` has the same bits as the statistics of a step of
/// the same tensor.
///
/// # Safety
/// `grad` points to `n` elements, `stats_out` to a struct of `struct_size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_grad_stats(
    grad: *const c_void,
    dtype: u32,
    n: u64,
    scale: f64,
    stats_out: *mut spw_step_stats,
) -> spw_status {
    guard(|| {
        required(stats_out, "stats_out")?;
        if !(scale as f32).is_finite() {
            return Err(Error::invalid("scale", format!("{scale} is not a finite f32")));
        }
        let dtype = tensor::parse_dtype(dtype, "dtype")?;
        // SAFETY: the caller meets the callees' requirements.
        unsafe {
            abi_struct::check_output(stats_out, "stats_out")?;
            let seen = match n {
                0 => StepStats::default(),
                _ => grad::stats(tensor::span(grad, dtype, n, "grad")?, scale as f32)?,
            };
            tensor::write_stats(seen, stats_out)
        }
    })
}
