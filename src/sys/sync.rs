//! A lock and a signal between threads, without poison.
//!
//! A thread that panics while it holds a lock leaves a value that the next holder may use: state is changed in steps
//! that each leave it valid, and a panic is reported by the call in which it arose.
#![forbid(unsafe_code)]

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

/// A value that one thread at a time uses.
#[derive(Debug, Default)]
pub struct Lock<T>(Mutex<T>);

/// The use of the value of a [`Lock`], until it is dropped.
pub type Guard<'a, T> = MutexGuard<'a, T>;

impl<T> Lock<T> {
    /// A lock around `value`.
    pub const fn new(value: T) -> Lock<T> {
        Lock(Mutex::new(value))
    }

    /// Waits until no other thread uses the value.
    pub fn lock(&self) -> Guard<'_, T> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The value, unless a thread uses it, this one included.
    pub fn try_lock(&self) -> Option<Guard<'_, T>> {
        match self.0.try_lock() {
            Ok(guard) => Some(guard),
            Err(TryLockError::Poisoned(poison)) => Some(poison.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// The value, through an exclusive borrow that no other thread can have.
    pub fn get_mut(&mut self) -> &mut T {
        self.0.get_mut().unwrap_or_else(PoisonError::into_inner)
    }

    /// The value.
    pub fn into_inner(self) -> T {
        self.0.into_inner().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Wakes threads that wait for a change of a [`Lock`]'s value.
#[derive(Debug, Default)]
pub struct Signal(Condvar);

impl Signal {
    /// Sleeps until a notification. A wait may also end without one: the caller checks its condition again.
    pub fn wait<'a, T>(&self, guard: Guard<'a, T>) -> Guard<'a, T> {
        self.0.wait(guard).unwrap_or_else(PoisonError::into_inner)
    }

    /// Like [`Signal::wait`], at most until `until`. False if that time had passed at the start of the call.
    pub fn wait_until<'a, T>(&self, guard: Guard<'a, T>, until: Option<Instant>) -> (Guard<'a, T>, bool) {
        let Some(until) = until else { return (self.wait(guard), true) };
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return (guard, false);
        }
        (self.0.wait_timeout(guard, left).unwrap_or_else(PoisonError::into_inner).0, true)
    }

    /// Sleeps while `condition` holds, at most until `until`. The condition may hold afterwards only if that time passed.
    pub fn wait_while<'a, T>(
        &self,
        mut guard: Guard<'a, T>,
        until: Option<Instant>,
        mut condition: impl FnMut(&mut T) -> bool,
    ) -> Guard<'a, T> {
        let mut in_time = true;
        while in_time && condition(&mut guard) {
            (guard, in_time) = self.wait_until(guard, until);
        }
        guard
    }

    /// Wakes one waiting thread.
    pub fn notify_one(&self) {
        self.0.notify_one();
    }

    /// Wakes all waiting threads.
    pub fn notify_all(&self) {
        self.0.notify_all();
    }
}

/// The moment that lies `timeout` ahead; `None` without a timeout, and for one that has no end.
pub fn deadline_after(timeout: Option<Duration>) -> Option<Instant> {
    timeout.and_then(|timeout| Instant::now().checked_add(timeout))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_is_usable_after_a_panic_of_its_holder() {
        let value = Lock::new(1);
        std::thread::scope(|scope| {
            let holder = scope.spawn(|| {
                let _guard = value.lock();
                std::panic::resume_unwind(Box::new("a bug"));
            });
            assert!(holder.join().is_err());
        });
        *value.lock() += 1;
        assert_eq!(value.into_inner(), 2);
    }

    #[test]
    fn a_wait_ends_at_a_notification_and_at_its_time() {
        let (value, changed) = (Lock::new(0), Signal::default());
        let soon = || Some(Instant::now() + Duration::from_millis(1));
        assert_eq!(*changed.wait_while(value.lock(), soon(), |value| *value == 0), 0);
        assert!(!changed.wait_until(value.lock(), Some(Instant::now())).1);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                *value.lock() = 1;
                changed.notify_all();
            });
            assert_eq!(*changed.wait_while(value.lock(), None, |value| *value == 0), 1);
        });
    }
}
