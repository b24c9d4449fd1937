//! Jobs from start to outcome, and retries of failed parts on other paths.
//!
//! Invariants:
//! - One thread at a time drives a job: the thread that waits for its ticket, or a commit.
//! - An outcome is kept until the owner of the ticket asks for it.
#![forbid(unsafe_code)]

use std::sync::{Arc, OnceLock};
use std::time::Instant;

use super::allocation::{Allocated, AllocationRequest, ExtentPlacement, allocate, free_chunks};
use super::contents::{Contents, WriteOrigin};
use super::extent::{Chunk, Shape, Version};
use super::health::Health;
use super::state::{TicketState, TierState};
use super::storage::timed_out;
use super::store::Tier;
use super::transfer::{Direction, Job, verdict};
use crate::error::{Error, IoKind, Result};
use crate::pool::transfer_buffer::TransferBuffer;

/// A started write, which has exclusive access to its extent.
#[derive(Debug)]
pub(super) struct StartedWrite {
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
    pub(super) fn begin_write(
        &self,
        number: u32,
        spans: Option<&[TransferBuffer]>,
        writer: WriteOrigin,
    ) -> Result<StartedWrite> {
        self.complete_opening()?;
        self.end_finished_reads(number);
        let mut state = self.state.lock();
        let (committing, next) = (state.committing, state.generation + 1);
        let extent = state.extent(number)?;
        spans.map_or(Ok(()), |spans| extent.shape.check(spans))?;
        let moved = match &writer {
            WriteOrigin::Caller => None,
            WriteOrigin::Evacuation(of) | WriteOrigin::Commit(of) => Some(of),
        };
        let replaced = |of: &Arc<Contents>| extent.current.as_ref().is_none_or(|now| !Arc::ptr_eq(now, of));
        let why = if committing && !matches!(writer, WriteOrigin::Commit(_)) {
            "a commit is in progress"
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
        let begun = StartedWrite {
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
        let mut state = self.state.lock();
        if !state.extent(number).is_ok_and(|extent| extent.is_read()) {
            return;
        }
        let reads = |slot: &TicketState| matches!(slot, TicketState::Idle(job) if job.extent == number && job.reading);
        let tickets: Vec<u64> =
            state.ticket_states.iter().filter(|(_, slot)| reads(slot)).map(|(ticket, _)| *ticket).collect();
        for ticket in tickets {
            // Another thread may have waited for the ticket meanwhile.
            let Some(TicketState::Idle(mut job)) = state.ticket_states.remove(&ticket) else { continue };
            state.ticket_states.insert(ticket, TicketState::Driven);
            drop(state);
            let over = job.drive(Some(Instant::now()));
            state = self.state.lock();
            if let Some(source) = job.source.clone().filter(|_| over && std::mem::take(&mut job.reading)) {
                state.end_reading(&source);
            }
            state.ticket_states.insert(ticket, TicketState::Idle(job));
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Starts the transfers of a write that [`Tier::begin_write`] returned, and returns its ticket.
    pub(super) fn start_write(
        &self,
        begun: StartedWrite,
        spans: &[TransferBuffer],
        placement: &ExtentPlacement,
        checksums: Option<Vec<u64>>,
    ) -> Result<u64> {
        let StartedWrite { extent, home, moves, .. } = begun;
        let prepared = self.prepare_write(begun, spans, checksums);
        let started = prepared.and_then(|job| self.start_blocks(job, placement, home));
        let mut state = self.state.lock();
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

    fn prepare_write(
        &self,
        begun: StartedWrite,
        spans: &[TransferBuffer],
        checksums: Option<Vec<u64>>,
    ) -> Result<Job> {
        let StartedWrite { extent, name, shape, generation, moves, .. } = begun;
        let checksums = match checksums {
            Some(checksums) if checksums.len() != shape.blocks() as usize => {
                let reason =
                    format!("there are {}, but the extent has {} blocks", checksums.len(), shape.blocks());
                return Err(Error::invalid("checksums", reason));
            }
            Some(checksums) => checksums,
            None => super::checksums::of_blocks(&shape, spans, 0, shape.blocks())?,
        };
        let version = Version { generation, chunks: Vec::new() };
        let contents = Contents::new(version, OnceLock::from(Arc::from(checksums)));
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
            transfers: Vec::new(),
            excluded: vec![false; self.volumes.len()],
        })
    }

    fn start_blocks(&self, mut job: Job, placement: &ExtentPlacement, home: Option<u32>) -> Result<Job> {
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
        placement: &ExtentPlacement,
        home: Option<u32>,
    ) -> Result<()> {
        if count == 0 {
            return Ok(());
        }
        let shape = Arc::clone(&job.shape);
        let excluded = job.excluded.clone();
        let request = AllocationRequest { shape: &shape, first, count, excluded: &excluded };
        let mut chunks = self.allocate_chunks(request, placement, home)?;
        let mut started = Ok(());
        for chunk in &mut chunks {
            let path = self.volumes[chunk.path as usize].clone();
            let gone = || Error::invalid("placement", "the path is missing");
            started = started.and_then(|()| job.start_write(chunk, &path.ok_or_else(gone)?, self.identity));
        }
        job.contents.version.chunks.extend(chunks);
        job.contents.version.chunks.sort_by_key(|chunk| chunk.first);
        started.inspect_err(|_| self.abandon(job))
    }

    /// Allocates space, and extends data files if necessary. A file system that was full is asked again if no path has room.
    pub(super) fn allocate_chunks(
        &self,
        request: AllocationRequest,
        placement: &ExtentPlacement,
        home: Option<u32>,
    ) -> Result<Vec<Chunk>> {
        let (mut refused, mut asked) = (None, false);
        loop {
            // A separate statement, so that the lock is released before the match.
            let found = allocate(&mut self.state.lock(), request, placement, home);
            match found {
                Ok(Allocated::Chunks(chunks)) => return Ok(chunks),
                Ok(Allocated::Grow { path, end }) => refused = self.grow_file(path, end).err().or(refused),
                Err(error) if error.io_kind() == Some(IoKind::NoSpace) => {
                    let retried = refused.is_none() && !asked && self.retry_full_paths();
                    if !retried {
                        return Err(refused.unwrap_or(error));
                    }
                    asked = true;
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Returns true if the file system of a path was full, and the path's file may grow again.
    fn retry_full_paths(&self) -> bool {
        self.state.lock().paths.iter_mut().map(|path| path.space.retry()).filter(|full| *full).count() > 0
    }

    /// Extends a data file. If that fails, the path is marked as full or failed. The tier's lock is free meanwhile. The
    /// I/O timeout bounds the wait for a device that does not answer.
    fn grow_file(&self, path: usize, end: u64) -> Result<()> {
        let gone = || Error::invalid("placement", "the path is missing");
        let files = self.volumes[path].as_ref().ok_or_else(gone)?;
        let _one_at_a_time = files.growing();
        let from = self.state.lock().paths[path].space.end();
        if end <= from {
            return Ok(());
        }
        match files.allocate(from, end) {
            Ok(()) => {
                self.state.lock().paths[path].space.grew(end);
                Ok(())
            }
            Err(error) => {
                match error.is_full() {
                    true => self.state.lock().paths[path].space.full(),
                    false => self.mark(path, Health::Failed, &error.to_string()),
                }
                Err(error)
            }
        }
    }

    /// Drives a job, whose ticket is `Driven`, to its outcome, and stores the outcome in the ticket. The outer error is
    /// a timeout; the job is then back in its ticket.
    pub(super) fn drive(
        &self,
        ticket: u64,
        mut job: Box<Job>,
        until: Option<Instant>,
    ) -> Result<Result<u64>> {
        loop {
            if !job.drive(until) {
                self.state.lock().ticket_states.insert(ticket, TicketState::Idle(job));
                self.changed.notify_all();
                return Err(timed_out());
            }
            let outcome = match job.direction {
                Direction::Read { .. } => Some(self.finish_read(&mut job)),
                Direction::Write => self.finish_write(&mut job),
            };
            if let Some(outcome) = outcome {
                self.state.lock().ticket_states.insert(ticket, TicketState::Done(outcome.clone()));
                self.changed.notify_all();
                return Ok(outcome);
            }
        }
    }

    fn finish_read(&self, job: &mut Job) -> Result<u64> {
        if let Some(source) = job.source.clone().filter(|_| std::mem::take(&mut job.reading)) {
            self.state.lock().end_reading(&source);
        }
        self.mark_failures(job);
        if let Some(error) = job.failure() {
            return Err(error);
        }
        let version = &job.contents.version;
        let checksums = job.read_checksums(version, self.identity.tier)?;
        if let Some(source) = &job.source {
            let _ = source.checksums.set(Arc::clone(&checksums));
        }
        if job.direction == (Direction::Read { unchecked: false }) {
            job.check_blocks(version, &checksums)?;
        }
        Ok(version.generation)
    }

    /// Ends a write. `None` if a failed part was restarted on another path.
    fn finish_write(&self, job: &mut Job) -> Option<Result<u64>> {
        self.mark_failures(job);
        let mut failed: Vec<(u32, u32, u32, Error)> = Vec::new();
        for (transfer, error) in job.failures() {
            let chunk = &transfer.chunk;
            if !failed.iter().any(|(first, ..)| *first == chunk.first) {
                failed.push((chunk.first, chunk.count, chunk.path, error));
            }
        }
        if failed.is_empty() {
            let chunks = std::mem::take(&mut job.contents.version.chunks);
            let version = Version { chunks, ..job.contents.version };
            let generation = version.generation;
            let contents = Arc::new(Contents::new(version, std::mem::take(&mut job.contents.checksums)));
            return Some(self.state.lock().install(job.extent, contents, job.moves).map(|()| generation));
        }
        if let Some((.., error)) = failed.iter().find(|(.., error)| error.is_fenced()) {
            // No other path is asked: another process may commit this tier from now on.
            let error = error.clone();
            self.abandon(job);
            self.state.lock().write_failed(job.extent, job.moves, &error);
            return Some(Err(error));
        }
        failed.iter().for_each(|(.., path, _)| job.excluded[*path as usize] = true);
        for (first, count, _, error) in &failed {
            self.drop_chunk(job, *first);
            if let Err(none) = self.write_blocks(job, *first, *count, &ExtentPlacement::Auto, None) {
                self.abandon(job);
                let error = error.clone().context(format_args!("no other path accepted the data: {none}"));
                self.state.lock().write_failed(job.extent, job.moves, &error);
                return Some(Err(error));
            }
        }
        None
    }

    /// Removes a chunk from a job, and frees its space, unless the system may still write there.
    fn drop_chunk(&self, job: &mut Job, first: u32) {
        let stuck = job.transfers.iter().any(|transfer| transfer.chunk.first == first && transfer.stuck());
        job.transfers.retain(|transfer| transfer.chunk.first != first);
        let chunks = &mut job.contents.version.chunks;
        if let Some(at) = chunks.iter().position(|chunk| chunk.first == first) {
            let chunk = chunks.remove(at);
            if !stuck {
                free_chunks(&mut self.state.lock(), &job.shape, &[chunk]);
            }
        }
    }

    /// Ends the transfers of a job, and removes all its chunks.
    fn abandon(&self, job: &mut Job) {
        job.give_up();
        let firsts: Vec<u32> = job.contents.version.chunks.iter().map(|chunk| chunk.first).collect();
        firsts.into_iter().for_each(|first| self.drop_chunk(job, first));
    }

    fn mark_failures(&self, job: &Job) {
        for (transfer, error) in job.failures() {
            if let Some(health) = verdict(&error, job.direction) {
                self.mark(transfer.chunk.path as usize, health, &error.to_string());
            }
        }
    }

    /// Drives all writes to their outcomes; returns the first error.
    pub(super) fn finish_writes(&self) -> Option<Error> {
        let mut first = None;
        loop {
            let mut state = self.state.lock();
            let write = |slot: &TicketState| matches!(slot, TicketState::Idle(job) if job.direction == Direction::Write);
            let next = state.ticket_states.iter().find(|(_, slot)| write(slot)).map(|(ticket, _)| *ticket);
            if let Some(ticket) = next {
                let Some(TicketState::Idle(job)) = state.ticket_states.insert(ticket, TicketState::Driven)
                else {
                    continue;
                };
                drop(state);
                if let Ok(Err(error)) = self.drive(ticket, job, None) {
                    first.get_or_insert(error);
                }
            } else if state.extents.iter().flatten().any(|extent| extent.writing) {
                drop(self.changed.wait(state));
            } else {
                return first;
            }
        }
    }
}

impl TierState {
    pub(super) fn ticket(&mut self, job: Job) -> u64 {
        self.tickets += 1;
        self.ticket_states.insert(self.tickets, TicketState::Idle(Box::new(job)));
        self.tickets
    }
}
