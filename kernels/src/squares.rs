//! The sum of squares as a tree whose shape depends on the number of elements alone.
//!
//! A tile is 4096 consecutive elements. Element `i` of a tile belongs to lane `i % 256`, and a lane adds its elements in
//! order, each by one f64 fma (the square of an f32 is exact in f64). The 256 lanes are halved: lane `j` takes lane
//! `j + 128`, then `j + 64`, down to one sum. Sums of tiles meet in a binary tree that splits `t` tiles at the
//! largest power of two below `t`. A GPU warp walks a tile with eight neighbouring lanes per thread.
//!
//! No term is negative, so partial sums never shrink, and one Inf or NaN anywhere makes the total non-finite: finite
//! squares cannot overflow f64 below 2^700 elements.
#![forbid(unsafe_code)]

use super::float_mode::IeeeMode;

/// Elements of a tile.
pub const TILE: usize = 4096;
/// Lanes of a tile.
pub const LANES: usize = 256;

/// Sum of one tile from its lanes, which are used up.
#[inline(always)]
pub fn tile_sum(lanes: &mut [f64; LANES]) -> f64 {
    let mut half = LANES / 2;
    while half > 0 {
        let (low, high) = lanes.split_at_mut(half);
        for (sum, other) in low.iter_mut().zip(high.iter()) {
            *sum += *other;
        }
        half /= 2;
    }
    lanes[0]
}

/// Sum of consecutive tiles.
pub fn tree_sum(tiles: &[f64]) -> f64 {
    match tiles {
        [] => 0.0,
        [one] => *one,
        many => {
            let (left, right) = many.split_at(split(many.len()));
            tree_sum(left) + tree_sum(right)
        }
    }
}

/// Sum of consecutive sums of as many tiles as a power of two says, in IEEE mode whatever this thread's mode is.
pub fn sum(sums: &[f64]) -> f64 {
    // A call of its own, because arithmetic may otherwise move past the change of mode.
    #[inline(never)]
    fn tree(sums: &[f64]) -> f64 {
        tree_sum(sums)
    }
    let _mode = IeeeMode::enter();
    tree(sums)
}

/// `sum` of two.
pub fn add(left: f64, right: f64) -> f64 {
    sum(&[left, right])
}

/// The largest power of two below `parts`, where a tree of `parts` (at least 2) splits.
pub const fn split(parts: usize) -> usize {
    1 << (parts - 1).ilog2()
}
