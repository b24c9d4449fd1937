//! Optimizer ids as in DeepSpeed's op module `cpu_adam`.

use std::ffi::c_void;

use super::call::{rule_of, spw_ds_adam_call};
use crate::capi::optim::table;
use crate::capi::optim::tensor::{at, no_split_masters, no_steps_of_codes, spw_tensor};
use crate::capi::prelude::*;
use crate::capi::undo::spw_undo;
use crate::optim::deepspeed::{ADAM, AdamState};
use crate::optim::lent::Lent;
use crate::optim::{self, Family, undo};

/// DeepSpeed's `create_adam`: creates the optimizer `id`, or resets it. `adamw_mode` 1 is AdamW, 0 is L2. Ids are
/// shared by all threads of the process. Calls with an id that was not created are SPW_ERR_UNKNOWN_ID.
#[unsafe(no_mangle)]
pub extern "C" fn spw_ds_adam_create(id: i32, beta1: f32, beta2: f32, adamw_mode: u32) -> spw_status {
    guard(|| {
        let decoupled = abi_struct::flag("adamw_mode", adamw_mode)?;
        ADAM.create(id, AdamState::new(decoupled, beta1, beta2)?);
        Ok(())
    })
}

/// DeepSpeed's `adam_update` of one tensor. Each id keeps the powers of beta in f32, as DeepSpeed does:
///
/// - Step t + 1 after step t multiplies the powers by beta.
/// - Step t again (the next parameter) keeps them.
/// - Any other step, or a changed beta, computes them anew.
///
/// The results have the bits of DeepSpeed's AVX-512 build. If `undo` is not NULL, the step is recorded in it for
/// `spw_ds_adam_rollback`, as by `spw_undo_adam_step`.
///
/// # Safety
/// As `spw_adam_step`, for one tensor. `call` points to a struct of `struct_size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_ds_adam_update(
    undo: Option<&mut spw_undo>,
    id: i32,
    call: In<spw_ds_adam_call>,
    tensor: In<spw_tensor>,
) -> spw_status {
    guard(|| {
        // SAFETY: the caller meets the callees' requirements.
        unsafe {
            let (state, rule) = rule_of(id, call)?;
            match undo {
                None => step_one(rule, tensor)?,
                Some(undo) => undo.0.record_sealed(lent(rule, tensor)?)?,
            }
            ADAM.create(id, state);
        }
        Ok(())
    })
}

/// DeepSpeed's `adam_rollback` of one tensor, with the arguments of the update that is rolled back.
///
/// The rollback is bit-exact, and `exact_out` becomes 1, if `undo` holds exactly that step and the spans are as the
/// step left them. The spans may have moved. Otherwise, or if `undo` is NULL, the rollback is approximate as with
/// SPW_UNDO_MODE_ARITHMETIC, which rejects Inf and NaN, and `exact_out` becomes 0.
///
/// DeepSpeed's implementation writes 0 to a parameter whose gradient is not finite. It supports neither L2 nor steps
/// without bias correction.
///
/// # Safety
/// As `spw_ds_adam_update`; `exact_out` points to a u32.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_ds_adam_rollback(
    undo: Option<&mut spw_undo>,
    id: i32,
    call: In<spw_ds_adam_call>,
    tensor: In<spw_tensor>,
    exact_out: Out<u32>,
) -> spw_status {
    guard(|| {
        exact_out.required("exact_out")?;
        // SAFETY: the caller meets the callees' requirements.
        unsafe {
            let (_, rule) = rule_of(id, call)?;
            let rolled_back = match undo {
                Some(undo) => undo.0.rollback_sealed(lent(rule, tensor)?)?,
                None => None,
            };
            if rolled_back.is_none() {
                let mut tensors = lent(rule, tensor)?;
                let mut jobs = tensors.lend()?;
                jobs.iter_mut().try_for_each(undo::check_reversible)?;
                undo::undo(&mut jobs, None)?;
            }
            exact_out.put((rolled_back == Some(true)).into(), "exact_out")
        }
    })
}

/// DeepSpeed's `destroy_adam`: removes the optimizer `id`.
#[unsafe(no_mangle)]
pub extern "C" fn spw_ds_adam_destroy(id: i32) -> spw_status {
    guard(|| ADAM.destroy(id))
}

/// Steps the tensor of a call that names an id.
///
/// # Safety
/// As `spw_adam_step`, for one tensor.
unsafe fn step_one<R: Family>(rule: R, tensor: In<spw_tensor>) -> Result<()> {
    // SAFETY: the caller meets the callee's requirements.
    one(tensor, |own| unsafe {
        table::with_jobs(tensor, 1, &rule, own, |jobs| {
            if jobs.iter().any(|job| job.tensor.is_split()) {
                return Err(at(0, no_split_masters()));
            }
            if jobs.iter().any(|job| job.tensor.has_codes()) {
                return Err(at(0, no_steps_of_codes()));
            }
            optim::step(jobs, false).map(drop)
        })
    })
}

/// The tensor of a call that names an id, for longer than the call. Rejects param_low and 8-bit moments.
///
/// # Safety
/// As [`table::lent`], for one tensor.
pub(super) unsafe fn lent<R: Family>(rule: R, tensor: In<spw_tensor>) -> Result<Lent<R>> {
    // SAFETY: the caller meets the callee's requirements.
    one(tensor, |own| unsafe { table::lent_if(table::whole_states, tensor, 1, &rule, own) })
}

/// Calls `read`, which reads one tensor that must not have options of its own. Its errors name no place in an array.
fn one<R, T>(
    tensor: In<spw_tensor>,
    read: impl FnOnce(fn(*const c_void) -> Result<R>) -> Result<T>,
) -> Result<T> {
    match tensor.is_null() {
        true => Err(Error::invalid("tensor", "is NULL")),
        false => read(|_| Err(options_of_id())).map_err(|error| error.without("tensors[0].")),
    }
}

/// The error for a tensor with options of its own.
pub(in crate::capi) fn options_of_id() -> Error {
    Error::invalid("options", "must be NULL: the id determines the options")
}
