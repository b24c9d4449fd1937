//! Checksums of many pieces of memory at once, by all threads. A caller finds with them which tensors have changed.
//!
//! Invariants:
//! - A checksum depends on the bytes alone: memory is cut at fixed distances from its start, never by threads.
//! - Work of at most one piece wakes no worker.
#![forbid(unsafe_code)]

use crate::checksum;
use crate::error::Result;
use crate::sys::{threads, try_vec};

/// Bytes of a piece of memory that is cut.
const PIECE: usize = 256 << 10;

/// The checksum of each memory: XXH3-64 of its bytes, or for more than [`PIECE`] bytes that of the checksums of its
/// pieces, as little-endian words.
pub fn of_all(all: &[&[u8]]) -> Result<Vec<u64>> {
    let count = all.iter().map(|bytes| pieces_of(bytes)).sum();
    let mut pieces = try_vec::with_capacity("listing the pieces of memory", count)?;
    for bytes in all {
        match bytes.len() {
            ..=PIECE => pieces.push((*bytes, 0)),
            _ => pieces.extend(bytes.chunks(PIECE).map(|piece| (piece, 0))),
        }
    }
    let work = |(bytes, sum): &mut (&[u8], u64)| *sum = checksum::of(bytes);
    match pieces.iter().try_fold(0, |sum: usize, (bytes, _)| sum.checked_add(bytes.len())) {
        Some(..=PIECE) => pieces.iter_mut().for_each(work),
        _ => threads::each(&mut pieces, work)?,
    }
    let mut rest = &pieces[..];
    try_vec::from_fn("listing the checksums", all.len(), |at| {
        let (own, others) = rest.split_at(pieces_of(all[at]));
        rest = others;
        match own {
            [(_, sum)] => *sum,
            many => of_pieces(many),
        }
    })
}

fn pieces_of(bytes: &[u8]) -> usize {
    bytes.len().div_ceil(PIECE).max(1)
}

/// The checksum of the checksums of pieces.
fn of_pieces(pieces: &[(&[u8], u64)]) -> u64 {
    let mut whole = checksum::RunningChecksum::default();
    pieces.iter().for_each(|(_, sum)| whole.add(&sum.to_le_bytes()));
    whole.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_checksum_is_that_of_the_bytes_or_of_the_checksums_of_pieces() {
        let memory: Vec<u8> = (0..3 * PIECE + 5).map(|at| (at * at * 31 + (at >> 9)) as u8).collect();
        let lengths = [0, 1, 7, 1000, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE, 3 * PIECE + 5];
        let all: Vec<&[u8]> = lengths.iter().map(|length| &memory[..*length]).collect();
        let sums = of_all(&all).unwrap();
        for (bytes, sum) in all.iter().zip(&sums) {
            let words: Vec<u8> =
                bytes.chunks(PIECE).flat_map(|piece| checksum::of(piece).to_le_bytes()).collect();
            let expected = if bytes.len() > PIECE { checksum::of(&words) } else { checksum::of(bytes) };
            assert_eq!(*sum, expected, "{} bytes", bytes.len());
            assert_eq!(of_all(&[bytes]).unwrap(), [*sum], "{} bytes alone", bytes.len());
        }
        assert!(of_all(&[]).unwrap().is_empty());
    }
}
