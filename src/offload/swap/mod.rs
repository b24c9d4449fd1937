//! The tiered update (MLP-Offload sections 3.2 to 3.4): optimizer state on a tier, stepped through few buffers of host
//! memory.
//!
//! Invariants:
//! - The tier's committed state is never written to: until [`Swap::commit`] succeeds, a crash, an error or
//!   [`Swap::roll_back`] leads back to the last commit, whole.
//! - A step that failed is taken up again by rolling back, by nothing else: some subgroups may have been stepped.
//! - No gradient ever goes to the tier; only param, exp_avg and exp_avg_sq do, 12 bytes a parameter; 10 if param is split,
//!   there and in memory, and then the caller keeps the 16-bit copy that belongs to the state: a wrong one is told, never
//!   stepped.
//! - All memory is taken at open, and it is what [`budget::plan`] said.
#![forbid(unsafe_code)]

mod access;
pub mod budget;
mod extents;
pub mod form;
mod lanes;
pub mod master;
pub mod pipeline;
mod slots;
mod traffic;

use std::sync::Arc;
use std::time::Duration;

use crate::dtype::bf16;
use budget::Budget;
use extents::Extents;
use form::Form;
use lanes::Lanes;
use pipeline::{Action, Pipeline, PipelineStats};
use slots::Slots;
use traffic::{Direction, Traffic};

use crate::error::{Error, Result};
use crate::pool::region::Backing;
use crate::sys::span::Span;
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
    slots: Slots,
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
        let slots = Slots::open(&budget, options.usual, options.backing)?;
        let traffic = Traffic::new(&tier, options)?;
        let lanes = Lanes::new(&tier, options)?;
        // Last: what fails before leaves the tier as it was.
        let extents = Extents::define(&tier, &options.subgroups, options.usual)?;
        Ok(Swap {
            tier,
            usual: options.usual,
            budget,
            extents,
            slots,
            pipeline,
            traffic,
            lanes,
            broken: None,
        })
    }

    /// An error in a forked child of the process that opened the tier.
    pub fn owned(&self) -> Result<()> {
        self.tier.owned()
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
    /// state published them. It is asked before the subgroup is stepped, if param has to be made of them.
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
        self.look_at_slots();
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
        self.look_at_slots();
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
                    self.pipeline.handed_over(slot);
                }
                Action::Fetch { subgroup, slot } => self.fetch(subgroup, slot)?,
                Action::Flush { subgroup, slot, keep } => self.flush(subgroup, slot, keep)?,
                Action::Step { subgroup, slot } => {
                    let elements = self.extents.elements(subgroup);
                    self.make_whole(subgroup, slot, source)?;
                    work(subgroup, self.slots.state(slot, elements)?)?;
                    if self.pipeline.stays(subgroup) && !self.slots.keep(slot, elements)? {
                        self.pipeline.let_go(slot);
                    }
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
        self.slots.comes(slot, form);
        let spans = self.slots.spans(slot, form, self.extents.elements(subgroup));
        self.traffic.read(&self.tier, slot, extent, &spans)
    }

    /// Gives a slot the whole param of its state, or at least the memory for it if the state comes from nowhere.
    fn make_whole(&mut self, subgroup: usize, slot: usize, source: Source) -> Result<()> {
        if self.slots.has_master(slot) {
            return Ok(());
        }
        self.lend_master(slot)?;
        let Source::Tier(copies) = source else { return Ok(()) };
        let elements = self.extents.elements(subgroup);
        match self.slots.came(slot) {
            Form::Split => {
                let named = |error: Error| error.within(&format!("subgroup {subgroup}, "));
                self.slots.join(slot, elements, copies(subgroup)).map_err(named)
            }
            // Seldom: a state that could not be split. It was fetched without param, for which there was no memory.
            Form::Whole => {
                let (extent, ..) = self.extents.newest(&self.tier, subgroup)?;
                let param = self.slots.spans(slot, Form::Whole, elements)[0];
                self.traffic.read(&self.tier, slot, extent, &[param, Span::empty(), Span::empty()])?;
                while self.traffic.uses(slot) {
                    self.collect(true)?;
                }
                Ok(())
            }
        }
    }

    /// Waits for a master, if all are being written.
    fn lend_master(&mut self, slot: usize) -> Result<()> {
        while !self.slots.lend(slot) {
            if self.traffic.idle() {
                self.look_at_slots();
                if self.slots.lend(slot) {
                    break;
                }
                let reason =
                    "every master is in a transfer that was given up and that its device has not ended";
                return Err(Error::Busy(reason.to_string()));
            }
            self.collect(true)?;
        }
        Ok(())
    }

    /// Starts a write of a slot's state, which stays there if `keep`.
    fn flush(&mut self, subgroup: usize, slot: usize, keep: bool) -> Result<()> {
        self.start_flush(subgroup, slot, keep).inspect_err(|_| self.ended(Direction::Flush, slot, false))
    }

    fn start_flush(&mut self, subgroup: usize, slot: usize, keep: bool) -> Result<()> {
        let elements = self.extents.elements(subgroup);
        let form = self.slots.store(slot, elements, keep)?;
        let extent = self.extents.written_as(&self.tier, subgroup, form)?;
        let spans = self.slots.spans(slot, form, elements);
        let parts = self.traffic.place(subgroup, form, &self.tier)?;
        self.traffic.write(&self.tier, slot, extent, &spans, parts)
    }

    fn ended(&mut self, direction: Direction, slot: usize, well: bool) {
        match direction {
            Direction::Fetch => self.pipeline.fetched(slot, well),
            Direction::Flush => self.pipeline.flushed(slot, well),
        }
        self.look_at(slot);
    }

    fn look_at_slots(&mut self) {
        (0..self.slots.len()).for_each(|slot| self.look_at(slot));
    }

    /// Sets a slot aside while a transfer that was given up may reach it, and takes its master back if it is vacant.
    fn look_at(&mut self, slot: usize) {
        self.pipeline.set_aside(slot, self.slots.in_transfer(slot));
        if self.pipeline.is_vacant(slot) {
            self.slots.take_back(slot);
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

#[cfg(test)]
mod tests;
