// The interleaved update on a GPU, over the fake driver. Every plan gives the bits of spw_adam_step, uses no copy
// through pageable memory, and orders every memory access by events.

#define SPW_EXPERIMENTAL
#include "fake_cuda.h"

#include <spillway/interleave.h>

enum { SUBGROUPS = 6, ORDINAL = 7 };
// A transfer type of this test: the gradients are in host memory alone, and the GPU fetches them from there.
static const uint32_t HOME = 1000;
static const uint64_t SIZES[SUBGROUPS] = {3000, 17, 0, 3000, 1024, 700};

static struct problem plain[SUBGROUPS];
static void *states[SUBGROUPS][3], *staging[SUBGROUPS], *host_grads[SUBGROUPS], *copies[SUBGROUPS];
static uint64_t grads[SUBGROUPS], params[SUBGROUPS];
static uint64_t seed = 1;
static void *stream;

static void *pinned(size_t bytes) {
    void *start = NULL;
    CHECK_OK(spw_pinned_alloc(NULL, bytes + 1, &start));
    return start;
}

static void take_memory(uint32_t grad, uint32_t copy) {
    for (int i = 0; i < SUBGROUPS; i++) {
        plain[i] = make(SIZES[i], SPW_DTYPE_F32, SPW_DTYPE_F32, grad, copy, (uint64_t)i);
        const int order[3] = {2, 3, 0};
        for (int state = 0; state < 3; state++) {
            states[i][state] = pinned(plain[i].bytes[order[state]]);
            memcpy(states[i][state], plain[i].spans[order[state]], plain[i].bytes[order[state]]);
        }
        staging[i] = pinned(plain[i].bytes[1]);
        host_grads[i] = pinned(plain[i].bytes[1]);
        copies[i] = pinned(plain[i].bytes[4]);
        if (SIZES[i] == 0) continue;
        grads[i] = device_memory(plain[i].spans[1], plain[i].bytes[1]);
        if (copy != SPW_DTYPE_NONE) params[i] = device_memory(plain[i].spans[4], plain[i].bytes[4]);
    }
}

static void give_memory_back(void) {
    for (int i = 0; i < SUBGROUPS; i++) {
        for (int state = 0; state < 3; state++) CHECK_OK(spw_pinned_free(states[i][state]));
        CHECK_OK(spw_pinned_free(staging[i]));
        CHECK_OK(spw_pinned_free(host_grads[i]));
        CHECK_OK(spw_pinned_free(copies[i]));
        if (grads[i] != 0) FAKE("cuMemFree_v2", grads[i]);
        if (params[i] != 0) FAKE("cuMemFree_v2", params[i]);
        grads[i] = params[i] = 0;
        release(&plain[i]);
    }
}

static spw_interleave_options options_of(spw_gpu *gpu, uint32_t wire, uint32_t fetch, uint32_t grad, uint32_t copy) {
    return (spw_interleave_options){.struct_size = sizeof(spw_interleave_options),
                                    .backend = SPW_INTERLEAVE_BACKEND_CUDA,
                                    .transfer_dtype = wire == HOME ? SPW_TRANSFER_DTYPE_DELIVERED : wire,
                                    .fetch_gradients = fetch,
                                    .grad_dtype = grad,
                                    .copy_dtype = copy,
                                    .chunk = 640,
                                    .gpu = gpu};
}

static void describe(spw_interleave_subgroup subgroups[SUBGROUPS], uint32_t wire) {
    for (int i = 0; i < SUBGROUPS; i++) {
        subgroups[i] = (spw_interleave_subgroup){.struct_size = sizeof(spw_interleave_subgroup),
                                                 .n = SIZES[i],
                                                 .param = states[i][2],
                                                 .exp_avg = states[i][0],
                                                 .exp_avg_sq = states[i][1],
                                                 .grad = wire == HOME ? NULL : (void *)(uintptr_t)grads[i],
                                                 .param_copy = (void *)(uintptr_t)params[i],
                                                 .host_grad = wire == SPW_TRANSFER_DTYPE_DELIVERED || wire == HOME ? host_grads[i] : NULL};
    }
}

// The framework produces gradients on its stream; no call waits on the host.
static void backward(spw_interleave *update, int frees_early) {
    for (int i = SUBGROUPS - 1; i >= 0; i--) {
        fill(plain[i].spans[1], plain[i].tensor.grad_dtype, SIZES[i], ++seed, 0);
        memcpy(staging[i], plain[i].spans[1], plain[i].bytes[1]);
        memcpy(host_grads[i], plain[i].spans[1], plain[i].bytes[1]);
        if (SIZES[i] > 0) FAKE("cuMemcpyHtoDAsync_v2", grads[i], staging[i], plain[i].bytes[1], stream);
        if (frees_early) CHECK_OK(spw_interleave_release_params(update, (uint64_t)i, (uintptr_t)stream));
        CHECK_OK(spw_interleave_grad_ready(update, (uint64_t)i, (uintptr_t)stream));
    }
}

static void step(spw_interleave *update, uint64_t number) {
    spw_adam_options options = adam_options();
    options.step = number;
    for (int i = 0; i < SUBGROUPS; i++) CHECK_OK(spw_adam_step(&options, &plain[i].tensor, 1, NULL));
    CHECK_OK(spw_interleave_begin(update, &options, 1, (uintptr_t)stream));
}

// The next forward pass reads each subgroup's parameters on the framework's stream.
static void forward(spw_interleave *update) {
    for (int i = 0; i < SUBGROUPS; i++) {
        CHECK_OK(spw_interleave_stream_wait_params(update, (uint64_t)i, (uintptr_t)stream));
        if (plain[i].bytes[4] > 0) FAKE("cuMemcpyDtoHAsync_v2", copies[i], params[i], plain[i].bytes[4], stream);
    }
    FAKE("cuStreamSynchronize", stream);
    for (int i = 0; i < SUBGROUPS; i++) {
        CHECK(plain[i].bytes[4] == 0 || memcmp(copies[i], plain[i].spans[4], plain[i].bytes[4]) == 0);
    }
}

static void trains_with_the_same_bits(spw_gpu *gpu, uint32_t wire, uint32_t fetch, uint32_t grad, uint32_t copy,
                                     uint64_t steps) {
    take_memory(grad, copy);
    spw_interleave_subgroup subgroups[SUBGROUPS];
    describe(subgroups, wire);
    const spw_interleave_options options = options_of(gpu, wire, fetch, grad, copy);
    spw_interleave *update = NULL;
    CHECK_OK(spw_interleave_open(&options, subgroups, SUBGROUPS, &update));
    for (uint64_t number = 1; number <= steps; number++) {
        uint32_t sites[SUBGROUPS];
        for (int i = 0; i < SUBGROUPS; i++) sites[i] = number == 5 ? 1 : (uint32_t)(random_bits(&seed) % (wire == HOME ? 2 : 3));
        CHECK_OK(spw_interleave_set_plan(update, sites, SUBGROUPS));
        backward(update, number % 2 == 0);
        step(update, number);
        forward(update);
    }
    const uint32_t on_cpu[SUBGROUPS] = {0};
    uint64_t away = 99, bytes = 0;
    CHECK_OK(spw_interleave_set_plan(update, on_cpu, SUBGROUPS));
    CHECK_OK(spw_interleave_drain(update));
    CHECK_OK(spw_interleave_get_in_flight(update, NULL, 0, &away));
    CHECK(away == 0);
    CHECK_OK(spw_interleave_get_trace(update, NULL, 0, &bytes));
    CHECK(bytes > 100);
    for (int i = 0; i < SUBGROUPS; i++) {
        CHECK(memcmp(states[i][0], plain[i].spans[2], plain[i].bytes[2]) == 0);
        CHECK(memcmp(states[i][1], plain[i].spans[3], plain[i].bytes[3]) == 0);
        CHECK(memcmp(states[i][2], plain[i].spans[0], plain[i].bytes[0]) == 0);
    }
    CHECK_OK(spw_interleave_close(update));
    give_memory_back();
    CHECK(fake_count("fakecuda_races", ORDINAL) == 0);
}

// Without a plan of the caller, the update makes subgroups resident in the memory that is free after two steps.
static void takes_free_memory_for_residents(spw_gpu *gpu) {
    take_memory(SPW_DTYPE_BF16, SPW_DTYPE_BF16);
    spw_interleave_subgroup subgroups[SUBGROUPS];
    describe(subgroups, SPW_TRANSFER_DTYPE_NATIVE);
    const spw_interleave_options options = options_of(gpu, SPW_TRANSFER_DTYPE_NATIVE, 0, SPW_DTYPE_BF16, SPW_DTYPE_BF16);
    spw_interleave *update = NULL;
    CHECK_OK(spw_interleave_open(&options, subgroups, SUBGROUPS, &update));
    const spw_interleave_rates rates = {.struct_size = sizeof rates, .cpu = 2e9, .gpu = 25e9, .h2d = 1e9, .d2h = 1e9};
    CHECK_OK(spw_interleave_calibrate(update, &rates));
    uint32_t sites[SUBGROUPS], changed = 9;
    for (uint64_t number = 1; number <= 3; number++) {
        backward(update, 0);
        step(update, number);
        forward(update);
        CHECK_OK(spw_interleave_drain(update));
        CHECK_OK(spw_interleave_replan(update, 0, &changed));
        CHECK_OK(spw_interleave_get_plan(update, sites));
        CHECK(changed == (number == 2));
        for (int i = 0; i < SUBGROUPS; i++) CHECK(sites[i] == (number < 2 ? SPW_PLACEMENT_CPU : SPW_PLACEMENT_RESIDENT));
    }
    CHECK_OK(spw_interleave_close(update));
    give_memory_back();
    CHECK(fake_count("fakecuda_races", ORDINAL) == 0);
}

static int too_few;

static void count_lines(void *user, int32_t level, const char *message) {
    (void)user;
    too_few += level == SPW_LOG_LEVEL_WARN && strstr(message, "holds 2 of the 4 subgroups") != NULL;
}

// Subgroups without memory are on the CPU, with one line in the log, and steps go on.
static void steps_on_the_cpu_without_memory(spw_gpu *gpu) {
    take_memory(SPW_DTYPE_BF16, SPW_DTYPE_BF16);
    spw_interleave_subgroup subgroups[SUBGROUPS];
    describe(subgroups, SPW_TRANSFER_DTYPE_NATIVE);
    const spw_interleave_options options = options_of(gpu, SPW_TRANSFER_DTYPE_NATIVE, 0, SPW_DTYPE_BF16, SPW_DTYPE_BF16);
    spw_interleave *update = NULL;
    CHECK_OK(spw_interleave_open(&options, subgroups, SUBGROUPS, &update));
    CHECK_OK(spw_set_log(count_lines, NULL, SPW_LOG_LEVEL_WARN));
    ((void (*)(uint32_t, uint64_t))fake_symbol("fakecuda_leave"))(ORDINAL, 12 * (700 + 1024 + 1000));
    const uint32_t wanted[SUBGROUPS] = {2, 0, 0, 2, 2, 2}, expected[SUBGROUPS] = {0, 0, 0, 0, 2, 2};
    uint32_t sites[SUBGROUPS];
    CHECK_OK(spw_interleave_set_plan(update, wanted, SUBGROUPS));
    CHECK_OK(spw_interleave_get_plan(update, sites));
    CHECK(memcmp(sites, expected, sizeof sites) == 0 && too_few == 1);
    for (uint64_t number = 1; number <= 2; number++) {
        backward(update, 0);
        step(update, number);
        forward(update);
    }
    CHECK(too_few == 1);
    CHECK_OK(spw_set_log(NULL, NULL, SPW_LOG_LEVEL_OFF));
    CHECK_OK(spw_interleave_close(update));
    ((void (*)(uint32_t, uint64_t))fake_symbol("fakecuda_leave"))(ORDINAL, UINT64_C(1) << 34);
    give_memory_back();
    CHECK(fake_count("fakecuda_races", ORDINAL) == 0);
}

static void refusals(spw_gpu *gpu) {
    take_memory(SPW_DTYPE_BF16, SPW_DTYPE_BF16);
    spw_interleave_subgroup subgroups[SUBGROUPS];
    spw_interleave *update = NULL;
    describe(subgroups, SPW_TRANSFER_DTYPE_NATIVE);
    spw_interleave_options options = options_of(NULL, SPW_TRANSFER_DTYPE_NATIVE, 0, SPW_DTYPE_BF16, SPW_DTYPE_BF16);
    INVALID(spw_interleave_open(&options, subgroups, SUBGROUPS, &update), "gpu: is NULL");
    options.gpu = gpu;
    subgroups[3].param = plain[3].spans[0];
    INVALID(spw_interleave_open(&options, subgroups, SUBGROUPS, &update), "subgroups[3].param");
    describe(subgroups, SPW_TRANSFER_DTYPE_NATIVE);
    subgroups[4].grad = NULL;
    INVALID(spw_interleave_open(&options, subgroups, SUBGROUPS, &update), "subgroups[4].grad");
    describe(subgroups, SPW_TRANSFER_DTYPE_DELIVERED);
    INVALID(spw_interleave_open(&options, subgroups, SUBGROUPS, &update), "subgroups[0].host_grad");
    describe(subgroups, HOME);
    options = options_of(gpu, HOME, 0, SPW_DTYPE_BF16, SPW_DTYPE_BF16);
    INVALID(spw_interleave_open(&options, subgroups, SUBGROUPS, &update), "subgroups[0].grad: is NULL");
    CHECK(update == NULL);
    options.fetch_gradients = 1;
    CHECK_OK(spw_interleave_open(&options, subgroups, SUBGROUPS, &update));
    const uint32_t sites[SUBGROUPS] = {0, 1, 0, 0, SPW_PLACEMENT_RESIDENT, 0};
    INVALID(spw_interleave_set_plan(update, sites, SUBGROUPS), "plan: makes subgroup 4 resident");
    CHECK_OK(spw_interleave_close(update));
    give_memory_back();
}

int main(void) {
    use_fake_driver();
    spw_gpu *gpu = open_gpu(ORDINAL);
    enter_context(ORDINAL);
    FAKE("cuStreamCreateWithPriority", &stream, 1u, 0);
    trains_with_the_same_bits(gpu, SPW_TRANSFER_DTYPE_NATIVE, 0, SPW_DTYPE_BF16, SPW_DTYPE_BF16, 100);
    trains_with_the_same_bits(gpu, SPW_TRANSFER_DTYPE_NATIVE, 1, SPW_DTYPE_F16, SPW_DTYPE_F16, 12);
    trains_with_the_same_bits(gpu, SPW_TRANSFER_DTYPE_F32, 0, SPW_DTYPE_F16, SPW_DTYPE_F16, 12);
    trains_with_the_same_bits(gpu, SPW_TRANSFER_DTYPE_F32, 1, SPW_DTYPE_BF16, SPW_DTYPE_BF16, 12);
    trains_with_the_same_bits(gpu, SPW_TRANSFER_DTYPE_DELIVERED, 0, SPW_DTYPE_BF16, SPW_DTYPE_BF16, 12);
    trains_with_the_same_bits(gpu, SPW_TRANSFER_DTYPE_NATIVE, 0, SPW_DTYPE_F32, SPW_DTYPE_NONE, 12);
    trains_with_the_same_bits(gpu, HOME, 1, SPW_DTYPE_F32, SPW_DTYPE_BF16, 12);
    takes_free_memory_for_residents(gpu);
    steps_on_the_cpu_without_memory(gpu);
    refusals(gpu);
    FAKE("cuStreamDestroy_v2", stream);
    CHECK_OK(spw_gpu_close(gpu));
    CHECK(fake_count("fakecuda_pageable_copies", ORDINAL) == 0);
    return 0;
}
