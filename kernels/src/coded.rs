//! 8-bit moments in memory. `codes` has their meaning.
#![forbid(unsafe_code)]

use crate::dtype::{bf16, codes_in};

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

/// Bytes of codes and scales that lie one behind the other (see [`Codes::within`]); `None` past 2^64.
pub const fn bytes_together(elements: u64) -> Option<u64> {
    let scales = 2 * elements.div_ceil(BLOCK as u64);
    match elements.checked_next_multiple_of(2) {
        Some(codes) => codes.checked_add(scales),
        None => None,
    }
}

impl<'a> Codes<'a> {
    /// The codes of `elements` elements at the start of `memory`, and from the next even byte on their scales. Panics if
    /// `memory` is smaller than that.
    pub fn within(memory: &'a mut [f32], elements: usize) -> Codes<'a> {
        let (codes, scales) = codes_in(memory, elements.next_multiple_of(2), elements.div_ceil(BLOCK));
        Codes { codes: &mut codes[..elements], scales }
    }

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
