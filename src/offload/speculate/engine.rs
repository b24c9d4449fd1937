//! The public calls of the speculation engine.
//!
//! Invariants:
//! - Thread-safe: every call takes one lock. No task of a bucket runs while the lock is held.
//! - Dropping an engine rolls an open round back before the drop returns.
#![forbid(unsafe_code)]

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::bucket::{Bucket, Publish};
use super::clip::{Clip, Verdict};
use super::executor::{self, Inner, RoundBoard};
use super::round::{Counts, Progress};
use crate::error::{Error, Result, RoundKind, Rounds};
use crate::optim::StepStats;
use crate::sys::event::Event;
use crate::sys::sync::{Guard, deadline_after};
use crate::sys::threads;

/// Maximum number of buckets: each bucket costs memory from `open` on, and every verdict visits all of them.
const MAX_BUCKETS: u32 = 1 << 20;

/// Steps buckets before their verdict is known. Thread-safe.
pub struct Engine {
    publish: Publish,
    shared: Arc<RoundBoard>,
}

/// The verdict of a round and its consequences.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Outcome {
    /// The verdict.
    pub verdict: Verdict,
    /// Norm of the gradients of all ranks; NaN if a gradient is not finite, or if the caller gave the verdict.
    pub norm: f64,
    /// Gradient factor of every committed step; 0 if the verdict is [`Verdict::Skip`].
    pub factor: f32,
    /// Number of buckets whose speculative steps are rolled back.
    pub rolled_back: usize,
}

/// Statistics since `open`.
#[derive(Debug, Clone, Copy, Default)]
pub struct Stats {
    /// Counts of rounds and buckets.
    pub counts: Counts,
    /// Total time that callers were blocked in this engine.
    pub exposed: Duration,
    /// Time since the first bucket of the open or the last round began.
    pub begun: Option<Duration>,
}

impl Engine {
    /// Starts an engine for rounds of `buckets` buckets. Errors: `buckets` is not in `1..=MAX_BUCKETS`; no memory or
    /// no thread. `of` is the subject of its errors.
    pub fn open(buckets: u32, publish: Publish, of: Rounds) -> Result<Engine> {
        if !(1..=MAX_BUCKETS).contains(&buckets) {
            return Err(Error::invalid("buckets", format!("{buckets} is not between 1 and {MAX_BUCKETS}")));
        }
        let shared = Arc::new(RoundBoard::new(buckets, of)?);
        let theirs = Arc::clone(&shared);
        threads::spawn_quiet("spillway-spec", move || executor::execute(&theirs))
            .map_err(|error| Error::system("starting the thread that steps in the background", &error))?;
        Ok(Engine { publish, shared })
    }

    /// Opens a round. Errors: a round is open, or buckets of the previous round are not final yet.
    pub fn begin(&self, clip: Clip) -> Result<()> {
        let mut inner = self.lock();
        inner.round.begin(clip, self.publish == Publish::Speculative)?;
        inner.begun = None;
        Ok(())
    }

    /// Returns Ok if `submit` would accept this bucket now, and its error otherwise.
    pub fn may_submit(&self, bucket: u32) -> Result<()> {
        self.lock().round.may_submit(bucket)
    }

    /// Transfers ownership of a bucket to the round. The bucket steps once `event` is signalled, or at once if there is
    /// no event.
    pub fn submit(&self, bucket: u32, work: Box<dyn Bucket>, event: Option<Event>) -> Result<()> {
        let mut inner = self.lock();
        inner.round.submit(bucket)?;
        let slot = &mut inner.slots[bucket as usize];
        slot.work = Some(work);
        slot.event = event.map(Arc::new);
        drop(inner);
        self.shared.waker.set();
        Ok(())
    }

    /// Waits until every bucket is measured, and returns the sum of squares over this rank's buckets.
    pub fn local_result(&self, timeout: Option<Duration>) -> Result<StepStats> {
        self.until(timeout, |inner| inner.round.local())
    }

    /// Sum of squares of each bucket of this rank. Errors: a bucket is not measured.
    pub fn squares(&self) -> Result<Vec<f64>> {
        let inner = self.lock();
        inner.round.squares()?.ok_or_else(|| inner.round.error(RoundKind::Unmeasured))
    }

    /// Resolves the round with the verdict that follows from the reduced statistics of all ranks.
    pub fn resolve(&self, global: StepStats) -> Result<Outcome> {
        let inner = self.lock();
        let verdict = inner.round.clip().verdict(global);
        let norm = if global.nonfinite { f64::NAN } else { global.sum_squares.sqrt() };
        self.close_round(inner, verdict).map(|outcome| Outcome { norm, ..outcome })
    }

    /// Resolves the round with the caller's verdict.
    pub fn resolve_as(&self, verdict: Verdict) -> Result<Outcome> {
        self.close_round(self.lock(), verdict)
    }

    /// Rolls an open round back, whichever buckets were submitted; a no-op without an open round.
    pub fn abort(&self) -> Result<()> {
        self.abort_locked(&mut self.lock());
        Ok(())
    }

    /// State of a bucket. Errors: no such bucket; the error of a failed bucket.
    pub fn progress(&self, bucket: u32) -> Result<Progress> {
        self.lock().round.progress(bucket)
    }

    /// Waits until the 16-bit copies of a bucket are valid: until the bucket is final, or stepped under
    /// [`Publish::Speculative`].
    pub fn wait(&self, bucket: u32, timeout: Option<Duration>) -> Result<()> {
        let outcome = self.until(timeout, |inner| match inner.round.progress(bucket)? {
            Progress::Missing if inner.round.is_idle() => Err(inner.round.error(RoundKind::Missing(bucket))),
            Progress::Final => Ok(Some(())),
            Progress::Speculative if self.publish == Publish::Speculative => Ok(Some(())),
            _ => Ok(None),
        });
        match outcome {
            Err(Error::Timeout(text)) if matches!(self.progress(bucket), Ok(Progress::Missing)) => {
                Err(Error::Timeout(format!("{text}; bucket {bucket} is not submitted yet")))
            }
            other => other,
        }
    }

    /// Waits until every bucket of the resolved round is final and the executor polls none of its events any more. A round
    /// in which a bucket has failed gets no verdict: while it is open, the error of the bucket is returned at once.
    pub fn finish(&self, timeout: Option<Duration>) -> Result<()> {
        self.until(timeout, |inner| match inner.round.failure().filter(|_| inner.round.is_open()) {
            Some(error) => Err(error.clone()),
            None => over(inner),
        })
    }

    /// As [`Engine::finish`], for a round that needs no verdict once a bucket has failed: it is aborted then, also if the
    /// bucket fails during the wait.
    pub fn finish_or_abort(&self, timeout: Option<Duration>) -> Result<()> {
        self.until(timeout, |inner| {
            if inner.round.failure().is_some() {
                self.abort_locked(inner);
            }
            over(inner)
        })
    }

    /// Buckets whose speculative steps the last verdict rolled back.
    pub fn rolled_back_buckets(&self) -> Result<Vec<u32>> {
        Ok(self.lock().round.rolled_back_buckets().to_vec())
    }

    /// Statistics since `open`.
    pub fn stats(&self) -> Result<Stats> {
        let inner = self.lock();
        let begun = inner.begun.map(|begun| begun.elapsed());
        Ok(Stats { counts: inner.round.counts(), exposed: inner.exposed, begun })
    }

    /// When 16-bit copies are written and valid.
    pub fn publish(&self) -> Publish {
        self.publish
    }

    fn lock(&self) -> Guard<'_, Inner> {
        self.shared.inner.lock()
    }

    fn abort_locked(&self, inner: &mut Inner) {
        if inner.round.abort() {
            inner.sweep();
            self.shared.waker.set();
            self.shared.changed.notify_all();
        }
    }

    fn close_round(&self, mut inner: Guard<'_, Inner>, verdict: Verdict) -> Result<Outcome> {
        let scale = inner.round.clip().scale();
        inner.round.resolve(verdict)?;
        inner.sweep();
        let factor = match verdict {
            Verdict::Commit => scale,
            Verdict::Redo(factor) => factor,
            Verdict::Skip => 0.0,
        };
        let rolled_back = inner.round.rolled_back_buckets().len();
        // Where a commit has nothing to write, stepped buckets become final in this call.
        let here = verdict == Verdict::Commit && self.publish != Publish::Final;
        let jobs = if here { inner.take_commits() } else { Vec::new() };
        // A commit may call the driver, for uploads of copies.
        drop(inner);
        self.shared.waker.set();
        for job in jobs {
            let done = executor::run(Some(job));
            self.lock().put_back(done);
        }
        self.shared.changed.notify_all();
        Ok(Outcome { verdict, norm: f64::NAN, factor, rolled_back })
    }

    /// Waits until `check` returns a result; the time counts as exposed.
    fn until<T>(
        &self,
        timeout: Option<Duration>,
        mut check: impl FnMut(&mut Inner) -> Result<Option<T>>,
    ) -> Result<T> {
        let start = Instant::now();
        let end = deadline_after(timeout);
        let mut inner = self.lock();
        let outcome = loop {
            if let Some(outcome) = check(&mut inner).transpose() {
                break outcome;
            }
            if inner.executor_gone {
                break Err(Error::Internal("the speculation thread ended unexpectedly".to_string()));
            }
            let in_time;
            (inner, in_time) = self.shared.changed.wait_until(inner, end);
            if !in_time {
                break Err(timed_out(&inner, start.elapsed()));
            }
        };
        inner.exposed += start.elapsed();
        outcome
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        let mut inner = self.lock();
        inner.round.abort();
        inner.sweep();
        inner.closing = true;
        self.shared.waker.set();
        while !inner.executor_gone {
            inner = self.shared.changed.wait(inner);
        }
    }
}

/// Whether every bucket of the round is final and no event is polled; the error of a failed bucket then.
fn over(inner: &mut Inner) -> Result<Option<()>> {
    let over = inner.round.is_idle() && !inner.watching;
    match inner.round.failure().filter(|_| over) {
        Some(error) => Err(error.clone()),
        None => Ok(over.then_some(())),
    }
}

fn timed_out(inner: &Inner, waited: Duration) -> Error {
    let waiting: Vec<String> = inner.round.waiting().map(|index| index.to_string()).take(8).collect();
    let detail = match (waiting.is_empty(), inner.slots.len()) {
        (true, _) => String::new(),
        (false, 1) => "; its event is still pending".to_string(),
        (false, _) => format!("; buckets whose event is still pending: {}", waiting.join(", ")),
    };
    Error::Timeout(format!("timed out after {:.3} s{detail}", waited.as_secs_f64()))
}
