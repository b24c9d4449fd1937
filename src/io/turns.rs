//! Turns of processes on a device: only some processes of a user transfer to it at a time, by default one (MLP-Offload
//! section 3.2). The thread of an engine takes and ends them, so neither a caller nor a wait is needed for that.
//!
//! Invariants:
//! - A read or write of more than [`FREE_BYTES`] begins only while this process has the turn of its device. It is finished
//!   in the turn in which it began. Smaller ones, syncs and allocations need no turn.
//! - All engines of a process share its turn of a device. The turn ends when none of their operations is left in it.
//! - If another process waits, no operation begins after [`SHARE`], so that the turn ends.
//! - Time without a turn is neither busy time nor a stall of the device. It counts toward the deadline of an operation.
//! - A process that waited in vain keeps its turn of the device, also without engines, until the holder has moved: the next
//!   engine does not wait for the same holder.
//! - Turns never affect correctness. After an error of the queue the process uses the device without turns.
#![forbid(unsafe_code)]

pub mod queue;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::file::File;
use super::options::TurnOptions;
use crate::error::Result;
use crate::log::{self, Level};
use crate::sys::fork::PerProcessStatic;
use crate::sys::sync::Lock;
use queue::{TurnQueue, TurnRequest};

/// Operations of at most this size need no turn: they take little of a device, and a commit must not wait with its
/// superblock.
pub const FREE_BYTES: u64 = 64 << 10;
/// Interval between looks at the queue; a turn lasts tens of milliseconds or more.
pub(super) const POLL_INTERVAL: Duration = Duration::from_millis(1);
/// How long operations may begin in a turn that other processes wait for.
const SHARE: Duration = Duration::from_millis(50);

/// The turns of this process by device and number of turns: those that engines use, and those that are stuck.
static DEVICES: PerProcessStatic<Lock<Known>> = PerProcessStatic::empty();

type Known = HashMap<(u64, u32), Arc<DeviceTurn>>;

/// The turns that an engine uses. Only its driver has it.
pub(super) struct Turns {
    options: TurnOptions,
    devices: HashMap<u64, DeviceUse>,
}

/// The use of a device by one engine.
struct DeviceUse {
    turn: Arc<DeviceTurn>,
    /// Operations in the turn.
    inside: usize,
    /// An operation was held back since [`Turns::begin`].
    held: bool,
    /// This engine is counted among those that wait for the turn.
    waits: bool,
}

impl Turns {
    /// `None` if the options ask for no turns.
    pub(super) fn new(options: TurnOptions) -> Option<Turns> {
        (options.most > 0).then(|| Turns { options, devices: HashMap::new() })
    }

    /// Begins to look for operations that may start.
    pub(super) fn begin(&mut self) {
        self.devices.values_mut().for_each(|device| device.held = false);
    }

    /// True if an operation on a file may begin; [`Turns::leave`] follows when it has ended.
    pub(super) fn enter(&mut self, file: &File) -> bool {
        let (device, options) = (file.identity().device, self.options);
        let found = self.devices.entry(device).or_insert_with(|| {
            let turn = DeviceTurn::of(device, options.most, file.name());
            DeviceUse { turn, inside: 0, held: false, waits: false }
        });
        // One look for each device is enough.
        let entered = !found.held && found.turn.enter(options.timeout);
        found.inside += usize::from(entered);
        if !entered {
            found.held = true;
            if !std::mem::replace(&mut found.waits, true) {
                found.turn.state.lock().waiting += 1;
            }
        }
        entered
    }

    /// Records the end of an operation that has entered.
    pub(super) fn leave(&mut self, file: &File) {
        if let Some(found) = self.devices.get_mut(&file.identity().device) {
            found.inside -= 1;
            found.turn.leave(1);
        }
    }

    /// Ends what [`Turns::begin`] began. True if operations are held back.
    pub(super) fn end(&mut self) -> bool {
        for device in self.devices.values_mut().filter(|device| !device.held) {
            device.stop_waiting();
        }
        self.devices.values().any(|device| device.held)
    }
}

impl DeviceUse {
    fn stop_waiting(&mut self) {
        if std::mem::take(&mut self.waits) {
            self.turn.stop_waiting();
        }
    }
}

impl Drop for Turns {
    fn drop(&mut self) {
        if !self.devices.is_empty() {
            self.devices.clear();
            DeviceTurn::drop_unused();
        }
    }
}

impl Drop for DeviceUse {
    fn drop(&mut self) {
        self.stop_waiting();
        self.turn.leave(self.inside);
    }
}

/// The turn of this process on a device.
struct DeviceTurn {
    state: Lock<DeviceState>,
}

struct DeviceState {
    /// `None` after an error of the queue.
    request: Option<TurnRequest>,
    /// Operations in the turn.
    inside: usize,
    /// Engines with operations that are held back.
    waiting: usize,
    granted: Option<Instant>,
    polled: Option<Instant>,
    /// Since when no operation begins, because another process waits and this one has had its share.
    closing: Option<Instant>,
}

impl DeviceTurn {
    /// The turn on a device, which all engines of this process share. `name` is a file there.
    fn of(device: u64, most: u32, name: &str) -> Arc<DeviceTurn> {
        let all = DEVICES.get_or_make(Lock::default);
        let known = |all: &Known| all.get(&(device, most)).map(Arc::clone);
        // A separate statement, so that the lock is released: the log callback may use an engine.
        let found = known(&all.lock());
        if let Some(found) = found {
            return found;
        }
        let queue = TurnQueue::join(device, name, most, None);
        let (request, failed) = match queue {
            Ok(queue) => (Some(TurnRequest::new(queue)), None),
            Err(error) => (None, Some(error)),
        };
        let (inside, waiting, granted, polled, closing) = (0, 0, None, None, None);
        let state = Lock::new(DeviceState { request, inside, waiting, granted, polled, closing });
        let made = Arc::new(DeviceTurn { state });
        let mut all = all.lock();
        if let Some(first) = known(&all) {
            return first;
        }
        all.insert((device, most), Arc::clone(&made));
        drop(all);
        if let Some(error) = failed {
            let message =
                format!("the device of {name} is used without taking turns with other processes: {error}");
            log::write(Level::Warn, &message);
        }
        made
    }

    /// Drops the turns that no engine uses. One that is stuck stays, and with it what it is stuck behind.
    fn drop_unused() {
        let all = DEVICES.get_or_make(Lock::default);
        all.lock().retain(|_, turn| Arc::strong_count(turn) > 1 || turn.is_stuck());
    }

    fn is_stuck(&self) -> bool {
        self.state.lock().request.as_ref().is_some_and(TurnRequest::is_stuck)
    }

    fn enter(&self, timeout: Duration) -> bool {
        let mut state = self.state.lock();
        let (entered, message) = match state.advance(timeout) {
            Ok(entered) => (entered, state.request.as_mut().and_then(TurnRequest::take_message)),
            Err(error) => {
                state.request = None;
                (true, Some(format!("this process takes no more turns on a device: {error}")))
            }
        };
        state.inside += usize::from(entered);
        drop(state);
        if let Some(message) = message {
            log::write(Level::Warn, &message);
        }
        entered
    }

    /// Records the end of operations. The turn ends with the last one.
    fn leave(&self, operations: usize) {
        let mut state = self.state.lock();
        state.inside -= operations;
        if operations > 0 && state.inside == 0 {
            state.give_up();
        }
    }

    /// An engine no longer waits. Without any other the process leaves the queue.
    fn stop_waiting(&self) {
        let mut state = self.state.lock();
        state.waiting -= 1;
        if state.waiting == 0 && state.inside == 0 {
            state.give_up();
        }
    }
}

impl DeviceState {
    /// True if an operation may begin now. Asks for the turn if this process does not have it.
    fn advance(&mut self, timeout: Duration) -> Result<bool> {
        let now = Instant::now();
        let past = |since: Option<Instant>, time| since.is_none_or(|since| now.duration_since(since) >= time);
        let Some(request) = &mut self.request else { return Ok(true) };
        let due = past(self.polled, POLL_INTERVAL);
        if request.granted() {
            if due && self.closing.is_none() && past(self.granted, SHARE) {
                self.polled = Some(now);
                self.closing = request.others_wait()?.then_some(now);
            }
            let Some(closing) = self.closing else { return Ok(true) };
            if self.inside > 0 {
                // Operations do not wait without end for a device that does not answer.
                return Ok(now.duration_since(closing) >= timeout);
            }
            self.closing = None;
            request.release();
        } else if !due {
            return Ok(false);
        }
        self.polled = Some(now);
        self.granted = Some(now);
        request.poll(timeout)
    }

    fn give_up(&mut self) {
        (self.polled, self.closing) = (None, None);
        self.request.iter_mut().for_each(TurnRequest::release);
    }
}

#[cfg(test)]
mod tests;
