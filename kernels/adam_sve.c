// In-place Adam for SVE with any vector length. Compiled twice, with USE_BFCVT and without.
//
// The whole file is compiled with SVE enabled, so no function of it may run before SVE was detected. For that reason
// the file contains only the kernel.

#include "sve.h"

#ifdef USE_BFCVT
#define KERNEL spillway_adam_sve_bf16
#else
#define KERNEL spillway_adam_sve
#endif

// Vectors per iteration of the main loop. With 128-bit vectors, one iteration is one cache line of f32.
enum { UNROLL = 4 };

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
    moments(active, rule, g, &m, &v);
    svfloat32_t change = update(active, rule, m, v);
    if (decay == DECOUPLED)
        p = svmla_n_f32_x(active, p, p, rule->decay_factor);
    p = svmla_n_f32_x(active, p, change, rule->step_size);

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

// Steps n elements. With lanes not NULL, adds the square of element i to lanes[i].
INLINE struct adam_spans row(const struct adam_rule *rule, enum decay decay, enum element param, enum element state,
                             enum element grad, enum element copy, struct adam_spans at, size_t n, double *lanes)
{
    const size_t round = UNROLL * svcntw();
    for (; n >= round; n -= round) {
        __builtin_prefetch(at.param + PREFETCH_DISTANCE, 1);
        __builtin_prefetch(at.grad + PREFETCH_DISTANCE, 0);
        __builtin_prefetch(at.exp_avg + PREFETCH_DISTANCE, 1);
        __builtin_prefetch(at.exp_avg_sq + PREFETCH_DISTANCE, 1);
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

// With lanes, processes rows of SQUARE_LANES elements: a vector length that does not divide SQUARE_LANES would
// otherwise write past the end of lanes.
INLINE void chunk_loop(const struct adam_rule *rule, enum decay decay, enum element param, enum element state,
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
    (lanes ? chunk_loop(rule, DECAY, P, S, G, C, spans, n, lanes) : chunk_loop(rule, DECAY, P, S, G, C, spans, n, NULL))

#define CASE(P, S, G, C)                                                                                               \
    case ADAM_TYPES(P, S, G, C):                                                                                       \
        if (decay == NO_DECAY)                                                                                         \
            WALK(NO_DECAY, P, S, G, C);                                                                                \
        else if (decay == L2)                                                                                          \
            WALK(L2, P, S, G, C);                                                                                      \
        else                                                                                                           \
            WALK(DECOUPLED, P, S, G, C);                                                                               \
        return 1;

_Bool KERNEL(const struct adam_rule *rule, enum decay decay, unsigned types, struct adam_spans spans, size_t n,
             double *lanes)
{
    switch (types) {
        ADAM_COMBINATIONS(CASE)
    default:
        return 0;
    }
}
