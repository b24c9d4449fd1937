//! The tiered update: what it is opened with, and what it says of itself.
#![allow(non_camel_case_types)]

use std::time::Duration;

use super::record::{self, Record};
use crate::error::{Error, Result};
use crate::offload::swap::SwapOptions;
use crate::offload::swap::budget;
use crate::offload::swap::form::Form;
use crate::pool::region::Backing;

/// Choices for a tiered update, added together.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub enum spw_swap_flag {
    /// Base pages, even where 2 MiB pages could be had.
    SPW_SWAP_NO_HUGE_PAGES = 1,
    /// Leave the memory unlocked.
    SPW_SWAP_NO_LOCK = 2,
    /// Use the paths without waiting for turns. Else one process of this node and user at a time uses a path, and the
    /// others go to another path first (MLP-Offload section 3.1).
    SPW_SWAP_NO_TURNS = 4,
    /// Store param without its upper 16 bits, which follow from the bf16 weights that the model holds: 10 bytes a parameter
    /// on the tier and in memory instead of 12. Every step is then given the weights that the step before it published, and a
    /// tier that is resumed those of the commit: they have to be saved with it, for without them param is lost. Weights that
    /// do not belong to the state are told by a checksum, and nothing is lost.
    SPW_SWAP_SPLIT_MASTER = 8,
}

/// Settings of a tiered update.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct spw_swap_options {
    /// `sizeof(spw_swap_options)`
    pub struct_size: u32,
    /// Sum of `spw_swap_flag`.
    pub flags: u32,
    /// Most bytes of host memory for state; 2 MiB pages may add a 64th. `spw_swap_plan` says what comes of it.
    pub host_bytes: u64,
    /// Elements of each subgroup; the memory may be reused after the call.
    pub elements: *const u64,
    /// Number of subgroups.
    pub subgroups: u64,
    /// Share of each path in the state, in any unit, one for each path of the tier; NULL: in proportion to the measured
    /// speed (MLP-Offload Eq. 1).
    pub ratio: *const f64,
    /// Bytes per second of each path, to begin with; NULL: all alike, until the first update has measured them.
    pub speeds: *const f64,
    /// Seconds that a process waits for its turn on a path before it goes on without; 0: 30.
    pub patience_seconds: f64,
}

// SAFETY: numbers and pointers without padding; null pointers are valid.
unsafe impl Record for spw_swap_options {
    const FIRST_SIZE: usize = 56;
    const NAME: &'static str = "spw_swap_options";
}

/// Memory and bytes of a tiered update.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct spw_swap_budget {
    /// `sizeof(spw_swap_budget)`
    pub struct_size: u32,
    /// 0
    pub reserved: u32,
    /// Bytes of host memory that buffers and masters take, all at open.
    pub host_bytes: u64,
    /// Bytes of one buffer: the state of the largest subgroup, as it is stored.
    pub buffer_bytes: u64,
    /// Number of buffers.
    pub buffers: u64,
    /// Those of them that keep their subgroup from update to update; but subgroups that cannot be split do not stay.
    pub cached: u64,
    /// Bytes of all state.
    pub state_bytes: u64,
    /// Bytes that an update reads from the tier, and as many that it writes; a commit writes the cached rest.
    pub step_bytes: u64,
    /// Bytes of one master: with SPW_SWAP_SPLIT_MASTER, the param of the largest subgroup.
    pub master_bytes: u64,
    /// Masters that are whole in memory at a time; 0 if every buffer has its own.
    pub masters: u64,
    /// Bytes of host memory with which every path can read and write at once, and none are there only to be cached.
    pub working_bytes: u64,
}

// SAFETY: integers without padding.
unsafe impl Record for spw_swap_budget {
    const FIRST_SIZE: usize = 56;
    const NAME: &'static str = "spw_swap_budget";
}

/// Counts since open.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct spw_swap_stats {
    /// `sizeof(spw_swap_stats)`
    pub struct_size: u32,
    /// 0
    pub reserved: u32,
    /// Updates begun, the first filling included.
    pub rounds: u64,
    /// Subgroups that an update found in memory.
    pub hits: u64,
    /// Subgroups read from the tier.
    pub fetched: u64,
    /// Subgroups written to it.
    pub flushed: u64,
    /// Pieces of subgroups that changed their path.
    pub moved: u64,
    /// Seconds in which there was nothing to step because its data had not come yet.
    pub exposed_seconds: f64,
}

// SAFETY: numbers without padding.
unsafe impl Record for spw_swap_stats {
    const FIRST_SIZE: usize = 56;
    const NAME: &'static str = "spw_swap_stats";
}

/// Most subgroups of a tiered update: each is an extent of the tier.
const MAX_SUBGROUPS: u64 = 1 << 20;

pub(super) unsafe fn parse(options: *const spw_swap_options, paths: usize) -> Result<SwapOptions> {
    // SAFETY: the caller's promise is the callee's.
    let raw = unsafe { record::read(options, "options") }?;
    if raw.flags & !15 != 0 {
        return Err(Error::invalid("options.flags", format!("{:#x} has unknown bits", raw.flags)));
    }
    if raw.subgroups > MAX_SUBGROUPS {
        let reason = format!("{} is over {MAX_SUBGROUPS}", raw.subgroups);
        return Err(Error::invalid("options.subgroups", reason));
    }
    if raw.elements.is_null() && raw.subgroups > 0 {
        return Err(Error::invalid("options.elements", "is NULL"));
    }
    let patience = match raw.patience_seconds {
        0.0 => Duration::from_secs(30),
        seconds => Duration::try_from_secs_f64(seconds)
            .map_err(|error| Error::invalid("options.patience_seconds", error.to_string()))?,
    };
    // SAFETY: the caller's promise: as many numbers as there are subgroups, or paths.
    unsafe {
        let numbers =
            |from: *const f64| (!from.is_null()).then(|| std::slice::from_raw_parts(from, paths).to_vec());
        let elements = match raw.subgroups {
            0 => Vec::new(),
            count => std::slice::from_raw_parts(raw.elements, count as usize).to_vec(),
        };
        Ok(SwapOptions {
            subgroups: elements,
            usual: if raw.flags & 8 == 0 { Form::Whole } else { Form::Split },
            host_bytes: raw.host_bytes,
            backing: Backing { huge: raw.flags & 1 == 0, lock: raw.flags & 2 == 0, node: None },
            ratio: numbers(raw.ratio),
            speeds: numbers(raw.speeds).unwrap_or_default(),
            exclusive: raw.flags & 4 == 0,
            patience,
        })
    }
}

pub(super) unsafe fn write_budget(plan: budget::Budget, budget_out: *mut spw_swap_budget) -> Result<()> {
    let values = spw_swap_budget {
        struct_size: 0,
        reserved: 0,
        host_bytes: plan.host_bytes,
        buffer_bytes: plan.buffer_bytes,
        buffers: plan.buffers as u64,
        cached: plan.cached as u64,
        state_bytes: plan.state_bytes,
        step_bytes: plan.step_bytes,
        master_bytes: plan.master_bytes,
        masters: plan.masters as u64,
        working_bytes: plan.working_bytes,
    };
    // SAFETY: the caller's promise is the callee's.
    unsafe { record::write(&values, budget_out, "budget_out") }
}
