//! Buffers on the devices: what holds memory, from the begin of which operation, to the end of which.
//!
//! | buffer | from | to the end of |
//! |---|---|---|
//! | parameters | their fetch | their last pass |
//! | input of a forward stage | its receipt, or the pass that makes it | its forward pass; its backward pass or the send of the checkpoint |
//! | checkpoint inside a stage | the forward pass | its backward pass, or its send |
//! | received checkpoint | its receipt | its backward pass |
//! | activations | recomputation; without it the forward pass | the backward pass |
//! | output or gradient that is sent | the pass that makes it | its send |
//! | gradient that a backward stage reads | its receipt, or the pass that makes it | its backward pass |
//! | accumulated gradients | the first backward pass | their offload |
#![forbid(unsafe_code)]

use super::graph::{NONE, Operation};
use super::passes::Links;
use super::residency::Residency;
use super::{Shape, Unit, filled, reserve, reserved};
use crate::error::Result;

/// Content of a buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Category {
    /// Parameters.
    Parameters = 0,
    /// Inputs of stages and units that recomputation needs.
    Checkpoints = 1,
    /// Activations that a backward pass reads.
    Activations = 2,
    /// Accumulated gradients of parameters.
    Gradients = 3,
    /// Activations and gradients in transfer between stages.
    Messages = 4,
}

/// Number of categories.
pub const CATEGORIES: usize = 5;

/// A buffer on a device.
pub struct Buffer {
    category: Category,
    bytes: u64,
    /// The operation with whose begin the buffer is allocated. It has the buffer's device.
    from: u32,
    /// The operations after which the buffer is freed; [`NONE`] for unused entries.
    users: [u32; 2],
}

/// A change of the bytes of one category on one device.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Change {
    /// The operation: an allocation with its begin, a release with its end.
    pub operation: u32,
    /// The device of the operation.
    pub device: u32,
    /// What is allocated or freed.
    pub category: Category,
    /// True if the bytes are freed at the end of the operation.
    pub freed: bool,
    /// The bytes that are allocated or freed.
    pub bytes: u64,
    /// The bytes of the category on the device afterwards.
    pub resident: u64,
}

/// The buffers of a schedule.
pub fn buffers(shape: &Shape, units: &[Unit], links: &Links, residency: &Residency) -> Result<Vec<Buffer>> {
    let mut list = List(Vec::new());
    let sum = |first: u32, count: u32, bytes: fn(&Unit) -> u64| -> u64 {
        units[first as usize..][..count as usize].iter().map(bytes).sum()
    };
    for stay in &residency.stays {
        list.add(Category::Parameters, stay.bytes, stay.fetch, [stay.last, NONE])?;
    }
    for (stage, offload) in residency.offloads.iter().enumerate() {
        let (stage, split) = (stage as u32, shape.backward_split());
        let bytes = sum(stage * split, split, |unit| unit.grad_bytes);
        list.add(Category::Gradients, bytes, links.backward(stage, 0), [*offload, NONE])?;
    }
    for micro_batch in 0..shape.micro_batches {
        for stage in 0..shape.stages {
            add_input(shape, units, links, (stage, micro_batch), &mut list)?;
        }
        for stage in 0..shape.backward_stages() {
            let split = shape.backward_split();
            add_checkpoint(shape, units, links, (stage, micro_batch), &mut list)?;
            add_gradient(shape, units, links, (stage, micro_batch), &mut list)?;
            let from = match shape.recompute {
                true => links.backward_start(stage, micro_batch),
                false => links.forward(stage, micro_batch),
            };
            let bytes = sum(stage * split, split, |unit| unit.activation_bytes);
            list.add(Category::Activations, bytes, from, [links.backward(stage, micro_batch), NONE])?;
        }
    }
    Ok(list.0)
}

struct List(Vec<Buffer>);

impl List {
    fn add(&mut self, category: Category, bytes: u64, from: u32, users: [u32; 2]) -> Result<()> {
        if bytes > 0 {
            reserve(&mut self.0, 1)?;
            self.0.push(Buffer { category, bytes, from, users });
        }
        Ok(())
    }
}

/// The input of a forward stage, and the sent output of the stage before.
fn add_input(
    shape: &Shape,
    units: &[Unit],
    links: &Links,
    (stage, micro_batch): (u32, u32),
    list: &mut List,
) -> Result<()> {
    let first_unit = stage * shape.split;
    let bytes = units[first_unit as usize].input_bytes;
    let (sent, received) = links.activation(stage, micro_batch);
    if sent != NONE {
        list.add(Category::Messages, bytes, links.forward(stage - 1, micro_batch), [sent, NONE])?;
    }
    let from = match (received, stage) {
        (NONE, 0) => links.forward(0, micro_batch),
        (NONE, _) => links.forward(stage - 1, micro_batch),
        _ => received,
    };
    let backward_stage = first_unit / shape.backward_split();
    let kept = match links.checkpoint(backward_stage, micro_batch) {
        (NONE, _) => links.backward(backward_stage, micro_batch),
        (sent, _) => sent,
    };
    let category = if shape.recompute { Category::Checkpoints } else { Category::Activations };
    list.add(category, bytes, from, [links.forward(stage, micro_batch), kept])
}

/// A checkpoint inside a forward stage, and the copy of a sent checkpoint on the device that receives it.
fn add_checkpoint(
    shape: &Shape,
    units: &[Unit],
    links: &Links,
    (stage, micro_batch): (u32, u32),
    list: &mut List,
) -> Result<()> {
    let first_unit = stage * shape.backward_split();
    let bytes = units[first_unit as usize].input_bytes;
    let (sent, received) = links.checkpoint(stage, micro_batch);
    let backward = links.backward(stage, micro_batch);
    if !first_unit.is_multiple_of(shape.split) {
        let from = links.forward(first_unit / shape.split, micro_batch);
        let user = if sent == NONE { backward } else { sent };
        list.add(Category::Checkpoints, bytes, from, [user, NONE])?;
    }
    match received {
        NONE => Ok(()),
        from => list.add(Category::Checkpoints, bytes, from, [backward, NONE]),
    }
}

/// The gradient that a backward stage reads, and the sent copy on the device that makes it.
fn add_gradient(
    shape: &Shape,
    units: &[Unit],
    links: &Links,
    (stage, micro_batch): (u32, u32),
    list: &mut List,
) -> Result<()> {
    if stage + 1 == shape.backward_stages() {
        return Ok(());
    }
    let bytes = units[((stage + 1) * shape.backward_split()) as usize].input_bytes;
    let (made, read) = (links.backward(stage + 1, micro_batch), links.backward(stage, micro_batch));
    match links.gradient(stage, micro_batch) {
        (NONE, _) => list.add(Category::Messages, bytes, made, [read, NONE]),
        (sent, received) => {
            list.add(Category::Messages, bytes, made, [sent, NONE])?;
            list.add(Category::Messages, bytes, received, [read, NONE])
        }
    }
}

/// All changes in the order of their positions. Changes of one category at one position are one change.
pub fn changes(operations: &[Operation], buffers: &[Buffer]) -> Result<Vec<Change>> {
    let mut all: Vec<(u32, Change)> = reserved(buffers.len() * 2)?;
    for buffer in buffers {
        let ends = buffer.users.iter().filter(|user| **user != NONE);
        let last = ends.copied().max_by_key(|user| operations[*user as usize].ends).unwrap_or(buffer.from);
        for (operation, freed) in [(buffer.from, false), (last, true)] {
            let Operation { device, begins, ends, .. } = operations[operation as usize];
            let position = if freed { ends } else { begins };
            let Buffer { category, bytes, .. } = *buffer;
            all.push((position, Change { operation, device, category, freed, bytes, resident: 0 }));
        }
    }
    all.sort_unstable_by_key(|(position, change)| (*position, change.category));
    let devices = operations.iter().map(|operation| operation.device as usize + 1).max().unwrap_or(0);
    let mut resident = filled([0_u64; CATEGORIES], devices)?;
    let mut changes: Vec<Change> = reserved(all.len())?;
    let mut last = None;
    for (position, change) in all {
        let now = &mut resident[change.device as usize][change.category as usize];
        *now = if change.freed { *now - change.bytes } else { *now + change.bytes };
        if last != Some((position, change.category)) {
            last = Some((position, change.category));
            changes.push(Change { bytes: 0, ..change });
        }
        let merged = changes.last_mut().expect("pushed in this or an earlier round");
        (merged.bytes, merged.resident) = (merged.bytes + change.bytes, *now);
    }
    Ok(changes)
}
