//! DeepSpeed's compiled CPU optimizers on Spillway's kernels.
//!
//! A compiled `cpu_adam`, `cpu_adagrad` or `cpu_lion` calls its own C++ functions through its global offset table, and
//! the loader fills that table from this library first. The functions here have the C++ names. Each takes its tensors
//! apart with torch's C functions, and steps with `libspillway.so`. What does not fit goes to the function of the op.
//!
//! | file | content |
//! |---|---|
//! | this file | the functions with DeepSpeed's names |
//! | `call_site.rs` | the same functions as the loader sees them: they add the caller's address to the arguments |
//! | `steps.rs` | which calls are served, and how |
//! | `op.rs` | the compiled op that called: its number, its own functions, its counters |
//! | `tensor.rs` | an `at::Tensor` through torch's C functions |
//! | `library.rs` | the functions of `libspillway.so` |
//! | `recordings.rs` | steps that may be rolled back |
//!
//! Invariants:
//! - A call is served whole or by the op's own function whole. A refused step has changed nothing.
//! - No lock is taken, except in a rollback and in steps that are recorded for one.
//! - The op's own optimizer objects are created and destroyed too, for calls that go to it. C++ exceptions of its
//!   functions pass through this library.
//! - An op's optimizers and another op's with the same id are different: the id of Spillway's optimizer contains the
//!   op's number.

mod call_site;
mod library;
mod op;
mod recordings;
mod steps;
mod tensor;

use std::ffi::{CStr, c_char};
use std::mem::transmute;

use libc::c_int;

use op::{Kind, Name, Op};
use steps::{AdamArguments, Served};
use tensor::AtTensor;

type AdamStep = unsafe extern "C-unwind" fn(
    c_int,
    usize,
    f32,
    f32,
    f32,
    f32,
    f32,
    bool,
    AtTensor,
    AtTensor,
    AtTensor,
    AtTensor,
) -> c_int;
type AdamCreate = unsafe extern "C-unwind" fn(c_int, f32, f32, f32, f32, f32, bool, bool) -> c_int;
type AdagradStep =
    unsafe extern "C-unwind" fn(c_int, usize, f32, f32, f32, AtTensor, AtTensor, AtTensor) -> c_int;
type AdagradCreate = unsafe extern "C-unwind" fn(c_int, f32, f32, f32, bool) -> c_int;
type LionStep =
    unsafe extern "C-unwind" fn(c_int, usize, f32, f32, f32, f32, AtTensor, AtTensor, AtTensor) -> c_int;
type LionCreate = unsafe extern "C-unwind" fn(c_int, f32, f32, f32, f32, bool) -> c_int;
type Destroy = unsafe extern "C-unwind" fn(c_int) -> c_int;

/// What a function returns if neither Spillway nor the op can serve it.
const FAILED: c_int = -1;

unsafe extern "C-unwind" fn create_adam(
    id: c_int,
    lr: f32,
    beta1: f32,
    beta2: f32,
    eps: f32,
    weight_decay: f32,
    adamw: bool,
    log: bool,
    caller: usize,
) -> c_int {
    let op = Op::of(caller);
    steps::create_adam(op, id, beta1, beta2, adamw);
    // SAFETY: the op's function has this type, by its C++ name; the caller guarantees the arguments.
    match op.and_then(|op| op.own(Name::AdamCreate)) {
        Some(own) => unsafe {
            transmute::<usize, AdamCreate>(own)(id, lr, beta1, beta2, eps, weight_decay, adamw, log)
        },
        None => 0,
    }
}

unsafe extern "C-unwind" fn adam_step(
    id: c_int,
    step: usize,
    lr: f32,
    beta1: f32,
    beta2: f32,
    eps: f32,
    weight_decay: f32,
    bias_correction: bool,
    param: AtTensor,
    grad: AtTensor,
    exp_avg: AtTensor,
    exp_avg_sq: AtTensor,
    caller: usize,
) -> c_int {
    let op = Op::of(caller);
    let call = AdamArguments { id, step, lr, beta1, beta2, eps, weight_decay, bias_correction };
    if steps::adam(op, &call, [param, grad, exp_avg, exp_avg_sq]) == Served::Yes {
        return 0;
    }
    // SAFETY: as in `create_adam`.
    match op.and_then(|op| op.own(Name::AdamStep)) {
        Some(own) => unsafe {
            let own = transmute::<usize, AdamStep>(own);
            own(
                id,
                step,
                lr,
                beta1,
                beta2,
                eps,
                weight_decay,
                bias_correction,
                param,
                grad,
                exp_avg,
                exp_avg_sq,
            )
        },
        None => FAILED,
    }
}

unsafe extern "C-unwind" fn adam_rollback(
    id: c_int,
    step: usize,
    lr: f32,
    beta1: f32,
    beta2: f32,
    eps: f32,
    weight_decay: f32,
    bias_correction: bool,
    param: AtTensor,
    grad: AtTensor,
    exp_avg: AtTensor,
    exp_avg_sq: AtTensor,
    caller: usize,
) -> c_int {
    let op = Op::of(caller);
    let call = AdamArguments { id, step, lr, beta1, beta2, eps, weight_decay, bias_correction };
    match steps::adam_rollback(op, &call, [param, grad, exp_avg, exp_avg_sq]) {
        Served::Yes => return 0,
        Served::Refused => return FAILED,
        Served::No => {}
    }
    // SAFETY: as in `create_adam`.
    match op.and_then(|op| op.own(Name::AdamRollback)) {
        Some(own) => unsafe {
            let own = transmute::<usize, AdamStep>(own);
            own(
                id,
                step,
                lr,
                beta1,
                beta2,
                eps,
                weight_decay,
                bias_correction,
                param,
                grad,
                exp_avg,
                exp_avg_sq,
            )
        },
        None => FAILED,
    }
}

unsafe extern "C-unwind" fn destroy_adam(id: c_int, caller: usize) -> c_int {
    // SAFETY: the caller guarantees the argument.
    unsafe { destroy(Kind::Adam, Name::AdamDestroy, id, caller) }
}

unsafe extern "C-unwind" fn create_adagrad(
    id: c_int,
    lr: f32,
    eps: f32,
    weight_decay: f32,
    log: bool,
    caller: usize,
) -> c_int {
    let op = Op::of(caller);
    steps::create_stateless(op, Kind::Adagrad, id);
    // SAFETY: as in `create_adam`.
    match op.and_then(|op| op.own(Name::AdagradCreate)) {
        Some(own) => unsafe { transmute::<usize, AdagradCreate>(own)(id, lr, eps, weight_decay, log) },
        None => 0,
    }
}

unsafe extern "C-unwind" fn adagrad_step(
    id: c_int,
    step: usize,
    lr: f32,
    eps: f32,
    weight_decay: f32,
    param: AtTensor,
    grad: AtTensor,
    exp_avg_sq: AtTensor,
    caller: usize,
) -> c_int {
    let op = Op::of(caller);
    if steps::adagrad(op, id, step, [lr, eps, weight_decay], [param, grad, exp_avg_sq]) == Served::Yes {
        return 0;
    }
    // SAFETY: as in `create_adam`.
    match op.and_then(|op| op.own(Name::AdagradStep)) {
        Some(own) => unsafe {
            transmute::<usize, AdagradStep>(own)(id, step, lr, eps, weight_decay, param, grad, exp_avg_sq)
        },
        None => FAILED,
    }
}

unsafe extern "C-unwind" fn destroy_adagrad(id: c_int, caller: usize) -> c_int {
    // SAFETY: the caller guarantees the argument.
    unsafe { destroy(Kind::Adagrad, Name::AdagradDestroy, id, caller) }
}

unsafe extern "C-unwind" fn create_lion(
    id: c_int,
    lr: f32,
    beta1: f32,
    beta2: f32,
    weight_decay: f32,
    log: bool,
    caller: usize,
) -> c_int {
    let op = Op::of(caller);
    steps::create_stateless(op, Kind::Lion, id);
    // SAFETY: as in `create_adam`.
    match op.and_then(|op| op.own(Name::LionCreate)) {
        Some(own) => unsafe { transmute::<usize, LionCreate>(own)(id, lr, beta1, beta2, weight_decay, log) },
        None => 0,
    }
}

unsafe extern "C-unwind" fn lion_step(
    id: c_int,
    step: usize,
    lr: f32,
    beta1: f32,
    beta2: f32,
    weight_decay: f32,
    param: AtTensor,
    grad: AtTensor,
    exp_avg: AtTensor,
    caller: usize,
) -> c_int {
    let op = Op::of(caller);
    if steps::lion(op, id, step, [lr, beta1, beta2, weight_decay], [param, grad, exp_avg]) == Served::Yes {
        return 0;
    }
    // SAFETY: as in `create_adam`.
    match op.and_then(|op| op.own(Name::LionStep)) {
        Some(own) => unsafe {
            transmute::<usize, LionStep>(own)(id, step, lr, beta1, beta2, weight_decay, param, grad, exp_avg)
        },
        None => FAILED,
    }
}

unsafe extern "C-unwind" fn destroy_lion(id: c_int, caller: usize) -> c_int {
    // SAFETY: the caller guarantees the argument.
    unsafe { destroy(Kind::Lion, Name::LionDestroy, id, caller) }
}

unsafe fn destroy(kind: Kind, name: Name, id: c_int, caller: usize) -> c_int {
    let op = Op::of(caller);
    steps::destroy(op, kind, id);
    // SAFETY: as in `create_adam`.
    match op.and_then(|op| op.own(name)) {
        Some(own) => unsafe { transmute::<usize, Destroy>(own)(id) },
        None => 0,
    }
}

/// For `spillway.deepspeed.active()`: writes the served calls of `op` in this process, their elements, and the calls that
/// went to the op's own function. Returns 1, or 0 for an unknown op.
///
/// # Safety
/// `op` is a string that ends with NUL, such as "cpu_adam"; `counts` has room for three numbers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spillway_preload_counts(op: *const c_char, counts: *mut u64) -> c_int {
    if op.is_null() || counts.is_null() {
        return 0;
    }
    // SAFETY: the caller guarantees the string.
    let Some(kind) = Kind::named(unsafe { CStr::from_ptr(op) }) else { return 0 };
    for (index, count) in kind.counts().into_iter().enumerate() {
        // SAFETY: the caller guarantees room for three numbers.
        unsafe { counts.add(index).write(count) };
    }
    1
}
