//! The tensors of one call, kept for longer than the call: those of a recorded step, and of a speculation bucket.
#![forbid(unsafe_code)]

use super::job::Job;
use crate::error::{Error, Result};
use crate::kernel::{LentTensor, Tensor};
use crate::sys::try_vec;

/// The tensors of one call that are not empty, each with its coefficients.
#[derive(Debug)]
pub struct Lent<O> {
    tensors: Vec<Entry<O>>,
}

#[derive(Debug)]
struct Entry<O> {
    /// Position in the call, for messages.
    index: usize,
    tensor: LentTensor,
    optimizer: O,
}

/// Where the 16-bit copy of a tensor lies.
#[derive(Debug, Clone, Copy)]
pub struct LentCopy {
    /// Position of the tensor in the call.
    pub index: usize,
    /// First byte.
    pub address: usize,
    /// Length.
    pub bytes: usize,
}

impl<O: Copy> Lent<O> {
    /// An empty list with room for `count` tensors.
    pub fn with_capacity(count: usize) -> Result<Lent<O>> {
        Ok(Lent { tensors: try_vec::with_capacity("listing the tensors", count)? })
    }

    /// Adds the tensor at position `index` of the call.
    pub fn push(&mut self, index: usize, tensor: LentTensor, optimizer: O) {
        self.tensors.push(Entry { index, tensor, optimizer });
    }

    /// Number of tensors.
    pub fn count(&self) -> usize {
        self.tensors.len()
    }

    /// Elements of each tensor.
    pub fn lengths(&self) -> impl Iterator<Item = usize> {
        self.tensors.iter().map(|entry| entry.tensor.len())
    }

    /// The 16-bit copies of the tensors that have one.
    pub fn copies(&self) -> Result<Vec<LentCopy>> {
        let mut copies = try_vec::with_capacity("listing the 16-bit copies", self.tensors.len())?;
        copies.extend(self.tensors.iter().filter_map(|entry| {
            let (address, bytes) = entry.tensor.param_copy()?;
            Some(LentCopy { index: entry.index, address, bytes })
        }));
        Ok(copies)
    }

    /// Fails for a tensor whose step takes what other code has written to its copy.
    pub fn check_copies_only_written(&self) -> Result<()> {
        match self.tensors.iter().find(|entry| entry.tensor.takes_copy()) {
            None => Ok(()),
            Some(entry) => Err(Error::invalid(
                format!("tensors[{}].take_copy", entry.index),
                "is 1, but the copies are written after the verdict; publish them in the step, or set 0",
            )),
        }
    }

    /// Fails for a tensor without shadow spans if `wanted`, or with shadow spans if not.
    pub fn check_shadows(&self, wanted: bool) -> Result<()> {
        let reason = match wanted {
            true => "is NULL, but the undo mode is SHADOW; set the shadow spans of every tensor",
            false => "is set, but the undo mode is not SHADOW; leave the shadow spans NULL",
        };
        match self.tensors.iter().find(|entry| entry.tensor.has_shadow() != wanted) {
            None => Ok(()),
            Some(entry) => Err(Error::invalid(format!("tensors[{}].shadow_param", entry.index), reason)),
        }
    }

    /// True if the tensors have the number, lengths, types and coefficients of `other`.
    pub fn is_alike(&self, other: &Self) -> bool
    where
        O: PartialEq,
    {
        let shape = |entry: &Entry<O>| (entry.tensor.len(), entry.tensor.types(), entry.optimizer);
        self.tensors.iter().map(shape).eq(other.tensors.iter().map(shape))
    }

    /// The tensors, for one pass over their memory.
    pub fn lend(&mut self) -> Result<Vec<Job<'_, O>>> {
        self.lend_by(LentTensor::borrow)
    }

    /// [`Lent::lend`], with each tensor as `borrow` lends it: with all or some of its spans.
    pub fn lend_by(&mut self, borrow: impl Fn(&mut LentTensor) -> Tensor<'_>) -> Result<Vec<Job<'_, O>>> {
        let mut jobs = try_vec::with_capacity("listing the tensors", self.tensors.len())?;
        jobs.extend(
            self.tensors
                .iter_mut()
                .map(|entry| Job { optimizer: entry.optimizer, tensor: borrow(&mut entry.tensor) }),
        );
        Ok(jobs)
    }

    /// Adds to an error of the job `job` the position of its tensor in the call.
    pub fn named(&self, job: usize, error: Error) -> Error {
        let index = self.tensors.get(job).map_or(job, |entry| entry.index);
        error.within(&format!("tensors[{index}]."))
    }
}
