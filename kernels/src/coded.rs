//! 8-bit moments in memory. `codes` has their meaning.
#![forbid(unsafe_code)]

use crate::dtype::bf16;

/// Elements of a block, which have one scale.
pub const BLOCK: usize = 32;

/// An 8-bit moment: codes, and a scale for each block of them.
#[derive(Debug)]
pub struct Codes<'a> {
    /// One for each element.
    pub codes: &'a mut [u8],
    /// One for each block; the last block may have fewer elements.
    pub scales: &'a mut [bf16],
}

/// exp_avg and exp_avg_sq of a tensor, as far as they are there.
pub type Moments<'a> = [Option<Codes<'a>>; 2];

/// Which of the two moments codes stand for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Moment {
    /// exp_avg, which has a sign.
    First,
    /// exp_avg_sq, which has none.
    Second,
}

impl<'a> Codes<'a> {
    /// The first `mid` elements and the rest. `mid` is a multiple of [`BLOCK`].
    pub(super) fn split_at(self, mid: usize) -> (Codes<'a>, Codes<'a>) {
        let (codes, codes_rest) = self.codes.split_at_mut(mid);
        let (scales, scales_rest) = self.scales.split_at_mut(mid / BLOCK);
        (Codes { codes, scales }, Codes { codes: codes_rest, scales: scales_rest })
    }

    /// The same codes with a shorter lifetime.
    pub(super) fn reborrow(&mut self) -> Codes<'_> {
        Codes { codes: self.codes, scales: self.scales }
    }
}
