// One step of Adam or AdamW over any number of tensors, for every combination of element types that the CPU kernels
// support; sums of squares of their gradients; and the tree that adds these sums. Split masters and 8-bit moments are in
// narrow.cu.
//
// A step reads the states `from` and writes the states `to`, which may be the same.

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
