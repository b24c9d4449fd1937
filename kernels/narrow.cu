// One step of Adam or AdamW with split masters, 8-bit moments, or both. Their formats are those of kernels/src/split.rs,
// word_sum.rs and codes.rs, and so is every bit.
//
// In each round of a tile a thread has a group of eight neighbouring elements: a stripe of the tile's sum of words, and a
// quarter of a block of codes. So every thread of the warp takes part in each round, also one without elements: four
// neighbours exchange the largest magnitude of their block, and all of them the sum of the tile.
//
// The states are stepped in place.

typedef unsigned char u8;

// Elements of a block of codes, which have one scale.
#define BLOCK 32

static __device__ __forceinline__ u64 take_word(u64 from) {
    u64 word;
    asm volatile("ld.global.u64 %0, [%1];" : "=l"(word) : "l"(from));
    return word;
}

static __device__ __forceinline__ void put_word(u64 to, u64 word) {
    asm volatile("st.global.u64 [%0], %1;" ::"l"(to), "l"(word));
}

// The first `count` elements of a group, and zeros. `vectors`: a whole group is loaded with 128-bit accesses.
template <class E>
static __device__ __forceinline__ void load_some(const typename E::Raw *from, float (&value)[GROUP], int count, bool vectors) {
    if (vectors && count == GROUP) return load<E>(from, value);
#pragma unroll
    for (int i = 0; i < GROUP; i++) {
        value[i] = 0;
        if (i < count) value[i] = E::widen(take_one(from + i));
    }
}

template <class E>
static __device__ __forceinline__ void store_some(typename E::Raw *to, const float (&value)[GROUP], int count, bool vectors) {
    if (vectors && count == GROUP) return store<E>(to, value);
#pragma unroll
    for (int i = 0; i < GROUP; i++) {
        if (i < count) put_one(to + i, E::narrow(value[i]));
    }
}

static __device__ __forceinline__ void take_some(const u16 *from, u16 (&raw)[GROUP], int count, bool vectors) {
    if (vectors && count == GROUP) return take(from, raw);
#pragma unroll
    for (int i = 0; i < GROUP; i++) {
        raw[i] = 0;
        if (i < count) raw[i] = take_one(from + i);
    }
}

static __device__ __forceinline__ void put_some(u16 *to, const u16 (&raw)[GROUP], int count, bool vectors) {
    if (vectors && count == GROUP) return put(to, raw);
#pragma unroll
    for (int i = 0; i < GROUP; i++) {
        if (i < count) put_one(to + i, raw[i]);
    }
}

// Bytes of a group.
static __device__ __forceinline__ void take_some(const u8 *from, u32 (&byte)[GROUP], int count, bool vectors) {
    if (vectors && count == GROUP) {
        u32 words[2];
        asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(words[0]), "=r"(words[1]) : "l"(from));
#pragma unroll
        for (int i = 0; i < GROUP; i++) byte[i] = words[i / 4] >> i % 4 * 8 & 0xff;
        return;
    }
#pragma unroll
    for (int i = 0; i < GROUP; i++) {
        byte[i] = 0;
        if (i < count) asm volatile("ld.global.u8 %0, [%1];" : "=r"(byte[i]) : "l"(from + i));
    }
}

static __device__ __forceinline__ void put_some(u8 *to, const u32 (&byte)[GROUP], int count, bool vectors) {
    if (vectors && count == GROUP) {
        u32 words[2] = {0, 0};
#pragma unroll
        for (int i = 0; i < GROUP; i++) words[i / 4] |= byte[i] << i % 4 * 8;
        asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(to), "r"(words[0]), "r"(words[1]));
        return;
    }
#pragma unroll
    for (int i = 0; i < GROUP; i++) {
        if (i < count) asm volatile("st.global.u8 [%0], %1;" ::"l"(to + i), "r"(byte[i]));
    }
}

static __device__ __forceinline__ u32 least(u32 a, u32 b) { return a < b ? a : b; }
static __device__ __forceinline__ u32 most(u32 a, u32 b) { return a < b ? b : a; }
static __device__ __forceinline__ u32 magnitude(u32 bits) { return bits & 0x7fffffff; }

// The value of the thread whose number in the warp differs in the bits of `mask`.
static __device__ __forceinline__ u32 across(u32 value, int mask) { return __shfl_xor_sync(EVERY_LANE, value, mask); }

// A group of elements of one thread.
struct Group {
    // The first element, and its place in its tile.
    u64 at;
    u32 place;
    // How many of its elements are there.
    int count;
    bool vectors;
};

// Moments as they are stored, in f32 or in bf16.
template <class S> struct Floats {
    typename S::Raw *exp_avg, *exp_avg_sq;

    // Returns true if both arrays are aligned.
    __device__ __forceinline__ bool begin(const Row &row) {
        exp_avg = (typename S::Raw *)row.from_exp_avg;
        exp_avg_sq = (typename S::Raw *)row.from_exp_avg_sq;
        return aligned(row.from_exp_avg | row.from_exp_avg_sq);
    }
    __device__ __forceinline__ void read(Group group, float (&m)[GROUP], float (&v)[GROUP]) const {
        load_some<S>(exp_avg + group.at, m, group.count, group.vectors);
        load_some<S>(exp_avg_sq + group.at, v, group.count, group.vectors);
    }
    // With random numbers unless `random` is zero.
    __device__ __forceinline__ void write(Group group, float (&m)[GROUP], float (&v)[GROUP], const u32 (&bits)[GROUP], u32 random) const {
        if (random) {
#pragma unroll
            for (int i = 0; i < GROUP; i++) {
                m[i] = round_by(m[i], bits[i] & 0xffffu);
                v[i] = round_by(v[i], bits[i] >> 16);
            }
        }
        store_some<S>(exp_avg + group.at, m, group.count, group.vectors);
        store_some<S>(exp_avg_sq + group.at, v, group.count, group.vectors);
    }
};

// The codes of one moment. FIRST: of exp_avg, which has a sign.
template <bool FIRST> struct Code {
    u8 *codes;
    u16 *scales;

    // Bits of a float below a step of a code, and the random bits that are added there.
    enum : u32 { STEP = 19, RANDOM = 0x7ffe0 };
    enum : u32 { NAN_SCALE = 0x7fc00000, SMALLEST_SCALE = 0x00800000, LARGEST_SCALE = 0x7e800000, INFINITE = 0x7f800000 };

    // The offset d.
    static __device__ __forceinline__ float offset() { return FIRST ? 1.0f / 256 : 1.0f / 65536; }
    // The value of the largest code in units of the scale.
    static __device__ __forceinline__ float top() { return 0.96875f - offset(); }
    // The bits of the largest magnitude that a code has.
    static __device__ __forceinline__ u32 limit() { return __float_as_uint(__uint_as_float(LARGEST_SCALE) * top()); }

    __device__ __forceinline__ void read(Group group, float (&value)[GROUP]) const {
        u32 byte[GROUP];
        take_some(codes + group.at, byte, group.count, group.vectors);
        float scale = 0;
        if (group.count > 0) scale = Bf16::widen(take_one(scales + group.at / BLOCK));
        float less = __fmul_rn(-offset(), scale);
#pragma unroll
        for (int i = 0; i < GROUP; i++) {
            u32 code = FIRST ? byte[i] & 0x7f : byte[i];
            float moved = __uint_as_float((code << STEP) + __float_as_uint(offset()));
            u32 bits = __float_as_uint(__fmaf_rn(moved, scale, less));
            value[i] = __uint_as_float(FIRST ? bits | (byte[i] << 24 & 0x80000000u) : bits);
        }
    }

    // The bits of the largest magnitude of the block. A negative second moment counts as more than any finite one.
    static __device__ __forceinline__ u32 largest(int count, const float (&value)[GROUP]) {
        u32 found = 0;
#pragma unroll
        for (int i = 0; i < GROUP; i++) {
            u32 bits = FIRST ? magnitude(__float_as_uint(value[i])) : __float_as_uint(__fadd_rn(value[i], 0.0f));
            if (i < count) found = most(found, bits);
        }
        found = most(found, across(found, 1));
        return most(found, across(found, 2));
    }

    // Rounds to the nearest code, or with random numbers unless `random` is zero.
    __device__ __forceinline__ void write(Group group, const float (&value)[GROUP], const u32 (&bits)[GROUP], u32 random) const {
        u32 found = largest(group.count, value);
        u32 whole = most(__float_as_uint(__fdiv_rn(__uint_as_float(least(found, limit())), top())), SMALLEST_SCALE);
        u32 scale = least((whole - 16 + 0xffff) & 0xffff0000u, LARGEST_SCALE);
        float factor = __fdiv_rn(1.0f, __uint_as_float(scale));
        if (found == 0) scale = 0, factor = 0;
        if (found > INFINITE) scale = NAN_SCALE;
        u32 byte[GROUP];
#pragma unroll
        for (int i = 0; i < GROUP; i++) byte[i] = found > INFINITE ? 0 : code(value[i], factor, random ? moved(bits[i]) : 1u << (STEP - 1));
        put_some(codes + group.at, byte, group.count, group.vectors);
        if (group.count > 0 && group.at % BLOCK == 0) put_one(scales + group.at / BLOCK, (u16)(scale >> 16));
    }

    // Each moment has random bits of its own.
    static __device__ __forceinline__ u32 moved(u32 bits) { return (FIRST ? bits << 5 : bits >> 13) & RANDOM; }

    // `moved` is what is added below a step before the code is cut off.
    static __device__ __forceinline__ u32 code(float value, float factor, u32 moved) {
        u32 bits = __float_as_uint(value), size = least(magnitude(bits), limit());
        u32 sum = __float_as_uint(__fmaf_rn(__uint_as_float(size), factor, offset()));
        u32 found = (sum - __float_as_uint(offset()) + moved) >> STEP;
        // A second moment has at least 1, unless it is zero: the step would divide by eps.
        return FIRST ? found | (bits >> 24 & 0x80) : most(found, least(size, 1));
    }
};

// 8-bit moments.
struct Coded {
    Code<true> exp_avg;
    Code<false> exp_avg_sq;

    __device__ __forceinline__ bool begin(const Row &row) {
        exp_avg.codes = (u8 *)row.from_exp_avg, exp_avg.scales = (u16 *)row.to_exp_avg;
        exp_avg_sq.codes = (u8 *)row.from_exp_avg_sq, exp_avg_sq.scales = (u16 *)row.to_exp_avg_sq;
        return ((row.from_exp_avg | row.from_exp_avg_sq) & (GROUP - 1)) == 0;
    }
    __device__ __forceinline__ void read(Group group, float (&m)[GROUP], float (&v)[GROUP]) const {
        exp_avg.read(group, m);
        exp_avg_sq.read(group, v);
    }
    __device__ __forceinline__ void write(Group group, float (&m)[GROUP], float (&v)[GROUP], const u32 (&bits)[GROUP], u32 random) const {
        exp_avg.write(group, m, bits, random);
        exp_avg_sq.write(group, v, bits, random);
    }
};

// Stores a copy of the parameter, unless there is none.
template <class C>
static __device__ __forceinline__ void store_copy_some(typename C::Raw *to, const float (&p)[GROUP], int count, bool vectors) {
    store_some<C>(to, p, count, vectors);
}
template <> __device__ __forceinline__ void store_copy_some<Absent>(u16 *, const float (&)[GROUP], int, bool) {}

// A parameter in f32, and its copy.
template <class C> struct Whole {
    float *param;
    typename C::Raw *copy;

    __device__ __forceinline__ bool begin(const Row &row) {
        param = (float *)row.from_param;
        copy = (typename C::Raw *)row.copy;
        return aligned(row.from_param | row.copy);
    }
    __device__ __forceinline__ void begin_tile(u64, u64, bool) {}
    __device__ __forceinline__ void read(Group group, float (&p)[GROUP]) const {
        load_some<F32>(param + group.at, p, group.count, group.vectors);
    }
    __device__ __forceinline__ void write(Group group, const float (&p)[GROUP]) {
        store_some<F32>(param + group.at, p, group.count, group.vectors);
        store_copy_some<C>(copy + group.at, p, group.count, group.vectors);
    }
    __device__ __forceinline__ void end_tile(u64) {}
};

// A split master: the bf16 parameter and 16 low bits, with a sum for each tile that tells whether other code has written.
struct Split {
    u16 *param, *low;
    // Address of the sums; 0 without them.
    u64 sums;
    // The low bits that count in this tile: all or none.
    u32 counts;
    // Of the elements of the tile that this thread has written.
    u64 written;

    __device__ __forceinline__ bool begin(const Row &row) {
        param = (u16 *)row.from_param, low = (u16 *)row.to_param, sums = row.copy;
        return aligned(row.from_param | row.to_param);
    }

    // The term of a stripe of the sum.
    static __device__ __forceinline__ u64 stripe(const u16 (&raw)[GROUP], u32 place) {
        u64 half[2] = {0, 0};
#pragma unroll
        for (int i = 0; i < GROUP; i++) half[i / 4] |= (u64)raw[i] << i % 4 * 16;
        u64 a = half[0] ^ (0x9e3779b97f4a7c15ull + place * 0xc2b2ae3d27d4eb4full), b = half[1] ^ 0x9fb21c651e98df25ull;
        return a * b ^ __umul64hi(a, b);
    }

    // The sum of a tile from those of all threads.
    static __device__ __forceinline__ u64 total(u64 sum) {
#pragma unroll 1
        for (int mask = 1; mask < WARP; mask *= 2) {
            u32 low = across((u32)sum, mask), high = across((u32)(sum >> 32), mask);
            sum += (u64)high << 32 | low;
        }
        return sum == 0 ? 1 : sum;
    }

    // Compares the tile with the sum that was kept.
    __device__ __forceinline__ void begin_tile(u64 tile, u64 n, bool vectors) {
        counts = 0xffff, written = 0;
        if (sums == 0) return;
        u64 kept = take_word(sums + tile * 8), now = 0;
        if (kept == 0) return;
        u32 place = threadIdx.x % WARP * GROUP;
#pragma unroll 1
        for (u64 start = tile * TILE; start < n && place < TILE; start += ROUND, place += ROUND) {
            u64 at = tile * TILE + place;
            int count = at >= n ? 0 : n - at < GROUP ? (int)(n - at) : GROUP;
            u16 raw[GROUP];
            take_some(param + at, raw, count, vectors);
            if (count > 0) now += stripe(raw, place);
        }
        if (total(now) != kept) counts = 0;
    }

    __device__ __forceinline__ void read(Group group, float (&p)[GROUP]) const {
        u16 high[GROUP], lower[GROUP];
        take_some(param + group.at, high, group.count, group.vectors);
        take_some(low + group.at, lower, group.count, group.vectors);
#pragma unroll
        for (int i = 0; i < GROUP; i++) {
            u32 upper = high[i], rest = lower[i] & counts;
            // 1 unless the parameter is zero, which no master with the highest low bit rounds to.
            u32 borrows = ((upper & 0x7fff) + 0x7fff) >> 15;
            p[i] = __uint_as_float((upper - (rest >> 15 & borrows)) << 16 | rest);
        }
    }

    __device__ __forceinline__ void write(Group group, const float (&p)[GROUP]) {
        u16 high[GROUP], lower[GROUP];
#pragma unroll
        for (int i = 0; i < GROUP; i++) {
            u32 bits = __float_as_uint(p[i]);
            u32 master = magnitude(bits) > 0x7f800000 ? 0x7fc00000 : bits;
            high[i] = i < group.count ? (u16)((master + 0x8000) >> 16) : (u16)0;
            lower[i] = (u16)master;
        }
        put_some(param + group.at, high, group.count, group.vectors);
        put_some(low + group.at, lower, group.count, group.vectors);
        if (group.count > 0) written += stripe(high, group.place);
    }

    __device__ __forceinline__ void end_tile(u64 tile) {
        if (sums == 0) return;
        u64 sum = total(written);
        if (threadIdx.x % WARP == 0) put_word(sums + tile * 8, sum);
    }
};

template <class M, class S, class G> struct Narrow {
    Rule rule;
    M master;
    S moments;
    const typename G::Raw *grad;
    Lanes lanes;

    // Sets the arrays of `row`. Returns true if all are aligned.
    __device__ __forceinline__ bool begin(const Rule &with, const Row &row) {
        rule = with;
        grad = (const typename G::Raw *)row.grad;
        lanes.clear();
        bool master_aligned = master.begin(row), moments_aligned = moments.begin(row);
        return master_aligned && moments_aligned && aligned(row.grad);
    }

    __device__ __forceinline__ void step(Group group) {
        float p[GROUP], m[GROUP], v[GROUP], g[GROUP];
        master.read(group, p);
        moments.read(group, m, v);
        load_some<G>(grad + group.at, g, group.count, group.vectors);
        u32 bits[GROUP];
#pragma unroll
        for (int i = 0; i < GROUP; i++) {
            g[i] = __fmul_rn(g[i], rule.grad_scale);
            Values old = {p[i], m[i], v[i]};
            Values now = forward(rule, old, g[i]);
            p[i] = now.param, m[i] = now.exp_avg, v[i] = now.exp_avg_sq;
            bits[i] = rule.random ? random_bits((u64)rule.key[1] << 32 | rule.key[0], group.at + i) : 0;
        }
        lanes.add(g);
        master.write(group, p);
        moments.write(group, m, v, bits, rule.random);
    }
};

// Steps one tile. All threads of a warp call it together.
template <class M, class S, class G>
static __device__ __forceinline__ void walk(Narrow<M, S, G> &work, u64 tile, u64 n, bool vectors) {
    work.master.begin_tile(tile, n, vectors);
    u32 place = threadIdx.x % WARP * GROUP;
#pragma unroll 1
    for (u64 start = tile * TILE; start < n && place < TILE; start += ROUND, place += ROUND) {
        u64 at = tile * TILE + place;
        Group group = {at, place, at >= n ? 0 : n - at < GROUP ? (int)(n - at) : GROUP, vectors};
        work.step(group);
    }
    work.master.end_tile(tile);
    __syncwarp();
}

// Two blocks on a multiprocessor: fewer warps would wait for memory.
#define NARROW(name, M, S, G) \
    extern "C" __global__ void __launch_bounds__(256, 2) name(Batch batch) { run<Narrow<M, S, G>>(batch); }
// 8-bit moments and a parameter in f32, by the types of the gradient and of the copy.
NARROW(spw_coded_f32, Whole<Absent>, Coded, F32)
NARROW(spw_coded_f32_f16, Whole<F16>, Coded, F32)
NARROW(spw_coded_f32_bf16, Whole<Bf16>, Coded, F32)
NARROW(spw_coded_f16, Whole<Absent>, Coded, F16)
NARROW(spw_coded_f16_f16, Whole<F16>, Coded, F16)
NARROW(spw_coded_f16_bf16, Whole<Bf16>, Coded, F16)
NARROW(spw_coded_bf16, Whole<Absent>, Coded, Bf16)
NARROW(spw_coded_bf16_f16, Whole<F16>, Coded, Bf16)
NARROW(spw_coded_bf16_bf16, Whole<Bf16>, Coded, Bf16)
// A split master and 8-bit moments, by the type of the gradient.
NARROW(spw_split_coded_f32, Split, Coded, F32)
NARROW(spw_split_coded_bf16, Split, Coded, Bf16)
// A split master, by the types of the moments and of the gradient.
NARROW(spw_split_f32_f32, Split, Floats<F32>, F32)
NARROW(spw_split_f32_bf16, Split, Floats<F32>, Bf16)
NARROW(spw_split_bf16_f32, Split, Floats<Bf16>, F32)
NARROW(spw_split_bf16_bf16, Split, Floats<Bf16>, Bf16)
