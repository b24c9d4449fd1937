//! Contents of an extent, and the origin of a write.
#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use super::extent::Version;

/// Contents of an extent, and their checksums once they are known.
#[derive(Debug)]
pub(super) struct Contents {
    pub(super) version: Version,
    pub(super) sums: OnceLock<Arc<[u64]>>,
    /// Changed with the state locked.
    readers: AtomicUsize,
}

impl Contents {
    pub(super) fn new(version: Version, sums: OnceLock<Arc<[u64]>>) -> Contents {
        Contents { version, sums, readers: AtomicUsize::new(0) }
    }

    /// True if its places are being read.
    pub(super) fn is_read(&self) -> bool {
        self.readers.load(Ordering::Relaxed) > 0
    }

    /// Counts a reader; with the state locked.
    pub(super) fn begin_read(&self) {
        self.readers.fetch_add(1, Ordering::Relaxed);
    }

    /// A reader is done; with the state locked.
    pub(super) fn end_read(&self) {
        self.readers.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Whose write it is.
#[derive(Debug)]
pub(super) enum Writer {
    /// The caller's: new contents.
    Caller,
    /// An evacuation's, of contents that were read.
    Evacuation(Arc<Contents>),
    /// A commit's, of contents that it cannot make durable where they are.
    Commit(Arc<Contents>),
}
