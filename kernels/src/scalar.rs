//! One lane, on any processor. The tests compare every other kernel with this reference.

use half::{bf16, f16};

use super::vector::{Body, Isa, Vector, Width, wrappers};

/// The baseline instruction set of the compilation target.
pub struct Scalar;

impl Isa for Scalar {
    // Not inlined: the caller changes the float mode around this call, and the compiler cannot move arithmetic
    // across a call.
    #[inline(never)]
    unsafe fn vectorize<B: Body>(body: B) -> f64 {
        // SAFETY: f32 needs no instruction set; the caller guarantees the pointers of the body.
        unsafe { body.run::<f32>() }
    }
}

// SAFETY: for the trait and each block below: every method is plain Rust on one lane, and callers pass pointers to one
// element.
unsafe impl Vector for f32 {
    const LANES: usize = 1;
    type Bits = u32;

    wrappers! {
        splat(value: f32) -> Self = value;
        load_f32(from: *const f32) -> Self = from.read();
        store_f32(self, to: *mut f32) = to.write(self);
        load_f16(from: *const u16) -> Self = f16::from_bits(from.read()).to_f32_const();
        store_f16(self, to: *mut u16) = to.write(self.round_f16() as u16);
        load_bf16(from: *const u16) -> Self = bf16::from_bits(from.read()).to_f32_const();
        store_bf16(self, to: *mut u16) = to.write(self.round_bf16() as u16);
        add(self, other: Self) -> Self = self + other;
        sub(self, other: Self) -> Self = self - other;
        mul(self, other: Self) -> Self = self * other;
        div(self, other: Self) -> Self = self / other;
        sqrt(self) -> Self = f32::sqrt(self);
        mul_add(self, factor: Self, addend: Self) -> Self = f32::mul_add(self, factor, addend);
        to_bits(self) -> u32 = f32::to_bits(self);
        from_bits(bits: u32) -> Self = f32::from_bits(bits);
        nan_to_zero(self) -> Self = if self.is_nan() { 0.0 } else { self };
        widen_f16(bits: u32) -> Self = f16::from_bits(bits as u16).to_f32_const();
        widen_bf16(bits: u32) -> Self = bf16::from_bits(bits as u16).to_f32_const();
        load_bits32(from: *const u32) -> u32 = from.read();
        load_bits16(from: *const u16) -> u32 = from.read().into();
        store_bits32(bits: u32, to: *mut u32) = to.write(bits);
        store_bits16(bits: u32, to: *mut u16) = to.write(bits as u16);
        bits_add(a: u32, b: u32) -> u32 = a.wrapping_add(b);
        bits_sub(a: u32, b: u32) -> u32 = a.wrapping_sub(b);
        bits_mul(a: u32, b: u32) -> u32 = a.wrapping_mul(b);
        bits_splat(value: u32) -> u32 = value;
        bits_or(a: u32, b: u32) -> u32 = a | b;
        bits_xor(a: u32, b: u32) -> u32 = a ^ b;
        bits_and(a: u32, b: u32) -> u32 = a & b;
        bits_shl(a: u32, by: u32) -> u32 = a.unbounded_shl(by);
        bits_shr(a: u32, by: u32) -> u32 = a.unbounded_shr(by);
        bits_max(a: u32, b: u32) -> u32 = a.max(b);
        bits_min(a: u32, b: u32) -> u32 = a.min(b);
        largest(bits: u32) -> u32 = bits;
        within(a: u32, a_mask: u32, b: u32, b_mask: u32) -> bool = (a & !a_mask) | (b & !b_mask) == 0;
        store_bytes(bits: u32, to: *mut u8) = to.write(bits as u8);
        load_bytes(from: *const u8) -> u32 = from.read().into();
    }

    #[inline(always)]
    unsafe fn signum_times(self, magnitude: Self) -> Self {
        if self.abs() > 0.0 { magnitude.copysign(self) } else { self }
    }

    #[inline(always)]
    unsafe fn add_squares(self, lanes: *mut f64) {
        let wide = f64::from(self);
        // SAFETY: the caller passes a pointer to one lane.
        unsafe { lanes.write(wide.mul_add(wide, lanes.read())) }
    }

    #[inline(always)]
    unsafe fn round_f16(self) -> u32 {
        if self.is_nan() { 0x7e00 } else { f16::from_f32_const(self).to_bits().into() }
    }

    #[inline(always)]
    unsafe fn round_bf16(self) -> u32 {
        if self.is_nan() { 0x7fc0 } else { bf16::from_f32_const(self).to_bits().into() }
    }

    #[inline(always)]
    unsafe fn pack(bits: u32, to: *mut u8) -> Width {
        let width = Width::of_magnitude(bits ^ (bits as i32 >> 31) as u32);
        let bytes = bits.to_le_bytes();
        // SAFETY: the caller passes room for width.bytes(1) bytes.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, width.bytes(1)) };
        width
    }

    #[inline(always)]
    unsafe fn unpack(width: Width, from: *const u8) -> u32 {
        let mut bytes = [0; 4];
        // SAFETY: the caller passes what pack wrote.
        unsafe { std::ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), width.bytes(1)) };
        let unused = 32 - 8 * width.bytes(1);
        ((u32::from_le_bytes(bytes) << unused) as i32 >> unused) as u32
    }
}
