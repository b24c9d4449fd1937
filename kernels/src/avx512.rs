//! AVX-512 F, BW, DQ and VL: sixteen lanes (Skylake-SP, Zen 4 and later).
//!
//! A constant that replaces NaN lanes is the destination of a masked move, never its source. As the source it becomes a
//! masked load from memory. A masked load whose lanes are all off, from a page that is not mapped yet, takes hundreds of
//! cycles and never maps the page: without NaN every step would pay that.

use std::arch::x86_64::*;

use super::vector::{Body, Isa, Vector, Width, wrappers};

/// The instruction sets AVX-512 F, BW, DQ and VL.
pub struct Avx512;

impl Avx512 {
    /// True if the processor and the operating system support all of these sets.
    pub fn detected() -> bool {
        is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl")
    }
}

impl Isa for Avx512 {
    // Not inlined: the caller changes the float mode around this call, and the compiler cannot move arithmetic
    // across a call.
    #[inline(never)]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    unsafe fn vectorize<B: Body>(body: B) -> f64 {
        // SAFETY: the caller guarantees the instruction set, which this function enables.
        unsafe { body.run::<F32x16>() }
    }
}

/// Sixteen f32 in one register.
#[derive(Clone, Copy)]
pub struct F32x16(__m512);

// SAFETY: for the trait and each block below: callers of `Vector` run inside `Avx512::vectorize` and pass pointers to
// sixteen elements.
unsafe impl Vector for F32x16 {
    const LANES: usize = 16;
    type Bits = __m512i;

    wrappers! {
        splat(value: f32) -> Self = Self(_mm512_set1_ps(value));
        load_f32(from: *const f32) -> Self = Self(_mm512_loadu_ps(from));
        store_f32(self, to: *mut f32) = _mm512_storeu_ps(to, self.0);
        load_f16(from: *const u16) -> Self = Self(_mm512_cvtph_ps(_mm256_loadu_si256(from.cast())));
        store_bf16(self, to: *mut u16) = Self::store_bits16(self.round_bf16(), to);
        add(self, other: Self) -> Self = Self(_mm512_add_ps(self.0, other.0));
        sub(self, other: Self) -> Self = Self(_mm512_sub_ps(self.0, other.0));
        mul(self, other: Self) -> Self = Self(_mm512_mul_ps(self.0, other.0));
        div(self, other: Self) -> Self = Self(_mm512_div_ps(self.0, other.0));
        sqrt(self) -> Self = Self(_mm512_sqrt_ps(self.0));
        mul_add(self, factor: Self, addend: Self) -> Self = Self(_mm512_fmadd_ps(self.0, factor.0, addend.0));
        to_bits(self) -> __m512i = _mm512_castps_si512(self.0);
        from_bits(bits: __m512i) -> Self = Self(_mm512_castsi512_ps(bits));
        widen_f16(bits: __m512i) -> Self = Self(_mm512_cvtph_ps(_mm512_cvtepi32_epi16(bits)));
        widen_bf16(bits: __m512i) -> Self = Self(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(bits)));
        load_bits32(from: *const u32) -> __m512i = _mm512_loadu_si512(from.cast());
        load_bits16(from: *const u16) -> __m512i = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()));
        store_bits32(bits: __m512i, to: *mut u32) = _mm512_storeu_si512(to.cast(), bits);
        bits_add(a: __m512i, b: __m512i) -> __m512i = _mm512_add_epi32(a, b);
        bits_sub(a: __m512i, b: __m512i) -> __m512i = _mm512_sub_epi32(a, b);
        bits_mul(a: __m512i, b: __m512i) -> __m512i = _mm512_mullo_epi32(a, b);
        bits_splat(value: u32) -> __m512i = _mm512_set1_epi32(value as i32);
        bits_or(a: __m512i, b: __m512i) -> __m512i = _mm512_or_si512(a, b);
        bits_xor(a: __m512i, b: __m512i) -> __m512i = _mm512_xor_si512(a, b);
        bits_and(a: __m512i, b: __m512i) -> __m512i = _mm512_and_si512(a, b);
        bits_shl(a: __m512i, by: __m512i) -> __m512i = _mm512_sllv_epi32(a, by);
        bits_shr(a: __m512i, by: __m512i) -> __m512i = _mm512_srlv_epi32(a, by);
        bits_max(a: __m512i, b: __m512i) -> __m512i = _mm512_max_epu32(a, b);
        bits_min(a: __m512i, b: __m512i) -> __m512i = _mm512_min_epu32(a, b);
        largest(bits: __m512i) -> u32 = _mm512_reduce_max_epu32(bits);
        store_bytes(bits: __m512i, to: *mut u8) = _mm_storeu_si128(to.cast(), _mm512_cvtepi32_epi8(bits));
        load_bytes(from: *const u8) -> __m512i = _mm512_cvtepu8_epi32(_mm_loadu_si128(from.cast()));
    }

    #[inline(always)]
    unsafe fn store_f16(self, to: *mut u16) {
        // SAFETY: as stated at the impl.
        unsafe {
            let number = _mm512_cmp_ps_mask::<_CMP_ORD_Q>(self.0, self.0);
            let quiet = _mm512_mask_mov_ps(_mm512_set1_ps(f32::NAN), number, self.0);
            _mm256_storeu_si256(to.cast(), _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(quiet));
        }
    }

    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> Self {
        // SAFETY: as stated at the impl.
        unsafe {
            let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()));
            Self(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide)))
        }
    }

    #[inline(always)]
    unsafe fn signum_times(self, magnitude: Self) -> Self {
        // SAFETY: as stated at the impl.
        unsafe {
            let sign = _mm512_set1_ps(-0.0);
            let signed = _mm512_or_ps(_mm512_and_ps(self.0, sign), _mm512_andnot_ps(sign, magnitude.0));
            let moves = _mm512_cmp_ps_mask::<_CMP_GT_OQ>(_mm512_andnot_ps(sign, self.0), _mm512_setzero_ps());
            Self(_mm512_mask_mov_ps(self.0, moves, signed))
        }
    }

    #[inline(always)]
    unsafe fn add_squares(self, lanes: *mut f64) {
        // SAFETY: as stated at the impl.
        unsafe {
            let low = _mm512_cvtps_pd(_mm512_castps512_ps256(self.0));
            let high = _mm512_cvtps_pd(_mm512_extractf32x8_ps::<1>(self.0));
            let upper = lanes.add(8);
            _mm512_storeu_pd(lanes, _mm512_fmadd_pd(low, low, _mm512_loadu_pd(lanes)));
            _mm512_storeu_pd(upper, _mm512_fmadd_pd(high, high, _mm512_loadu_pd(upper)));
        }
    }

    #[inline(always)]
    unsafe fn nan_to_zero(self) -> Self {
        // SAFETY: as stated at the impl.
        unsafe {
            let number = _mm512_cmp_ps_mask::<_CMP_ORD_Q>(self.0, self.0);
            Self(_mm512_maskz_mov_ps(number, self.0))
        }
    }

    #[inline(always)]
    unsafe fn round_f16(self) -> __m512i {
        // SAFETY: as stated at the impl.
        unsafe {
            let number = _mm512_cmp_ps_mask::<_CMP_ORD_Q>(self.0, self.0);
            let quiet = _mm512_mask_mov_ps(_mm512_set1_ps(f32::NAN), number, self.0);
            _mm512_cvtepu16_epi32(_mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(quiet))
        }
    }

    #[inline(always)]
    unsafe fn round_bf16(self) -> __m512i {
        // SAFETY: as stated at the impl.
        unsafe {
            let bits = _mm512_castps_si512(self.0);
            let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
            let bias = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
            let rounded = _mm512_srli_epi32::<16>(_mm512_add_epi32(bits, bias));
            let number = _mm512_cmp_ps_mask::<_CMP_ORD_Q>(self.0, self.0);
            _mm512_mask_mov_epi32(_mm512_set1_epi32(0x7fc0), number, rounded)
        }
    }

    #[inline(always)]
    unsafe fn store_bits16(bits: __m512i, to: *mut u16) {
        // SAFETY: as stated at the impl.
        unsafe { _mm256_storeu_si256(to.cast(), _mm512_cvtepi32_epi16(bits)) }
    }

    #[inline(always)]
    unsafe fn stream_bits32(bits: __m512i, to: *mut u32) {
        // SAFETY: as stated at the impl; the caller aligned `to`.
        unsafe { _mm512_stream_si512(to.cast(), bits) }
    }

    #[inline(always)]
    unsafe fn stream_bits16(bits: __m512i, to: *mut u16) {
        // SAFETY: as stated at the impl; the caller aligned `to`.
        unsafe { _mm256_stream_si256(to.cast(), _mm512_cvtepi32_epi16(bits)) }
    }

    #[inline(always)]
    unsafe fn prefetch(from: *const u8) {
        // SAFETY: a prefetch of any address is harmless.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(from.cast()) }
    }

    #[inline(always)]
    unsafe fn fence() {
        // SAFETY: every 64-bit x86 processor has this instruction.
        unsafe { _mm_sfence() }
    }

    #[inline(always)]
    unsafe fn within(a: __m512i, a_mask: u32, b: __m512i, b_mask: u32) -> bool {
        // SAFETY: as stated at the impl.
        unsafe {
            let a = _mm512_test_epi32_mask(a, _mm512_set1_epi32(!a_mask as i32));
            let b = _mm512_test_epi32_mask(b, _mm512_set1_epi32(!b_mask as i32));
            a | b == 0
        }
    }

    #[inline(always)]
    unsafe fn pack(bits: __m512i, to: *mut u8) -> Width {
        // SAFETY: as stated at the impl.
        unsafe {
            let magnitude = _mm512_xor_si512(bits, _mm512_srai_epi32::<31>(bits));
            let width = Width::of_magnitude(_mm512_reduce_or_epi32(magnitude) as u32);
            match width {
                Width::W8 => Self::store_bytes(bits, to),
                Width::W16 => Self::store_bits16(bits, to.cast()),
                Width::W32 => Self::store_bits32(bits, to.cast()),
            }
            width
        }
    }

    #[inline(always)]
    unsafe fn unpack(width: Width, from: *const u8) -> __m512i {
        // SAFETY: as stated at the impl.
        unsafe {
            match width {
                Width::W8 => _mm512_cvtepi8_epi32(_mm_loadu_si128(from.cast())),
                Width::W16 => _mm512_cvtepi16_epi32(_mm256_loadu_si256(from.cast())),
                Width::W32 => Self::load_bits32(from.cast()),
            }
        }
    }
}
