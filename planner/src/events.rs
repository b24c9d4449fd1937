//! What both discrete-event simulators use: times that a queue can sort, and what depends on an operation.
#![forbid(unsafe_code)]

use std::cmp::Ordering;

/// A time with a total order.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Time(pub f64);

/// The operations that depend on each operation.
#[derive(Debug)]
pub(super) struct Successors {
    /// The successors of operation i are `next[first[i]..first[i + 1]]`.
    first: Vec<u32>,
    next: Vec<u32>,
}

impl Successors {
    /// Of `edges`, pairs (before, after). `first` holds a 0 for each operation and one more, `next` one for each edge.
    pub(super) fn of(mut first: Vec<u32>, mut next: Vec<u32>, edges: &[(u32, u32)]) -> Successors {
        edges.iter().for_each(|(before, _)| first[*before as usize] += 1);
        (1..first.len()).for_each(|index| first[index] += first[index - 1]);
        // Each operation's range is filled from its end, so that `first` is its begin afterwards.
        for (before, after) in edges.iter().rev() {
            first[*before as usize] -= 1;
            next[first[*before as usize] as usize] = *after;
        }
        Successors { first, next }
    }

    /// The operations that depend on this one, in the order of the edges.
    pub(super) fn after(&self, number: u32) -> &[u32] {
        &self.next[self.first[number as usize] as usize..self.first[number as usize + 1] as usize]
    }
}

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
