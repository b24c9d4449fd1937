//! Sum of squares in a fixed tree. The shape of the tree depends only on the number of elements.
//!
//! - A tile is 4096 consecutive elements. Element `i` of a tile belongs to lane `i % 256`.
//! - A lane adds its elements in order, each with one f64 fma (the square of an f32 is exact in f64).
//! - The 256 lanes are reduced by halves: lane `j` adds lane `j + 128`, then lane `j + 64`, down to one sum.
//! - The sums of `t` tiles are added in a binary tree that splits at the largest power of two below `t`.
//! - A GPU warp processes one tile; each of its threads has eight neighbouring lanes.
//!
//! No term is negative, so partial sums never decrease. One Inf or NaN element makes the total non-finite. Finite
//! squares cannot overflow f64 below 2^700 elements.
#![forbid(unsafe_code)]

use super::float_mode::IeeeMode;

/// Elements of a tile.
pub const TILE: usize = 4096;
/// Lanes of a tile.
pub const LANES: usize = 256;

/// Sum of one tile from its lanes. Overwrites the lanes.
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

/// Adds consecutive partial sums in the tree, in IEEE mode whatever the mode of this thread. Each partial sum covers
/// the same power-of-two number of tiles; the last may cover fewer.
pub fn sum(sums: &[f64]) -> f64 {
    // A separate call, because the compiler may otherwise move arithmetic past the change of the float mode.
    #[inline(never)]
    fn tree(sums: &[f64]) -> f64 {
        tree_sum(sums)
    }
    let _mode = IeeeMode::enter();
    tree(sums)
}

/// [`sum`] of two values.
pub fn add(left: f64, right: f64) -> f64 {
    sum(&[left, right])
}

/// Where a tree of `parts` leaves splits: the largest power of two below `parts`. `parts` is at least 2.
pub const fn split(parts: usize) -> usize {
    1 << (parts - 1).ilog2()
}
