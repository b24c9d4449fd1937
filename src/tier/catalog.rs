//! Catalog of an open tier: its extents, where their versions are stored, the space and health of its paths, and what is
//! committed. Pure: no I/O, no locks, no clock. The tier holds it under its lock.
//!
//! ```text
//! extent   settled --begin_write--> writing --install, fail--> settled --committed--> committed
//! version  current --install, rollback, revert, committed--> former --last read, snapshot, pin ends--> free
//! version  former --revert--> current
//! commit   idle --begin_commit, begin_commit_beside--> under way --committed | in_doubt, end_commit--> idle
//! ```
//!
//! Invariants:
//! - The space of a committed version is freed only after a later commit that does not name this version has succeeded.
//!   If the outcome of a commit is unknown, the space of everything it named is also kept until a commit succeeds.
//! - A commit allocates space only before it succeeds, and only writes touch free space. Until the first write after a
//!   commit, the data of the previous commit is therefore unchanged on disk, although its space is free.
//! - An extent has either one writer or any number of readers. Space that is being read is freed when the last read
//!   ends. A snapshot holds space too, but does not keep an extent from being written.
//! - The contents of an extent hold each of its blocks exactly once.
//! - While a commit is in flight, no extent is removed, and only the commit changes contents. The state that becomes
//!   committed is therefore the state that its superblock names.
//! - A commit beside writes names the extents of its begin, with what each of them held then, or what a write in flight
//!   then has installed. It holds the space of these contents until its end. Other writes continue, and a later commit names
//!   them. The extents of a tiered update are named later, once the update has written what was in memory at the begin.
//! - After a commit beside writes in a run of several ranks, what only the commit before named keeps its space until the
//!   next commit begins. By then the ranks know whether all of them have the commit, or resume at the one before.
//! - Contents whose write began before a sync of their path failed are never committed.
//! - All parts of a snapshot, its step and its payload are of one moment.
#![forbid(unsafe_code)]

mod commits;
mod contents;
mod named;

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, OnceLock};

pub(super) use contents::Contents;
use contents::same;
use named::Commit;

use super::extent::{Chunk, Shape, Version};
use super::format::{ExtentRecord, Superblock};
use super::paths::{Health, PathState, Paths};
use crate::error::{Error, Result, TierError, TierKind};

/// Description of an extent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExtentInfo {
    /// Number of the extent; valid while the tier is open.
    pub number: u32,
    /// Name of the extent.
    pub name: String,
    /// Length of each stream, in bytes.
    pub streams: Vec<u64>,
    /// Generation that reads return; 0 if never written.
    pub generation: u64,
    /// True if this generation is the committed one.
    pub committed: bool,
    /// Number of blocks on each path, by path number.
    pub blocks: Vec<u32>,
    /// True if some blocks are on a missing path.
    pub lost: bool,
}

/// The extent and the generation that a transfer reads or writes.
#[derive(Debug, Clone)]
pub(super) struct Subject {
    pub(super) extent: u32,
    pub(super) name: String,
    pub(super) shape: Arc<Shape>,
    pub(super) generation: u64,
}

/// Contents that a reader or a snapshot holds, until [`Catalog::end_read`] or [`Catalog::end_snapshot`].
#[derive(Debug, Clone)]
pub(super) struct Held {
    pub(super) subject: Subject,
    pub(super) contents: Arc<Contents>,
}

/// A started write, which has its extent alone until [`Catalog::install`] or [`Catalog::fail`].
#[derive(Debug, Clone)]
pub(super) struct Reservation {
    pub(super) subject: Subject,
    /// Path of the extent's first block.
    pub(super) home: Option<u32>,
    /// Number of the contents that it installs.
    contents: u64,
    moves: bool,
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

/// What a snapshot holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum View {
    /// What reads see.
    Current,
    /// What the last commit made durable.
    Committed,
}

/// The contents of all extents at one moment.
#[derive(Debug, Clone)]
pub(super) struct HeldContents<T> {
    /// The last committed step.
    pub(super) step: Option<u64>,
    /// Payload of that commit.
    pub(super) payload: Vec<u8>,
    /// All extents that were written, in order of their numbers.
    pub(super) extents: Vec<T>,
    /// An error for each extent that is lost with a path. Such extents are not in `extents`.
    pub(super) lost: Vec<Error>,
}

#[derive(Debug, Clone)]
struct Extent {
    name: String,
    shape: Arc<Shape>,
    committed: Option<Arc<Contents>>,
    current: Option<Arc<Contents>>,
    /// A commit with unknown outcome may have named `current`.
    in_doubt: bool,
    removed: bool,
    writing: bool,
    /// The write moves the contents to other places.
    moving: bool,
    /// Error of the last write of this step, if no write has succeeded since.
    failed: Option<Error>,
}

/// Contents that an extent no longer has, and the extent's shape.
#[derive(Debug, Clone)]
struct Former {
    contents: Arc<Contents>,
    shape: Arc<Shape>,
}

/// What keeps the space of contents.
#[derive(Debug, Clone, Default)]
struct Holds {
    readers: u32,
    snapshots: u32,
    /// Set when the extent no longer has the contents: their space is freed with the last hold.
    former: Option<Former>,
}

/// State of an open tier.
#[derive(Debug, Clone)]
pub(super) struct Catalog {
    paths: Paths,
    extents: Vec<Option<Extent>>,
    /// Numbers that no extent has, in order. Removed extents leave them.
    unused: VecDeque<u32>,
    names: HashMap<String, u32>,
    /// By number of the contents.
    held: HashMap<u64, Holds>,
    /// Replaced contents that a commit with unknown outcome may have named.
    in_doubt: Vec<Former>,
    /// True if the commit before the last one must stay, for tiers that have not committed the last step yet.
    keeps_before: bool,
    /// What only the commit before the last one named, held until the next commit begins.
    previous: Vec<Arc<Contents>>,
    /// Number of the last contents.
    contents: u64,
    generation: u64,
    sequence: u64,
    step: Option<u64>,
    payload: Vec<u8>,
    commit: Commit,
    /// Number of extents that were looked at one after the other.
    #[cfg(test)]
    looked: std::cell::Cell<u64>,
}

impl Catalog {
    /// The catalog of these paths, with the state of `superblock`.
    pub(super) fn new(paths: Paths, superblock: Option<&Superblock>, keeps_before: bool) -> Catalog {
        let mut catalog = Catalog {
            paths,
            extents: Vec::new(),
            unused: VecDeque::new(),
            names: HashMap::new(),
            held: HashMap::new(),
            in_doubt: Vec::new(),
            keeps_before,
            previous: Vec::new(),
            contents: 0,
            generation: superblock.map_or(0, |one| one.generation),
            sequence: superblock.map_or(0, |one| one.sequence),
            step: superblock.and_then(|one| one.step),
            payload: superblock.map_or_else(Vec::new, |one| one.payload.clone()),
            commit: Commit::None,
            #[cfg(test)]
            looked: Default::default(),
        };
        for (number, record) in superblock.iter().flat_map(|one| &one.extents).enumerate() {
            let extent = record.as_ref().map(|ExtentRecord { name, shape, version }| {
                catalog.names.insert(name.clone(), number as u32);
                let contents = version.clone().map(|version| {
                    let (number, checksums) = (catalog.next_contents(), OnceLock::new());
                    Arc::new(Contents { number, version, checksums })
                });
                Extent { committed: contents.clone(), current: contents, ..Extent::new(name, shape.clone()) }
            });
            catalog.extents.push(extent);
        }
        catalog.find_unused();
        catalog
    }

    fn find_unused(&mut self) {
        self.unused = (0..).zip(&self.extents).filter_map(|(n, one)| one.is_none().then_some(n)).collect();
    }

    fn next_contents(&mut self) -> u64 {
        self.contents += 1;
        self.contents
    }

    pub(super) fn paths(&self) -> &Paths {
        &self.paths
    }

    pub(super) fn paths_mut(&mut self) -> &mut Paths {
        &mut self.paths
    }

    fn numbered(&self) -> impl Iterator<Item = (u32, &Extent)> {
        (0..).zip(&self.extents).filter_map(|(number, extent)| {
            #[cfg(test)]
            self.looked.set(self.looked.get() + 1);
            Some((number, extent.as_ref()?))
        })
    }

    fn get(&self, number: u32) -> Result<&Extent> {
        let found = self.extents.get(number as usize).and_then(Option::as_ref);
        found.ok_or_else(|| missing(number))
    }

    fn get_mut(&mut self, number: u32) -> Option<&mut Extent> {
        self.extents.get_mut(number as usize).and_then(Option::as_mut)
    }

    /// Returns the number of the extent with this name, and defines the extent if it does not exist. `Foreign` if the
    /// existing extent has other streams.
    pub(super) fn define(&mut self, name: &str, shape: Shape) -> Result<u32> {
        let Some(number) = self.number(name) else {
            let defined = Some(Extent::new(name, shape));
            let number = match self.unused.pop_front() {
                Some(number) => {
                    self.extents[number as usize] = defined;
                    number
                }
                None => {
                    self.extents.push(defined);
                    self.extents.len() as u32 - 1
                }
            };
            self.names.insert(name.to_string(), number);
            return Ok(number);
        };
        let extent = self.get(number)?;
        if extent.removed && !self.is_deferred(number) {
            self.between_commits()?;
        }
        if *extent.shape != shape {
            let (path, extent, found) = (self.paths.some_name(), name.to_string(), extent.shape.streams());
            let detail =
                format!("its streams have {found:?} bytes, but {:?} were requested", shape.streams());
            return Err(TierError { kind: TierKind::Foreign, path, extent, block: None, detail }.into());
        }
        if extent.removed {
            self.get_mut(number).into_iter().for_each(|extent| extent.removed = false);
        }
        Ok(number)
    }

    /// Removes an extent at the next commit. `Busy` while a commit is in flight.
    pub(super) fn remove(&mut self, number: u32) -> Result<()> {
        if !self.is_deferred(number) {
            self.between_commits()?;
        }
        self.get(number)?;
        self.get_mut(number).into_iter().for_each(|extent| extent.removed = true);
        Ok(())
    }

    /// Takes back the definition of an extent that was never written.
    pub(super) fn undefine(&mut self, number: u32) {
        let Some(slot) = self.extents.get_mut(number as usize) else { return };
        let unused =
            |extent: &mut Extent| !extent.writing && extent.current.is_none() && extent.committed.is_none();
        if let Some(extent) = slot.take_if(unused) {
            self.names.remove(&extent.name);
            self.unused.insert(self.unused.partition_point(|one| *one < number), number);
        }
    }

    /// Number of the extent with this name.
    pub(super) fn number(&self, name: &str) -> Option<u32> {
        self.names.get(name).copied()
    }

    /// Descriptions of all extents, in order of their numbers.
    pub(super) fn extents(&self) -> Vec<ExtentInfo> {
        self.numbered().map(|(number, extent)| self.describe(number, extent)).collect()
    }

    /// The extent at position `index` of [`Catalog::extents`].
    pub(super) fn nth_extent(&self, index: usize) -> Option<ExtentInfo> {
        let index = u32::try_from(index).ok()?;
        // The unused number at place n has `number - n` extents before it.
        let (mut before, mut end) = (0, self.unused.len());
        while before < end {
            let middle = before.midpoint(end);
            match self.unused[middle] - middle as u32 <= index {
                true => before = middle + 1,
                false => end = middle,
            }
        }
        self.extent(index.checked_add(before as u32)?).ok()
    }

    /// Description of one extent.
    pub(super) fn extent(&self, number: u32) -> Result<ExtentInfo> {
        Ok(self.describe(number, self.get(number)?))
    }

    fn describe(&self, number: u32, extent: &Extent) -> ExtentInfo {
        let mut blocks = vec![0; self.paths.iter().len()];
        extent.chunks().iter().for_each(|chunk| blocks[chunk.path as usize] += chunk.count);
        ExtentInfo {
            number,
            name: extent.name.clone(),
            streams: extent.shape.streams().to_vec(),
            generation: extent.current.as_ref().map_or(0, |contents| contents.version.generation),
            committed: extent.is_committed(),
            lost: extent.chunks().iter().any(|chunk| self.paths.is_missing(chunk)),
            blocks,
        }
    }

    /// Stream and block sizes of an extent.
    pub(super) fn shape(&self, number: u32) -> Result<Arc<Shape>> {
        Ok(Arc::clone(&self.get(number)?.shape))
    }

    /// Number of blocks of all extents on a path.
    pub(super) fn blocks_on(&self, path: u32) -> u64 {
        let chunks = self.numbered().flat_map(|(_, extent)| extent.chunks());
        chunks.filter(|chunk| chunk.path == path).map(|chunk| u64::from(chunk.count)).sum()
    }

    /// Contents of an extent that reads see. `Lost` if a chunk is on a missing path.
    pub(super) fn current(&self, number: u32) -> Result<Arc<Contents>> {
        let extent = self.get(number)?;
        let never =
            || Error::invalid("extent", format!("{:?} was never written; fill or put it first", extent.name));
        let contents = extent.current.as_ref().ok_or_else(never)?;
        self.lost(extent, contents).map_or_else(|| Ok(Arc::clone(contents)), Err)
    }

    /// The error of contents with a chunk on a missing path.
    fn lost(&self, extent: &Extent, contents: &Contents) -> Option<Error> {
        let chunk = contents.version.chunks.iter().find(|chunk| self.paths.is_missing(chunk))?;
        let lost = TierError {
            kind: TierKind::Lost,
            path: self.paths.get(chunk.path as usize).name().to_string(),
            extent: extent.name.clone(),
            block: Some((chunk.first.into(), chunk.offset)),
            detail: String::new(),
        };
        Some(lost.into())
    }
}

/// Readers and snapshots.
impl Catalog {
    fn held(&self, number: u32) -> Result<Held> {
        let contents = self.current(number)?;
        Ok(Held { subject: self.get(number)?.subject(number, contents.version.generation), contents })
    }

    /// Adds a reader, if the memory fits. `known`: only of the extent with this shape from [`Catalog::shape`]. A removed one
    /// does not exist, also if another one has its number. `Busy` if the extent is being written.
    pub(super) fn begin_read(
        &mut self,
        number: u32,
        known: Option<&Arc<Shape>>,
        fits: impl FnOnce(&Shape) -> Result<()>,
    ) -> Result<Held> {
        let extent = self.get(number)?;
        if known.is_some_and(|known| !Arc::ptr_eq(known, &extent.shape)) {
            return Err(missing(number));
        }
        let held = self.held(number)?;
        fits(&held.subject.shape)?;
        if self.get(number)?.writing {
            return Err(Error::Busy(format!("extent {:?} is being written", held.subject.name)));
        }
        self.held.entry(held.contents.number).or_default().readers += 1;
        Ok(held)
    }

    /// Removes a reader.
    pub(super) fn end_read(&mut self, contents: &Contents) {
        self.end_hold(contents, |holds| &mut holds.readers);
    }

    /// True if a read of the extent's current contents is in flight.
    pub(super) fn is_read(&self, number: u32) -> bool {
        let current = self.get(number).ok().and_then(|extent| extent.current.as_ref());
        let holds = current.and_then(|current| self.held.get(&current.number));
        holds.is_some_and(|holds| holds.readers > 0)
    }

    /// Takes a snapshot. Errors: `Current` while an extent is being written (`Busy`), `Committed` without a commit
    /// (`NoState`).
    pub(super) fn snapshot(&mut self, view: View) -> Result<HeldContents<Held>> {
        let writing = self.numbered().find(|(_, extent)| extent.writing && view == View::Current);
        if let Some((_, extent)) = writing {
            return Err(Error::Busy(format!("extent {:?} is being written", extent.name)));
        }
        if view == View::Committed && self.step.is_none() {
            let message = "nothing was committed; commit first";
            return Err(TierError::at(TierKind::NoState, self.paths.some_name(), message));
        }
        let (mut extents, mut lost) = (Vec::new(), Vec::new());
        for (number, extent) in self.numbered() {
            let seen = match view {
                View::Current => extent.current.as_ref(),
                View::Committed => extent.last_committed(),
            };
            // An extent that was never written has no contents.
            let Some(contents) = seen.cloned() else { continue };
            match self.lost(extent, &contents) {
                Some(error) => lost.push(error),
                None => extents
                    .push(Held { subject: extent.subject(number, contents.version.generation), contents }),
            }
        }
        extents.iter().for_each(|held| self.hold(&held.contents));
        Ok(HeldContents { step: self.step, payload: self.payload.clone(), extents, lost })
    }

    /// Holds the contents of one extent, which may have none, until [`Catalog::end_snapshot`].
    pub(super) fn pin(&mut self, number: u32) -> Result<Option<Arc<Contents>>> {
        let current = self.get(number)?.current.clone();
        current.iter().for_each(|contents| self.hold(contents));
        Ok(current)
    }

    fn hold(&mut self, contents: &Contents) {
        self.held.entry(contents.number).or_default().snapshots += 1;
    }

    /// Gives an extent the contents that [`Catalog::pin`] returned. `Busy` while it is being written, or while a commit
    /// is in flight that excludes writes.
    pub(super) fn revert(&mut self, number: u32, contents: Option<&Arc<Contents>>) -> Result<()> {
        if matches!(self.commit, Commit::Alone) {
            self.between_commits()?;
        }
        let extent = self.get(number)?;
        if extent.writing {
            return Err(Error::Busy(format!("extent {:?}: it is being written", extent.name)));
        }
        if same(extent.current.as_ref(), contents) {
            return Ok(());
        }
        let held = contents.and_then(|contents| self.held.get_mut(&contents.number));
        held.into_iter().for_each(|holds| holds.former = None);
        let doubted = self.in_doubt.iter().position(|former| same(Some(&former.contents), contents));
        self.replace(number, contents.cloned());
        if let Some(doubted) = doubted {
            self.in_doubt.swap_remove(doubted);
            self.get_mut(number).into_iter().for_each(|extent| extent.in_doubt = true);
        }
        Ok(())
    }

    /// Ends the hold of a snapshot on contents.
    pub(super) fn end_snapshot(&mut self, contents: &Contents) {
        self.end_hold(contents, |holds| &mut holds.snapshots);
    }

    fn end_hold(&mut self, contents: &Contents, count: fn(&mut Holds) -> &mut u32) {
        let Some(holds) = self.held.get_mut(&contents.number) else { return };
        *count(holds) -= 1;
        if (holds.readers, holds.snapshots) == (0, 0) {
            let former = self.held.remove(&contents.number).and_then(|holds| holds.former);
            former.into_iter().for_each(|former| self.release(former));
        }
    }

    fn release(&mut self, former: Former) {
        match self.held.get_mut(&former.contents.number) {
            Some(holds) => holds.former = Some(former),
            None => self.paths.free_chunks(&former.shape, &former.contents.version.chunks),
        }
    }
}

/// Writes.
impl Catalog {
    /// Reserves an extent for a write or a move. `Busy` if the extent is being read or written, or while a commit is in
    /// flight that excludes writes and is not the writer itself.
    pub(super) fn begin_write(&mut self, number: u32, origin: &WriteOrigin) -> Result<Reservation> {
        let extent = self.get(number)?;
        let moved = match origin {
            WriteOrigin::Caller => None,
            WriteOrigin::Evacuation(of) | WriteOrigin::Commit(of) => Some(of),
        };
        let replaced = |of: &Arc<Contents>| !same(extent.current.as_ref(), Some(of));
        let why = if matches!(self.commit, Commit::Alone) && !matches!(origin, WriteOrigin::Commit(_)) {
            "a commit is in progress"
        } else if self.commits_beside() && extent.removed && !self.is_deferred(number) {
            "a commit in progress removes it"
        } else if extent.writing {
            "it is being written"
        } else if self.is_read(number) {
            "it is being read"
        } else if moved.is_some_and(replaced) {
            "it was written or rolled back since it was read"
        } else {
            ""
        };
        if !why.is_empty() {
            return Err(Error::Busy(format!("extent {:?}: {why}", extent.name)));
        }
        // A move keeps the generation of the contents.
        let generation = moved.map_or(self.generation + 1, |of| of.version.generation);
        let subject = extent.subject(number, generation);
        let home = extent.chunks().first().map(|chunk| chunk.path);
        let moves = moved.is_some();
        self.generation = self.generation.max(generation);
        if let Some(extent) = self.get_mut(number) {
            (extent.writing, extent.moving) = (true, moves);
        }
        Ok(Reservation { subject, home, contents: self.next_contents(), moves })
    }

    /// Ends a write: the extent has these contents now. Returns their generation. A move does not clear an earlier write
    /// failure.
    pub(super) fn install(
        &mut self,
        reserved: &Reservation,
        chunks: Vec<Chunk>,
        checksums: Arc<[u64]>,
    ) -> Result<u64> {
        let Subject { extent: number, name, generation, .. } = &reserved.subject;
        let Some(extent) = self.get_mut(*number) else {
            return Err(Error::Internal(format!("extent {name:?} was removed while it was written")));
        };
        let version = Version { generation: *generation, chunks };
        if !version.covers(&extent.shape) {
            let error = Error::Internal(format!("extent {name:?}: a write did not place each block once"));
            self.fail(reserved, &error);
            return Err(error);
        }
        (extent.writing, extent.moving) = (false, false);
        if !reserved.moves {
            extent.failed = None;
        }
        for chunk in &version.chunks {
            self.paths.set_dirty(chunk.path as usize);
        }
        let contents =
            Arc::new(Contents { number: reserved.contents, version, checksums: OnceLock::from(checksums) });
        self.replace(*number, Some(contents));
        self.written(*number);
        Ok(*generation)
    }

    /// Ends a write that failed. The extent is marked as failed, unless the write was a move: then its contents are
    /// where they were.
    pub(super) fn fail(&mut self, reserved: &Reservation, error: &Error) {
        let Some(extent) = self.get_mut(reserved.subject.extent) else { return };
        (extent.writing, extent.moving) = (false, false);
        if !reserved.moves {
            extent.failed = Some(error.clone());
        }
        self.written(reserved.subject.extent);
    }

    /// True if an extent is being written.
    pub(super) fn is_writing(&self) -> bool {
        self.numbered().any(|(_, extent)| extent.writing)
    }

    /// True while the extent is being written.
    pub(super) fn is_being_written(&self, number: u32) -> bool {
        self.get(number).is_ok_and(|extent| extent.writing)
    }

    /// True while the contents of the extent are moved to other places.
    pub(super) fn is_being_moved(&self, number: u32) -> bool {
        self.get(number).is_ok_and(|extent| extent.moving)
    }

    /// Error of a write of this step, if no write of its extent has succeeded since.
    pub(super) fn failed(&self) -> Option<Error> {
        self.numbered().find_map(|(_, extent)| extent.failed.clone())
    }

    /// Discards all changes since the last commit. `Busy` while a commit is in flight.
    pub(super) fn rollback(&mut self) -> Result<()> {
        self.between_commits()?;
        for number in 0..self.extents.len() as u32 {
            let Some(extent) = self.get_mut(number) else { continue };
            (extent.failed, extent.removed) = (None, false);
            let committed = extent.committed.clone();
            self.replace(number, committed);
        }
        Ok(())
    }

    /// Gives an extent other contents. The space of the replaced ones is freed, unless they are committed or may be.
    fn replace(&mut self, number: u32, contents: Option<Arc<Contents>>) {
        let Some(extent) = self.get_mut(number) else { return };
        let in_doubt = std::mem::take(&mut extent.in_doubt);
        let old = std::mem::replace(&mut extent.current, contents);
        let Some(old) = old.filter(|old| !same(Some(old), extent.committed.as_ref())) else { return };
        let former = Former { contents: old, shape: Arc::clone(&extent.shape) };
        if in_doubt { self.in_doubt.push(former) } else { self.release(former) }
    }
}

fn missing(number: u32) -> Error {
    Error::invalid("extent", format!("{number} does not exist"))
}

impl Extent {
    fn new(name: &str, shape: Shape) -> Extent {
        Extent {
            name: name.to_string(),
            shape: Arc::new(shape),
            committed: None,
            current: None,
            in_doubt: false,
            removed: false,
            writing: false,
            moving: false,
            failed: None,
        }
    }

    fn subject(&self, extent: u32, generation: u64) -> Subject {
        Subject { extent, name: self.name.clone(), shape: Arc::clone(&self.shape), generation }
    }

    fn chunks(&self) -> &[Chunk] {
        self.current.as_ref().map_or(&[], |contents| &contents.version.chunks)
    }

    /// What the last commit made durable. A move since then does not change it, and its old place may have failed.
    fn last_committed(&self) -> Option<&Arc<Contents>> {
        let committed = self.committed.as_ref()?;
        let moved = |current: &&Arc<Contents>| current.version.generation == committed.version.generation;
        Some(self.current.as_ref().filter(moved).unwrap_or(committed))
    }

    /// True if reads see what the last commit made durable.
    fn is_committed(&self) -> bool {
        same(self.current.as_ref(), self.committed.as_ref())
    }
}

#[cfg(test)]
mod tests;
