//! The interleaved optimizer update on CPU and GPU (Deep Optimizer States): the placement of each subgroup, the
//! order of the commands, the predicted time, and the memory.
//!
//! The optimizer state of a rank is split into subgroups, numbered in the order in which their gradients arrive. There
//! are three placements:
//! - the CPU, which updates the state in host memory;
//! - the GPU, which fetches the state into a slot, updates it and flushes it back to host memory;
//! - the GPU for residents, whose state stays in GPU memory.
//!
//! All rates are in parameters per second, for one GPU and its share of the host.
//!
//! | file | holds |
//! |---|---|
//! | `placements` | the placement of every subgroup: spread evenly or by a stride, residents last |
//! | `share` | Eq. 1, as printed and as corrected |
//! | `schedule` | the commands of one step: copies, updates, and the events that order them |
//! | `pieces` | the GPU commands of a step, in pieces of one subgroup, with a limit on queued operations |
//! | `timeline` | a discrete-event simulator of engines that serve one operation at a time |
//! | `model` | the predicted seconds of a step: the schedule run on the simulator |
//! | `choose` | the plan with the shortest predicted time |
//! | `memory` | bytes that a plan allocates and transfers |
#![forbid(unsafe_code)]

pub mod choose;
pub mod memory;
pub mod model;
pub mod pieces;
pub mod placements;
pub mod schedule;
pub mod share;
pub mod timeline;

use super::check;
use crate::error::{Error, Result};

/// Maximal number of subgroups of a plan.
pub const MAX_SUBGROUPS: usize = 1 << 16;
/// Maximal number of chunks of all subgroups together. Each chunk takes a few commands in every step.
const MAX_PARTS: u64 = 1 << 18;
/// Maximal number of slots.
const MAX_SLOTS: usize = 8;
/// Number of slots unless the caller gives one: prefetch, update and flush have one each, so that both directions of the
/// link are always busy. With two, a prefetch waits for the update and part of the flush of an earlier subgroup. On a
/// device it also waits until the host has seen the end of the flush and has enqueued it.
pub const DEFAULT_SLOTS: usize = 3;

/// Rates of one GPU, its links and its share of the host, in parameters per second unless stated otherwise.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rates {
    /// Optimizer step on the CPU (the paper's U_c): alone if `dram` is finite, beside copies if it is not.
    pub cpu: f64,
    /// Rounding to 16 bits on the CPU (D_c); infinite if the step rounds in the same pass.
    pub downscale: f64,
    /// Optimizer step on the GPU (U_g).
    pub gpu: f64,
    /// Host to device, in f32 words (B).
    pub h2d: f64,
    /// Device to host, in f32 words (B).
    pub d2h: f64,
    /// Widening of gradients to f32 on the GPU; infinite if the time is negligible.
    pub cast: f64,
    /// Host memory bandwidth in bytes per second, shared by CPU and copies; infinite if it is never the limit.
    pub dram: f64,
    /// True if the link transfers in both directions at the same time.
    pub duplex: bool,
}

impl Rates {
    /// Returns an error unless all rates are positive; only `downscale`, `cast` and `dram` may be infinite.
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

/// How gradients are transferred to the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TransferDtype {
    /// Widened on the GPU and transferred as f32.
    F32,
    /// Transferred as 16 bits and widened in the registers of the CPU step.
    Native,
    /// Transferred by the caller.
    Delivered,
}

/// Where the gradients of GPU subgroups are stored until the update.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GpuGrads {
    /// In GPU memory.
    Kept,
    /// In host memory, as for CPU subgroups, and fetched with the state.
    Fetched,
}

/// Properties that are fixed for the lifetime of an optimizer: the subgroups and how they are transferred.
#[derive(Debug, Clone, PartialEq)]
pub struct Shape {
    /// Parameters of each subgroup, in the order in which gradients arrive.
    pub sizes: Vec<u64>,
    /// Parameters per copy operation. Other copies can run between two chunks of a state.
    pub chunk: u64,
    /// Number of state buffers on the GPU. Each takes 12 bytes per parameter of the largest subgroup, and the bytes of
    /// its gradient if that is fetched.
    pub slots: usize,
    /// How gradients are transferred to the host.
    pub transfer_dtype: TransferDtype,
    /// Where the gradients of GPU subgroups are stored until the update.
    pub gpu_grads: GpuGrads,
}

impl Shape {
    /// `count` subgroups of `size` parameters, [`DEFAULT_SLOTS`], copies of whole arrays, [`TransferDtype::F32`],
    /// [`GpuGrads::Kept`].
    pub fn uniform(count: usize, size: u64) -> Shape {
        Shape {
            sizes: vec![size; count],
            chunk: u64::MAX,
            slots: DEFAULT_SLOTS,
            transfer_dtype: TransferDtype::F32,
            gpu_grads: GpuGrads::Kept,
        }
    }

    /// Subgroups of `size` parameters for `total` parameters, the last one smaller if need be; the rest as for
    /// [`Shape::uniform`]. Errors: more subgroups than a plan may have; nothing is allocated for them.
    pub fn covering(total: u64, size: u64) -> Result<Shape> {
        let count = total.div_ceil(size.max(1));
        if count > MAX_SUBGROUPS as u64 {
            let reason = format!(
                "of {size} parameters divides {total} parameters into {count} subgroups, but the limit is {MAX_SUBGROUPS}"
            );
            return Err(Error::invalid("subgroup", reason));
        }
        let mut shape = Shape::uniform(count as usize, size);
        if let Some(last) = shape.sizes.last_mut() {
            *last = total - (count - 1) * size;
        }
        Ok(shape)
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

    /// f32 words per parameter of a gradient on the link to the host; zero if the caller delivers the gradients.
    pub fn transfer_words(&self) -> f64 {
        match self.transfer_dtype {
            TransferDtype::F32 => 1.0,
            TransferDtype::Native => 0.5,
            TransferDtype::Delivered => 0.0,
        }
    }

    /// f32 words per parameter that a GPU update fetches for its gradient.
    pub fn fetched_words(&self) -> f64 {
        match (self.gpu_grads, self.transfer_dtype) {
            (GpuGrads::Kept, _) => 0.0,
            (GpuGrads::Fetched, TransferDtype::Native) => 0.5,
            (GpuGrads::Fetched, _) => 1.0,
        }
    }

    /// Returns an error if a size, the number of slots or the chunk size is out of range.
    pub fn check(&self) -> Result<()> {
        let refuse = |name: &'static str, reason: String| Err(Error::invalid(name, reason));
        if self.count() > MAX_SUBGROUPS {
            return refuse("count", format!("there are {}, but the limit is {MAX_SUBGROUPS}", self.count()));
        }
        if self
            .sizes
            .iter()
            .try_fold(0_u64, |sum, size| sum.checked_add(*size))
            .is_none_or(|sum| sum >> 56 != 0)
        {
            return refuse("sizes", "have a sum of 2^56 parameters or more".to_string());
        }
        if !(1..=MAX_SLOTS).contains(&self.slots) {
            return refuse("slots", format!("{} is not between 1 and {MAX_SLOTS}", self.slots));
        }
        if self.chunk == 0 {
            return refuse("chunk", "is 0, but must be at least 1".to_string());
        }
        match self.sizes.iter().map(|size| size.div_ceil(self.chunk)).sum::<u64>() {
            parts if parts > MAX_PARTS => refuse(
                "chunk",
                format!(
                    "of {} splits the subgroups into {parts} parts, but the limit is {MAX_PARTS}; use larger \
                     chunks",
                    self.chunk
                ),
            ),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_is_divided_into_subgroups_and_too_many_are_refused_before_they_are_allocated() {
        let sizes = |total, size| Shape::covering(total, size).map(|shape| shape.sizes);
        assert_eq!(sizes(10, 4), Ok(vec![4, 4, 2]));
        assert_eq!(sizes(8, 4), Ok(vec![4, 4]));
        assert_eq!(sizes(3, 4), Ok(vec![3]));
        assert_eq!(sizes(MAX_SUBGROUPS as u64, 1).map(|sizes| sizes.len()), Ok(MAX_SUBGROUPS));
        for total in [MAX_SUBGROUPS as u64 + 1, u64::MAX] {
            let refused = sizes(total, 1).unwrap_err().to_string();
            assert!(refused.contains("subgroup") && refused.contains("65536"), "{refused}");
        }
    }
}
