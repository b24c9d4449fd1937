//! The tiered update: its options, budget and counters.

use crate::capi::prelude::*;
use crate::offload::swap::SwapOptions;
use crate::offload::swap::budget;
use crate::offload::swap::encoding::{Encoding, Master, Moments};
use crate::pool::region::Backing;

/// Flags of a tiered update, combined by addition.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub enum spw_swap_flag {
    /// Use base pages even if 2 MiB pages are available.
    SPW_SWAP_FLAG_NO_HUGE_PAGES = 1,
    /// Do not lock the memory (mlock).
    SPW_SWAP_FLAG_NO_LOCK = 2,
    /// Store param without its upper 16 bits, which are derived from the model's bf16 weights. State then takes 2 bytes
    /// fewer per parameter on the tier and in memory. A subgroup with too many values that cannot be split still takes
    /// them. Every step needs the weights that the step before published. A resumed tier needs the weights of its
    /// commit: save them with it, else param is lost. A checksum detects weights that do not match the state: a read
    /// then changes nothing, and a step is an error that a rollback ends.
    SPW_SWAP_FLAG_SPLIT_MASTER = 4,
    /// Store exp_avg and exp_avg_sq as bf16: 4 bytes fewer per parameter on the tier and in memory. The step has the
    /// bits of `spw_adam_step` with bf16 states and f32 param. `spw_swap_read` returns these values as f32;
    /// `spw_swap_fill` and `spw_swap_write` round to nearest even. A tier that holds moments of the other type is
    /// SPW_ERR_INVALID_ARGUMENT.
    SPW_SWAP_FLAG_BF16_MOMENTS = 8,
    /// Store exp_avg and exp_avg_sq as codes of 8 bits with a scale for 32 elements (see `spw_tensor`): 5.87 bytes fewer
    /// per parameter. Blocks count from the subgroup's first element. Each part begins with a block, and its last block is
    /// its own: moments of elements behind the part, up to the end of the block, may change. As
    /// SPW_SWAP_FLAG_BF16_MOMENTS otherwise, which may not be set too.
    SPW_SWAP_FLAG_CODED_MOMENTS = 32,
    /// Allocate the buffers on NUMA node `node`. If the node is refused, or has less free memory than they need, the log
    /// gets a warning and the memory may come from any node.
    SPW_SWAP_FLAG_BIND_NODE = 16,
    /// Store 16 low bits of param, 2 bytes fewer per parameter. The caller has the parameters: bf16 ones hold their master
    /// together with these bits, as with `param_low` of `spw_tensor`, and f32 ones are their own master. A step writes
    /// them, with the bits of `spw_adam_step` on such tensors. `spw_swap_read`, `spw_swap_write` and `spw_swap_fill` take
    /// low bits as numbers from 0 to 65,535 in the place of param; 0 at first. A commit has no parameters: store those of
    /// its time with it. Not with SPW_SWAP_FLAG_SPLIT_MASTER.
    SPW_SWAP_FLAG_LOW_BITS = 64,
}

c_struct! { first 56;
/// Settings of a tiered update.
pub struct spw_swap_options {
    /// Sum of `spw_swap_flag`.
    pub flags: u32,
    /// Limit on host memory for state, in bytes; 2 MiB pages may add 1/64. `spw_swap_plan_budget` computes the
    /// resulting budget.
    pub host_memory: u64,
    /// Number of elements of each subgroup. The array may be freed after the call.
    pub elements: In<u64>,
    /// Number of subgroups, at most 2^20.
    pub subgroups: u64,
    /// Each path's share of the state, in any unit, one entry per path of the tier. NULL: in proportion to the measured
    /// bandwidths (MLP-Offload Eq. 1).
    pub ratio: In<f64>,
    /// Initial estimate of each path's bandwidth, in bytes per second. NULL: in proportion to the state that the tier
    /// holds. Without any the division is equal at first, and the first writes measure the paths.
    pub speeds: In<f64>,
    /// NUMA node, used with SPW_SWAP_FLAG_BIND_NODE.
    pub node: u32,
    /// 0
    pub reserved: u32,
}
}

c_struct! { first 56;
/// Memory and traffic of a tiered update.
pub struct spw_swap_budget {
    /// 0
    pub reserved: u32,
    /// Bytes of host memory for buffers and masters, all allocated at open.
    pub host_bytes: u64,
    /// Bytes of one buffer. It holds the stored state of the largest subgroup.
    pub buffer_bytes: u64,
    /// Number of buffers.
    pub buffers: u64,
    /// Buffers that keep their subgroup between updates. Subgroups that cannot be split are not kept.
    pub cached: u64,
    /// Bytes of all state.
    pub state_bytes: u64,
    /// Bytes that an update reads from the tier, and also the bytes that it writes, for subgroups of average size. A
    /// commit also writes the cached subgroups.
    pub step_bytes: u64,
    /// Bytes of one master buffer (SPW_SWAP_FLAG_SPLIT_MASTER), which holds the f32 param of the largest subgroup.
    pub master_bytes: u64,
    /// Number of master buffers; 0 if every buffer includes its own.
    pub masters: u64,
    /// Bytes of host memory that suffice for all paths to read and write at once, without any cached subgroups.
    pub working_bytes: u64,
}
}

c_struct! { first 56;
/// Counters since open.
pub struct spw_swap_stats {
    /// 0
    pub reserved: u32,
    /// Updates started, including the first fill.
    pub rounds: u64,
    /// Subgroups that an update found in memory (cache hits).
    pub hits: u64,
    /// Subgroups read from the tier.
    pub fetched: u64,
    /// Subgroups written to the tier.
    pub flushed: u64,
    /// Pieces of subgroups that moved to another path.
    pub moved: u64,
    /// Seconds in which the step waited for data. Beside the caller: seconds that calls waited for the update.
    pub exposed_seconds: f64,
}
}

/// Maximum number of subgroups. Each is an extent of the tier.
const MAX_SUBGROUPS: u64 = 1 << 20;

pub(in crate::capi) fn parse(options: In<spw_swap_options>, paths: usize) -> Result<SwapOptions> {
    let raw = options.read("options")?;
    abi_struct::flags("options.flags", raw.flags, 127)?;
    abi_struct::zero("options.reserved", raw.reserved)?;
    if raw.subgroups > MAX_SUBGROUPS {
        let reason = format!("is {}, but the limit is {MAX_SUBGROUPS}", raw.subgroups);
        return Err(Error::invalid("options.subgroups", reason));
    }
    let of_paths = |numbers: In<f64>, field| match numbers.is_null() {
        true => Ok(None),
        false => numbers.array(paths as u64, field).map(|numbers| Some(numbers.to_vec())),
    };
    Ok(SwapOptions {
        subgroups: raw.elements.array(raw.subgroups, "options.elements")?.to_vec(),
        usual: Encoding { master: master_of(raw.flags)?, moments: moments_of(raw.flags)? },
        host_memory: raw.host_memory,
        backing: Backing {
            huge: raw.flags & 1 == 0,
            lock: raw.flags & 2 == 0,
            node: (raw.flags & 16 != 0).then_some(raw.node),
        },
        ratio: of_paths(raw.ratio, "options.ratio")?,
        speeds: of_paths(raw.speeds, "options.speeds")?.unwrap_or_default(),
    })
}

fn master_of(flags: u32) -> Result<Master> {
    match (flags & 4 != 0, flags & 64 != 0) {
        (false, false) => Ok(Master::Full),
        (true, false) => Ok(Master::Split),
        (false, true) => Ok(Master::Low),
        (true, true) => {
            let reason = "has SPW_SWAP_FLAG_SPLIT_MASTER and SPW_SWAP_FLAG_LOW_BITS; set one of them";
            Err(Error::invalid("options.flags", reason))
        }
    }
}

fn moments_of(flags: u32) -> Result<Moments> {
    match (flags & 8 != 0, flags & 32 != 0) {
        (false, false) => Ok(Moments::F32),
        (true, false) => Ok(Moments::Bf16),
        (false, true) => Ok(Moments::Codes),
        (true, true) => {
            let reason = "has SPW_SWAP_FLAG_BF16_MOMENTS and SPW_SWAP_FLAG_CODED_MOMENTS; set one of them";
            Err(Error::invalid("options.flags", reason))
        }
    }
}

pub(in crate::capi) fn write_budget(plan: budget::Budget, budget_out: Out<spw_swap_budget>) -> Result<()> {
    let values = report!(spw_swap_budget from plan {
        host_bytes, buffer_bytes, buffers, cached, state_bytes, step_bytes, master_bytes, masters,
        working_bytes
    } with {
        reserved: 0
    });
    budget_out.write(&values, "budget_out")
}
