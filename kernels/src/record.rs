//! A step that records how to take it back.
//!
//! A step is almost invertible by algebra: the inverse formula misses the old value by a few units in the last place.
//! The log of a chunk holds, for each group of one vector, those differences between bit patterns (old - estimate,
//! wrapping) in as few bits as the group needs (see `pack`). Raw 32 bits hold any difference, so that Inf, NaN, the first
//! step and gradient spikes come back exactly, too; they only take more room. The estimate depends on stored
//! values and the gradient alone, which must be unchanged when it is undone.
//!
//! The log lives in memory, for the process and the kernel that wrote it. Where it is too large for the caches, its lines
//! gather in a small buffer and go to memory whole and past the caches: each costs its own bytes only, not
//! also the reading of what was there before.

use std::marker::PhantomData;

use super::element::Element;
use super::log::{HEADER, LINE, SLACK};
use super::pack::{self, Differences};
use super::rules::{Arithmetic, Settle, Values};
use super::spans::{Spans, decode, encode, load_bits, put, store_bits};
use super::vector::Vector;
use super::walk::{Access, MAX_LANES, Op};

/// Bytes that gather before they go out.
const BATCH: usize = 32 * LINE;

/// Cache lines on their way into a log.
#[repr(align(64))]
pub(super) struct Stage([u8; BATCH + pack::most(MAX_LANES) + SLACK]);

impl Stage {
    pub const fn new() -> Self {
        Stage([0; BATCH + pack::most(MAX_LANES) + SLACK])
    }
}

/// A step that records what its inverse will miss.
pub(super) struct Recorded<'s, R, P: Element, S: Element, G: Element, C: Element> {
    rule: R,
    spans: Spans<P, S, G, C>,
    sink: Sink<'s>,
}

impl<'s, R, P: Element, S: Element, G: Element, C: Element> Recorded<'s, R, P, S, G, C> {
    /// `stage` is given where the log is to go past the caches.
    ///
    /// # Safety
    /// `log` has [`log_capacity`](super::log::log_capacity) bytes for the elements that will be walked, and is aligned to a line if there is a
    /// stage.
    pub unsafe fn new(rule: R, spans: Spans<P, S, G, C>, log: *mut u8, stage: Option<&'s mut Stage>) -> Self {
        // SAFETY: the caller's promise is the callee's.
        Recorded { rule, spans, sink: unsafe { Sink::new(log, stage) } }
    }
}

impl<R: Arithmetic, P: Element, S: Element, G: Element, C: Element> Op for Recorded<'_, R, P, S, G, C> {
    #[inline(always)]
    unsafe fn apply<V: Vector, A: Access>(&mut self, at: usize, access: A) -> V {
        // SAFETY: the caller's promise covers every line; the sink has room for every group at its widest.
        unsafe {
            self.spans.prefetch::<V>(at);
            let old = load_bits::<P, S, V, A>(access, at, &self.spans.before());
            let grad = access.load::<G, V>(self.spans.grad.add(at)).mul(V::splat(self.rule.grad_scale()));
            let new = encode::<P, S, V>(self.rule.forward(decode::<P, S, V>(old), grad));
            let stored = decode::<P, S, V>(new);
            store_bits::<P, S, V, A>(access, at, new, &self.spans.after());
            put::<C, V, A>(access, self.spans.streamed_copy(), stored.param, self.spans.param_copy.add(at));

            let mut writer = Writer::<P, S, V>::new(old);
            self.rule.inverse(stored, grad, &mut writer);
            let bytes = pack::pack::<V>(writer.differences, self.sink.next);
            self.sink.next = self.sink.next.add(bytes);
            self.sink.drain::<V>();
            grad
        }
    }

    #[inline(always)]
    unsafe fn finish<V: Vector>(&mut self) {
        // SAFETY: the caller's promise is the callee's.
        unsafe { self.sink.finish::<V>() }
    }
}

/// Where groups are written: into the log, or into a stage whose full lines are streamed there.
struct Sink<'s> {
    log: *mut u8,
    /// Where the next group goes.
    next: *mut u8,
    /// The first byte not yet in the log, and where it lies in the log.
    staged: *mut u8,
    to: *mut u8,
    /// Groups stay below this address without a drain.
    full: *mut u8,
    stage: PhantomData<&'s mut Stage>,
}

impl<'s> Sink<'s> {
    #[inline(always)]
    unsafe fn new(log: *mut u8, stage: Option<&'s mut Stage>) -> Self {
        let (staged, full) = match stage {
            // SAFETY: BATCH lies inside the stage.
            Some(stage) => unsafe { (stage.0.as_mut_ptr(), stage.0.as_mut_ptr().add(BATCH)) },
            None => (log, std::ptr::null_mut::<u8>().wrapping_sub(1)),
        };
        // SAFETY: log and stage begin with room for a header.
        Sink { log, next: unsafe { staged.add(HEADER) }, staged, to: log, full, stage: PhantomData }
    }

    #[inline(always)]
    unsafe fn drain<V: Vector>(&mut self) {
        if self.next >= self.full {
            // SAFETY: the caller's promise is the callee's.
            unsafe { self.drain_full::<V>() }
        }
    }

    /// Streams the full batch, and moves what lies past it to the front.
    #[cold]
    #[inline(always)]
    unsafe fn drain_full<V: Vector>(&mut self) {
        // SAFETY: the stage holds BATCH bytes and at most a group more; the log has room for all that is written.
        unsafe {
            stream_lines::<V>(self.staged, self.to, BATCH);
            self.to = self.to.add(BATCH);
            let rest = self.next.offset_from(self.full) as usize;
            std::ptr::copy_nonoverlapping(self.full, self.staged, rest);
            self.next = self.staged.add(rest);
        }
    }

    #[inline(always)]
    unsafe fn finish<V: Vector>(&mut self) {
        // SAFETY: the stage's bytes past the last group may be anything; the log has room for whole lines.
        unsafe {
            let rest = self.next.offset_from(self.staged) as usize;
            let used = self.to.offset_from(self.log) as usize + rest;
            if self.staged != self.log {
                stream_lines::<V>(self.staged, self.to, rest.next_multiple_of(LINE));
            }
            V::fence();
            self.log.cast::<u64>().write_unaligned(used as u64);
        }
    }
}

/// Copies whole lines past the caches.
///
/// # Safety
/// As [`Vector`]; both are aligned to a line and cover `bytes`, a multiple of it.
#[inline(always)]
unsafe fn stream_lines<V: Vector>(from: *const u8, to: *mut u8, bytes: usize) {
    // SAFETY: a line is a whole number of vectors of any set.
    unsafe {
        let mut at = 0;
        while at < bytes {
            V::stream_bits32(V::load_bits32(from.add(at).cast()), to.add(at).cast());
            at += 4 * V::LANES;
        }
    }
}

/// Settles by known old values, and keeps the differences.
struct Writer<P, S, V: Vector> {
    old: Values<V::Bits>,
    differences: Differences<V::Bits>,
    elements: PhantomData<(P, S)>,
}

impl<P: Element, S: Element, V: Vector> Writer<P, S, V> {
    #[inline(always)]
    unsafe fn new(old: Values<V::Bits>) -> Self {
        // SAFETY: the caller's promise is the callee's.
        let zero = unsafe { V::bits_splat(0) };
        let differences = Differences { param: zero, exp_avg: zero, exp_avg_sq: zero };
        Writer { old, differences, elements: PhantomData }
    }
}

#[inline(always)]
unsafe fn difference<E: Element, V: Vector>(old: V::Bits, estimate: V) -> V::Bits {
    // SAFETY: the caller's promise is the callees'.
    unsafe { V::bits_sub(old, E::encode(estimate.nan_to_zero())) }
}

impl<P: Element, S: Element, V: Vector> Settle<V> for Writer<P, S, V> {
    #[inline(always)]
    unsafe fn param(&mut self, estimate: V) -> V {
        // SAFETY: the caller's promise is the callees'.
        unsafe {
            self.differences.param = difference::<P, V>(self.old.param, estimate);
            P::decode(self.old.param)
        }
    }
    #[inline(always)]
    unsafe fn exp_avg(&mut self, estimate: V) -> V {
        // SAFETY: the caller's promise is the callees'.
        unsafe {
            self.differences.exp_avg = difference::<S, V>(self.old.exp_avg, estimate);
            S::decode(self.old.exp_avg)
        }
    }
    #[inline(always)]
    unsafe fn exp_avg_sq(&mut self, estimate: V) -> V {
        // SAFETY: the caller's promise is the callees'.
        unsafe {
            self.differences.exp_avg_sq = difference::<S, V>(self.old.exp_avg_sq, estimate);
            S::decode(self.old.exp_avg_sq)
        }
    }
}
