//! NEON with sixteen lanes in four registers. Every 64-bit Arm processor has NEON.
//!
//! Four registers per group let the compiler use load-pair and store-pair instructions.

use std::arch::aarch64::*;
use std::arch::asm;
use std::array::from_fn;

use super::vector::{Body, Isa, Vector, Width, wrappers};

/// NEON.
pub struct Neon;

impl Isa for Neon {
    // Not inlined: the caller changes the float mode around this call, and the compiler cannot move arithmetic
    // across a call.
    #[inline(never)]
    unsafe fn vectorize<B: Body>(body: B) -> f64 {
        // SAFETY: the target has NEON; the caller guarantees the pointers of the body.
        unsafe { body.run::<F32x16>() }
    }
}

/// Sixteen f32 in four registers.
#[derive(Clone, Copy)]
pub struct F32x16([float32x4_t; 4]);

impl F32x16 {
    #[inline(always)]
    fn map(self, work: impl Fn(float32x4_t) -> float32x4_t) -> Self {
        Self(from_fn(|i| work(self.0[i])))
    }

    #[inline(always)]
    fn zip(self, other: Self, work: impl Fn(float32x4_t, float32x4_t) -> float32x4_t) -> Self {
        Self(from_fn(|i| work(self.0[i], other.0[i])))
    }

    /// Loads sixteen 16-bit elements; `widen` converts eight of them to two registers.
    #[inline(always)]
    unsafe fn load_halves(
        from: *const u16,
        widen: impl Fn(uint16x8_t) -> (float32x4_t, float32x4_t),
    ) -> Self {
        // SAFETY: the caller passes a pointer to sixteen elements.
        let (a, b) = unsafe { (vld1q_u16(from), vld1q_u16(from.add(8))) };
        let ((a, b), (c, d)) = (widen(a), widen(b));
        Self([a, b, c, d])
    }

    #[inline(always)]
    unsafe fn store_halves(self, to: *mut u16, narrow: impl Fn(float32x4_t, float32x4_t) -> uint16x8_t) {
        let [a, b, c, d] = self.0;
        // SAFETY: the caller passes a pointer to sixteen elements.
        unsafe {
            vst1q_u16(to, narrow(a, b));
            vst1q_u16(to.add(8), narrow(c, d));
        }
    }
}

/// Widens eight f16. Inline assembly, here and in `narrow_f16`, because the intrinsics are not stable in Rust; the
/// instructions belong to the base set.
#[inline(always)]
fn widen_f16(halves: uint16x8_t) -> (float32x4_t, float32x4_t) {
    let (low, high);
    // SAFETY: conversions between registers.
    unsafe {
        asm!("fcvtl {low:v}.4s, {halves:v}.4h", "fcvtl2 {high:v}.4s, {halves:v}.8h",
            low = out(vreg) low, high = lateout(vreg) high, halves = in(vreg) halves,
            options(pure, nomem, nostack, preserves_flags));
    }
    (low, high)
}

/// Rounds eight f32 to f16. A NaN becomes 0x7e00 because `IeeeMode` enables default NaN.
#[inline(always)]
fn narrow_f16(low: float32x4_t, high: float32x4_t) -> uint16x8_t {
    let halves;
    // SAFETY: conversions between registers.
    unsafe {
        asm!("fcvtn {halves:v}.4h, {low:v}.4s", "fcvtn2 {halves:v}.8h, {high:v}.4s",
            halves = out(vreg) halves, low = in(vreg) low, high = in(vreg) high,
            options(pure, nomem, nostack, preserves_flags));
    }
    halves
}

#[inline(always)]
fn widen_bf16(halves: uint16x8_t) -> (float32x4_t, float32x4_t) {
    // SAFETY: every 64-bit Arm processor has NEON.
    unsafe {
        let low = vshll_n_u16::<16>(vget_low_u16(halves));
        let high = vshll_high_n_u16::<16>(halves);
        (vreinterpretq_f32_u32(low), vreinterpretq_f32_u32(high))
    }
}

#[inline(always)]
fn narrow_bf16(low: float32x4_t, high: float32x4_t) -> uint16x8_t {
    // SAFETY: every 64-bit Arm processor has NEON.
    unsafe {
        let bits = |x| vbslq_u32(vceqq_f32(x, x), vreinterpretq_u32_f32(x), vdupq_n_u32(0x7fc0_0000));
        let bias = |bits| {
            let odd = vandq_u32(vshrq_n_u32::<16>(bits), vdupq_n_u32(1));
            vaddq_u32(odd, vdupq_n_u32(0x7fff))
        };
        let (low, high) = (bits(low), bits(high));
        vaddhn_high_u32(vaddhn_u32(low, bias(low)), high, bias(high))
    }
}

// SAFETY: for the trait and each block below: every 64-bit Arm processor has NEON, and callers pass pointers to sixteen
// elements.
unsafe impl Vector for F32x16 {
    const LANES: usize = 16;
    type Bits = [uint32x4_t; 4];

    wrappers! {
        splat(value: f32) -> Self = Self([vdupq_n_f32(value); 4]);
        load_f32(from: *const f32) -> Self = Self(from_fn(|i| vld1q_f32(from.add(4 * i))));
        load_f16(from: *const u16) -> Self = Self::load_halves(from, widen_f16);
        store_f16(self, to: *mut u16) = self.store_halves(to, narrow_f16);
        load_bf16(from: *const u16) -> Self = Self::load_halves(from, widen_bf16);
        store_bf16(self, to: *mut u16) = self.store_halves(to, narrow_bf16);
        add(self, other: Self) -> Self = self.zip(other, |a, b| vaddq_f32(a, b));
        sub(self, other: Self) -> Self = self.zip(other, |a, b| vsubq_f32(a, b));
        mul(self, other: Self) -> Self = self.zip(other, |a, b| vmulq_f32(a, b));
        div(self, other: Self) -> Self = self.zip(other, |a, b| vdivq_f32(a, b));
        sqrt(self) -> Self = self.map(|a| vsqrtq_f32(a));
        to_bits(self) -> Self::Bits = self.0.map(|x| vreinterpretq_u32_f32(x));
        from_bits(bits: Self::Bits) -> Self = Self(bits.map(|x| vreinterpretq_f32_u32(x)));
        load_bits32(from: *const u32) -> Self::Bits = from_fn(|i| vld1q_u32(from.add(4 * i)));
        load_bits16(from: *const u16) -> Self::Bits = zero_extend([vld1q_u16(from), vld1q_u16(from.add(8))]);
        bits_add(a: Self::Bits, b: Self::Bits) -> Self::Bits = from_fn(|i| vaddq_u32(a[i], b[i]));
        bits_sub(a: Self::Bits, b: Self::Bits) -> Self::Bits = from_fn(|i| vsubq_u32(a[i], b[i]));
        bits_mul(a: Self::Bits, b: Self::Bits) -> Self::Bits = from_fn(|i| vmulq_u32(a[i], b[i]));
        bits_splat(value: u32) -> Self::Bits = [vdupq_n_u32(value); 4];
        bits_or(a: Self::Bits, b: Self::Bits) -> Self::Bits = from_fn(|i| vorrq_u32(a[i], b[i]));
        bits_xor(a: Self::Bits, b: Self::Bits) -> Self::Bits = from_fn(|i| veorq_u32(a[i], b[i]));
        bits_and(a: Self::Bits, b: Self::Bits) -> Self::Bits = from_fn(|i| vandq_u32(a[i], b[i]));
        bits_max(a: Self::Bits, b: Self::Bits) -> Self::Bits = from_fn(|i| vmaxq_u32(a[i], b[i]));
        bits_min(a: Self::Bits, b: Self::Bits) -> Self::Bits = from_fn(|i| vminq_u32(a[i], b[i]));
    }

    #[inline(always)]
    unsafe fn store_f32(self, to: *mut f32) {
        for (i, register) in self.0.into_iter().enumerate() {
            // SAFETY: as stated at the impl.
            unsafe { vst1q_f32(to.add(4 * i), register) }
        }
    }

    #[inline(always)]
    unsafe fn mul_add(self, factor: Self, addend: Self) -> Self {
        // SAFETY: as stated at the impl.
        Self(from_fn(|i| unsafe { vfmaq_f32(addend.0[i], self.0[i], factor.0[i]) }))
    }

    #[inline(always)]
    unsafe fn signum_times(self, magnitude: Self) -> Self {
        // SAFETY: as stated at the impl.
        self.zip(magnitude, |a, magnitude| unsafe {
            let signed = vbslq_f32(vdupq_n_u32(0x8000_0000), a, magnitude);
            vbslq_f32(vcagtq_f32(a, vdupq_n_f32(0.0)), signed, a)
        })
    }

    #[inline(always)]
    unsafe fn add_squares(self, lanes: *mut f64) {
        for (i, register) in self.0.into_iter().enumerate() {
            // SAFETY: as stated at the impl.
            unsafe {
                let low = vcvt_f64_f32(vget_low_f32(register));
                let high = vcvt_high_f64_f32(register);
                let (lower, upper) = (lanes.add(4 * i), lanes.add(4 * i + 2));
                vst1q_f64(lower, vfmaq_f64(vld1q_f64(lower), low, low));
                vst1q_f64(upper, vfmaq_f64(vld1q_f64(upper), high, high));
            }
        }
    }

    #[inline(always)]
    unsafe fn nan_to_zero(self) -> Self {
        // SAFETY: as stated at the impl.
        self.map(|x| unsafe { vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(x), vceqq_f32(x, x))) })
    }

    #[inline(always)]
    unsafe fn round_f16(self) -> Self::Bits {
        let [a, b, c, d] = self.0;
        // SAFETY: as stated at the impl.
        unsafe { zero_extend([narrow_f16(a, b), narrow_f16(c, d)]) }
    }

    #[inline(always)]
    unsafe fn round_bf16(self) -> Self::Bits {
        let [a, b, c, d] = self.0;
        // SAFETY: as stated at the impl.
        unsafe { zero_extend([narrow_bf16(a, b), narrow_bf16(c, d)]) }
    }

    #[inline(always)]
    unsafe fn widen_f16(bits: Self::Bits) -> Self {
        // SAFETY: as stated at the impl.
        let [low, high] = unsafe { lower_halves(bits) };
        let ((a, b), (c, d)) = (widen_f16(low), widen_f16(high));
        Self([a, b, c, d])
    }

    #[inline(always)]
    unsafe fn widen_bf16(bits: Self::Bits) -> Self {
        // SAFETY: as stated at the impl.
        Self(bits.map(|x| unsafe { vreinterpretq_f32_u32(vshlq_n_u32::<16>(x)) }))
    }

    #[inline(always)]
    unsafe fn store_bits32(bits: Self::Bits, to: *mut u32) {
        for (i, register) in bits.into_iter().enumerate() {
            // SAFETY: as stated at the impl.
            unsafe { vst1q_u32(to.add(4 * i), register) }
        }
    }

    #[inline(always)]
    unsafe fn store_bits16(bits: Self::Bits, to: *mut u16) {
        // SAFETY: as stated at the impl.
        unsafe {
            let [low, high] = lower_halves(bits);
            vst1q_u16(to, low);
            vst1q_u16(to.add(8), high);
        }
    }

    #[inline(always)]
    unsafe fn bits_shl(a: Self::Bits, by: Self::Bits) -> Self::Bits {
        // SAFETY: as stated at the impl.
        unsafe { from_fn(|i| vshlq_u32(a[i], vreinterpretq_s32_u32(by[i]))) }
    }

    #[inline(always)]
    unsafe fn bits_shr(a: Self::Bits, by: Self::Bits) -> Self::Bits {
        // SAFETY: as stated at the impl.
        unsafe { from_fn(|i| vshlq_u32(a[i], vnegq_s32(vreinterpretq_s32_u32(by[i])))) }
    }

    #[inline(always)]
    unsafe fn largest([a, b, c, d]: Self::Bits) -> u32 {
        // SAFETY: as stated at the impl.
        unsafe { vmaxvq_u32(vmaxq_u32(vmaxq_u32(a, b), vmaxq_u32(c, d))) }
    }

    #[inline(always)]
    unsafe fn within(a: Self::Bits, a_mask: u32, b: Self::Bits, b_mask: u32) -> bool {
        // SAFETY: as stated at the impl.
        unsafe {
            let union = |[a, b, c, d]: Self::Bits| vorrq_u32(vorrq_u32(a, b), vorrq_u32(c, d));
            let outside = |bits, mask| vbicq_u32(union(bits), vdupq_n_u32(mask));
            vmaxvq_u32(vorrq_u32(outside(a, a_mask), outside(b, b_mask))) == 0
        }
    }

    #[inline(always)]
    unsafe fn store_bytes(bits: Self::Bits, to: *mut u8) {
        // SAFETY: as stated at the impl.
        unsafe {
            let [low, high] = lower_halves(bits);
            vst1q_u8(to, vmovn_high_u16(vmovn_u16(low), high));
        }
    }

    #[inline(always)]
    unsafe fn load_bytes(from: *const u8) -> Self::Bits {
        // SAFETY: as stated at the impl.
        unsafe {
            let bytes = vld1q_u8(from);
            zero_extend([vmovl_u8(vget_low_u8(bytes)), vmovl_high_u8(bytes)])
        }
    }

    #[inline(always)]
    unsafe fn pack(bits: Self::Bits, to: *mut u8) -> Width {
        // SAFETY: as stated at the impl.
        unsafe {
            let [a, b, c, d] = bits.map(|x| {
                let sign = vshrq_n_s32::<31>(vreinterpretq_s32_u32(x));
                veorq_u32(x, vreinterpretq_u32_s32(sign))
            });
            let width = Width::of_magnitude(vmaxvq_u32(vorrq_u32(vorrq_u32(a, b), vorrq_u32(c, d))));
            match width {
                Width::W8 => Self::store_bytes(bits, to),
                Width::W16 => Self::store_bits16(bits, to.cast()),
                Width::W32 => Self::store_bits32(bits, to.cast()),
            }
            width
        }
    }

    #[inline(always)]
    unsafe fn unpack(width: Width, from: *const u8) -> Self::Bits {
        // SAFETY: as stated at the impl.
        unsafe {
            match width {
                Width::W8 => sign_extend_bytes(vld1q_s8(from.cast())),
                Width::W16 => sign_extend([vld1q_s16(from.cast()), vld1q_s16(from.add(16).cast())]),
                Width::W32 => Self::load_bits32(from.cast()),
            }
        }
    }
}

/// # Safety
/// Needs NEON, which every 64-bit Arm processor has. The same holds for the functions below.
#[inline(always)]
unsafe fn lower_halves([a, b, c, d]: [uint32x4_t; 4]) -> [uint16x8_t; 2] {
    // SAFETY: the caller upholds this function's contract.
    unsafe { [vmovn_high_u32(vmovn_u32(a), b), vmovn_high_u32(vmovn_u32(c), d)] }
}

/// # Safety
/// NEON.
#[inline(always)]
unsafe fn zero_extend([low, high]: [uint16x8_t; 2]) -> [uint32x4_t; 4] {
    // SAFETY: the caller upholds this function's contract.
    unsafe {
        let (a, c) = (vmovl_u16(vget_low_u16(low)), vmovl_u16(vget_low_u16(high)));
        [a, vmovl_high_u16(low), c, vmovl_high_u16(high)]
    }
}

/// # Safety
/// NEON.
#[inline(always)]
unsafe fn sign_extend([low, high]: [int16x8_t; 2]) -> [uint32x4_t; 4] {
    // SAFETY: the caller upholds this function's contract.
    unsafe {
        let (a, c) = (vmovl_s16(vget_low_s16(low)), vmovl_s16(vget_low_s16(high)));
        [a, vmovl_high_s16(low), c, vmovl_high_s16(high)].map(|x| vreinterpretq_u32_s32(x))
    }
}

/// # Safety
/// NEON.
#[inline(always)]
unsafe fn sign_extend_bytes(bytes: int8x16_t) -> [uint32x4_t; 4] {
    // SAFETY: the caller upholds this function's contract.
    unsafe { sign_extend([vmovl_s8(vget_low_s8(bytes)), vmovl_high_s8(bytes)]) }
}
