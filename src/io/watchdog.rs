//! When the operations in flight last made progress, and whether completions may be waiting that the driver has not
//! processed.
//!
//! Invariant: after a stop of the process, and after a deadline passes, nothing expires before the driver has waited
//! for completions again. A system call can block the driver, so this delay is bounded.
#![forbid(unsafe_code)]

use std::time::{Duration, Instant};

/// A check is late if it happens this much after its planned time.
const LATE: Duration = Duration::from_millis(250);
/// After a stop: time for threads and devices to resume, and the longest wait for the driver.
const AFTER_STOP: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(2));
/// After a deadline passed: the longest wait for the driver.
const AFTER_DEADLINE: Duration = Duration::from_millis(250);
/// Time between two checks of whether the driver has waited again.
const SETTLING_CHECK: Duration = Duration::from_millis(5);

/// State from earlier checks of the operations in flight.
#[derive(Debug, Default)]
pub(super) struct Watchdog {
    /// The value of `DriverLink::progress`, and when it was last seen to change.
    pub(super) seen: (u64, Option<Instant>),
    /// When the next check was planned; `None` if nothing was in flight.
    pub(super) planned: Option<Instant>,
    settling: Option<Settling>,
    /// True if a stall has put operations among the deadlines.
    pub(super) stalled: bool,
    /// True if the driver was woken since the oldest passed deadline.
    woken: bool,
}

/// Set while the driver may not have processed all completions.
#[derive(Debug)]
struct Settling {
    /// The number of driver waits after which all completions are processed.
    turn: u64,
    not_before: Instant,
    until: Instant,
}

impl Watchdog {
    /// The state after a check that planned the next one for `when`.
    #[cfg(test)]
    pub(super) fn planned_for(when: Instant) -> Watchdog {
        Watchdog { planned: Some(when), ..Watchdog::default() }
    }

    /// Called when an operation is admitted and no other is in flight. A check is due at once, so a stop before the first
    /// check is noticed too.
    pub(super) fn starts(&mut self, submitted: Instant) {
        self.planned = Some(submitted);
    }

    /// True if the process was stopped since the last check. `turns` is the number of waits that the driver has ended.
    pub(super) fn notice_stop(&mut self, now: Instant, every: Duration, turns: u64) -> bool {
        let late = LATE.max(every);
        let stopped = self.planned.is_some_and(|planned| now.saturating_duration_since(planned) > late);
        if stopped {
            self.begin_settling(turns, now + AFTER_STOP.0, now + AFTER_STOP.1);
            self.seen.1 = Some(now);
        }
        stopped
    }

    /// Called when a deadline has passed; true if the driver must be woken to process completions first.
    pub(super) fn notice_deadline(&mut self, now: Instant, turns: u64) -> bool {
        if self.settling.is_some() || std::mem::replace(&mut self.woken, true) {
            return false;
        }
        self.begin_settling(turns, now, now + AFTER_DEADLINE);
        true
    }

    /// Called when the operations past their deadline expire.
    pub(super) fn expired(&mut self) {
        self.woken = false;
    }

    /// When to check again whether the driver has processed all completions; `None` if it has.
    pub(super) fn settles(&mut self, now: Instant, turns: u64) -> Option<Instant> {
        let is_settling = |settling: &Settling| {
            (turns < settling.turn || now < settling.not_before) && now < settling.until
        };
        self.settling = self.settling.take().filter(is_settling);
        self.settling.as_ref().map(|_| now + SETTLING_CHECK)
    }

    fn begin_settling(&mut self, turns: u64, not_before: Instant, until: Instant) {
        self.woken = true;
        // The driver's current wait may have ended already, so the wait after it counts.
        self.settling = Some(Settling { turn: turns + 2, not_before, until });
    }
}
