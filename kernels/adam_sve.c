// Adam for SVE of any vector length. Compiled twice: USE_BFCVT rounds to bf16 by the instruction of the BF16 extension.
//
// Nothing here may run before the processor was asked for SVE, so the file holds the kernel and nothing else.

#include "adam.h"

#include <arm_sve.h>

#ifdef USE_BFCVT
#define KERNEL spillway_adam_sve_bf16
#else
#define KERNEL spillway_adam_sve
#endif

#define INLINE static inline __attribute__((always_inline))

// Vectors per round of the main loop: at 128 bits one cache line of f32.
enum { UNROLL = 4 };

// How far ahead of the round its cache lines are asked for; long enough for memory latency at a few bytes per cycle.
enum { AHEAD = 1024 };

INLINE size_t size_of(enum element type)
{
    return type == ABSENT ? 0 : type == F32 ? 4 : 2;
}

// 16-bit elements are loaded and stored one per 32-bit container, so that no lane ever moves.
INLINE svfloat32_t load(svbool_t active, enum element type, const char *at, int64_t vector)
{
    if (type == F32)
        return svld1_vnum_f32(active, (const float *)at, vector);
    svuint32_t bits = svld1uh_vnum_u32(active, (const uint16_t *)at, vector);
    if (type == F16)
        return svcvt_f32_f16_x(active, svreinterpret_f16_u32(bits));
    return svreinterpret_f32_u32(svlsl_n_u32_x(active, bits, 16));
}

// Every NaN is the default one by FPCR, whose upper half is what a NaN has to become, in both ways to round.
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

INLINE void store(svbool_t active, enum element type, svfloat32_t value, char *at, int64_t vector)
{
    if (type == F32)
        svst1_vnum_f32(active, (float *)at, vector, value);
    else if (type == F16)
        svst1h_vnum_u32(active, (uint16_t *)at, vector, svreinterpret_u32_f16(svcvt_f16_f32_x(active, value)));
    else if (type == BF16)
        svst1h_vnum_u32(active, (uint16_t *)at, vector, bf16_bits(active, value));
}

// Adds the squares of one vector to consecutive f64 lanes, each by one fma.
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

// Steps the active elements of one vector.
INLINE void step(svbool_t active, const struct adam_rule *rule, enum decay decay, enum element param,
                 enum element state, enum element grad, enum element copy, struct adam_spans at, double *lanes,
                 int64_t vector)
{
    svfloat32_t g = svmul_n_f32_x(active, load(active, grad, at.grad, vector), rule->grad_scale);
    svfloat32_t p = load(active, param, at.param, vector);
    svfloat32_t m = load(active, state, at.exp_avg, vector);
    svfloat32_t v = load(active, state, at.exp_avg_sq, vector);

    if (lanes)
        add_squares(active, g, lanes, vector);
    if (decay == L2)
        g = svmla_n_f32_x(active, g, p, rule->decay_factor);
    m = svmla_n_f32_x(active, svmul_n_f32_x(active, m, rule->beta1), g, rule->one_minus_beta1);
    v = svmla_n_f32_x(active, svmul_n_f32_x(active, v, rule->beta2), svmul_f32_x(active, g, g), rule->one_minus_beta2);
    svfloat32_t denominator = svmad_f32_x(active, svsqrt_f32_x(active, v), svdup_n_f32(rule->inv_sqrt_correction2),
                                          svdup_n_f32(rule->eps));
    if (decay == DECOUPLED)
        p = svmla_n_f32_x(active, p, p, rule->decay_factor);
    p = svmla_n_f32_x(active, p, svdiv_f32_x(active, m, denominator), rule->step_size);

    store(active, state, m, at.exp_avg, vector);
    store(active, state, v, at.exp_avg_sq, vector);
    store(active, param, p, at.param, vector);
    store(active, copy, p, at.param_copy, vector);
}

INLINE struct adam_spans advance(struct adam_spans at, enum element param, enum element state, enum element grad,
                                 enum element copy, size_t elements)
{
    at.param += elements * size_of(param);
    at.grad += elements * size_of(grad);
    at.exp_avg += elements * size_of(state);
    at.exp_avg_sq += elements * size_of(state);
    at.param_copy += elements * size_of(copy);
    return at;
}

// Steps n elements whose squares, if wanted, go to lanes in order.
INLINE struct adam_spans row(const struct adam_rule *rule, enum decay decay, enum element param, enum element state,
                             enum element grad, enum element copy, struct adam_spans at, size_t n, double *lanes)
{
    const size_t round = UNROLL * svcntw();
    for (; n >= round; n -= round) {
        __builtin_prefetch(at.param + AHEAD, 1);
        __builtin_prefetch(at.grad + AHEAD, 0);
        __builtin_prefetch(at.exp_avg + AHEAD, 1);
        __builtin_prefetch(at.exp_avg_sq + AHEAD, 1);
#pragma GCC unroll 4
        for (int vector = 0; vector < UNROLL; vector++)
            step(svptrue_b32(), rule, decay, param, state, grad, copy, at, lanes, vector);
        at = advance(at, param, state, grad, copy, round);
        lanes = lanes ? lanes + round : lanes;
    }
    for (size_t done = 0; done < n; done += svcntw()) {
        step(svwhilelt_b32_u64(done, n), rule, decay, param, state, grad, copy, at, lanes, 0);
        at = advance(at, param, state, grad, copy, n - done < svcntw() ? n - done : svcntw());
        lanes = lanes ? lanes + svcntw() : lanes;
    }
    return at;
}

// Squares go row by row: a vector length that does not divide the lanes would otherwise run over their end.
INLINE void walk(const struct adam_rule *rule, enum decay decay, enum element param, enum element state,
                 enum element grad, enum element copy, struct adam_spans at, size_t n, double *lanes)
{
    const struct adam_rule local = *rule;
    if (!lanes) {
        row(&local, decay, param, state, grad, copy, at, n, NULL);
        return;
    }
    while (n > 0) {
        size_t elements = n < SQUARE_LANES ? n : SQUARE_LANES;
        at = row(&local, decay, param, state, grad, copy, at, elements, lanes);
        n -= elements;
    }
}

#define WALK(DECAY, P, S, G, C)                                                                                        \
    (lanes ? walk(rule, DECAY, P, S, G, C, spans, n, lanes) : walk(rule, DECAY, P, S, G, C, spans, n, NULL))

#define CASE(P, S, G, C)                                                                                               \
    case ADAM_TYPES(P, S, G, C):                                                                                       \
        if (decay == NO_DECAY)                                                                                         \
            WALK(NO_DECAY, P, S, G, C);                                                                                \
        else if (decay == L2)                                                                                          \
            WALK(L2, P, S, G, C);                                                                                      \
        else                                                                                                           \
            WALK(DECOUPLED, P, S, G, C);                                                                               \
        return 1

_Bool KERNEL(const struct adam_rule *rule, enum decay decay, unsigned types, struct adam_spans spans, size_t n,
             double *lanes)
{
    switch (types) {
        CASE(F32, F32, F32, ABSENT);
        CASE(F32, F32, F32, F16);
        CASE(F32, F32, F32, BF16);
        CASE(F32, F32, F16, ABSENT);
        CASE(F32, F32, F16, F16);
        CASE(F32, F32, F16, BF16);
        CASE(F32, F32, BF16, ABSENT);
        CASE(F32, F32, BF16, F16);
        CASE(F32, F32, BF16, BF16);
        CASE(F16, F32, F16, ABSENT);
        CASE(F16, F16, F16, ABSENT);
        CASE(BF16, F32, BF16, ABSENT);
        CASE(BF16, BF16, BF16, ABSENT);
    default:
        return 0;
    }
}
