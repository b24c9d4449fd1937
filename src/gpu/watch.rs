//! Waits for the framework's events and streams without a call of the driver while they are pending: one thread waits in
//! the driver for one event at a time, and reports each.
//!
//! Invariants:
//! - Each watch has a mark (see `marks`). Marks are reported in the order of the calls. No work before a mark depends on what a later watch starts, since the
//!   work was queued before the later call.
//! - The thread ends with its last mark once the watches are dropped. A GPU that hangs keeps this thread only.
#![forbid(unsafe_code)]

use std::collections::VecDeque;
use std::sync::{Arc, Weak};

use super::device::Device;
use super::marks::Marks;
use super::stream::{ForeignEvent, ForeignStream, GpuEvent};
use crate::error::{Error, Result};
use crate::sys::event::{Report, Status};
use crate::sys::sync::{Lock, Signal};
use crate::sys::threads;

/// Watches events and streams of one device.
#[derive(Debug)]
pub struct Watches {
    device: Arc<Device>,
    marks: Marks,
    shared: Arc<WatchList>,
}

/// What the callers and the thread share.
#[derive(Debug, Default)]
struct WatchList {
    state: Lock<State>,
    /// Signalled when a mark was added, when the watches are dropped, and when the thread ends.
    changed: Signal,
}

#[derive(Debug, Default)]
struct State {
    pending: VecDeque<(GpuEvent, Weak<Report>)>,
    /// Marks that may be recorded again.
    idle: Vec<GpuEvent>,
    /// The thread exists.
    runs: bool,
    /// The thread waits in the driver.
    waits: bool,
    closing: bool,
}

impl Watches {
    /// No watches yet. The first one starts the thread.
    pub fn new(device: &Arc<Device>) -> Watches {
        Watches { device: Arc::clone(device), marks: Marks::new(device), shared: Arc::default() }
    }

    /// Watches the last record of `event`. Errors: it was recorded during a graph capture.
    pub fn event(&self, event: ForeignEvent) -> Result<Arc<Report>> {
        let mark = self.mark()?;
        self.marks.behind(event, &mark)?;
        self.watch(mark)
    }

    /// Watches the work queued on `stream` so far.
    pub fn stream(&self, stream: ForeignStream) -> Result<Arc<Report>> {
        let mark = self.mark()?;
        stream.record(&mark)?;
        self.watch(mark)
    }

    fn mark(&self) -> Result<GpuEvent> {
        // Checks for a forked child before locking: another thread of the parent may have held the lock during the
        // fork.
        drop(self.device.enter()?);
        let idle = self.shared.state.lock().idle.pop();
        idle.map_or_else(|| GpuEvent::new(&self.device), Ok)
    }

    fn watch(&self, mark: GpuEvent) -> Result<Arc<Report>> {
        let report = Arc::<Report>::default();
        let mut state = self.shared.state.lock();
        if !state.runs {
            let theirs = Arc::clone(&self.shared);
            threads::spawn_quiet("spillway-watch", move || theirs.serve())
                .map_err(|error| Error::system("starting the thread that waits for GPU events", &error))?;
            state.runs = true;
        }
        state.pending.push_back((mark, Arc::downgrade(&report)));
        drop(state);
        self.shared.changed.notify_all();
        Ok(report)
    }
}

impl WatchList {
    /// The thread: waits for the marks in their order.
    fn serve(&self) {
        while let Some((mark, report)) = self.next() {
            // The driver sleeps: marks are events that block.
            let reached = mark.synchronize();
            let mut state = self.state.lock();
            state.waits = false;
            state.idle.extend(reached.is_ok().then_some(mark));
            drop(state);
            if let Some(report) = report.upgrade() {
                report.give(reached.map_or(Status::Broken("the GPU reported an error"), |()| Status::Ready));
            }
        }
        let idle = std::mem::take(&mut self.state.lock().idle);
        drop(idle);
        self.state.lock().runs = false;
        self.changed.notify_all();
    }

    /// The next mark; `None` after the last one, once the watches are dropped.
    fn next(&self) -> Option<(GpuEvent, Weak<Report>)> {
        let idle = |state: &mut State| state.pending.is_empty() && !state.closing;
        let mut state = self.changed.wait_while(self.state.lock(), None, idle);
        let next = state.pending.pop_front();
        state.waits = next.is_some();
        next
    }
}

impl Drop for Watches {
    fn drop(&mut self) {
        // A forked child has no such thread, and its lock may stay held.
        if !self.device.is_own() {
            return;
        }
        let mut state = self.shared.state.lock();
        state.closing = true;
        self.shared.changed.notify_all();
        // A thread without marks ends at once. Reports of others may have owners, and come later.
        let ends = |state: &mut State| state.runs && !state.waits && state.pending.is_empty();
        drop(self.shared.changed.wait_while(state, None, ends));
    }
}
