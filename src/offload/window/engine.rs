//! A window on a device: the rule of [`Order`], performed. Units in host memory are copied by the calls themselves. One
//! thread reads units of a tier into staging memory, and copies them from there.
//!
//! Invariants:
//! - The lock is not held while the device is called, except to free events: a driver whose queues are full blocks its
//!   caller, and nobody else.
//! - One thread at a time enqueues copies into places, in the order in which the rule gave the places away. A call that
//!   finds another one at it leaves its copies to that one.
//! - An error of a copy or a read is that of the unit: its use reports it, and the next use tries again.
//! - Staging memory is read into, or freed, only after its last copy is done, and never while the system may still write to it.
//! - Dropping the window waits for its thread and its copies.
#![forbid(unsafe_code)]

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use super::device::{Device, Layout, Mark, Reader, Source};
use super::order::{Fill, Order};
use crate::error::{Error, Result};
use crate::pool::buffer::Buffer;
use crate::pool::transfer_buffer::TransferBuffer;
use crate::sys::sync::{Guard, Lock, Signal, deadline_after};
use crate::sys::threads;
use crate::tier::Tier;
use crate::tier::extent::Shape;

/// Where a unit is while it is not on the device.
#[derive(Debug, Clone)]
pub enum Home {
    /// Host memory, with the bytes of the unit.
    Memory(TransferBuffer),
    /// A stream of an extent of the tier.
    Tier {
        /// Number of the extent.
        extent: u32,
        /// Index of the stream.
        stream: u32,
    },
}

/// A unit: parameters that are on the device together.
#[derive(Debug, Clone)]
pub struct Unit {
    /// Number of bytes.
    pub bytes: u64,
    /// Its home.
    pub home: Home,
    /// It stays on the device after its first use.
    pub keep: bool,
}

/// Counters of a window.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Stats {
    /// Bytes of all places.
    pub device_bytes: u64,
    /// Most bytes of units in slots at one time.
    pub peak_bytes: u64,
    /// Bytes that were copied to the device.
    pub fetched_bytes: u64,
    /// Copies of units to the device.
    pub fetches: u64,
    /// Uses of units, those whose copy failed among them.
    pub uses: u64,
    /// Uses whose copy no earlier call had begun.
    pub late: u64,
}

/// A window. Thread-safe.
#[derive(Debug)]
pub struct Window {
    inner: Arc<Inner>,
    worker: Arc<Worker>,
}

/// Whether the thread runs. Separate from `Inner`, which the thread drops before it ends.
#[derive(Debug, Default)]
struct Worker {
    is_running: Lock<bool>,
    ended: Signal,
}

#[derive(Debug)]
struct Inner {
    device: Box<dyn Device>,
    members: Vec<Member>,
    tier: Option<Arc<Tier>>,
    state: Lock<State>,
    /// Signalled when a unit has arrived, a job was added, or the window closes.
    changed: Signal,
}

#[derive(Debug)]
struct Member {
    bytes: u64,
    origin: Origin,
}

#[derive(Debug)]
enum Origin {
    Memory(Source),
    /// Extent, its shape when the window was opened, and index of the stream.
    Tier(u32, Arc<Shape>, usize),
}

#[derive(Debug)]
struct State {
    order: Order<Mark>,
    units: Vec<Progress>,
    /// Units that the thread has to read.
    jobs: VecDeque<(Fill, u64)>,
    /// The unit that the thread reads now.
    reading: Option<usize>,
    /// Copies that are to be enqueued, the first one first.
    due: VecDeque<Due>,
    /// The unit whose copy is being enqueued, by the only thread that enqueues copies now.
    copying: Option<usize>,
    is_closing: bool,
    stats: Stats,
}

/// A copy that is to be enqueued.
#[derive(Debug)]
struct Due {
    fill: Fill,
    number: u64,
    /// Memory that was read; an error is that of the unit.
    from: Result<Source>,
}

#[derive(Debug, Clone)]
struct Progress {
    /// Number of the last copy. An earlier one that is not enqueued yet is void.
    number: u64,
    arrival: Arrival,
    /// The end of the last copy that was enqueued.
    end: Mark,
}

/// How far the last copy of a unit is.
#[derive(Debug, Clone)]
enum Arrival {
    /// It is not read, or not enqueued, yet.
    Pending,
    /// It is enqueued, with this end.
    Copied(Mark),
    Failed(Error),
}

impl Window {
    /// A window of `slots` slots, each as large as the largest unit that does not stay, and a place for each unit that
    /// stays. `device` allocates the places.
    pub fn open(
        units: &[Unit],
        slots: usize,
        tier: Option<Arc<Tier>>,
        device: impl FnOnce(Layout) -> Result<Box<dyn Device>>,
    ) -> Result<Window> {
        // A unit without bytes needs no slot.
        let stays: Vec<bool> = units.iter().map(|unit| unit.keep || unit.bytes == 0).collect();
        let of = |stay: bool| {
            units.iter().zip(&stays).filter(move |pair| *pair.1 == stay).map(|pair| pair.0.bytes)
        };
        let order = Order::new(slots, &stays);
        let largest = of(false).max().unwrap_or(0);
        let layout = Layout::new(std::iter::repeat_n(largest, order.slots()).chain(of(true)));
        let layout = layout.ok_or_else(|| Error::invalid("units", "exceed the address space"))?;
        let stats = Stats { device_bytes: layout.bytes, ..Stats::default() };
        let device = device(layout)?;
        let within = |index: usize| move |error: Error| error.within(&format!("units[{index}]."));
        let member = |(index, unit): (usize, &Unit)| -> Result<Member> {
            let origin = origin_of(unit, &*device, tier.as_deref()).map_err(within(index))?;
            Ok(Member { bytes: unit.bytes, origin })
        };
        let members = units.iter().enumerate().map(member).collect::<Result<Vec<_>>>()?;
        let staged = members.iter().filter(|member| matches!(member.origin, Origin::Tier(..)));
        let staging = staged
            .map(|member| member.bytes)
            .max()
            .map(|bytes| Staging::open(bytes, &*device))
            .transpose()?;
        let progress =
            Progress { number: 0, arrival: Arrival::Copied(Mark::default()), end: Mark::default() };
        let state = State {
            order,
            units: vec![progress; units.len()],
            jobs: VecDeque::new(),
            reading: None,
            due: VecDeque::new(),
            copying: None,
            is_closing: false,
            stats,
        };
        let inner =
            Arc::new(Inner { device, members, tier, state: Lock::new(state), changed: Signal::default() });
        let window = Window { inner, worker: Arc::default() };
        staging.map_or(Ok(()), |staging| window.start_worker(staging))?;
        Ok(window)
    }

    fn start_worker(&self, staging: Vec<Staging>) -> Result<()> {
        let (inner, worker) = (Arc::clone(&self.inner), Arc::clone(&self.worker));
        *self.worker.is_running.lock() = true;
        let spawned = threads::spawn_quiet("spillway-window", move || {
            inner.serve(staging);
            drop(inner);
            *worker.is_running.lock() = false;
            worker.ended.notify_all();
        });
        spawned.map_err(|error| {
            *self.worker.is_running.lock() = false;
            Error::system("starting the thread of a window", &error)
        })
    }

    /// Begins an iteration, see [`Order::begin`].
    pub fn begin(&self) {
        self.inner.state.lock().order.begin();
    }

    /// Has a unit on the device for work that the reader gives it next, and returns its address. Then starts the copies
    /// of the units whose uses followed before. Every use is released once. Blocks while the unit is read from a tier, at
    /// most for `timeout`. After a `Timeout` the unit is not used, and the read continues, for a later call.
    pub fn enter(&self, unit: usize, reader: Reader, timeout: Option<Duration>) -> Result<u64> {
        let (inner, until) = (&*self.inner, deadline_after(timeout));
        let mut state = inner.state.lock();
        let fill = state.order.enter(unit)?;
        if let Some(fill) = fill {
            state.stats.late += 1;
            inner.start(&mut state, fill, true);
        }
        inner.look_ahead(&mut state);
        let state = inner.copy_due(state);
        // For a copy from memory that another thread enqueues, there is no limit: it waits for the driver only.
        let until = until.filter(|_| matches!(inner.members[unit].origin, Origin::Tier(..)));
        let pending = |state: &mut State| matches!(state.units[unit].arrival, Arrival::Pending);
        let mut state = inner.changed.wait_while(state, until, pending);
        let copied = match &state.units[unit].arrival {
            Arrival::Copied(copy) => Ok(copy.clone()),
            Arrival::Failed(error) => Err(error.clone()),
            Arrival::Pending => {
                state.order.cancel(unit, true);
                return Err(Error::Timeout(format!("unit {unit} is still being read; use it again")));
            }
        };
        drop(state);
        // The use keeps the unit in its place meanwhile.
        let is_copied = copied.is_ok();
        let outcome = copied.and_then(|copy| inner.device.order(&copy, reader));
        let mut state = inner.state.lock();
        state.stats.uses += 1;
        match (outcome, state.order.place(unit)) {
            (Ok(()), Some(place)) => Ok(inner.device.address(place)),
            (outcome, _) => {
                state.order.cancel(unit, is_copied);
                outcome.and(Err(Error::Internal("a unit in use has no place".to_string())))
            }
        }
    }

    /// Ends a use: what the reader was given so far is all that reads the unit.
    pub fn leave(&self, unit: usize, reader: Reader) -> Result<()> {
        let inner = &*self.inner;
        let mut state = inner.state.lock();
        state.order.check_used(unit)?;
        let earlier = state.order.many_marks(unit).to_vec();
        drop(state);
        // The use keeps the place from other units until the place has the mark.
        let mark = inner.device.mark(reader)?;
        let reached: Vec<Mark> = earlier.into_iter().filter(Mark::is_reached).collect();
        let mut state = inner.state.lock();
        state.order.leave(unit, mark, |mark| reached.iter().any(|reached| reached.is(mark)))?;
        inner.look_ahead(&mut state);
        drop(inner.copy_due(state));
        Ok(())
    }

    /// The home of a unit is going to change, or has changed. Waits for a copy that reads it; no other one begins before
    /// the next use of the unit, or the next iteration.
    pub fn changed(&self, unit: usize) -> Result<()> {
        let inner = &*self.inner;
        let mut state = inner.state.lock();
        state.order.changed(unit)?;
        state.drop_void();
        let in_memory = matches!(inner.members[unit].origin, Origin::Memory(_));
        let reads = |state: &mut State| state.reading == Some(unit) || (in_memory && state.is_due(unit));
        let state = inner.changed.wait_while(state, None, reads);
        let copy = if in_memory { state.units[unit].end.clone() } else { Mark::default() };
        drop(state);
        copy.wait()
    }

    /// The counters.
    pub fn stats(&self) -> Stats {
        self.inner.state.lock().stats
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        self.inner.state.lock().is_closing = true;
        self.inner.changed.notify_all();
        drop(self.worker.ended.wait_while(self.worker.is_running.lock(), None, |running| *running));
        // The memory that copies read belongs to the caller afterwards. With a lost context there are no copies.
        if matches!(self.inner.device.finish(), Err(Error::Timeout(_))) {
            // The device may still use the places and what copies read.
            std::mem::forget(Arc::clone(&self.inner));
        }
    }
}

impl Inner {
    fn look_ahead(&self, state: &mut State) {
        for fill in state.order.ahead() {
            self.start(state, fill, false);
        }
    }

    /// Starts a copy; a use waits for it if it is `urgent`.
    fn start(&self, state: &mut State, fill: Fill, urgent: bool) {
        let in_slots = state.order.here().iter().map(|unit| self.members[*unit].bytes).sum();
        state.stats.peak_bytes = state.stats.peak_bytes.max(in_slots);
        let progress = &mut state.units[fill.unit];
        progress.number += 1;
        progress.arrival = Arrival::Pending;
        let number = progress.number;
        match &self.members[fill.unit].origin {
            Origin::Memory(source) => state.due.push_back(Due { fill, number, from: Ok(source.clone()) }),
            Origin::Tier(..) => {
                let job = (fill, number);
                if urgent {
                    state.jobs.push_front(job)
                } else {
                    state.jobs.push_back(job)
                }
                self.changed.notify_all();
            }
        }
    }

    /// Enqueues the copies that are due, those that other threads add meanwhile among them. Returns at once if another
    /// thread does so.
    fn copy_due<'a>(&'a self, mut state: Guard<'a, State>) -> Guard<'a, State> {
        if state.copying.is_some() {
            return state;
        }
        while let Some((Due { fill, number, from }, marks)) = state.next_due() {
            drop(state);
            let fill_place = || from.and_then(|from| self.device.fill(fill.place, &from, &marks));
            let copied = catch_unwind(AssertUnwindSafe(fill_place));
            let copied = copied.unwrap_or_else(|panic| Err(Error::of_panic(&*panic)));
            state = self.state.lock();
            state.copying = None;
            let arrival = match copied {
                Ok(end) => {
                    state.stats.fetches += 1;
                    state.stats.fetched_bytes += self.members[fill.unit].bytes;
                    state.units[fill.unit].end = end.clone();
                    Arrival::Copied(end)
                }
                Err(error) => {
                    state.order.keep_marks(fill.place, marks);
                    Arrival::Failed(error)
                }
            };
            // The unit may have lost its place meanwhile, and got another one.
            let progress = &mut state.units[fill.unit];
            if progress.number == number {
                progress.arrival = arrival;
            }
            self.changed.notify_all();
        }
        state
    }

    /// Reads the units of jobs until the window closes.
    fn serve(&self, mut staging: Vec<Staging>) {
        let mut turn = 0;
        while let Some((fill, number)) = self.next_job() {
            let memory = &mut staging[turn % 2];
            let read = catch_unwind(AssertUnwindSafe(|| self.read(fill.unit, memory)));
            let from = read.unwrap_or_else(|panic| Err(Error::of_panic(&*panic)));
            let mut state = self.state.lock();
            state.reading = None;
            if state.wants(fill, number) {
                state.due.push_back(Due { fill, number, from });
                state = self.copy_due(state);
                let enqueued = |state: &mut State| state.is_due(fill.unit);
                let state = self.changed.wait_while(state, None, enqueued);
                memory.copied = state.units[fill.unit].end.clone();
                turn += 1;
            }
            self.changed.notify_all();
        }
    }

    /// The next job whose unit still has its place; `None` when the window closes.
    fn next_job(&self) -> Option<(Fill, u64)> {
        let idle = |state: &mut State| state.jobs.is_empty() && !state.is_closing;
        let mut state: Guard<'_, State> = self.state.lock();
        loop {
            state = self.changed.wait_while(state, None, idle);
            if state.is_closing {
                return None;
            }
            let job = state.jobs.pop_front().filter(|(fill, number)| state.wants(*fill, *number));
            if let Some((fill, number)) = job {
                state.reading = Some(fill.unit);
                return Some((fill, number));
            }
        }
    }

    fn read(&self, unit: usize, staging: &mut Staging) -> Result<Source> {
        let Member { bytes, origin: Origin::Tier(extent, shape, stream) } = &self.members[unit] else {
            return Err(Error::Internal(format!("unit {unit} is not on a tier")));
        };
        let tier =
            self.tier.as_ref().ok_or_else(|| Error::Internal("a window without its tier".to_string()))?;
        staging.copied.wait()?;
        if staging.memory.in_transfer() {
            // A read that was given up may still write there.
            let other = Buffer::open(staging.memory.span().len(), self.device.backing())?;
            staging.memory = Arc::new(other);
        }
        let memory = staging.memory.transfer(0, *bytes as usize);
        let mut spans = vec![TransferBuffer::empty(); shape.streams().len()];
        spans[*stream] = memory.clone();
        tier.wait(tier.read_known(*extent, Some(shape), &spans)?, None)?;
        self.device.source(&memory, "unit")
    }
}

impl State {
    /// The next copy that a unit still waits for, and the marks that it waits for itself.
    fn next_due(&mut self) -> Option<(Due, Vec<Mark>)> {
        self.drop_void();
        let due = self.due.pop_front()?;
        self.copying = Some(due.fill.unit);
        let marks = self.order.take_marks(due.fill.place);
        Some((due, marks))
    }

    /// Drops the copies of units that have lost their place.
    fn drop_void(&mut self) {
        let mut due = std::mem::take(&mut self.due);
        due.retain(|due| self.wants(due.fill, due.number));
        self.due = due;
    }

    /// True if a copy of a unit is to be enqueued, or is being enqueued.
    fn is_due(&self, unit: usize) -> bool {
        self.copying == Some(unit) || self.due.iter().any(|due| due.fill.unit == unit)
    }

    /// True if a unit still waits for this copy in this place.
    fn wants(&self, fill: Fill, number: u64) -> bool {
        self.order.place(fill.unit) == Some(fill.place) && self.units[fill.unit].number == number
    }
}

/// Memory that units of a tier are read into.
#[derive(Debug)]
struct Staging {
    memory: Arc<Buffer>,
    /// The end of the last copy from it.
    copied: Mark,
}

impl Staging {
    /// Two, so that one is read into while the other is copied.
    fn open(bytes: u64, device: &dyn Device) -> Result<Vec<Staging>> {
        let memory = Buffer::open_many(2, bytes as usize, device.backing())?;
        Ok(memory
            .into_iter()
            .map(|memory| Staging { memory: Arc::new(memory), copied: Mark::default() })
            .collect())
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        // The device reads the memory until then. With a lost context there are no copies.
        if matches!(self.copied.wait(), Err(Error::Timeout(_))) {
            std::mem::forget(Arc::clone(&self.memory));
        }
    }
}

/// Checks the home of a unit.
fn origin_of(unit: &Unit, device: &dyn Device, tier: Option<&Tier>) -> Result<Origin> {
    let lengths = |found: u64, what: &str| {
        let reason = format!("is {}, but {what} has {found} bytes", unit.bytes);
        if found == unit.bytes { Ok(()) } else { Err(Error::invalid("bytes", reason)) }
    };
    match &unit.home {
        Home::Memory(memory) => {
            lengths(memory.len() as u64, "its memory")?;
            Ok(Origin::Memory(device.source(memory, "host")?))
        }
        Home::Tier { extent, stream } => {
            let tier = tier.ok_or_else(|| Error::invalid("home", "is a tier, but the window has none"))?;
            let shape = tier.shape(*extent)?;
            let found = shape.streams().get(*stream as usize).ok_or_else(|| {
                let reason = format!("is {stream}, but the extent has {} streams", shape.streams().len());
                Error::invalid("stream", reason)
            })?;
            lengths(*found, "its stream")?;
            Ok(Origin::Tier(*extent, shape, *stream as usize))
        }
    }
}
