//! What simulated disks served, in order: one run gives the disks that a crash at any moment of it leaves behind.
#![forbid(unsafe_code)]

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Something that a disk did.
#[derive(Debug, Clone)]
pub enum Event {
    /// Bytes reached the disk's cache.
    Write {
        /// The file.
        name: String,
        /// Where in it.
        at: usize,
        /// Which bytes.
        bytes: Vec<u8>,
    },
    /// What was written to a file became durable.
    Sync {
        /// The file.
        name: String,
    },
    /// A file was made.
    Create {
        /// The file.
        name: String,
    },
    /// A file was given its length.
    Allocate {
        /// The file.
        name: String,
        /// The length.
        len: usize,
    },
    /// A file was removed.
    Remove {
        /// The file.
        name: String,
    },
    /// Which files there are became durable.
    SyncDirectory,
}

impl Event {
    /// The file, if it is about one.
    pub fn name(&self) -> Option<&String> {
        match self {
            Event::Write { name, .. }
            | Event::Sync { name }
            | Event::Create { name }
            | Event::Allocate { name, .. }
            | Event::Remove { name } => Some(name),
            Event::SyncDirectory => None,
        }
    }
}

/// The events of several disks, in the order of time.
#[derive(Debug, Clone, Default)]
pub struct Journal {
    events: Arc<Mutex<Vec<(usize, Event)>>>,
}

impl Journal {
    pub(super) fn add(&self, disk: usize, event: Event) {
        self.lock().push((disk, event));
    }

    /// Number of events so far.
    pub fn len(&self) -> usize {
        self.lock().len()
    }

    /// True if nothing happened.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Vec<(usize, Event)>> {
        self.events.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
