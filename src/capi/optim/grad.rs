//! Gradients without a step: statistics and sums.

use crate::capi::optim::overlap;
use crate::capi::optim::tensor::{self, at, spw_grad_tensor, spw_step_stats, spw_tensor};
use crate::capi::prelude::*;
use crate::dtype::Floats;
use crate::optim::check;
use crate::optim::grad::{self, Addition};
use crate::sys::try_vec;

/// Computes the sum of squares and the finiteness of the scaled gradients of `count` tensors, for example for gradient
/// clipping, in one pass over their memory. For one tensor the sum has the same bits as the statistics of its step; the
/// sums of several tensors are added in their order. Of each tensor only n, grad and grad_dtype are read. Gradients may
/// overlap.
///
/// # Safety
/// `tensors` points to `count` structs, `struct_size` bytes apart, `stats_out` to a struct of `struct_size` bytes. No
/// other thread writes the gradients during the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_grad_stats(
    tensors: In<spw_tensor>,
    count: u64,
    scale: f64,
    stats_out: Out<spw_step_stats>,
) -> spw_status {
    guard(|| {
        stats_out.required("stats_out")?;
        let scale = check::finite("scale", scale)?;
        // SAFETY: the caller meets the callees' requirements.
        unsafe {
            stats_out.check("stats_out")?;
            let raw = tensors.read_all(count, "tensors")?;
            let mut grads = try_vec::with_capacity("listing the gradients", raw.len())?;
            for (index, raw) in raw.iter().enumerate().filter(|(_, raw)| raw.n > 0) {
                grads.push(gradient(raw).map_err(|error| at(index, error))?);
            }
            tensor::write_stats(grad::stats_all(&grads, scale)?, stats_out)
        }
    })
}

/// The gradient of a tensor.
///
/// # Safety
/// The caller lends the gradient, of n elements, for `'a`.
unsafe fn gradient<'a>(raw: &spw_tensor) -> Result<Floats<'a>> {
    let dtype = tensor::parse_dtype(raw.grad_dtype, "grad_dtype")?;
    // SAFETY: the caller lends the gradient.
    unsafe { tensor::span(raw.grad, dtype, raw.n, "grad") }
}

/// Adds gradients of a micro-batch to accumulated gradients: `dst = dst + src * scale` for each of `count` tensors, in any
/// combination of f32, f16 and bf16. The sum is computed in f32 by a fused multiply-add, and rounded once to the type
/// of `dst`, to nearest even. The results have the same bits on every processor and for every number of threads.
///
/// If `stats_out` is not NULL, the same pass computes the sum of squares and the finiteness of the new `dst`, for
/// clipping after the last micro-batch. For one tensor these are the bits of `spw_grad_stats`; the sums of several
/// tensors are added in their order. No `dst` may overlap another span of the call. After an error nothing has changed.
///
/// # Safety
/// `tensors` points to `count` structs, `struct_size` bytes apart. No other thread uses their spans during the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_grad_accumulate(
    tensors: In<spw_grad_tensor>,
    count: u64,
    scale: f64,
    stats_out: Out<spw_step_stats>,
) -> spw_status {
    guard(|| {
        let scale = check::finite("scale", scale)?;
        // SAFETY: the caller meets the callees' requirements.
        unsafe {
            stats_out.check("stats_out")?;
            let raw = tensors.read_all(count, "tensors")?;
            overlap::check_sums(&raw)?;
            let mut additions = try_vec::with_capacity("listing the tensors", raw.len())?;
            for (index, raw) in raw.iter().enumerate() {
                additions.extend(addition(raw).map_err(|error| at(index, error))?);
            }
            let seen = grad::accumulate(additions, scale, !stats_out.is_null())?;
            tensor::write_stats(seen, stats_out)
        }
    })
}

/// The spans of a tensor; `None` for no elements.
///
/// # Safety
/// The caller lends the spans, each of n elements, for `'a`. They do not overlap.
unsafe fn addition<'a>(raw: &spw_grad_tensor) -> Result<Option<Addition<'a>>> {
    abi_struct::zero("reserved", raw.reserved)?;
    let dst = tensor::parse_dtype(raw.dst_dtype, "dst_dtype")?;
    let src = tensor::parse_dtype(raw.src_dtype, "src_dtype")?;
    if raw.n == 0 {
        return Ok(None);
    }
    // SAFETY: the caller lends the spans.
    let (dst, src) =
        unsafe { (tensor::span_mut(raw.dst, dst, raw.n, "dst")?, tensor::span(raw.src, src, raw.n, "src")?) };
    Ok(Some(Addition { dst, src }))
}
