//! The tiered update (MLP-Offload sections 3.2 to 3.4): optimizer state on a tier, stepped through few buffers of host
//! memory.
//!
//! Invariants:
//! - The tier's committed state is never written to: until [`Swap::commit`] succeeds, a crash, an error or
//!   [`Swap::roll_back`] leads back to the last commit, whole.
//! - A step that failed is taken up again by rolling back, by nothing else: some subgroups may have been stepped.
//! - No gradient ever goes to the tier; only param, exp_avg and exp_avg_sq do, 12 bytes a parameter; 10 if param is split,
//!   and then the caller keeps the 16-bit copy that belongs to the state: a wrong one is told, never stepped.
//! - All memory is taken at open, and it is what [`budget::plan`] said.
#![forbid(unsafe_code)]

mod access;
pub mod budget;
mod extents;
pub mod form;
mod lanes;
pub mod master;
pub mod pipeline;
mod traffic;

use std::sync::Arc;
use std::time::Duration;

use crate::dtype::bf16;
use budget::Budget;
use extents::Extents;
use form::Form;
use lanes::Lanes;
use pipeline::{Action, Pipeline, PipelineStats};
use traffic::{Direction, Traffic};

use crate::error::{Error, Result};
use crate::pool::buffer::Buffer;
use crate::pool::region::Backing;
use crate::tier::Tier;

pub use form::State;

/// Settings of a tiered update.
#[derive(Debug, Clone)]
pub struct SwapOptions {
    /// Elements of each subgroup.
    pub subgroups: Vec<u64>,
    /// How state is stored: [`Form::Split`] needs the 16-bit copies at every step.
    pub usual: Form,
    /// Most bytes of host memory for state.
    pub host_bytes: u64,
    /// What memory to take.
    pub backing: Backing,
    /// Share of each path, instead of its measured speed.
    pub ratio: Option<Vec<f64>>,
    /// Bytes per second of each path, to begin with; empty if nothing is known.
    pub speeds: Vec<f64>,
    /// One process of the node at a time uses a path.
    pub exclusive: bool,
    /// How long a process waits for its turn on a path before it goes on without one.
    pub patience: Duration,
}

/// Counts since open.
#[derive(Debug, Clone, PartialEq)]
pub struct SwapStats {
    /// Subgroups read, written, and found in memory.
    pub pipeline: PipelineStats,
    /// Seconds in which nothing could be stepped for want of data.
    pub exposed_seconds: f64,
    /// Bytes of state that live on each path.
    pub load: Vec<u64>,
    /// Pieces of subgroups that changed their path.
    pub moved: u64,
}

/// Subgroups on a tier.
#[derive(Debug)]
pub struct Swap {
    tier: Arc<Tier>,
    usual: Form,
    budget: Budget,
    extents: Extents,
    buffers: Vec<Buffer>,
    /// Of each buffer, the form in which its state was fetched, until it is joined.
    fetched: Vec<Form>,
    pipeline: Pipeline,
    traffic: Traffic,
    lanes: Lanes,
    /// Why the state in memory is no step's.
    broken: Option<Error>,
}

impl Swap {
    /// Takes the memory and defines the extents. Subgroups that the tier has already are kept as they are.
    pub fn open(tier: Arc<Tier>, options: &SwapOptions) -> Result<Swap> {
        let paths = tier.paths().len();
        let budget = budget::plan(&options.subgroups, options.usual, paths, options.host_bytes)?;
        let pipeline = Pipeline::new(options.subgroups.len(), budget.buffers, budget.cached)?;
        let extents = Extents::define(&tier, &options.subgroups, options.usual)?;
        let buffers = (0..budget.buffers)
            .map(|_| Buffer::open(budget.buffer_bytes as usize, options.backing))
            .collect::<Result<_>>()?;
        let traffic = Traffic::new(&tier, options)?;
        let lanes = Lanes::new(&tier, options)?;
        let fetched = vec![Form::Whole; budget.buffers];
        Ok(Swap {
            tier,
            usual: options.usual,
            budget,
            extents,
            buffers,
            fetched,
            pipeline,
            traffic,
            lanes,
            broken: None,
        })
    }

    /// What was taken.
    pub fn budget(&self) -> Budget {
        self.budget
    }

    /// The form in which state is stored.
    pub fn usual(&self) -> Form {
        self.usual
    }

    /// Number of subgroups.
    pub fn len(&self) -> usize {
        self.extents.len()
    }

    /// True for no subgroups.
    pub fn is_empty(&self) -> bool {
        self.extents.len() == 0
    }

    /// Elements of a subgroup.
    pub fn elements(&self, subgroup: usize) -> Result<usize> {
        match subgroup < self.len() {
            true => Ok(self.extents.elements(subgroup)),
            false => Err(Error::invalid("subgroup", format!("{subgroup} of {}", self.len()))),
        }
    }

    /// True if every subgroup has a state.
    pub fn filled(&self) -> Result<bool> {
        for subgroup in 0..self.len() {
            if self.extents.newest(&self.tier, subgroup)?.2 == 0 {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Counts since open.
    pub fn stats(&self) -> SwapStats {
        SwapStats {
            pipeline: self.pipeline.stats(),
            exposed_seconds: self.traffic.exposed.as_secs_f64(),
            load: self.traffic.load(),
            moved: self.traffic.moved(),
        }
    }

    /// Gives every subgroup its first state: `fill` writes it into memory that holds anything.
    pub fn fill(&mut self, mut fill: impl FnMut(usize, State<'_>) -> Result<()>) -> Result<()> {
        self.ready()?;
        let outcome = self.run(Source::Nothing, &mut fill);
        self.note(outcome)
    }

    /// One update: `step` is called once for each subgroup, in the order in which their states arrive.
    pub fn step(&mut self, step: impl FnMut(usize, State<'_>) -> Result<()>) -> Result<()> {
        self.step_with(&|_| &[], step)
    }

    /// The same for state whose master is split: `copies` gives each subgroup's 16-bit weights as the step that made the
    /// state published them. It is asked before the subgroup is stepped, and not at all for one that stayed in memory.
    pub fn step_with<'a>(
        &mut self,
        copies: Copies<'a>,
        mut step: impl FnMut(usize, State<'_>) -> Result<()>,
    ) -> Result<()> {
        self.ready()?;
        let outcome = self.run(Source::Tier(copies), &mut step);
        self.traffic.end_round(&self.tier);
        self.note(outcome)
    }

    /// Writes what is newer in memory, and makes all of it durable as `step`.
    pub fn commit(&mut self, step: u64, payload: &[u8]) -> Result<()> {
        self.ready()?;
        self.pipeline.settle()?;
        let outcome = self.drive(Source::Nothing, &mut |_, _| Ok(()));
        self.note(outcome)?;
        self.extents.remove_older(&self.tier)?;
        self.tier.commit(step, payload)?;
        self.extents.find(&self.tier);
        Ok(())
    }

    /// Goes back to the last commit.
    pub fn roll_back(&mut self) -> Result<()> {
        self.lanes.end(&self.tier);
        self.finish_transfers();
        self.tier.roll_back()?;
        self.pipeline.forget()?;
        self.extents.find(&self.tier);
        self.broken = None;
        Ok(())
    }

    fn ready(&self) -> Result<()> {
        match &self.broken {
            None => Ok(()),
            Some(error) => Err(Error::Busy(format!("roll back first; the last step failed: {error}"))),
        }
    }

    fn note(&mut self, outcome: Result<()>) -> Result<()> {
        self.lanes.end(&self.tier);
        outcome.inspect_err(|error| {
            self.finish_transfers();
            self.broken = Some(error.clone());
        })
    }

    fn run(&mut self, source: Source, work: Work) -> Result<()> {
        self.set_stuck_aside();
        self.pipeline.begin()?;
        self.drive(source, work)
    }

    /// Runs the pipeline to its end. From no source nothing is read: the work fills what it gets.
    fn drive(&mut self, source: Source, work: Work) -> Result<()> {
        self.lanes.begin(&self.tier);
        loop {
            self.lanes.look(&self.tier);
            match self.pipeline.next_action() {
                Action::Fetch { slot, .. } if matches!(source, Source::Nothing) => {
                    self.fetched[slot] = Form::Whole;
                    self.pipeline.handed_over(slot);
                }
                Action::Fetch { subgroup, slot } => self.fetch(subgroup, slot)?,
                Action::Flush { subgroup, slot, keep } => self.flush(subgroup, slot, keep)?,
                Action::Step { subgroup, slot } => {
                    let (buffer, elements) = (&mut self.buffers[slot], self.extents.elements(subgroup));
                    if std::mem::replace(&mut self.fetched[slot], Form::Whole) == Form::Split {
                        let named = |error: Error| error.within(&format!("subgroup {subgroup}, "));
                        form::join(buffer, elements, source.copy(subgroup)).map_err(named)?;
                    }
                    work(subgroup, form::state(buffer, elements)?)?;
                    self.pipeline.stepped(slot);
                    self.collect(false)?;
                }
                Action::Wait if self.traffic.idle() => {
                    let reason =
                        "every buffer is in a transfer that was given up and that its device has not ended";
                    return Err(Error::Busy(reason.to_string()));
                }
                Action::Wait => self.collect(true)?,
                Action::Done => return Ok(()),
            }
        }
    }

    /// Starts a read. One that cannot even start has failed like any other.
    fn fetch(&mut self, subgroup: usize, slot: usize) -> Result<()> {
        self.start_fetch(subgroup, slot).inspect_err(|_| self.ended(Direction::Fetch, slot, false))
    }

    fn start_fetch(&mut self, subgroup: usize, slot: usize) -> Result<()> {
        let (extent, form, _) = self.extents.newest(&self.tier, subgroup)?;
        self.fetched[slot] = form;
        let elements = self.extents.elements(subgroup);
        let spans = form::spans(form, self.buffers[slot].span(), elements);
        self.traffic.read(&self.tier, slot, extent, &spans)
    }

    /// Starts a write of a slot's state, which stays there if `keep`.
    fn flush(&mut self, subgroup: usize, slot: usize, keep: bool) -> Result<()> {
        self.start_flush(subgroup, slot, keep).inspect_err(|_| self.ended(Direction::Flush, slot, false))
    }

    fn start_flush(&mut self, subgroup: usize, slot: usize, keep: bool) -> Result<()> {
        let elements = self.extents.elements(subgroup);
        let form = match self.usual {
            Form::Split if !keep => form::split(&mut self.buffers[slot], elements)?,
            _ => Form::Whole,
        };
        let extent = self.extents.written_as(&self.tier, subgroup, form)?;
        let spans = form::spans(form, self.buffers[slot].span(), elements);
        let parts = self.traffic.place(subgroup, form, &self.tier)?;
        self.traffic.write(&self.tier, slot, extent, &spans, parts)
    }

    fn ended(&mut self, direction: Direction, slot: usize, well: bool) {
        match direction {
            Direction::Fetch => self.pipeline.fetched(slot, well),
            Direction::Flush => self.pipeline.flushed(slot, well),
        }
        self.pipeline.set_aside(slot, self.buffers[slot].in_transfer());
    }

    fn set_stuck_aside(&mut self) {
        for (slot, buffer) in self.buffers.iter().enumerate() {
            self.pipeline.set_aside(slot, buffer.in_transfer());
        }
    }

    /// Takes in transfers that are over; waits for one, if `wait`. All of them, whichever failed.
    fn collect(&mut self, wait: bool) -> Result<()> {
        let mut outcome = Ok(());
        for done in self.traffic.over(&self.tier, &mut self.lanes, wait) {
            self.ended(done.direction, done.slot, done.outcome.is_ok());
            outcome = outcome.and(done.outcome);
        }
        outcome
    }

    /// After an error: nothing may use the buffers any more.
    fn finish_transfers(&mut self) {
        while !self.traffic.idle() {
            // One error is known already.
            let _ = self.collect(true);
        }
    }
}

type Work<'a> = &'a mut dyn FnMut(usize, State<'_>) -> Result<()>;

/// The 16-bit weights of a subgroup.
pub type Copies<'a> = &'a dyn Fn(usize) -> &'a [bf16];

/// Where the states of a round come from.
#[derive(Clone, Copy)]
enum Source<'a> {
    /// From nowhere: the work fills them in.
    Nothing,
    /// From the tier, and the copies of those that are split.
    Tier(Copies<'a>),
}

impl<'a> Source<'a> {
    fn copy(self, subgroup: usize) -> &'a [bf16] {
        match self {
            Source::Nothing => &[],
            Source::Tier(copies) => copies(subgroup),
        }
    }
}

#[cfg(test)]
mod tests;
