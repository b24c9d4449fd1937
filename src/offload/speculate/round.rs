//! The states of a round and of its buckets. Pure: no thread, no memory, no clock.
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
//! - A bucket is submitted at most once a round, and only while the round is open.
//! - The sum of squares adds the buckets in their order, whatever the order in which they came.
//! - After `resolve` every bucket comes to the state of a step with the final factor, or of none. Which of them had been
//!   stepped before, and when the verdict was foreseen, changes no bit.
#![forbid(unsafe_code)]

use super::clip::{Clip, Verdict};
use crate::error::{Error, Result, RoundError};
use crate::kernel::squares;
use crate::optim::StepStats;
use crate::sys::room;

/// What the executor does with a bucket.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Task {
    /// Measures the gradient and leaves the rest alone.
    Look,
    /// Steps, recorded, and measures.
    Speculate,
    /// Nothing: the verdict needs no more numbers.
    Pass,
    /// Lets a recorded step stand.
    Commit,
    /// Takes the recorded step back.
    Rollback,
    /// Takes the recorded step back and steps with this factor.
    Redo(f32),
    /// Steps with this factor, once and for all.
    Step(f32),
}

/// Where a bucket stands.
#[derive(Debug, Clone, PartialEq)]
enum Bucket {
    Missing,
    Waiting,
    Running(Task),
    /// Measured (unless it was passed over), and perhaps stepped.
    Known {
        stats: Option<StepStats>,
        stepped: bool,
    },
    /// Needs this to be final.
    Due(Task),
    Final,
    Failed(Error),
}

/// What callers may know of a bucket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Progress {
    /// Not submitted in this round.
    Missing,
    /// Submitted; its values may change at any moment.
    Pending,
    /// Stepped, but the round is open: the step may be withdrawn.
    Speculative,
    /// As it will stay.
    Final,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Idle,
    Open,
    Resolved,
}

/// What a verdict can be foreseen from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Foreseen {
    Nothing,
    Clipped,
    Nonfinite,
}

/// Counts since the round object was made.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Rounds that were resolved so.
    pub commits: u64,
    /// As above.
    pub redos: u64,
    /// As above.
    pub skips: u64,
    /// Rounds given up before a verdict.
    pub aborts: u64,
    /// Buckets stepped before the verdict.
    pub speculated: u64,
    /// Those of them whose step stood.
    pub committed: u64,
    /// Those taken back and stepped again.
    pub redone: u64,
    /// Those taken back.
    pub rolled_back: u64,
    /// Buckets that were not stepped before the verdict: it was foreseen, or they never speculate.
    pub spared: u64,
}

/// A round and its buckets, and the counts over all rounds.
#[derive(Debug)]
pub struct Round {
    phase: Phase,
    clip: Clip,
    buckets: Vec<Bucket>,
    /// Buckets in the order in which they were submitted.
    order: Vec<usize>,
    running_sum: f64,
    foreseen: Foreseen,
    withdrawn: Vec<u32>,
    counts: Counts,
}

impl Round {
    /// No round, for `buckets` buckets.
    pub fn new(buckets: usize) -> Result<Round> {
        Ok(Round {
            phase: Phase::Idle,
            clip: Clip::none(),
            buckets: room::filled("listing the buckets", buckets, |_| Bucket::Missing)?,
            order: room::for_count("listing the buckets", buckets)?,
            running_sum: 0.0,
            foreseen: Foreseen::Nothing,
            withdrawn: Vec::new(),
            counts: Counts::default(),
        })
    }

    /// Opens a round.
    pub fn begin(&mut self, clip: Clip) -> Result<()> {
        match self.phase {
            Phase::Idle => {}
            Phase::Open => return Err(RoundError::Open.into()),
            Phase::Resolved => {
                return Err(Error::Busy("buckets of the round before are not final yet".to_string()));
            }
        }
        self.phase = Phase::Open;
        self.clip = clip;
        self.buckets.fill(Bucket::Missing);
        self.order.clear();
        self.running_sum = 0.0;
        self.foreseen = Foreseen::Nothing;
        self.withdrawn.clear();
        Ok(())
    }

    /// The clip rule of the round.
    pub fn clip(&self) -> Clip {
        self.clip
    }

    /// Whether `bucket` could be submitted now.
    pub fn may_submit(&self, bucket: u32) -> Result<()> {
        self.open()?;
        match self.bucket(bucket)? {
            Bucket::Missing => Ok(()),
            _ => Err(RoundError::Submitted(bucket).into()),
        }
    }

    /// Takes a bucket in.
    pub fn submit(&mut self, bucket: u32) -> Result<()> {
        self.may_submit(bucket)?;
        self.buckets[bucket as usize] = Bucket::Waiting;
        self.order.push(bucket as usize);
        Ok(())
    }

    /// Submitted buckets that have not started, the first submitted first.
    pub fn waiting(&self) -> impl Iterator<Item = usize> {
        self.order.iter().copied().filter(|index| self.buckets[*index] == Bucket::Waiting)
    }

    /// Buckets that need something to be final, the last submitted first: backward ends with the layers that forward
    /// begins with.
    pub fn due(&self) -> impl Iterator<Item = usize> {
        self.order.iter().rev().copied().filter(|index| matches!(self.buckets[*index], Bucket::Due(_)))
    }

    /// What a bucket that is due needs.
    pub fn due_task(&self, index: usize) -> Option<Task> {
        match self.buckets[index] {
            Bucket::Due(task) => Some(task),
            _ => None,
        }
    }

    /// True if nothing more will be done with the bucket.
    pub fn is_over(&self, index: usize) -> bool {
        matches!(self.buckets[index], Bucket::Final | Bucket::Failed(_))
    }

    /// Starts a bucket that is waiting or due; what to do with it. One that is waiting gets `first`, [`Task::Speculate`] or
    /// [`Task::Look`], as long as no verdict is foreseen.
    pub fn start(&mut self, index: usize, first: Task) -> Task {
        let task = match (&self.buckets[index], self.foreseen) {
            (Bucket::Due(task), _) => *task,
            (_, Foreseen::Nothing) => first,
            (_, Foreseen::Clipped) => Task::Look,
            (_, Foreseen::Nonfinite) => Task::Pass,
        };
        self.buckets[index] = Bucket::Running(task);
        task
    }

    /// Ends what `start` started.
    pub fn done(&mut self, index: usize, stats: StepStats) {
        let Bucket::Running(task) = self.buckets[index] else { return };
        self.buckets[index] = match task {
            Task::Look | Task::Speculate | Task::Pass => {
                let stepped = task == Task::Speculate;
                self.counts.speculated += u64::from(stepped);
                self.counts.spared += u64::from(!stepped);
                let stats = (task != Task::Pass).then_some(stats);
                stats.into_iter().for_each(|stats| self.foresee(stats));
                Bucket::Known { stats, stepped }
            }
            Task::Commit | Task::Rollback | Task::Redo(_) | Task::Step(_) => Bucket::Final,
        };
        if self.phase == Phase::Resolved {
            // Given up while this bucket ran.
            self.settle(index, Verdict::Skip);
            self.rest_if_final();
        }
    }

    /// The bucket broke while waiting or running; what it holds is not known.
    pub fn fail(&mut self, index: usize, error: Error) {
        self.buckets[index] = Bucket::Failed(error);
        self.rest_if_final();
    }

    /// This rank's sum over all buckets; `None` while some are not measured.
    pub fn local(&self) -> Result<Option<StepStats>> {
        self.open()?;
        self.whole()?;
        let mut sum = 0.0;
        for bucket in &self.buckets {
            match bucket {
                Bucket::Known { stats: Some(stats), .. } => sum = squares::add(sum, stats.sum_squares),
                Bucket::Known { stats: None, .. } => sum = f64::NAN,
                _ => return Ok(None),
            }
        }
        // One NaN for everything that is not finite: how much was measured before that depends on the order.
        Ok(Some(match sum.is_finite() {
            true => StepStats { nonfinite: false, sum_squares: sum },
            false => StepStats { nonfinite: true, sum_squares: f64::NAN },
        }))
    }

    /// Gives the round its verdict.
    pub fn resolve(&mut self, verdict: Verdict) -> Result<()> {
        if self.local()?.is_none() {
            return Err(Error::Busy("buckets of the round are still being measured".to_string()));
        }
        match verdict {
            Verdict::Commit => self.counts.commits += 1,
            Verdict::Redo(_) => self.counts.redos += 1,
            Verdict::Skip => self.counts.skips += 1,
        }
        self.close(verdict);
        Ok(())
    }

    /// Gives the round up, whatever was submitted: no step happens. Without an open round nothing.
    pub fn abort(&mut self) {
        if self.phase == Phase::Open {
            self.counts.aborts += 1;
            self.close(Verdict::Skip);
        }
    }

    /// True if no round is open and every bucket is final.
    pub fn is_idle(&self) -> bool {
        self.phase == Phase::Idle
    }

    /// Where a bucket stands; the error of one that failed.
    pub fn progress(&self, bucket: u32) -> Result<Progress> {
        match self.bucket(bucket)? {
            Bucket::Missing => Ok(Progress::Missing),
            Bucket::Known { stepped: true, .. } => Ok(Progress::Speculative),
            Bucket::Waiting | Bucket::Running(_) | Bucket::Known { .. } | Bucket::Due(_) => {
                Ok(Progress::Pending)
            }
            Bucket::Final => Ok(Progress::Final),
            Bucket::Failed(error) => Err(error.clone()),
        }
    }

    /// The error of the first bucket that failed.
    pub fn failure(&self) -> Option<&Error> {
        self.buckets.iter().find_map(|bucket| match bucket {
            Bucket::Failed(error) => Some(error),
            _ => None,
        })
    }

    /// Buckets that had been stepped when the verdict withdrew their steps.
    pub fn withdrawn(&self) -> &[u32] {
        &self.withdrawn
    }

    /// Counts over all rounds.
    pub fn counts(&self) -> Counts {
        self.counts
    }

    fn open(&self) -> Result<()> {
        match self.phase {
            Phase::Open => Ok(()),
            Phase::Resolved => Err(RoundError::Resolved.into()),
            Phase::Idle if self.order.is_empty() => Err(RoundError::NotBegun.into()),
            Phase::Idle => Err(RoundError::Resolved.into()),
        }
    }

    fn bucket(&self, bucket: u32) -> Result<&Bucket> {
        let count = self.buckets.len();
        let found = self.buckets.get(bucket as usize);
        found.ok_or_else(|| Error::invalid("bucket", format!("is {bucket}, but there are {count} buckets")))
    }

    /// Every bucket is there, and none failed.
    fn whole(&self) -> Result<()> {
        if let Some(error) = self.failure() {
            return Err(error.clone());
        }
        match self.buckets.iter().position(|bucket| *bucket == Bucket::Missing) {
            Some(missing) => Err(RoundError::Missing(missing as u32).into()),
            None => Ok(()),
        }
    }

    /// The norm only grows: past the limit it stays there.
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
            self.settle(index, verdict);
        }
        self.rest_if_final();
    }

    /// What the verdict means for one bucket; one that is running is settled when it is done.
    fn settle(&mut self, index: usize, verdict: Verdict) {
        let scale = self.clip.scale();
        let next = match &self.buckets[index] {
            Bucket::Missing | Bucket::Waiting => Bucket::Final,
            Bucket::Known { stepped: true, .. } => {
                if verdict != Verdict::Commit {
                    self.withdrawn.push(index as u32);
                }
                Bucket::Due(self.count_settled(verdict))
            }
            Bucket::Known { stepped: false, .. } => match verdict {
                Verdict::Skip => Bucket::Final,
                Verdict::Commit => Bucket::Due(Task::Step(scale)),
                Verdict::Redo(factor) => Bucket::Due(Task::Step(factor)),
            },
            Bucket::Running(_) | Bucket::Due(_) | Bucket::Final | Bucket::Failed(_) => return,
        };
        self.buckets[index] = next;
    }

    fn count_settled(&mut self, verdict: Verdict) -> Task {
        let Counts { committed, redone, rolled_back, .. } = &mut self.counts;
        let (count, task) = match verdict {
            Verdict::Commit => (committed, Task::Commit),
            Verdict::Redo(factor) => (redone, Task::Redo(factor)),
            Verdict::Skip => (rolled_back, Task::Rollback),
        };
        *count += 1;
        task
    }

    fn rest_if_final(&mut self) {
        if self.phase == Phase::Resolved && (0..self.buckets.len()).all(|index| self.is_over(index)) {
            self.phase = Phase::Idle;
        }
    }
}
