//! DeepSpeed's compiled CPU optimizers on Spillway's kernels.
//!
//! A compiled `cpu_adam`, `cpu_adagrad` or `cpu_lion` calls its own C++ functions through its global offset table, and
//! the loader fills that table from this library first. The functions here have the C++ names. Each takes its tensors
//! apart with torch's C functions, and steps with `libspillway.so`. Other calls go to the op's own function.
//!
//! | file | content |
//! |---|---|
//! | this file | the functions with DeepSpeed's names |
//! | `call_site.rs` | the same functions as the loader sees them: they add the caller's address to the arguments |
//! | `steps.rs` | which calls are served, and how |
//! | `op.rs` | the compiled op that called: its number, its own functions, its counters |
//! | `tensor.rs` | an `at::Tensor` through torch's C functions |
//! | `library.rs` | the functions of `libspillway.so` |
//! | `symbol.rs` | a function of a loaded library, by its name |
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
mod symbol;
mod tensor;

use std::ffi::{CStr, c_char};
use std::mem::transmute_copy;

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

/// Return value of a call that neither Spillway nor the op can serve.
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
    // SAFETY: the type is that of the C++ function; the caller guarantees the arguments.
    unsafe {
        let own: Option<AdamCreate> = own(op, Name::AdamCreate);
        own.map_or(0, |own| own(id, lr, beta1, beta2, eps, weight_decay, adamw, log))
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
    let tensors = [param, grad, exp_avg, exp_avg_sq];
    match steps::adam(op, &call, tensors) {
        Served::Yes => 0,
        // SAFETY: the caller guarantees the arguments.
        _ => unsafe { own_adam(op, Name::AdamStep, &call, tensors) },
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
    let tensors = [param, grad, exp_avg, exp_avg_sq];
    match steps::adam_rollback(op, &call, tensors) {
        Served::Yes => 0,
        Served::Refused => FAILED,
        // SAFETY: the caller guarantees the arguments.
        Served::No => unsafe { own_adam(op, Name::AdamRollback, &call, tensors) },
    }
}

unsafe extern "C-unwind" fn destroy_adam(id: c_int, caller: usize) -> c_int {
    let op = Op::of(caller);
    steps::destroy_adam(op, id);
    destroy(op, Name::AdamDestroy, id)
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
    steps::created_stateless(op, Kind::Adagrad);
    // SAFETY: as in `create_adam`.
    unsafe {
        let own: Option<AdagradCreate> = own(op, Name::AdagradCreate);
        own.map_or(0, |own| own(id, lr, eps, weight_decay, log))
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
    if steps::adagrad(op, step, [lr, eps, weight_decay], [param, grad, exp_avg_sq]) == Served::Yes {
        return 0;
    }
    // SAFETY: as in `create_adam`.
    unsafe {
        let own: Option<AdagradStep> = own(op, Name::AdagradStep);
        own.map_or(FAILED, |own| own(id, step, lr, eps, weight_decay, param, grad, exp_avg_sq))
    }
}

unsafe extern "C-unwind" fn destroy_adagrad(id: c_int, caller: usize) -> c_int {
    destroy(Op::of(caller), Name::AdagradDestroy, id)
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
    steps::created_stateless(op, Kind::Lion);
    // SAFETY: as in `create_adam`.
    unsafe {
        let own: Option<LionCreate> = own(op, Name::LionCreate);
        own.map_or(0, |own| own(id, lr, beta1, beta2, weight_decay, log))
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
    if steps::lion(op, [lr, beta1, beta2, weight_decay], [param, grad, exp_avg]) == Served::Yes {
        return 0;
    }
    // SAFETY: as in `create_adam`.
    unsafe {
        let own: Option<LionStep> = own(op, Name::LionStep);
        own.map_or(FAILED, |own| own(id, step, lr, beta1, beta2, weight_decay, param, grad, exp_avg))
    }
}

unsafe extern "C-unwind" fn destroy_lion(id: c_int, caller: usize) -> c_int {
    destroy(Op::of(caller), Name::LionDestroy, id)
}

/// Calls the op's own function that destroys an optimizer.
fn destroy(op: Option<&Op>, name: Name, id: c_int) -> c_int {
    // SAFETY: the type is that of the three C++ functions, which take any number.
    unsafe {
        let own: Option<Destroy> = own(op, name);
        own.map_or(0, |own| own(id))
    }
}

/// Calls the op's own step or rollback of Adam.
///
/// # Safety
/// The tensors are living `at::Tensor`s.
unsafe fn own_adam(op: Option<&Op>, name: Name, call: &AdamArguments, tensors: [AtTensor; 4]) -> c_int {
    let AdamArguments { id, step, lr, beta1, beta2, eps, weight_decay, bias_correction } = *call;
    let [param, grad, m, v] = tensors;
    // SAFETY: the type is that of both C++ functions; the caller guarantees the tensors.
    unsafe {
        let own: Option<AdamStep> = own(op, name);
        own.map_or(FAILED, |own| {
            own(id, step, lr, beta1, beta2, eps, weight_decay, bias_correction, param, grad, m, v)
        })
    }
}

/// The op's own function of a name.
///
/// # Safety
/// `F` is the function's type.
unsafe fn own<F>(op: Option<&Op>, name: Name) -> Option<F> {
    const { assert!(size_of::<F>() == size_of::<usize>()) };
    let address = op?.own(name)?;
    // SAFETY: the address is that of the function, whose library stays loaded; the caller guarantees the type.
    Some(unsafe { transmute_copy(&address) })
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
