//! The costs of a schedule: times, bubble ratios, memory, messages.
//!
//! Two accountings of bubbles, both as idle time of the devices over the whole time of all devices:
//! - of the passes: from the first pass to the last (Equation 3, Figures 1 and 5);
//! - of the iteration: from the first fetch to the last optimizer step (Figures 2 and 8).
#![forbid(unsafe_code)]

use super::graph::{Kind, Operation};
use super::memory::{CATEGORIES, Change};
use super::{Shape, filled};
use crate::error::Result;

/// Predictions for a device.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Device {
    /// Seconds of passes.
    pub busy: f64,
    /// Start of the first pass.
    pub first: f64,
    /// End of the last pass.
    pub last: f64,
    /// Number of operations.
    pub operations: u64,
    /// Largest number of bytes of all categories together.
    pub peak: u64,
    /// Largest number of bytes of each category.
    pub peaks: [u64; CATEGORIES],
}

/// Predictions for an iteration.
#[derive(Debug, Clone, PartialEq)]
pub struct Summary {
    /// Seconds from the first pass to the last.
    pub passes_seconds: f64,
    /// Seconds from the first fetch to the last operation.
    pub iteration_seconds: f64,
    /// Seconds after the last pass: gradients and optimizer steps that nothing hides.
    pub exposed_seconds: f64,
    /// Idle time from the first pass to the last, as a fraction.
    pub passes_bubble_ratio: f64,
    /// Idle time in the whole iteration, as a fraction.
    pub iteration_bubble_ratio: f64,
    /// Number of operations of each kind.
    pub counts: [u64; Kind::COUNT],
    /// Bytes of the operations of each kind.
    pub bytes: [u64; Kind::COUNT],
    /// Every device.
    pub devices: Vec<Device>,
}

/// Summarises a schedule.
pub fn of(shape: &Shape, operations: &[Operation], changes: &[Change]) -> Result<Summary> {
    let mut devices = filled(Device::default(), shape.devices as usize)?;
    let (mut counts, mut bytes) = ([0; Kind::COUNT], [0; Kind::COUNT]);
    let (mut first, mut last, mut end, mut busy) = (f64::INFINITY, 0.0_f64, 0.0_f64, 0.0);
    for operation in operations {
        let device = &mut devices[operation.device as usize];
        counts[operation.kind as usize] += 1;
        bytes[operation.kind as usize] += operation.bytes;
        end = end.max(operation.end);
        device.operations += 1;
        if operation.kind.is_compute() {
            if device.busy == 0.0 && device.last == 0.0 {
                device.first = operation.start;
            }
            device.busy += operation.seconds;
            device.last = device.last.max(operation.end);
            busy += operation.seconds;
            (first, last) = (first.min(operation.start), last.max(operation.end));
        }
    }
    add_peaks(&mut devices, changes)?;
    let ratio =
        |seconds: f64| if seconds > 0.0 { 1.0 - busy / (seconds * f64::from(shape.devices)) } else { 0.0 };
    Ok(Summary {
        passes_seconds: last - first,
        iteration_seconds: end,
        exposed_seconds: end - last,
        passes_bubble_ratio: ratio(last - first),
        iteration_bubble_ratio: ratio(end),
        counts,
        bytes,
        devices,
    })
}

fn add_peaks(devices: &mut [Device], changes: &[Change]) -> Result<()> {
    let mut resident = filled([0_u64; CATEGORIES], devices.len())?;
    for change in changes {
        let (device, now) = (&mut devices[change.device as usize], &mut resident[change.device as usize]);
        now[change.category as usize] = change.resident;
        let peak = &mut device.peaks[change.category as usize];
        *peak = (*peak).max(change.resident);
        device.peak = device.peak.max(now.iter().sum());
    }
    Ok(())
}
