//! Norm and finiteness of a gradient without a step: what clipping waits for.
#![forbid(unsafe_code)]

use super::StepStats;
use super::spread::both;
use crate::dtype::Floats;
use crate::error::Result;
use crate::kernel::squares::split;
use crate::kernel::{CHUNK, Kernel, grad_squares};
use crate::sys::threads;

/// Statistics of `grad * scale`, with the bits that a fused step would report.
pub fn stats(grad: Floats<'_>, scale: f32) -> Result<StepStats> {
    let kernel = Kernel::current()?;
    let parallel = grad.len() > CHUNK;
    let sum = match parallel {
        false => sum(kernel, grad, scale, parallel)?,
        true => threads::run(|| sum(kernel, grad, scale, parallel))??,
    };
    Ok(StepStats::of(sum))
}

fn sum(kernel: Kernel, grad: Floats<'_>, scale: f32, parallel: bool) -> Result<f64> {
    if grad.len() <= CHUNK {
        return Ok(grad_squares(kernel, grad, scale));
    }
    let (left, right) = grad.split_at(split(grad.len().div_ceil(CHUNK)) * CHUNK);
    both(parallel, || sum(kernel, left, scale, parallel), || sum(kernel, right, scale, parallel))
}
