// Reversible Adam for SVE with any vector length: steps that write a log or a shadow, undo, and undo with a new step.
// Compiled twice, with USE_BFCVT and without.
//
//   record   for each group: step; estimate the old values from the new ones; compute the differences;
//            for each stream of the group: find the narrowest width that fits; pack. A group whose old moments are
//            zeros packs the parameter only
//   undo     for each group: unpack the streams; estimate in the same way; add the differences; step again if requested
//
// A full group of four vectors keeps its differences in registers. Vectors of other lengths, and a last group that is
// not full, keep the differences in memory; lanes without an element are zero.

#include "log_sve.h"

#ifdef USE_BFCVT
#define RECORD spillway_adam_sve_bf16_record
#define UNDO spillway_adam_sve_bf16_undo
#else
#define RECORD spillway_adam_sve_record
#define UNDO spillway_adam_sve_undo
#endif

struct types {
    enum element param, state, grad, copy;
};

// The coefficients of a step and of its inverse.
struct inverse {
    struct adam_rule rule;
    enum decay decay;
    float decay_inverse, beta1_inverse, beta2_inverse;
};

// 1 / factor; 0 for a factor of zero, because a multiplication by zero lost the old value.
INLINE float inverse(float factor)
{
    return factor == 0 ? 0 : 1 / factor;
}

INLINE struct inverse inverse_of(const struct adam_rule *rule, enum decay decay)
{
    return (struct inverse){*rule, decay, inverse(1 + rule->decay_factor), inverse(rule->beta1), inverse(rule->beta2)};
}

// A predicate with all lanes or none. Predicated arithmetic costs less than a branch.
INLINE svbool_t when(int condition)
{
    return svdup_n_b32(condition);
}

// The gradient with L2 weight decay added.
INLINE svfloat32_t decayed(const struct inverse *step, svfloat32_t g, svfloat32_t p)
{
    return svmla_n_f32_m(when(step->decay == L2), g, p, step->rule.decay_factor);
}

// One step with the scaled gradient g. Returns the change of the parameter before the multiplication by step_size.
INLINE svfloat32_t forward(svbool_t active, const struct inverse *step, svfloat32_t g, svfloat32_t *p, svfloat32_t *m,
                           svfloat32_t *v)
{
    const struct adam_rule *rule = &step->rule;
    moments(active, rule, decayed(step, g, *p), m, v);
    svfloat32_t change = update(active, rule, *m, *v);
    *p = svmla_n_f32_m(when(step->decay == DECOUPLED), *p, *p, rule->decay_factor);
    *p = svmla_n_f32_x(active, *p, change, rule->step_size);
    return change;
}

INLINE svfloat32_t estimate_param(svbool_t active, const struct inverse *step, svfloat32_t p, svfloat32_t change)
{
    p = svmls_n_f32_x(active, p, change, step->rule.step_size);
    return svmul_n_f32_m(when(step->decay == DECOUPLED), p, step->decay_inverse);
}

INLINE svfloat32_t estimate_exp_avg(svbool_t active, const struct inverse *step, svfloat32_t m, svfloat32_t g)
{
    return svmul_n_f32_x(active, svmls_n_f32_x(active, m, g, step->rule.one_minus_beta1), step->beta1_inverse);
}

INLINE svfloat32_t estimate_exp_avg_sq(svbool_t active, const struct inverse *step, svfloat32_t v, svfloat32_t g)
{
    svfloat32_t squared = svmul_f32_x(active, g, g);
    return svmul_n_f32_x(active, svmls_n_f32_x(active, v, squared, step->rule.one_minus_beta2), step->beta2_inverse);
}

// Zero in the lanes whose sign is set.
INLINE svfloat32_t not_negative(svbool_t active, svfloat32_t x)
{
    return svsel_f32(svcmpge_n_s32(active, svreinterpret_s32_f32(x), 0), x, svdup_n_f32(0));
}

INLINE struct adam_states states_from(struct adam_states states, struct types types, size_t element)
{
    states.param += element * size_of(types.param);
    states.exp_avg += element * size_of(types.state);
    states.exp_avg_sq += element * size_of(types.state);
    return states;
}

INLINE struct adam_undo_spans spans_from(const struct adam_undo_spans *spans, struct types types, size_t element)
{
    return (struct adam_undo_spans){
        states_from(spans->before, types, element),
        states_from(spans->after, types, element),
        spans->grad + element * size_of(types.grad),
        spans->param_copy + element * size_of(types.copy),
    };
}

INLINE void ask_for(struct adam_states states, const char *grad)
{
    __builtin_prefetch(states.param + PREFETCH_DISTANCE, 1);
    __builtin_prefetch(grad + PREFETCH_DISTANCE, 0);
    __builtin_prefetch(states.exp_avg + PREFETCH_DISTANCE, 1);
    __builtin_prefetch(states.exp_avg_sq + PREFETCH_DISTANCE, 1);
}

INLINE void store_states(svbool_t active, struct types types, struct adam_states to, int64_t vector, svuint32_t p,
                         svuint32_t m, svuint32_t v)
{
    store_bits(active, types.param, p, to.param, vector);
    store_bits(active, types.state, m, to.exp_avg, vector);
    store_bits(active, types.state, v, to.exp_avg_sq, vector);
}

// True if all old moments of a group of `count` elements are zeros without a sign.
INLINE int all_zeros(struct types types, struct adam_states old, size_t count)
{
    // The first element answers for most groups of later steps.
    if (types.state == F32 ? *(const uint32_t *)old.exp_avg : *(const uint16_t *)old.exp_avg)
        return 0;
    for (size_t lane = 0; lane < count; lane += svcntw()) {
        const svbool_t some = svwhilelt_b32_u64(lane, count);
        const struct adam_states at = states_from(old, types, lane);
        svuint32_t m = load_bits(some, types.state, at.exp_avg, 0), v = load_bits(some, types.state, at.exp_avg_sq, 0);
        if (svptest_any(some, svcmpne_n_u32(some, both(m, v), 0)))
            return 0;
    }
    return 1;
}

// Steps one vector. If logged, also returns the differences.
INLINE void record_vector(svbool_t active, const struct inverse *step, struct types types, struct adam_undo_spans at,
                          int64_t vector, double *lanes, int logged, svuint32_t *p_difference,
                          svuint32_t *m_difference, svuint32_t *v_difference)
{
    svfloat32_t g = load(active, types.grad, at.grad, vector);
    svuint32_t old_p = load_bits(active, types.param, at.before.param, vector);
    svuint32_t old_m = load_bits(active, types.state, at.before.exp_avg, vector);
    svuint32_t old_v = load_bits(active, types.state, at.before.exp_avg_sq, vector);
    svfloat32_t p = decode(active, types.param, old_p), m = decode(active, types.state, old_m);
    svfloat32_t v = decode(active, types.state, old_v);

    g = svmul_n_f32_x(active, g, step->rule.grad_scale);
    add_squares(active, g, lanes, vector);
    svfloat32_t change = forward(active, step, g, &p, &m, &v);
    svuint32_t new_p = encode(active, types.param, p), new_m = encode(active, types.state, m);
    svuint32_t new_v = encode(active, types.state, v);
    store_states(active, types, at.after, vector, new_p, new_m, new_v);
    store(active, types.copy, p, at.param_copy, vector);
    if (!logged)
        return;

    p = decode(active, types.param, new_p);
    if (types.state != F32) {
        m = decode(active, types.state, new_m);
        v = decode(active, types.state, new_v);
        change = update(active, &step->rule, m, v);
    }
    *p_difference = difference(active, types.param, old_p, estimate_param(active, step, p, change));
    g = decayed(step, g, decode(active, types.param, old_p));
    *m_difference = difference(active, types.state, old_m, estimate_exp_avg(active, step, m, g));
    *v_difference = difference(active, types.state, old_v, estimate_exp_avg_sq(active, step, v, g));
}

// Rolls back one vector. The estimates of moments count in the lanes `moments`. With redo_scale not NULL, repeats the
// step with *redo_scale as the gradient scale.
INLINE void undo_vector(svbool_t active, svbool_t moments, const struct inverse *step, const float *redo_scale,
                        struct types types, struct adam_undo_spans at, int64_t vector, int logged,
                        svuint32_t p_difference, svuint32_t m_difference, svuint32_t v_difference)
{
    svfloat32_t grad = load(active, types.grad, at.grad, vector);
    svfloat32_t p = load(active, types.param, at.after.param, vector);
    svfloat32_t m = load(active, types.state, at.after.exp_avg, vector);
    svfloat32_t v = load(active, types.state, at.after.exp_avg_sq, vector);

    svfloat32_t g = svmul_n_f32_x(active, grad, step->rule.grad_scale);
    p = estimate_param(active, step, p, update(active, &step->rule, m, v));
    svuint32_t old_p = correct(active, active, types.param, logged, p_difference, p);
    p = decode(active, types.param, old_p);
    g = decayed(step, g, p);
    m = estimate_exp_avg(active, step, m, g);
    svuint32_t old_m = correct(active, moments, types.state, logged, m_difference, m);
    v = estimate_exp_avg_sq(active, step, v, g);
    // Without a log, a negative estimate would give the next step a NaN from its square root.
    if (!logged)
        v = not_negative(active, v);
    svuint32_t old_v = correct(active, moments, types.state, logged, v_difference, v);
    if (redo_scale) {
        m = decode(active, types.state, old_m);
        v = decode(active, types.state, old_v);
        forward(active, step, svmul_n_f32_x(active, grad, *redo_scale), &p, &m, &v);
        old_p = encode(active, types.param, p);
        old_m = encode(active, types.state, m);
        old_v = encode(active, types.state, v);
    }
    store_states(active, types, at.before, vector, old_p, old_m, old_v);
    store(active, types.copy, decode(active, types.param, old_p), at.param_copy, vector);
}

// Records a full group in four vectors. Returns the end of the group in the log, or NULL without a log.
INLINE unsigned char *record_four(const struct inverse *step, struct types types, struct adam_undo_spans at,
                                  double *lanes, unsigned char *log)
{
    svbool_t all = svptrue_b32();
    const int moments_zero = log && all_zeros(types, at.before, GROUP);
    svuint32_t pa, pb, pc, pd, ma, mb, mc, md, va, vb, vc, vd;
    record_vector(all, step, types, at, 0, lanes, log != NULL, &pa, &ma, &va);
    record_vector(all, step, types, at, 1, lanes, log != NULL, &pb, &mb, &vb);
    record_vector(all, step, types, at, 2, lanes, log != NULL, &pc, &mc, &vc);
    record_vector(all, step, types, at, 3, lanes, log != NULL, &pd, &md, &vd);
    if (!log)
        return NULL;
    const enum width p = width_of_four(pa, pb, pc, pd);
    if (moments_zero) {
        *log = (unsigned char)(ZEROS + p);
        return pack_four(p, pa, pb, pc, pd, log + 1);
    }
    const enum width m = width_of_four(ma, mb, mc, md);
    const enum width v = width_of_four(va, vb, vc, vd);
    *log = (unsigned char)(p | m << 2 | v << 4);
    log = pack_four(p, pa, pb, pc, pd, log + 1);
    log = pack_four(m, ma, mb, mc, md, log);
    return pack_four(v, va, vb, vc, vd, log);
}

INLINE const unsigned char *undo_four(const struct inverse *step, const float *redo_scale, struct types types,
                                      struct adam_undo_spans at, const unsigned char *log)
{
    svbool_t all = svptrue_b32();
    svuint32_t pa, pb, pc, pd, ma, mb, mc, md, va, vb, vc, vd;
    pa = pb = pc = pd = ma = mb = mc = md = va = vb = vc = vd = svdup_n_u32(0);
    const int logged = log != NULL;
    svbool_t moments = all;
    if (logged) {
        const unsigned control = *log;
        log = unpack_four(control & 3, &pa, &pb, &pc, &pd, log + 1);
        if (control & ZEROS) {
            moments = svpfalse_b();
        } else {
            log = unpack_four(control >> 2 & 3, &ma, &mb, &mc, &md, log);
            log = unpack_four(control >> 4 & 3, &va, &vb, &vc, &vd, log);
        }
    }
    undo_vector(all, moments, step, redo_scale, types, at, 0, logged, pa, ma, va);
    undo_vector(all, moments, step, redo_scale, types, at, 1, logged, pb, mb, vb);
    undo_vector(all, moments, step, redo_scale, types, at, 2, logged, pc, mc, vc);
    undo_vector(all, moments, step, redo_scale, types, at, 3, logged, pd, md, vd);
    return log;
}

struct differences {
    uint32_t of[STREAMS][GROUP];
};

// Records a group of `count` elements in vectors of any length.
INLINE unsigned char *record_group(const struct inverse *step, struct types types, struct adam_undo_spans at,
                                   size_t count, double *lanes, unsigned char *log)
{
    struct differences kept;
    const int moments_zero = log && all_zeros(types, at.before, count);
    svuint32_t p_seen = svdup_n_u32(0), m_seen = p_seen, v_seen = p_seen;
    for (size_t lane = 0; lane < GROUP; lane += svcntw()) {
        svbool_t group = svwhilelt_b32_u64(lane, GROUP), active = svwhilelt_b32_u64(lane, count);
        svuint32_t p = svdup_n_u32(0), m = p, v = p;
        record_vector(active, step, types, spans_from(&at, types, lane), 0, lanes + lane, log != NULL, &p, &m, &v);
        svst1_u32(group, kept.of[PARAM] + lane, p);
        svst1_u32(group, kept.of[EXP_AVG] + lane, m);
        svst1_u32(group, kept.of[EXP_AVG_SQ] + lane, v);
        p_seen = both(p_seen, magnitude(p));
        m_seen = both(m_seen, magnitude(m));
        v_seen = both(v_seen, magnitude(v));
    }
    if (!log)
        return NULL;
    const enum width p = width_of(p_seen), m = width_of(m_seen), v = width_of(v_seen);
    if (moments_zero) {
        *log = (unsigned char)(ZEROS + p);
        return pack_group(p, kept.of[PARAM], log + 1);
    }
    *log = (unsigned char)(p | m << 2 | v << 4);
    log = pack_group(p, kept.of[PARAM], log + 1);
    log = pack_group(m, kept.of[EXP_AVG], log);
    return pack_group(v, kept.of[EXP_AVG_SQ], log);
}

INLINE const unsigned char *undo_group(const struct inverse *step, const float *redo_scale, struct types types,
                                       struct adam_undo_spans at, size_t count, const unsigned char *log)
{
    struct differences kept = {0};
    const int logged = log != NULL;
    size_t moments = count;
    if (logged) {
        const unsigned control = *log;
        log = unpack_group(control & 3, kept.of[PARAM], log + 1);
        if (control & ZEROS) {
            moments = 0;
        } else {
            log = unpack_group(control >> 2 & 3, kept.of[EXP_AVG], log);
            log = unpack_group(control >> 4 & 3, kept.of[EXP_AVG_SQ], log);
        }
    }
    for (size_t lane = 0; lane < GROUP; lane += svcntw()) {
        svbool_t active = svwhilelt_b32_u64(lane, count);
        svuint32_t p = svld1_u32(active, kept.of[PARAM] + lane), m = svld1_u32(active, kept.of[EXP_AVG] + lane);
        svuint32_t v = svld1_u32(active, kept.of[EXP_AVG_SQ] + lane);
        undo_vector(active, svwhilelt_b32_u64(lane, moments), step, redo_scale, types, spans_from(&at, types, lane), 0,
                    logged, p, m, v);
    }
    return log;
}

// How many of n elements are processed as groups of four vectors.
INLINE size_t in_fours(size_t n)
{
    return svcntw() == GROUP / 4 ? n / GROUP * GROUP : 0;
}

INLINE unsigned char *record(const struct adam_rule *rule, enum decay decay, struct types types,
                             const struct adam_undo_spans *spans, size_t n, double *lanes, unsigned char *log)
{
    const struct inverse step = inverse_of(rule, decay);
    const struct adam_undo_spans all = *spans;
    size_t first = 0;
    for (; first < in_fours(n); first += GROUP) {
        const struct adam_undo_spans at = spans_from(&all, types, first);
        ask_for(at.before, at.grad);
        log = record_four(&step, types, at, lanes + first % SQUARE_LANES, log);
    }
    for (; first < n; first += GROUP) {
        const size_t count = n - first < GROUP ? n - first : GROUP;
        log = record_group(&step, types, spans_from(&all, types, first), count, lanes + first % SQUARE_LANES, log);
    }
    return log;
}

INLINE void undo(const struct adam_rule *rule, const float *redo_scale, enum decay decay, struct types types,
                 const struct adam_undo_spans *spans, size_t n, const unsigned char *log)
{
    const struct inverse step = inverse_of(rule, decay);
    const struct adam_undo_spans all = *spans;
    size_t first = 0;
    for (; first < in_fours(n); first += GROUP) {
        const struct adam_undo_spans at = spans_from(&all, types, first);
        ask_for(at.after, at.grad);
        log = undo_four(&step, redo_scale, types, at, log);
    }
    for (; first < n; first += GROUP) {
        const size_t count = n - first < GROUP ? n - first : GROUP;
        log = undo_group(&step, redo_scale, types, spans_from(&all, types, first), count, log);
    }
}

_Bool RECORD(const struct adam_rule *rule, enum decay decay, unsigned types, const struct adam_undo_spans *spans,
             size_t n, double *lanes, unsigned char **log)
{
#define CASE(P, S, G, C)                                                                                               \
    case ADAM_TYPES(P, S, G, C):                                                                                       \
        *log = record(rule, decay, (struct types){P, S, G, C}, spans, n, lanes, *log);                                 \
        return 1;
    switch (types) {
        ADAM_COMBINATIONS(CASE)
    default:
        return 0;
    }
#undef CASE
}

_Bool UNDO(const struct adam_rule *rule, const float *redo_scale, enum decay decay, unsigned types,
           const struct adam_undo_spans *spans, size_t n, const unsigned char *log)
{
#define CASE(P, S, G, C)                                                                                               \
    case ADAM_TYPES(P, S, G, C):                                                                                       \
        undo(rule, redo_scale, decay, (struct types){P, S, G, C}, spans, n, log);                                           \
        return 1;
    switch (types) {
        ADAM_COMBINATIONS(CASE)
    default:
        return 0;
    }
#undef CASE
}
