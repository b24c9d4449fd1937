//! SuperOffload's formulas: tail buckets, weight policy, and the type of gradients on the link.
#![allow(non_camel_case_types)]

use crate::capi::abi_struct::{self, abi_struct};
use crate::capi::base::spw_status;
use crate::capi::gpu::spw_transfer_dtype;
use crate::capi::guard::guard;
use crate::capi::input;
use crate::capi::output::{self, required};
use crate::error::{Error, Result};
use crate::plan::cast::{self, Probe};
use crate::plan::interleave::TransferDtype;
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

abi_struct!(spw_plan_bucket, 48: struct_size, reserved, grad, step_cpu, param, step_gpu, backward);

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
        let kept_out = required(kept_out, "kept_out")?;
        // SAFETY: the caller meets the callee's requirements.
        let raw = unsafe { abi_struct::read(bucket, "bucket") }?;
        abi_struct::zero("bucket.reserved", raw.reserved)?;
        let spw_plan_bucket { grad, step_cpu, param, step_gpu, backward, .. } = raw;
        let bucket = Bucket { grad, step_cpu, param, step_gpu, backward };
        let (count, most) = (number("count", count)?, number("most", most)?);
        let kept = tail::buckets(&bucket, count, most)?;
        // SAFETY: not NULL, and valid by the caller's promise.
        unsafe {
            kept_out.write(kept as u64);
            output::write_optional(tail::printed(&bucket, most) as u64, printed_out);
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
    measured: u64,
    start: u64,
    most: u64,
    next_out: *mut u64,
    best_out: *mut u64,
) -> spw_status {
    guard(|| {
        let next_out = required(next_out, "next_out")?;
        if measured > 0 && (kept.is_null() || seconds.is_null()) {
            return Err(Error::invalid("kept", "is NULL, or seconds is NULL, but measured is not 0"));
        }
        if u32::try_from(measured).is_err() {
            return Err(Error::invalid("measured", format!("is {measured}, over 2^32 - 1")));
        }
        let mut search = Search::new(number("start", start)?, number("most", most)?);
        // SAFETY: not NULL, and the arrays have `measured` entries by the caller's promise.
        let (kept, seconds) =
            unsafe { (input::array(kept, measured, "kept")?, input::array(seconds, measured, "seconds")?) };
        for (kept, seconds) in kept.iter().zip(seconds) {
            search.measured(number("kept", *kept)?, *seconds);
        }
        // SAFETY: not NULL, and valid by the caller's promise.
        unsafe {
            next_out.write(search.next().unwrap_or(search.best()) as u64);
            output::write_optional(search.best() as u64, best_out);
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

abi_struct!(spw_plan_load, 48: struct_size, reserved, peak, link, tokens, parameters, free_bytes);

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
        let (flow_out, efficiency_out) =
            (required(flow_out, "flow_out")?, required(efficiency_out, "efficiency_out")?);
        // SAFETY: the caller meets the callee's requirements.
        let raw = unsafe { abi_struct::read(load, "load") }?;
        abi_struct::zero("load.reserved", raw.reserved)?;
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
    pub f32_transfer: f64,
    /// Transferring 16 bits.
    pub native_transfer: f64,
    /// CPU step from f32 gradients.
    pub f32_step: f64,
    /// CPU step from 16-bit gradients.
    pub native_step: f64,
}

abi_struct!(spw_plan_probe, 40: struct_size, accumulates, f32_transfer, native_transfer, f32_step, native_step);

/// Chooses the type in which gradients cross a link (SuperOffload section 4.5), as an `spw_transfer_dtype`. The type
/// whose slower stage, transfer or CPU step, is faster wins. With `accumulates` it is always SPW_TRANSFER_DTYPE_F32.
///
/// # Safety
/// `probe` points to a struct of `struct_size` bytes, `transfer_dtype_out` to a u32.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_plan_cast(
    probe: *const spw_plan_probe,
    transfer_dtype_out: *mut u32,
) -> spw_status {
    guard(|| {
        // SAFETY: the caller meets the callee's requirements.
        let raw = unsafe { abi_struct::read(probe, "probe") }?;
        let accumulates = abi_struct::flag("probe.accumulates", raw.accumulates)?;
        let spw_plan_probe { f32_transfer, native_transfer, f32_step, native_step, .. } = raw;
        let probe = Probe { f32_transfer, native_transfer, f32_step, native_step };
        let dtype = match cast::choose(&probe, accumulates)? {
            TransferDtype::F32 => spw_transfer_dtype::SPW_TRANSFER_DTYPE_F32,
            TransferDtype::Native | TransferDtype::Delivered => spw_transfer_dtype::SPW_TRANSFER_DTYPE_NATIVE,
        };
        // SAFETY: the caller meets the callee's requirements.
        unsafe { output::write(dtype as u32, transfer_dtype_out, "transfer_dtype_out") }
    })
}

fn number(argument: &'static str, value: u64) -> Result<usize> {
    let fits = usize::try_from(value).ok().filter(|value| *value <= u32::MAX as usize);
    fits.ok_or_else(|| Error::invalid(argument, format!("is {value}, but the limit is 2^32 - 1")))
}
