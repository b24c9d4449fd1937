//! A team of worker threads that help the calling thread to process a list of items.
//!
//! The caller starts at once. A worker joins when it wakes; a worker that wakes after the work is done exits. The
//! caller waits only for items already started, never for a worker thread that another program keeps off its processor.
//!
//! The list is divided into consecutive chunks (stretches), one per thread. A thread that finishes its own chunk
//! continues with the next thread's chunk, so the work of a late worker is done by the others. A worker that joins
//! every call usually gets the same chunk, whose data may still be in its caches.
//!
//! Invariants:
//! - Each index is handed out once: chunks do not overlap, and `fetch_add` counts each chunk up. The thread that took
//!   an index therefore has exclusive access to its item.
//! - The gate holds the number of workers inside, and the flag SHUT. A worker enters by a compare-exchange that fails
//!   once SHUT is set. The caller sets SHUT and returns when no worker is inside. Both modify one atomic, so the two
//!   operations are ordered: the caller sees the worker and waits for it, or the worker sees SHUT.
//! - The items and the closure are borrowed from the caller. Only threads inside the gate access them.
//! - The caller sees every write of a worker: a worker leaves with release ordering, and the caller acquires the last
//!   exit.
//! - A worker that wakes later accesses only the gate, which its job co-owns with the caller.

use std::any::Any;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, Thread};

use rayon::{ThreadPool, ThreadPoolBuildError, ThreadPoolBuilder};

/// Worker threads that help the caller of [`Crew::each`].
pub struct Crew {
    pool: ThreadPool,
    /// Worker jobs that are queued and have not started yet, over all calls.
    asked: Arc<AtomicUsize>,
}

/// Limit of queued jobs per worker. A worker that gets no processor time would otherwise accumulate jobs, which take
/// memory.
const MOST_ASKED: usize = 64;

impl Crew {
    /// Starts `workers` threads. The caller of [`Crew::each`] works in addition to them.
    pub fn new(workers: usize) -> Result<Crew, ThreadPoolBuildError> {
        let pool = ThreadPoolBuilder::new()
            .num_threads(workers)
            .thread_name(|index| format!("spillway-{index}"))
            .build()?;
        Ok(Crew { pool, asked: Arc::default() })
    }

    /// Number of workers.
    pub fn workers(&self) -> usize {
        self.pool.current_num_threads()
    }

    /// Applies `work` to every item, concurrently. A panic in any call resumes on the caller's thread.
    pub fn each<T: Send>(&self, items: &mut [T], work: impl Fn(&mut T) + Sync) {
        let base = Base(items.as_mut_ptr());
        // SAFETY: `Shared` hands out each index below items.len() once, and the items stay borrowed during this call.
        let item = |index: usize| work(unsafe { &mut *base.at(index) });
        let workers = self.workers().min(items.len().saturating_sub(1));
        let shared = Arc::new(Shared::new(&item, items.len(), workers + 1));
        for _ in 0..workers {
            self.ask(&shared);
        }
        let shut = Shut(&shared);
        shared.go_through(0);
        drop(shut);
        let panic = shared.panic.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(panic) = panic {
            resume_unwind(panic);
        }
    }

    fn ask(&self, shared: &Arc<Shared>) {
        if self.asked.load(Ordering::Relaxed) >= MOST_ASKED * self.workers() {
            return;
        }
        self.asked.fetch_add(1, Ordering::Relaxed);
        let (asked, shared) = (Arc::clone(&self.asked), Arc::clone(shared));
        self.pool.spawn(move || {
            asked.fetch_sub(1, Ordering::Relaxed);
            shared.join_in();
        });
    }
}

/// Address of the first item.
struct Base<T>(*mut T);

impl<T> Base<T> {
    fn at(&self, index: usize) -> *mut T {
        self.0.wrapping_add(index)
    }
}

// SAFETY: each item is used by one thread at a time, and T: Send wherever a `Base` is made.
unsafe impl<T: Send> Sync for Base<T> {}

/// State that the caller and its workers share.
struct Shared {
    /// Borrowed from the caller: used only by the caller and by workers inside the gate.
    work: *const (dyn Fn(usize) + Sync),
    stretches: Vec<Stretch>,
    gate: AtomicUsize,
    /// Number of workers that entered; gives each worker its chunk.
    came: AtomicUsize,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    caller: Thread,
}

// SAFETY: the closure behind `work` is Sync, and the gate keeps the closure alive for every thread that calls it.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

/// A chunk: consecutive items, with a counter on a cache line of its own.
#[repr(align(64))]
struct Stretch {
    taken: AtomicUsize,
    items: Range<usize>,
}

impl Stretch {
    fn take(&self) -> Option<usize> {
        let taken = self.taken.fetch_add(1, Ordering::Relaxed);
        (taken < self.items.len()).then(|| self.items.start + taken)
    }
}

/// Gate flag: no worker may enter any more.
const SHUT: usize = 1 << (usize::BITS - 1);
/// Number of spins on the gate before the caller parks: some tens of microseconds, as long as one item may take.
const LOOKS: usize = 1 << 10;

impl Shared {
    fn new<'a>(work: &'a (dyn Fn(usize) + Sync + 'a), items: usize, crew: usize) -> Shared {
        let work: *const (dyn Fn(usize) + Sync + 'a) = work;
        // SAFETY: the two types differ in the lifetime alone, and the gate enforces the shorter lifetime.
        let work = unsafe {
            std::mem::transmute::<*const (dyn Fn(usize) + Sync + 'a), *const (dyn Fn(usize) + Sync)>(work)
        };
        let edge = |of: usize| (items as u128 * of as u128 / crew as u128) as usize;
        let stretch = |of: usize| Stretch { taken: AtomicUsize::new(0), items: edge(of)..edge(of + 1) };
        Shared {
            work,
            stretches: (0..crew).map(stretch).collect(),
            gate: AtomicUsize::new(0),
            came: AtomicUsize::new(0),
            panic: Mutex::new(None),
            caller: thread::current(),
        }
    }

    /// Processes all remaining items, starting with the chunk `own`.
    fn go_through(&self, own: usize) {
        // SAFETY: this thread is the caller of `Crew::each`, or a worker inside the gate.
        let work = unsafe { &*self.work };
        let (before, from_own) = self.stretches.split_at(own);
        for stretch in from_own.iter().chain(before) {
            while let Some(index) = stretch.take() {
                work(index);
            }
        }
    }

    /// The job of a worker.
    fn join_in(&self) {
        let enter = |gate: usize| (gate & SHUT == 0).then_some(gate + 1);
        if self.gate.fetch_update(Ordering::Acquire, Ordering::Relaxed, enter).is_err() {
            return;
        }
        let own = 1 + self.came.fetch_add(1, Ordering::Relaxed);
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| self.go_through(own))) {
            *self.panic.lock().unwrap_or_else(PoisonError::into_inner) = Some(panic);
        }
        if self.gate.fetch_sub(1, Ordering::Release) == SHUT + 1 {
            self.caller.unpark();
        }
    }
}

/// Sets SHUT and waits for the workers inside, also when the caller's own work panics.
struct Shut<'a>(&'a Shared);

impl Drop for Shut<'_> {
    fn drop(&mut self) {
        let gate = &self.0.gate;
        let mut inside = gate.fetch_or(SHUT, Ordering::Acquire) & !SHUT;
        for look in 0.. {
            if inside == 0 {
                return;
            }
            if look < LOOKS {
                std::hint::spin_loop()
            } else {
                thread::park()
            }
            inside = gate.load(Ordering::Acquire) & !SHUT;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Barrier;

    #[test]
    fn every_item_is_done_once_whatever_the_crew() {
        for workers in [1, 2, 3, 7] {
            let crew = Crew::new(workers).unwrap();
            for items in [0, 1, 2, 3, 7, 8, 9, 1000] {
                for _ in 0..50 {
                    let mut counts = vec![0; items];
                    crew.each(&mut counts, |count| *count += 1);
                    assert!(counts.iter().all(|count| *count == 1), "{workers} workers, {items} items");
                }
            }
        }
    }

    /// The only worker is blocked until `free`, so the caller processes all items.
    #[test]
    fn a_worker_that_does_not_come_is_not_waited_for() {
        let crew = Crew::new(1).unwrap();
        let (held, free) = (Arc::new(Barrier::new(2)), Arc::new(Barrier::new(2)));
        let (theirs_held, theirs_free) = (Arc::clone(&held), Arc::clone(&free));
        crew.pool.spawn(move || {
            theirs_held.wait();
            theirs_free.wait();
        });
        held.wait();
        let caller = thread::current().id();
        for _ in 0..10 * MOST_ASKED {
            let mut items = [None; 16];
            crew.each(&mut items, |item| *item = Some(thread::current().id()));
            assert!(items.iter().all(|item| *item == Some(caller)));
        }
        assert_eq!(crew.asked.load(Ordering::Relaxed), MOST_ASKED);
        free.wait();
        // The late jobs find SHUT set, and the worker is available again.
        while crew.asked.load(Ordering::Relaxed) > 0 {
            thread::yield_now();
        }
        let together = Barrier::new(2);
        crew.each(&mut [(), ()], |()| {
            together.wait();
        });
    }

    #[test]
    fn a_worker_that_came_is_waited_for() {
        let (crew, caller) = (Crew::new(1).unwrap(), thread::current().id());
        let together = Barrier::new(2);
        let mut items = [false; 2];
        crew.each(&mut items, |item| {
            together.wait();
            if thread::current().id() != caller {
                thread::sleep(std::time::Duration::from_millis(50));
            }
            *item = true;
        });
        assert_eq!(items, [true; 2]);
    }

    #[test]
    fn a_panic_on_any_thread_reaches_the_caller_when_all_have_left() {
        let crew = Crew::new(3).unwrap();
        for bad in 0..64 {
            let inside = AtomicUsize::new(0);
            let mut items: Vec<usize> = (0..64).collect();
            let attempt = AssertUnwindSafe(|| {
                crew.each(&mut items, |item| {
                    assert!(*item != bad, "item {bad}");
                    inside.fetch_add(1, Ordering::Relaxed);
                    thread::yield_now();
                    inside.fetch_sub(1, Ordering::Relaxed);
                });
            });
            let panic = catch_unwind(attempt).unwrap_err();
            assert_eq!(panic.downcast_ref::<String>(), Some(&format!("item {bad}")));
            assert_eq!(inside.into_inner(), 0, "a worker was still at an item");
        }
    }

    #[test]
    fn calls_inside_calls_and_from_many_threads_end() {
        let crew = Crew::new(2).unwrap();
        let total = AtomicUsize::new(0);
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..50 {
                        crew.each(&mut [0; 5], |_| {
                            crew.each(&mut [0; 5], |_| {
                                total.fetch_add(1, Ordering::Relaxed);
                            });
                        });
                    }
                });
            }
        });
        assert_eq!(total.into_inner(), 4 * 50 * 25);
    }
}
