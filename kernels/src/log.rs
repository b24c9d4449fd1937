//! The size of a log, and the header of a chunk's part of it. `record` writes the groups, `undo` reads them.
//!
//! ```text
//! log   := a chunk's part for every chunk of the tensor, each at a fixed distance from the one before
//! chunk := bytes used (8 bytes), groups
//! ```

use super::pack;
use super::walk::{CHUNK, MAX_LANES};

/// Bytes of the log of a tensor of `n` elements: room for every chunk at its worst. Only what a step writes of it is
/// ever touched, about 2 bytes per element in steady state.
pub const fn log_bytes(n: usize) -> usize {
    n / CHUNK * log_capacity(CHUNK) + log_capacity(n % CHUNK)
}

/// Bytes that the last recorded step of `n` elements used of its log.
pub fn log_used_of(log: &[u8], n: usize) -> u64 {
    log.chunks(log_capacity(CHUNK)).take(n.div_ceil(CHUNK)).map(log_used).sum()
}

/// Most bytes of the log of `n` elements, on any kernel: groups of one lane at their widest. A kernel may read a vector
/// past the end, hence the slack.
pub const fn log_capacity(n: usize) -> usize {
    if n == 0 {
        return 0;
    }
    (HEADER + n.next_multiple_of(MAX_LANES) * pack::most(1) + SLACK).next_multiple_of(LINE)
}

/// Bytes in use of the log of one chunk, or of what follows it.
pub fn log_used(log: &[u8]) -> u64 {
    log.first_chunk::<HEADER>().map_or(0, |used| u64::from_ne_bytes(*used))
}

pub(super) const HEADER: usize = size_of::<u64>();
/// Bytes of a cache line.
pub(super) const LINE: usize = 64;
/// What packing a vector may write past its own bytes, and unpacking read.
pub(super) const SLACK: usize = 64;
