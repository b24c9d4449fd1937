//! Operations in flight, and the state that an engine's callers and its driver share about them.
//!
//! A handle is pending, then finished, until a wait takes the outcome. A handle whose deadline passes is expired: the
//! caller gets the outcome at once, and the handle stays valid until the kernel has released the memory.
#![forbid(unsafe_code)]

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use slab::Slab;

use super::backend::{Action, Wake};
use super::busy::BusyTime;
use super::counters::Counters;
use super::file::File;
use super::watchdog::Watchdog;
use crate::error::{Doing, Error, IoError, IoKind, Result};
use crate::pool::region::Lease;
use crate::sys::bell::Bell;
use crate::sys::span::Span;
use crate::sys::sync::{Guard, Lock, Signal};

/// Largest generation of a handle: 31 bits, above the 32 bits of its slot.
pub(super) const GENERATIONS: u32 = u32::MAX >> 1;

/// One read, write, sync or allocation.
#[derive(Debug)]
pub(super) struct Operation {
    pub(super) handle: u64,
    pub(super) action: Action,
    pub(super) file: Arc<File>,
    pub(super) offset: u64,
    pub(super) span: Span,
    /// Most bytes of a piece.
    pub(super) piece: u64,
    pub(super) lease: Lease,
    pub(super) submitted: Instant,
    pub(super) deadline: Option<Instant>,
    /// The deadline passed: no further piece starts, and nothing is copied to the caller's memory.
    pub(super) expired: AtomicBool,
    /// True if pieces of the operation may be in the kernel.
    pub(super) started: AtomicBool,
}

impl Operation {
    /// Units of work: bytes of a transfer, 1 for a sync or an allocation.
    pub(super) fn total(&self) -> u64 {
        if self.action.moves_bytes() { self.span.len() as u64 } else { 1 }
    }

    /// Called before each piece; returns false if the operation has expired. SeqCst handshake with `expire`: at least
    /// one side observes the other.
    pub(super) fn start(&self) -> bool {
        self.started.store(true, Ordering::SeqCst);
        !self.expired.load(Ordering::SeqCst)
    }

    /// Expires the operation; true if pieces of it may be in the kernel.
    pub(super) fn expire(&self) -> bool {
        self.expired.store(true, Ordering::SeqCst);
        self.started.load(Ordering::SeqCst)
    }

    /// True if the deadline passed before the operation finished.
    pub(super) fn expired(&self) -> bool {
        self.expired.load(Ordering::Acquire)
    }

    pub(super) fn device(&self) -> u64 {
        self.file.identity().device
    }

    pub(super) fn doing(&self) -> Doing {
        match self.action {
            Action::Read => Doing::Reading,
            Action::Write => Doing::Writing,
            Action::Sync => Doing::Syncing,
            Action::Allocate { .. } => Doing::Preallocating,
        }
    }

    pub(super) fn error(&self, kind: IoKind, detail: String) -> Error {
        let bytes = match self.action {
            Action::Allocate { bytes } => bytes,
            _ => self.span.len() as u64,
        };
        let error = IoError::about(kind, self.doing(), self.file.name());
        error.at(self.offset, bytes).because(detail).into()
    }

    pub(super) fn refuse_failed_device(&self) -> Error {
        self.error(IoKind::PathFailed, FAILED_DEVICE.to_string())
    }
}

/// Why a device with operations past their deadline accepts no others.
pub(super) const FAILED_DEVICE: &str =
    "earlier operations on this device are still in flight after their deadline";

/// An event that a caller waits for. A thread is woken only for its own event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum WaitEvent {
    /// One operation has its outcome.
    Outcome(u64),
    /// No operation is pending.
    Quiet,
    /// The driver ended, or everything left is stuck.
    DriverGone,
}

/// State shared by callers and driver.
pub(super) struct DriverLink {
    pub(super) state: Lock<EngineState>,
    pub(super) counters: Counters,
    /// True if the driver has room, so a new operation should wake it.
    pub(super) need_wakeup: AtomicBool,
    /// A region has retired.
    pub(super) trim: AtomicBool,
    /// Number of completions the driver has seen.
    pub(super) progress: AtomicU64,
    /// Number of waits that the driver has ended and whose completions it has processed.
    pub(super) turns: AtomicU64,
    /// Number of callers for which operations begin without turns.
    pub(super) without_turns: AtomicUsize,
    /// See `Options::io_timeout`.
    pub(super) io_timeout: Option<Duration>,
    pub(super) waker: OnceLock<Arc<dyn Wake>>,
    /// Rung whenever operations have got their outcome.
    pub(super) bell: OnceLock<Arc<Bell>>,
}

#[derive(Default)]
pub(super) struct EngineState {
    pub(super) inbox: VecDeque<Arc<Operation>>,
    pub(super) entries: Slab<Entry>,
    pub(super) generation: u32,
    /// Number of operations so far.
    pub(super) admitted: u64,
    /// Deadlines of pending operations, with their handles.
    pub(super) deadlines: BTreeSet<(Instant, u64)>,
    waiters: Slab<(WaitEvent, Arc<Signal>)>,
    /// Operations that are pending and not expired.
    pub(super) unfinished: usize,
    pub(super) busy: BusyTime,
    pub(super) watchdog: Watchdog,
    /// Number of expired operations in the kernel, by device.
    pub(super) stuck: HashMap<u64, usize>,
    pub(super) closing: bool,
    pub(super) driver_gone: bool,
    pub(super) lost: Option<String>,
}

/// The result of admitting an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Admitted {
    /// The operation had nothing to do.
    Finished,
    /// The driver takes the operation when it has room.
    Queued,
    /// The operation's deadline is the earliest of all, so the driver must wake to shorten its sleep.
    Urgent,
}

pub(super) struct Entry {
    pub(super) handle: u64,
    /// Position in the order of submission.
    pub(super) number: u64,
    pub(super) op: Option<Arc<Operation>>,
    pub(super) phase: Phase,
}

pub(super) enum Phase {
    Pending,
    Finished(Result<u64>),
    /// The outcome is a passed deadline.
    Expired {
        /// `Some` until a wait takes it.
        unread: Option<Error>,
        /// True if the operation is counted as stuck on its device.
        stuck: bool,
        /// True if the kernel has released the operation and this was recorded.
        ended: bool,
    },
}

/// A finished operation, without its file and its memory.
struct Ended {
    handle: u64,
    action: Action,
    deadline: Option<Instant>,
    device: u64,
    outcome: Result<u64>,
}

impl Ended {
    fn new(op: &Operation, outcome: Result<u64>) -> Ended {
        Ended { handle: op.handle, action: op.action, deadline: op.deadline, device: op.device(), outcome }
    }
}

impl DriverLink {
    pub(super) fn new(io_timeout: Option<Duration>) -> DriverLink {
        DriverLink {
            state: Lock::default(),
            counters: Counters::default(),
            need_wakeup: AtomicBool::new(false),
            trim: AtomicBool::new(false),
            progress: AtomicU64::new(0),
            turns: AtomicU64::new(0),
            without_turns: AtomicUsize::new(0),
            io_timeout,
            waker: OnceLock::new(),
            bell: OnceLock::new(),
        }
    }

    pub(super) fn wake(&self) {
        if let Some(waker) = self.waker.get() {
            waker.wake();
        }
    }

    /// Sleeps until `event` may have happened, at most until `until`.
    pub(super) fn await_event<'a>(
        &'a self,
        mut state: Guard<'a, EngineState>,
        event: WaitEvent,
        until: Option<Instant>,
    ) -> Guard<'a, EngineState> {
        let signal = Arc::new(Signal::default());
        let key = state.waiters.insert((event, Arc::clone(&signal)));
        let mut state = signal.wait_until(state, until).0;
        state.waiters.remove(key);
        state
    }

    /// Called by the driver with operations that the kernel has released. Files without other users are closed before
    /// any waiter is notified, since the caller may unmount the file system next. Waiters are woken after the lock is
    /// released.
    pub(super) fn finish(&self, finished: &mut Vec<(Arc<Operation>, Result<u64>)>) {
        if finished.is_empty() {
            return;
        }
        let mut state = self.state.lock();
        let theirs: Vec<_> =
            finished.iter().map(|(op, _)| state.entry(op.handle).map(|entry| entry.op.take())).collect();
        drop(state);
        let ended: Vec<Ended> = finished.drain(..).map(|(op, outcome)| Ended::new(&op, outcome)).collect();
        drop(theirs);
        let mut state = self.state.lock();
        let mut woken = Vec::new();
        ended.into_iter().for_each(|ended| state.end(ended, &self.counters, &mut woken));
        drop(state);
        woken.iter().for_each(|signal| signal.notify_one());
        self.ring();
    }

    /// Reports outcomes to the engine's bell, if it has one.
    pub(super) fn ring(&self) {
        if let Some(bell) = self.bell.get() {
            bell.ring();
        }
    }

    /// Marks the engine as failed: no further operation is accepted.
    pub(super) fn mark_failed(&self, reason: &str) {
        self.state.lock().lost = Some(reason.to_string());
    }

    /// Called last by the driver thread: marks it as ended and wakes all waiters.
    pub(super) fn driver_ended(&self) {
        let mut state = self.state.lock();
        state.driver_gone = true;
        state.wake_all();
        drop(state);
        self.ring();
    }
}

impl EngineState {
    /// Assigns an operation its handle and queues it; an operation with nothing to do finishes at once. Returns the
    /// handle and whether the driver must be woken.
    pub(super) fn admit(&mut self, make: impl FnOnce(u64) -> Operation) -> (u64, Admitted) {
        self.generation = self.generation.wrapping_add(1) & GENERATIONS;
        self.admitted += 1;
        let number = self.admitted;
        let slot = self.entries.vacant_entry();
        let handle = u64::from(self.generation) << 32 | (slot.key() as u64 + 1);
        let op = Arc::new(make(handle));
        let nothing = op.total() == 0;
        let urgent =
            op.deadline.is_some_and(|own| self.deadlines.first().is_none_or(|(first, _)| own < *first));
        let phase = if nothing { Phase::Finished(Ok(0)) } else { Phase::Pending };
        slot.insert(Entry { handle, number, op: (!nothing).then(|| Arc::clone(&op)), phase });
        if !nothing {
            self.busy.begin(op.action);
            if self.unfinished == 0 {
                self.watchdog.starts(op.submitted);
            }
            self.unfinished += 1;
            op.deadline.map(|deadline| self.deadlines.insert((deadline, handle)));
            self.inbox.push_back(op);
        }
        let admitted = match (nothing, urgent) {
            (true, _) => Admitted::Finished,
            (_, true) => Admitted::Urgent,
            _ => Admitted::Queued,
        };
        (handle, admitted)
    }

    pub(super) fn entry(&mut self, handle: u64) -> Result<&mut Entry> {
        let found = self.entries.get_mut(key_of(handle)).filter(|entry| entry.handle == handle);
        found.ok_or_else(|| {
            Error::invalid("handle", format!("{handle:#x} is unknown, or was waited for already"))
        })
    }

    /// Records an operation that the kernel has released; appends the signals to notify to `woken`.
    fn end(&mut self, ended: Ended, counters: &Counters, woken: &mut Vec<Arc<Signal>>) {
        let Ended { handle, action, deadline, device, outcome } = ended;
        let key = key_of(handle);
        let Some(entry) = self.entries.get_mut(key).filter(|entry| entry.handle == handle) else {
            return;
        };
        match &mut entry.phase {
            Phase::Expired { unread, stuck, ended } => {
                let (stuck, read) = (*stuck, unread.is_none());
                *ended = true;
                if read {
                    self.entries.remove(key);
                }
                if stuck {
                    self.unstick(device);
                }
            }
            _ => {
                counters.count_outcome(action, &outcome);
                entry.phase = Phase::Finished(outcome);
                self.leave_pending(handle, action, deadline);
                woken.extend(self.waiters_for(handle));
            }
        }
    }

    /// Takes the outcome of a handle; `None` while it is pending.
    pub(super) fn take(&mut self, handle: u64) -> Result<Option<Result<u64>>> {
        let entry = self.entry(handle)?;
        match &mut entry.phase {
            Phase::Pending => Ok(None),
            Phase::Expired { unread, ended, .. } => {
                let (error, ended) = (unread.take().ok_or_else(|| taken(handle))?, *ended);
                // Until then the entry records that its device is stuck.
                if ended {
                    self.entries.remove(key_of(handle));
                }
                Ok(Some(Err(error)))
            }
            Phase::Finished(_) => match self.entries.remove(key_of(handle)).phase {
                Phase::Finished(outcome) => Ok(Some(outcome)),
                _ => Ok(None),
            },
        }
    }

    /// Removes an operation that has its outcome from the pending ones.
    pub(super) fn leave_pending(&mut self, handle: u64, action: Action, deadline: Option<Instant>) {
        self.unfinished -= 1;
        self.busy.end(action);
        deadline.map(|deadline| self.deadlines.remove(&(deadline, handle)));
    }

    /// The waiters for the outcome of `handle`, which just left the pending ones, and, if none is pending, the waiters
    /// for quiet.
    pub(super) fn waiters_for(&self, handle: u64) -> impl Iterator<Item = Arc<Signal>> {
        let quiet = self.unfinished == 0;
        let concerns = move |event| event == WaitEvent::Outcome(handle) || quiet && event == WaitEvent::Quiet;
        self.waiters
            .iter()
            .filter(move |(_, (event, _))| concerns(*event))
            .map(|(_, (_, signal))| Arc::clone(signal))
    }

    /// Wakes every waiter to check its condition.
    pub(super) fn wake_all(&self) {
        self.waiters.iter().for_each(|(_, (_, signal))| signal.notify_one());
    }

    fn unstick(&mut self, device: u64) {
        if let Some(count) = self.stuck.get_mut(&device) {
            *count -= 1;
            if *count == 0 {
                self.stuck.remove(&device);
            }
        }
    }
}

/// Error of a second wait for an operation that is still in flight after its deadline.
pub(super) fn taken(handle: u64) -> Error {
    Error::invalid("handle", format!("{handle:#x} was waited for already"))
}

pub(super) fn key_of(handle: u64) -> usize {
    ((handle & u64::from(u32::MAX)) as usize).wrapping_sub(1)
}

#[cfg(test)]
mod tests;
