//! Taking a step back, and stepping again.
#![forbid(unsafe_code)]

use super::grad;
use super::spread::{Job, Work, spread};
use crate::error::{Error, Result};
use crate::kernel::{self, Kernel, Rule, Tensor};

/// Takes the step of every tensor back: to the bit if the tensor carries the log of that step, else by the inverse
/// formula, which refuses gradients with Inf or NaN before it touches anything.
///
/// With `again`, the step is then done anew with that factor on the gradient, in the same pass over memory.
pub fn undo<O: Rule>(jobs: &mut [Job<'_, O>], again: Option<f32>) -> Result<()> {
    for job in jobs.iter() {
        if !job.tensor.has_log() && grad::stats(job.tensor.grad(), 1.0)?.nonfinite {
            return Err(Error::invalid(
                "grad",
                "holds Inf or NaN, and the step was not logged: it cannot be undone",
            ));
        }
    }
    undo_on(Kernel::current()?, jobs, again)
}

/// [`undo`] on a kernel of the caller's choice: the one that stepped.
pub fn undo_on<O: Rule>(kernel: Kernel, jobs: &mut [Job<'_, O>], again: Option<f32>) -> Result<()> {
    spread(jobs, &Undo { kernel, again }).map(drop)
}

/// Gives each tensor its part of a log, which has [`log_bytes_of`] bytes or more.
pub fn attach<'a, O>(jobs: Vec<Job<'a, O>>, log: &'a mut [u8]) -> Result<Vec<Job<'a, O>>> {
    let mut rest = log;
    let attached = jobs.into_iter().map(|job| {
        let wanted = kernel::log_bytes(job.tensor.len());
        let (mine, after) = std::mem::take(&mut rest)
            .split_at_mut_checked(wanted)
            .ok_or_else(|| Error::invalid("tensors", "have more elements than the recording has room for"))?;
        rest = after;
        Ok(Job { optimizer: job.optimizer, tensor: job.tensor.with_log(mine)? })
    });
    attached.collect()
}

/// Bytes of the log of all tensors.
pub fn log_bytes_of<O>(jobs: &[Job<'_, O>]) -> usize {
    jobs.iter().map(|job| kernel::log_bytes(job.tensor.len())).sum()
}

struct Undo {
    kernel: Kernel,
    again: Option<f32>,
}

impl<O: Rule> Work<O> for Undo {
    fn chunk(&self, optimizer: O, tensor: Tensor<'_>) -> Result<f64> {
        kernel::undo(self.kernel, optimizer, tensor, self.again).map(|()| 0.0)
    }
}
