// One step of Adam or AdamW over any number of tensors, for every combination of element types that the CPU kernels
// support; sums of squares of their gradients; and the tree that adds these sums.
//
// The operations and their order are the same as in kernels/src/rules.rs. A step reads the states `from` and writes the
// states `to`, which may be the same.

// Coefficients of a step. The host rounds each to f32 once.
struct Rule {
    // Masks: all ones if this kind of weight decay is enabled, else zero. A disabled kind must not change the sign of a
    // zero or a NaN.
    u32 l2, decoupled;
    float grad_scale, beta1, one_minus_beta1, beta2, one_minus_beta2, inv_sqrt_correction2, eps, step_size, decay_factor;
    // Lower and upper half of the key of stochastic rounding; read only by the kernels that round so.
    u32 key[2];
};

// One tensor: the addresses of its arrays, and its place among the tiles of all tensors.
struct Row {
    u64 from_param, from_exp_avg, from_exp_avg_sq;
    u64 to_param, to_exp_avg, to_exp_avg_sq;
    u64 grad;
    // Zero without a 16-bit copy of the parameter.
    u64 copy;
    u64 elements;
    // Tiles of all rows before this one.
    u64 first;
    u64 rule;
};

// The tensors of a launch. All rows have at least one tile. One more row follows them, of which only `first` is read.
struct Batch {
    // The only row, if `rows` is null.
    Row row;
    const Row *rows;
    // For every SHARE tiles, the row of the first one.
    const u32 *starts;
    // The tiles of this launch.
    u64 begin, end;
    // Receives one sum of squares of the scaled gradient per tile, unless it is null.
    double *tiles;
    // The coefficients of row i are rules[i.rule], or `rule` if `rules` is null.
    const Rule *rules;
    Rule rule;
};

#define SHARE 8

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
    put_one(to + at, C::narrow(p));
}
template <> __device__ __forceinline__ void store_copy_one<Absent>(u16 *, u64, float) {}

template <class P, class S, class G, class C, class Rounding> struct Step {
    Rule rule;
    const typename P::Raw *from_param;
    const typename S::Raw *from_exp_avg, *from_exp_avg_sq;
    typename P::Raw *to_param;
    typename S::Raw *to_exp_avg, *to_exp_avg_sq;
    const typename G::Raw *grad;
    typename C::Raw *copy;
    Lanes lanes;

    // Sets the arrays of `row`. Returns true if all are aligned.
    __device__ __forceinline__ bool begin(const Rule &with, const Row &row) {
        rule = with;
        from_param = (const typename P::Raw *)row.from_param;
        from_exp_avg = (const typename S::Raw *)row.from_exp_avg;
        from_exp_avg_sq = (const typename S::Raw *)row.from_exp_avg_sq;
        to_param = (typename P::Raw *)row.to_param;
        to_exp_avg = (typename S::Raw *)row.to_exp_avg;
        to_exp_avg_sq = (typename S::Raw *)row.to_exp_avg_sq;
        grad = (const typename G::Raw *)row.grad;
        copy = (typename C::Raw *)row.copy;
        lanes.clear();
        return aligned(row.from_param | row.from_exp_avg | row.from_exp_avg_sq | row.to_param | row.to_exp_avg |
                       row.to_exp_avg_sq | row.grad | row.copy);
    }

    __device__ __forceinline__ void whole(u64 at) {
        float p[GROUP], m[GROUP], v[GROUP], g[GROUP];
        load<P>(from_param + at, p);
        load<S>(from_exp_avg + at, m);
        load<S>(from_exp_avg_sq + at, v);
        load<G>(grad + at, g);
#pragma unroll
        for (int i = 0; i < GROUP; i++) {
            g[i] = __fmul_rn(g[i], rule.grad_scale);
            Values old = {p[i], m[i], v[i]};
            Values now = Rounding::round(rule, forward(rule, old, g[i]), at + i);
            p[i] = now.param, m[i] = now.exp_avg, v[i] = now.exp_avg_sq;
        }
        lanes.add(g);
        store<P>(to_param + at, p);
        store<S>(to_exp_avg + at, m);
        store<S>(to_exp_avg_sq + at, v);
        store_copy<C>(copy, at, p);
    }

    __device__ __forceinline__ void one(u64 at, int lane) {
        float g = __fmul_rn(G::widen(take_one(grad + at)), rule.grad_scale);
        Values old = {P::widen(take_one(from_param + at)), S::widen(take_one(from_exp_avg + at)),
                      S::widen(take_one(from_exp_avg_sq + at))};
        Values now = Rounding::round(rule, forward(rule, old, g), at);
        lanes.add_one(lane, g);
        put_one(to_param + at, P::narrow(now.param));
        put_one(to_exp_avg + at, S::narrow(now.exp_avg));
        put_one(to_exp_avg_sq + at, S::narrow(now.exp_avg_sq));
        store_copy_one<C>(copy, at, now.param);
    }
};

template <class G> struct Squares {
    float scale;
    const typename G::Raw *grad;
    Lanes lanes;

    __device__ __forceinline__ bool begin(const Rule &rule, const Row &row) {
        scale = rule.grad_scale;
        grad = (const typename G::Raw *)row.grad;
        lanes.clear();
        return aligned(row.grad);
    }
    __device__ __forceinline__ void whole(u64 at) {
        float value[GROUP];
        load<G>(grad + at, value);
#pragma unroll
        for (int i = 0; i < GROUP; i++) value[i] = __fmul_rn(value[i], scale);
        lanes.add(value);
    }
    __device__ __forceinline__ void one(u64 at, int lane) {
        lanes.add_one(lane, __fmul_rn(G::widen(take_one(grad + at)), scale));
    }
};

// Runs one warp per tile of the batch.
template <class W> static __device__ __forceinline__ void run(const Batch &batch) {
    for (u64 tile = batch.begin + warp_number(); tile < batch.end; tile += warp_count()) {
        Row row = batch.row;
        if (batch.rows) {
            u64 at = batch.starts[tile / SHARE];
#pragma unroll 1
            while (batch.rows[at + 1].first <= tile) at++;
            row = batch.rows[at];
        }
        Rule rule = batch.rule;
        if (batch.rules) rule = batch.rules[row.rule];
        W work;
        bool vectors = work.begin(rule, row);
        walk(work, tile - row.first, row.elements, vectors);
        if (batch.tiles) {
            double sum = work.lanes.tile();
            if (threadIdx.x % WARP == 0) batch.tiles[tile] = sum;
        }
    }
}

#define STEP(name, P, S, G, C) STEP_ROUNDED(name, P, S, G, C, Nearest)
#define STEP_ROUNDED(name, P, S, G, C, Rounding) \
    extern "C" __global__ void __launch_bounds__(256) name(Batch batch) { run<Step<P, S, G, C, Rounding>>(batch); }
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

#define SQUARES(name, G) \
    extern "C" __global__ void __launch_bounds__(256) name(Batch batch) { run<Squares<G>>(batch); }
SQUARES(spw_squares_f32, F32)
SQUARES(spw_squares_f16, F16)
SQUARES(spw_squares_bf16, Bf16)

// Neighbouring tiles of one row: SEGMENT, or fewer at the end of the row.
struct Segment {
    u64 first, tiles;
};

#define SEGMENT (WARP * GROUP)

// Each warp adds the sums of one segment: eight levels of the tree that splits at the largest power of two. Without
// `segments`, they are those of one row of `tiles` tiles.
extern "C" __global__ void __launch_bounds__(256)
    spw_fold(const Segment *segments, u64 tiles, u64 count, const double *sums, double *out) {
    u32 thread = threadIdx.x % WARP;
    for (u64 number = warp_number(); number < count; number += warp_count()) {
        Segment segment = {number * SEGMENT, tiles - number * SEGMENT};
        if (segments) segment = segments[number];
        u32 live = segment.tiles < SEGMENT ? (u32)segment.tiles : SEGMENT;
        double sum[GROUP];
#pragma unroll
        for (int i = 0; i < GROUP; i++) {
            u32 at = thread * GROUP + i;
            sum[i] = at < live ? sums[segment.first + at] : 0;
        }
        // Pairs begin at multiples of twice the step. A sum without a partner is unchanged.
#pragma unroll
        for (int step = 1; step < GROUP; step *= 2) {
#pragma unroll
            for (int i = 0; i < GROUP; i += 2 * step) {
                bool pair = thread * GROUP + i + step < live;
                sum[i] = pair ? __dadd_rn(sum[i], sum[i + step]) : sum[i];
            }
        }
#pragma unroll
        for (u32 step = 1; step < WARP; step *= 2) {
            double other = Lanes::down(sum[0], step);
            bool pair = thread % (2 * step) == 0 && (thread + step) * GROUP < live;
            sum[0] = pair ? __dadd_rn(sum[0], other) : sum[0];
        }
        if (thread == 0) out[number] = sum[0];
    }
}
