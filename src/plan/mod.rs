//! Cost models and planners. They are pure functions: they use no clock, no file and no thread.
#![forbid(unsafe_code)]

pub mod cast;
pub mod interleave;
pub mod model;
pub mod pipeline;
pub mod placement;
pub mod split;
pub mod tail;
mod time;
pub mod weights;

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
