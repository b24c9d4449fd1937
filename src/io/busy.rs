//! How long an engine had reads, and writes, in flight.
#![forbid(unsafe_code)]

use std::time::{Duration, Instant};

use super::backend::Action;

/// Time with at least one operation of a kind in flight.
#[derive(Debug, Default)]
pub(super) struct Clock {
    under_way: usize,
    since: Option<Instant>,
    total: Duration,
}

/// A clock for each direction, and one for both together. Syncs and allocations count as writing.
#[derive(Debug, Default)]
pub(super) struct Busy {
    pub(super) reading: Clock,
    pub(super) writing: Clock,
    pub(super) either: Clock,
}

impl Busy {
    pub(super) fn begins(&mut self, action: Action) {
        self.clock(action).begins();
        self.either.begins();
    }

    pub(super) fn ends(&mut self, action: Action) {
        self.clock(action).ends();
        self.either.ends();
    }

    fn clock(&mut self, action: Action) -> &mut Clock {
        match action {
            Action::Read => &mut self.reading,
            Action::Write | Action::Sync | Action::Allocate { .. } => &mut self.writing,
        }
    }
}

impl Clock {
    fn begins(&mut self) {
        self.under_way += 1;
        self.since.get_or_insert_with(Instant::now);
    }

    fn ends(&mut self) {
        self.under_way = self.under_way.saturating_sub(1);
        if self.under_way == 0 {
            self.total += self.since.take().map_or(Duration::ZERO, |since| since.elapsed());
        }
    }

    /// Total time so far, including the current interval.
    pub(super) fn total(&self) -> Duration {
        self.total + self.since.map_or(Duration::ZERO, |since| since.elapsed())
    }
}
