//! Rolls back steps, and repeats them with another gradient scale.
#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicU64, Ordering};

use super::grad;
use super::parallel::{ChunkStep, Job, Work, run_parallel, step_all};
use crate::checksum::RunningChecksum;
use crate::error::{Error, Result};
use crate::kernel::{self, CHUNK, Kernel, Optimizer, log_bytes, log_has_values, log_used_of};
use crate::sys::reserve::Reserve;

/// Rolls back the step of every tensor: bit-exactly if the tensor has the log of that step, else approximately by the
/// inverse formula. Without a log, the caller must first call [`check_reversible`].
///
/// With `redo_scale`, repeats the step in the same pass over memory, with `redo_scale` as the gradient scale.
pub fn undo<O: Optimizer>(jobs: &mut [Job<'_, O>], redo_scale: Option<f32>) -> Result<()> {
    undo_on(super::kernel()?, jobs, redo_scale)
}

/// Returns an error if the scaled gradient, the parameter or a state holds Inf or NaN. The inverse formula cannot
/// recover the old values from these.
pub fn check_reversible<O: Optimizer>(job: &mut Job<'_, O>) -> Result<()> {
    job.tensor.require_states(O::EXP_AVG, O::EXP_AVG_SQ)?;
    for (name, span) in job.tensor.spans() {
        let scale = if name == "grad" { job.optimizer.grad_scale() } else { 1.0 };
        if grad::stats(span, scale)?.nonfinite {
            return Err(Error::invalid(
                name,
                "contains Inf or NaN, so a step without a log cannot be undone; record with the delta mode",
            ));
        }
    }
    Ok(())
}

/// [`undo`] with the kernel that the caller chooses. A log can be read only by the kernel that wrote it.
pub fn undo_on<O: Optimizer>(kernel: Kernel, jobs: &mut [Job<'_, O>], redo_scale: Option<f32>) -> Result<()> {
    run_parallel(jobs, &Undo { kernel, redo_scale }).map(drop)
}

/// Repeats the step of tensors with a shadow, with another gradient scale. The old values are still in the states.
pub fn step_again<O: Optimizer>(jobs: &mut [Job<'_, O>], grad_scale: f32) -> Result<()> {
    for job in jobs.iter_mut() {
        job.optimizer = job.optimizer.with_grad_scale(grad_scale);
    }
    step_all(jobs, false).map(drop)
}

/// Steps one tensor, and returns the checksum of all values that the undo of this step will read. Each chunk is summed
/// right after its step, while it is still in the caches.
pub fn step_sealed<O: Optimizer>(job: &mut Job<'_, O>) -> Result<u64> {
    sealed(job, ChunkStep { kernel: super::kernel()?, squares: false })
}

/// Computes the checksum of [`step_sealed`] again. The result is equal if parameter, states and gradient are unchanged.
pub fn seal<O: Optimizer>(job: &mut Job<'_, O>) -> Result<u64> {
    sealed(job, Nothing)
}

fn sealed<O: Optimizer, W: Work<O>>(job: &mut Job<'_, O>, work: W) -> Result<u64> {
    let start = job.tensor.grad().address().addr();
    let sealing = Sealing { work, start, sum: AtomicU64::new(0) };
    run_parallel(std::slice::from_mut(job), &sealing)?;
    Ok(sealing.sum.into_inner())
}

/// Bytes of `log` that the last recorded step used. `lengths` are the elements of each tensor of that step.
pub fn log_used(log: &mut Reserve, lengths: impl Iterator<Item = usize>) -> u64 {
    let mut rest: &[u8] = log.bytes_mut();
    let used = lengths.map(|n| {
        let (log, after) = rest.split_at(log_bytes(n));
        rest = after;
        log_used_of(log, n)
    });
    used.sum()
}

/// Releases the log memory of chunks that used more than `KEPT` bytes per element. `lengths` are the elements of each
/// tensor. The next step is expected to need less, except where the log holds old values.
pub fn trim(log: &mut Reserve, lengths: impl Iterator<Item = usize>) {
    let mut start = 0;
    for n in lengths {
        for at in (0..n).step_by(CHUNK) {
            let elements = CHUNK.min(n - at);
            let end = start + log_bytes(elements);
            let chunk: &[u8] = log.bytes_mut().get(start..end).unwrap_or_default();
            if !log_has_values(chunk) && log_used_of(chunk, elements) > (KEPT * elements) as u64 {
                log.release_range(start..end);
            }
            start = end;
        }
    }
}

/// Maximal log bytes per element of a chunk whose memory is kept between steps.
const KEPT: usize = 3;

/// Attaches to each tensor its part of `log`. Fails with [`no_room`] if `log` has less than [`log_bytes_of`] bytes.
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

/// The error for tensors that need more log bytes than the recording has.
pub fn no_room() -> Error {
    Error::invalid("tensors", "have more elements than the recording has room for; raise options.elements")
}

/// Log bytes that all tensors need.
pub fn log_bytes_of<O>(jobs: &[Job<'_, O>]) -> usize {
    jobs.iter().map(|job| kernel::log_bytes(job.tensor.len())).sum()
}

/// Does the work of `W`, then adds the checksum of each chunk to `sum`. The sum does not depend on the order of chunks.
struct Sealing<W> {
    work: W,
    /// Address of the gradient of the tensor. The checksum of a chunk includes the chunk's offset from this address.
    start: usize,
    sum: AtomicU64,
}

impl<O: Optimizer, W: Work<O>> Work<O> for Sealing<W> {
    // The checksum depends on the cuts, and must not depend on whether the tensor has a log.
    const WHOLE_CHUNKS: bool = true;

    fn chunk(&self, job: Job<'_, O>) -> Result<f64> {
        let Job { optimizer, mut tensor } = job;
        let part = self.work.chunk(Job { optimizer, tensor: tensor.reborrow() })?;
        let mut chunk = RunningChecksum::default();
        chunk.add(&(tensor.grad().address().addr() - self.start).to_ne_bytes());
        tensor.spans().for_each(|(_, span)| chunk.add(span.bytes()));
        self.sum.fetch_add(chunk.finish(), Ordering::Relaxed);
        Ok(part)
    }
}

struct Nothing;

impl<O> Work<O> for Nothing {
    fn chunk(&self, _: Job<'_, O>) -> Result<f64> {
        Ok(0.0)
    }
}

struct Undo {
    kernel: Kernel,
    redo_scale: Option<f32>,
}

impl<O: Optimizer> Work<O> for Undo {
    fn chunk(&self, job: Job<'_, O>) -> Result<f64> {
        let Job { optimizer, tensor } = job;
        optimizer.undo(self.kernel, tensor, self.redo_scale)?;
        Ok(0.0)
    }
}
