//! Taking a step back, and stepping again.
#![forbid(unsafe_code)]

use super::spread::{Job, Work, spread, step_all};
use super::{grad, processor};
use crate::error::{Error, Result};
use crate::kernel::{self, CHUNK, Kernel, Rule, Tensor, log_bytes, log_used_of};
use crate::sys::reserve::Reserve;

/// Takes the step of every tensor back: to the bit if the tensor carries the log of that step, else by the inverse
/// formula, which refuses what it could only damage before it touches anything: a scaled gradient, a parameter or a state
/// with Inf or NaN.
///
/// With `again`, the step is then done anew with that factor on the gradient, in the same pass over memory.
pub fn undo<O: Rule>(jobs: &mut [Job<'_, O>], again: Option<f32>) -> Result<()> {
    for job in jobs.iter_mut().filter(|job| !job.tensor.has_log()) {
        job.tensor.keep(O::EXP_AVG, O::EXP_AVG_SQ)?;
        for (name, span) in job.tensor.spans() {
            let scale = if name == "grad" { job.optimizer.grad_scale() } else { 1.0 };
            if grad::stats(span, scale)?.nonfinite {
                return Err(Error::invalid(
                    name,
                    "holds Inf or NaN, and the step was not logged: it cannot be undone",
                ));
            }
        }
    }
    undo_on(processor::kernel()?, jobs, again)
}

/// [`undo`] on a kernel of the caller's choice: the one that stepped.
pub fn undo_on<O: Rule>(kernel: Kernel, jobs: &mut [Job<'_, O>], again: Option<f32>) -> Result<()> {
    spread(jobs, &Undo { kernel, again }).map(drop)
}

/// Steps tensors that have a shadow again, with another factor on the gradient: the old values are still there.
pub fn step_again<O: Rule>(jobs: &mut [Job<'_, O>], grad_scale: f32) -> Result<()> {
    for job in jobs.iter_mut() {
        job.optimizer = job.optimizer.with_grad_scale(grad_scale);
    }
    step_all(jobs, false).map(drop)
}

/// A number that tells other contents apart from these with near certainty, though not every small change: it looks at
/// up to 256 elements of each span.
pub fn fingerprint(tensor: &Tensor<'_>) -> u64 {
    const SAMPLES: usize = 256;
    let mut mixed = tensor.len() as u64;
    for (_, span) in tensor.spans() {
        let n = span.len();
        for sample in 0..n.min(SAMPLES) {
            let bits = span.bits_at((sample as u128 * n as u128 / n.min(SAMPLES) as u128) as usize);
            mixed = (mixed ^ u64::from(bits)).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
        }
    }
    mixed
}

/// Bytes that the last recorded step of tensors of these lengths used of their log.
pub fn log_used(log: &mut Reserve, lengths: impl Iterator<Item = usize>) -> u64 {
    let mut rest: &[u8] = log.bytes_mut();
    let used = lengths.map(|n| {
        let (log, after) = rest.split_at(log_bytes(n));
        rest = after;
        log_used_of(log, n)
    });
    used.sum()
}

/// Gives back the memory of chunks that took more than [`KEPT`] bytes per element: the next step will need less.
pub fn trim(log: &mut Reserve, lengths: impl Iterator<Item = usize>) {
    let mut start = 0;
    for n in lengths {
        for at in (0..n).step_by(CHUNK) {
            let elements = CHUNK.min(n - at);
            let end = start + log_bytes(elements);
            let used = log.bytes_mut().get(start..end).map_or(0, |log| log_used_of(log, elements));
            if used > (KEPT * elements) as u64 {
                log.release_range(start..end);
            }
            start = end;
        }
    }
}

/// Bytes of log per element that stay between steps.
const KEPT: usize = 3;

/// Gives each tensor its part of a log, which has [`log_bytes_of`] bytes or more.
pub fn attach<'a, O>(jobs: Vec<Job<'a, O>>, log: &'a mut [u8]) -> Result<Vec<Job<'a, O>>> {
    let mut rest = log;
    let attached = jobs.into_iter().map(|job| {
        let wanted = kernel::log_bytes(job.tensor.len());
        let (mine, after) = std::mem::take(&mut rest).split_at_mut_checked(wanted).ok_or_else(no_room)?;
        rest = after;
        Ok(Job { optimizer: job.optimizer, tensor: job.tensor.with_log(mine)? })
    });
    attached.collect()
}

/// The tensors of a step need more log than there is.
pub fn no_room() -> Error {
    Error::invalid("tensors", "have more elements than the recording has room for")
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
        optimizer.undo(self.kernel, tensor, self.again)?;
        Ok(0.0)
    }
}
