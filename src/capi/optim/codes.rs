//! 8-bit moments: the check of those of a tensor, and their conversion from and to f32.

use std::ffi::c_void;

use super::tensor::{ADDRESS_SPACE, at, spw_dtype, spw_tensor};
use crate::capi::prelude::*;
use crate::dtype::{Dtype, Floats, FloatsMut};
use crate::kernel::{BLOCK, Codes, Moment};
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
            let to = super::tensor::span_mut(values.cast(), Dtype::F32, n, "values")?;
            let FloatsMut::F32(to) = to else { return Ok(()) };
            codes::decode(moment, own, to)
        }
    })
}

/// Replaces the `n` codes of a moment and their scales by those of `values`, each rounded to the nearest code. All values
/// of a block become NaN if one of them is NaN, has a magnitude above 0.96 * 2^126, or is a negative second moment. Arguments as those of `spw_codes_read`.
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
            let from = super::tensor::span(values.cast(), Dtype::F32, n, "values")?;
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

/// The state_dtype of tensors with 8-bit moments.
pub(super) const CODES: u32 = spw_dtype::SPW_DTYPE_CODES as u32;

/// Bytes of the scales of `n` codes.
pub(super) fn bytes_of_scales(n: u64) -> u64 {
    n.div_ceil(BLOCK as u64) * 2
}

/// The 8-bit moments of a tensor, `[exp_avg, exp_avg_sq]`.
///
/// # Safety
/// The caller lends the spans for `'a`. They do not overlap.
pub(super) unsafe fn moments_of<'a>(raw: &spw_tensor) -> Result<[Option<Codes<'a>>; 2]> {
    let names = [["exp_avg", "exp_avg_scale"], ["exp_avg_sq", "exp_avg_sq_scale"]];
    let spans = [(raw.exp_avg, raw.exp_avg_scale), (raw.exp_avg_sq, raw.exp_avg_sq_scale)];
    let mut moments = [None, None];
    for ((moment, (codes, scales)), names) in moments.iter_mut().zip(spans).zip(names) {
        if !codes.is_null() || !scales.is_null() {
            // SAFETY: the caller lends the spans.
            *moment = Some(unsafe { codes_of(codes, scales, raw.n, names)? });
        }
    }
    Ok(moments)
}

/// # Safety
/// The caller lends `n` codes and their scales for `'a`.
unsafe fn codes_of<'a>(
    codes: *mut c_void,
    scales: *mut c_void,
    n: u64,
    names: [&'static str; 2],
) -> Result<Codes<'a>> {
    let [codes_name, scales_name] = names;
    for (name, span, bytes) in [(codes_name, codes, n), (scales_name, scales, bytes_of_scales(n))] {
        if span.is_null() {
            return Err(Error::invalid(name, "is NULL"));
        }
        if span.addr() as u128 + u128::from(bytes) > ADDRESS_SPACE {
            return Err(Error::invalid(
                name,
                format!("{bytes} bytes from {span:p} exceed the address space"),
            ));
        }
    }
    if !scales.addr().is_multiple_of(2) {
        return Err(Error::invalid(
            scales_name,
            format!("address {scales:p} is not aligned to 2 bytes (bf16)"),
        ));
    }
    // SAFETY: not NULL, aligned, within the address space; the caller lends them.
    unsafe {
        Ok(Codes {
            codes: std::slice::from_raw_parts_mut(codes.cast(), n as usize),
            scales: std::slice::from_raw_parts_mut(scales.cast(), (bytes_of_scales(n) / 2) as usize),
        })
    }
}

/// True if the tensor has 8-bit moments, or scales of them.
fn has_codes(raw: &spw_tensor) -> bool {
    raw.state_dtype == CODES || !(raw.exp_avg_scale.is_null() && raw.exp_avg_sq_scale.is_null())
}

/// Rejects 8-bit moments, for calls that do not step them.
pub(in crate::capi) fn no_codes(tensors: &[spw_tensor]) -> Result<()> {
    match tensors.iter().position(|raw| raw.n > 0 && has_codes(raw)) {
        None => Ok(()),
        Some(index) => Err(at(index, no_steps_of_codes())),
    }
}

/// The error for a tensor with 8-bit moments in a call that does not step them.
pub(in crate::capi) fn no_steps_of_codes() -> Error {
    let reason = "state_dtype is SPW_DTYPE_CODES, or a scale is set, but this call does not step 8-bit moments; pass moments \
                  of f32 or bf16";
    Error::Unsupported(reason.to_string())
}

/// Rejects scales without SPW_DTYPE_CODES.
pub(super) fn check_scales(raw: &spw_tensor) -> Result<()> {
    match raw.state_dtype != CODES && has_codes(raw) {
        true => Err(Error::invalid(
            "exp_avg_scale",
            "or exp_avg_sq_scale is set, but state_dtype is not SPW_DTYPE_CODES",
        )),
        false => Ok(()),
    }
}
