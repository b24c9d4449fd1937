//! Binds the library's workers to processors (SuperOffload section 4.7), for example those that a launcher left to the
//! optimizer.
//!
//! Invariants:
//! - Only threads that this library started are bound. The caller's threads and their affinity stay as they are.
//! - A binding is refused as a whole if the system would leave out one of its processors.
//! - A forked child keeps its parent's binding, as it keeps the number of threads, and binds workers of its own.
#![forbid(unsafe_code)]

use std::io;

use nix::sched::CpuSet;

use super::affinity::{bind_own_thread, current};
use super::bitmap::Bitmap;
use super::threads::{self, Binding};
use crate::error::{Error, Result};

/// Binds the workers to `cpus`, which have `cores` cores. Each worker may run on every processor of the set.
pub fn bind(cpus: &Bitmap, cores: usize) -> Result<()> {
    if cpus.is_empty() {
        return Err(Error::invalid("cpus", "names no processor"));
    }
    let refused = |reason: String| Error::invalid("cpus", format!("{cpus}: {reason}"));
    let granted = granted(cpus).map_err(|error| match error.raw_os_error() {
        Some(libc::EINVAL) => refused(format!("the system refuses them: {error}")),
        _ => Error::system("asking the system for the processors on a thread of the library", &error),
    })?;
    let missing = cpus.minus(&granted);
    if !missing.is_empty() {
        return Err(refused(format!("processors {missing} are offline, or not in this process's cpuset")));
    }
    threads::set_binding(Some(Binding { cpus: cpus.clone(), cores: cores.max(1) }));
    Ok(())
}

/// Workers that start from now on run where the thread that starts them may run.
pub fn unbind() {
    threads::set_binding(None);
}

/// Processors that a new thread of this process gets if it asks for `wanted`: the system leaves out those that are
/// offline or not in the cpuset. An error if none is left.
pub fn granted(wanted: &Bitmap) -> io::Result<Bitmap> {
    let (send, receive) = std::sync::mpsc::channel();
    let wanted = wanted.clone();
    threads::spawn_quiet("spillway-probe", move || {
        let granted = bind_own_thread(&wanted).and_then(|()| {
            current().ok_or_else(|| io::Error::other("the system does not state the affinity of a thread"))
        });
        let _ = send.send(granted);
    })?;
    receive.recv().unwrap_or_else(|_| Err(io::Error::other("the thread ended early")))
}

/// All processors of this process's cpuset, whatever the affinity of the calling thread.
pub fn widest() -> Option<Bitmap> {
    granted(&(0..CpuSet::count() as u32).collect()).ok()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::sync::Mutex;

    use super::*;
    use crate::sys::fork::in_forked_child;

    /// Affinities of the threads that did some of the work, other than the caller.
    fn of_workers() -> BTreeSet<Bitmap> {
        let seen = Mutex::new(BTreeSet::new());
        let caller = std::thread::current().id();
        let mut items = [(); 8];
        threads::each(&mut items, |()| {
            if std::thread::current().id() != caller {
                seen.lock().unwrap().insert(current().unwrap());
            }
            std::thread::sleep(std::time::Duration::from_millis(2));
        })
        .unwrap();
        seen.into_inner().unwrap()
    }

    /// Affinities of the workers, once some have come.
    fn seen() -> BTreeSet<Bitmap> {
        loop {
            let found = of_workers();
            if !found.is_empty() {
                return found;
            }
        }
    }

    /// In a child, so that other tests of this process keep their pool.
    #[test]
    fn workers_are_bound_and_the_caller_is_not_until_the_binding_is_undone() {
        let all = current().unwrap();
        let last: Bitmap = all.iter().last().into_iter().collect();
        assert!(in_forked_child(|| {
            threads::configure(3).unwrap();
            bind(&last, 1).unwrap();
            let bound = seen();
            let kept = current().unwrap();
            let in_child = in_forked_child(|| seen() == [last.clone()].into());
            unbind();
            let after = seen();
            threads::configure(0).unwrap();
            bound == [last.clone()].into() && kept == all && in_child && after == [all.clone()].into()
        }));
    }

    #[test]
    fn threads_of_the_library_follow_each_change() {
        let all = current().unwrap();
        let last: Bitmap = all.iter().last().into_iter().collect();
        assert!(in_forked_child(|| {
            threads::configure(1).unwrap();
            let (ask, asked) = std::sync::mpsc::channel::<()>();
            let (answer, answered) = std::sync::mpsc::channel();
            threads::spawn_quiet("spillway-test", move || {
                while asked.recv().is_ok() {
                    threads::each(&mut [()], |()| {}).unwrap();
                    answer.send(current().unwrap()).unwrap();
                }
            })
            .unwrap();
            let now = || {
                ask.send(()).unwrap();
                answered.recv().unwrap()
            };
            let before = now();
            bind(&last, 1).unwrap();
            let bound = now();
            unbind();
            (before, bound, now()) == (all.clone(), last.clone(), all.clone())
        }));
    }

    #[test]
    fn processors_that_the_system_would_leave_out_are_refused_by_name() {
        let beyond = current().unwrap().or(&[1000].into_iter().collect());
        for (cpus, words) in [(Bitmap::new(), "names no processor"), (beyond, "processors 1000 are offline")]
        {
            let error = bind(&cpus, 1).unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        }
        assert!(bind(&[5000].into_iter().collect(), 1).is_err());
        assert_eq!(threads::binding(), None);
    }
}
