//! Runs system calls that may not return, each on a thread of its own, with a time limit.
//!
//! A thread whose call has returned waits a moment for the next call of the same caller: a commit makes several, and to
//! start a thread takes as long as such a call.
//!
//! Invariants:
//! - A thread gets no other call before its call has returned and the result was sent or dropped.
//! - A call that exceeds its limit keeps running. Its own thread drops the result when the call returns.
//! - Until that call returns, another call on the same path returns `NoAnswer::EarlierCall` at once. The new call would
//!   block on the same file system, or on a resource that the first call holds.
//! - Time in which this process did not run (SIGSTOP, a paused container) does not count towards the limit. Neither does
//!   the time until the thread of a call runs.
//! - Where no thread can be started, a call runs on the calling thread, without a limit.
//! - No lock is held across a fork. Calls in flight in the parent do not count in its child.

use std::cell::RefCell;
use std::io;
use std::panic::{self, AssertUnwindSafe};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use arc_swap::ArcSwapOption;

use super::fork::PerProcess;
use super::threads;

use crate::sys::sync::Lock;

/// Length of one wait. A slice that takes longer, because the process did not run, adds at most twice this length.
const SLICE: Duration = Duration::from_millis(50);

/// How long a thread waits for its caller's next call.
const IDLE: Duration = Duration::from_millis(10);

/// Why a call has no result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NoAnswer {
    /// The call took longer than its limit.
    TooLong,
    /// An earlier call on the path has not returned. The call did not start, or, for [`Call::cleanup`], nobody waits for
    /// it.
    EarlierCall,
}

/// Result of a call, or why there is none. The outer error: the call panicked.
pub type Answer<T> = io::Result<Result<T, NoAnswer>>;

/// A call that uses files below a path.
pub struct Call<T> {
    path: PathBuf,
    work: Work<T>,
    cleanup: bool,
}

impl<T> Call<T> {
    /// A call that does not start while an earlier call on the path has not returned.
    pub fn new(path: &Path, work: impl FnOnce() -> T + Send + 'static) -> Call<T> {
        Call { path: path.to_path_buf(), work: Box::new(work), cleanup: false }
    }

    /// A call that starts in any case, because only it frees what `work` owns. Nobody waits for it while an earlier call
    /// on the path has not returned.
    pub fn cleanup(path: &Path, work: impl FnOnce() -> T + Send + 'static) -> Call<T> {
        Call { cleanup: true, ..Call::new(path, work) }
    }
}

/// Returns the result of `work`, which uses files below `path`. Without a limit `work` runs on the calling thread.
pub fn run_within<T: Send + 'static>(
    limit: Option<Duration>,
    path: &Path,
    work: impl FnOnce() -> T + Send + 'static,
) -> Answer<T> {
    let only = run_all_within(limit, vec![Call::new(path, work)]).pop();
    only.unwrap_or_else(|| Err(io::Error::other("the call has no result")))
}

/// Runs calls on different paths at the same time, and returns their results in order. All of them share one limit.
pub fn run_all_within<T: Send + 'static>(limit: Option<Duration>, calls: Vec<Call<T>>) -> Vec<Answer<T>> {
    let Some(limit) = limit else {
        return calls.into_iter().map(|call| Ok(Ok((call.work)()))).collect();
    };
    let (send, receive) = mpsc::channel();
    let mut flights: Vec<Flight<T>> =
        calls.into_iter().enumerate().map(|(number, call)| Flight::begin(number, call, &send)).collect();
    drop(send);
    let mut waited = Duration::ZERO;
    while waited < limit && flights.iter().any(|flight| flight.answer.is_none()) {
        let began = Instant::now();
        match receive.recv_timeout(SLICE.min(limit - waited)) {
            Ok((number, Some(result))) => flights[number].answer = Some(Ok(Ok(result))),
            Ok((number, None)) => flights[number].answer = Some(Err(panicked())),
            Err(RecvTimeoutError::Disconnected) => break,
            Err(RecvTimeoutError::Timeout) => {}
        }
        if flights.iter().all(Flight::runs) {
            waited += began.elapsed().min(2 * SLICE);
        }
    }
    flights.into_iter().map(Flight::end).collect()
}

/// A call whose thread was started, or its answer.
struct Flight<T> {
    path: PathBuf,
    started: Arc<AtomicBool>,
    done: Arc<AtomicBool>,
    answer: Option<Answer<T>>,
}

impl<T: Send + 'static> Flight<T> {
    fn begin(number: usize, call: Call<T>, send: &Sender<(usize, Option<T>)>) -> Flight<T> {
        let Call { path, work, cleanup } = call;
        let (started, done) = (Arc::default(), Arc::default());
        let mut flight = Flight { path, started, done, answer: None };
        let earlier = is_abandoned(&flight.path);
        if earlier && !cleanup {
            flight.answer = Some(Ok(Err(NoAnswer::EarlierCall)));
            return flight;
        }
        let (starts, sets_done) = (Arc::clone(&flight.started), DoneOnDrop(Arc::clone(&flight.done)));
        let send = send.clone();
        let work = Arc::new(Lock::new(Some(work)));
        let theirs = Arc::clone(&work);
        let begun = begin_on_thread(Box::new(move || {
            starts.store(true, Ordering::Release);
            let run = move || take(&theirs).map(|work| work());
            let result = panic::catch_unwind(AssertUnwindSafe(run)).ok().flatten();
            // The send fails if the caller no longer waits. The result is then dropped here, before `done` is set.
            let _ = send.send((number, result));
            drop(sets_done);
        }));
        match begun {
            // Without a thread the call has no limit. An error would make a commit fail on a file system that works.
            Err(error) => flight.answer = Some(take(&work).map(|work| Ok(work())).ok_or(error)),
            Ok(()) if earlier => {
                abandon(&flight.path, Arc::clone(&flight.done));
                flight.answer = Some(Ok(Err(NoAnswer::EarlierCall)));
            }
            Ok(()) => {}
        }
        flight
    }

    /// False until the thread runs.
    fn runs(&self) -> bool {
        self.answer.is_some() || self.started.load(Ordering::Acquire)
    }

    fn end(self) -> Answer<T> {
        self.answer.unwrap_or_else(|| {
            abandon(&self.path, self.done);
            Ok(Err(NoAnswer::TooLong))
        })
    }
}

/// What a thread does for one call.
type Job = Box<dyn FnOnce() + Send>;

thread_local! {
    /// Threads that this thread has started, and that may wait for its next call.
    static WAITING: RefCell<Vec<Waiting>> = const { RefCell::new(Vec::new()) };
}

/// A thread of calls, as its caller sees it.
struct Waiting {
    /// [`BUSY`], [`READY`] or [`ENDED`].
    state: Arc<AtomicU8>,
    /// A forked child has no such thread.
    jobs: PerProcess<Sender<Job>>,
}

/// The thread is at work, or its next job is on the way.
const BUSY: u8 = 0;
/// It waits for a job.
const READY: u8 = 1;
/// It gets no further job.
const ENDED: u8 = 2;

fn changes(state: &AtomicU8, from: u8, to: u8) -> bool {
    state.compare_exchange(from, to, Ordering::AcqRel, Ordering::Acquire).is_ok()
}

/// Starts a job on a thread of this caller that waits, else on a new one.
fn begin_on_thread(job: Job) -> io::Result<()> {
    let ready = WAITING.try_with(|waiting| {
        let mut waiting = waiting.borrow_mut();
        waiting.retain(|one| one.jobs.is_here() && one.state.load(Ordering::Acquire) != ENDED);
        waiting.iter().find(|one| changes(&one.state, READY, BUSY)).and_then(|one| one.jobs.get().cloned())
    });
    if let Ok(Some(jobs)) = ready {
        return jobs.send(job).map_err(|_| panicked());
    }
    let (send, receive) = mpsc::channel();
    let state = Arc::new(AtomicU8::new(BUSY));
    let theirs = Arc::clone(&state);
    threads::spawn_quiet("spillway-call", move || serve(job, &theirs, &receive))?;
    // A caller that ends has no next call.
    let _ = WAITING.try_with(|waiting| {
        waiting.borrow_mut().push(Waiting { state, jobs: PerProcess::new(send) });
    });
    Ok(())
}

/// Does a job, and those that follow soon.
fn serve(first: Job, state: &AtomicU8, jobs: &Receiver<Job>) {
    let mut next = Some(first);
    while let Some(job) = next {
        job();
        state.store(READY, Ordering::Release);
        next = match jobs.recv_timeout(IDLE) {
            Ok(job) => Some(job),
            Err(_) if changes(state, READY, ENDED) => None,
            // The caller sends one at this moment.
            Err(_) => jobs.recv().ok(),
        };
    }
}

type Work<T> = Box<dyn FnOnce() -> T + Send>;

fn take<T>(work: &Lock<Option<Work<T>>>) -> Option<Work<T>> {
    work.lock().take()
}

fn panicked() -> io::Error {
    io::Error::other("its thread ended unexpectedly")
}

struct DoneOnDrop(Arc<AtomicBool>);

impl Drop for DoneOnDrop {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

/// A call in flight whose caller stopped waiting.
struct Abandoned {
    path: PathBuf,
    done: PerProcess<Arc<AtomicBool>>,
}

impl Abandoned {
    fn is_running(&self) -> bool {
        self.done.get().is_some_and(|done| !done.load(Ordering::Acquire))
    }
}

static ABANDONED: ArcSwapOption<Vec<Arc<Abandoned>>> = ArcSwapOption::const_empty();

/// True while a call on the path, whose caller stopped waiting, has not returned.
pub fn is_abandoned(path: &Path) -> bool {
    let all = ABANDONED.load();
    all.iter().flat_map(|all| all.iter()).any(|call| call.path == path && call.is_running())
}

fn abandon(path: &Path, done: Arc<AtomicBool>) {
    let call = Arc::new(Abandoned { path: path.to_path_buf(), done: PerProcess::new(done) });
    ABANDONED.rcu(|all| {
        let before = all.iter().flat_map(|all| all.iter()).filter(|call| call.is_running());
        Some(Arc::new(before.chain([&call]).cloned().collect::<Vec<_>>()))
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::fork::in_forked_child;

    const LONG: Option<Duration> = Some(Duration::from_secs(60));

    #[test]
    fn a_call_that_does_not_return_is_left_alone_and_its_path_with_it() {
        let (path, other) = (Path::new("hung"), Path::new("other"));
        assert_eq!(run_within(None, path, || 7).unwrap(), Ok(7));
        assert_eq!(run_within(LONG, path, || 8).unwrap(), Ok(8));
        let (release, held) = mpsc::channel::<()>();
        let kept = Arc::new(());
        let theirs = Arc::clone(&kept);
        let hung = run_within(Some(Duration::from_millis(60)), path, move || {
            let _ = held.recv();
            theirs
        });
        assert!(matches!(hung.unwrap(), Err(NoAnswer::TooLong)));
        assert_eq!(Arc::strong_count(&kept), 2, "the call still has what it works with");
        let second = run_within(LONG, path, || panic!("started beside the earlier call")).unwrap();
        assert_eq!(second, Err::<(), _>(NoAnswer::EarlierCall));
        assert_eq!(run_within(LONG, other, || 9).unwrap(), Ok(9));
        assert!(in_forked_child(|| !is_abandoned(path)), "a parent's call counts in the child");
        drop(release);
        while is_abandoned(path) {
            std::thread::yield_now();
        }
        assert_eq!(Arc::strong_count(&kept), 1);
        assert_eq!(run_within(LONG, path, || 10).unwrap(), Ok(10));
    }

    #[test]
    fn calls_on_several_paths_share_one_limit_and_a_cleanup_starts_beside_an_earlier_call() {
        let limit = Duration::from_millis(200);
        let (release, held) = mpsc::channel::<()>();
        let held = Arc::new(std::sync::Mutex::new(held));
        let hung = |path: &str| {
            let held = Arc::clone(&held);
            Call::new(Path::new(path), move || {
                let _ = held.lock().map(|held| held.recv());
            })
        };
        let began = Instant::now();
        let quick = Call::new(Path::new("shared-quick"), || ());
        let answers = run_all_within(Some(limit), vec![hung("shared-1"), quick, hung("shared-2")]);
        let answers: Vec<_> = answers.into_iter().map(io::Result::unwrap).collect();
        assert_eq!(answers, [Err(NoAnswer::TooLong), Ok(()), Err(NoAnswer::TooLong)]);
        assert!(began.elapsed() >= limit);
        let (ran, runs) = mpsc::channel();
        let cleanup = Call::cleanup(Path::new("shared-1"), move || ran.send(()).unwrap());
        assert_eq!(run_all_within(LONG, vec![cleanup]).pop().unwrap().unwrap(), Err(NoAnswer::EarlierCall));
        runs.recv_timeout(LONG.unwrap()).unwrap();
        drop(release);
        while is_abandoned(Path::new("shared-1")) || is_abandoned(Path::new("shared-2")) {
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_thread_serves_the_next_calls_of_its_caller_and_then_ends() {
        let path = Path::new("next");
        let id = || std::thread::current().id();
        let calls =
            move || -> Vec<_> { (0..100).map(|_| run_within(LONG, path, id).unwrap().unwrap()).collect() };
        let (ours, theirs) = (calls(), std::thread::spawn(calls).join().unwrap());
        let distinct =
            |ids: &[std::thread::ThreadId]| ids.iter().collect::<std::collections::HashSet<_>>().len();
        assert!(distinct(&ours) < 100, "each call had a thread of its own");
        assert!(ours.iter().all(|one| !theirs.contains(one)), "a thread served two callers");
        let ended = |one: &Waiting| one.state.load(Ordering::Acquire) == ENDED;
        while !WAITING.with_borrow(|waiting| waiting.iter().all(ended)) {
            std::thread::yield_now();
        }
        assert_eq!(run_within(LONG, path, || 2).unwrap(), Ok(2));
        assert_eq!(WAITING.with_borrow(Vec::len), 1);
    }

    #[test]
    fn a_waiting_thread_is_not_there_in_a_forked_child() {
        let path = Path::new("parent");
        assert_eq!(run_within(LONG, path, || 1).unwrap(), Ok(1));
        let in_child = in_forked_child(|| {
            let parents = WAITING.with_borrow(Vec::len);
            let answer = run_within(LONG, path, || 2).unwrap();
            parents > 0 && answer == Ok(2) && WAITING.with_borrow(Vec::len) == 1
        });
        assert!(in_child, "the child uses the threads of its parent");
    }

    #[test]
    fn a_panic_is_an_error() {
        let panicked = run_within(LONG, Path::new("panics"), || -> () { std::panic::panic_any(()) });
        assert!(panicked.is_err());
    }
}
