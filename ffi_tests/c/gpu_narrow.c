// A step of split masters and 8-bit moments in device memory has the bits of the same step in host memory, over the fake
// driver. Wrong uses are refused before anything is written.

#define SPW_EXPERIMENTAL
#include "fake_cuda.h"

#include <stdbool.h>

enum { ORDINAL = 8, N = 9001, STEPS = 3, SPANS = 9 };

// The arrays of a tensor, in host memory and in device memory: param, low bits, sums, gradient, moments, scales, copy.
struct arrays {
    void *host[SPANS];
    uint64_t device[SPANS];
    size_t bytes[SPANS];
};

static uint64_t state = 1;

static uint32_t next(void) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(state >> 33);
}

static struct arrays make_arrays(bool split, bool coded) {
    const size_t blocks = (N + 31) / 32, moment = coded ? N : 4 * N;
    struct arrays made = {.bytes = {split ? 2 * N : 4 * N, split ? 2 * N : 0, split ? 8 * ((N + 4095) / 4096) : 0, 2 * N, moment, moment,
                                    coded ? 2 * blocks : 0, coded ? 2 * blocks : 0, split ? 0 : 2 * N}};
    for (int i = 0; i < SPANS; i++) made.host[i] = calloc(made.bytes[i] + 1, 1);
    for (int i = 0; i < N; i++) {
        const float param = (float)next() / 2147483648.0f - 0.5f;
        uint32_t bits;
        memcpy(&bits, &param, sizeof bits);
        if (split) ((uint16_t *)made.host[0])[i] = (uint16_t)(bits >> 16), ((uint16_t *)made.host[1])[i] = (uint16_t)bits;
        if (!split) ((uint32_t *)made.host[0])[i] = bits;
        ((uint16_t *)made.host[3])[i] = (uint16_t)(0x3c00 | next() % 256 | (next() & 1) << 15);
    }
    for (int i = 0; i < SPANS; i++)
        if (made.bytes[i] != 0) made.device[i] = device_memory(made.host[i], made.bytes[i]);
    return made;
}

static void *span(const struct arrays *arrays, bool device, int which) {
    if (arrays->bytes[which] == 0) return NULL;
    return device ? (void *)(uintptr_t)arrays->device[which] : arrays->host[which];
}

static spw_tensor tensor_of(const struct arrays *arrays, bool device, bool split, bool coded) {
    return (spw_tensor){.struct_size = sizeof(spw_tensor),
                        .n = N,
                        .param_dtype = split ? SPW_DTYPE_BF16 : SPW_DTYPE_F32,
                        .state_dtype = coded ? SPW_DTYPE_CODES : SPW_DTYPE_F32,
                        .grad_dtype = SPW_DTYPE_BF16,
                        .copy_dtype = split ? SPW_DTYPE_NONE : SPW_DTYPE_BF16,
                        .param = span(arrays, device, 0),
                        .param_low = span(arrays, device, 1),
                        .low_sums = span(arrays, device, 2),
                        .grad = span(arrays, device, 3),
                        .exp_avg = span(arrays, device, 4),
                        .exp_avg_sq = span(arrays, device, 5),
                        .exp_avg_scale = span(arrays, device, 6),
                        .exp_avg_sq_scale = span(arrays, device, 7),
                        .param_copy = span(arrays, device, 8)};
}

static void check_same(const struct arrays *arrays) {
    for (int i = 0; i < SPANS; i++)
        CHECK(arrays->bytes[i] == 0 || memcmp(arrays->host[i], (void *)(uintptr_t)arrays->device[i], arrays->bytes[i]) == 0);
}

static void give_back(struct arrays *arrays) {
    for (int i = 0; i < SPANS; i++) {
        free(arrays->host[i]);
        if (arrays->device[i] != 0) FAKE("cuMemFree_v2", arrays->device[i]);
    }
}

static void a_step_has_the_bits_of_the_processor(spw_gpu *gpu, bool split, bool coded, uint32_t rounding) {
    struct arrays arrays = make_arrays(split, coded);
    const spw_tensor host = tensor_of(&arrays, false, split, coded), device = tensor_of(&arrays, true, split, coded);
    for (uint64_t number = 1; number <= STEPS; number++) {
        spw_adam_options options = adam_options();
        options.step = number, options.rounding = rounding, options.rounding_seed = 7;
        spw_step_stats expected = SPW_STEP_STATS_INIT, found = SPW_STEP_STATS_INIT;
        CHECK_OK(spw_adam_step(&options, &host, 1, &expected));
        CHECK_OK(spw_gpu_adam_step(gpu, &options, &device, 1, 0, &found));
        CHECK(memcmp(&expected.sum_squares, &found.sum_squares, sizeof(double)) == 0);
        check_same(&arrays);
        // Other code writes to a part of the parameter.
        ((uint16_t *)arrays.host[0])[4100]++, ((uint16_t *)(uintptr_t)arrays.device[0])[4100]++;
    }
    give_back(&arrays);
}

static void wrong_uses_are_refused(spw_gpu *gpu) {
    struct arrays arrays = make_arrays(true, true);
    const spw_tensor good = tensor_of(&arrays, true, true, true);
    spw_adam_options options = adam_options();
    options.step = 1;
#define WRONG(change, words)                                                  \
    do {                                                                      \
        spw_tensor wrong = good;                                              \
        change;                                                               \
        INVALID(spw_gpu_adam_step(gpu, &options, &wrong, 1, 0, NULL), words); \
    } while (0)
    WRONG(wrong.param_low = NULL, "low_sums");
    WRONG(wrong.low_sums = (uint64_t *)((uintptr_t)good.low_sums + 4), "low_sums: address");
    WRONG(wrong.exp_avg_scale = NULL, "exp_avg_scale: is NULL");
    WRONG(wrong.exp_avg = NULL, "exp_avg: is NULL");
    // Half the elements, so that the wider moments overlap nothing.
    WRONG((wrong.state_dtype = SPW_DTYPE_BF16, wrong.n = N / 2), "exp_avg_scale");
    WRONG(wrong.exp_avg_sq = wrong.exp_avg, "exp_avg");
    WRONG((wrong.param_copy = wrong.param_low, wrong.copy_dtype = SPW_DTYPE_BF16), "param_copy");
#undef WRONG
    spw_tensor wrong = good;
    wrong.param_low = NULL, wrong.low_sums = NULL;
    CHECK(spw_gpu_adam_step(gpu, &options, &wrong, 1, 0, NULL) == SPW_ERR_UNSUPPORTED);
    CHECK(strstr(spw_last_error(), "need an f32 param, or a bf16 param with param_low"));
    check_same(&arrays);
    give_back(&arrays);
}

int main(void) {
    use_fake_driver();
    enter_context(ORDINAL);
    spw_gpu *gpu = open_gpu(ORDINAL);
    for (int kind = 1; kind < 4; kind++) {
        a_step_has_the_bits_of_the_processor(gpu, kind & 1, kind & 2, SPW_ROUNDING_NEAREST);
        if (kind & 2) a_step_has_the_bits_of_the_processor(gpu, kind & 1, true, SPW_ROUNDING_STOCHASTIC);
    }
    wrong_uses_are_refused(gpu);
    CHECK_OK(spw_gpu_close(gpu));
    return 0;
}
