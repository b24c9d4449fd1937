//! A rule with almost no arithmetic, for measurements of memory bandwidth.

use super::rules::{Arithmetic, Corrector, ElementState};
use super::vector::Vector;

/// Reads and writes the same memory as Adam with almost no arithmetic. Its time is the lower bound that memory
/// bandwidth sets for an Adam step. It has no undo, and a step for few types only.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StreamRule;

impl Arithmetic for StreamRule {
    const EXP_AVG: bool = true;
    const EXP_AVG_SQ: bool = true;

    #[inline(always)]
    fn grad_scale(&self) -> f32 {
        1.0
    }

    fn with_grad_scale(self, _: f32) -> Self {
        self
    }

    #[inline(always)]
    unsafe fn forward<V: Vector>(&self, old: ElementState<V>, grad: V) -> ElementState<V> {
        // SAFETY: the caller upholds the callee's contract.
        unsafe {
            let ElementState { param, exp_avg, exp_avg_sq } = old;
            ElementState {
                param: param.add(grad),
                exp_avg: exp_avg.add(grad),
                exp_avg_sq: exp_avg_sq.add(grad),
            }
        }
    }

    #[inline(always)]
    unsafe fn inverse<V: Vector, S: Corrector<V>>(&self, new: ElementState<V>, grad: V, corrector: &mut S) {
        // SAFETY: the caller upholds the callee's contract.
        unsafe {
            corrector.param(new.param.sub(grad));
            corrector.exp_avg(new.exp_avg.sub(grad));
            corrector.exp_avg_sq(new.exp_avg_sq.sub(grad));
        }
    }
}
