//! The tensors of a tiered update: their check, their weights of the step before, and their state in memory.

use std::ffi::c_void;

use crate::capi::optim::overlap;
use crate::capi::optim::tensor::{self, spw_dtype, spw_tensor};
use crate::dtype::bf16;
use crate::error::{Error, Result};
use crate::offload::swap::encoding::Encoding;
use crate::offload::swap::{SubgroupState, Swap};

/// Copies the tensors of an update, one for each subgroup, and rejects invalid ones.
///
/// # Safety
/// `tensors` points to `count` structs, `struct_size` bytes apart.
pub(in crate::capi) unsafe fn read_tensors(
    swap: &Swap,
    tensors: *const spw_tensor,
    count: u64,
) -> Result<Vec<spw_tensor>> {
    check_count(swap, count)?;
    // SAFETY: the caller meets the callee's requirements.
    let raw = unsafe { tensor::read_all(tensors, count) }?;
    check_inputs(swap, &raw)?;
    Ok(raw)
}

/// Rejects a count that is not the number of subgroups, before an array of that many structs is read.
pub(in crate::capi) fn check_count(swap: &Swap, count: u64) -> Result<()> {
    match count == swap.len() as u64 {
        true => Ok(()),
        false => Err(Error::invalid("count", format!("is {count}, but there are {} subgroups", swap.len()))),
    }
}

/// The caller's tensor with the subgroup's state in memory.
pub(in crate::capi) fn with_state(tensor: spw_tensor, state: SubgroupState<'_>) -> spw_tensor {
    spw_tensor {
        param_dtype: spw_dtype::SPW_DTYPE_F32 as u32,
        param: state.param.as_mut_ptr().cast(),
        exp_avg: state.exp_avg.as_mut_ptr().cast(),
        exp_avg_sq: state.exp_avg_sq.as_mut_ptr().cast(),
        ..tensor
    }
}

/// The bf16 weights that a tensor names as those of the step before; empty without them.
///
/// # Safety
/// [`check_inputs`] accepted the tensor. No code writes the weights while the slice is in use.
pub(in crate::capi) unsafe fn published<'a>(raw: &spw_tensor) -> &'a [bf16] {
    let (from, _) = weights_of(raw);
    if from.is_null() || raw.n == 0 {
        return &[];
    }
    // SAFETY: the type and alignment are checked, and the caller lends `n` numbers until the call returns. The slice is
    // used only before the tensor is stepped, and no code writes to it until then.
    unsafe { std::slice::from_raw_parts(from.cast(), raw.n as usize) }
}

/// The address of a tensor's bf16 weights and the field that names it; NULL without weights.
fn weights_of(raw: &spw_tensor) -> (*const c_void, &'static str) {
    let bf16 = spw_dtype::SPW_DTYPE_BF16 as u32;
    match (raw.param.is_null(), raw.copy_dtype == bf16) {
        (false, _) => (raw.param.cast_const(), "param"),
        (true, true) => (raw.param_copy.cast_const(), "param_copy"),
        (true, false) => (std::ptr::null(), "param"),
    }
}

pub(in crate::capi) fn check_aligned(weights: *const c_void, name: &'static str) -> Result<()> {
    match weights.cast::<bf16>().is_aligned() {
        true => Ok(()),
        false => Err(Error::invalid(name, "must be aligned to 2 bytes")),
    }
}

/// Rejects invalid tensors before any subgroup is stepped.
fn check_inputs(swap: &Swap, tensors: &[spw_tensor]) -> Result<()> {
    let [f32, bf16] = [spw_dtype::SPW_DTYPE_F32, spw_dtype::SPW_DTYPE_BF16].map(|dtype| dtype as u32);
    let split = swap.usual() == Encoding::SplitMaster;
    for (index, raw) in tensors.iter().enumerate() {
        let at = |error: Error| error.within(&format!("tensors[{index}]."));
        let elements = swap.elements(index)? as u64;
        let weights = split && raw.param_dtype == bf16;
        let wrong = if raw.n != elements {
            Some(("n", format!("is {}, but the subgroup has {elements} elements", raw.n)))
        } else if raw.param_dtype != f32 && !weights || raw.state_dtype != f32 {
            Some(("param_dtype", "must be SPW_DTYPE_F32, and state_dtype too".to_string()))
        } else if split && raw.n > 0 && (raw.copy_dtype != bf16 || raw.param_copy.is_null()) {
            Some((
                "param_copy",
                "must not be NULL, and copy_dtype must be SPW_DTYPE_BF16: the master weights are split"
                    .to_string(),
            ))
        } else if !raw.param.is_null() && !weights || !raw.exp_avg.is_null() || !raw.exp_avg_sq.is_null() {
            Some(("param", "must be NULL, exp_avg and exp_avg_sq too: the tier stores them".to_string()))
        } else if raw.grad.is_null() && raw.n > 0 {
            Some(("grad", "is NULL".to_string()))
        } else {
            None
        };
        if let Some((argument, reason)) = wrong {
            return Err(at(Error::invalid(argument, reason)));
        }
        if raw.n > 0 {
            let (weights, name) = weights_of(raw);
            check_aligned(weights, name).map_err(at)?;
        }
    }
    tensor::no_shadows(tensors)?;
    overlap::check(tensors)
}
