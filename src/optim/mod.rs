//! Optimizer steps over whole tensors: converts hyper-parameters to coefficients, and runs the kernels on all chunks.
#![forbid(unsafe_code)]

pub mod adagrad;
pub mod adam;
pub mod checksums;
pub mod codes;
pub mod deepspeed;
pub mod grad;
pub mod lent;
pub mod lion;
pub mod low_bits;
pub mod parallel;
pub mod recording;
pub mod undo;

use crate::environment;
use crate::error::{Error, Result};
use crate::kernel::{AdagradRule, AdamRule, Kernel, LionRule, Optimizer};
use crate::log;
use crate::stats::{self, OptimizerCounter};
use crate::sys::cancellation::NoCancellation;
use lent::Lent;

pub use parallel::step;

/// An optimizer of this library: its kernels, its counter, and the record of its steps.
pub trait Family: Optimizer + 'static {
    /// Counts the elements of its steps.
    const COUNTER: &'static OptimizerCounter;
    /// A recorded step of these tensors.
    const RECORDED: fn(Lent<Self>) -> recording::Step;
}

impl Family for AdamRule {
    const COUNTER: &'static OptimizerCounter = &stats::ADAM;
    const RECORDED: fn(Lent<Self>) -> recording::Step = recording::Step::Adam;
}

impl Family for AdagradRule {
    const COUNTER: &'static OptimizerCounter = &stats::ADAGRAD;
    const RECORDED: fn(Lent<Self>) -> recording::Step = recording::Step::Adagrad;
}

impl Family for LionRule {
    const COUNTER: &'static OptimizerCounter = &stats::LION;
    const RECORDED: fn(Lent<Self>) -> recording::Step = recording::Step::Lion;
}

/// The kernel of this process: the one that `SPILLWAY_KERNEL` names, else the fastest that the processor supports. The
/// choice is logged when it is made. Fails if `SPILLWAY_KERNEL` names an unknown or unsupported kernel.
pub fn kernel() -> Result<Kernel> {
    let variable = || environment::word("SPILLWAY_KERNEL").map_err(Error::from);
    Kernel::current(variable, |choice| {
        // A log function may reach a point of cancellation.
        let _no_cancellation = NoCancellation::enter();
        log::write(log::Level::Info, choice);
    })
}

/// Statistics of the scaled gradients of one step.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct StepStats {
    /// True if any scaled gradient was Inf or NaN.
    pub nonfinite: bool,
    /// Sum of squares, as `kernel::squares` defines it; NaN if any scaled gradient was NaN.
    pub sum_squares: f64,
}

impl StepStats {
    pub(crate) fn of(sum: f64) -> Self {
        // Every NaN becomes the same NaN, because the payload after an addition depends on the order of the operands.
        let sum_squares = if sum.is_nan() { f64::NAN } else { sum };
        StepStats { nonfinite: !sum.is_finite(), sum_squares }
    }
}

pub(crate) mod check {
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
}
