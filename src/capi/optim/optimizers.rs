//! The optimizers beside Adam.

use crate::capi::CStruct;
use crate::capi::optim::table::{self, StepOptions, optimizer_calls, step_options};
use crate::capi::optim::tensor::{spw_step_stats, spw_tensor};
use crate::capi::prelude::*;
use crate::capi::speculate::engine::{self, spw_spec};
use crate::capi::undo::{self, spw_undo};
use crate::kernel::{AdagradRule, LionRule};
use crate::optim::optimizers::{AdagradOptions, LionOptions, SignumOptions};

step_options! {
    spw_adagrad_options from AdagradOptions { step, lr, lr_decay, eps, weight_decay, grad_scale } for AdagradRule;
    spw_lion_options from LionOptions { lr, beta1, beta2, weight_decay, grad_scale } for LionRule;
    spw_signum_options from SignumOptions { lr, momentum, weight_decay, grad_scale } for LionRule;
}

c_struct! { first 56, initial StepOptions::set_defaults;
/// Hyper-parameters of one Adagrad step. Begin with SPW_ADAGRAD_OPTIONS_INIT, which has the defaults of
/// `torch.optim.Adagrad`: lr 1e-2, eps 1e-10, no decay, step 1, grad_scale 1.
pub struct spw_adagrad_options {
    /// 0
    pub reserved: u32,
    /// Number of this step, counted from 1. Used only with lr_decay.
    pub step: u64,
    /// Learning rate, finite and >= 0.
    pub lr: f64,
    /// The learning rate of step t is lr / (1 + (t - 1) * lr_decay).
    pub lr_decay: f64,
    /// Added to the denominator, finite and >= 0.
    pub eps: f64,
    /// L2 weight decay, finite and >= 0.
    pub weight_decay: f64,
    /// Factor on the gradient, rounded to f32; not 0.
    pub grad_scale: f64,
}
}

optimizer_calls! {
    /// Does one Adagrad step of every tensor (Duchi et al. 2011, as `torch.optim.Adagrad`). exp_avg_sq holds the running
    /// sum v of squares. exp_avg is not used; pass NULL.
    ///
    ///     g = grad * grad_scale + weight_decay * p
    ///     v = v + g * g
    ///     p = p - lr / (1 + (t - 1) * lr_decay) * g / (sqrt(v) + eps)
    ///
    /// Arguments, determinism, threads and errors are those of `spw_adam_step`.
    spw_adagrad_options: spw_adagrad_step, spw_adagrad_check, spw_undo_adagrad_step, spw_spec_begin_adagrad
}

c_struct! { first 48, initial StepOptions::set_defaults;
/// Hyper-parameters of a Lion step. Begin with SPW_LION_OPTIONS_INIT, which has the defaults of the paper: lr 1e-4,
/// beta 0.9 and 0.99, no decay, grad_scale 1.
pub struct spw_lion_options {
    /// 0
    pub reserved: u32,
    /// Learning rate, finite and >= 0.
    pub lr: f64,
    /// Weight of exp_avg in the update direction, in [0, 1).
    pub beta1: f64,
    /// Decay factor of exp_avg, in [0, 1).
    pub beta2: f64,
    /// Decoupled weight decay, finite and >= 0.
    pub weight_decay: f64,
    /// Factor on the gradient, rounded to f32; not 0.
    pub grad_scale: f64,
}
}

optimizer_calls! {
    /// Does one Lion step of every tensor (Chen et al. 2023, Algorithm 2). The sign of zero is zero. exp_avg_sq is not
    /// used; pass NULL.
    ///
    ///     g = grad * grad_scale
    ///     p = p - lr * weight_decay * p - lr * sign(beta1 * m + (1 - beta1) * g)
    ///     m = beta2 * m + (1 - beta2) * g
    ///
    /// Arguments, determinism, threads and errors are those of `spw_adam_step`.
    spw_lion_options: spw_lion_step, spw_lion_check, spw_undo_lion_step, spw_spec_begin_lion
}

c_struct! { first 40, initial StepOptions::set_defaults;
/// Hyper-parameters of a Signum step. Begin with SPW_SIGNUM_OPTIONS_INIT: lr 1e-4, momentum 0.9, no decay, grad_scale 1.
pub struct spw_signum_options {
    /// 0
    pub reserved: u32,
    /// Learning rate, finite and >= 0.
    pub lr: f64,
    /// Decay factor of exp_avg, in [0, 1).
    pub momentum: f64,
    /// Decoupled weight decay, finite and >= 0.
    pub weight_decay: f64,
    /// Factor on the gradient, rounded to f32; not 0.
    pub grad_scale: f64,
}
}

optimizer_calls! {
    /// Does one step of SGD by the sign of the momentum (Bernstein et al. 2018) of every tensor. The sign of zero is zero.
    /// exp_avg_sq is not used; pass NULL. The bits are those of a Lion step whose two betas are momentum.
    ///
    ///     g = grad * grad_scale
    ///     m = momentum * m + (1 - momentum) * g
    ///     p = p - lr * weight_decay * p - lr * sign(m)
    ///
    /// Arguments, determinism, threads and errors are those of `spw_adam_step`.
    spw_signum_options: spw_signum_step, spw_signum_check, spw_undo_signum_step, spw_spec_begin_signum
}
