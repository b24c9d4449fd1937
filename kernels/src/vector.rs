//! The vector operations that the kernel bodies use.
//!
//! One file per instruction set implements [`Vector`] with thin wrappers. The kernel bodies are generic over
//! [`Vector`].

/// A group of f32 lanes: 1 lane in `scalar`, 8 in AVX2, 16 in AVX-512 and NEON.
///
/// # Safety
/// Every method may execute instructions of its instruction set. A call is sound only inside `Isa::vectorize` of the
/// same set, on a processor that has the set. Pointers must be valid for `LANES` elements.
#[allow(clippy::missing_safety_doc, reason = "stated once, for all functions")]
pub unsafe trait Vector: Copy {
    /// Number of f32 in the group.
    const LANES: usize;
    /// A group of `LANES` 32-bit patterns.
    type Bits: Copy;

    /// The same value in every lane.
    unsafe fn splat(value: f32) -> Self;
    /// Unaligned load.
    unsafe fn load_f32(from: *const f32) -> Self;
    /// Unaligned store.
    unsafe fn store_f32(self, to: *mut f32);
    /// Widens binary16, exactly.
    unsafe fn load_f16(from: *const u16) -> Self;
    /// Rounds to nearest even; NaN becomes 0x7e00.
    unsafe fn store_f16(self, to: *mut u16);
    /// Widens bfloat16, exactly.
    unsafe fn load_bf16(from: *const u16) -> Self;
    /// Rounds to nearest even, denormals included; NaN becomes 0x7fc0.
    unsafe fn store_bf16(self, to: *mut u16);

    /// `self + other`.
    unsafe fn add(self, other: Self) -> Self;
    /// `self - other`.
    unsafe fn sub(self, other: Self) -> Self;
    /// `self * other`.
    unsafe fn mul(self, other: Self) -> Self;
    /// `self / other`, IEEE.
    unsafe fn div(self, other: Self) -> Self;
    /// Square root, IEEE.
    unsafe fn sqrt(self) -> Self;
    /// `self * factor + addend` with one rounding.
    unsafe fn mul_add(self, factor: Self, addend: Self) -> Self;
    /// `magnitude` with the sign of `self`; zero and NaN lanes keep `self`.
    unsafe fn signum_times(self, magnitude: Self) -> Self;
    /// `lanes[i] = fma(self[i], self[i], lanes[i])` in f64.
    unsafe fn add_squares(self, lanes: *mut f64);

    /// The bit patterns of the lanes.
    unsafe fn to_bits(self) -> Self::Bits;
    /// The lanes with these bit patterns.
    unsafe fn from_bits(bits: Self::Bits) -> Self;
    /// Zero in the lanes that are NaN.
    unsafe fn nan_to_zero(self) -> Self;
    /// Rounds as `store_f16` does, to patterns below 2^16.
    unsafe fn round_f16(self) -> Self::Bits;
    /// Rounds as `store_bf16` does, to patterns below 2^16.
    unsafe fn round_bf16(self) -> Self::Bits;
    /// Widens binary16 patterns below 2^16.
    unsafe fn widen_f16(bits: Self::Bits) -> Self;
    /// Widens bfloat16 patterns below 2^16.
    unsafe fn widen_bf16(bits: Self::Bits) -> Self;
    /// Unaligned load of 32-bit patterns.
    unsafe fn load_bits32(from: *const u32) -> Self::Bits;
    /// Unaligned load of 16-bit patterns, zero-extended.
    unsafe fn load_bits16(from: *const u16) -> Self::Bits;
    /// Unaligned store of 32-bit patterns.
    unsafe fn store_bits32(bits: Self::Bits, to: *mut u32);
    /// Unaligned store of the lower 16 bits of each pattern.
    unsafe fn store_bits16(bits: Self::Bits, to: *mut u16);
    /// `store_bits32` with non-temporal stores where the set has them, so that the cache lines are not read first.
    /// `to` must be aligned to the stored size. Other threads may read the bytes after [`Vector::fence`].
    #[inline(always)]
    unsafe fn stream_bits32(bits: Self::Bits, to: *mut u32) {
        // SAFETY: the caller upholds the callee's contract.
        unsafe { Self::store_bits32(bits, to) }
    }
    /// `store_bits16` with non-temporal stores; same contract as [`Vector::stream_bits32`].
    #[inline(always)]
    unsafe fn stream_bits16(bits: Self::Bits, to: *mut u16) {
        // SAFETY: the caller upholds the callee's contract.
        unsafe { Self::store_bits16(bits, to) }
    }
    /// Prefetches the cache line at `from`, which may be any address.
    #[inline(always)]
    unsafe fn prefetch(_from: *const u8) {}
    /// Orders all earlier `store_nt` stores before all later stores of this thread.
    #[inline(always)]
    unsafe fn fence() {}
    /// `a + b`, wrapping.
    unsafe fn bits_add(a: Self::Bits, b: Self::Bits) -> Self::Bits;
    /// `a - b`, wrapping.
    unsafe fn bits_sub(a: Self::Bits, b: Self::Bits) -> Self::Bits;
    /// The lower 32 bits of `a * b`.
    unsafe fn bits_mul(a: Self::Bits, b: Self::Bits) -> Self::Bits;
    /// The same pattern in every lane.
    unsafe fn bits_splat(value: u32) -> Self::Bits;
    /// `a | b`.
    unsafe fn bits_or(a: Self::Bits, b: Self::Bits) -> Self::Bits;
    /// `a ^ b`.
    unsafe fn bits_xor(a: Self::Bits, b: Self::Bits) -> Self::Bits;
    /// `a & b`.
    unsafe fn bits_and(a: Self::Bits, b: Self::Bits) -> Self::Bits;
    /// Shifts each lane left by 0 to 32 bits; a shift by 32 gives zero.
    unsafe fn bits_shl(a: Self::Bits, by: Self::Bits) -> Self::Bits;
    /// Shifts each lane right by 0 to 31 bits, filling with zeros.
    unsafe fn bits_shr(a: Self::Bits, by: Self::Bits) -> Self::Bits;
    /// The larger of two patterns in each lane, as unsigned numbers.
    unsafe fn bits_max(a: Self::Bits, b: Self::Bits) -> Self::Bits;
    /// The smaller of two patterns in each lane, as unsigned numbers.
    unsafe fn bits_min(a: Self::Bits, b: Self::Bits) -> Self::Bits;
    /// The largest pattern of all lanes, as unsigned numbers.
    unsafe fn largest(bits: Self::Bits) -> u32;
    /// True if no lane of `a` has a bit outside `a_mask` and no lane of `b` has a bit outside `b_mask`.
    unsafe fn within(a: Self::Bits, a_mask: u32, b: Self::Bits, b_mask: u32) -> bool;
    /// Stores the lowest byte of each lane, unaligned.
    unsafe fn store_bytes(bits: Self::Bits, to: *mut u8);
    /// Loads one byte per lane, zero-extended.
    unsafe fn load_bytes(from: *const u8) -> Self::Bits;
    /// Writes the lanes as signed integers of the narrowest width that fits every lane. Writes `width.bytes(LANES)`
    /// bytes and returns the width.
    unsafe fn pack(bits: Self::Bits, to: *mut u8) -> Width;
    /// Reads lanes that `pack` wrote with this width.
    unsafe fn unpack(width: Width, from: *const u8) -> Self::Bits;
}

/// Functions of an implementation of [`Vector`] whose body is one expression. The impl states why it is safe.
macro_rules! wrappers {
    ($($name:ident($($arguments:tt)*) $(-> $result:ty)? = $body:expr;)*) => {$(
        #[inline(always)]
        #[allow(unused_unsafe, reason = "the scalar functions without a pointer are safe code")]
        unsafe fn $name($($arguments)*) $(-> $result)? {
            // SAFETY: as stated at the impl.
            unsafe { $body }
        }
    )*};
}
pub(super) use wrappers;

/// Bytes per lane of packed residuals.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Width {
    /// One byte.
    W8 = 0,
    /// Two bytes.
    W16 = 1,
    /// Four bytes, enough for any residual.
    W32 = 2,
}

impl Width {
    /// The width for a group whose largest magnitude `x ^ (x >> 31)` is `magnitude`. The bitwise OR of all magnitudes
    /// gives the same width.
    #[inline(always)]
    pub fn of_magnitude(magnitude: u32) -> Width {
        match magnitude {
            0..=0x7f => Width::W8,
            0x80..=0x7fff => Width::W16,
            _ => Width::W32,
        }
    }

    /// The width that the lowest two bits of `code` name.
    #[inline(always)]
    pub fn from_code(code: u8) -> Width {
        match code & 3 {
            0 => Width::W8,
            1 => Width::W16,
            _ => Width::W32,
        }
    }

    /// Bytes of `lanes` packed lanes.
    #[inline(always)]
    pub fn bytes(self, lanes: usize) -> usize {
        lanes << (self as u8)
    }
}

/// Work that can be run with any [`Vector`].
pub trait Body {
    /// Does the work.
    ///
    /// # Safety
    /// Same contract as [`Vector`]. Implementations are `#[inline(always)]`, so that the wrappers compile to single
    /// instructions.
    unsafe fn run<V: Vector>(self) -> f64;
}

/// An instruction set. `vectorize` compiles a [`Body`] with the set enabled.
pub trait Isa {
    /// Runs `body` with the vectors of this set.
    ///
    /// # Safety
    /// The processor has the instruction set, and the pointers of the body are valid.
    unsafe fn vectorize<B: Body>(body: B) -> f64;
}
