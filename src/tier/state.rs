//! State of an open tier.
//!
//! Invariants:
//! - The space of a committed version is freed only after a later commit that does not name this version has succeeded.
//!   If the outcome of a commit is unknown, the space of everything it named is also kept until a commit succeeds.
//! - A commit allocates space only before it succeeds, and only writes touch free space. Until the first write after a
//!   commit, the data of the previous commit is therefore unchanged on disk, although its space is free.
//! - An extent has either one writer or any number of readers. Space that is being read is freed when the last read
//!   ends. A snapshot holds space too, but does not keep an extent from being written.
//! - The contents of an extent hold each of its blocks exactly once.
//! - While a commit is in flight, only the commit changes the contents of extents and the set of extents. The state
//!   that becomes committed is therefore the state that its superblock names.
#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::sync::Arc;

use super::contents::Contents;
use super::extent::Shape;
use super::format::Stamp;
use super::health::Health;
use super::space::Space;
use super::transfer::Job;
use crate::error::{Error, Result, TierError, TierKind};

/// State of one path.
#[derive(Debug)]
pub(super) struct PathState {
    pub(super) name: String,
    pub(super) memory: bool,
    pub(super) health: Health,
    /// Reason if the path is not healthy.
    pub(super) reason: String,
    pub(super) space: Space,
    /// The copy with the last superblock known to be durable on this path.
    pub(super) durable_copy: Option<DurableCopy>,
    /// The superblocks that the open found in the copies. The owner replaces only these and its own.
    pub(super) found: [Option<Stamp>; 2],
    /// The files no longer have their names. If no data is left on the path, the next commit drops it.
    pub(super) gone: bool,
    /// True if data was written since the last commit.
    pub(super) dirty: bool,
    /// Bytes written to the path before this open.
    pub(super) written_before: u64,
}

/// A durable superblock, which the next one must not overwrite.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct DurableCopy {
    pub(super) copy: usize,
    pub(super) sequence: u64,
}

/// Contents that an extent no longer has, and the extent's shape.
type Former = (Arc<Contents>, Arc<Shape>);

#[derive(Debug)]
pub(super) struct Extent {
    pub(super) name: String,
    pub(super) shape: Arc<Shape>,
    pub(super) committed: Option<Arc<Contents>>,
    pub(super) current: Option<Arc<Contents>>,
    /// A commit with unknown outcome may have named `current`.
    pub(super) in_doubt: bool,
    pub(super) removed: bool,
    pub(super) writing: bool,
    /// Error of the last write of this step, if no write has succeeded since.
    pub(super) failed: Option<Error>,
}

/// State of a ticket.
#[derive(Debug)]
pub(super) enum TicketState {
    /// In flight; no thread waits for it.
    Idle(Box<Job>),
    /// A thread drives the job.
    Driven,
    /// Ended; the outcome was not fetched yet.
    Done(Result<u64>),
}

#[derive(Debug)]
pub(super) struct TierState {
    pub(super) paths: Vec<PathState>,
    pub(super) extents: Vec<Option<Extent>>,
    pub(super) names: HashMap<String, u32>,
    pub(super) ticket_states: HashMap<u64, TicketState>,
    pub(super) tickets: u64,
    pub(super) generation: u64,
    pub(super) sequence: u64,
    pub(super) step: Option<u64>,
    pub(super) payload: Vec<u8>,
    pub(super) committing: bool,
    /// Replaced contents that a commit with unknown outcome may have named.
    pub(super) in_doubt_frees: Vec<Former>,
    /// Replaced contents that are still being read, or held by a snapshot.
    pub(super) deferred_frees: Vec<Former>,
}

impl Extent {
    pub(super) fn is_read(&self) -> bool {
        self.current.as_ref().is_some_and(|current| current.is_read())
    }

    /// True if reads see what the last commit made durable.
    pub(super) fn is_committed(&self) -> bool {
        match (&self.current, &self.committed) {
            (Some(current), Some(committed)) => Arc::ptr_eq(current, committed),
            (current, committed) => current.is_none() && committed.is_none(),
        }
    }
}

impl TierState {
    pub(super) fn extent(&mut self, number: u32) -> Result<&mut Extent> {
        let found = self.extents.get_mut(number as usize).and_then(Option::as_mut);
        found.ok_or_else(|| Error::invalid("extent", format!("{number} does not exist")))
    }

    /// `Busy` while a commit is in flight.
    pub(super) fn between_commits(&self) -> Result<()> {
        match self.committing {
            true => Err(Error::Busy("a commit is in progress".to_string())),
            false => Ok(()),
        }
    }

    /// Contents of an extent that reads see. `Lost` if a chunk is on a missing path.
    pub(super) fn contents(&mut self, number: u32) -> Result<Arc<Contents>> {
        let missing: Vec<bool> = self.paths.iter().map(|path| path.health == Health::Missing).collect();
        let extent = self.extent(number)?;
        let never = || Error::invalid("extent", format!("{:?} was never written", extent.name));
        let contents = extent.current.clone().ok_or_else(never)?;
        let lost = contents.version.chunks.iter().find(|chunk| missing[chunk.path as usize]);
        let name = extent.name.clone();
        match lost.map(|chunk| (self.paths[chunk.path as usize].name.clone(), chunk)) {
            None => Ok(contents),
            Some((path, chunk)) => Err(TierError {
                kind: TierKind::Lost,
                path,
                extent: name,
                block: Some((chunk.first.into(), chunk.offset)),
                detail: String::new(),
            }
            .into()),
        }
    }

    /// Installs the contents of a finished write. A move does not clear an earlier write failure.
    pub(super) fn install(&mut self, number: u32, contents: Arc<Contents>, moves: bool) -> Result<()> {
        let extent = self.extent(number)?;
        extent.writing = false;
        if !contents.version.covers(&extent.shape) {
            let message = format!("extent {:?}: a write did not place each block once", extent.name);
            return Err(Error::Internal(message));
        }
        for chunk in &contents.version.chunks {
            self.paths[chunk.path as usize].dirty = true;
        }
        let extent = self.extent(number)?;
        if !moves {
            extent.failed = None;
        }
        let in_doubt = std::mem::take(&mut extent.in_doubt);
        let old = extent.current.replace(contents);
        let committed = extent.committed.clone();
        self.let_go(number, old, committed, in_doubt)
    }

    /// Ends a failed write. The extent is marked as failed, unless the write was a move: then its contents are where
    /// they were.
    pub(super) fn write_failed(&mut self, number: u32, moves: bool, error: &Error) {
        let Ok(extent) = self.extent(number) else { return };
        extent.writing = false;
        if !moves {
            extent.failed = Some(error.clone());
        }
    }

    /// Discards all changes since the last commit.
    pub(super) fn rollback(&mut self) -> Result<()> {
        for number in 0..self.extents.len() as u32 {
            let Ok(extent) = self.extent(number) else { continue };
            extent.failed = None;
            extent.removed = false;
            let in_doubt = std::mem::take(&mut extent.in_doubt);
            let committed = extent.committed.clone();
            let old = std::mem::replace(&mut extent.current, committed.clone());
            self.let_go(number, old, committed, in_doubt)?;
        }
        Ok(())
    }

    /// Frees the space of replaced contents, unless they are committed or may be committed.
    fn let_go(
        &mut self,
        number: u32,
        old: Option<Arc<Contents>>,
        committed: Option<Arc<Contents>>,
        in_doubt: bool,
    ) -> Result<()> {
        let Some(old) = old.filter(|old| committed.is_none_or(|kept| !Arc::ptr_eq(old, &kept))) else {
            return Ok(());
        };
        let former = (old, Arc::clone(&self.extent(number)?.shape));
        match in_doubt {
            true => self.in_doubt_frees.push(former),
            false => self.release(former),
        }
        Ok(())
    }

    /// Adds a reader, until [`TierState::end_reading`].
    pub(super) fn begin_reading(&mut self, contents: &Contents) {
        contents.begin_read();
    }

    pub(super) fn end_reading(&mut self, contents: &Arc<Contents>) {
        contents.end_read();
        self.release_deferred(contents);
    }

    /// Ends the hold of a snapshot.
    pub(super) fn end_holding(&mut self, contents: &Arc<Contents>) {
        contents.let_go();
        self.release_deferred(contents);
    }

    fn release_deferred(&mut self, contents: &Arc<Contents>) {
        let over = |(one, _): &Former| Arc::ptr_eq(one, contents) && !one.is_held();
        if let Some(at) = self.deferred_frees.iter().position(over) {
            let former = self.deferred_frees.swap_remove(at);
            self.release(former);
        }
    }

    fn release(&mut self, (contents, shape): Former) {
        if contents.is_held() {
            return self.deferred_frees.push((contents, shape));
        }
        for chunk in &contents.version.chunks {
            self.free((chunk.path, chunk.offset, chunk.stored(&shape)));
        }
    }

    pub(super) fn free(&mut self, (path, offset, bytes): (u32, u64, u64)) {
        let path = &mut self.paths[path as usize];
        if path.health != Health::Missing {
            path.space.give(offset, bytes);
        }
    }

    /// Makes exactly what the last superblock named the committed state, and frees everything else.
    pub(super) fn committed(&mut self) {
        let mut former = std::mem::take(&mut self.in_doubt_frees);
        for slot in &mut self.extents {
            let Some(extent) = slot else { continue };
            let gone = extent.removed.then(|| extent.current.take()).flatten();
            let old = std::mem::replace(&mut extent.committed, extent.current.clone());
            let replaced = old.filter(|old| {
                extent.current.as_ref().is_none_or(|kept| !Arc::ptr_eq(old, kept))
                    && gone.as_ref().is_none_or(|gone| !Arc::ptr_eq(old, gone))
            });
            former.extend(replaced.into_iter().chain(gone).map(|one| (one, Arc::clone(&extent.shape))));
            extent.in_doubt = false;
            if extent.removed {
                self.names.remove(&extent.name);
                *slot = None;
            }
        }
        former.into_iter().for_each(|one| self.release(one));
        self.paths.iter_mut().for_each(|path| path.dirty = false);
    }

    /// Lowers the health of a path to `health`; it never improves it. True if the health changed.
    pub(super) fn mark(&mut self, path: usize, health: Health, reason: &str) -> bool {
        let path = &mut self.paths[path];
        let worse = health as u8 > path.health as u8;
        if worse {
            path.health = health;
            path.reason = reason.to_string();
        }
        worse
    }
}
