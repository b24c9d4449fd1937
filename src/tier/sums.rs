//! Checksums of an extent's blocks, over the threads of the pool.
#![forbid(unsafe_code)]

use super::extent::Shape;
use crate::checksum;
use crate::error::Result;
use crate::sys::span::Span;
use crate::sys::threads;

/// Fewer bytes than this stay on one thread.
const GRAIN: u64 = 2 << 20;

/// Sums of blocks `first..first + count` of an extent whose streams lie in `spans`.
pub fn of_blocks(shape: &Shape, spans: &[Span], first: u32, count: u32) -> Result<Vec<u64>> {
    let mut sums = vec![0; count as usize];
    if u64::from(count) * shape.block_bytes() <= GRAIN {
        fill(shape, spans, first, &mut sums);
    } else {
        threads::run(|| fill_spread(shape, spans, first, &mut sums))?;
    }
    Ok(sums)
}

fn fill_spread(shape: &Shape, spans: &[Span], first: u32, sums: &mut [u64]) {
    if sums.len() as u64 * shape.block_bytes() <= GRAIN || sums.len() == 1 {
        return fill(shape, spans, first, sums);
    }
    let middle = sums.len() / 2;
    let (left, right) = sums.split_at_mut(middle);
    threads::join(
        || fill_spread(shape, spans, first, left),
        || fill_spread(shape, spans, first + middle as u32, right),
    );
}

fn fill(shape: &Shape, spans: &[Span], first: u32, sums: &mut [u64]) {
    for (number, sum) in (first..).zip(sums) {
        let block = shape.block(number);
        *sum = spans[block.stream].part(block.from as usize, block.len as usize).with_bytes(checksum::of);
    }
}
