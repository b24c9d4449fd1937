//! The machine and the run that a plan is made for.
#![forbid(unsafe_code)]

use serde::Serialize;

use crate::error::{Error, Result};

/// Largest capacity in bytes. Plans add a few of them, and the sums stay within 64 bits.
pub const MOST_BYTES: u64 = 1 << 60;

/// Most paths of a tier.
const MOST_PATHS: usize = 256;
/// Range of a speed per second. Times of a step are then far from the limits of f64.
const SPEEDS: std::ops::RangeInclusive<f64> = 1.0..=1e24;

/// A path of the tier.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PathSpec {
    /// Name or directory.
    pub name: String,
    /// Bytes per second of reads.
    pub read: f64,
    /// Bytes per second of writes.
    pub write: f64,
    /// Bytes that may be stored.
    pub capacity: u64,
}

impl PathSpec {
    /// The bandwidth by which state is divided: the slower direction (MLP-Offload section 3.3).
    pub fn speed(&self) -> f64 {
        self.read.min(self.write)
    }
}

/// One machine with its GPUs. Speeds are those that a run reaches, not the peaks of data sheets.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Machine {
    /// Bytes of memory of one GPU.
    pub gpu_memory: u64,
    /// Bytes of host memory for the ranks of this machine together.
    pub host_memory: u64,
    /// Bytes per second from the host to one GPU.
    pub h2d: f64,
    /// Bytes per second from one GPU to the host.
    pub d2h: f64,
    /// True if both directions of the link work at the same time.
    pub duplex: bool,
    /// Adam on all processors together, in parameters per second.
    pub cpu: f64,
    /// A separate pass that rounds parameters to 16 bits, on all processors together, in parameters per second;
    /// infinite: the step rounds in the same pass.
    #[serde(skip_serializing_if = "is_infinite")]
    pub downscale: f64,
    /// Adam on one GPU, in parameters per second.
    pub gpu: f64,
    /// Operations per second of forward and backward on one GPU.
    pub flops: f64,
    /// The paths of the tier, shared by the ranks of this machine.
    pub paths: Vec<PathSpec>,
}

fn is_infinite(value: &f64) -> bool {
    value.is_infinite()
}

impl Machine {
    /// Fails unless all speeds are from 1 to 10^24 and all capacities at most [`MOST_BYTES`].
    pub fn check(&self) -> Result<()> {
        let own = [
            ("link to the GPU", self.h2d),
            ("link to the host", self.d2h),
            ("Adam on the CPU", self.cpu),
            ("Adam on the GPU", self.gpu),
            ("operations of the GPU", self.flops),
        ];
        let rounds = (self.downscale != f64::INFINITY).then_some(("machine.downscale", self.downscale));
        let of_path = |path: &PathSpec| [("path.read", path.read), ("path.write", path.write)];
        for (name, speed) in own.into_iter().chain(rounds).chain(self.paths.iter().flat_map(of_path)) {
            if !SPEEDS.contains(&speed) {
                return Err(Error::invalid(
                    name,
                    format!("is {speed} per second, but must be from 1 to 1e24"),
                ));
            }
        }
        if self.paths.len() > MOST_PATHS {
            let reason = format!("there are {}, but the limit is {MOST_PATHS}", self.paths.len());
            return Err(Error::invalid("paths", reason));
        }
        let capacities = self.paths.iter().map(|path| ("path.capacity", path.capacity));
        let memories = [("machine.gpu_memory", self.gpu_memory), ("machine.host_memory", self.host_memory)];
        for (name, bytes) in memories.into_iter().chain(capacities) {
            if bytes > MOST_BYTES {
                return Err(Error::invalid(name, format!("is {bytes} bytes, but the limit is {MOST_BYTES}")));
            }
        }
        Ok(())
    }
}

/// Parameters of a training run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Workload {
    /// Number of ranks, each with one GPU of this machine.
    pub ranks: u64,
    /// ZeRO stage: 3 shards the 16-bit weights over the ranks, 2 does not. Both shard gradients and states.
    pub stage: u64,
    /// Sequences of one micro-batch.
    pub micro_batch: u64,
    /// Tokens of a sequence.
    pub sequence: u64,
    /// Micro-batches of a step.
    pub accumulation: u64,
    /// Activations are recomputed: the backward pass keeps one checkpoint per layer.
    pub recompute: bool,
    /// Parameters of a subgroup.
    pub subgroup: u64,
    /// Steps are committed: the paths keep the last committed state beside the new one.
    pub commits: bool,
    /// Bytes of each GPU that the plan leaves alone: context, workspaces, fragmentation.
    pub gpu_reserve: u64,
}

impl Workload {
    /// One rank, one sequence of 2048 tokens, checkpoints, subgroups of 100 M: the runs of MLP-Offload section 4.1.
    pub const DEFAULT: Workload = Workload {
        ranks: 1,
        stage: 3,
        micro_batch: 1,
        sequence: 2048,
        accumulation: 1,
        recompute: true,
        subgroup: 100_000_000,
        commits: true,
        gpu_reserve: 1 << 30,
    };

    /// Tokens of one micro-batch.
    pub fn tokens(&self) -> u64 {
        self.micro_batch * self.sequence
    }

    /// Fails unless all numbers are in range.
    pub fn check(&self) -> Result<()> {
        for (name, value, most) in [
            ("ranks", self.ranks, 1 << 10),
            ("micro_batch", self.micro_batch, 1 << 20),
            ("sequence", self.sequence, 1 << 30),
            ("accumulation", self.accumulation, 1 << 10),
            ("subgroup", self.subgroup, 1 << 56),
        ] {
            if !(1..=most).contains(&value) {
                return Err(Error::invalid(name, format!("is {value}, but must be from 1 to {most}")));
            }
        }
        if !(2..=3).contains(&self.stage) {
            return Err(Error::invalid("ZeRO stage", format!("is {}, but must be 2 or 3", self.stage)));
        }
        match self.gpu_reserve <= MOST_BYTES {
            true => Ok(()),
            false => Err(Error::invalid("gpu_reserve", format!("is over the limit of {MOST_BYTES} bytes"))),
        }
    }
}
