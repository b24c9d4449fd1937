//! The passes of each device, in the order in which the device computes them.
//!
//! - All forward, all backward: the device's stages in ascending order, each on all micro-batches; then its backward
//!   stages in descending order, each on all micro-batches (GPipe; Mobius Figure 2; SysX Figure 8).
//! - One forward, one backward: a number of forward passes to fill the pipeline, then a forward and a backward pass in
//!   turn, then the remaining backward passes (DAPPLE; Megatron-LM section 2.2 for several stages per device).
#![forbid(unsafe_code)]

use super::{Schedule, Shape, reserve, reserved};
use crate::error::Result;

/// A forward or backward pass of a stage on a micro-batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Pass {
    /// True for a backward pass, whose `stage` is a backward stage.
    pub backward: bool,
    /// The stage.
    pub stage: u32,
    /// The micro-batch.
    pub micro_batch: u32,
}

/// The passes of every device, in order.
pub fn orders(shape: &Shape) -> Result<Vec<Vec<Pass>>> {
    let mut all = reserved(shape.devices as usize)?;
    for device in 0..shape.devices {
        all.push(match shape.schedule {
            Schedule::OneForwardOneBackward => one_forward_one_backward(shape, device)?,
            _ => all_forward_all_backward(shape, device)?,
        });
    }
    Ok(all)
}

fn all_forward_all_backward(shape: &Shape, device: u32) -> Result<Vec<Pass>> {
    let (devices, last) = (shape.devices, shape.backward_stages() - 1);
    let forward = (device..shape.stages).step_by(devices as usize);
    // The device's highest backward stage is among the last `devices` ones.
    let highest = (0..devices.min(last + 1))
        .map(|back| last - back)
        .find(|stage| shape.backward_device(*stage) == device);
    let backward = highest.into_iter().flat_map(|stage| (0..=stage).rev().step_by(devices as usize));
    let stages = forward.map(|stage| (false, stage)).chain(backward.map(|stage| (true, stage)));
    let mut passes = Vec::new();
    for (backward, stage) in stages {
        reserve(&mut passes, shape.micro_batches as usize)?;
        passes.extend((0..shape.micro_batches).map(|micro_batch| Pass { backward, stage, micro_batch }));
    }
    Ok(passes)
}

/// The n-th forward pass of a device is of chunk (n mod (devices * chunks)) / devices: all chunks on one group of
/// `devices` micro-batches, then all chunks on the next group. Backward passes take the chunks in descending order.
fn one_forward_one_backward(shape: &Shape, device: u32) -> Result<Vec<Pass>> {
    let Shape { devices, micro_batches, stages, .. } = *shape;
    let chunks = stages / devices;
    let total = chunks * micro_batches;
    let pass = |number: u32, backward: bool| {
        let (group, inside) = (number / (devices * chunks), number % (devices * chunks));
        let chunk = if backward { chunks - 1 - inside / devices } else { inside / devices };
        match chunks {
            // Also for numbers of micro-batches that are not a multiple of the devices.
            1 => Pass { backward, stage: device, micro_batch: number },
            _ => Pass {
                backward,
                stage: chunk * devices + device,
                micro_batch: group * devices + inside % devices,
            },
        }
    };
    let warm_up = match chunks {
        1 => devices - 1 - device,
        _ if micro_batches == devices => total,
        _ => (devices - 1 - device) * 2 + (chunks - 1) * devices,
    };
    let warm_up = warm_up.min(total);
    let mut passes = reserved(2 * total as usize)?;
    passes.extend((0..warm_up).map(|number| pass(number, false)));
    for number in warm_up..total {
        passes.extend([pass(number, false), pass(number - warm_up, true)]);
    }
    passes.extend((total - warm_up..total).map(|number| pass(number, true)));
    Ok(passes)
}
