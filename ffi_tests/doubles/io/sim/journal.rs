//! The events of simulated disks in order. One run yields the disk images after a crash at any point of it.
#![forbid(unsafe_code)]

use std::sync::Arc;

use crate::sys::sync::Lock;

/// An action of a disk.
#[derive(Debug, Clone)]
pub enum DiskEvent {
    /// Bytes reached the disk's cache.
    Write {
        /// The file.
        name: String,
        /// Byte offset in the file.
        at: usize,
        /// The bytes.
        bytes: Vec<u8>,
    },
    /// The written data of a file became durable.
    Sync {
        /// The file.
        name: String,
    },
    /// A file was created.
    Create {
        /// The file.
        name: String,
    },
    /// A file was extended to a length.
    Allocate {
        /// The file.
        name: String,
        /// The length in bytes.
        len: usize,
    },
    /// A file was removed.
    Remove {
        /// The file.
        name: String,
    },
    /// The creation of files became durable.
    SyncDirectory,
}

impl DiskEvent {
    /// The file of the event, if it concerns one.
    pub fn name(&self) -> Option<&String> {
        match self {
            DiskEvent::Write { name, .. }
            | DiskEvent::Sync { name }
            | DiskEvent::Create { name }
            | DiskEvent::Allocate { name, .. }
            | DiskEvent::Remove { name } => Some(name),
            DiskEvent::SyncDirectory => None,
        }
    }
}

/// The events of several disks, in order of time.
#[derive(Debug, Clone, Default)]
pub struct Journal {
    pub(super) events: Arc<Lock<Vec<(usize, DiskEvent)>>>,
}

impl Journal {
    pub(super) fn add(&self, disk: usize, event: DiskEvent) {
        self.events.lock().push((disk, event));
    }

    /// Number of events so far.
    pub fn len(&self) -> usize {
        self.events.lock().len()
    }

    /// True if there are no events.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}
