//! A chunk in tiles, whose sums of squares meet as those of every kernel do.

use crate::squares::{self, LANES, TILE};
use crate::walk::CHUNK;

/// Calls `work` for every tile with its first element, its length and LANES sums; the sum of them all.
// Not inlined: the caller changes the float mode around this call, and a call is what arithmetic cannot cross.
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
