//! The declarations of kernels/adam.h, and the conversion of Rust types to its numbers.

use std::ffi::c_void;

use crate::dtype::Dtype;
use crate::element::Dtypes;
use crate::rules::{AdamRule, WeightDecay};

#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Rule {
    pub grad_scale: f32,
    pub beta1: f32,
    pub one_minus_beta1: f32,
    pub beta2: f32,
    pub one_minus_beta2: f32,
    pub inv_sqrt_correction2: f32,
    pub eps: f32,
    pub step_size: f32,
    pub decay_factor: f32,
}

#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Spans {
    pub param: *mut c_void,
    pub grad: *const c_void,
    pub exp_avg: *mut c_void,
    pub exp_avg_sq: *mut c_void,
    pub param_copy: *mut c_void,
}

#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct States {
    pub param: *mut c_void,
    pub exp_avg: *mut c_void,
    pub exp_avg_sq: *mut c_void,
}

#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct UndoSpans {
    pub before: States,
    pub after: States,
    pub grad: *const c_void,
    pub param_copy: *mut c_void,
}

/// Declares functions of one signature, and the type of a pointer to them.
macro_rules! declare {
    ($type:ident $arguments:tt -> $result:ty: $($function:ident)*) => {
        pub type $type = unsafe extern "C" fn $arguments -> $result;
        unsafe extern "C" {
            $(pub fn $function $arguments -> $result;)*
        }
    };
}

declare! {
    Step(
        rule: *const Rule,
        decay: u32,
        types: u32,
        spans: Spans,
        n: usize,
        lanes: *mut f64,
    ) -> bool: spillway_adam_sve spillway_adam_sve_bf16
}

declare! {
    Record(
        rule: *const Rule,
        decay: u32,
        types: u32,
        spans: *const UndoSpans,
        n: usize,
        lanes: *mut f64,
        log: *mut *mut u8,
    ) -> bool: spillway_adam_sve_record spillway_adam_sve_bf16_record
}

declare! {
    Undo(
        rule: *const Rule,
        redo_scale: *const f32,
        decay: u32,
        types: u32,
        spans: *const UndoSpans,
        n: usize,
        log: *const u8,
    ) -> bool: spillway_adam_sve_undo spillway_adam_sve_bf16_undo
}

pub fn coefficients(rule: &AdamRule) -> Rule {
    Rule {
        grad_scale: rule.grad_scale,
        beta1: rule.beta1,
        one_minus_beta1: rule.one_minus_beta1,
        beta2: rule.beta2,
        one_minus_beta2: rule.one_minus_beta2,
        inv_sqrt_correction2: rule.inv_sqrt_correction2,
        eps: rule.eps,
        step_size: rule.step_size,
        decay_factor: rule.decay_factor,
    }
}

/// The value of `enum decay` in kernels/adam.h.
pub fn decay(decay: WeightDecay) -> u32 {
    match decay {
        WeightDecay::None => 0,
        WeightDecay::L2 => 1,
        WeightDecay::Decoupled => 2,
    }
}

/// The value of the macro `ADAM_TYPES` in kernels/adam.h.
pub fn types(dtypes: Dtypes) -> u32 {
    let element = |dtype| match dtype {
        Dtype::F32 => 1,
        Dtype::F16 => 2,
        Dtype::Bf16 => 3,
    };
    let Dtypes { param, state, grad, copy } = dtypes;
    element(param) << 6 | element(state) << 4 | element(grad) << 2 | copy.map_or(0, element)
}
