//! How long an engine had reads, and writes, in flight.
#![forbid(unsafe_code)]

use std::time::{Duration, Instant};

use super::backend::Action;

/// Time with at least one operation of a kind in flight.
#[derive(Debug, Default)]
pub(super) struct Stopwatch {
    in_flight: usize,
    since: Option<Instant>,
    total: Duration,
}

/// A clock for each direction, and one for both together. Syncs and allocations count as writing.
#[derive(Debug, Default)]
pub(super) struct BusyTime {
    pub(super) reading: Stopwatch,
    pub(super) writing: Stopwatch,
    pub(super) either: Stopwatch,
}

impl BusyTime {
    pub(super) fn begin(&mut self, action: Action) {
        self.clock(action).begin();
        self.either.begin();
    }

    pub(super) fn end(&mut self, action: Action) {
        self.clock(action).end();
        self.either.end();
    }

    fn clock(&mut self, action: Action) -> &mut Stopwatch {
        match action {
            Action::Read => &mut self.reading,
            Action::Write | Action::Sync | Action::Allocate { .. } => &mut self.writing,
        }
    }
}

impl Stopwatch {
    fn begin(&mut self) {
        self.in_flight += 1;
        self.since.get_or_insert_with(Instant::now);
    }

    fn end(&mut self) {
        self.in_flight = self.in_flight.saturating_sub(1);
        if self.in_flight == 0 {
            self.total += self.since.take().map_or(Duration::ZERO, |since| since.elapsed());
        }
    }

    /// Total time so far, including the current interval.
    pub(super) fn total(&self) -> Duration {
        self.total + self.since.map_or(Duration::ZERO, |since| since.elapsed())
    }
}
