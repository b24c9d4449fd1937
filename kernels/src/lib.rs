//! The kernels of the optimizers: one body for every instruction set, and the element types it works on.
//!
//! | file | holds |
//! |---|---|
//! | `rules` | the arithmetic of Adam, Adagrad and Lion, written once over a vector; `stream`: hardly any |
//! | `chunk` | the entries: which body steps a chunk, or undoes it |
//! | `step`, `record`, `undo` | the generic bodies: a step, recorded if wanted, and its exact reversal |
//! | `tensor`, `spans` | what a step reads and writes: checked slices, then typed addresses |
//! | `log`, `pack` | the size of a record, and how its differences become bytes |
//! | `publish` | the 16-bit copy of a parameter without a step |
//! | `walk` | how a chunk is walked: whole vectors, then one padded vector for the rest |
//! | `element` | element types in memory, and the table of type combinations |
//! | `squares` | the fixed tree in which squares are summed |
//! | `vector` | the operations that an instruction set supplies; `scalar`, `avx2`, `avx512`, `neon` supply them |
//! | `sve` | Adam and its undo by the C bodies beside src/, since Rust has no SVE |
//! | `select` | which set this process uses |
//! | `float_mode` | IEEE arithmetic whatever the caller's thread has switched on |

mod chunk;
pub mod dtype;
mod element;
mod error;
pub mod float_mode;
mod log;
mod pack;
mod publish;
mod record;
mod rules;
mod select;
mod spans;
pub mod squares;
mod step;
mod stream;
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

pub use chunk::Rule;
pub use element::{Dtypes, supported};
pub use error::{Error, Result};
pub use float_mode::IeeeMode;
pub use log::{log_bytes, log_used_of};
pub use publish::publish;
pub use rules::{AdagradRule, AdamRule, Arithmetic, LionRule, WeightDecay};
pub use select::Kernel;
pub use step::grad_squares;
pub use stream::StreamRule;
pub use tensor::{States, Tensor};
pub use walk::CHUNK;

/// What this crate's own tests look at beside its face.
#[doc(hidden)]
pub mod inside {
    pub use crate::log::log_used;
    pub use crate::pack::{Differences, most, pack, unpack};
    pub use crate::vector::{Body, Vector};
    pub use crate::walk::MAX_LANES;
}
