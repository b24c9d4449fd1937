//! In-place steps without a log: the Rust side of kernels/adam_sve.c.

use super::bodies::Adam;
use super::ffi::{self, coefficients, decay, types};
use super::tiles::by_tiles;
use crate::dtype::Dtype;
use crate::element::{Absent, Dtypes};
use crate::float_mode::IeeeMode;
use crate::rules::AdamRule;
use crate::spans::Spans;
use crate::tensor::Tensor;

/// Steps one chunk in place and returns the sum of squares. Returns `None` without changing anything if no body exists
/// for these types.
pub fn step(
    adam: &Adam,
    rule: &AdamRule,
    tensor: &Tensor<'_>,
    spans: ffi::Spans,
    squares: bool,
) -> Option<f64> {
    let (n, dtypes) = (tensor.len(), tensor.dtypes().ok()?);
    let coefficients = coefficients(rule);
    let call = |at: usize, n: usize, lanes: *mut f64| {
        // SAFETY: the body was chosen for this processor. The constructor of the tensor checked that every span has the
        // elements. `lanes` is null or has LANES sums.
        unsafe {
            (adam.step)(&coefficients, decay(rule.decay), types(dtypes), offset(&spans, dtypes, at), n, lanes)
        }
    };
    let _mode = IeeeMode::enter();
    if squares { by_tiles(n, call) } else { call(0, n, std::ptr::null_mut()).then_some(0.0) }
}

/// The addresses of `tensor` for an in-place step without a log. `None` if the tensor has a shadow or a log.
pub fn addresses(tensor: &mut Tensor<'_>) -> Option<ffi::Spans> {
    // Elements of `Absent` are `()`, so these addresses have no element type.
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

/// The addresses advanced by `at` elements. An absent copy stays null.
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
