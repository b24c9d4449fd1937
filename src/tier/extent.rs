//! Structure of an extent: streams are cut into blocks, and runs of blocks are stored in chunks.
//!
//! Blocks are numbered consecutively over all streams. A block belongs to one stream. On disk each block takes whole
//! pages.
#![forbid(unsafe_code)]

use crate::error::{Error, Result};
use crate::pool::transfer_buffer::TransferBuffer;
use crate::sys::memory::BASE_PAGE;

/// Alignment and unit of allocations on disk, in bytes.
pub const PAGE: u64 = BASE_PAGE as u64;
/// Bytes of the fixed part of a chunk header.
pub(super) const CHUNK_FIXED: u64 = 128;
/// Maximum number of streams in an extent.
pub const MAX_STREAMS: usize = 64;
/// Maximum length of a name, in bytes.
pub const MAX_NAME: usize = 255;

/// Size in bytes of a chunk header for `blocks` blocks: a multiple of [`PAGE`].
pub fn header_bytes(blocks: u64) -> u64 {
    (CHUNK_FIXED + 8 * blocks).next_multiple_of(PAGE)
}

/// Sizes of an extent: its streams and its block size.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shape {
    streams: Vec<u64>,
    block_bytes: u64,
    /// For each stream, the number of its first block; then the number of blocks.
    first: Vec<u32>,
}

/// Position of a block in its stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Block {
    /// Index of the stream.
    pub stream: usize,
    /// Offset in the stream, in bytes.
    pub from: u64,
    /// Length in bytes.
    pub len: u64,
}

/// Consecutive blocks that are stored contiguously in one data file, behind a header.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Chunk {
    /// Number of the path.
    pub path: u32,
    /// Offset of the header in the data file, in bytes; the blocks follow the header.
    pub offset: u64,
    /// Number of the first block.
    pub first: u32,
    /// Number of blocks, at least one.
    pub count: u32,
    /// Checksum of the chunk header.
    pub header_checksum: u64,
}

/// One version of an extent's contents, and where it is stored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Version {
    /// Generation: each write of an extent gets a higher number.
    pub generation: u64,
    /// The chunks in block order. Together they hold every block exactly once.
    pub chunks: Vec<Chunk>,
}

impl Shape {
    /// An extent with streams of these lengths, in bytes, and blocks of `block_bytes`. It may have 1 to [`MAX_STREAMS`]
    /// streams and fewer than 2^31 blocks.
    pub fn new(streams: &[u64], block_bytes: u64) -> Result<Shape> {
        if streams.is_empty() || streams.len() > MAX_STREAMS {
            let reason = format!("an extent must have 1 to {MAX_STREAMS} streams, not {}", streams.len());
            return Err(Error::invalid("streams", reason));
        }
        let too_large = || {
            Error::invalid(
                "streams",
                format!("have more than 2^31 blocks of {block_bytes} bytes; use larger blocks"),
            )
        };
        let mut first = vec![0_u32];
        for len in streams {
            let so_far = u64::from(first[first.len() - 1]);
            let next = so_far.saturating_add(len.div_ceil(block_bytes));
            first.push(u32::try_from(next).ok().filter(|n| *n < 1 << 31).ok_or_else(too_large)?);
        }
        Ok(Shape { streams: streams.to_vec(), block_bytes, first })
    }

    /// Length of each stream, in bytes.
    pub fn streams(&self) -> &[u64] {
        &self.streams
    }

    /// Bytes of a block; the last block of a stream may be shorter.
    pub fn block_bytes(&self) -> u64 {
        self.block_bytes
    }

    /// Total length of all streams, in bytes.
    pub fn bytes(&self) -> u64 {
        self.streams.iter().sum()
    }

    /// Number of blocks.
    pub fn blocks(&self) -> u32 {
        self.first[self.streams.len()]
    }

    /// The block with this number, which must be below [`Shape::blocks`].
    pub fn block(&self, number: u32) -> Block {
        let stream = self.first.partition_point(|first| *first <= number) - 1;
        let from = u64::from(number - self.first[stream]) * self.block_bytes;
        Block { stream, from, len: self.block_bytes.min(self.streams[stream] - from) }
    }

    /// Bytes on disk of blocks `first..first + count`, without the chunk header.
    pub fn stored(&self, first: u32, count: u32) -> u64 {
        self.position(first + count) - self.position(first)
    }

    /// Number of leading blocks whose size on disk is nearest to `bytes`.
    pub fn nearest(&self, bytes: u64) -> u32 {
        let (mut low, mut high) = (0, self.blocks());
        while low < high {
            let middle = low + (high - low) / 2;
            if self.position(middle + 1) <= bytes { low = middle + 1 } else { high = middle }
        }
        let next = (low + 1).min(self.blocks());
        if self.position(next).abs_diff(bytes) < self.position(low).abs_diff(bytes) { next } else { low }
    }

    /// Offset of a block if all blocks were stored one after another.
    fn position(&self, number: u32) -> u64 {
        let before = self.first.partition_point(|first| *first <= number).saturating_sub(1);
        let whole: u64 = self.streams[..before].iter().map(|len| len.next_multiple_of(PAGE)).sum();
        whole + u64::from(number - self.first[before]) * self.block_bytes
    }

    /// Number of blocks from `first` that fit into `room` bytes together with their chunk header.
    pub fn fitting(&self, first: u32, room: u64) -> u32 {
        let fits = |count: &u32| header_bytes((*count).into()) + self.stored(first, *count) <= room;
        let (mut low, mut high) = (0, self.blocks() - first);
        while low < high {
            let middle = low + (high - low).div_ceil(2);
            if fits(&middle) { low = middle } else { high = middle - 1 }
        }
        low
    }

    /// Transfers for blocks `first..first + count`: one run per stream, contiguous in the stream and on disk.
    pub fn runs(&self, first: u32, count: u32) -> Vec<Run> {
        let mut runs: Vec<Run> = Vec::new();
        for stream in 0..self.streams.len() {
            let from = first.max(self.first[stream]);
            let to = (first + count).min(self.first[stream + 1]);
            if from < to {
                let (begin, last) = (self.block(from), self.block(to - 1));
                runs.push(Run {
                    block: from,
                    stream,
                    from: begin.from,
                    len: last.from + last.len - begin.from,
                    at: self.stored(first, from - first),
                });
            }
        }
        runs
    }

    /// As [`Shape::runs`], in runs of at most `bytes` bytes each, or of one block if that is more.
    pub fn windows(&self, first: u32, count: u32, bytes: u64) -> impl Iterator<Item = Run> {
        let at_once = (bytes / self.block_bytes).clamp(1, count.max(1).into()) as u32;
        let end = first + count;
        (first..end).step_by(at_once as usize).flat_map(move |from| self.runs(from, at_once.min(end - from)))
    }

    /// Checks that there is one span per stream, with the stream's length.
    pub fn check(&self, spans: &[TransferBuffer]) -> Result<()> {
        self.check_lengths(spans, |found, len| found == len)
    }

    /// As [`Shape::check`], for a read: an empty span stands for a stream that is not read.
    pub fn check_read(&self, spans: &[TransferBuffer]) -> Result<()> {
        self.check_lengths(spans, |found, len| found == 0 || found == len)
    }

    fn check_lengths(&self, spans: &[TransferBuffer], fits: fn(u64, u64) -> bool) -> Result<()> {
        let found: Vec<u64> = spans.iter().map(|span| span.len() as u64).collect();
        let fit = found.iter().zip(&self.streams).all(|(found, len)| fits(*found, *len));
        if fit && found.len() == self.streams.len() {
            return Ok(());
        }
        let reason = format!("have {found:?} bytes, but the extent has {:?}", self.streams);
        Err(Error::invalid("streams", reason))
    }
}

/// A byte range that is contiguous in a stream and in a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    /// Number of the run's first block.
    pub block: u32,
    /// Index of the stream.
    pub stream: usize,
    /// Offset in the stream, in bytes.
    pub from: u64,
    /// Length in bytes.
    pub len: u64,
    /// Offset behind the chunk header, in bytes.
    pub at: u64,
}

impl Run {
    /// Number of blocks.
    pub fn count(&self, shape: &Shape) -> u32 {
        self.len.div_ceil(shape.block_bytes) as u32
    }
}

impl Chunk {
    /// True if it holds the block with this number.
    pub fn holds(&self, block: u32) -> bool {
        (self.first..self.first + self.count).contains(&block)
    }

    /// Bytes on disk, header included.
    pub fn stored(&self, shape: &Shape) -> u64 {
        header_bytes(self.count.into()) + shape.stored(self.first, self.count)
    }

    /// Offset of the first block in the data file.
    pub fn data(&self) -> u64 {
        self.offset + header_bytes(self.count.into())
    }

    /// End of the last byte of its blocks in the data file. Padding may follow.
    pub fn written_end(&self, shape: &Shape) -> u64 {
        let ends = shape.runs(self.first, self.count).into_iter().map(|run| run.at + run.len);
        self.data() + ends.max().unwrap_or(0)
    }

    /// Offset of block number `block` in the data file.
    pub fn block_offset(&self, shape: &Shape, block: u32) -> u64 {
        self.data() + shape.stored(self.first, block - self.first)
    }
}

impl Version {
    /// True if the chunks hold every block of `shape` exactly once, in order.
    pub fn covers(&self, shape: &Shape) -> bool {
        let mut next = 0_u32;
        for chunk in &self.chunks {
            if chunk.first != next || chunk.count == 0 || chunk.count > shape.blocks() - next {
                return false;
            }
            next += chunk.count;
        }
        next == shape.blocks()
    }

    /// True if a chunk is stored on this path.
    pub fn touches(&self, path: u32) -> bool {
        self.chunks.iter().any(|chunk| chunk.path == path)
    }
}

/// Checks a name: 1 to [`MAX_NAME`] bytes, without NUL.
pub(super) fn check_name(argument: &'static str, name: &str) -> Result<()> {
    match name.len() {
        0 => Err(Error::invalid(argument, "is empty")),
        len if len > MAX_NAME => {
            Err(Error::invalid(argument, format!("has {len} bytes, but the limit is {MAX_NAME}")))
        }
        _ if name.contains('\0') => Err(Error::invalid(argument, "contains a NUL")),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_runs_and_places_agree_for_every_cut() {
        let shape = Shape::new(&[10_000, 0, 8192, 1], 4096).unwrap();
        assert_eq!((shape.blocks(), shape.bytes()), (6, 18_193));
        assert_eq!(shape.block(2), Block { stream: 0, from: 8192, len: 1808 });
        assert_eq!(shape.block(5), Block { stream: 3, from: 0, len: 1 });
        assert_eq!(shape.stored(0, 6), 12_288 + 8192 + 4096);
        for first in 0..6 {
            for count in 1..=6 - first {
                let runs = shape.runs(first, count);
                let bytes: u64 = runs.iter().map(|run| run.len).sum();
                assert_eq!(bytes, (first..first + count).map(|n| shape.block(n).len).sum::<u64>());
                let chunk = Chunk { path: 0, offset: 4096, first, count, header_checksum: 0 };
                for run in runs {
                    assert_eq!(chunk.data() + run.at, chunk.block_offset(&shape, run.block));
                    assert!(run.at.is_multiple_of(PAGE));
                }
                let room = chunk.stored(&shape);
                assert_eq!((shape.fitting(first, room), shape.fitting(first, room - 1)), (count, count - 1));
            }
        }
    }

    #[test]
    fn a_cut_falls_between_the_blocks_that_are_nearest() {
        let shape = Shape::new(&[8192, 100, 10_000], 8192).unwrap();
        assert_eq!(
            (0..=4).map(|n| shape.stored(0, n)).collect::<Vec<_>>(),
            [0, 8192, 12_288, 20_480, 24_576]
        );
        for (bytes, blocks) in
            [(0, 0), (4096, 0), (4097, 1), (10_240, 1), (10_241, 2), (24_000, 4), (1 << 40, 4)]
        {
            assert_eq!(shape.nearest(bytes), blocks, "{bytes}");
        }
    }

    #[test]
    fn versions_that_leave_blocks_out_or_hold_them_twice_are_told() {
        let shape = Shape::new(&[40_960], 4096).unwrap();
        let version = |parts: &[(u32, u32)]| Version {
            generation: 1,
            chunks: parts
                .iter()
                .map(|(first, count)| Chunk {
                    path: 0,
                    offset: 0,
                    first: *first,
                    count: *count,
                    header_checksum: 0,
                })
                .collect(),
        };
        assert!(version(&[(0, 10)]).covers(&shape) && version(&[(0, 3), (3, 7)]).covers(&shape));
        for wrong in [&[(0, 9)][..], &[(0, 11)], &[(1, 9)], &[(0, 3), (4, 6)], &[(0, 3), (2, 8)], &[]] {
            assert!(!version(wrong).covers(&shape), "{wrong:?}");
        }
        assert!(!version(&[(0, 10), (10, 0)]).covers(&shape));
        assert!(!version(&[(0, u32::MAX)]).covers(&shape));
    }

    #[test]
    fn sizes_past_every_limit_are_errors() {
        assert!(Shape::new(&[], 4096).is_err() && Shape::new(&[0; 65], 4096).is_err());
        assert!(Shape::new(&[u64::MAX], 4096).is_err() && Shape::new(&[1 << 43, 1 << 43], 4096).is_err());
        assert_eq!(Shape::new(&[1 << 35], 1 << 20).unwrap().blocks(), 1 << 15);
        assert_eq!(Shape::new(&[0], 4096).unwrap().blocks(), 0);
    }
}
