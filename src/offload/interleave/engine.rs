//! The state machine on a backend. One thread runs the CPU's part of a step, one enqueues the rest of the GPU's part.
//!
//! The CPU's thread starts first. Then the caller enqueues as much of the GPU's part as fits the device's queues. A
//! second thread enqueues the rest, piece by piece, as the queues drain.
//!
//! Invariants:
//! - The state machine's lock is not held while a command is enqueued, runs or is waited for, nor while the backend is
//!   asked. See [`Calls`] for the order of the commands of calls.
//! - The lock of the timings is held while the backend is asked for timings, which waits for no work.
//! - The threads of a step take only subgroups of that step. They may still be exiting when the next step begins.
//! - Dropping the engine blocks until those threads and the backend are idle, so that memory lent to the backend may be
//!   freed.
//! - In a forked child every call returns an error and waits for no thread; dropping the engine frees nothing there.
#![forbid(unsafe_code)]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use super::calls::Calls;
use super::machine::Machine;
use super::recalibrate::RateMeter;
use super::{Backend, Model, Timing};
use crate::error::{Error, Result};
use crate::kernel::AdamRule;
use crate::log::{self, Level};
use crate::sys::sync::{Guard, Lock, Signal};
use crate::sys::threads;
use spillway_planner::interleave::pieces;
use spillway_planner::interleave::placements::{Placement, Plan};
use spillway_planner::interleave::schedule::{self, Lane, LaneEvent};
use spillway_planner::interleave::{Rates, Shape};

/// The interleaved update of one rank. Thread-safe.
pub struct InterleavedUpdate {
    inner: Arc<Inner>,
    worker: Arc<Worker>,
    watched: Lock<Watched>,
}

/// The reader of new parameters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reader {
    /// The calling thread.
    Caller,
    /// The framework's stream.
    Stream(Model),
}

/// Maximum number of timings kept for a meter that [`InterleavedUpdate::replan`] never reads.
const MOST_UNSEEN: usize = 1 << 20;

/// Timings of past steps, and the meter that learns from them.
#[derive(Default)]
struct Watched {
    /// True if the caller has set a plan, and so the number of residents.
    planned: bool,
    meter: Option<RateMeter>,
    /// Timings that the meter has not observed yet.
    unseen: Vec<Timing>,
    /// Timings since the last step began.
    ran: Vec<Timing>,
}

struct Inner {
    backend: Box<dyn Backend>,
    calls: Calls,
    /// Signalled when a subgroup has stepped or a failure occurred.
    changed: Signal,
}

/// Number of running threads. Separate from `Inner`, so that a thread can drop `Inner` before it counts itself out.
#[derive(Default)]
struct Worker {
    running: Lock<usize>,
    ended: Signal,
}

impl InterleavedUpdate {
    /// Starts with all subgroups on the CPU.
    pub fn new(shape: Shape, backend: Box<dyn Backend>) -> Result<InterleavedUpdate> {
        let calls = Calls::new(Machine::new(shape)?);
        let inner = Arc::new(Inner { backend, calls, changed: Signal::default() });
        Ok(InterleavedUpdate { inner, worker: Arc::default(), watched: Lock::default() })
    }

    /// The subgroups and settings, which never change.
    pub fn shape(&self) -> Shape {
        self.machine().shape().clone()
    }

    /// The plan of the next step, or of the step in flight.
    pub fn plan(&self) -> Plan {
        self.machine().plan().clone()
    }

    /// Changes the plan: only after a step and before the first gradient of the next step. Subgroups for which the GPU
    /// has no memory are on the CPU.
    pub fn set_plan(&self, plan: Plan) -> Result<()> {
        self.adopt(plan)?;
        self.watched.lock().planned = true;
        Ok(())
    }

    /// Changes the plan to what the backend accepts of it, and returns that.
    fn adopt(&self, plan: Plan) -> Result<Plan> {
        let backend = &*self.inner.backend;
        self.inner
            .calls
            .set_plan(plan, |plan| backend.accepts(plan), &mut |command| backend.play(command, None))
    }

    /// Work already queued on `stream` produces the gradient of `subgroup`; its transfer may start.
    pub fn gradient(&self, subgroup: usize, stream: Model) -> Result<()> {
        self.inner.calls.gradient(subgroup, &mut |command| self.inner.backend.play(command, stream))
    }

    /// Work already queued on `stream` contains every read of the 16-bit parameters of `subgroup`, which may then be
    /// overwritten. [`InterleavedUpdate::begin`] implies this call for the remaining subgroups.
    pub fn params_free(&self, subgroup: usize, stream: Model) -> Result<()> {
        self.inner.calls.params_free(subgroup, &mut |command| self.inner.backend.play(command, stream))
    }

    /// Starts the step of all subgroups and returns. Every gradient must have been announced. `stream` is the
    /// framework's. `rules` holds one rule for all subgroups, or one per subgroup.
    pub fn begin(&self, rules: Vec<AdamRule>, stream: Model) -> Result<()> {
        let count = self.machine().shape().count();
        if rules.len() != 1 && rules.len() != count {
            return Err(Error::invalid(
                "rules",
                format!("there are {}, but 1 or {count} are needed", rules.len()),
            ));
        }
        let prepare = || {
            self.inner.backend.begin(rules.into())?;
            self.collect().ran.clear();
            Ok(())
        };
        let emit = &mut |command| self.inner.backend.play(command, stream);
        let on_cpu = self.inner.calls.begin(prepare, emit)?;
        if on_cpu > 0 {
            self.start_worker("spillway-step", move |inner| inner.cpu_part(on_cpu))?;
        }
        self.inner.gpu_part(true, usize::MAX)?;
        let left = self.machine().pieces_left();
        match left {
            0 => Ok(()),
            left => self.start_worker("spillway-feed", move |inner| drop(inner.gpu_part(false, left))),
        }
    }

    /// Makes `reader` wait for the new 16-bit parameters of a subgroup. The call itself blocks at least until the CPU
    /// has updated the subgroup, or the GPU's work for it is enqueued.
    pub fn publish(&self, subgroup: usize, reader: Reader) -> Result<()> {
        let mut machine = self.machine();
        machine.check(subgroup)?;
        while machine.is_stepping(subgroup) {
            machine = self.inner.changed.wait(machine);
            machine.check(subgroup)?;
        }
        drop(machine);
        let (lane, stream) = match reader {
            Reader::Caller => (Lane::Caller, None),
            Reader::Stream(stream) => (Lane::Model, stream),
        };
        schedule::publish(subgroup, lane, &mut |command| self.inner.backend.play(command, stream))
    }

    /// True if the parameters of a subgroup are those of the last step begun.
    pub fn is_ready(&self, subgroup: usize) -> Result<bool> {
        let is_stepping = {
            let machine = self.machine();
            machine.check(subgroup)?;
            machine.is_stepping(subgroup)
        };
        Ok(!is_stepping && self.inner.backend.reached(LaneEvent::Ready(subgroup))?)
    }

    /// [`InterleavedUpdate::publish`] for every subgroup. Flushes may still be in flight afterwards.
    pub fn finish(&self, reader: Reader) -> Result<()> {
        let count = self.machine().shape().count();
        (0..count).try_for_each(|subgroup| self.publish(subgroup, reader))
    }

    /// Sets initial rates; from then on [`InterleavedUpdate::replan`] corrects them with the timings of every step.
    pub fn calibrate(&self, rates: Rates) -> Result<()> {
        self.watched.lock().meter = Some(RateMeter::new(rates)?);
        Ok(())
    }

    /// Updates the rates with the timings since the last call, and changes the plan if the gain is worth it; returns
    /// true if the plan changed. If no plan was set, makes subgroups resident in GPU memory that is free after the first
    /// steps. `backward`: seconds of the backward pass that the steps overlap.
    pub fn replan(&self, backward: f64) -> Result<bool> {
        let (shape, present) = (self.shape(), self.plan());
        let (plan, room) = {
            let watched = &mut *self.collect();
            let unseen = std::mem::take(&mut watched.unseen);
            let meter = watched.meter.as_mut();
            let meter = meter.ok_or_else(|| {
                Error::invalid("interleave", "was opened without rates, which a new plan needs")
            })?;
            meter.observe(&shape, &present, &unseen, backward)?;
            let chooses = !watched.planned && meter.chooses_residents(&present);
            let room = if chooses { self.inner.backend.room()? } else { None };
            (meter.replan(&shape, &present, &watched.ran, backward, room)?, room)
        };
        if plan == present {
            return Ok(false);
        }
        let accepted = self.adopt(plan.clone())?;
        if accepted != plan
            && let Some(meter) = &mut self.watched.lock().meter
        {
            meter.found_no_room();
        }
        let residents = accepted.count_on(Placement::Resident);
        if let Some(room) = room.filter(|_| residents > 0) {
            let text = format!(
                "interleaved update: {residents} of {} subgroups are resident in the {} MiB of GPU memory that are \
                 free beside the reserve",
                accepted.count(),
                room >> 20
            );
            log::write(Level::Info, &text);
        }
        Ok(accepted != present)
    }

    /// Blocks until the states of all non-resident subgroups are in host memory. Needed before a checkpoint reads them,
    /// and after [`InterleavedUpdate::set_plan`] removed residents.
    pub fn drain(&self) -> Result<()> {
        self.finish(Reader::Caller)?;
        let plan = self.plan();
        let at_home = (0..plan.count()).filter(|subgroup| plan.placement(*subgroup) != Placement::Resident);
        at_home.into_iter().try_for_each(|subgroup| {
            schedule::drain(subgroup, &mut |command| self.inner.backend.play(command, None))
        })
    }

    /// Subgroups whose state in host memory is not the state after the last step: residents, subgroups whose flush is
    /// in flight, and after a failure every subgroup in doubt.
    pub fn away(&self) -> Vec<usize> {
        let sent: Vec<bool> = {
            let machine = self.machine();
            let resident = |subgroup| machine.plan().placement(subgroup) == Placement::Resident;
            let sent = |subgroup| !resident(subgroup) && !machine.is_stepping(subgroup);
            (0..machine.shape().count()).map(sent).collect()
        };
        let reached = |subgroup| self.inner.backend.reached(LaneEvent::Home(subgroup)).unwrap_or(false);
        (0..sent.len()).filter(|subgroup| !sent[*subgroup] || !reached(*subgroup)).collect()
    }

    /// Timings since the last step began.
    pub fn ran(&self) -> Vec<Timing> {
        self.collect().ran.clone()
    }

    /// Takes the timings from the backend: for the meter, if there is one, and for a trace.
    fn collect(&self) -> Guard<'_, Watched> {
        let mut watched = self.watched.lock();
        let new = self.inner.backend.timings();
        if watched.meter.is_some() && watched.unseen.len() < MOST_UNSEEN {
            watched.unseen.extend_from_slice(&new);
        }
        watched.ran.extend(new);
        watched
    }

    fn machine(&self) -> Guard<'_, Machine> {
        self.inner.calls.machine()
    }

    /// Starts a thread of the step in flight. If the thread cannot start, the step fails.
    fn start_worker(&self, name: &'static str, work: impl FnOnce(&Inner) + Send + 'static) -> Result<()> {
        let (inner, worker) = (Arc::clone(&self.inner), Arc::clone(&self.worker));
        *worker.running.lock() += 1;
        let spawned = threads::spawn_quiet(name, move || {
            work(&inner);
            drop(inner);
            *worker.running.lock() -= 1;
            worker.ended.notify_all();
        });
        spawned.or_else(|error| {
            *self.worker.running.lock() -= 1;
            let error = Error::system("starting a thread of the interleaved update", &error);
            self.inner.done(0, Err(error))
        })
    }
}

impl Inner {
    fn cpu_part(&self, subgroups: usize) {
        for _ in 0..subgroups {
            let Some((nth, subgroup)) = self.calls.machine().next_cpu() else { return };
            let emit = &mut |command| self.backend.play(command, None);
            let outcome = catch_unwind(AssertUnwindSafe(|| schedule::cpu_part(nth, subgroup, emit)));
            // The state machine keeps the failure and returns it from every later call.
            let _ = self.done(subgroup, outcome.unwrap_or_else(|panic| Err(Error::of_panic(&*panic))));
        }
    }

    /// Enqueues at most `most` pieces of the GPU's part. With `at_once`, stops at the first piece that must wait for
    /// space in the device's queues.
    fn gpu_part(&self, at_once: bool, most: usize) -> Result<()> {
        let shape = self.calls.machine().shape().clone();
        for _ in 0..most {
            let Some((piece, room)) = self.calls.machine().next_gpu(at_once) else { return Ok(()) };
            let emit = &mut |command| self.backend.play(command, None);
            let outcome = catch_unwind(AssertUnwindSafe(|| {
                pieces::room(&room, emit).and_then(|()| pieces::enqueue(&shape, piece, emit))
            }));
            let outcome = outcome.unwrap_or_else(|panic| Err(Error::of_panic(&*panic)));
            let kept = self.calls.machine().enqueued(piece, outcome);
            self.changed.notify_all();
            kept?;
        }
        Ok(())
    }

    fn done(&self, subgroup: usize, outcome: Result<()>) -> Result<()> {
        let kept = self.calls.machine().stepped(subgroup, outcome);
        self.changed.notify_all();
        kept
    }
}

impl Drop for InterleavedUpdate {
    fn drop(&mut self) {
        let mut running = self.worker.running.lock();
        while *running > 0 {
            running = self.worker.ended.wait(running);
        }
    }
}
