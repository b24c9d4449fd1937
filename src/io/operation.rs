//! Operations under way, and what an engine's callers and its driver share about them.
//!
//! A handle's life: pending, then finished until a wait takes the outcome. One whose deadline passes is expired: its
//! caller has the outcome at once, and the handle stays known until the kernel is done with the memory.
#![forbid(unsafe_code)]

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use slab::Slab;

use super::backend::{Action, Wake};
use super::busy::Busy;
use super::counters::Counters;
use super::file::File;
use crate::error::{Error, IoError, IoKind, Result};
use crate::pool::region::Lease;
use crate::sys::span::Span;

/// One read, write or sync.
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
    pub(super) expired: AtomicBool,
}

impl Operation {
    /// How far it has to go: bytes, or one step for a sync.
    pub(super) fn total(&self) -> u64 {
        if self.action == Action::Sync { 1 } else { self.span.len() as u64 }
    }

    /// True if no more pieces are to be started.
    pub(super) fn stopped(&self) -> bool {
        self.stop.load(Ordering::Acquire)
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
        }
    }

    pub(super) fn error(&self, kind: IoKind, detail: String) -> Error {
        let path = self.file.name().to_string();
        let bytes = self.span.len() as u64;
        IoError { kind, doing: self.doing(), path, offset: self.offset, bytes, errno: 0, detail }.into()
    }

    pub(super) fn refuse_failed_device(&self) -> Error {
        let words = "earlier operations on this device are stuck past their deadline";
        self.error(IoKind::PathFailed, words.to_string())
    }
}

/// What callers and driver share.
pub(super) struct Shared {
    state: Mutex<State>,
    news: Condvar,
    pub(super) counters: Counters,
    /// The driver has room: a new operation is worth a wake.
    pub(super) hungry: AtomicBool,
    /// A region retired.
    pub(super) trim: AtomicBool,
    /// Completions seen by the driver.
    pub(super) progress: AtomicU64,
    /// See `Options::stall`.
    stall: Option<Duration>,
    pub(super) waker: OnceLock<Arc<dyn Wake>>,
}

#[derive(Default)]
pub(super) struct State {
    pub(super) inbox: VecDeque<Arc<Operation>>,
    pub(super) entries: Slab<Entry>,
    generation: u32,
    /// Operations that are pending and not expired.
    pub(super) unfinished: usize,
    pub(super) busy: Busy,
    /// `Shared::progress` when it was last looked at, and when it was last seen to change.
    progress: (u64, Option<Instant>),
    /// Devices with expired operations in the kernel, and how many.
    pub(super) stuck: HashMap<u64, usize>,
    pub(super) closing: bool,
    pub(super) driver_gone: bool,
    pub(super) lost: Option<String>,
}

pub(super) struct Entry {
    pub(super) handle: u64,
    pub(super) op: Option<Arc<Operation>>,
    pub(super) phase: Phase,
}

pub(super) enum Phase {
    Pending,
    Finished(Result<u64>),
    /// The outcome is the deadline; `Some` until a wait takes it.
    Expired(Option<Error>),
}

impl Shared {
    pub(super) fn new(stall: Option<Duration>) -> Shared {
        Shared {
            state: Mutex::default(),
            news: Condvar::new(),
            counters: Counters::default(),
            hungry: AtomicBool::new(false),
            trim: AtomicBool::new(false),
            progress: AtomicU64::new(0),
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

    /// Waits for news, at the longest until `until`. False if that has passed.
    pub(super) fn wait_news<'a>(
        &self,
        state: MutexGuard<'a, State>,
        until: Option<Instant>,
    ) -> (MutexGuard<'a, State>, bool) {
        let Some(until) = until else {
            return (self.news.wait(state).unwrap_or_else(PoisonError::into_inner), true);
        };
        let Some(left) = until.checked_duration_since(Instant::now()).filter(|left| !left.is_zero()) else {
            return (state, false);
        };
        let (state, _) = self.news.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner);
        (state, true)
    }

    /// The driver's word that the kernel is done with an operation. Whoever hears of it finds its memory let go.
    pub(super) fn finish(&self, op: Arc<Operation>, outcome: Result<u64>) {
        let mut guard = self.lock();
        let state = &mut *guard;
        let key = key_of(op.handle);
        let Some(entry) = state.entries.get_mut(key).filter(|entry| entry.handle == op.handle) else {
            return;
        };
        let (action, device) = (op.action, op.device());
        entry.op = None;
        drop(op);
        match &entry.phase {
            Phase::Expired(unread) => {
                if unread.is_none() {
                    state.entries.remove(key);
                }
                state.unstick(device);
            }
            _ => {
                self.counters.count_outcome(action, &outcome);
                state.busy.ends(action);
                entry.phase = Phase::Finished(outcome);
                state.unfinished -= 1;
            }
        }
        drop(guard);
        self.news.notify_all();
    }

    /// Expires what is past its deadline, or under way without progress for too long; when to look again, and whether
    /// anything expired.
    pub(super) fn expire(&self, state: &mut State, now: Instant) -> (Option<Instant>, bool) {
        let progress = self.progress.load(Ordering::Relaxed);
        if state.progress.0 != progress {
            state.progress = (progress, Some(now));
        }
        let moved = state.progress.1;
        let stall = self.stall;
        let limit = |op: &Operation| {
            let stalled = stall.and_then(|time| {
                let from = moved.map_or(op.submitted, |moved| moved.max(op.submitted));
                from.checked_add(time)
            });
            [op.deadline, stalled].into_iter().flatten().min()
        };
        state.expire(now, limit)
    }

    /// The driver's last word.
    pub(super) fn driver_ends(&self, lost: Option<String>) {
        let mut state = self.lock();
        state.driver_gone = true;
        state.lost = lost;
        drop(state);
        self.news.notify_all();
    }
}

impl State {
    /// Gives an operation its handle and queues it; one that has nothing to do is finished at once.
    pub(super) fn admit(&mut self, make: impl FnOnce(u64) -> Operation) -> (u64, bool) {
        self.generation = self.generation.wrapping_add(1);
        let slot = self.entries.vacant_entry();
        let handle = u64::from(self.generation) << 32 | (slot.key() as u64 + 1);
        let op = Arc::new(make(handle));
        let nothing = op.total() == 0;
        let phase = if nothing { Phase::Finished(Ok(0)) } else { Phase::Pending };
        slot.insert(Entry { handle, op: (!nothing).then(|| Arc::clone(&op)), phase });
        if !nothing {
            self.busy.begins(op.action);
            self.unfinished += 1;
            self.inbox.push_back(op);
        }
        (handle, nothing)
    }

    pub(super) fn entry(&mut self, handle: u64) -> Result<&mut Entry> {
        let found = self.entries.get_mut(key_of(handle)).filter(|entry| entry.handle == handle);
        found.ok_or_else(|| {
            Error::invalid("handle", format!("{handle:#x} was never given, or was waited for"))
        })
    }

    /// Takes the outcome of a handle, if it has one.
    pub(super) fn take(&mut self, handle: u64) -> Result<Option<Result<u64>>> {
        let entry = self.entry(handle)?;
        match &mut entry.phase {
            Phase::Pending => Ok(None),
            Phase::Expired(unread) => {
                let known = || Error::invalid("handle", format!("{handle:#x} was waited for"));
                let error = unread.take().ok_or_else(known)?;
                if entry.op.is_none() {
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

    fn expire(
        &mut self,
        now: Instant,
        limit: impl Fn(&Operation) -> Option<Instant>,
    ) -> (Option<Instant>, bool) {
        let mut next = None;
        let mut expired_any = false;
        for (_, entry) in self.entries.iter_mut().filter(|(_, entry)| matches!(entry.phase, Phase::Pending)) {
            let Some((op, deadline)) = entry.op.as_ref().and_then(|op| Some((op, limit(op)?))) else {
                continue;
            };
            if deadline > now {
                next = Some(next.map_or(deadline, |other: Instant| other.min(deadline)));
                continue;
            }
            op.expired.store(true, Ordering::Release);
            op.stop.store(true, Ordering::Release);
            let words = "its deadline passed; the buffer stays in use until the system answers";
            let error = op.error(IoKind::Deadline, words.to_string());
            *self.stuck.entry(op.device()).or_default() += 1;
            entry.phase = Phase::Expired(Some(error));
            self.busy.ends(op.action);
            self.unfinished -= 1;
            expired_any = true;
        }
        (next, expired_any)
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
