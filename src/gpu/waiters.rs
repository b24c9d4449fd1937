//! Waits in the driver with a limit of time. The driver's own wait has none: a thread of Spillway waits in the driver,
//! and the caller waits for the thread.
//!
//! Invariants:
//! - Nothing asks the driver while a wait is pending.
//! - A GPU that hangs keeps one thread for each record of an event, however often that record is waited for.
//! - A thread holds the event that it waits for. Idle threads hold nothing and end with the device.
#![forbid(unsafe_code)]

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use crate::error::{Error, Result};
use crate::sys::sync::{Lock, Signal};
use crate::sys::threads;

/// An event, and the number of its record.
pub(super) type EventRecord = (usize, u64);

/// The threads that wait for one device.
#[derive(Default)]
pub(super) struct Waiters(Arc<WaitQueue>);

impl fmt::Debug for Waiters {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Waiters").finish_non_exhaustive()
    }
}

#[derive(Default)]
struct WaitQueue {
    state: Lock<State>,
    /// Signalled when a wait was added, and at the end.
    added: Signal,
    /// Signalled when a wait is over.
    over: Signal,
}

#[derive(Default)]
struct State {
    /// Waits that no thread has taken.
    jobs: VecDeque<(Call, EventRecord, Arc<Wait>)>,
    /// Waits that are not over.
    pending: HashMap<EventRecord, Arc<Wait>>,
    /// Threads without a wait.
    idle: usize,
    closing: bool,
}

/// The wait in the driver. It holds the event.
type Call = Box<dyn Fn() -> Result<()> + Send>;

/// One wait, and its outcome once it is over.
type Wait = OnceLock<Result<()>>;

impl Waiters {
    /// Waits for a record by `call`, at most until `until`. False if that time has come.
    pub(super) fn wait(
        &self,
        record: EventRecord,
        call: impl Fn() -> Result<()> + Send + 'static,
        until: Instant,
    ) -> Result<bool> {
        let mut state = self.0.state.lock();
        let wait = match state.pending.get(&record) {
            Some(pending) => Arc::clone(pending),
            None => self.add(&mut state, Box::new(call), record)?,
        };
        drop(self.0.over.wait_while(state, Some(until), |_| wait.get().is_none()));
        wait.get().map_or(Ok(false), |outcome| outcome.clone().map(|()| true))
    }

    fn add(&self, state: &mut State, call: Call, record: EventRecord) -> Result<Arc<Wait>> {
        if state.idle <= state.jobs.len() {
            let shared = Arc::clone(&self.0);
            threads::spawn_quiet("spillway-wait", move || shared.serve())
                .map_err(|error| Error::system("starting a thread that waits for the GPU", &error))?;
        }
        let wait = Arc::<Wait>::default();
        state.pending.insert(record, Arc::clone(&wait));
        state.jobs.push_back((call, record, Arc::clone(&wait)));
        self.0.added.notify_one();
        Ok(wait)
    }

    /// Idle threads end. Not for a forked child, which has none, and whose lock may stay held.
    pub(super) fn close(&self) {
        self.0.state.lock().closing = true;
        self.0.added.notify_all();
    }
}

impl WaitQueue {
    fn serve(&self) {
        while let Some((call, record, wait)) = self.next() {
            // The driver sleeps: the events block.
            let outcome = call();
            // Before the event goes: another one may get its number.
            self.state.lock().pending.remove(&record);
            drop(call);
            let state = self.state.lock();
            // Only this thread sets it.
            let _ = wait.set(outcome);
            drop(state);
            self.over.notify_all();
        }
    }

    fn next(&self) -> Option<(Call, EventRecord, Arc<Wait>)> {
        let mut state = self.state.lock();
        state.idle += 1;
        let none = |state: &mut State| state.jobs.is_empty() && !state.closing;
        state = self.added.wait_while(state, None, none);
        state.idle -= 1;
        state.jobs.pop_front()
    }
}
