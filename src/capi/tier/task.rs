//! The virtual tier: work that a thread of the library does beside the caller.

use crate::capi::prelude::*;
use crate::sys::promise::Outcome;
use crate::tier::snapshot::{Progress, TierSnapshot};

/// A commit or an export that a thread of the library makes, while the tier is put and got.
pub struct spw_tier_task(Work, OpeningProcess);

enum Work {
    Commit { step: u64, outcome: Outcome<()> },
    Export(TierSnapshot),
}

impl spw_tier_task {
    pub(in crate::capi) fn commit(step: u64, outcome: Outcome<()>) -> spw_tier_task {
        spw_tier_task(Work::Commit { step, outcome }, OpeningProcess::current())
    }

    pub(super) fn export(snapshot: TierSnapshot) -> spw_tier_task {
        spw_tier_task(Work::Export(snapshot), OpeningProcess::current())
    }
}

handle!(spw_tier_task, "task", 1, "the tier");

c_struct! { first 32;
/// How far a commit or an export is.
pub struct spw_tier_progress {
    /// 1 once it has ended, with or without success, else 0.
    pub ended: u32,
    /// The step that it commits or exports.
    pub step: u64,
    /// Bytes that an export has written so far; 0 for a commit.
    pub written: u64,
    /// Bytes of the whole export; 0 for a commit.
    pub bytes: u64,
}
}

/// Waits until the commit or export has ended, for up to `timeout_ms` milliseconds (0: poll; negative: without limit).
/// SPW_ERR_TIMEOUT: it continues. Any other status is its own, and every later call returns it again. `step_out` (may be
/// NULL) receives the step.
#[unsafe(no_mangle)]
pub extern "C" fn spw_tier_task_wait(
    task: Option<&spw_tier_task>,
    timeout_ms: i64,
    step_out: Out<u64>,
) -> spw_status {
    guard(|| {
        let limit = timeout(timeout_ms);
        let step = match &handle::get(task)?.0 {
            Work::Commit { step, outcome } => outcome.wait(limit).map(|()| *step)?,
            Work::Export(snapshot) => snapshot.wait(limit)?,
        };
        step_out.put_optional(step);
        Ok(())
    })
}

/// Writes how far the commit or export is.
#[unsafe(no_mangle)]
pub extern "C" fn spw_tier_task_get_progress(
    task: Option<&spw_tier_task>,
    progress_out: Out<spw_tier_progress>,
) -> spw_status {
    guard(|| {
        let found = match &handle::get(task)?.0 {
            Work::Commit { step, outcome } => {
                Progress { step: *step, written: 0, bytes: 0, ended: outcome.ended() }
            }
            Work::Export(snapshot) => snapshot.progress(),
        };
        let values = report!(spw_tier_progress from found { step, written, bytes } with {
            ended: found.ended.into()
        });
        progress_out.write(&values, "progress_out")
    })
}

/// Frees the handle. A commit that has not ended is waited for. An export that has not ended is cancelled, and nothing of
/// it is left; this takes as long as the write in flight, at most the I/O timeout of the tier.
#[unsafe(no_mangle)]
pub extern "C" fn spw_tier_task_close(task: Option<Box<spw_tier_task>>) -> spw_status {
    guard(|| handle::end(task))
}
