//! What an engine counts, and how it tells.
#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::backend::Action;
use crate::error::Result;

/// Counters of an engine.
#[derive(Debug, Default)]
pub(super) struct Counters {
    pub(super) reads: AtomicU64,
    pub(super) writes: AtomicU64,
    pub(super) read_bytes: AtomicU64,
    pub(super) written_bytes: AtomicU64,
    pub(super) failed: AtomicU64,
    pub(super) pieces: AtomicU64,
    pub(super) direct_bytes: AtomicU64,
    pub(super) buffered_bytes: AtomicU64,
    pub(super) bounced_bytes: AtomicU64,
    pub(super) resumed: AtomicU64,
    pub(super) retried: AtomicU64,
}

impl Counters {
    pub(super) fn add(counter: &AtomicU64, count: u64) {
        counter.fetch_add(count, Ordering::Relaxed);
    }

    pub(super) fn count_outcome(&self, action: Action, outcome: &Result<u64>) {
        match (action, outcome) {
            (_, Err(_)) => Counters::add(&self.failed, 1),
            (Action::Read, Ok(bytes)) => {
                Counters::add(&self.reads, 1);
                Counters::add(&self.read_bytes, *bytes);
            }
            (Action::Write, Ok(bytes)) => {
                Counters::add(&self.writes, 1);
                Counters::add(&self.written_bytes, *bytes);
            }
            (Action::Sync | Action::Allocate { .. }, Ok(_)) => {}
        }
    }
}

/// What an engine has done so far.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EngineStats {
    /// Reads that succeeded.
    pub reads: u64,
    /// Writes that succeeded.
    pub writes: u64,
    /// Bytes read by them.
    pub read_bytes: u64,
    /// Bytes written by them.
    pub written_bytes: u64,
    /// Operations that failed.
    pub failed: u64,
    /// Requests to the system.
    pub pieces: u64,
    /// Bytes sent past the page cache.
    pub direct_bytes: u64,
    /// Bytes sent through it.
    pub buffered_bytes: u64,
    /// Bytes of `direct_bytes` that went through bounce blocks.
    pub bounced_bytes: u64,
    /// Short transfers that were resumed.
    pub resumed: u64,
    /// Interrupted requests that were tried again.
    pub retried: u64,
    /// Time with a read under way.
    pub reading: Duration,
    /// Time with a write or a sync under way.
    pub writing: Duration,
    /// Time with any operation under way.
    pub busy: Duration,
    /// Operations not finished.
    pub pending: u64,
    /// Operations past their deadline whose memory the system still has.
    pub stuck: u64,
    /// "io_uring", "threads" or "sim".
    pub backend: &'static str,
    /// Why it is not io_uring; empty if it is, or if threads were asked for.
    pub backend_reason: String,
    /// Why the last file that is not direct is not; empty if all are.
    pub buffered_reason: String,
    /// Requests under way at a time.
    pub depth: u32,
    /// Most bytes of a request, for the last file.
    pub block_bytes: u64,
    /// The profile that these come from, as far as the caller did not give them; empty if none.
    pub profile: String,
}
