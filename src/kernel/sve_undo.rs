//! Steps that can be taken back on SVE: the Rust face of kernels/undo_sve.c.
//!
//! Logs have groups of one size, whatever the vector length of the thread that writes or reads them, in a layout of their
//! own (kernels/log_sve.h).

use super::element::{Absent, Dtypes};
use super::float_mode::IeeeMode;
use super::record::HEADER;
use super::rules::AdamRule;
use super::sve::{Adam, by_tiles, coefficients, decay, ffi, types};
use super::tensor::{Spans, StateSpans, Tensor};
use crate::dtype::Dtype;

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

/// Takes one chunk's step back, as `undo::undo` does; false, with nothing done, if there is no body for these types.
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

#[cfg(test)]
mod tests {
    use super::super::{Kernel, States, WeightDecay, log_bytes, log_used_of, step, undo};
    use super::*;
    use crate::dtype::{Floats, FloatsMut};

    const RULE: AdamRule = AdamRule {
        decay: WeightDecay::Decoupled,
        grad_scale: 0.5,
        beta1: 0.9,
        one_minus_beta1: 0.1,
        beta2: 0.99,
        one_minus_beta2: 0.01,
        inv_sqrt_correction2: 2.0,
        eps: 1e-8,
        step_size: -1e-2,
        decay_factor: -1e-4,
    };

    /// Differences of every width, in whole groups and in one that is not full.
    fn start() -> ([Vec<f32>; 3], Vec<f32>) {
        let values = |seed: u32, sign: f32| -> Vec<f32> {
            let value = |i: u32| {
                let bits = (i * 7 + seed).wrapping_mul(2_654_435_761) >> 8;
                let scale = [1.0, 1e-3, 1e-6, 1e12][(i / 16 % 4) as usize];
                sign * bits as f32 / 1e8 * scale
            };
            (0..1000).map(value).collect()
        };
        ([values(1, 1.0), values(2, -1.0), values(3, 1.0)], values(4, 1.0))
    }

    fn tensor<'a>(states: &'a mut [Vec<f32>; 3], grad: &'a [f32], log: &'a mut [u8]) -> Tensor<'a> {
        let [param, exp_avg, exp_avg_sq] = states.each_mut().map(|span| FloatsMut::F32(span));
        let states = States { param, exp_avg: Some(exp_avg), exp_avg_sq: Some(exp_avg_sq) };
        Tensor::new(states, Floats::F32(grad), None).unwrap().with_log(log).unwrap()
    }

    #[test]
    fn both_variants_write_the_same_logs_and_read_each_others() {
        let (before, grad) = start();
        let kernels: Vec<Kernel> = Kernel::all().filter(|kernel| kernel.adam().is_some()).collect();
        for (writer, reader) in kernels.iter().flat_map(|w| kernels.iter().map(move |r| (*w, *r))) {
            let mut log = vec![0; log_bytes(grad.len())];
            let mut states = before.clone();
            step(writer, RULE, tensor(&mut states, &grad, &mut log), false).unwrap();
            assert!(log_used_of(&log, grad.len()) > grad.len() as u64 / 2);
            undo(reader, RULE, tensor(&mut states, &grad, &mut log), None).unwrap();
            assert_eq!(states, before, "{} undone by {}", writer.name(), reader.name());
        }
    }
}
