//! The operations of computation, and the messages between them.
//!
//! The input of a forward stage is an activation message, unless the stage before has the same device. The checkpoint of
//! a backward stage is the input of its first unit, which the forward pass of that unit's stage has.
#![forbid(unsafe_code)]

use super::graph::{Graph, Kind, NONE, Operation};
use super::order::Pass;
use super::{Shape, Unit, filled, reserved};
use crate::error::Result;

/// The numbers of a send and of its receipt; [`NONE`] if both ends have the same device.
pub type Message = (u32, u32);

/// A time of a unit.
type Cost = fn(&Unit) -> f64;

/// The operations of all passes and messages, by stage and micro-batch.
pub struct Links {
    micro_batches: usize,
    /// The computation of each device, in order.
    pub computed: Vec<Vec<u32>>,
    forward: Vec<u32>,
    backward: Vec<u32>,
    recompute: Vec<u32>,
    activations: Vec<Message>,
    gradients: Vec<Message>,
    checkpoints: Vec<Message>,
}

impl Links {
    fn at(&self, stage: u32, micro_batch: u32) -> usize {
        stage as usize * self.micro_batches + micro_batch as usize
    }

    /// The forward pass of a stage.
    pub fn forward(&self, stage: u32, micro_batch: u32) -> u32 {
        self.forward[self.at(stage, micro_batch)]
    }

    /// The backward pass of a backward stage.
    pub fn backward(&self, stage: u32, micro_batch: u32) -> u32 {
        self.backward[self.at(stage, micro_batch)]
    }

    /// The first computation of a backward stage: its recomputation, else its backward pass.
    pub fn backward_start(&self, stage: u32, micro_batch: u32) -> u32 {
        match self.recompute[self.at(stage, micro_batch)] {
            NONE => self.backward(stage, micro_batch),
            recompute => recompute,
        }
    }

    /// The message with the input of a forward stage.
    pub fn activation(&self, stage: u32, micro_batch: u32) -> Message {
        self.activations[self.at(stage, micro_batch)]
    }

    /// The message with the gradient that a backward stage reads.
    pub fn gradient(&self, stage: u32, micro_batch: u32) -> Message {
        self.gradients[self.at(stage, micro_batch)]
    }

    /// The message with the checkpoint of a backward stage.
    pub fn checkpoint(&self, stage: u32, micro_batch: u32) -> Message {
        self.checkpoints[self.at(stage, micro_batch)]
    }
}

/// Adds the computation of all devices, and the messages.
pub fn add(shape: &Shape, units: &[Unit], orders: &[Vec<Pass>], graph: &mut Graph) -> Result<Links> {
    let micro_batches = shape.micro_batches as usize;
    let forward = shape.stages as usize * micro_batches;
    let backward = shape.backward_stages() as usize * micro_batches;
    let mut links = Links {
        micro_batches,
        computed: reserved(orders.len())?,
        forward: filled(NONE, forward)?,
        backward: filled(NONE, backward)?,
        recompute: filled(NONE, backward)?,
        activations: filled((NONE, NONE), forward)?,
        gradients: filled((NONE, NONE), backward)?,
        checkpoints: filled((NONE, NONE), backward)?,
    };
    for (device, passes) in orders.iter().enumerate() {
        let computed = add_device(shape, units, device as u32, passes, graph, &mut links)?;
        links.computed.push(computed);
    }
    let before = before_each(&links.computed, graph.operations.len())?;
    for micro_batch in 0..shape.micro_batches {
        add_activations(shape, units, micro_batch, graph, &mut links)?;
        add_gradients(shape, units, micro_batch, graph, &mut links)?;
        add_checkpoints(shape, units, micro_batch, &before, graph, &mut links)?;
    }
    Ok(links)
}

fn add_device(
    shape: &Shape,
    units: &[Unit],
    device: u32,
    passes: &[Pass],
    graph: &mut Graph,
    links: &mut Links,
) -> Result<Vec<u32>> {
    let mut computed: Vec<u32> = reserved(passes.len() * 2)?;
    for pass in passes {
        let count = if pass.backward { shape.backward_split() } else { shape.split };
        let first_unit = pass.stage * count;
        let inside = &units[first_unit as usize..][..count as usize];
        let kinds: &[(Kind, Cost)] = match (pass.backward, shape.recompute) {
            (false, _) => &[(Kind::Forward, |unit| unit.forward)],
            (true, false) => &[(Kind::Backward, |unit| unit.backward)],
            (true, true) => {
                &[(Kind::Recompute, |unit| unit.recompute), (Kind::Backward, |unit| unit.backward)]
            }
        };
        let at = links.at(pass.stage, pass.micro_batch);
        for (kind, cost) in kinds {
            let operation = Operation {
                micro_batch: pass.micro_batch,
                seconds: inside.iter().map(cost).sum(),
                ..blank(*kind, device, first_unit, count)
            };
            let last = computed.last().map(std::slice::from_ref).unwrap_or_default();
            let number = graph.add(operation, last)?;
            match kind {
                Kind::Forward => links.forward[at] = number,
                Kind::Recompute => links.recompute[at] = number,
                _ => links.backward[at] = number,
            }
            computed.push(number);
        }
    }
    Ok(computed)
}

/// An operation without a micro-batch, a peer, bytes or times.
pub fn blank(kind: Kind, device: u32, first_unit: u32, units: u32) -> Operation {
    Operation {
        kind,
        device,
        peer: NONE,
        micro_batch: NONE,
        first_unit,
        units,
        bytes: 0,
        seconds: 0.0,
        start: 0.0,
        end: 0.0,
        begins: 0,
        ends: 0,
        first_dependency: 0,
        dependencies: 0,
    }
}

/// For each operation the one that its device computes before it.
fn before_each(computed: &[Vec<u32>], operations: usize) -> Result<Vec<u32>> {
    let mut before = filled(NONE, operations)?;
    for list in computed {
        for pair in list.windows(2) {
            before[pair[1] as usize] = pair[0];
        }
    }
    Ok(before)
}

/// A send from one device to another, which takes as long as its bytes need.
fn send(
    shape: &Shape,
    kind: Kind,
    devices: (u32, u32),
    micro_batch: u32,
    stage: (u32, u32),
    bytes: u64,
) -> Operation {
    let seconds = shape.latency + shape.seconds_per_byte * bytes as f64;
    Operation { peer: devices.1, micro_batch, bytes, seconds, ..blank(kind, devices.0, stage.0, stage.1) }
}

fn add_activations(
    shape: &Shape,
    units: &[Unit],
    micro_batch: u32,
    graph: &mut Graph,
    links: &mut Links,
) -> Result<()> {
    for stage in 1..shape.stages {
        let (from, to) = (shape.forward_device(stage - 1), shape.forward_device(stage));
        let (produced, consumed) = (links.forward(stage - 1, micro_batch), links.forward(stage, micro_batch));
        let first_unit = stage * shape.split;
        if from == to {
            graph.order(produced, consumed)?;
            continue;
        }
        let bytes = units[first_unit as usize].input_bytes;
        let sent =
            send(shape, Kind::SendActivation, (from, to), micro_batch, (first_unit, shape.split), bytes);
        let message = graph.message(sent, Kind::ReceiveActivation, &[produced])?;
        graph.order(message.1, consumed)?;
        let at = links.at(stage, micro_batch);
        links.activations[at] = message;
    }
    Ok(())
}

fn add_gradients(
    shape: &Shape,
    units: &[Unit],
    micro_batch: u32,
    graph: &mut Graph,
    links: &mut Links,
) -> Result<()> {
    let split = shape.backward_split();
    for stage in (0..shape.backward_stages() - 1).rev() {
        let (from, to) = (shape.backward_device(stage + 1), shape.backward_device(stage));
        let (produced, consumed) =
            (links.backward(stage + 1, micro_batch), links.backward(stage, micro_batch));
        if from == to {
            graph.order(produced, consumed)?;
            continue;
        }
        let bytes = units[((stage + 1) * split) as usize].input_bytes;
        let sent = send(shape, Kind::SendGradient, (from, to), micro_batch, (stage * split, split), bytes);
        let message = graph.message(sent, Kind::ReceiveGradient, &[produced])?;
        graph.order(message.1, consumed)?;
        let at = links.at(stage, micro_batch);
        links.gradients[at] = message;
    }
    Ok(())
}

fn add_checkpoints(
    shape: &Shape,
    units: &[Unit],
    micro_batch: u32,
    before: &[u32],
    graph: &mut Graph,
    links: &mut Links,
) -> Result<()> {
    for stage in 0..shape.backward_stages() {
        let first_unit = stage * shape.backward_split();
        let forward_stage = first_unit / shape.split;
        let (from, to) = (shape.forward_device(forward_stage), shape.backward_device(stage));
        let produced = links.forward(forward_stage, micro_batch);
        let consumed = links.backward_start(stage, micro_batch);
        if from == to {
            graph.order(produced, consumed)?;
            continue;
        }
        let bytes = units[first_unit as usize].input_bytes;
        let sent = send(shape, Kind::SendCheckpoint, (from, to), micro_batch, (first_unit, 1), bytes);
        let late = before[consumed as usize];
        let after = [produced, late];
        let after = if shape.early_checkpoints || late == NONE { &after[..1] } else { &after };
        let message = graph.message(sent, Kind::ReceiveCheckpoint, after)?;
        graph.order(message.1, consumed)?;
        let at = links.at(stage, micro_batch);
        links.checkpoints[at] = message;
    }
    Ok(())
}
