//! How long an engine had reads, and writes, in flight.
#![forbid(unsafe_code)]

use std::time::{Duration, Instant};

use super::backend::Action;

/// Time with at least one operation of a kind in flight.
#[derive(Debug, Default)]
pub(super) struct Stopwatch {
    in_flight: usize,
    /// The operations in flight wait for other processes.
    held: bool,
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

    /// Stops the clocks while all operations in flight wait for other processes.
    pub(super) fn hold(&mut self, held: bool) {
        for clock in [&mut self.reading, &mut self.writing, &mut self.either] {
            clock.hold(held);
        }
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
        self.run();
    }

    fn run(&mut self) {
        if self.in_flight > 0 && !self.held {
            self.since.get_or_insert_with(Instant::now);
        }
    }

    fn stop(&mut self) {
        self.total += self.since.take().map_or(Duration::ZERO, |since| since.elapsed());
    }

    fn hold(&mut self, held: bool) {
        if std::mem::replace(&mut self.held, held) != held {
            if held { self.stop() } else { self.run() }
        }
    }

    fn end(&mut self) {
        self.in_flight = self.in_flight.saturating_sub(1);
        if self.in_flight == 0 {
            self.stop();
        }
    }

    /// Total time so far, including the current interval.
    pub(super) fn total(&self) -> Duration {
        self.total + self.since.map_or(Duration::ZERO, |since| since.elapsed())
    }
}
