//! Sums that tell whether other code has written to the bf16 parameter of a split master.
//!
//! A step stores the sum of each tile that it has written. The next step compares the tile with it, and low bits of
//! another tile count as zero: they belong to a master that the parameter no longer has.
//!
//! A sum has one term for each stripe: a 128-bit product of its two 64-bit words and its place, folded. So an exchange of
//! stripes changes it too, and stripes may be added in any order. A change keeps a sum by a chance of about 1 in 2^64. Sums
//! depend on the elements alone, never on the kernel. They stay in memory, so their definition may change.

use super::squares::TILE;
use crate::dtype::bf16;

/// Elements of a stripe.
pub(super) const STRIPE: usize = 8;
/// The kept sum of a tile that was not stepped yet: its low bits count.
const UNKNOWN: u64 = 0;
/// Numbers without a pattern.
const KEYS: [u64; 3] = [0x9e37_79b9_7f4a_7c15, 0xc2b2_ae3d_27d4_eb4f, 0x9fb2_1c65_1e98_df25];

/// The sum of some elements of a tile.
#[derive(Debug, Clone, Copy)]
pub(super) struct WordSum(u64);

impl WordSum {
    /// The sum of no elements.
    pub(super) const EMPTY: WordSum = WordSum(0);

    /// Adds the `count` elements from element `at` of a tile on: whole stripes.
    ///
    /// # Safety
    /// `tile` points to `at + count` elements. Both are multiples of [`STRIPE`].
    #[inline(always)]
    pub(super) unsafe fn add(&mut self, tile: *const u16, at: usize, count: usize) {
        for at in (at..at + count).step_by(STRIPE) {
            // SAFETY: the stripe lies below at + count.
            self.add_stripe(unsafe { tile.add(at).cast::<[u64; 2]>().read_unaligned() }, at);
        }
    }

    #[inline(always)]
    fn add_stripe(&mut self, [first, second]: [u64; 2], at: usize) {
        let place = KEYS[0].wrapping_add((at as u64).wrapping_mul(KEYS[1]));
        let product = u128::from(first ^ place) * u128::from(second ^ KEYS[2]);
        self.0 = self.0.wrapping_add(product as u64 ^ (product >> 64) as u64);
    }

    /// The sum of a tile of `count` elements, after the elements from element `at` on.
    ///
    /// # Safety
    /// `tile` points to `count` elements. `at` is a multiple of [`STRIPE`], at most `count`.
    #[inline(always)]
    pub(super) unsafe fn finish(mut self, tile: *const u16, at: usize, count: usize) -> u64 {
        let whole = count - count % STRIPE;
        // SAFETY: both parts lie below count, and the rest is shorter than a stripe.
        unsafe {
            self.add(tile, at, whole - at);
            if whole < count {
                let mut last = [0u64; 2];
                let bytes = size_of::<u16>() * (count - whole);
                std::ptr::copy_nonoverlapping(tile.add(whole).cast::<u8>(), last.as_mut_ptr().cast(), bytes);
                self.add_stripe(last, whole);
            }
        }
        self.0.max(UNKNOWN + 1)
    }
}

/// True if the low bits of a tile count: the tile has the sum that was kept, or none was kept.
#[inline(always)]
pub(super) fn low_bits_count(kept: u64, now: u64) -> bool {
    kept == UNKNOWN || kept == now
}

/// Does what the step of a split master with sums would do first: sets the low bits of each tile to zero that other code
/// has written, and stores the sums of the present elements. Panics if `low` and `sums` do not fit `param`.
pub fn settle_low_bits(param: &[bf16], low: &mut [u16], sums: &mut [u64]) {
    assert!(low.len() == param.len() && sums.len() == param.len().div_ceil(TILE));
    for ((param, low), sum) in param.chunks(TILE).zip(low.chunks_mut(TILE)).zip(sums) {
        // SAFETY: the tile has this many elements, each a word of 16 bits.
        let now = unsafe { WordSum::EMPTY.finish(param.as_ptr().cast(), 0, param.len()) };
        if !low_bits_count(*sum, now) {
            low.fill(0);
        }
        *sum = now;
    }
}
