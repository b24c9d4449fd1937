//! Schedules of pipeline parallelism with offloaded parameters (SysX section 3): the operations of each device, their
//! times, bubbles, memory and messages.
//!
//! A model is a list of units. A forward stage has `split` units (the paper's d). A backward stage has one unit if the
//! schedule is decoupled, else the units of its forward stage. A parameter set is the units of one stage.
//!
//! Invariants:
//! - A device computes its passes in the order of [`order`]. It waits for missing data, and never changes the order.
//! - An operation begins after all its dependencies have ended. The positions of begins and ends are a total order that
//!   respects all dependencies. A device that follows its part of this order cannot deadlock.
//! - A receive begins and ends with its send. Each receive has one send.
//!
//! | file | holds |
//! |---|---|
//! | `order` | the passes of each device, in order |
//! | `graph` | operations and dependencies, as a growing list |
//! | `passes` | the operations of computation and of messages |
//! | `residency` | which parameters are on a device when; fetch, offload and optimizer operations |
//! | `simulate` | start, end and position of every operation |
//! | `memory` | buffers, and the bytes on each device after every change |
//! | `summary` | bubble ratios, peaks and counts |
//! | `closed` | the closed forms of bubbles, time and rollback |
//! | `svg` | the timeline as a picture |
#![forbid(unsafe_code)]

pub mod closed;
pub mod graph;
pub mod memory;
pub mod order;
mod passes;
mod residency;
mod simulate;
pub mod summary;
pub mod svg;
#[cfg(test)]
mod tests;

use super::check;
use crate::error::{Error, Result};
use closed::Closed;
use graph::{Graph, Operation};
use memory::Change;
use summary::Summary;

/// Maximal number of devices.
const MAX_DEVICES: u32 = 1 << 12;
/// Maximal number of passes: forward and backward passes of all stages on all micro-batches.
const MAX_PASSES: u64 = 1 << 20;

/// The order of the passes on the devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Schedule {
    /// All forward passes, then all backward passes. With more stages than devices it is interleaved, as in Mobius.
    AllForwardAllBackward,
    /// One forward, one backward. With more stages than devices it is Megatron's interleaved schedule.
    OneForwardOneBackward,
    /// SysX: all forward passes, then the backward passes in fine-grained stages, on the device that is free next.
    Decoupled,
}

/// The pipeline: its devices, stages and rules.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Shape {
    /// The order of the passes.
    pub schedule: Schedule,
    /// Number of devices, the paper's N_g.
    pub devices: u32,
    /// Number of micro-batches, N_m.
    pub micro_batches: u32,
    /// Number of forward stages, N_sf.
    pub stages: u32,
    /// Units per forward stage, d. N_sb is `stages * split` if the schedule is decoupled.
    pub split: u32,
    /// Number of parameter sets that a device has room for. The next one is fetched while the present one computes.
    pub slots: u32,
    /// True: a forward pass keeps checkpoints only, and the backward pass recomputes the activations.
    pub recompute: bool,
    /// True: a checkpoint is sent after its forward pass. False: right before the backward pass that needs it.
    pub early_checkpoints: bool,
    /// True: a stage's optimizer begins with its own gradients. False: when all gradients are in host memory.
    pub async_optimizer: bool,
    /// Time of a message, in seconds.
    pub latency: f64,
    /// Further time of a message per byte, in seconds.
    pub seconds_per_byte: f64,
}

/// Costs of a unit. Times are in seconds; passes and activations are those of one micro-batch.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Unit {
    /// Forward pass.
    pub forward: f64,
    /// Backward pass.
    pub backward: f64,
    /// Recomputation before the backward pass.
    pub recompute: f64,
    /// Transfer of the parameters to a device.
    pub fetch: f64,
    /// Transfer of the gradients to host memory.
    pub offload: f64,
    /// Optimizer step on the CPU.
    pub optimizer: f64,
    /// Bytes of the parameters.
    pub param_bytes: u64,
    /// Bytes of the gradients.
    pub grad_bytes: u64,
    /// Bytes of the activations that a backward pass reads.
    pub activation_bytes: u64,
    /// Bytes of the input, which is the output of the unit before.
    pub input_bytes: u64,
}

impl Shape {
    /// Number of units.
    pub fn units(&self) -> u32 {
        self.stages * self.split
    }

    /// Units of a backward stage.
    pub fn backward_split(&self) -> u32 {
        if self.schedule == Schedule::Decoupled { 1 } else { self.split }
    }

    /// Number of backward stages, the paper's N_sb.
    pub fn backward_stages(&self) -> u32 {
        self.units() / self.backward_split()
    }

    /// The device of a forward stage.
    pub fn forward_device(&self, stage: u32) -> u32 {
        stage % self.devices
    }

    /// The device of a backward stage. Decoupled stages continue with the device after that of the last forward stage.
    pub fn backward_device(&self, stage: u32) -> u32 {
        match self.schedule {
            Schedule::Decoupled => (self.stages + (self.backward_stages() - 1 - stage)) % self.devices,
            _ => stage % self.devices,
        }
    }

    /// Returns an error if the schedule is not possible, or has too many passes.
    pub fn check(&self) -> Result<()> {
        let refuse = |name: &'static str, reason: String| Err(Error::invalid(name, reason));
        if !(1..=MAX_DEVICES).contains(&self.devices) {
            return refuse("devices", format!("{} is not between 1 and {MAX_DEVICES}", self.devices));
        }
        for (name, value) in [
            ("micro_batches", self.micro_batches),
            ("stages", self.stages),
            ("split", self.split),
            ("slots", self.slots),
        ] {
            if value == 0 {
                return refuse(name, "is 0, but must be at least 1".to_string());
            }
        }
        let units = u64::from(self.stages) * u64::from(self.split);
        let passes = u128::from(u64::from(self.stages) + units) * u128::from(self.micro_batches);
        if passes > u128::from(MAX_PASSES) {
            return refuse(
                "stages",
                format!(
                    "give {passes} passes with {} micro-batches, but the limit is {MAX_PASSES}",
                    self.micro_batches
                ),
            );
        }
        if self.schedule == Schedule::Decoupled && !self.recompute {
            return refuse(
                "recompute",
                "is 0, but a decoupled schedule recomputes: activations stay on the device of the forward pass".into(),
            );
        }
        if self.schedule == Schedule::OneForwardOneBackward {
            self.check_one_forward_one_backward()?;
        }
        check::not_negative("latency", self.latency)?;
        check::not_negative("seconds_per_byte", self.seconds_per_byte)
    }

    fn check_one_forward_one_backward(&self) -> Result<()> {
        let Shape { devices, micro_batches, stages, .. } = self;
        if stages % devices != 0 {
            let reason =
                format!("{stages} is not a multiple of {devices} devices, as one-forward-one-backward needs");
            return Err(Error::invalid("stages", reason));
        }
        if stages != devices && micro_batches % devices != 0 {
            let reason = format!(
                "{micro_batches} is not a multiple of {devices} devices, as interleaved one-forward-one-backward needs"
            );
            return Err(Error::invalid("micro_batches", reason));
        }
        Ok(())
    }
}

impl Unit {
    /// Returns an error if a time is negative or not finite, or if bytes could overflow a sum.
    pub fn check(&self) -> Result<()> {
        check::not_negative("forward", self.forward)?;
        check::not_negative("backward", self.backward)?;
        check::not_negative("recompute", self.recompute)?;
        check::not_negative("fetch", self.fetch)?;
        check::not_negative("offload", self.offload)?;
        check::not_negative("optimizer", self.optimizer)?;
        for (name, bytes) in [
            ("param_bytes", self.param_bytes),
            ("grad_bytes", self.grad_bytes),
            ("activation_bytes", self.activation_bytes),
            ("input_bytes", self.input_bytes),
        ] {
            if bytes >> 40 != 0 {
                return Err(Error::invalid(name, format!("is {bytes}, but the limit is 2^40 - 1")));
            }
        }
        Ok(())
    }
}

/// A schedule with all that is predicted for it.
#[derive(Debug, Clone, PartialEq)]
pub struct Plan {
    /// The shape that the plan is for.
    pub shape: Shape,
    /// All operations, by device, and for each device in the order in which they begin.
    pub operations: Vec<Operation>,
    /// The dependencies of all operations; each operation has a range of them.
    pub dependencies: Vec<u32>,
    /// Every change of the bytes on a device, in the order of the changes.
    pub changes: Vec<Change>,
    /// Times, bubble ratios, peaks and counts.
    pub summary: Summary,
    /// Times by the closed form, if all units cost the same, and neither transfers, messages nor recomputation take time.
    pub closed: Option<Closed>,
}

/// Plans a pipeline. `units` has the costs of each unit, or of all units if it has one entry.
pub fn plan(shape: &Shape, units: &[Unit]) -> Result<Plan> {
    shape.check()?;
    let units = all_units(shape, units)?;
    let orders = order::orders(shape)?;
    let mut graph = Graph::default();
    let links = passes::add(shape, &units, &orders, &mut graph)?;
    let residency = residency::add(shape, &units, &links, &mut graph)?;
    let mut schedule = simulate::run(shape, graph)?;
    let buffers = memory::buffers(shape, &units, &links, &residency)?;
    let mut changes = memory::changes(&schedule.operations, &buffers)?;
    schedule.sort_by_device(&mut changes)?;
    let summary = summary::of(shape, &schedule.operations, &changes)?;
    if !(summary.iteration_seconds * f64::from(shape.devices)).is_finite() {
        let reason =
            "the times of all devices add up to more than a double holds; pass times in a larger unit";
        return Err(Error::invalid("units", reason.to_string()));
    }
    let (operations, dependencies) = (schedule.operations, schedule.dependencies);
    let closed = closed_form(shape, &units);
    Ok(Plan { shape: *shape, operations, dependencies, changes, summary, closed })
}

fn closed_form(shape: &Shape, units: &[Unit]) -> Option<Closed> {
    let Unit { forward, backward, recompute, .. } = units[0];
    let same = |unit: &Unit| (unit.forward, unit.backward, unit.recompute) == (forward, backward, recompute);
    let in_time = |unit: &Unit| unit.fetch == 0.0 && shape.latency == 0.0 && shape.seconds_per_byte == 0.0;
    if !units.iter().all(|unit| same(unit) && in_time(unit)) {
        return None;
    }
    // A recomputation needs no gradient, and fills idle time before the backward pass: no closed form is known then.
    if shape.recompute && recompute > 0.0 {
        return None;
    }
    closed::passes(shape, forward * f64::from(shape.split), backward * f64::from(shape.backward_split()))
}

fn all_units(shape: &Shape, units: &[Unit]) -> Result<Vec<Unit>> {
    let count = shape.units() as usize;
    if units.len() != 1 && units.len() != count {
        let reason = format!("is {}, but must be 1 or the number of units, {count}", units.len());
        return Err(Error::invalid("unit_count", reason));
    }
    for (index, unit) in units.iter().enumerate() {
        unit.check().map_err(|error| error.within(&format!("units[{index}].")))?;
    }
    let mut all = reserved(count)?;
    all.extend((0..count).map(|index| units[index % units.len()]));
    Ok(all)
}

/// An empty vector with room for `count` values.
fn reserved<T>(count: usize) -> Result<Vec<T>> {
    let mut values = Vec::new();
    reserve(&mut values, count)?;
    Ok(values)
}

/// Makes room for `more` further values.
fn reserve<T>(values: &mut Vec<T>, more: usize) -> Result<()> {
    values.try_reserve(more).map_err(|_| Error::OutOfMemory {
        what: "planning a pipeline",
        reason: format!("out of memory for {more} entries of {} bytes", size_of::<T>()),
    })
}

/// A vector of `count` copies of a value.
fn filled<T: Clone>(value: T, count: usize) -> Result<Vec<T>> {
    let mut values = reserved(count)?;
    values.resize(count, value);
    Ok(values)
}
