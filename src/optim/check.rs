//! Checks of hyper-parameters.
#![forbid(unsafe_code)]

use crate::error::{Error, Result};

/// Returns an error for a hyper-parameter outside its range, as torch does.
pub fn range(name: &'static str, value: f64, allowed: bool, range: &str) -> Result<()> {
    if allowed { Ok(()) } else { Err(Error::invalid(name, format!("{value} is not {range}"))) }
}

pub fn not_negative(name: &'static str, value: f64) -> Result<()> {
    range(name, value, value >= 0.0 && (value as f32).is_finite(), "a number >= 0 that is finite in f32")
}

/// Checks eps. A positive eps that rounds to 0 in f32 is an error, because the step would divide 0 by 0.
pub fn eps(value: f64) -> Result<()> {
    not_negative("eps", value)?;
    range("eps", value, value == 0.0 || value as f32 > 0.0, "0 or a number that is above 0 in f32")
}

/// The number rounded to f32.
pub fn finite(name: &'static str, value: f64) -> Result<f32> {
    range(name, value, (value as f32).is_finite(), "a finite f32")?;
    Ok(value as f32)
}

pub fn beta(name: &'static str, value: f64) -> Result<()> {
    range(name, value, (0.0..1.0).contains(&value) && (value as f32) < 1.0, "in [0, 1) in f32")
}

pub fn step(value: u64) -> Result<()> {
    match value {
        0 => Err(Error::invalid("step", "is 0; steps are counted from 1")),
        _ => Ok(()),
    }
}
