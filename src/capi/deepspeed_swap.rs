//! DeepSpeed's Adam over a tiered update, and saving the state of an id.
#![allow(non_camel_case_types)]

use std::ffi::c_void;

use super::deepspeed::jobs;
use super::guard::guard;
use super::record::{self, Record};
use super::status::spw_status;
use super::swap::{check_inputs, object, published, spw_swap, with_state};
use super::tensor::{self, spw_tensor};
use crate::error::{Error, Result};
use crate::kernel::{AdamRule, Arithmetic};
use crate::optim::adam;
use crate::optim::deepspeed::{ADAM, AdamCall, AdamState};

/// Arguments of DeepSpeed's `adam_update` for one subgroup.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
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

// SAFETY: numbers without padding.
unsafe impl Record for spw_ds_adam_call {
    const FIRST_SIZE: usize = 40;
    const NAME: &'static str = "spw_ds_adam_call";
}

/// State that an id keeps between steps.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
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

// SAFETY: numbers without padding.
unsafe impl Record for spw_ds_adam_state {
    const FIRST_SIZE: usize = 32;
    const NAME: &'static str = "spw_ds_adam_state";
}

/// Called by the thread that runs the update after each subgroup's step, while transfers of other subgroups continue.
/// `param` holds the subgroup's new f32 master weights and is valid until the return. A return value other than 0 ends
/// the update with SPW_ERR_INVALID_ARGUMENT. The function must not call the update.
pub type spw_swap_stepped_fn =
    Option<unsafe extern "C" fn(user: *mut c_void, subgroup: u64, param: *const f32) -> i32>;

/// Does `spw_swap_adam_step` with the arithmetic of `spw_ds_adam_update`, one call per subgroup. The coefficients
/// advance in the order of `calls`, whatever the order of the steps, so the bits are those of DeepSpeed's step over
/// states in memory. `tensors[i].options` is NULL. The id advances only if the whole update succeeds.
///
/// # Safety
/// As `spw_swap_adam_step`; `calls` points to `count` structs, `struct_size` bytes apart; `stepped` may be NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_swap_ds_adam_step(
    swap: Option<&mut spw_swap>,
    id: i32,
    calls: *const spw_ds_adam_call,
    tensors: *const spw_tensor,
    count: usize,
    stepped: spw_swap_stepped_fn,
    user: *mut c_void,
) -> spw_status {
    guard(|| {
        let swap = object(swap)?;
        // SAFETY: the caller meets the callees' requirements.
        unsafe {
            let raw = tensor::read_all(tensors, count)?;
            check_inputs(swap, &raw)?;
            let (kept, rules) = rules_of(id, calls, count)?;
            swap.step_with(&|subgroup| published(&raw[subgroup]), |subgroup, state| {
                let whole = with_state(raw[subgroup], state);
                let named = |error: Error| error.within(&format!("tensors[{subgroup}]."));
                adam::step(&mut jobs(rules[subgroup], &whole).map_err(named)?, false)?;
                match stepped.map_or(0, |stepped| stepped(user, subgroup as u64, whole.param.cast())) {
                    0 => Ok(()),
                    other => {
                        Err(Error::invalid("stepped", format!("returned {other} for subgroup {subgroup}")))
                    }
                }
            })?;
            ADAM.create(id, kept);
            Ok(())
        }
    })
}

/// The coefficients of each call, computed in order, and the state of the id after them.
///
/// # Safety
/// `calls` points to `count` structs, `struct_size` bytes apart.
pub(super) unsafe fn rules_of(
    id: i32,
    calls: *const spw_ds_adam_call,
    count: usize,
) -> Result<(AdamState, Vec<AdamRule>)> {
    let mut kept = ADAM.get(id)?;
    // SAFETY: the caller meets the callee's requirements.
    let calls = unsafe { record::read_all(calls, count, "calls") }?;
    let mut rules = Vec::new();
    for (index, call) in calls.iter().enumerate() {
        let named = |error: Error| error.within(&format!("calls[{index}]."));
        let (state, rule) = kept.begin(&call_of(call)?).map_err(named)?;
        kept = state;
        rules.push(rule.with_grad_scale(call.grad_scale));
    }
    Ok((kept, rules))
}

/// Writes the state of an id, for `spw_ds_adam_restore` in another process.
///
/// # Safety
/// `state_out` points to a struct of `struct_size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_ds_adam_save(id: i32, state_out: *mut spw_ds_adam_state) -> spw_status {
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
        unsafe { record::write(&raw, state_out, "state_out") }
    })
}

/// Creates the id with this state, or replaces the state of an existing id. Its next step has the bits that it would
/// have in the process that saved the state.
///
/// # Safety
/// `state` points to a struct of `struct_size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_ds_adam_restore(id: i32, state: *const spw_ds_adam_state) -> spw_status {
    guard(|| {
        // SAFETY: the caller meets the callee's requirements.
        let raw = unsafe { record::read(state, "state") }?;
        let state = AdamState {
            decoupled: record::flag("state.adamw_mode", raw.adamw_mode)?,
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

fn call_of(raw: &spw_ds_adam_call) -> Result<AdamCall> {
    Ok(AdamCall {
        step: raw.step,
        lr: raw.lr,
        beta1: raw.beta1,
        beta2: raw.beta2,
        eps: raw.eps,
        weight_decay: raw.weight_decay,
        bias_correction: record::flag("bias_correction", raw.bias_correction)?,
    })
}
