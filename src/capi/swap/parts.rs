//! The tiered update of subgroups that are made of parts of many tensors.
//!
//! Invariant: everything about the parts that could fail is checked before the first subgroup is stepped.

use super::update::spw_swap;
use crate::capi::base::spw_status;
use crate::capi::guard::guard;
use crate::capi::handle;
use crate::capi::optim::adam::{self, spw_adam_options};
use crate::capi::optim::overlap;
use crate::capi::optim::tensor::{self, at, spw_dtype, spw_tensor};
use crate::error::{Error, Result};
use crate::offload::swap::encoding::Encoding;
use crate::offload::swap::{SubgroupState, Swap};
use crate::optim;
use crate::sys::try_vec;

/// As `spw_swap_adam_step`, for subgroups that hold parts of many tensors. `tensors[i]` is stepped with the `n` elements
/// of subgroup `subgroups[i]` from element `firsts[i]` on. The parts are sorted by subgroup and element, and do not
/// overlap. Elements of a subgroup without a part do not change.
///
/// A tensor may have options of its own. Its `param_copy` may also be SPW_DTYPE_F32: it then receives the new param
/// itself. The step does not return statistics. With SPW_SWAP_FLAG_SPLIT_MASTER the call is SPW_ERR_UNSUPPORTED.
///
/// # Safety
/// As `spw_adam_step`; `subgroups` and `firsts` point to `count` numbers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_swap_adam_step_parts(
    swap: Option<&mut spw_swap>,
    options: *const spw_adam_options,
    tensors: *const spw_tensor,
    subgroups: *const u64,
    firsts: *const u64,
    count: u64,
) -> spw_status {
    guard(|| {
        let swap = &mut handle::get_mut(swap)?.0;
        // SAFETY: the caller meets the callees' requirements.
        unsafe {
            let raw = tensor::read_all(tensors, count)?;
            let place = |numbers: *const u64, name| match numbers.is_null() && count > 0 {
                true => Err(Error::invalid(name, "is NULL")),
                false if count == 0 => Ok(&[][..]),
                // `read_all` has checked that the count fits the address space.
                false => Ok(std::slice::from_raw_parts(numbers, count as usize)),
            };
            let parts = parts_of(swap, &raw, place(subgroups, "subgroups")?, place(firsts, "firsts")?)?;
            adam::check(options, &raw)?;
            swap.step_with(&|_| &[], |subgroup, state| step(options, &parts[subgroup], state))
        }
    })
}

/// A tensor with its first element in the subgroup.
type Part = (usize, spw_tensor);

/// The parts of each subgroup.
fn parts_of(swap: &Swap, raw: &[spw_tensor], subgroups: &[u64], firsts: &[u64]) -> Result<Vec<Vec<Part>>> {
    if swap.usual() == Encoding::SplitMaster {
        let reason = "the masters of this update are split; call spw_swap_adam_step";
        return Err(Error::Unsupported(reason.to_string()));
    }
    let mut parts = try_vec::with_capacity("listing the subgroups", swap.len())?;
    parts.resize_with(swap.len(), Vec::new);
    let mut end = (0, 0);
    for (index, ((raw, subgroup), first)) in raw.iter().zip(subgroups).zip(firsts).enumerate() {
        let subgroup = usize::try_from(*subgroup).ok().filter(|subgroup| *subgroup < swap.len());
        let Some(subgroup) = subgroup else {
            let reason = format!("must be less than the {} subgroups", swap.len());
            return Err(Error::invalid(format!("subgroups[{index}]"), reason));
        };
        let after =
            first.checked_add(raw.n).filter(|after| *after <= swap.elements(subgroup).unwrap_or(0) as u64);
        let Some(after) = after else {
            let reason = format!(
                "plus tensors[{index}].n exceeds the {} elements of subgroup {subgroup}",
                swap.elements(subgroup)?
            );
            return Err(Error::invalid(format!("firsts[{index}]"), reason));
        };
        if (subgroup, *first) < end {
            let reason =
                "must not be below the end of the part before: sort the parts by subgroup and element";
            return Err(Error::invalid(format!("firsts[{index}]"), reason));
        }
        end = (subgroup, after);
        if raw.n > 0 {
            check(raw).map_err(|error| at(index, error))?;
            parts[subgroup].push((*first as usize, *raw));
        }
    }
    tensor::no_shadows(raw)?;
    overlap::check(raw)?;
    Ok(parts)
}

fn check(raw: &spw_tensor) -> Result<()> {
    tensor::check_copy(raw)?;
    let f32 = spw_dtype::SPW_DTYPE_F32 as u32;
    if raw.param_dtype != f32 || raw.state_dtype != f32 {
        return Err(Error::invalid("param_dtype", "must be SPW_DTYPE_F32, and state_dtype too"));
    }
    if !raw.param.is_null() || !raw.exp_avg.is_null() || !raw.exp_avg_sq.is_null() {
        let reason = "must be NULL, exp_avg and exp_avg_sq too: the tier stores them";
        return Err(Error::invalid("param", reason));
    }
    // SAFETY: the slices are checked and dropped; nothing is read.
    unsafe { tensor::span(raw.grad, tensor::parse_dtype(raw.grad_dtype, "grad_dtype")?, raw.n, "grad") }?;
    if raw.copy_dtype != 0 {
        let dtype = tensor::parse_dtype(raw.copy_dtype, "copy_dtype")?;
        // SAFETY: as above.
        unsafe { tensor::span(raw.param_copy, dtype, raw.n, "param_copy") }?;
    }
    Ok(())
}

/// Steps the parts of one subgroup, and copies f32 params out.
///
/// # Safety
/// As `spw_swap_adam_step_parts`; [`check`] accepted the parts, and their ranges lie in the subgroup.
unsafe fn step(options: *const spw_adam_options, parts: &[Part], state: SubgroupState<'_>) -> Result<()> {
    let SubgroupState { param, exp_avg, exp_avg_sq } = state;
    let f32 = |raw: &spw_tensor| raw.copy_dtype == spw_dtype::SPW_DTYPE_F32 as u32;
    let mut tensors = try_vec::with_capacity("listing the parts of a subgroup", parts.len())?;
    for (first, raw) in parts {
        let range = *first..first + raw.n as usize;
        let mut tensor = spw_tensor {
            param: param[range.clone()].as_mut_ptr().cast(),
            exp_avg: exp_avg[range.clone()].as_mut_ptr().cast(),
            exp_avg_sq: exp_avg_sq[range].as_mut_ptr().cast(),
            ..*raw
        };
        if f32(raw) {
            (tensor.param_copy, tensor.copy_dtype) = (std::ptr::null_mut(), 0);
        }
        tensors.push(tensor);
    }
    // SAFETY: the states are borrowed for this call, and the parts do not overlap; the caller lends the other spans.
    let mut jobs = unsafe { adam::jobs(options, tensors.as_ptr(), tensors.len() as u64) }?;
    optim::adam::step(&mut jobs, false)?;
    drop(jobs);
    for (first, raw) in parts.iter().filter(|(_, raw)| f32(raw)) {
        let from = &param[*first..first + raw.n as usize];
        // SAFETY: the caller lends `n` floats, which do not overlap memory of the update; `check` tested the address.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), raw.param_copy.cast::<f32>(), from.len()) };
    }
    Ok(())
}
