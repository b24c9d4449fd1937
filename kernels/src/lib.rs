//! The kernels of the optimizers: one body for every instruction set, and the element types it works on.
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
//! | `sve`, `sve_undo` | Adam and its undo by the C bodies beside src/, since Rust has no SVE |
//! | `select` | which set this process uses |
//! | `float_mode` | IEEE arithmetic whatever the caller's thread has switched on |

pub mod dtype;
mod element;
mod error;
pub mod float_mode;
mod pack;
mod publish;
mod record;
mod rules;
mod select;
pub mod squares;
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

pub use element::{Dtypes, supported};
pub use error::{Error, Result};
pub use float_mode::IeeeMode;
pub use publish::publish;
pub use rules::{AdagradRule, AdamRule, LionRule, Rule, StreamRule, WeightDecay};
pub use select::Kernel;
pub use step::grad_squares;
pub use tensor::{States, Tensor, log_bytes, log_used_of};
pub use walk::CHUNK;

/// What this crate's own tests look at beside its face.
#[doc(hidden)]
pub mod inside {
    pub use crate::pack::{Differences, most, pack, unpack};
    pub use crate::record::log_used;
    pub use crate::vector::{Body, Vector};
    pub use crate::walk::MAX_LANES;
}
