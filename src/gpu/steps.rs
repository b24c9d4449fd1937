//! Adam over many tensors in device memory, in order on the framework's stream.

use std::sync::Arc;

use super::device::Device;
use super::kernels::Kernels;
use super::list::{Job, List, StepPass};
use super::memory::Registry;
use super::stream::{ForeignStream, GpuEvent, Stream};
use super::sums::Sums;
use super::tables::{Table, Tables};
use crate::error::{Error, Result};
use crate::kernel::AdamRule;
use crate::optim::{Family, StepStats};
use crate::sys::sync::Lock;

/// Adam steps on one device.
#[derive(Debug)]
pub struct Steps {
    device: Arc<Device>,
    kernels: Arc<Kernels>,
    registry: Registry,
    stream: Stream,
    memory: Arc<Memory>,
}

/// What kernels use until they are over.
#[derive(Debug)]
struct Memory {
    _kernels: Arc<Kernels>,
    tables: Tables,
    /// Buffers that no call uses.
    spare: Lock<Vec<Sums>>,
}

/// One call: its tensors, and the memory that it alone uses.
#[derive(Debug)]
struct Call {
    list: List,
    part: StepPass,
    table: Option<Table>,
    sums: Option<Sums>,
}

impl Steps {
    /// Prepares steps with `kernels`.
    pub fn new(device: &Arc<Device>, kernels: &Arc<Kernels>) -> Result<Steps> {
        Ok(Steps {
            device: Arc::clone(device),
            kernels: Arc::clone(kernels),
            registry: Registry::new(device),
            stream: Stream::new(device)?,
            memory: Arc::new(Memory {
                _kernels: Arc::clone(kernels),
                tables: Tables::new(device)?,
                spare: Lock::default(),
            }),
        })
    }

    /// Steps every tensor, in order on `stream`. With `squares` the call blocks, and returns the same statistics as
    /// `optim::step`; without, it returns default statistics at once. If a tensor is refused, no tensor steps.
    pub fn adam(&self, jobs: &[Job], stream: ForeignStream, squares: bool) -> Result<StepStats> {
        self.run(jobs, stream, if squares { StepPass::Both } else { StepPass::Step }).map(|(_, seen)| seen)
    }

    /// As [`Steps::adam`] without `squares`; returns an event recorded behind the step.
    pub fn start(&self, jobs: &[Job], stream: ForeignStream) -> Result<Arc<GpuEvent>> {
        self.run(jobs, stream, StepPass::Step).map(|(after, _)| after)
    }

    /// Returns the statistics of [`Steps::adam`] without stepping; blocks. The gradients are complete: the call waits for
    /// no other work of the framework.
    pub fn measure(&self, jobs: &[Job]) -> Result<StepStats> {
        let after = Arc::new(GpuEvent::new(&self.device)?);
        let call = self.prepare(jobs, StepPass::Squares)?;
        let queued = self.launch(&call).and_then(|()| self.stream.record(&after));
        if queued.is_err() {
            // Squares that are queued must not read the gradients after this call.
            let _ = self.stream.synchronize();
        }
        self.end(call, queued.map(|()| &after))
    }

    /// Blocks until all steps are done. Errors: `Timeout` after the device's patience.
    pub fn finish(&self) -> Result<()> {
        self.stream.finish()
    }

    fn run(&self, jobs: &[Job], stream: ForeignStream, part: StepPass) -> Result<(Arc<GpuEvent>, StepStats)> {
        let (before, after) = (GpuEvent::new(&self.device)?, Arc::new(GpuEvent::new(&self.device)?));
        let call = self.prepare(jobs, part)?;
        let stepped = self.step_between(&call, stream, &before, &after);
        if stepped.is_ok() {
            AdamRule::COUNTER.add(jobs.iter().map(|job| job.tensor.grad.len() as usize).sum());
        }
        let seen = self.end(call, stepped.map(|()| &after))?;
        Ok((after, seen))
    }

    /// Enqueues a call behind the work of the framework, and the framework's later work behind the call.
    fn step_between(
        &self,
        call: &Call,
        stream: ForeignStream,
        before: &GpuEvent,
        after: &GpuEvent,
    ) -> Result<()> {
        stream.record(before)?;
        self.stream.wait(before)?;
        let queued = self.launch(call);
        let ordered = self.stream.record(after).and_then(|()| stream.wait(after));
        if ordered.is_err() {
            // Nothing orders the framework's stream behind what is queued. The framework may reuse the arrays once
            // this call has returned.
            let _ = self.stream.synchronize();
        }
        queued.and(ordered)
    }

    /// Lists the tensors, takes the memory of the call and uploads its table. Errors: a tensor is refused.
    fn prepare(&self, jobs: &[Job], part: StepPass) -> Result<Call> {
        // Checks for a forked child before locking: another thread of the parent may have held the lock during the
        // fork.
        drop(self.device.enter()?);
        let list = List::new(&self.kernels, jobs)?;
        let sums = if part == StepPass::Step { None } else { Some(self.sums(&list)?) };
        let mut call = Call { list, part, table: None, sums };
        match self.upload(&mut call) {
            Ok(()) => Ok(call),
            Err(error) => {
                self.give_back(call);
                Err(error)
            }
        }
    }

    /// The table does not wait for the framework, whose work it does not touch.
    fn upload(&self, call: &mut Call) -> Result<()> {
        let Some(words) = call.list.table()? else { return Ok(()) };
        let table = call.table.insert(self.memory.tables.take(&call.list, words.len())?);
        self.memory.tables.upload(table, words, &self.stream)
    }

    /// Enqueues the kernels of a call. After an error some of them are queued.
    fn launch(&self, call: &Call) -> Result<()> {
        let table = call.table.as_ref().map(Table::address);
        call.list.launch(&self.kernels, &self.stream, call.part, table, call.sums.as_ref())
    }

    /// Gives the memory of a call back. With sums, first blocks until they are there, and returns their statistics.
    fn end(&self, mut call: Call, queued: Result<&Arc<GpuEvent>>) -> Result<StepStats> {
        // Another call may have the table while this one waits.
        if let Some(table) = call.table.take() {
            self.memory.tables.give(table);
        }
        let seen = queued.and_then(|after| match &call.sums {
            Some(sums) => {
                after.wait()?;
                Ok(StepStats::of(call.list.sum(&sums.read(call.list.count()))))
            }
            None => Ok(StepStats::default()),
        });
        self.give_back(call);
        seen
    }

    /// What is queued ends before the next use of the memory, in the same stream.
    fn give_back(&self, call: Call) {
        if let Some(table) = call.table {
            self.memory.tables.give(table);
        }
        self.memory.spare.lock().extend(call.sums);
    }

    /// Buffers that this call alone uses, reallocated if they are too small.
    fn sums(&self, list: &List) -> Result<Sums> {
        let known = self.memory.spare.lock().pop();
        match known.filter(|known| known.fit(list.count())) {
            Some(known) => Ok(known),
            None => Sums::new(&self.device, &self.registry, list.count()),
        }
    }
}

impl Drop for Steps {
    fn drop(&mut self) {
        // The module of the kernels may be unloaded next, and the arrays freed. With a lost context nothing is queued.
        if matches!(self.finish(), Err(Error::Timeout(_))) {
            // The kernels may still run, and use the memory.
            std::mem::forget(Arc::clone(&self.memory));
        }
    }
}
