//! Gradients without a step: norm and finiteness for clipping, and sums over micro-batches.
#![forbid(unsafe_code)]

use super::{StepStats, processor};
use crate::dtype::{Floats, FloatsMut};
use crate::error::Result;
use crate::kernel::squares;
use crate::kernel::{self, CHUNK, grad_squares};
use crate::sys::{threads, try_vec};

/// Statistics of `grad * scale`, with the same bits that a step reports for one tensor.
pub fn stats(grad: Floats<'_>, scale: f32) -> Result<StepStats> {
    let kernel = processor::kernel()?;
    if grad.len() <= CHUNK {
        return Ok(StepStats::of(grad_squares(kernel, grad, scale)));
    }
    let mut chunks = Vec::with_capacity(grad.len().div_ceil(CHUNK));
    let mut rest = grad;
    while !rest.is_empty() {
        let (chunk, after) = rest.split_at(rest.len().min(CHUNK));
        chunks.push((chunk, 0.0));
        rest = after;
    }
    threads::each(&mut chunks, |(chunk, sum)| *sum = grad_squares(kernel, *chunk, scale))?;
    let sums: Vec<f64> = chunks.into_iter().map(|(_, sum)| sum).collect();
    Ok(StepStats::of(squares::sum(&sums)))
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
    let kernel = processor::kernel()?;
    let chunks_of = |addition: &Addition<'_>| addition.src.len().div_ceil(CHUNK);
    let counts = try_vec::from_fn("counting the chunks", additions.len(), |at| chunks_of(&additions[at]))?;
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
    // Work of one chunk wakes no worker.
    match chunks.iter().map(|(_, from, _)| from.len()).sum::<usize>() {
        ..=CHUNK => chunks.iter_mut().for_each(add),
        _ => threads::each(&mut chunks, add)?,
    }
    let sums = try_vec::from_fn("listing the sums", chunks.len(), |at| chunks[at].2)?;
    let mut total = 0.0;
    let mut rest = &sums[..];
    for count in counts {
        let (own, others) = rest.split_at(count);
        total += squares::sum(own);
        rest = others;
    }
    Ok(StepStats::of(total))
}
