//! Norm and finiteness of a gradient without a step, for gradient clipping.
#![forbid(unsafe_code)]

use super::{StepStats, processor};
use crate::dtype::Floats;
use crate::error::Result;
use crate::kernel::squares;
use crate::kernel::{CHUNK, grad_squares};
use crate::sys::threads;

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
