//! Steps that can be taken back on SVE: the Rust face of kernels/undo_sve.c.
//!
//! Logs have groups of one size, whatever the vector length of the thread that writes or reads them, in a layout of their
//! own (kernels/log_sve.h).

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

/// Steps one chunk into its log, its shadow or both; `None`, with nothing done, if there is no body for these types.
pub fn step(adam: &Adam, rule: &AdamRule, tensor: &mut Tensor<'_>, squares: bool) -> Option<f64> {
    let (n, dtypes) = (tensor.len(), tensor.dtypes().ok()?);
    let (spans, start) = (addresses(tensor), tensor.log_address());
    let coefficients = coefficients(rule);
    // SAFETY: a log begins with its header.
    let mut log = start.map_or(std::ptr::null_mut(), |start| unsafe { start.add(HEADER) });
    let _mode = IeeeMode::enter();
    let sum = by_tiles(n, |at, n, lanes| {
        let spans = offset(&spans, dtypes, at);
        // SAFETY: the body was chosen for this processor; the tensor's constructor checked that every span has the
        // elements, with_log that the log has room for their groups, and `lanes` has LANES sums.
        unsafe {
            (adam.record)(&coefficients, decay(rule.decay), types(dtypes), &spans, n, lanes, &raw mut log)
        }
    })?;
    if let Some(start) = start {
        // SAFETY: both point into the log, whose header is free for the length.
        unsafe { start.cast::<u64>().write_unaligned(log.offset_from(start) as u64) };
    }
    Some(if squares || start.is_some() { sum } else { 0.0 })
}

/// Takes one chunk's step back, as the generic body does; false, with nothing done, if there is no body for these types.
pub fn undo(adam: &Adam, rule: &AdamRule, tensor: &mut Tensor<'_>, again: Option<f32>) -> bool {
    let Ok(dtypes) = tensor.dtypes() else { return false };
    let (n, spans) = (tensor.len(), addresses(tensor));
    let again = again.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    // SAFETY: a log begins with its header.
    let log = tensor.log_address().map_or(std::ptr::null(), |log| unsafe { log.add(HEADER).cast_const() });
    let _mode = IeeeMode::enter();
    // SAFETY: the body was chosen for this processor; the tensor's constructor checked that every span has n elements;
    // a log holds the step of exactly these elements.
    unsafe { (adam.undo)(&coefficients(rule), again, decay(rule.decay), types(dtypes), &spans, n, log) }
}

fn addresses(tensor: &mut Tensor<'_>) -> ffi::UndoSpans {
    // Absent's elements are (), which leaves the addresses without a type.
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

/// The addresses `at` elements further; an absent copy stays null.
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
