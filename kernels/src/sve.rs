//! SVE of any vector length: the Rust face of kernels/adam_sve.c.
//!
//! Only Adam has SVE bodies, because only C can write them: `std::arch` has no SVE. Everything else runs on NEON under
//! these kernels' names, with the same bits: Adagrad, Lion, and sums of squares alone. Steps that can be taken back are
//! in `sve_undo`.

use std::arch::is_aarch64_feature_detected;

use super::CHUNK;
use super::element::{Absent, Dtypes};
use super::float_mode::IeeeMode;
use super::rules::{AdamRule, WeightDecay};
use super::squares::{self, LANES, TILE};
use super::sve_undo;
use super::tensor::{Spans, Tensor};
use crate::dtype::Dtype;

/// The Adam bodies of one instruction set; the contract is kernels/adam.h.
#[derive(Debug)]
pub struct Adam {
    step: ffi::Step,
    pub(super) record: ffi::Record,
    pub(super) undo: ffi::Undo,
}

/// Needs SVE.
pub static SVE: Adam = Adam {
    step: ffi::spillway_adam_sve,
    record: ffi::spillway_adam_sve_record,
    undo: ffi::spillway_adam_sve_undo,
};

/// Needs SVE with BF16.
pub static SVE_BF16: Adam = Adam {
    step: ffi::spillway_adam_sve_bf16,
    record: ffi::spillway_adam_sve_bf16_record,
    undo: ffi::spillway_adam_sve_bf16_undo,
};

/// The declarations of kernels/adam.h.
pub(super) mod ffi {
    use std::ffi::c_void;

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

    pub type Step = unsafe extern "C" fn(
        rule: *const Rule,
        decay: u32,
        types: u32,
        spans: Spans,
        n: usize,
        lanes: *mut f64,
    ) -> bool;

    pub type Record = unsafe extern "C" fn(
        rule: *const Rule,
        decay: u32,
        types: u32,
        spans: *const UndoSpans,
        n: usize,
        lanes: *mut f64,
        log: *mut *mut u8,
    ) -> bool;

    pub type Undo = unsafe extern "C" fn(
        rule: *const Rule,
        again: *const f32,
        decay: u32,
        types: u32,
        spans: *const UndoSpans,
        n: usize,
        log: *const u8,
    ) -> bool;

    macro_rules! declare {
        ($($step:ident $record:ident $undo:ident)*) => {
            unsafe extern "C" {
                $(
                pub fn $step(
                    rule: *const Rule,
                    decay: u32,
                    types: u32,
                    spans: Spans,
                    n: usize,
                    lanes: *mut f64,
                ) -> bool;
                pub fn $record(
                    rule: *const Rule,
                    decay: u32,
                    types: u32,
                    spans: *const UndoSpans,
                    n: usize,
                    lanes: *mut f64,
                    log: *mut *mut u8,
                ) -> bool;
                pub fn $undo(
                    rule: *const Rule,
                    again: *const f32,
                    decay: u32,
                    types: u32,
                    spans: *const UndoSpans,
                    n: usize,
                    log: *const u8,
                ) -> bool;
                )*
            }
        };
    }

    declare! {
        spillway_adam_sve spillway_adam_sve_record spillway_adam_sve_undo
        spillway_adam_sve_bf16 spillway_adam_sve_bf16_record spillway_adam_sve_bf16_undo
    }
}

/// True if this processor and operating system have SVE.
pub fn detected() -> bool {
    is_aarch64_feature_detected!("sve")
}

/// True if they have the conversions to bf16 for SVE too; the "bf16" of `is_aarch64_feature_detected` speaks of NEON.
pub fn bf16_detected() -> bool {
    const HWCAP2_SVEBF16: u64 = 1 << 12;
    // SAFETY: reads the auxiliary vector of the process.
    let extensions = unsafe { libc::getauxval(libc::AT_HWCAP2) };
    detected() && extensions & HWCAP2_SVEBF16 != 0
}

/// Steps one chunk; `None`, with nothing done, if there is no body for these types.
pub fn step(adam: &Adam, rule: &AdamRule, tensor: &mut Tensor<'_>, squares: bool) -> Option<f64> {
    let Some(spans) = in_place(tensor) else { return sve_undo::step(adam, rule, tensor, squares) };
    let (n, dtypes) = (tensor.len(), tensor.dtypes().ok()?);
    let coefficients = coefficients(rule);
    let call = |at: usize, n: usize, lanes: *mut f64| {
        // SAFETY: the body was chosen for this processor; the tensor's constructor checked that every span has the
        // elements, and `lanes` is null or has LANES sums.
        unsafe {
            (adam.step)(&coefficients, decay(rule.decay), types(dtypes), offset(&spans, dtypes, at), n, lanes)
        }
    };
    let _mode = IeeeMode::enter();
    if squares { by_tiles(n, call) } else { call(0, n, std::ptr::null_mut()).then_some(0.0) }
}

/// Calls `work` for every tile with its first element, its length and LANES sums; the sum of them all.
// Not inlined: the caller changes the float mode around this call, and a call is what arithmetic cannot cross.
#[inline(never)]
pub(super) fn by_tiles(n: usize, mut work: impl FnMut(usize, usize, *mut f64) -> bool) -> Option<f64> {
    let mut sums = [0.0; CHUNK / TILE];
    for (tile, sum) in sums.iter_mut().enumerate().take(n.div_ceil(TILE)) {
        let at = tile * TILE;
        let mut lanes = [0.0; LANES];
        if !work(at, TILE.min(n - at), lanes.as_mut_ptr()) {
            return None;
        }
        *sum = squares::tile_sum(&mut lanes);
    }
    Some(squares::tree_sum(&sums[..n.div_ceil(TILE)]))
}

pub(super) fn coefficients(rule: &AdamRule) -> ffi::Rule {
    ffi::Rule {
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

/// The addresses of a step in place that leaves no log.
fn in_place(tensor: &mut Tensor<'_>) -> Option<ffi::Spans> {
    // Absent's elements are (), which leaves the addresses without a type.
    let spans = Spans::<Absent, Absent, Absent, Absent>::of(tensor);
    let old = spans.before();
    (spans.in_place() && !tensor.has_log()).then_some(ffi::Spans {
        param: old.param.cast(),
        grad: spans.grad.cast(),
        exp_avg: old.exp_avg.cast(),
        exp_avg_sq: old.exp_avg_sq.cast(),
        param_copy: spans.param_copy.cast(),
    })
}

/// The addresses `at` elements further; an absent copy stays null.
fn offset(spans: &ffi::Spans, dtypes: Dtypes, at: usize) -> ffi::Spans {
    let Dtypes { param, state, grad, copy } = dtypes;
    ffi::Spans {
        param: spans.param.wrapping_byte_add(at * param.size()),
        grad: spans.grad.wrapping_byte_add(at * grad.size()),
        exp_avg: spans.exp_avg.wrapping_byte_add(at * state.size()),
        exp_avg_sq: spans.exp_avg_sq.wrapping_byte_add(at * state.size()),
        param_copy: spans.param_copy.wrapping_byte_add(at * copy.map_or(0, Dtype::size)),
    }
}

/// `enum decay`
pub(super) fn decay(decay: WeightDecay) -> u32 {
    match decay {
        WeightDecay::None => 0,
        WeightDecay::L2 => 1,
        WeightDecay::Decoupled => 2,
    }
}

/// `ADAM_TYPES` of `enum element`
pub(super) fn types(dtypes: Dtypes) -> u32 {
    let element = |dtype| match dtype {
        Dtype::F32 => 1,
        Dtype::F16 => 2,
        Dtype::Bf16 => 3,
    };
    let Dtypes { param, state, grad, copy } = dtypes;
    element(param) << 6 | element(state) << 4 | element(grad) << 2 | copy.map_or(0, element)
}
