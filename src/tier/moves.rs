//! Moves of extents to other paths: evacuations, and commits of data that cannot become durable where it is.
//!
//! Invariants:
//! - A move of an extent delays reads and writes of this extent, and never fails them.
//! - A move compares every block with its checksum between its read and its write. The new location of contents takes
//!   effect only after every block is written. After a failure the contents stay where they were.
#![forbid(unsafe_code)]

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use super::blocks::Job;
use super::catalog::{Contents, Subject, WriteOrigin};
use super::extent::{Chunk, Shape};
use super::lanes::{self, Buffers, Route};
use super::paths::Health;
use super::store::Tier;
use super::stored::{NewChunks, StoredPart, StoredReader};
use crate::error::{Error, Result};
use crate::log::{self, Level};
use crate::pool::transfer_buffer::TransferBuffer;
use crate::sys::try_vec;

impl Tier {
    /// Marks a path as draining, and moves all its data to other paths. The move becomes durable with the next commit.
    /// `Busy` if a commit is in flight. Waits for a commit beside writes, and for the transfers of each extent.
    pub fn evacuate(&self, path: u32) -> Result<()> {
        if path as usize >= self.volumes.len() {
            return Err(Error::invalid("number", format!("there is no path {path}")));
        }
        self.after_commit_beside().catalog.between_commits()?;
        self.mark(path as usize, Health::Draining, "it is being evacuated");
        self.extents().iter().try_for_each(|extent| self.move_off(path as usize, extent.number))
    }

    /// Moves an extent off a path that takes no new writes. A write that began before may still end there.
    fn move_off(&self, path: usize, number: u32) -> Result<()> {
        loop {
            let state = self.after_commit_beside();
            state.catalog.between_commits()?;
            let is_writing = state.catalog.is_being_written(number);
            drop(state);
            if is_writing {
                self.finish_transfer_of(number);
                continue;
            }
            if self.extent(number)?.blocks[path] == 0 {
                return Ok(());
            }
            match self.move_extent(number, WriteOrigin::Evacuation) {
                Err(Error::Busy(_)) => self.finish_transfer_of(number),
                outcome => return outcome,
            }
        }
    }

    /// Waits for the end of a transfer of an extent, if there is one.
    fn finish_transfer_of(&self, number: u32) {
        let state = self.state.lock();
        let of = |job: &Job| job.subject.extent == number && job.is_in_use();
        match state.tickets.idle(of).first().copied() {
            Some(ticket) => {
                drop(state);
                self.drive_idle(ticket);
            }
            None if state.catalog.is_being_written(number) || state.catalog.is_read(number) => {
                drop(self.changed.wait(state));
            }
            None => {}
        }
    }

    /// Copies an extent's contents to healthy paths, and installs the copy.
    pub(super) fn move_extent(&self, extent: u32, origin: fn(Arc<Contents>) -> WriteOrigin) -> Result<()> {
        let contents = self.state.lock().catalog.current(extent)?;
        let reserved = self.begin_write(extent, &origin(Arc::clone(&contents)))?;
        self.fill(&reserved, |new| self.copy(&reserved.subject, &contents, new))?;
        log::write(Level::Info, &format!("extent {:?} of a tier was moved", reserved.subject.name));
        Ok(())
    }

    /// Copies contents into new chunks, and returns the checksums of their blocks.
    fn copy(&self, subject: &Subject, contents: &Contents, new: &NewChunks) -> Result<Arc<[u64]>> {
        let (shape, known) = (&*subject.shape, contents.checksums().cloned());
        let whole = u64::from(shape.blocks().max(1)) * shape.block_bytes();
        let buffers = Buffers::gentle(shape.block_bytes()).within(whole);
        let sources = contents.version().chunks.iter();
        let parts = sources.flat_map(|from| parts(shape, from, new.chunks(), buffers.bytes));
        let checksums = try_vec::from_fn("listing checksums", shape.blocks() as usize, |_| 0)?;
        let mut route =
            Moving { tier: self, subject, reader: StoredReader::new(self, known), new, checksums };
        lanes::run(parts, buffers, &AtomicBool::new(false), &mut route)?;
        Ok(route.checksums.into())
    }
}

/// The parts of a stored chunk, each of which goes to one of the new chunks.
fn parts(shape: &Shape, from: &Chunk, new: &[Chunk], bytes: u64) -> impl Iterator<Item = StoredPart> {
    let runs = new.iter().flat_map(move |to| {
        let first = from.first.max(to.first);
        let end = (from.first + from.count).min(to.first + to.count);
        shape.windows(first, end.saturating_sub(first), bytes)
    });
    StoredPart::all(from, runs)
}

/// The route of a move, from stored chunks to new ones.
struct Moving<'a> {
    tier: &'a Tier,
    subject: &'a Subject,
    reader: StoredReader<'a>,
    new: &'a NewChunks<'a>,
    /// Those of the blocks that were read.
    checksums: Vec<u64>,
}

impl Route<StoredPart> for Moving<'_> {
    fn fetch(&mut self, part: &StoredPart, buffer: &TransferBuffer) -> Result<u64> {
        self.reader.fetch(self.subject, part, buffer)
    }

    fn fetched(&mut self, part: &StoredPart, started: Result<u64>) -> Result<()> {
        let fetched = self.reader.fetched(self.subject, part, started);
        // Damage is no fault of the path.
        fetched.inspect_err(|error| {
            if error.tier_kind().is_none() {
                self.tier.mark_after(part.chunk.path as usize, false, error);
            }
        })
    }

    fn check(&mut self, part: &StoredPart, buffer: &TransferBuffer) -> Result<()> {
        if let Some(error) = self.reader.check(self.subject, part, buffer)?.next() {
            return Err(error);
        }
        let (first, count) = (part.run.block as usize, part.run.count(&self.subject.shape) as usize);
        self.checksums[first..first + count].copy_from_slice(&self.reader.expected(part)[..count]);
        Ok(())
    }

    fn store(&mut self, part: &StoredPart, buffer: &TransferBuffer) -> Result<u64> {
        self.new.store(&part.run, buffer)
    }

    fn stored(&mut self, part: &StoredPart, started: Result<u64>) -> Result<()> {
        self.new.stored(&part.run, started)
    }
}
