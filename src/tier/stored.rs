//! Stored extents as an end of a route (see `lanes`): parts of them are read and checked, or written into new chunks.
//!
//! Invariants:
//! - A part passes on only if its chunk has the header that the version names, and every block has its checksum.
//! - New contents take effect only after every block and every header is written. After a failure the extent stays as it
//!   was.
//! - Chunks are written again, to other paths, if a path does not accept a part. That path is marked. Space that the
//!   system may still write to stays allocated.
#![forbid(unsafe_code)]

use std::collections::VecDeque;
use std::sync::Arc;

use super::blocks::{chunk_header, compare, header_checksums, may_go_on};
use super::catalog::{Reservation, Subject};
use super::extent::{Chunk, Run, header_bytes};
use super::paths::{AllocationRequest, ExtentPlacement};
use super::store::Tier;
use super::volume::Scratch;
use crate::error::{Error, Result};
use crate::pool::transfer_buffer::TransferBuffer;
use crate::sys::sync::Lock;

/// Blocks of one chunk that are read at once.
#[derive(Debug)]
pub(super) struct StoredPart {
    pub(super) chunk: Chunk,
    pub(super) run: Run,
    /// True for the first part of its chunk, with which the header of the chunk is read.
    begins: bool,
}

impl StoredPart {
    /// Runs of a chunk as parts.
    pub(super) fn all(chunk: &Chunk, runs: impl Iterator<Item = Run>) -> impl Iterator<Item = StoredPart> {
        runs.enumerate().map(|(nth, run)| StoredPart { chunk: chunk.clone(), run, begins: nth == 0 })
    }
}

/// Reads parts of stored extents, and checks them. The parts of a chunk come one after the other.
pub(super) struct StoredReader<'a> {
    tier: &'a Tier,
    /// Checksums of the whole extent; without them those in the headers are read.
    known: Option<Arc<[u64]>>,
    /// Reads of chunk headers in flight.
    headers: VecDeque<Result<(u64, Scratch)>>,
    /// The checksums of the chunk whose part was fetched last; empty if its header is damaged or cannot be read.
    checksums: Vec<u64>,
}

impl<'a> StoredReader<'a> {
    pub(super) fn new(tier: &'a Tier, known: Option<Arc<[u64]>>) -> StoredReader<'a> {
        StoredReader { tier, known, headers: VecDeque::new(), checksums: Vec::new() }
    }

    /// Starts to read a part.
    pub(super) fn fetch(
        &mut self,
        subject: &Subject,
        part: &StoredPart,
        buffer: &TransferBuffer,
    ) -> Result<u64> {
        let StoredPart { chunk, run, .. } = part;
        let volume = self.tier.volume(chunk.path as usize)?;
        if self.reads_header(part) {
            let memory = volume.scratch(header_bytes(chunk.count.into()) as usize);
            let header =
                memory.and_then(|memory| Ok((volume.read(chunk.offset, memory.transfer())?, memory)));
            self.headers.push_back(header);
        }
        volume.read(chunk.block_offset(&subject.shape, run.block), buffer.part(0, run.len as usize))
    }

    /// Waits until a part is read, and checks the header of its chunk.
    pub(super) fn fetched(
        &mut self,
        subject: &Subject,
        part: &StoredPart,
        started: Result<u64>,
    ) -> Result<()> {
        let StoredPart { chunk, run, .. } = part;
        let volume = self.tier.volume(chunk.path as usize)?;
        let header = if self.reads_header(part) { self.headers.pop_front() } else { None };
        let checksums = header.map(|header| {
            let (handle, header) = header?;
            volume.ended(Ok(handle)).map_err(|error| at(error, "the header of ", chunk.first, subject))?;
            header_checksums(volume, chunk, subject, &header, self.tier.identity.tier)
        });
        let ended = volume.ended(started).map_err(|error| at(error, "", run.block, subject));
        if let Some(checksums) = checksums {
            self.checksums.clear();
            self.checksums = checksums?;
        }
        ended
    }

    fn reads_header(&self, part: &StoredPart) -> bool {
        part.begins && self.known.is_none()
    }

    /// True if the checksums of the chunk are known whose part was fetched last.
    pub(super) fn knows_checksums(&self) -> bool {
        self.known.is_some() || !self.checksums.is_empty()
    }

    /// The checksums that the blocks of a fetched part must have.
    pub(super) fn expected(&self, StoredPart { chunk, run, .. }: &StoredPart) -> &[u64] {
        match &self.known {
            Some(all) => &all[run.block as usize..],
            None => &self.checksums[(run.block - chunk.first) as usize..],
        }
    }

    /// An error for each block of a fetched part that does not have its checksum.
    pub(super) fn check<'b>(
        &'b self,
        subject: &'b Subject,
        part: &'b StoredPart,
        buffer: &TransferBuffer,
    ) -> Result<impl Iterator<Item = Error> + 'b> {
        let StoredPart { chunk, run, .. } = part;
        let volume = self.tier.volume(chunk.path as usize)?;
        compare(volume, chunk, subject, run, buffer.span().part(0, run.len as usize), self.expected(part))
    }
}

fn at(error: Error, what: &str, block: u32, subject: &Subject) -> Error {
    error.context(format_args!("{what}block {block} of extent {:?}", subject.name))
}

/// The new chunks of an extent, while routes fill them.
pub(super) struct NewChunks<'a> {
    tier: &'a Tier,
    subject: &'a Subject,
    chunks: Vec<Chunk>,
    /// Path and first block of chunks that a path did not accept a part of.
    refused: Lock<Vec<(u32, u32, Error)>>,
}

impl NewChunks<'_> {
    /// The chunks, in block order.
    pub(super) fn chunks(&self) -> &[Chunk] {
        &self.chunks
    }

    /// Starts to write a run, which lies in one chunk.
    pub(super) fn store(&self, run: &Run, buffer: &TransferBuffer) -> Result<u64> {
        let chunk = self.chunk_of(run)?;
        let offset = chunk.block_offset(&self.subject.shape, run.block);
        self.tier.volume(chunk.path as usize)?.write(offset, buffer.part(0, run.len as usize))
    }

    /// Waits until a run is written.
    pub(super) fn stored(&self, run: &Run, started: Result<u64>) -> Result<()> {
        let chunk = self.chunk_of(run)?;
        self.accepted(chunk, self.tier.volume(chunk.path as usize)?.ended(started))
    }

    fn chunk_of(&self, run: &Run) -> Result<&Chunk> {
        let found = self.chunks.iter().find(|chunk| chunk.holds(run.block));
        found.ok_or_else(|| Error::Internal(format!("no new chunk holds block {}", run.block)))
    }

    fn write_headers(&mut self, checksums: &[u64]) -> Result<()> {
        for at in 0..self.chunks.len() {
            let volume = self.tier.volume(self.chunks[at].path as usize)?;
            let header =
                chunk_header(volume, &mut self.chunks[at], self.subject, checksums, self.tier.identity)?;
            let chunk = &self.chunks[at];
            self.accepted(chunk, volume.ended(volume.write(chunk.offset, header.transfer())))?;
        }
        Ok(())
    }

    fn accepted(&self, chunk: &Chunk, ended: Result<()>) -> Result<()> {
        ended.inspect_err(|error| self.refused.lock().push((chunk.path, chunk.first, error.clone())))
    }
}

impl Tier {
    /// Allocates space for new contents of a whole extent, which `write` fills and whose checksums it returns, and ends the
    /// reservation.
    pub(super) fn fill(
        &self,
        reserved: &Reservation,
        write: impl FnMut(&NewChunks) -> Result<Arc<[u64]>>,
    ) -> Result<()> {
        let filled = self.filled(reserved, write);
        let mut state = self.state.lock();
        let outcome = match filled {
            Ok((chunks, checksums)) => state.catalog.install(reserved, chunks, checksums).map(drop),
            Err(error) => {
                state.catalog.fail(reserved, &error);
                Err(error)
            }
        };
        drop(state);
        self.changed.notify_all();
        outcome
    }

    /// The filled chunks with the checksums of their blocks.
    fn filled(
        &self,
        reserved: &Reservation,
        mut write: impl FnMut(&NewChunks) -> Result<Arc<[u64]>>,
    ) -> Result<(Vec<Chunk>, Arc<[u64]>)> {
        let (subject, mut excluded) = (&reserved.subject, vec![false; self.volumes.len()]);
        let shape = &*subject.shape;
        loop {
            let request = AllocationRequest { shape, first: 0, count: shape.blocks(), excluded: &excluded };
            let chunks = self.allocate_chunks(request, &ExtentPlacement::Auto, reserved.home)?;
            let mut new = NewChunks { tier: self, subject, chunks, refused: Lock::default() };
            let written = write(&new).and_then(|sums| new.write_headers(&sums).map(|()| sums));
            let NewChunks { mut chunks, refused, .. } = new;
            let error = match written {
                Ok(checksums) => return Ok((chunks, checksums)),
                Err(error) => error,
            };
            let refused = refused.into_inner();
            // After a deadline the system may still write to the chunk.
            let is_stuck = |chunk: &Chunk, (path, first, error): &(u32, u32, Error)| {
                (*path, *first) == (chunk.path, chunk.first) && may_go_on(error)
            };
            chunks.retain(|chunk| !refused.iter().any(|one| is_stuck(chunk, one)));
            self.state.lock().catalog.paths_mut().free_chunks(shape, &chunks);
            if refused.is_empty() {
                return Err(error);
            }
            for (path, _, error) in refused {
                self.mark_after(path as usize, true, &error);
                excluded[path as usize] = true;
            }
        }
    }
}
