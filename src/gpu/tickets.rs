//! What is known of each copy: a queue for each direction, the copies that the driver has, and those that failed.
//!
//! Invariants:
//! - Copies of one direction leave its queue in the order of the calls.
//! - A copy holds its host memory from the call to its end.
//! - A failed copy is known until the end, so that no wait takes it for done.
//! - The lock is held for steps in memory only: not during a call of the driver, nor during a wait.
#![forbid(unsafe_code)]

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Instant;

use super::copy::{Copy, Direction};
use super::memory::HostSpan;
use super::stream::GpuEvent;
use crate::error::{Error, Result};
use crate::pool::region::Lease;
use crate::sys::sync::{Lock, Signal};

/// Most copies that are known at one time.
const MOST: usize = 1 << 16;

/// The copies of one device.
#[derive(Debug, Default)]
pub(super) struct Tickets {
    state: Lock<State>,
    /// Signalled when a copy was added or left its queue, and when the queues are closed.
    changed: Signal,
}

#[derive(Debug, Default)]
struct State {
    copies: HashMap<u64, Known>,
    queues: [VecDeque<(u64, Request)>; 2],
    /// Copies that are in a queue, or on their way to the driver.
    waiting: usize,
    /// The copies that the driver has, by the stream that ends them. Those of one stream end in this order.
    order: [VecDeque<u64>; 3],
    /// Number of tickets so far. The first one is 1.
    count: u64,
    closing: bool,
}

#[derive(Debug)]
enum Known {
    Waiting,
    Given(Running),
    Failed(Error),
}

/// A copy in a queue.
#[derive(Debug)]
pub(super) struct Request {
    pub(super) copy: Copy,
    /// What the copy waits for on the device.
    pub(super) mark: Option<GpuEvent>,
    /// Recorded before the copy and behind it, if its time is measured.
    pub(super) timed: Option<[Arc<GpuEvent>; 2]>,
    /// Keeps pool memory from being reused if its owner frees it too early.
    pub(super) lease: Lease,
}

/// A copy that the driver has, and what it holds.
#[derive(Debug)]
pub(super) struct Running {
    pub(super) done: Arc<GpuEvent>,
    pub(super) _host: HostSpan,
    pub(super) _lease: Lease,
}

/// Why no more copies are taken. Failed ones stay known, because each wait for one returns its error.
fn full(copies: &HashMap<u64, Known>) -> String {
    let failed = copies.values().filter(|known| matches!(known, Known::Failed(_))).count();
    let cure = match failed == copies.len() {
        true => "close the GPU and open it again",
        false => "wait for a copy that has not failed",
    };
    format!("{MOST} copies have not ended, or have failed ({failed} of them); {cure}")
}

impl Tickets {
    /// Adds a copy to the queue of its direction, and returns its ticket. Errors: too many copies are known.
    pub(super) fn add(&self, request: Request) -> Result<u64> {
        let mut state = self.state.lock();
        if state.copies.len() >= MOST {
            return Err(Error::LimitReached(full(&state.copies)));
        }
        state.count += 1;
        let ticket = state.count;
        state.copies.insert(ticket, Known::Waiting);
        state.waiting += 1;
        state.queues[request.copy.direction as usize].push_back((ticket, request));
        drop(state);
        self.changed.notify_all();
        Ok(ticket)
    }

    /// Takes the next copy out of a queue; `None` once the queues are closed and this one is empty.
    pub(super) fn next(&self, direction: Direction) -> Option<(u64, Request)> {
        let place = direction as usize;
        let idle = |state: &mut State| state.queues[place].is_empty() && !state.closing;
        self.changed.wait_while(self.state.lock(), None, idle).queues[place].pop_front()
    }

    /// The driver has a copy that was taken out of its queue, or it failed. `last`: the stream that ends the copy.
    pub(super) fn gave(&self, ticket: u64, last: usize, outcome: Result<Running>) {
        let mut state = self.state.lock();
        state.waiting -= 1;
        let known = match outcome {
            Ok(running) => {
                state.order[last].push_back(ticket);
                Known::Given(running)
            }
            Err(error) => Known::Failed(error),
        };
        state.copies.insert(ticket, known);
        drop(state);
        self.changed.notify_all();
    }

    /// Waits until the driver has a copy, at most until `until`, and returns the event of its end. `None` for a copy that
    /// is done and forgotten. Errors: the copy failed, or `Timeout`.
    pub(super) fn given(&self, ticket: u64, until: Option<Instant>) -> Result<Option<Arc<GpuEvent>>> {
        let state = self.state.lock();
        if ticket == 0 || ticket > state.count {
            return Err(Error::invalid("ticket", format!("{ticket} is not a ticket of this object")));
        }
        let waits = |state: &mut State| matches!(state.copies.get(&ticket), Some(Known::Waiting));
        let state = self.changed.wait_while(state, until, waits);
        match state.copies.get(&ticket) {
            None => Ok(None),
            Some(Known::Given(running)) => Ok(Some(Arc::clone(&running.done))),
            Some(Known::Failed(error)) => Err(error.clone()),
            Some(Known::Waiting) => Err(in_flight(ticket)),
        }
    }

    /// Waits until the driver has every copy so far, at most until `until`. Returns the ends of the last copies, or `None` if
    /// that time has come.
    pub(super) fn all_given(&self, until: Option<Instant>) -> Option<Vec<Arc<GpuEvent>>> {
        let state = self.changed.wait_while(self.state.lock(), until, |state| state.waiting > 0);
        let last = state.order.iter().filter_map(|order| state.end_of(*order.back()?));
        (state.waiting == 0).then(|| last.collect())
    }

    /// Forgets copies that are done: the oldest of each of these streams, up to one that is not done. No lock is held
    /// while the driver is asked, nor while a copy lets go of its memory.
    pub(super) fn forget_done(&self, streams: &[usize]) {
        for stream in streams {
            loop {
                let state = self.state.lock();
                let Some(ticket) = state.order[*stream].front().copied() else { break };
                let end = state.end_of(ticket);
                drop(state);
                if end.is_some_and(|end| !matches!(end.done(), Ok(true))) {
                    break;
                }
                let over = self.state.lock().forget(*stream, ticket);
                drop(over);
            }
        }
    }

    /// Each thread ends once its queue is empty.
    pub(super) fn close(&self) {
        self.state.lock().closing = true;
        self.changed.notify_all();
    }
}

impl State {
    fn end_of(&self, ticket: u64) -> Option<Arc<GpuEvent>> {
        match self.copies.get(&ticket) {
            Some(Known::Given(running)) => Some(Arc::clone(&running.done)),
            _ => None,
        }
    }

    /// Another thread may have forgotten the copy meanwhile.
    fn forget(&mut self, stream: usize, ticket: u64) -> Option<Known> {
        if self.order[stream].front() != Some(&ticket) {
            return None;
        }
        self.order[stream].pop_front();
        self.copies.remove(&ticket)
    }
}

/// The error of a wait that ended too early.
pub(super) fn in_flight(ticket: u64) -> Error {
    Error::Timeout(format!("copy {ticket} is still in flight"))
}
