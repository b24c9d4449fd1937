//! Commit: makes a step durable.
//!
//! Order of a commit:
//! 1. Wait for all writes. Until the commit ends, only the commit itself starts writes.
//! 2. Read the owner's record of each path. If one names another process, the commit fails, and with it every later one.
//! 3. Check that the files of each path still have their names. Move the data of a path whose files were removed or
//!    replaced. Extend data files that were truncated behind their last written byte; fail if written bytes are missing.
//! 4. Sync the data of every path, except with `Durability::Process`.
//! 5. On each path, read the superblock copy that does not hold the last committed superblock. It must be one of this
//!    owner, or the one that the open found there; else the commit fails.
//! 6. On each path, write the superblock into that copy. Sync it, except with `Durability::Process`. With
//!    `Durability::Full`, also sync the directory and read the superblock back.
//! 7. Read the owner's record of each path again. A process that claims the tier later finds this superblock. If a
//!    record names another process by now, the commit fails, and its outcome is unknown.
//! 8. The step is committed as soon as one path has completed point 7, unless another process claimed one.
//!
//! A crash before point 6 leaves the previous step. A crash during point 6 leaves the previous step or the new one. A
//! crash after point 8 leaves the new one. With `Durability::Process` this holds for the end of the process only, not
//! for a power cut.
//!
//! If no path completes point 7, the outcome is unknown: a crash may or may not find the step. Both steps then keep
//! their space until a later commit succeeds.
//!
//! Invariants:
//! - A commit succeeds only if every data file reaches the last written byte of the chunks that the commit names.
//! - A file that lacks only bytes behind the last written one is extended with zeros. Written bytes are never extended
//!   over: a file that lacks some of them is an error of the commit, and of the next open.
//! - The superblock of an open is written to every working path, and synced except with `Durability::Process`, before
//!   space is reused. If the paths are too full for it, the tier is open for reading. The first put or commit writes it,
//!   or fails.
#![forbid(unsafe_code)]

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::contents::WriteOrigin;
use super::extent::{Chunk, PAGE, Shape};
use super::format::{Encoded, ExtentRecord, PathRecord, Superblock};
use super::health::Health;
use super::options::Durability;
use super::state::{DurableCopy, Extent, PathState, TierState};
use super::storage::{fenced, with_reason};
use super::store::Tier;
use super::volume::{SuperblockCopy, Volume};
use crate::error::{Doing, Error, IoError, IoKind, Result, TierError, TierKind};

/// Maximum length of a commit's payload, in bytes.
pub const MAX_PAYLOAD: usize = 1 << 20;

impl Tier {
    /// Commits all changes as step `step`. `payload` has at most [`MAX_PAYLOAD`] bytes; the next open returns it.
    /// `Busy` if another commit is in flight. After an error the previous step stays committed, but if the outcome is
    /// unknown, a crash may find the new step.
    pub fn commit(&self, step: u64, payload: &[u8]) -> Result<()> {
        if payload.len() > MAX_PAYLOAD {
            let reason = format!("has {} bytes, but the limit is {MAX_PAYLOAD}", payload.len());
            return Err(Error::invalid("payload", reason));
        }
        if std::mem::replace(&mut self.state.lock().committing, true) {
            return Err(Error::Busy("another commit is in progress".to_string()));
        }
        let _ends = Committing(self);
        self.commit_all(step, payload)
    }

    fn commit_all(&self, step: u64, payload: &[u8]) -> Result<()> {
        self.complete_opening()?;
        if let Some(error) = self.finish_writes() {
            return Err(error);
        }
        if let Some(error) =
            self.state.lock().extents.iter().flatten().find_map(|extent| extent.failed.clone())
        {
            return Err(error);
        }
        self.check_owners()?;
        self.check_paths()?;
        self.complete_lengths()?;
        if self.durability() != Durability::Process {
            self.sync_data()?;
        }
        let (superblock, bytes) = self.next_superblock(Some(step), payload)?;
        let written = self.write_superblocks(&superblock, &bytes);
        let mut state = self.state.lock();
        match written {
            Ok(()) => {
                state.step = Some(step);
                state.payload = payload.to_vec();
                state.committed();
                Ok(())
            }
            Err(error) => {
                state.extents.iter_mut().flatten().for_each(|extent| extent.in_doubt = true);
                Err(error)
            }
        }
    }

    /// Builds and encodes the next superblock. After an error nothing is changed and nothing is written.
    pub(super) fn next_superblock(&self, step: Option<u64>, payload: &[u8]) -> Result<(Superblock, Encoded)> {
        let mut state = self.state.lock();
        let mut superblock = self.superblock(&state, step, payload.to_vec());
        superblock.sequence += 1;
        let refused = |message| {
            let message = format!(
                "{}: the superblock of this state could not be reopened: {message}",
                self.some_name()
            );
            Error::LimitReached(message)
        };
        let bytes = superblock.encode().map_err(refused)?;
        state.sequence = superblock.sequence;
        Ok((superblock, bytes))
    }

    /// Fails with `Fenced` if another process claimed one of the paths. An error of a device is that of the calls which
    /// follow.
    fn check_owners(&self) -> Result<()> {
        let checked = self.volumes.iter().flatten().filter_map(|path| path.check_owner().err());
        checked.filter(Error::is_fenced).map(Err).next().unwrap_or(Ok(()))
    }

    /// Fails with `Fenced` if the copy that the next superblock replaces on a path is of another owner. A path whose
    /// copy cannot be read gets no superblock, and has failed.
    fn check_replaced(&self, paths: Vec<(usize, Arc<Volume>)>) -> Result<ReplacedCopies> {
        let mut reads = Vec::new();
        for (number, path) in paths {
            let (copy, found) = {
                let state = self.state.lock();
                let path = &state.paths[number];
                let copy = path.durable_copy.map_or(0, |good| 1 - good.copy);
                (copy, path.found[copy])
            };
            reads.push((number, path.read_stamp(copy), path, copy, found));
        }
        let mut replaced = ReplacedCopies::default();
        for (number, read, path, copy, found) in reads {
            match read.and_then(|read| path.stamp(read)) {
                Ok(stamp)
                    if stamp.is_none_or(|stamp| {
                        stamp.session == self.identity.session || found == Some(stamp)
                    }) =>
                {
                    replaced.copies.push((number, path, copy));
                }
                Ok(_) => {
                    return Err(fenced(path.superblock_name(copy), "a process that wrote this superblock"));
                }
                Err(error) => replaced.errors.push((number, error)),
            }
        }
        Ok(replaced)
    }

    /// Syncs the data of all paths. If a sync fails, the data is moved to other paths, if it can still be read.
    fn sync_data(&self) -> Result<()> {
        for _ in 0..=self.volumes.len() {
            let dirty: Vec<usize> = {
                let state = self.state.lock();
                (0..self.volumes.len()).filter(|path| state.paths[*path].dirty).collect()
            };
            let live: Vec<(usize, &Arc<Volume>)> =
                dirty.iter().filter_map(|path| Some((*path, self.volumes[*path].as_ref()?))).collect();
            let handles: Vec<Result<u64>> = live.iter().map(|(_, path)| path.sync_data()).collect();
            let mut failed = Vec::new();
            for ((number, path), handle) in live.iter().zip(handles) {
                match handle.and_then(|handle| path.wait(handle, None)) {
                    Ok(_) => self.state.lock().paths[*number].dirty = false,
                    Err(error) => failed.push((*number, error)),
                }
            }
            if failed.is_empty() {
                return Ok(());
            }
            for (number, error) in &failed {
                self.mark(*number, Health::Failed, &error.to_string());
                // A later sync would succeed although the data was lost, so the extents are marked as failed.
                for extent in self.unsynced(*number as u32) {
                    self.state.lock().extent(extent)?.failed = Some(error.clone());
                }
            }
            for (number, error) in failed {
                self.move_unsynced(number as u32).map_err(|reason| with_reason(&error, &reason))?;
                self.state.lock().paths[number].dirty = false;
            }
        }
        Err(self.no_path_left())
    }

    /// Writes a superblock to every durable path that works. Fails if no path holds it durably afterwards, unless all
    /// paths are in memory.
    pub(super) fn write_superblocks(&self, superblock: &Superblock, bytes: &Encoded) -> Result<()> {
        let sync = self.durability() != Durability::Process;
        let replaced = self.check_replaced(self.superblock_paths())?;
        let (mut first, mut lost) = (None, None);
        let mut fail = |number: usize, error: Error| {
            if !error.is_full() {
                self.mark(number, Health::Failed, &error.to_string());
            }
            first.get_or_insert(error);
        };
        let mut under_way = Vec::new();
        let ReplacedCopies { copies, errors } = replaced;
        errors.into_iter().for_each(|(number, error)| fail(number, error));
        for (number, path, copy) in copies {
            let bytes = bytes.on_path(number as u32);
            let started = path.scratch(bytes.len()).and_then(|scratch| {
                scratch.span().write(&bytes);
                Ok((path.write_superblock(copy, scratch.transfer())?, scratch))
            });
            match started {
                Ok((handle, scratch)) => under_way.push((number, path, copy, handle, scratch)),
                Err(error) if error.is_fenced() => lost = Some(error),
                Err(error) => fail(number, error),
            }
        }
        let mut synced = Vec::new();
        for (number, path, copy, handle, scratch) in under_way {
            let begin =
                path.wait(handle, None).and_then(|_| if sync { path.sync_superblock(copy) } else { Ok(0) });
            match begin {
                Ok(handle) => synced.push((number, path, copy, handle)),
                Err(error) => fail(number, error),
            }
            drop(scratch);
        }
        let mut durable = 0;
        let lasting = self.state.lock().paths.iter().any(|path| !path.memory);
        for (number, path, copy, handle) in synced {
            let ended = if sync { path.wait(handle, None).map(|_| ()) } else { Ok(()) };
            let ended = ended.and_then(|()| self.look_again(&path, copy, superblock.sequence));
            match ended.and_then(|()| path.check_owner()) {
                Ok(()) => {
                    self.state.lock().paths[number].durable_copy =
                        Some(DurableCopy { copy, sequence: superblock.sequence });
                    durable += 1;
                }
                Err(error) if error.is_fenced() => lost = Some(error),
                Err(error) => fail(number, error),
            }
        }
        if let Some(error) = lost {
            return Err(error);
        }
        match (durable, first) {
            (0, Some(error)) => Err(error),
            (0, None) if lasting => Err(self.no_path_left()),
            _ => Ok(()),
        }
    }

    /// Error of a commit that no path can hold, with the reason of each path.
    fn no_path_left(&self) -> Error {
        let state = self.state.lock();
        let durable = || state.paths.iter().filter(|path| !path.memory);
        let why = |path: &PathState| {
            let health = format!("{:?}", path.health).to_lowercase();
            format!("{} is {health}: {}", path.name, path.reason)
        };
        let reasons: Vec<String> = durable().map(why).collect();
        let names = durable().map(|path| path.name.as_str()).collect::<Vec<_>>().join(", ");
        let detail = format!("no usable path is left for the commit: {}", reasons.join("; "));
        IoError::about(IoKind::PathFailed, Doing::Committing, names).because(detail).into()
    }

    /// With full durability, syncs the directory and reads the superblock back.
    fn look_again(&self, path: &Volume, copy: usize, sequence: u64) -> Result<()> {
        if self.durability() != Durability::Full {
            return Ok(());
        }
        path.sync_directory()?;
        match path.read_superblock(copy)? {
            SuperblockCopy::Valid(found) if found.sequence == sequence => Ok(()),
            _ => Err(TierError::at(
                TierKind::Corrupt,
                path.superblock_name(copy),
                format!(
                    "the superblock that was read back is not the one of sequence {sequence} that was written"
                ),
            )),
        }
    }

    pub(super) fn superblock_paths(&self) -> Vec<(usize, Arc<Volume>)> {
        let state = self.state.lock();
        let works = |number: usize| state.paths[number].health as u8 <= Health::Draining as u8;
        let paths = self.volumes.iter().enumerate();
        paths
            .filter_map(|(number, path)| Some((number, Arc::clone(path.as_ref()?))))
            .filter(|(number, path)| path.lasts() && works(*number))
            .collect()
    }

    /// Extents with blocks on `path` that were written since the last commit.
    fn unsynced(&self, path: u32) -> Vec<u32> {
        let state = self.state.lock();
        let wanted = |extent: &Extent| {
            let current = extent.current.as_ref().filter(|current| current.version.touches(path))?;
            let committed = extent.committed.as_ref().is_some_and(|old| Arc::ptr_eq(old, current));
            (!committed).then_some(())
        };
        let numbered = state.extents.iter().enumerate();
        numbered.filter_map(|(n, extent)| wanted(extent.as_ref()?).map(|()| n as u32)).collect()
    }

    /// Moves the unsynced extents of a path to other paths, and clears their failures.
    fn move_unsynced(&self, path: u32) -> Result<()> {
        self.unsynced(path).into_iter().try_for_each(|extent| {
            self.move_extent(extent, WriteOrigin::Commit)?;
            self.state.lock().extent(extent)?.failed = None;
            Ok(())
        })
    }
}

/// The superblock copies that the next superblocks replace.
#[derive(Debug, Default)]
struct ReplacedCopies {
    /// Path number, path and copy.
    copies: Vec<(usize, Arc<Volume>, usize)>,
    /// Paths whose copy cannot be read.
    errors: Vec<(usize, Error)>,
}

/// Guard of a commit in flight. Its drop ends the commit, also after a panic.
struct Committing<'a>(&'a Tier);

impl Drop for Committing<'_> {
    fn drop(&mut self) {
        self.0.state.lock().committing = false;
    }
}

impl Tier {
    /// Superblock of the current state, as reads see it.
    pub(super) fn superblock(&self, state: &TierState, step: Option<u64>, payload: Vec<u8>) -> Superblock {
        let written = |number: usize| {
            let stats = self.volumes[number].as_ref().and_then(|path| path.engine.stats().ok());
            stats.map_or(0, |stats| stats.written_bytes)
        };
        // A path without files and without data is dropped from the tier, so the next open does not report it as
        // missing.
        let retired = |number: usize, path: &PathState| {
            let current = |extent: &Extent| extent.current.clone().filter(|_| !extent.removed);
            (path.health == Health::Missing || path.gone)
                && !state
                    .extents
                    .iter()
                    .flatten()
                    .filter_map(current)
                    .any(|one| one.version.touches(number as u32))
        };
        let paths = state.paths.iter().enumerate().map(|(number, path)| PathRecord {
            name: if retired(number, path) { String::new() } else { path.name.clone() },
            memory: path.memory,
            end: path.space.end(),
            written: path.written_before + written(number),
        });
        let extents = state.extents.iter().map(|extent| {
            let extent = extent.as_ref().filter(|extent| !extent.removed)?;
            Some(ExtentRecord {
                name: extent.name.clone(),
                shape: (*extent.shape).clone(),
                version: extent.current.as_ref().map(|contents| contents.version.clone()),
            })
        });
        Superblock {
            tier: self.identity.tier,
            sequence: state.sequence,
            session: self.identity.session,
            step,
            path: 0,
            block_bytes: self.block_bytes,
            job: self.options.owner.job.clone(),
            host: self.options.owner.host.clone(),
            rank: self.options.owner.rank,
            world: self.options.world,
            generation: state.generation,
            payload,
            paths: paths.collect(),
            extents: extents.collect(),
        }
    }
}

impl Tier {
    /// Marks paths as failed whose files were removed, replaced or renamed, or which do not respond. Moves readable data
    /// off the paths whose files are gone: no open would find the data there. Fails if a part cannot be moved, or if no
    /// durable path is left.
    pub(super) fn check_paths(&self) -> Result<()> {
        let present: Vec<(usize, &Volume)> = self
            .volumes
            .iter()
            .enumerate()
            .filter_map(|(number, path)| Some((number, path.as_deref()?)))
            .collect();
        let checked = Volume::check_all(&present.iter().map(|(_, path)| *path).collect::<Vec<_>>());
        let failed: Vec<(usize, Error)> = present
            .iter()
            .zip(checked)
            .filter_map(|((number, _), checked)| Some((*number, checked.err()?)))
            .collect();
        for (number, error) in &failed {
            self.mark(*number, Health::Failed, &error.to_string());
        }
        // The files of a path that does not respond may be where they were.
        let gone = || failed.iter().filter(|(_, error)| error.tier_kind().is_some());
        let silent =
            |number: usize| failed.iter().any(|(one, error)| *one == number && error.io_kind().is_some());
        for (number, path) in
            self.state.lock().paths.iter_mut().enumerate().filter(|(number, _)| !silent(*number))
        {
            path.gone = gone().any(|(one, _)| *one == number);
        }
        for (number, error) in gone() {
            self.move_all(*number as u32).map_err(|reason| with_reason(error, &reason))?;
        }
        match failed.into_iter().next() {
            Some((_, error)) if self.superblock_paths().is_empty() => Err(error),
            _ => Ok(()),
        }
    }

    /// Moves everything that the next commit names off a path.
    fn move_all(&self, path: u32) -> Result<()> {
        let there = |extent: &Extent| {
            let current = extent.current.as_ref().filter(|_| !extent.removed);
            current.is_some_and(|current| current.version.touches(path))
        };
        let extents: Vec<u32> = {
            let state = self.state.lock();
            let numbered = (0..).zip(&state.extents);
            numbered.filter_map(|(n, extent)| extent.as_ref().filter(|one| there(one)).map(|_| n)).collect()
        };
        extents.into_iter().try_for_each(|extent| self.move_extent(extent, WriteOrigin::Commit))
    }
}

/// Space of a chunk in a data file, in bytes.
#[derive(Debug, Clone, Copy)]
pub(super) struct UsedSpace {
    /// Offset of the chunk, and its length with the padding of the last page.
    pub(super) range: (u64, u64),
    /// End of the last byte that was written.
    pub(super) written_end: u64,
}

impl UsedSpace {
    /// Space of a chunk.
    pub(super) fn of(chunk: &Chunk, shape: &Shape) -> UsedSpace {
        let last = shape.runs(chunk.first, chunk.count).into_iter().map(|run| run.at + run.len).max();
        let range = (chunk.offset, chunk.stored(shape));
        UsedSpace { range, written_end: chunk.data() + last.unwrap_or(0) }
    }
}

/// Length of the data file at an open. Extends a file that lacks only the padding of its last page.
pub(super) fn opened_length(path: &Volume, used: &[UsedSpace]) -> Result<u64> {
    let len = path.data_len()?;
    let written = used.iter().map(|space| space.written_end).max().unwrap_or(0);
    let padded = written.next_multiple_of(PAGE);
    if len >= padded || len < written {
        return Ok(len);
    }
    path.allocate(len, padded)?;
    Ok(padded)
}

impl Tier {
    /// Extends data files that were truncated behind the last written byte of the next commit. Fails with `Corrupt` if
    /// written bytes are missing, and names an extent to which they belong.
    pub(super) fn complete_lengths(&self) -> Result<()> {
        for (number, path) in self.volumes.iter().enumerate() {
            let Some(path) = path.as_ref().filter(|_| !self.state.lock().paths[number].gone) else {
                continue;
            };
            let end = self.state.lock().paths[number].space.end();
            // An error of the device is that of the sync which follows.
            let Some(len) = path.data_len().ok().filter(|len| *len < end) else { continue };
            if let Some((extent, written_end)) = self.beyond(number as u32, len) {
                return Err(truncated(path, extent, len, written_end));
            }
            // The next open extends the file of a path that failed.
            if self.state.lock().paths[number].health as u8 <= Health::Draining as u8 {
                path.allocate(len, end)?;
                self.state.lock().paths[number].dirty = true;
            }
        }
        Ok(())
    }

    /// An extent of the next commit with bytes on `path` behind offset `len`, and the end of these bytes.
    fn beyond(&self, path: u32, len: u64) -> Option<(String, u64)> {
        let state = self.state.lock();
        state.extents.iter().flatten().filter(|extent| !extent.removed).find_map(|extent| {
            let chunks = &extent.current.as_ref()?.version.chunks;
            let ends = chunks.iter().filter(|chunk| chunk.path == path);
            let end = ends.map(|chunk| UsedSpace::of(chunk, &extent.shape).written_end).max()?;
            (end > len).then(|| (extent.name.clone(), end))
        })
    }
}

fn truncated(path: &Volume, extent: String, len: u64, written_end: u64) -> Error {
    let detail = format!(
        "the file was truncated to {len} bytes while the tier was open, and this extent has data up to byte \
         {written_end}; nothing was committed; write the extent again before the next commit"
    );
    let path = path.data_name().to_string();
    TierError { kind: TierKind::Corrupt, path, extent, block: None, detail }.into()
}

impl Tier {
    /// Writes the state that was found, or the empty one, as a new superblock to every path. The superblock that was
    /// found may exist only in the page cache, and paths may have been renamed, added or left out.
    pub(super) fn write_opening_superblock(&self) -> Result<()> {
        let (step, payload) = {
            let state = self.state.lock();
            (state.step, state.payload.clone())
        };
        let (superblock, bytes) = self.next_superblock(step, &payload)?;
        let table = bytes.on_path(0).len() as u64;
        for path in self.volumes.iter().flatten().filter(|path| path.lasts()) {
            path.reserve_superblocks(table)?;
        }
        if self.durability() != Durability::Process {
            let live = || self.volumes.iter().flatten().filter(|path| path.lasts());
            for path in live() {
                let all = [path.sync_data()?, path.sync_superblock(0)?, path.sync_superblock(1)?];
                for handle in all {
                    path.wait(handle, None)?;
                }
            }
        }
        self.write_superblocks(&superblock, &bytes)
    }

    /// Writes the opening superblock if the open had no room for it. Without it no space may be used.
    pub(super) fn complete_opening(&self) -> Result<()> {
        if !self.opening_due.load(Ordering::Acquire) {
            return Ok(());
        }
        let _one_at_a_time = self.opening.lock();
        if self.opening_due.load(Ordering::Acquire) {
            let more =
                "the tier was opened without room for a superblock; free some space, then repeat the call";
            self.write_opening_superblock().map_err(|error| error.context(more))?;
            self.opening_due.store(false, Ordering::Release);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tier::directory::Owner;
    use crate::tier::options::{PathLocation, PathOptions, TierOptions};

    #[test]
    fn a_panic_in_a_commit_ends_the_commit() {
        let owner = Owner { job: "run".to_string(), host: "node".to_string(), rank: 0 };
        let memory = PathOptions { location: PathLocation::Memory, limit: None, reserve: 0 };
        let tier = Tier::open(TierOptions { paths: vec![memory], ..TierOptions::new(owner, []) }).unwrap();
        let panics = || {
            tier.state.lock().committing = true;
            let _ends = Committing(&tier);
            panic!("a bug in a commit");
        };
        assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(panics)).is_err());
        tier.commit(1, &[]).unwrap();
    }
}
