//! The arithmetic of the optimizers. All generic kernel bodies use this one implementation.
//!
//! All operations are in f32 with one rounding each, in the order of DeepSpeed's AVX-512 Adam. `fma(a, b, c)` is
//! `a * b + c` with one rounding. `g` is the scaled gradient.
//!
//! ```text
//! Adam      L2:        g = fma(p, wd, g)
//!                      m = fma(g, 1-b1, m*b1)
//!                      v = fma(g*g, 1-b2, v*b2)
//!                      d = fma(sqrt(v), 1/sqrt(1-b2^t), eps)
//!           decoupled: p = fma(p, -lr*wd, p)
//!                      p = fma(m/d, -lr/(1-b1^t), p)
//!
//! Adagrad              g = fma(p, wd, g)
//!                      v = fma(g, g, v)
//!                      p = fma(g / (sqrt(v) + eps), -lr, p)
//!
//! Lion                 c = fma(g, 1-b1, m*b1)
//!                      p = fma(p, -lr*wd, p)
//!                      p = p - lr*sign(c)
//!                      m = fma(g, 1-b2, m*b2)
//!
//! Signum               Lion with b1 = b2, so that c is the new m
//! ```
//!
//! The new p is computed from the f32 values of m and v, also where m and v are stored in 16 bits. A weight decay of
//! zero skips the lines with `wd`.
//!
//! Each rule also has its algebraic inverse, which is off by a few units in the last place; `undo` makes it exact. An
//! inverse has each old value corrected (see [`Corrector`]) before the next estimate uses it, so no error is carried
//! over.

use super::vector::Vector;

/// Calls a macro with each rule that steps in one way only. Adam can also round at random.
macro_rules! plain_rules {
    ($with:ident) => {
        $with!($crate::AdagradRule);
        $with!($crate::LionRule);
    };
}
pub(super) use plain_rules;

/// Parameter and states of one group of elements.
#[derive(Clone, Copy)]
pub struct ElementState<V> {
    /// Parameter.
    pub param: V,
    /// First moment; unspecified for a rule that keeps none.
    pub exp_avg: V,
    /// Second moment; unspecified for a rule that keeps none.
    pub exp_avg_sq: V,
}

/// Corrector of estimates: each method takes the estimate of an old value and returns the old value.
///
/// # Safety
/// All methods have the same contract as [`Vector`].
pub trait Corrector<V: Vector> {
    /// Returns the old parameter.
    ///
    /// # Safety
    /// As the trait.
    unsafe fn param(&mut self, estimate: V) -> V;
    /// Returns the old first moment.
    ///
    /// # Safety
    /// As the trait.
    unsafe fn exp_avg(&mut self, estimate: V) -> V;
    /// Returns the old second moment.
    ///
    /// # Safety
    /// As the trait.
    unsafe fn exp_avg_sq(&mut self, estimate: V) -> V;
}

/// The arithmetic of one optimizer on one group of elements.
pub trait Arithmetic: Copy + Send + Sync {
    /// True if the optimizer keeps a first moment.
    const EXP_AVG: bool;
    /// True if the optimizer keeps a second moment.
    const EXP_AVG_SQ: bool;

    /// Factor on the gradient.
    fn grad_scale(&self) -> f32;

    /// The same rule with another factor on the gradient.
    fn with_grad_scale(self, grad_scale: f32) -> Self;

    /// Returns the new values. `grad` is the scaled gradient.
    ///
    /// # Safety
    /// Same contract as [`Vector`].
    unsafe fn forward<V: Vector>(&self, old: ElementState<V>, grad: V) -> ElementState<V>;

    /// Estimates the old values from the new values as stored, and passes each estimate to `corrector`. `grad` is the
    /// scaled gradient.
    ///
    /// # Safety
    /// Same contract as [`Vector`].
    unsafe fn inverse<V: Vector, S: Corrector<V>>(&self, new: ElementState<V>, grad: V, corrector: &mut S);

    /// Returns the new values as they are to be stored. `at` is the first element of the group, counted from the start of
    /// the chunk.
    ///
    /// # Safety
    /// Same contract as [`Vector`].
    #[inline(always)]
    unsafe fn round<V: Vector>(&self, _at: usize, new: ElementState<V>) -> ElementState<V> {
        new
    }

    /// Returns the coefficients if the rule is Adam, which has SVE bodies in C.
    #[cfg(target_arch = "aarch64")]
    fn as_adam(&self) -> Option<&AdamRule> {
        None
    }
}

/// How Adam applies weight decay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WeightDecay {
    /// No weight decay.
    None,
    /// Added to the gradient (Adam, L2).
    L2,
    /// Applied to the parameter (AdamW).
    Decoupled,
}

/// Coefficients of one Adam step, each rounded to f32 once.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamRule {
    /// How weight decay is applied.
    pub decay: WeightDecay,
    /// Factor on the gradient: the product of unscaling and clipping.
    pub grad_scale: f32,
    /// beta1
    pub beta1: f32,
    /// 1 - beta1
    pub one_minus_beta1: f32,
    /// beta2
    pub beta2: f32,
    /// 1 - beta2
    pub one_minus_beta2: f32,
    /// 1 / sqrt(1 - beta2^t)
    pub inv_sqrt_correction2: f32,
    /// eps
    pub eps: f32,
    /// -lr / (1 - beta1^t)
    pub step_size: f32,
    /// weight_decay for L2, -lr * weight_decay for decoupled
    pub decay_factor: f32,
    /// Stochastic rounding of bf16 moments with the random bits of this key; `None` rounds to nearest even.
    pub stochastic: Option<u64>,
}

impl Arithmetic for AdamRule {
    const EXP_AVG: bool = true;
    const EXP_AVG_SQ: bool = true;

    #[cfg(target_arch = "aarch64")]
    fn as_adam(&self) -> Option<&AdamRule> {
        Some(self)
    }

    #[inline(always)]
    fn grad_scale(&self) -> f32 {
        self.grad_scale
    }

    fn with_grad_scale(self, grad_scale: f32) -> Self {
        Self { grad_scale, ..self }
    }

    #[inline(always)]
    unsafe fn forward<V: Vector>(&self, old: ElementState<V>, grad: V) -> ElementState<V> {
        // SAFETY: the caller upholds the callee's contract.
        unsafe {
            let decay = V::splat(self.decay_factor);
            let g = if self.decay == WeightDecay::L2 { old.param.mul_add(decay, grad) } else { grad };
            let m = g.mul_add(V::splat(self.one_minus_beta1), old.exp_avg.mul(V::splat(self.beta1)));
            let v =
                g.mul(g).mul_add(V::splat(self.one_minus_beta2), old.exp_avg_sq.mul(V::splat(self.beta2)));
            let decoupled = self.decay == WeightDecay::Decoupled;
            let p = if decoupled { old.param.mul_add(decay, old.param) } else { old.param };
            let p = self.update(m, v).mul_add(V::splat(self.step_size), p);
            ElementState { param: p, exp_avg: m, exp_avg_sq: v }
        }
    }

    #[inline(always)]
    unsafe fn inverse<V: Vector, S: Corrector<V>>(&self, new: ElementState<V>, grad: V, corrector: &mut S) {
        // SAFETY: the caller upholds the callee's contract.
        unsafe {
            let p = self.update(new.exp_avg, new.exp_avg_sq).mul_add(V::splat(-self.step_size), new.param);
            let p = if self.decay == WeightDecay::Decoupled {
                p.mul(V::splat(inverse(1.0 + self.decay_factor)))
            } else {
                p
            };
            let p = corrector.param(p);
            let g = if self.decay == WeightDecay::L2 {
                p.mul_add(V::splat(self.decay_factor), grad)
            } else {
                grad
            };
            let m = g.mul_add(V::splat(-self.one_minus_beta1), new.exp_avg);
            corrector.exp_avg(m.mul(V::splat(inverse(self.beta1))));
            let v = g.mul(g).mul_add(V::splat(-self.one_minus_beta2), new.exp_avg_sq);
            corrector.exp_avg_sq(v.mul(V::splat(inverse(self.beta2))));
        }
    }
}

impl AdamRule {
    /// m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
    #[inline(always)]
    unsafe fn update<V: Vector>(&self, m: V, v: V) -> V {
        // SAFETY: the caller upholds the callee's contract.
        unsafe { m.div(v.sqrt().mul_add(V::splat(self.inv_sqrt_correction2), V::splat(self.eps))) }
    }
}

/// Coefficients of one Adagrad step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdagradRule {
    /// Factor on the gradient.
    pub grad_scale: f32,
    /// -lr, after the decay of the learning rate
    pub step_size: f32,
    /// eps
    pub eps: f32,
    /// weight_decay
    pub weight_decay: f32,
}

impl AdagradRule {
    #[inline(always)]
    unsafe fn decayed<V: Vector>(&self, p: V, grad: V) -> V {
        // SAFETY: the caller upholds the callee's contract.
        unsafe { if self.weight_decay == 0.0 { grad } else { p.mul_add(V::splat(self.weight_decay), grad) } }
    }
}

impl Arithmetic for AdagradRule {
    const EXP_AVG: bool = false;
    const EXP_AVG_SQ: bool = true;

    #[inline(always)]
    fn grad_scale(&self) -> f32 {
        self.grad_scale
    }

    fn with_grad_scale(self, grad_scale: f32) -> Self {
        Self { grad_scale, ..self }
    }

    #[inline(always)]
    unsafe fn forward<V: Vector>(&self, old: ElementState<V>, grad: V) -> ElementState<V> {
        // SAFETY: the caller upholds the callee's contract.
        unsafe {
            let g = self.decayed(old.param, grad);
            let v = g.mul_add(g, old.exp_avg_sq);
            let update = g.div(v.sqrt().add(V::splat(self.eps)));
            ElementState { param: update.mul_add(V::splat(self.step_size), old.param), exp_avg_sq: v, ..old }
        }
    }

    #[inline(always)]
    unsafe fn inverse<V: Vector, S: Corrector<V>>(&self, new: ElementState<V>, grad: V, corrector: &mut S) {
        // SAFETY: the caller upholds the callee's contract.
        unsafe {
            let g = self.decayed(new.param, grad);
            let update = g.div(new.exp_avg_sq.sqrt().add(V::splat(self.eps)));
            let p = corrector.param(update.mul_add(V::splat(-self.step_size), new.param));
            let g = self.decayed(p, grad);
            corrector.exp_avg_sq(g.mul(V::splat(-1.0)).mul_add(g, new.exp_avg_sq));
        }
    }
}

/// Coefficients of one Lion step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LionRule {
    /// Factor on the gradient.
    pub grad_scale: f32,
    /// lr
    pub lr: f32,
    /// beta1
    pub beta1: f32,
    /// 1 - beta1
    pub one_minus_beta1: f32,
    /// beta2
    pub beta2: f32,
    /// 1 - beta2
    pub one_minus_beta2: f32,
    /// -lr * weight_decay
    pub decay_factor: f32,
}

impl LionRule {
    /// lr * sign(c)
    #[inline(always)]
    unsafe fn update<V: Vector>(&self, m: V, grad: V) -> V {
        // SAFETY: the caller upholds the callee's contract.
        unsafe {
            let direction = grad.mul_add(V::splat(self.one_minus_beta1), m.mul(V::splat(self.beta1)));
            direction.signum_times(V::splat(self.lr))
        }
    }
}

impl Arithmetic for LionRule {
    const EXP_AVG: bool = true;
    const EXP_AVG_SQ: bool = false;

    #[inline(always)]
    fn grad_scale(&self) -> f32 {
        self.grad_scale
    }

    fn with_grad_scale(self, grad_scale: f32) -> Self {
        Self { grad_scale, ..self }
    }

    #[inline(always)]
    unsafe fn forward<V: Vector>(&self, old: ElementState<V>, grad: V) -> ElementState<V> {
        // SAFETY: the caller upholds the callee's contract.
        unsafe {
            let decayed = old.param.mul_add(V::splat(self.decay_factor), old.param);
            let p = if self.decay_factor == 0.0 { old.param } else { decayed };
            let p = p.sub(self.update(old.exp_avg, grad));
            let m = grad.mul_add(V::splat(self.one_minus_beta2), old.exp_avg.mul(V::splat(self.beta2)));
            ElementState { param: p, exp_avg: m, ..old }
        }
    }

    #[inline(always)]
    unsafe fn inverse<V: Vector, S: Corrector<V>>(&self, new: ElementState<V>, grad: V, corrector: &mut S) {
        // SAFETY: the caller upholds the callee's contract.
        unsafe {
            let m = grad.mul_add(V::splat(-self.one_minus_beta2), new.exp_avg);
            let m = corrector.exp_avg(m.mul(V::splat(inverse(self.beta2))));
            let p = new.param.add(self.update(m, grad));
            corrector.param(p.mul(V::splat(inverse(1.0 + self.decay_factor))));
        }
    }
}

/// 1 / factor; 0 for a factor of zero, because a multiplication by zero lost the old value.
#[inline(always)]
fn inverse(factor: f32) -> f32 {
    if factor == 0.0 { 0.0 } else { 1.0 / factor }
}
