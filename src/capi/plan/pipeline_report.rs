//! The parts of a planned pipeline: operations, changes of memory, predictions, a picture.
#![allow(non_camel_case_types)]

use std::ffi::c_char;

use super::pipeline::spw_pipeline;
use crate::capi::abi_struct::{self, AbiStruct, c_struct};
use crate::capi::base::spw_status;
use crate::capi::guard::guard;
use crate::capi::handle;
use crate::capi::output::{self, required};
use crate::error::{Error, Result};
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
    /// `sizeof(spw_pipeline_result)`
    pub struct_size: u32,
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
    /// `sizeof(spw_pipeline_operation)`
    pub struct_size: u32,
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
    /// `sizeof(spw_pipeline_change)`
    pub struct_size: u32,
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
    /// `sizeof(spw_pipeline_device)`
    pub struct_size: u32,
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
///
/// # Safety
/// `result_out` points to a struct of `struct_size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_pipeline_get_result(
    pipeline: Option<&spw_pipeline>,
    result_out: *mut spw_pipeline_result,
) -> spw_status {
    guard(|| {
        let result = result_of(handle::get(pipeline)?.plan());
        // SAFETY: the caller meets the callee's requirements.
        unsafe { abi_struct::write(&result, result_out, "result_out") }
    })
}

/// Writes the predictions for a device.
///
/// # Safety
/// `device_out` points to a struct of `struct_size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_pipeline_get_device(
    pipeline: Option<&spw_pipeline>,
    device: u32,
    device_out: *mut spw_pipeline_device,
) -> spw_status {
    guard(|| {
        let devices = &handle::get(pipeline)?.plan().summary.devices;
        let found = devices.get(device as usize).ok_or_else(|| {
            Error::invalid("device", format!("is {device}, but the pipeline has {} devices", devices.len()))
        })?;
        let [parameters, checkpoints, activations, gradients, messages] = found.peaks;
        let values = spw_pipeline_device {
            struct_size: 0,
            reserved: 0,
            busy: found.busy,
            first: found.first,
            last: found.last,
            operations: found.operations,
            peak_bytes: found.peak,
            parameters,
            checkpoints,
            activations,
            gradients,
            messages,
        };
        // SAFETY: the caller meets the callee's requirements.
        unsafe { abi_struct::write(&values, device_out, "device_out") }
    })
}

/// Writes `count` operations, from number `first` on. They are sorted by device, and for each device in the order in which
/// they begin. Only the first struct needs its `struct_size`; the call writes the others.
///
/// # Safety
/// `operations_out` has room for `count` structs of the first one's `struct_size`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_pipeline_get_operations(
    pipeline: Option<&spw_pipeline>,
    first: u64,
    count: u64,
    operations_out: *mut spw_pipeline_operation,
) -> spw_status {
    guard(|| {
        let found = part(&handle::get(pipeline)?.plan().operations, first, count)?;
        let values = found.iter().map(|one| spw_pipeline_operation {
            struct_size: 0,
            kind: one.kind as u32,
            device: one.device,
            peer: one.peer,
            micro_batch: one.micro_batch,
            first_unit: one.first_unit,
            units: one.units,
            begins: one.begins,
            ends: one.ends,
            dependencies: one.dependencies,
            first_dependency: one.first_dependency.into(),
            bytes: one.bytes,
            start: one.start,
            end: one.end,
        });
        // SAFETY: the caller meets the callee's requirements.
        unsafe { write_structs(values, operations_out, "operations_out") }
    })
}

/// Writes `count` changes of memory, from number `first` on, in the order in which they happen. Only the first struct
/// needs its `struct_size`; the call writes the others.
///
/// # Safety
/// `changes_out` has room for `count` structs of the first one's `struct_size`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_pipeline_get_changes(
    pipeline: Option<&spw_pipeline>,
    first: u64,
    count: u64,
    changes_out: *mut spw_pipeline_change,
) -> spw_status {
    guard(|| {
        let found = part(&handle::get(pipeline)?.plan().changes, first, count)?;
        let values = found.iter().map(|one| spw_pipeline_change {
            struct_size: 0,
            operation: one.operation,
            device: one.device,
            memory: one.category as u32,
            freed: one.freed.into(),
            reserved: 0,
            bytes: one.bytes,
            resident: one.resident,
        });
        // SAFETY: the caller meets the callee's requirements.
        unsafe { write_structs(values, changes_out, "changes_out") }
    })
}

/// Writes the numbers of operations that others depend on: `count` entries of the list, from entry `first` on. Each
/// operation has a range of this list.
///
/// # Safety
/// `dependencies_out` has room for `count` numbers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_pipeline_get_dependencies(
    pipeline: Option<&spw_pipeline>,
    first: u64,
    count: u64,
    dependencies_out: *mut u32,
) -> spw_status {
    guard(|| {
        let found = part(&handle::get(pipeline)?.plan().dependencies, first, count)?;
        let mut written = 0;
        // SAFETY: the caller meets the callee's requirements.
        unsafe { output::write_array(found, dependencies_out, count, "dependencies_out", &raw mut written) }
    })
}

/// Draws the timeline as an SVG picture of `width` pixels, from 200 to 20000. A plan with more than 16384 operations that
/// take time is refused.
///
/// # Safety
/// `text_out` is NULL or has room for `size` bytes, `needed_out` is NULL or points to a u64.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_pipeline_get_svg(
    pipeline: Option<&spw_pipeline>,
    width: u32,
    text_out: *mut c_char,
    size: usize,
    needed_out: *mut u64,
) -> spw_status {
    guard(|| {
        let text = svg::draw(handle::get(pipeline)?.plan(), width)?;
        // SAFETY: the caller meets the callee's requirements.
        unsafe { output::write_text(&text, text_out, size, needed_out) };
        Ok(())
    })
}

fn result_of(plan: &Plan) -> spw_pipeline_result {
    let found = &plan.summary;
    let (count, bytes) = (|kind: Kind| found.counts[kind as usize], |kind: Kind| found.bytes[kind as usize]);
    spw_pipeline_result {
        struct_size: 0,
        reserved: 0,
        passes_seconds: found.passes_seconds,
        iteration_seconds: found.iteration_seconds,
        exposed_seconds: found.exposed_seconds,
        passes_bubble_ratio: found.passes_bubble_ratio,
        iteration_bubble_ratio: found.iteration_bubble_ratio,
        closed_bubble_ratio: plan.closed.map_or(f64::NAN, |closed| closed.bubble_ratio()),
        operations: plan.operations.len() as u64,
        dependencies: plan.dependencies.len() as u64,
        changes: plan.changes.len() as u64,
        fetches: count(Kind::Fetch),
        fetched_bytes: bytes(Kind::Fetch),
        offloaded_bytes: bytes(Kind::Offload),
        activations: count(Kind::SendActivation),
        activation_bytes: bytes(Kind::SendActivation),
        gradients: count(Kind::SendGradient),
        gradient_bytes: bytes(Kind::SendGradient),
        checkpoints: count(Kind::SendCheckpoint),
        checkpoint_bytes: bytes(Kind::SendCheckpoint),
    }
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

/// Writes structs one behind the other, as far apart as the first one's `struct_size` says.
///
/// # Safety
/// `to` has room for all values, of the first struct's `struct_size`.
unsafe fn write_structs<T: AbiStruct>(
    values: impl ExactSizeIterator<Item = T>,
    to: *mut T,
    argument: &'static str,
) -> Result<()> {
    if values.len() == 0 {
        return Ok(());
    }
    let to = required(to, argument)?;
    // SAFETY: there is at least one struct, which begins with its size.
    let apart = unsafe { abi_struct::stride(to, argument) }?;
    for (index, value) in values.enumerate() {
        // SAFETY: the structs lie `apart` bytes apart, and the caller has room for all of them.
        unsafe {
            let to = to.byte_add(index * apart);
            to.cast::<u32>().write_unaligned(apart as u32);
            abi_struct::write(&value, to, argument)?;
        }
    }
    Ok(())
}
