//! Adam and AdamW: converts hyper-parameters to coefficients.
//!
//! Coefficients are computed in f64 and rounded to f32 once. `libm` computes the same powers on every platform.
#![forbid(unsafe_code)]

use std::cell::Cell;

use super::check;
use crate::error::Result;
use crate::kernel::{self, AdamRule, WeightDecay};

/// Hyper-parameters of one step. The defaults are those of `torch.optim.Adam` at step 1, but with decoupled decay.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamOptions {
    /// True: weight decay scales the parameter (AdamW). False: weight decay is added to the gradient (L2).
    pub decoupled: bool,
    /// Number of this step, from 1.
    pub step: u64,
    /// Learning rate.
    pub lr: f64,
    /// Decay of exp_avg.
    pub beta1: f64,
    /// Decay of exp_avg_sq.
    pub beta2: f64,
    /// Added to the denominator.
    pub eps: f64,
    /// Weight decay; 0 disables it.
    pub weight_decay: f64,
    /// Factor on the gradient, rounded to f32: unscaling factor times clip coefficient.
    pub grad_scale: f64,
    /// Divide the moments by 1 - beta^t.
    pub bias_correction: bool,
    /// Seed of the stochastic rounding of bf16 moments; `None` rounds to nearest even.
    pub stochastic_seed: Option<u64>,
}

impl Default for AdamOptions {
    fn default() -> Self {
        AdamOptions {
            decoupled: true,
            step: 1,
            lr: 1e-3,
            beta1: 0.9,
            beta2: 0.999,
            eps: 1e-8,
            weight_decay: 0.0,
            grad_scale: 1.0,
            bias_correction: true,
            stochastic_seed: None,
        }
    }
}

impl AdamOptions {
    /// Returns the coefficients. Fails with the name of the first option that is out of range.
    pub fn rule(&self) -> Result<AdamRule> {
        check::step(self.step)?;
        check::not_negative("lr", self.lr)?;
        check::beta("beta1", self.beta1)?;
        check::beta("beta2", self.beta2)?;
        check::eps(self.eps)?;
        check::not_negative("weight_decay", self.weight_decay)?;
        let grad_scale = check::finite("grad_scale", self.grad_scale)?;

        let (correction1, correction2) = match self.bias_correction {
            true => (1.0 - power(self.beta1, self.step), 1.0 - power(self.beta2, self.step)),
            false => (1.0, 1.0),
        };
        let (decay, decay_factor) = match (self.weight_decay, self.decoupled) {
            (0.0, _) => (WeightDecay::None, 0.0),
            (decay, true) => (WeightDecay::Decoupled, -self.lr * decay),
            (decay, false) => (WeightDecay::L2, decay),
        };
        Ok(AdamRule {
            decay,
            grad_scale,
            beta1: self.beta1 as f32,
            one_minus_beta1: (1.0 - self.beta1) as f32,
            beta2: self.beta2 as f32,
            one_minus_beta2: (1.0 - self.beta2) as f32,
            inv_sqrt_correction2: (1.0 / correction2.sqrt()) as f32,
            eps: self.eps as f32,
            step_size: (-self.lr / correction1) as f32,
            decay_factor: decay_factor as f32,
            stochastic: self.stochastic_seed.map(|seed| kernel::stochastic_key(seed, self.step)),
        })
    }
}

/// `base^step`. Steps above 2^53 are rounded to f64, but there the power of every allowed beta is 0.
///
/// The last two powers of a thread are kept: a program that steps each tensor by itself asks for the same two powers
/// many times, and a power takes as long as the step of 200 parameters.
pub(super) fn power(base: f64, step: u64) -> f64 {
    thread_local! {
        static KEPT: Cell<[(f64, u64, f64); 2]> = const { Cell::new([(1.0, 0, 1.0); 2]) };
    }
    let kept = KEPT.get();
    if let Some((.., power)) = kept.iter().find(|(of, at, _)| of.to_bits() == base.to_bits() && *at == step) {
        return *power;
    }
    let power = libm::pow(base, step as f64);
    KEPT.set([kept[1], (base, step, power)]);
    power
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn coefficients_are_rounded_once_from_f64() {
        let rule = AdamOptions { weight_decay: 0.01, step: 3, ..Default::default() }.rule().unwrap();
        assert_eq!(rule.one_minus_beta2, (1.0 - 0.999f64) as f32);
        assert_eq!(rule.step_size, (-1e-3 / (1.0 - 0.9f64.powi(3))) as f32);
        assert_eq!((rule.decay, rule.decay_factor), (WeightDecay::Decoupled, -1e-5f64 as f32));
    }

    #[test]
    fn options_out_of_range_are_named() {
        let good = AdamOptions::default();
        let cases = [
            (AdamOptions { step: 0, ..good }, "step"),
            (AdamOptions { lr: -1.0, ..good }, "lr"),
            (AdamOptions { lr: f64::NAN, ..good }, "lr"),
            (AdamOptions { beta1: 1.0, ..good }, "beta1"),
            (AdamOptions { beta2: -0.1, ..good }, "beta2"),
            (AdamOptions { beta2: 1.0 - 1e-12, ..good }, "beta2"),
            (AdamOptions { eps: f64::INFINITY, ..good }, "eps"),
            (AdamOptions { weight_decay: -0.1, ..good }, "weight_decay"),
            (AdamOptions { grad_scale: 1e60, ..good }, "grad_scale"),
        ];
        for (options, name) in cases {
            let message = options.rule().unwrap_err().to_string();
            assert!(message.starts_with(name), "{message}");
        }
    }
}
