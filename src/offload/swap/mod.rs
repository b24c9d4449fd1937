//! The tiered update (MLP-Offload sections 3.2 to 3.4): optimizer state lives on a tier and is stepped through a few
//! buffers of host memory.
//!
//! Invariants:
//! - The tier's committed state is never overwritten. Until [`Swap::commit`] succeeds, the last commit can be restored
//!   completely after a crash, after an error, and with [`Swap::rollback`].
//! - After a failed step, only a rollback makes the state usable again: some subgroups may have been stepped.
//! - Gradients never go to the tier; only param, exp_avg and exp_avg_sq do.
//! - Before the verdict of a speculative update every replaced version of a subgroup is pinned on the tier, and no state
//!   that is only in memory changes. A skip or a redo therefore finds the state of the step before.
//! - With low bits the caller has the parameters; the tier knows nothing of them, and a step writes them.
//! - State takes 12 bytes per parameter on the tier and in memory, 2 fewer if param is split, 4 fewer with bf16 moments,
//!   and 5.87 fewer with 8-bit ones. With a split param the caller keeps the 16-bit copy that belongs to the state; a wrong copy is detected and never stepped.
//! - All memory is allocated at open, as much as [`budget::plan`] computed.
#![forbid(unsafe_code)]

mod access;
pub mod adam;
pub mod beside;
pub mod budget;
pub mod encoding;
mod extents;
pub mod master;
mod moment;
mod options;
pub mod pipeline;
mod placement;
mod slots;
mod timeline;
mod traffic;

use std::sync::Arc;

use crate::dtype::bf16;
use budget::Budget;
use encoding::{Encoding, Master, Moments};
use extents::Extents;
use pipeline::{Action, Pipeline, PipelineStats};
use slots::Slots;
use timeline::{Timeline, Work};
use traffic::{Direction, Traffic};

use crate::error::{Error, Result};
use crate::pool::transfer_buffer::TransferBuffer;
use crate::sys::promise::Promise;
use crate::tier::commit::CommitBeside;
use crate::tier::{Pin, Tier, UpdateClaim};
use crate::trace::Trace;

pub use encoding::{exported_tensors, tensors_of};
pub use moment::{MomentMut, SubgroupState};
pub use options::SwapOptions;

/// Counts since open.
#[derive(Debug, Clone, PartialEq)]
pub struct SwapStats {
    /// Subgroups read, written, and found in memory.
    pub pipeline: PipelineStats,
    /// Seconds in which no subgroup could be stepped because its data was in flight.
    pub exposed_seconds: f64,
    /// Bytes of state on each path.
    pub load: Vec<u64>,
    /// Pieces of subgroups that moved to another path.
    pub moved: u64,
}

/// The subgroups of an update.
#[derive(Debug, Clone)]
pub struct Layout {
    usual: Encoding,
    elements: Vec<u64>,
}

impl Layout {
    /// The encoding in which state is stored.
    pub fn usual(&self) -> Encoding {
        self.usual
    }

    /// True if the moments are codes of 8 bits.
    pub fn has_codes(&self) -> bool {
        self.usual.moments == Moments::Codes
    }

    /// Number of subgroups.
    pub fn len(&self) -> usize {
        self.elements.len()
    }

    /// True if there are no subgroups.
    pub fn is_empty(&self) -> bool {
        self.elements.is_empty()
    }

    /// Number of elements of a subgroup. Errors: no such subgroup.
    pub fn elements(&self, subgroup: usize) -> Result<usize> {
        match self.elements.get(subgroup) {
            Some(elements) => Ok(*elements as usize),
            None => Err(Error::invalid(
                "subgroup",
                format!("is {subgroup}, but there are {} subgroups", self.len()),
            )),
        }
    }
}

/// The tiered update of one rank: subgroups on a tier, and the host memory to step them.
#[derive(Debug)]
pub struct Swap {
    tier: Arc<Tier>,
    layout: Layout,
    budget: Budget,
    extents: Extents,
    slots: Slots,
    pipeline: Pipeline,
    traffic: Traffic,
    timeline: Timeline,
    /// The order in which subgroups are expected to arrive in an update beside the caller.
    expected: Vec<usize>,
    /// The versions that writes of an update without a verdict replaced; `None`: the update needs none.
    pins: Option<Vec<Pin>>,
    /// The error that made the state in memory invalid; cleared by a rollback.
    broken: Option<Error>,
    /// Keeps other updates off the tier, and other commits while states change.
    claim: Arc<UpdateClaim>,
}

impl Swap {
    /// Allocates the memory and defines the extents. Subgroups that the tier already holds keep their state.
    pub fn open(tier: Arc<Tier>, options: &SwapOptions) -> Result<Swap> {
        let paths = tier.paths().len();
        let budget = budget::plan(&options.subgroups, options.usual, paths, options.host_memory)?;
        let pipeline = Pipeline::new(options.subgroups.len(), budget.buffers, budget.cached)?;
        let claim = UpdateClaim::new(&tier)?;
        let slots = Slots::open(&budget, options.usual, options.backing)?;
        let traffic = Traffic::new(&tier, options)?;
        let timeline = Timeline::new(budget.buffers, options.subgroups.len())?;
        // Last: a failure before this line leaves the tier unchanged.
        let extents = Extents::define(&tier, &options.subgroups, options.usual)?;
        Ok(Swap {
            tier,
            layout: Layout { usual: options.usual, elements: options.subgroups.clone() },
            budget,
            extents,
            slots,
            pipeline,
            traffic,
            timeline,
            // Backward ends with the first layers.
            expected: (0..options.subgroups.len()).rev().collect(),
            pins: None,
            broken: None,
            claim: Arc::new(claim),
        })
    }

    /// The memory that was allocated.
    pub fn budget(&self) -> Budget {
        self.budget
    }

    /// The subgroups.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// True if every subgroup has a state.
    pub fn filled(&self) -> Result<bool> {
        for subgroup in 0..self.layout.len() {
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

    /// The last update, and what was written since: a row for each buffer, and the bytes in flight on each path.
    pub fn trace(&self) -> Trace {
        self.timeline.trace()
    }

    /// Gives every subgroup its first state: `fill` writes the state into uninitialised memory.
    pub fn fill(&mut self, fill: impl FnMut(usize, SubgroupState<'_>) -> Result<()>) -> Result<()> {
        self.ready()?;
        self.claim.change()?;
        let outcome = self.run(Source::Nothing, &mut Closure(fill));
        self.note(outcome)
    }

    /// Runs one update: each subgroup is stepped once, in the order in which the states arrive.
    pub fn update(&mut self, update: &mut dyn Update) -> Result<()> {
        self.ready()?;
        self.claim.change()?;
        let outcome = self.run(Source::Tier, update);
        self.traffic.end_round(&self.tier);
        self.note(outcome)
    }

    /// Writes dirty subgroups to the tier and makes all state durable as step number `step`, with `payload`.
    pub fn commit(&mut self, step: u64, payload: &[u8]) -> Result<()> {
        self.write_dirty()?;
        self.claim.commit(step, payload)
    }

    /// Continues a commit that began when the states were as they are now. A thread makes them durable beside the next
    /// updates, and `promise` gets the outcome. This call fails only if the states in memory were not written; the
    /// promise has its error too.
    pub fn commit_beside(
        &mut self,
        begun: CommitBeside,
        step: u64,
        payload: &[u8],
        promise: Promise<()>,
    ) -> Result<()> {
        match self.write_dirty() {
            Ok(()) => {
                // The states in memory are good without this commit: its error is that of the promise alone.
                let _ = begun.run(&extents::all(&self.tier, self.layout.len()), step, payload, promise);
                Ok(())
            }
            Err(error) => {
                drop(begun);
                promise.keep(Err(error.clone()));
                Err(error)
            }
        }
    }

    /// Writes dirty subgroups, and marks extents for removal that are older than others.
    fn write_dirty(&mut self) -> Result<()> {
        self.ready()?;
        self.pipeline.flush_dirty()?;
        let outcome = self.drive(Source::Nothing, &mut Closure(|_, _: SubgroupState<'_>| Ok(())));
        self.note(outcome)?;
        self.extents.remove_older(&self.tier)
    }

    /// Rolls back to the last commit.
    pub fn rollback(&mut self) -> Result<()> {
        self.pins = None;
        self.finish_transfers();
        self.claim.rollback()?;
        self.pipeline.forget()?;
        self.refresh_slots();
        self.extents.find(&self.tier);
        // An import may have committed other states meanwhile, on which no step is possible.
        self.broken = self.extents.check_moments(&self.tier).err();
        self.broken.clone().map_or(Ok(()), Err)
    }

    fn ready(&self) -> Result<()> {
        match &self.broken {
            None => self.claim.fresh(),
            Some(error) => Err(Error::Busy(format!("the last step failed; roll back first: {error}"))),
        }
    }

    fn note(&mut self, outcome: Result<()>) -> Result<()> {
        outcome.inspect_err(|error| {
            self.pins = None;
            self.finish_transfers();
            self.broken = Some(error.clone());
        })
    }

    fn run(&mut self, source: Source, work: &mut dyn Update) -> Result<()> {
        self.refresh_slots();
        self.pipeline.begin()?;
        self.timeline.begin();
        self.drive(source, work)
    }

    /// Runs the pipeline to its end. With `Source::Nothing` no subgroup is read: `work` fills the memory.
    fn drive(&mut self, source: Source, work: &mut dyn Update) -> Result<()> {
        loop {
            match self.advance(source, work)? {
                Advance::Acted => {}
                Advance::Waits if self.traffic.idle() => return Err(stuck()),
                Advance::Waits => self.collect(true)?,
                Advance::Done => return Ok(()),
            }
        }
    }

    /// Does what the pipeline wants next.
    fn advance(&mut self, source: Source, work: &mut dyn Update) -> Result<Advance> {
        match self.pipeline.next_action() {
            Action::Fetch { slot, .. } if source == Source::Nothing => self.pipeline.mark_filled(slot),
            Action::Fetch { subgroup, slot } => self.fetch(subgroup, slot)?,
            Action::Flush { subgroup, slot, keep } => self.flush(subgroup, slot, keep)?,
            Action::Step { subgroup, slot } => {
                let elements = self.extents.elements(subgroup);
                self.make_whole(subgroup, slot, source, work)?;
                self.timeline.start(Work::Step, slot, subgroup, Vec::new());
                work.step(subgroup, self.slots.state(slot, elements)?)?;
                self.timeline.end(slot);
                if source == Source::Nothing {
                    self.traffic.end_part();
                }
                if work.keeps_state() {
                    self.pipeline.passed(slot);
                    self.refresh_slot(slot);
                } else {
                    if self.pipeline.stays(subgroup) && !self.slots.keep(slot, elements)? {
                        self.pipeline.uncache(slot);
                    }
                    self.pipeline.stepped(slot);
                }
                self.collect(false)?;
            }
            Action::Wait => return Ok(Advance::Waits),
            Action::Done => return Ok(Advance::Done),
        }
        Ok(Advance::Acted)
    }

    /// Starts a read. A read that cannot start counts as a failed read.
    fn fetch(&mut self, subgroup: usize, slot: usize) -> Result<()> {
        self.start_fetch(subgroup, slot).inspect_err(|_| self.ended(Direction::Fetch, slot, false))
    }

    fn start_fetch(&mut self, subgroup: usize, slot: usize) -> Result<()> {
        let (extent, master, _) = self.extents.newest(&self.tier, subgroup)?;
        self.slots.set_fetched(slot, master);
        let spans = self.slots.buffers(slot, master, self.extents.elements(subgroup));
        let bytes = self.tier.extent(extent)?.blocks.iter().map(|blocks| self.bytes_of(*blocks)).collect();
        self.timeline.start(Work::Fetch, slot, subgroup, bytes);
        self.traffic.read(&self.tier, slot, extent, &spans)
    }

    /// Bytes of this number of blocks, the last of which may be short.
    fn bytes_of(&self, blocks: u32) -> u64 {
        u64::from(blocks) * self.tier.block_bytes()
    }

    /// Gives a slot its full f32 param. If the source is `Nothing`, only the memory for param. Errors: split masters,
    /// and the weights of `work` do not belong to them; this does not depend on what is cached.
    fn make_whole(&mut self, subgroup: usize, slot: usize, source: Source, work: &dyn Update) -> Result<()> {
        if self.layout.usual.master != Master::Split {
            return Ok(());
        }
        let whole = self.slots.has_master(slot);
        self.lend_master(slot)?;
        if source == Source::Nothing {
            return Ok(());
        }
        let (elements, copy) = (self.extents.elements(subgroup), work.weights(subgroup));
        let outcome = match (whole, self.slots.fetched(slot)) {
            (true, _) => self.slots.check_copy(slot, elements, copy),
            (false, Master::Split | Master::Low) => self.slots.join(slot, elements, copy),
            (false, Master::Full) => {
                self.fetch_param(subgroup, slot)?;
                self.slots.check_copy(slot, elements, copy)
            }
        };
        outcome.map_err(|error| error.within(&format!("subgroup {subgroup}, ")))
    }

    /// Reads the param of a state that could not be split, which is rare. The state was fetched without param, since
    /// the slot had no master.
    fn fetch_param(&mut self, subgroup: usize, slot: usize) -> Result<()> {
        let (extent, ..) = self.extents.newest(&self.tier, subgroup)?;
        let mut buffers = self.slots.buffers(slot, Master::Full, self.extents.elements(subgroup));
        buffers[1..].fill(TransferBuffer::empty());
        self.traffic.read(&self.tier, slot, extent, &buffers)?;
        while self.traffic.uses(slot) {
            self.collect(true)?;
        }
        Ok(())
    }

    /// Lends a master to a slot; waits if all masters are in use by writes.
    fn lend_master(&mut self, slot: usize) -> Result<()> {
        while !self.slots.lend(slot) {
            if self.traffic.idle() {
                self.refresh_slots();
                if self.slots.lend(slot) {
                    break;
                }
                let reason = "every buffer for master weights is still in use by a transfer that timed out; \
                              the device has not ended it";
                return Err(Error::Busy(reason.to_string()));
            }
            self.collect(true)?;
        }
        Ok(())
    }

    /// Starts to write a slot's state. The state stays in the slot if `keep`.
    fn flush(&mut self, subgroup: usize, slot: usize, keep: bool) -> Result<()> {
        self.start_flush(subgroup, slot, keep).inspect_err(|_| self.ended(Direction::Flush, slot, false))
    }

    fn start_flush(&mut self, subgroup: usize, slot: usize, keep: bool) -> Result<()> {
        let elements = self.extents.elements(subgroup);
        let master = self.slots.pack(slot, elements, keep)?;
        let extent = self.extents.written_as(&self.tier, subgroup, master)?;
        if let Some(pins) = &mut self.pins {
            pins.push(self.tier.pin(extent)?);
        }
        let spans = self.slots.buffers(slot, master, elements);
        let parts = self.traffic.place(subgroup, master, &self.tier)?;
        let mut bytes = vec![0; self.tier.paths().len()];
        parts.iter().for_each(|(path, blocks)| bytes[*path as usize] = self.bytes_of(*blocks));
        self.timeline.start(Work::Flush, slot, subgroup, bytes);
        self.traffic.write(&self.tier, slot, extent, &spans, parts)
    }

    fn ended(&mut self, direction: Direction, slot: usize, succeeded: bool) {
        self.timeline.end(slot);
        match direction {
            Direction::Fetch => self.pipeline.fetched(slot, succeeded),
            Direction::Flush => self.pipeline.flushed(slot, succeeded),
        }
        self.refresh_slot(slot);
    }

    fn refresh_slots(&mut self) {
        (0..self.slots.len()).for_each(|slot| self.refresh_slot(slot));
    }

    /// Quarantines a slot while an abandoned transfer may still access it. Takes the master back from a vacant slot.
    fn refresh_slot(&mut self, slot: usize) {
        self.pipeline.quarantine(slot, self.slots.in_transfer(slot));
        if self.pipeline.is_vacant(slot) {
            self.slots.take_back(slot);
        }
    }

    /// Handles all transfers that have ended; with `wait`, at least one. Returns the first error after handling them
    /// all.
    fn collect(&mut self, wait: bool) -> Result<()> {
        let mut outcome = Ok(());
        for done in self.traffic.collect_ended(&self.tier, wait) {
            self.ended(done.direction, done.slot, done.outcome.is_ok());
            outcome = outcome.and(done.outcome);
        }
        outcome
    }

    /// Waits for all transfers after an error, so that none uses the buffers any more.
    fn finish_transfers(&mut self) {
        while !self.traffic.idle() {
            // The caller already has an error to return.
            let _ = self.collect(true);
        }
    }
}

/// What an update does with each subgroup.
pub trait Update {
    /// For state with a split master: the 16-bit weights of a subgroup, as the step that made the state published them.
    /// If param must be rebuilt, this is called before the subgroup is stepped.
    fn weights(&self, _subgroup: usize) -> &[bf16] {
        &[]
    }

    /// True if the calls of `step` leave the states as they are.
    fn keeps_state(&self) -> bool {
        false
    }

    /// Changes the state of a subgroup.
    fn step(&mut self, subgroup: usize, state: SubgroupState<'_>) -> Result<()>;
}

/// An update without weights.
pub struct Closure<F>(pub F);

impl<F: FnMut(usize, SubgroupState<'_>) -> Result<()>> Update for Closure<F> {
    fn step(&mut self, subgroup: usize, state: SubgroupState<'_>) -> Result<()> {
        (self.0)(subgroup, state)
    }
}

/// Outcome of [`Swap::advance`].
#[derive(Clone, Copy, PartialEq, Eq)]
enum Advance {
    /// There may be more to do.
    Acted,
    /// The pipeline waits.
    Waits,
    /// The round is over.
    Done,
}

fn stuck() -> Error {
    let reason = "every buffer is still in use by a transfer that timed out; the device has not ended it";
    Error::Busy(reason.to_string())
}

/// Origin of the states of a round.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Source {
    /// No stored state: the update fills the memory.
    Nothing,
    /// The tier.
    Tier,
}

#[cfg(test)]
mod tests;
