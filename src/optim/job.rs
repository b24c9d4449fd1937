//! One tensor of a call.
#![forbid(unsafe_code)]

use crate::kernel::Tensor;

/// One tensor and its optimizer coefficients.
#[derive(Debug)]
pub struct Job<'a, O> {
    /// Coefficients.
    pub optimizer: O,
    /// Memory spans of the tensor.
    pub tensor: Tensor<'a>,
}

/// Total elements of all tensors.
pub fn elements<O>(jobs: &[Job<'_, O>]) -> usize {
    jobs.iter().map(|job| job.tensor.len()).sum()
}
