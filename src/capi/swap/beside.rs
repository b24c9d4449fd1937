//! A tiered update whose steps run beside the caller.

use super::inputs::{self, Rules, of_call};
use super::update::spw_swap;
use crate::capi::optim::adam::spw_adam_options;
use crate::capi::optim::tensor::{self, spw_step_stats, spw_tensor};
use crate::capi::prelude::*;
use crate::capi::speculate::verdict::parse_verdict;
use crate::offload::swap::beside::BesideOptions;
use crate::optim::deepspeed::ADAM;

/// Flags of `spw_swap_begin`, combined by addition.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub enum spw_swap_begin_flag {
    /// The steps are final only after `spw_swap_verdict`.
    SPW_SWAP_BEGIN_FLAG_SPECULATIVE = 1,
    /// `spw_swap_finish` returns the statistics of the gradients.
    SPW_SWAP_BEGIN_FLAG_STATS = 2,
    /// After SPW_SPEC_VERDICT_SKIP the copies hold any values, and nothing is read for them.
    SPW_SWAP_BEGIN_FLAG_NO_RESTORE = 4,
}

/// Opens one Adam step of all subgroups, and returns at once. A thread of the library does what `spw_swap_adam_step`
/// does, with the same bits: it steps each subgroup once it is fetched and its gradient was submitted. Subgroups are
/// fetched in the order of the last update's submits; the first update expects the last subgroup first. `flags` is the
/// sum of `spw_swap_begin_flag`.
///
/// Until `spw_swap_finish` returns, every call is SPW_ERR_ROUND_OPEN but `spw_swap_submit`, `spw_swap_verdict`,
/// `spw_swap_rollback`, `spw_swap_close` and `spw_swap_get_stats`. After the finish the thread still
/// writes. The next begin does not wait for these writes; other calls do.
///
/// With SPW_SWAP_BEGIN_FLAG_SPECULATIVE the tier keeps the version before the step of each subgroup until the verdict.
/// This takes space for a third version of what was not committed. Subgroups in memory whose state the tier lacks are
/// stepped after the verdict.
///
/// If the update fails in the background, `spw_swap_submit` and `spw_swap_finish` return its error; see
/// `spw_swap_adam_step` for what is possible then. A write that fails after the finish makes the next call SPW_ERR_BUSY,
/// with the same remedy.
#[unsafe(no_mangle)]
pub extern "C" fn spw_swap_begin(
    swap: Option<&mut spw_swap>,
    options: In<spw_adam_options>,
    flags: u32,
) -> spw_status {
    guard(|| {
        let swap = handle::get_mut(swap)?;
        let flags = abi_struct::flags("flags", flags, 7)?;
        let rule = of_call(options)?;
        let [speculative, squares, keeps] = [1, 2, 4].map(|flag| flags & flag != 0);
        swap.update.begin(BesideOptions { speculative, squares, restores: !keeps })?;
        swap.rules = Rules::One(rule);
        Ok(())
    })
}

/// Passes the gradients of a subgroup to the open update, and returns at once. `tensors` and `firsts` are the parts of
/// the subgroup as for `spw_swap_adam_step_parts`; NULL for `firsts` means one tensor for the whole subgroup. A `count`
/// of 0 leaves the subgroup as it is. The library copies the structs.
///
/// Kept: the gradients and the copies, until `spw_swap_finish`, `spw_swap_rollback` or `spw_swap_close` has returned.
///
/// The step writes the copies. After SPW_SPEC_VERDICT_SKIP a copy that was written holds the param from before the step; a
/// copy that was not written yet holds what it held at the submit.
///
/// With SPW_SWAP_FLAG_SPLIT_MASTER there is one tensor for the whole subgroup. In a speculative update `param` then names
/// the weights of the step before, which stay unchanged. It does so with SPW_SWAP_FLAG_LOW_BITS too, and after a skip
/// `low_sums` hold any values.
///
/// - SPW_ERR_NO_ROUND: no update is open.
/// - SPW_ERR_ROUND_RESOLVED: the update is skipped.
/// - SPW_ERR_BUCKET_SUBMITTED: the subgroup was already submitted in this update.
///
/// # Safety
/// As `spw_adam_step`, and any thread may use the spans until they belong to the caller again. No two subgroups of an
/// update have a common copy. `firsts` is NULL or points to `count` numbers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_swap_submit(
    swap: Option<&mut spw_swap>,
    subgroup: u64,
    tensors: In<spw_tensor>,
    firsts: In<u64>,
    count: u64,
) -> spw_status {
    guard(|| {
        let spw_swap { update, rules, .. } = handle::get_mut(swap)?;
        let subgroup = usize::try_from(subgroup).unwrap_or(usize::MAX);
        update.may_submit(subgroup)?;
        let keep_weights = update.is_speculative()?;
        // SAFETY: the caller meets the callee's requirements, and lends the spans until the update drops the parts.
        let parts = unsafe {
            inputs::of_subgroup(update.layout(), subgroup, tensors, firsts, count, rules, keep_weights)?
        };
        update.submit(subgroup, parts)
    })
}

/// Gives a speculative update its verdict, an `spw_spec_verdict`, and returns at once. It may come before submits.
///
/// - SPW_SPEC_VERDICT_COMMIT: the steps are final.
/// - SPW_SPEC_VERDICT_SKIP: every subgroup keeps the state from before the step. No subgroup has to be submitted.
/// - SPW_SPEC_VERDICT_REDO: every subgroup is stepped with `grad_scale` instead of the factor of its options, which is
///   rounded to f32. Subgroups that were written are read again.
///
/// SPW_ERR_ROUND_RESOLVED: the update has its verdict, or is not speculative.
#[unsafe(no_mangle)]
pub extern "C" fn spw_swap_verdict(swap: Option<&mut spw_swap>, verdict: u32, grad_scale: f64) -> spw_status {
    guard(|| {
        let swap = handle::get_mut(swap)?;
        swap.update.verdict(parse_verdict(verdict, grad_scale)?)
    })
}

/// Waits until all subgroups are stepped, for up to `timeout_ms` milliseconds (negative: without limit), and ends the
/// update. With SPW_SWAP_BEGIN_FLAG_STATS `stats_out` receives the statistics of the gradients, as from
/// `spw_swap_adam_step`; it may be NULL.
///
/// - SPW_ERR_NO_ROUND: no update is open.
/// - SPW_ERR_BUCKET_MISSING: a subgroup was not submitted. The update stays open.
/// - SPW_ERR_ROUND_OPEN: a speculative update has no verdict. It stays open.
/// - SPW_ERR_TIMEOUT: the update stays open.
/// - Other errors ended the update, see `spw_swap_begin`.
#[unsafe(no_mangle)]
pub extern "C" fn spw_swap_finish(
    swap: Option<&mut spw_swap>,
    timeout_ms: i64,
    stats_out: Out<spw_step_stats>,
) -> spw_status {
    guard(|| {
        let swap = handle::get_mut(swap)?;
        stats_out.check("stats_out")?;
        let skipped = swap.update.is_skipped();
        let stats = swap.update.finish(timeout(timeout_ms))?;
        if let (Rules::Each { id, state, .. }, false) = (&swap.rules, skipped) {
            ADAM.create(*id, *state);
        }
        tensor::write_stats(stats, stats_out)
    })
}

/// Waits for up to `timeout_ms` milliseconds (negative: without limit) for the next subgroup whose step is final and whose
/// copies are written, and writes its number. The copies may be read from then on, while later subgroups are stepped. Each
/// subgroup is named once, before `spw_swap_finish`. Before a verdict no step is final.
///
/// - SPW_ERR_NO_ROUND: no update is open.
/// - SPW_ERR_NOT_FOUND: every subgroup was named, or the update is skipped.
/// - SPW_ERR_TIMEOUT: there is none yet.
/// - Other errors ended the update, see `spw_swap_begin`.
#[unsafe(no_mangle)]
pub extern "C" fn spw_swap_next_published(
    swap: Option<&mut spw_swap>,
    timeout_ms: i64,
    subgroup_out: Out<u64>,
) -> spw_status {
    guard(|| {
        let swap = handle::get_mut(swap)?;
        subgroup_out.required("subgroup_out")?;
        match swap.update.next_published(timeout(timeout_ms))? {
            Some(subgroup) => subgroup_out.put(subgroup as u64, "subgroup_out"),
            None => {
                Err(Error::NotFound("no subgroup of the update is left to publish; finish it".to_string()))
            }
        }
    })
}
