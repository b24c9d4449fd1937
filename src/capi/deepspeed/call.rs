//! The arguments of a step of a DeepSpeed id, and the state that the id keeps between steps.

use crate::capi::prelude::*;
use crate::kernel::{AdamRule, Arithmetic, stochastic_key};
use crate::optim::check;
use crate::optim::deepspeed::{ADAM, AdamCall, AdamState};

c_struct! { first 40, initial |call| (call.bias_correction, call.grad_scale) = (1, 1.0);
/// Arguments of DeepSpeed's `adam_update`, except id and tensor. Begin with SPW_DS_ADAM_CALL_INIT, in which grad_scale
/// and bias_correction are 1. All structs of an array have the same `struct_size`.
pub struct spw_ds_adam_call {
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
    /// Factor on the gradient; not 0.
    pub grad_scale: f32,
}
}

c_struct! { first 32;
/// State that an id keeps between steps.
pub struct spw_ds_adam_state {
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
#[unsafe(no_mangle)]
pub extern "C" fn spw_ds_adam_get_state(id: i32, state_out: Out<spw_ds_adam_state>) -> spw_status {
    guard(|| {
        let state = ADAM.get(id)?;
        let raw = report!(spw_ds_adam_state from state {
            step, beta1, beta2, beta1_power, beta2_power
        } with {
            adamw_mode: state.decoupled.into()
        });
        state_out.write(&raw, "state_out")
    })
}

/// Creates the id with this state, or replaces the state of an existing id. The next step is bit-identical to the next
/// step in the saving process.
#[unsafe(no_mangle)]
pub extern "C" fn spw_ds_adam_set_state(id: i32, state: In<spw_ds_adam_state>) -> spw_status {
    guard(|| {
        let raw = state.read("state")?;
        let state = parsed!(AdamState from raw {
            step, beta1, beta2, beta1_power, beta2_power
        } with {
            decoupled: abi_struct::flag("state.adamw_mode", raw.adamw_mode)?
        });
        ADAM.create(id, state.restored().map_err(|error| error.within("state."))?);
        Ok(())
    })
}

/// The call's coefficients, and the state of the id after the call.
pub(in crate::capi) fn rule_of(id: i32, call: In<spw_ds_adam_call>) -> Result<(AdamState, AdamRule)> {
    let call = call.read("call")?;
    let named = |error: Error| error.within("call.");
    let (state, rule) = ADAM.get(id)?.begin(&call_of(&call).map_err(named)?).map_err(named)?;
    Ok((state, rule.with_grad_scale(grad_scale_of(&call).map_err(named)?)))
}

/// The coefficients of each call, computed in order, and the state of the id after them. `rounds`: each rounds its moments
/// at random, with bits of its own.
pub(in crate::capi) fn rules_of(
    id: i32,
    calls: In<spw_ds_adam_call>,
    count: u64,
    rounds: bool,
) -> Result<(AdamState, Vec<AdamRule>)> {
    let mut kept = ADAM.get(id)?;
    let calls = calls.read_all(count, "calls")?;
    let mut rules = Vec::new();
    for (index, call) in calls.iter().enumerate() {
        let named = |error: Error| error.within(&format!("calls[{index}]."));
        let (state, rule) = kept.begin(&call_of(call).map_err(named)?).map_err(named)?;
        kept = state;
        let stochastic = rounds.then(|| stochastic_key(index as u64, call.step));
        let rule = AdamRule { stochastic, ..rule };
        rules.push(rule.with_grad_scale(grad_scale_of(call).map_err(named)?));
    }
    Ok((kept, rules))
}

fn call_of(raw: &spw_ds_adam_call) -> Result<AdamCall> {
    Ok(parsed!(AdamCall from raw {
        step, lr, beta1, beta2, eps, weight_decay
    } with {
        bias_correction: abi_struct::flag("bias_correction", raw.bias_correction)?
    }))
}

fn grad_scale_of(raw: &spw_ds_adam_call) -> Result<f32> {
    abi_struct::initialised::<spw_ds_adam_call>("grad_scale", raw.grad_scale == 0.0)?;
    check::finite("grad_scale", raw.grad_scale.into())
}
