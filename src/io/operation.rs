//! Operations under way, and what an engine's callers and its driver share about them.
//!
//! A handle has 63 bits: the top one is free for numbers of callers' own (see `tier::gate`). A handle's life: pending, then finished until a wait takes the outcome. One whose deadline passes is expired: its
//! caller has the outcome at once, and the handle stays known until the kernel is done with the memory.
#![forbid(unsafe_code)]

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use slab::Slab;

use super::backend::{Action, Wake, doze};
use super::busy::Busy;
use super::counters::Counters;
use super::file::File;
use super::progress::Progress;
use crate::error::{Error, IoError, IoKind, Result};
use crate::pool::region::Lease;
use crate::sys::span::Span;

/// Largest generation of a handle: 31 bits, above the 32 of its slot.
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
    pub(super) lease: Option<Lease>,
    pub(super) submitted: Instant,
    pub(super) deadline: Option<Instant>,
    pub(super) stop: AtomicBool,
    /// Some of it may be in the kernel.
    pub(super) started: AtomicBool,
    pub(super) expired: AtomicBool,
}

impl Operation {
    /// How far it has to go: bytes, or one step for a sync or an allocation.
    pub(super) fn total(&self) -> u64 {
        if self.action.moves_bytes() { self.span.len() as u64 } else { 1 }
    }

    /// True if no more pieces are to be started.
    pub(super) fn stopped(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }

    /// Before its next piece: false if it is stopped. Who stops it either is seen here, or sees that it has started.
    pub(super) fn start(&self) -> bool {
        self.started.store(true, Ordering::SeqCst);
        !self.stop.load(Ordering::SeqCst)
    }

    /// Stops it; true if some of it may be in the kernel.
    pub(super) fn expire(&self) -> bool {
        self.expired.store(true, Ordering::Release);
        self.stop.store(true, Ordering::SeqCst);
        self.started.load(Ordering::SeqCst)
    }

    /// True if its deadline passed before it finished.
    pub(super) fn expired(&self) -> bool {
        self.expired.load(Ordering::Acquire)
    }

    pub(super) fn device(&self) -> u64 {
        self.file.identity().device
    }

    pub(super) fn doing(&self) -> &'static str {
        match self.action {
            Action::Read => "reading",
            Action::Write => "writing",
            Action::Sync => "syncing",
            Action::Allocate { .. } => "preallocating",
        }
    }

    pub(super) fn error(&self, kind: IoKind, detail: String) -> Error {
        let path = self.file.name().to_string();
        let bytes = match self.action {
            Action::Allocate { bytes } => bytes,
            _ => self.span.len() as u64,
        };
        IoError { kind, doing: self.doing(), path, offset: self.offset, bytes, errno: 0, detail }.into()
    }

    pub(super) fn refuse_failed_device(&self) -> Error {
        let words = "earlier operations on this device are stuck past their deadline";
        self.error(IoKind::PathFailed, words.to_string())
    }
}

/// What a caller waits for; a thread is woken for its own event alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Event {
    /// One operation has its outcome.
    Outcome(u64),
    /// Nothing is pending any more.
    Quiet,
    /// The driver ended, or what it still has is stuck.
    DriverGone,
}

/// What callers and driver share.
pub(super) struct Shared {
    state: Mutex<State>,
    pub(super) counters: Counters,
    /// The driver has room: a new operation is worth a wake.
    pub(super) hungry: AtomicBool,
    /// A region retired.
    pub(super) trim: AtomicBool,
    /// Completions seen by the driver.
    pub(super) progress: AtomicU64,
    /// Waits that the driver has ended, and whose completions it has taken.
    pub(super) turns: AtomicU64,
    /// See `Options::stall`.
    pub(super) stall: Option<Duration>,
    pub(super) waker: OnceLock<Arc<dyn Wake>>,
}

#[derive(Default)]
pub(super) struct State {
    pub(super) inbox: VecDeque<Arc<Operation>>,
    pub(super) entries: Slab<Entry>,
    pub(super) generation: u32,
    /// Of pending operations, with their handles.
    pub(super) deadlines: BTreeSet<(Instant, u64)>,
    waiters: Slab<(Event, Arc<Condvar>)>,
    /// Operations that are pending and not expired.
    pub(super) unfinished: usize,
    pub(super) busy: Busy,
    pub(super) progress: Progress,
    /// Devices with expired operations in the kernel, and how many.
    pub(super) stuck: HashMap<u64, usize>,
    pub(super) closing: bool,
    pub(super) driver_gone: bool,
    pub(super) lost: Option<String>,
}

/// What became of an operation that was accepted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Admitted {
    /// It had nothing to do.
    Finished,
    /// The driver takes it when it has room.
    Queued,
    /// Its deadline is the earliest of all: the driver sleeps for too long.
    Urgent,
}

pub(super) struct Entry {
    pub(super) handle: u64,
    pub(super) op: Option<Arc<Operation>>,
    pub(super) phase: Phase,
}

pub(super) enum Phase {
    Pending,
    Finished(Result<u64>),
    /// The outcome is the deadline.
    Expired {
        /// `Some` until a wait takes it.
        unread: Option<Error>,
        /// Counted as stuck on its device.
        stuck: bool,
        /// The kernel is done with it, and that was counted.
        ended: bool,
    },
}

/// An operation that is over, without its file and its memory.
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

impl Shared {
    pub(super) fn new(stall: Option<Duration>) -> Shared {
        Shared {
            state: Mutex::default(),
            counters: Counters::default(),
            hungry: AtomicBool::new(false),
            trim: AtomicBool::new(false),
            progress: AtomicU64::new(0),
            turns: AtomicU64::new(0),
            stall,
            waker: OnceLock::new(),
        }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn wake(&self) {
        if let Some(waker) = self.waker.get() {
            waker.wake();
        }
    }

    /// Sleeps until `event` may have come, at the longest until `until`.
    pub(super) fn await_event<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        event: Event,
        until: Option<Instant>,
    ) -> MutexGuard<'a, State> {
        let news = Arc::new(Condvar::new());
        let key = state.waiters.insert((event, Arc::clone(&news)));
        let mut state = doze(&news, state, until).0;
        state.waiters.remove(key);
        state
    }

    /// The driver's word that the kernel is done with operations. Their files are closed, if nobody else uses them,
    /// before anybody is told: the file system may be unmounted next. Waiters are woken after the lock is free.
    pub(super) fn finish(&self, over: &mut Vec<(Arc<Operation>, Result<u64>)>) {
        if over.is_empty() {
            return;
        }
        let mut state = self.lock();
        let theirs: Vec<_> =
            over.iter().map(|(op, _)| state.entry(op.handle).map(|entry| entry.op.take())).collect();
        drop(state);
        let ended: Vec<Ended> = over.drain(..).map(|(op, outcome)| Ended::new(&op, outcome)).collect();
        drop(theirs);
        let mut state = self.lock();
        let mut woken = Vec::new();
        ended.into_iter().for_each(|ended| state.end(ended, &self.counters, &mut woken));
        drop(state);
        woken.iter().for_each(|news| news.notify_one());
    }

    /// The engine is lost: no operation is accepted any more.
    pub(super) fn lose(&self, reason: &str) {
        self.lock().lost = Some(reason.to_string());
    }

    /// The driver's last word.
    pub(super) fn driver_ends(&self) {
        let mut state = self.lock();
        state.driver_gone = true;
        state.tell_all();
    }
}

impl State {
    /// Gives an operation its handle and queues it; one that has nothing to do is finished at once. Also, what the
    /// driver has to know of it.
    pub(super) fn admit(&mut self, make: impl FnOnce(u64) -> Operation) -> (u64, Admitted) {
        self.generation = self.generation.wrapping_add(1) & GENERATIONS;
        let slot = self.entries.vacant_entry();
        let handle = u64::from(self.generation) << 32 | (slot.key() as u64 + 1);
        let op = Arc::new(make(handle));
        let nothing = op.total() == 0;
        let urgent =
            op.deadline.is_some_and(|own| self.deadlines.first().is_none_or(|(first, _)| own < *first));
        let phase = if nothing { Phase::Finished(Ok(0)) } else { Phase::Pending };
        slot.insert(Entry { handle, op: (!nothing).then(|| Arc::clone(&op)), phase });
        if !nothing {
            self.busy.begins(op.action);
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
            Error::invalid("handle", format!("{handle:#x} was never given, or was waited for"))
        })
    }

    /// An operation that the kernel is done with; adds whom to wake.
    fn end(&mut self, ended: Ended, counters: &Counters, woken: &mut Vec<Arc<Condvar>>) {
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
                woken.extend(self.concerned(handle));
            }
        }
    }

    /// Takes the outcome of a handle, if it has one.
    pub(super) fn take(&mut self, handle: u64) -> Result<Option<Result<u64>>> {
        let entry = self.entry(handle)?;
        match &mut entry.phase {
            Phase::Pending => Ok(None),
            Phase::Expired { unread, ended, .. } => {
                let known = || Error::invalid("handle", format!("{handle:#x} was waited for"));
                let (error, ended) = (unread.take().ok_or_else(known)?, *ended);
                // Until then the entry says that its device is stuck.
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

    /// An operation that was pending has its outcome.
    pub(super) fn leave_pending(&mut self, handle: u64, action: Action, deadline: Option<Instant>) {
        self.unfinished -= 1;
        self.busy.ends(action);
        deadline.map(|deadline| self.deadlines.remove(&(deadline, handle)));
    }

    /// Who waits for the outcome of `handle`, which just left the pending ones, or for quiet, if it was the last.
    pub(super) fn concerned(&self, handle: u64) -> impl Iterator<Item = Arc<Condvar>> {
        let quiet = self.unfinished == 0;
        let concerns = move |event| event == Event::Outcome(handle) || quiet && event == Event::Quiet;
        self.waiters
            .iter()
            .filter(move |(_, (event, _))| concerns(*event))
            .map(|(_, (_, news))| Arc::clone(news))
    }

    /// Wakes every waiter, to see for itself.
    pub(super) fn tell_all(&self) {
        self.waiters.iter().for_each(|(_, (_, news))| news.notify_one());
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

fn key_of(handle: u64) -> usize {
    ((handle & u64::from(u32::MAX)) as usize).wrapping_sub(1)
}

#[cfg(test)]
mod tests;
