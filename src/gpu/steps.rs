//! Adam over many tensors in device memory, in order on the framework's stream.

use std::sync::Arc;

use super::device::Device;
use super::kernels::{DeviceTensor, Kernels, Sums};
use super::memory::{HostSpan, Registry};
use super::stream::{ForeignStream, GpuEvent, Stream};
use crate::error::Result;
use crate::kernel::AdamRule;
use crate::optim::StepStats;
use crate::optim::parallel;
use crate::pool::buffer::Buffer;
use crate::stats;
use crate::sys::sync::Lock;

/// One tensor and the coefficients of its step.
#[derive(Debug, Clone, Copy)]
pub struct Job {
    /// Coefficients.
    pub rule: AdamRule,
    /// The tensor's arrays.
    pub tensor: DeviceTensor,
}

/// Adam steps on one device.
#[derive(Debug)]
pub struct Steps {
    device: Arc<Device>,
    kernels: Arc<Kernels>,
    registry: Registry,
    stream: Stream,
    /// Buffers that no call uses.
    spare: Lock<Vec<Scratch>>,
}

/// The parts of a step that a call runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    Step,
    Squares,
    Both,
}

/// Buffers for the sums of one call: partial sums of the current tensor on the device, one sum per tensor on the host.
#[derive(Debug)]
struct Scratch {
    sums: Sums,
    host: HostSpan,
    _memory: Buffer,
}

const WORD: usize = size_of::<f64>();

impl Steps {
    /// Prepares steps with `kernels`.
    pub fn new(device: &Arc<Device>, kernels: &Arc<Kernels>) -> Result<Steps> {
        Ok(Steps {
            device: Arc::clone(device),
            kernels: Arc::clone(kernels),
            registry: Registry::new(device),
            stream: Stream::new(device)?,
            spare: Lock::default(),
        })
    }

    /// Steps every tensor, in order on `stream`. With `squares` the call blocks, and returns the same statistics as
    /// `optim::step`; without, it returns default statistics at once. If a tensor is refused, no tensor steps.
    pub fn adam(&self, jobs: &[Job], stream: ForeignStream, squares: bool) -> Result<StepStats> {
        self.run(jobs, stream, if squares { Part::Both } else { Part::Step }).map(|(_, seen)| seen)
    }

    /// As [`Steps::adam`] without `squares`; returns an event recorded behind the step.
    pub fn start(&self, jobs: &[Job], stream: ForeignStream) -> Result<GpuEvent> {
        self.run(jobs, stream, Part::Step).map(|(after, _)| after)
    }

    /// Returns the statistics of [`Steps::adam`] without stepping; blocks. The gradients are complete: the call waits for
    /// no other work of the framework.
    pub fn measure(&self, jobs: &[Job]) -> Result<StepStats> {
        self.check(jobs)?;
        let scratch = self.scratch(jobs)?;
        let after = GpuEvent::new(&self.device)?;
        let queued =
            self.queue(jobs, Part::Squares, Some(&scratch)).and_then(|()| self.stream.record(&after));
        if let Err(error) = queued {
            // Squares that are queued must not read the gradients after this call.
            let _ = self.stream.synchronize();
            self.spare.lock().push(scratch);
            return Err(error);
        }
        self.statistics(jobs, scratch, &after)
    }

    /// Blocks until all steps are done.
    pub fn finish(&self) -> Result<()> {
        self.stream.synchronize()
    }

    fn run(&self, jobs: &[Job], stream: ForeignStream, part: Part) -> Result<(GpuEvent, StepStats)> {
        self.check(jobs)?;
        let scratch = if part == Part::Step { None } else { Some(self.scratch(jobs)?) };
        let (before, after) = (GpuEvent::new(&self.device)?, GpuEvent::new(&self.device)?);
        stream.record(&before)?;
        self.stream.wait(&before)?;
        let queued = self.queue(jobs, part, scratch.as_ref());
        let ordered = self.stream.record(&after).and_then(|()| stream.wait(&after));
        if ordered.is_err() {
            // Nothing orders the framework's stream behind what is queued. The framework may reuse the arrays once
            // this call has returned.
            let _ = self.stream.synchronize();
        }
        if let Err(error) = queued.and(ordered) {
            // What is queued ends before the next use of the buffers, in the same stream.
            self.spare.lock().extend(scratch);
            return Err(error);
        }
        stats::ADAM.add(jobs.iter().map(|job| job.tensor.grad.len() as usize).sum());
        let seen = scratch.map(|scratch| self.statistics(jobs, scratch, &after)).transpose()?;
        Ok((after, seen.unwrap_or_default()))
    }

    fn check(&self, jobs: &[Job]) -> Result<()> {
        // Checks for a forked child before locking: another thread of the parent may have held the lock during the
        // fork.
        drop(self.device.enter()?);
        jobs.iter().try_for_each(|job| self.kernels.accepts(&job.rule, &job.tensor))
    }

    /// Blocks until the sums are there, and gives the buffers back.
    fn statistics(&self, jobs: &[Job], scratch: Scratch, after: &GpuEvent) -> Result<StepStats> {
        after.synchronize()?;
        let bytes = scratch.host.part(0, jobs.len() * WORD).span().to_vec();
        self.spare.lock().push(scratch);
        let sums =
            bytes.chunks_exact(WORD).map(|word| f64::from_ne_bytes(word.try_into().unwrap_or_default()));
        Ok(StepStats::of(parallel::sum_of(&sums.collect::<Vec<f64>>())))
    }

    /// Enqueues the kernels of a call. After an error some of them are queued.
    fn queue(&self, jobs: &[Job], part: Part, scratch: Option<&Scratch>) -> Result<()> {
        for (index, job) in jobs.iter().enumerate() {
            let sums = scratch.map(|scratch| &scratch.sums);
            let sum = match (part, sums) {
                (Part::Squares, Some(sums)) => {
                    self.kernels.squares(&self.stream, job.tensor.grad, job.rule.grad_scale, sums)?
                }
                _ => self.kernels.adam(&self.stream, &job.rule, &job.tensor, sums)?,
            };
            if let (Some(scratch), Some(sum)) = (scratch, sum) {
                self.stream.download(sum, &scratch.host.part(index * WORD, WORD))?;
            }
        }
        Ok(())
    }

    /// Buffers that this call alone uses, reallocated if they are too small.
    fn scratch(&self, jobs: &[Job]) -> Result<Scratch> {
        let most = jobs.iter().map(|job| job.tensor.grad.len()).max().unwrap_or(0);
        let bytes = jobs.len().max(1) * WORD;
        let known = self.spare.lock().pop();
        let fits = |known: &Scratch| known.sums.elements() >= most && known.host.span().len() >= bytes;
        match known.filter(fits) {
            Some(known) => Ok(known),
            None => Scratch::new(&self.device, &self.registry, most, bytes),
        }
    }
}

impl Drop for Steps {
    fn drop(&mut self) {
        // The module of the kernels may be unloaded next, and the arrays freed. With a lost context nothing is queued.
        let _ = self.finish();
    }
}

impl Scratch {
    fn new(device: &Arc<Device>, registry: &Registry, elements: u64, bytes: usize) -> Result<Scratch> {
        let sums = Sums::new(device, elements)?;
        let memory = Buffer::open(bytes, device.backing())?;
        let host = registry.host(memory.transfer(0, bytes), "sums")?;
        Ok(Scratch { sums, host, _memory: memory })
    }
}
