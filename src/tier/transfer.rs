//! Transfers of extent reads and writes in flight.
//!
//! Invariants:
//! - A write never touches the space of a committed version, nor space that a stuck write may still reach.
//! - A chunk whose write failed is written to another path before the write succeeds. The path that failed is marked.
//! - A checked read succeeds only if its bytes match the checksums of the last write.
#![forbid(unsafe_code)]

use std::sync::Arc;
use std::time::Instant;

use super::contents::Contents;
use super::extent::{Chunk, Run, Shape, Version, header_bytes};
use super::format::ChunkHeader;
use super::health::Health;
use super::volume::{Scratch, Volume};
use crate::error::{Error, IoKind, Result};
use crate::pool::transfer_buffer::TransferBuffer;

/// Direction of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Direction {
    Read {
        /// True if the caller checks the blocks itself.
        unchecked: bool,
    },
    Write,
}

/// One read or write of an extent.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) direction: Direction,
    pub(super) extent: u32,
    /// True for a write that moves existing contents.
    pub(super) moves: bool,
    pub(super) name: String,
    pub(super) shape: Arc<Shape>,
    pub(super) spans: Vec<TransferBuffer>,
    pub(super) contents: Contents,
    /// Contents that a read reads from.
    pub(super) source: Option<Arc<Contents>>,
    /// True while the job counts as a reader of `source`.
    pub(super) reading: bool,
    pub(super) transfers: Vec<Transfer>,
    pub(super) excluded: Vec<bool>,
}

/// One transfer of a job.
#[derive(Debug)]
pub(super) struct Transfer {
    /// Chunk that the transfer belongs to.
    pub(super) chunk: Chunk,
    /// Blocks that are transferred; `None` for the header.
    pub(super) run: Option<Run>,
    pub(super) path: Arc<Volume>,
    pub(super) handle: Result<u64>,
    pub(super) outcome: Option<Result<()>>,
    header: Option<Scratch>,
}

/// Tier and session that chunk headers name.
#[derive(Debug, Clone, Copy)]
pub(super) struct TierIdentity {
    pub(super) tier: u128,
    pub(super) session: u64,
}

impl Job {
    /// Starts the writes of a chunk whose space is allocated; sets the checksum of its header.
    pub(super) fn start_write(
        &mut self,
        chunk: &mut Chunk,
        path: &Arc<Volume>,
        identity: TierIdentity,
    ) -> Result<()> {
        let checksums = self.contents.checksums.get().map_or(&[][..], |checksums| checksums);
        let header = ChunkHeader {
            tier: identity.tier,
            session: identity.session,
            extent: self.extent,
            path: chunk.path,
            generation: self.contents.version.generation,
            first: chunk.first,
            offset: chunk.offset,
            block_bytes: self.shape.block_bytes(),
            checksums: checksums[chunk.first as usize..(chunk.first + chunk.count) as usize].to_vec(),
        };
        let (bytes, sum) = header.encode();
        chunk.header_checksum = sum;
        let header = path.scratch(bytes.len())?;
        header.span().write(&bytes);
        let handle = path.write(chunk.offset, header.transfer());
        self.transfers.push(Transfer::new(chunk, None, path, handle, Some(header)));
        for run in self.shape.runs(chunk.first, chunk.count) {
            let span = self.spans[run.stream].part(run.from as usize, run.len as usize);
            let handle = path.write(chunk.data() + run.at, span);
            self.transfers.push(Transfer::new(chunk, Some(run), path, handle, None));
        }
        Ok(())
    }

    /// Starts the reads of a chunk; also of its header unless the checksums are `known`. A stream with an empty span is
    /// skipped.
    pub(super) fn start_read(&mut self, chunk: &Chunk, path: &Arc<Volume>, known: bool) -> Result<()> {
        if !known {
            let header = path.scratch(header_bytes(chunk.count.into()) as usize)?;
            let handle = path.read(chunk.offset, header.transfer());
            self.transfers.push(Transfer::new(chunk, None, path, handle, Some(header)));
        }
        for run in self.shape.runs(chunk.first, chunk.count) {
            let Some(span) = self.spans.get(run.stream).filter(|span| !span.is_empty()) else { continue };
            let handle = path.read(chunk.data() + run.at, span.part(run.from as usize, run.len as usize));
            self.transfers.push(Transfer::new(chunk, Some(run), path, handle, None));
        }
        Ok(())
    }

    /// Waits until every transfer has ended; false if `until` comes first.
    pub(super) fn drive(&mut self, until: Option<Instant>) -> bool {
        for transfer in self.transfers.iter_mut().filter(|transfer| transfer.outcome.is_none()) {
            let outcome = match &transfer.handle {
                Err(error) => Err(error.clone()),
                Ok(handle) => {
                    let left = until.map(|until| until.saturating_duration_since(Instant::now()));
                    match transfer.path.wait(*handle, left) {
                        Err(error) if error.io_kind() == Some(IoKind::Timeout) => return false,
                        other => other.map(|_| ()),
                    }
                }
            };
            transfer.outcome = Some(outcome);
        }
        true
    }

    /// Ends a job that will not succeed: transfers that are held at a gate never begin, and all others have ended after
    /// the call. The thread that opens the gates may be this one.
    pub(super) fn give_up(&mut self) {
        self.transfers
            .retain(|transfer| !transfer.handle.as_ref().is_ok_and(|handle| transfer.path.withdraw(*handle)));
        self.drive(None);
    }

    /// Failed transfers of a finished job, in the order of their start.
    pub(super) fn failures(&self) -> impl Iterator<Item = (&Transfer, Error)> {
        self.transfers.iter().filter_map(|transfer| match &transfer.outcome {
            Some(Err(error)) => Some((transfer, transfer.explain(error.clone(), &self.name, &self.shape))),
            _ => None,
        })
    }

    /// Error of a finished job, if it failed. An error that leaves the caller's memory in use takes precedence.
    pub(super) fn failure(&self) -> Option<Error> {
        let stuck = self.failures().find(|(transfer, _)| transfer.stuck());
        stuck.or_else(|| self.failures().next()).map(|(_, error)| error)
    }

    /// Checksums of the whole extent: known already, or from the headers that were read.
    pub(super) fn read_checksums(&self, version: &Version, tier: u128) -> Result<Arc<[u64]>> {
        if let Some(checksums) = self.source.as_ref().and_then(|source| source.checksums.get()) {
            return Ok(Arc::clone(checksums));
        }
        let mut checksums = Vec::with_capacity(self.shape.blocks() as usize);
        for chunk in &version.chunks {
            let header =
                self.transfers.iter().find(|transfer| transfer.run.is_none() && transfer.chunk == *chunk);
            let missing = || Error::invalid("extent", "the header of a chunk was not read");
            let transfer = header.ok_or_else(missing)?;
            let bytes = transfer.header.as_ref().map_or_else(Vec::new, |header| header.span().to_vec());
            let header = check_header(&bytes, chunk, version.generation, tier, self.extent, &self.shape);
            let corrupt =
                |message| transfer.path.corrupt_block(&self.name, (chunk.first, chunk.offset), message);
            checksums.extend(header.map_err(corrupt)?.checksums);
        }
        Ok(checksums.into())
    }

    /// Compares the blocks that were read with their checksums.
    pub(super) fn check_blocks(&self, version: &Version, checksums: &[u64]) -> Result<()> {
        for transfer in &self.transfers {
            let Some(run) = transfer.run else { continue };
            let count = run.len.div_ceil(self.shape.block_bytes()) as u32;
            let found = super::checksums::of_blocks(&self.shape, &self.spans, run.block, count)?;
            let expected = &checksums[run.block as usize..];
            if let Some(at) = found.iter().zip(expected).position(|(found, expected)| found != expected) {
                let block = run.block + at as u32;
                let offset = transfer.chunk.block_offset(&self.shape, block);
                let message = super::checksums::difference(found[at], expected[at]);
                let message = format!("{message}, generation {}", version.generation);
                return Err(transfer.path.corrupt_block(&self.name, (block, offset), message));
            }
        }
        Ok(())
    }
}

/// Parses a chunk header, and checks that it is the one that `chunk` names.
pub(super) fn check_header(
    bytes: &[u8],
    chunk: &Chunk,
    generation: u64,
    tier: u128,
    extent: u32,
    shape: &Shape,
) -> std::result::Result<ChunkHeader, String> {
    let (header, sum) =
        ChunkHeader::parse(bytes).map_err(|message| format!("the header of the chunk: {message}"))?;
    let whose = (header.tier, header.extent, header.generation, header.path, header.offset);
    if whose != (tier, extent, generation, chunk.path, chunk.offset) {
        let (other, found) = (header.tier != tier, header.generation);
        return Err(match other {
            true => "the header of the chunk belongs to another tier".to_string(),
            false => format!(
                "the header of the chunk is of extent {} generation {found}, path {} offset {}; generation \
                 {generation} was expected",
                header.extent, header.path, header.offset
            ),
        });
    }
    let fits = header.first == chunk.first
        && header.checksums.len() == chunk.count as usize
        && header.block_bytes == shape.block_bytes();
    match fits && sum == chunk.header_checksum {
        true => Ok(header),
        false => Err("the header of the chunk is not the committed one".to_string()),
    }
}

impl Transfer {
    fn new(
        chunk: &Chunk,
        run: Option<Run>,
        path: &Arc<Volume>,
        handle: Result<u64>,
        header: Option<Scratch>,
    ) -> Transfer {
        let chunk = chunk.clone();
        Transfer { chunk, run, path: Arc::clone(path), handle, outcome: None, header }
    }

    /// True if the system may still access the caller's memory or the disk: the deadline passed, or the engine failed.
    pub(super) fn stuck(&self) -> bool {
        matches!((&self.handle, &self.outcome), (Ok(_), Some(Err(error))) if may_go_on(error))
    }

    /// Adds extent and block to an error, which has path and offset already.
    fn explain(&self, error: Error, name: &str, shape: &Shape) -> Error {
        let Error::Io(inner) = &error else { return error };
        let place = match self.run {
            None => "the header of a chunk".to_string(),
            Some(run) => {
                let into = inner.offset.saturating_sub(self.chunk.data() + run.at) / shape.block_bytes();
                let last = run.len.div_ceil(shape.block_bytes()) - 1;
                format!("block {}", u64::from(run.block) + into.min(last))
            }
        };
        error.context(format_args!("extent {name:?}, {place}"))
    }
}

/// True if a transfer that began and failed with this error may still access memory and disk: its deadline passed, or
/// the engine failed.
pub(super) fn may_go_on(error: &Error) -> bool {
    error.io_kind() == Some(IoKind::Deadline) || matches!(error, Error::System { .. })
}

/// Health of the path after a transfer error. `None` if the path is only full, another process claimed it, or the
/// caller's memory is invalid (`EFAULT`).
pub(super) fn verdict(error: &Error, direction: Direction) -> Option<Health> {
    let no_memory = matches!(error, Error::Io(inner) if inner.errno == libc::EFAULT);
    // Of a path that another process claimed nothing is known but that this process may not write to it.
    if no_memory || error.is_full() || error.is_fenced() {
        return None;
    }
    match (error.io_kind(), direction) {
        (Some(IoKind::Deadline | IoKind::PathFailed), _) | (_, Direction::Write) => Some(Health::Failed),
        _ => Some(Health::Draining),
    }
}
