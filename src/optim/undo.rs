//! Taking a step back, and stepping again.
#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicU64, Ordering};

use super::spread::{Job, Step, Work, spread, step_all};
use super::{grad, processor};
use crate::checksum::Summing;
use crate::error::{Error, Result};
use crate::kernel::{self, CHUNK, Kernel, Rule, Tensor, log_bytes, log_used_of};
use crate::sys::reserve::Reserve;

/// Takes the step of every tensor back: to the bit if the tensor carries the log of that step, else by the inverse
/// formula, for which [`check_reversible`] comes first.
///
/// With `again`, the step is then done anew with that factor on the gradient, in the same pass over memory.
pub fn undo<O: Rule>(jobs: &mut [Job<'_, O>], again: Option<f32>) -> Result<()> {
    undo_on(processor::kernel()?, jobs, again)
}

/// Refuses what the inverse formula could only damage: a scaled gradient, a parameter or a state with Inf or NaN.
pub fn check_reversible<O: Rule>(job: &mut Job<'_, O>) -> Result<()> {
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
    Ok(())
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

/// Steps one tensor, and returns the checksum of everything that the step's undo will read. Each chunk is summed while
/// the caches still hold it.
pub fn step_sealed<O: Rule>(job: &mut Job<'_, O>) -> Result<u64> {
    sealed(job, Step { kernel: processor::kernel()?, squares: false })
}

/// The checksum that [`step_sealed`] returned, if the parameter, the states and the gradient are as it left them.
pub fn seal<O: Rule>(job: &mut Job<'_, O>) -> Result<u64> {
    sealed(job, Nothing)
}

fn sealed<O: Rule, W: Work<O>>(job: &mut Job<'_, O>, work: W) -> Result<u64> {
    let start = job.tensor.grad().address().addr();
    let sealing = Sealing { work, start, sum: AtomicU64::new(0) };
    spread(std::slice::from_mut(job), &sealing)?;
    Ok(sealing.sum.into_inner())
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

/// Does the work of `W`, and adds the checksum of each chunk to `sum`, in whatever order the chunks are done.
struct Sealing<W> {
    work: W,
    /// Address of the tensor's gradient: a chunk's checksum includes its distance from there.
    start: usize,
    sum: AtomicU64,
}

impl<O: Rule, W: Work<O>> Work<O> for Sealing<W> {
    fn chunk(&self, optimizer: O, mut tensor: Tensor<'_>) -> Result<f64> {
        let part = self.work.chunk(optimizer, tensor.reborrow())?;
        let mut chunk = Summing::default();
        chunk.add(&(tensor.grad().address().addr() - self.start).to_ne_bytes());
        tensor.spans().for_each(|(_, span)| chunk.add(span.bytes()));
        self.sum.fetch_add(chunk.finish(), Ordering::Relaxed);
        Ok(part)
    }
}

struct Nothing;

impl<O> Work<O> for Nothing {
    fn chunk(&self, _: O, _: Tensor<'_>) -> Result<f64> {
        Ok(0.0)
    }
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
