//! Cuts tensors into parts and spreads them over the threads.
//!
//! Invariants:
//! - Where a cut falls, and in which shape sums meet, depends on the tensors alone, never on threads or kernels: one
//!   recursion, [`tree`], makes the parts and later adds up what they came to.
//! - Work of at most one chunk stays on the caller's thread: waking a worker would cost more than it saves.
#![forbid(unsafe_code)]

use super::{StepStats, processor};
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
    step_on(processor::kernel()?, jobs, squares)
}

/// [`step_all`] on a kernel of the caller's choice.
pub fn step_on<O: Rule>(kernel: Kernel, jobs: &mut [Job<'_, O>], squares: bool) -> Result<StepStats> {
    spread(jobs, &Step { kernel, squares }).map(StepStats::of)
}

/// What a step would see of the gradients, with the same bits, and nothing else.
pub fn look<O: Rule>(jobs: &mut [Job<'_, O>]) -> Result<StepStats> {
    spread(jobs, &Look { kernel: processor::kernel()? }).map(StepStats::of)
}

/// Writes the 16-bit copies that a step has kept back.
pub fn publish<O: Rule>(jobs: &mut [Job<'_, O>]) -> Result<()> {
    spread(jobs, &Publish { kernel: processor::kernel()? }).map(drop)
}

/// Does `work` with all chunks of all tensors, and adds up what it returns.
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

/// Elements of all tensors together.
pub fn elements<O>(jobs: &[Job<'_, O>]) -> usize {
    jobs.iter().map(|job| job.tensor.len()).sum()
}

/// One step of each chunk.
pub(super) struct Step {
    pub kernel: Kernel,
    /// The sum is that of the gradients' squares.
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

/// What one thread does in one go.
enum Part<'p, 'a, O> {
    /// Small tensors, of at most a chunk together.
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

/// Halves the list of tensors, and then each tensor, and adds up what `part` says of the ends; the error of the first one
/// that has one. With `few`, small tensors that lie together are one end.
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
