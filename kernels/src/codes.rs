//! 8-bit moments: one code of a byte for each element, one bf16 scale for each block of 32 elements.
//!
//! | moment | code | value |
//! |---|---|---|
//! | first | 128 + c, with c from -127 to 127 | `y * abs(y)` with `y = c * (scale / 127)` |
//! | second | c, from 0 to 255 | `y * y` with `y = c * (scale / 255)` |
//!
//! The scale is the square root of the block's largest magnitude, rounded up to bf16. Codes are even in the square root,
//! so that an element whose gradients are 100 times smaller than those of its block still has a value.
//!
//! Invariants:
//! - A second moment that is not zero never gets the code of zero: the step would divide by eps.
//! - A block with Inf, NaN or a negative second moment gets the scale NaN, so that all of its values are NaN.
//! - Each operation is one IEEE operation, so that every kernel gives the same codes.
//!
//! A step decodes a tile into a buffer that stays in the caches, steps it as f32 moments, and encodes the result. So
//! every rule, type combination and instruction set has 8-bit moments, with the bits of a step of the decoded moments.

use super::chunk_loop::CHUNK;
use super::dispatch::Kernel;
use super::float_mode::IeeeMode;
use super::squares::{self, TILE};
use super::stochastic::RandomBits;
use super::tensor::Tensor;
use super::vector::{Body, Vector};
use crate::dtype::{FloatsMut, bf16};
use crate::error::Result;

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

    /// Writes the values of all codes. Panics if `to` or the scales have another length than the codes need.
    pub fn decode(&self, kernel: Kernel, moment: Moment, to: &mut [f32]) {
        self.check(to.len());
        let (codes, scales, n) = (self.codes.as_ptr(), self.scales.as_ptr().cast(), to.len());
        let _mode = IeeeMode::enter();
        let to = to.as_mut_ptr();
        // SAFETY: `check` found one code for each of the n values, and one scale for each block of them.
        unsafe {
            match moment {
                Moment::First => kernel.run(Decode::<true> { codes, scales, to, n }),
                Moment::Second => kernel.run(Decode::<false> { codes, scales, to, n }),
            }
        };
    }

    /// Replaces codes and scales by those of `from`. Rounds to the nearest code, or with `random` up or down at random.
    /// Panics if `from` or the scales have another length than the codes need.
    pub fn encode(&mut self, kernel: Kernel, moment: Moment, from: &[f32], random: Option<RandomBits>) {
        self.check(from.len());
        let (codes, scales) = (self.codes.as_mut_ptr(), self.scales.as_mut_ptr().cast());
        let (from, n) = (from.as_ptr(), from.len());
        let _mode = IeeeMode::enter();
        // SAFETY: as in `decode`.
        unsafe {
            match moment {
                Moment::First => kernel.run(Encode::<true> { from, codes, scales, n, random }),
                Moment::Second => kernel.run(Encode::<false> { from, codes, scales, n, random }),
            }
        };
    }

    fn check(&self, n: usize) {
        assert!(self.codes.len() == n && self.scales.len() == n.div_ceil(BLOCK), "codes of {n} elements");
    }
}

/// Steps one chunk with 8-bit moments: `step` steps each tile of it with f32 moments.
pub fn step(
    kernel: Kernel,
    mut tensor: Tensor<'_>,
    random: Option<RandomBits>,
    mut step: impl FnMut(Tensor<'_>) -> Result<f64>,
) -> Result<f64> {
    if tensor.len() <= SMALL {
        return step_tile::<SMALL>(kernel, tensor, random, &mut step);
    }
    let mut sums = [0.0; CHUNK / TILE];
    let tiles = tensor.len().div_ceil(TILE);
    for sum in &mut sums[..tiles - 1] {
        let (tile, rest) = tensor.split_at(TILE);
        *sum = step_tile::<TILE>(kernel, tile, random, &mut step)?;
        tensor = rest;
    }
    sums[tiles - 1] = step_tile::<TILE>(kernel, tensor, random, &mut step)?;
    Ok(squares::sum(&sums[..tiles]))
}

/// Most elements of a step whose buffer is small: to clear the buffer of a tile takes longer than such a step.
const SMALL: usize = 128;

fn step_tile<const MOST: usize>(
    kernel: Kernel,
    mut tensor: Tensor<'_>,
    random: Option<RandomBits>,
    step: &mut impl FnMut(Tensor<'_>) -> Result<f64>,
) -> Result<f64> {
    let n = tensor.len();
    let random = random.map(|random| random.from(tensor.first()));
    let [mut first, mut second] = tensor.take_codes();
    let mut values = [[0.0; MOST]; 2];
    let [first_values, second_values] = &mut values;
    let moments = [
        (&mut first, Moment::First, &mut first_values[..n]),
        (&mut second, Moment::Second, &mut second_values[..n]),
    ];
    let moments = moments.map(|(codes, moment, values)| {
        codes.as_mut().map(|codes| {
            codes.decode(kernel, moment, values);
            (codes, moment, values)
        })
    });
    let [mut first, mut second] = moments;
    let mut plain = tensor.reborrow();
    plain.states.exp_avg = first.as_mut().map(|(.., values)| FloatsMut::F32(values));
    plain.states.exp_avg_sq = second.as_mut().map(|(.., values)| FloatsMut::F32(values));
    let sum = step(plain)?;
    for (codes, moment, values) in [first, second].into_iter().flatten() {
        codes.encode(kernel, moment, values, random);
    }
    Ok(sum)
}

/// The largest c of a code.
const fn most(first: bool) -> f32 {
    if first { 127.0 } else { 255.0 }
}

/// The code of zero.
const fn zero_code(first: bool) -> u32 {
    if first { 128 } else { 0 }
}

/// 2^23: its sum with an integer below has the integer as its low bits.
const INTEGER: f32 = 8_388_608.0;
/// 1.5 * 2^23: rounds what is added to it to the nearest integer, also below zero.
const ROUND: f32 = 12_582_912.0;

struct Decode<const FIRST: bool> {
    codes: *const u8,
    scales: *const u16,
    to: *mut f32,
    n: usize,
}

impl<const FIRST: bool> Body for Decode<FIRST> {
    #[inline(always)]
    unsafe fn run<V: Vector>(self) -> f64 {
        let Decode { codes, scales, to, n } = self;
        for at in (0..n).step_by(BLOCK) {
            // SAFETY: the block begins below n. A last block of fewer elements is read and written through a buffer.
            unsafe {
                let scale = f32::from_bits(u32::from(scales.add(at / BLOCK).read()) << 16);
                if n - at >= BLOCK {
                    decode_block::<V, FIRST>(scale, codes.add(at), to.add(at));
                    continue;
                }
                let (mut last, mut values) = ([0; BLOCK], [0.0; BLOCK]);
                std::ptr::copy_nonoverlapping(codes.add(at), last.as_mut_ptr(), n - at);
                decode_block::<V, FIRST>(scale, last.as_ptr(), values.as_mut_ptr());
                std::ptr::copy_nonoverlapping(values.as_ptr(), to.add(at), n - at);
            }
        }
        0.0
    }
}

/// # Safety
/// Same contract as [`Vector`]. Both point to [`BLOCK`] elements.
#[inline(always)]
unsafe fn decode_block<V: Vector, const FIRST: bool>(scale: f32, codes: *const u8, to: *mut f32) {
    // SAFETY: the caller upholds the callees' contracts.
    unsafe {
        let unit = V::splat(scale / most(FIRST));
        let zero = V::splat(INTEGER + zero_code(FIRST) as f32);
        for at in (0..BLOCK).step_by(V::LANES) {
            let code = V::bits_or(V::load_bytes(codes.add(at)), V::bits_splat(INTEGER.to_bits()));
            let root = V::from_bits(code).sub(zero).mul(unit);
            let other = if FIRST { magnitude(root) } else { root };
            root.mul(other).store_f32(to.add(at));
        }
    }
}

#[inline(always)]
unsafe fn magnitude<V: Vector>(value: V) -> V {
    // SAFETY: the caller upholds the callees' contracts.
    unsafe { V::from_bits(V::bits_and(value.to_bits(), V::bits_splat(0x7fff_ffff))) }
}

struct Encode<const FIRST: bool> {
    from: *const f32,
    codes: *mut u8,
    scales: *mut u16,
    n: usize,
    random: Option<RandomBits>,
}

impl<const FIRST: bool> Body for Encode<FIRST> {
    #[inline(always)]
    unsafe fn run<V: Vector>(self) -> f64 {
        let Encode { from, codes, scales, n, random } = self;
        for at in (0..n).step_by(BLOCK) {
            // SAFETY: the block begins below n. A last block of fewer elements is read and written through a buffer.
            unsafe {
                let random = random.as_ref().map(|random| (random, at));
                let scale = if n - at >= BLOCK {
                    encode_block::<V, FIRST>(from.add(at), codes.add(at), random)
                } else {
                    let (mut last, mut values) = ([0; BLOCK], [0.0; BLOCK]);
                    std::ptr::copy_nonoverlapping(from.add(at), values.as_mut_ptr(), n - at);
                    let scale = encode_block::<V, FIRST>(values.as_ptr(), last.as_mut_ptr(), random);
                    std::ptr::copy_nonoverlapping(last.as_ptr(), codes.add(at), n - at);
                    scale
                };
                scales.add(at / BLOCK).write(scale);
            }
        }
        0.0
    }
}

/// Encodes a block, and returns the bits of its scale. `random` has the place of the block too.
///
/// # Safety
/// Same contract as [`Vector`]. Both point to [`BLOCK`] elements.
#[inline(always)]
unsafe fn encode_block<V: Vector, const FIRST: bool>(
    from: *const f32,
    codes: *mut u8,
    random: Option<(&RandomBits, usize)>,
) -> u16 {
    // SAFETY: the caller upholds the callees' contracts. Each group of V::LANES elements has a place in `groups`.
    unsafe {
        let zero = V::splat(0.0);
        let mut groups = [(zero, zero); BLOCK];
        let mut largest = V::bits_splat(0);
        for at in (0..BLOCK).step_by(V::LANES) {
            let value = V::load_f32(from.add(at));
            let root = root_of::<V, FIRST>(value);
            largest = V::bits_max(largest, root.to_bits());
            groups[at / V::LANES] = (value, root);
        }
        let Some((scale, factor)) = scale_of::<FIRST>(V::largest(largest)) else {
            std::ptr::write_bytes(codes, zero_code(FIRST) as u8, BLOCK);
            return NAN_SCALE;
        };
        let factor = V::splat(factor);
        for at in (0..BLOCK).step_by(V::LANES) {
            let (value, root) = groups[at / V::LANES];
            let c = match random {
                None => root.mul(factor),
                Some((random, block)) => {
                    root.mul_add(factor, dither::<V, FIRST>(random.bits::<V>(block + at)))
                }
            };
            V::store_bytes(code_of::<V, FIRST>(value, c), codes.add(at));
        }
        scale
    }
}

/// The square root of the magnitude, without a sign also for a NaN; NaN for a negative second moment.
#[inline(always)]
unsafe fn root_of<V: Vector, const FIRST: bool>(value: V) -> V {
    // SAFETY: the caller upholds the callees' contracts.
    unsafe { if FIRST { magnitude(magnitude(value).sqrt()) } else { magnitude(value.sqrt()) } }
}

/// The scale of a block with Inf or NaN.
const NAN_SCALE: u16 = 0x7fc0;

/// The bits of a block's scale and the factor of its roots, from the bits of the largest root; `None` for Inf and NaN. A
/// root up to 16 units above a scale counts as that scale: rounding made it from the largest code.
#[inline(always)]
fn scale_of<const FIRST: bool>(largest: u32) -> Option<(u16, f32)> {
    const INFINITE: u32 = 0x7f80_0000;
    match largest {
        0 => Some((0, 0.0)),
        INFINITE.. => None,
        finite => {
            let scale = (finite - 16 + 0xffff) >> 16;
            Some((scale as u16, most(FIRST) / f32::from_bits(scale << 16)))
        }
    }
}

/// A random number between -1/2 and 1/2. Each moment has its own of the random bits.
#[inline(always)]
unsafe fn dither<V: Vector, const FIRST: bool>(random: V::Bits) -> V {
    // SAFETY: the caller upholds the callees' contracts.
    unsafe {
        let shifted = V::bits_shr(random, V::bits_splat(if FIRST { 8 } else { 24 }));
        let byte = V::bits_and(shifted, V::bits_splat(0xff));
        let number = V::from_bits(V::bits_or(byte, V::bits_splat(INTEGER.to_bits()))).sub(V::splat(INTEGER));
        // Odd multiples of 1/512, so that the mean is zero.
        number.mul_add(V::splat(1.0 / 256.0), V::splat(-255.0 / 512.0))
    }
}

/// The code of `value`, whose root in units of codes is `c` before rounding.
#[inline(always)]
unsafe fn code_of<V: Vector, const FIRST: bool>(value: V, c: V) -> V::Bits {
    // SAFETY: the caller upholds the callees' contracts.
    unsafe {
        let c = V::bits_sub(c.add(V::splat(ROUND)).to_bits(), V::bits_splat(ROUND.to_bits()));
        let highest = |bits| V::bits_shr(bits, V::bits_splat(31));
        if FIRST {
            let sign = highest(value.to_bits());
            let negated = V::bits_add(V::bits_xor(c, V::bits_sub(V::bits_splat(0), sign)), sign);
            return V::bits_add(negated, V::bits_splat(zero_code(FIRST)));
        }
        let is_zero = highest(V::bits_sub(c, V::bits_splat(1)));
        let has_value = highest(V::bits_sub(V::bits_splat(0), magnitude(value).to_bits()));
        V::bits_add(c, V::bits_and(is_zero, has_value))
    }
}
