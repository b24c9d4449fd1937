//! The machine on a backend, with a thread for the CPU's part, and one for what is left of the GPU's.
//!
//! The CPU's thread starts first. Then the caller enqueues as much of the GPU's part as the device has room for, and the
//! second thread the rest, piece by piece as room is made.
//!
//! Invariants:
//! - The lock is held while the commands of a call are enqueued, never while those of a step are, nor while one is worked on
//!   or waited for.
//! - The threads of a step take the subgroups of that step and no more: they may still be about to end when the next
//!   step has begun. Dropping the engine returns when neither they nor the backend work any
//!   more, so that the memory lent to the backend may go.
//! - A child made by fork gets errors, never a wait for a thread that it does not have, and drops nothing.
#![forbid(unsafe_code)]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use super::machine::Machine;
use super::recalibrate::Meter;
use super::{Backend, Model, Timing};
use crate::error::{Error, Result};
use crate::kernel::AdamRule;
use crate::plan::interleave::pieces;
use crate::plan::interleave::schedule::{self, Event, Lane};
use crate::plan::interleave::sites::{Plan, Site};
use crate::plan::interleave::{Rates, Shape};
use crate::sys::threads;

/// The interleaved update of one rank. Any thread may call.
pub struct Engine<B: Backend + 'static> {
    process: u32,
    inner: Arc<Inner<B>>,
    worker: Arc<Worker>,
    watched: Mutex<Watched>,
}

/// Who waits for new parameters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reader {
    /// The thread that calls.
    Caller,
    /// The framework's stream.
    Stream(Model),
}

/// Timings kept for a meter that nobody asks.
const MOST_UNSEEN: usize = 1 << 20;

/// What is known of how steps go.
#[derive(Default)]
struct Watched {
    meter: Option<Meter>,
    /// What the meter has not seen.
    unseen: Vec<Timing>,
    /// What ran since the last step began.
    ran: Vec<Timing>,
}

struct Inner<B> {
    backend: B,
    machine: Mutex<Machine>,
    /// A subgroup was stepped, or something failed.
    changed: Condvar,
}

/// How many threads run; apart from `Inner`, so that a thread lets go of that first.
#[derive(Default)]
struct Worker {
    running: Mutex<usize>,
    ended: Condvar,
}

impl<B: Backend + 'static> Engine<B> {
    /// All subgroups on the CPU, to begin with.
    pub fn new(shape: Shape, backend: B) -> Result<Engine<B>> {
        let machine = Mutex::new(Machine::new(shape)?);
        let inner = Arc::new(Inner { backend, machine, changed: Condvar::new() });
        Ok(Engine { process: std::process::id(), inner, worker: Arc::default(), watched: Mutex::default() })
    }

    /// What is fixed.
    pub fn shape(&self) -> Result<Shape> {
        Ok(self.machine()?.shape().clone())
    }

    /// The plan of the next step, or of the one under way.
    pub fn plan(&self) -> Result<Plan> {
        Ok(self.machine()?.plan().clone())
    }

    /// Takes another plan: after a step and before the first gradient of the next.
    pub fn set_plan(&self, plan: Plan) -> Result<()> {
        let mut machine = self.machine()?;
        if plan.count() == machine.shape().count() {
            self.inner.backend.accepts(&plan)?;
        }
        machine.set_plan(plan, &mut |command| self.inner.backend.play(command, None))
    }

    /// The gradient of a subgroup is made on the framework's stream; its way to where it is needed begins.
    pub fn gradient(&self, subgroup: usize, stream: Model) -> Result<()> {
        self.machine()?.gradient(subgroup, &mut |command| self.inner.backend.play(command, stream))
    }

    /// What the framework's stream was given so far is all that reads the 16-bit parameters of a subgroup; at the latest
    /// [`Engine::begin`] says so for all.
    pub fn params_free(&self, subgroup: usize, stream: Model) -> Result<()> {
        self.machine()?.params_free(subgroup, &mut |command| self.inner.backend.play(command, stream))
    }

    /// Starts the step of all subgroups, whose gradients have come, and returns. `stream` is the framework's. One rule stands for all subgroups, or each
    /// has its own.
    pub fn begin(&self, rules: Vec<AdamRule>, stream: Model) -> Result<()> {
        let mut machine = self.machine()?;
        let count = machine.shape().count();
        if rules.len() != 1 && rules.len() != count {
            return Err(Error::invalid("rules", format!("are {}, there are {count} subgroups", rules.len())));
        }
        self.inner.backend.begin(rules.into())?;
        self.collect().ran.clear();
        machine.begin(&mut |command| self.inner.backend.play(command, stream))?;
        let on_cpu = machine.plan().count_on(Site::Cpu);
        drop(machine);
        if on_cpu > 0 {
            self.start_worker("spillway-step", move |inner| inner.cpu_part(on_cpu))?;
        }
        self.inner.gpu_part(true, usize::MAX)?;
        match self.inner.lock().pieces_left() {
            0 => Ok(()),
            left => self.start_worker("spillway-feed", move |inner| drop(inner.gpu_part(false, left))),
        }
    }

    /// Makes `reader` wait for the new 16-bit parameters of a subgroup. Blocks at least until the CPU is past it, or the GPU's
    /// work for it is enqueued.
    pub fn publish(&self, subgroup: usize, reader: Reader) -> Result<()> {
        let mut machine = self.machine()?;
        machine.check(subgroup)?;
        while machine.is_stepping(subgroup) {
            machine = self.inner.changed.wait(machine).unwrap_or_else(PoisonError::into_inner);
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
        let machine = self.machine()?;
        machine.check(subgroup)?;
        Ok(!machine.is_stepping(subgroup) && self.inner.backend.reached(Event::Ready(subgroup))?)
    }

    /// [`Engine::publish`] of every subgroup. Flushes may go on.
    pub fn finish(&self, reader: Reader) -> Result<()> {
        let count = self.machine()?.shape().count();
        (0..count).try_for_each(|subgroup| self.publish(subgroup, reader))
    }

    /// Takes rates to begin with; from then on [`Engine::replan`] corrects them by what every step took.
    pub fn calibrate(&self, rates: Rates) -> Result<()> {
        drop(self.machine()?);
        self.watched().meter = Some(Meter::new(rates)?);
        Ok(())
    }

    /// The rates as they are known now; `None` before [`Engine::calibrate`].
    pub fn rates(&self) -> Result<Option<Rates>> {
        drop(self.machine()?);
        Ok(self.watched().meter.as_ref().map(|meter| *meter.rates()))
    }

    /// Learns from what ran since the last call, and takes another plan if that is worth it; true if it did. `backward` are
    /// the seconds of the backward pass that steps hide behind.
    pub fn replan(&self, backward: f64) -> Result<bool> {
        let (shape, present) = (self.shape()?, self.plan()?);
        let plan = {
            let mut watched = self.collect();
            let unseen = std::mem::take(&mut watched.unseen);
            let meter = watched.meter.as_mut();
            let meter =
                meter.ok_or_else(|| Error::invalid("interleave", "was given no rates to begin with"))?;
            meter.observe(&shape, &unseen);
            meter.replan(&shape, &present, backward)?
        };
        let changes = plan != present;
        if changes {
            self.set_plan(plan)?;
        }
        Ok(changes)
    }

    /// Blocks until the states of all subgroups that are not resident are in host memory: before a checkpoint reads
    /// them, or after [`Engine::set_plan`] took residents away.
    pub fn drain(&self) -> Result<()> {
        self.finish(Reader::Caller)?;
        let plan = self.plan()?;
        let at_home = (0..plan.count()).filter(|subgroup| plan.site(*subgroup) != Site::Resident);
        at_home.into_iter().try_for_each(|subgroup| {
            schedule::drain(subgroup, &mut |command| self.inner.backend.play(command, None))
        })
    }

    /// Subgroups whose state in host memory is not that of the last step: residents, flushes under way, and after a
    /// failure all that cannot be told.
    pub fn away(&self) -> Vec<usize> {
        let Ok(machine) = self.machine() else { return Vec::new() };
        let home = |subgroup: &usize| {
            machine.plan().site(*subgroup) != Site::Resident
                && !machine.is_stepping(*subgroup)
                && self.inner.backend.reached(Event::Home(*subgroup)).unwrap_or(false)
        };
        (0..machine.shape().count()).filter(|subgroup| !home(subgroup)).collect()
    }

    /// What ran since the last step began.
    pub fn ran(&self) -> Result<Vec<Timing>> {
        drop(self.machine()?);
        Ok(self.collect().ran.clone())
    }

    /// Takes the timings from the backend, for the meter if there is one, and for a trace.
    fn collect(&self) -> MutexGuard<'_, Watched> {
        let mut watched = self.watched();
        let new = self.inner.backend.timings();
        if watched.meter.is_some() && watched.unseen.len() < MOST_UNSEEN {
            watched.unseen.extend_from_slice(&new);
        }
        watched.ran.extend(new);
        watched
    }

    fn watched(&self) -> MutexGuard<'_, Watched> {
        self.watched.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn machine(&self) -> Result<MutexGuard<'_, Machine>> {
        match self.process == std::process::id() {
            true => Ok(self.inner.lock()),
            false => Err(Error::Unsupported(format!(
                "this interleaved update belongs to process {}, which forked this one; a child opens its own",
                self.process
            ))),
        }
    }

    /// Starts a thread of the step under way; where that fails, so does the step.
    fn start_worker(&self, name: &'static str, work: impl FnOnce(&Inner<B>) + Send + 'static) -> Result<()> {
        let (inner, worker) = (Arc::clone(&self.inner), Arc::clone(&self.worker));
        *worker.lock() += 1;
        let spawned = threads::spawn_quiet(name, move || {
            work(&inner);
            drop(inner);
            *worker.lock() -= 1;
            worker.ended.notify_all();
        });
        spawned.or_else(|error| {
            *self.worker.lock() -= 1;
            let error = Error::system("starting a thread of the interleaved update", &error);
            self.inner.done(0, Err(error))
        })
    }
}

impl<B: Backend> Inner<B> {
    fn lock(&self) -> MutexGuard<'_, Machine> {
        self.machine.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn cpu_part(&self, subgroups: usize) {
        for _ in 0..subgroups {
            let Some((nth, subgroup)) = self.lock().next_cpu() else { return };
            let emit = &mut |command| self.backend.play(command, None);
            let outcome = catch_unwind(AssertUnwindSafe(|| schedule::cpu_part(nth, subgroup, emit)));
            // The machine keeps a failure, and tells everyone who asks.
            let _ = self.done(subgroup, outcome.unwrap_or_else(|_| panicked(subgroup)));
        }
    }

    /// Enqueues at most so many pieces of the GPU's part, or all that need not wait for room.
    fn gpu_part(&self, at_once: bool, most: usize) -> Result<()> {
        let shape = self.lock().shape().clone();
        for _ in 0..most {
            let Some((piece, event)) = self.lock().next_gpu(at_once) else { return Ok(()) };
            let emit = &mut |command| self.backend.play(command, None);
            let outcome = catch_unwind(AssertUnwindSafe(|| {
                pieces::room(event, emit).and_then(|()| pieces::enqueue(&shape, piece, emit))
            }));
            self.done(piece.subgroup(), outcome.unwrap_or_else(|_| panicked(piece.subgroup())))?;
        }
        Ok(())
    }

    fn done(&self, subgroup: usize, outcome: Result<()>) -> Result<()> {
        let kept = self.lock().stepped(subgroup, outcome);
        self.changed.notify_all();
        kept
    }
}

fn panicked(subgroup: usize) -> Result<()> {
    Err(Error::Unsupported(format!("the update of subgroup {subgroup} panicked")))
}

impl Worker {
    fn lock(&self) -> MutexGuard<'_, usize> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<B: Backend + 'static> Drop for Engine<B> {
    fn drop(&mut self) {
        if self.process != std::process::id() {
            std::mem::forget(Arc::clone(&self.inner));
            return;
        }
        let mut running = self.worker.lock();
        while *running > 0 {
            running = self.worker.ended.wait(running).unwrap_or_else(PoisonError::into_inner);
        }
    }
}
