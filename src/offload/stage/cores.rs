//! The processors that the stages of a process share.
//!
//! Invariants:
//! - The cores in use by stages never exceed the threads of the pool.
//! - A free core goes to the waiting stage of the highest priority, and among equals to the first that came. A stage
//!   that has cores keeps them to the end of its task.
//! - A stage that waits for its event or for a verdict has no cores.
#![forbid(unsafe_code)]

use std::collections::BTreeSet;
use std::ops::Deref;

use crate::error::Result;
use crate::sys::fork::PerProcessStatic;
use crate::sys::sync::{Lock, Signal};
use crate::sys::{cap, threads};

/// The state of the processors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cores {
    /// Threads of the pool, the caller of a step included.
    pub all: usize,
    /// Cores that stages have now.
    pub in_use: usize,
    /// Stages that could run and wait for a core.
    pub waiting: usize,
    /// Threads that stages kept at work at one time: the most so far.
    pub peak_threads: usize,
}

#[derive(Debug, Default)]
struct Gate {
    state: Lock<State>,
    changed: Signal,
}

#[derive(Debug, Default)]
struct State {
    in_use: usize,
    next: u64,
    /// Waiting tasks, the next one first: by falling priority, then by their numbers.
    waiting: BTreeSet<(i64, u64)>,
}

/// A forked child has its own gate: its parent's tasks do not run there.
static GATE: PerProcessStatic<Gate> = PerProcessStatic::empty();

/// The state of the processors now.
pub fn cores() -> Result<Cores> {
    let all = threads::count()?;
    let gate = GATE.get_or_make(Gate::default);
    let state = gate.state.lock();
    let (_, peak_threads) = cap::running_and_peak();
    Ok(Cores { all, in_use: state.in_use, waiting: state.waiting.len(), peak_threads })
}

/// Waits for a core, and calls `work` with as many as are free, up to `quota` (0: all of the pool).
pub fn with_cores<R>(priority: i32, quota: usize, work: impl FnOnce() -> R) -> Result<R> {
    let all = threads::count()?;
    let held = Held::wait(GATE.get_or_make(Gate::default), all, priority, quota);
    Ok(cap::within(held.cores, work))
}

/// Cores that one task has.
struct Held<G: Deref<Target = Gate>> {
    gate: G,
    cores: usize,
}

impl<G: Deref<Target = Gate>> Held<G> {
    fn wait(gate: G, all: usize, priority: i32, quota: usize) -> Held<G> {
        let mut state = gate.state.lock();
        let mine = (-i64::from(priority), state.next);
        state.next += 1;
        state.waiting.insert(mine);
        while state.waiting.first() != Some(&mine) || state.in_use >= all {
            state = gate.changed.wait(state);
        }
        state.waiting.remove(&mine);
        let free = all - state.in_use;
        let cores = if quota == 0 { free } else { quota.min(free) };
        state.in_use += cores;
        drop(state);
        // Another task may fit beside this one.
        gate.changed.notify_all();
        Held { gate, cores }
    }
}

impl<G: Deref<Target = Gate>> Drop for Held<G> {
    fn drop(&mut self) {
        self.gate.state.lock().in_use -= self.cores;
        self.gate.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn free_cores_go_to_the_highest_priority_first() {
        let (gate, order) = (Gate::default(), Lock::new(Vec::new()));
        std::thread::scope(|scope| {
            let first = Held::wait(&gate, 2, i32::MIN, 0);
            assert_eq!(first.cores, 2);
            for (number, priority) in [(0, -5), (1, 0), (2, i32::MAX), (3, 0)] {
                let (gate, order) = (&gate, &order);
                scope.spawn(move || {
                    let held = Held::wait(gate, 2, priority, 7);
                    order.lock().push((number, held.cores));
                });
                while gate.state.lock().waiting.len() <= number {
                    std::thread::yield_now();
                }
            }
            drop(first);
        });
        assert_eq!(*order.lock(), [(2, 2), (1, 2), (3, 2), (0, 2)]);
    }

    #[test]
    fn tasks_have_together_no_more_cores_than_there_are() {
        let (gate, used) = (Gate::default(), AtomicUsize::new(0));
        std::thread::scope(|scope| {
            for quota in 0..16 {
                let (gate, used) = (&gate, &used);
                scope.spawn(move || {
                    for _ in 0..200 {
                        let held = Held::wait(gate, 3, 0, quota % 4);
                        assert!(held.cores >= 1 && (quota % 4 == 0 || held.cores <= quota % 4));
                        let before = used.fetch_add(held.cores, Ordering::SeqCst);
                        assert!(before + held.cores <= 3);
                        used.fetch_sub(held.cores, Ordering::SeqCst);
                    }
                });
            }
        });
        assert_eq!(gate.state.lock().in_use, 0);
    }
}
