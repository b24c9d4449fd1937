//! The paths of an open tier: their health, their space, and the superblocks that are durable on them. Pure, as `catalog`.
//!
//! Invariants:
//! - Each byte range of a data file is either free or allocated once. Only allocated ranges are freed. Adjacent free
//!   ranges are merged.
//! - No call waits for a device. If a data file must grow before space is allocated, the caller gets its path and length,
//!   extends the file without the lock, and asks again.
//! - A call allocates space for all requested blocks, or for none.
//! - The durable superblock of a path is never the copy that the next superblock replaces.
#![forbid(unsafe_code)]

use std::collections::{BTreeMap, BTreeSet};

use super::extent::{Chunk, Shape, header_bytes};
use crate::error::{Doing, Error, IoError, IoKind, Result};

/// Health of a path, best first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Health {
    /// The path serves reads and writes.
    Healthy,
    /// The path serves reads only. Its data moves to another path at the next write.
    Draining,
    /// A write or the whole path failed. Reads are still tried.
    Failed,
    /// The path was absent when the tier was opened.
    Missing,
}

/// Placement that the caller requests for an extent.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum ExtentPlacement {
    /// The extent's current path, or the path with the least data for a new extent. Another path if this one is full or
    /// not healthy.
    #[default]
    Auto,
    /// The path with this number. Another path only if this one is full or not healthy.
    On(u32),
    /// Several paths in order: path number and number of blocks. The last path also takes the remaining blocks.
    Striped(Vec<(u32, u32)>),
}

/// Identity of a superblock: no two superblocks of a tier have the same one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stamp {
    /// Sequence number.
    pub sequence: u64,
    /// Session of the owner that wrote it.
    pub session: u64,
}

/// A durable superblock, which the next one must not overwrite.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct DurableCopy {
    pub(super) copy: usize,
    pub(super) sequence: u64,
}

/// What an open found in the superblock copies of a path.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct FoundCopies {
    /// The copy that the next superblock must not overwrite.
    pub(super) kept: Option<DurableCopy>,
    /// The superblocks of the copies. The owner replaces only these and its own.
    pub(super) stamps: [Option<Stamp>; 2],
}

/// The superblock copy of a path that the next superblock replaces.
#[derive(Debug, Clone, Copy)]
pub(super) struct ReplacedCopy {
    pub(super) path: usize,
    pub(super) copy: usize,
    /// What the open found there.
    pub(super) found: Option<Stamp>,
}

/// State of one path.
#[derive(Debug, Clone)]
pub(super) struct PathState {
    name: String,
    memory: bool,
    health: Health,
    /// Reason if the path is not healthy.
    reason: String,
    space: Space,
    copies: FoundCopies,
    /// The files no longer have their names. If no data is left on the path, the next commit drops it.
    gone: bool,
    /// True if data was written since the last sync.
    dirty: bool,
    /// The last sync that failed. Contents of lower numbers that were not committed before are not durable.
    unsynced: Option<(u64, Error)>,
    /// Bytes written to the path before this open.
    written_before: u64,
}

/// All paths, by number.
#[derive(Debug, Clone)]
pub(super) struct Paths(Vec<PathState>);

/// Blocks to be placed.
#[derive(Debug, Clone, Copy)]
pub(super) struct AllocationRequest<'a> {
    pub(super) shape: &'a Shape,
    pub(super) first: u32,
    pub(super) count: u32,
    /// Paths that this write must not use, by number.
    pub(super) excluded: &'a [bool],
}

/// Result of a placement.
#[derive(Debug)]
pub(super) enum Allocated {
    /// Chunks with space for all blocks.
    Chunks(Vec<Chunk>),
    /// Nothing allocated: the data file of `path` must first grow to `end` bytes.
    Grow { path: usize, end: u64 },
}

/// Result of an allocation on one path.
enum ChunkAllocation {
    Chunk(Chunk),
    Nothing,
    /// All blocks fit after the file has grown to this length.
    Grow(u64),
}

impl Paths {
    pub(super) fn new(paths: Vec<PathState>) -> Paths {
        Paths(paths)
    }

    pub(super) fn get(&self, path: usize) -> &PathState {
        &self.0[path]
    }

    pub(super) fn iter(&self) -> impl ExactSizeIterator<Item = &PathState> {
        self.0.iter()
    }

    /// Name of the first path that is present, for error messages about the whole tier.
    pub(super) fn some_name(&self) -> String {
        let present = self.0.iter().find(|path| path.health != Health::Missing);
        present.map_or_else(String::new, |path| path.name.clone())
    }

    /// Lowers the health of a path to `health`; it never improves it. Returns a message if the health changed.
    pub(super) fn mark(&mut self, path: usize, health: Health, reason: &str) -> Option<String> {
        let path = &mut self.0[path];
        (health > path.health).then(|| {
            (path.health, path.reason) = (health, reason.to_string());
            format!("tier path {} is now {health:?}: {reason}", path.name)
        })
    }

    /// Sets the health of a path. A missing path stays missing, and no path can be set to missing.
    pub(super) fn set_health(&mut self, path: u32, health: Health, reason: &str) -> Result<()> {
        let Some(found) = self.0.get_mut(path as usize) else {
            return Err(Error::invalid("number", format!("there is no path {path}")));
        };
        if found.health == Health::Missing || health == Health::Missing {
            let reason = format!("the health of {} cannot be changed to or from missing", found.name);
            return Err(Error::invalid("path", reason));
        }
        (found.health, found.reason) = (health, reason.to_string());
        Ok(())
    }

    /// Records whether the files of a path lost their names.
    pub(super) fn set_gone(&mut self, path: usize, gone: bool) {
        self.0[path].gone = gone;
    }

    /// Records that the data file of a path has `end` bytes now.
    pub(super) fn grew(&mut self, path: usize, end: u64) {
        self.0[path].space.grew(end);
    }

    /// Records that the file system of a path has no room.
    pub(super) fn full(&mut self, path: usize) {
        self.0[path].space.full();
    }

    /// Lets the files of full file systems grow again. True if there was one.
    pub(super) fn retry_full(&mut self) -> bool {
        self.0.iter_mut().filter_map(|path| path.space.retry().then_some(())).count() > 0
    }

    /// The copies that the next superblock replaces, on the paths that take superblocks.
    pub(super) fn replaced_copies(&self) -> Vec<ReplacedCopy> {
        let taken = |(path, state): (usize, &PathState)| {
            let copy = state.copies.kept.map_or(0, |good| 1 - good.copy);
            let found = state.copies.stamps[copy];
            (!state.memory && state.health.takes_superblocks()).then_some(ReplacedCopy { path, copy, found })
        };
        self.0.iter().enumerate().filter_map(taken).collect()
    }

    /// Records that a superblock is durable on a path.
    pub(super) fn durable(&mut self, path: usize, copy: DurableCopy) {
        self.0[path].copies.kept = Some(copy);
    }

    /// Paths with data to sync. What is written from now on is for the next sync.
    pub(super) fn take_dirty(&mut self) -> Vec<usize> {
        let paths = self.0.iter_mut().enumerate();
        paths.filter_map(|(number, path)| std::mem::take(&mut path.dirty).then_some(number)).collect()
    }

    /// Records that a path has data to sync.
    pub(super) fn set_dirty(&mut self, path: usize) {
        self.0[path].dirty = true;
    }

    /// Records that a sync failed. `limit`: the first number of contents whose write begins later.
    pub(super) fn sync_failed(&mut self, path: usize, limit: u64, error: &Error) {
        self.0[path].unsynced = Some((limit, error.clone()));
    }

    /// The error of the sync that failed after the write of these contents began.
    pub(super) fn unsynced(&self, path: u32, contents: u64) -> Option<&Error> {
        self.0[path as usize].unsynced.as_ref().filter(|(limit, _)| contents < *limit).map(|(_, error)| error)
    }

    /// True if a chunk is on a path that the open did not find.
    pub(super) fn is_missing(&self, chunk: &Chunk) -> bool {
        self.0[chunk.path as usize].health == Health::Missing
    }

    /// Error of a commit that no path can hold, with the reason of each path.
    pub(super) fn none_left(&self) -> Error {
        let lasting = || self.0.iter().filter(|path| !path.memory);
        let reasons: Vec<String> = lasting()
            .map(|path| format!("{} is {}: {}", path.name, path.health.word(), path.reason))
            .collect();
        let names = lasting().map(|path| path.name.as_str()).collect::<Vec<_>>().join(", ");
        let detail = format!("no usable path is left for the commit: {}", reasons.join("; "));
        IoError::about(IoKind::PathFailed, Doing::Committing, names).because(detail).into()
    }
}

/// Allocation of space.
impl Paths {
    /// Allocates chunks for the requested blocks, as `placement` says. `home` is the extent's current path.
    pub(super) fn allocate(
        &mut self,
        request: AllocationRequest,
        placement: &ExtentPlacement,
        home: Option<u32>,
    ) -> Result<Allocated> {
        let parts: Vec<(Option<u32>, u32)> = match placement {
            ExtentPlacement::Auto => vec![(home, request.count)],
            ExtentPlacement::On(path) => vec![(Some(*path), request.count)],
            ExtentPlacement::Striped(parts) => {
                parts.iter().map(|(path, count)| (Some(*path), *count)).collect()
            }
        };
        let mut chunks = Vec::new();
        let (mut first, end) = (request.first, request.first + request.count);
        for (number, (path, count)) in parts.iter().enumerate() {
            let last = number + 1 == parts.len();
            let count = if last { end - first } else { (*count).min(end - first) };
            match self.allocate_part(AllocationRequest { first, count, ..request }, *path) {
                Ok(Allocated::Chunks(more)) => chunks.extend(more),
                other => {
                    self.free_chunks(request.shape, &chunks);
                    return other;
                }
            }
            first += count;
        }
        Ok(Allocated::Chunks(chunks))
    }

    fn allocate_part(&mut self, request: AllocationRequest, preferred: Option<u32>) -> Result<Allocated> {
        let mut chunks = Vec::new();
        let (mut first, end) = (request.first, request.first + request.count);
        for path in self.order(request.excluded, preferred) {
            while first < end {
                match self.take(path, AllocationRequest { first, count: end - first, ..request }) {
                    ChunkAllocation::Chunk(chunk) => {
                        first += chunk.count;
                        chunks.push(chunk);
                    }
                    ChunkAllocation::Nothing => break,
                    ChunkAllocation::Grow(end) => {
                        self.free_chunks(request.shape, &chunks);
                        return Ok(Allocated::Grow { path, end });
                    }
                }
            }
        }
        if first == end {
            return Ok(Allocated::Chunks(chunks));
        }
        self.free_chunks(request.shape, &chunks);
        let bytes = header_bytes(request.count.into()) + request.shape.stored(request.first, request.count);
        Err(self.no_room(bytes))
    }

    /// Healthy paths that are not excluded: the preferred one, then the others with the least used space first.
    fn order(&self, excluded: &[bool], preferred: Option<u32>) -> Vec<usize> {
        let usable = |path: &usize| self.0[*path].health == Health::Healthy && !excluded[*path];
        let mut order: Vec<usize> = (0..self.0.len()).filter(usable).collect();
        let used = |path: &usize| self.0[*path].space.end() - self.0[*path].space.free();
        order.sort_by_key(|path| (preferred != Some(*path as u32), used(path)));
        order
    }

    /// Allocates one chunk on a path. It holds all blocks if they fit, also after growing the file. Otherwise it holds
    /// as many as fit into the longest free range.
    fn take(&mut self, path: usize, request: AllocationRequest) -> ChunkAllocation {
        let AllocationRequest { shape, first, count, .. } = request;
        let chunk = |offset, count| Chunk { path: path as u32, offset, first, count, header_checksum: 0 };
        let bytes = |count: u32| header_bytes(count.into()) + shape.stored(first, count);
        let space = &mut self.0[path].space;
        if let Some(offset) = space.take(bytes(count)) {
            return ChunkAllocation::Chunk(chunk(offset, count));
        }
        if let Some(end) = space.end_for(bytes(count)) {
            return ChunkAllocation::Grow(end);
        }
        let fitting = shape.fitting(first, space.longest()).min(count);
        let offset = if fitting == 0 { None } else { space.take(bytes(fitting)) };
        offset.map_or(ChunkAllocation::Nothing, |offset| ChunkAllocation::Chunk(chunk(offset, fitting)))
    }

    /// Error of a request for `bytes` more bytes, with the free space of each path.
    pub(super) fn no_room(&self, bytes: u64) -> Error {
        let rooms = self.0.iter().map(|path| {
            let room = path.space.room();
            let room = if room > 1 << 60 { "no limit".to_string() } else { format!("{room} bytes free") };
            match path.health {
                Health::Healthy => format!("{} has {room}", path.name),
                health => format!("{} is {}", path.name, health.word()),
            }
        });
        let rooms = rooms.collect::<Vec<_>>().join(", ");
        let detail = format!(
            "no path has room: {rooms}; free space, add a path, raise the limit (limit_bytes) of a path, or set a draining path to \
             healthy"
        );
        let names = self.0.iter().map(|path| path.name.as_str()).collect::<Vec<_>>().join(", ");
        IoError::about(IoKind::NoSpace, Doing::Preallocating, names).at(0, bytes).because(detail).into()
    }

    /// Frees the space of chunks.
    pub(super) fn free_chunks(&mut self, shape: &Shape, chunks: &[Chunk]) {
        for chunk in chunks {
            let path = &mut self.0[chunk.path as usize];
            if path.health != Health::Missing {
                path.space.give(chunk.offset, chunk.stored(shape));
            }
        }
    }
}

impl Health {
    /// True if superblocks are written to the path.
    pub(super) fn takes_superblocks(self) -> bool {
        self <= Health::Draining
    }

    fn word(self) -> String {
        format!("{self:?}").to_lowercase()
    }
}

impl ExtentPlacement {
    /// Fails if the placement names an unknown path, or no path for an extent with blocks.
    pub(super) fn check(&self, paths: usize, blocks: u32) -> Result<()> {
        let named: Vec<u32> = match self {
            ExtentPlacement::Auto => Vec::new(),
            ExtentPlacement::On(path) => vec![*path],
            ExtentPlacement::Striped(parts) if parts.is_empty() && blocks > 0 => {
                let reason = format!("assigns none of the {blocks} blocks to a path");
                return Err(Error::invalid("target.path_blocks", reason));
            }
            ExtentPlacement::Striped(parts) => parts.iter().map(|(path, _)| *path).collect(),
        };
        match named.into_iter().find(|path| *path as usize >= paths) {
            Some(path) => Err(Error::invalid("target.path", format!("there is no path {path}"))),
            None => Ok(()),
        }
    }
}

impl PathState {
    /// A path that is present. `written_before` bytes were written to it before this open.
    pub(super) fn present(
        name: String,
        memory: bool,
        space: Space,
        copies: FoundCopies,
        written_before: u64,
    ) -> PathState {
        let (health, reason, gone, dirty) = (Health::Healthy, String::new(), false, false);
        PathState { name, memory, health, reason, space, copies, gone, dirty, unsynced: None, written_before }
    }

    /// A path that the open did not find, with a data file of `end` bytes.
    pub(super) fn missing(name: &str, memory: bool, end: u64, written_before: u64) -> PathState {
        let (space, copies) = (Space::new(end, end, []).unwrap_or_default(), FoundCopies::default());
        PathState {
            health: Health::Missing,
            reason: "it was missing when the tier was opened".to_string(),
            ..PathState::present(name.to_string(), memory, space, copies, written_before)
        }
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// True if the data is lost when the process ends.
    pub(super) fn memory(&self) -> bool {
        self.memory
    }

    pub(super) fn health(&self) -> Health {
        self.health
    }

    /// Reason if the path is not healthy.
    pub(super) fn reason(&self) -> &str {
        &self.reason
    }

    pub(super) fn space(&self) -> &Space {
        &self.space
    }

    /// The copy with the last superblock known to be durable on this path.
    pub(super) fn durable_copy(&self) -> Option<DurableCopy> {
        self.copies.kept
    }

    /// True if the files no longer have their names.
    pub(super) fn gone(&self) -> bool {
        self.gone
    }

    /// Bytes written to the path before this open.
    pub(super) fn written_before(&self) -> u64 {
        self.written_before
    }
}

/// Allocator of one data file. Offsets and lengths are in bytes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Space {
    end: u64,
    limit: u64,
    /// The file system refused to extend the file.
    full: bool,
    /// Free ranges: length by offset.
    free: BTreeMap<u64, u64>,
    /// The same ranges: length and offset.
    by_length: BTreeSet<(u64, u64)>,
    /// Their sum.
    free_bytes: u64,
}

impl Space {
    /// A file of `end` bytes that may grow to `limit`, with the ranges `used` (offset, length) allocated. `None` if
    /// ranges overlap or exceed `end`.
    pub fn new(end: u64, limit: u64, used: impl IntoIterator<Item = (u64, u64)>) -> Option<Space> {
        let mut used: Vec<(u64, u64)> = used.into_iter().filter(|(_, len)| *len > 0).collect();
        used.sort_unstable();
        let mut space = Space { end, limit: limit.max(end), ..Space::default() };
        let mut at = 0;
        for (from, len) in used {
            if from < at {
                return None;
            }
            space.give(at, from - at);
            at = from.checked_add(len).filter(|to| *to <= end)?;
        }
        space.give(at, end - at);
        Some(space)
    }

    /// Allocates `len` contiguous bytes from the smallest free range that fits. Returns their offset.
    pub fn take(&mut self, len: u64) -> Option<u64> {
        let (room, at) = self.by_length.range((len, 0)..).next().copied()?;
        self.remove(at);
        self.give(at + len, room - len);
        Some(at)
    }

    /// Frees `len` bytes at offset `at`.
    pub fn give(&mut self, at: u64, len: u64) {
        if len == 0 {
            return;
        }
        let (mut from, mut to) = (at, at + len);
        if let Some(after) = self.remove(to) {
            to += after;
        }
        let before = self.free.range(..from).next_back().map(|(at, room)| (*at, *room));
        if let Some((start, room)) = before.filter(|(start, room)| start + room == from) {
            debug_assert!(room > 0);
            self.remove(start);
            from = start;
        }
        self.free.insert(from, to - from);
        self.by_length.insert((to - from, from));
        self.free_bytes += to - from;
    }

    /// Removes the free range at this offset, and returns its length.
    fn remove(&mut self, at: u64) -> Option<u64> {
        let len = self.free.remove(&at)?;
        self.by_length.remove(&(len, at));
        self.free_bytes -= len;
        Some(len)
    }

    /// File length at which `len` contiguous bytes are available; `None` if it exceeds the limit, or the file is full.
    pub fn end_for(&self, len: u64) -> Option<u64> {
        let tail = self.free.iter().next_back().filter(|(at, room)| *at + *room == self.end);
        let from = tail.map_or(self.end, |(at, _)| *at);
        from.checked_add(len).filter(|end| *end <= self.limit && !self.full)
    }

    /// Records that the file now has `end` bytes. The added bytes are free.
    pub fn grew(&mut self, end: u64) {
        if end > self.end {
            let from = std::mem::replace(&mut self.end, end);
            self.give(from, end - from);
        }
    }

    /// Records that the file system has no room for the file to grow.
    pub fn full(&mut self) {
        self.full = true;
    }

    /// Lets the file grow again: the file system may have room now. Returns true if the file was full.
    pub fn retry(&mut self) -> bool {
        std::mem::take(&mut self.full)
    }

    /// Length of the file, in bytes.
    pub fn end(&self) -> u64 {
        self.end
    }

    /// Length of the longest free range, without growing the file.
    pub fn longest(&self) -> u64 {
        self.by_length.last().map_or(0, |(len, _)| *len)
    }

    /// Free bytes of the file as it is.
    pub fn free(&self) -> u64 {
        self.free_bytes
    }

    /// Free bytes, including growth up to the limit.
    pub fn room(&self) -> u64 {
        self.free() + if self.full { 0 } else { self.limit - self.end }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_taken_once_and_merge_when_they_come_back() {
        let mut space = Space::new(100, 200, [(10, 20), (50, 10)]).unwrap();
        assert_eq!((space.free(), space.room(), space.longest()), (70, 170, 40));
        assert_eq!(space.take(10), Some(0));
        assert_eq!(space.take(20), Some(30));
        assert_eq!(space.take(41), None);
        assert_eq!(space.end_for(41), Some(101));
        space.grew(101);
        assert_eq!(space.take(41), Some(60));
        assert_eq!((space.free(), space.end_for(100), space.end_for(99)), (0, None, Some(200)));
        for (at, len) in [(0, 10), (30, 20), (60, 41), (10, 20), (50, 10)] {
            space.give(at, len);
        }
        assert_eq!((space.longest(), space.free.len()), (101, 1));
        space.full();
        assert_eq!((space.room(), space.end_for(102)), (101, None));
        assert!(space.retry() && !space.retry());
        assert_eq!((space.room(), space.end_for(102)), (200, Some(102)));
    }

    #[test]
    fn parts_that_overlap_or_lie_outside_are_refused() {
        assert_eq!(Space::new(100, 100, [(0, 20), (19, 1)]), None);
        assert_eq!(Space::new(100, 100, [(90, 11)]), None);
        assert_eq!(Space::new(100, 100, [(u64::MAX, 11)]), None);
        assert!(Space::new(100, 100, [(90, 10), (0, 90)]).is_some_and(|space| space.free() == 0));
    }

    /// Compares the allocator with one rebuilt from the list of allocated ranges after every operation.
    #[test]
    fn a_thousand_random_turns_match_a_map_of_bytes() {
        let mut random = fastrand::Rng::with_seed(7);
        let mut next = |below: u64| random.u64(..below);
        let mut space = Space::new(256, 1024, []).unwrap();
        let mut taken: Vec<(u64, u64)> = Vec::new();
        for _ in 0..1000 {
            let len = 1 + next(40);
            if next(2) == 0 && !taken.is_empty() {
                let (at, len) = taken.swap_remove(next(taken.len() as u64) as usize);
                space.give(at, len);
            } else if let Some(at) = space.take(len) {
                taken.push((at, len));
            } else if let Some(end) = space.end_for(len) {
                space.grew(end);
                taken.push((space.take(len).unwrap(), len));
            }
            let model = Space::new(space.end, 1024, taken.iter().copied()).expect("no part is taken twice");
            assert_eq!(space, model);
        }
    }
}
