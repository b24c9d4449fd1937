//! Limits the threads of the calls of one thread, and counts the threads at work under a limit.
//!
//! Invariants:
//! - A limit belongs to the thread that set it. Its calls of [`super::threads::each`] use at most that number of
//!   threads, itself included.
//! - The count has each thread once: the calling thread from the begin of [`within`] to its end, a worker while it
//!   processes an item of a limited call.
#![forbid(unsafe_code)]

use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::fork::PerProcessStatic;

thread_local! {
    /// The limit of this thread; 0 for none.
    static LIMIT: Cell<usize> = const { Cell::new(0) };
}

/// Threads at work under a limit. A forked child counts its own.
static COUNTS: PerProcessStatic<Counts> = PerProcessStatic::empty();

#[derive(Debug, Default)]
struct Counts {
    running: AtomicUsize,
    peak: AtomicUsize,
}

/// Counts this thread while it lives.
struct Counted;

impl Counted {
    fn begin() -> Counted {
        let counts = COUNTS.get_or_make(Counts::default);
        let running = counts.running.fetch_add(1, Ordering::AcqRel) + 1;
        counts.peak.fetch_max(running, Ordering::AcqRel);
        Counted
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        COUNTS.get_or_make(Counts::default).running.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Calls `work`, whose calls of [`super::threads::each`] use at most `threads` threads.
pub fn within<R>(threads: usize, work: impl FnOnce() -> R) -> R {
    struct Restore(usize);
    impl Drop for Restore {
        fn drop(&mut self) {
            LIMIT.set(self.0);
        }
    }
    let _restore = Restore(LIMIT.replace(threads.max(1)));
    let _counted = Counted::begin();
    work()
}

/// The limit of the calling thread.
pub(super) fn limit() -> Option<usize> {
    Some(LIMIT.get()).filter(|limit| *limit > 0)
}

/// Calls `work` with an item of a limited call; counts the thread if it is a worker.
pub(super) fn counted<T>(item: T, work: impl Fn(T)) {
    let _counted = limit().is_none().then(Counted::begin);
    work(item);
}

/// Threads at work under a limit: now, and the largest number so far.
pub fn running_and_peak() -> (usize, usize) {
    let counts = COUNTS.get_or_make(Counts::default);
    (counts.running.load(Ordering::Acquire), counts.peak.load(Ordering::Acquire))
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::thread;

    use super::super::threads;
    use super::*;

    #[test]
    fn a_limited_call_uses_no_more_threads_and_the_next_one_is_free_again() {
        for most in [1, 2] {
            let seen = Mutex::new(std::collections::BTreeSet::new());
            within(most, || {
                assert_eq!(limit(), Some(most));
                let note = |_: &mut u8| {
                    seen.lock().unwrap().insert(format!("{:?}", thread::current().id()));
                };
                threads::each(&mut [0; 100], note).unwrap();
                assert!(running_and_peak().0 >= 1);
            });
            assert!(seen.lock().unwrap().len() <= most);
        }
        assert_eq!(limit(), None);
        let panicked = std::panic::catch_unwind(|| within(3, || panic!("inside")));
        assert!(panicked.is_err() && limit().is_none());
    }
}
