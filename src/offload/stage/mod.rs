//! Stages: asynchronous optimizer jobs of a pipeline (SysX sections 3.2 and 4, "CPU optimizer").
//!
//! A stage steps its tensors as soon as their gradients are complete, before the other stages and processes have
//! validated theirs. The verdict of all comes later, and keeps every step or rolls every step back, exactly to the bit.
//! A stage is a speculation engine of one bucket. Stages also divide the processors among them, and publish 16-bit copies
//! into an arena.
//!
//! | file | holds |
//! |---|---|
//! | `job` | a stage and its calls |
//! | `cores` | the processors that stages share |
//! | `target` | the region of an arena that receives a stage's 16-bit copies |
#![forbid(unsafe_code)]

mod cores;
mod job;
mod target;

#[cfg(test)]
mod tests;

pub use cores::{Cores, cores};
pub use job::{Options, Stage};
pub use target::Target;
