//! Whether the spans of one call overlap.
//!
//! All spans of the call are sorted by address; then each span is compared with the furthest end before it.

use std::ffi::c_void;

use super::tensor::{
    at, bytes_of_scales, bytes_of_sums, dtype_size, has_codes, spw_dtype, spw_grad_tensor, spw_tensor,
};
use crate::capi::prelude::*;
use crate::sys::bump::{self, Bump};
use crate::sys::try_vec;

/// One span of a call: its addresses, tensor index and field.
#[derive(Clone, Copy)]
struct Range {
    start: usize,
    end: usize,
    tensor: u32,
    span: u8,
}

const SPANS: [&str; 12] = [
    "param",
    "grad",
    "exp_avg",
    "exp_avg_sq",
    "param_copy",
    "shadow_param",
    "shadow_exp_avg",
    "shadow_exp_avg_sq",
    "param_low",
    "low_sums",
    "exp_avg_scale",
    "exp_avg_sq_scale",
];
/// Index of the first span that only 8-bit moments have.
const SCALES: u8 = 10;
/// Spans of a sum of gradients.
const SUM_SPANS: [&str; 2] = ["dst", "src"];
/// Index of the only read-only span in both lists.
const GRAD: u8 = 1;

/// Rejects a written span that shares a byte with any other span of the call.
pub(in crate::capi) fn check(tensors: &[spw_tensor]) -> Result<()> {
    bump::with(|bump| check_in(bump, tensors))
}

/// [`check`] with the bump of the call.
pub(in crate::capi) fn check_in(bump: &Bump, tensors: &[spw_tensor]) -> Result<()> {
    if let [one] = tensors {
        // Without an allocation: a step of one small tensor takes less time than that.
        let mut ranges = [const { Range { start: 0, end: 0, tensor: 0, span: 0 } }; SPANS.len()];
        let mut count = 0;
        for range in (0..SCALES).filter_map(|span| range(0, one, span)) {
            ranges[count] = range;
            count += 1;
        }
        if has_codes(one) {
            for range in scales(0, one) {
                ranges[count] = range;
                count += 1;
            }
        }
        return check_ranges(&mut ranges[..count], &SPANS);
    }
    // Listed by field, not by tensor: allocators return each kind at rising addresses, and the sort detects such runs.
    let most = tensors.len().saturating_mul(SPANS.len());
    let mut ranges = bump::with_capacity(bump, "listing the spans", most)?;
    // A loop of few spans is unrolled, and then needs no choice for each tensor.
    for span in 0..SCALES {
        let of = |(tensor, raw): (usize, &spw_tensor)| range(tensor as u32, raw, span);
        ranges.extend(tensors.iter().enumerate().filter_map(of));
    }
    if tensors.iter().any(has_codes) {
        for (tensor, raw) in tensors.iter().enumerate() {
            ranges.extend(scales(tensor as u32, raw));
        }
    }
    check_ranges(&mut ranges, &SPANS)
}

/// [`check`] for sums of gradients.
pub(in crate::capi) fn check_sums(tensors: &[spw_grad_tensor]) -> Result<()> {
    let mut ranges = try_vec::with_capacity("listing the spans", 2 * tensors.len())?;
    for (index, raw) in tensors.iter().enumerate() {
        ranges.extend(range_of(index as u32, 0, raw.dst.cast_const(), raw.dst_dtype, raw.n));
        ranges.extend(range_of(index as u32, GRAD, raw.src, raw.src_dtype, raw.n));
    }
    check_ranges(&mut ranges, &SUM_SPANS)
}

fn check_ranges(ranges: &mut [Range], names: &[&'static str]) -> Result<()> {
    ranges.sort_by_key(|range| range.start);
    let mut furthest: Option<Range> = None;
    let mut furthest_written: Option<Range> = None;
    for range in ranges {
        let written = range.span != GRAD;
        let rival = if written { furthest } else { furthest_written };
        if let Some(other) = rival.filter(|other| range.start < other.end) {
            let reason = format!("overlaps tensors[{}].{}", other.tensor, names[usize::from(other.span)]);
            return Err(at(range.tensor as usize, Error::invalid(names[usize::from(range.span)], reason)));
        }
        let further = |known: Option<Range>| known.is_none_or(|known| range.end > known.end);
        if further(furthest) {
            furthest = Some(*range);
        }
        if written && further(furthest_written) {
            furthest_written = Some(*range);
        }
    }
    Ok(())
}

#[inline(always)]
fn range(tensor: u32, raw: &spw_tensor, span: u8) -> Option<Range> {
    let (address, dtype) = match span {
        0 => (raw.param.cast_const(), raw.param_dtype),
        GRAD => (raw.grad, raw.grad_dtype),
        2 => (raw.exp_avg.cast_const(), raw.state_dtype),
        3 => (raw.exp_avg_sq.cast_const(), raw.state_dtype),
        4 => (raw.param_copy.cast_const(), raw.copy_dtype),
        5 => (raw.shadow_param.cast_const(), raw.param_dtype),
        6 => (raw.shadow_exp_avg.cast_const(), raw.state_dtype),
        7 => (raw.shadow_exp_avg_sq.cast_const(), raw.state_dtype),
        8 => (raw.param_low.cast_const(), spw_dtype::SPW_DTYPE_BF16 as u32),
        _ if raw.low_sums.is_null() => return None,
        _ => return range_of_bytes(tensor, span, raw.low_sums.addr(), bytes_of_sums(raw.n)),
    };
    range_of(tensor, span, address, dtype, raw.n)
}

/// The scales of 8-bit moments.
#[cold]
fn scales(tensor: u32, raw: &spw_tensor) -> impl Iterator<Item = Range> {
    let bytes = bytes_of_scales(raw.n);
    let spans = [(SCALES, raw.exp_avg_scale.addr()), (SCALES + 1, raw.exp_avg_sq_scale.addr())];
    spans.into_iter().filter_map(move |(span, start)| range_of_bytes(tensor, span, start, bytes))
}

fn range_of(tensor: u32, span: u8, address: *const c_void, dtype: u32, n: u64) -> Option<Range> {
    // Most spans of a tensor are NULL.
    if address.is_null() {
        return None;
    }
    range_of_bytes(tensor, span, address.addr(), dtype_size(dtype).saturating_mul(n))
}

fn range_of_bytes(tensor: u32, span: u8, start: usize, bytes: u64) -> Option<Range> {
    let bytes = bytes.min(usize::MAX as u64) as usize;
    (start > 0 && bytes > 0).then(|| Range { start, end: start.saturating_add(bytes), tensor, span })
}
