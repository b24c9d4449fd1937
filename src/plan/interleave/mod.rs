//! The interleaved update of CPU and GPU (Deep Optimizer States): what is updated where, in which order it is enqueued,
//! how long it takes and what memory it needs.
//!
//! The optimizer state of a rank is cut into subgroups, numbered in the order in which their gradients arrive. Three
//! kinds of places update them: the CPU in host memory; the GPU, which fetches the state into a slot and flushes
//! it back; and the GPU for residents, whose state never leaves it. All rates are parameters per second of one GPU and
//! its share of the host.
//!
//! | file | holds |
//! |---|---|
//! | `sites` | which subgroup is updated where: even spread, stride, residents last |
//! | `share` | Eq. 1, as printed and corrected |
//! | `schedule` | the commands of one step: copies, updates, and the events that order them |
//! | `pieces` | the GPU's part of a step, and how much of it is enqueued at a time |
//! | `timeline` | a discrete-event simulator of engines that serve one operation at a time |
//! | `model` | the schedule on the simulator: seconds of a step |
//! | `choose` | the plan that the model likes best |
//! | `memory` | bytes that a plan needs and moves |
#![forbid(unsafe_code)]

pub mod choose;
pub mod memory;
pub mod model;
pub mod pieces;
pub mod schedule;
pub mod share;
pub mod sites;
pub mod timeline;

use super::check;
use crate::error::{Error, Result};

/// Most subgroups of a plan.
pub const MAX_SUBGROUPS: usize = 1 << 16;
/// Most parts that all subgroups together are cut into: each is a few commands of every step.
pub const MAX_PARTS: u64 = 1 << 18;
/// Most slots; the model gains nothing from a third.
pub const MAX_SLOTS: usize = 8;

/// What one GPU, its links and its share of the host can do, in parameters per second.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rates {
    /// Optimizer step on the CPU (the paper's U_c), measured while copies run.
    pub cpu: f64,
    /// Rounding to 16 bits on the CPU (D_c); infinite where the step does it in the same pass.
    pub downscale: f64,
    /// Optimizer step on the GPU (U_g).
    pub gpu: f64,
    /// Host to device, in f32 words (B).
    pub h2d: f64,
    /// Device to host, in f32 words (B).
    pub d2h: f64,
    /// Widening gradients to f32 on the GPU; infinite if negligible.
    pub cast: f64,
    /// Bytes per second of host memory that all of it shares; infinite if it never binds.
    pub dram: f64,
    /// Both directions of the link at once.
    pub duplex: bool,
}

impl Rates {
    /// Refuses rates that no machine has.
    pub fn check(&self) -> Result<()> {
        check::positive("rates.cpu", self.cpu)?;
        check::positive_or_infinite("rates.downscale", self.downscale)?;
        check::positive("rates.gpu", self.gpu)?;
        check::positive("rates.h2d", self.h2d)?;
        check::positive("rates.d2h", self.d2h)?;
        check::positive_or_infinite("rates.cast", self.cast)?;
        check::positive_or_infinite("rates.dram", self.dram)
    }
}

/// In which form gradients go to the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wire {
    /// Widened on the GPU, f32 on the link.
    F32,
    /// 16 bits on the link, widened in the registers of the CPU step.
    Native,
    /// The caller brings them to the host itself.
    Delivered,
}

/// Where the gradients of subgroups that the GPU updates wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GpuGrads {
    /// On the GPU.
    Kept,
    /// On the host like all others, and fetched with the state.
    Fetched,
}

/// What is fixed for the life of an optimizer: its subgroups and how they travel.
#[derive(Debug, Clone, PartialEq)]
pub struct Shape {
    /// Parameters of each subgroup, in the order in which gradients arrive.
    pub sizes: Vec<u64>,
    /// Parameters per copy; copies of one state take turns with others at this grain.
    pub chunk: u64,
    /// State buffers on the GPU.
    pub slots: usize,
    /// How gradients leave.
    pub wire: Wire,
    /// Where gradients of GPU subgroups wait.
    pub gpu_grads: GpuGrads,
}

impl Shape {
    /// `count` subgroups of `size` parameters, two slots, whole copies, f32 wire, kept gradients.
    pub fn uniform(count: usize, size: u64) -> Shape {
        Shape {
            sizes: vec![size; count],
            chunk: u64::MAX,
            slots: 2,
            wire: Wire::F32,
            gpu_grads: GpuGrads::Kept,
        }
    }

    /// Number of subgroups.
    pub fn count(&self) -> usize {
        self.sizes.len()
    }

    /// Parameters of all subgroups.
    pub fn total(&self) -> u64 {
        self.sizes.iter().sum()
    }

    /// Parameters of the largest subgroup.
    pub fn largest(&self) -> u64 {
        self.sizes.iter().copied().max().unwrap_or(0)
    }

    /// Words per parameter of a gradient on the link; zero where the caller delivers it.
    pub fn wire_words(&self) -> f64 {
        match self.wire {
            Wire::F32 => 1.0,
            Wire::Native => 0.5,
            Wire::Delivered => 0.0,
        }
    }

    /// Words per parameter that a GPU update fetches for its gradient.
    pub fn fetched_words(&self) -> f64 {
        match (self.gpu_grads, self.wire) {
            (GpuGrads::Kept, _) => 0.0,
            (GpuGrads::Fetched, Wire::Native) => 0.5,
            (GpuGrads::Fetched, _) => 1.0,
        }
    }

    /// Refuses shapes that no schedule can be made of.
    pub fn check(&self) -> Result<()> {
        let refuse = |name: &'static str, reason: String| Err(Error::invalid(name, reason));
        if self.count() > MAX_SUBGROUPS {
            return refuse("subgroups", format!("{} are more than {MAX_SUBGROUPS}", self.count()));
        }
        if self
            .sizes
            .iter()
            .try_fold(0_u64, |sum, size| sum.checked_add(*size))
            .is_none_or(|sum| sum >> 56 != 0)
        {
            return refuse("subgroups", "have 2^56 parameters or more".to_string());
        }
        if !(1..=MAX_SLOTS).contains(&self.slots) {
            return refuse("slots", format!("{} is not in 1..={MAX_SLOTS}", self.slots));
        }
        if self.chunk == 0 {
            return refuse("chunk", "is 0".to_string());
        }
        match self.sizes.iter().map(|size| size.div_ceil(self.chunk)).sum::<u64>() {
            parts if parts > MAX_PARTS => refuse(
                "chunk",
                format!("of {} cuts the subgroups into {parts} parts, over {MAX_PARTS}", self.chunk),
            ),
            _ => Ok(()),
        }
    }
}
