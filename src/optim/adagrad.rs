//! Adagrad, as in `torch.optim.Adagrad`: L2 weight decay is added to the gradient of the state and of the update.
#![forbid(unsafe_code)]

use super::check;
use crate::error::Result;
use crate::kernel::AdagradRule;

/// Hyper-parameters of one step. The defaults are those of `torch.optim.Adagrad`, at step 1.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdagradOptions {
    /// Number of this step, from 1. Used only with `lr_decay`.
    pub step: u64,
    /// Learning rate.
    pub lr: f64,
    /// The learning rate of step t is `lr / (1 + (t - 1) * lr_decay)`.
    pub lr_decay: f64,
    /// Added to the denominator.
    pub eps: f64,
    /// L2 weight decay.
    pub weight_decay: f64,
    /// Factor on the gradient, rounded to f32.
    pub grad_scale: f64,
}

impl Default for AdagradOptions {
    fn default() -> Self {
        AdagradOptions { step: 1, lr: 1e-2, lr_decay: 0.0, eps: 1e-10, weight_decay: 0.0, grad_scale: 1.0 }
    }
}

impl AdagradOptions {
    /// Returns the coefficients. Fails with the name of the first option that is out of range.
    pub fn rule(&self) -> Result<AdagradRule> {
        check::step(self.step)?;
        check::not_negative("lr", self.lr)?;
        check::not_negative("lr_decay", self.lr_decay)?;
        check::eps(self.eps)?;
        check::not_negative("weight_decay", self.weight_decay)?;
        let grad_scale = check::finite("grad_scale", self.grad_scale)?;
        let lr = self.lr / (1.0 + (self.step - 1) as f64 * self.lr_decay);
        Ok(AdagradRule {
            grad_scale,
            step_size: -lr as f32,
            eps: self.eps as f32,
            weight_decay: self.weight_decay as f32,
        })
    }
}
