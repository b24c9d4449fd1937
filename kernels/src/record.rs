//! A step that records an undo log.
//!
//! A step is almost invertible by algebra: the inverse formula misses the old value by a few units in the last place.
//! For each group of one vector, the log of a chunk holds the residuals of bit patterns (old - estimate, wrapping).
//! `pack` encodes the residuals in as few bits as the group needs. 32 bits hold any residual, so Inf, NaN and
//! gradient spikes are restored exactly as well; they take more space. The estimate depends only on
//! stored values and the gradient, which must be unchanged when the step is undone.
//!
//! Only the process and the kernel that wrote a log can read it. A log that is too large for the caches is collected in
//! a small buffer and written with non-temporal stores of whole cache lines. Such a store writes a line without reading
//! the old contents first.

use std::marker::PhantomData;

use super::chunk_loop::{Access, MAX_LANES, Op};
use super::element::Element;
use super::log::{HEADER, LINE, SLACK};
use super::pack::{self, Residuals};
use super::rules::{Arithmetic, Corrector, ElementState};
use super::spans::{Spans, decode, encode, load_bits, store_bits, store_maybe_nt};
use super::vector::Vector;

/// Bytes that the stage collects before they are streamed to the log.
const BATCH: usize = 32 * LINE;

/// Write-combining buffer for a log: a full batch, plus one group of maximal size and slack.
#[repr(align(64))]
pub(super) struct StagingBuffer([u8; BATCH + pack::most(MAX_LANES) + SLACK]);

impl StagingBuffer {
    pub const fn new() -> Self {
        StagingBuffer([0; BATCH + pack::most(MAX_LANES) + SLACK])
    }
}

/// A step that records the errors of its inverse.
pub(super) struct Recorded<'s, R, P: Element, S: Element, G: Element, C: Element> {
    rule: R,
    spans: Spans<P, S, G, C>,
    combiner: WriteCombiner<'s>,
}

impl<'s, R, P: Element, S: Element, G: Element, C: Element> Recorded<'s, R, P, S, G, C> {
    /// With a `stage`, the log is written with non-temporal stores.
    ///
    /// # Safety
    /// `log` has [`log_capacity`](super::log::log_capacity) bytes for the elements of the walk. With a stage, `log` is
    /// aligned to a cache line.
    pub unsafe fn new(
        rule: R,
        spans: Spans<P, S, G, C>,
        log: *mut u8,
        stage: Option<&'s mut StagingBuffer>,
    ) -> Self {
        // SAFETY: the caller upholds the callee's contract.
        Recorded { rule, spans, combiner: unsafe { WriteCombiner::new(log, stage) } }
    }
}

impl<R: Arithmetic, P: Element, S: Element, G: Element, C: Element> Op for Recorded<'_, R, P, S, G, C> {
    #[inline(always)]
    unsafe fn apply<V: Vector, A: Access>(&mut self, at: usize, access: A) -> V {
        // SAFETY: the caller's contract covers every call below; the combiner has room for every group at maximal size.
        unsafe {
            self.spans.prefetch::<V>(at);
            let old = load_bits::<P, S, V, A>(access, at, &self.spans.before());
            let grad = access.load::<G, V>(self.spans.grad.add(at)).mul(V::splat(self.rule.grad_scale()));
            let new = self.rule.round::<V>(at, self.rule.forward(decode::<P, S, V>(old), grad));
            let new = encode::<P, S, V>(new);
            let stored = decode::<P, S, V>(new);
            store_bits::<P, S, V, A>(access, at, new, &self.spans.after());
            store_maybe_nt::<C, V, A>(
                access,
                self.spans.streamed_copy(),
                stored.param,
                self.spans.param_copy.add(at),
            );

            let mut writer = Writer::<P, S, V>::new(old);
            self.rule.inverse(stored, grad, &mut writer);
            let moments = [writer.old.exp_avg, writer.old.exp_avg_sq];
            let bytes = pack::pack::<V>(writer.residuals, moments, self.combiner.next);
            self.combiner.next = self.combiner.next.add(bytes);
            self.combiner.drain::<V>();
            grad
        }
    }

    #[inline(always)]
    unsafe fn finish<V: Vector>(&mut self) {
        // SAFETY: the caller upholds the callee's contract.
        unsafe { self.combiner.finish::<V>() }
    }
}

/// Destination of the groups: the log itself, or a stage whose full batches are streamed to the log.
struct WriteCombiner<'s> {
    log: *mut u8,
    /// Address of the next group.
    next: *mut u8,
    /// Start of the bytes that are not yet in the log (the stage, or the log itself).
    staged: *mut u8,
    /// Address in the log that receives the first staged byte.
    to: *mut u8,
    /// End of a batch in the stage: at or above this address the combiner drains. Maximal without a stage.
    full: *mut u8,
    stage: PhantomData<&'s mut StagingBuffer>,
}

impl<'s> WriteCombiner<'s> {
    #[inline(always)]
    unsafe fn new(log: *mut u8, stage: Option<&'s mut StagingBuffer>) -> Self {
        let (staged, full) = match stage {
            // SAFETY: BATCH lies inside the stage.
            Some(stage) => unsafe { (stage.0.as_mut_ptr(), stage.0.as_mut_ptr().add(BATCH)) },
            None => (log, std::ptr::null_mut::<u8>().wrapping_sub(1)),
        };
        // SAFETY: the log and the stage both begin with room for a header.
        WriteCombiner { log, next: unsafe { staged.add(HEADER) }, staged, to: log, full, stage: PhantomData }
    }

    #[inline(always)]
    unsafe fn drain<V: Vector>(&mut self) {
        if self.next >= self.full {
            // SAFETY: the caller upholds the callee's contract.
            unsafe { self.drain_full::<V>() }
        }
    }

    /// Streams the full batch to the log, and moves the bytes after the batch to the front of the stage.
    #[cold]
    #[inline(always)]
    unsafe fn drain_full<V: Vector>(&mut self) {
        // SAFETY: the stage holds BATCH bytes and at most one group more; the log has room for every byte written.
        unsafe {
            store_lines_nt::<V>(self.staged, self.to, BATCH);
            self.to = self.to.add(BATCH);
            let rest = self.next.offset_from(self.full) as usize;
            std::ptr::copy_nonoverlapping(self.full, self.staged, rest);
            self.next = self.staged.add(rest);
        }
    }

    #[inline(always)]
    unsafe fn finish<V: Vector>(&mut self) {
        // SAFETY: the bytes of the stage after the last group are initialized but unspecified; the log has room for
        // whole lines.
        unsafe {
            let rest = self.next.offset_from(self.staged) as usize;
            let used = self.to.offset_from(self.log) as usize + rest;
            if self.staged != self.log {
                store_lines_nt::<V>(self.staged, self.to, rest.next_multiple_of(LINE));
            }
            V::fence();
            self.log.cast::<u64>().write_unaligned(used as u64);
        }
    }
}

/// Copies whole cache lines with non-temporal stores.
///
/// # Safety
/// Same contract as [`Vector`]. `from` and `to` are aligned to a cache line and valid for `bytes`, a multiple of a
/// line.
#[inline(always)]
unsafe fn store_lines_nt<V: Vector>(from: *const u8, to: *mut u8, bytes: usize) {
    // SAFETY: a cache line is a whole number of vectors of any set.
    unsafe {
        let mut at = 0;
        while at < bytes {
            V::stream_bits32(V::load_bits32(from.add(at).cast()), to.add(at).cast());
            at += 4 * V::LANES;
        }
    }
}

/// Returns the known old values for the estimates, and keeps the residuals.
struct Writer<P, S, V: Vector> {
    old: ElementState<V::Bits>,
    residuals: Residuals<V::Bits>,
    elements: PhantomData<(P, S)>,
}

impl<P: Element, S: Element, V: Vector> Writer<P, S, V> {
    #[inline(always)]
    unsafe fn new(old: ElementState<V::Bits>) -> Self {
        // SAFETY: the caller upholds the callee's contract.
        let zero = unsafe { V::bits_splat(0) };
        let residuals = Residuals { param: zero, exp_avg: zero, exp_avg_sq: zero };
        Writer { old, residuals, elements: PhantomData }
    }
}

#[inline(always)]
unsafe fn residual<E: Element, V: Vector>(old: V::Bits, estimate: V) -> V::Bits {
    // SAFETY: the caller upholds the callees' contracts.
    unsafe { V::bits_sub(old, E::encode(estimate.nan_to_zero())) }
}

impl<P: Element, S: Element, V: Vector> Corrector<V> for Writer<P, S, V> {
    #[inline(always)]
    unsafe fn param(&mut self, estimate: V) -> V {
        // SAFETY: the caller upholds the callees' contracts.
        unsafe {
            self.residuals.param = residual::<P, V>(self.old.param, estimate);
            P::decode(self.old.param)
        }
    }
    #[inline(always)]
    unsafe fn exp_avg(&mut self, estimate: V) -> V {
        // SAFETY: the caller upholds the callees' contracts.
        unsafe {
            self.residuals.exp_avg = residual::<S, V>(self.old.exp_avg, estimate);
            S::decode(self.old.exp_avg)
        }
    }
    #[inline(always)]
    unsafe fn exp_avg_sq(&mut self, estimate: V) -> V {
        // SAFETY: the caller upholds the callees' contracts.
        unsafe {
            self.residuals.exp_avg_sq = residual::<S, V>(self.old.exp_avg_sq, estimate);
            S::decode(self.old.exp_avg_sq)
        }
    }
}
