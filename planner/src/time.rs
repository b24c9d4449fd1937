//! Times that a queue can sort.
#![forbid(unsafe_code)]

use std::cmp::Ordering;

/// A time with a total order.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Time(pub f64);

impl Eq for Time {}
impl PartialOrd for Time {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Time {
    fn cmp(&self, other: &Self) -> Ordering {
        self.0.total_cmp(&other.0)
    }
}
