//! Lion.

use crate::capi::optim::table::{self, StepOptions, optimizer_calls};
use crate::capi::optim::tensor::{spw_step_stats, spw_tensor};
use crate::capi::prelude::*;
use crate::capi::speculate::engine::{self, spw_spec};
use crate::capi::undo::{self, spw_undo};
use crate::kernel::LionRule;
use crate::optim::lion::LionOptions;

c_struct! { first 48, initial lion_defaults;
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

fn lion_defaults(raw: &mut spw_lion_options) {
    let LionOptions { lr, beta1, beta2, weight_decay, grad_scale } = LionOptions::default();
    *raw = spw_lion_options { lr, beta1, beta2, weight_decay, grad_scale, ..*raw };
}

/// Does one Lion step of every tensor (Chen et al. 2023, Algorithm 2). The sign of zero is zero. exp_avg_sq is not
/// used; pass NULL.
///
///     g = grad * grad_scale
///     p = p - lr * weight_decay * p - lr * sign(beta1 * m + (1 - beta1) * g)
///     m = beta2 * m + (1 - beta2) * g
///
/// Arguments, determinism, threads and errors are those of `spw_adam_step`.
///
/// # Safety
/// As `spw_adam_step`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_lion_step(
    options: In<spw_lion_options>,
    tensors: In<spw_tensor>,
    count: u64,
    stats_out: Out<spw_step_stats>,
) -> spw_status {
    // SAFETY: the caller meets the callee's requirements.
    guard_step(|| unsafe { table::step(options, tensors, count, stats_out) })
}

optimizer_calls! {
    spw_lion_options: spw_lion_check, spw_undo_lion_step, spw_spec_begin_lion
}

impl StepOptions for spw_lion_options {
    type Rule = LionRule;

    fn rule(&self) -> Result<LionRule> {
        abi_struct::zero("options.reserved", self.reserved)?;
        abi_struct::initialised::<Self>("options.grad_scale", self.grad_scale == 0.0)?;
        let options = parsed!(LionOptions from self { lr, beta1, beta2, weight_decay, grad_scale });
        options.rule().map_err(|error| error.within("options."))
    }

    fn grad_scale(&self) -> f64 {
        self.grad_scale
    }
}
