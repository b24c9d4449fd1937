//! The tensors of a call as jobs: checked, with the coefficients of each.

use std::ffi::c_void;

use super::overlap;
use super::tensor::{at, no_low_bits, spw_tensor, tensor_of};
use crate::capi::abi_struct;
use crate::error::Result;
use crate::kernel::{Optimizer, Tensor};
use crate::optim::parallel::Job;
use crate::optim::processor;
use crate::sys::arena::{self, Arena};
use crate::sys::try_vec;

/// Reads the tensors of a call, except those of no elements. `own` makes coefficients from a tensor's own options.
/// Rejects param_low.
///
/// # Safety
/// `tensors` points to `count` tensors. No other code uses their spans during `'a`.
pub(in crate::capi) unsafe fn jobs<'a, R: Optimizer>(
    tensors: *const spw_tensor,
    count: u64,
    optimizer: &R,
    own: impl Fn(*const c_void) -> Result<R>,
) -> Result<Vec<Job<'a, R>>> {
    arena::with(|arena| {
        // SAFETY: the caller meets the callees' requirements.
        unsafe {
            let raw = abi_struct::all_in(arena, tensors, count, "tensors")?;
            no_low_bits(raw)?;
            let mut jobs = try_vec::with_capacity("listing the tensors", raw.len())?;
            make_jobs(arena, raw, optimizer, own, |job| jobs.push(job))?;
            Ok(jobs)
        }
    })
}

/// Calls `work` with the jobs of [`jobs`], param_low allowed. Their list lasts for the call only, so it costs no allocation.
///
/// # Safety
/// As [`jobs`].
pub(in crate::capi) unsafe fn with_jobs<R: Optimizer, T>(
    tensors: *const spw_tensor,
    count: u64,
    optimizer: &R,
    own: impl Fn(*const c_void) -> Result<R>,
    work: impl FnOnce(&mut [Job<'_, R>]) -> Result<T>,
) -> Result<T> {
    arena::with(|arena| {
        // SAFETY: the caller meets the callees' requirements.
        unsafe {
            let raw = abi_struct::all_in(arena, tensors, count, "tensors")?;
            let mut jobs = arena::with_capacity(arena, "listing the tensors", raw.len())?;
            make_jobs(arena, raw, optimizer, own, |job| jobs.push(job))?;
            work(&mut jobs)
        }
    })
}

/// Fails as a step of these tensors would, and changes nothing.
///
/// # Safety
/// As [`jobs`].
pub(in crate::capi) unsafe fn check<R: Optimizer>(
    tensors: *const spw_tensor,
    count: u64,
    optimizer: &R,
    own: impl Fn(*const c_void) -> Result<R>,
) -> Result<()> {
    // SAFETY: the caller meets the callee's requirements.
    unsafe { with_jobs(tensors, count, optimizer, own, |_| processor::kernel().map(drop)) }
}

/// # Safety
/// As [`spans`].
unsafe fn make_jobs<'a, R: Optimizer>(
    arena: &Arena,
    raw: &[spw_tensor],
    optimizer: &R,
    own: impl Fn(*const c_void) -> Result<R>,
    mut push: impl FnMut(Job<'a, R>),
) -> Result<()> {
    overlap::check_in(arena, raw)?;
    for (index, raw) in raw.iter().enumerate().filter(|(_, raw)| raw.n > 0) {
        let optimizer = if raw.options.is_null() { Ok(*optimizer) } else { own(raw.options) };
        let job = optimizer.and_then(|optimizer| {
            // SAFETY: the spans do not overlap, and the caller lends them for 'a.
            let mut tensor = unsafe { tensor_of(raw) }?;
            tensor.require_states(R::EXP_AVG, R::EXP_AVG_SQ)?;
            optimizer.check_types(&tensor)?;
            Ok(Job { optimizer, tensor })
        });
        push(job.map_err(|error| at(index, error))?);
    }
    Ok(())
}

/// Makes the spans of the tensors, except those of no elements, each with its index. An error does not yet name its
/// tensor.
///
/// # Safety
/// No other code uses the spans during `'a`.
pub(in crate::capi) unsafe fn spans<'a>(
    raw: &[spw_tensor],
) -> Result<impl Iterator<Item = (usize, Result<Tensor<'a>>)>> {
    overlap::check(raw)?;
    let with_elements = raw.iter().enumerate().filter(|(_, raw)| raw.n > 0);
    // SAFETY: the spans do not overlap, and the caller lends them for 'a.
    Ok(with_elements.map(|(index, raw)| (index, unsafe { tensor_of(raw) })))
}
