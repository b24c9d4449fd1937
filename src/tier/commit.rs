//! Commit: makes a step durable.
//!
//! Order of a commit:
//! 1. Wait for all writes. Until the commit ends, only the commit itself starts writes. A commit beside writes waits for
//!    those that were in flight at its begin, and names what the extents held then; other writes continue.
//! 2. Read the owner's record of each path. If one names another process, the commit fails, and with it every later one.
//! 3. Check that the files of each path still have their names. Move the data of a path whose files were removed or
//!    replaced. Extend data files that were truncated behind their last written byte; fail if written bytes are missing.
//!    A commit beside writes moves and extends nothing: it fails, and the next commit that excludes writes does it.
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

use super::blocks::Job;
use super::catalog::WriteOrigin;
use super::claim::Committer;
use super::format::{Encoded, Superblock};
use super::options::{Durability, Mode};
use super::paths::{DurableCopy, Health, ReplacedCopy};
use super::reading::only_read;
use super::storage::{fenced, with_reason};
use super::store::{Tier, TierState};
use super::volume::{Scratch, SuperblockCopy, Volume};
use crate::error::{Error, Result, TierError, TierKind};
use crate::sys::promise::{Outcome, Promise, promise};
use crate::sys::sync::Guard;

/// Maximum length of a commit's payload, in bytes.
pub const MAX_PAYLOAD: usize = 1 << 20;

impl Tier {
    /// Commits all changes as step `step`. `payload` has at most [`MAX_PAYLOAD`] bytes; the next open returns it. Waits
    /// for a commit beside writes first. `Busy` if another commit is in flight, or if a tiered update has changed states;
    /// [`RoundKind::Open`](crate::error::RoundKind::Open) if it has an open step. After an error the previous step stays
    /// committed, but if the outcome is unknown, a crash may find the new step.
    pub fn commit(&self, step: u64, payload: &[u8]) -> Result<()> {
        self.commit_if(Committer::Caller, step, payload)
    }

    pub(super) fn commit_if(&self, by: Committer, step: u64, payload: &[u8]) -> Result<()> {
        check_payload(payload)?;
        let mut state = self.after_commit_beside();
        self.claims.may_commit(by)?;
        state.catalog.begin_commit()?;
        drop(state);
        let _ends = Committing(self);
        self.complete_opening()?;
        if let Some(error) = self.finish_writes().or_else(|| self.state.lock().catalog.failed()) {
            return Err(error);
        }
        self.make_durable(Writers::Excluded, step, payload)?;
        if by == Committer::Update {
            self.claims.clear_changes();
        }
        Ok(())
    }

    /// As [`Tier::commit`], but a thread of its own commits what the extents hold at the call, and what writes in flight
    /// then install. Puts and gets continue meanwhile. Until it has ended, other commits, rollbacks and removals wait for
    /// it. Where [`Tier::commit`] moves data off a path that failed, this commit fails, and the next [`Tier::commit`]
    /// moves it.
    pub fn commit_beside(self: &Arc<Tier>, step: u64, payload: &[u8]) -> Result<Outcome<()>> {
        let begun = self.begin_commit_beside(Committer::Caller, payload, &[])?;
        let (promise, outcome) = promise("the commit");
        begun.run(&[], step, payload, promise)?;
        Ok(outcome)
    }

    /// Begins a commit beside writes. Extents in `deferred` are named by [`CommitBeside::run`].
    pub(super) fn begin_commit_beside(
        self: &Arc<Tier>,
        by: Committer,
        payload: &[u8],
        deferred: &[u32],
    ) -> Result<CommitBeside> {
        check_payload(payload)?;
        self.complete_opening()?;
        let mut state = self.after_commit_beside();
        self.claims.may_commit(by)?;
        state.catalog.begin_commit_beside(deferred)?;
        if by == Committer::Update {
            self.claims.clear_changes();
        }
        Ok(CommitBeside { tier: Arc::clone(self), by, succeeded: false })
    }

    /// The state, once no commit beside writes is in flight.
    pub(super) fn after_commit_beside(&self) -> Guard<'_, TierState> {
        self.changed.wait_while(self.state.lock(), None, |state| state.catalog.commits_beside())
    }

    /// Point 1 of a commit beside writes.
    fn finish_awaited(&self) -> Result<()> {
        let mut state = self.state.lock();
        while state.catalog.awaits() {
            let awaited = |job: &Job| job.is_write() && state.catalog.is_awaited(job.subject.extent);
            let idle = state.tickets.idle(awaited);
            state = match idle.is_empty() {
                true => self.changed.wait(state),
                false => {
                    drop(state);
                    idle.into_iter().for_each(|ticket| drop(self.drive_idle(ticket)));
                    self.state.lock()
                }
            };
        }
        state.catalog.named_failure().map_or(Ok(()), Err)
    }

    /// Points 2 to 8.
    fn make_durable(&self, writers: Writers, step: u64, payload: &[u8]) -> Result<()> {
        self.check_owners()?;
        let lengths = self.check_files(writers)?;
        self.complete_lengths(writers, &lengths)?;
        if self.options.durability != Durability::Process {
            self.sync_data(writers)?;
        }
        let (superblock, bytes) = self.next_superblock(Some(step), payload, true)?;
        let written = self.write_superblocks(&superblock, &bytes);
        let catalog = &mut self.state.lock().catalog;
        match &written {
            Ok(()) => catalog.committed(step, payload),
            Err(_) => catalog.in_doubt(),
        }
        written
    }

    /// Point 2. An error of a device is that of the calls which follow.
    fn check_owners(&self) -> Result<()> {
        let checked = self.volumes.iter().flatten().filter_map(|volume| volume.check_owner().err());
        checked.filter(Error::is_fenced).map(Err).next().unwrap_or(Ok(()))
    }

    /// Point 3, names: marks paths as failed whose files were removed, replaced or renamed, or which do not respond.
    /// Moves readable data off the paths whose files are gone: no open would find the data there. Fails if a part cannot
    /// be moved, or if no durable path is left. Returns the length of each path's data file, 0 if it is not known.
    fn check_files(&self, writers: Writers) -> Result<Vec<u64>> {
        let present = self.volumes.iter().enumerate();
        let (numbers, volumes): (Vec<usize>, Vec<&Volume>) =
            present.filter_map(|(number, volume)| Some((number, volume.as_deref()?))).unzip();
        let (mut lengths, mut failed) = (vec![0; self.volumes.len()], Vec::new());
        for (number, checked) in numbers.into_iter().zip(Volume::check_all(&volumes)) {
            match checked {
                Ok(len) => lengths[number] = len,
                Err(error) => failed.push((number, error)),
            }
        }
        failed.iter().for_each(|(number, error)| self.mark(*number, Health::Failed, &error.to_string()));
        for number in 0..self.volumes.len() {
            let error = failed.iter().find(|(one, _)| *one == number).map(|(_, error)| error);
            // The files of a path that does not respond may be where they were.
            if error.is_none_or(|error| error.io_kind().is_none()) {
                let gone = error.is_some_and(|error| error.tier_kind().is_some());
                self.state.lock().catalog.paths_mut().set_gone(number, gone);
            }
        }
        for (number, error) in failed.iter().filter(|(_, error)| error.tier_kind().is_some()) {
            let named = self.state.lock().catalog.named_on(*number as u32);
            named.into_iter().try_for_each(|extent| self.move_named(extent, writers, error))?;
        }
        match failed.into_iter().next() {
            Some((_, error)) if self.state.lock().catalog.paths().replaced_copies().is_empty() => Err(error),
            _ => Ok(lengths),
        }
    }

    /// Point 3, lengths: extends data files that were truncated behind the last written byte of the next commit. Fails
    /// with `Corrupt` if written bytes are missing, and names an extent to which they belong. `lengths` are those that
    /// the check of the names found; a file that was too short then is asked again, because data may have moved to it.
    fn complete_lengths(&self, writers: Writers, lengths: &[u64]) -> Result<()> {
        for (number, volume) in self.volumes.iter().enumerate() {
            let (gone, health, end) = {
                let state = self.state.lock();
                let path = state.catalog.paths().get(number);
                (path.gone(), path.health(), path.space().end())
            };
            let short = !gone && lengths[number] < end;
            let Some(volume) = volume.as_ref().filter(|_| short) else { continue };
            // An error of the device is that of the sync which follows.
            let Some(len) = volume.data_len().ok().filter(|len| *len < end) else { continue };
            let beyond = self.state.lock().catalog.named_beyond(number as u32, len);
            if let Some((extent, written_end)) = beyond {
                return Err(truncated(volume, extent, len, written_end));
            }
            // The next open extends the file of a path that failed.
            if health.takes_superblocks() && writers == Writers::Excluded {
                volume.allocate(len, end)?;
                self.state.lock().catalog.paths_mut().set_dirty(number);
            }
        }
        Ok(())
    }

    /// Point 4. If a sync fails, the data is moved to other paths, if it can still be read.
    fn sync_data(&self, writers: Writers) -> Result<()> {
        for _ in 0..=self.volumes.len() {
            let failed = self.sync_dirty();
            let unsynced = self.state.lock().catalog.unsynced();
            if !failed && unsynced.is_empty() {
                return Ok(());
            }
            for (extent, error) in unsynced {
                self.move_named(extent, writers, &error)?;
            }
        }
        Err(self.state.lock().catalog.paths().none_left())
    }

    /// Syncs the data of all paths. True if a sync failed.
    fn sync_dirty(&self) -> bool {
        let dirty = self.state.lock().catalog.paths_mut().take_dirty();
        let started = dirty.into_iter().filter_map(|path| {
            let volume = self.volumes[path].as_ref()?;
            Some((path, volume, volume.sync_data()))
        });
        let started: Vec<_> = started.collect();
        let ended = started.into_iter().map(|(path, volume, handle)| (path, volume.ended(handle)));
        let failed: Vec<_> = ended.filter_map(|(path, ended)| Some((path, ended.err()?))).collect();
        for (path, error) in &failed {
            self.mark(*path, Health::Failed, &error.to_string());
            self.state.lock().catalog.sync_failed(*path as u32, error);
        }
        !failed.is_empty()
    }

    /// Moves an extent that cannot be committed where it is because of `error`.
    fn move_named(&self, extent: u32, writers: Writers, error: &Error) -> Result<()> {
        match writers {
            Writers::Excluded => {
                self.move_extent(extent, WriteOrigin::Commit).map_err(|reason| with_reason(error, &reason))
            }
            Writers::Beside => Err(error.clone().context(
                "a commit in the background moves no data to another path; a commit that is waited for does",
            )),
        }
    }

    /// Builds and encodes the next superblock, of a commit or of an open. After an error nothing is changed and nothing is written.
    fn next_superblock(
        &self,
        step: Option<u64>,
        payload: &[u8],
        commits: bool,
    ) -> Result<(Superblock, Encoded)> {
        let frame = Superblock {
            tier: self.identity.tier,
            sequence: 0,
            session: self.identity.session,
            step,
            path: 0,
            block_bytes: self.block_bytes,
            job: self.options.owner.job.clone(),
            host: self.options.owner.host.clone(),
            rank: self.options.owner.rank,
            world: self.options.world,
            generation: 0,
            payload: payload.to_vec(),
            paths: Vec::new(),
            extents: Vec::new(),
        };
        let written = |path: usize| {
            let stats = self.volumes[path].as_ref().and_then(|volume| volume.engine.stats().ok());
            stats.map_or(0, |stats| stats.written_bytes)
        };
        let catalog = &mut self.state.lock().catalog;
        let superblock = catalog.superblock(frame, commits, written);
        let bytes = superblock.encode().map_err(|message| {
            let path = catalog.paths().some_name();
            Error::LimitReached(format!(
                "{path}: the superblock of this state could not be reopened: {message}"
            ))
        })?;
        catalog.use_sequence(&superblock);
        Ok((superblock, bytes))
    }

    /// Points 5 to 7. Fails if no path holds the superblock durably afterwards, unless all paths are in memory.
    fn write_superblocks(&self, superblock: &Superblock, bytes: &Encoded) -> Result<()> {
        let sync = self.options.durability != Durability::Process;
        let copies = self.state.lock().catalog.paths().replaced_copies();
        let mut publication = Publication { tier: self, first: None, fenced: None };
        let all = copies.into_iter().map(|copy| (copy, ())).collect();
        let reads = publication.each(all, |volume, replaced, ()| volume.read_stamp(replaced.copy));
        let free =
            publication.each(reads, |volume, replaced, read| self.check_replaced(volume, replaced, read));
        if let Some(error) = publication.fenced {
            return Err(error);
        }
        let writes = publication.each(free, |volume, replaced, ()| {
            let bytes = bytes.on_path(replaced.path as u32);
            let scratch = volume.scratch(bytes.len())?;
            scratch.span().write(&bytes);
            Ok((volume.write_superblock(replaced.copy, scratch.transfer())?, scratch))
        });
        let syncs = publication.each(writes, |volume, replaced, (handle, _scratch)| {
            volume.wait(handle, None)?;
            sync.then(|| volume.sync_superblock(replaced.copy)).transpose()
        });
        let durable = publication.each(syncs, |volume, replaced, handle| {
            handle.map_or(Ok(()), |handle| volume.ended(Ok(handle)))?;
            self.look_again(volume, replaced.copy, superblock.sequence)?;
            volume.check_owner()?;
            let copy = DurableCopy { copy: replaced.copy, sequence: superblock.sequence };
            self.state.lock().catalog.paths_mut().durable(replaced.path, copy);
            Ok(())
        });
        let paths = self.state.lock();
        let paths = paths.catalog.paths();
        match (publication.fenced, publication.first) {
            (Some(error), _) => Err(error),
            (None, Some(error)) if durable.is_empty() => Err(error),
            (None, None) if durable.is_empty() && paths.iter().any(|path| !path.memory()) => {
                Err(paths.none_left())
            }
            _ => Ok(()),
        }
    }

    /// Point 5: fails with `Fenced` if the copy that the superblock replaces is of another owner.
    fn check_replaced(&self, volume: &Volume, replaced: &ReplacedCopy, read: (u64, Scratch)) -> Result<()> {
        let stamp = volume.stamp(read)?;
        let ours = |stamp| stamp == self.identity.session;
        if stamp.is_none_or(|stamp| ours(stamp.session) || replaced.found == Some(stamp)) {
            return Ok(());
        }
        Err(fenced(volume.superblock_name(replaced.copy), "a process that wrote this superblock"))
    }

    /// Point 6: with full durability, syncs the directory and reads the superblock back.
    fn look_again(&self, volume: &Volume, copy: usize, sequence: u64) -> Result<()> {
        if self.options.durability != Durability::Full {
            return Ok(());
        }
        volume.sync_directory()?;
        match volume.read_superblock(copy)? {
            SuperblockCopy::Valid(found) if found.sequence == sequence => Ok(()),
            _ => {
                let message = format!(
                    "the superblock that was read back is not the one of sequence {sequence} that was written"
                );
                Err(TierError::at(TierKind::Corrupt, volume.superblock_name(copy), message))
            }
        }
    }

    /// Writes the state that was found, or the empty one, as a new superblock to every path. The superblock that was
    /// found may exist only in the page cache, and paths may have been renamed, added or left out.
    pub(super) fn write_opening_superblock(&self) -> Result<()> {
        let (step, payload) = self.state.lock().catalog.last_commit();
        let (superblock, bytes) = self.next_superblock(step, &payload, false)?;
        let table = bytes.on_path(0).len() as u64;
        let lasting = || self.volumes.iter().flatten().filter(|volume| volume.lasts());
        lasting().try_for_each(|volume| volume.reserve_superblocks(table))?;
        if self.options.durability != Durability::Process {
            for volume in lasting() {
                let all = [volume.sync_data()?, volume.sync_superblock(0)?, volume.sync_superblock(1)?];
                all.into_iter().try_for_each(|handle| volume.ended(Ok(handle)))?;
            }
        }
        self.write_superblocks(&superblock, &bytes)
    }

    /// Writes the opening superblock if the open has not written it. Without it no space may be used.
    pub(super) fn complete_opening(&self) -> Result<()> {
        if self.options.mode == Mode::Read {
            return Err(only_read());
        }
        let mut due = self.opening_due.lock();
        if *due {
            let more =
                "the superblock of the open could not be written; free some space, then repeat the call";
            let full = |error: Error| if error.is_full() { error.context(more) } else { error };
            self.write_opening_superblock().map_err(full)?;
            *due = false;
        }
        Ok(())
    }
}

/// A superblock on its way to all paths.
struct Publication<'a> {
    tier: &'a Tier,
    /// The first error of a path, which has failed then, unless it is full.
    first: Option<Error>,
    /// Another process claimed a path.
    fenced: Option<Error>,
}

impl Publication<'_> {
    /// Makes a step on every path, and returns the paths that continue.
    fn each<A, B>(
        &mut self,
        on: Vec<(ReplacedCopy, A)>,
        mut step: impl FnMut(&Volume, &ReplacedCopy, A) -> Result<B>,
    ) -> Vec<(ReplacedCopy, B)> {
        let mut going = Vec::new();
        for (replaced, so_far) in on {
            match self.tier.volume(replaced.path).and_then(|volume| step(volume, &replaced, so_far)) {
                Ok(made) => going.push((replaced, made)),
                Err(error) if error.is_fenced() => self.fenced = Some(error),
                Err(error) => {
                    if !error.is_full() {
                        self.tier.mark(replaced.path, Health::Failed, &error.to_string());
                    }
                    self.first.get_or_insert(error);
                }
            }
        }
        going
    }
}

/// What other writers do during a commit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Writers {
    Excluded,
    Beside,
}

/// Guard of a commit in flight. Its drop ends the commit, also after a panic.
struct Committing<'a>(&'a Tier);

impl Drop for Committing<'_> {
    fn drop(&mut self) {
        self.0.state.lock().catalog.end_commit();
        self.0.changed.notify_all();
    }
}

/// A commit beside writes that has begun. Its drop ends it.
#[derive(Debug)]
pub struct CommitBeside {
    tier: Arc<Tier>,
    by: Committer,
    succeeded: bool,
}

impl CommitBeside {
    /// Names the deferred extents, which are not being written, and continues in a thread. `promise` gets its outcome, and
    /// the error of this call.
    pub fn run(mut self, extents: &[u32], step: u64, payload: &[u8], promise: Promise<()>) -> Result<()> {
        let named = self.tier.state.lock().catalog.name_deferred(extents);
        if let Err(error) = named {
            drop(self);
            promise.keep(Err(error.clone()));
            return Err(error);
        }
        let payload = payload.to_vec();
        promise.keep_in_thread("spillway-commit", "starting the thread of a commit", move |promise| {
            let tier = &self.tier;
            let done =
                tier.finish_awaited().and_then(|()| tier.make_durable(Writers::Beside, step, &payload));
            self.succeeded = done.is_ok();
            // A caller who knows the outcome may close the tier, which this thread does not use any more.
            drop(self);
            promise.keep(done);
        })
    }
}

impl Drop for CommitBeside {
    fn drop(&mut self) {
        if self.by == Committer::Update && !self.succeeded {
            self.tier.claims.change(false);
        }
        drop(Committing(&self.tier));
    }
}

/// Fails if a payload is too long for a commit.
fn check_payload(payload: &[u8]) -> Result<()> {
    if payload.len() > MAX_PAYLOAD {
        let reason = format!("has {} bytes, but the limit is {MAX_PAYLOAD}", payload.len());
        return Err(Error::invalid("payload", reason));
    }
    Ok(())
}

fn truncated(volume: &Volume, extent: String, len: u64, written_end: u64) -> Error {
    let detail = format!(
        "the file was truncated to {len} bytes while the tier was open, and this extent has data up to byte \
         {written_end}; nothing was committed; write the extent again before the next commit"
    );
    let path = volume.data_name().to_string();
    TierError { kind: TierKind::Corrupt, path, extent, block: None, detail }.into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tier::directory::Owner;
    use crate::tier::options::{PathLocation, PathOptions, TierOptions};

    #[test]
    fn a_panic_in_a_commit_ends_the_commit() {
        let owner = Owner { job: "run".to_string(), host: "node".to_string(), rank: 0 };
        let memory = PathOptions { location: PathLocation::Memory(None), limit: None, reserve: 0 };
        let tier = Tier::open(TierOptions { paths: vec![memory], ..TierOptions::new(owner, []) }).unwrap();
        let panics = || {
            tier.state.lock().catalog.begin_commit().unwrap();
            let _ends = Committing(&tier);
            panic!("a bug in a commit");
        };
        assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(panics)).is_err());
        tier.commit(1, &[]).unwrap();
    }
}
