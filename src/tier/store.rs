//! An open tier: its extents, paths and snapshots, close and removal. `jobs` has its transfers, `moves` its moves, `commit`
//! its commits, `recover` its open, `export` its exports.
//!
//! Invariants:
//! - Until a commit succeeds, an open after a crash finds the state of the previous commit, complete.
//! - After a failed write, commits fail until the extent is written again or all changes since the last commit are
//!   rolled back. A step is therefore committed completely or not at all.
//! - Every byte that a read returns was checked against its checksum.
#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::ops::Deref;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::blocks::{Job, TierIdentity, is_hung};
use super::catalog::{Catalog, Contents, ExtentInfo, Held, HeldContents, View};
use super::claim::Claims;
use super::extent::{Shape, check_name};
use super::options::TierOptions;
use super::paths::Health;
use super::volume::Volume;
use crate::error::{Error, IoKind, Result};
use crate::io::counters::{EngineStats, EngineTraffic};
use crate::io::engine::WithoutTurns;
use crate::log::{self, Level};
use crate::sys::bell::Bell;
use crate::sys::sync::{Lock, Signal, deadline_after};

/// Shortest wait of a close for its files.
const CLOSE_AT_LEAST: Duration = Duration::from_secs(1);

/// A tier: named extents stored on several paths.
#[derive(Debug)]
pub struct Tier {
    pub(super) options: TierOptions,
    pub(super) identity: TierIdentity,
    pub(super) block_bytes: u64,
    /// By path number; `None` for missing paths.
    pub(super) volumes: Vec<Option<Arc<Volume>>>,
    pub(super) state: Lock<TierState>,
    pub(super) changed: Signal,
    /// Rung whenever transfers of a path may have ended, and when a ticket is settled that another thread has asked for.
    pub(super) bell: Arc<Bell>,
    pub(super) opened: Opened,
    pub(super) claims: Claims,
    /// True if the open has not written its superblock: it had no room, or `write_at_open` is false. Held while a thread writes that superblock.
    pub(super) opening_due: Lock<bool>,
}

/// What changes while a tier is open.
#[derive(Debug)]
pub(super) struct TierState {
    pub(super) catalog: Catalog,
    pub(super) tickets: Tickets,
}

/// The tickets that were given out and not waited for.
#[derive(Debug, Default)]
pub(super) struct Tickets {
    states: HashMap<u64, TicketState>,
    last: u64,
    /// Number of searches through all tickets.
    #[cfg(test)]
    pub(super) searches: std::cell::Cell<u64>,
}

/// State of a ticket.
#[derive(Debug)]
pub(super) enum TicketState {
    /// In flight; no thread waits for it.
    Idle(Box<Job>),
    /// A thread drives the job. `asked`: another one has asked for the outcome, and may wait for the bell.
    Driven { asked: bool },
    /// Ended; the outcome was not fetched yet.
    Done(Result<u64>),
}

impl Tickets {
    pub(super) fn add(&mut self, job: Job) -> u64 {
        self.last += 1;
        self.states.insert(self.last, TicketState::Idle(Box::new(job)));
        self.last
    }

    pub(super) fn is_driven(&self, ticket: u64) -> bool {
        matches!(self.states.get(&ticket), Some(TicketState::Driven { .. }))
    }

    /// Records that a thread has asked for the outcome of a ticket that another one drives.
    pub(super) fn ask(&mut self, ticket: u64) {
        if let Some(TicketState::Driven { asked }) = self.states.get_mut(&ticket) {
            *asked = true;
        }
    }

    /// Takes the job of an idle ticket, to drive it.
    pub(super) fn take(&mut self, ticket: u64) -> Option<Box<Job>> {
        let slot = self.states.get_mut(&ticket).filter(|slot| matches!(slot, TicketState::Idle(_)))?;
        match std::mem::replace(slot, TicketState::Driven { asked: false }) {
            TicketState::Idle(job) => Some(job),
            _ => None,
        }
    }

    /// Puts a job back, or its outcome. True if another thread has asked for it.
    pub(super) fn put_back(&mut self, ticket: u64, settled: TicketState) -> bool {
        matches!(self.states.insert(ticket, settled), Some(TicketState::Driven { asked: true }))
    }

    /// Takes the outcome of a ticket, which ends with it.
    pub(super) fn outcome(&mut self, ticket: u64) -> Option<Result<u64>> {
        match self.states.get(&ticket) {
            Some(TicketState::Done(_)) => match self.states.remove(&ticket) {
                Some(TicketState::Done(outcome)) => Some(outcome),
                _ => None,
            },
            _ => None,
        }
    }

    /// Idle tickets with such a job.
    pub(super) fn idle(&self, wanted: impl Fn(&Job) -> bool) -> Vec<u64> {
        #[cfg(test)]
        self.searches.set(self.searches.get() + 1);
        let wanted = |slot: &TicketState| matches!(slot, TicketState::Idle(job) if wanted(job));
        self.states.iter().filter(|(_, slot)| wanted(slot)).map(|(ticket, _)| *ticket).collect()
    }
}

/// Result of opening a tier.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Opened {
    /// True if a tier existed already; it may be without a commit.
    pub resumed: bool,
    /// Step of the state; `None` if nothing was committed.
    pub step: Option<u64>,
    /// Payload of that commit.
    pub payload: Vec<u8>,
    /// Names of missing paths.
    pub missing: Vec<String>,
    /// Names of extents with blocks on missing paths.
    pub lost: Vec<String>,
}

/// State and statistics of a path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PathReport {
    /// Directory or address of the path, or "memory".
    pub name: String,
    /// True if the data is lost when the process ends.
    pub memory: bool,
    /// Health of the path.
    pub health: Health,
    /// Reason if the path is not healthy.
    pub reason: String,
    /// Bytes read since the open.
    pub read_bytes: u64,
    /// Bytes written since the open, including headers and superblocks.
    pub written_bytes: u64,
    /// Time during which at least one read was in flight.
    pub reading: Duration,
    /// Time during which at least one write or sync was in flight.
    pub writing: Duration,
    /// Time during which at least one operation was in flight.
    pub busy: Duration,
    /// Bytes written since the tier was created.
    pub wear: u64,
    /// Length of the data file, in bytes.
    pub file_bytes: u64,
    /// Free bytes in the data file.
    pub free: u64,
    /// Free bytes in the data file, including growth up to its limit.
    pub room: u64,
    /// "io_uring", "threads", "s3" or "sim"; empty if the path is missing.
    pub backend: &'static str,
}

/// Health and traffic of one path.
#[derive(Debug, Clone, Copy)]
pub struct PathFlow {
    /// Health of the path.
    pub health: Health,
    /// Bytes and busy time since the tier was opened; zero for a missing path.
    pub traffic: EngineTraffic,
}

impl Tier {
    /// Result of the open.
    pub fn opened(&self) -> &Opened {
        &self.opened
    }

    /// Block size, in bytes.
    pub fn block_bytes(&self) -> u64 {
        self.block_bytes
    }

    /// Returns the number of the extent with this name, and defines the extent if it does not exist. `streams` are the
    /// stream lengths in bytes. Fails with `Foreign` if the existing extent has other streams. Waits for a commit beside
    /// writes that removes the extent.
    pub fn define(&self, name: &str, streams: &[u64]) -> Result<u32> {
        check_name("name", name)?;
        let shape = Shape::new(streams, self.block_bytes)?;
        self.unless_beside(|catalog| catalog.define(name, shape.clone()))
    }

    /// Removes an extent at the next commit. Defining the extent again before the commit cancels the removal. `Busy`
    /// while a commit is in flight, for the removal and its cancellation. Waits for a commit beside writes.
    pub fn remove(&self, extent: u32) -> Result<()> {
        self.unless_beside(|catalog| catalog.remove(extent))
    }

    /// Makes a call of the catalog; waits for a commit beside writes if the call is `Busy` because of it.
    fn unless_beside<T>(&self, mut call: impl FnMut(&mut Catalog) -> Result<T>) -> Result<T> {
        let mut state = self.state.lock();
        loop {
            match call(&mut state.catalog) {
                Err(Error::Busy(_)) if state.catalog.commits_beside() => state = self.changed.wait(state),
                outcome => return outcome,
            }
        }
    }

    /// Numbers of the extents with these names; `None` for a name that no extent has.
    pub fn numbers<'a>(&self, names: impl Iterator<Item = &'a str>) -> Vec<Option<u32>> {
        let state = self.state.lock();
        names.map(|name| state.catalog.number(name)).collect()
    }

    /// All extents, in order of their numbers.
    pub fn extents(&self) -> Vec<ExtentInfo> {
        self.state.lock().catalog.extents()
    }

    /// The extent at position `index` of [`Tier::extents`], without building the whole list.
    pub fn nth_extent(&self, index: usize) -> Option<ExtentInfo> {
        self.state.lock().catalog.nth_extent(index)
    }

    /// Description of one extent.
    pub fn extent(&self, number: u32) -> Result<ExtentInfo> {
        self.state.lock().catalog.extent(number)
    }

    /// Stream and block sizes of an extent.
    pub fn shape(&self, number: u32) -> Result<Arc<Shape>> {
        self.state.lock().catalog.shape(number)
    }

    /// Number of blocks of all extents on a path.
    pub fn blocks_on(&self, path: u32) -> u64 {
        self.state.lock().catalog.blocks_on(path)
    }

    /// Number of times that transfers of a path have ended, for [`Tier::wait_for_event`].
    pub fn events(&self) -> u64 {
        self.bell.events()
    }

    /// What [`Tier::wait_for_event`] waits for; a thread may ring it for a reason of its own.
    pub fn bell(&self) -> Arc<Bell> {
        Arc::clone(&self.bell)
    }

    /// Waits until transfers have ended since [`Tier::events`] returned `seen`. Their tickets may still be pending: a
    /// transfer that failed continues on another path.
    pub fn wait_for_event(&self, seen: u64) {
        self.bell.wait(seen, None);
    }

    /// Discards all changes since the last commit. Waits for a commit beside writes first. `Busy` while a commit is in flight, or while a tiered update has
    /// changed states; [`RoundKind::Open`](crate::error::RoundKind::Open) while it has an open step.
    pub fn rollback(&self) -> Result<()> {
        self.rollback_if(|| self.claims.may_roll_back())
    }

    pub(super) fn rollback_if(&self, allowed: impl Fn() -> Result<()>) -> Result<()> {
        loop {
            allowed()?;
            self.finish_writes();
            let catalog = &mut self.after_commit_beside().catalog;
            catalog.between_commits()?;
            allowed()?;
            // A write that started meanwhile would install its contents after the rollback.
            if !catalog.is_writing() {
                catalog.rollback()?;
                self.claims.clear_changes();
                return Ok(());
            }
        }
    }

    /// The volume of a path that is present.
    pub(super) fn volume(&self, path: usize) -> Result<&Arc<Volume>> {
        self.volumes[path].as_ref().ok_or_else(|| Error::invalid("path", format!("path {path} is missing")))
    }

    /// Lowers the health of a path, and logs the change.
    pub(super) fn mark(&self, path: usize, health: Health, reason: &str) {
        let changed = self.state.lock().catalog.paths_mut().mark(path, health, reason);
        changed.iter().for_each(|message| log::write(Level::Warn, message));
    }

    /// Marks a path as failed that did not respond to a read.
    pub(super) fn mark_if_hung(&self, path: usize, error: &Error) {
        if is_hung(error) {
            self.mark(path, Health::Failed, &error.to_string());
        }
    }
}

/// Contents of one extent; its drop lets them go. `T` refers to the tier, or owns a part of it.
#[derive(Debug)]
pub(super) struct HeldExtent<T: Deref<Target = Tier>> {
    tier: T,
    pub(super) held: Held,
}

impl<T: Deref<Target = Tier>> Drop for HeldExtent<T> {
    fn drop(&mut self) {
        self.tier.state.lock().catalog.end_snapshot(&self.held.contents);
    }
}

/// Takes a snapshot of a tier. Writes and commits continue meanwhile: they use other space.
pub(super) fn snapshot<T: Deref<Target = Tier> + Clone>(
    tier: &T,
    view: View,
) -> Result<HeldContents<HeldExtent<T>>> {
    let HeldContents { step, payload, extents, lost } = tier.state.lock().catalog.snapshot(view)?;
    let extents = extents.into_iter().map(|held| HeldExtent { tier: tier.clone(), held }).collect();
    Ok(HeldContents { step, payload, extents, lost })
}

/// What one extent held when it was pinned. Until the drop these contents keep their space, whatever is written to the
/// extent or committed.
#[derive(Debug)]
pub struct Pin {
    tier: Arc<Tier>,
    extent: u32,
    contents: Option<Arc<Contents>>,
}

impl Pin {
    /// Discards what was written to the extent since. `Busy` while the extent is being written or a commit is in flight.
    pub fn revert(&self) -> Result<()> {
        self.tier.after_move(self.extent).catalog.revert(self.extent, self.contents.as_ref())
    }
}

impl Drop for Pin {
    fn drop(&mut self) {
        if let Some(contents) = &self.contents {
            self.tier.state.lock().catalog.end_snapshot(contents);
        }
    }
}

/// Pins.
impl Tier {
    /// Pins what an extent holds.
    pub fn pin(self: &Arc<Tier>, extent: u32) -> Result<Pin> {
        let contents = self.state.lock().catalog.pin(extent)?;
        Ok(Pin { tier: Arc::clone(self), extent, contents })
    }
}

/// Paths.
impl Tier {
    /// Reports of all paths, by number.
    pub fn paths(&self) -> Vec<PathReport> {
        (0..self.volumes.len()).map(|number| self.report(number)).collect()
    }

    /// Report of one path; `None` if there is no such path.
    pub fn path(&self, number: u32) -> Option<PathReport> {
        let number = usize::try_from(number).ok().filter(|number| *number < self.volumes.len())?;
        Some(self.report(number))
    }

    /// Health and traffic of all paths, by number.
    pub fn flows(&self) -> Vec<PathFlow> {
        let state = self.state.lock();
        let paths = state.catalog.paths().iter().zip(&self.volumes);
        let flows = paths.map(|(path, volume)| {
            let traffic = volume.as_ref().and_then(|volume| volume.engine.traffic().ok());
            PathFlow { health: path.health(), traffic: traffic.unwrap_or_default() }
        });
        flows.collect()
    }

    fn report(&self, number: usize) -> PathReport {
        let state = self.state.lock();
        let path = state.catalog.paths().get(number);
        let stats = self.volumes[number].as_ref().and_then(|volume| volume.engine.stats().ok());
        let count = |get: fn(&EngineStats) -> u64| stats.as_ref().map_or(0, get);
        let time = |get: fn(&EngineStats) -> Duration| stats.as_ref().map_or(Duration::ZERO, get);
        PathReport {
            name: path.name().to_string(),
            memory: path.memory(),
            health: path.health(),
            reason: path.reason().to_string(),
            read_bytes: count(|stats| stats.read_bytes),
            written_bytes: count(|stats| stats.written_bytes),
            reading: time(|stats| stats.reading),
            writing: time(|stats| stats.writing),
            busy: time(|stats| stats.busy),
            wear: path.written_before() + count(|stats| stats.written_bytes),
            file_bytes: path.space().end(),
            free: path.space().free(),
            room: path.space().room(),
            backend: stats.as_ref().map_or("", |stats| stats.backend),
        }
    }

    /// The error of a caller who needs `bytes` more bytes than the paths have: what [`Tier::write`] returns.
    pub fn no_room(&self, bytes: u64) -> Error {
        self.state.lock().catalog.paths().no_room(bytes)
    }

    /// Sets the health of a path. A draining path gets no new writes; a healthy one gets them again. A missing path
    /// stays missing, and no path can be set to missing.
    pub fn set_health(&self, path: u32, health: Health, reason: &str) -> Result<()> {
        self.state.lock().catalog.paths_mut().set_health(path, health, reason)
    }
}

/// Turns on the devices of paths (see `io::turns`), for callers that wait for transfers to end.
impl Tier {
    /// Lets transfers begin without turns until the drop of the result.
    pub fn without_turns(&self) -> Vec<WithoutTurns> {
        self.volumes.iter().flatten().map(|volume| volume.engine.without_turns()).collect()
    }

    /// Lets transfers begin without turns from now on.
    pub fn end_turns(&self) {
        self.volumes.iter().flatten().for_each(|volume| volume.engine.end_turns());
    }
}

/// The end of a tier.
impl Tier {
    /// Waits for operations in flight and closes the paths. Uncommitted changes are lost. `Timeout` if operations are
    /// still in flight after `timeout`. `Deadline` if a file system does not respond to the close of the files within the
    /// I/O timeout, or within the rest of `timeout`, which counts as one second at least. The close then continues on its
    /// own.
    pub fn close(self, timeout: Option<Duration>) -> Result<()> {
        let until = deadline_after(timeout);
        let left = || until.map(|until| until.saturating_duration_since(Instant::now()));
        // Every path is closed, also after a timeout: the drop of a path would wait for it, and longer.
        let mut drained = Ok(());
        for volume in self.volumes.iter().flatten() {
            match volume.engine.close(left()) {
                Err(error) if error.io_kind() == Some(IoKind::Timeout) => drained = drained.and(Err(error)),
                // Errors of operations that no caller waited for concern writes that are discarded here.
                _ => {}
            }
        }
        let Tier { volumes, state, .. } = self;
        // Transfers without a waiter hold references to their volumes.
        drop(state);
        let volumes = volumes.into_iter().flatten().filter_map(Arc::into_inner).collect();
        drained.and(Volume::close_all(left().map(|left| left.max(CLOSE_AT_LEAST)), volumes))
    }

    /// Removes the tier from every path that is present. Returns the first error, after trying all paths. `Busy` if an
    /// operation is in flight. `Deadline` if a file system does not respond; the removal then continues on its own.
    pub fn destroy(self) -> Result<()> {
        let Tier { volumes, state, .. } = self;
        // Transfers without a waiter hold references to their volumes.
        drop(state);
        let (mut outcome, mut owned) = (Ok(()), Vec::new());
        for volume in volumes.into_iter().flatten() {
            let name = volume.name();
            match Arc::into_inner(volume) {
                Some(volume) => owned.push(volume),
                None => outcome = outcome.and(Err(Error::Busy(format!("{name} is still in use")))),
            }
        }
        outcome.and(Volume::remove_all(owned))
    }
}
