//! Checksums of an extent's blocks, computed in parallel on the thread pool.
#![forbid(unsafe_code)]

use super::extent::Shape;
use crate::checksum;
use crate::error::Result;
use crate::pool::transfer_buffer::TransferBuffer;
use crate::sys::span::Span;
use crate::sys::{threads, try_vec};

/// At most this many bytes are summed on one thread.
const GRAIN: u64 = 2 << 20;

/// Checksums of blocks `first..first + count` of an extent whose streams are in `spans`.
pub fn of_blocks(shape: &Shape, spans: &[TransferBuffer], first: u32, count: u32) -> Result<Vec<u64>> {
    let mut checksums = try_vec::from_fn("listing checksums", count as usize, |_| 0)?;
    if u64::from(count) * shape.block_bytes() <= GRAIN {
        fill(shape, spans, first, &mut checksums);
    } else {
        let blocks = (GRAIN / shape.block_bytes()).max(1);
        let starts = (first..).step_by(blocks as usize);
        let mut parts: Vec<(&mut [u64], u32)> = checksums.chunks_mut(blocks as usize).zip(starts).collect();
        threads::each(&mut parts, |(checksums, first)| fill(shape, spans, *first, checksums))?;
    }
    Ok(checksums)
}

/// The blocks from `first` on whose bytes do not have the expected checksums, each with a message. `bytes` begins with
/// block `first`, and its blocks follow each other in one stream.
pub fn differences<'a>(
    shape: &'a Shape,
    bytes: Span,
    first: u32,
    expected: &'a [u64],
) -> impl Iterator<Item = (u32, String)> + 'a {
    (first..).zip(expected).filter_map(move |(block, expected)| {
        let from = u64::from(block - first) * shape.block_bytes();
        let part = bytes.part(from as usize, shape.block(block).len as usize);
        let found = part.with_bytes(checksum::of);
        (found != *expected).then(|| (block, difference(found, *expected)))
    })
}

/// Message about a checksum that is not the expected one.
pub fn difference(found: u64, expected: u64) -> String {
    format!("found {found:#018x} instead of {expected:#018x}")
}

fn fill(shape: &Shape, spans: &[TransferBuffer], first: u32, checksums: &mut [u64]) {
    for (number, sum) in (first..).zip(checksums) {
        let block = shape.block(number);
        let bytes = spans[block.stream].span().part(block.from as usize, block.len as usize);
        *sum = bytes.with_bytes(checksum::of);
    }
}
