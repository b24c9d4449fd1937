//! A step that does next to no arithmetic, for measurements of the memory.

use super::rules::{Arithmetic, Settle, Values};
use super::vector::Vector;

/// Reads and writes what Adam does with next to no arithmetic: how fast the memory lets any such step be. Compiled where it
/// is used, by a measurement.
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
    unsafe fn forward<V: Vector>(&self, old: Values<V>, grad: V) -> Values<V> {
        // SAFETY: the caller's promise is the callee's.
        unsafe {
            let Values { param, exp_avg, exp_avg_sq } = old;
            Values { param: param.add(grad), exp_avg: exp_avg.add(grad), exp_avg_sq: exp_avg_sq.add(grad) }
        }
    }

    #[inline(always)]
    unsafe fn inverse<V: Vector, S: Settle<V>>(&self, new: Values<V>, grad: V, settle: &mut S) {
        // SAFETY: the caller's promise is the callee's.
        unsafe {
            settle.param(new.param.sub(grad));
            settle.exp_avg(new.exp_avg.sub(grad));
            settle.exp_avg_sq(new.exp_avg_sq.sub(grad));
        }
    }
}
