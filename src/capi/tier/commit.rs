//! The virtual tier: commits beside puts.

use std::ffi::c_void;

use super::open::spw_tier;
use super::task::spw_tier_task;
use crate::capi::prelude::*;

/// Begins what `spw_tier_commit` does, and returns at once. The commit takes what the extents hold at the call; of a put in
/// flight, what it puts. Puts and gets may continue, and count for the next commit. They use other space, so the tier needs
/// room for a third version of what is put meanwhile. The library copies the payload.
///
/// Until the commit has ended, other commits, rollbacks, removals, imports and evacuations of the tier wait for it. Where
/// `spw_tier_commit` moves data off a path that failed or lost its files, this commit fails; the next `spw_tier_commit`
/// moves the data. After any error what was put is still there, uncommitted. SPW_ERR_BUSY and the error of a failed put
/// come from this call, other errors from `spw_tier_task_wait`.
///
/// Ranks that must resume at a common step wait for the commits of all ranks before any of them begins the next commit.
/// With a `world` above 1, or SPW_TIER_FLAG_KEEP_BEFORE, the tier keeps the state of the commit before until then, in space
/// of its own.
#[unsafe(no_mangle)]
pub extern "C" fn spw_tier_commit_begin(
    tier: Option<&spw_tier>,
    step: u64,
    payload: In<c_void>,
    payload_bytes: u64,
    task_out: Out<*mut spw_tier_task>,
) -> spw_status {
    guard(|| {
        let tier = &handle::get(tier)?.0;
        let payload = payload.payload(payload_bytes)?;
        task_out.open(|| Ok(spw_tier_task::commit(step, tier.commit_beside(step, payload)?)))
    })
}
