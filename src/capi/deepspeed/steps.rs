//! DeepSpeed's Adam in a tiered update and in a speculation round.

use std::ffi::c_void;

use super::call::{rule_of, rules_of, spw_ds_adam_call};
use super::ids::lent;
use crate::capi::optim::spw_tensor;
use crate::capi::prelude::*;
use crate::capi::speculate::bucket::{parse_event, spw_spec_event};
use crate::capi::speculate::engine::spw_spec;
use crate::capi::swap::inputs::{self, Rules};
use crate::capi::swap::spw_swap;
use crate::error::{RoundKind, Rounds};
use crate::kernel::Arithmetic;
use crate::optim::deepspeed::ADAM;

/// Called on the thread that made the call, after each subgroup's step, while transfers of other subgroups continue.
/// `param` holds the subgroup's new f32 master weights and is valid until the return. A return value other than 0 ends
/// the update with SPW_ERR_INVALID_ARGUMENT. The function must not call the update.
pub type spw_swap_stepped_fn =
    Option<unsafe extern "C" fn(user: *mut c_void, subgroup: u64, param: *const f32) -> i32>;

/// Does `spw_swap_adam_step` with the arithmetic of `spw_ds_adam_update`, one call per subgroup. The coefficients
/// advance in the order of `calls`, whatever the order of the steps, so the bits are those of DeepSpeed's step over
/// states in memory. `tensors[i].options` is NULL. The id advances only if the whole update succeeds. `stepped`
/// may be NULL. With SPW_SWAP_FLAG_CODED_MOMENTS the moments are rounded at random, with bits that the step and the
/// subgroup's number determine.
///
/// # Safety
/// As `spw_swap_adam_step`; `calls` points to `count` structs, `struct_size` bytes apart; `stepped` may be NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_swap_ds_adam_step(
    swap: Option<&mut spw_swap>,
    id: i32,
    calls: In<spw_ds_adam_call>,
    tensors: In<spw_tensor>,
    count: u64,
    stepped: spw_swap_stepped_fn,
    user: *mut c_void,
) -> spw_status {
    guard(|| {
        let swap = &handle::get_mut(swap)?.update;
        // SAFETY: the caller meets the callees' requirements.
        unsafe {
            let (kept, rules) = rules_of(id, calls, count, swap.layout().has_codes())?;
            let own = |index: usize, raw: &spw_tensor| inputs::rule_of_id(&rules, index, raw);
            let parts = inputs::whole(swap.layout(), tensors, count, own)?;
            let mut after = |subgroup: usize, param: &[f32]| match stepped
                .map_or(0, |stepped| stepped(user, subgroup as u64, param.as_ptr()))
            {
                0 => Ok(()),
                other => {
                    let reason = format!(
                        "the callback returned {other} for subgroup {subgroup}, which ended the update"
                    );
                    Err(Error::invalid("stepped", reason))
                }
            };
            swap.at_rest(|swap| swap.adam_step(parts, false, &mut after))?;
            ADAM.create(id, kept);
            Ok(())
        }
    })
}

/// Gives the update that `spw_swap_begin` opened the arithmetic of `spw_swap_ds_adam_step`, with one call per subgroup.
/// It comes before the first `spw_swap_submit`, whose tensors then have no options. The id advances when
/// `spw_swap_finish` ends the update, unless the update is skipped.
///
/// - SPW_ERR_NO_ROUND: no update is open.
/// - SPW_ERR_BUCKET_SUBMITTED: a subgroup was already submitted.
///
/// # Safety
/// `calls` points to `count` structs, `struct_size` bytes apart.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_swap_ds_adam_calls(
    swap: Option<&mut spw_swap>,
    id: i32,
    calls: In<spw_ds_adam_call>,
    count: u64,
) -> spw_status {
    guard(|| {
        let swap = handle::get_mut(swap)?;
        if let Some(subgroup) = swap.update.first_submitted()? {
            return Err(Rounds::Update.error(RoundKind::Submitted(subgroup as u32)));
        }
        if count != swap.update.layout().len() as u64 {
            let reason = format!("is {count}, but there are {} subgroups", swap.update.layout().len());
            return Err(Error::invalid("count", reason));
        }
        let (state, rules) = rules_of(id, calls, count, swap.update.layout().has_codes())?;
        swap.rules = Rules::Each { rules, id, state };
        Ok(())
    })
}

/// Submits a bucket of one tensor to a round of `spw_spec_begin_adam`, with the hyper-parameters of `call` and the
/// arithmetic of `spw_ds_adam_update`. grad_scale and max_norm are those of the round, in place of `call->grad_scale`.
/// The step of `id` advances now. Otherwise as `spw_spec_submit`.
///
/// # Safety
/// As `spw_spec_submit`, for one tensor. `call` points to a struct of `struct_size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_spec_submit_ds_adam(
    spec: Option<&spw_spec>,
    bucket: u32,
    id: i32,
    call: In<spw_ds_adam_call>,
    tensor: In<spw_tensor>,
    event: In<spw_spec_event>,
) -> spw_status {
    guard(|| {
        // SAFETY: the caller meets the callees' requirements.
        unsafe {
            let spec = handle::get(spec)?;
            let round = spec.adam_round_for(bucket)?;
            let event = parse_event(event)?;
            let (state, rule) = rule_of(id, call)?;
            let rule = rule.with_grad_scale(round.grad_scale);
            let work = spec.boxed(lent(rule, tensor)?)?;
            spec.submit(bucket, work, event)?;
            ADAM.create(id, state);
            Ok(())
        }
    })
}
