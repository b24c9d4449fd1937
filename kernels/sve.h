// Common code of the SVE kernels: loads and stores of the element types, and the arithmetic of Adam.
//
// With USE_BFCVT, rounding to bf16 uses the instruction of the BF16 extension.

#ifndef SPILLWAY_KERNELS_SVE_H
#define SPILLWAY_KERNELS_SVE_H

#include "adam.h"

#include <arm_sve.h>

#define INLINE static inline __attribute__((always_inline))

// Prefetch distance in bytes. It covers the memory latency at a few bytes per cycle.
enum { PREFETCH_DISTANCE = 1024 };

INLINE size_t size_of(enum element type)
{
    return type == ABSENT ? 0 : type == F32 ? 4 : 2;
}

// Loads the bit patterns of consecutive elements. 16-bit patterns are zero-extended to one 32-bit lane each, so that no
// element changes its lane. Inactive lanes are zero.
INLINE svuint32_t load_bits(svbool_t active, enum element type, const char *at, int64_t vector)
{
    if (type == F32)
        return svld1_vnum_u32(active, (const uint32_t *)at, vector);
    return svld1uh_vnum_u32(active, (const uint16_t *)at, vector);
}

INLINE void store_bits(svbool_t active, enum element type, svuint32_t bits, char *at, int64_t vector)
{
    if (type == F32)
        svst1_vnum_u32(active, (uint32_t *)at, vector, bits);
    else if (type != ABSENT)
        svst1h_vnum_u32(active, (uint16_t *)at, vector, bits);
}

INLINE svfloat32_t decode(svbool_t active, enum element type, svuint32_t bits)
{
    if (type == F16)
        return svcvt_f32_f16_x(active, svreinterpret_f16_u32(bits));
    return svreinterpret_f32_u32(type == F32 ? bits : svlsl_n_u32_x(active, bits, 16));
}

// FPCR makes every NaN the default NaN. Its upper half is the required bf16 NaN, so both code paths round NaN
// correctly.
INLINE svuint32_t bf16_bits(svbool_t active, svfloat32_t value)
{
#ifdef USE_BFCVT
    return svreinterpret_u32_bf16(svcvt_bf16_f32_x(active, value));
#else
    svuint32_t bits = svreinterpret_u32_f32(value);
    svuint32_t odd = svand_n_u32_x(active, svlsr_n_u32_x(active, bits, 16), 1);
    svuint32_t bias = svadd_u32_x(active, odd, svdup_n_u32(0x7fff));
    return svlsr_n_u32_x(active, svadd_u32_x(active, bits, bias), 16);
#endif
}

INLINE svuint32_t encode(svbool_t active, enum element type, svfloat32_t value)
{
    if (type == F16)
        return svreinterpret_u32_f16(svcvt_f16_f32_x(active, value));
    return type == BF16 ? bf16_bits(active, value) : svreinterpret_u32_f32(value);
}

INLINE svfloat32_t load(svbool_t active, enum element type, const char *at, int64_t vector)
{
    return decode(active, type, load_bits(active, type, at, vector));
}

INLINE void store(svbool_t active, enum element type, svfloat32_t value, char *at, int64_t vector)
{
    store_bits(active, type, encode(active, type, value), at, vector);
}

// Adds the squares of one vector to consecutive f64 lanes, each with one fma.
INLINE void add_squares(svbool_t active, svfloat32_t grad, double *lanes, int64_t vector)
{
    svuint32_t bits = svreinterpret_u32_f32(grad);
    svbool_t low_active = svunpklo_b(active), high_active = svunpkhi_b(active);
    svfloat64_t low = svcvt_f64_f32_x(low_active, svreinterpret_f32_u64(svunpklo_u64(bits)));
    svfloat64_t high = svcvt_f64_f32_x(high_active, svreinterpret_f32_u64(svunpkhi_u64(bits)));
    svfloat64_t low_sum = svld1_vnum_f64(low_active, lanes, 2 * vector);
    svfloat64_t high_sum = svld1_vnum_f64(high_active, lanes, 2 * vector + 1);
    svst1_vnum_f64(low_active, lanes, 2 * vector, svmla_f64_x(low_active, low_sum, low, low));
    svst1_vnum_f64(high_active, lanes, 2 * vector + 1, svmla_f64_x(high_active, high_sum, high, high));
}

// m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
INLINE svfloat32_t update(svbool_t active, const struct adam_rule *rule, svfloat32_t m, svfloat32_t v)
{
    svfloat32_t denominator = svmad_f32_x(active, svsqrt_f32_x(active, v), svdup_n_f32(rule->inv_sqrt_correction2),
                                          svdup_n_f32(rule->eps));
    return svdiv_f32_x(active, m, denominator);
}

// Updates the moments. g is the scaled gradient, with L2 weight decay already added.
INLINE void moments(svbool_t active, const struct adam_rule *rule, svfloat32_t g, svfloat32_t *m, svfloat32_t *v)
{
    *m = svmla_n_f32_x(active, svmul_n_f32_x(active, *m, rule->beta1), g, rule->one_minus_beta1);
    *v = svmla_n_f32_x(active, svmul_n_f32_x(active, *v, rule->beta2), svmul_f32_x(active, g, g),
                       rule->one_minus_beta2);
}

#endif
