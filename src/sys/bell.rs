//! A counter of events that several threads report and one thread waits for.
//!
//! Invariants:
//! - A wait returns if an event was reported after the count that the caller passes was read. The count and the number
//!   of waiters are changed in one total order: either the reporter sees the waiter, or the waiter sees the event.
//! - A report without a waiter takes no lock.
#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use crate::sys::sync::{Lock, Signal, deadline_after};

/// Counter of events, with a wait for the next one.
#[derive(Debug, Default)]
pub struct Bell {
    events: AtomicU64,
    waiters: AtomicUsize,
    lock: Lock<()>,
    rung: Signal,
}

impl Bell {
    /// Number of events so far.
    pub fn events(&self) -> u64 {
        self.events.load(Ordering::SeqCst)
    }

    /// Reports an event.
    pub fn ring(&self) {
        self.events.fetch_add(1, Ordering::SeqCst);
        if self.waiters.load(Ordering::SeqCst) > 0 {
            // With the lock held, the waiter either sleeps already or has yet to read the count.
            drop(self.lock.lock());
            self.rung.notify_all();
        }
    }

    /// Waits until the number of events is not `seen`, at most for `timeout`.
    pub fn wait(&self, seen: u64, timeout: Option<Duration>) {
        let until = deadline_after(timeout);
        self.waiters.fetch_add(1, Ordering::SeqCst);
        drop(self.rung.wait_while(self.lock.lock(), until, |()| self.events() == seen));
        self.waiters.fetch_sub(1, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_event_is_missed() {
        const EVENTS: u64 = 2000;
        let bell = Bell::default();
        std::thread::scope(|scope| {
            scope.spawn(|| (0..EVENTS).for_each(|_| bell.ring()));
            let mut seen = 0;
            // A missed event would leave the last wait without an end.
            while seen < EVENTS {
                bell.wait(seen, None);
                assert!(bell.events() > seen);
                seen = bell.events();
            }
        });
    }

    #[test]
    fn a_wait_ends_at_its_timeout_or_at_once_after_an_event() {
        let bell = Bell::default();
        bell.wait(0, Some(Duration::from_millis(1)));
        bell.ring();
        bell.wait(0, None);
        assert_eq!(bell.events(), 1);
    }
}
