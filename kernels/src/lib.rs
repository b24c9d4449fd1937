//! The optimizer kernels: one generic body compiled for every instruction set, and the element types of its operands.
//!
//! | file | holds |
//! |---|---|
//! | `rules` | the arithmetic of the optimizers, written once over a vector |
//! | `stochastic` | Adam with stochastic rounding of bf16 moments |
//! | `chunk` | the entry points: dispatch of a chunk's step or undo to an SVE body or the generic body |
//! | `step`, `record`, `undo` | the generic bodies: a step, a recorded step, and the exact undo of a recorded step |
//! | `tensor`, `spans` | the operands of a step: checked slices, then typed addresses |
//! | `lent` | a tensor whose memory is lent for longer than one borrow |
//! | `log`, `pack` | the size of an undo log, and the encoding of its residuals |
//! | `accumulate` | adds a gradient to an accumulated gradient |
//! | `split` | the step of a bf16 parameter with a split f32 master |
//! | `coded`, `codes` | 8-bit moments in memory, and the values of their codes |
//! | `coded_step` | the step with 8-bit moments, which are decoded in registers |
//! | `word_sum` | the sums that tell such a step whether other code has written to the parameter |
//! | `publish` | writes the 16-bit copy of a parameter without a step |
//! | `take` | takes what other code has written to the 16-bit copy of a parameter into the parameter |
//! | `chunk_loop` | the loop over a chunk: whole vectors, then one padded vector for the remainder |
//! | `dtype`, `error` | element types that are known at run time; the errors of this crate |
//! | `element` | element types in memory, and the table of supported type combinations |
//! | `squares` | the fixed tree in which squares are summed |
//! | `vector` | the trait of vector operations; `scalar`, `avx2`, `avx512` and `neon` implement it |
//! | `sve` | Adam and its undo through the C bodies beside src/, because Rust has no SVE intrinsics |
//! | `dispatch` | detection and choice of the instruction set of this process |
//! | `float_mode` | IEEE arithmetic, whatever float mode the calling thread has set |

mod accumulate;
mod chunk;
mod chunk_loop;
mod coded;
mod coded_step;
mod codes;
mod dispatch;
pub mod dtype;
mod element;
mod error;
pub mod float_mode;
mod kept;
mod lent;
mod log;
mod pack;
mod publish;
mod record;
mod rules;
mod spans;
mod split;
pub mod squares;
mod step;
mod stochastic;
mod take;
mod tensor;
mod undo;
mod vector;
mod word_sum;

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "aarch64")]
mod neon;
mod scalar;
#[cfg(target_arch = "aarch64")]
mod sve;

pub use accumulate::accumulate;
pub use chunk::Optimizer;
pub use chunk_loop::CHUNK;
pub use coded::{BLOCK, Codes, Moment, Moments, bytes_together};
pub use dispatch::Kernel;
pub use element::{Dtypes, supported, supports_split};
pub use error::{Error, Result};
pub use float_mode::IeeeMode;
pub use lent::LentTensor;
pub use log::{log_bytes, log_has_values, log_used_of};
pub use publish::publish;
pub use rules::*;
pub use step::grad_squares;
pub use stochastic::{RandomBits, stochastic_key};
pub use tensor::{States, Tensor, needs_a_log};
pub use word_sum::settle_low_bits;

/// Internals that the tests of this crate use in addition to the public API.
#[doc(hidden)]
pub mod inside {
    pub use crate::chunk_loop::MAX_LANES;
    pub use crate::log::log_used;
    pub use crate::pack::{Group, Residuals, most, pack, unpack};
    pub use crate::take::take_copy;
    pub use crate::vector::{Body, Vector};
}
