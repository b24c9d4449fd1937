//! Buckets and the GPU: those whose states live there, and 16-bit copies that go there from the host.
//!
//! A bucket on the GPU is measured when its gradient is there and stepped once, after the verdict: the GPU steps so fast that
//! going ahead gains nothing, and it has nothing to take back. The copies of the others are uploaded by the thread that
//! stepped them, as soon as they count.
//!
//! Invariants:
//! - A copy in host memory is written again only after its last upload is over.
//! - A stream of the framework that was ordered by [`Ready`] reads the parameters of the last task, and no older ones.
#![forbid(unsafe_code)]

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::bucket::{Bucket, Publish, Recording};
use super::round::Task;
use crate::error::{Error, Result};
use crate::gpu::steps::{Job, Steps};
use crate::gpu::stream::{Event, ForeignStream};
use crate::gpu::transfer::{Copy, Transfers};
use crate::kernel::Arithmetic;
use crate::optim::StepStats;

/// What has to be over on the device before a bucket's new parameters are there.
#[derive(Debug, Default)]
pub struct Ready(Mutex<Vec<Mark>>);

#[derive(Debug)]
enum Mark {
    Upload(Arc<Transfers>, u64),
    Step(Event),
}

impl Ready {
    /// Makes what is queued on `stream` from now on wait for the parameters.
    pub fn order(&self, stream: ForeignStream) -> Result<()> {
        self.marks().iter().try_for_each(|mark| match mark {
            Mark::Upload(transfers, ticket) => transfers.stream_wait(*ticket, stream),
            Mark::Step(event) => stream.wait(event),
        })
    }

    /// Waits on this thread until they are there.
    fn settle(&self) -> Result<()> {
        let marks = std::mem::take(&mut *self.marks());
        marks.iter().try_for_each(Mark::settle)
    }

    fn marks(&self) -> MutexGuard<'_, Vec<Mark>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Mark {
    fn settle(&self) -> Result<()> {
        match self {
            Mark::Upload(transfers, ticket) => transfers.wait(*ticket, None),
            Mark::Step(event) => event.synchronize(),
        }
    }
}

/// Waits: the host memory of uploads may then be freed.
impl Drop for Ready {
    fn drop(&mut self) {
        // Not by the lock, which another thread may have held when a child was forked. A context that is lost, or another
        // process's, copies nothing any more.
        let marks = self.0.get_mut().unwrap_or_else(PoisonError::into_inner);
        let _ = marks.iter().try_for_each(Mark::settle);
    }
}

/// Where the 16-bit copies of a bucket go.
#[derive(Debug, Clone)]
pub struct Publication {
    transfers: Arc<Transfers>,
    copies: Arc<[Copy]>,
    ready: Arc<Ready>,
}

impl Publication {
    /// To device memory, by these copies.
    pub fn new(transfers: &Arc<Transfers>, copies: Vec<Copy>) -> Publication {
        Publication { transfers: Arc::clone(transfers), copies: copies.into(), ready: Arc::default() }
    }

    /// When they are there.
    pub fn ready(&self) -> &Arc<Ready> {
        &self.ready
    }

    /// False for a bucket whose parameters are on the device already.
    pub fn uploads(&self) -> bool {
        !self.copies.is_empty()
    }

    fn upload(&self) -> Result<()> {
        let mut marks = self.ready.marks();
        for copy in self.copies.iter() {
            marks.push(Mark::Upload(Arc::clone(&self.transfers), self.transfers.start(copy)?));
        }
        Ok(())
    }
}

/// A bucket on the host whose copies are uploaded.
pub struct Published {
    work: Box<dyn Bucket>,
    publish: Publish,
    to: Publication,
}

impl Published {
    /// `work`, published `to` the device when its copies count.
    pub fn new(work: Box<dyn Bucket>, publish: Publish, to: Publication) -> Published {
        Published { work, publish, to }
    }

    /// True if the copies count once `task` is done, and are others than before.
    fn publishes(&self, task: Task) -> bool {
        match task {
            Task::Look | Task::Pass => false,
            Task::Speculate | Task::Rollback => self.publish == Publish::Speculative,
            Task::Commit => self.publish != Publish::Speculative,
            Task::Redo(_) | Task::Step(_) => true,
        }
    }
}

impl Bucket for Published {
    fn run(&mut self, task: Task, recording: &mut Recording) -> Result<StepStats> {
        if !matches!(task, Task::Look | Task::Pass)
            && (task != Task::Commit || self.publish == Publish::Final)
        {
            self.to.ready.settle()?;
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
    /// These tensors, worked on in the order of the framework's `stream`.
    pub fn new(steps: &Arc<Steps>, jobs: Vec<Job>, stream: ForeignStream, ready: &Arc<Ready>) -> Resident {
        Resident { steps: Arc::clone(steps), jobs, stream, ready: Arc::clone(ready) }
    }
}

impl Bucket for Resident {
    fn run(&mut self, task: Task, _: &mut Recording) -> Result<StepStats> {
        match task {
            Task::Look => self.steps.measure(&self.jobs, self.stream),
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
                Err(Error::Internal("a bucket on the GPU has no step to take back".to_string()))
            }
        }
    }

    fn speculates(&self) -> bool {
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::Dtype;
    use crate::gpu::kernels::{DeviceFloats, Kernels};
    use crate::gpu::memory::{DeviceMemory, HostSpan, Registry};
    use crate::gpu::stream::Stream;
    use crate::gpu::tests::{device, foreign};
    use crate::gpu::transfer::{After, Direction};
    use crate::pool::pinned;
    use crate::sys::span::Span;

    const ORDINAL: u32 = 45;

    /// Writes its copy, and tells the driver's checker.
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

    fn locked(registry: &Registry) -> (usize, HostSpan) {
        let block = pinned::alloc(64).unwrap();
        (block.address(), registry.host(block.part(0, 64), "block").unwrap())
    }

    /// Steps, redoes and rollbacks in a row: none writes a copy that is being uploaded, and a stream that was ordered reads the
    /// last one.
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
            direction: Direction::In,
            device: floats,
            host: source.clone(),
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
}
