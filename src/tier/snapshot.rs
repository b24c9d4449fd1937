//! Snapshots: an export of the last commit that a thread of its own writes, while the tier is used.
//!
//! Invariants:
//! - The begin holds the state: later writes and commits use other space until the snapshot has ended.
//! - The directory or file appears complete and durable, or not at all, as with every export.
//! - After the close the thread has ended, and nothing of an unfinished snapshot is left.
#![forbid(unsafe_code)]

use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use super::export::{Export, Form, Pace};
use super::select::Selection;
use super::store::Tier;
use crate::error::{Doing, IoError, IoKind, Result};
use crate::sys::promise::{Outcome, promise};
use crate::sys::sync::{Lock, Signal};

/// A snapshot that is being written, or has ended. Its drop cancels it.
#[derive(Debug)]
pub struct TierSnapshot {
    tier: Weak<Tier>,
    shared: Arc<SnapshotTask>,
    outcome: Outcome<u64>,
}

/// How far a snapshot is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// The committed step that it holds.
    pub step: u64,
    /// Bytes written so far.
    pub written: u64,
    /// Bytes of the whole state.
    pub bytes: u64,
    /// True once the thread has ended, with or without success.
    pub ended: bool,
}

#[derive(Debug)]
struct SnapshotTask {
    step: u64,
    bytes: u64,
    to: PathBuf,
    state: Lock<State>,
    changed: Signal,
}

#[derive(Debug, Default)]
struct State {
    written: u64,
    cancelled: bool,
}

impl TierSnapshot {
    /// Holds the last commit of `tier`, and starts to write it to `directory`, which must not exist. `bytes_per_second`
    /// limits the speed; `None`: no limit. Errors are those of [`Tier::export`].
    pub fn begin(tier: &Arc<Tier>, directory: &Path, bytes_per_second: Option<u64>) -> Result<TierSnapshot> {
        let whole = Selection::default();
        TierSnapshot::export(tier, directory, Form::Directory, &whole, Pace::Gentle, bytes_per_second)
    }

    /// As [`TierSnapshot::begin`], of what `selection` takes, in any form and at any pace.
    pub fn export(
        tier: &Arc<Tier>,
        to: &Path,
        form: Form,
        selection: &Selection,
        pace: Pace,
        bytes_per_second: Option<u64>,
    ) -> Result<TierSnapshot> {
        let export = Export::begin(Arc::clone(tier), to, form, selection)?;
        let shared = Arc::new(SnapshotTask {
            step: export.step(),
            bytes: export.bytes(),
            to: to.to_path_buf(),
            state: Lock::default(),
            changed: Signal::default(),
        });
        let (theirs, (promise, outcome)) = (Arc::clone(&shared), promise("the snapshot"));
        promise.keep_in_thread("spillway-snap", "starting the thread of a snapshot", move |promise| {
            let begun = Instant::now();
            promise.keep(export.run(pace, &|bytes| theirs.passed(bytes, bytes_per_second, begun)));
        })?;
        Ok(TierSnapshot { tier: Arc::downgrade(tier), shared, outcome })
    }

    /// How far the snapshot is.
    pub fn progress(&self) -> Progress {
        let SnapshotTask { step, bytes, .. } = *self.shared;
        Progress { step, written: self.shared.state.lock().written, bytes, ended: self.outcome.ended() }
    }

    /// Waits until the export is complete, and returns the step. `Timeout` if it is not after `timeout`.
    pub fn wait(&self, timeout: Option<Duration>) -> Result<u64> {
        self.outcome.wait(timeout)
    }
}

impl SnapshotTask {
    /// Counts bytes, and sleeps until the limit of the speed allows them. Fails once the snapshot is cancelled.
    fn passed(&self, bytes: u64, bytes_per_second: Option<u64>, begun: Instant) -> Result<()> {
        let mut state = self.state.lock();
        let due = bytes_per_second.and_then(|speed| {
            let seconds = (state.written + bytes) as f64 / speed.max(1) as f64;
            begun.checked_add(Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX))
        });
        if bytes_per_second.is_some() {
            state = self.changed.wait_while(state, due, |state| !state.cancelled);
        }
        if state.cancelled {
            let message = "the snapshot was closed before it was complete; nothing of it is left";
            return Err(IoError::about(IoKind::Cancelled, Doing::Writing, self.to.to_string_lossy())
                .because(message)
                .into());
        }
        state.written += bytes;
        Ok(())
    }
}

impl Drop for TierSnapshot {
    fn drop(&mut self) {
        self.shared.state.lock().cancelled = true;
        self.shared.changed.notify_all();
        // The read in flight does not wait for a turn.
        let _without_turns = self.tier.upgrade().map(|tier| tier.without_turns());
        let _ = self.outcome.wait(None);
    }
}
