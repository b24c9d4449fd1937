//! 8-bit moments: one code of a byte for each element, one bf16 scale for each block of 32 elements.
//!
//! A code is a small float with an offset. With the value `x` of an element in units of its block's scale, from 0 to 0.965,
//! a code k is the number of steps of 1/16 octave from `d` to `x + d`: `k = (bits(x + d) - bits(d)) >> 19`.
//!
//! | moment | byte | codes k | d |
//! |---|---|---|---|
//! | first | sign, and 7 bits of k | 0 to 127 | 2^-8 |
//! | second | k | 0 to 255 | 2^-16 |
//!
//! Codes are even near zero and proportional above `d`: a value is off by 1/32 of itself at most, so that also an element
//! keeps its moments whose gradients are 100 times smaller than others of its block. Zero bytes are zeros.
//! There is no root and no division.
//!
//! Invariants:
//! - The scale is rounded up to bf16 from the number of which the block's largest magnitude would be the largest code. So
//!   encoding what codes stand for keeps scale and codes where an element has the largest code, and no scale grows by itself.
//! - The steps of an octave are equal, and d begins an octave: random bits below a step round without bias.
//! - A second moment that is not zero never gets the code of zero: the step would divide by eps.
//! - A block with NaN or a negative second moment gets the scale NaN, so that all of its values are NaN. A magnitude above
//!   0.96 * 2^126, also Inf, counts as that.
//! - Each operation is one IEEE operation, so that every kernel gives the same codes.
//!
//! `coded_step` steps them.

use super::coded::{BLOCK, Codes, Moment};
use super::dispatch::Kernel;
use super::float_mode::IeeeMode;
use super::vector::{Body, Vector};

/// Elements that are encoded at once: the values of two moments and the random numbers of a strip stay in the nearest cache.
pub(super) const STRIP: usize = 2048;

impl Codes<'_> {
    /// Writes the values of all codes. Panics if `to` or the scales have another length than the codes need.
    pub fn decode(&self, kernel: Kernel, moment: Moment, to: &mut [f32]) {
        let n = to.len();
        self.check(n);
        let (codes, scales) = (self.codes.as_ptr(), self.scales.as_ptr().cast());
        let to = to.as_mut_ptr();
        let _mode = IeeeMode::enter();
        // SAFETY: `check` found one code for each of the n values, and one scale for each block of them.
        unsafe {
            match moment {
                Moment::First => kernel.run(Decode::<true> { codes, scales, to, n }),
                Moment::Second => kernel.run(Decode::<false> { codes, scales, to, n }),
            }
        };
    }

    /// Replaces codes and scales by those of `from`. Rounds to the nearest code, or with `random`, a number for each element,
    /// up or down at random, so that the mean is the value. Panics if `from`, `random` or the scales have another length than
    /// the codes need.
    pub fn encode(&mut self, kernel: Kernel, moment: Moment, from: &[f32], random: Option<&[u32]>) {
        self.check(from.len());
        assert!(random.is_none_or(|random| random.len() == from.len()), "a number for each element");
        let random = random.map(<[u32]>::as_ptr);
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

/// Bits of a float below a step of 1/16 octave.
const STEP: u32 = 19;
/// The random bits that are added before a code is cut off. The lowest are left out: with them, a value that rounding has put
/// above the largest code by some units would get the code after that.
const RANDOM: u32 = 0x7ffe0;

/// The offset d.
const fn offset(first: bool) -> f32 {
    if first { 1.0 / 256.0 } else { 1.0 / 65_536.0 }
}

/// The value of the largest code in units of the scale: the sum with d is one step below 1.
const fn top(first: bool) -> f32 {
    0.968_75 - offset(first)
}

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
                let scale = scale_at(scales, at);
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
        for at in (0..BLOCK).step_by(V::LANES) {
            value_of::<V, FIRST>(V::load_bytes(codes.add(at)), scale).store_f32(to.add(at));
        }
    }
}

/// The scale of element `at`.
///
/// # Safety
/// There is one for each block of elements.
#[inline(always)]
pub(super) unsafe fn scale_at(scales: *const u16, at: usize) -> f32 {
    // SAFETY: the caller's promise.
    f32::from_bits(u32::from(unsafe { scales.add(at / BLOCK).read() }) << 16)
}

/// The values of codes that have one scale.
///
/// # Safety
/// Same contract as [`Vector`].
#[inline(always)]
pub(super) unsafe fn value_of<V: Vector, const FIRST: bool>(byte: V::Bits, scale: f32) -> V {
    // SAFETY: the caller upholds the callees' contracts.
    unsafe {
        let offset = offset(FIRST);
        let (less, scale) = (V::splat(-offset * scale), V::splat(scale));
        let code = if FIRST { V::bits_and(byte, V::bits_splat(0x7f)) } else { byte };
        let moved = V::bits_add(V::bits_shl(code, V::bits_splat(STEP)), V::bits_splat(offset.to_bits()));
        // (moved - d) * scale with one rounding: d is a power of two, so its product with the scale is exact.
        let value = V::from_bits(moved).mul_add(scale, less);
        if !FIRST {
            return value;
        }
        let sign = V::bits_and(V::bits_shl(byte, V::bits_splat(24)), V::bits_splat(1 << 31));
        V::from_bits(V::bits_or(value.to_bits(), sign))
    }
}

#[inline(always)]
unsafe fn magnitude<V: Vector>(bits: V::Bits) -> V::Bits {
    // SAFETY: the caller upholds the callee's contract.
    unsafe { V::bits_and(bits, V::bits_splat(0x7fff_ffff)) }
}

/// Encodes `n` values, with a random number for each one or none.
pub(super) struct Encode<const FIRST: bool> {
    pub(super) from: *const f32,
    pub(super) codes: *mut u8,
    pub(super) scales: *mut u16,
    pub(super) n: usize,
    pub(super) random: Option<*const u32>,
}

impl<const FIRST: bool> Body for Encode<FIRST> {
    #[inline(always)]
    unsafe fn run<V: Vector>(self) -> f64 {
        let Encode { from, codes, scales, n, random } = self;
        for strip in (0..n).step_by(STRIP) {
            let count = STRIP.min(n - strip);
            // SAFETY: the strip lies below n, and begins with a block.
            unsafe {
                let random = random.map(|random| random.add(strip));
                let (from, codes, scales) = (from.add(strip), codes.add(strip), scales.add(strip / BLOCK));
                encode_strip::<V, FIRST>(from, codes, scales, count, random);
            }
        }
        0.0
    }
}

/// Encodes a strip of `n` elements in three passes: with one pass, each block would wait for the two divisions of its scale.
///
/// # Safety
/// Same contract as [`Vector`]. There are `n` elements, codes and random numbers, at most [`STRIP`], and scales of their blocks.
#[inline(always)]
unsafe fn encode_strip<V: Vector, const FIRST: bool>(
    from: *const f32,
    codes: *mut u8,
    scales: *mut u16,
    n: usize,
    random: Option<*const u32>,
) {
    let (mut scale, mut factor) = ([0; STRIP / BLOCK], [0.0; STRIP / BLOCK]);
    let (whole, rest) = (n / BLOCK, n % BLOCK);
    // SAFETY: each block lies below n. A last block of fewer elements is read and written through a buffer.
    unsafe {
        let (mut last, mut last_codes) = ([0.0; BLOCK], [0; BLOCK]);
        std::ptr::copy_nonoverlapping(from.add(whole * BLOCK), last.as_mut_ptr(), rest);
        for (block, largest) in scale[..whole].iter_mut().enumerate() {
            *largest = largest_of::<V, FIRST>(from.add(block * BLOCK));
        }
        if rest > 0 {
            scale[whole] = largest_of::<V, FIRST>(last.as_ptr());
        }
        for (scale, factor) in scale.iter_mut().zip(&mut factor) {
            (*scale, *factor) = scale_of::<FIRST>(*scale);
        }
        for (block, scale) in scale[..n.div_ceil(BLOCK)].iter().enumerate() {
            scales.add(block).write((scale >> 16) as u16);
        }
        for block in 0..whole {
            let at = block * BLOCK;
            let random = random.map(|random| random.add(at));
            encode_block::<V, FIRST>(from.add(at), codes.add(at), (scale[block], factor[block]), random);
        }
        if rest > 0 {
            let mut numbers = [0; BLOCK];
            let random = random.map(|random| {
                std::ptr::copy_nonoverlapping(random.add(whole * BLOCK), numbers.as_mut_ptr(), rest);
                numbers.as_ptr()
            });
            let scale = (scale[whole], factor[whole]);
            encode_block::<V, FIRST>(last.as_ptr(), last_codes.as_mut_ptr(), scale, random);
            std::ptr::copy_nonoverlapping(last_codes.as_ptr(), codes.add(whole * BLOCK), rest);
        }
    }
}

/// The bits of the largest magnitude of a block. A negative second moment counts as more than any finite one.
///
/// # Safety
/// Same contract as [`Vector`]. There are [`BLOCK`] elements.
#[inline(always)]
unsafe fn largest_of<V: Vector, const FIRST: bool>(from: *const f32) -> u32 {
    // SAFETY: the caller upholds the callees' contracts.
    unsafe {
        let mut largest = V::bits_splat(0);
        for at in (0..BLOCK).step_by(V::LANES) {
            let value = V::load_f32(from.add(at));
            // The sum with zero makes zero of minus zero.
            let bits =
                if FIRST { magnitude::<V>(value.to_bits()) } else { value.add(V::splat(0.0)).to_bits() };
            largest = V::bits_max(largest, bits);
        }
        V::largest(largest)
    }
}

/// The bits of the scale of a block with a NaN or a negative second moment.
const NAN_SCALE: u32 = 0x7fc0_0000;
/// Those of the largest scale, 2^126: the inverse of a larger one would be denormal.
const LARGEST_SCALE: u32 = 0x7e80_0000;

/// The largest magnitude that a code has. Larger ones, also Inf, count as this one.
fn limit(first: bool) -> f32 {
    f32::from_bits(LARGEST_SCALE) * top(first)
}

/// The bits of a block's scale and its inverse, from the bits of the largest magnitude. A number up to 16 units above a
/// scale counts as that scale: rounding made it from the largest code. Without branches, so that the compiler makes vectors
/// of it.
#[inline(always)]
fn scale_of<const FIRST: bool>(largest: u32) -> (u32, f32) {
    const SMALLEST: u32 = 0x0080_0000;
    const INFINITE: u32 = 0x7f80_0000;
    let finite = largest.min(limit(FIRST).to_bits());
    let whole = (f32::from_bits(finite) / top(FIRST)).to_bits().max(SMALLEST);
    let scale = ((whole - 16 + 0xffff) & 0xffff_0000).min(LARGEST_SCALE);
    let factor = 1.0 / f32::from_bits(scale);
    let none = largest == 0;
    let known = if largest > INFINITE { NAN_SCALE } else { scale };
    (if none { 0 } else { known }, if none { 0.0 } else { factor })
}

/// A block whose magnitudes are at most the limit.
#[cold]
fn limited(first: bool, block: &[f32; BLOCK]) -> [f32; BLOCK] {
    block.map(|value| value.clamp(-limit(first), limit(first)))
}

/// Encodes a block with its scale's bits and inverse.
///
/// # Safety
/// Same contract as [`Vector`]. All point to [`BLOCK`] elements.
#[inline(always)]
unsafe fn encode_block<V: Vector, const FIRST: bool>(
    mut from: *const f32,
    codes: *mut u8,
    (scale, factor): (u32, f32),
    random: Option<*const u32>,
) {
    let block;
    // SAFETY: the caller upholds the callees' contracts.
    unsafe {
        match scale {
            NAN_SCALE => return std::ptr::write_bytes(codes, 0, BLOCK),
            LARGEST_SCALE => {
                block = limited(FIRST, &from.cast::<[f32; BLOCK]>().read_unaligned());
                from = block.as_ptr();
            }
            _ => {}
        }
        let factor = V::splat(factor);
        for at in (0..BLOCK).step_by(V::LANES) {
            let moved = match random {
                None => V::bits_splat(1 << (STEP - 1)),
                Some(random) => {
                    let bits = V::load_bits32(random.add(at));
                    // Each moment has random bits of its own.
                    let bits = if FIRST {
                        V::bits_shl(bits, V::bits_splat(5))
                    } else {
                        V::bits_shr(bits, V::bits_splat(13))
                    };
                    V::bits_and(bits, V::bits_splat(RANDOM))
                }
            };
            let bits = V::load_bits32(from.add(at).cast());
            V::store_bytes(code_of::<V, FIRST>(bits, factor, moved), codes.add(at));
        }
    }
}

/// The code of the value with these bits. `moved` is what is added below a step before the code is cut off.
#[inline(always)]
unsafe fn code_of<V: Vector, const FIRST: bool>(bits: V::Bits, factor: V, moved: V::Bits) -> V::Bits {
    // SAFETY: the caller upholds the callees' contracts.
    unsafe {
        let size = magnitude::<V>(bits);
        let offset = offset(FIRST);
        let sum = V::from_bits(size).mul_add(factor, V::splat(offset)).to_bits();
        let steps = V::bits_add(V::bits_sub(sum, V::bits_splat(offset.to_bits())), moved);
        let code = V::bits_shr(steps, V::bits_splat(STEP));
        if FIRST {
            let sign = V::bits_and(V::bits_shr(bits, V::bits_splat(24)), V::bits_splat(0x80));
            return V::bits_or(code, sign);
        }
        // At least 1, unless the value is zero.
        V::bits_max(code, V::bits_min(size, V::bits_splat(1)))
    }
}
