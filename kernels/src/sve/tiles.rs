//! Loop over the tiles of a chunk. Adds the sums of squares in the same tree as every other kernel.

use crate::chunk_loop::CHUNK;
use crate::squares::{self, LANES, TILE};

/// Calls `work(first element, length, LANES sums)` for every tile and returns the total. Returns `None` if `work`
/// returns false.
// Not inlined: the caller changes the float mode around this call, and the compiler cannot move arithmetic
// across a call.
#[inline(never)]
pub fn by_tiles(n: usize, mut work: impl FnMut(usize, usize, *mut f64) -> bool) -> Option<f64> {
    let mut sums = [0.0; CHUNK / TILE];
    for (tile, sum) in sums.iter_mut().enumerate().take(n.div_ceil(TILE)) {
        let at = tile * TILE;
        let mut lanes = [0.0; LANES];
        if !work(at, TILE.min(n - at), lanes.as_mut_ptr()) {
            return None;
        }
        *sum = squares::tile_sum(&mut lanes);
    }
    Some(squares::tree_sum(&sums[..n.div_ceil(TILE)]))
}
