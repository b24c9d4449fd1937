//! One lane, on any processor: the reference that every other kernel is compared with.

use half::{bf16, f16};

use super::vector::{Body, Isa, Vector};

/// No instruction set beyond the target's own.
pub struct Scalar;

impl Isa for Scalar {
    // Not inlined: the caller changes the float mode around this call, and a call is what arithmetic cannot cross.
    #[inline(never)]
    unsafe fn vectorize<B: Body>(body: B) -> f64 {
        // SAFETY: f32 needs no instruction set; the caller upholds the body's own pointers.
        unsafe { body.run::<f32>() }
    }
}

// SAFETY: every method is plain Rust on one lane.
unsafe impl Vector for f32 {
    const LANES: usize = 1;

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        value
    }
    #[inline(always)]
    unsafe fn load_f32(from: *const f32) -> Self {
        // SAFETY: the caller passes a pointer to one element.
        unsafe { from.read() }
    }
    #[inline(always)]
    unsafe fn store_f32(self, to: *mut f32) {
        // SAFETY: the caller passes a pointer to one element.
        unsafe { to.write(self) }
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> Self {
        // SAFETY: the caller passes a pointer to one element.
        f16::from_bits(unsafe { from.read() }).to_f32_const()
    }
    #[inline(always)]
    unsafe fn store_f16(self, to: *mut u16) {
        let bits = if self.is_nan() { 0x7e00 } else { f16::from_f32_const(self).to_bits() };
        // SAFETY: the caller passes a pointer to one element.
        unsafe { to.write(bits) }
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> Self {
        // SAFETY: the caller passes a pointer to one element.
        bf16::from_bits(unsafe { from.read() }).to_f32_const()
    }
    #[inline(always)]
    unsafe fn store_bf16(self, to: *mut u16) {
        let bits = if self.is_nan() { 0x7fc0 } else { bf16::from_f32_const(self).to_bits() };
        // SAFETY: the caller passes a pointer to one element.
        unsafe { to.write(bits) }
    }
    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        self + other
    }
    #[inline(always)]
    unsafe fn sub(self, other: Self) -> Self {
        self - other
    }
    #[inline(always)]
    unsafe fn mul(self, other: Self) -> Self {
        self * other
    }
    #[inline(always)]
    unsafe fn div(self, other: Self) -> Self {
        self / other
    }
    #[inline(always)]
    unsafe fn sqrt(self) -> Self {
        f32::sqrt(self)
    }
    #[inline(always)]
    unsafe fn mul_add(self, factor: Self, addend: Self) -> Self {
        f32::mul_add(self, factor, addend)
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
}
