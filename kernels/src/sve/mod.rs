//! SVE with any vector length: the Rust side of the Adam bodies in C beside src/.
//!
//! The SVE bodies are in C because `std::arch` has no SVE, and only Adam has them. Under the SVE kernel names, Adagrad,
//! Lion and sums of squares without a step run on NEON, with the same bits.

mod bodies;
mod ffi;
mod in_place;
mod recorded;
mod tiles;

pub use bodies::{Adam, SVE, SVE_BF16, bf16_detected, detected};
pub use recorded::undo;

use crate::rules::AdamRule;
use crate::tensor::Tensor;

/// Steps one chunk and returns the sum of squares. Returns `None` without changing anything if no body exists for these
/// types.
pub fn step(adam: &Adam, rule: &AdamRule, tensor: &mut Tensor<'_>, squares: bool) -> Option<f64> {
    match in_place::addresses(tensor) {
        Some(spans) => in_place::step(adam, rule, tensor, spans, squares),
        None => recorded::step(adam, rule, tensor, squares),
    }
}
