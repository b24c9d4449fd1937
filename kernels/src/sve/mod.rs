//! SVE of any vector length: the Rust face of the Adam bodies in C beside src/.
//!
//! Only Adam has SVE bodies, because only C can write them: `std::arch` has no SVE. Everything else runs on NEON under
//! these kernels' names, with the same bits: Adagrad, Lion, and sums of squares alone.

mod bodies;
mod ffi;
mod in_place;
mod recorded;
mod tiles;

pub use bodies::{Adam, SVE, SVE_BF16, bf16_detected, detected};
pub use recorded::undo;

use crate::rules::AdamRule;
use crate::tensor::Tensor;

/// Steps one chunk; `None`, with nothing done, if there is no body for these types.
pub fn step(adam: &Adam, rule: &AdamRule, tensor: &mut Tensor<'_>, squares: bool) -> Option<f64> {
    match in_place::addresses(tensor) {
        Some(spans) => in_place::step(adam, rule, tensor, spans, squares),
        None => recorded::step(adam, rule, tensor, squares),
    }
}
