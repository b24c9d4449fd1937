//! Adagrad.

use crate::capi::optim::table::{self, StepOptions, optimizer_calls};
use crate::capi::optim::tensor::{spw_step_stats, spw_tensor};
use crate::capi::prelude::*;
use crate::capi::speculate::engine::{self, spw_spec};
use crate::capi::undo::{self, spw_undo};
use crate::kernel::AdagradRule;
use crate::optim::adagrad::AdagradOptions;

c_struct! { first 56, initial adagrad_defaults;
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

fn adagrad_defaults(raw: &mut spw_adagrad_options) {
    let AdagradOptions { step, lr, lr_decay, eps, weight_decay, grad_scale } = AdagradOptions::default();
    *raw = spw_adagrad_options { step, lr, lr_decay, eps, weight_decay, grad_scale, ..*raw };
}

/// Does one Adagrad step of every tensor (Duchi et al. 2011, as `torch.optim.Adagrad`). exp_avg_sq holds the running
/// sum v of squares. exp_avg is not used; pass NULL.
///
///     g = grad * grad_scale + weight_decay * p
///     v = v + g * g
///     p = p - lr / (1 + (t - 1) * lr_decay) * g / (sqrt(v) + eps)
///
/// Arguments, determinism, threads and errors are those of `spw_adam_step`.
///
/// # Safety
/// As `spw_adam_step`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_adagrad_step(
    options: In<spw_adagrad_options>,
    tensors: In<spw_tensor>,
    count: u64,
    stats_out: Out<spw_step_stats>,
) -> spw_status {
    // SAFETY: the caller meets the callee's requirements.
    guard_step(|| unsafe { table::step(options, tensors, count, stats_out) })
}

optimizer_calls! {
    spw_adagrad_options: spw_adagrad_check, spw_undo_adagrad_step, spw_spec_begin_adagrad
}

impl StepOptions for spw_adagrad_options {
    type Rule = AdagradRule;

    fn rule(&self) -> Result<AdagradRule> {
        abi_struct::zero("options.reserved", self.reserved)?;
        abi_struct::initialised::<Self>("options.grad_scale", self.grad_scale == 0.0)?;
        let options = parsed!(AdagradOptions from self { step, lr, lr_decay, eps, weight_decay, grad_scale });
        options.rule().map_err(|error| error.within("options."))
    }

    fn grad_scale(&self) -> f64 {
        self.grad_scale
    }
}
