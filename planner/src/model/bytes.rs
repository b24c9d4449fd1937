//! Bytes of memory and traffic, by part.
#![forbid(unsafe_code)]

use bytesize::ByteSize;
use serde::Serialize;

use crate::error::Result;

/// A byte count with its binary unit, such as `64.0 KiB`.
pub fn size(bytes: u64) -> String {
    ByteSize::b(bytes).display().iec().to_string()
}

/// The memory of a tiered update of one rank, as the update itself computes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TierNeed {
    /// Bytes of host memory for states.
    pub host_bytes: u64,
    /// Bytes of all states.
    pub state_bytes: u64,
    /// Bytes read, and as many written, in a step.
    pub step_bytes: u64,
    /// Buffers.
    pub buffers: u64,
    /// Buffers that keep their subgroup from step to step.
    pub cached: u64,
}

/// Computes a [`TierNeed`] from the sizes of the subgroups, whether masters are split, the number of paths, and the
/// limit of host memory; without a limit, the least memory that keeps every path busy.
pub type TierBudget<'a> = dyn Fn(&[u64], bool, usize, Option<u64>) -> Result<TierNeed> + 'a;

/// Bytes of one GPU's memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct GpuBytes {
    /// 16-bit weights that stay.
    pub weights: u64,
    /// Weights of the modules that are gathered or loaded for use.
    pub window: u64,
    /// 16-bit gradients.
    pub gradients: u64,
    /// Activations and logits of a micro-batch.
    pub activations: u64,
    /// States, slots and chunk buffers of GPU steps.
    pub states: u64,
    /// The reserve of the run.
    pub reserve: u64,
}

impl GpuBytes {
    /// The sum.
    pub fn total(&self) -> u64 {
        self.weights + self.window + self.gradients + self.activations + self.states + self.reserve
    }
}

/// Subgroups of one rank whose states stay on its GPU.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Residents {
    /// Their number.
    pub subgroups: usize,
    /// Their parameters.
    pub parameters: u64,
    /// The bytes of their states on the GPU.
    pub bytes: u64,
}

/// Bytes of host memory, of all ranks together.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct HostBytes {
    /// States, or the buffers and the cache of a tiered update.
    pub states: u64,
    /// Gradients.
    pub gradients: u64,
    /// 16-bit weights: those that flow, those of a split master, and staging buffers.
    pub weights: u64,
    /// The undo log.
    pub undo: u64,
}

impl HostBytes {
    /// The sum.
    pub fn total(&self) -> u64 {
        self.states + self.gradients + self.weights + self.undo
    }

    /// The bytes of `ranks` ranks that each have these.
    pub fn times(self, ranks: u64) -> HostBytes {
        HostBytes {
            states: self.states * ranks,
            gradients: self.gradients * ranks,
            weights: self.weights * ranks,
            undo: self.undo * ranks,
        }
    }
}

/// Bytes that a step moves: over one GPU's link, and to and from the paths by all ranks together.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Traffic {
    /// Host to device.
    pub h2d: u64,
    /// Device to host.
    pub d2h: u64,
    /// Read from the paths.
    pub path_read: u64,
    /// Written to the paths.
    pub path_written: u64,
}
