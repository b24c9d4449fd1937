//! Public API of a tier: define, write, read, wait.
//!
//! Invariants:
//! - Until a commit succeeds, an open after a crash finds the state of the previous commit, complete.
//! - After a failed write, commits fail until the extent is written again or all changes since the last commit are
//!   rolled back. A step is therefore committed completely or not at all.
//! - Every byte that a read returns was checked against its checksum, unless the caller asked for an unchecked read.
#![forbid(unsafe_code)]

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use super::allocation::ExtentPlacement;
use super::contents::{Contents, WriteOrigin};
use super::extent::{Shape, check_name};
use super::health::Health;
use super::options::{Durability, TierOptions};
use super::state::{Extent, TicketState, TierState};
use super::storage::{deadline_after, timed_out};
use super::transfer::{Direction, Job, TierIdentity};
use super::volume::Volume;
use crate::error::{Error, Result, TierError, TierKind};
use crate::log::{self, Level};
use crate::pool::transfer_buffer::TransferBuffer;
use crate::sys::bell::Bell;
use crate::sys::process::OpeningProcess;
use crate::sys::sync::{Lock, Signal};

/// A tier: named extents stored on several paths.
#[derive(Debug)]
pub struct Tier {
    pub(super) opener: OpeningProcess,
    pub(super) options: TierOptions,
    pub(super) identity: TierIdentity,
    pub(super) block_bytes: u64,
    /// By path number; `None` for missing paths.
    pub(super) volumes: Vec<Option<Arc<Volume>>>,
    pub(super) state: Lock<TierState>,
    pub(super) changed: Signal,
    /// Rung whenever transfers of a path may have ended.
    pub(super) bell: Arc<Bell>,
    pub(super) opened: Opened,
    /// True while an [`UpdateClaim`](super::claim::UpdateClaim) exists.
    pub(super) claimed: AtomicBool,
    /// True if the open had no room for its superblock.
    pub(super) opening_due: AtomicBool,
    /// Held while a thread writes that superblock.
    pub(super) opening: Lock<()>,
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

impl Tier {
    /// Fails in a forked child: the tier's threads and locks belong to the parent process.
    pub fn check_process(&self) -> Result<()> {
        self.opener.check("the tier")
    }

    /// Result of the open.
    pub fn opened(&self) -> &Opened {
        &self.opened
    }

    /// Block size, in bytes.
    pub fn block_bytes(&self) -> u64 {
        self.block_bytes
    }

    /// Returns the number of the extent with this name, and defines the extent if it does not exist. `streams` are the
    /// stream lengths in bytes. Fails with `Foreign` if the existing extent has other streams.
    pub fn define(&self, name: &str, streams: &[u64]) -> Result<u32> {
        check_name("name", name)?;
        let shape = Shape::new(streams, self.block_bytes)?;
        let mut state = self.state.lock();
        if let Some(number) = state.names.get(name).copied() {
            let settled = state.between_commits();
            let extent = state.extent(number)?;
            if *extent.shape != shape {
                return Err(TierError {
                    kind: TierKind::Foreign,
                    path: self.some_name(),
                    extent: name.to_string(),
                    block: None,
                    detail: format!(
                        "its streams have {:?} bytes, but {streams:?} were requested",
                        extent.shape.streams()
                    ),
                }
                .into());
            }
            if extent.removed {
                settled?;
                extent.removed = false;
            }
            return Ok(number);
        }
        let extent = Extent {
            name: name.to_string(),
            shape: Arc::new(shape),
            committed: None,
            current: None,
            in_doubt: false,
            removed: false,
            writing: false,
            failed: None,
        };
        let free = state.extents.iter().position(Option::is_none).unwrap_or(state.extents.len());
        if free == state.extents.len() {
            state.extents.push(None);
        }
        state.extents[free] = Some(extent);
        state.names.insert(name.to_string(), free as u32);
        Ok(free as u32)
    }

    /// Removes an extent at the next commit. Defining the extent again before the commit cancels the removal. `Busy`
    /// while a commit is in flight, for the removal and its cancellation.
    pub fn remove(&self, extent: u32) -> Result<()> {
        let mut state = self.state.lock();
        state.between_commits()?;
        state.extent(extent)?.removed = true;
        Ok(())
    }

    /// Numbers of the extents with these names; `None` for a name that no extent has.
    pub fn numbers<'a>(&self, names: impl Iterator<Item = &'a str>) -> Vec<Option<u32>> {
        let state = self.state.lock();
        names.map(|name| state.names.get(name).copied()).collect()
    }

    /// All extents, in order of their numbers.
    pub fn extents(&self) -> Vec<ExtentInfo> {
        let state = self.state.lock();
        let numbered = state.extents.iter().enumerate();
        numbered
            .filter_map(|(number, extent)| Some(describe(&state, number as u32, extent.as_ref()?)))
            .collect()
    }

    /// The extent at position `index` of [`Tier::extents`], without building the whole list.
    pub fn nth_extent(&self, index: usize) -> Option<ExtentInfo> {
        let state = self.state.lock();
        // Without unused numbers, which removed extents leave, the index equals the number.
        let number = match state.names.len() == state.extents.len() {
            true => index,
            false => {
                let there = state.extents.iter().enumerate().filter(|(_, extent)| extent.is_some());
                there.map(|(number, _)| number).nth(index)?
            }
        };
        let extent = state.extents.get(number)?.as_ref()?;
        Some(describe(&state, number as u32, extent))
    }

    /// Number of blocks of all extents on a path.
    pub fn blocks_on(&self, path: u32) -> u64 {
        let state = self.state.lock();
        let contents = state.extents.iter().flatten().filter_map(|extent| extent.current.as_ref());
        let chunks = contents.flat_map(|contents| &contents.version.chunks);
        chunks.filter(|chunk| chunk.path == path).map(|chunk| u64::from(chunk.count)).sum()
    }

    /// Description of one extent.
    pub fn extent(&self, number: u32) -> Result<ExtentInfo> {
        let mut state = self.state.lock();
        state.extent(number)?;
        let known = state.extents[number as usize].as_ref().map(|extent| describe(&state, number, extent));
        known.ok_or_else(|| Error::invalid("extent", format!("{number} does not exist")))
    }

    /// Stream and block sizes of an extent.
    pub fn shape(&self, number: u32) -> Result<Arc<Shape>> {
        Ok(Arc::clone(&self.state.lock().extent(number)?.shape))
    }

    /// Starts to write an extent from one span per stream, and returns a ticket for [`Tier::wait`]. Reads return the
    /// new contents after the wait; the committed contents stay on disk. `checksums` are the checksums of all blocks,
    /// if the caller knows them. The spans must stay valid and unchanged until the write has ended.
    pub fn write(
        &self,
        extent: u32,
        spans: &[TransferBuffer],
        placement: &ExtentPlacement,
        checksums: Option<Vec<u64>>,
    ) -> Result<u64> {
        placement.check(self.volumes.len(), self.shape(extent)?.blocks())?;
        let begun = self.begin_write(extent, Some(spans), WriteOrigin::Caller)?;
        self.start_write(begun, spans, placement, checksums)
    }

    /// Starts to read an extent into one span per stream, and returns a ticket. A stream with an empty span is not
    /// read. The read succeeds only if every block matches its checksum. With `unchecked` the caller checks the blocks;
    /// [`Tier::checksums`] returns the expected checksums.
    pub fn read(&self, extent: u32, spans: &[TransferBuffer], unchecked: bool) -> Result<u64> {
        let (source, shape, name) = {
            let mut state = self.state.lock();
            let source = state.contents(extent)?;
            let known = state.extent(extent)?;
            let fits = spans.len() == known.shape.streams().len()
                && spans
                    .iter()
                    .zip(known.shape.streams())
                    .all(|(s, len)| s.is_empty() || s.len() as u64 == *len);
            if !fits {
                known.shape.check(spans)?;
            }
            if known.writing {
                return Err(Error::Busy(format!("extent {:?} is being written", known.name)));
            }
            let (shape, name) = (Arc::clone(&known.shape), known.name.clone());
            state.begin_reading(&source);
            (source, shape, name)
        };
        let mut job = Job {
            direction: Direction::Read { unchecked },
            extent,
            moves: false,
            name,
            shape,
            spans: spans.to_vec(),
            contents: Contents::new(source.version.clone(), OnceLock::new()),
            source: Some(Arc::clone(&source)),
            reading: true,
            transfers: Vec::new(),
            excluded: Vec::new(),
        };
        let known = source.checksums.get().is_some();
        let mut started = Ok(());
        for chunk in &source.version.chunks {
            let path = self.volumes[chunk.path as usize].clone();
            let gone = || Error::invalid("extent", "one of its paths is missing");
            started = started.and_then(|()| job.start_read(chunk, &path.ok_or_else(gone)?, known));
        }
        if let Err(error) = started {
            job.give_up();
            self.state.lock().end_reading(&source);
            return Err(job.failure().unwrap_or(error));
        }
        Ok(self.state.lock().ticket(job))
    }

    /// Checksums of the blocks that reads return. `None` until the contents were written or read while the tier is
    /// open.
    pub fn checksums(&self, extent: u32) -> Result<Option<Arc<[u64]>>> {
        Ok(self.state.lock().contents(extent)?.checksums.get().cloned())
    }

    /// Number of times that transfers of a path have ended, for [`Tier::wait_for_event`].
    pub fn events(&self) -> u64 {
        self.bell.events()
    }

    /// Waits until transfers have ended since [`Tier::events`] returned `seen`, at most for `timeout`. Their tickets
    /// may still be pending: a transfer that failed continues on another path.
    pub fn wait_for_event(&self, seen: u64, timeout: Option<Duration>) {
        self.bell.wait(seen, timeout);
    }

    /// Waits for the transfer of a ticket, ends the ticket, and returns the generation that was written or read. After
    /// a `Timeout` the transfer is still in flight and the ticket stays valid.
    pub fn wait(&self, ticket: u64, timeout: Option<Duration>) -> Result<u64> {
        let until = deadline_after(timeout);
        let unknown = || Error::invalid("ticket", format!("{ticket} is unknown, or was waited for already"));
        let mut state = self.state.lock();
        let driven =
            |state: &mut TierState| matches!(state.ticket_states.get(&ticket), Some(TicketState::Driven));
        state = self.changed.wait_while(state, until, driven);
        if driven(&mut state) {
            return Err(timed_out());
        }
        match state.ticket_states.get_mut(&ticket).ok_or_else(unknown)? {
            TicketState::Done(_) => match state.ticket_states.remove(&ticket) {
                Some(TicketState::Done(outcome)) => outcome,
                _ => Err(unknown()),
            },
            slot => {
                let TicketState::Idle(job) = std::mem::replace(slot, TicketState::Driven) else {
                    return Err(unknown());
                };
                drop(state);
                let outcome = self.drive(ticket, job, until)?;
                self.state.lock().ticket_states.remove(&ticket);
                outcome
            }
        }
    }

    pub(super) fn mark(&self, path: usize, health: Health, reason: &str) {
        let mut state = self.state.lock();
        if state.mark(path, health, reason) {
            let message = format!("tier path {} is now {health:?}: {reason}", state.paths[path].name);
            drop(state);
            log::write(Level::Warn, &message);
        }
    }

    /// Name of the first path that is present, for error messages about the whole tier.
    pub(super) fn some_name(&self) -> String {
        self.volumes.iter().flatten().next().map_or_else(String::new, |path| path.name())
    }

    /// Discards all changes since the last commit. `Busy` while a commit is in flight.
    pub fn rollback(&self) -> Result<()> {
        loop {
            self.finish_writes();
            let mut state = self.state.lock();
            state.between_commits()?;
            // A write that started meanwhile would install its contents after the rollback.
            if !state.extents.iter().flatten().any(|extent| extent.writing) {
                return state.rollback();
            }
        }
    }

    pub(super) fn durability(&self) -> Durability {
        self.options.durability
    }
}

fn describe(state: &TierState, number: u32, extent: &Extent) -> ExtentInfo {
    let chunks = extent.current.as_ref().map_or(&[][..], |contents| &contents.version.chunks);
    let mut blocks = vec![0; state.paths.len()];
    chunks.iter().for_each(|chunk| blocks[chunk.path as usize] += chunk.count);
    ExtentInfo {
        number,
        name: extent.name.clone(),
        streams: extent.shape.streams().to_vec(),
        generation: extent.current.as_ref().map_or(0, |contents| contents.version.generation),
        committed: extent.is_committed(),
        lost: chunks.iter().any(|chunk| state.paths[chunk.path as usize].health == Health::Missing),
        blocks,
    }
}
