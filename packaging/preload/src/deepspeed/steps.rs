//! Decides which calls are served, and serves them.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;

use libc::c_int;

use super::library::{AdagradOptions, AdamCall, DType, LionOptions, Spillway, StepFunction, Tensor};
use super::op::{Kind, Op};
use super::recordings::{self, Mode};
use super::tensor::{self, AtTensor};
use crate::cancellation::NoCancellation;
use crate::report::Level;

/// Outcome of a call.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Served {
    Yes,
    /// The op's own function serves it.
    No,
    /// The op's own function would damage the tensors; they are unchanged.
    Refused,
}

/// The numbers of a call of DeepSpeed's Adam.
pub struct AdamArguments {
    pub id: c_int,
    pub step: usize,
    pub lr: f32,
    pub beta1: f32,
    pub beta2: f32,
    pub eps: f32,
    pub weight_decay: f32,
    pub bias_correction: bool,
}

/// The lines that an op logs once.
const SERVES: u32 = 0;
const REFUSES: u32 = 1;
const APPROXIMATE: u32 = 2;

pub fn create_adam(op: Option<&'static Op>, id: c_int, beta1: f32, beta2: f32, adamw: bool) {
    guarded(op, Kind::Adam, |op, spillway| {
        let id = known(op, id)?;
        // SAFETY: the function takes numbers.
        checked(spillway, unsafe { (spillway.adam_create)(id, beta1, beta2, adamw.into()) })?;
        recordings::forget(spillway, id);
        serves(op, Kind::Adam, spillway);
        Ok(())
    });
}

/// Notes that an op creates an optimizer that keeps no state between calls.
pub fn created_stateless(op: Option<&'static Op>, kind: Kind) {
    guarded(op, kind, |op, spillway| {
        serves(op, kind, spillway);
        Ok(())
    });
}

pub fn destroy_adam(op: Option<&'static Op>, id: c_int) {
    guarded(op, Kind::Adam, |op, spillway| {
        let id = known(op, id)?;
        // An unknown id is not an error, as in DeepSpeed.
        // SAFETY: the function takes a number.
        unsafe { (spillway.adam_destroy)(id) };
        recordings::forget(spillway, id);
        Ok(())
    });
}

pub fn adam(op: Option<&'static Op>, call: &AdamArguments, tensors: [AtTensor; 4]) -> Served {
    counted(op, Kind::Adam, |op, spillway| {
        let (id, tensor) = (known(op, call.id)?, adam_tensor(tensors)?);
        let record = call.record();
        let status = recordings::with(spillway, id, &tensor, recordings::wanted(id), |undo| {
            // SAFETY: the tensors' memory is valid and stays so during the call; `undo` is null or a recording.
            unsafe { (spillway.adam_update)(undo, id, &raw const record, &raw const tensor) }
        });
        checked(spillway, status?)?;
        Ok(tensor.n)
    })
}

pub fn adam_rollback(op: Option<&'static Op>, call: &AdamArguments, tensors: [AtTensor; 4]) -> Served {
    let mut refused = false;
    let served = counted(op, Kind::Adam, |op, spillway| {
        let (id, tensor) = (known(op, call.id)?, adam_tensor(tensors)?);
        let (record, mut exact) = (call.record(), 0_u32);
        let status = recordings::with(spillway, id, &tensor, false, |undo| {
            // SAFETY: as in `adam`; `exact` is a local.
            unsafe {
                (spillway.adam_rollback)(undo, id, &raw const record, &raw const tensor, &raw mut exact)
            }
        });
        recordings::rolled_back(id);
        if status? != 0 {
            refused = true;
            let reason = op.in_own_ids(&spillway.last_error());
            op.say_once(REFUSES, Level::Error, || {
                let advice = recordings::mode().advice();
                format!("a step is not rolled back, and its tensors are unchanged: {reason}{advice}")
            });
            return Err(reason);
        }
        if exact == 0 {
            op.say_once(APPROXIMATE, Level::Warn, || {
                let later = match recordings::mode() {
                    Mode::Auto => "; later steps of its optimizer are recorded",
                    Mode::Always | Mode::Never => "",
                };
                let advice = recordings::mode().advice();
                format!(
                    "a step that was not recorded is rolled back by the inverse formula, which is not exact{later}{advice}"
                )
            });
        }
        Ok(tensor.n)
    });
    if refused { Served::Refused } else { served }
}

pub fn adagrad(
    op: Option<&'static Op>,
    step: usize,
    [lr, eps, weight_decay]: [f32; 3],
    [param, grad, exp_avg_sq]: [AtTensor; 3],
) -> Served {
    counted(op, Kind::Adagrad, |_, spillway| {
        let mut tensor = record(param, grad, exp_avg_sq, "exp_avg_sq")?;
        (tensor.exp_avg_sq, tensor.exp_avg) = (tensor.exp_avg, ptr::null_mut());
        let options = AdagradOptions {
            struct_size: size_of::<AdagradOptions>() as u32,
            reserved: 0,
            step: step as u64,
            lr: lr.into(),
            lr_decay: 0.0,
            eps: eps.into(),
            weight_decay: weight_decay.into(),
            grad_scale: 1.0,
        };
        stepped(spillway, spillway.adagrad_step, &options, &tensor)
    })
}

pub fn lion(
    op: Option<&'static Op>,
    [lr, beta1, beta2, weight_decay]: [f32; 4],
    [param, grad, exp_avg]: [AtTensor; 3],
) -> Served {
    counted(op, Kind::Lion, |_, spillway| {
        let tensor = record(param, grad, exp_avg, "exp_avg")?;
        let options = LionOptions {
            struct_size: size_of::<LionOptions>() as u32,
            reserved: 0,
            lr: lr.into(),
            beta1: beta1.into(),
            beta2: beta2.into(),
            weight_decay: weight_decay.into(),
            grad_scale: 1.0,
        };
        stepped(spillway, spillway.lion_step, &options, &tensor)
    })
}

/// Steps a tensor whose optimizer keeps no state between calls, and returns its number of elements.
fn stepped<Options>(
    spillway: &Spillway,
    step: StepFunction<Options>,
    options: &Options,
    tensor: &Tensor,
) -> Result<u64, String> {
    // SAFETY: as in `adam`; the last argument may be null.
    let status = unsafe { step(options, tensor, 1, ptr::null_mut()) };
    checked(spillway, status)?;
    Ok(tensor.n)
}

impl AdamArguments {
    fn record(&self) -> AdamCall {
        AdamCall {
            struct_size: size_of::<AdamCall>() as u32,
            bias_correction: self.bias_correction.into(),
            step: self.step as u64,
            lr: self.lr,
            beta1: self.beta1,
            beta2: self.beta2,
            eps: self.eps,
            weight_decay: self.weight_decay,
            grad_scale: 1.0,
        }
    }
}

fn adam_tensor([param, grad, exp_avg, exp_avg_sq]: [AtTensor; 4]) -> Result<Tensor, String> {
    let mut tensor = record(param, grad, exp_avg, "exp_avg")?;
    // SAFETY: the op passes living tensors.
    let second = unsafe { tensor::span(exp_avg_sq, "exp_avg_sq") }?;
    if second.dtype as u32 != tensor.state_dtype || second.elements != tensor.n {
        return Err("exp_avg_sq has another type or size than exp_avg".to_string());
    }
    tensor.exp_avg_sq = second.data;
    Ok(tensor)
}

/// The record of a tensor with one state, in the place of `exp_avg`.
fn record(param: AtTensor, grad: AtTensor, state: AtTensor, name: &str) -> Result<Tensor, String> {
    // SAFETY: the op passes living tensors.
    let (param, grad, state) =
        unsafe { (tensor::span(param, "params")?, tensor::span(grad, "grads")?, tensor::span(state, name)?) };
    if grad.elements != param.elements || state.elements != param.elements {
        return Err(format!("grads or {name} has another size than params"));
    }
    if param.dtype != DType::F32 && grad.dtype != param.dtype {
        return Err("grads has another type than params".to_string());
    }
    Ok(Tensor {
        struct_size: size_of::<Tensor>() as u32,
        param_dtype: param.dtype as u32,
        state_dtype: state.dtype as u32,
        grad_dtype: grad.dtype as u32,
        copy_dtype: 0,
        take_copy: 0,
        n: param.elements,
        param: param.data,
        grad: grad.data,
        exp_avg: state.data,
        exp_avg_sq: ptr::null_mut(),
        param_copy: ptr::null_mut(),
        options: ptr::null(),
    })
}

/// Runs a step, and counts it as served or as left to the op.
fn counted(
    op: Option<&'static Op>,
    kind: Kind,
    step: impl FnOnce(&'static Op, &'static Spillway) -> Result<u64, String>,
) -> Served {
    match guarded(op, kind, step) {
        Some(elements) => {
            kind.count_served(elements);
            Served::Yes
        }
        None => {
            kind.count_left();
            Served::No
        }
    }
}

/// Runs `body` with the op and the library. `None`, after one line in the log, if there is none, if it fails, or if it
/// panics: no panic leaves this library.
fn guarded<T>(
    op: Option<&'static Op>,
    kind: Kind,
    body: impl FnOnce(&'static Op, &'static Spillway) -> Result<T, String>,
) -> Option<T> {
    let _no_cancellation = NoCancellation::enter();
    let run = || {
        crate::registry::log_panics();
        let (op, spillway) = (op?, Spillway::get()?);
        body(op, spillway)
            .inspect_err(|reason| {
                let reason = op.in_own_ids(reason);
                op.warn(&format!("a call of {} is left to DeepSpeed's function: {reason}", kind.op_name()));
            })
            .ok()
    };
    catch_unwind(AssertUnwindSafe(run)).unwrap_or(None)
}

fn serves(op: &'static Op, kind: Kind, spillway: &Spillway) {
    op.say_once(SERVES, Level::Info, || {
        format!("{} is served by {}", kind.op_name(), spillway.path.display())
    });
}

fn known(op: &Op, id: c_int) -> Result<i32, String> {
    op.id(id).ok_or_else(|| format!("the optimizer id {id} is outside 0 to 1048575"))
}

fn checked(spillway: &Spillway, status: i32) -> Result<(), String> {
    if status == 0 { Ok(()) } else { Err(spillway.last_error()) }
}
