//! Runs a system call that may not return on a thread of its own, with a time limit.
//!
//! Invariants:
//! - A call that exceeds its limit keeps running. Its own thread drops the result when the call returns.
//! - Until that call returns, another call on the same path returns `NoAnswer::EarlierCall` at once. The new call would block on the
//!   same file system, or on a resource that the first call holds.
//! - Time in which this process did not run (SIGSTOP, a paused container) does not count towards the limit.
//! - No lock is held across a fork. Calls in flight in the parent do not count in its child.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use arc_swap::ArcSwapOption;

use super::per_process::PerProcess;
use super::threads;

/// Length of one wait. A slice that takes longer, because the process did not run, adds at most twice this length.
const SLICE: Duration = Duration::from_millis(50);

/// Why a call has no result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NoAnswer {
    /// The call took longer than its limit.
    TooLong,
    /// An earlier call on the path has not returned, so the call did not start.
    EarlierCall,
}

/// Returns the result of `work`, which uses files below `path`. Without a limit `work` runs on the calling thread.
pub fn run_within<T: Send + 'static>(
    limit: Option<Duration>,
    path: &Path,
    work: impl FnOnce() -> T + Send + 'static,
) -> io::Result<Result<T, NoAnswer>> {
    let Some(limit) = limit else { return Ok(Ok(work())) };
    if is_abandoned(path) {
        return Ok(Err(NoAnswer::EarlierCall));
    }
    let (send, receive) = mpsc::channel();
    let done = Arc::new(AtomicBool::new(false));
    let sets_done = DoneOnDrop(Arc::clone(&done));
    threads::spawn_quiet("spillway-open", move || {
        // The send fails if the caller no longer waits. The result is then dropped here, before `done` is set.
        let _ = send.send(work());
        drop(sets_done);
    })?;
    let mut waited = Duration::ZERO;
    while waited < limit {
        let began = Instant::now();
        match receive.recv_timeout(SLICE.min(limit - waited)) {
            Ok(result) => return Ok(Ok(result)),
            Err(RecvTimeoutError::Disconnected) => {
                return Err(io::Error::other("its thread ended unexpectedly"));
            }
            Err(RecvTimeoutError::Timeout) => waited += began.elapsed().min(2 * SLICE),
        }
    }
    abandon(path, done);
    Ok(Err(NoAnswer::TooLong))
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

fn is_abandoned(path: &Path) -> bool {
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
    use crate::sys::process::in_forked_child;

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
    fn a_panic_is_an_error() {
        let panicked = run_within(LONG, Path::new("panics"), || -> () { std::panic::panic_any(()) });
        assert!(panicked.is_err());
    }
}
