//! Results that the processes of one machine post in an arena.

use crate::arena::Verdict;
use crate::capi::arena::open::spw_arena;
use crate::capi::optim::tensor::spw_step_stats;
use crate::capi::prelude::*;
use crate::optim::StepStats;

c_struct! { first 24;
/// The results of all processes of an arena together.
pub struct spw_arena_verdict {
    /// 1 if a gradient of any process is Inf or NaN, else 0.
    pub nonfinite: u32,
    /// Number of processes that failed.
    pub failed: u32,
    /// 0
    pub reserved: u32,
    /// Sum of squares over all processes, added in the order of their numbers; NaN if `nonfinite` is 1.
    pub sum_squares: f64,
}
}

/// Takes the number `process` (from 0, below `processes` of the arena) for this handle. Every process joins before the
/// first round, so that the others notice its death. An open round that an earlier process posted with this number is
/// aborted. Joining again does nothing. SPW_ERR_BUSY if another handle has the number.
#[unsafe(no_mangle)]
pub extern "C" fn spw_arena_join(arena: Option<&spw_arena>, process: u32) -> spw_status {
    guard(|| handle::get(arena)?.0.join(process))
}

/// Posts the local result of `process` for `round` (1 to 2^32 - 1, each round once): the statistics of its gradients, and
/// `failed` 1 if one of its stages failed. A round is decided once all processes have posted it. The call is an error while
/// the round that the process posted before is open: wait for its verdict, or abort it. A round that was aborted may
/// be posted; its wait is an error at once.
#[unsafe(no_mangle)]
pub extern "C" fn spw_arena_post(
    arena: Option<&spw_arena>,
    process: u32,
    round: u64,
    stats: In<spw_step_stats>,
    failed: u32,
) -> spw_status {
    guard(|| {
        let raw = stats.read("stats")?;
        let nonfinite = abi_struct::flag("stats.nonfinite", raw.nonfinite)?;
        let stats = StepStats { nonfinite, sum_squares: raw.sum_squares };
        handle::get(arena)?.0.post(process, round, stats, abi_struct::flag("failed", failed)?)
    })
}

/// Waits until `round` is decided, for up to `timeout_ms` milliseconds (0: polls; negative: without limit), and writes its
/// verdict. Every process gets the same outcome, and the same bits.
///
/// - SPW_ERR_ARENA_PEER_ENDED: the round is aborted for all processes. Roll back. A process left it by
///   `spw_arena_abort_round`, or one that joined ended before it posted.
/// - SPW_ERR_TIMEOUT: the round is open; the message names a process that has not posted. Do not roll back: wait again, or
///   call `spw_arena_abort_round`.
/// - SPW_ERR_ARENA_CHANGED: a process went on without this round.
///
/// A handle that has not joined observes: it aborts no round. It waits on for a process that ended, because a process that
/// joins with the same number may post the round; the message of its timeout names the process that ended.
#[unsafe(no_mangle)]
pub extern "C" fn spw_arena_wait_verdict(
    arena: Option<&spw_arena>,
    round: u64,
    timeout_ms: i64,
    verdict_out: Out<spw_arena_verdict>,
) -> spw_status {
    guard(|| {
        verdict_out.required("verdict_out")?;
        verdict_out.check("verdict_out")?;
        write(handle::get(arena)?.0.wait_verdict(round, timeout(timeout_ms))?, verdict_out)
    })
}

/// Leaves `round`, posted or not: aborts it for all processes, unless it is decided. All open rounds below `round` are
/// aborted with it. `decided_out` receives 1 if the round
/// was decided before: `verdict_out` then has the verdict, which this process follows as all others do. Otherwise it
/// receives 0, all processes roll back, and `verdict_out` stays as it is.
#[unsafe(no_mangle)]
pub extern "C" fn spw_arena_abort_round(
    arena: Option<&spw_arena>,
    process: u32,
    round: u64,
    decided_out: Out<u32>,
    verdict_out: Out<spw_arena_verdict>,
) -> spw_status {
    guard(|| {
        decided_out.required("decided_out")?;
        verdict_out.required("verdict_out")?;
        verdict_out.check("verdict_out")?;
        let found = handle::get(arena)?.0.abort_round(process, round)?;
        decided_out.put(u32::from(found.is_some()), "decided_out")?;
        found.map_or(Ok(()), |found| write(found, verdict_out))
    })
}

fn write(found: Verdict, verdict_out: Out<spw_arena_verdict>) -> Result<()> {
    let stats = found.stats;
    let values = report!(spw_arena_verdict from stats {
        nonfinite, sum_squares
    } with {
        failed: found.failed, reserved: 0
    });
    verdict_out.write(&values, "verdict_out")
}
