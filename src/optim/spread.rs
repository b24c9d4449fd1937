//! Splits tensors into chunks and spreads them over the thread pool.
//!
//! Invariants:
//! - Where a split falls, and in which shape sums meet, depends on the tensors alone, never on threads or kernels.
//! - Work of at most one chunk stays on the caller's thread: waking a worker would cost more than it saves.
#![forbid(unsafe_code)]

use super::StepStats;
use crate::error::Result;
use crate::kernel::squares::{self, split};
use crate::kernel::{self, CHUNK, Kernel, Rule, Tensor};
use crate::sys::threads;

/// One tensor and what to step it with.
#[derive(Debug)]
pub struct Job<'a, O> {
    /// Coefficients.
    pub optimizer: O,
    /// Spans.
    pub tensor: Tensor<'a>,
}

/// What is done with each chunk of a tensor.
pub trait Work<O>: Sync {
    /// Does it, and returns this chunk's part of a sum.
    fn chunk(&self, optimizer: O, tensor: Tensor<'_>) -> Result<f64>;
}

/// Steps all tensors; one pass over their memory, the squares of the gradients included where asked.
pub fn step_all<O: Rule>(jobs: &mut [Job<'_, O>], squares: bool) -> Result<StepStats> {
    step_on(Kernel::current()?, jobs, squares)
}

/// [`step_all`] on a kernel of the caller's choice.
pub fn step_on<O: Rule>(kernel: Kernel, jobs: &mut [Job<'_, O>], squares: bool) -> Result<StepStats> {
    spread(jobs, &Step { kernel, squares }).map(StepStats::of)
}

/// What a step would see of the gradients, with the same bits, and nothing else.
pub fn look<O: Rule>(jobs: &mut [Job<'_, O>]) -> Result<StepStats> {
    spread(jobs, &Look { kernel: Kernel::current()? }).map(StepStats::of)
}

/// Writes the 16-bit copies that a step has kept back.
pub fn publish<O: Rule>(jobs: &mut [Job<'_, O>]) -> Result<()> {
    spread(jobs, &Publish { kernel: Kernel::current()? }).map(drop)
}

/// Does `work` with all chunks of all tensors, and adds up what it returns.
pub fn spread<O: Rule, W: Work<O>>(jobs: &mut [Job<'_, O>], work: &W) -> Result<f64> {
    let elements = elements(jobs);
    for job in jobs.iter_mut() {
        job.tensor.keep(O::EXP_AVG, O::EXP_AVG_SQ)?;
        job.tensor.part_of(elements);
    }
    match elements <= CHUNK {
        true => list(jobs, work, false),
        false => threads::run(|| list(jobs, work, true))?,
    }
}

/// Elements of all tensors together.
pub fn elements<O>(jobs: &[Job<'_, O>]) -> usize {
    jobs.iter().map(|job| job.tensor.len()).sum()
}

struct Step {
    kernel: Kernel,
    squares: bool,
}

impl<O: Rule> Work<O> for Step {
    fn chunk(&self, optimizer: O, tensor: Tensor<'_>) -> Result<f64> {
        kernel::step(self.kernel, optimizer, tensor, self.squares)
    }
}

struct Look {
    kernel: Kernel,
}

impl<O: Rule> Work<O> for Look {
    fn chunk(&self, optimizer: O, tensor: Tensor<'_>) -> Result<f64> {
        Ok(kernel::grad_squares(self.kernel, tensor.grad(), optimizer.grad_scale()))
    }
}

struct Publish {
    kernel: Kernel,
}

impl<O: Rule> Work<O> for Publish {
    fn chunk(&self, _: O, tensor: Tensor<'_>) -> Result<f64> {
        kernel::publish(self.kernel, tensor);
        Ok(0.0)
    }
}

fn list<O: Rule, W: Work<O>>(jobs: &mut [Job<'_, O>], work: &W, parallel: bool) -> Result<f64> {
    match jobs {
        [] => Ok(0.0),
        [job] => one(job.optimizer, job.tensor.reborrow(), work, parallel),
        many => {
            let parallel = parallel && elements(many) > CHUNK;
            let (left, right) = many.split_at_mut(many.len() / 2);
            both(parallel, || list(left, work, parallel), || list(right, work, parallel))
        }
    }
}

fn one<O: Rule, W: Work<O>>(optimizer: O, tensor: Tensor<'_>, work: &W, parallel: bool) -> Result<f64> {
    if tensor.len() <= CHUNK {
        return work.chunk(optimizer, tensor);
    }
    let chunks = tensor.len().div_ceil(CHUNK);
    let (left, right) = tensor.split_at(split(chunks) * CHUNK);
    both(parallel, || one(optimizer, left, work, parallel), || one(optimizer, right, work, parallel))
}

/// Sum of two halves of the work, at the same time where that is allowed.
pub(super) fn both(
    parallel: bool,
    left: impl FnOnce() -> Result<f64> + Send,
    right: impl FnOnce() -> Result<f64> + Send,
) -> Result<f64> {
    let (left, right) = if parallel { threads::join(left, right) } else { (left(), right()) };
    Ok(squares::add(left?, right?))
}
