//! A team of worker threads that help the calling thread to process a list of items.
//!
//! The caller starts at once. A worker joins when it wakes; a worker that wakes after the work is done exits. The
//! caller waits only for items already started, never for a worker thread that another program keeps off its processor.
//!
//! The list is divided into consecutive chunks, one per thread. A worker that joins every call gets the same chunk, whose
//! data may still be in its caches. A thread that finishes its own chunk continues with the chunks of workers that did
//! not come, and then with those of workers that fell behind.
//!
//! Invariants:
//! - Each index is handed out once: chunks do not overlap, and `fetch_add` counts each chunk up. The thread that took
//!   an index therefore has exclusive access to its item.
//! - `occupancy` holds the number of workers inside, and the flag CLOSED. A worker enters by a compare-exchange that
//!   fails once CLOSED is set. The caller sets CLOSED and returns when no worker is inside. Both modify one atomic, so
//!   the two operations are ordered: the caller sees the worker and waits for it, or the worker sees CLOSED.
//! - The items and the closure are borrowed from the caller. Only the caller and the workers inside access them.
//! - The caller sees every write of a worker: a worker leaves with release ordering, and the caller acquires the last
//!   exit.
//! - A worker outside accesses only fields of `TeamWork` that borrow nothing; its job co-owns them with the caller.

use std::any::Any;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::time::Duration;

use rayon::{ThreadPool, ThreadPoolBuildError, ThreadPoolBuilder};

use super::sync::Lock;
use super::{futex, openmp};

/// Worker threads that help the caller of [`Team::each`].
pub struct Team {
    pool: ThreadPool,
    /// True if the workers have processors of their own: OpenMP's threads then never take their place.
    bound: bool,
    /// Worker jobs that are queued and have not started yet, over all calls.
    queued: Arc<AtomicUsize>,
}

/// Limit of queued jobs per worker. A worker that gets no processor time would otherwise accumulate jobs, which take
/// memory.
const MAX_QUEUED: usize = 64;
/// Stack of a thread of the library. Stated, because Rust otherwise reads it from the variable RUST_MIN_STACK.
pub const STACK_BYTES: usize = 2 << 20;

impl Team {
    /// Starts `workers` threads. The caller of [`Team::each`] works in addition to them. Each worker calls
    /// `start` first, and then `bind`, which binds it.
    pub fn new(
        workers: usize,
        start: fn(),
        bind: Option<Box<dyn Fn() + Send + Sync>>,
    ) -> Result<Team, ThreadPoolBuildError> {
        let bound = bind.is_some();
        let pool = ThreadPoolBuilder::new()
            .num_threads(workers)
            .thread_name(|index| format!("spillway-{index}"))
            .stack_size(STACK_BYTES)
            .start_handler(move |_| {
                start();
                bind.iter().for_each(|bind| bind());
            })
            .build()?;
        Ok(Team { pool, bound, queued: Arc::default() })
    }

    /// Number of workers.
    pub fn workers(&self) -> usize {
        self.pool.current_num_threads()
    }

    /// Applies `work` to every item, concurrently on at most `most` threads. A panic in any call resumes on the caller's
    /// thread.
    pub fn each<T: Send>(&self, most: usize, items: &mut [T], work: impl Fn(&mut T) + Sync) {
        let base = Base(items.as_mut_ptr());
        // SAFETY: `TeamWork` hands out each index below items.len() once, and the items stay borrowed during this call.
        let item = |index: usize| work(unsafe { &mut *base.at(index) });
        let workers = self.workers().min(items.len().saturating_sub(1)).min(most.saturating_sub(1));
        let shared = Arc::new(TeamWork::new(&item, items.len(), workers + 1));
        let began = openmp::now();
        if !self.bound
            && workers == self.workers()
            && openmp::run(workers + 1, &|number| shared.run_in_region(number))
        {
            openmp::call_ended(began);
            return shared.resume_panic();
        }
        for _ in 0..workers {
            self.queue_job(&shared);
        }
        let close = CloseOnDrop(&shared);
        shared.process_from(0);
        drop(close);
        openmp::call_ended(began);
        shared.resume_panic();
    }

    fn queue_job(&self, shared: &Arc<TeamWork>) {
        if self.queued.load(Ordering::Relaxed) >= MAX_QUEUED * self.workers() {
            return;
        }
        self.queued.fetch_add(1, Ordering::Relaxed);
        let (queued, shared) = (Arc::clone(&self.queued), Arc::clone(shared));
        self.pool.spawn(move || {
            queued.fetch_sub(1, Ordering::Relaxed);
            shared.run_worker(rayon::current_thread_index().unwrap_or(0));
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
struct TeamWork {
    /// Borrowed from the caller: used only by the caller and by workers inside.
    work: *const (dyn Fn(usize) + Sync),
    chunks: Vec<Chunk>,
    occupancy: AtomicUsize,
    panic: Lock<Option<Box<dyn Any + Send>>>,
    /// RUNNING, ASLEEP while the caller sleeps, LEFT when the last worker has left after CLOSED.
    workers: AtomicU32,
}

const RUNNING: u32 = 0;
const ASLEEP: u32 = 1;
const LEFT: u32 = 2;

// SAFETY: the closure behind `work` is Sync, and `occupancy` keeps the closure alive for every thread that calls it.
unsafe impl Send for TeamWork {}
// SAFETY: as above.
unsafe impl Sync for TeamWork {}

/// A chunk: consecutive items, with a counter on cache lines of its own.
#[repr(align(128))]
struct Chunk {
    taken: AtomicUsize,
    /// True once its owner works on this call.
    joined: AtomicBool,
    items: Range<usize>,
}

impl Chunk {
    fn process(&self, work: &(dyn Fn(usize) + Sync)) {
        while let Some(index) = self.take() {
            work(index);
        }
    }

    fn take(&self) -> Option<usize> {
        let taken = self.taken.fetch_add(1, Ordering::Relaxed);
        (taken < self.items.len()).then(|| self.items.start + taken)
    }
}

/// Flag in `occupancy`: no worker may enter any more.
const CLOSED: usize = 1 << (usize::BITS - 1);
/// Longest sleep before the caller looks again.
const SLEEP: Duration = Duration::from_secs(1);
/// Number of spins on `occupancy` before the caller sleeps: some tens of microseconds, as long as one item may take.
const SPINS: usize = 1 << 10;

impl TeamWork {
    fn new<'a>(work: &'a (dyn Fn(usize) + Sync + 'a), items: usize, team: usize) -> TeamWork {
        let work: *const (dyn Fn(usize) + Sync + 'a) = work;
        // SAFETY: the two types differ in the lifetime alone, and `occupancy` enforces the shorter lifetime.
        let work = unsafe {
            std::mem::transmute::<*const (dyn Fn(usize) + Sync + 'a), *const (dyn Fn(usize) + Sync)>(work)
        };
        let edge = |of: usize| (items as u128 * of as u128 / team as u128) as usize;
        let chunk = |of: usize| Chunk {
            taken: AtomicUsize::new(0),
            joined: AtomicBool::new(of == 0),
            items: edge(of)..edge(of + 1),
        };
        TeamWork {
            work,
            chunks: (0..team).map(chunk).collect(),
            occupancy: AtomicUsize::new(0),
            panic: Lock::new(None),
            workers: AtomicU32::new(RUNNING),
        }
    }

    /// Processes all remaining items, starting with the chunk `own`.
    fn process_from(&self, own: usize) {
        // SAFETY: this thread is the caller of `Team::each`, or a worker inside.
        let work = unsafe { &*self.work };
        let (before, from_own) = self.chunks.split_at(own);
        let others = || from_own.iter().skip(1).chain(before);
        self.chunks[own].process(work);
        others().filter(|chunk| !chunk.joined.load(Ordering::Relaxed)).for_each(|chunk| chunk.process(work));
        others().for_each(|chunk| chunk.process(work));
    }

    /// The job of a thread of an OpenMP region, which ends after all threads have returned from here.
    fn run_in_region(&self, number: usize) {
        if number > 0 {
            return self.run_worker(number - 1);
        }
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| self.process_from(0))) {
            *self.panic.lock() = Some(panic);
        }
    }

    /// Resumes a panic of any thread, when all threads have left.
    fn resume_panic(&self) {
        let panic = self.panic.lock().take();
        if let Some(panic) = panic {
            resume_unwind(panic);
        }
    }

    /// The job of a worker.
    fn run_worker(&self, worker: usize) {
        let enter = |occupancy: usize| (occupancy & CLOSED == 0).then_some(occupancy + 1);
        if self.occupancy.fetch_update(Ordering::Acquire, Ordering::Relaxed, enter).is_err() {
            return;
        }
        // The chunk 0 is the caller's. A job exists only for a list of at least two chunks.
        let own = 1 + worker % (self.chunks.len() - 1);
        self.chunks[own].joined.store(true, Ordering::Relaxed);
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| self.process_from(own))) {
            *self.panic.lock() = Some(panic);
        }
        if self.occupancy.fetch_sub(1, Ordering::Release) == CLOSED + 1 {
            // A futex, because a thread that ends has no handle by which another could unpark it.
            if self.workers.swap(LEFT, Ordering::Release) == ASLEEP {
                futex::wake_all(&self.workers);
            }
        }
    }
}

/// Sets CLOSED and waits for the workers inside, also when the caller's own work panics.
struct CloseOnDrop<'a>(&'a TeamWork);

impl Drop for CloseOnDrop<'_> {
    fn drop(&mut self) {
        let TeamWork { occupancy, workers, .. } = self.0;
        let mut inside = occupancy.fetch_or(CLOSED, Ordering::Acquire) & !CLOSED;
        for spin in 0.. {
            if inside == 0 {
                return;
            }
            if spin < SPINS {
                std::hint::spin_loop()
            } else if workers.compare_exchange(RUNNING, ASLEEP, Ordering::Relaxed, Ordering::Relaxed)
                != Err(LEFT)
            {
                futex::wait(workers, ASLEEP, SLEEP);
            }
            inside = occupancy.load(Ordering::Acquire) & !CLOSED;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;
    use std::thread;

    use super::*;

    #[test]
    fn every_item_is_done_once_whatever_the_crew() {
        for workers in [1, 2, 3, 7] {
            let team = Team::new(workers, || (), None).unwrap();
            for items in [0, 1, 2, 3, 7, 8, 9, 1000] {
                for _ in 0..50 {
                    let mut counts = vec![0; items];
                    team.each(usize::MAX, &mut counts, |count| *count += 1);
                    assert!(counts.iter().all(|count| *count == 1), "{workers} workers, {items} items");
                }
            }
        }
    }

    /// The only worker is blocked until `free`, so the caller processes all items.
    #[test]
    fn a_worker_that_does_not_come_is_not_waited_for() {
        let team = Team::new(1, || (), None).unwrap();
        let (held, free) = (Arc::new(Barrier::new(2)), Arc::new(Barrier::new(2)));
        let (theirs_held, theirs_free) = (Arc::clone(&held), Arc::clone(&free));
        team.pool.spawn(move || {
            theirs_held.wait();
            theirs_free.wait();
        });
        held.wait();
        let caller = thread::current().id();
        for _ in 0..10 * MAX_QUEUED {
            let mut items = [None; 16];
            team.each(usize::MAX, &mut items, |item| *item = Some(thread::current().id()));
            assert!(items.iter().all(|item| *item == Some(caller)));
        }
        assert_eq!(team.queued.load(Ordering::Relaxed), MAX_QUEUED);
        free.wait();
        // The late jobs find CLOSED set, and the worker is available again.
        while team.queued.load(Ordering::Relaxed) > 0 {
            thread::yield_now();
        }
        let together = Barrier::new(2);
        team.each(usize::MAX, &mut [(), ()], |()| {
            together.wait();
        });
    }

    #[test]
    fn a_worker_that_came_is_waited_for() {
        let (team, caller) = (Team::new(1, || (), None).unwrap(), thread::current().id());
        let together = Barrier::new(2);
        let mut items = [false; 2];
        team.each(usize::MAX, &mut items, |item| {
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
        let team = Team::new(3, || (), None).unwrap();
        for bad in 0..64 {
            let inside = AtomicUsize::new(0);
            let mut items: Vec<usize> = (0..64).collect();
            let attempt = AssertUnwindSafe(|| {
                team.each(usize::MAX, &mut items, |item| {
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
        let team = Team::new(2, || (), None).unwrap();
        let total = AtomicUsize::new(0);
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..50 {
                        team.each(usize::MAX, &mut [0; 5], |_| {
                            team.each(usize::MAX, &mut [0; 5], |_| {
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
