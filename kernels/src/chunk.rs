//! Entry points for the step and the undo of one chunk. An SVE kernel runs its C body where one exists for the rule and
//! the element types. Every other call runs the generic Rust body.

use super::chunk_loop::CHUNK;
use super::coded_step::step_coded;
use super::dispatch::Kernel;
use super::element::{Dtypes, has_bf16_moments};
use super::kept;
use super::publish::publish;
use super::rules::{AdamRule, Arithmetic, plain_rules};
use super::split::step_split;
use super::stochastic::{RandomBits, Stochastic};
use super::take::take_copy;
use super::tensor::{Tensor, needs_a_log, not_stochastic, split_stands_alone};
use crate::dtype::Dtype;
use crate::error::Result;

/// An optimizer with compiled kernels: the coefficients of one step, and the operations step and undo.
pub trait Optimizer: Arithmetic {
    /// Steps one chunk (at most [`CHUNK`] elements). Returns the sum of squares of the scaled gradient if `squares` is
    /// true. Records the step if the tensor has a log. Begins with what other code has written to a copy that counts. Fails if a state is missing or no kernel exists for the types.
    fn step(self, kernel: Kernel, tensor: Tensor<'_>, squares: bool) -> Result<f64>;

    /// Fails if the rule has no kernel for the types of `tensor`, which other rules may have.
    fn check_types(&self, _tensor: &Tensor<'_>) -> Result<()> {
        Ok(())
    }

    /// Rolls back the step of one chunk: bit-exactly if the tensor has the log of that step, else approximately by the
    /// inverse formula. With `redo_scale`, repeats the step in the same pass with `redo_scale` as the gradient scale.
    fn undo(self, kernel: Kernel, tensor: Tensor<'_>, redo_scale: Option<f32>) -> Result<()>;
}

/// Implements [`Optimizer`] for one concrete type. A blanket impl would be compiled again in every crate that calls it;
/// concrete impls are compiled once, in this crate.
macro_rules! rule {
    ($rule:ty) => {
        impl Optimizer for $rule {
            fn step(self, kernel: Kernel, tensor: Tensor<'_>, squares: bool) -> Result<f64> {
                step(kernel, self, tensor, squares)
            }

            fn undo(self, kernel: Kernel, tensor: Tensor<'_>, redo_scale: Option<f32>) -> Result<()> {
                undo(kernel, self, tensor, redo_scale)
            }
        }
    };
}

plain_rules!(rule);

impl AdamRule {
    /// Fails if the rule rounds stochastically, and these types have no moments that it could round.
    pub fn check_rounding(&self, dtypes: Dtypes) -> Result<()> {
        match self.stochastic {
            Some(_) if !has_bf16_moments(dtypes) => Err(not_stochastic(dtypes)),
            _ => Ok(()),
        }
    }
}

impl Optimizer for AdamRule {
    fn check_types(&self, tensor: &Tensor<'_>) -> Result<()> {
        if self.stochastic.is_none() || tensor.has_codes() {
            return Ok(());
        }
        let mut dtypes = tensor.dtypes()?;
        if tensor.is_split() {
            // The step joins the master to f32 in registers.
            dtypes.param = Dtype::F32;
        }
        self.check_rounding(dtypes)
    }

    fn step(self, kernel: Kernel, mut tensor: Tensor<'_>, squares: bool) -> Result<f64> {
        let Some(key) = self.stochastic else { return step(kernel, self, tensor, squares) };
        if tensor.keeps_values() {
            keep_values::<AdamRule>(kernel, &mut tensor)?;
        }
        if tensor.has_codes() {
            let random = RandomBits::new(key, tensor.first());
            let rule = AdamRule { stochastic: None, ..self };
            return step_of_codes(kernel, rule, &mut tensor, squares, Some(random));
        }
        check::<AdamRule>(&tensor)?;
        take_copy(kernel, &mut tensor);
        let rule = Stochastic::new(self, key, tensor.first());
        if tensor.is_split() {
            return step_of_split(kernel, rule, &mut tensor, squares);
        }
        super::step::step_stochastic(kernel, rule, &mut tensor, squares)
    }

    fn undo(self, kernel: Kernel, mut tensor: Tensor<'_>, redo_scale: Option<f32>) -> Result<()> {
        let Some(key) = self.stochastic else { return undo(kernel, self, tensor, redo_scale) };
        if tensor.keeps_values() {
            return undo_of_values(kernel, self, tensor, redo_scale);
        }
        check::<AdamRule>(&tensor)?;
        let rule = Stochastic::new(self, key, tensor.first());
        super::undo::undo_stochastic(kernel, rule, &mut tensor, redo_scale)
    }
}

fn step<R: Arithmetic>(kernel: Kernel, rule: R, mut tensor: Tensor<'_>, squares: bool) -> Result<f64> {
    // One question for most tensors: a call of many small ones pays for each.
    if !tensor.keeps_values() {
        return step_plain(kernel, rule, tensor, squares);
    }
    keep_values::<R>(kernel, &mut tensor)?;
    if tensor.has_codes() {
        return step_of_codes(kernel, rule, &mut tensor, squares, None);
    }
    check::<R>(&tensor)?;
    step_of_split(kernel, rule, &mut tensor, squares)
}

/// Steps a tensor without 8-bit moments and split master.
#[inline(always)]
fn step_plain<R: Arithmetic>(kernel: Kernel, rule: R, mut tensor: Tensor<'_>, squares: bool) -> Result<f64> {
    check::<R>(&tensor)?;
    take_copy(kernel, &mut tensor);
    #[cfg(target_arch = "aarch64")]
    if let (Some(adam), Some(rule)) = (kernel.adam(), rule.as_adam())
        && let Some(sum) = super::sve::step(adam, rule, &mut tensor, squares)
    {
        return Ok(sum);
    }
    super::step::step(kernel, rule, &mut tensor, squares)
}

/// Steps 8-bit moments, which `random` rounds.
fn step_of_codes<R: Arithmetic>(
    kernel: Kernel,
    rule: R,
    tensor: &mut Tensor<'_>,
    squares: bool,
    random: Option<RandomBits>,
) -> Result<f64> {
    check::<R>(tensor)?;
    take_copy(kernel, tensor);
    step_coded(kernel, rule, tensor, squares, random)
}

fn step_of_split<R: Arithmetic>(
    kernel: Kernel,
    rule: R,
    tensor: &mut Tensor<'_>,
    squares: bool,
) -> Result<f64> {
    if tensor.has_shadow() {
        return Err(split_stands_alone());
    }
    step_split(kernel, rule, tensor, squares)
}

fn undo<R: Optimizer>(
    kernel: Kernel,
    rule: R,
    mut tensor: Tensor<'_>,
    redo_scale: Option<f32>,
) -> Result<()> {
    if tensor.keeps_values() {
        return undo_of_values(kernel, rule, tensor, redo_scale);
    }
    check::<R>(&tensor)?;
    #[cfg(target_arch = "aarch64")]
    if let (Some(adam), Some(rule)) = (kernel.adam(), rule.as_adam())
        && super::sve::undo(adam, rule, &mut tensor, redo_scale)
    {
        return Ok(());
    }
    super::undo::undo(kernel, rule, &mut tensor, redo_scale)
}

fn check<R: Arithmetic>(tensor: &Tensor<'_>) -> Result<()> {
    assert!(tensor.len() <= CHUNK, "a chunk is at most {CHUNK} elements");
    tensor.check_states::<R>()
}

/// Before a recorded step that no formula inverts: keeps the old values in the log.
fn keep_values<R: Arithmetic>(kernel: Kernel, tensor: &mut Tensor<'_>) -> Result<()> {
    if !tensor.has_log() {
        return Ok(());
    }
    check::<R>(tensor)?;
    take_copy(kernel, tensor);
    kept::keep(tensor)
}

/// Rolls back a step whose log has the old values. The copy then holds them too, so a repeated step does not take it.
fn undo_of_values<R: Optimizer>(
    kernel: Kernel,
    rule: R,
    mut tensor: Tensor<'_>,
    redo_scale: Option<f32>,
) -> Result<()> {
    check::<R>(&tensor)?;
    if !kept::restore(&mut tensor)? {
        return Err(needs_a_log());
    }
    match redo_scale {
        Some(scale) => rule.with_grad_scale(scale).step(kernel, tensor.without_taking(), false).map(drop),
        None => {
            publish(kernel, tensor);
            Ok(())
        }
    }
}
