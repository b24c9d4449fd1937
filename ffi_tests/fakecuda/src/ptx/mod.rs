//! A PTX interpreter: it parses the instructions that the kernels use strictly, and runs them as
//! the PTX manual defines.
//!
//! Anything unknown is an error; so are flush-to-zero, approximations and floating point without a rounding mode. The
//! threads of a warp synchronise at shuffles and warp barriers, and all of them must arrive. Arithmetic produces NaN as
//! 0x7fffffff, as the hardware does.

mod parse;
mod program;
mod run;

pub use program::{Kernel, Memory, Module};
