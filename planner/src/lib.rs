//! Cost models and planners. They are pure functions: they use no clock, no file and no thread.
//!
//! | file | holds |
//! |---|---|
//! | `interleave` | an optimizer update that CPU and GPU share: its schedule, which the library runs, and its predicted time |
//! | `iteration` | an iteration whose optimizer steps on the CPU: what forward and backward hide |
//! | `pipeline` | schedules of pipelines: passes, transfers, memory |
//! | `model` | the training of a model on a machine: memory, traffic and seconds of each strategy |
//! | `picture` | pictures as SVG text |
//! | `split` | units divided over paths in proportion to weights |
//! | `cast`, `tail`, `weights` | the rules of SuperOffload: dtype of gradients on the link, last buckets on the GPU, flowing weights |
//! | `check`, `error` | arguments that must be positive, or finite; the error for the others |
//! | `events` | what both simulators use: `pipeline/simulate.rs` for plans, `interleave/timeline.rs` for shared bandwidth |
#![forbid(unsafe_code)]

pub mod cast;
pub mod error;
mod events;
pub mod interleave;
pub mod iteration;
pub mod model;
pub mod picture;
pub mod pipeline;
pub mod split;
pub mod tail;
pub mod weights;

/// Checks of numbers.
mod check {
    use crate::error::{Error, Result};

    /// Returns an error unless `value` is positive and finite.
    pub fn positive(name: &'static str, value: f64) -> Result<()> {
        match value > 0.0 && value.is_finite() {
            true => Ok(()),
            false => Err(Error::invalid(name, format!("{value} is not a positive finite number"))),
        }
    }

    /// Returns an error unless `value` is positive. Infinity is allowed and means "no limit".
    pub fn positive_or_infinite(name: &'static str, value: f64) -> Result<()> {
        match value > 0.0 {
            true => Ok(()),
            false => Err(Error::invalid(name, format!("{value} is not a positive number"))),
        }
    }

    /// Returns an error unless `value` is finite and at least zero.
    pub fn not_negative(name: &'static str, value: f64) -> Result<()> {
        match value >= 0.0 && value.is_finite() {
            true => Ok(()),
            false => Err(Error::invalid(name, format!("{value} is not a finite number >= 0"))),
        }
    }
}
