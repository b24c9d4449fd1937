// Common code of the steps of Adam: what a launch reads, the arithmetic of an element, and the loop over tiles.
//
// The operations and their order are the same as in kernels/src/rules.rs.

// Coefficients of a step. The host rounds each to f32 once.
struct Rule {
    // Masks: all ones if this kind of weight decay is enabled, else zero. A disabled kind must not change the sign of a
    // zero or a NaN.
    u32 l2, decoupled;
    float grad_scale, beta1, one_minus_beta1, beta2, one_minus_beta2, inv_sqrt_correction2, eps, step_size, decay_factor;
    // Lower and upper half of the key of stochastic rounding.
    u32 key[2];
    // Not zero: the kernels of narrow states round at random. The others have a kernel for it.
    u32 random;
};

// One tensor: the addresses of its arrays, and its place among the tiles of all tensors.
struct Row {
    u64 from_param, from_exp_avg, from_exp_avg_sq;
    // Of narrow states, which are stepped in place: the low bits of the parameter, and the scales of both moments.
    u64 to_param, to_exp_avg, to_exp_avg_sq;
    u64 grad;
    // Zero without a 16-bit copy of the parameter. Of a split master: the sums of its tiles, zero without them.
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

template <class C> static __device__ __forceinline__ void store_copy(typename C::Raw *to, u64 at, const float (&p)[GROUP]) {
    store<C>(to + at, p);
}
template <> __device__ __forceinline__ void store_copy<Absent>(u16 *, u64, const float (&)[GROUP]) {}

template <class C> static __device__ __forceinline__ void store_copy_one(typename C::Raw *to, u64 at, float p) {
    put_one(to + at, C::narrow(p));
}
template <> __device__ __forceinline__ void store_copy_one<Absent>(u16 *, u64, float) {}
