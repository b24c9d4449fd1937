//! The optimizers: a row for each set of kernels, and the options of those beside Adam, which has `adam.rs`.
#![forbid(unsafe_code)]

use super::check;
use super::lent::Lent;
use crate::error::Result;
use crate::kernel::{AdagradRule, AdamRule, LionRule, Optimizer};
use crate::stats::OptimizerCounter;

/// An optimizer of this library: its kernels, its counter, and the record of its steps.
pub trait Family: Optimizer + 'static {
    /// Counts the elements of its steps.
    const COUNTER: &'static OptimizerCounter;
    /// A recorded step of these tensors.
    const RECORDED: fn(Lent<Self>) -> RecordedStep;
}

/// Work on the tensors of a recorded step, whatever its optimizer is.
pub trait WithTensors {
    /// Does the work.
    fn with<R: Optimizer>(self, tensors: &mut Lent<R>) -> Result<()>;
}

macro_rules! families {
    ($($(#[$doc:meta])* $name:ident: $rule:ty;)*) => {
        /// The tensors of a recorded step, with their coefficients.
        pub enum RecordedStep {
            $($(#[$doc])* $name(Lent<$rule>),)*
        }

        impl RecordedStep {
            /// Elements of each tensor.
            pub fn lengths(&self) -> Vec<usize> {
                match self {
                    $(RecordedStep::$name(tensors) => tensors.lengths().collect(),)*
                }
            }

            /// Does `work` on the tensors.
            pub fn with(&mut self, work: impl WithTensors) -> Result<()> {
                match self {
                    $(RecordedStep::$name(tensors) => work.with(tensors),)*
                }
            }
        }

        $(impl Family for $rule {
            const COUNTER: &'static OptimizerCounter = {
                static COUNTER: OptimizerCounter = OptimizerCounter::new();
                &COUNTER
            };
            const RECORDED: fn(Lent<Self>) -> RecordedStep = RecordedStep::$name;
        })*
    };
}

families! {
    /// A step of Adam.
    Adam: AdamRule;
    /// A step of Adagrad.
    Adagrad: AdagradRule;
    /// A step of Lion or Signum.
    Lion: LionRule;
}

/// Hyper-parameters of one step of Adagrad, as in `torch.optim.Adagrad`: L2 weight decay is added to the gradient of the
/// state and of the update. The defaults are torch's, at step 1.
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

/// Hyper-parameters of one step of Lion, as in Chen et al. 2023, Algorithm 2. The sign of zero is zero. The defaults are
/// those of the paper.
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

/// Hyper-parameters of one step of Signum, as in Bernstein et al. 2018, with decoupled weight decay. The sign of zero is
/// zero.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SignumOptions {
    /// Learning rate.
    pub lr: f64,
    /// Decay of exp_avg.
    pub momentum: f64,
    /// Decoupled weight decay.
    pub weight_decay: f64,
    /// Factor on the gradient, rounded to f32.
    pub grad_scale: f64,
}

impl Default for SignumOptions {
    fn default() -> Self {
        SignumOptions { lr: 1e-4, momentum: 0.9, weight_decay: 0.0, grad_scale: 1.0 }
    }
}

impl SignumOptions {
    /// Returns the coefficients, which are those of Lion with two equal betas: Lion's direction is then the new exp_avg.
    /// Fails with the name of the first option that is out of range.
    pub fn rule(&self) -> Result<LionRule> {
        check::beta("momentum", self.momentum)?;
        let SignumOptions { lr, momentum, weight_decay, grad_scale } = *self;
        LionOptions { lr, beta1: momentum, beta2: momentum, weight_decay, grad_scale }.rule()
    }
}
