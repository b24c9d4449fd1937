// Conversions between f32 and 16 bits.

template <class From, class To> struct Cast {
    const typename From::Raw *from;
    typename To::Raw *to;

    __device__ __forceinline__ void whole(u64 at) {
        float value[GROUP];
        load<From>(from + at, value);
        store<To>(to + at, value);
    }
    __device__ __forceinline__ void one(u64 at, int) { put_one(to + at, To::narrow(From::widen(take_one(from + at)))); }
};

template <class From, class To>
static __device__ __forceinline__ void cast(const typename From::Raw *from, typename To::Raw *to, u64 n) {
    Cast<From, To> work = {from, to};
    u64 tiles = (n + TILE - 1) / TILE;
    for (u64 tile = warp_number(); tile < tiles; tile += warp_count()) walk(work, tile, n, aligned(from) && aligned(to));
}

#define CAST(name, From, To) \
    extern "C" __global__ void __launch_bounds__(256) name(const From::Raw *from, To::Raw *to, u64 n) { \
        cast<From, To>(from, to, n); \
    }
CAST(spw_cast_f32_f16, F32, F16)
CAST(spw_cast_f32_bf16, F32, Bf16)
CAST(spw_cast_f16_f32, F16, F32)
CAST(spw_cast_bf16_f32, Bf16, F32)
