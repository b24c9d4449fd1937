//! The arguments of a step of a DeepSpeed id, and the state that the id keeps between steps.
#![allow(non_camel_case_types)]

use crate::capi::abi_struct::{self, c_struct};
use crate::capi::base::spw_status;
use crate::capi::guard::guard;
use crate::error::{Error, Result};
use crate::kernel::{AdamRule, Arithmetic};
use crate::optim::deepspeed::{ADAM, AdamCall, AdamState};

c_struct! { first 40;
/// Arguments of DeepSpeed's `adam_update`, except id and tensor. Begin with SPW_DS_ADAM_CALL_INIT, in which grad_scale
/// and bias_correction are 1.
pub struct spw_ds_adam_call {
    /// `sizeof(spw_ds_adam_call)`, the same in all structs of an array.
    pub struct_size: u32,
    /// 1 divides by 1 - beta^t, 0 omits the division.
    pub bias_correction: u32,
    /// Number of this step, counted from 1. A call equal to the call before it reuses its coefficients, so subgroups
    /// that are parts of one DeepSpeed tensor get the bits of a single call.
    pub step: u64,
    /// Learning rate.
    pub lr: f32,
    /// Decay factor of exp_avg.
    pub beta1: f32,
    /// Decay factor of exp_avg_sq.
    pub beta2: f32,
    /// Added to the denominator.
    pub eps: f32,
    /// Weight decay.
    pub weight_decay: f32,
    /// Factor on the gradient.
    pub grad_scale: f32,
}
}

c_struct! { first 32;
/// State that an id keeps between steps.
pub struct spw_ds_adam_state {
    /// `sizeof(spw_ds_adam_state)`
    pub struct_size: u32,
    /// DeepSpeed's adamw_mode: 1 is AdamW, 0 is L2.
    pub adamw_mode: u32,
    /// The last step; 0 before the first.
    pub step: u64,
    /// beta1 of that step.
    pub beta1: f32,
    /// beta2 of that step.
    pub beta2: f32,
    /// The power of beta1 in that step, computed in f32 by repeated multiplication as in DeepSpeed.
    pub beta1_power: f32,
    /// The power of beta2 in that step.
    pub beta2_power: f32,
}
}

/// Writes the state of an id, for `spw_ds_adam_set_state` in another process.
///
/// # Safety
/// `state_out` points to a struct of `struct_size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_ds_adam_get_state(id: i32, state_out: *mut spw_ds_adam_state) -> spw_status {
    guard(|| {
        let state = ADAM.get(id)?;
        let raw = spw_ds_adam_state {
            struct_size: 0,
            adamw_mode: state.decoupled.into(),
            step: state.step,
            beta1: state.beta1,
            beta2: state.beta2,
            beta1_power: state.beta1_power,
            beta2_power: state.beta2_power,
        };
        // SAFETY: the caller meets the callee's requirements.
        unsafe { abi_struct::write(&raw, state_out, "state_out") }
    })
}

/// Creates the id with this state, or replaces the state of an existing id. The next step is bit-identical to the next
/// step in the saving process.
///
/// # Safety
/// `state` points to a struct of `struct_size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_ds_adam_set_state(id: i32, state: *const spw_ds_adam_state) -> spw_status {
    guard(|| {
        // SAFETY: the caller meets the callee's requirements.
        let raw = unsafe { abi_struct::read(state, "state") }?;
        let state = AdamState {
            decoupled: abi_struct::flag("state.adamw_mode", raw.adamw_mode)?,
            step: raw.step,
            beta1: raw.beta1,
            beta2: raw.beta2,
            beta1_power: raw.beta1_power,
            beta2_power: raw.beta2_power,
        };
        ADAM.create(id, state.restored().map_err(|error| error.within("state."))?);
        Ok(())
    })
}

/// The call's coefficients, and the state of the id after the call.
///
/// # Safety
/// `call` is NULL or points to a struct of `struct_size` bytes.
pub(in crate::capi) unsafe fn rule_of(
    id: i32,
    call: *const spw_ds_adam_call,
) -> Result<(AdamState, AdamRule)> {
    // SAFETY: the caller meets the callee's requirements.
    let call = unsafe { abi_struct::read(call, "call") }?;
    let named = |error: Error| error.within("call.");
    let (state, rule) = ADAM.get(id)?.begin(&call_of(&call).map_err(named)?).map_err(named)?;
    Ok((state, rule.with_grad_scale(grad_scale_of(&call).map_err(named)?)))
}

/// The coefficients of each call, computed in order, and the state of the id after them.
///
/// # Safety
/// `calls` points to `count` structs, `struct_size` bytes apart.
pub(in crate::capi) unsafe fn rules_of(
    id: i32,
    calls: *const spw_ds_adam_call,
    count: u64,
) -> Result<(AdamState, Vec<AdamRule>)> {
    let mut kept = ADAM.get(id)?;
    // SAFETY: the caller meets the callee's requirements.
    let calls = unsafe { abi_struct::read_all(calls, count, "calls") }?;
    let mut rules = Vec::new();
    for (index, call) in calls.iter().enumerate() {
        let named = |error: Error| error.within(&format!("calls[{index}]."));
        let (state, rule) = kept.begin(&call_of(call).map_err(named)?).map_err(named)?;
        kept = state;
        rules.push(rule.with_grad_scale(grad_scale_of(call).map_err(named)?));
    }
    Ok((kept, rules))
}

fn call_of(raw: &spw_ds_adam_call) -> Result<AdamCall> {
    Ok(AdamCall {
        step: raw.step,
        lr: raw.lr,
        beta1: raw.beta1,
        beta2: raw.beta2,
        eps: raw.eps,
        weight_decay: raw.weight_decay,
        bias_correction: abi_struct::flag("bias_correction", raw.bias_correction)?,
    })
}

fn grad_scale_of(raw: &spw_ds_adam_call) -> Result<f32> {
    match raw.grad_scale.is_finite() {
        true => Ok(raw.grad_scale),
        false => Err(Error::invalid("grad_scale", format!("{} is not a finite f32", raw.grad_scale))),
    }
}
