// What the GPU kernels share: element types, groups of eight elements, and the fixed tree in which squares are summed.
//
// Every operation is one that rounds to nearest, spelt out, so that no compiler option changes a bit; conversions to
// 16 bits round to nearest even, denormals included, and a NaN becomes 0x7fc0 or 0x7e00. These are the bits of
// kernels/src on every processor (a NaN of f32 may carry another payload).
//
// A warp walks a tile of 4096 elements in 16 rounds of 256. A thread has eight neighbouring elements in each round, which
// are eight neighbouring lanes of kernels/src/squares.rs: whole groups at aligned addresses move by 128 bits, others
// element by element.
//
// No header of the toolkit is needed.

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define GROUP 8
#define ROUND 256
#define TILE 4096
#define WARP 32
#define EVERY_LANE 0xffffffffu

struct F32 {
    typedef float Raw;
    static __device__ __forceinline__ float widen(float value) { return value; }
    static __device__ __forceinline__ float narrow(float value) { return value; }
};

struct F16 {
    typedef u16 Raw;
    static __device__ __forceinline__ float widen(u16 bits) {
        float value;
        asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
        return value;
    }
    static __device__ __forceinline__ u16 narrow(float value) {
        u16 bits;
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
        return value != value ? (u16)0x7e00 : bits;
    }
};

struct Bf16 {
    typedef u16 Raw;
    static __device__ __forceinline__ float widen(u16 bits) { return __uint_as_float((u32)bits << 16); }
    static __device__ __forceinline__ u16 narrow(float value) {
        u32 bits = __float_as_uint(value);
        u32 rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
        return value != value ? (u16)0x7fc0 : (u16)rounded;
    }
};

// No memory at all: the copy that was not asked for.
struct Absent {
    typedef u16 Raw;
};

// 128 bits of memory as registers.
static __device__ __forceinline__ void take(const float *from, float (&raw)[GROUP]) {
    float4 low = ((const float4 *)from)[0], high = ((const float4 *)from)[1];
    raw[0] = low.x, raw[1] = low.y, raw[2] = low.z, raw[3] = low.w;
    raw[4] = high.x, raw[5] = high.y, raw[6] = high.z, raw[7] = high.w;
}

static __device__ __forceinline__ void take(const u16 *from, u16 (&raw)[GROUP]) {
    uint4 all = *(const uint4 *)from;
    u32 words[4] = {all.x, all.y, all.z, all.w};
#pragma unroll
    for (int i = 0; i < GROUP; i++) raw[i] = (u16)(words[i / 2] >> i % 2 * 16);
}

static __device__ __forceinline__ void put(float *to, const float (&raw)[GROUP]) {
    ((float4 *)to)[0] = make_float4(raw[0], raw[1], raw[2], raw[3]);
    ((float4 *)to)[1] = make_float4(raw[4], raw[5], raw[6], raw[7]);
}

static __device__ __forceinline__ void put(u16 *to, const u16 (&raw)[GROUP]) {
    u32 words[4];
#pragma unroll
    for (int i = 0; i < 4; i++) words[i] = (u32)raw[2 * i] | (u32)raw[2 * i + 1] << 16;
    *(uint4 *)to = make_uint4(words[0], words[1], words[2], words[3]);
}

template <class E> static __device__ __forceinline__ void load(const typename E::Raw *from, float (&value)[GROUP]) {
    typename E::Raw raw[GROUP];
    take(from, raw);
#pragma unroll
    for (int i = 0; i < GROUP; i++) value[i] = E::widen(raw[i]);
}

template <class E> static __device__ __forceinline__ void store(typename E::Raw *to, const float (&value)[GROUP]) {
    typename E::Raw raw[GROUP];
#pragma unroll
    for (int i = 0; i < GROUP; i++) raw[i] = E::narrow(value[i]);
    put(to, raw);
}

static __device__ __forceinline__ bool aligned(const void *address) { return ((u64)address & 15) == 0; }

// The squares of a thread's eight lanes.
struct Lanes {
    double sum[GROUP];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < GROUP; i++) sum[i] = 0;
    }

    __device__ __forceinline__ void add(const float (&grad)[GROUP]) {
#pragma unroll
        for (int i = 0; i < GROUP; i++) sum[i] = __fma_rn((double)grad[i], (double)grad[i], sum[i]);
    }

    __device__ __forceinline__ void add_one(int lane, float grad) {
        double square = __dmul_rn((double)grad, (double)grad);
#pragma unroll
        for (int i = 0; i < GROUP; i++) sum[i] = i == lane ? __dadd_rn(square, sum[i]) : sum[i];
    }

    // The sum of the tile, in the thread of lane 0: 256 lanes are halved down to one.
    __device__ __forceinline__ double tile() {
#pragma unroll 1
        for (int half = WARP / 2; half > 0; half /= 2) {
#pragma unroll
            for (int i = 0; i < GROUP; i++) sum[i] = __dadd_rn(sum[i], down(sum[i], half));
        }
#pragma unroll
        for (int half = GROUP / 2; half > 0; half /= 2) {
#pragma unroll
            for (int i = 0; i < half; i++) sum[i] = __dadd_rn(sum[i], sum[i + half]);
        }
        return sum[0];
    }

    // The value of the thread `by` further on.
    static __device__ __forceinline__ double down(double value, int by) {
        int low = __double2loint(value), high = __double2hiint(value);
        low = __shfl_down_sync(EVERY_LANE, low, by);
        high = __shfl_down_sync(EVERY_LANE, high, by);
        return __hiloint2double(high, low);
    }
};

// Walks `work` over n elements. It has whole(at), for the group of eight at `at`; one(at, lane), for the element at `at`,
// which is number `lane` of its group; begin() and end(tile) around each tile, for all threads of a warp together.
template <class W> static __device__ __forceinline__ void walk(W &work, u64 n, bool vectors) {
    u64 tiles = (n + TILE - 1) / TILE;
    u64 warp = ((u64)blockIdx.x * blockDim.x + threadIdx.x) / WARP;
    u64 warps = (u64)gridDim.x * blockDim.x / WARP;
    u32 thread = threadIdx.x % WARP;
    for (u64 tile = warp; tile < tiles; tile += warps) {
        work.begin();
        u64 at = tile * TILE + thread * GROUP;
#pragma unroll 1
        for (int round = 0; round < TILE / ROUND && at < n; round++, at += ROUND) {
            u64 left = n - at;
            if (vectors && left >= GROUP) {
                work.whole(at);
            } else {
                int count = left < GROUP ? (int)left : GROUP;
#pragma unroll 1
                for (int lane = 0; lane < count; lane++) work.one(at + lane, lane);
            }
        }
        __syncwarp();
        work.end(tile, thread);
    }
}
