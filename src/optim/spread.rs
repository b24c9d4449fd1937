//! Splits tensors into parts and distributes the parts over the worker threads.
//!
//! Invariants:
//! - The split points and the order of additions depend only on the tensors, never on threads or kernels. One
//!   recursion, `tree`, makes the parts and later adds the results of the parts.
//! - Work of at most one chunk runs on the caller's thread, because waking a worker would cost more than it saves.
#![forbid(unsafe_code)]

use super::{StepStats, processor};
use crate::error::Result;
use crate::kernel::squares::{self, split};
use crate::kernel::{self, CHUNK, Kernel, Rule, Tensor};
use crate::sys::threads;

/// One tensor and its optimizer coefficients.
#[derive(Debug)]
pub struct Job<'a, O> {
    /// Coefficients.
    pub optimizer: O,
    /// Memory spans of the tensor.
    pub tensor: Tensor<'a>,
}

/// Work on each chunk of a tensor.
pub trait Work<O>: Sync {
    /// Processes one chunk, and returns the chunk's term of the total sum.
    fn chunk(&self, optimizer: O, tensor: Tensor<'_>) -> Result<f64>;
}

/// Steps all tensors in one pass over their memory. Sums the squares of the scaled gradients if `squares` is true.
pub fn step_all<O: Rule>(jobs: &mut [Job<'_, O>], squares: bool) -> Result<StepStats> {
    step_on(processor::kernel()?, jobs, squares)
}

/// [`step_all`] with the kernel that the caller chooses.
pub fn step_on<O: Rule>(kernel: Kernel, jobs: &mut [Job<'_, O>], squares: bool) -> Result<StepStats> {
    spread(jobs, &Step { kernel, squares }).map(StepStats::of)
}

/// Returns the statistics that a step would return, with the same bits. Changes nothing.
pub fn look<O: Rule>(jobs: &mut [Job<'_, O>]) -> Result<StepStats> {
    spread(jobs, &Look { kernel: processor::kernel()? }).map(StepStats::of)
}

/// Writes the 16-bit parameter copies that a step withheld.
pub fn publish<O: Rule>(jobs: &mut [Job<'_, O>]) -> Result<()> {
    spread(jobs, &Publish { kernel: processor::kernel()? }).map(drop)
}

/// Does `work` on all chunks of all tensors, and returns the sum of the results. Fails if a tensor lacks a state that
/// the optimizer keeps.
pub fn spread<O: Rule, W: Work<O>>(jobs: &mut [Job<'_, O>], work: &W) -> Result<f64> {
    let elements = elements(jobs);
    for job in jobs.iter_mut() {
        job.tensor.keep(O::EXP_AVG, O::EXP_AVG_SQ)?;
        job.tensor.part_of(elements);
    }
    if elements <= CHUNK {
        return tree(jobs, false, &mut |part| part.run(work));
    }
    let mut parts = Vec::new();
    tree(jobs, true, &mut |part| {
        parts.push((Some(part), Ok(0.0)));
        Ok(0.0)
    })?;
    threads::each(&mut parts, |(part, sum)| {
        if let Some(part) = part.take() {
            *sum = part.run(work);
        }
    })?;
    let sums: Vec<Result<f64>> = parts.into_iter().map(|(_, sum)| sum).collect();
    let mut sums = sums.into_iter();
    tree(jobs, true, &mut |_| sums.next().unwrap_or(Ok(0.0)))
}

/// Total elements of all tensors.
pub fn elements<O>(jobs: &[Job<'_, O>]) -> usize {
    jobs.iter().map(|job| job.tensor.len()).sum()
}

/// Steps each chunk.
pub(super) struct Step {
    pub kernel: Kernel,
    /// If true, the result is the sum of squares of the scaled gradients.
    pub squares: bool,
}

impl<O: Rule> Work<O> for Step {
    fn chunk(&self, optimizer: O, tensor: Tensor<'_>) -> Result<f64> {
        Ok(optimizer.step(self.kernel, tensor, self.squares)?)
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

/// The unit of work of one thread.
enum Part<'p, 'a, O> {
    /// Adjacent small tensors with at most [`CHUNK`] elements in total.
    Few(&'p mut [Job<'a, O>]),
    Chunk(O, Tensor<'p>),
}

impl<O: Rule> Part<'_, '_, O> {
    fn run<W: Work<O>>(self, work: &W) -> Result<f64> {
        match self {
            Part::Few(jobs) => tree(jobs, false, &mut |part| part.run(work)),
            Part::Chunk(optimizer, tensor) => work.chunk(optimizer, tensor),
        }
    }
}

/// Recursively halves the list of tensors, then splits each tensor into chunks. Calls `part` on each leaf and returns
/// the sum of the results, or the error of the first leaf that failed. With `few`, adjacent small tensors form one
/// leaf.
fn tree<'p, 'a, O: Rule>(
    jobs: &'p mut [Job<'a, O>],
    few: bool,
    part: &mut impl FnMut(Part<'p, 'a, O>) -> Result<f64>,
) -> Result<f64> {
    match jobs {
        [] => Ok(0.0),
        [job] => chunks(job.optimizer, job.tensor.reborrow(), part),
        many if few && elements(many) <= CHUNK => part(Part::Few(many)),
        many => {
            let (left, right) = many.split_at_mut(many.len() / 2);
            meet(tree(left, few, part), tree(right, few, part))
        }
    }
}

fn chunks<'p, 'a: 'p, O: Rule + 'p>(
    optimizer: O,
    tensor: Tensor<'p>,
    part: &mut impl FnMut(Part<'p, 'a, O>) -> Result<f64>,
) -> Result<f64> {
    if tensor.len() <= CHUNK {
        return part(Part::Chunk(optimizer, tensor));
    }
    let chunk_count = tensor.len().div_ceil(CHUNK);
    let (left, right) = tensor.split_at(split(chunk_count) * CHUNK);
    meet(chunks(optimizer, left, part), chunks(optimizer, right, part))
}

fn meet(left: Result<f64>, right: Result<f64>) -> Result<f64> {
    Ok(squares::add(left?, right?))
}
