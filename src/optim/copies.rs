//! Copies of many pieces of memory at once, by all threads.
//!
//! Invariant: copies of at most [`PIECE`] bytes together wake no worker.
#![forbid(unsafe_code)]

use crate::error::Result;
use crate::sys::{threads, try_vec};

/// Bytes that one thread copies at once.
const PIECE: usize = 256 << 10;

/// Copies the bytes of each second slice to the first one, which has as many.
pub fn all(pieces: &mut [(&mut [u8], &[u8])]) -> Result<()> {
    let copy = |(to, from): &mut (&mut [u8], &[u8])| to.copy_from_slice(from);
    match pieces.iter().try_fold(0, |sum: usize, (_, from)| sum.checked_add(from.len())) {
        Some(..=PIECE) => pieces.iter_mut().for_each(copy),
        _ => {
            let count = pieces.iter().map(|(_, from)| from.len().div_ceil(PIECE)).sum();
            let mut parts = try_vec::with_capacity("listing the pieces of memory", count)?;
            for (to, from) in pieces {
                parts.extend(to.chunks_mut(PIECE).zip(from.chunks(PIECE)));
            }
            threads::each(&mut parts, copy)?;
        }
    }
    Ok(())
}
