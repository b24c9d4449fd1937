//! The virtual tier: commits beside puts.

use std::ffi::c_void;

use super::open::spw_tier;
use crate::capi::prelude::*;
use crate::sys::promise::Outcome;

/// A commit that a thread of the library makes, while the tier is put and got.
pub struct spw_commit(Outcome<()>, OpeningProcess);

impl spw_commit {
    pub(in crate::capi) fn of(outcome: Outcome<()>) -> spw_commit {
        spw_commit(outcome, OpeningProcess::current())
    }
}

handle!(spw_commit, "commit", 1, "the commit");

/// Begins what `spw_tier_commit` does, and returns at once. The commit takes what the extents hold at the call; of a put in
/// flight, what it puts. Puts and gets may continue, and count for the next commit. They use other space, so the tier needs
/// room for a third version of what is put meanwhile. The library copies the payload.
///
/// Until the commit has ended, other commits, rollbacks, removals, imports and evacuations of the tier wait for it. Where
/// `spw_tier_commit` moves data off a path that failed or lost its files, this commit fails; the next `spw_tier_commit`
/// moves the data. After any error what was put is still there, uncommitted. SPW_ERR_BUSY and the error of a failed put
/// come from this call, other errors from `spw_commit_wait`.
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
    commit_out: Out<*mut spw_commit>,
) -> spw_status {
    guard(|| {
        let tier = &handle::get(tier)?.0;
        let payload = payload.payload(payload_bytes)?;
        commit_out.open(|| Ok(spw_commit::of(tier.commit_beside(step, payload)?)))
    })
}

/// Waits until the commit has ended, for up to `timeout_ms` milliseconds (0: poll; negative: without limit). SPW_ERR_TIMEOUT:
/// the commit continues. Any other status is that of the commit, and every later call returns it again.
#[unsafe(no_mangle)]
pub extern "C" fn spw_commit_wait(commit: Option<&spw_commit>, timeout_ms: i64) -> spw_status {
    guard(|| handle::get(commit)?.0.wait(timeout(timeout_ms)))
}

/// Waits until the commit has ended, and frees the handle.
#[unsafe(no_mangle)]
pub extern "C" fn spw_commit_close(commit: Option<Box<spw_commit>>) -> spw_status {
    guard(|| handle::end(commit))
}
