//! Which operations are past their deadline, or in flight without progress for too long.
//!
//! Invariants:
//! - An operation stalls only after the engine saw no completion for the whole I/O timeout, during which the process
//!   ran.
//! - A check that happens much later than planned means that the process did not run (SIGSTOP, a frozen cgroup, a
//!   paused container). Completions of that time are still in the queue. The I/O timeout then starts again, and no
//!   deadline expires before the driver had a chance to process the completions.
//! - Waiters check as well as the driver, since a system call can block the driver.
#![forbid(unsafe_code)]

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::counters::Counters;
use super::engine::Engine;
use super::file::File;
use super::operation::{DriverLink, EngineState, FAILED_DEVICE, Phase, key_of};
use crate::error::{Doing, Error, IoError, IoKind, Result};
use crate::log::{self, Level};
use crate::sys::sync::Guard;

/// Bounds of the time between two checks while operations are in flight.
const CHECK_EVERY: (Duration, Duration) = (Duration::from_millis(5), Duration::from_secs(2));

impl DriverLink {
    /// Expires and logs operations past their deadline, or in flight without progress for too long. `now` is the time at
    /// which the caller has the lock. Returns the time of the next check, and whether anything expired.
    pub(super) fn expire<'a>(
        &'a self,
        mut state: Guard<'a, EngineState>,
        now: Instant,
    ) -> (Guard<'a, EngineState>, Option<Instant>, bool) {
        let every = self
            .io_timeout
            .map_or(CHECK_EVERY.1, |io_timeout| (io_timeout / 8).clamp(CHECK_EVERY.0, CHECK_EVERY.1));
        let turns = self.turns.load(Ordering::Acquire);
        if state.watchdog.notice_stop(now, every, turns) {
            self.wake();
        }
        let stalled = self.io_timeout.and_then(|io_timeout| {
            let due = state.expire_stalled(self.progress.load(Ordering::Relaxed), io_timeout, now)?;
            Some(due.min(now + every))
        });
        let passed = state.deadlines.first().is_some_and(|(deadline, _)| *deadline <= now);
        if passed && state.watchdog.notice_deadline(now, turns) {
            self.wake();
        }
        let settles = state.watchdog.settles(now, turns);
        let expired = if settles.is_some() { Vec::new() } else { state.expire(now) };
        if !expired.is_empty() {
            expired.iter().for_each(|_| Counters::add(&self.counters.failed, 1));
            drop(state);
            self.ring();
            expired.iter().for_each(|error| log::write(Level::Warn, &error.to_string()));
            state = self.state.lock();
        }
        let deadline =
            state.deadlines.first().map(|(deadline, _)| settles.unwrap_or(*deadline).max(*deadline));
        let next = deadline.into_iter().chain(stalled).min();
        state.watchdog.planned = next.filter(|_| state.unfinished > 0);
        (state, next, !expired.is_empty())
    }
}

impl Engine {
    /// Fails with `PathFailed` if operations on the device of `file` are still in flight after their deadline.
    pub fn check_device(&self, file: &File, doing: Doing) -> Result<()> {
        match self.shared.state.lock().stuck.contains_key(&file.identity().device) {
            false => Ok(()),
            true => Err(IoError::about(IoKind::PathFailed, doing, file.name()).because(FAILED_DEVICE).into()),
        }
    }
}

impl EngineState {
    /// Sets a passed deadline on operations without progress for too long; returns when the next one may be due.
    fn expire_stalled(&mut self, progress: u64, io_timeout: Duration, now: Instant) -> Option<Instant> {
        if self.watchdog.seen.0 != progress {
            self.watchdog.seen = (progress, Some(now));
            self.forget_stall();
        }
        let moved = self.watchdog.seen.1;
        if let Some(soonest) = moved.and_then(|moved| moved.checked_add(io_timeout)).filter(|at| *at > now) {
            return (self.unfinished > 0).then_some(soonest);
        }
        let mut next = None;
        for (_, entry) in self.entries.iter().filter(|(_, entry)| matches!(entry.phase, Phase::Pending)) {
            let Some(op) = &entry.op else { continue };
            let from = moved.map_or(op.submitted, |moved| moved.max(op.submitted));
            match from.checked_add(io_timeout) {
                Some(due) if due <= now => {
                    self.deadlines.insert((due, op.handle));
                    self.watchdog.stalled = true;
                }
                due => next = next.into_iter().chain(due).min(),
            }
        }
        next
    }

    /// Removes the deadlines that a stall set, since a completion arrived before the operations expired.
    fn forget_stall(&mut self) {
        if !std::mem::take(&mut self.watchdog.stalled) {
            return;
        }
        let entries = &self.entries;
        self.deadlines.retain(|(deadline, handle)| {
            let entry = entries.get(key_of(*handle)).filter(|entry| entry.handle == *handle);
            entry.and_then(|entry| entry.op.as_ref()).is_some_and(|op| op.deadline == Some(*deadline))
        });
    }

    /// Expires operations past their deadline; returns their errors.
    fn expire(&mut self, now: Instant) -> Vec<Error> {
        let mut errors = Vec::new();
        self.watchdog.expired();
        while let Some((_, handle)) = self.deadlines.first().copied().filter(|(deadline, _)| *deadline <= now)
        {
            self.deadlines.pop_first();
            let entry = self.entry(handle).ok().filter(|entry| matches!(entry.phase, Phase::Pending));
            let Some(op) = entry.and_then(|entry| entry.op.clone()) else { continue };
            let stuck = op.expire();
            let words = match stuck {
                true => "the deadline passed; the buffer stays in use until the system ends the operation",
                false => "the deadline passed before the operation started",
            };
            let error = op.error(IoKind::Deadline, words.to_string());
            if stuck {
                *self.stuck.entry(op.device()).or_default() += 1;
            }
            if let Ok(entry) = self.entry(handle) {
                entry.phase = Phase::Expired { unread: Some(error.clone()), stuck, ended: false };
            }
            self.leave_pending(handle, op.action, op.deadline);
            self.waiters_for(handle).for_each(|signal| signal.notify_one());
            errors.push(error);
        }
        errors
    }
}
