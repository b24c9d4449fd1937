//! When the operations in flight last made progress, and whether the process stood still since the last check.
#![forbid(unsafe_code)]

use std::time::{Duration, Instant};

/// A check is late if it comes this much after its time.
const LATE: Duration = Duration::from_millis(250);
/// Time for the driver to take completions after the process ran again.
const SETTLE: Duration = Duration::from_millis(50);

/// What earlier checks of the operations in flight saw.
#[derive(Debug, Default)]
pub(super) struct Progress {
    /// `Shared::progress`, and when it was last seen to change.
    pub(super) seen: (u64, Option<Instant>),
    /// When the next check was planned; `None` if nothing was in flight.
    pub(super) planned: Option<Instant>,
    /// Nothing expires before.
    pub(super) settles: Option<Instant>,
}

impl Progress {
    /// As a check leaves it that planned the next one for `when`.
    #[cfg(test)]
    pub(super) fn planned_for(when: Instant) -> Progress {
        Progress { planned: Some(when), ..Progress::default() }
    }

    /// Notes whether the process stood still since the last check.
    pub(super) fn notice_stop(&mut self, now: Instant, every: Duration) {
        let late = LATE.max(every);
        if self.planned.is_some_and(|planned| now.saturating_duration_since(planned) > late) {
            self.settles = now.checked_add(SETTLE);
            self.seen.1 = Some(now);
        }
        self.settles = self.settles.filter(|settles| *settles > now);
    }
}
