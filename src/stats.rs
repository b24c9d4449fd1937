//! Counters of optimizer work since the library was loaded.
#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicU64, Ordering};

/// Number of calls and elements of one optimizer.
#[derive(Debug)]
pub struct OptimizerCounter {
    calls: AtomicU64,
    elements: AtomicU64,
}

impl OptimizerCounter {
    const fn new() -> Self {
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

/// Adam and AdamW steps.
pub static ADAM: OptimizerCounter = OptimizerCounter::new();
/// Adagrad steps.
pub static ADAGRAD: OptimizerCounter = OptimizerCounter::new();
/// Lion steps.
pub static LION: OptimizerCounter = OptimizerCounter::new();
