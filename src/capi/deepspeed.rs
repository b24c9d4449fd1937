//! Optimizer ids as in DeepSpeed's op modules `cpu_adam`, `cpu_adagrad` and `cpu_lion`.

use super::guard::guard;
use super::library::out;
use super::record;
use super::status::spw_status;
use super::tensor::{self, spw_tensor};
use super::undo::{Step, spw_undo};
use crate::error::{Error, Result};
use crate::kernel::{AdamRule, Rule};
use crate::optim::adagrad::{self, AdagradOptions};
use crate::optim::deepspeed::{ADAGRAD, ADAM, AdamCall, AdamState, LION};
use crate::optim::lion::{self, LionOptions};
use crate::optim::spread::{self, Job};
use crate::optim::{StepStats, adam, undo};
use crate::stats;

/// DeepSpeed's `create_adam`: creates the optimizer `id`, or resets it. `adamw_mode` 1 is AdamW, 0 is L2. Ids are
/// shared by all threads of the process. Calls with an id that was not created are SPW_ERR_UNKNOWN_ID.
#[unsafe(no_mangle)]
pub extern "C" fn spw_ds_adam_create(id: i32, beta1: f32, beta2: f32, adamw_mode: u32) -> spw_status {
    guard(|| {
        let decoupled = record::flag("adamw_mode", adamw_mode)?;
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
/// The results have the bits of DeepSpeed's AVX-512 build.
///
/// # Safety
/// As `spw_adam_step`, for one tensor.
#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments)]
pub unsafe extern "C" fn spw_ds_adam_update(
    id: i32,
    step: u64,
    lr: f32,
    beta1: f32,
    beta2: f32,
    eps: f32,
    weight_decay: f32,
    bias_correction: u32,
    tensor: *const spw_tensor,
) -> spw_status {
    guard(|| {
        let call = call(step, lr, beta1, beta2, eps, weight_decay, bias_correction)?;
        let (state, rule) = ADAM.begin(id, &call)?;
        // SAFETY: the caller meets the callee's requirements.
        adam::step(&mut unsafe { jobs(rule, tensor) }?, false)?;
        ADAM.create(id, state);
        Ok(())
    })
}

/// Does `spw_ds_adam_update` and records it in `undo` for `spw_ds_adam_rollback`. `undo` forgets its earlier step.
///
/// # Safety
/// As `spw_ds_adam_update`.
#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments)]
pub unsafe extern "C" fn spw_ds_adam_update_recorded(
    undo: Option<&mut spw_undo>,
    id: i32,
    step: u64,
    lr: f32,
    beta1: f32,
    beta2: f32,
    eps: f32,
    weight_decay: f32,
    bias_correction: u32,
    tensor: *const spw_tensor,
) -> spw_status {
    guard(|| {
        let undo = undo.ok_or_else(|| Error::invalid("undo", "is NULL"))?;
        let call = call(step, lr, beta1, beta2, eps, weight_decay, bias_correction)?;
        let (state, rule) = ADAM.begin(id, &call)?;
        // SAFETY: the caller meets the callee's requirements.
        unsafe { undo.ds_step(rule, tensor) }?;
        ADAM.create(id, state);
        Ok(())
    })
}

/// DeepSpeed's `adam_rollback` of one tensor, with the arguments of the update that is rolled back.
///
/// The rollback is bit-exact, and `exact_out` becomes 1, if `undo` holds exactly that step and the spans are as the
/// step left them. The spans may have moved. Otherwise, or if `undo` is NULL, the rollback is approximate as with
/// SPW_UNDO_ARITHMETIC, which rejects Inf and NaN, and `exact_out` becomes 0.
///
/// DeepSpeed's implementation writes 0 to a parameter whose gradient is not finite. It supports neither L2 nor steps
/// without bias correction.
///
/// # Safety
/// As `spw_ds_adam_update`; `exact_out` points to a u32.
#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments)]
pub unsafe extern "C" fn spw_ds_adam_rollback(
    undo: Option<&mut spw_undo>,
    id: i32,
    step: u64,
    lr: f32,
    beta1: f32,
    beta2: f32,
    eps: f32,
    weight_decay: f32,
    bias_correction: u32,
    tensor: *const spw_tensor,
    exact_out: *mut u32,
) -> spw_status {
    guard(|| {
        let exact_out = out(exact_out, "exact_out")?;
        let call = call(step, lr, beta1, beta2, eps, weight_decay, bias_correction)?;
        let (_, rule) = ADAM.begin(id, &call)?;
        // SAFETY: the caller meets the callees' requirements.
        unsafe {
            let exact = match undo {
                Some(undo) => undo.ds_back(rule, tensor)?,
                None => false,
            };
            if !exact {
                let mut jobs = jobs(rule, tensor)?;
                jobs.iter_mut().try_for_each(undo::check_reversible)?;
                undo::undo(&mut jobs, None)?;
            }
            exact_out.write(exact.into());
        }
        Ok(())
    })
}

/// DeepSpeed's `destroy_adam`: removes the optimizer `id`.
#[unsafe(no_mangle)]
pub extern "C" fn spw_ds_adam_destroy(id: i32) -> spw_status {
    guard(|| ADAM.destroy(id))
}

/// DeepSpeed's `create_adagrad`: creates the optimizer `id`, or resets it.
#[unsafe(no_mangle)]
pub extern "C" fn spw_ds_adagrad_create(id: i32) -> spw_status {
    guard(|| {
        ADAGRAD.create(id, ());
        Ok(())
    })
}

/// DeepSpeed's `adagrad_update` of one tensor, with the arithmetic of `spw_adagrad_step`. DeepSpeed's implementation
/// omits weight decay in the numerator up to version 0.19.6.
///
/// # Safety
/// As `spw_adam_step`, for one tensor.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_ds_adagrad_update(
    id: i32,
    step: u64,
    lr: f32,
    eps: f32,
    weight_decay: f32,
    tensor: *const spw_tensor,
) -> spw_status {
    guard(|| {
        ADAGRAD.get(id)?;
        let options = AdagradOptions {
            step,
            lr: lr.into(),
            eps: eps.into(),
            weight_decay: weight_decay.into(),
            ..Default::default()
        };
        // SAFETY: the caller meets the callee's requirements.
        let mut jobs = unsafe { jobs(options.rule()?, tensor) }?;
        adagrad::step(&mut jobs, false).map(drop)
    })
}

/// DeepSpeed's `destroy_adagrad`: removes the optimizer `id`.
#[unsafe(no_mangle)]
pub extern "C" fn spw_ds_adagrad_destroy(id: i32) -> spw_status {
    guard(|| ADAGRAD.destroy(id))
}

/// DeepSpeed's `create_lion`: creates the optimizer `id`, or resets it.
#[unsafe(no_mangle)]
pub extern "C" fn spw_ds_lion_create(id: i32) -> spw_status {
    guard(|| {
        LION.create(id, ());
        Ok(())
    })
}

/// DeepSpeed's `lion_update` of one tensor, with the arithmetic of `spw_lion_step`. DeepSpeed's implementation does not
/// train on processors with AVX up to version 0.19.6. Lion ignores the step number, but 0 is an error, since DeepSpeed
/// counts from 1.
///
/// # Safety
/// As `spw_adam_step`, for one tensor.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spw_ds_lion_update(
    id: i32,
    step: u64,
    lr: f32,
    beta1: f32,
    beta2: f32,
    weight_decay: f32,
    tensor: *const spw_tensor,
) -> spw_status {
    guard(|| {
        LION.get(id)?;
        if step == 0 {
            return Err(Error::invalid("step", "is 0; steps are counted from 1"));
        }
        let options = LionOptions {
            lr: lr.into(),
            beta1: beta1.into(),
            beta2: beta2.into(),
            weight_decay: weight_decay.into(),
            ..Default::default()
        };
        // SAFETY: the caller meets the callee's requirements.
        let mut jobs = unsafe { jobs(options.rule()?, tensor) }?;
        lion::step(&mut jobs, false).map(drop)
    })
}

/// DeepSpeed's `destroy_lion`: removes the optimizer `id`.
#[unsafe(no_mangle)]
pub extern "C" fn spw_ds_lion_destroy(id: i32) -> spw_status {
    guard(|| LION.destroy(id))
}

/// Arguments of an Adam id's calls, except id and tensor.
pub(super) fn call(
    step: u64,
    lr: f32,
    beta1: f32,
    beta2: f32,
    eps: f32,
    weight_decay: f32,
    bias_correction: u32,
) -> Result<AdamCall> {
    let bias_correction = record::flag("bias_correction", bias_correction)?;
    Ok(AdamCall { step, lr, beta1, beta2, eps, weight_decay, bias_correction })
}

impl spw_undo {
    /// Does a recorded Adam step of one tensor with DeepSpeed's coefficients, for [`spw_undo::ds_back`].
    unsafe fn ds_step(&mut self, rule: AdamRule, tensor: *const spw_tensor) -> Result<()> {
        // SAFETY: the caller meets the callees' requirements, here and below.
        let jobs = unsafe { jobs(rule, tensor) }?;
        let mut seal = 0;
        // SAFETY: as above.
        unsafe {
            self.step(jobs, tensor, 1, Step::Adam, |jobs| {
                for job in jobs.iter_mut() {
                    seal = undo::step_sealed(job)?;
                }
                stats::ADAM.add(spread::elements(jobs));
                Ok(StepStats::default())
            })?;
        }
        self.seal = seal;
        Ok(())
    }

    /// Rolls that step back, at the present address of its spans. Returns false and changes nothing if the recording
    /// holds another step, or if the spans are not as the step left them.
    unsafe fn ds_back(&mut self, rule: AdamRule, tensor: *const spw_tensor) -> Result<bool> {
        // SAFETY: the caller meets the callees' requirements.
        let (mut jobs, raw) = unsafe { (jobs(rule, tensor)?, tensor::read_all(tensor, 1)?) };
        let (Some(Step::Adam(tensors, rules)), Some(job)) = (&mut self.step, jobs.first_mut()) else {
            return Ok(jobs.is_empty());
        };
        let shape = |t: &spw_tensor| (t.n, t.param_dtype, t.state_dtype, t.grad_dtype);
        let same = tensors.len() == 1 && shape(&tensors[0]) == shape(&raw[0]) && rules[0] == rule;
        if !same || undo::seal(job)? != self.seal {
            return Ok(false);
        }
        drop(jobs);
        *tensors = raw;
        // SAFETY: the checksum proves that the spans are as the step left them.
        unsafe { self.back(None) }?;
        Ok(true)
    }
}

/// The job of one tensor.
pub(super) unsafe fn jobs<'a, R: Rule>(rule: R, tensor: *const spw_tensor) -> Result<Vec<Job<'a, R>>> {
    if tensor.is_null() {
        return Err(Error::invalid("tensor", "is NULL"));
    }
    // SAFETY: the caller meets the callee's requirements.
    let jobs = unsafe {
        tensor::jobs(tensor, 1, &rule, |_| Err(Error::invalid("options", "is not NULL; the id has its own")))
    };
    jobs.map_err(|error| error.without("tensors[0]."))
}
