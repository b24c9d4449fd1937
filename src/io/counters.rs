//! Counters and statistics of an engine.
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

/// Bytes and busy time of an engine since it was opened.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct EngineTraffic {
    /// Bytes read by successful reads.
    pub read_bytes: u64,
    /// Bytes written by successful writes.
    pub written_bytes: u64,
    /// Time with a read in flight.
    pub reading: Duration,
    /// Time with a write or a sync in flight.
    pub writing: Duration,
    /// Time with any operation in flight.
    pub busy: Duration,
    /// Operations in flight.
    pub pending: u64,
}

/// Statistics of an engine since it was opened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EngineStats {
    /// Reads that succeeded.
    pub reads: u64,
    /// Writes that succeeded.
    pub writes: u64,
    /// Bytes read by successful reads.
    pub read_bytes: u64,
    /// Bytes written by successful writes.
    pub written_bytes: u64,
    /// Operations that failed.
    pub failed: u64,
    /// Pieces of reads and writes submitted to the backend.
    pub pieces: u64,
    /// Bytes submitted with O_DIRECT.
    pub direct_bytes: u64,
    /// Bytes submitted through the page cache.
    pub buffered_bytes: u64,
    /// Bytes of `direct_bytes` copied through bounce blocks.
    pub bounced_bytes: u64,
    /// Short transfers that were resumed.
    pub resumed: u64,
    /// Interrupted requests that were retried.
    pub retried: u64,
    /// Time with a read in flight.
    pub reading: Duration,
    /// Time with a write, a sync or an allocation in flight.
    pub writing: Duration,
    /// Time with any operation in flight.
    pub busy: Duration,
    /// Operations that have no outcome yet.
    pub pending: u64,
    /// Operations past their deadline whose memory the system may still use.
    pub stuck: u64,
    /// "io_uring", "threads", "s3" or "sim".
    pub backend: &'static str,
    /// Why io_uring is unavailable; empty unless the engine fell back to threads.
    pub backend_reason: String,
    /// Why the most recent buffered file does not use direct I/O; empty if all files do.
    pub buffered_reason: String,
    /// Most pieces in flight in each direction.
    pub depth: u32,
    /// Most bytes of a piece, for the most recent file.
    pub block_bytes: u64,
    /// Path of the profile that supplied settings the caller left open; empty if none.
    pub profile: String,
}
