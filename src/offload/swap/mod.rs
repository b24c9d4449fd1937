//! The tiered update (MLP-Offload sections 3.2 to 3.4): optimizer state on a tier, stepped through few buffers of host
//! memory.
//!
//! Invariants:
//! - The tier's committed state is never written to: until [`Swap::commit`] succeeds, a crash, an error or
//!   [`Swap::roll_back`] leads back to the last commit, whole.
//! - A step that failed is taken up again by rolling back, by nothing else: some subgroups may have been stepped.
//! - No gradient ever goes to the tier; only param, exp_avg and exp_avg_sq do, 12 bytes a parameter.
//! - All memory is taken at open, and it is what [`budget::plan`] said.
#![forbid(unsafe_code)]

mod access;
pub mod budget;
mod lanes;
pub mod master;
pub mod pipeline;
mod traffic;

use std::sync::Arc;
use std::time::Duration;

use budget::{Budget, STREAMS, stream_bytes};
use lanes::Lanes;
use pipeline::{Action, Pipeline, PipelineStats};
use traffic::{Direction, Traffic};

use crate::error::{Error, Result};
use crate::pool::buffer::Buffer;
use crate::pool::region::Backing;
use crate::sys::span::Span;
use crate::tier::Tier;

/// Settings of a tiered update.
#[derive(Debug, Clone)]
pub struct SwapOptions {
    /// Elements of each subgroup.
    pub subgroups: Vec<u64>,
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

/// The state of one subgroup in host memory.
#[derive(Debug)]
pub struct State<'a> {
    /// Master weights.
    pub param: &'a mut [f32],
    /// First moment.
    pub exp_avg: &'a mut [f32],
    /// Second moment.
    pub exp_avg_sq: &'a mut [f32],
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
    budget: Budget,
    /// Elements, and the extent that holds the state.
    subgroups: Vec<(usize, u32)>,
    buffers: Vec<Buffer>,
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
        let budget = budget::plan(&options.subgroups, paths, options.host_bytes)?;
        let pipeline = Pipeline::new(options.subgroups.len(), budget.buffers, budget.cached)?;
        let mut subgroups = Vec::with_capacity(options.subgroups.len());
        for (index, elements) in options.subgroups.iter().enumerate() {
            let extent = tier.define(&format!("subgroup-{index:06}"), &[elements * 4; STREAMS])?;
            subgroups.push((*elements as usize, extent));
        }
        let buffers = (0..budget.buffers)
            .map(|_| Buffer::open(budget.buffer_bytes as usize, options.backing))
            .collect::<Result<_>>()?;
        let extents: Vec<u32> = subgroups.iter().map(|(_, extent)| *extent).collect();
        let traffic = Traffic::new(&tier, &extents, options)?;
        let lanes = Lanes::new(&tier, options)?;
        Ok(Swap { tier, budget, subgroups, buffers, pipeline, traffic, lanes, broken: None })
    }

    /// What was taken.
    pub fn budget(&self) -> Budget {
        self.budget
    }

    /// Number of subgroups.
    pub fn len(&self) -> usize {
        self.subgroups.len()
    }

    /// True for no subgroups.
    pub fn is_empty(&self) -> bool {
        self.subgroups.is_empty()
    }

    /// Elements of a subgroup.
    pub fn elements(&self, subgroup: usize) -> Result<usize> {
        self.subgroups.get(subgroup).map(|(elements, _)| *elements).ok_or_else(|| self.unknown(subgroup))
    }

    fn unknown(&self, subgroup: usize) -> Error {
        Error::invalid("subgroup", format!("{subgroup} of {}", self.len()))
    }

    /// True if every subgroup has a state.
    pub fn filled(&self) -> Result<bool> {
        for (_, extent) in &self.subgroups {
            if self.tier.extent(*extent)?.generation == 0 {
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
        let outcome = self.run(true, &mut fill);
        self.note(outcome)
    }

    /// One update: `step` is called once for each subgroup, in the order in which their states arrive.
    pub fn step(&mut self, mut step: impl FnMut(usize, State<'_>) -> Result<()>) -> Result<()> {
        self.ready()?;
        let outcome = self.run(false, &mut step);
        self.traffic.end_round(&self.tier);
        self.note(outcome)
    }

    /// Writes what is newer in memory, and makes all of it durable as `step`.
    pub fn commit(&mut self, step: u64, payload: &[u8]) -> Result<()> {
        self.ready()?;
        self.pipeline.settle()?;
        let outcome = self.drive(false, &mut |_, _| Ok(()));
        self.note(outcome)?;
        self.tier.commit(step, payload)
    }

    /// Goes back to the last commit.
    pub fn roll_back(&mut self) -> Result<()> {
        self.finish_transfers();
        self.tier.roll_back()?;
        self.pipeline.forget()?;
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
        self.lanes.release_all();
        outcome.inspect_err(|error| {
            self.finish_transfers();
            self.broken = Some(error.clone());
        })
    }

    fn run(&mut self, blank: bool, work: Work) -> Result<()> {
        self.pipeline.begin()?;
        self.drive(blank, work)
    }

    /// Runs the pipeline to its end. With `blank`, nothing is read: the work fills what it gets.
    fn drive(&mut self, blank: bool, work: Work) -> Result<()> {
        loop {
            let (homes, lanes, subgroups) = (&self.traffic, &mut self.lanes, &self.subgroups);
            let action = self
                .pipeline
                .next(|waiting| lanes.choose(waiting, |subgroup| homes.paths_of(subgroups[subgroup].1)));
            match action {
                Action::Fetch { slot, .. } if blank => self.pipeline.fetched(slot, true),
                Action::Fetch { subgroup, slot } => self.start(Direction::Fetch, subgroup, slot)?,
                Action::Flush { subgroup, slot } => self.start(Direction::Flush, subgroup, slot)?,
                Action::Step { subgroup, slot } => {
                    let state = state_in(&mut self.buffers[slot], self.subgroups[subgroup].0)?;
                    work(subgroup, state)?;
                    self.pipeline.stepped(slot);
                    self.collect(false)?;
                }
                Action::Wait => self.collect(true)?,
                Action::Done => return Ok(()),
            }
        }
    }

    fn start(&mut self, direction: Direction, subgroup: usize, slot: usize) -> Result<()> {
        let (elements, extent) = self.subgroups[subgroup];
        let spans = spans_of(self.buffers[slot].span(), elements);
        let paths = match direction {
            Direction::Fetch => self.traffic.paths_of(extent),
            Direction::Flush => self.traffic.place(subgroup, &self.tier)?,
        };
        while !self.lanes.enter(&paths)? {
            self.collect(true)?;
        }
        self.traffic.start(&self.tier, direction, subgroup, slot, extent, &spans)
    }

    /// Takes in transfers that are over; waits for one, if `wait`.
    fn collect(&mut self, wait: bool) -> Result<()> {
        for done in self.traffic.over(&self.tier, wait) {
            let well = done.outcome.is_ok();
            match done.direction {
                Direction::Fetch => self.pipeline.fetched(done.slot, well),
                Direction::Flush => self.pipeline.flushed(done.slot, well),
            }
            self.lanes.leave(&done.paths);
            done.outcome?;
        }
        Ok(())
    }

    /// After an error: nothing may use the buffers any more.
    fn finish_transfers(&mut self) {
        while !self.traffic.idle() {
            for done in self.traffic.over(&self.tier, true) {
                let well = done.outcome.is_ok();
                match done.direction {
                    Direction::Fetch => self.pipeline.fetched(done.slot, well),
                    Direction::Flush => self.pipeline.flushed(done.slot, well),
                }
                self.lanes.leave(&done.paths);
            }
        }
    }
}

type Work<'a> = &'a mut dyn FnMut(usize, State<'_>) -> Result<()>;

/// Where the streams of a subgroup lie in a buffer.
fn spans_of(buffer: Span, elements: usize) -> [Span; STREAMS] {
    let stride = stream_bytes(elements as u64).unwrap_or(0) as usize;
    std::array::from_fn(|stream| buffer.part(stream * stride, elements * 4))
}

fn state_in(buffer: &mut Buffer, elements: usize) -> Result<State<'_>> {
    let stride = stream_bytes(elements as u64).unwrap_or(0) as usize / 4;
    let (param, rest) = buffer.floats()?.split_at_mut(stride);
    let (exp_avg, exp_avg_sq) = rest.split_at_mut(stride);
    Ok(State {
        param: &mut param[..elements],
        exp_avg: &mut exp_avg[..elements],
        exp_avg_sq: &mut exp_avg_sq[..elements],
    })
}

#[cfg(test)]
mod tests;
