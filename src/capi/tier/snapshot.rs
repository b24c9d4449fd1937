//! The virtual tier: snapshots, which are exports beside steps.

use std::ffi::c_char;

use super::open::spw_tier;
use crate::capi::prelude::*;
use crate::tier::snapshot::TierSnapshot;

/// An export of the last commit that a thread of the library writes, while the tier is put, got and committed.
pub struct spw_tier_snapshot(TierSnapshot);

impl Handle for spw_tier_snapshot {
    const NAME: &'static str = "snapshot";

    fn check_process(&self) -> Result<()> {
        self.0.check_process()
    }
}

c_struct! { first 32;
/// How far a snapshot is.
pub struct spw_tier_snapshot_info {
    /// 1 once the snapshot has ended, with or without success, else 0.
    pub ended: u32,
    /// The committed step that it holds.
    pub step: u64,
    /// Bytes written so far.
    pub written: u64,
    /// Bytes of the whole state.
    pub bytes: u64,
}
}

/// Holds the last commit, and starts to write it to `directory`, which must not exist. Puts and commits may go on: the
/// snapshot keeps the space of its own versions. The directory is as of `spw_tier_export`, and `spw_tier_import` reads it.
/// It appears complete or not at all. `bytes_per_second` limits the speed; 0: no limit. The tier stays locked until the
/// snapshot has ended, also if it is closed before. Errors are those of `spw_tier_export`.
#[unsafe(no_mangle)]
pub extern "C" fn spw_tier_snapshot_begin(
    tier: Option<&spw_tier>,
    directory: In<c_char>,
    bytes_per_second: u64,
    snapshot_out: Out<*mut spw_tier_snapshot>,
) -> spw_status {
    guard(|| {
        let tier = &handle::get(tier)?.0;
        let directory = directory.path("directory")?;
        let speed = (bytes_per_second > 0).then_some(bytes_per_second);
        snapshot_out.open(|| Ok(spw_tier_snapshot(TierSnapshot::begin(tier, directory, speed)?)))
    })
}

/// Waits until the directory is complete, for up to `timeout_ms` milliseconds (0: poll; negative: without limit).
/// SPW_ERR_TIMEOUT: the snapshot goes on. Any other status is that of the snapshot, and every later call returns it again.
/// `step_out` (may be NULL) receives the step.
#[unsafe(no_mangle)]
pub extern "C" fn spw_tier_snapshot_wait(
    snapshot: Option<&spw_tier_snapshot>,
    timeout_ms: i64,
    step_out: Out<u64>,
) -> spw_status {
    guard(|| {
        step_out.put_optional(handle::get(snapshot)?.0.wait(timeout(timeout_ms))?);
        Ok(())
    })
}

/// Returns how far the snapshot is.
#[unsafe(no_mangle)]
pub extern "C" fn spw_tier_snapshot_get_progress(
    snapshot: Option<&spw_tier_snapshot>,
    info_out: Out<spw_tier_snapshot_info>,
) -> spw_status {
    guard(|| {
        let found = handle::get(snapshot)?.0.progress();
        let values = report!(spw_tier_snapshot_info from found { step, written, bytes } with {
            ended: found.ended.into()
        });
        info_out.write(&values, "info_out")
    })
}

/// Frees the snapshot. One that has not ended is cancelled first, and nothing of it is left; this takes as long as the
/// write in flight, at most the I/O timeout of the tier.
#[unsafe(no_mangle)]
pub extern "C" fn spw_tier_snapshot_close(snapshot: Option<Box<spw_tier_snapshot>>) -> spw_status {
    guard(|| handle::end(snapshot))
}
