//! Runs a system call that may not return on a thread of its own, with a time limit.
//!
//! Invariants:
//! - A call that exceeds its limit keeps running. Its own thread drops the result when the call returns.
//! - Until that call returns, another call on the same path returns `None` at once. The new call would block on the
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

use super::{process, threads};

/// Length of one wait. A slice that takes longer, because the process did not run, adds at most twice this length.
const SLICE: Duration = Duration::from_millis(50);

/// Returns the result of `work`, which uses files below `path`; `None` if `work` takes longer than `limit`. Without a
/// limit `work` runs on the calling thread.
pub fn within<T: Send + 'static>(
    limit: Option<Duration>,
    path: &Path,
    work: impl FnOnce() -> T + Send + 'static,
) -> io::Result<Option<T>> {
    let Some(limit) = limit else { return Ok(Some(work())) };
    if is_abandoned(path) {
        return Ok(None);
    }
    let (send, receive) = mpsc::channel();
    let over = Arc::new(AtomicBool::new(false));
    let sets_over = SetOnDrop(Arc::clone(&over));
    threads::spawn_quiet("spillway-open", move || {
        // The send fails if the caller no longer waits. The result is then dropped here, before `over` is set.
        let _ = send.send(work());
        drop(sets_over);
    })?;
    let mut waited = Duration::ZERO;
    while waited < limit {
        let began = Instant::now();
        match receive.recv_timeout(SLICE.min(limit - waited)) {
            Ok(result) => return Ok(Some(result)),
            Err(RecvTimeoutError::Disconnected) => return Err(io::Error::other("its thread died")),
            Err(RecvTimeoutError::Timeout) => waited += began.elapsed().min(2 * SLICE),
        }
    }
    abandon(path, over);
    Ok(None)
}

struct SetOnDrop(Arc<AtomicBool>);

impl Drop for SetOnDrop {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

/// A call in flight whose caller stopped waiting.
struct Abandoned {
    path: PathBuf,
    process: u32,
    over: Arc<AtomicBool>,
}

impl Abandoned {
    fn goes_on(&self) -> bool {
        self.process == process::id() && !self.over.load(Ordering::Acquire)
    }
}

static ABANDONED: ArcSwapOption<Vec<Arc<Abandoned>>> = ArcSwapOption::const_empty();

fn is_abandoned(path: &Path) -> bool {
    let all = ABANDONED.load();
    all.iter().flat_map(|all| all.iter()).any(|call| call.path == path && call.goes_on())
}

fn abandon(path: &Path, over: Arc<AtomicBool>) {
    let call = Arc::new(Abandoned { path: path.to_path_buf(), process: process::id(), over });
    ABANDONED.rcu(|all| {
        let before = all.iter().flat_map(|all| all.iter()).filter(|call| call.goes_on());
        Some(Arc::new(before.chain([&call]).cloned().collect::<Vec<_>>()))
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Option<Duration> = Some(Duration::from_secs(60));

    #[test]
    fn a_call_that_does_not_return_is_left_alone_and_its_path_with_it() {
        let (path, other) = (Path::new("hung"), Path::new("other"));
        assert_eq!(within(None, path, || 7).unwrap(), Some(7));
        assert_eq!(within(LONG, path, || 8).unwrap(), Some(8));
        let (release, held) = mpsc::channel::<()>();
        let kept = Arc::new(());
        let theirs = Arc::clone(&kept);
        let hung = within(Some(Duration::from_millis(60)), path, move || {
            let _ = held.recv();
            theirs
        });
        assert!(hung.unwrap().is_none());
        assert_eq!(Arc::strong_count(&kept), 2, "the call still has what it works with");
        assert_eq!(within(LONG, path, || panic!("begun beside the call before")).unwrap(), None::<()>);
        assert_eq!(within(LONG, other, || 9).unwrap(), Some(9));
        assert!(process::in_forked_child(|| !is_abandoned(path)), "a parent's call counts in the child");
        drop(release);
        while is_abandoned(path) {
            std::thread::yield_now();
        }
        assert_eq!(Arc::strong_count(&kept), 1);
        assert_eq!(within(LONG, path, || 10).unwrap(), Some(10));
    }

    #[test]
    fn a_panic_is_an_error() {
        let panicked = within(LONG, Path::new("panics"), || -> () { std::panic::panic_any(()) });
        assert!(panicked.is_err());
    }
}
