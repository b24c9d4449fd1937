//! The step of a bf16 parameter whose f32 master is split: the parameter and 16 low bits per element hold the master.
//!
//! | part | bits |
//! |---|---|
//! | parameter | the master rounded to the nearest bf16, ties away from zero: the upper half of `master + 0x8000` |
//! | low bits | the lower half of the master |
//!
//! The step joins a group in registers, updates it as an f32 parameter, and splits the result. Invariants:
//! - A join returns every bit of the master that was split. The parameter is one above the master's upper half if and
//!   only if the highest low bit is set. Ties away from zero make this rule exact; ties to even would be ambiguous.
//! - A NaN becomes 0x7fc00000, so that the parameter is a NaN too.
//! - A parameter with low bits of zero is its own master. With low bits of another master, a finite parameter is a
//!   master within half a unit in its last place; zero is a denormal master, not a NaN.
//! - With sums of tiles (see `word_sum`), low bits of a tile that other code has written count as zero. The loop over a
//!   tile sums the elements that it writes, and those of the next tile, which are in no other pass.

use super::chunk_loop::{Access, ChunkLoop, Op, StepOp};
use super::dispatch::Kernel;
use super::element::{Absent, Bf16, Element, F32, WithTypes, with_split_types};
use super::float_mode::IeeeMode;
use super::rules::{Arithmetic, ElementState};
use super::spans::{AHEAD, Spans};
use super::squares::TILE;
use super::tensor::{Tensor, no_split_kernel};
use super::vector::Vector;
use super::word_sum::{STRIPE, WordSum, low_bits_count};
use crate::error::Result;

/// Steps one chunk of a tensor with a split master.
pub fn step_split<R: Arithmetic>(
    kernel: Kernel,
    rule: R,
    tensor: &mut Tensor<'_>,
    squares: bool,
) -> Result<f64> {
    let dtypes = tensor.dtypes()?;
    with_split_types(dtypes, SplitCall { kernel, rule, tensor, squares })
        .ok_or_else(|| no_split_kernel(dtypes))
}

struct SplitCall<'t, 'a, R> {
    kernel: Kernel,
    rule: R,
    tensor: &'t mut Tensor<'a>,
    squares: bool,
}

impl<R: Arithmetic> WithTypes for SplitCall<'_, '_, R> {
    type Output = f64;
    fn with<P: Element, S: Element, G: Element, C: Element>(self) -> f64 {
        let SplitCall { kernel, rule, tensor, squares } = self;
        let n = tensor.len();
        let sums = tensor.low_sums_address();
        let _mode = IeeeMode::enter();
        let split = Split::<R, S, G>::of(rule, tensor);
        // SAFETY: `with_split_types` chose S and G by the tensor's dtypes, and the parameter is bf16, so the addresses
        // point to elements of these types. `Tensor::new_split` checked that every span has n elements, and
        // `with_low_sums` that there is a sum for each tile. `check_states` checked that no state of the rule is missing.
        // The tensor borrows all spans, and exclusively those that are written, for longer than this call.
        unsafe {
            match (sums.is_null(), squares) {
                (true, true) => kernel.run(ChunkLoop::<_, true> { op: split, n }),
                (true, false) => kernel.run(ChunkLoop::<_, false> { op: split, n }),
                (false, true) => kernel.run(ChunkLoop::<_, true> { op: Summed::new(split, sums, n), n }),
                (false, false) => kernel.run(ChunkLoop::<_, false> { op: Summed::new(split, sums, n), n }),
            }
        }
    }
}

/// A step of a split master with sums of its tiles.
pub(super) struct Summed<R, S: Element, G: Element> {
    split: Split<R, S, G>,
    /// One for each tile.
    sums: *mut u64,
    n: usize,
    /// The elements of the present tile that were written.
    written: WordSum,
    /// Those of the next tile, before they are stepped.
    ahead: WordSum,
}

impl<R: Arithmetic, S: Element, G: Element> Summed<R, S, G> {
    /// The sums are one for each tile of the `n` elements.
    pub(super) fn new(split: Split<R, S, G>, sums: *mut u64, n: usize) -> Self {
        Summed { split, sums, n, written: WordSum::EMPTY, ahead: WordSum::EMPTY }
    }

    /// The elements of a tile of `count` elements that whole groups have.
    #[inline(always)]
    fn in_groups<V: Vector>(count: usize) -> usize {
        if V::LANES.is_multiple_of(STRIPE) { count - count % V::LANES } else { 0 }
    }
}

impl<R: Arithmetic, S: Element, G: Element> Op for Summed<R, S, G> {
    #[inline(always)]
    unsafe fn begin_tile<V: Vector>(&mut self, at: usize) {
        let count = TILE.min(self.n - at);
        // The loop over the tile before has summed the groups of this one.
        let summed = if at == 0 { 0 } else { Self::in_groups::<V>(count) };
        // SAFETY: the tile and its sum lie inside the spans.
        unsafe {
            let tile = self.split.spans.before().param.add(at);
            let counts =
                low_bits_count(self.sums.add(at / TILE).read(), self.ahead.finish(tile, summed, count));
            self.split.counts = if counts { u32::from(u16::MAX) } else { 0 };
        }
        (self.written, self.ahead) = (WordSum::EMPTY, WordSum::EMPTY);
    }

    #[inline(always)]
    unsafe fn apply<V: Vector, A: Access>(&mut self, at: usize, access: A) -> V {
        // SAFETY: the caller's contract covers the calls.
        unsafe {
            let grad = self.split.apply::<V, A>(at, access);
            self.sum::<V, A>(at);
            grad
        }
    }

    #[inline(always)]
    unsafe fn end_tile<V: Vector>(&mut self, at: usize, count: usize) {
        // SAFETY: the tile and its sum lie inside the spans.
        unsafe {
            let tile = self.split.spans.before().param.add(at);
            let sum = self.written.finish(tile, Self::in_groups::<V>(count), count);
            self.sums.add(at / TILE).write(sum);
        }
    }
}

impl<R: Arithmetic, S: Element, G: Element> Summed<R, S, G> {
    /// Adds the group at element `at`, which was stepped, and that of the next tile.
    #[inline(always)]
    unsafe fn sum<V: Vector, A: Access>(&mut self, at: usize) {
        if !(A::WHOLE && V::LANES.is_multiple_of(STRIPE)) {
            return;
        }
        // SAFETY: the group is whole. A group of the next tile is added if it lies below n.
        unsafe {
            let place = at % TILE;
            let tile = self.split.spans.before().param.add(at - place);
            self.written.add(tile, place, V::LANES);
            if at + TILE + V::LANES <= self.n {
                self.ahead.add(tile.add(TILE), place, V::LANES);
            }
        }
    }
}

impl<R: Arithmetic, S: Element, G: Element> StepOp for Summed<R, S, G> {
    #[inline(always)]
    unsafe fn advance<V: Vector, A: Access>(&mut self, at: usize, access: A, moments: [V; 2]) -> (V, [V; 2]) {
        // SAFETY: the caller's contract covers the calls.
        unsafe {
            let advanced = self.split.advance(at, access, moments);
            self.sum::<V, A>(at);
            advanced
        }
    }
}

/// A step of a split master.
pub(super) struct Split<R, S: Element, G: Element> {
    rule: R,
    spans: Spans<Bf16, S, G, Absent>,
    low: *mut u16,
    /// The low bits that count: all or none.
    counts: u32,
}

impl<R: Arithmetic, S: Element, G: Element> Split<R, S, G> {
    /// The step of a tensor with a split master. The dtypes of `tensor` must match the static types.
    pub(super) fn of(rule: R, tensor: &mut Tensor<'_>) -> Self {
        let low = tensor.low_address();
        Split { rule, spans: Spans::of(tensor), low, counts: u32::from(u16::MAX) }
    }
}

impl<R: Arithmetic, S: Element, G: Element> Op for Split<R, S, G> {
    #[inline(always)]
    unsafe fn apply<V: Vector, A: Access>(&mut self, at: usize, access: A) -> V {
        // SAFETY: the caller's contract covers every call below.
        unsafe {
            self.spans.prefetch_moments::<V>(at);
            let (spans, zero) = (self.spans.before(), V::splat(0.0));
            let old = [
                if R::EXP_AVG { access.load::<S, V>(spans.exp_avg.add(at)) } else { zero },
                if R::EXP_AVG_SQ { access.load::<S, V>(spans.exp_avg_sq.add(at)) } else { zero },
            ];
            let (grad, [exp_avg, exp_avg_sq]) = self.advance(at, access, old);
            if R::EXP_AVG {
                access.store::<S, V>(exp_avg, spans.exp_avg.add(at));
            }
            if R::EXP_AVG_SQ {
                access.store::<S, V>(exp_avg_sq, spans.exp_avg_sq.add(at));
            }
            grad
        }
    }
}

impl<R: Arithmetic, S: Element, G: Element> StepOp for Split<R, S, G> {
    #[inline(always)]
    unsafe fn advance<V: Vector, A: Access>(&mut self, at: usize, access: A, moments: [V; 2]) -> (V, [V; 2]) {
        // SAFETY: the caller's contract covers every call below.
        unsafe {
            self.spans.prefetch_param::<V>(at);
            V::prefetch(self.low.wrapping_add(at + AHEAD).cast::<u8>());
            let param = self.spans.before().param;
            let high = access.load_bits::<Bf16, V>(param.add(at));
            let low = access.load_bits::<Bf16, V>(self.low.add(at));
            let low = V::bits_and(low, V::bits_splat(self.counts));
            let [exp_avg, exp_avg_sq] = moments;
            let old = ElementState { param: F32::decode(join::<V>(high, low)), exp_avg, exp_avg_sq };
            let grad = access.load::<G, V>(self.spans.grad.add(at)).mul(V::splat(self.rule.grad_scale()));
            let new = self.rule.round::<V>(at, self.rule.forward(old, grad));
            let master = one_nan::<V>(new.param.to_bits());
            access.store_bits::<Bf16, V>(rounded::<V>(master), param.add(at));
            access.store_bits::<Bf16, V>(V::bits_and(master, V::bits_splat(0xffff)), self.low.add(at));
            (grad, [new.exp_avg, new.exp_avg_sq])
        }
    }
}

/// The bits of the master.
#[inline(always)]
unsafe fn join<V: Vector>(high: V::Bits, low: V::Bits) -> V::Bits {
    // SAFETY: the caller upholds the callees' contracts.
    unsafe {
        let sixteen = V::bits_splat(16);
        // 1 unless the parameter is zero, which no master with the highest low bit rounds to.
        let magnitude = V::bits_and(high, V::bits_splat(0x7fff));
        let borrows = V::bits_shr(V::bits_add(magnitude, V::bits_splat(0x7fff)), V::bits_splat(15));
        let borrow = V::bits_and(V::bits_shr(low, V::bits_splat(15)), borrows);
        let upper = V::bits_sub(high, borrow);
        V::bits_or(V::bits_shl(upper, sixteen), low)
    }
}

/// The bits of the bf16 parameter of a master. No carry leaves the word, since a NaN is 0x7fc00000.
#[inline(always)]
unsafe fn rounded<V: Vector>(master: V::Bits) -> V::Bits {
    // SAFETY: the caller upholds the callees' contracts.
    unsafe { V::bits_shr(V::bits_add(master, V::bits_splat(0x8000)), V::bits_splat(16)) }
}

/// The same bits, with 0x7fc00000 for every NaN.
#[inline(always)]
unsafe fn one_nan<V: Vector>(bits: V::Bits) -> V::Bits {
    // SAFETY: the caller upholds the callees' contracts.
    unsafe {
        let magnitude = V::bits_and(bits, V::bits_splat(0x7fff_ffff));
        // The difference is negative for a NaN only: its magnitude is above that of Inf.
        let nan = V::bits_shr(V::bits_sub(V::bits_splat(0x7f80_0000), magnitude), V::bits_splat(31));
        let keep = V::bits_sub(nan, V::bits_splat(1));
        let quiet = V::bits_and(V::bits_splat(0x7fc0_0000), V::bits_sub(V::bits_splat(0), nan));
        V::bits_or(V::bits_and(bits, keep), quiet)
    }
}
