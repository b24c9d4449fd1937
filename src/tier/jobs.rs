//! Reads and writes of extents, from the call to the outcome.
//!
//! Invariants:
//! - One thread at a time drives a job: the thread that waits for its ticket, or a commit.
//! - An outcome is kept until the owner of the ticket asks for it. A panic is an outcome too: an error with its message.
//! - A chunk whose write failed is written to another path before the write succeeds. The path that failed is marked.
#![forbid(unsafe_code)]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::blocks::{Direction, Job, checksums_of, verdict};
use super::catalog::{Held, Reservation, Subject, WriteOrigin};
use super::extent::{Block, Chunk, Shape};
use super::paths::{Allocated, AllocationRequest, ExtentPlacement, Health};
use super::storage::timed_out;
use super::store::{TicketState, Tier, TierState};
use crate::error::{Error, IoKind, Result};
use crate::pool::transfer_buffer::TransferBuffer;
use crate::sys::sync::{Guard, deadline_after};

impl Tier {
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
        let shape = self.shape(extent)?;
        placement.check(self.volumes.len(), shape.blocks())?;
        shape.check(spans)?;
        let reserved = self.begin_write(extent, &WriteOrigin::Caller)?;
        self.start_write(reserved, spans, placement, checksums)
    }

    /// Reserves an extent for a write or a move.
    pub(super) fn begin_write(&self, number: u32, origin: &WriteOrigin) -> Result<Reservation> {
        self.complete_opening()?;
        self.end_finished_reads(number);
        self.after_move(number).catalog.begin_write(number, origin)
    }

    /// The state of the tier at a moment when the extent is not being moved.
    pub(super) fn after_move(&self, number: u32) -> Guard<'_, TierState> {
        self.changed.wait_while(self.state.lock(), None, |state| state.catalog.is_being_moved(number))
    }

    /// Starts the transfers of a write that [`Tier::begin_write`] returned, and returns its ticket.
    pub(super) fn start_write(
        &self,
        reserved: Reservation,
        spans: &[TransferBuffer],
        placement: &ExtentPlacement,
        checksums: Option<Vec<u64>>,
    ) -> Result<u64> {
        let (subject, home) = (reserved.subject.clone(), reserved.home);
        let started = self.known_checksums(&subject, spans, checksums).and_then(|checksums| {
            let (reserved, excluded) = (reserved.clone(), vec![false; self.volumes.len()]);
            let direction = Direction::Write { reserved, checksums, chunks: Vec::new(), excluded };
            let blocks = subject.shape.blocks();
            let mut job = Job::new(subject, direction, spans);
            self.write_blocks(&mut job, (0, blocks), placement, home)?;
            Ok(job)
        });
        let mut state = self.state.lock();
        let ticket = match started {
            Ok(job) => Ok(state.tickets.add(job)),
            Err(error) => {
                state.catalog.fail(&reserved, &error);
                Err(error)
            }
        };
        drop(state);
        // A commit may be waiting for this write, which had no ticket yet.
        self.changed.notify_all();
        ticket
    }

    fn known_checksums(
        &self,
        subject: &Subject,
        spans: &[TransferBuffer],
        checksums: Option<Vec<u64>>,
    ) -> Result<Arc<[u64]>> {
        let blocks = subject.shape.blocks();
        let Some(checksums) = checksums else {
            let bytes =
                |block: Block| spans[block.stream].span().part(block.from as usize, block.len as usize);
            return Ok(checksums_of(&subject.shape, 0, blocks, &bytes)?.into());
        };
        match checksums.len() == blocks as usize {
            true => Ok(checksums.into()),
            false => {
                let reason = format!("there are {}, but the extent has {blocks} blocks", checksums.len());
                Err(Error::invalid("checksums", reason))
            }
        }
    }

    /// Allocates space for blocks (first and count), and starts to write them.
    fn write_blocks(
        &self,
        job: &mut Job,
        (first, count): (u32, u32),
        placement: &ExtentPlacement,
        home: Option<u32>,
    ) -> Result<()> {
        let Direction::Write { excluded, checksums, .. } = &job.direction else { return Ok(()) };
        if count == 0 {
            return Ok(());
        }
        let (shape, checksums) = (Arc::clone(&job.subject.shape), Arc::clone(checksums));
        let request = AllocationRequest { shape: &shape, first, count, excluded };
        let mut new = self.allocate_chunks(request, placement, home)?;
        let started = new.iter_mut().try_for_each(|chunk| {
            let volume = self.volume(chunk.path as usize)?;
            job.start_write(chunk, volume, &checksums, self.identity)
        });
        if let Direction::Write { chunks, .. } = &mut job.direction {
            chunks.extend(new);
            chunks.sort_by_key(|chunk| chunk.first);
        }
        started.inspect_err(|_| self.abandon(job))
    }

    /// Allocates space, and extends data files if necessary. A file system that was full is asked again if no path has
    /// room.
    pub(super) fn allocate_chunks(
        &self,
        request: AllocationRequest,
        placement: &ExtentPlacement,
        home: Option<u32>,
    ) -> Result<Vec<Chunk>> {
        let (mut refused, mut asked) = (None, false);
        loop {
            // A separate statement, so that the lock is released before the match.
            let found = self.state.lock().catalog.paths_mut().allocate(request, placement, home);
            match found {
                Ok(Allocated::Chunks(chunks)) => return Ok(chunks),
                Ok(Allocated::Grow { path, end }) => refused = self.grow_file(path, end).err().or(refused),
                Err(error) if error.io_kind() == Some(IoKind::NoSpace) => {
                    let retry = || self.state.lock().catalog.paths_mut().retry_full();
                    let retried = refused.is_none() && !asked && retry();
                    if !retried {
                        return Err(refused.unwrap_or(error));
                    }
                    asked = true;
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Extends a data file. If that fails, the path is marked as full or failed. The tier's lock is free meanwhile. The
    /// I/O timeout bounds the wait for a device that does not answer.
    fn grow_file(&self, path: usize, end: u64) -> Result<()> {
        let volume = self.volume(path)?;
        let _one_at_a_time = volume.growing();
        let from = self.state.lock().catalog.paths().get(path).space().end();
        if end <= from {
            return Ok(());
        }
        match volume.allocate(from, end) {
            Ok(()) => {
                self.state.lock().catalog.paths_mut().grew(path, end);
                Ok(())
            }
            Err(error) => {
                match error.is_full() {
                    true => self.state.lock().catalog.paths_mut().full(path),
                    false => self.mark(path, Health::Failed, &error.to_string()),
                }
                Err(error)
            }
        }
    }

    /// Starts to read an extent into one span per stream, and returns a ticket. A stream with an empty span is not
    /// read. The read succeeds only if every block matches its checksum.
    pub fn read(&self, extent: u32, spans: &[TransferBuffer]) -> Result<u64> {
        self.read_known(extent, None, spans)
    }

    /// As [`Tier::read`], but only of the extent with this shape from [`Tier::shape`]. If it was removed it does not exist,
    /// also if another one has its number.
    pub fn read_known(
        &self,
        extent: u32,
        known: Option<&Arc<Shape>>,
        spans: &[TransferBuffer],
    ) -> Result<u64> {
        let begun =
            self.after_move(extent).catalog.begin_read(extent, known, |shape| shape.check_read(spans));
        let Held { subject, contents } = begun?;
        let source = Arc::clone(&contents);
        let mut job = Job::new(subject, Direction::Read { source, held: true }, spans);
        let known = contents.checksums().is_some();
        let started = contents.version().chunks.iter().try_for_each(|chunk| {
            let volume = self.volume(chunk.path as usize)?;
            job.start_read(chunk, volume, known)
        });
        if let Err(error) = started {
            job.drive(None);
            self.state.lock().catalog.end_read(&contents);
            return Err(job.failure().unwrap_or(error));
        }
        Ok(self.state.lock().tickets.add(job))
    }

    /// Waits for the transfer of a ticket, ends the ticket, and returns the generation that was written or read. After
    /// a `Timeout` the transfer is still in flight and the ticket stays valid.
    pub fn wait(&self, ticket: u64, timeout: Option<Duration>) -> Result<u64> {
        let until = deadline_after(timeout);
        let state = self.state.lock();
        let mut state = self.changed.wait_while(state, until, |state| state.tickets.is_driven(ticket));
        if state.tickets.is_driven(ticket) {
            state.tickets.ask(ticket);
            return Err(timed_out());
        }
        if let Some(outcome) = state.tickets.outcome(ticket) {
            return outcome;
        }
        let unknown = || Error::invalid("ticket", format!("{ticket} is unknown, or was waited for already"));
        let job = state.tickets.take(ticket).ok_or_else(unknown)?;
        drop(state);
        let outcome = self.drive(ticket, job, until)?;
        self.state.lock().tickets.outcome(ticket);
        outcome
    }

    /// Drives all writes to their outcomes; returns the first error.
    pub(super) fn finish_writes(&self) -> Option<Error> {
        let mut first = None;
        loop {
            let state = self.state.lock();
            let idle = state.tickets.idle(Job::is_write);
            if !idle.is_empty() {
                drop(state);
                for ticket in idle {
                    first = first.or(self.drive_idle(ticket));
                }
            } else if state.catalog.is_writing() {
                drop(self.changed.wait(state));
            } else {
                return first;
            }
        }
    }

    /// Drives the job of a ticket to its outcome, unless another thread does. Returns the error.
    pub(super) fn drive_idle(&self, ticket: u64) -> Option<Error> {
        let job = self.state.lock().tickets.take(ticket)?;
        self.drive(ticket, job, None).ok()?.err()
    }

    /// Drives a job, whose ticket is `Driven`, to its outcome, and stores the outcome in the ticket. The outer error is
    /// a timeout; the job is then back in its ticket.
    pub(super) fn drive(
        &self,
        ticket: u64,
        mut job: Box<Job>,
        until: Option<Instant>,
    ) -> Result<Result<u64>> {
        match self.caught(&mut job, |job| self.drive_on(job, until)) {
            Ok(None) => {
                self.put_back(ticket, TicketState::Idle(job));
                Err(timed_out())
            }
            Ok(Some(outcome)) | Err(outcome) => {
                self.put_back(ticket, TicketState::Done(outcome.clone()));
                Ok(outcome)
            }
        }
    }

    /// The outcome of a job; `None` if `until` comes first.
    fn drive_on(&self, job: &mut Job, until: Option<Instant>) -> Option<Result<u64>> {
        while job.drive(until) {
            let outcome = if job.is_write() { self.finish_write(job) } else { Some(self.finish_read(job)) };
            if outcome.is_some() {
                return outcome;
            }
        }
        None
    }

    /// Calls `work`. After a panic the job has ended, with the outcome that is returned as the error.
    fn caught<R>(
        &self,
        job: &mut Job,
        work: impl FnOnce(&mut Job) -> R,
    ) -> std::result::Result<R, Result<u64>> {
        catch_unwind(AssertUnwindSafe(|| work(job))).map_err(|panic| {
            let error = Error::of_panic(&*panic);
            self.end_read(job);
            if let Direction::Write { reserved, .. } = &job.direction {
                self.state.lock().catalog.fail(reserved, &error);
            }
            Err(error)
        })
    }

    fn put_back(&self, ticket: u64, settled: TicketState) {
        let asked = self.state.lock().tickets.put_back(ticket, settled);
        self.changed.notify_all();
        if asked {
            // The transfer's own event came before the outcome.
            self.bell.ring();
        }
    }

    fn finish_read(&self, job: &mut Job) -> Result<u64> {
        self.end_read(job);
        self.mark_failures(job);
        if let Some(error) = job.failure() {
            return Err(error);
        }
        if let Direction::Read { source, .. } = &job.direction {
            let checksums = job.read_checksums(source, self.identity.tier)?;
            source.learn(&checksums);
            job.check_blocks(&checksums)?;
        }
        Ok(job.subject.generation)
    }

    /// Ends the hold of a read on its contents.
    fn end_read(&self, job: &mut Job) {
        if let Direction::Read { source, held, .. } = &mut job.direction
            && std::mem::take(held)
        {
            self.state.lock().catalog.end_read(source);
        }
    }

    /// Releases the space of reads that have ended although no caller waited for their tickets. The memory that was
    /// read is not checked here; the later wait checks it.
    fn end_finished_reads(&self, number: u32) {
        let mut state = self.state.lock();
        if !state.catalog.is_read(number) {
            return;
        }
        let reads = |job: &Job| {
            job.subject.extent == number && matches!(job.direction, Direction::Read { held: true, .. })
        };
        for ticket in state.tickets.idle(reads) {
            // Another thread may have waited for the ticket meanwhile.
            let Some(mut job) = state.tickets.take(ticket) else { continue };
            drop(state);
            let ended = self.caught(&mut job, |job| {
                if job.drive(Some(Instant::now())) {
                    self.end_read(job);
                }
            });
            state = self.state.lock();
            state.tickets.put_back(ticket, ended.map_or_else(TicketState::Done, |()| TicketState::Idle(job)));
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Ends a write. `None` if a failed part was restarted on another path.
    fn finish_write(&self, job: &mut Job) -> Option<Result<u64>> {
        self.mark_failures(job);
        let mut failed: Vec<(Chunk, Error)> = Vec::new();
        for (transfer, error) in job.failures() {
            if !failed.iter().any(|(chunk, _)| chunk.first == transfer.chunk.first) {
                failed.push((transfer.chunk.clone(), error));
            }
        }
        if failed.is_empty() {
            let Direction::Write { reserved, checksums, chunks, .. } = &mut job.direction else {
                return None;
            };
            let (chunks, checksums) = (std::mem::take(chunks), Arc::clone(checksums));
            return Some(self.state.lock().catalog.install(reserved, chunks, checksums));
        }
        if let Some((_, error)) = failed.iter().find(|(_, error)| error.is_fenced()) {
            // No other path is asked: another process may commit this tier from now on.
            return Some(Err(self.fail_write(job, error.clone())));
        }
        if let Direction::Write { excluded, .. } = &mut job.direction {
            failed.iter().for_each(|(chunk, _)| excluded[chunk.path as usize] = true);
        }
        for (chunk, error) in failed {
            self.drop_chunk(job, chunk.first);
            let blocks = (chunk.first, chunk.count);
            if let Err(none) = self.write_blocks(job, blocks, &ExtentPlacement::Auto, None) {
                let error = error.context(format_args!("no other path accepted the data: {none}"));
                return Some(Err(self.fail_write(job, error)));
            }
        }
        None
    }

    fn fail_write(&self, job: &mut Job, error: Error) -> Error {
        self.abandon(job);
        if let Direction::Write { reserved, .. } = &job.direction {
            self.state.lock().catalog.fail(reserved, &error);
        }
        error
    }

    /// Ends the transfers of a job, and removes all its chunks.
    fn abandon(&self, job: &mut Job) {
        job.drive(None);
        let Direction::Write { chunks, .. } = &job.direction else { return };
        let firsts: Vec<u32> = chunks.iter().map(|chunk| chunk.first).collect();
        firsts.into_iter().for_each(|first| self.drop_chunk(job, first));
    }

    /// Removes a chunk from a job, and frees its space, unless the system may still write there.
    fn drop_chunk(&self, job: &mut Job, first: u32) {
        let stuck = job.forget_chunk(first);
        let Direction::Write { chunks, .. } = &mut job.direction else { return };
        let Some(at) = chunks.iter().position(|chunk| chunk.first == first) else { return };
        let chunk = chunks.remove(at);
        if !stuck {
            self.state.lock().catalog.paths_mut().free_chunks(&job.subject.shape, &[chunk]);
        }
    }

    fn mark_failures(&self, job: &Job) {
        for (transfer, error) in job.failures() {
            self.mark_after(transfer.chunk.path as usize, job.is_write(), &error);
        }
    }

    /// Marks a path after a failed transfer.
    pub(super) fn mark_after(&self, path: usize, is_write: bool, error: &Error) {
        if let Some(health) = verdict(error, is_write) {
            self.mark(path, health, &error.to_string());
        }
    }
}
