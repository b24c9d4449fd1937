//! Jobs from start to outcome, and retries of failed parts on other paths.
//!
//! Invariants:
//! - One thread at a time drives a job: the thread that waits for its ticket, or a commit.
//! - An outcome is kept until the owner of the ticket asks for it.
#![forbid(unsafe_code)]

use std::sync::{Arc, OnceLock, PoisonError};
use std::time::Instant;

use super::contents::{Contents, Writer};
use super::extent::{Chunk, Shape, Version};
use super::health::Health;
use super::place::{Found, Placement, Wanted, give_back, place};
use super::state::{Slot, State};
use super::store::Tier;
use super::transfer::{Direction, Job, verdict};
use super::waiting::timed_out;
use crate::error::{Error, IoKind, Result};
use crate::sys::span::Span;

/// A started write, which has exclusive access to its extent.
#[derive(Debug)]
pub(super) struct Begun {
    pub(super) extent: u32,
    pub(super) name: String,
    pub(super) shape: Arc<Shape>,
    pub(super) generation: u64,
    /// Path of the extent's first block.
    pub(super) home: Option<u32>,
    moves: bool,
}

impl Tier {
    /// Locks an extent for a write of `spans`, or for a move (`None`). `Busy` if the extent is being read or written,
    /// or while a commit is in flight that is not the writer itself.
    pub(super) fn begin_write(&self, number: u32, spans: Option<&[Span]>, writer: Writer) -> Result<Begun> {
        self.end_finished_reads(number);
        let mut state = self.lock();
        let (committing, next) = (state.committing, state.generation + 1);
        let extent = state.extent(number)?;
        spans.map_or(Ok(()), |spans| extent.shape.check(spans))?;
        let moved = match &writer {
            Writer::Caller => None,
            Writer::Evacuation(of) | Writer::Commit(of) => Some(of),
        };
        let replaced = |of: &Arc<Contents>| extent.current.as_ref().is_none_or(|now| !Arc::ptr_eq(now, of));
        let why = if committing && !matches!(writer, Writer::Commit(_)) {
            "a commit is under way"
        } else if extent.writing {
            "it is being written"
        } else if extent.is_read() {
            "it is being read"
        } else if moved.is_some_and(replaced) {
            "it was written or rolled back since it was read"
        } else {
            ""
        };
        if !why.is_empty() {
            return Err(Error::Busy(format!("extent {:?}: {why}", extent.name)));
        }
        extent.writing = true;
        let first = extent.current.as_ref().and_then(|contents| contents.version.chunks.first());
        let begun = Begun {
            extent: number,
            name: extent.name.clone(),
            shape: Arc::clone(&extent.shape),
            // A move keeps the generation of the contents.
            generation: moved.map_or(next, |of| of.version.generation),
            home: first.map(|chunk| chunk.path),
            moves: moved.is_some(),
        };
        state.generation = state.generation.max(begun.generation);
        Ok(begun)
    }

    /// Releases the space of reads that have ended although no caller waited for their tickets. The memory that was
    /// read is not checked here; the later wait checks it.
    fn end_finished_reads(&self, number: u32) {
        let mut state = self.lock();
        if !state.extent(number).is_ok_and(|extent| extent.is_read()) {
            return;
        }
        let reads = |slot: &Slot| matches!(slot, Slot::Idle(job) if job.extent == number && job.reading);
        let tickets: Vec<u64> =
            state.slots.iter().filter(|(_, slot)| reads(slot)).map(|(ticket, _)| *ticket).collect();
        for ticket in tickets {
            // Another thread may have waited for the ticket meanwhile.
            let Some(Slot::Idle(mut job)) = state.slots.remove(&ticket) else { continue };
            state.slots.insert(ticket, Slot::Driven);
            drop(state);
            let over = job.drive(Some(Instant::now()));
            state = self.lock();
            if let Some(source) = job.source.clone().filter(|_| over && std::mem::take(&mut job.reading)) {
                state.end_reading(&source);
            }
            state.slots.insert(ticket, Slot::Idle(job));
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Starts the transfers of a write that [`Tier::begin_write`] returned, and returns its ticket.
    pub(super) fn carry_on(
        &self,
        begun: Begun,
        spans: &[Span],
        placement: &Placement,
        sums: Option<Vec<u64>>,
    ) -> Result<u64> {
        let Begun { extent, home, moves, .. } = begun;
        let prepared = self.prepare_write(begun, spans, sums);
        let started = prepared.and_then(|job| self.start_write(job, placement, home));
        let mut state = self.lock();
        let ticket = match started {
            Ok(job) => Ok(state.ticket(job)),
            Err(error) => {
                state.write_failed(extent, moves, &error);
                Err(error)
            }
        };
        drop(state);
        // A commit may be waiting for this write, which had no ticket yet.
        self.changed.notify_all();
        ticket
    }

    fn prepare_write(&self, begun: Begun, spans: &[Span], sums: Option<Vec<u64>>) -> Result<Job> {
        let Begun { extent, name, shape, generation, moves, .. } = begun;
        let sums = match sums {
            Some(sums) if sums.len() != shape.blocks() as usize => {
                let reason = format!("{} for {} blocks", sums.len(), shape.blocks());
                return Err(Error::invalid("sums", reason));
            }
            Some(sums) => sums,
            None => super::sums::of_blocks(&shape, spans, 0, shape.blocks())?,
        };
        let version = Version { generation, chunks: Vec::new() };
        let contents = Contents::new(version, OnceLock::from(Arc::from(sums)));
        Ok(Job {
            direction: Direction::Write,
            extent,
            moves,
            name,
            shape,
            spans: spans.to_vec(),
            contents,
            source: None,
            reading: false,
            flights: Vec::new(),
            excluded: vec![false; self.paths.len()],
        })
    }

    fn start_write(&self, mut job: Job, placement: &Placement, home: Option<u32>) -> Result<Job> {
        let shape = Arc::clone(&job.shape);
        self.write_blocks(&mut job, 0, shape.blocks(), placement, home)?;
        Ok(job)
    }

    /// Allocates space for blocks, and starts to write them.
    fn write_blocks(
        &self,
        job: &mut Job,
        first: u32,
        count: u32,
        placement: &Placement,
        home: Option<u32>,
    ) -> Result<()> {
        if count == 0 {
            return Ok(());
        }
        let shape = Arc::clone(&job.shape);
        let excluded = job.excluded.clone();
        let wanted = Wanted { shape: &shape, first, count, excluded: &excluded };
        let mut chunks = self.find_places(wanted, placement, home)?;
        let mut started = Ok(());
        for chunk in &mut chunks {
            let path = self.paths[chunk.path as usize].clone();
            let gone = || Error::invalid("placement", "the path is missing");
            started = started.and_then(|()| job.start_write(chunk, &path.ok_or_else(gone)?, self.who));
        }
        job.contents.version.chunks.extend(chunks);
        job.contents.version.chunks.sort_by_key(|chunk| chunk.first);
        started.inspect_err(|_| self.abandon(job))
    }

    /// Allocates space, and extends data files if necessary.
    pub(super) fn find_places(
        &self,
        wanted: Wanted,
        placement: &Placement,
        home: Option<u32>,
    ) -> Result<Vec<Chunk>> {
        let mut refused = None;
        loop {
            // A separate statement, so that the lock is released before the match.
            let found = place(&mut self.lock(), wanted, placement, home);
            match found {
                Ok(Found::Chunks(chunks)) => return Ok(chunks),
                Ok(Found::Longer { path, end }) => refused = self.make_longer(path, end).err().or(refused),
                Err(error) if error.io_kind() == Some(IoKind::NoSpace) => {
                    return Err(refused.unwrap_or(error));
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Extends a data file. If that fails, the path is marked as full or failed. The tier's lock is free meanwhile. The
    /// stall limit bounds the wait for a device that does not answer.
    fn make_longer(&self, path: usize, end: u64) -> Result<()> {
        let gone = || Error::invalid("placement", "the path is missing");
        let files = self.paths[path].as_ref().ok_or_else(gone)?;
        let _one_at_a_time = files.growing();
        let from = self.lock().paths[path].space.end();
        if end <= from {
            return Ok(());
        }
        match files.allocate(from, end) {
            Ok(()) => {
                self.lock().paths[path].space.grew(end);
                Ok(())
            }
            Err(error) => {
                match error.is_full() {
                    true => self.lock().paths[path].space.full(),
                    false => self.mark(path, Health::Failed, &error.to_string()),
                }
                Err(error)
            }
        }
    }

    /// Drives a job, whose slot is `Driven`, to its outcome, and stores the outcome in the slot. The outer error is a
    /// timeout; the job is then back in its slot.
    pub(super) fn drive(
        &self,
        ticket: u64,
        mut job: Box<Job>,
        until: Option<Instant>,
    ) -> Result<Result<u64>> {
        loop {
            if !job.drive(until) {
                self.lock().slots.insert(ticket, Slot::Idle(job));
                self.changed.notify_all();
                return Err(timed_out());
            }
            let outcome = match job.direction {
                Direction::Read { .. } => Some(self.finish_read(&mut job)),
                Direction::Write => self.finish_write(&mut job),
            };
            if let Some(outcome) = outcome {
                self.lock().slots.insert(ticket, Slot::Done(outcome.clone()));
                self.changed.notify_all();
                return Ok(outcome);
            }
        }
    }

    fn finish_read(&self, job: &mut Job) -> Result<u64> {
        if let Some(source) = job.source.clone().filter(|_| std::mem::take(&mut job.reading)) {
            self.lock().end_reading(&source);
        }
        self.mark_failures(job);
        if let Some(error) = job.failure() {
            return Err(error);
        }
        let version = &job.contents.version;
        let sums = job.read_sums(version, self.who.tier)?;
        if let Some(source) = &job.source {
            let _ = source.sums.set(Arc::clone(&sums));
        }
        if job.direction == (Direction::Read { unchecked: false }) {
            job.check_blocks(version, &sums)?;
        }
        Ok(version.generation)
    }

    /// Ends a write. `None` if a failed part was restarted on another path.
    fn finish_write(&self, job: &mut Job) -> Option<Result<u64>> {
        self.mark_failures(job);
        let mut failed: Vec<(u32, u32, u32, Error)> = Vec::new();
        for (flight, error) in job.failures() {
            let chunk = &flight.chunk;
            if !failed.iter().any(|(first, ..)| *first == chunk.first) {
                failed.push((chunk.first, chunk.count, chunk.path, error));
            }
        }
        if failed.is_empty() {
            let chunks = std::mem::take(&mut job.contents.version.chunks);
            let version = Version { chunks, ..job.contents.version };
            let generation = version.generation;
            let contents = Arc::new(Contents::new(version, std::mem::take(&mut job.contents.sums)));
            return Some(self.lock().install(job.extent, contents, job.moves).map(|()| generation));
        }
        failed.iter().for_each(|(.., path, _)| job.excluded[*path as usize] = true);
        for (first, count, _, error) in &failed {
            self.drop_chunk(job, *first);
            if let Err(none) = self.write_blocks(job, *first, *count, &Placement::Auto, None) {
                job.drive(None);
                self.abandon(job);
                let error = with_reason(error.clone(), &none);
                self.lock().write_failed(job.extent, job.moves, &error);
                return Some(Err(error));
            }
        }
        None
    }

    /// Removes a chunk from a job, and frees its space, unless the system may still write there.
    fn drop_chunk(&self, job: &mut Job, first: u32) {
        let stuck = job.flights.iter().any(|flight| flight.chunk.first == first && flight.stuck());
        job.flights.retain(|flight| flight.chunk.first != first);
        let chunks = &mut job.contents.version.chunks;
        if let Some(at) = chunks.iter().position(|chunk| chunk.first == first) {
            let chunk = chunks.remove(at);
            if !stuck {
                give_back(&mut self.lock(), &job.shape, &[chunk]);
            }
        }
    }

    /// Waits for the transfers of a job, and removes all its chunks.
    fn abandon(&self, job: &mut Job) {
        job.drive(None);
        let firsts: Vec<u32> = job.contents.version.chunks.iter().map(|chunk| chunk.first).collect();
        firsts.into_iter().for_each(|first| self.drop_chunk(job, first));
    }

    fn mark_failures(&self, job: &Job) {
        for (flight, error) in job.failures() {
            if let Some(health) = verdict(&error, job.direction) {
                self.mark(flight.chunk.path as usize, health, &error.to_string());
            }
        }
    }

    /// Drives all writes to their outcomes; returns the first error.
    pub(super) fn finish_writes(&self) -> Option<Error> {
        let mut first = None;
        loop {
            let mut state = self.lock();
            let write = |slot: &Slot| matches!(slot, Slot::Idle(job) if job.direction == Direction::Write);
            let next = state.slots.iter().find(|(_, slot)| write(slot)).map(|(ticket, _)| *ticket);
            if let Some(ticket) = next {
                let Some(Slot::Idle(job)) = state.slots.insert(ticket, Slot::Driven) else { continue };
                drop(state);
                if let Ok(Err(error)) = self.drive(ticket, job, None) {
                    first.get_or_insert(error);
                }
            } else if state.extents.iter().flatten().any(|extent| extent.writing) {
                drop(self.changed.wait(state).unwrap_or_else(PoisonError::into_inner));
            } else {
                return first;
            }
        }
    }
}

impl State {
    pub(super) fn ticket(&mut self, job: Job) -> u64 {
        self.tickets += 1;
        self.slots.insert(self.tickets, Slot::Idle(Box::new(job)));
        self.tickets
    }
}

/// Adds to the error of a write why no other path took the data.
fn with_reason(error: Error, none: &Error) -> Error {
    match error {
        Error::Io(mut inner) => {
            let separator = if inner.detail.is_empty() { "" } else { "; " };
            inner.detail = format!("{}{separator}no other path took it: {none}", inner.detail);
            Error::Io(inner)
        }
        other => other,
    }
}
