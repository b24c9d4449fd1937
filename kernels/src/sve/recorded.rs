//! Steps with a log or a shadow, and their undo, on SVE: the Rust side of kernels/undo_sve.c.
//!
//! SVE logs have their own layout (kernels/log_sve.h). Their groups have one size, whatever the vector length of the
//! thread that writes or reads the log.

use super::bodies::Adam;
use super::ffi::{self, coefficients, decay, types};
use super::tiles::by_tiles;
use crate::dtype::Dtype;
use crate::element::{Absent, Dtypes};
use crate::float_mode::IeeeMode;
use crate::log::HEADER;
use crate::rules::AdamRule;
use crate::spans::{Spans, StateSpans};
use crate::tensor::Tensor;

/// Steps one chunk with a log, a shadow or both, and returns the sum of squares. Returns `None` without changing
/// anything if no body exists for these types.
pub fn step(adam: &Adam, rule: &AdamRule, tensor: &mut Tensor<'_>, squares: bool) -> Option<f64> {
    let (n, dtypes) = (tensor.len(), tensor.dtypes().ok()?);
    let (spans, start) = (addresses(tensor), tensor.log_address());
    let coefficients = coefficients(rule);
    // SAFETY: a log begins with its header.
    let mut log = start.map_or(std::ptr::null_mut(), |start| unsafe { start.add(HEADER) });
    let _mode = IeeeMode::enter();
    let sum = by_tiles(n, |at, n, lanes| {
        let spans = offset(&spans, dtypes, at);
        // SAFETY: the body was chosen for this processor. The constructor of the tensor checked that every span has the
        // elements, and with_log checked that the log has room for their groups. `lanes` has LANES sums.
        unsafe {
            (adam.record)(&coefficients, decay(rule.decay), types(dtypes), &spans, n, lanes, &raw mut log)
        }
    })?;
    if let Some(start) = start {
        // SAFETY: both pointers point into the log, and its header is reserved for the length.
        unsafe { start.cast::<u64>().write_unaligned(log.offset_from(start) as u64) };
    }
    Some(if squares || start.is_some() { sum } else { 0.0 })
}

/// Rolls back the step of one chunk, as the generic body does. Returns false without changing anything if no body
/// exists for these types.
pub fn undo(adam: &Adam, rule: &AdamRule, tensor: &mut Tensor<'_>, redo_scale: Option<f32>) -> bool {
    let Ok(dtypes) = tensor.dtypes() else { return false };
    let (n, spans) = (tensor.len(), addresses(tensor));
    let redo_scale = redo_scale.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    // SAFETY: a log begins with its header.
    let log = tensor.log_address().map_or(std::ptr::null(), |log| unsafe { log.add(HEADER).cast_const() });
    let _mode = IeeeMode::enter();
    // SAFETY: the body was chosen for this processor. The constructor of the tensor checked that every span has n
    // elements. A log holds the step of exactly these elements.
    unsafe { (adam.undo)(&coefficients(rule), redo_scale, decay(rule.decay), types(dtypes), &spans, n, log) }
}

fn addresses(tensor: &mut Tensor<'_>) -> ffi::UndoSpans {
    // Elements of `Absent` are `()`, so these addresses have no element type.
    let spans = Spans::<Absent, Absent, Absent, Absent>::of(tensor);
    let states = |states: StateSpans<Absent, Absent>| ffi::States {
        param: states.param.cast(),
        exp_avg: states.exp_avg.cast(),
        exp_avg_sq: states.exp_avg_sq.cast(),
    };
    ffi::UndoSpans {
        before: states(spans.before()),
        after: states(spans.after()),
        grad: spans.grad.cast(),
        param_copy: spans.param_copy.cast(),
    }
}

/// The addresses advanced by `at` elements. An absent copy stays null.
fn offset(spans: &ffi::UndoSpans, dtypes: Dtypes, at: usize) -> ffi::UndoSpans {
    let Dtypes { param, state, grad, copy } = dtypes;
    let states = |states: &ffi::States| ffi::States {
        param: states.param.wrapping_byte_add(at * param.size()),
        exp_avg: states.exp_avg.wrapping_byte_add(at * state.size()),
        exp_avg_sq: states.exp_avg_sq.wrapping_byte_add(at * state.size()),
    };
    ffi::UndoSpans {
        before: states(&spans.before),
        after: states(&spans.after),
        grad: spans.grad.wrapping_byte_add(at * grad.size()),
        param_copy: spans.param_copy.wrapping_byte_add(at * copy.map_or(0, Dtype::size)),
    }
}
