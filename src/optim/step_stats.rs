//! Statistics that a step returns.
#![forbid(unsafe_code)]

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
