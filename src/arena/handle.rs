//! One process's access to an arena.
//!
//! Invariants:
//! - Locks belong to a description of their own, whose descriptor forked children close and which leaves the process
//!   never. Another descriptor of the arena, without locks, may be sent to other processes.
//! - A forked child uses none of this. The mapping stays in the child: addresses that it inherited are valid.
//! - Memory that can be written is pinned memory for transfers, which register it at its first use. A read-only mapping
//!   cannot be registered.
//! - The owner removes the name of the arena when it closes it. Memory that other processes have mapped stays mapped.
#![forbid(unsafe_code)]

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use super::layout::{Identity, Layout, Region};
use super::name::NamedFile;
use crate::error::{ArenaError, ArenaKind, Error, Result};
use crate::pool;
use crate::sys::fork_closed::ForkClosedFile;
use crate::sys::shared_memory::{self, SharedMapping};
use crate::sys::span::Span;
use crate::sys::sync::Lock;
use crate::sys::{range_lock, try_vec};

/// Bytes of the file, beyond every arena, whose locks show that a process lives: the owner, the writer of each region,
/// and the process of each slot.
pub const OWNER_LOCK: u64 = 1 << 60;
pub const WRITER_LOCKS: u64 = OWNER_LOCK + (1 << 32);
pub const PROCESS_LOCKS: u64 = OWNER_LOCK + (2 << 32);

/// An arena that this process has mapped. Thread-safe.
#[derive(Debug)]
pub struct Arena {
    pub(super) title: String,
    pub(super) layout: Layout,
    identity: Identity,
    pub(super) mapping: SharedMapping,
    /// The memory as transfers to and from files and GPUs know it, if it can be written.
    transfers: Option<Arc<pool::region::Region>>,
    pub(super) locks: ForkClosedFile,
    shared: File,
    /// The name that this process removes at close.
    owned: Option<NamedFile>,
    is_owner: bool,
    huge: bool,
    notes: Notes,
    pub(super) writing: Vec<Writing>,
    pub(super) joined: Vec<AtomicBool>,
    /// Held by a thread that posts.
    pub(super) posting: Lock<()>,
}

/// The reservation of this handle for one region, and its write.
#[derive(Debug, Default)]
pub(super) struct Writing {
    /// A phase of `write`; 0 without a reservation.
    pub phase: AtomicU32,
    /// The generation that is written, or will be.
    pub generation: AtomicU64,
    /// The region was torn when it was reserved.
    pub torn: AtomicBool,
}

/// A file of an arena that was just created or opened, and what is known about it.
pub(super) struct OpenedFile {
    pub title: String,
    pub layout: Layout,
    pub locks: ForkClosedFile,
    pub shared: File,
    pub is_owner: bool,
    pub huge: bool,
    pub notes: Notes,
}

/// Requested properties that an arena lacks, with the reasons.
#[derive(Debug, Default)]
pub(super) struct Notes(String);

impl Notes {
    pub fn add(&mut self, note: String) {
        let separator = if self.0.is_empty() { "" } else { "; " };
        self.0.push_str(&format!("{separator}{note}"));
    }

    pub fn transparent(&mut self) {
        if let Some(reason) = shared_memory::no_huge_reason() {
            self.add(format!("no transparent huge pages: {reason}"));
        }
    }
}

/// An arena as this process sees it.
#[derive(Debug, Clone)]
pub struct Info {
    /// Where it is mapped in this process.
    pub span: Span,
    /// A descriptor of the memory that may be sent to other processes. It is open as long as the arena.
    pub fd: i32,
    /// Random number of the arena.
    pub id: u64,
    /// True if this process may write.
    pub writable: bool,
    /// True if this handle created the arena.
    pub is_owner: bool,
    /// True if the owner has the arena open.
    pub owner_lives: bool,
    /// Process id of the owner.
    pub owner: u32,
    /// True if reserved huge pages back it.
    pub huge: bool,
    /// Number of regions.
    pub regions: usize,
    /// Number of slots for verdicts.
    pub processes: u32,
}

/// A region of an arena.
#[derive(Debug, Clone)]
pub struct RegionInfo {
    /// Its name.
    pub name: String,
    /// Offset in the arena.
    pub offset: usize,
    /// Where it is mapped in this process.
    pub span: Span,
    /// The last whole step; 0 before the first.
    pub generation: u64,
    /// True if a write has begun and has not ended: by a live writer, or by one that ended.
    pub in_write: bool,
}

impl Arena {
    pub(super) fn of(parts: OpenedFile, identity: Identity, mapping: SharedMapping) -> Result<Arena> {
        let OpenedFile { title, layout, locks, shared, is_owner, huge, notes } = parts;
        let writing = try_vec::from_fn("listing the regions", layout.regions.len(), |_| Writing::default())?;
        let joined = try_vec::from_fn("listing the processes", layout.processes as usize, |_| false.into())?;
        let transfers = mapping.is_writable().then(|| pool::region::Region::adopt(mapping.memory(), false));
        Ok(Arena {
            title,
            layout,
            identity,
            mapping,
            transfers,
            locks,
            shared,
            owned: None,
            is_owner,
            huge,
            notes,
            writing,
            joined,
            posting: Lock::new(()),
        })
    }

    /// The same arena, whose name this handle removes at its end.
    pub(super) fn owning(mut self, named: NamedFile) -> Arena {
        self.owned = Some(named);
        self
    }

    /// Returns the properties of the arena and of its mapping in this process.
    pub fn info(&self) -> Result<Info> {
        Ok(Info {
            span: self.mapping.span(),
            fd: self.shared.as_raw_fd(),
            id: self.identity.id,
            writable: self.mapping.is_writable(),
            is_owner: self.is_owner,
            owner_lives: self.is_owner || self.is_locked(OWNER_LOCK)?,
            owner: self.identity.owner,
            huge: self.huge,
            regions: self.layout.regions.len(),
            processes: self.layout.processes,
        })
    }

    /// Returns the requested properties that the arena lacks, with the reasons; empty if it has all of them.
    pub fn notes(&self) -> &str {
        &self.notes.0
    }

    /// Index of the region of that name.
    pub fn find(&self, name: &str) -> Result<u32> {
        let found = self.layout.regions.iter().position(|region| region.name == name);
        found
            .map(|index| index as u32)
            .ok_or_else(|| Error::invalid("name", format!("{} has no region {name:?}", self.title)))
    }

    /// The region with that index.
    pub fn region(&self, index: u32) -> Result<RegionInfo> {
        let (at, region) = self.described(index)?;
        let control = self.layout.control(at);
        Ok(RegionInfo {
            name: region.name.clone(),
            offset: region.offset,
            span: self.mapping.span().part(region.offset, region.bytes),
            generation: self.mapping.load64(control.generation(), Ordering::Acquire),
            in_write: self.mapping.load64(control.sequence(), Ordering::Acquire) % 2 == 1,
        })
    }

    pub(super) fn described(&self, index: u32) -> Result<(usize, &Region)> {
        let count = self.layout.regions.len();
        let found = self.layout.regions.get(index as usize);
        let region = found
            .ok_or_else(|| Error::invalid("region", format!("is {index}, but there are {count} regions")))?;
        Ok((index as usize, region))
    }

    pub(super) fn check_writable(&self) -> Result<()> {
        match self.mapping.is_writable() {
            true => Ok(()),
            false => Err(Error::Unsupported(format!("{} is mapped for reading only", self.title))),
        }
    }

    /// The file of this handle's locks.
    fn lock_file(&self) -> Result<&File> {
        self.locks.file().ok_or_else(|| Error::Internal("an arena without its lock file".to_string()))
    }

    /// True if another handle, of any process, holds the lock.
    pub(super) fn is_locked(&self, lock: u64) -> Result<bool> {
        range_lock::is_held_elsewhere(self.lock_file()?, lock)
            .map_err(|error| Error::system("looking at a lock of an arena", &error))
    }

    /// Takes a lock; false if another handle holds it.
    pub(super) fn take_lock(&self, lock: u64) -> Result<bool> {
        range_lock::take(self.lock_file()?, lock)
            .map_err(|error| Error::system("locking a part of an arena", &error))
    }

    /// An error about this arena, and a part of it.
    pub(super) fn error(&self, kind: ArenaKind, part: &str, detail: impl Into<String>) -> Error {
        ArenaError::of(kind, format!("{}{part}", self.title), detail)
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        if let Some(region) = &self.transfers {
            region.retire();
        }
        if let (Some(named), Ok(found)) = (&self.owned, self.shared.metadata()) {
            named.remove_if((found.dev(), found.ino()));
        }
    }
}
