//! Lion, as in Chen et al. 2023, Algorithm 2. The sign of zero is zero.
#![forbid(unsafe_code)]

use super::check;
use crate::error::Result;
use crate::kernel::LionRule;

/// Hyper-parameters of one step. The defaults are those of the paper.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LionOptions {
    /// Learning rate.
    pub lr: f64,
    /// Weight of exp_avg in the update direction.
    pub beta1: f64,
    /// Decay of exp_avg.
    pub beta2: f64,
    /// Decoupled weight decay.
    pub weight_decay: f64,
    /// Factor on the gradient, rounded to f32.
    pub grad_scale: f64,
}

impl Default for LionOptions {
    fn default() -> Self {
        LionOptions { lr: 1e-4, beta1: 0.9, beta2: 0.99, weight_decay: 0.0, grad_scale: 1.0 }
    }
}

impl LionOptions {
    /// Returns the coefficients. Fails with the name of the first option that is out of range.
    pub fn rule(&self) -> Result<LionRule> {
        check::not_negative("lr", self.lr)?;
        check::beta("beta1", self.beta1)?;
        check::beta("beta2", self.beta2)?;
        check::not_negative("weight_decay", self.weight_decay)?;
        let grad_scale = check::finite("grad_scale", self.grad_scale)?;
        Ok(LionRule {
            grad_scale,
            lr: self.lr as f32,
            beta1: self.beta1 as f32,
            one_minus_beta1: (1.0 - self.beta1) as f32,
            beta2: self.beta2 as f32,
            one_minus_beta2: (1.0 - self.beta2) as f32,
            decay_factor: (-self.lr * self.weight_decay) as f32,
        })
    }
}
