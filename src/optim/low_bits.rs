//! Low bits of split masters that no longer count, found without a step, by all threads.
#![forbid(unsafe_code)]

use crate::dtype::bf16;
use crate::error::Result;
use crate::kernel::squares::TILE;
use crate::kernel::{CHUNK, settle_low_bits};
use crate::sys::{threads, try_vec};

/// A bf16 parameter with a split master, and the sums of its tiles.
#[derive(Debug)]
pub struct SplitMaster<'a> {
    /// Upper bits.
    pub param: &'a [bf16],
    /// Low bits, as many.
    pub low: &'a mut [u16],
    /// One for each tile.
    pub sums: &'a mut [u64],
}

/// Sets low bits to zero whose tile other code has written, and stores the sums of the present elements. Fails before
/// anything is changed. Panics if lengths do not fit each other.
pub fn zero_stale(masters: Vec<SplitMaster<'_>>) -> Result<()> {
    let count = masters.iter().map(|master| master.param.len().div_ceil(CHUNK)).sum();
    let mut parts = try_vec::with_capacity("listing the parts of parameters", count)?;
    let elements: usize = masters.iter().map(|master| master.param.len()).sum();
    for SplitMaster { param, low, sums } in masters {
        let cut = param.chunks(CHUNK).zip(low.chunks_mut(CHUNK)).zip(sums.chunks_mut(CHUNK / TILE));
        parts.extend(cut.map(|((param, low), sums)| SplitMaster { param, low, sums }));
    }
    let work = |part: &mut SplitMaster<'_>| settle_low_bits(part.param, part.low, part.sums);
    match elements {
        // To wake a worker would take longer.
        ..=CHUNK => parts.iter_mut().for_each(work),
        _ => threads::each(&mut parts, work)?,
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_low_bits_of_written_tiles_become_zero() {
        let lengths = [0, 1, TILE - 1, TILE, TILE + 1, CHUNK, 2 * CHUNK + TILE + 3];
        let mut params: Vec<Vec<bf16>> = lengths
            .iter()
            .map(|n| (0..*n).map(|at| bf16::from_bits((at * 2_654_435_761) as u16)).collect())
            .collect();
        let mut lows: Vec<Vec<u16>> = lengths.iter().map(|n| vec![7; *n]).collect();
        let mut sums: Vec<Vec<u64>> = lengths.iter().map(|n| vec![0; n.div_ceil(TILE)]).collect();
        let settle_all = |params: &[Vec<bf16>], lows: &mut [Vec<u16>], sums: &mut [Vec<u64>]| {
            let masters = params.iter().zip(lows).zip(sums);
            zero_stale(masters.map(|((param, low), sums)| SplitMaster { param, low, sums }).collect())
                .unwrap();
        };

        settle_all(&params, &mut lows, &mut sums);
        assert!(lows.iter().flatten().all(|low| *low == 7), "no sum was known");
        assert!(sums.iter().flatten().all(|sum| *sum != 0));
        let known = sums.clone();
        settle_all(&params, &mut lows, &mut sums);
        assert!(lows.iter().flatten().all(|low| *low == 7) && sums == known);

        for param in params.iter_mut() {
            if let Some(last) = param.last_mut() {
                *last = bf16::from_bits(last.to_bits() ^ 0x8000);
            }
        }
        settle_all(&params, &mut lows, &mut sums);
        for low in &lows {
            let first = low.len().saturating_sub(1) / TILE * TILE;
            assert!(low[..first].iter().all(|low| *low == 7) && low[first..].iter().all(|low| *low == 0));
        }
        for (sums, known) in sums.iter().zip(&known).filter(|(sums, _)| !sums.is_empty()) {
            let last = sums.len() - 1;
            assert!(sums[..last] == known[..last] && sums[last] != known[last]);
        }
    }
}
