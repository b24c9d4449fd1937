//! When the operations in flight last made progress, and whether completions may wait that the driver has not taken.
//!
//! Invariant: nothing expires before the driver has waited for completions anew, after a stop of the process and after a
//! deadline passed. A system call can hold the driver up, so that this has a limit.
#![forbid(unsafe_code)]

use std::time::{Duration, Instant};

/// A check is late if it comes this much after its time.
const LATE: Duration = Duration::from_millis(250);
/// After a stop: time for threads and devices to go on, and the longest wait for the driver.
const AFTER_STOP: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(2));
/// After a deadline passed: the longest wait for the driver.
const AFTER_DEADLINE: Duration = Duration::from_millis(250);
/// Time between two checks of whether the driver has waited anew.
const SETTLING_CHECK: Duration = Duration::from_millis(5);

/// What earlier checks of the operations in flight saw.
#[derive(Debug, Default)]
pub(super) struct Progress {
    /// `Shared::progress`, and when it was last seen to change.
    pub(super) seen: (u64, Option<Instant>),
    /// When the next check was planned; `None` if nothing was in flight.
    pub(super) planned: Option<Instant>,
    settling: Option<Settling>,
    /// The driver was asked since the first deadline that has passed did.
    asked: bool,
}

/// The driver may not have taken all completions yet.
#[derive(Debug)]
struct Settling {
    /// The driver's wait that takes them.
    turn: u64,
    not_before: Instant,
    until: Instant,
}

impl Progress {
    /// As a check leaves it that planned the next one for `when`.
    #[cfg(test)]
    pub(super) fn planned_for(when: Instant) -> Progress {
        Progress { planned: Some(when), ..Progress::default() }
    }

    /// True if the process stood still since the last check. `turns` are the waits that the driver has ended so far.
    pub(super) fn notice_stop(&mut self, now: Instant, every: Duration, turns: u64) -> bool {
        let late = LATE.max(every);
        let stopped = self.planned.is_some_and(|planned| now.saturating_duration_since(planned) > late);
        if stopped {
            self.settle(turns, now + AFTER_STOP.0, now + AFTER_STOP.1);
            self.seen.1 = Some(now);
        }
        stopped
    }

    /// A deadline has passed: true if the driver is still to be asked for what has completed.
    pub(super) fn notice_deadline(&mut self, now: Instant, turns: u64) -> bool {
        if self.settling.is_some() || std::mem::replace(&mut self.asked, true) {
            return false;
        }
        self.settle(turns, now, now + AFTER_DEADLINE);
        true
    }

    /// What was past its deadline has expired.
    pub(super) fn expired(&mut self) {
        self.asked = false;
    }

    /// When to check again whether the driver has taken all completions; `None` if it has.
    pub(super) fn settles(&mut self, now: Instant, turns: u64) -> Option<Instant> {
        let goes_on = |settling: &Settling| {
            (turns < settling.turn || now < settling.not_before) && now < settling.until
        };
        self.settling = self.settling.take().filter(goes_on);
        self.settling.as_ref().map(|_| now + SETTLING_CHECK)
    }

    fn settle(&mut self, turns: u64, not_before: Instant, until: Instant) {
        self.asked = true;
        // The wait that the driver is in may have ended already: the one after it counts.
        self.settling = Some(Settling { turn: turns + 2, not_before, until });
    }
}
