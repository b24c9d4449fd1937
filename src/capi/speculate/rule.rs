//! The optimizer of a round.

use std::any::Any;

use crate::capi::optim::table::{self, StepOptions};
use crate::capi::optim::tensor::spw_tensor;
use crate::capi::prelude::*;
use crate::kernel::{AdamRule, Arithmetic};
use crate::offload::speculate::{Bucket, Publish, Tensors, Undo};
use crate::optim::lent::Lent;

/// The coefficients of a round, whatever its optimizer is.
pub(in crate::capi) trait RoundRule: Send + Sync {
    /// The bucket of these tensors.
    ///
    /// # Safety
    /// As `spw_spec_submit`.
    unsafe fn bucket(
        &self,
        undo: Undo,
        publish: Publish,
        tensors: In<spw_tensor>,
        count: u64,
    ) -> Result<Box<dyn Bucket>>;

    /// The coefficients, if they are Adam's.
    fn adam(&self) -> Option<AdamRule>;
}

/// The coefficients of the optimizer with these options.
pub(in crate::capi) struct RuleOf<O: StepOptions>(pub(in crate::capi) O::Rule);

impl<O: StepOptions + 'static> RoundRule for RuleOf<O> {
    unsafe fn bucket(
        &self,
        undo: Undo,
        publish: Publish,
        tensors: In<spw_tensor>,
        count: u64,
    ) -> Result<Box<dyn Bucket>> {
        // SAFETY: the caller meets the callee's requirements.
        let tensors = unsafe { lent::<O>(self.0, tensors, count) }?;
        Ok(Box::new(Tensors::new(tensors, undo, publish)?))
    }

    fn adam(&self) -> Option<AdamRule> {
        (&self.0 as &dyn Any).downcast_ref().copied()
    }
}

/// The tensors of a bucket. Their own options have the grad_scale of `rule`.
///
/// # Safety
/// As `spw_spec_submit`.
pub(in crate::capi) unsafe fn lent<O: StepOptions>(
    rule: O::Rule,
    tensors: In<spw_tensor>,
    count: u64,
) -> Result<Lent<O::Rule>> {
    // SAFETY: the caller meets the callees' requirements.
    unsafe {
        table::lent(tensors, count, &rule, |options| match table::own_rule::<O>(options)? {
            own if own.grad_scale() == rule.grad_scale() => Ok(own),
            _ => Err(Error::invalid("options.grad_scale", "must be equal to the grad_scale of the round")),
        })
    }
}
