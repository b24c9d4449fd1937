//! Blocks between memory and volumes: the transfers of a read or write, checksums of blocks, headers of chunks.
//!
//! Invariants:
//! - A write never touches the space of a committed version, nor space that a stuck write may still reach.
//! - A checked read succeeds only if its bytes match the checksums of the last write.
#![forbid(unsafe_code)]

use std::sync::Arc;
use std::time::Instant;

use super::catalog::{Contents, Reservation, Subject};
use super::extent::{Block, Chunk, Run, Shape, header_bytes};
use super::format::ChunkHeader;
use super::paths::Health;
use super::volume::{Scratch, Volume};
use crate::checksum;
use crate::error::{Error, IoKind, Result};
use crate::pool::transfer_buffer::TransferBuffer;
use crate::sys::span::Span;
use crate::sys::{threads, try_vec};

/// At most this many bytes are summed on one thread.
const GRAIN: u64 = 2 << 20;

/// Tier and session that chunk headers name.
#[derive(Debug, Clone, Copy)]
pub(super) struct TierIdentity {
    pub(super) tier: u128,
    pub(super) session: u64,
}

/// One read or write of an extent.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) subject: Subject,
    pub(super) direction: Direction,
    pub(super) spans: Vec<TransferBuffer>,
    transfers: Vec<Transfer>,
}

/// What a job does.
#[derive(Debug)]
pub(super) enum Direction {
    /// Reads these contents. `held` while the job counts as a reader.
    Read { source: Arc<Contents>, held: bool },
    /// Writes blocks with these checksums into these chunks, but not to the excluded paths.
    Write { reserved: Reservation, checksums: Arc<[u64]>, chunks: Vec<Chunk>, excluded: Vec<bool> },
}

/// One transfer of a job.
#[derive(Debug)]
pub(super) struct Transfer {
    /// Chunk that the transfer belongs to.
    pub(super) chunk: Chunk,
    /// Blocks that are transferred; `None` for the header.
    run: Option<Run>,
    volume: Arc<Volume>,
    handle: Result<u64>,
    outcome: Option<Result<()>>,
    header: Option<Scratch>,
}

impl Job {
    pub(super) fn new(subject: Subject, direction: Direction, spans: &[TransferBuffer]) -> Job {
        Job { subject, direction, spans: spans.to_vec(), transfers: Vec::new() }
    }

    pub(super) fn is_write(&self) -> bool {
        matches!(self.direction, Direction::Write { .. })
    }

    /// True for a write, and for a read that holds its contents.
    pub(super) fn is_in_use(&self) -> bool {
        matches!(self.direction, Direction::Write { .. } | Direction::Read { held: true, .. })
    }

    /// Starts the writes of a chunk whose space is allocated; sets the checksum of its header.
    pub(super) fn start_write(
        &mut self,
        chunk: &mut Chunk,
        volume: &Arc<Volume>,
        checksums: &[u64],
        identity: TierIdentity,
    ) -> Result<()> {
        let header = chunk_header(volume, chunk, &self.subject, checksums, identity)?;
        let handle = volume.write(chunk.offset, header.transfer());
        self.start(chunk, None, volume, handle, Some(header));
        let shape = Arc::clone(&self.subject.shape);
        for run in shape.runs(chunk.first, chunk.count) {
            let span = self.spans[run.stream].part(run.from as usize, run.len as usize);
            let handle = volume.write(chunk.data() + run.at, span);
            self.start(chunk, Some(run), volume, handle, None);
        }
        Ok(())
    }

    /// Starts the reads of a chunk; also of its header unless the checksums are `known`. A stream with an empty span is
    /// skipped.
    pub(super) fn start_read(&mut self, chunk: &Chunk, volume: &Arc<Volume>, known: bool) -> Result<()> {
        if !known {
            let header = volume.scratch(header_bytes(chunk.count.into()) as usize)?;
            let handle = volume.read(chunk.offset, header.transfer());
            self.start(chunk, None, volume, handle, Some(header));
        }
        let shape = Arc::clone(&self.subject.shape);
        for run in shape.runs(chunk.first, chunk.count) {
            let Some(span) = self.spans.get(run.stream).filter(|span| !span.is_empty()) else { continue };
            let span = span.part(run.from as usize, run.len as usize);
            let handle = volume.read(chunk.data() + run.at, span);
            self.start(chunk, Some(run), volume, handle, None);
        }
        Ok(())
    }

    fn start(
        &mut self,
        chunk: &Chunk,
        run: Option<Run>,
        volume: &Arc<Volume>,
        handle: Result<u64>,
        header: Option<Scratch>,
    ) {
        let (chunk, volume) = (chunk.clone(), Arc::clone(volume));
        self.transfers.push(Transfer { chunk, run, volume, handle, outcome: None, header });
    }

    /// Waits until every transfer has ended; false if `until` comes first.
    pub(super) fn drive(&mut self, until: Option<Instant>) -> bool {
        for transfer in self.transfers.iter_mut().filter(|transfer| transfer.outcome.is_none()) {
            let outcome = match &transfer.handle {
                Err(error) => Err(error.clone()),
                Ok(handle) => {
                    let left = until.map(|until| until.saturating_duration_since(Instant::now()));
                    match transfer.volume.wait(*handle, left) {
                        Err(error) if error.io_kind() == Some(IoKind::Timeout) => return false,
                        other => other.map(|_| ()),
                    }
                }
            };
            transfer.outcome = Some(outcome);
        }
        true
    }

    /// Failed transfers of a finished job, in the order of their start.
    pub(super) fn failures(&self) -> impl Iterator<Item = (&Transfer, Error)> {
        self.transfers.iter().filter_map(|transfer| match &transfer.outcome {
            Some(Err(error)) => Some((transfer, transfer.explain(error.clone(), &self.subject))),
            _ => None,
        })
    }

    /// Error of a finished job, if it failed. An error that leaves the caller's memory in use takes precedence.
    pub(super) fn failure(&self) -> Option<Error> {
        let stuck = self.failures().find(|(transfer, _)| transfer.stuck());
        stuck.or_else(|| self.failures().next()).map(|(_, error)| error)
    }

    /// Removes the transfers of the chunk that begins with block `first`. True if the system may still write there.
    pub(super) fn forget_chunk(&mut self, first: u32) -> bool {
        let stuck = self.transfers.iter().any(|transfer| transfer.chunk.first == first && transfer.stuck());
        self.transfers.retain(|transfer| transfer.chunk.first != first);
        stuck
    }

    /// Checksums of the whole extent: known already, or from the headers that were read.
    pub(super) fn read_checksums(&self, source: &Contents, tier: u128) -> Result<Arc<[u64]>> {
        if let Some(checksums) = source.checksums() {
            return Ok(Arc::clone(checksums));
        }
        let mut checksums = Vec::with_capacity(self.subject.shape.blocks() as usize);
        for chunk in &source.version().chunks {
            let mut headers = self.transfers.iter().filter(|one| one.chunk == *chunk);
            let header = headers.find_map(|one| Some((&one.volume, one.header.as_ref()?)));
            let missing = || Error::invalid("extent", "the header of a chunk was not read");
            let (volume, header) = header.ok_or_else(missing)?;
            checksums.extend(header_checksums(volume, chunk, &self.subject, header, tier)?);
        }
        Ok(checksums.into())
    }

    /// Compares the blocks that were read with their checksums.
    pub(super) fn check_blocks(&self, checksums: &[u64]) -> Result<()> {
        for Transfer { chunk, run, volume, .. } in &self.transfers {
            let Some(run) = run else { continue };
            let bytes = self.spans[run.stream].span().part(run.from as usize, run.len as usize);
            let expected = &checksums[run.block as usize..];
            if let Some(error) = compare(volume, chunk, &self.subject, run, bytes, expected)?.next() {
                return Err(error);
            }
        }
        Ok(())
    }
}

impl Transfer {
    /// True if the system may still access the caller's memory or the disk: the deadline passed, or the engine failed.
    fn stuck(&self) -> bool {
        matches!((&self.handle, &self.outcome), (Ok(_), Some(Err(error))) if may_go_on(error))
    }

    /// Adds extent and block to an error, which has path and offset already.
    fn explain(&self, error: Error, subject: &Subject) -> Error {
        let Error::Io(inner) = &error else { return error };
        let place = match self.run {
            None => "the header of a chunk".to_string(),
            Some(run) => {
                let block_bytes = subject.shape.block_bytes();
                let into = inner.offset.saturating_sub(self.chunk.data() + run.at) / block_bytes;
                format!("block {}", u64::from(run.block) + into.min(u64::from(run.count(&subject.shape)) - 1))
            }
        };
        error.context(format_args!("extent {:?}, {place}", subject.name))
    }
}

/// True if a transfer that began and failed with this error may still access memory and disk: its deadline passed, or
/// the engine failed.
pub(super) fn may_go_on(error: &Error) -> bool {
    error.io_kind() == Some(IoKind::Deadline) || matches!(error, Error::System { .. })
}

/// Health of a path after a failed transfer. `None` if the path is only full, another process claimed it, or the
/// caller's memory is invalid (`EFAULT`).
pub(super) fn verdict(error: &Error, is_write: bool) -> Option<Health> {
    let no_memory = matches!(error, Error::Io(inner) if inner.errno == libc::EFAULT);
    // Of a path that another process claimed nothing is known but that this process may not write to it.
    if no_memory || error.is_full() || error.is_fenced() {
        return None;
    }
    Some(if is_write || is_hung(error) { Health::Failed } else { Health::Draining })
}

/// True if the path did not respond.
pub(super) fn is_hung(error: &Error) -> bool {
    matches!(error.io_kind(), Some(IoKind::Deadline | IoKind::PathFailed))
}

/// An error for each block of a run whose bytes do not have the expected checksum. `expected` begins with the run.
pub(super) fn compare<'a>(
    volume: &'a Volume,
    chunk: &'a Chunk,
    subject: &'a Subject,
    run: &'a Run,
    bytes: Span,
    expected: &'a [u64],
) -> Result<impl Iterator<Item = Error> + 'a> {
    let part = |block: Block| bytes.part((block.from - run.from) as usize, block.len as usize);
    let found = checksums_of(&subject.shape, run.block, run.count(&subject.shape), &part)?;
    let differing =
        (run.block..).zip(found.into_iter().zip(expected)).filter(|(_, (found, is))| found != *is);
    Ok(differing.map(move |(block, (found, expected))| {
        let message =
            format!("found {found:#018x} instead of {expected:#018x}, generation {}", subject.generation);
        volume.corrupt_block(&subject.name, (block, chunk.block_offset(&subject.shape, block)), message)
    }))
}

/// Checksums of blocks `first..first + count`, computed in parallel. `bytes` returns the bytes of a block.
pub(super) fn checksums_of(
    shape: &Shape,
    first: u32,
    count: u32,
    bytes: &(dyn Fn(Block) -> Span + Sync),
) -> Result<Vec<u64>> {
    let fill = |checksums: &mut [u64], first: u32| {
        for (number, sum) in (first..).zip(checksums) {
            *sum = bytes(shape.block(number)).with_bytes(checksum::of);
        }
    };
    let mut checksums = try_vec::from_fn("listing checksums", count as usize, |_| 0)?;
    if u64::from(count) * shape.block_bytes() <= GRAIN {
        fill(&mut checksums, first);
    } else {
        let blocks = (GRAIN / shape.block_bytes()).max(1) as usize;
        let starts = (first..).step_by(blocks);
        let mut parts: Vec<(&mut [u64], u32)> = checksums.chunks_mut(blocks).zip(starts).collect();
        threads::each(&mut parts, |(checksums, first)| fill(checksums, *first))?;
    }
    Ok(checksums)
}

/// The stored header of a chunk that is about to be written; sets the checksum of the header. `checksums` are those of
/// the whole extent.
pub(super) fn chunk_header(
    volume: &Volume,
    chunk: &mut Chunk,
    subject: &Subject,
    checksums: &[u64],
    identity: TierIdentity,
) -> Result<Scratch> {
    let header = ChunkHeader {
        tier: identity.tier,
        session: identity.session,
        extent: subject.extent,
        path: chunk.path,
        generation: subject.generation,
        first: chunk.first,
        offset: chunk.offset,
        block_bytes: subject.shape.block_bytes(),
        checksums: checksums[chunk.first as usize..(chunk.first + chunk.count) as usize].to_vec(),
    };
    let (bytes, sum) = header.encode();
    chunk.header_checksum = sum;
    let header = volume.scratch(bytes.len())?;
    header.span().write(&bytes);
    Ok(header)
}

/// The checksums in the header of a chunk, which must be the one that `chunk` names.
pub(super) fn header_checksums(
    volume: &Volume,
    chunk: &Chunk,
    subject: &Subject,
    header: &Scratch,
    tier: u128,
) -> Result<Vec<u64>> {
    let parsed = header.span().with_bytes(|bytes| check_header(bytes, chunk, subject, tier));
    parsed
        .map(|header| header.checksums)
        .map_err(|message| volume.corrupt_block(&subject.name, (chunk.first, chunk.offset), message))
}

/// Parses a chunk header, and checks that it is the one that `chunk` names.
pub(super) fn check_header(
    bytes: &[u8],
    chunk: &Chunk,
    subject: &Subject,
    tier: u128,
) -> std::result::Result<ChunkHeader, String> {
    let (header, sum) =
        ChunkHeader::parse(bytes).map_err(|message| format!("the header of the chunk: {message}"))?;
    let whose = (header.tier, header.extent, header.generation, header.path, header.offset);
    if whose != (tier, subject.extent, subject.generation, chunk.path, chunk.offset) {
        if header.tier != tier {
            return Err("the header of the chunk belongs to another tier".to_string());
        }
        return Err(format!(
            "the header of the chunk is of extent {} generation {}, path {} offset {}; generation {} was expected",
            header.extent, header.generation, header.path, header.offset, subject.generation
        ));
    }
    let fits = header.first == chunk.first
        && header.checksums.len() == chunk.count as usize
        && header.block_bytes == subject.shape.block_bytes();
    match fits && sum == chunk.header_checksum {
        true => Ok(header),
        false => Err("the header of the chunk is not the committed one".to_string()),
    }
}
