//! One optimizer body for every instruction set.
//!
//! | file | holds |
//! |---|---|
//! | `rules` | the arithmetic of Adam, Adagrad and Lion, written once over a vector |
//! | `step`, `record`, `undo` | a step over a chunk, recorded if wanted, and its exact reversal |
//! | `pack` | how the differences of a record become bytes |
//! | `publish` | the 16-bit copy of a parameter without a step |
//! | `walk` | how a chunk is walked: whole vectors, then one padded vector for the rest |
//! | `element` | element types in memory, and the table of type combinations |
//! | `squares` | the fixed tree in which squares are summed |
//! | `vector` | the operations that an instruction set supplies; `scalar`, `avx2`, `avx512`, `neon` supply them |
//! | `sve`, `sve_undo` | Adam and its undo by the C bodies in kernels/, since Rust has no SVE |
//! | `select` | which set this process uses |
//! | `float_mode` | IEEE arithmetic whatever the caller's thread has switched on |

mod element;
mod float_mode;
mod pack;
mod publish;
mod record;
mod rules;
mod select;
pub(crate) mod squares;
mod step;
mod tensor;
mod undo;
mod vector;
mod walk;

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "aarch64")]
mod neon;
mod scalar;
#[cfg(target_arch = "aarch64")]
mod sve;
#[cfg(target_arch = "aarch64")]
mod sve_undo;

#[cfg(test)]
pub(crate) mod check;
#[cfg(test)]
mod check_bounds;
#[cfg(test)]
mod check_stream;
#[cfg(test)]
mod check_undo;

pub use float_mode::IeeeMode;
pub use publish::publish;
pub use rules::{AdagradRule, AdamRule, LionRule, Rule, StreamRule, WeightDecay};
pub use select::Kernel;
pub use step::{grad_squares, step};
pub use tensor::{States, Tensor, log_bytes, log_used_of};
pub use undo::undo;
pub use walk::CHUNK;
