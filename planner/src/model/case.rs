//! A model on a machine, the strategies for it, and how a strategy places it.
#![forbid(unsafe_code)]

use serde::Serialize;

use super::super::interleave::choose::Choice;
use super::bytes::{GpuBytes, HostBytes, Residents, TierBudget, TierNeed, Traffic};
use super::config::Model;
use super::machine::{Machine, Workload};

/// Where states are and which processor steps them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Strategy {
    /// States on the GPU: no offload.
    Gpu,
    /// States in host memory; the CPU steps after backward (ZeRO-Offload).
    Host,
    /// As `Host`, with moments in bf16.
    HostBf16Moments,
    /// As `HostBf16Moments`, with 10 bytes per parameter: the 16-bit weights in host memory, and 16 low bits of each, are
    /// the master.
    HostSplitMaster,
    /// As `HostSplitMaster`, with 8-bit moments: 8.1 bytes per parameter.
    HostInt8Moments,
    /// States in host memory; the CPU steps during backward, the GPU steps the last buckets (SuperOffload).
    Speculation,
    /// States in host memory; CPU and GPU step subgroups at the same time (Deep Optimizer States).
    Interleave,
    /// As `Interleave`; the states of as many subgroups as fit stay in the rest of GPU memory.
    InterleaveResidents,
    /// States on the fastest path.
    TierOnePath,
    /// States on all paths (MLP-Offload).
    Tier,
    /// States on all paths; the rest of host memory caches subgroups.
    TierCache,
    /// As `TierCache`, with 10 bytes per parameter: the 16-bit weights in host memory imply the other two.
    TierSplitMaster,
}

impl Strategy {
    /// All strategies. Of two that take the same time, the earlier one is simpler.
    pub const ALL: [Strategy; 12] = [
        Strategy::Gpu,
        Strategy::Host,
        Strategy::HostBf16Moments,
        Strategy::HostSplitMaster,
        Strategy::HostInt8Moments,
        Strategy::Speculation,
        Strategy::Interleave,
        Strategy::InterleaveResidents,
        Strategy::TierOnePath,
        Strategy::Tier,
        Strategy::TierCache,
        Strategy::TierSplitMaster,
    ];

    /// The name, as in the report.
    pub const fn name(self) -> &'static str {
        match self {
            Strategy::Gpu => "gpu",
            Strategy::Host => "host",
            Strategy::HostBf16Moments => "host-bf16-moments",
            Strategy::HostSplitMaster => "host-split-master",
            Strategy::HostInt8Moments => "host-int8-moments",
            Strategy::Speculation => "speculation",
            Strategy::Interleave => "interleave",
            Strategy::InterleaveResidents => "interleave-residents",
            Strategy::TierOnePath => "tier-one-path",
            Strategy::Tier => "tier",
            Strategy::TierCache => "tier-cache",
            Strategy::TierSplitMaster => "tier-split-master",
        }
    }

    /// True if moments are f32, so that results do not depend on the strategy.
    pub const fn is_exact(self) -> bool {
        use Strategy::{HostBf16Moments, HostInt8Moments, HostSplitMaster};
        !matches!(self, HostBf16Moments | HostSplitMaster | HostInt8Moments)
    }

    /// True for strategies in which CPU and GPU step subgroups at the same time, after the last gradient.
    pub const fn is_interleaved(self) -> bool {
        matches!(self, Strategy::Interleave | Strategy::InterleaveResidents)
    }

    /// True for strategies that keep states on paths.
    pub const fn is_tiered(self) -> bool {
        use Strategy::{Tier, TierCache, TierOnePath, TierSplitMaster};
        matches!(self, TierOnePath | Tier | TierCache | TierSplitMaster)
    }
}

/// A model on a machine.
pub struct Case<'a> {
    /// The model.
    pub model: &'a Model,
    /// The machine.
    pub machine: &'a Machine,
    /// The run.
    pub run: &'a Workload,
    /// The memory of a tiered update.
    pub budget: &'a TierBudget<'a>,
    /// Parameters of a rank's shard.
    pub shard: u64,
    /// Parameters of each subgroup of a rank.
    pub sizes: Vec<u64>,
}

/// How a strategy places states, gradients and steps.
#[derive(Debug, Clone)]
pub struct Placement {
    /// GPU memory.
    pub gpu: GpuBytes,
    /// Host memory of one rank.
    pub host: HostBytes,
    /// Bytes of the states on the paths, of one rank.
    pub stored: u64,
    /// Traffic of one rank.
    pub traffic: Traffic,
    /// Fraction of the weights in host memory, which are loaded for each pass.
    pub flow: f64,
    /// The memory of the tiered update.
    pub tier: Option<TierNeed>,
    /// The last buckets, which the GPU steps.
    pub tail: u64,
    /// The interleaved plan: the update phase alone, after the last gradient, because the norm needs all of them.
    pub interleaved: Option<Choice>,
    /// Subgroups of the interleaved plan whose gradients leave the GPU.
    pub leaving: usize,
    /// The subgroups whose states stay on the GPU.
    pub residents: Residents,
}
