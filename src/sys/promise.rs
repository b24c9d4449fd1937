//! The outcome of work that a thread of the library does, for callers that wait for it.
//!
//! Invariants:
//! - A promise has one outcome. One that is dropped without an outcome, as by a panic, has an error: no caller waits for
//!   ever.
//! - A drop of the caller's side waits for the outcome. It is not dropped in a forked child, which lacks the thread.
#![forbid(unsafe_code)]

use std::sync::Arc;
use std::time::Duration;

use super::sync::{Lock, Signal, deadline_after};
use super::threads;
use crate::error::{Error, IoError, Result};

/// The side of the thread, which gives the outcome.
#[derive(Debug)]
pub struct Promise<T>(Arc<Awaited<T>>);

/// The side of the caller, who waits for the outcome.
#[derive(Debug)]
pub struct Outcome<T>(Arc<Awaited<T>>);

#[derive(Debug)]
struct Awaited<T> {
    /// What is awaited, for messages.
    what: &'static str,
    outcome: Lock<Option<Result<T>>>,
    given: Signal,
}

/// Both sides of the outcome of `what`.
pub fn promise<T>(what: &'static str) -> (Promise<T>, Outcome<T>) {
    let shared = Arc::new(Awaited { what, outcome: Lock::new(None), given: Signal::default() });
    (Promise(Arc::clone(&shared)), Outcome(shared))
}

impl<T> Promise<T> {
    /// Gives the outcome.
    pub fn keep(self, outcome: Result<T>) {
        *self.0.outcome.lock() = Some(outcome);
    }
}

impl<T: Send + 'static> Promise<T> {
    /// Does `work` in a thread with this name; `work` gives the outcome. If no thread starts, the call returns the error
    /// `starting`, and so does every wait.
    pub fn keep_in_thread(
        self,
        name: &str,
        starting: &'static str,
        work: impl FnOnce(Promise<T>) + Send + 'static,
    ) -> Result<()> {
        // A thread that does not start drops its closure, and must not drop the promise with it.
        let kept = Arc::new(Lock::new(Some(self)));
        let theirs = Arc::clone(&kept);
        let spawned = threads::spawn_quiet(name, move || {
            let promise = theirs.lock().take();
            if let Some(promise) = promise {
                work(promise);
            }
        });
        spawned.map_err(|error| {
            let error = Error::system(starting, &error);
            let promise = kept.lock().take();
            if let Some(promise) = promise {
                promise.keep(Err(error.clone()));
            }
            error
        })
    }
}

impl<T> Drop for Promise<T> {
    fn drop(&mut self) {
        let lost = || Err(Error::Internal(format!("the thread of {} panicked", self.0.what)));
        self.0.outcome.lock().get_or_insert_with(lost);
        self.0.given.notify_all();
    }
}

impl<T: Clone> Outcome<T> {
    /// True once the outcome was given.
    pub fn ended(&self) -> bool {
        self.0.outcome.lock().is_some()
    }

    /// The outcome, any number of times. `Timeout` if it was not given after `timeout`.
    pub fn wait(&self, timeout: Option<Duration>) -> Result<T> {
        let until = deadline_after(timeout);
        let Awaited { what, outcome, given } = &*self.0;
        let outcome = given.wait_while(outcome.lock(), until, |outcome| outcome.is_none());
        outcome.clone().unwrap_or_else(|| Err(IoError::wait_timeout(format!("{what} is still in progress"))))
    }
}

impl<T> Drop for Outcome<T> {
    fn drop(&mut self) {
        let Awaited { outcome, given, .. } = &*self.0;
        drop(given.wait_while(outcome.lock(), None, |outcome| outcome.is_none()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::threads;

    #[test]
    fn an_outcome_is_given_once_to_any_number_of_waits() {
        let (promise, outcome) = promise("the sum");
        assert!(!outcome.ended() && outcome.wait(Some(Duration::ZERO)).is_err());
        threads::spawn_quiet("test", move || promise.keep(Ok(3))).unwrap();
        assert_eq!((outcome.wait(None), outcome.wait(None)), (Ok(3), Ok(3)));
        assert!(outcome.ended());
    }

    #[test]
    fn a_thread_that_does_not_start_gives_its_error_to_the_call_and_to_every_wait() {
        let (promise, outcome) = promise::<()>("the sum");
        let begun = threads::without_new_threads(|| {
            promise.keep_in_thread("test", "starting the thread of the sum", |promise| promise.keep(Ok(())))
        });
        let error = begun.unwrap_err();
        assert!(error.to_string().contains("starting the thread of the sum"), "{error}");
        assert_eq!(outcome.wait(None), Err(error));
    }

    #[test]
    fn a_thread_that_panics_gives_an_error() {
        let (promise, outcome) = promise::<()>("the sum");
        threads::spawn_quiet("test", move || {
            let _promise = promise;
            std::panic::resume_unwind(Box::new("a bug"));
        })
        .unwrap();
        let error = outcome.wait(None).unwrap_err();
        assert!(error.to_string().contains("the thread of the sum panicked"), "{error}");
    }
}
