//! SuperOffload's formulas: tail buckets, weight policy, and the type of gradients on the link.
#![allow(non_camel_case_types)]

use super::guard::guard;
use super::library::out;
use super::plan::spw_plan_wire;
use super::record::{self, Record};
use super::status::spw_status;
use crate::error::{Error, Result};
use crate::plan::cast::{self, Probe};
use crate::plan::interleave::Wire;
use crate::plan::tail::{self, Bucket, Search};
use crate::plan::weights::{self, Load, Policy};

/// Seconds per bucket of each stage.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct spw_plan_bucket {
    /// `sizeof(spw_plan_bucket)`
    pub struct_size: u32,
    /// 0
    pub reserved: u32,
    /// Transfer of the gradient to the host.
    pub grad: f64,
    /// Step on the CPU.
    pub step_cpu: f64,
    /// Transfer of the parameter to the GPU.
    pub param: f64,
    /// Step on the GPU.
    pub step_gpu: f64,
    /// Backward pass.
    pub backward: f64,
}

// SAFETY: numbers without padding.
unsafe impl Record for spw_plan_bucket {
    const FIRST_SIZE: usize = 48;
    const NAME: &'static str = "spw_plan_bucket";
}

/// Computes how many of the last of `count` buckets the GPU should update, so that the backward pass hides the CPU's
/// work. At most `most` buckets fit on the GPU. `kept_out` follows SuperOffload Eq. 4-5, extended to CPUs slower than
/// backward. `printed_out` (may be NULL) follows the equations as printed.
///
/// # Safety
/// `bucket` points to a struct of `struct_size` bytes, `kept_out` to a u64, and `printed_out` to a u64 or is NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_plan_tail(
    bucket: *const spw_plan_bucket,
    count: u64,
    most: u64,
    kept_out: *mut u64,
    printed_out: *mut u64,
) -> spw_status {
    guard(|| {
        let kept_out = out(kept_out, "kept_out")?;
        // SAFETY: the caller meets the callee's requirements.
        let raw = unsafe { record::read(bucket, "bucket") }?;
        record::zero("bucket.reserved", raw.reserved)?;
        let spw_plan_bucket { grad, step_cpu, param, step_gpu, backward, .. } = raw;
        let bucket = Bucket { grad, step_cpu, param, step_gpu, backward };
        let (count, most) = (number("count", count)?, number("most", most)?);
        let kept = tail::buckets(&bucket, count, most)?;
        // SAFETY: not NULL, and valid by the caller's promise.
        unsafe {
            kept_out.write(kept as u64);
            if !printed_out.is_null() {
                printed_out.write(tail::printed(&bucket, most) as u64);
            }
        }
        Ok(())
    })
}

/// Tunes the number of tail buckets by measured iteration times. An iteration with `kept[i]` buckets on the GPU took
/// `seconds[i]`. `next_out` receives the number to try next, and `best_out` (may be NULL) the fastest so far. Without
/// measurements both are `start`. `most` is the maximum that fits. The search is over when `next_out` is already in
/// `kept`; it is then the fastest.
///
/// # Safety
/// `kept` and `seconds` have `measured` entries, `next_out` points to a u64, and `best_out` to a u64 or is NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_plan_tail_next(
    kept: *const u64,
    seconds: *const f64,
    measured: usize,
    start: u64,
    most: u64,
    next_out: *mut u64,
    best_out: *mut u64,
) -> spw_status {
    guard(|| {
        let next_out = out(next_out, "next_out")?;
        if measured > 0 && (kept.is_null() || seconds.is_null()) {
            return Err(Error::invalid("kept", "or seconds is NULL"));
        }
        let mut search = Search::new(number("start", start)?, number("most", most)?);
        for index in 0..measured {
            // SAFETY: not NULL, and the arrays have `measured` entries.
            let (kept, seconds) = unsafe { (kept.add(index).read(), seconds.add(index).read()) };
            search.measured(number("kept", kept)?, seconds);
        }
        // SAFETY: not NULL, and valid by the caller's promise.
        unsafe {
            next_out.write(search.next().unwrap_or(search.best()) as u64);
            if !best_out.is_null() {
                best_out.write(search.best() as u64);
            }
        }
        Ok(())
    })
}

/// One GPU, its link, and its workload.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct spw_plan_load {
    /// `sizeof(spw_plan_load)`
    pub struct_size: u32,
    /// 0
    pub reserved: u32,
    /// Operations per second that the GPU sustains.
    pub peak: f64,
    /// Bandwidth to the GPU, in bytes per second.
    pub link: f64,
    /// Batch size times sequence length.
    pub tokens: f64,
    /// Number of parameters of this rank.
    pub parameters: f64,
    /// Bytes of GPU memory available for 16-bit weights.
    pub free_bytes: f64,
}

// SAFETY: numbers without padding.
unsafe impl Record for spw_plan_load {
    const FIRST_SIZE: usize = 48;
    const NAME: &'static str = "spw_plan_load";
}

/// Decides which part of the 16-bit weights streams from the host (SuperOffload Eq. 1-3): the part that does not fit on
/// the GPU. `flow_out` receives that fraction, from 0 to 1. `efficiency_out` receives compute time over the sum of
/// compute and load time. Above 0.5 computation hides the loads; 0.6 is the recommended minimum.
///
/// # Safety
/// `load` points to a struct of `struct_size` bytes, the outputs to a double each.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_plan_weights(
    load: *const spw_plan_load,
    flow_out: *mut f64,
    efficiency_out: *mut f64,
) -> spw_status {
    guard(|| {
        let (flow_out, efficiency_out) = (out(flow_out, "flow_out")?, out(efficiency_out, "efficiency_out")?);
        // SAFETY: the caller meets the callee's requirements.
        let raw = unsafe { record::read(load, "load") }?;
        record::zero("load.reserved", raw.reserved)?;
        let spw_plan_load { peak, link, tokens, parameters, free_bytes, .. } = raw;
        let found = weights::choose(&Load { peak, link, tokens, parameters, free_bytes })?;
        debug_assert_eq!(found.policy == Policy::Flow, found.fraction > 0.0);
        // SAFETY: not NULL, and valid by the caller's promise.
        unsafe {
            flow_out.write(found.fraction);
            efficiency_out.write(found.efficiency);
        }
        Ok(())
    })
}

/// Measurements of one link and its CPU, in parameters per second.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct spw_plan_probe {
    /// `sizeof(spw_plan_probe)`
    pub struct_size: u32,
    /// 1 if the host accumulates gradients (always in f32), else 0.
    pub accumulates: u32,
    /// Converting to f32 on the GPU and transferring f32.
    pub f32_wire: f64,
    /// Transferring 16 bits.
    pub native_wire: f64,
    /// CPU step from f32 gradients.
    pub f32_step: f64,
    /// CPU step from 16-bit gradients.
    pub native_step: f64,
}

// SAFETY: numbers without padding.
unsafe impl Record for spw_plan_probe {
    const FIRST_SIZE: usize = 40;
    const NAME: &'static str = "spw_plan_probe";
}

/// Chooses the type in which gradients cross a link (SuperOffload section 4.5), as an `spw_plan_wire`. The type whose
/// slower stage, transfer or CPU step, is faster wins. With `accumulates` it is always SPW_WIRE_F32.
///
/// # Safety
/// `probe` points to a struct of `struct_size` bytes, `wire_out` to a u32.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_plan_cast(probe: *const spw_plan_probe, wire_out: *mut u32) -> spw_status {
    guard(|| {
        let wire_out = out(wire_out, "wire_out")?;
        // SAFETY: the caller meets the callee's requirements.
        let raw = unsafe { record::read(probe, "probe") }?;
        let accumulates = record::flag("probe.accumulates", raw.accumulates)?;
        let spw_plan_probe { f32_wire, native_wire, f32_step, native_step, .. } = raw;
        let wire = match cast::choose(&Probe { f32_wire, native_wire, f32_step, native_step }, accumulates)? {
            Wire::F32 => spw_plan_wire::SPW_WIRE_F32,
            Wire::Native | Wire::Delivered => spw_plan_wire::SPW_WIRE_NATIVE,
        };
        // SAFETY: not NULL, and valid by the caller's promise.
        unsafe { wire_out.write(wire as u32) };
        Ok(())
    })
}

fn number(argument: &'static str, value: u64) -> Result<usize> {
    let fits = usize::try_from(value).ok().filter(|value| *value <= u32::MAX as usize);
    fits.ok_or_else(|| Error::invalid(argument, format!("{value} is over 2^32 - 1")))
}
