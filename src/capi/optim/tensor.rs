//! Tensors as C passes them, and the checks that allow their use as slices.

use std::ffi::c_void;

use crate::capi::prelude::*;
use crate::dtype::{Dtype, Floats, FloatsMut};
use crate::kernel::squares::TILE;
use crate::kernel::{BLOCK, Codes, Moments, States, Tensor};
use crate::optim::StepStats;

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
    /// 8-bit codes of a moment, with a bf16 scale for each 32 elements. Only as the state_dtype of a tensor.
    SPW_DTYPE_CODES = 4,
}

/// Bytes of one element: 0 for SPW_DTYPE_NONE and for values that are not an `spw_dtype`.
pub(super) fn dtype_size(dtype: u32) -> u64 {
    const SIZES: [u64; 5] = [0, 4, 2, 2, 1];
    SIZES.get(dtype as usize).copied().unwrap_or(0)
}

c_struct! { first 80;
/// One tensor of a step. `struct_size` is also the distance in bytes between the tensors of an array. Each span is a
/// contiguous array of `n` elements, aligned to its element. Spans do not overlap.
///
/// Without shadow spans a step updates param and states in place. With shadow spans a step writes the new values to
/// these and leaves the old values unchanged. A caller can alternate between two sets of spans: param and states name
/// the current set, the shadow fields the other. To undo a step, the caller passes the same set as current again.
/// Shadow spans aligned to a cache line (64 bytes) are written with non-temporal stores where these are faster.
///
/// | param | exp_avg, exp_avg_sq | grad | param_copy |
/// |---|---|---|---|
/// | f32 | f32 | f32, f16, bf16 | none, f16, bf16 |
/// | f32 | bf16 | f32, bf16 | none, bf16 |
/// | f16 | f32, f16 | f16 | none |
/// | bf16 | f32, bf16 | bf16 | none |
/// | bf16 with param_low | f32, bf16 | f32, bf16 | none |
/// | as with f32 moments | 8-bit codes | as with f32 moments | as with f32 moments |
pub struct spw_tensor {
    /// `spw_dtype` of param.
    pub param_dtype: u32,
    /// `spw_dtype` of exp_avg and exp_avg_sq.
    pub state_dtype: u32,
    /// `spw_dtype` of grad.
    pub grad_dtype: u32,
    /// `spw_dtype` of param_copy, or SPW_DTYPE_NONE without param_copy.
    pub copy_dtype: u32,
    /// 1: the step first takes what other code has written to param_copy. Each element of param that does not round to its
    /// element of param_copy becomes that element, unless both are NaN. With bf16 an element halfway between two values
    /// rounds to either. Allowed for tensors in host memory without shadow spans, in steps that write param_copy at once.
    /// 0: param_copy is only written.
    pub take_copy: u32,
    /// Number of elements. If it is 0, all other fields of the tensor are ignored.
    pub n: u64,
    /// Parameter (the master weight if it is f32).
    pub param: *mut c_void,
    /// Gradient. It is only read.
    pub grad: *const c_void,
    /// First moment. NULL for Adagrad.
    pub exp_avg: *mut c_void,
    /// Second moment (Adagrad: the sum of squares). NULL for Lion and Signum.
    pub exp_avg_sq: *mut c_void,
    /// Receives the updated parameter rounded to 16 bits, in the same pass; or NULL. It is read only with take_copy.
    pub param_copy: *mut c_void,
    /// Options of this tensor (the option struct of the called optimizer), or NULL for the options of the call.
    pub options: *const c_void,
    /// Receives the updated param, with the type of param; NULL: the update is in place.
    pub shadow_param: *mut c_void,
    /// Receives the updated exp_avg. Set it if and only if shadow_param and exp_avg are set.
    pub shadow_exp_avg: *mut c_void,
    /// Receives the updated exp_avg_sq. Set it if and only if shadow_param and exp_avg_sq are set.
    pub shadow_exp_avg_sq: *mut c_void,
    /// `n` words of 16 bits, or NULL. With a bf16 param they hold the low halves of its f32 master, and the step updates
    /// the master: its results have the bits of an f32 parameter's. param is then the master rounded to the nearest
    /// bf16, ties away from zero. Zeros make param its own master. Only the steps of this header, `spw_low_bits_settle`,
    /// `spw_undo_*`, `spw_spec_submit` and `spw_stage_submit` take it, without shadow
    /// spans. A recorded step keeps the old values in its log, up to 12 bytes per element.
    pub param_low: *mut c_void,
    /// A word for each 4,096 elements, the last of which may be fewer, or NULL. Only with param_low, or where a tier has the
    /// low bits (SPW_SWAP_FLAG_LOW_BITS). Shows whether other
    /// code has written to param since the last step: a step compares the elements with the sum that the step before
    /// has stored. Where they differ, the low bits of these elements count as zero, so that param is their master. Then
    /// the step stores the sum of the elements that it has written. 0 in place of a sum: no step was taken yet, and the
    /// low bits count; so set 0 at first, and after param and param_low were both written. Keep sums in memory only: they
    /// are the same on every processor, but their definition may change.
    pub low_sums: *mut u64,
    /// With a state_dtype of SPW_DTYPE_CODES: the scales of exp_avg, one bf16 for each block of 32 elements, of which the
    /// last may have fewer; else NULL. Bytes of zero are moments of zero. A step computes
    /// with the values of the codes as with f32 moments, and then stores the nearest codes, or with stochastic rounding
    /// the code below or above. A second moment above zero never becomes zero. The calls that take param_low take codes,
    /// without shadow spans.
    pub exp_avg_scale: *mut c_void,
    /// The scales of exp_avg_sq.
    pub exp_avg_sq_scale: *mut c_void,
}
}

c_struct! { first 16;
/// Statistics of the scaled gradients of all tensors of one call.
pub struct spw_step_stats {
    /// 1 if any scaled gradient is Inf or NaN, else 0. The step was done in both cases.
    pub nonfinite: u32,
    /// Sum of squares in f64. The order of summation depends only on the tensors, so the bits are the same on every
    /// processor and for every number of threads. Inf or NaN if `nonfinite` is 1.
    pub sum_squares: f64,
}
}

c_struct! { first 40;
/// A gradient and the accumulated gradient to which it is added.
pub struct spw_grad_tensor {
    /// An `spw_dtype`: the type of `dst`.
    pub dst_dtype: u32,
    /// An `spw_dtype`: the type of `src`.
    pub src_dtype: u32,
    /// 0
    pub reserved: u32,
    /// Number of elements of both; 0 is allowed.
    pub n: u64,
    /// Accumulated gradient, which receives the sum.
    pub dst: *mut c_void,
    /// Gradient to add. It is only read.
    pub src: *const c_void,
}
}

pub(in crate::capi) fn parse_dtype(dtype: u32, argument: &'static str) -> Result<Dtype> {
    known_dtype(dtype).ok_or_else(|| match dtype {
        CODES => Error::invalid(argument, "is SPW_DTYPE_CODES, which is for state_dtype only"),
        _ => Error::invalid(argument, format!("{dtype} is not an spw_dtype")),
    })
}

/// The dtype of a copy; `None` without one.
pub(in crate::capi) fn parse_copy_dtype(dtype: u32, argument: &'static str) -> Result<Option<Dtype>> {
    if dtype == 0 { Ok(None) } else { parse_dtype(dtype, argument).map(Some) }
}

fn known_dtype(dtype: u32) -> Option<Dtype> {
    match dtype {
        1 => Some(Dtype::F32),
        2 => Some(Dtype::F16),
        3 => Some(Dtype::Bf16),
        _ => None,
    }
}

/// Rejects param_low and low_sums, for calls that do not step split masters.
pub(in crate::capi) fn no_low_bits(tensors: &[spw_tensor]) -> Result<()> {
    let is_split = |raw: &spw_tensor| !(raw.param_low.is_null() && raw.low_sums.is_null());
    match tensors.iter().position(|raw| raw.n > 0 && is_split(raw)) {
        None => Ok(()),
        Some(index) if tensors[index].param_low.is_null() => Err(at(index, sums_of_no_low_bits())),
        Some(index) => Err(at(index, no_split_masters())),
    }
}

/// The error for a tensor with low_sums and without param_low.
pub(in crate::capi) fn sums_of_no_low_bits() -> Error {
    Error::invalid("low_sums", "is set, but param_low is NULL")
}

/// The error for a tensor with param_low in a call that does not step split masters.
pub(in crate::capi) fn no_split_masters() -> Error {
    let reason = "param_low is set, but this call does not step split masters; pass NULL and an f32 param";
    Error::Unsupported(reason.to_string())
}

/// As [`read_split`]. Rejects param_low.
pub(in crate::capi) fn read_all(tensors: In<spw_tensor>, count: u64) -> Result<Vec<spw_tensor>> {
    let raw = read_split(tensors, count)?;
    no_low_bits(&raw)?;
    Ok(raw)
}

/// Copies the tensors of a call as structs of this version. Rejects take_copy.
pub(in crate::capi) fn read_split(tensors: In<spw_tensor>, count: u64) -> Result<Vec<spw_tensor>> {
    let mut raw = tensors.read_all(count, "tensors")?;
    match raw.iter().position(|raw| raw.n > 0 && raw.take_copy != 0) {
        None => {}
        Some(index) => return Err(at(index, no_taken_copies())),
    }
    raw.iter_mut().for_each(|tensor| tensor.struct_size = size_of::<spw_tensor>() as u32);
    Ok(raw)
}

/// Adds the tensor's index to an error.
pub(in crate::capi) fn at(index: usize, error: Error) -> Error {
    match error {
        Error::Unsupported(what) => Error::Unsupported(format!("tensors[{index}]: {what}")),
        other => other.within(&format!("tensors[{index}].")),
    }
}

/// Rejects param_copy without copy_dtype or the reverse, and take_copy that is not 0 or 1.
pub(in crate::capi) fn check_copy(raw: &spw_tensor) -> Result<()> {
    match (raw.take_copy, raw.copy_dtype, raw.param_copy.is_null()) {
        (2.., _, _) => Err(Error::invalid("take_copy", format!("is {}; pass 0 or 1", raw.take_copy))),
        (_, 0, false) => Err(Error::invalid("copy_dtype", "is SPW_DTYPE_NONE, but param_copy is not NULL")),
        (_, 1.., true) => Err(Error::invalid("param_copy", "is NULL, but copy_dtype is set")),
        _ => Ok(()),
    }
}

/// The error for a tensor with take_copy in a call that does not read param_copy.
pub(in crate::capi) fn no_taken_copies() -> Error {
    Error::invalid("take_copy", "must be 0: this call only writes param_copy, and does not read it")
}

/// Makes the spans of a tensor.
///
/// # Safety
/// The caller lends the spans, each of n elements, for `'a`. They do not overlap.
pub(super) unsafe fn tensor_of<'a>(raw: &spw_tensor) -> Result<Tensor<'a>> {
    // SAFETY: the caller's promise.
    unsafe { if has_codes(raw) { tensor_with_codes(raw) } else { plain_tensor(raw) } }
}

/// A tensor without 8-bit moments. Inlined, because lists of small tensors pay for each call.
///
/// # Safety
/// As [`tensor_of`].
#[inline(always)]
unsafe fn plain_tensor<'a>(raw: &spw_tensor) -> Result<Tensor<'a>> {
    check_copy(raw)?;
    let state_dtype = parse_dtype(raw.state_dtype, "state_dtype")?;
    let copy_dtype = parse_copy_dtype(raw.copy_dtype, "copy_dtype")?;
    // SAFETY: the caller lends the spans, each of n elements, and they do not overlap.
    unsafe {
        let param = span_mut(raw.param, parse_dtype(raw.param_dtype, "param_dtype")?, raw.n, "param")?;
        let grad = span(raw.grad, parse_dtype(raw.grad_dtype, "grad_dtype")?, raw.n, "grad")?;
        let exp_avg = optional_span(raw.exp_avg, Some(state_dtype), raw.n, "exp_avg")?;
        let exp_avg_sq = optional_span(raw.exp_avg_sq, Some(state_dtype), raw.n, "exp_avg_sq")?;
        if raw.param_low.is_null() && !raw.low_sums.is_null() {
            return Err(sums_of_no_low_bits());
        }
        if !raw.param_low.is_null() {
            return split_tensor(raw, States { param, exp_avg, exp_avg_sq }, grad);
        }
        let param_copy = optional_span(raw.param_copy, copy_dtype, raw.n, "param_copy")?;
        let tensor = Tensor::new(States { param, exp_avg, exp_avg_sq }, grad, param_copy)?;
        let tensor = match shadow_of(raw, state_dtype)? {
            Some(shadow) => tensor.with_shadow(shadow)?,
            None => tensor,
        };
        if raw.take_copy == 1 { Ok(tensor.with_copy_taken()?) } else { Ok(tensor) }
    }
}

/// # Safety
/// As [`tensor_of`].
#[cold]
unsafe fn tensor_with_codes<'a>(raw: &spw_tensor) -> Result<Tensor<'a>> {
    check_scales(raw)?;
    if has_shadow(raw) {
        return Err(Error::invalid("state_dtype", "is SPW_DTYPE_CODES, so the shadow spans must be NULL"));
    }
    // The tensor without moments.
    let mut rest = *raw;
    rest.state_dtype = spw_dtype::SPW_DTYPE_F32 as u32;
    for span in [&mut rest.exp_avg, &mut rest.exp_avg_sq, &mut rest.exp_avg_scale, &mut rest.exp_avg_sq_scale]
    {
        *span = std::ptr::null_mut();
    }
    // SAFETY: the caller lends the spans.
    unsafe { Ok(plain_tensor(&rest)?.with_codes(moments_of(raw)?)?) }
}

/// # Safety
/// As [`tensor_of`].
unsafe fn split_tensor<'a>(raw: &spw_tensor, states: States<'a>, grad: Floats<'a>) -> Result<Tensor<'a>> {
    if raw.copy_dtype != 0 || has_shadow(raw) {
        return Err(Error::invalid("param_low", "is set, so param_copy and the shadow spans must be NULL"));
    }
    if raw.take_copy != 0 {
        return Err(Error::invalid("take_copy", "is 1, but there is no param_copy"));
    }
    // SAFETY: the caller lends the spans.
    let (low, sums) = unsafe { (low_bits(raw)?, low_sums(raw)?) };
    let tensor = Tensor::new_split(states, grad, low)?;
    Ok(match sums {
        Some(sums) => tensor.with_low_sums(sums)?,
        None => tensor,
    })
}

/// # Safety
/// The caller lends param_low, of n words, for `'a`.
pub(super) unsafe fn low_bits<'a>(raw: &spw_tensor) -> Result<&'a mut [u16]> {
    let n = checked_length(raw.param_low, Dtype::Bf16, raw.n, "param_low")?;
    // SAFETY: not NULL, aligned, n words that fit the address space; the caller lends them to us alone.
    Ok(unsafe { std::slice::from_raw_parts_mut(raw.param_low.cast::<u16>(), n) })
}

/// Bytes of the sums of a tensor, which has a word for each tile.
pub(in crate::capi) fn bytes_of_sums(n: u64) -> u64 {
    n.div_ceil(TILE as u64) * 8
}

/// The sums of tiles; `None` without.
///
/// # Safety
/// The caller lends low_sums for `'a`.
pub(in crate::capi) unsafe fn low_sums<'a>(raw: &spw_tensor) -> Result<Option<&'a mut [u64]>> {
    let address = raw.low_sums;
    if address.is_null() {
        return Ok(None);
    }
    if !address.is_aligned() {
        return Err(Error::invalid("low_sums", format!("address {address:p} is not aligned to 8 bytes")));
    }
    // Fewer bytes than those of param, which fit the address space.
    let bytes = bytes_of_sums(raw.n);
    if !is_memory(address.addr(), bytes) {
        return Err(Error::invalid(
            "low_sums",
            format!("{bytes} bytes from {address:p} exceed the address space"),
        ));
    }
    // SAFETY: not NULL, aligned, and words that fit the address space; the caller lends them to us alone.
    Ok(Some(unsafe { std::slice::from_raw_parts_mut(address, (bytes / 8) as usize) }))
}

/// The state_dtype of tensors with 8-bit moments.
const CODES: u32 = spw_dtype::SPW_DTYPE_CODES as u32;

/// Bytes of the scales of `n` codes.
pub(in crate::capi) fn bytes_of_scales(n: u64) -> u64 {
    n.div_ceil(BLOCK as u64) * 2
}

/// The 8-bit moments of a tensor, `[exp_avg, exp_avg_sq]`.
///
/// # Safety
/// The caller lends the spans for `'a`. They do not overlap.
unsafe fn moments_of<'a>(raw: &spw_tensor) -> Result<Moments<'a>> {
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
pub(super) unsafe fn codes_of<'a>(
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
        if !is_memory(span.addr(), bytes) {
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
pub(in crate::capi) fn has_codes(raw: &spw_tensor) -> bool {
    // Without a branch for each: a call asks for every tensor.
    (raw.state_dtype == CODES) | !raw.exp_avg_scale.is_null() | !raw.exp_avg_sq_scale.is_null()
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
pub(in crate::capi) fn check_scales(raw: &spw_tensor) -> Result<()> {
    match raw.state_dtype {
        CODES => Ok(()),
        _ => {
            let reason = "or exp_avg_sq_scale is set, but state_dtype is not SPW_DTYPE_CODES";
            Err(Error::invalid("exp_avg_scale", reason))
        }
    }
}

/// Rejects shadow spans, for calls that keep their own states.
pub(in crate::capi) fn no_shadows(tensors: &[spw_tensor]) -> Result<()> {
    match tensors.iter().position(|raw| raw.n > 0 && has_shadow(raw)) {
        None => Ok(()),
        Some(index) => Err(at(
            index,
            Error::invalid(
                "shadow_param",
                "must be NULL, as all shadow spans: this call does not support them",
            ),
        )),
    }
}

/// True if any shadow span is set.
pub(in crate::capi) fn has_shadow(raw: &spw_tensor) -> bool {
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
pub(in crate::capi) unsafe fn span<'a>(
    from: *const c_void,
    dtype: Dtype,
    n: u64,
    argument: &'static str,
) -> Result<Floats<'a>> {
    let n = checked_length(from, dtype, n, argument)?;
    // SAFETY: not NULL, aligned, n elements that fit the address space; the caller lends them.
    Ok(unsafe { Floats::from_raw(from, dtype, n) })
}

pub(super) unsafe fn span_mut<'a>(
    to: *mut c_void,
    dtype: Dtype,
    n: u64,
    argument: &'static str,
) -> Result<FloatsMut<'a>> {
    let n = checked_length(to, dtype, n, argument)?;
    // SAFETY: not NULL, aligned, n elements that fit the address space; the caller lends them to us alone.
    Ok(unsafe { FloatsMut::from_raw(to, dtype, n) })
}

#[inline]
pub(in crate::capi) unsafe fn optional_span<'a>(
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

/// Inlined, because lists of small tensors pay for each call.
#[inline]
fn checked_length(address: *const c_void, dtype: Dtype, n: u64, argument: &'static str) -> Result<usize> {
    let (address, size) = (address.addr(), dtype.size());
    let fits = |bytes| is_memory(address, bytes);
    if address != 0 && address & (size - 1) == 0 && n.checked_mul(size as u64).is_some_and(fits) {
        return Ok(n as usize);
    }
    Err(no_elements(address, dtype, n, argument))
}

/// Why there are no `n` elements at an address.
#[cold]
fn no_elements(address: usize, dtype: Dtype, n: u64, argument: &'static str) -> Error {
    let reason = match address {
        0 => "is NULL".to_string(),
        _ if !address.is_multiple_of(dtype.size()) => {
            format!("address {address:#x} is not aligned to {} bytes ({})", dtype.size(), dtype.name())
        }
        _ => format!("{n} elements of {} exceed the address space", dtype.name()),
    };
    Error::invalid(argument, reason)
}

/// Upper bound of user addresses on every processor.
const ADDRESS_SPACE: u64 = 1 << 56;

/// True if these bytes do not exceed the address space.
pub(super) fn is_memory(address: usize, bytes: u64) -> bool {
    bytes <= ADDRESS_SPACE && address as u64 <= ADDRESS_SPACE - bytes
}

/// Checks that the caller requested statistics, waits for them, and writes them.
pub(in crate::capi) fn wait_stats(
    wait: impl FnOnce() -> Result<StepStats>,
    stats_out: Out<spw_step_stats>,
) -> Result<()> {
    stats_out.required("stats_out")?;
    stats_out.check("stats_out")?;
    write_stats(wait()?, stats_out)
}

/// Writes the statistics if the caller requested them.
pub(in crate::capi) fn write_stats(seen: StepStats, stats_out: Out<spw_step_stats>) -> Result<()> {
    if stats_out.is_null() {
        return Ok(());
    }
    let StepStats { nonfinite, sum_squares } = seen;
    let values = report!(spw_step_stats with { nonfinite: u32::from(nonfinite), sum_squares });
    stats_out.write(&values, "stats_out")
}
