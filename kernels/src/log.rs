//! The size of an undo log, and the header of each chunk in it. `record` writes the groups, `undo` reads them.
//!
//! ```text
//! log   := chunk*                          one per chunk of the tensor, at multiples of log_capacity(CHUNK) bytes
//! chunk := bytes used (8 bytes), group*
//! ```
//!
//! With the highest bit of the header the chunk holds old values in place of groups (see `kept`).

use super::chunk_loop::{CHUNK, MAX_LANES};
use super::pack;

/// Bytes of the log of a tensor of `n` elements, enough for every chunk at its maximal size. A step touches only the
/// bytes that it writes, about 2 bytes per element in steady state.
pub const fn log_bytes(n: usize) -> usize {
    n / CHUNK * log_capacity(CHUNK) + log_capacity(n % CHUNK)
}

/// Bytes of `log` that the last recorded step of `n` elements used.
pub fn log_used_of(log: &[u8], n: usize) -> u64 {
    log.chunks(log_capacity(CHUNK)).take(n.div_ceil(CHUNK)).map(log_used).sum()
}

/// Maximal bytes of the log of `n` elements (one chunk) on any kernel. The maximum has one-lane groups at 32 bits per
/// residual. `SLACK` is included because a kernel may access one vector past the end.
const fn log_capacity(n: usize) -> usize {
    if n == 0 {
        return 0;
    }
    (HEADER + n.next_multiple_of(MAX_LANES) * pack::most(1) + SLACK).next_multiple_of(LINE)
}

/// Bytes in use of the log of one chunk, from its header at the start of `log`.
pub fn log_used(log: &[u8]) -> u64 {
    header(log) & !VALUES
}

/// True if the log of one chunk holds old values: the next step needs as many bytes.
pub fn log_has_values(log: &[u8]) -> bool {
    header(log) & VALUES != 0
}

fn header(log: &[u8]) -> u64 {
    log.first_chunk::<HEADER>().map_or(0, |header| u64::from_ne_bytes(*header))
}

/// In a header: the chunk holds old values.
pub(super) const VALUES: u64 = 1 << 63;

pub(super) const HEADER: usize = size_of::<u64>();
/// Bytes of a cache line.
pub(super) const LINE: usize = 64;
/// Bytes past the end of a packed vector that packing may write and unpacking may read.
pub(super) const SLACK: usize = 64;
