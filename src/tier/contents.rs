//! Contents of an extent, and the origin of a write.
#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use super::extent::Version;

/// Contents of an extent, and the checksums of its blocks once known.
#[derive(Debug)]
pub(super) struct Contents {
    pub(super) version: Version,
    pub(super) checksums: OnceLock<Arc<[u64]>>,
    /// Number of readers; changed only with the state locked.
    readers: AtomicUsize,
    /// Number of snapshots that hold these contents; changed only with the state locked.
    snapshots: AtomicUsize,
}

impl Contents {
    pub(super) fn new(version: Version, checksums: OnceLock<Arc<[u64]>>) -> Contents {
        Contents { version, checksums, readers: AtomicUsize::new(0), snapshots: AtomicUsize::new(0) }
    }

    /// True if a read of this version is in flight.
    pub(super) fn is_read(&self) -> bool {
        self.readers.load(Ordering::Relaxed) > 0
    }

    /// True if a read is in flight, or a snapshot holds this version: its space must stay as it is.
    pub(super) fn is_held(&self) -> bool {
        self.is_read() || self.snapshots.load(Ordering::Relaxed) > 0
    }

    /// Adds a snapshot. The state must be locked.
    pub(super) fn hold(&self) {
        self.snapshots.fetch_add(1, Ordering::Relaxed);
    }

    /// Removes a snapshot. The state must be locked.
    pub(super) fn let_go(&self) {
        self.snapshots.fetch_sub(1, Ordering::Relaxed);
    }

    /// Adds a reader. The state must be locked.
    pub(super) fn begin_read(&self) {
        self.readers.fetch_add(1, Ordering::Relaxed);
    }

    /// Removes a reader. The state must be locked.
    pub(super) fn end_read(&self) {
        self.readers.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Origin of a write.
#[derive(Debug)]
pub(super) enum WriteOrigin {
    /// A write of new contents by the caller.
    Caller,
    /// A move by an evacuation, of contents that were read.
    Evacuation(Arc<Contents>),
    /// A move by a commit, of contents that cannot become durable where they are.
    Commit(Arc<Contents>),
}
