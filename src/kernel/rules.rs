//! The arithmetic of the optimizers, written once; every kernel runs these lines.
//!
//! All in f32 with one rounding per operation, in the order of the body of DeepSpeed's AVX-512 Adam; `fma(a, b, c)` is
//! `a * b + c` rounded once. `g` is the gradient after scaling.
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
//! ```
//!
//! The new p comes from the unrounded m and v, also where these are stored in 16 bits. Weight decay of zero leaves its
//! line out.

use super::element::Element;
use super::tensor::Spans;
use super::vector::Vector;
use super::walk::Access;

/// What one optimizer does to one group of elements.
pub trait Rule: Copy + Send + Sync {
    /// Updates the elements at `at` and returns their scaled gradient.
    ///
    /// # Safety
    /// As [`Vector`]; the spans hold the group that `access` reads and writes at `at`.
    unsafe fn apply<V, A, P, S, G, C>(&self, spans: &Spans<P, S, G, C>, at: usize, access: A) -> V
    where
        V: Vector,
        A: Access,
        P: Element,
        S: Element,
        G: Element,
        C: Element;

    /// Adam's coefficients if this is Adam, which has a body in C for SVE.
    #[cfg(target_arch = "aarch64")]
    fn as_adam(&self) -> Option<&AdamRule> {
        None
    }
}

/// Where Adam's weight decay enters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WeightDecay {
    /// Nowhere.
    None,
    /// Into the gradient (Adam, L2).
    L2,
    /// Into the parameter (AdamW).
    Decoupled,
}

/// Coefficients of one Adam step, each rounded to f32 once.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamRule {
    /// Which line of weight decay runs.
    pub decay: WeightDecay,
    /// Factor on the gradient: unscaling and clipping.
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
}

/// Adam with its decay known at compile time.
#[derive(Clone, Copy)]
pub struct Adam<const DECAY: u8>(pub AdamRule);

/// `Adam::<NO_DECAY>`
pub const NO_DECAY: u8 = 0;
/// `Adam::<L2>`
pub const L2: u8 = 1;
/// `Adam::<DECOUPLED>`
pub const DECOUPLED: u8 = 2;

impl<const DECAY: u8> Rule for Adam<DECAY> {
    #[inline(always)]
    unsafe fn apply<V, A, P, S, G, C>(&self, spans: &Spans<P, S, G, C>, at: usize, access: A) -> V
    where
        V: Vector,
        A: Access,
        P: Element,
        S: Element,
        G: Element,
        C: Element,
    {
        // SAFETY: the caller's promise about the instruction set and the spans covers every line.
        unsafe {
            let rule = &self.0;
            let decay = V::splat(rule.decay_factor);
            let grad = access.load::<G, V>(spans.grad.add(at)).mul(V::splat(rule.grad_scale));
            let mut p = access.load::<P, V>(spans.param.add(at));
            let m = access.load::<S, V>(spans.exp_avg.add(at));
            let v = access.load::<S, V>(spans.exp_avg_sq.add(at));

            let g = if DECAY == L2 { p.mul_add(decay, grad) } else { grad };
            let m = g.mul_add(V::splat(rule.one_minus_beta1), m.mul(V::splat(rule.beta1)));
            let v = g.mul(g).mul_add(V::splat(rule.one_minus_beta2), v.mul(V::splat(rule.beta2)));
            let denominator = v.sqrt().mul_add(V::splat(rule.inv_sqrt_correction2), V::splat(rule.eps));
            if DECAY == DECOUPLED {
                p = p.mul_add(decay, p);
            }
            let p = m.div(denominator).mul_add(V::splat(rule.step_size), p);

            access.store::<P, V>(p, spans.param.add(at));
            access.store::<S, V>(m, spans.exp_avg.add(at));
            access.store::<S, V>(v, spans.exp_avg_sq.add(at));
            access.store::<C, V>(p, spans.param_copy.add(at));
            grad
        }
    }

    #[cfg(target_arch = "aarch64")]
    fn as_adam(&self) -> Option<&AdamRule> {
        Some(&self.0)
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

impl Rule for AdagradRule {
    #[inline(always)]
    unsafe fn apply<V, A, P, S, G, C>(&self, spans: &Spans<P, S, G, C>, at: usize, access: A) -> V
    where
        V: Vector,
        A: Access,
        P: Element,
        S: Element,
        G: Element,
        C: Element,
    {
        // SAFETY: the caller's promise about the instruction set and the spans covers every line.
        unsafe {
            let grad = access.load::<G, V>(spans.grad.add(at)).mul(V::splat(self.grad_scale));
            let p = access.load::<P, V>(spans.param.add(at));
            let v = access.load::<S, V>(spans.exp_avg_sq.add(at));

            let g =
                if self.weight_decay == 0.0 { grad } else { p.mul_add(V::splat(self.weight_decay), grad) };
            let v = g.mul_add(g, v);
            let update = g.div(v.sqrt().add(V::splat(self.eps)));
            let p = update.mul_add(V::splat(self.step_size), p);

            access.store::<P, V>(p, spans.param.add(at));
            access.store::<S, V>(v, spans.exp_avg_sq.add(at));
            access.store::<C, V>(p, spans.param_copy.add(at));
            grad
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

impl Rule for LionRule {
    #[inline(always)]
    unsafe fn apply<V, A, P, S, G, C>(&self, spans: &Spans<P, S, G, C>, at: usize, access: A) -> V
    where
        V: Vector,
        A: Access,
        P: Element,
        S: Element,
        G: Element,
        C: Element,
    {
        // SAFETY: the caller's promise about the instruction set and the spans covers every line.
        unsafe {
            let grad = access.load::<G, V>(spans.grad.add(at)).mul(V::splat(self.grad_scale));
            let mut p = access.load::<P, V>(spans.param.add(at));
            let m = access.load::<S, V>(spans.exp_avg.add(at));

            let direction = grad.mul_add(V::splat(self.one_minus_beta1), m.mul(V::splat(self.beta1)));
            if self.decay_factor != 0.0 {
                p = p.mul_add(V::splat(self.decay_factor), p);
            }
            let p = p.sub(direction.signum_times(V::splat(self.lr)));
            let m = grad.mul_add(V::splat(self.one_minus_beta2), m.mul(V::splat(self.beta2)));

            access.store::<P, V>(p, spans.param.add(at));
            access.store::<S, V>(m, spans.exp_avg.add(at));
            access.store::<C, V>(p, spans.param_copy.add(at));
            grad
        }
    }
}
