//! The state of a subgroup in host memory. A moment is numbers, or 8-bit codes with their scales.
//!
//! Invariant: blocks of codes count from the subgroup's first element, and a part of a moment begins with a block.
#![forbid(unsafe_code)]

use crate::dtype::{FloatsMut, as_bf16};
use crate::error::Result;
use crate::kernel::{BLOCK, CHUNK, Codes, Moment};
use crate::optim;
use crate::sys::span::{self, Span};

use super::encoding::{self, Moments};

/// The state of one subgroup in host memory.
#[derive(Debug)]
pub struct SubgroupState<'a> {
    /// Master weights; empty if the caller has the parameters, and the state their low bits.
    pub param: &'a mut [f32],
    /// The low bits of the caller's parameters; else empty.
    pub low: &'a mut [u16],
    /// First moment.
    pub exp_avg: MomentMut<'a>,
    /// Second moment.
    pub exp_avg_sq: MomentMut<'a>,
}

impl SubgroupState<'_> {
    /// Stores f32 numbers, given as their bytes, in param or in the low bits.
    pub fn store_param(&mut self, from: &[u8]) {
        encoding::store(from, FloatsMut::F32(self.param));
        encoding::store_low(from, self.low);
    }
}

/// A moment of a subgroup.
#[derive(Debug)]
pub enum MomentMut<'a> {
    /// As numbers.
    Floats(FloatsMut<'a>),
    /// As codes.
    Codes(Moment, Codes<'a>),
}

impl<'a> MomentMut<'a> {
    /// The moment of `elements` elements at the start of `memory`.
    pub(super) fn within(memory: &'a mut [f32], which: Moment, moments: Moments, elements: usize) -> Self {
        let floats = |all: FloatsMut<'a>| MomentMut::Floats(all.split_at_mut(elements).0);
        match moments {
            Moments::F32 => floats(FloatsMut::F32(memory)),
            Moments::Bf16 => floats(FloatsMut::Bf16(as_bf16(memory))),
            Moments::Codes => MomentMut::Codes(which, Codes::within(memory, elements)),
        }
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        match self {
            MomentMut::Floats(floats) => floats.len(),
            MomentMut::Codes(_, codes) => codes.codes.len(),
        }
    }

    /// True without elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The same moment, for less time.
    pub fn reborrow(&mut self) -> MomentMut<'_> {
        match self {
            MomentMut::Floats(floats) => MomentMut::Floats(floats.reborrow()),
            MomentMut::Codes(which, codes) => {
                let Codes { codes, scales } = codes;
                MomentMut::Codes(*which, Codes { codes, scales })
            }
        }
    }

    /// Makes all elements zero.
    pub fn clear(self) {
        match self {
            MomentMut::Floats(FloatsMut::F32(floats)) => floats.fill(0.0),
            MomentMut::Floats(FloatsMut::Bf16(floats)) => floats.fill(Default::default()),
            MomentMut::Floats(FloatsMut::F16(floats)) => floats.fill(Default::default()),
            MomentMut::Codes(_, Codes { codes, scales }) => {
                codes.fill(0);
                scales.fill(Default::default());
            }
        }
    }

    /// Stores f32 numbers, given as their bytes. Fewer bits are rounded to nearest.
    pub fn store(self, from: &[u8]) -> Result<()> {
        match self {
            MomentMut::Floats(floats) => encoding::store(from, floats),
            MomentMut::Codes(which, Codes { codes, scales }) => {
                let parts = codes.chunks_mut(CHUNK).zip(scales.chunks_mut(CHUNK / BLOCK));
                let mut numbers = Vec::new();
                for ((codes, scales), from) in parts.zip(from.chunks(4 * CHUNK)) {
                    numbers.clear();
                    numbers.extend(from.as_chunks().0.iter().map(|bytes| f32::from_ne_bytes(*bytes)));
                    optim::codes::encode(which, &numbers, Codes { codes, scales })?;
                }
            }
        }
        Ok(())
    }

    /// Copies the values to `to`, as f32.
    pub(super) fn load(self, to: Span) -> Result<()> {
        match self {
            MomentMut::Floats(floats) => encoding::load(floats.shared(), to),
            MomentMut::Codes(which, Codes { codes, scales }) => {
                let mut numbers = vec![0.0; codes.len().min(CHUNK)];
                let parts = codes.chunks_mut(CHUNK).zip(scales.chunks_mut(CHUNK / BLOCK));
                for (number, (codes, scales)) in parts.enumerate() {
                    let numbers = &mut numbers[..codes.len()];
                    optim::codes::decode(which, Codes { codes, scales }, numbers)?;
                    to.part(4 * CHUNK * number, 4 * numbers.len()).write(span::bytes_of(numbers));
                }
            }
        }
        Ok(())
    }
}

/// The elements of a moment that no part has yet.
#[derive(Debug)]
pub struct Rest<'a> {
    moment: MomentMut<'a>,
    /// Elements of its first block that parts have: their scale is that of the part.
    used: usize,
}

impl<'a> Rest<'a> {
    /// All of them.
    pub fn of(moment: MomentMut<'a>) -> Rest<'a> {
        Rest { moment, used: 0 }
    }

    /// The `elements` elements behind the next `skipped` ones, and those behind. Codes begin with a block.
    pub fn part(self, skipped: usize, elements: usize) -> (MomentMut<'a>, Rest<'a>) {
        let Rest { moment, used } = self;
        match moment {
            MomentMut::Floats(floats) => {
                let (part, rest) = floats.split_at_mut(skipped).1.split_at_mut(elements);
                (MomentMut::Floats(part), Rest::of(MomentMut::Floats(rest)))
            }
            MomentMut::Codes(which, Codes { codes, scales }) => {
                let blocks = (used + skipped) / BLOCK - usize::from(used > 0);
                let (codes, rest) = codes[skipped..].split_at_mut(elements);
                let (scales, rest_scales) = scales[blocks..].split_at_mut(elements.div_ceil(BLOCK));
                let rest = MomentMut::Codes(which, Codes { codes: rest, scales: rest_scales });
                let part = MomentMut::Codes(which, Codes { codes, scales });
                (part, Rest { moment: rest, used: elements % BLOCK })
            }
        }
    }
}
