//! Counters of optimizer work since the library was loaded.
#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicU64, Ordering};

/// Number of calls and elements of one optimizer.
#[derive(Debug, Default)]
pub struct OptimizerCounter {
    calls: AtomicU64,
    elements: AtomicU64,
}

impl OptimizerCounter {
    /// A counter of nothing yet.
    pub const fn new() -> Self {
        OptimizerCounter { calls: AtomicU64::new(0), elements: AtomicU64::new(0) }
    }

    /// Counts one successful call over `elements` elements.
    pub fn add(&self, elements: usize) {
        self.calls.fetch_add(1, Ordering::Relaxed);
        self.elements.fetch_add(elements as u64, Ordering::Relaxed);
    }

    /// Number of calls and elements so far.
    pub fn get(&self) -> (u64, u64) {
        (self.calls.load(Ordering::Relaxed), self.elements.load(Ordering::Relaxed))
    }
}
