//! A chunk's step and its undo: by a body in C where the kernel has one for this rule and these types, else by the generic
//! body.

use super::rules::{AdagradRule, AdamRule, Arithmetic, LionRule};
use super::select::Kernel;
use super::stream::StreamRule;
use super::tensor::Tensor;
use super::walk::CHUNK;
use crate::error::Result;

/// An optimizer whose kernels are compiled: coefficients of one step, and the two things done with them.
pub trait Rule: Arithmetic {
    /// Steps one chunk (at most [`CHUNK`] elements) and returns the sum of squares of the scaled gradient, or 0 when
    /// `squares` is false. A tensor with a log has its step recorded there.
    fn step(self, kernel: Kernel, tensor: Tensor<'_>, squares: bool) -> Result<f64>;

    /// Takes one chunk's step back: exactly if the tensor carries the log of that step, else by the inverse formula.
    /// With a factor `again`, the step is done anew in the same pass, its gradient multiplied by that instead.
    fn undo(self, kernel: Kernel, tensor: Tensor<'_>, again: Option<f32>) -> Result<()>;
}

/// An impl for each rule, and not one for all, so that this crate compiles the kernels and no crate that calls them
/// compiles them again.
macro_rules! rule {
    ($rule:ty $(, #[$how:meta])?) => {
        impl Rule for $rule {
            $(#[$how])?
            fn step(self, kernel: Kernel, tensor: Tensor<'_>, squares: bool) -> Result<f64> {
                step(kernel, self, tensor, squares)
            }

            $(#[$how])?
            fn undo(self, kernel: Kernel, tensor: Tensor<'_>, again: Option<f32>) -> Result<()> {
                undo(kernel, self, tensor, again)
            }
        }
    };
}

rule!(AdamRule);
rule!(AdagradRule);
rule!(LionRule);
rule!(StreamRule, #[inline]);

fn step<R: Arithmetic>(kernel: Kernel, rule: R, mut tensor: Tensor<'_>, squares: bool) -> Result<f64> {
    check::<R>(&tensor)?;
    #[cfg(target_arch = "aarch64")]
    if let (Some(adam), Some(rule)) = (kernel.adam(), rule.as_adam())
        && let Some(sum) = super::sve::step(adam, rule, &mut tensor, squares)
    {
        return Ok(sum);
    }
    super::step::step(kernel, rule, &mut tensor, squares)
}

fn undo<R: Arithmetic>(kernel: Kernel, rule: R, mut tensor: Tensor<'_>, again: Option<f32>) -> Result<()> {
    check::<R>(&tensor)?;
    #[cfg(target_arch = "aarch64")]
    if let (Some(adam), Some(rule)) = (kernel.adam(), rule.as_adam())
        && super::sve::undo(adam, rule, &mut tensor, again)
    {
        return Ok(());
    }
    super::undo::undo(kernel, rule, &mut tensor, again)
}

fn check<R: Arithmetic>(tensor: &Tensor<'_>) -> Result<()> {
    assert!(tensor.len() <= CHUNK, "a chunk is at most {CHUNK} elements");
    tensor.check_states::<R>()
}
