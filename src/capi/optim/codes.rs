//! 8-bit moments: their conversion from and to f32.

use std::ffi::c_void;

use super::tensor::{codes_of, span, span_mut};
use crate::capi::prelude::*;
use crate::dtype::{Dtype, Floats, FloatsMut};
use crate::kernel::Moment;
use crate::optim::codes;

/// Which of the two moments 8-bit codes stand for. Passed as `uint32_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub enum spw_moment {
    /// exp_avg. A byte has a sign and 7 bits k. It stands for `scale * (y - 2^-8)`, where the bits of the f32 y are those of
    /// 2^-8 and k << 19 more.
    SPW_MOMENT_FIRST = 1,
    /// exp_avg_sq. A byte k stands for `scale * (y - 2^-16)`, where the bits of y are those of 2^-16 and k << 19 more.
    SPW_MOMENT_SECOND = 2,
}

/// Writes the values of the `n` codes of a moment to `values`, in f32. `scales` has ceil(n / 32) numbers of bf16, one for
/// each block of 32 codes. `moment` is an `spw_moment`.
///
/// # Safety
/// The arrays have these lengths. They do not overlap, and no other thread uses them during the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_codes_read(
    moment: u32,
    codes: *const u8,
    scales: *const c_void,
    n: u64,
    values: *mut f32,
) -> spw_status {
    guard(|| {
        let moment = parse_moment(moment)?;
        if n == 0 {
            return Ok(());
        }
        // SAFETY: the caller lends the arrays. The kernels only read codes and scales here.
        unsafe {
            let own = codes_of(codes.cast_mut().cast(), scales.cast_mut(), n, ["codes", "scales"])?;
            let to = span_mut(values.cast(), Dtype::F32, n, "values")?;
            let FloatsMut::F32(to) = to else { return Ok(()) };
            codes::decode(moment, own, to)
        }
    })
}

/// Replaces the `n` codes of a moment and their scales by those of `values`, each rounded to the nearest code. All values
/// of a block become NaN if one of them is NaN or a negative second moment. A magnitude above 0.96 * 2^126, also Inf,
/// counts as that. Arguments as those of `spw_codes_read`.
///
/// # Safety
/// As `spw_codes_read`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_codes_write(
    moment: u32,
    values: *const f32,
    n: u64,
    codes: *mut u8,
    scales: *mut c_void,
) -> spw_status {
    guard(|| {
        let moment = parse_moment(moment)?;
        if n == 0 {
            return Ok(());
        }
        // SAFETY: the caller lends the arrays.
        unsafe {
            let own = codes_of(codes.cast(), scales, n, ["codes", "scales"])?;
            let from = span(values.cast(), Dtype::F32, n, "values")?;
            let Floats::F32(from) = from else { return Ok(()) };
            codes::encode(moment, from, own)
        }
    })
}

fn parse_moment(moment: u32) -> Result<Moment> {
    match moment {
        1 => Ok(Moment::First),
        2 => Ok(Moment::Second),
        other => Err(Error::invalid("moment", format!("{other} is not an spw_moment"))),
    }
}
