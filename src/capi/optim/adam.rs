//! Adam and AdamW: one call for any number of tensors.

use crate::capi::optim::table::{self, StepOptions};
use crate::capi::optim::tensor::{spw_step_stats, spw_tensor};
use crate::capi::prelude::*;
use crate::kernel::AdamRule;
use crate::optim::adam::AdamOptions;

/// How weight decay is applied. Passed as `uint32_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub enum spw_weight_decay {
    /// Subtracted from the parameter (AdamW).
    SPW_WEIGHT_DECAY_DECOUPLED = 0,
    /// Added to the gradient (Adam with L2).
    SPW_WEIGHT_DECAY_L2 = 1,
}

/// How moments of 16 and 8 bits are rounded. Passed as `uint32_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub enum spw_rounding {
    /// To the nearest value, ties to even; 8-bit moments to the nearest code.
    SPW_ROUNDING_NEAREST = 0,
    /// Up or down at random, so that the expected value is the exact one. For f32 masters with bf16 or 8-bit moments.
    SPW_ROUNDING_STOCHASTIC = 1,
}

c_struct! { first 72, initial StepOptions::set_defaults;
/// Hyper-parameters of one Adam step. Begin with SPW_ADAM_OPTIONS_INIT, which has the defaults of `torch.optim.AdamW`
/// without weight decay: lr 1e-3, beta 0.9 and 0.999, eps 1e-8, step 1, grad_scale 1, decoupled decay. beta1, beta2 and
/// eps may each be 0, but not all three: a gradient of 0 would then make the parameter NaN.
pub struct spw_adam_options {
    /// An `spw_weight_decay`.
    pub weight_decay_mode: u32,
    /// Number t of this step, counted from 1. The caller counts.
    pub step: u64,
    /// Learning rate, finite and >= 0.
    pub lr: f64,
    /// Decay factor of exp_avg, in [0, 1).
    pub beta1: f64,
    /// Decay factor of exp_avg_sq, in [0, 1).
    pub beta2: f64,
    /// Added to the denominator, finite and >= 0.
    pub eps: f64,
    /// Weight decay, finite and >= 0; 0 disables it.
    pub weight_decay: f64,
    /// Factor on the gradient (1 / loss scale times clip coefficient), rounded to f32; not 0.
    pub grad_scale: f64,
    /// 1 disables bias correction, the division by 1 - beta^t; 0 enables it.
    pub no_bias_correction: u32,
    /// 0
    pub reserved: u32,
    /// An `spw_rounding`. `spw_adam_step`, `spw_gpu_adam_step`, undo, speculation and the tiered update round
    /// stochastically; other calls refuse it.
    pub rounding: u32,
    /// 0
    pub reserved2: u32,
    /// Seed of stochastic rounding. The random bits depend only on the seed, the step and the element's number in its
    /// tensor. Give each tensor of a model a seed of its own.
    pub rounding_seed: u64,
    /// In a tiered update: number of the tensor's first element in its parameter. The elements then have the random
    /// bits of a tensor of the whole parameter. Other calls need 0.
    pub rounding_first: u64,
}
}

/// Does one Adam or AdamW step of `count` tensors, in one pass over their memory (SuperOffload section 4.6,
/// "GraceAdam"):
///
///     g = grad * grad_scale                       (+ weight_decay * p for L2)
///     m = beta1 * m + (1 - beta1) * g
///     v = beta2 * v + (1 - beta2) * g * g
///     p = p - lr * weight_decay * p               (decoupled)
///     p = p - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
///
/// The arithmetic is f32 with fused multiply-adds. The results have the same bits on every processor and for every
/// number of threads, however a parameter is divided into tensors
/// (with 8-bit moments: into multiples of 32 elements). If `stats_out` is not NULL, the same pass computes
/// the sum of squares and the finiteness of the scaled gradients. Tensors of one call must not overlap. Other threads
/// may step other tensors at the same time.
///
/// # Safety
/// `tensors` points to `count` structs, `struct_size` bytes apart. No other thread uses their spans during the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_adam_step(
    options: In<spw_adam_options>,
    tensors: In<spw_tensor>,
    count: u64,
    stats_out: Out<spw_step_stats>,
) -> spw_status {
    // SAFETY: the caller meets the callee's requirements.
    guard_step(|| unsafe { table::step(options, tensors, count, stats_out) })
}

/// Checks the arguments of `spw_adam_step`, and changes nothing: it fails as the step would, with the same message. A
/// step of arguments that passed fails only for lack of memory or threads. For callers that write other data in the same
/// step, and must know beforehand that this part can be done.
///
/// # Safety
/// As `spw_adam_step`; the spans are not accessed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_adam_check(
    options: In<spw_adam_options>,
    tensors: In<spw_tensor>,
    count: u64,
) -> spw_status {
    // SAFETY: the caller meets the callee's requirements.
    guard(|| unsafe { table::check(options, tensors, count) })
}

impl StepOptions for spw_adam_options {
    type Rule = AdamRule;

    fn set_defaults(&mut self) {
        let AdamOptions { step, lr, beta1, beta2, eps, weight_decay, grad_scale, .. } =
            AdamOptions::default();
        *self = spw_adam_options { step, lr, beta1, beta2, eps, weight_decay, grad_scale, ..*self };
    }

    fn rule(&self) -> Result<AdamRule> {
        match self.rounding_first {
            0 => self.rule_of_part(),
            first => Err(Error::Unsupported(format!(
                "options.rounding_first: is {first}, but only a tiered update numbers the elements of a part; pass 0"
            ))),
        }
    }

    fn grad_scale(&self) -> f64 {
        self.grad_scale
    }
}

impl spw_adam_options {
    /// The coefficients, also of a tensor that is a part of its parameter.
    pub(in crate::capi) fn rule_of_part(&self) -> Result<AdamRule> {
        abi_struct::zero("options.reserved", self.reserved)?;
        abi_struct::zero("options.reserved2", self.reserved2)?;
        abi_struct::initialised::<Self>("options.grad_scale", self.grad_scale == 0.0)?;
        let all = [self.beta1, self.beta2, self.eps];
        abi_struct::initialised::<Self>("options.eps", all == [0.0; 3])?;
        let options = parsed!(AdamOptions from self {
            step, lr, beta1, beta2, eps, weight_decay, grad_scale
        } with {
            decoupled: !abi_struct::flag("options.weight_decay_mode", self.weight_decay_mode)?,
            bias_correction: !abi_struct::flag("options.no_bias_correction", self.no_bias_correction)?,
            stochastic_seed: abi_struct::flag("options.rounding", self.rounding)?
                .then_some(self.rounding_seed)
        });
        options.rule().map_err(|error| error.within("options."))
    }
}

/// Reads an array of options as coefficients. Rejects stochastic rounding.
pub(in crate::capi) fn rules(options: In<spw_adam_options>, count: u64) -> Result<Vec<AdamRule>> {
    let all = options.read_all(count, "options")?;
    all.iter().map(|raw| nearest(raw.rule()?)).collect()
}

fn nearest(rule: AdamRule) -> Result<AdamRule> {
    match rule.stochastic {
        None => Ok(rule),
        Some(_) => Err(Error::Unsupported(
            "options.rounding: this call does not round stochastically; pass SPW_ROUNDING_NEAREST"
                .to_string(),
        )),
    }
}
