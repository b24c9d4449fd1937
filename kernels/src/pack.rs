//! Encoding of the residuals of one group to bytes, and decoding.
//!
//! ```text
//! group := control (1 byte), body
//!
//! control   body, per lane
//! 0         one byte: param 2 bits, exp_avg_sq 2 bits, exp_avg 4 bits, each with a bias
//! 1         one byte: param 4 bits, exp_avg_sq 4 bits; then, for all lanes, one byte of exp_avg
//! 64 + w    param, then exp_avg, then exp_avg_sq, each as signed integers of its own width; w has two bits per width
//! 128 + w   param as signed integers of width w; the old moments are zeros
//! ```
//!
//! In training, the residuals of param and exp_avg_sq are one or two units. The residual of exp_avg grows with the
//! ratio of gradient to exp_avg. Four of five groups take form 0, and nearly all others form 1. The choice between the
//! two is unpredictable for the processor, so both share one code path with a table of shifts. Only the last two branch.
//!
//! An optimizer's first step needs the last form. Its estimates of moments that were zeros are small numbers, whose bit
//! patterns are far from that of zero.

use super::vector::{Vector, Width};

/// Differences of one group: old bit pattern minus estimated bit pattern. Zero for a state that the rule does not keep.
#[derive(Clone, Copy)]
pub struct Residuals<B> {
    /// Difference of the parameter.
    pub param: B,
    /// Difference of the first moment.
    pub exp_avg: B,
    /// Difference of the second moment.
    pub exp_avg_sq: B,
}

/// A group that was read.
pub struct Group<B> {
    /// The residuals; those of moments that were zeros are zero.
    pub residuals: Residuals<B>,
    /// Mask of the bits of the moments' estimates that count: none if the moments were zeros.
    pub moments: B,
    /// Length of the group in bytes.
    pub bytes: usize,
}

/// Layout of form 0 or form 1.
struct Form {
    /// First bits of exp_avg_sq and exp_avg in the first byte of a lane. The value 32 shifts exp_avg out of the byte.
    exp_avg_sq: u32,
    exp_avg: u32,
    /// Mask of the bits of param, and of exp_avg_sq.
    mask: u32,
    /// First bit of exp_avg in the byte that holds it, and the bias of exp_avg.
    last: u32,
    bias: u32,
}

const FORMS: [Form; 2] = [
    Form { exp_avg_sq: 2, exp_avg: 4, mask: 3, last: 4, bias: BIAS_NARROW },
    Form { exp_avg_sq: 4, exp_avg: 32, mask: 15, last: 0, bias: BIAS_BYTE },
];
/// Bias of param and exp_avg_sq.
const BIAS: u32 = 2;
/// Biases of exp_avg in form 0 (four bits) and form 1 (eight bits).
const BIAS_NARROW: u32 = 8;
const BIAS_BYTE: u32 = 128;
/// Control byte of the third form, before the widths are added.
const WIDE: u8 = 64;
/// Control byte of the form for moments that were zeros, before the width is added.
const ZEROS: u8 = 128;

/// Maximal bytes of a group of `lanes` lanes.
pub const fn most(lanes: usize) -> usize {
    1 + 3 * 4 * lanes
}

/// Writes a group and returns its length in bytes. May write up to one vector past that length. `moments` has the old
/// bit patterns of the moments.
///
/// # Safety
/// Same contract as [`Vector`]; `to` has room for [`most`] bytes and one vector.
#[inline(always)]
pub unsafe fn pack<V: Vector>(residuals: Residuals<V::Bits>, moments: [V::Bits; 2], to: *mut u8) -> usize {
    // SAFETY: the caller's contract covers every call below.
    unsafe {
        let bias = V::bits_splat(BIAS);
        let param = V::bits_add(residuals.param, bias);
        let exp_avg_sq = V::bits_add(residuals.exp_avg_sq, bias);
        let exp_avg = V::bits_add(residuals.exp_avg, V::bits_splat(BIAS_NARROW));
        let byte = V::bits_add(residuals.exp_avg, V::bits_splat(BIAS_BYTE));
        let either = V::bits_or(param, exp_avg_sq);
        if !V::within(either, 15, byte, 255) {
            // Asked here only: most groups of later steps do not pay for the answer.
            return match V::within(moments[0], 0, moments[1], 0) {
                true => pack_zeros::<V>(residuals.param, to),
                false => pack_wide::<V>(residuals, to),
            };
        }
        let code = usize::from(!V::within(either, 3, exp_avg, 15));
        let form = &FORMS[code];
        let first = V::bits_or(param, V::bits_shl(exp_avg_sq, V::bits_splat(form.exp_avg_sq)));
        let first = V::bits_or(first, V::bits_shl(exp_avg, V::bits_splat(form.exp_avg)));
        to.write(code as u8);
        V::store_bytes(first, to.add(1));
        V::store_bytes(byte, to.add(1 + V::LANES));
        1 + V::LANES + V::LANES * code
    }
}

/// Reads a group that [`pack`] wrote. May read up to one vector past its length.
///
/// # Safety
/// Same contract as [`Vector`]; `from` points to a group that the same vector type wrote.
#[inline(always)]
pub unsafe fn unpack<V: Vector>(from: *const u8) -> Group<V::Bits> {
    // SAFETY: the caller's contract covers every call below.
    unsafe {
        let code = usize::from(from.read());
        let Some(form) = FORMS.get(code) else {
            return if code < usize::from(ZEROS) { unpack_wide::<V>(from) } else { unpack_zeros::<V>(from) };
        };
        let first = V::load_bytes(from.add(1));
        let last = V::load_bytes(from.add(1 + V::LANES * code));
        let mask = V::bits_splat(form.mask);
        let exp_avg_sq = V::bits_shr(first, V::bits_splat(form.exp_avg_sq));
        let exp_avg = V::bits_shr(last, V::bits_splat(form.last));
        let bias = V::bits_splat(BIAS);
        let residuals = Residuals {
            param: V::bits_sub(V::bits_and(first, mask), bias),
            exp_avg: V::bits_sub(exp_avg, V::bits_splat(form.bias)),
            exp_avg_sq: V::bits_sub(V::bits_and(exp_avg_sq, mask), bias),
        };
        Group { residuals, moments: V::bits_splat(u32::MAX), bytes: 1 + V::LANES + V::LANES * code }
    }
}

#[inline(always)]
unsafe fn pack_zeros<V: Vector>(param: V::Bits, to: *mut u8) -> usize {
    // SAFETY: the caller upholds the callees' contracts.
    unsafe {
        let width = V::pack(param, to.add(1));
        to.write(ZEROS + width as u8);
        1 + width.bytes(V::LANES)
    }
}

#[inline(always)]
unsafe fn unpack_zeros<V: Vector>(from: *const u8) -> Group<V::Bits> {
    // SAFETY: the caller upholds the callees' contracts.
    unsafe {
        let (width, zero) = (Width::from_code(from.read()), V::bits_splat(0));
        let residuals = Residuals { param: V::unpack(width, from.add(1)), exp_avg: zero, exp_avg_sq: zero };
        Group { residuals, moments: zero, bytes: 1 + width.bytes(V::LANES) }
    }
}

#[inline(always)]
unsafe fn pack_wide<V: Vector>(residuals: Residuals<V::Bits>, to: *mut u8) -> usize {
    let Residuals { param, exp_avg, exp_avg_sq } = residuals;
    let (mut at, mut widths) = (1, 0);
    // SAFETY: the caller upholds the callees' contracts.
    unsafe {
        for (index, bits) in [param, exp_avg, exp_avg_sq].into_iter().enumerate() {
            let width = V::pack(bits, to.add(at));
            at += width.bytes(V::LANES);
            widths |= (width as u8) << (2 * index);
        }
        to.write(WIDE + widths);
    }
    at
}

#[inline(always)]
unsafe fn unpack_wide<V: Vector>(from: *const u8) -> Group<V::Bits> {
    let mut at = 1;
    // SAFETY: the caller upholds the callees' contracts.
    unsafe {
        let widths = from.read();
        let mut next = |index: u8| {
            let width = Width::from_code(widths >> (2 * index));
            let bits = V::unpack(width, from.add(at));
            at += width.bytes(V::LANES);
            bits
        };
        let residuals = Residuals { param: next(0), exp_avg: next(1), exp_avg_sq: next(2) };
        Group { residuals, moments: V::bits_splat(u32::MAX), bytes: at }
    }
}
