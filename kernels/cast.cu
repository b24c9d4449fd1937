// Conversions between f32 and 16 bits, sums of squares per tile, and the tree that adds the sums of tiles.

template <class From, class To> struct Cast {
    const typename From::Raw *from;
    typename To::Raw *to;

    __device__ __forceinline__ void begin() {}
    __device__ __forceinline__ void end(u64, u32) {}
    __device__ __forceinline__ void whole(u64 at) {
        float value[GROUP];
        load<From>(from + at, value);
        store<To>(to + at, value);
    }
    __device__ __forceinline__ void one(u64 at, int) { to[at] = To::narrow(From::widen(from[at])); }
};

template <class From, class To>
static __device__ __forceinline__ void cast(const typename From::Raw *from, typename To::Raw *to, u64 n) {
    Cast<From, To> work = {from, to};
    walk(work, n, aligned(from) && aligned(to));
}

#define CAST(name, From, To) \
    extern "C" __global__ void __launch_bounds__(256) name(const From::Raw *from, To::Raw *to, u64 n) { \
        cast<From, To>(from, to, n); \
    }
CAST(spw_cast_f32_f16, F32, F16)
CAST(spw_cast_f32_bf16, F32, Bf16)
CAST(spw_cast_f16_f32, F16, F32)
CAST(spw_cast_bf16_f32, Bf16, F32)

template <class G> struct Squares {
    const typename G::Raw *grad;
    float scale;
    double *tiles;
    Lanes lanes;

    __device__ __forceinline__ void begin() { lanes.clear(); }
    __device__ __forceinline__ void end(u64 tile, u32 thread) {
        double sum = lanes.tile();
        if (thread == 0) tiles[tile] = sum;
    }
    __device__ __forceinline__ void whole(u64 at) {
        float value[GROUP];
        load<G>(grad + at, value);
#pragma unroll
        for (int i = 0; i < GROUP; i++) value[i] = __fmul_rn(value[i], scale);
        lanes.add(value);
    }
    __device__ __forceinline__ void one(u64 at, int lane) {
        lanes.add_one(lane, __fmul_rn(G::widen(grad[at]), scale));
    }
};

#define SQUARES(name, G) \
    extern "C" __global__ void __launch_bounds__(256) name(const G::Raw *grad, float scale, u64 n, double *tiles) { \
        Squares<G> work; \
        work.grad = grad, work.scale = scale, work.tiles = tiles; \
        walk(work, n, aligned(grad)); \
    }
SQUARES(spw_squares_f32, F32)
SQUARES(spw_squares_f16, F16)
SQUARES(spw_squares_bf16, Bf16)

// Each warp adds 32 neighbouring sums to one: five levels of the tree that splits at the largest power of two.
extern "C" __global__ void __launch_bounds__(256) spw_tree(const double *sums, u64 count, double *out) {
    u64 warp = ((u64)blockIdx.x * blockDim.x + threadIdx.x) / WARP;
    u64 warps = (u64)gridDim.x * blockDim.x / WARP;
    u32 thread = threadIdx.x % WARP;
    for (u64 first = warp; first * WARP < count; first += warps) {
        u64 left = count - first * WARP;
        u32 live = left < WARP ? (u32)left : WARP;
        double sum = thread < live ? sums[first * WARP + thread] : 0;
#pragma unroll
        for (u32 step = 1; step < WARP; step *= 2) {
            double other = Lanes::down(sum, step);
            // Pairs begin at multiples of twice the step. A sum without a partner is unchanged.
            sum = thread % (2 * step) == 0 && thread + step < live ? __dadd_rn(sum, other) : sum;
        }
        if (thread == 0) out[first] = sum;
    }
}
