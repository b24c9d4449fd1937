//! Results that the processes of one machine post in an arena.
#![allow(non_camel_case_types)]

use crate::capi::abi_struct::{self, abi_struct};
use crate::capi::arena::open::spw_arena;
use crate::capi::base::spw_status;
use crate::capi::guard::guard;
use crate::capi::handle;
use crate::capi::input::timeout;
use crate::capi::optim::tensor::spw_step_stats;
use crate::capi::output::required;
use crate::optim::StepStats;

/// The results of all processes of an arena together.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct spw_arena_verdict {
    /// `sizeof(spw_arena_verdict)`
    pub struct_size: u32,
    /// 1 if a gradient of any process is Inf or NaN, else 0.
    pub nonfinite: u32,
    /// Number of processes that failed.
    pub failed: u32,
    /// 0
    pub reserved: u32,
    /// Sum of squares over all processes, added in the order of their numbers; NaN if `nonfinite` is 1.
    pub sum_squares: f64,
}

abi_struct!(spw_arena_verdict, 24: struct_size, nonfinite, failed, reserved, sum_squares);

/// Takes the number `process` (from 0, below `processes` of the arena) for this handle. Every process joins before the
/// first round, so that the others notice its death. Joining again does nothing. SPW_ERR_BUSY if another handle has the
/// number.
#[unsafe(no_mangle)]
pub extern "C" fn spw_arena_join(arena: Option<&spw_arena>, process: u32) -> spw_status {
    guard(|| handle::get(arena)?.0.join(process))
}

/// Posts the local verdict of `process` for `round` (from 1 on, each round once): the statistics of its gradients, and
/// `failed` 1 if one of its stages failed. A process posts a round only after it has waited for the round before.
///
/// # Safety
/// `stats` points to a struct of `struct_size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_arena_post(
    arena: Option<&spw_arena>,
    process: u32,
    round: u64,
    stats: *const spw_step_stats,
    failed: u32,
) -> spw_status {
    guard(|| {
        // SAFETY: the caller meets the callee's requirements.
        let raw = unsafe { abi_struct::read(stats, "stats") }?;
        let nonfinite = abi_struct::flag("stats.nonfinite", raw.nonfinite)?;
        let stats = StepStats { nonfinite, sum_squares: raw.sum_squares };
        handle::get(arena)?.0.post(process, round, stats, abi_struct::flag("failed", failed)?)
    })
}

/// Waits until every process has posted `round`, for up to `timeout_ms` milliseconds (0: polls; negative: without
/// limit). Every process gets the same bits.
///
/// - SPW_ERR_ARENA_PEER_ENDED: a process that joined ended before it posted. Roll back.
/// - SPW_ERR_TIMEOUT: the message names a process that has not posted.
///
/// # Safety
/// `verdict_out` points to a struct of `struct_size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_arena_wait_verdict(
    arena: Option<&spw_arena>,
    round: u64,
    timeout_ms: i64,
    verdict_out: *mut spw_arena_verdict,
) -> spw_status {
    guard(|| {
        required(verdict_out, "verdict_out")?;
        // SAFETY: the caller meets the callees' requirements.
        unsafe {
            abi_struct::check_output(verdict_out, "verdict_out")?;
            let found = handle::get(arena)?.0.wait_verdict(round, timeout(timeout_ms))?;
            let values = spw_arena_verdict {
                struct_size: 0,
                nonfinite: found.stats.nonfinite.into(),
                failed: found.failed,
                reserved: 0,
                sum_squares: found.stats.sum_squares,
            };
            abi_struct::write(&values, verdict_out, "verdict_out")
        }
    })
}
