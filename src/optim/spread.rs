//! Splits tensors into chunks and spreads them over the thread pool.
//!
//! Invariants:
//! - Where a split falls, and in which shape sums meet, depends on the tensors alone, never on threads or kernels.
//! - Work of at most one chunk stays on the caller's thread: waking a worker would cost more than it saves.
#![forbid(unsafe_code)]

use super::StepStats;
use crate::error::Result;
use crate::kernel::squares::split;
use crate::kernel::{self, CHUNK, Kernel, Tensor};
use crate::sys::threads;

/// An optimizer with its coefficients: what a chunk of a tensor is stepped with.
pub trait Stepper: Copy + Send + Sync {
    /// Steps one chunk; the sum of squares of its scaled gradient if `squares`, else 0.
    fn chunk(&self, kernel: Kernel, tensor: Tensor<'_>, squares: bool) -> Result<f64>;
}

/// One tensor and what to step it with.
#[derive(Debug)]
pub struct Job<'a, S> {
    /// Coefficients.
    pub stepper: S,
    /// Spans.
    pub tensor: Tensor<'a>,
}

/// Steps all tensors; one pass over their memory, the squares of the gradients included where asked.
pub fn step_all<S: Stepper>(jobs: &mut [Job<'_, S>], squares: bool) -> Result<StepStats> {
    step_on(Kernel::current()?, jobs, squares)
}

/// [`step_all`] on a kernel of the caller's choice.
pub fn step_on<S: Stepper>(kernel: Kernel, jobs: &mut [Job<'_, S>], squares: bool) -> Result<StepStats> {
    let sum = if elements(jobs) <= CHUNK {
        list(jobs, Spread { kernel, squares, parallel: false })?
    } else {
        threads::run(|| list(jobs, Spread { kernel, squares, parallel: true }))??
    };
    Ok(StepStats::of(sum))
}

/// Elements of all tensors together.
pub fn elements<S>(jobs: &[Job<'_, S>]) -> usize {
    jobs.iter().map(|job| job.tensor.len()).sum()
}

#[derive(Clone, Copy)]
struct Spread {
    kernel: Kernel,
    squares: bool,
    parallel: bool,
}

fn list<S: Stepper>(jobs: &mut [Job<'_, S>], spread: Spread) -> Result<f64> {
    match jobs {
        [] => Ok(0.0),
        [job] => one(&job.stepper, job.tensor.reborrow(), spread),
        many => {
            let spread = Spread { parallel: spread.parallel && elements(many) > CHUNK, ..spread };
            let (left, right) = many.split_at_mut(many.len() / 2);
            both(spread.parallel, || list(left, spread), || list(right, spread))
        }
    }
}

fn one<S: Stepper>(stepper: &S, tensor: Tensor<'_>, spread: Spread) -> Result<f64> {
    if tensor.len() <= CHUNK {
        return stepper.chunk(spread.kernel, tensor, spread.squares);
    }
    let chunks = tensor.len().div_ceil(CHUNK);
    let (left, right) = tensor.split_at(split(chunks) * CHUNK);
    both(spread.parallel, || one(stepper, left, spread), || one(stepper, right, spread))
}

/// Sum of two halves of the work, at the same time where that is allowed.
pub(super) fn both(
    parallel: bool,
    left: impl FnOnce() -> Result<f64> + Send,
    right: impl FnOnce() -> Result<f64> + Send,
) -> Result<f64> {
    let (left, right) = if parallel { rayon::join(left, right) } else { (left(), right()) };
    Ok(left? + right?)
}

impl Stepper for kernel::StreamRule {
    fn chunk(&self, kernel: Kernel, tensor: Tensor<'_>, squares: bool) -> Result<f64> {
        kernel::step(kernel, *self, tensor, squares)
    }
}
