//! The shape of the tree that sums the squares.

use spillway_kernels::squares::{split, tree_sum};

#[test]
fn trees_split_at_the_largest_power_of_two_below() {
    let splits: Vec<usize> = (2..=9).map(split).collect();
    assert_eq!(splits, [1, 2, 2, 4, 4, 4, 4, 8]);
}

#[test]
fn the_sum_of_the_whole_is_the_sum_of_the_two_sides_of_the_split() {
    let tiles: Vec<f64> = (0..77).map(|i| 1.0 / f64::from(i + 3)).collect();
    let (left, right) = tiles.split_at(64);
    assert_eq!(tree_sum(&tiles), tree_sum(left) + tree_sum(right));
}
