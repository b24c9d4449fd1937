//! The parts of a planned pipeline: operations, changes of memory, predictions, a picture.

use std::ffi::c_char;

use super::pipeline::spw_pipeline;
use crate::capi::prelude::*;
use spillway_planner::pipeline::graph::Kind;
use spillway_planner::pipeline::{Plan, svg};

/// Kind of an operation. Passed as `uint32_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub enum spw_pipeline_kind {
    /// Forward pass of a stage.
    SPW_PIPELINE_KIND_FORWARD = 0,
    /// Backward pass of a stage.
    SPW_PIPELINE_KIND_BACKWARD = 1,
    /// Computing the activations of a backward stage again, from its checkpoint.
    SPW_PIPELINE_KIND_RECOMPUTE = 2,
    /// Transfer of parameters to the device.
    SPW_PIPELINE_KIND_FETCH = 3,
    /// Transfer of accumulated gradients to host memory.
    SPW_PIPELINE_KIND_OFFLOAD = 4,
    /// Optimizer step on the CPU.
    SPW_PIPELINE_KIND_OPTIMIZE = 5,
    /// Sending the output of a forward stage to the device of the next stage.
    SPW_PIPELINE_KIND_SEND_ACTIVATION = 6,
    /// Its receipt.
    SPW_PIPELINE_KIND_RECEIVE_ACTIVATION = 7,
    /// Sending the gradient of a backward stage's input to the device of the stage before.
    SPW_PIPELINE_KIND_SEND_GRADIENT = 8,
    /// Its receipt.
    SPW_PIPELINE_KIND_RECEIVE_GRADIENT = 9,
    /// Sending the input of a unit to the device of its backward pass.
    SPW_PIPELINE_KIND_SEND_CHECKPOINT = 10,
    /// Its receipt.
    SPW_PIPELINE_KIND_RECEIVE_CHECKPOINT = 11,
    /// Agreement of all devices that all gradients are finite: before the optimizers, or after asynchronous ones.
    SPW_PIPELINE_KIND_VALIDATE = 12,
}

/// Content of memory on a device. Passed as `uint32_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub enum spw_pipeline_memory {
    /// Parameters.
    SPW_PIPELINE_MEMORY_PARAMETERS = 0,
    /// Inputs of stages and units that recomputation needs.
    SPW_PIPELINE_MEMORY_CHECKPOINTS = 1,
    /// Activations that a backward pass reads.
    SPW_PIPELINE_MEMORY_ACTIVATIONS = 2,
    /// Accumulated gradients of parameters.
    SPW_PIPELINE_MEMORY_GRADIENTS = 3,
    /// Activations and gradients in transfer between stages.
    SPW_PIPELINE_MEMORY_MESSAGES = 4,
}

c_struct! { first 152;
/// Predictions for an iteration. Two accountings of bubbles: from the first pass to the last (SysX Equation 3), and from
/// the first fetch to the last optimizer step (Figures 2 and 8).
pub struct spw_pipeline_result {
    /// 0
    pub reserved: u32,
    /// Seconds from the first pass to the last.
    pub passes_seconds: f64,
    /// Seconds from the first fetch to the last operation.
    pub iteration_seconds: f64,
    /// Seconds after the last pass.
    pub exposed_seconds: f64,
    /// Idle time of the devices from the first pass to the last, as a fraction.
    pub passes_bubble_ratio: f64,
    /// Idle time of the devices in the whole iteration, as a fraction.
    pub iteration_bubble_ratio: f64,
    /// The same as passes_bubble_ratio by the closed form. NaN if none is known: it needs units of equal cost whose fetches,
    /// messages and recomputations take no time.
    pub closed_bubble_ratio: f64,
    /// Number of operations.
    pub operations: u64,
    /// Number of dependencies of all operations.
    pub dependencies: u64,
    /// Number of changes of memory.
    pub changes: u64,
    /// Number of fetches of parameters.
    pub fetches: u64,
    /// Their bytes.
    pub fetched_bytes: u64,
    /// Bytes of offloaded gradients.
    pub offloaded_bytes: u64,
    /// Number of sent activations.
    pub activations: u64,
    /// Their bytes.
    pub activation_bytes: u64,
    /// Number of sent gradients.
    pub gradients: u64,
    /// Their bytes.
    pub gradient_bytes: u64,
    /// Number of sent checkpoints.
    pub checkpoints: u64,
    /// Their bytes.
    pub checkpoint_bytes: u64,
}
}

c_struct! { first 72;
/// An operation of a device. The positions of all begins and ends are one total order, which respects the dependencies.
/// A receipt begins and ends right behind its send.
pub struct spw_pipeline_operation {
    /// An `spw_pipeline_kind`.
    pub kind: u32,
    /// The device.
    pub device: u32,
    /// The other device of a message, else UINT32_MAX.
    pub peer: u32,
    /// The micro-batch; UINT32_MAX for parameters, accumulated gradients, optimizers and validations.
    pub micro_batch: u32,
    /// First unit of the operation's stage. For a message, the first unit of the stage that receives.
    pub first_unit: u32,
    /// Number of units of that stage; 1 for a checkpoint.
    pub units: u32,
    /// Position of the begin.
    pub begins: u32,
    /// Position of the end.
    pub ends: u32,
    /// Number of dependencies.
    pub dependencies: u32,
    /// Its first dependency in the list of `spw_pipeline_get_dependencies`.
    pub first_dependency: u64,
    /// Bytes of a transfer or message.
    pub bytes: u64,
    /// Seconds from the start of the iteration to the begin.
    pub start: f64,
    /// Seconds from the start of the iteration to the end.
    pub end: f64,
}
}

c_struct! { first 40;
/// A change of the bytes of one kind on one device: an allocation with the begin of an operation, or a release with the
/// end of one.
pub struct spw_pipeline_change {
    /// Number of the operation.
    pub operation: u32,
    /// Its device.
    pub device: u32,
    /// An `spw_pipeline_memory`.
    pub memory: u32,
    /// 1: freed at the end of the operation. 0: allocated at its begin.
    pub freed: u32,
    /// 0
    pub reserved: u32,
    /// The bytes that are allocated or freed.
    pub bytes: u64,
    /// The bytes of this kind on the device afterwards.
    pub resident: u64,
}
}

c_struct! { first 88;
/// Predictions for a device.
pub struct spw_pipeline_device {
    /// 0
    pub reserved: u32,
    /// Seconds of passes.
    pub busy: f64,
    /// Seconds from the start of the iteration to the first pass.
    pub first: f64,
    /// Seconds from the start of the iteration to the end of the last pass.
    pub last: f64,
    /// Number of operations.
    pub operations: u64,
    /// Largest number of bytes at a time.
    pub peak_bytes: u64,
    /// Largest number of bytes of parameters.
    pub parameters: u64,
    /// Largest number of bytes of checkpoints.
    pub checkpoints: u64,
    /// Largest number of bytes of activations.
    pub activations: u64,
    /// Largest number of bytes of accumulated gradients.
    pub gradients: u64,
    /// Largest number of bytes in transfer between stages.
    pub messages: u64,
}
}

/// Writes the predictions for an iteration.
#[unsafe(no_mangle)]
pub extern "C" fn spw_pipeline_get_result(
    pipeline: Option<&spw_pipeline>,
    result_out: Out<spw_pipeline_result>,
) -> spw_status {
    guard(|| {
        let result = result_of(handle::get(pipeline)?.plan());
        result_out.write(&result, "result_out")
    })
}

/// Writes the predictions for a device.
#[unsafe(no_mangle)]
pub extern "C" fn spw_pipeline_get_device(
    pipeline: Option<&spw_pipeline>,
    device: u32,
    device_out: Out<spw_pipeline_device>,
) -> spw_status {
    guard(|| {
        let devices = &handle::get(pipeline)?.plan().summary.devices;
        let found = devices.get(device as usize).ok_or_else(|| {
            Error::invalid("device", format!("is {device}, but the pipeline has {} devices", devices.len()))
        })?;
        let [parameters, checkpoints, activations, gradients, messages] = found.peaks;
        let values = report!(spw_pipeline_device from found {
            busy, first, last, operations
        } with {
            reserved: 0, peak_bytes: found.peak, parameters, checkpoints, activations, gradients, messages
        });
        device_out.write(&values, "device_out")
    })
}

/// Writes `count` operations, from number `first` on. They are sorted by device, and for each device in the order in which
/// they begin. Only the first struct needs its `struct_size`; the call writes the others.
#[unsafe(no_mangle)]
pub extern "C" fn spw_pipeline_get_operations(
    pipeline: Option<&spw_pipeline>,
    first: u64,
    count: u64,
    operations_out: Out<spw_pipeline_operation>,
) -> spw_status {
    guard(|| {
        let found = part(&handle::get(pipeline)?.plan().operations, first, count)?;
        let values = found.iter().map(|one| {
            report!(spw_pipeline_operation from one {
                device, peer, micro_batch, first_unit, units, begins, ends, dependencies,
                first_dependency, bytes, start, end
            } with {
                kind: one.kind as u32
            })
        });
        operations_out.write_all(values, "operations_out")
    })
}

/// Writes `count` changes of memory, from number `first` on, in the order in which they happen. Only the first struct
/// needs its `struct_size`; the call writes the others.
#[unsafe(no_mangle)]
pub extern "C" fn spw_pipeline_get_changes(
    pipeline: Option<&spw_pipeline>,
    first: u64,
    count: u64,
    changes_out: Out<spw_pipeline_change>,
) -> spw_status {
    guard(|| {
        let found = part(&handle::get(pipeline)?.plan().changes, first, count)?;
        let values = found.iter().map(|one| {
            report!(spw_pipeline_change from one {
                operation, device, freed, bytes, resident
            } with {
                memory: one.category as u32, reserved: 0
            })
        });
        changes_out.write_all(values, "changes_out")
    })
}

/// Writes the numbers of operations that others depend on: `count` entries of the list, from entry `first` on. Each
/// operation has a range of this list.
#[unsafe(no_mangle)]
pub extern "C" fn spw_pipeline_get_dependencies(
    pipeline: Option<&spw_pipeline>,
    first: u64,
    count: u64,
    dependencies_out: Out<u32>,
) -> spw_status {
    guard(|| {
        let found = part(&handle::get(pipeline)?.plan().dependencies, first, count)?;
        if !found.is_empty() {
            dependencies_out.required("dependencies_out")?;
        }
        dependencies_out.put_all(found.iter().copied());
        Ok(())
    })
}

/// Draws the timeline as an SVG picture of `width` pixels, from 200 to 20000. A plan with more than 16384 operations that
/// take time is refused.
#[unsafe(no_mangle)]
pub extern "C" fn spw_pipeline_get_svg(
    pipeline: Option<&spw_pipeline>,
    width: u32,
    text_out: Out<c_char>,
    size: u64,
    needed_out: Out<u64>,
) -> spw_status {
    guard(|| {
        let text = svg::draw(handle::get(pipeline)?.plan(), width)?;
        text_out.put_text(&text, size, needed_out)
    })
}

fn result_of(plan: &Plan) -> spw_pipeline_result {
    let found = &plan.summary;
    let (count, bytes) = (|kind: Kind| found.counts[kind as usize], |kind: Kind| found.bytes[kind as usize]);
    report!(spw_pipeline_result from found {
        passes_seconds, iteration_seconds, exposed_seconds, passes_bubble_ratio, iteration_bubble_ratio
    } with {
        reserved: 0, closed_bubble_ratio: plan.closed.map_or(f64::NAN, |closed| closed.bubble_ratio()),
        operations: plan.operations.len() as u64, dependencies: plan.dependencies.len() as u64,
        changes: plan.changes.len() as u64, fetches: count(Kind::Fetch), fetched_bytes: bytes(Kind::Fetch),
        offloaded_bytes: bytes(Kind::Offload), activations: count(Kind::SendActivation),
        activation_bytes: bytes(Kind::SendActivation), gradients: count(Kind::SendGradient),
        gradient_bytes: bytes(Kind::SendGradient), checkpoints: count(Kind::SendCheckpoint),
        checkpoint_bytes: bytes(Kind::SendCheckpoint)
    })
}

fn part<T>(all: &[T], first: u64, count: u64) -> Result<&[T]> {
    let end = first.checked_add(count).filter(|end| *end <= all.len() as u64);
    match end {
        Some(end) => Ok(&all[first as usize..end as usize]),
        None => Err(Error::invalid(
            "count",
            format!("is {count} from number {first} on, but there are {} in all", all.len()),
        )),
    }
}
