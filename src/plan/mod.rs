//! Pure cost models: numbers in, plan out. No clock, no file, no thread.
#![forbid(unsafe_code)]

pub mod cast;
pub mod interleave;
pub mod placement;
pub mod split;
pub mod tail;
pub mod weights;

mod check {
    use crate::error::{Error, Result};

    /// Refuses what is no positive finite number.
    pub fn positive(name: &'static str, value: f64) -> Result<()> {
        match value > 0.0 && value.is_finite() {
            true => Ok(()),
            false => Err(Error::invalid(name, format!("{value} is not a positive finite number"))),
        }
    }

    /// Refuses what is no positive number; infinity stands for "no limit".
    pub fn positive_or_infinite(name: &'static str, value: f64) -> Result<()> {
        match value > 0.0 {
            true => Ok(()),
            false => Err(Error::invalid(name, format!("{value} is not a positive number"))),
        }
    }

    /// Refuses what is no finite number from zero up.
    pub fn not_negative(name: &'static str, value: f64) -> Result<()> {
        match value >= 0.0 && value.is_finite() {
            true => Ok(()),
            false => Err(Error::invalid(name, format!("{value} is not a finite number >= 0"))),
        }
    }
}
