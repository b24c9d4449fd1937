// Common code of the GPU kernels: element types, groups of eight elements, and the fixed tree of the sum of squares.
//
// Every operation is an intrinsic that rounds to nearest, so that no compiler option changes a bit. Conversions to 16
// bits round to nearest even, denormals included. A NaN becomes 0x7fc0 (bf16) or 0x7e00 (f16). The results have the
// same bits as those of kernels/src on every processor; only the payload of an f32 NaN may differ.
//
// A warp processes a tile of 4096 elements in 16 rounds of 256. In each round a thread has eight neighbouring elements,
// which are eight neighbouring lanes of kernels/src/squares.rs. Whole groups at aligned addresses are loaded and stored
// with 128-bit accesses, other groups element by element.
//
// This file needs no header of the CUDA toolkit.

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

// An absent span: the caller did not request a parameter copy.
struct Absent {
    typedef u16 Raw;
};

// Accesses to elements. An address that a kernel reads from a table has no address space for the compiler, so these
// instructions name it.

static __device__ __forceinline__ float take_one(const float *from) {
    float value;
    asm volatile("ld.global.f32 %0, [%1];" : "=f"(value) : "l"(from));
    return value;
}

static __device__ __forceinline__ u16 take_one(const u16 *from) {
    u16 bits;
    asm volatile("ld.global.u16 %0, [%1];" : "=h"(bits) : "l"(from));
    return bits;
}

static __device__ __forceinline__ void put_one(float *to, float value) {
    asm volatile("st.global.f32 [%0], %1;" ::"l"(to), "f"(value));
}

static __device__ __forceinline__ void put_one(u16 *to, u16 bits) {
    asm volatile("st.global.u16 [%0], %1;" ::"l"(to), "h"(bits));
}

static __device__ __forceinline__ void take_four(const float *from, float *raw) {
    asm volatile("ld.global.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(raw[0]), "=f"(raw[1]), "=f"(raw[2]), "=f"(raw[3])
                 : "l"(from));
}

static __device__ __forceinline__ void put_four(float *to, const float *raw) {
    asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(raw[0]), "f"(raw[1]), "f"(raw[2]), "f"(raw[3]));
}

// Loads one group of eight elements with 128-bit accesses.
static __device__ __forceinline__ void take(const float *from, float (&raw)[GROUP]) {
    take_four(from, raw);
    take_four(from + 4, raw + 4);
}

static __device__ __forceinline__ void take(const u16 *from, u16 (&raw)[GROUP]) {
    u32 words[4];
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "l"(from));
#pragma unroll
    for (int i = 0; i < GROUP; i++) raw[i] = (u16)(words[i / 2] >> i % 2 * 16);
}

static __device__ __forceinline__ void put(float *to, const float (&raw)[GROUP]) {
    put_four(to, raw);
    put_four(to + 4, raw + 4);
}

static __device__ __forceinline__ void put(u16 *to, const u16 (&raw)[GROUP]) {
    u32 words[4];
#pragma unroll
    for (int i = 0; i < 4; i++) words[i] = (u32)raw[2 * i] | (u32)raw[2 * i + 1] << 16;
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3]));
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

static __device__ __forceinline__ bool aligned(u64 address) { return (address & 15) == 0; }
static __device__ __forceinline__ bool aligned(const void *address) { return aligned((u64)address); }

// The sums of squares of the eight lanes of one thread.
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

    // The sum of the tile, valid in the thread of lane 0. Reduces the 256 lanes by halves.
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

    // The value of the thread that is `by` threads further in the warp.
    static __device__ __forceinline__ double down(double value, int by) {
        int low = __double2loint(value), high = __double2hiint(value);
        low = __shfl_down_sync(EVERY_LANE, low, by);
        high = __shfl_down_sync(EVERY_LANE, high, by);
        return __hiloint2double(high, low);
    }
};

// Runs `work` over one tile of an array of n elements. `vectors`: all spans are aligned, so whole groups may use 128-bit
// accesses. All threads of a warp call it together. Methods of `work`:
//   whole(at)        the group of eight elements at `at`
//   one(at, lane)    the element at `at`, number `lane` of its group
template <class W> static __device__ __forceinline__ void walk(W &work, u64 tile, u64 n, bool vectors) {
    u64 at = tile * TILE + threadIdx.x % WARP * GROUP;
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
}

static __device__ __forceinline__ u64 warp_number() { return ((u64)blockIdx.x * blockDim.x + threadIdx.x) / WARP; }
static __device__ __forceinline__ u64 warp_count() { return (u64)gridDim.x * blockDim.x / WARP; }
