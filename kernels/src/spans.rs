//! The addresses of a tensor with static element types, and the loads and stores of groups of elements.

use super::chunk_loop::Access;
use super::element::Element;
use super::log::LINE;
use super::rules::ElementState;
use super::tensor::{States, Tensor};
use super::vector::Vector;
use crate::dtype::FloatsMut;

/// Prefetch distance in elements.
pub(super) const AHEAD: usize = 512;

/// The addresses of a tensor with static element types.
#[derive(Clone, Copy)]
pub struct Spans<P: Element, S: Element, G: Element, C: Element> {
    pub grad: *const G::Raw,
    pub param_copy: *mut C::Raw,
    old: StateSpans<P, S>,
    new: StateSpans<P, S>,
    streamed: bool,
    streamed_copy: bool,
}

/// Addresses of parameter and states. An absent state is null.
pub struct StateSpans<P: Element, S: Element> {
    pub param: *mut P::Raw,
    pub exp_avg: *mut S::Raw,
    pub exp_avg_sq: *mut S::Raw,
}

impl<P: Element, S: Element> Clone for StateSpans<P, S> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<P: Element, S: Element> Copy for StateSpans<P, S> {}

impl<P: Element, S: Element> StateSpans<P, S> {
    fn of(states: &mut States<'_>) -> Self {
        let state =
            |span: &mut Option<FloatsMut<'_>>| span.as_mut().map_or(std::ptr::null_mut(), FloatsMut::address);
        StateSpans {
            param: states.param.address().cast(),
            exp_avg: state(&mut states.exp_avg).cast(),
            exp_avg_sq: state(&mut states.exp_avg_sq).cast(),
        }
    }

    /// True if every span is aligned to a cache line. An absent state counts as aligned.
    fn aligned(self) -> bool {
        let addresses = [self.param.addr(), self.exp_avg.addr(), self.exp_avg_sq.addr()];
        addresses.iter().all(|address| address.is_multiple_of(LINE))
    }
}

impl<P: Element, S: Element, G: Element, C: Element> Spans<P, S, G, C> {
    /// Returns the addresses of `tensor`. The dtypes of `tensor` must match the static types.
    pub fn of(tensor: &mut Tensor<'_>) -> Self {
        let old = StateSpans::of(&mut tensor.states);
        let new = tensor.shadow_mut().map(StateSpans::of);
        let param_copy: *mut C::Raw =
            tensor.param_copy.as_mut().map_or(std::ptr::null_mut(), FloatsMut::address).cast();
        let streamed = tensor.streams.written;
        Spans {
            grad: tensor.grad.address().cast(),
            param_copy,
            old,
            new: new.unwrap_or(old),
            streamed: streamed && new.is_some_and(StateSpans::aligned),
            // Lines that were just read are in the caches.
            streamed_copy: streamed
                && !tensor.takes_copy()
                && !param_copy.is_null()
                && param_copy.addr().is_multiple_of(LINE),
        }
    }

    /// True if the new states are written with non-temporal stores.
    #[inline(always)]
    pub fn streamed(&self) -> bool {
        self.streamed
    }

    /// True if the param_copy is written with non-temporal stores.
    #[inline(always)]
    pub fn streamed_copy(&self) -> bool {
        self.streamed_copy
    }

    /// Prefetches the inputs of the group [`AHEAD`] elements after `at`. The hardware prefetcher stops at every page
    /// boundary.
    ///
    /// # Safety
    /// Same contract as [`Vector`].
    #[inline(always)]
    pub unsafe fn prefetch<V: Vector>(&self, at: usize) {
        // SAFETY: the caller upholds the callees' contracts.
        unsafe {
            self.prefetch_param::<V>(at);
            self.prefetch_moments::<V>(at);
        }
    }

    /// As [`Spans::prefetch`], of gradient and parameter.
    ///
    /// # Safety
    /// Same contract as [`Vector`].
    #[inline(always)]
    pub unsafe fn prefetch_param<V: Vector>(&self, at: usize) {
        // SAFETY: a prefetch of any address is harmless.
        unsafe {
            V::prefetch(self.grad.wrapping_add(at + AHEAD).cast());
            V::prefetch(self.old.param.wrapping_add(at + AHEAD).cast());
        }
    }

    /// As [`Spans::prefetch`], of the moments.
    ///
    /// # Safety
    /// Same contract as [`Vector`].
    #[inline(always)]
    pub unsafe fn prefetch_moments<V: Vector>(&self, at: usize) {
        // SAFETY: a prefetch of any address is harmless.
        unsafe {
            V::prefetch(self.old.exp_avg.wrapping_add(at + AHEAD).cast());
            V::prefetch(self.old.exp_avg_sq.wrapping_add(at + AHEAD).cast());
        }
    }

    /// True if the step has no shadow: it overwrites the old states.
    pub fn in_place(&self) -> bool {
        self.old.param == self.new.param
    }

    /// The states that a step reads and its undo writes.
    #[inline(always)]
    pub fn before(&self) -> StateSpans<P, S> {
        self.old
    }

    /// The states that a step writes and its undo reads: the shadow if there is one, else the same as
    /// [`Spans::before`].
    #[inline(always)]
    pub fn after(&self) -> StateSpans<P, S> {
        self.new
    }
}

/// Writes a group, with non-temporal stores if `streamed`.
#[inline(always)]
pub(super) unsafe fn store_maybe_nt<E: Element, V: Vector, A: Access>(
    access: A,
    streamed: bool,
    value: V,
    to: *mut E::Raw,
) {
    // SAFETY: the caller upholds the callees' contracts. Streamed spans begin at a cache line, so every group is
    // aligned.
    unsafe {
        if streamed { access.store_nt::<E, V>(E::encode(value), to) } else { access.store::<E, V>(value, to) }
    }
}

#[inline(always)]
pub(super) unsafe fn decode<P: Element, S: Element, V: Vector>(
    bits: ElementState<V::Bits>,
) -> ElementState<V> {
    // SAFETY: the caller upholds the callees' contracts.
    unsafe {
        ElementState {
            param: P::decode(bits.param),
            exp_avg: S::decode(bits.exp_avg),
            exp_avg_sq: S::decode(bits.exp_avg_sq),
        }
    }
}

#[inline(always)]
pub(super) unsafe fn encode<P: Element, S: Element, V: Vector>(
    values: ElementState<V>,
) -> ElementState<V::Bits> {
    // SAFETY: the caller upholds the callees' contracts.
    unsafe {
        ElementState {
            param: P::encode(values.param),
            exp_avg: S::encode(values.exp_avg),
            exp_avg_sq: S::encode(values.exp_avg_sq),
        }
    }
}

/// Loads the bit patterns of a group. Zero for a state that the rule does not keep.
#[inline(always)]
pub(super) unsafe fn load_bits<P: Element, S: Element, V: Vector, A: Access>(
    access: A,
    at: usize,
    from: &StateSpans<P, S>,
) -> ElementState<V::Bits> {
    // SAFETY: the caller upholds the callees' contracts; a null span is not accessed.
    unsafe {
        let zero = V::splat(0.0).to_bits();
        let state = |span: *mut S::Raw| match span.is_null() {
            true => zero,
            false => access.load_bits::<S, V>(span.add(at)),
        };
        ElementState {
            param: access.load_bits::<P, V>(from.param.add(at)),
            exp_avg: state(from.exp_avg),
            exp_avg_sq: state(from.exp_avg_sq),
        }
    }
}

#[inline(always)]
pub(super) unsafe fn store_bits<P: Element, S: Element, V: Vector, A: Access>(
    access: A,
    at: usize,
    values: ElementState<V::Bits>,
    to: &StateSpans<P, S>,
) {
    // SAFETY: the caller upholds the callees' contracts; a null span is not accessed.
    unsafe {
        access.store_bits::<P, V>(values.param, to.param.add(at));
        if !to.exp_avg.is_null() {
            access.store_bits::<S, V>(values.exp_avg, to.exp_avg.add(at));
        }
        if !to.exp_avg_sq.is_null() {
            access.store_bits::<S, V>(values.exp_avg_sq, to.exp_avg_sq.add(at));
        }
    }
}
