//! The thread that runs the tasks of a round.
//!
//! Invariants:
//! - One bucket runs at a time, spread over the thread pool. Tasks that follow a verdict come first; then buckets run
//!   in the order of submission among those whose event is signalled. Commits that write nothing run in the call that
//!   gives the verdict.
//! - The lock is not held while a task runs, nor while the executor sleeps on events.
//! - A task that panics fails its own bucket only.
#![forbid(unsafe_code)]

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::bucket::{Bucket, Recording};
use super::round::{Round, Task};
use crate::error::{Error, Result, RoundKind, Rounds};
use crate::optim::StepStats;
use crate::sys::event::{Event, EventFd, Status, poll};
use crate::sys::sync::{Lock, Signal};
use crate::sys::try_vec;

/// State shared by the callers and the executor.
pub struct RoundBoard {
    pub inner: Lock<Inner>,
    /// Signalled when a bucket changes its state or the executor ends.
    pub changed: Signal,
    /// Wakes the executor: it may have work.
    pub waker: Arc<EventFd>,
}

/// The state under the lock.
pub struct Inner {
    pub round: Round,
    pub slots: Vec<BucketSlot>,
    /// The executor polls events of callers.
    pub watching: bool,
    pub closing: bool,
    pub executor_gone: bool,
    /// Total time that callers were blocked.
    pub exposed: Duration,
    /// When the first bucket of the open or the last round began.
    pub begun: Option<Instant>,
}

/// The data of one bucket index.
#[derive(Default)]
pub struct BucketSlot {
    pub work: Option<Box<dyn Bucket>>,
    pub event: Option<Arc<Event>>,
    recording: Recording,
}

/// A task with the data it needs, taken out of its slot.
pub struct Job {
    index: usize,
    task: Task,
    work: Box<dyn Bucket>,
    recording: Recording,
}

impl RoundBoard {
    /// RoundBoard state for rounds of `buckets` buckets; `of` is the subject of their errors.
    pub fn new(buckets: u32, of: Rounds) -> Result<RoundBoard> {
        let waker = EventFd::new().map_err(|error| Error::system("creating an eventfd", &error))?;
        let inner = Inner {
            round: Round::new(buckets as usize, of)?,
            slots: try_vec::from_fn("listing the buckets", buckets as usize, |_| BucketSlot::default())?,
            watching: false,
            closing: false,
            executor_gone: false,
            exposed: Duration::ZERO,
            begun: None,
        };
        Ok(RoundBoard { inner: Lock::new(inner), changed: Signal::default(), waker: Arc::new(waker) })
    }
}

impl Inner {
    /// Starts a bucket that is waiting or due. `None` if its slot holds no work.
    pub fn take(&mut self, index: usize) -> Option<Job> {
        let slot = &mut self.slots[index];
        let work = slot.work.take()?;
        let recording = std::mem::take(&mut slot.recording);
        self.begun.get_or_insert_with(Instant::now);
        let first = if work.speculates() { Task::Speculate } else { Task::Measure };
        let task = self.round.start(index, first);
        Some(Job { index, task, work, recording })
    }

    /// Starts the buckets whose recorded step becomes final.
    pub fn take_commits(&mut self) -> Vec<Job> {
        let due_buckets: Vec<usize> = self.round.due().collect();
        let commits =
            due_buckets.into_iter().filter(|index| self.round.due_task(*index) == Some(Task::Commit));
        let commits: Vec<usize> = commits.collect();
        commits.into_iter().filter_map(|index| self.take(index)).collect()
    }

    /// Returns the data of a finished job to its slot, and records the result.
    pub fn put_back(&mut self, done: Option<(Job, Result<StepStats>)>) {
        let Some((job, outcome)) = done else { return };
        let slot = &mut self.slots[job.index];
        slot.recording = job.recording;
        slot.work = Some(job.work);
        match outcome {
            Ok(stats) => self.round.done(job.index, stats),
            Err(error) => self.round.fail(job.index, error),
        }
        self.release(job.index);
    }

    /// Releases the work and events of buckets that are final or failed.
    pub fn sweep(&mut self) {
        (0..self.slots.len()).for_each(|index| self.release(index));
    }

    fn release(&mut self, index: usize) {
        if self.round.is_finished(index) {
            self.slots[index].work = None;
            self.slots[index].event = None;
        }
    }

    /// Starts the next runnable task: tasks after a verdict first, then buckets whose event is signalled.
    fn next(&mut self) -> Option<Job> {
        let due = self.round.due().next();
        let ready = || self.round.waiting().find(|index| self.slots[*index].event.is_none());
        let index = due.or_else(ready)?;
        self.take(index)
    }

    /// Waiting buckets with their events.
    fn watched(&self) -> Vec<(usize, Arc<Event>)> {
        let event = |index: usize| self.slots[index].event.clone().map(|event| (index, event));
        self.round.waiting().filter_map(event).collect()
    }

    /// Records the polled status of those events; if the poll itself failed, their buckets fail.
    fn record_statuses(&mut self, watched: &[(usize, Arc<Event>)], seen: io::Result<Vec<Status>>) {
        self.watching = false;
        for (order, (index, event)) in watched.iter().enumerate() {
            let slot = &mut self.slots[*index];
            if !slot.event.as_ref().is_some_and(|mine| Arc::ptr_eq(mine, event)) {
                continue;
            }
            let error = match &seen {
                Ok(statuses) => match statuses[order] {
                    Status::Pending => continue,
                    Status::Ready => {
                        slot.event = None;
                        continue;
                    }
                    Status::Broken(reason) => {
                        self.round.error(RoundKind::Event { bucket: *index as u32, reason })
                    }
                },
                Err(error) => Error::system("polling events", error),
            };
            self.round.fail(*index, error);
            self.release(*index);
        }
    }
}

/// Runs one task; a panic becomes an error.
pub fn run(job: Option<Job>) -> Option<(Job, Result<StepStats>)> {
    let mut job = job?;
    let attempt = AssertUnwindSafe(|| job.work.run(job.task, &mut job.recording));
    let outcome = catch_unwind(attempt).unwrap_or_else(|panic| Err(Error::of_panic(&*panic)));
    Some((job, outcome))
}

/// Body of the executor thread: runs tasks until the engine closes and the round is idle.
pub fn execute(shared: &RoundBoard) {
    struct Gone<'a>(&'a RoundBoard);
    impl Drop for Gone<'_> {
        fn drop(&mut self) {
            self.0.inner.lock().executor_gone = true;
            self.0.changed.notify_all();
        }
    }
    let _gone = Gone(shared);
    loop {
        let mut inner = shared.inner.lock();
        if let Some(job) = inner.next() {
            drop(inner);
            let done = run(Some(job));
            shared.inner.lock().put_back(done);
            shared.changed.notify_all();
            continue;
        }
        if inner.closing && inner.round.is_idle() {
            return;
        }
        let watched = inner.watched();
        inner.watching = !watched.is_empty();
        drop(inner);
        let events: Vec<&Event> = watched.iter().map(|(_, event)| &**event).collect();
        let seen = poll(&shared.waker, &events, true);
        shared.waker.clear();
        shared.inner.lock().record_statuses(&watched, seen);
        shared.changed.notify_all();
    }
}
