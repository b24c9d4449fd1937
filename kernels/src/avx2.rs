//! AVX2 with FMA and F16C: eight lanes (Haswell, Zen and later).

use std::arch::x86_64::*;

use super::vector::{Body, Isa, Vector, Width, wrappers};

/// The instruction sets AVX2, FMA and F16C.
pub struct Avx2;

impl Avx2 {
    /// True if the processor and the operating system support all of these sets.
    pub fn detected() -> bool {
        is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c")
    }
}

impl Isa for Avx2 {
    // Not inlined: the caller changes the float mode around this call, and the compiler cannot move arithmetic
    // across a call.
    #[inline(never)]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn vectorize<B: Body>(body: B) -> f64 {
        // SAFETY: the caller guarantees the instruction set, which this function enables.
        unsafe { body.run::<F32x8>() }
    }
}

/// Eight f32 in one register.
#[derive(Clone, Copy)]
pub struct F32x8(__m256);

// SAFETY: for the trait and each block below: callers of `Vector` run inside `Avx2::vectorize` and pass pointers to
// eight elements.
unsafe impl Vector for F32x8 {
    const LANES: usize = 8;
    type Bits = __m256i;

    wrappers! {
        splat(value: f32) -> Self = Self(_mm256_set1_ps(value));
        load_f32(from: *const f32) -> Self = Self(_mm256_loadu_ps(from));
        store_f32(self, to: *mut f32) = _mm256_storeu_ps(to, self.0);
        load_f16(from: *const u16) -> Self = Self(_mm256_cvtph_ps(_mm_loadu_si128(from.cast())));
        store_bf16(self, to: *mut u16) = Self::store_bits16(self.round_bf16(), to);
        add(self, other: Self) -> Self = Self(_mm256_add_ps(self.0, other.0));
        sub(self, other: Self) -> Self = Self(_mm256_sub_ps(self.0, other.0));
        mul(self, other: Self) -> Self = Self(_mm256_mul_ps(self.0, other.0));
        div(self, other: Self) -> Self = Self(_mm256_div_ps(self.0, other.0));
        sqrt(self) -> Self = Self(_mm256_sqrt_ps(self.0));
        mul_add(self, factor: Self, addend: Self) -> Self = Self(_mm256_fmadd_ps(self.0, factor.0, addend.0));
        to_bits(self) -> __m256i = _mm256_castps_si256(self.0);
        from_bits(bits: __m256i) -> Self = Self(_mm256_castsi256_ps(bits));
        nan_to_zero(self) -> Self = Self(_mm256_and_ps(self.0, _mm256_cmp_ps::<_CMP_ORD_Q>(self.0, self.0)));
        widen_f16(bits: __m256i) -> Self = Self(_mm256_cvtph_ps(halves(bits)));
        widen_bf16(bits: __m256i) -> Self = Self(_mm256_castsi256_ps(_mm256_slli_epi32::<16>(bits)));
        load_bits32(from: *const u32) -> __m256i = _mm256_loadu_si256(from.cast());
        load_bits16(from: *const u16) -> __m256i = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()));
        store_bits32(bits: __m256i, to: *mut u32) = _mm256_storeu_si256(to.cast(), bits);
        store_bits16(bits: __m256i, to: *mut u16) = _mm_storeu_si128(to.cast(), halves(bits));
        bits_add(a: __m256i, b: __m256i) -> __m256i = _mm256_add_epi32(a, b);
        bits_sub(a: __m256i, b: __m256i) -> __m256i = _mm256_sub_epi32(a, b);
        bits_mul(a: __m256i, b: __m256i) -> __m256i = _mm256_mullo_epi32(a, b);
        bits_splat(value: u32) -> __m256i = _mm256_set1_epi32(value as i32);
        bits_or(a: __m256i, b: __m256i) -> __m256i = _mm256_or_si256(a, b);
        bits_xor(a: __m256i, b: __m256i) -> __m256i = _mm256_xor_si256(a, b);
        bits_and(a: __m256i, b: __m256i) -> __m256i = _mm256_and_si256(a, b);
        bits_shl(a: __m256i, by: __m256i) -> __m256i = _mm256_sllv_epi32(a, by);
        bits_shr(a: __m256i, by: __m256i) -> __m256i = _mm256_srlv_epi32(a, by);
        bits_max(a: __m256i, b: __m256i) -> __m256i = _mm256_max_epu32(a, b);
        bits_min(a: __m256i, b: __m256i) -> __m256i = _mm256_min_epu32(a, b);
        load_bytes(from: *const u8) -> __m256i = _mm256_cvtepu8_epi32(_mm_loadl_epi64(from.cast()));
    }

    #[inline(always)]
    unsafe fn store_f16(self, to: *mut u16) {
        // SAFETY: as stated at the impl.
        unsafe {
            let nan = _mm256_cmp_ps::<_CMP_UNORD_Q>(self.0, self.0);
            let quiet = _mm256_blendv_ps(self.0, _mm256_set1_ps(f32::NAN), nan);
            _mm_storeu_si128(to.cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(quiet));
        }
    }

    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> Self {
        // SAFETY: as stated at the impl.
        unsafe {
            let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()));
            Self(_mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide)))
        }
    }

    #[inline(always)]
    unsafe fn signum_times(self, magnitude: Self) -> Self {
        // SAFETY: as stated at the impl.
        unsafe {
            let sign = _mm256_set1_ps(-0.0);
            let signed = _mm256_or_ps(_mm256_and_ps(self.0, sign), _mm256_andnot_ps(sign, magnitude.0));
            let moves = _mm256_cmp_ps::<_CMP_GT_OQ>(_mm256_andnot_ps(sign, self.0), _mm256_setzero_ps());
            Self(_mm256_blendv_ps(self.0, signed, moves))
        }
    }

    #[inline(always)]
    unsafe fn add_squares(self, lanes: *mut f64) {
        // SAFETY: as stated at the impl.
        unsafe {
            let low = _mm256_cvtps_pd(_mm256_castps256_ps128(self.0));
            let high = _mm256_cvtps_pd(_mm256_extractf128_ps::<1>(self.0));
            let upper = lanes.add(4);
            _mm256_storeu_pd(lanes, _mm256_fmadd_pd(low, low, _mm256_loadu_pd(lanes)));
            _mm256_storeu_pd(upper, _mm256_fmadd_pd(high, high, _mm256_loadu_pd(upper)));
        }
    }

    #[inline(always)]
    unsafe fn round_f16(self) -> __m256i {
        // SAFETY: as stated at the impl.
        unsafe {
            let nan = _mm256_cmp_ps::<_CMP_UNORD_Q>(self.0, self.0);
            let quiet = _mm256_blendv_ps(self.0, _mm256_set1_ps(f32::NAN), nan);
            _mm256_cvtepu16_epi32(_mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(quiet))
        }
    }

    #[inline(always)]
    unsafe fn round_bf16(self) -> __m256i {
        // SAFETY: as stated at the impl.
        unsafe {
            let bits = _mm256_castps_si256(self.0);
            let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
            let bias = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
            let rounded = _mm256_srli_epi32::<16>(_mm256_add_epi32(bits, bias));
            let nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(self.0, self.0));
            _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), nan)
        }
    }

    #[inline(always)]
    unsafe fn stream_bits32(bits: __m256i, to: *mut u32) {
        // SAFETY: as stated at the impl; the caller aligned `to`.
        unsafe { _mm256_stream_si256(to.cast(), bits) }
    }

    #[inline(always)]
    unsafe fn stream_bits16(bits: __m256i, to: *mut u16) {
        // SAFETY: as stated at the impl; the caller aligned `to`.
        unsafe { _mm_stream_si128(to.cast(), halves(bits)) }
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
    unsafe fn largest(bits: __m256i) -> u32 {
        // SAFETY: as stated at the impl.
        unsafe {
            let four = _mm_max_epu32(_mm256_castsi256_si128(bits), _mm256_extracti128_si256::<1>(bits));
            let two = _mm_max_epu32(four, _mm_shuffle_epi32::<0b1110>(four));
            _mm_cvtsi128_si32(_mm_max_epu32(two, _mm_shuffle_epi32::<0b01>(two))) as u32
        }
    }

    #[inline(always)]
    unsafe fn within(a: __m256i, a_mask: u32, b: __m256i, b_mask: u32) -> bool {
        // SAFETY: as stated at the impl.
        unsafe {
            let a = _mm256_and_si256(a, _mm256_set1_epi32(!a_mask as i32));
            let b = _mm256_and_si256(b, _mm256_set1_epi32(!b_mask as i32));
            let outside = _mm256_or_si256(a, b);
            _mm256_testz_si256(outside, outside) == 1
        }
    }

    #[inline(always)]
    unsafe fn store_bytes(bits: __m256i, to: *mut u8) {
        // SAFETY: as stated at the impl.
        unsafe {
            let lowest = _mm256_shuffle_epi8(bits, _mm256_set1_epi32(0x0c08_0400));
            let (low, high) = (_mm256_castsi256_si128(lowest), _mm256_extracti128_si256::<1>(lowest));
            _mm_storel_epi64(to.cast(), _mm_unpacklo_epi32(low, high));
        }
    }

    #[inline(always)]
    unsafe fn pack(bits: __m256i, to: *mut u8) -> Width {
        // SAFETY: as stated at the impl.
        unsafe {
            let magnitude = _mm256_xor_si256(bits, _mm256_srai_epi32::<31>(bits));
            let fits = |limit: i32| _mm256_testz_si256(magnitude, _mm256_set1_epi32(!limit)) == 1;
            match (fits(0x7f), fits(0x7fff)) {
                (true, _) => {
                    Self::store_bytes(bits, to);
                    Width::W8
                }
                (false, true) => {
                    Self::store_bits16(bits, to.cast());
                    Width::W16
                }
                (false, false) => {
                    Self::store_bits32(bits, to.cast());
                    Width::W32
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn unpack(width: Width, from: *const u8) -> __m256i {
        // SAFETY: as stated at the impl.
        unsafe {
            match width {
                Width::W8 => _mm256_cvtepi8_epi32(_mm_loadl_epi64(from.cast())),
                Width::W16 => _mm256_cvtepi16_epi32(_mm_loadu_si128(from.cast())),
                Width::W32 => Self::load_bits32(from.cast()),
            }
        }
    }
}

/// The lower 16 bits of eight 32-bit lanes, in order.
///
/// # Safety
/// The processor has AVX2.
#[inline(always)]
unsafe fn halves(bits: __m256i) -> __m128i {
    // SAFETY: the caller upholds this function's contract.
    unsafe {
        let low_bytes = _mm256_set1_epi64x(0x0d0c_0908_0504_0100);
        let packed = _mm256_shuffle_epi8(bits, low_bytes);
        _mm256_castsi256_si128(_mm256_permute4x64_epi64::<0b1000>(packed))
    }
}
