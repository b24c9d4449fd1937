//! The generic step of one chunk, and the sum of squares of a gradient without a step.

use std::marker::PhantomData;

use super::chunk_loop::{Access, CHUNK, ChunkLoop, Op, StepOp};
use super::dispatch::Kernel;
use super::element::{Bf16, Element, F16, F32, WithTypes, with_bf16_moments, with_types};
use super::float_mode::IeeeMode;
use super::record::{Recorded, StagingBuffer};
use super::rules::{Arithmetic, ElementState};
use super::spans::{Spans, store_maybe_nt};
use super::stochastic::Stochastic;
use super::tensor::{Tensor, no_kernel, not_stochastic};
use super::vector::Vector;
use crate::dtype::Floats;
use crate::error::Result;

/// Steps one chunk with the generic body.
pub fn step<R: Arithmetic>(kernel: Kernel, rule: R, tensor: &mut Tensor<'_>, squares: bool) -> Result<f64> {
    let dtypes = tensor.dtypes()?;
    with_types(dtypes, StepCall { kernel, rule, tensor, squares }).ok_or_else(|| no_kernel(dtypes))
}

/// As [`step`], for bf16 moments that are rounded stochastically.
pub fn step_stochastic(
    kernel: Kernel,
    rule: Stochastic,
    tensor: &mut Tensor<'_>,
    squares: bool,
) -> Result<f64> {
    let dtypes = tensor.dtypes()?;
    let work = StepCall { kernel, rule, tensor, squares };
    with_bf16_moments(dtypes, work).ok_or_else(|| not_stochastic(dtypes))
}

/// Sum of squares of `grad * scale` for one chunk. Panics if `grad` has more than [`CHUNK`] elements.
pub fn grad_squares(kernel: Kernel, grad: Floats<'_>, scale: f32) -> f64 {
    assert!(grad.len() <= CHUNK, "a chunk is at most {CHUNK} elements");
    let n = grad.len();
    let _mode = IeeeMode::enter();
    // SAFETY: each pointer covers the n elements of the slice it comes from.
    unsafe {
        match grad {
            Floats::F32(g) => {
                kernel.run(ChunkLoop::<_, true> { op: Scaled::<F32>::new(g.as_ptr(), scale), n })
            }
            Floats::F16(g) => {
                kernel.run(ChunkLoop::<_, true> { op: Scaled::<F16>::new(g.as_ptr().cast(), scale), n })
            }
            Floats::Bf16(g) => {
                kernel.run(ChunkLoop::<_, true> { op: Scaled::<Bf16>::new(g.as_ptr().cast(), scale), n })
            }
        }
    }
}

struct StepCall<'t, 'a, R> {
    kernel: Kernel,
    rule: R,
    tensor: &'t mut Tensor<'a>,
    squares: bool,
}

impl<R: Arithmetic> WithTypes for StepCall<'_, '_, R> {
    type Output = f64;
    fn with<P: Element, S: Element, G: Element, C: Element>(self) -> f64 {
        let StepCall { kernel, rule, tensor, squares } = self;
        let n = tensor.len();
        let spans = Spans::<P, S, G, C>::of(tensor);
        let streams_log = tensor.streams_log();
        let log = tensor.log_address();
        // Made only for a streamed log: to clear it takes longer than the step of a small tensor.
        let mut stage = streams_log.then(StagingBuffer::new);
        let stage = stage.as_mut();
        let _mode = IeeeMode::enter();
        // SAFETY: `with_types` chose P, S, G and C by the tensor's dtypes, so the addresses point to elements of these
        // types. `Tensor::new` and `with_shadow` checked that every span has n elements. `check_states` checked that no
        // state of the rule is missing. `with_log` checked that the log has room for n elements at maximal size. The
        // tensor borrows all spans, and exclusively those that are written, for longer than this call.
        unsafe {
            match (log, spans.in_place(), squares) {
                (None, true, true) => {
                    kernel.run(ChunkLoop::<_, true> { op: Update::<_, _, _, _, _, true> { rule, spans }, n })
                }
                (None, true, false) => {
                    kernel.run(ChunkLoop::<_, false> { op: Update::<_, _, _, _, _, true> { rule, spans }, n })
                }
                (None, false, true) => {
                    kernel.run(ChunkLoop::<_, true> { op: Update::<_, _, _, _, _, false> { rule, spans }, n })
                }
                (None, false, false) => kernel
                    .run(ChunkLoop::<_, false> { op: Update::<_, _, _, _, _, false> { rule, spans }, n }),
                (Some(log), _, true) => {
                    kernel.run(ChunkLoop::<_, true> { op: Recorded::new(rule, spans, log, stage), n })
                }
                (Some(log), _, false) => {
                    kernel.run(ChunkLoop::<_, false> { op: Recorded::new(rule, spans, log, stage), n })
                }
            }
        }
    }
}

/// A step without a log. `IN_PLACE` is a constant because the in-place loop then has three addresses fewer, which Arm
/// would otherwise increment separately.
pub(super) struct Update<R, P: Element, S: Element, G: Element, C: Element, const IN_PLACE: bool> {
    pub(super) rule: R,
    pub(super) spans: Spans<P, S, G, C>,
}

impl<R: Arithmetic, P: Element, S: Element, G: Element, C: Element, const IN_PLACE: bool> Op
    for Update<R, P, S, G, C, IN_PLACE>
{
    #[inline(always)]
    unsafe fn apply<V: Vector, A: Access>(&mut self, at: usize, access: A) -> V {
        // SAFETY: the caller's contract covers every call below.
        unsafe {
            self.spans.prefetch_moments::<V>(at);
            let (from, zero) = (self.spans.before(), V::splat(0.0));
            let to = if IN_PLACE { from } else { self.spans.after() };
            let old = [
                if R::EXP_AVG { access.load::<S, V>(from.exp_avg.add(at)) } else { zero },
                if R::EXP_AVG_SQ { access.load::<S, V>(from.exp_avg_sq.add(at)) } else { zero },
            ];
            let (grad, [exp_avg, exp_avg_sq]) = self.advance(at, access, old);
            let streamed = !IN_PLACE && self.spans.streamed();
            if R::EXP_AVG {
                store_maybe_nt::<S, V, A>(access, streamed, exp_avg, to.exp_avg.add(at));
            }
            if R::EXP_AVG_SQ {
                store_maybe_nt::<S, V, A>(access, streamed, exp_avg_sq, to.exp_avg_sq.add(at));
            }
            grad
        }
    }

    #[inline(always)]
    unsafe fn finish<V: Vector>(&mut self) {
        if !IN_PLACE || self.spans.streamed_copy() {
            // SAFETY: the caller upholds the callee's contract.
            unsafe { V::fence() }
        }
    }
}

impl<R: Arithmetic, P: Element, S: Element, G: Element, C: Element, const IN_PLACE: bool> StepOp
    for Update<R, P, S, G, C, IN_PLACE>
{
    #[inline(always)]
    unsafe fn advance<V: Vector, A: Access>(&mut self, at: usize, access: A, moments: [V; 2]) -> (V, [V; 2]) {
        // SAFETY: the caller's contract covers every call below.
        unsafe {
            self.spans.prefetch_param::<V>(at);
            let from = self.spans.before();
            let to = if IN_PLACE { from } else { self.spans.after() };
            let [exp_avg, exp_avg_sq] = moments;
            let old = ElementState { param: access.load::<P, V>(from.param.add(at)), exp_avg, exp_avg_sq };
            let grad = access.load::<G, V>(self.spans.grad.add(at)).mul(V::splat(self.rule.grad_scale()));
            let new = self.rule.round::<V>(at, self.rule.forward(old, grad));
            let streamed = !IN_PLACE && self.spans.streamed();
            store_maybe_nt::<P, V, A>(access, streamed, new.param, to.param.add(at));
            store_maybe_nt::<C, V, A>(
                access,
                self.spans.streamed_copy(),
                new.param,
                self.spans.param_copy.add(at),
            );
            (grad, [new.exp_avg, new.exp_avg_sq])
        }
    }
}

struct Scaled<G: Element> {
    grad: *const G::Raw,
    scale: f32,
    element: PhantomData<G>,
}

impl<G: Element> Scaled<G> {
    fn new(grad: *const G::Raw, scale: f32) -> Self {
        Scaled { grad, scale, element: PhantomData }
    }
}

impl<G: Element> Op for Scaled<G> {
    #[inline(always)]
    unsafe fn apply<V: Vector, A: Access>(&mut self, at: usize, access: A) -> V {
        // SAFETY: the caller upholds the callee's contract.
        unsafe { access.load::<G, V>(self.grad.add(at)).mul(V::splat(self.scale)) }
    }
}
