//! Tensors as C passes them, and the checks that allow their use as slices.
#![allow(non_camel_case_types)]

use std::ffi::c_void;

use super::record::{self, Record};
use crate::dtype::{Dtype, Floats, FloatsMut};
use crate::error::{Error, Result};
use crate::kernel::{Rule, States, Tensor};
use crate::optim::StepStats;
use crate::optim::spread::Job;
use crate::sys::room;

/// Element type of a span (a contiguous array). Passed as `uint32_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub enum spw_dtype {
    /// There is no span.
    SPW_DTYPE_NONE = 0,
    /// IEEE binary32.
    SPW_DTYPE_F32 = 1,
    /// IEEE binary16.
    SPW_DTYPE_F16 = 2,
    /// bfloat16: the upper half of binary32.
    SPW_DTYPE_BF16 = 3,
}

/// Returns the bytes of one element: 0 for SPW_DTYPE_NONE and for values that are not an `spw_dtype`.
#[unsafe(no_mangle)]
pub extern "C" fn spw_dtype_size(dtype: u32) -> u64 {
    parse_dtype(dtype, "dtype").map_or(0, |dtype| dtype.size() as u64)
}

/// One tensor of a step. Each span is a contiguous array of `n` elements, aligned to its element. Spans do not overlap.
///
/// Without shadow spans a step updates param and states in place. With shadow spans a step writes the new values to
/// these and leaves the old values unchanged. A caller can alternate between two sets of spans: param and states name
/// the current set, the shadow fields the other. To undo a step, the caller passes the same set as current again.
/// Shadow spans aligned to a cache line (64 bytes) are written with non-temporal stores where these are faster.
///
/// | param | exp_avg, exp_avg_sq | grad | param_copy |
/// |---|---|---|---|
/// | f32 | f32 | f32, f16, bf16 | none, f16, bf16 |
/// | f16 | f32, f16 | f16 | none |
/// | bf16 | f32, bf16 | bf16 | none |
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct spw_tensor {
    /// `sizeof(spw_tensor)`. It is also the distance in bytes between the tensors of an array.
    pub struct_size: u32,
    /// `spw_dtype` of param.
    pub param_dtype: u32,
    /// `spw_dtype` of exp_avg and exp_avg_sq.
    pub state_dtype: u32,
    /// `spw_dtype` of grad.
    pub grad_dtype: u32,
    /// `spw_dtype` of param_copy, or SPW_DTYPE_NONE without param_copy.
    pub copy_dtype: u32,
    /// 0
    pub reserved: u32,
    /// Number of elements. If it is 0, all other fields of the tensor are ignored.
    pub n: u64,
    /// Parameter (the master weight if it is f32).
    pub param: *mut c_void,
    /// Gradient. It is only read.
    pub grad: *const c_void,
    /// First moment. NULL for Adagrad.
    pub exp_avg: *mut c_void,
    /// Second moment (Adagrad: the sum of squares). NULL for Lion.
    pub exp_avg_sq: *mut c_void,
    /// Receives the updated parameter rounded to 16 bits, in the same pass; or NULL.
    pub param_copy: *mut c_void,
    /// Options of this tensor (the option struct of the called optimizer), or NULL for the options of the call.
    pub options: *const c_void,
    /// Receives the updated param, with the type of param; NULL: the update is in place.
    pub shadow_param: *mut c_void,
    /// Receives the updated exp_avg. Set it if and only if shadow_param and exp_avg are set.
    pub shadow_exp_avg: *mut c_void,
    /// Receives the updated exp_avg_sq. Set it if and only if shadow_param and exp_avg_sq are set.
    pub shadow_exp_avg_sq: *mut c_void,
}

// SAFETY: integers and pointers without padding; a null pointer is valid.
unsafe impl Record for spw_tensor {
    const FIRST_SIZE: usize = 80;
    const NAME: &'static str = "spw_tensor";
}

/// Statistics of the scaled gradients of all tensors of one call.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct spw_step_stats {
    /// `sizeof(spw_step_stats)`
    pub struct_size: u32,
    /// 1 if any scaled gradient is Inf or NaN, else 0. The step was done in both cases.
    pub nonfinite: u32,
    /// Sum of squares in f64. The order of summation depends only on the tensors, so the bits are the same on every
    /// processor and for every number of threads. Inf or NaN if `nonfinite` is 1.
    pub sum_squares: f64,
}

// SAFETY: numbers without padding.
unsafe impl Record for spw_step_stats {
    const FIRST_SIZE: usize = 16;
    const NAME: &'static str = "spw_step_stats";
}

pub(super) fn parse_dtype(dtype: u32, argument: &'static str) -> Result<Dtype> {
    match dtype {
        1 => Ok(Dtype::F32),
        2 => Ok(Dtype::F16),
        3 => Ok(Dtype::Bf16),
        _ => Err(Error::invalid(argument, format!("{dtype} is not an spw_dtype"))),
    }
}

/// Reads the tensors of a call, except those of no elements. `own` makes coefficients from a tensor's own options.
///
/// # Safety
/// `tensors` points to `count` tensors. No other code uses their spans during `'a`.
pub(super) unsafe fn jobs<'a, R: Rule>(
    tensors: *const spw_tensor,
    count: usize,
    optimizer: &R,
    own: impl Fn(*const c_void) -> Result<R>,
) -> Result<Vec<Job<'a, R>>> {
    // SAFETY: the caller meets the callee's requirements.
    let raw = unsafe { read_all(tensors, count) }?;
    let mut jobs = room::for_count("listing the tensors", raw.len())?;
    // SAFETY: the caller lends the spans for 'a.
    for (index, tensor) in unsafe { spans(&raw) }? {
        let options = raw[index].options;
        let optimizer = if options.is_null() { Ok(*optimizer) } else { own(options) };
        let job = optimizer.and_then(|optimizer| {
            let mut tensor = tensor?;
            tensor.keep(R::EXP_AVG, R::EXP_AVG_SQ)?;
            Ok(Job { optimizer, tensor })
        });
        jobs.push(job.map_err(|error| at(index, error))?);
    }
    Ok(jobs)
}

/// Makes the spans of the tensors, except those of no elements, each with its index. An error does not yet name its
/// tensor.
///
/// # Safety
/// No other code uses the spans during `'a`.
pub(super) unsafe fn spans<'a>(
    raw: &[spw_tensor],
) -> Result<impl Iterator<Item = (usize, Result<Tensor<'a>>)>> {
    check_overlap(raw)?;
    let with_elements = raw.iter().enumerate().filter(|(_, raw)| raw.n > 0);
    // SAFETY: the spans do not overlap, and the caller lends them for 'a.
    Ok(with_elements.map(|(index, raw)| (index, unsafe { tensor_of(raw) })))
}

/// Rejects a tensor without shadow spans if `wanted`, or with shadow spans if not.
pub(super) fn check_shadows(tensors: &[spw_tensor], wanted: bool) -> Result<()> {
    let wrong = |raw: &spw_tensor| raw.n > 0 && raw.shadow_param.is_null() == wanted;
    let reason = match wanted {
        true => "is NULL, but the undo mode is SPW_UNDO_SHADOW",
        false => "is set, but the undo mode is not SPW_UNDO_SHADOW",
    };
    match tensors.iter().position(wrong) {
        None => Ok(()),
        Some(index) => Err(at(index, Error::invalid("shadow_param", reason))),
    }
}

/// Copies the tensors of a call as structs of this version.
///
/// # Safety
/// `tensors` points to `count` structs, `struct_size` bytes apart.
pub(super) unsafe fn read_all(tensors: *const spw_tensor, count: usize) -> Result<Vec<spw_tensor>> {
    if count == 0 {
        return Ok(Vec::new());
    }
    if tensors.is_null() {
        return Err(Error::invalid("tensors", "is NULL"));
    }
    if u32::try_from(count).is_err() {
        return Err(Error::invalid("count", format!("is {count}, over 2^32 - 1")));
    }
    // SAFETY: there is at least one tensor.
    let stride = unsafe { record::stride(tensors, "tensors[0]") }?;
    let mut raw = room::for_count("copying the tensors", count)?;
    for index in 0..count {
        // SAFETY: the tensors of the array lie `stride` bytes apart.
        let tensor = unsafe { record::read(tensors.byte_add(index * stride), "tensor") };
        let tensor =
            tensor.and_then(|tensor| same_stride(tensor, stride)).map_err(|error| at(index, error))?;
        raw.push(spw_tensor { struct_size: size_of::<spw_tensor>() as u32, ..tensor });
    }
    Ok(raw)
}

/// Adds the tensor's index to an error.
pub(super) fn at(index: usize, error: Error) -> Error {
    error.within(&format!("tensors[{index}]."))
}

fn same_stride(tensor: spw_tensor, stride: usize) -> Result<spw_tensor> {
    match tensor.struct_size as usize == stride {
        true => Ok(tensor),
        false => {
            Err(Error::invalid("struct_size", format!("is {}, of the first {stride}", tensor.struct_size)))
        }
    }
}

/// Rejects param_copy without copy_dtype or the reverse, and a reserved field that is set.
pub(super) fn check_copy(raw: &spw_tensor) -> Result<()> {
    match (raw.reserved, raw.copy_dtype, raw.param_copy.is_null()) {
        (1.., _, _) => Err(Error::invalid("reserved", "is not 0")),
        (_, 0, false) => Err(Error::invalid("copy_dtype", "is SPW_DTYPE_NONE, but param_copy is not NULL")),
        (_, 1.., true) => Err(Error::invalid("param_copy", "is NULL, but copy_dtype is set")),
        _ => Ok(()),
    }
}

unsafe fn tensor_of<'a>(raw: &spw_tensor) -> Result<Tensor<'a>> {
    check_copy(raw)?;
    let state_dtype = parse_dtype(raw.state_dtype, "state_dtype")?;
    let copy_dtype = match raw.copy_dtype {
        0 => None,
        dtype => Some(parse_dtype(dtype, "copy_dtype")?),
    };
    // SAFETY: the caller lends the spans, each of n elements, and they do not overlap.
    unsafe {
        let param = span_mut(raw.param, parse_dtype(raw.param_dtype, "param_dtype")?, raw.n, "param")?;
        let grad = span(raw.grad, parse_dtype(raw.grad_dtype, "grad_dtype")?, raw.n, "grad")?;
        let exp_avg = optional_span(raw.exp_avg, Some(state_dtype), raw.n, "exp_avg")?;
        let exp_avg_sq = optional_span(raw.exp_avg_sq, Some(state_dtype), raw.n, "exp_avg_sq")?;
        let param_copy = optional_span(raw.param_copy, copy_dtype, raw.n, "param_copy")?;
        let tensor = Tensor::new(States { param, exp_avg, exp_avg_sq }, grad, param_copy)?;
        match shadow_of(raw, state_dtype)? {
            Some(shadow) => Ok(tensor.with_shadow(shadow)?),
            None => Ok(tensor),
        }
    }
}

/// Rejects shadow spans, for calls that keep their own states.
pub(super) fn no_shadows(tensors: &[spw_tensor]) -> Result<()> {
    match tensors.iter().position(has_shadow) {
        None => Ok(()),
        Some(index) => Err(at(index, Error::invalid("shadow_param", "and its kind are not for this call"))),
    }
}

/// True if any shadow span is set.
pub(super) fn has_shadow(raw: &spw_tensor) -> bool {
    [raw.shadow_param, raw.shadow_exp_avg, raw.shadow_exp_avg_sq].iter().any(|shadow| !shadow.is_null())
}

/// Makes the shadow set: a shadow span for each of the tensor's param and states, or none at all.
unsafe fn shadow_of<'a>(raw: &spw_tensor, state_dtype: Dtype) -> Result<Option<States<'a>>> {
    let pairs = [
        ("shadow_param", raw.param, raw.shadow_param),
        ("shadow_exp_avg", raw.exp_avg, raw.shadow_exp_avg),
        ("shadow_exp_avg_sq", raw.exp_avg_sq, raw.shadow_exp_avg_sq),
    ];
    if !has_shadow(raw) {
        return Ok(None);
    }
    for (name, own, shadow) in pairs {
        match (own.is_null(), shadow.is_null()) {
            (false, true) => return Err(Error::invalid(name, "is NULL, but another shadow span is set")),
            (true, false) => return Err(Error::invalid(name, "is set, but the span it shadows is NULL")),
            _ => {}
        }
    }
    // SAFETY: the caller lends the spans, each of n elements, and they do not overlap.
    unsafe {
        let param_dtype = parse_dtype(raw.param_dtype, "param_dtype")?;
        let param = span_mut(raw.shadow_param, param_dtype, raw.n, "shadow_param")?;
        let exp_avg = optional_span(raw.shadow_exp_avg, Some(state_dtype), raw.n, "shadow_exp_avg")?;
        let exp_avg_sq = optional_span(raw.shadow_exp_avg_sq, Some(state_dtype), raw.n, "shadow_exp_avg_sq")?;
        Ok(Some(States { param, exp_avg, exp_avg_sq }))
    }
}

/// Makes a shared slice of `n` elements.
///
/// # Safety
/// `from` is NULL or points to `n` elements. No code writes them during `'a`.
pub(super) unsafe fn span<'a>(
    from: *const c_void,
    dtype: Dtype,
    n: u64,
    argument: &'static str,
) -> Result<Floats<'a>> {
    let n = checked_length(from, dtype, n, argument)?;
    // SAFETY: not NULL, aligned, n elements that fit the address space; the caller lends them.
    Ok(unsafe {
        match dtype {
            Dtype::F32 => Floats::F32(std::slice::from_raw_parts(from.cast(), n)),
            Dtype::F16 => Floats::F16(std::slice::from_raw_parts(from.cast(), n)),
            Dtype::Bf16 => Floats::Bf16(std::slice::from_raw_parts(from.cast(), n)),
        }
    })
}

unsafe fn span_mut<'a>(
    to: *mut c_void,
    dtype: Dtype,
    n: u64,
    argument: &'static str,
) -> Result<FloatsMut<'a>> {
    let n = checked_length(to, dtype, n, argument)?;
    // SAFETY: not NULL, aligned, n elements that fit the address space; the caller lends them to us alone.
    Ok(unsafe {
        match dtype {
            Dtype::F32 => FloatsMut::F32(std::slice::from_raw_parts_mut(to.cast(), n)),
            Dtype::F16 => FloatsMut::F16(std::slice::from_raw_parts_mut(to.cast(), n)),
            Dtype::Bf16 => FloatsMut::Bf16(std::slice::from_raw_parts_mut(to.cast(), n)),
        }
    })
}

unsafe fn optional_span<'a>(
    to: *mut c_void,
    dtype: Option<Dtype>,
    n: u64,
    argument: &'static str,
) -> Result<Option<FloatsMut<'a>>> {
    match dtype.filter(|_| !to.is_null()) {
        // SAFETY: the caller meets the callee's requirements.
        Some(dtype) => unsafe { span_mut(to, dtype, n, argument) }.map(Some),
        None => Ok(None),
    }
}

fn checked_length(address: *const c_void, dtype: Dtype, n: u64, argument: &'static str) -> Result<usize> {
    if address.is_null() {
        return Err(Error::invalid(argument, "is NULL"));
    }
    if !address.addr().is_multiple_of(dtype.size()) {
        let reason =
            format!("address {address:p} is not aligned to {} bytes ({})", dtype.size(), dtype.name());
        return Err(Error::invalid(argument, reason));
    }
    let bytes = u128::from(n) * dtype.size() as u128;
    match address.addr() as u128 + bytes <= ADDRESS_SPACE {
        true => Ok(n as usize),
        false => Err(Error::invalid(
            argument,
            format!("{n} elements of {} do not fit the address space", dtype.name()),
        )),
    }
}

/// Upper bound of user addresses on every processor.
const ADDRESS_SPACE: u128 = 1 << 56;

/// One span of a call: its addresses, tensor index and field.
#[derive(Clone, Copy)]
struct Range {
    start: usize,
    end: usize,
    tensor: u32,
    span: u8,
}

const SPANS: [&str; 8] = [
    "param",
    "grad",
    "exp_avg",
    "exp_avg_sq",
    "param_copy",
    "shadow_param",
    "shadow_exp_avg",
    "shadow_exp_avg_sq",
];
/// Index of the only read-only span.
const GRAD: u8 = 1;

/// Rejects a written span that shares a byte with any other span of the call.
pub(super) fn check_overlap(tensors: &[spw_tensor]) -> Result<()> {
    // Listed by field, not by tensor: allocators return each kind at rising addresses, and the sort detects such runs.
    let mut ranges = room::for_count("listing the spans", tensors.len().saturating_mul(SPANS.len()))?;
    for span in 0..SPANS.len() as u8 {
        let of = |(tensor, raw): (usize, &spw_tensor)| range(tensor as u32, raw, span);
        ranges.extend(tensors.iter().enumerate().filter_map(of));
    }
    ranges.sort_by_key(|range| range.start);
    let mut furthest: Option<Range> = None;
    let mut furthest_written: Option<Range> = None;
    for range in ranges {
        let written = range.span != GRAD;
        let rival = if written { furthest } else { furthest_written };
        if let Some(other) = rival.filter(|other| range.start < other.end) {
            let reason = format!("overlaps tensors[{}].{}", other.tensor, SPANS[usize::from(other.span)]);
            return Err(at(range.tensor as usize, Error::invalid(SPANS[usize::from(range.span)], reason)));
        }
        let further = |known: Option<Range>| known.is_none_or(|known| range.end > known.end);
        if further(furthest) {
            furthest = Some(range);
        }
        if written && further(furthest_written) {
            furthest_written = Some(range);
        }
    }
    Ok(())
}

fn range(tensor: u32, raw: &spw_tensor, span: u8) -> Option<Range> {
    let (address, dtype) = match span {
        0 => (raw.param.cast_const(), raw.param_dtype),
        GRAD => (raw.grad, raw.grad_dtype),
        2 => (raw.exp_avg.cast_const(), raw.state_dtype),
        3 => (raw.exp_avg_sq.cast_const(), raw.state_dtype),
        4 => (raw.param_copy.cast_const(), raw.copy_dtype),
        5 => (raw.shadow_param.cast_const(), raw.param_dtype),
        6 => (raw.shadow_exp_avg.cast_const(), raw.state_dtype),
        _ => (raw.shadow_exp_avg_sq.cast_const(), raw.state_dtype),
    };
    let bytes = spw_dtype_size(dtype).saturating_mul(raw.n).min(usize::MAX as u64) as usize;
    let start = address.addr();
    (bytes > 0 && start > 0).then(|| Range { start, end: start.saturating_add(bytes), tensor, span })
}

/// Writes the statistics if the caller requested them.
///
/// # Safety
/// `stats` is NULL or points to a struct of `struct_size` bytes.
pub(super) unsafe fn write_stats(seen: StepStats, stats: *mut spw_step_stats) -> Result<()> {
    if stats.is_null() {
        return Ok(());
    }
    let StepStats { nonfinite, sum_squares } = seen;
    let values = spw_step_stats { struct_size: 0, nonfinite: u32::from(nonfinite), sum_squares };
    // SAFETY: the caller meets the callee's requirements.
    unsafe { record::write(&values, stats, "stats") }
}
