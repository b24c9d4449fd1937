//! Moves contents between paths: off a path that is evacuated, or that failed in a commit.
//!
//! Invariants:
//! - A move uses the memory of one window, or of one block if that is larger, for extents of any size.
//! - Every block is compared with its checksum between its read and its write.
//! - The new location of contents takes effect only after every block is written. After a failure the contents stay
//!   where they were.
#![forbid(unsafe_code)]

use std::sync::{Arc, OnceLock};

use super::allocation::{AllocationRequest, ExtentPlacement, free_chunks};
use super::checksums;
use super::contents::{Contents, WriteOrigin};
use super::extent::{Chunk, Run, Shape, Version, header_bytes};
use super::format::ChunkHeader;
use super::health::Health;
use super::inspect::WINDOW;
use super::jobs::StartedWrite;
use super::store::Tier;
use super::transfer::{Direction, check_header, may_go_on, verdict};
use super::volume::{Scratch, Volume};
use crate::error::{Error, Result};
use crate::log::{self, Level};
use crate::pool::transfer_buffer::TransferBuffer;

/// Reason why blocks could not be copied.
enum Stopped {
    /// The source cannot be read, or is damaged.
    Reading(Error),
    /// Path `path` did not accept the blocks. If `stuck`, the system may still write to the chunk whose first block is
    /// `first`.
    Writing { path: usize, first: u32, stuck: bool, error: Error },
}

/// Contents that a move copies.
#[derive(Clone, Copy)]
struct Source<'a> {
    extent: u32,
    name: &'a str,
    shape: &'a Shape,
    version: &'a Version,
}

impl Tier {
    /// Marks a path as draining, and moves all its data to other paths. The move becomes durable with the next commit.
    /// `Busy` if a commit is in flight.
    pub fn evacuate(&self, path: u32) -> Result<()> {
        if path as usize >= self.volumes.len() {
            return Err(Error::invalid("number", format!("there is no path {path}")));
        }
        self.state.lock().between_commits()?;
        self.mark(path as usize, Health::Draining, "it is being evacuated");
        let extents = self.extents();
        let there = |extent: &&super::store::ExtentInfo| extent.blocks[path as usize] > 0;
        extents
            .iter()
            .filter(there)
            .try_for_each(|extent| self.move_extent(extent.number, WriteOrigin::Evacuation))
    }

    /// Copies an extent's contents to healthy paths, and installs the copy.
    pub(super) fn move_extent(&self, extent: u32, writer: fn(Arc<Contents>) -> WriteOrigin) -> Result<()> {
        let contents = self.state.lock().contents(extent)?;
        let begun = self.begin_write(extent, None, writer(Arc::clone(&contents)))?;
        let moved = self.copy_contents(&begun, &contents);
        let mut state = self.state.lock();
        let outcome = match moved {
            Ok(moved) => state.install(extent, Arc::new(moved), true),
            Err(error) => {
                state.write_failed(extent, true, &error);
                Err(error)
            }
        };
        drop(state);
        self.changed.notify_all();
        outcome.inspect(|()| log::write(Level::Info, &format!("extent {:?} of a tier was moved", begun.name)))
    }

    fn copy_contents(&self, begun: &StartedWrite, contents: &Contents) -> Result<Contents> {
        let (shape, version) = (&*begun.shape, &contents.version);
        let source = Source { extent: begun.extent, name: &begun.name, shape, version };
        let checksums = match contents.checksums.get() {
            Some(checksums) => Arc::clone(checksums),
            None => self.stored_checksums(source)?,
        };
        let mut excluded = vec![false; self.volumes.len()];
        loop {
            let request = AllocationRequest { shape, first: 0, count: shape.blocks(), excluded: &excluded };
            let mut chunks = self.allocate_chunks(request, &ExtentPlacement::Auto, begun.home)?;
            match chunks.iter_mut().try_for_each(|chunk| self.copy_chunk(source, chunk, &checksums)) {
                Ok(()) => {
                    let version = Version { generation: begun.generation, chunks };
                    return Ok(Contents::new(version, OnceLock::from(checksums)));
                }
                Err(Stopped::Reading(error)) => {
                    free_chunks(&mut self.state.lock(), shape, &chunks);
                    return Err(error);
                }
                Err(Stopped::Writing { path, first, stuck, error }) => {
                    // After a deadline the system may still write to the chunk, so its space stays allocated.
                    chunks.retain(|chunk| !(stuck && chunk.first == first));
                    free_chunks(&mut self.state.lock(), shape, &chunks);
                    self.mark_after(path, Direction::Write, &error);
                    excluded[path] = true;
                }
            }
        }
    }

    fn stored_checksums(&self, source: Source) -> Result<Arc<[u64]>> {
        let mut checksums = Vec::new();
        let too_many = |_| Error::LimitReached("out of memory for the checksums of an extent".to_string());
        checksums.try_reserve_exact(source.shape.blocks() as usize).map_err(too_many)?;
        for chunk in &source.version.chunks {
            let path = self.there(chunk.path as usize)?;
            let header = path.scratch(header_bytes(chunk.count.into()) as usize)?;
            transfer(path.read(chunk.offset, header.transfer()), path)
                .inspect_err(|error| self.mark_after(chunk.path as usize, READING, error))?;
            let parsed = header.span().with_bytes(|bytes| {
                let (generation, tier) = (source.version.generation, self.identity.tier);
                check_header(bytes, chunk, generation, tier, source.extent, source.shape)
            });
            let header = parsed
                .map_err(|message| path.corrupt_block(source.name, (chunk.first, chunk.offset), message))?;
            checksums.extend(header.checksums);
        }
        Ok(checksums.into())
    }

    /// Writes one chunk of the copy, header and blocks; sets the checksum of its header.
    fn copy_chunk(
        &self,
        source: Source,
        chunk: &mut Chunk,
        checksums: &[u64],
    ) -> std::result::Result<(), Stopped> {
        let shape = source.shape;
        let (path, end) = (chunk.path as usize, chunk.first + chunk.count);
        let to = self.there(path).map_err(Stopped::Reading)?;
        let failed =
            |error: Error, first: u32| Stopped::Writing { path, first, stuck: may_go_on(&error), error };
        let header = ChunkHeader {
            tier: self.identity.tier,
            session: self.identity.session,
            extent: source.extent,
            path: chunk.path,
            generation: source.version.generation,
            first: chunk.first,
            offset: chunk.offset,
            block_bytes: shape.block_bytes(),
            checksums: checksums[chunk.first as usize..end as usize].to_vec(),
        };
        let (bytes, sum) = header.encode();
        chunk.header_checksum = sum;
        let header = to.scratch(bytes.len()).map_err(Stopped::Reading)?;
        header.span().write(&bytes);
        transfer(to.write(chunk.offset, header.transfer()), to)
            .map_err(|error| failed(error, chunk.first))?;
        let at_once = (WINDOW / shape.block_bytes()).clamp(1, chunk.count.into()) as u32;
        let window = (u64::from(at_once) * shape.block_bytes()) as usize;
        let window = Scratch::new(window).map_err(Stopped::Reading)?;
        for first in (chunk.first..end).step_by(at_once as usize) {
            for run in shape.runs(first, at_once.min(end - first)) {
                let buffer = window.transfer().part(0, run.len as usize);
                self.fetch_run(source, run, &buffer, checksums).map_err(Stopped::Reading)?;
                transfer(to.write(chunk.block_offset(shape, run.block), buffer), to)
                    .map_err(|error| failed(error, chunk.first))?;
            }
        }
        Ok(())
    }

    /// Reads the blocks of a run from their current location, and checks them.
    fn fetch_run(&self, source: Source, run: Run, to: &TransferBuffer, checksums: &[u64]) -> Result<()> {
        let shape = source.shape;
        let end = run.block + run.len.div_ceil(shape.block_bytes()) as u32;
        for chunk in &source.version.chunks {
            let (first, last) = (run.block.max(chunk.first), end.min(chunk.first + chunk.count));
            if first >= last {
                continue;
            }
            let path = self.there(chunk.path as usize)?;
            for part in shape.runs(first, last - first) {
                let into = to.part((part.from - run.from) as usize, part.len as usize);
                transfer(path.read(chunk.block_offset(shape, part.block), into), path)
                    .inspect_err(|error| self.mark_after(chunk.path as usize, READING, error))?;
            }
            let from = (u64::from(first - run.block) * shape.block_bytes()) as usize;
            let part = to.span().part(from, to.len() - from);
            let expected = &checksums[first as usize..last as usize];
            if let Some((block, message)) = checksums::differences(shape, part, first, expected).next() {
                let place = (block, chunk.block_offset(shape, block));
                return Err(path.corrupt_block(source.name, place, message));
            }
        }
        Ok(())
    }

    fn there(&self, path: usize) -> Result<&Arc<Volume>> {
        self.volumes[path].as_ref().ok_or_else(|| Error::invalid("path", format!("path {path} is missing")))
    }

    fn mark_after(&self, path: usize, direction: Direction, error: &Error) {
        if let Some(health) = verdict(error, direction) {
            self.mark(path, health, &error.to_string());
        }
    }
}

const READING: Direction = Direction::Read { unchecked: false };

/// Waits for a started transfer.
fn transfer(begun: Result<u64>, path: &Volume) -> Result<()> {
    path.wait(begun?, None).map(|_| ())
}
