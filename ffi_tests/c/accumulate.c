// spw_grad_accumulate: the sums of every pair of types against plain C, the statistics against spw_grad_stats, bits for any
// number of workers and any split, and what it refuses.

#include "check.h"

#include <math.h> // the macros INFINITY and NAN

enum { N = 200001, TENSORS = 7 };

static float dst[N], src[N], start[N];

static spw_grad_tensor pair_of(void *to, uint32_t to_dtype, const void *from, uint32_t from_dtype, uint64_t n) {
    spw_grad_tensor pair = {sizeof pair, to_dtype, from_dtype, 0, n, to, from};
    return pair;
}

static void fill_arrays(void) {
    for (int i = 0; i < N; i++) {
        start[i] = (float)(i % 1013 - 506) / 64;
        src[i] = (float)(i % 811 - 405) / 256;
    }
    memcpy(dst, start, sizeof dst);
}

static void sums_are_rounded_once(void) {
    const double scale = 0.3;
    fill_arrays();
    spw_grad_tensor pair = pair_of(dst, SPW_DTYPE_F32, src, SPW_DTYPE_F32, N);
    CHECK_OK(spw_grad_accumulate(&pair, 1, scale, NULL));
    for (int i = 0; i < N; i++) {
        // The product and the sum of these values are exact in double.
        CHECK(dst[i] == (float)((double)src[i] * (double)(float)scale + (double)start[i]));
    }
}

static void statistics_are_those_of_the_results(void) {
    fill_arrays();
    src[777] = INFINITY;
    spw_step_stats seen = step_stats(), alone = step_stats();
    spw_grad_tensor pair = pair_of(dst, SPW_DTYPE_F32, src, SPW_DTYPE_F32, 700);
    CHECK_OK(spw_grad_accumulate(&pair, 1, 1, &seen));
    CHECK_OK(grad_stats(dst, SPW_DTYPE_F32, 700, 1, &alone));
    CHECK(seen.nonfinite == 0 && seen.sum_squares == alone.sum_squares && seen.sum_squares > 0);
    pair = pair_of(dst, SPW_DTYPE_F32, src, SPW_DTYPE_F32, N);
    CHECK_OK(spw_grad_accumulate(&pair, 1, 1, &seen));
    CHECK(seen.nonfinite == 1);
}

// bf16 values of small integers are exact, and so are their sums.
static void types_mix(void) {
    static uint16_t halves[N];
    fill_arrays();
    for (int i = 0; i < N; i++) {
        const float value = (float)(i % 128);
        uint32_t bits;
        memcpy(&bits, &value, sizeof bits);
        halves[i] = (uint16_t)(bits >> 16);
    }
    spw_grad_tensor pair = pair_of(dst, SPW_DTYPE_F32, halves, SPW_DTYPE_BF16, N);
    CHECK_OK(spw_grad_accumulate(&pair, 1, 2, NULL));
    for (int i = 0; i < N; i++) CHECK(dst[i] == start[i] + 2 * (float)(i % 128));
    for (uint32_t to = SPW_DTYPE_F32; to <= SPW_DTYPE_BF16; to++) {
        for (uint32_t from = SPW_DTYPE_F32; from <= SPW_DTYPE_BF16; from++) {
            pair = pair_of(dst, to, src, from, 1000);
            CHECK_OK(spw_grad_accumulate(&pair, 1, 1, NULL));
        }
    }
}

static void workers_and_splits_change_no_bit(void) {
    static float expected[N];
    spw_step_stats first = step_stats();
    for (uint32_t workers = 1; workers <= 4; workers++) {
        configure_threads(workers);
        fill_arrays();
        spw_step_stats seen = step_stats();
        spw_grad_tensor whole = pair_of(dst, SPW_DTYPE_F32, src, SPW_DTYPE_F32, N);
        CHECK_OK(spw_grad_accumulate(&whole, 1, 0.7, &seen));
        if (workers == 1) {
            memcpy(expected, dst, sizeof dst);
            first = seen;
        }
        CHECK(memcmp(expected, dst, sizeof dst) == 0 && memcmp(&first, &seen, sizeof seen) == 0);
        fill_arrays();
        spw_grad_tensor parts[TENSORS];
        uint64_t at = 0;
        for (int i = 0; i < TENSORS; i++) {
            const uint64_t n = i == TENSORS - 1 ? N - at : i == 3 ? 0 : (uint64_t)i * 9001 + 1;
            parts[i] = pair_of(n ? dst + at : NULL, SPW_DTYPE_F32, n ? src + at : NULL, SPW_DTYPE_F32, n);
            at += n;
        }
        CHECK_OK(spw_grad_accumulate(parts, TENSORS, 0.7, NULL));
        CHECK(memcmp(expected, dst, sizeof dst) == 0);
    }
}

static void wrong_values_change_nothing(void) {
    fill_arrays();
    spw_grad_tensor two[2] = {pair_of(dst, SPW_DTYPE_F32, src, SPW_DTYPE_F32, 100),
                              pair_of(dst + 200, SPW_DTYPE_F32, src + 200, SPW_DTYPE_F32, 100)};
    const spw_grad_tensor good = two[1];
    INVALID(spw_grad_accumulate(NULL, 2, 1, NULL), "tensors: is NULL");
    INVALID(spw_grad_accumulate(two, 2, INFINITY, NULL), "scale");
    INVALID(spw_grad_accumulate(two, 2, NAN, NULL), "scale");
    two[1].dst_dtype = 4;
    INVALID(spw_grad_accumulate(two, 2, 1, NULL), "tensors[1].dst_dtype");
    two[1] = good, two[1].src_dtype = 0;
    INVALID(spw_grad_accumulate(two, 2, 1, NULL), "tensors[1].src_dtype");
    two[1] = good, two[1].reserved = 1;
    INVALID(spw_grad_accumulate(two, 2, 1, NULL), "tensors[1].reserved");
    two[1] = good, two[1].src = NULL;
    INVALID(spw_grad_accumulate(two, 2, 1, NULL), "tensors[1].src: is NULL");
    two[1] = good, two[1].dst = NULL;
    INVALID(spw_grad_accumulate(two, 2, 1, NULL), "tensors[1].dst: is NULL");
    two[1] = good, two[1].dst = (char *)two[1].dst + 1;
    INVALID(spw_grad_accumulate(two, 2, 1, NULL), "tensors[1].dst");
    two[1] = good, two[1].dst = dst + 99;
    INVALID(spw_grad_accumulate(two, 2, 1, NULL), "overlaps tensors[0].dst");
    two[1] = good, two[1].src = dst + 50;
    INVALID(spw_grad_accumulate(two, 2, 1, NULL), "tensors[1].src: overlaps tensors[0].dst");
    two[1] = good, two[1].src = good.dst;
    INVALID(spw_grad_accumulate(two, 2, 1, NULL), "overlaps");
    two[1] = good, two[1].n = UINT64_MAX;
    INVALID(spw_grad_accumulate(two, 2, 1, NULL), "tensors[");
    CHECK(memcmp(dst, start, sizeof dst) == 0);
    two[1] = good, two[1].src = two[0].src;
    CHECK_OK(spw_grad_accumulate(two, 2, 1, NULL));
    CHECK_OK(spw_grad_accumulate(NULL, 0, 1, NULL));
}

int main(void) {
    sums_are_rounded_once();
    statistics_are_those_of_the_results();
    types_mix();
    workers_and_splits_change_no_bit();
    wrong_values_change_nothing();
    return 0;
}
