//! The state machine of a round and of its buckets. Pure: no threads, no tensor memory, no clock.
//!
//! ```text
//! round    idle --begin--> open --resolve, abort--> resolved --last bucket final--> idle
//!
//! bucket   missing --submit--> waiting --start--> running --done--> known
//!          known   --resolve--> final, or due --start--> running --done--> final
//!          waiting, running --fail--> failed
//! ```
//!
//! Invariants:
//! - A bucket is submitted at most once per round, and only while the round is open.
//! - The sum of squares adds the buckets in index order, whatever the order of their arrival.
//! - After `resolve` every bucket reaches the state of one step with the final factor, or of no step. Speculation and
//!   the moment at which the verdict was foreseen change no bit.
//!
//! A step before the verdict that the verdict repeats, or that is taken back, costs more than one after it. After two
//! rounds in a row in which such steps were in vain, buckets are only measured before the verdict, until a round would
//! have kept them.
#![forbid(unsafe_code)]

use super::clip::{Clip, Verdict};
use crate::error::{Error, Result, RoundKind, Rounds};
use crate::kernel::squares;
use crate::optim::StepStats;
use crate::sys::try_vec;

/// Rounds in a row whose steps are in vain before the next ones only measure.
const IN_A_ROW: u32 = 2;

/// A task of the executor on one bucket.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Task {
    /// Measures the gradient and changes nothing.
    Measure,
    /// Measures the gradient and steps, with a rollback record.
    Speculate,
    /// No work: the verdict is already certain without this bucket's norm.
    Pass,
    /// Makes a recorded step final.
    Commit,
    /// Rolls the recorded step back.
    Rollback,
    /// Rolls the recorded step back and steps again with this factor.
    Redo(f32),
    /// Steps with this factor, without a record.
    Step(f32),
}

/// State of a bucket.
#[derive(Debug, Clone, PartialEq)]
enum BucketState {
    Missing,
    Waiting,
    Running(Task),
    /// Measured (unless the task was [`Task::Pass`]); stepped after [`Task::Speculate`].
    Known {
        stats: Option<StepStats>,
        stepped: bool,
    },
    /// Waits for this task; final afterwards.
    Due(Task),
    Final,
    Failed(Error),
}

/// State of a bucket as callers see it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Progress {
    /// Not submitted in this round.
    Missing,
    /// Submitted, and not in another state; a task may change its values at any moment.
    Pending,
    /// Stepped, but the round is open: the step may be rolled back.
    Speculative,
    /// No task is left: the values no longer change.
    Final,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Idle,
    Open,
    Resolved,
}

/// What the running sum says about the verdict.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Foreseen {
    Nothing,
    Clipped,
    Nonfinite,
}

/// Counts since the round object was created.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Rounds resolved with [`Verdict::Commit`].
    pub commits: u64,
    /// Rounds resolved with [`Verdict::Redo`].
    pub redos: u64,
    /// Rounds resolved with [`Verdict::Skip`].
    pub skips: u64,
    /// Rounds aborted before a verdict.
    pub aborts: u64,
    /// Buckets that stepped speculatively, before the verdict.
    pub speculated: u64,
    /// Speculative steps that were committed.
    pub committed: u64,
    /// Speculative steps that were rolled back and repeated with the clip factor.
    pub redone: u64,
    /// Speculative steps that were rolled back.
    pub rolled_back: u64,
    /// Buckets that did not step before the verdict: the verdict was foreseen, the last rounds were in vain, or the bucket
    /// never speculates.
    pub spared: u64,
}

/// One round, its buckets, and the counts over all rounds.
#[derive(Debug)]
pub struct Round {
    /// The subject of its errors.
    of: Rounds,
    phase: Phase,
    clip: Clip,
    buckets: Vec<BucketState>,
    /// Submitted buckets in the order of their submission.
    order: Vec<usize>,
    running_sum: f64,
    foreseen: Foreseen,
    /// Buckets may step before the verdict.
    early: bool,
    /// Rounds in a row whose steps before the verdict were in vain, or would have been.
    in_vain: u32,
    /// The last round was aborted, and has stepped early or would have: the open one may repeat it, and does not show that
    /// early steps are kept.
    aborted: bool,
    rolled_back_buckets: Vec<u32>,
    counts: Counts,
}

impl Round {
    /// An idle state machine for `buckets` buckets.
    pub fn new(buckets: usize, of: Rounds) -> Result<Round> {
        Ok(Round {
            of,
            phase: Phase::Idle,
            clip: Clip::none(),
            buckets: try_vec::from_fn("listing the buckets", buckets, |_| BucketState::Missing)?,
            order: try_vec::with_capacity("listing the buckets", buckets)?,
            running_sum: 0.0,
            foreseen: Foreseen::Nothing,
            early: true,
            in_vain: 0,
            aborted: false,
            rolled_back_buckets: Vec::new(),
            counts: Counts::default(),
        })
    }

    /// Opens a round. `always_early`: readers use what steps write before the verdict, whether or not the last rounds were
    /// in vain. Errors: a round is open, or buckets of the previous round are not final.
    pub fn begin(&mut self, clip: Clip, always_early: bool) -> Result<()> {
        match self.phase {
            Phase::Idle => {}
            Phase::Open => return Err(self.error(RoundKind::Open)),
            Phase::Resolved => return Err(self.error(RoundKind::Unfinished)),
        }
        self.phase = Phase::Open;
        self.clip = clip;
        self.early = always_early || self.in_vain < IN_A_ROW;
        self.buckets.fill(BucketState::Missing);
        self.order.clear();
        self.running_sum = 0.0;
        self.foreseen = Foreseen::Nothing;
        self.rolled_back_buckets.clear();
        Ok(())
    }

    /// The clip rule of the round.
    pub fn clip(&self) -> Clip {
        self.clip
    }

    /// Returns Ok if `submit` would accept `bucket` now, and its error otherwise.
    pub fn may_submit(&self, bucket: u32) -> Result<()> {
        self.open()?;
        match self.bucket(bucket)? {
            BucketState::Missing => Ok(()),
            _ => Err(self.error(RoundKind::Submitted(bucket))),
        }
    }

    /// Submits a bucket. Errors: no open round, no such bucket, or the bucket was submitted before.
    pub fn submit(&mut self, bucket: u32) -> Result<()> {
        self.may_submit(bucket)?;
        self.buckets[bucket as usize] = BucketState::Waiting;
        self.order.push(bucket as usize);
        Ok(())
    }

    /// Submitted buckets that have not started, in the order of submission.
    pub fn waiting(&self) -> impl Iterator<Item = usize> {
        self.order.iter().copied().filter(|index| self.buckets[*index] == BucketState::Waiting)
    }

    /// Buckets with a task left after the verdict, in reverse order of submission: backward ends with the layers that
    /// the next forward uses first.
    pub fn due(&self) -> impl Iterator<Item = usize> {
        self.order.iter().rev().copied().filter(|index| matches!(self.buckets[*index], BucketState::Due(_)))
    }

    /// The task of a bucket that is due.
    pub fn due_task(&self, index: usize) -> Option<Task> {
        match self.buckets[index] {
            BucketState::Due(task) => Some(task),
            _ => None,
        }
    }

    /// True if no task will touch the bucket any more.
    pub fn is_finished(&self, index: usize) -> bool {
        matches!(self.buckets[index], BucketState::Final | BucketState::Failed(_))
    }

    /// Starts a bucket that is waiting or due, and returns its task. A waiting bucket gets `first` ([`Task::Speculate`]
    /// or [`Task::Measure`]) unless the verdict is foreseen, or the last rounds were in vain.
    pub fn start(&mut self, index: usize, first: Task) -> Task {
        let task = match (&self.buckets[index], self.foreseen) {
            (BucketState::Due(task), _) => *task,
            (_, Foreseen::Nothing) if self.early => first,
            (_, Foreseen::Nothing | Foreseen::Clipped) => Task::Measure,
            (_, Foreseen::Nonfinite) => Task::Pass,
        };
        self.buckets[index] = BucketState::Running(task);
        task
    }

    /// Records the end of a task that `start` returned.
    pub fn done(&mut self, index: usize, stats: StepStats) {
        let BucketState::Running(task) = self.buckets[index] else { return };
        self.buckets[index] = match task {
            Task::Measure | Task::Speculate | Task::Pass => {
                let stepped = task == Task::Speculate;
                self.counts.speculated += u64::from(stepped);
                self.counts.spared += u64::from(!stepped);
                let stats = (task != Task::Pass).then_some(stats);
                stats.into_iter().for_each(|stats| self.foresee(stats));
                BucketState::Known { stats, stepped }
            }
            Task::Commit | Task::Rollback | Task::Redo(_) | Task::Step(_) => BucketState::Final,
        };
        if self.phase == Phase::Resolved {
            // The round was aborted while this bucket ran.
            self.apply_verdict(index, Verdict::Skip);
            self.become_idle_if_final();
        }
    }

    /// Records a failure of a bucket that was waiting or running. The bucket's values are then undefined.
    pub fn fail(&mut self, index: usize, error: Error) {
        self.buckets[index] = BucketState::Failed(error);
        self.become_idle_if_final();
    }

    /// This rank's sum over all buckets; `None` while a bucket is not measured.
    pub fn local(&self) -> Result<Option<StepStats>> {
        let Some(sums) = self.sums()? else { return Ok(None) };
        let sum = sums.fold(0.0, squares::add);
        // Every non-finite sum becomes NaN: which buckets were measured by then depends on their order.
        Ok(Some(match sum.is_finite() {
            true => StepStats { nonfinite: false, sum_squares: sum },
            false => StepStats { nonfinite: true, sum_squares: f64::NAN },
        }))
    }

    /// The sum of squares of each bucket, NaN if it is not finite; `None` while a bucket is not measured.
    pub fn squares(&self) -> Result<Option<Vec<f64>>> {
        let Some(sums) = self.sums()? else { return Ok(None) };
        let mut found = try_vec::with_capacity("listing the sums of the buckets", self.buckets.len())?;
        found.extend(sums.map(|sum| if sum.is_finite() { sum } else { f64::NAN }));
        Ok(Some(found))
    }

    /// The sum of squares of each bucket, NaN of a bucket that was not measured because the verdict was certain.
    fn sums(&self) -> Result<Option<impl Iterator<Item = f64>>> {
        self.open()?;
        self.check_complete()?;
        let known = |bucket: &BucketState| matches!(bucket, BucketState::Known { .. });
        Ok(self.buckets.iter().all(known).then(|| {
            self.buckets.iter().map(|bucket| match bucket {
                BucketState::Known { stats: Some(stats), .. } => stats.sum_squares,
                _ => f64::NAN,
            })
        }))
    }

    /// Resolves the round. Errors: no open round; a bucket failed or is missing; a bucket is not measured.
    pub fn resolve(&mut self, verdict: Verdict) -> Result<()> {
        if self.local()?.is_none() {
            return Err(self.error(RoundKind::Unmeasured));
        }
        match verdict {
            Verdict::Commit => self.counts.commits += 1,
            Verdict::Redo(_) => self.counts.redos += 1,
            Verdict::Skip => self.counts.skips += 1,
        }
        // Steps that were taken back before say more than the verdict on them.
        if !std::mem::take(&mut self.aborted) {
            self.in_vain = if verdict == Verdict::Commit { 0 } else { self.in_vain.saturating_add(1) };
        }
        self.close(verdict);
        Ok(())
    }

    /// Aborts an open round, whichever buckets were submitted: all steps are rolled back. Returns false, and changes
    /// nothing, if no round is open.
    pub fn abort(&mut self) -> bool {
        let open = self.phase == Phase::Open;
        if open {
            self.counts.aborts += 1;
            let stepped = |bucket: &BucketState| {
                matches!(
                    bucket,
                    BucketState::Known { stepped: true, .. } | BucketState::Running(Task::Speculate)
                )
            };
            let in_vain = self.buckets.iter().any(stepped);
            self.in_vain = self.in_vain.saturating_add(u32::from(in_vain));
            self.aborted |= in_vain || (!self.early && !self.order.is_empty());
            self.close(Verdict::Skip);
        }
        open
    }

    /// True from the beginning of a round to its verdict, or to its abort.
    pub fn is_open(&self) -> bool {
        self.phase == Phase::Open
    }

    /// True if no round is open and every bucket is final.
    pub fn is_idle(&self) -> bool {
        self.phase == Phase::Idle
    }

    /// State of a bucket. Errors: no such bucket; the error of a failed bucket.
    pub fn progress(&self, bucket: u32) -> Result<Progress> {
        match self.bucket(bucket)? {
            BucketState::Missing => Ok(Progress::Missing),
            BucketState::Known { stepped: true, .. } => Ok(Progress::Speculative),
            BucketState::Waiting
            | BucketState::Running(_)
            | BucketState::Known { .. }
            | BucketState::Due(_) => Ok(Progress::Pending),
            BucketState::Final => Ok(Progress::Final),
            BucketState::Failed(error) => Err(error.clone()),
        }
    }

    /// The error of the failed bucket with the lowest index.
    pub fn failure(&self) -> Option<&Error> {
        self.buckets.iter().find_map(|bucket| match bucket {
            BucketState::Failed(error) => Some(error),
            _ => None,
        })
    }

    /// Buckets whose speculative steps the verdict rolled back.
    pub fn rolled_back_buckets(&self) -> &[u32] {
        &self.rolled_back_buckets
    }

    /// Counts over all rounds.
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// The error of a call that does not fit the state.
    pub fn error(&self, kind: RoundKind) -> Error {
        self.of.error(kind)
    }

    fn open(&self) -> Result<()> {
        match self.phase {
            Phase::Open => Ok(()),
            Phase::Resolved => Err(self.error(RoundKind::Resolved)),
            Phase::Idle if self.order.is_empty() => Err(self.error(RoundKind::NotBegun)),
            Phase::Idle => Err(self.error(RoundKind::Resolved)),
        }
    }

    fn bucket(&self, bucket: u32) -> Result<&BucketState> {
        let count = self.buckets.len();
        let found = self.buckets.get(bucket as usize);
        found.ok_or_else(|| Error::invalid("bucket", format!("is {bucket}, but there are {count} buckets")))
    }

    /// Checks that every bucket is submitted and that none failed.
    fn check_complete(&self) -> Result<()> {
        if let Some(error) = self.failure() {
            return Err(error.clone());
        }
        match self.buckets.iter().position(|bucket| *bucket == BucketState::Missing) {
            Some(missing) => Err(self.error(RoundKind::Missing(missing as u32))),
            None => Ok(()),
        }
    }

    /// Updates the running sum and what it says about the verdict. The sum never decreases, so a foreseen verdict
    /// holds.
    fn foresee(&mut self, stats: StepStats) {
        self.running_sum = squares::add(self.running_sum, stats.sum_squares);
        if stats.nonfinite || !self.running_sum.is_finite() {
            self.foreseen = Foreseen::Nonfinite;
        } else if self.foreseen == Foreseen::Nothing
            && self.clip.factor(self.running_sum) != self.clip.scale()
        {
            self.foreseen = Foreseen::Clipped;
        }
    }

    fn close(&mut self, verdict: Verdict) {
        self.phase = Phase::Resolved;
        for index in 0..self.buckets.len() {
            self.apply_verdict(index, verdict);
        }
        self.become_idle_if_final();
    }

    /// Applies the verdict to one bucket. `done` applies it to a running bucket.
    fn apply_verdict(&mut self, index: usize, verdict: Verdict) {
        let scale = self.clip.scale();
        let next = match &self.buckets[index] {
            BucketState::Missing | BucketState::Waiting => BucketState::Final,
            BucketState::Known { stepped: true, .. } => {
                if verdict != Verdict::Commit {
                    self.rolled_back_buckets.push(index as u32);
                }
                BucketState::Due(self.count_outcome(verdict))
            }
            BucketState::Known { stepped: false, .. } => match verdict {
                Verdict::Skip => BucketState::Final,
                Verdict::Commit => BucketState::Due(Task::Step(scale)),
                Verdict::Redo(factor) => BucketState::Due(Task::Step(factor)),
            },
            BucketState::Running(_) | BucketState::Due(_) | BucketState::Final | BucketState::Failed(_) => {
                return;
            }
        };
        self.buckets[index] = next;
    }

    fn count_outcome(&mut self, verdict: Verdict) -> Task {
        let Counts { committed, redone, rolled_back, .. } = &mut self.counts;
        let (count, task) = match verdict {
            Verdict::Commit => (committed, Task::Commit),
            Verdict::Redo(factor) => (redone, Task::Redo(factor)),
            Verdict::Skip => (rolled_back, Task::Rollback),
        };
        *count += 1;
        task
    }

    fn become_idle_if_final(&mut self) {
        if self.phase == Phase::Resolved && (0..self.buckets.len()).all(|index| self.is_finished(index)) {
            self.phase = Phase::Idle;
        }
    }
}
