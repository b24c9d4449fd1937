//! Rolls back a step, and optionally repeats it with another gradient scale.
//!
//! The inverse formula estimates the old values. The log that `record` wrote corrects the estimates bit-exactly.
//! Without a log the undo stores the estimates themselves.

use std::marker::PhantomData;

use super::chunk_loop::{Access, ChunkLoop, Op};
use super::dispatch::Kernel;
use super::element::{Element, WithTypes, with_bf16_moments, with_types};
use super::float_mode::IeeeMode;
use super::log::HEADER;
use super::pack::{self, Group};
use super::rules::{Arithmetic, Corrector, ElementState};
use super::spans::{Spans, decode, encode, load_bits, store_bits, store_maybe_nt};
use super::stochastic::Stochastic;
use super::tensor::{Tensor, no_kernel, not_stochastic};
use super::vector::Vector;
use crate::error::Result;

/// Rolls back the step of one chunk with the generic body.
pub fn undo<R: Arithmetic>(
    kernel: Kernel,
    rule: R,
    tensor: &mut Tensor<'_>,
    redo_scale: Option<f32>,
) -> Result<()> {
    let dtypes = tensor.dtypes()?;
    with_types(dtypes, UndoStep { kernel, rule, tensor, redo_scale }).ok_or_else(|| no_kernel(dtypes))
}

/// As [`undo`], for bf16 moments that are rounded stochastically.
pub fn undo_stochastic(
    kernel: Kernel,
    rule: Stochastic,
    tensor: &mut Tensor<'_>,
    redo_scale: Option<f32>,
) -> Result<()> {
    let dtypes = tensor.dtypes()?;
    let work = UndoStep { kernel, rule, tensor, redo_scale };
    with_bf16_moments(dtypes, work).ok_or_else(|| not_stochastic(dtypes))
}

struct UndoStep<'t, 'a, R> {
    kernel: Kernel,
    rule: R,
    tensor: &'t mut Tensor<'a>,
    redo_scale: Option<f32>,
}

impl<R: Arithmetic> WithTypes for UndoStep<'_, '_, R> {
    type Output = ();
    fn with<P: Element, S: Element, G: Element, C: Element>(self) {
        let UndoStep { kernel, rule, tensor, redo_scale } = self;
        let n = tensor.len();
        let spans = Spans::<P, S, G, C>::of(tensor);
        let log = tensor.log_address();
        let redo_scale = redo_scale.map(|scale| rule.with_grad_scale(scale));
        // SAFETY: a log begins with its header.
        let log = log.map_or(std::ptr::null_mut(), |log| unsafe { log.add(HEADER) });
        let op = Undo { rule, spans, log, redo_scale };
        let _mode = IeeeMode::enter();
        // SAFETY: `with_types` chose P, S, G and C by the tensor's dtypes, so the addresses point to elements of these
        // types. `Tensor::new` checked that every span has n elements, and `check_states` that no state of the rule is
        // missing. `with_log` checked that the log has room for n elements at maximal size, and the control byte of a
        // group cannot name more bytes than that maximum. The tensor borrows all spans for longer than this call.
        unsafe { kernel.run(ChunkLoop::<_, false> { op, n }) };
    }
}

/// Corrects estimates by the residuals that `record` wrote. Without a log, takes the estimates as the old values.
struct Reader<P, S, V: Vector> {
    old: ElementState<V::Bits>,
    group: Option<Group<V::Bits>>,
    elements: PhantomData<(P, S)>,
}

#[inline(always)]
unsafe fn correct<E: Element, V: Vector>(estimate: V, residual: Option<V::Bits>) -> V::Bits {
    // SAFETY: the caller upholds the callees' contracts.
    unsafe {
        match residual {
            Some(residual) => V::bits_add(E::encode(estimate.nan_to_zero()), residual),
            None => E::encode(estimate),
        }
    }
}

/// As [`correct`]. A moment has a mask too: that of the bits of its estimate that count.
#[inline(always)]
unsafe fn correct_moment<E: Element, V: Vector>(estimate: V, group: Option<(V::Bits, V::Bits)>) -> V::Bits {
    // SAFETY: the caller upholds the callees' contracts.
    unsafe {
        match group {
            Some((residual, mask)) => {
                V::bits_add(V::bits_and(E::encode(estimate.nan_to_zero()), mask), residual)
            }
            None => E::encode(estimate),
        }
    }
}

/// Zero in the lanes whose sign is set.
#[inline(always)]
unsafe fn not_negative<V: Vector>(value: V) -> V {
    // SAFETY: the caller upholds the callees' contracts.
    unsafe {
        let one = V::bits_splat(1);
        let keep = V::bits_sub(V::bits_shr(value.to_bits(), V::bits_splat(31)), one);
        V::from_bits(V::bits_and(value.to_bits(), keep))
    }
}

impl<P: Element, S: Element, V: Vector> Corrector<V> for Reader<P, S, V> {
    #[inline(always)]
    unsafe fn param(&mut self, estimate: V) -> V {
        // SAFETY: the caller upholds the callee's contract.
        unsafe {
            self.old.param =
                correct::<P, V>(estimate, self.group.as_ref().map(|group| group.residuals.param));
            P::decode(self.old.param)
        }
    }
    #[inline(always)]
    unsafe fn exp_avg(&mut self, estimate: V) -> V {
        // SAFETY: the caller upholds the callee's contract.
        unsafe {
            self.old.exp_avg = correct_moment::<S, V>(
                estimate,
                self.group.as_ref().map(|group| (group.residuals.exp_avg, group.moments)),
            );
            S::decode(self.old.exp_avg)
        }
    }
    #[inline(always)]
    unsafe fn exp_avg_sq(&mut self, estimate: V) -> V {
        // SAFETY: the caller upholds the callee's contract.
        unsafe {
            // Without a log, a negative estimate would give the next step a NaN from its square root.
            let estimate = if self.group.is_some() { estimate } else { not_negative(estimate) };
            self.old.exp_avg_sq = correct_moment::<S, V>(
                estimate,
                self.group.as_ref().map(|group| (group.residuals.exp_avg_sq, group.moments)),
            );
            S::decode(self.old.exp_avg_sq)
        }
    }
}

/// Rolls back a step, then repeats the step with the rule `redo_scale` if there is one.
struct Undo<R, P: Element, S: Element, G: Element, C: Element> {
    rule: R,
    spans: Spans<P, S, G, C>,
    log: *const u8,
    redo_scale: Option<R>,
}

impl<R: Arithmetic, P: Element, S: Element, G: Element, C: Element> Op for Undo<R, P, S, G, C> {
    #[inline(always)]
    unsafe fn apply<V: Vector, A: Access>(&mut self, at: usize, access: A) -> V {
        // SAFETY: the caller's contract covers every call below; the log holds this group.
        unsafe {
            self.spans.prefetch::<V>(at);
            let new = load_bits::<P, S, V, A>(access, at, &self.spans.after());
            let raw_grad = access.load::<G, V>(self.spans.grad.add(at));
            let group = match self.log.is_null() {
                true => None,
                false => {
                    let group = pack::unpack::<V>(self.log);
                    self.log = self.log.add(group.bytes);
                    Some(group)
                }
            };
            let mut reader = Reader::<P, S, V> { old: new, group, elements: PhantomData };
            let grad = raw_grad.mul(V::splat(self.rule.grad_scale()));
            self.rule.inverse(decode::<P, S, V>(new), grad, &mut reader);

            let mut values = reader.old;
            if let Some(redo_scale) = &self.redo_scale {
                let grad = raw_grad.mul(V::splat(redo_scale.grad_scale()));
                let new = redo_scale.forward(decode::<P, S, V>(values), grad);
                values = encode::<P, S, V>(redo_scale.round::<V>(at, new));
            }
            store_bits::<P, S, V, A>(access, at, values, &self.spans.before());
            store_maybe_nt::<C, V, A>(
                access,
                self.spans.streamed_copy(),
                P::decode(values.param),
                self.spans.param_copy.add(at),
            );
            raw_grad
        }
    }

    #[inline(always)]
    unsafe fn finish<V: Vector>(&mut self) {
        if self.spans.streamed_copy() {
            // SAFETY: the caller upholds the callee's contract.
            unsafe { V::fence() }
        }
    }
}
