//! The clip rule and its verdict.
//!
//! ```text
//! norm   = sqrt(sum of squares of the unscaled gradients of all ranks)
//! clip   = min(1, max_norm / (norm + 1e-6))
//! factor = f32(scale * clip)                  (scale: 1 / loss scale)
//! ```
//!
//! This is the formula of `torch.nn.utils.clip_grad_norm_` and of DeepSpeed's ZeRO optimizers, evaluated in f64 and
//! rounded once.
#![forbid(unsafe_code)]

use crate::error::{Error, Result};
use crate::optim::StepStats;

/// Added to the norm, as in torch and DeepSpeed.
const EPSILON: f64 = 1e-6;

/// Outcome of a round.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Verdict {
    /// The unclipped steps are final.
    Commit,
    /// No step happens.
    Skip,
    /// Every bucket steps with this gradient factor.
    Redo(f32),
}

/// Clip limit and gradient scale of one round.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Clip {
    max_norm: Option<f64>,
    scale: f64,
}

impl Clip {
    /// Clips gradients, unscaled by `scale`, to the norm `max_norm` (0: no limit). Errors: `max_norm` is negative or
    /// not finite.
    pub fn new(max_norm: f64, scale: f64) -> Result<Clip> {
        let fine = max_norm >= 0.0 && max_norm.is_finite();
        match fine {
            true => Ok(Clip { max_norm: (max_norm > 0.0).then_some(max_norm), scale }),
            false => Err(Error::invalid(
                "max_norm",
                format!("{max_norm} is not a finite number >= 0 (0: no limit)"),
            )),
        }
    }

    /// No limit, and a scale of 1.
    pub const fn none() -> Clip {
        Clip { max_norm: None, scale: 1.0 }
    }

    /// Gradient factor of an unclipped step.
    pub fn scale(&self) -> f32 {
        self.scale as f32
    }

    /// Gradient factor of a step whose gradients have this sum of squares.
    pub fn factor(&self, sum_squares: f64) -> f32 {
        let clip = self.max_norm.map_or(1.0, |limit| (limit / (sum_squares.sqrt() + EPSILON)).min(1.0));
        (self.scale * clip) as f32
    }

    /// The verdict, from the statistics of all ranks together.
    pub fn verdict(&self, global: StepStats) -> Verdict {
        if global.nonfinite || !global.sum_squares.is_finite() {
            return Verdict::Skip;
        }
        match self.factor(global.sum_squares) {
            factor if factor == self.scale() => Verdict::Commit,
            factor => Verdict::Redo(factor),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(sum_squares: f64) -> StepStats {
        StepStats { nonfinite: false, sum_squares }
    }

    #[test]
    fn the_verdict_follows_the_norm() {
        let clip = Clip::new(1.0, 0.5).unwrap();
        assert_eq!(clip.verdict(seen(0.25)), Verdict::Commit);
        assert_eq!(clip.verdict(seen(0.0)), Verdict::Commit);
        assert_eq!(clip.verdict(seen(4.0)), Verdict::Redo((0.5 / (2.0 + 1e-6)) as f32));
        assert_eq!(clip.verdict(seen(f64::NAN)), Verdict::Skip);
        assert_eq!(clip.verdict(StepStats { nonfinite: true, sum_squares: 1.0 }), Verdict::Skip);
        // The clip rounds to the factor of an unclipped step, so the speculative step is already correct.
        assert_eq!(clip.verdict(seen(1.0 - 1.99e-6)), Verdict::Commit);
    }

    #[test]
    fn without_a_limit_only_what_is_not_finite_matters() {
        let clip = Clip::new(0.0, 1.0).unwrap();
        assert_eq!(clip.verdict(seen(1e300)), Verdict::Commit);
        assert_eq!(clip.verdict(seen(f64::INFINITY)), Verdict::Skip);
        for bad in [-1.0, f64::NAN, f64::INFINITY] {
            assert!(Clip::new(bad, 1.0).unwrap_err().to_string().starts_with("max_norm"));
        }
    }
}
