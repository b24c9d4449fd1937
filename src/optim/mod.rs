//! Optimizer steps over whole tensors: converts hyper-parameters to coefficients, and runs the kernels on all chunks.
#![forbid(unsafe_code)]

pub mod adam;
pub(crate) mod check;
pub mod checksums;
pub mod codes;
pub mod copies;
pub mod deepspeed;
pub mod grad;
mod job;
mod kernel_choice;
pub mod lent;
pub mod low_bits;
pub mod optimizers;
pub mod parallel;
pub mod recording;
mod step_stats;
pub mod undo;

pub use kernel_choice::kernel;
pub use optimizers::Family;
pub use parallel::step;
pub use step_stats::StepStats;
