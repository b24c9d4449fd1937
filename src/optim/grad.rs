//! Gradients without a step: norm and finiteness for clipping, and sums over micro-batches.
#![forbid(unsafe_code)]

use super::StepStats;
use crate::dtype::{Floats, FloatsMut};
use crate::error::Result;
use crate::kernel::squares;
use crate::kernel::{self, CHUNK, grad_squares};
use crate::sys::{threads, try_vec};

/// Statistics of `grad * scale`, with the same bits that a step reports for one tensor.
pub fn stats(grad: Floats<'_>, scale: f32) -> Result<StepStats> {
    match grad.len() {
        ..=CHUNK => Ok(StepStats::of(grad_squares(super::kernel()?, grad, scale))),
        _ => stats_all(&[grad], scale),
    }
}

/// Statistics of several gradients: the sums that [`stats`] has for each are added in their order.
pub fn stats_all(grads: &[Floats<'_>], scale: f32) -> Result<StepStats> {
    let kernel = super::kernel()?;
    let counts = chunk_counts(grads.len(), |at| grads[at].len())?;
    let mut chunks = try_vec::with_capacity("listing the chunks", counts.iter().sum())?;
    for grad in grads {
        let mut rest = *grad;
        while !rest.is_empty() {
            let (chunk, after) = rest.split_at(rest.len().min(CHUNK));
            chunks.push((chunk, 0.0));
            rest = after;
        }
    }
    let measure = |(chunk, sum): &mut (Floats<'_>, f64)| *sum = grad_squares(kernel, *chunk, scale);
    each(&mut chunks, |(chunk, _)| chunk.len(), measure)?;
    Ok(total(&counts, &try_vec::from_fn("listing the sums", chunks.len(), |at| chunks[at].1)?))
}

/// A gradient to add, and the accumulated gradient that receives it. Both have the same length.
#[derive(Debug)]
pub struct Addition<'a> {
    /// Receives the sum.
    pub dst: FloatsMut<'a>,
    /// Is added.
    pub src: Floats<'a>,
}

/// Adds `src * scale` to every `dst`, with one rounding. Returns the statistics of the results if `wanted` is true: the
/// sums of the tensors are added in their order.
pub fn accumulate(additions: Vec<Addition<'_>>, scale: f32, wanted: bool) -> Result<StepStats> {
    let kernel = super::kernel()?;
    let counts = chunk_counts(additions.len(), |at| additions[at].src.len())?;
    let mut chunks = try_vec::with_capacity("listing the chunks", counts.iter().sum())?;
    for Addition { mut dst, mut src } in additions {
        while !src.is_empty() {
            let length = src.len().min(CHUNK);
            let (to, rest) = dst.split_at_mut(length);
            let (from, after) = src.split_at(length);
            chunks.push((Some(to), from, 0.0));
            (dst, src) = (rest, after);
        }
    }
    let add = |(to, from, sum): &mut (Option<FloatsMut<'_>>, Floats<'_>, f64)| {
        if let Some(to) = to.take() {
            *sum = kernel::accumulate(kernel, to, *from, scale, wanted);
        }
    };
    each(&mut chunks, |(_, from, _)| from.len(), add)?;
    Ok(total(&counts, &try_vec::from_fn("listing the sums", chunks.len(), |at| chunks[at].2)?))
}

/// The number of chunks of each tensor.
fn chunk_counts(tensors: usize, length: impl Fn(usize) -> usize) -> Result<Vec<usize>> {
    try_vec::from_fn("counting the chunks", tensors, |at| length(at).div_ceil(CHUNK))
}

/// Does `work` on all chunks. Work of one chunk wakes no worker.
fn each<T: Send>(
    chunks: &mut [T],
    length: impl Fn(&T) -> usize,
    work: impl Fn(&mut T) + Sync + Send,
) -> Result<()> {
    match chunks.iter().map(length).sum::<usize>() {
        ..=CHUNK => chunks.iter_mut().for_each(work),
        _ => threads::each(chunks, work)?,
    }
    Ok(())
}

/// Adds the sums of the chunks of each tensor, and those of the tensors in their order.
fn total(counts: &[usize], sums: &[f64]) -> StepStats {
    let mut total = 0.0;
    let mut rest = sums;
    for count in counts {
        let (own, others) = rest.split_at(*count);
        total += squares::sum(own);
        rest = others;
    }
    StepStats::of(total)
}
