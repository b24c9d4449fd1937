//! Workers that wait awake between calls that follow each other closely. Waking a sleeping thread takes as long as
//! stepping some 10,000 parameters.
//!
//! Invariants:
//! - A worker waits awake for at most the limit (`SPILLWAY_SPIN_US`), and only in a burst: the pause before the present
//!   call was shorter than the limit. A program that computes between its steps has no worker that waits awake, except
//!   for one limit after the last call of a burst.
//! - A worker that lost its processor while it waited ends its wait, and no burst begins during [`CROWDED`]: other
//!   threads need the processors.
//! - A job that a seat accepts is taken once, by the worker that waits there.

use std::hint::spin_loop;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};
use std::time::Duration;

use nix::time::{ClockId, clock_gettime};

use crate::environment;
use crate::error::{Error, Result};

/// The limit if `SPILLWAY_SPIN_US` is not set, in nanoseconds.
const DEFAULT_LIMIT: u64 = 0;
/// Largest limit, in microseconds.
const MAX_LIMIT_US: u64 = 10_000;
/// A gap in the time of a waiting worker that shows that it lost its processor, in nanoseconds.
const LOST: u64 = 500_000;
/// How long no burst begins after a worker lost its processor, in nanoseconds.
const CROWDED: u64 = 10_000_000;
/// Looks at the seat between two looks at the clock.
const LOOKS: usize = 32;

/// Monotonic time in nanoseconds.
pub fn now() -> u64 {
    // The monotonic clock always exists.
    clock_gettime(ClockId::CLOCK_MONOTONIC).map_or(0, |time| Duration::from(time).as_nanos() as u64)
}

/// The limit that `SPILLWAY_SPIN_US` sets, in nanoseconds.
pub fn configured_limit() -> Result<u64> {
    match environment::word("SPILLWAY_SPIN_US")? {
        None => Ok(DEFAULT_LIMIT),
        Some(text) => text
            .parse()
            .ok()
            .filter(|limit| *limit <= MAX_LIMIT_US)
            .map(|limit: u64| limit * 1000)
            .ok_or_else(|| {
                let reason = format!("{text:?} is not a number from 0 to {MAX_LIMIT_US}");
                Error::invalid("SPILLWAY_SPIN_US", reason)
            }),
    }
}

/// Whether calls follow each other closely. Several threads may use it at once; its answers are estimates.
#[derive(Debug)]
pub struct Burst {
    /// Longest pause of a burst, in nanoseconds; [`UNKNOWN`] until it is set.
    limit: AtomicU64,
    /// End of the last call.
    ended: AtomicU64,
    /// End of the time in which no burst begins.
    crowded: AtomicU64,
}

const UNKNOWN: u64 = u64::MAX;

impl Burst {
    /// Without a call and without a limit: never a burst.
    pub const fn new() -> Burst {
        Burst { limit: AtomicU64::new(UNKNOWN), ended: AtomicU64::new(0), crowded: AtomicU64::new(0) }
    }

    /// Sets the longest pause of a burst in nanoseconds; 0: never a burst. `None`: not decided yet.
    pub fn set_limit(&self, limit: Option<u64>) {
        self.limit.store(limit.unwrap_or(UNKNOWN), Ordering::Relaxed);
    }

    /// The longest pause of a burst; `None` until it is set.
    pub fn limit(&self) -> Option<u64> {
        Some(self.limit.load(Ordering::Relaxed)).filter(|limit| *limit != UNKNOWN)
    }

    /// True if a call that begins now belongs to a burst.
    pub fn goes_on(&self) -> bool {
        let limit = self.limit().unwrap_or(0);
        if limit == 0 {
            return false;
        }
        let now = now();
        now.saturating_sub(self.ended.load(Ordering::Relaxed)) < limit
            && now >= self.crowded.load(Ordering::Relaxed)
    }

    /// A call has ended.
    pub fn call_ended(&self) {
        if self.limit() != Some(0) {
            self.ended.store(now(), Ordering::Relaxed);
        }
    }
}

/// Where one worker waits awake, on cache lines of its own.
#[derive(Debug)]
#[repr(align(128))]
pub struct Seat<T> {
    /// NULL: no worker waits. [`waiting`]: a worker waits. Any other address: a job, from `Arc::into_raw`.
    job: AtomicPtr<T>,
}

/// The address that marks a waiting worker.
fn waiting<T>() -> *mut T {
    // An address that no job has: a job is behind the counters of its Arc.
    ptr::without_provenance_mut(align_of::<T>())
}

impl<T> Seat<T> {
    /// A seat where no worker waits.
    pub const fn empty() -> Seat<T> {
        Seat { job: AtomicPtr::new(ptr::null_mut()) }
    }

    /// Gives a job to the worker that waits here. False if none waits.
    pub fn give(&self, job: &Arc<T>) -> bool {
        if self.job.load(Ordering::Relaxed) != waiting() {
            return false;
        }
        let given = Arc::into_raw(Arc::clone(job)).cast_mut();
        let accepted =
            self.job.compare_exchange(waiting(), given, Ordering::Release, Ordering::Relaxed).is_ok();
        if !accepted {
            // SAFETY: from `into_raw` above, and nobody else has it.
            drop(unsafe { Arc::from_raw(given) });
        }
        accepted
    }

    /// Waits awake for a job. `None` after the burst's limit, when `stop` is true, or when the processor was lost. One
    /// thread at a time waits at a seat.
    pub fn wait(&self, burst: &Burst, stop: impl Fn() -> bool) -> Option<Arc<T>> {
        self.job.store(waiting(), Ordering::Relaxed);
        let (start, limit) = (now(), burst.limit().unwrap_or(0));
        let mut last = start;
        while !self.looks() && !stop() {
            let now = now();
            if now - last > LOST {
                burst.crowded.store(now + CROWDED, Ordering::Relaxed);
                break;
            }
            if now - start >= limit {
                break;
            }
            last = now;
        }
        let job = self.job.swap(ptr::null_mut(), Ordering::Acquire);
        // SAFETY: any other address is that of a job, from `into_raw`; the swap gave it to this thread alone.
        (job != waiting()).then(|| unsafe { Arc::from_raw(job) })
    }

    /// Looks for a job a few times.
    fn looks(&self) -> bool {
        (0..LOOKS).any(|_| {
            spin_loop();
            self.job.load(Ordering::Relaxed) != waiting()
        })
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::sync::atomic::AtomicBool;
    use std::thread;

    use super::*;

    /// A burst with a limit in nanoseconds.
    pub fn burst(limit: u64) -> &'static Burst {
        let burst = Box::leak(Box::new(Burst::new()));
        burst.set_limit(Some(limit));
        burst
    }

    #[test]
    fn every_job_that_a_seat_accepts_is_taken_once() {
        let (seat, over) = (Seat::empty(), AtomicBool::new(false));
        let job = Arc::new(());
        let (given, taken) = thread::scope(|scope| {
            let worker = scope.spawn(|| {
                let mut taken = 0;
                while !over.load(Ordering::Relaxed) {
                    taken += usize::from(seat.wait(burst(20_000), || over.load(Ordering::Relaxed)).is_some());
                }
                taken
            });
            let mut given = 0;
            for _ in 0..200_000 {
                given += usize::from(seat.give(&job));
            }
            over.store(true, Ordering::Relaxed);
            (given, worker.join().unwrap())
        });
        assert_eq!(given, taken);
        assert_eq!(Arc::strong_count(&job), 1);
    }

    #[test]
    fn calls_are_a_burst_only_while_their_pauses_are_short() {
        let long = burst(UNKNOWN - 1);
        assert!(long.goes_on());
        long.crowded.store(u64::MAX, Ordering::Relaxed);
        assert!(!long.goes_on());
        let short = burst(1);
        short.call_ended();
        thread::sleep(Duration::from_millis(1));
        assert!(!short.goes_on());
        assert!(!burst(0).goes_on() && !Burst::new().goes_on());
    }

    #[test]
    fn a_wait_ends_at_the_limit_and_when_it_is_stopped() {
        let seat = Seat::<()>::empty();
        assert!(seat.wait(burst(1_000_000), || false).is_none());
        assert!(seat.wait(burst(UNKNOWN - 1), || true).is_none());
        assert!(!seat.give(&Arc::new(())));
    }
}
