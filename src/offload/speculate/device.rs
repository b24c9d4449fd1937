//! Buckets and the GPU: buckets whose states are in GPU memory, and uploads of 16-bit copies from the host.
//!
//! A bucket in GPU memory is measured once its gradient is complete, and steps once, after the verdict. A step on the
//! GPU is so fast that speculation gains nothing; it also avoids rollbacks. For a bucket on the host, the thread that
//! stepped the bucket uploads the copies as soon as they are valid.
//!
//! Invariants:
//! - A copy in host memory is overwritten only after its last upload has finished.
//! - A framework stream ordered by [`Ready`] reads the parameters of the bucket's last task, never older ones.
//! - No lock is held during a wait, nor during a call of the driver.
#![forbid(unsafe_code)]

use std::sync::Arc;

use super::bucket::{Bucket, Publish, Recording};
use super::round::Task;
use crate::error::{Error, Result};
use crate::gpu::list::Job;
use crate::gpu::steps::Steps;
use crate::gpu::stream::{ForeignStream, GpuEvent};
use crate::gpu::transfer::{Copy, Transfers};
use crate::kernel::Arithmetic;
use crate::optim::StepStats;
use crate::sys::sync::{Guard, Lock};

/// The device operations that must finish before a bucket's new parameters can be read.
#[derive(Debug, Default)]
pub struct Ready(Lock<Vec<Mark>>);

#[derive(Debug, Clone)]
enum Mark {
    Upload(Arc<Transfers>, u64),
    Step(Arc<GpuEvent>),
}

impl Ready {
    /// Makes later work on `stream` wait for the parameters.
    pub fn order(&self, stream: ForeignStream) -> Result<()> {
        let marks = self.marks().clone();
        marks.iter().try_for_each(|mark| match mark {
            Mark::Upload(transfers, ticket) => transfers.stream_wait(*ticket, stream),
            Mark::Step(event) => stream.wait(event),
        })
    }

    /// Blocks the calling thread until the parameters are there. Errors: `Timeout` after the device's patience.
    fn wait(&self) -> Result<()> {
        let marks = self.marks().clone();
        marks.iter().try_for_each(Mark::wait)?;
        // A bucket runs one task at a time: no mark was added meanwhile.
        self.marks().clear();
        Ok(())
    }

    fn marks(&self) -> Guard<'_, Vec<Mark>> {
        self.0.lock()
    }
}

impl Mark {
    fn wait(&self) -> Result<()> {
        match self {
            Mark::Upload(transfers, ticket) => transfers.wait_patiently(*ticket),
            Mark::Step(event) => event.wait(),
        }
    }
}

/// Blocks until the uploads have finished, so that their host memory can be freed.
impl Drop for Ready {
    fn drop(&mut self) {
        // `get_mut` takes no lock: after a fork, another thread of the parent may have held it. Errors are ignored: a
        // lost context, or the context of another process, copies nothing any more. If the device hangs, its transfers
        // keep the host memory.
        let marks = self.0.get_mut();
        let _ = marks.iter().try_for_each(Mark::wait);
    }
}

/// Destination of a bucket's 16-bit copies.
#[derive(Debug, Clone)]
pub struct Publication {
    transfers: Arc<Transfers>,
    copies: Arc<[Copy]>,
    ready: Arc<Ready>,
}

impl Publication {
    /// Uploads with `copies` to device memory. Empty for a bucket whose parameters are in device memory.
    pub fn new(transfers: &Arc<Transfers>, copies: Vec<Copy>) -> Publication {
        Publication { transfers: Arc::clone(transfers), copies: copies.into(), ready: Arc::default() }
    }

    /// The operations that a reader of the copies must wait for.
    pub fn ready(&self) -> &Arc<Ready> {
        &self.ready
    }

    /// False for a bucket whose parameters are on the device already.
    pub fn uploads(&self) -> bool {
        !self.copies.is_empty()
    }

    fn upload(&self) -> Result<()> {
        for copy in self.copies.iter() {
            let ticket = self.transfers.start(copy)?;
            self.ready.marks().push(Mark::Upload(Arc::clone(&self.transfers), ticket));
        }
        Ok(())
    }
}

/// A bucket on the host whose 16-bit copies are uploaded.
pub struct Published {
    work: Box<dyn Bucket>,
    publish: Publish,
    to: Publication,
}

impl Published {
    /// Wraps `work`: its copies are uploaded to `to` whenever they become valid.
    pub fn new(work: Box<dyn Bucket>, publish: Publish, to: Publication) -> Published {
        Published { work, publish, to }
    }

    /// True if the copies are valid after `task` and differ from the copies of the device.
    fn publishes(&self, task: Task) -> bool {
        match task {
            Task::Measure | Task::Pass => false,
            Task::Speculate | Task::Rollback => self.publish == Publish::Speculative,
            Task::Commit => self.publish != Publish::Speculative,
            Task::Redo(_) | Task::Step(_) => true,
        }
    }
}

impl Bucket for Published {
    fn run(&mut self, task: Task, recording: &mut Recording) -> Result<StepStats> {
        if !matches!(task, Task::Measure | Task::Pass)
            && (task != Task::Commit || self.publish == Publish::Final)
        {
            self.to.ready.wait()?;
        }
        let seen = self.work.run(task, recording)?;
        if self.publishes(task) {
            self.to.upload()?;
        }
        Ok(seen)
    }
}

/// A bucket whose tensors are in device memory.
pub struct Resident {
    steps: Arc<Steps>,
    jobs: Vec<Job>,
    stream: ForeignStream,
    ready: Arc<Ready>,
}

impl Resident {
    /// A bucket of these tensors. Its kernels run in order on the framework's `stream`.
    pub fn new(steps: &Arc<Steps>, jobs: Vec<Job>, stream: ForeignStream, ready: &Arc<Ready>) -> Resident {
        Resident { steps: Arc::clone(steps), jobs, stream, ready: Arc::clone(ready) }
    }
}

impl Bucket for Resident {
    fn run(&mut self, task: Task, _: &mut Recording) -> Result<StepStats> {
        match task {
            Task::Measure => self.steps.measure(&self.jobs),
            Task::Step(factor) => {
                for job in &mut self.jobs {
                    job.rule = job.rule.with_grad_scale(factor);
                }
                let done = self.steps.start(&self.jobs, self.stream)?;
                *self.ready.marks() = vec![Mark::Step(done)];
                Ok(StepStats::default())
            }
            Task::Pass => Ok(StepStats::default()),
            Task::Speculate | Task::Commit | Task::Rollback | Task::Redo(_) => {
                Err(Error::Internal("a bucket on the GPU has no step to roll back".to_string()))
            }
        }
    }

    fn speculates(&self) -> bool {
        false
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::dtype::Dtype;
    use crate::error::Rounds;
    use crate::gpu::kernels::{DeviceFloats, Kernels};
    use crate::gpu::memory::{DeviceMemory, HostSpan, Registry};
    use crate::gpu::stream::Stream;
    use crate::gpu::tests::{device, fill, foreign, until, while_blocked};
    use crate::gpu::transfer::{After, Direction};
    use crate::gpu::watch::Watches;
    use crate::offload::speculate::{Clip, Engine, Verdict};
    use crate::pool::pinned;
    use crate::pool::region::Backing;
    use crate::sys::event::Event;
    use crate::sys::span::Span;

    const ORDINAL: u32 = 45;

    /// Writes its copy, and reports each write to the race checker of the fake driver.
    struct Writer(Span, u8);

    impl Bucket for Writer {
        fn run(&mut self, task: Task, _: &mut Recording) -> Result<StepStats> {
            if task != Task::Commit {
                self.1 += 1;
                self.0.write(&[self.1; 64]);
                let (start, bytes) = (self.0.address() as u64, self.0.len() as u64);
                fakecuda::with(ORDINAL, |gpu| gpu.host_access(start, bytes, true));
            }
            Ok(StepStats::default())
        }
    }

    /// A bucket with nothing to do.
    struct Idle;

    impl Bucket for Idle {
        fn run(&mut self, _: Task, _: &mut Recording) -> Result<StepStats> {
            Ok(StepStats::default())
        }
    }

    #[test]
    fn pending_buckets_cost_no_call_of_the_driver() {
        const BUCKETS: u32 = 200;
        let device = device(56);
        let (framework, watches) = (Stream::new(&device).unwrap(), Watches::new(&device));
        let engine = Engine::open(BUCKETS, Publish::Staged, Rounds::Speculation).unwrap();
        engine.begin(Clip::none()).unwrap();
        fakecuda::with(56, |gpu| gpu.stalled = true);
        for bucket in 0..BUCKETS {
            let ready = Event::Reported(watches.stream(foreign(&framework)).unwrap());
            engine.submit(bucket, Box::new(Idle), Some(ready)).unwrap();
        }
        until(|| fakecuda::with(56, |gpu| gpu.waiting == 1));
        let calls = || fakecuda::with(56, |gpu| gpu.calls.len());
        let before = calls();
        let late = engine.local_result(Some(Duration::from_millis(20))).unwrap_err();
        assert!(matches!(late, Error::Timeout(_)), "{late}");
        assert_eq!(calls() - before, 0);
        fakecuda::with(56, |gpu| assert_eq!(gpu.alive()[0], 1, "the framework's stream alone"));
        fakecuda::resume(56);
        engine.local_result(Some(Duration::from_secs(60))).unwrap();
        engine.resolve_as(Verdict::Commit).unwrap();
        engine.finish(Some(Duration::from_secs(60))).unwrap();
    }

    fn locked(registry: &Registry) -> (usize, HostSpan) {
        let block = pinned::alloc(64, Backing::default()).unwrap();
        (block.address(), registry.host(block.part(0, 64), "block").unwrap())
    }

    /// A sequence of steps, redos and rollbacks. No task overwrites a copy whose upload is in flight, and an ordered
    /// stream reads the newest copy.
    #[test]
    fn a_copy_is_written_again_only_after_its_upload() {
        let device = device(ORDINAL);
        let kernels = Arc::new(Kernels::load(&device).unwrap());
        let transfers = Arc::new(Transfers::new(&device, &kernels, 16).unwrap());
        let registry = Registry::new(&device);
        let (framework, memory) = (Stream::new(&device).unwrap(), DeviceMemory::new(&device, 64).unwrap());
        let ((from, source), (to, target)) = (locked(&registry), locked(&registry));
        let floats = DeviceFloats::new(memory.span(), Dtype::Bf16, "param").unwrap();
        let after = After::Stream(foreign(&framework));
        let copy = Copy {
            direction: Direction::H2d,
            device: floats,
            host: source.clone().into(),
            host_dtype: Dtype::Bf16,
            after,
        };
        let publication = Publication::new(&transfers, vec![copy]);
        let writer = Box::new(Writer(source.span(), 0));
        let mut bucket = Published::new(writer, Publish::Speculative, publication.clone());
        let mut written = 0;
        for task in
            [Task::Speculate, Task::Redo(0.5), Task::Speculate, Task::Rollback, Task::Speculate, Task::Commit]
        {
            bucket.run(task, &mut Recording::default()).unwrap();
            written += u8::from(task != Task::Commit);
            publication.ready().order(foreign(&framework)).unwrap();
            framework.download(memory.span(), &target).unwrap();
        }
        framework.synchronize().unwrap();
        assert_eq!(target.span().to_vec(), [written; 64]);
        drop((bucket, publication));
        let races = fakecuda::with(ORDINAL, |gpu| gpu.races().to_vec());
        assert_eq!(races, [""; 0]);
        drop((source, target));
        [from, to].iter().for_each(|block| pinned::free(*block).unwrap());
    }

    #[test]
    fn a_reader_that_the_driver_blocks_keeps_no_task_waiting() {
        let device = device(87);
        let framework = Stream::new(&device).unwrap();
        let event = Arc::new(GpuEvent::new(&device).unwrap());
        framework.record(&event).unwrap();
        let stepped = Mark::Step(event);
        let ready = Ready(Lock::new(vec![stepped.clone()]));
        fill(87, &framework, 0);
        let order = || ready.order(foreign(&framework)).unwrap();
        // The task of a resident that has stepped.
        while_blocked(87, order, || *ready.marks() = vec![stepped]);
        framework.synchronize().unwrap();
    }

    /// The engine's callers have limits of their own; the task of the bucket fails, and overwrites nothing.
    #[test]
    fn a_device_that_hangs_fails_the_task_and_its_copy_is_not_overwritten() {
        let device = device(77);
        let kernels = Arc::new(Kernels::load(&device).unwrap());
        let transfers = Arc::new(Transfers::new(&device, &kernels, 64).unwrap());
        let registry = Registry::new(&device);
        let memory = DeviceMemory::new(&device, 64).unwrap();
        let (from, source) = locked(&registry);
        let device_floats = DeviceFloats::new(memory.span(), Dtype::Bf16, "param").unwrap();
        let copy = Copy {
            direction: Direction::H2d,
            device: device_floats,
            host: source.clone().into(),
            host_dtype: Dtype::Bf16,
            after: After::Now,
        };
        let publication = Publication::new(&transfers, vec![copy]);
        let writer = Box::new(Writer(source.span(), 0));
        let mut bucket = Published::new(writer, Publish::Speculative, publication.clone());
        fakecuda::with(77, |gpu| gpu.stalled = true);
        bucket.run(Task::Speculate, &mut Recording::default()).unwrap();
        device.set_patience(Duration::from_millis(5));
        for _ in 0..2 {
            let late = bucket.run(Task::Redo(0.5), &mut Recording::default()).unwrap_err();
            assert!(matches!(late, Error::Timeout(_)), "{late}");
            assert_eq!(source.span().to_vec(), [1; 64]);
        }
        fakecuda::resume(77);
        device.set_patience(Duration::from_secs(60));
        bucket.run(Task::Redo(0.5), &mut Recording::default()).unwrap();
        assert_eq!(source.span().to_vec(), [2; 64]);
        drop((bucket, publication, source));
        pinned::free(from).unwrap();
    }
}
