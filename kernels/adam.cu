// One step of Adam or AdamW, for every combination of element types that the CPU kernels support.
//
// The operations and their order are the same as in kernels/src/rules.rs. A step reads the states `from` and writes the
// states `to`, which may be the same. Unless `tiles` is null, it receives one sum of squares of the scaled gradient per
// tile.

// Coefficients of a step. The host rounds each to f32 once.
struct Rule {
    // Masks: all ones if this kind of weight decay is enabled, else zero. A disabled kind must not change the sign of a
    // zero or a NaN.
    u32 l2, decoupled;
    float grad_scale, beta1, one_minus_beta1, beta2, one_minus_beta2, inv_sqrt_correction2, eps, step_size, decay_factor;
    // Lower and upper half of the key of stochastic rounding; read only by the kernels that round so.
    u32 key[2];
};

template <class P, class S> struct States {
    typename P::Raw *param;
    typename S::Raw *exp_avg;
    typename S::Raw *exp_avg_sq;
};

struct Values {
    float param, exp_avg, exp_avg_sq;
};

// Bitwise selection: `then` for a mask of all ones, else `otherwise`. With a branch, compilers duplicate the loop.
static __device__ __forceinline__ float pick(u32 mask, float then, float otherwise) {
    return __uint_as_float((__float_as_uint(then) & mask) | (__float_as_uint(otherwise) & ~mask));
}

static __device__ __forceinline__ float update(const Rule &rule, float m, float v) {
    return __fdiv_rn(m, __fmaf_rn(__fsqrt_rn(v), rule.inv_sqrt_correction2, rule.eps));
}

// One step of one element. `grad` is the scaled gradient.
static __device__ __forceinline__ Values forward(const Rule &rule, Values old, float grad) {
    float g = pick(rule.l2, __fmaf_rn(old.param, rule.decay_factor, grad), grad);
    float m = __fmaf_rn(g, rule.one_minus_beta1, __fmul_rn(old.exp_avg, rule.beta1));
    float v = __fmaf_rn(__fmul_rn(g, g), rule.one_minus_beta2, __fmul_rn(old.exp_avg_sq, rule.beta2));
    float p = pick(rule.decoupled, __fmaf_rn(old.param, rule.decay_factor, old.param), old.param);
    p = __fmaf_rn(update(rule, m, v), rule.step_size, p);
    Values now = {p, m, v};
    return now;
}

// A bijection in which every bit of the argument changes half of the bits of the result (SplitMix64).
static __device__ __forceinline__ u64 mix(u64 x) {
    x += 0x9e3779b97f4a7c15ull;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

// 32 random bits for an element, as kernels/src/stochastic.rs makes them.
static __device__ __forceinline__ u32 random_bits(u64 key, u64 index) {
    u64 keys = mix(key ^ (index >> 32));
    u32 x = (u32)index ^ (u32)keys;
    x = (x ^ (x >> 17)) * 0xed5ad4bbu + (u32)(keys >> 32);
    x = (x ^ (x >> 11)) * 0xac4c1b51u;
    x = (x ^ (x >> 15)) * 0x31848babu;
    return x ^ (x >> 14);
}

// Rounds to a value that bf16 holds exactly, by random bits below 2^16. Inf and NaN stay as they are.
static __device__ __forceinline__ float round_by(float value, u32 random) {
    u32 bits = __float_as_uint(value);
    u32 finite = (((bits & 0x7f800000u) + 0x00800000u) >> 31) - 1u;
    return __uint_as_float((bits + (random & finite)) & 0xffff0000u);
}

// How moments are rounded before they are stored.
struct Nearest {
    static __device__ __forceinline__ Values round(const Rule &, Values now, u64) { return now; }
};
struct Stochastic {
    static __device__ __forceinline__ Values round(const Rule &rule, Values now, u64 index) {
        u32 random = random_bits((u64)rule.key[1] << 32 | rule.key[0], index);
        now.exp_avg = round_by(now.exp_avg, random & 0xffffu);
        now.exp_avg_sq = round_by(now.exp_avg_sq, random >> 16);
        return now;
    }
};

template <class C> static __device__ __forceinline__ void store_copy(typename C::Raw *to, u64 at, const float (&p)[GROUP]) {
    store<C>(to + at, p);
}
template <> __device__ __forceinline__ void store_copy<Absent>(u16 *, u64, const float (&)[GROUP]) {}

template <class C> static __device__ __forceinline__ void store_copy_one(typename C::Raw *to, u64 at, float p) {
    to[at] = C::narrow(p);
}
template <> __device__ __forceinline__ void store_copy_one<Absent>(u16 *, u64, float) {}

template <class P, class S, class G, class C, class Rounding> struct Step {
    Rule rule;
    States<P, S> from, to;
    const typename G::Raw *grad;
    typename C::Raw *copy;
    double *tiles;
    Lanes lanes;

    __device__ __forceinline__ void begin() { lanes.clear(); }
    __device__ __forceinline__ void end(u64 tile, u32 thread) {
        double sum = lanes.tile();
        if (thread == 0 && tiles) tiles[tile] = sum;
    }

    __device__ __forceinline__ void whole(u64 at) {
        float p[GROUP], m[GROUP], v[GROUP], g[GROUP];
        load<P>(from.param + at, p);
        load<S>(from.exp_avg + at, m);
        load<S>(from.exp_avg_sq + at, v);
        load<G>(grad + at, g);
#pragma unroll
        for (int i = 0; i < GROUP; i++) {
            g[i] = __fmul_rn(g[i], rule.grad_scale);
            Values old = {p[i], m[i], v[i]};
            Values now = Rounding::round(rule, forward(rule, old, g[i]), at + i);
            p[i] = now.param, m[i] = now.exp_avg, v[i] = now.exp_avg_sq;
        }
        lanes.add(g);
        store<P>(to.param + at, p);
        store<S>(to.exp_avg + at, m);
        store<S>(to.exp_avg_sq + at, v);
        store_copy<C>(copy, at, p);
    }

    __device__ __forceinline__ void one(u64 at, int lane) {
        float g = __fmul_rn(G::widen(grad[at]), rule.grad_scale);
        Values old = {P::widen(from.param[at]), S::widen(from.exp_avg[at]), S::widen(from.exp_avg_sq[at])};
        Values now = Rounding::round(rule, forward(rule, old, g), at);
        lanes.add_one(lane, g);
        to.param[at] = P::narrow(now.param);
        to.exp_avg[at] = S::narrow(now.exp_avg);
        to.exp_avg_sq[at] = S::narrow(now.exp_avg_sq);
        store_copy_one<C>(copy, at, now.param);
    }
};

#define STEP(name, P, S, G, C) STEP_ROUNDED(name, P, S, G, C, Nearest)
#define STEP_ROUNDED(name, P, S, G, C, Rounding) \
    extern "C" __global__ void __launch_bounds__(256) \
        name(Rule rule, States<P, S> from, States<P, S> to, const G::Raw *grad, C::Raw *copy, u64 n, double *tiles) { \
        Step<P, S, G, C, Rounding> work; \
        work.rule = rule, work.from = from, work.to = to; \
        work.grad = grad, work.copy = copy, work.tiles = tiles; \
        bool vectors = aligned(from.param) && aligned(from.exp_avg) && aligned(from.exp_avg_sq) && \
                       aligned(to.param) && aligned(to.exp_avg) && aligned(to.exp_avg_sq) && aligned(grad) && \
                       aligned(copy); \
        walk(work, n, vectors); \
    }
STEP(spw_adam_f32_f32_f32, F32, F32, F32, Absent)
STEP(spw_adam_f32_f32_f32_f16, F32, F32, F32, F16)
STEP(spw_adam_f32_f32_f32_bf16, F32, F32, F32, Bf16)
STEP(spw_adam_f32_f32_f16, F32, F32, F16, Absent)
STEP(spw_adam_f32_f32_f16_f16, F32, F32, F16, F16)
STEP(spw_adam_f32_f32_f16_bf16, F32, F32, F16, Bf16)
STEP(spw_adam_f32_f32_bf16, F32, F32, Bf16, Absent)
STEP(spw_adam_f32_f32_bf16_f16, F32, F32, Bf16, F16)
STEP(spw_adam_f32_f32_bf16_bf16, F32, F32, Bf16, Bf16)
STEP(spw_adam_f32_bf16_f32, F32, Bf16, F32, Absent)
STEP(spw_adam_f32_bf16_f32_bf16, F32, Bf16, F32, Bf16)
STEP(spw_adam_f32_bf16_bf16, F32, Bf16, Bf16, Absent)
STEP(spw_adam_f32_bf16_bf16_bf16, F32, Bf16, Bf16, Bf16)
STEP_ROUNDED(spw_adam_stochastic_f32_bf16_f32, F32, Bf16, F32, Absent, Stochastic)
STEP_ROUNDED(spw_adam_stochastic_f32_bf16_f32_bf16, F32, Bf16, F32, Bf16, Stochastic)
STEP_ROUNDED(spw_adam_stochastic_f32_bf16_bf16, F32, Bf16, Bf16, Absent, Stochastic)
STEP_ROUNDED(spw_adam_stochastic_f32_bf16_bf16_bf16, F32, Bf16, Bf16, Bf16, Stochastic)
STEP(spw_adam_f16_f32_f16, F16, F32, F16, Absent)
STEP(spw_adam_f16_f16_f16, F16, F16, F16, Absent)
STEP(spw_adam_bf16_f32_bf16, Bf16, F32, Bf16, Absent)
STEP(spw_adam_bf16_bf16_bf16, Bf16, Bf16, Bf16, Absent)
