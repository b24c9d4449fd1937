//! Low bits of split masters without a step.

use super::overlap;
use super::tensor::{self, at, low_bits, low_sums, spw_dtype, spw_tensor};
use crate::capi::prelude::*;
use crate::dtype::Floats;
use crate::optim::low_bits::{self, SplitMaster};
use crate::sys::try_vec;

/// Does what the next step of `count` tensors with low_sums would do first: sets the low bits to zero whose elements
/// other code has written since the sums were stored, and stores the sums of the present elements. For callers that
/// read or save masters between steps. Of each tensor only n, param, param_dtype, param_low and low_sums are read; all of
/// them are needed. After an error nothing has changed.
///
/// # Safety
/// `tensors` points to `count` structs, `struct_size` bytes apart. No other thread uses their spans during the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_low_bits_settle(tensors: In<spw_tensor>, count: u64) -> spw_status {
    guard(|| {
        let raw = tensors.read_all(count, "tensors")?;
        // SAFETY: the caller lends the spans.
        unsafe {
            let mut own = try_vec::with_capacity("listing the tensors", raw.len())?;
            own.extend(raw.iter().map(only_split));
            overlap::check(&own)?;
            let mut masters = try_vec::with_capacity("listing the parameters", raw.len())?;
            for (index, raw) in own.iter().enumerate().filter(|(_, raw)| raw.n > 0) {
                masters.push(master(raw).map_err(|error| at(index, error))?);
            }
            low_bits::zero_stale(masters)
        }
    })
}

/// The tensor with the fields that the call reads.
fn only_split(raw: &spw_tensor) -> spw_tensor {
    let mut own = *raw;
    own.grad = std::ptr::null();
    for span in [
        &mut own.exp_avg,
        &mut own.exp_avg_sq,
        &mut own.param_copy,
        &mut own.shadow_param,
        &mut own.shadow_exp_avg,
        &mut own.shadow_exp_avg_sq,
        &mut own.exp_avg_scale,
        &mut own.exp_avg_sq_scale,
    ] {
        *span = std::ptr::null_mut();
    }
    own
}

/// # Safety
/// The caller lends the spans for `'a`. They do not overlap.
unsafe fn master<'a>(raw: &spw_tensor) -> Result<SplitMaster<'a>> {
    let dtype = tensor::parse_dtype(raw.param_dtype, "param_dtype")?;
    // SAFETY: the caller lends the spans.
    unsafe {
        let Floats::Bf16(param) = tensor::span(raw.param, dtype, raw.n, "param")? else {
            let reason = format!("is not SPW_DTYPE_BF16 ({})", spw_dtype::SPW_DTYPE_BF16 as u32);
            return Err(Error::invalid("param_dtype", reason));
        };
        let low = low_bits(raw)?;
        let sums = low_sums(raw)?.ok_or_else(|| Error::invalid("low_sums", "is NULL"))?;
        Ok(SplitMaster { param, low, sums })
    }
}
