//! Names of kernels, the shape of sums, and where a log may be cut.

use spillway_kernels::squares::{split, tree_sum};
use spillway_kernels::{CHUNK, Kernel, log_bytes};

#[test]
fn names_are_found_and_others_are_refused_with_the_list() {
    assert_eq!(Kernel::named("scalar").unwrap().name(), "scalar");
    let message = Kernel::named("sse9").unwrap_err().to_string();
    assert!(
        message.contains("sse9") && message.contains("avx512, avx2, sve_bf16, sve, neon, scalar"),
        "{message}"
    );
}

#[test]
fn the_list_ends_with_scalar_and_every_entry_can_be_named() {
    let all: Vec<Kernel> = Kernel::all().collect();
    assert_eq!(all.last().map(|kernel| kernel.name()), Some("scalar"));
    for kernel in all {
        assert_eq!(Kernel::named(kernel.name()), Ok(kernel));
    }
}

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

#[test]
fn a_log_splits_into_the_logs_of_its_parts() {
    for n in [1, CHUNK - 1, CHUNK, CHUNK + 1, 7 * CHUNK, 7 * CHUNK + 3] {
        for mid in (0..n).step_by(CHUNK) {
            assert_eq!(log_bytes(n), log_bytes(mid) + log_bytes(n - mid), "{n} at {mid}");
        }
    }
}
