//! Schedules of pipeline parallelism with offloaded parameters.

use crate::capi::prelude::*;
use spillway_planner::pipeline::{Plan, Schedule, Shape, Unit, plan};

/// The order of the passes on the devices. Passed as `uint32_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub enum spw_pipeline_schedule {
    /// All forward passes, then all backward passes (GPipe). With more stages than devices: interleaved, as in Mobius.
    SPW_PIPELINE_SCHEDULE_AFAB = 0,
    /// One forward pass, one backward pass (DAPPLE). With more stages than devices: Megatron's interleaved schedule.
    SPW_PIPELINE_SCHEDULE_1F1B = 1,
    /// SysX: all forward passes, then fine-grained backward stages, each on the device that is free next.
    SPW_PIPELINE_SCHEDULE_DECOUPLED = 2,
}

/// Bits of `flags` in `spw_pipeline_options`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub enum spw_pipeline_flag {
    /// A forward pass keeps checkpoints only, and the backward pass recomputes the activations.
    SPW_PIPELINE_FLAG_RECOMPUTE = 1,
    /// A checkpoint is sent right before the backward pass that needs it, and not after its forward pass.
    SPW_PIPELINE_FLAG_LATE_CHECKPOINTS = 2,
    /// A stage's optimizer begins with its own gradients, and not when all gradients are in host memory.
    SPW_PIPELINE_FLAG_ASYNC_OPTIMIZER = 4,
}

c_struct! { first 48;
/// A pipeline: its devices, stages and rules. A model is a list of units. A forward stage has `split` of them; so has a
/// backward stage, unless the schedule is decoupled: then a backward stage has one.
pub struct spw_pipeline_options {
    /// An `spw_pipeline_schedule`.
    pub schedule: u32,
    /// Number of devices, N_g, at most 4096.
    pub devices: u32,
    /// Number of micro-batches, N_m.
    pub micro_batches: u32,
    /// Number of forward stages, N_sf.
    pub stages: u32,
    /// Units per forward stage, d; 0: 1. There are at most 2^20 forward passes and backward passes of units.
    pub split: u32,
    /// Number of parameter sets that a device has room for; 0: 2. A set is the parameters of a stage.
    pub slots: u32,
    /// Bits of `spw_pipeline_flag`. A decoupled schedule needs SPW_PIPELINE_FLAG_RECOMPUTE.
    pub flags: u32,
    /// Seconds of a message between devices.
    pub latency: f64,
    /// Further seconds of a message per byte.
    pub seconds_per_byte: f64,
}
}

c_struct! { first 88;
/// Costs of a unit. Passes, activations and inputs are those of one micro-batch.
pub struct spw_pipeline_unit {
    /// 0
    pub reserved: u32,
    /// Seconds of the forward pass.
    pub forward: f64,
    /// Seconds of the backward pass.
    pub backward: f64,
    /// Seconds of the recomputation.
    pub recompute: f64,
    /// Seconds of the transfer of the parameters to a device.
    pub fetch: f64,
    /// Seconds of the transfer of the gradients to host memory.
    pub offload: f64,
    /// Seconds of the optimizer step on the CPU.
    pub optimizer: f64,
    /// Bytes of the parameters, below 2^40, as all bytes here.
    pub param_bytes: u64,
    /// Bytes of the gradients.
    pub grad_bytes: u64,
    /// Bytes of the activations that the backward pass reads.
    pub activation_bytes: u64,
    /// Bytes of the input, which is the output of the unit before.
    pub input_bytes: u64,
}
}

/// A planned pipeline. It never changes, and several threads and forked processes may use it.
pub struct spw_pipeline(Plan);

impl spw_pipeline {
    pub(super) fn plan(&self) -> &Plan {
        &self.0
    }
}

handle!(spw_pipeline, "pipeline");

/// Plans a pipeline (SysX section 3). `units` has the costs of each unit, or with `unit_count` 1 of all units. Close the
/// handle with `spw_pipeline_close`. Times whose sum over all devices is not finite are refused.
#[unsafe(no_mangle)]
pub extern "C" fn spw_plan_pipeline(
    options: In<spw_pipeline_options>,
    units: In<spw_pipeline_unit>,
    unit_count: u64,
    pipeline_out: Out<*mut spw_pipeline>,
) -> spw_status {
    guard(|| {
        pipeline_out.open(|| {
            let shape = read_shape(&options.read("options")?)?;
            shape.check().map_err(|error| error.within("options."))?;
            let raw = units.read_all(unit_count, "units")?;
            let units: Vec<Unit> = raw.iter().enumerate().map(read_unit).collect::<Result<_>>()?;
            Ok(spw_pipeline(plan(&shape, &units)?))
        })
    })
}

/// Frees a plan. NULL is allowed.
#[unsafe(no_mangle)]
pub extern "C" fn spw_pipeline_close(pipeline: Option<Box<spw_pipeline>>) -> spw_status {
    guard(|| handle::end(pipeline))
}

fn read_shape(raw: &spw_pipeline_options) -> Result<Shape> {
    let schedules = [Schedule::AllForwardAllBackward, Schedule::OneForwardOneBackward, Schedule::Decoupled];
    let flags = abi_struct::flags("options.flags", raw.flags, 7)?;
    Ok(parsed!(Shape from raw {
        devices, micro_batches, stages, latency, seconds_per_byte
    } with {
        schedule: choice("options.schedule", raw.schedule, "spw_pipeline_schedule", &schedules)?,
        split: if raw.split == 0 { 1 } else { raw.split },
        slots: if raw.slots == 0 { 2 } else { raw.slots },
        recompute: flags & spw_pipeline_flag::SPW_PIPELINE_FLAG_RECOMPUTE as u32 != 0,
        early_checkpoints: flags & spw_pipeline_flag::SPW_PIPELINE_FLAG_LATE_CHECKPOINTS as u32 == 0,
        async_optimizer: flags & spw_pipeline_flag::SPW_PIPELINE_FLAG_ASYNC_OPTIMIZER as u32 != 0,
    }))
}

fn read_unit((index, raw): (usize, &spw_pipeline_unit)) -> Result<Unit> {
    abi_struct::zero("reserved", raw.reserved).map_err(|error| error.within(&format!("units[{index}].")))?;
    Ok(parsed!(Unit from raw {
        forward, backward, recompute, fetch, offload, optimizer, param_bytes, grad_bytes, activation_bytes, input_bytes
    }))
}
