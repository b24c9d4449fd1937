// Gradients leave the device and parameters return, in the transfer type that the dtypes require and after the
// framework's event or stream. Adam on the device gives the same bits as Adam on the processor. Memory that is not
// pinned is refused. The fake driver reports no race.

#define SPW_EXPERIMENTAL
#include "fake_cuda.h"

#include <stdint.h>

enum { N = 10007, ORDINAL = 2 };

static float widen(uint16_t bits) {
    const uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
}

static void gradients_and_parameters(spw_gpu *gpu, void *stream) {
    uint16_t *values = malloc(N * sizeof *values);
    for (uint32_t i = 0; i < N; i++) values[i] = (uint16_t)(i * 5 % 0x7f80);
    float *wide = NULL;
    CHECK_OK(spw_pinned_alloc(NULL, N * sizeof *wide, (void **)&wide));
    const uint64_t grads = device_memory(values, N * sizeof *values);
    uint64_t event = 0, ticket = 0;
    FAKE("cuEventCreate", &event, 2u);
    FAKE("cuEventRecord", event, stream);

    spw_gpu_copy copy = {.struct_size = sizeof copy, .direction = SPW_GPU_DIRECTION_D2H, .device_dtype = SPW_DTYPE_BF16,
                         .host_dtype = SPW_DTYPE_F32, .after = SPW_GPU_AFTER_EVENT, .n = N, .device = grads,
                         .host = wide, .handle = event};
    CHECK_OK(spw_gpu_copy_start(gpu, &copy, &ticket));
    REFUSED(spw_gpu_copy_wait(gpu, ticket, 0), SPW_ERR_TIMEOUT, "still in flight");
    CHECK_OK(spw_gpu_copy_wait(gpu, ticket, -1));
    for (uint32_t i = 0; i < N; i++) CHECK(wide[i] == widen(values[i]));

    // Copy back to fresh device memory; the framework's stream waits for the copy and then reads it.
    const uint64_t params = device_memory(values + 1, (N - 1) * sizeof *values);
    copy = (spw_gpu_copy){.struct_size = sizeof copy, .direction = SPW_GPU_DIRECTION_H2D, .device_dtype = SPW_DTYPE_BF16,
                          .host_dtype = SPW_DTYPE_F32, .after = SPW_GPU_AFTER_STREAM, .n = N - 1, .device = params,
                          .host = wide, .handle = (uintptr_t)stream};
    CHECK_OK(spw_gpu_copy_start(gpu, &copy, &ticket));
    CHECK_OK(spw_gpu_copy_stream_wait(gpu, ticket, (uintptr_t)stream));
    FAKE("cuStreamSynchronize", stream);
    CHECK(memcmp((void *)(uintptr_t)params, values, (N - 1) * sizeof *values) == 0);

    // If both sides have 16 bits, the values travel unchanged.
    uint16_t *narrow = (uint16_t *)wide;
    copy = (spw_gpu_copy){.struct_size = sizeof copy, .direction = SPW_GPU_DIRECTION_D2H, .device_dtype = SPW_DTYPE_BF16,
                          .host_dtype = SPW_DTYPE_BF16, .n = N, .device = grads, .host = narrow};
    CHECK_OK(spw_gpu_copy_start(gpu, &copy, NULL));
    CHECK_OK(spw_gpu_copy_start(gpu, &copy, &ticket));
    CHECK_OK(spw_gpu_copy_wait(gpu, ticket, 60000));
    CHECK(memcmp(narrow, values, N * sizeof *values) == 0);

    const spw_gpu_copy good = copy;
    copy.host = values;
    INVALID(spw_gpu_copy_start(gpu, &copy, &ticket), "copy.host: 20014 bytes at");
    copy = good, copy.device = 0;
    INVALID(spw_gpu_copy_start(gpu, &copy, &ticket), "copy.device: is NULL");
    copy = good, copy.host = NULL;
    INVALID(spw_gpu_copy_start(gpu, &copy, &ticket), "copy.host: is NULL");
    copy = good, copy.after = SPW_GPU_AFTER_EVENT;
    INVALID(spw_gpu_copy_start(gpu, &copy, &ticket), "copy.handle: is 0; record the event first");
    copy = good, copy.after = 3;
    INVALID(spw_gpu_copy_start(gpu, &copy, &ticket), "copy.after: 3");
    copy = good, copy.direction = 2;
    INVALID(spw_gpu_copy_start(gpu, &copy, &ticket), "copy.direction: is 2");
    copy = good, copy.host_dtype = SPW_DTYPE_F16;
    INVALID(spw_gpu_copy_start(gpu, &copy, &ticket), "host_dtype: is f16, but the device type is bf16");
    copy = good, copy.n = UINT64_MAX;
    INVALID(spw_gpu_copy_start(gpu, &copy, &ticket), "exceed the address space");
    copy = good, copy.device += 1;
    INVALID(spw_gpu_copy_start(gpu, &copy, &ticket), "copy.device:");
    INVALID(spw_gpu_copy_wait(gpu, 1000, 0), "ticket: 1000 is not a ticket of this object");
    FAKE("cuMemFree_v2", grads);
    FAKE("cuMemFree_v2", params);
    CHECK_OK(spw_pinned_free(wide));
    free(values);
}

static void adam(spw_gpu *gpu, void *stream) {
    struct problem problems[2] = {make_mixed(N, 8), make_mixed(5, 9)};
    spw_tensor device[3] = {problems[0].tensor, problems[1].tensor, {.struct_size = sizeof *device}};
    for (int i = 0; i < 2; i++) {
        spw_tensor *t = &device[i];
        const uint64_t n = t->n;
        t->param = (void *)(uintptr_t)device_memory(t->param, n * width(t->param_dtype));
        t->grad = (void *)(uintptr_t)device_memory(t->grad, n * width(t->grad_dtype));
        t->exp_avg = (void *)(uintptr_t)device_memory(t->exp_avg, n * width(t->state_dtype));
        t->exp_avg_sq = (void *)(uintptr_t)device_memory(t->exp_avg_sq, n * width(t->state_dtype));
        t->param_copy = (void *)(uintptr_t)device_memory(t->param_copy, n * width(t->copy_dtype));
    }
    spw_adam_options options = adam_options();
    options.weight_decay = 0.1;
    spw_step_stats mine = {.struct_size = sizeof mine}, theirs = {.struct_size = sizeof theirs};
    spw_tensor host[2] = {problems[0].tensor, problems[1].tensor};
    for (options.step = 1; options.step <= 3; options.step++) {
        const int asked = options.step != 2;
        CHECK_OK(spw_adam_step(&options, host, 2, &theirs));
        CHECK_OK(spw_gpu_adam_step(gpu, &options, device, 3, (uintptr_t)stream, asked ? &mine : NULL));
        if (asked) CHECK(memcmp(&mine, &theirs, sizeof mine) == 0);
    }
    FAKE("cuStreamSynchronize", stream);
    for (int i = 0; i < 2; i++) {
        const spw_tensor *a = &device[i], *b = &host[i];
        CHECK(memcmp(a->param, b->param, b->n * width(b->param_dtype)) == 0);
        CHECK(memcmp(a->exp_avg, b->exp_avg, b->n * width(b->state_dtype)) == 0);
        CHECK(memcmp(a->exp_avg_sq, b->exp_avg_sq, b->n * width(b->state_dtype)) == 0);
        CHECK(memcmp(a->param_copy, b->param_copy, b->n * width(b->copy_dtype)) == 0);
    }
    spw_tensor broken = device[0];
    broken.grad = NULL;
    INVALID(spw_gpu_adam_step(gpu, &options, &broken, 1, 0, NULL), "tensors[0].grad: is NULL");
    broken = device[0], broken.state_dtype = SPW_DTYPE_F16;
    REFUSED(spw_gpu_adam_step(gpu, &options, &broken, 1, 0, NULL), SPW_ERR_UNSUPPORTED, "spw_adam_f32_f16");
    for (int i = 0; i < 2; i++) {
        FAKE("cuMemFree_v2", device[i].param);
        FAKE("cuMemFree_v2", device[i].grad);
        FAKE("cuMemFree_v2", device[i].exp_avg);
        FAKE("cuMemFree_v2", device[i].exp_avg_sq);
        FAKE("cuMemFree_v2", device[i].param_copy);
        release(&problems[i]);
    }
}

// Shadow spans keep the old states: a step is redone with another factor, or rolled back, bit for bit.
static void steps_that_are_taken_back(spw_gpu *gpu, void *stream) {
    struct problem plain = make(N, SPW_DTYPE_F32, SPW_DTYPE_F32, SPW_DTYPE_BF16, SPW_DTYPE_BF16, 3);
    const spw_tensor *host = &plain.tensor;
    const size_t bytes = N * sizeof(float);
    void *old[3] = {host->param, host->exp_avg, host->exp_avg_sq}, *before[3], *spans[6];
    for (int i = 0; i < 6; i++) spans[i] = (void *)(uintptr_t)device_memory(old[i % 3], bytes);
    for (int i = 0; i < 3; i++) before[i] = memcpy(malloc(bytes), old[i], bytes);
    spw_tensor device = *host;
    device.param = spans[0], device.exp_avg = spans[1], device.exp_avg_sq = spans[2];
    device.shadow_param = spans[3], device.shadow_exp_avg = spans[4], device.shadow_exp_avg_sq = spans[5];
    device.grad = (void *)(uintptr_t)device_memory(host->grad, N * 2);
    device.param_copy = (void *)(uintptr_t)device_memory(host->param_copy, N * 2);
    spw_adam_options options = adam_options();
    CHECK_OK(spw_gpu_adam_step(gpu, &options, &device, 1, (uintptr_t)stream, NULL));
    options.grad_scale = 0.375;
    CHECK_OK(spw_gpu_adam_step(gpu, &options, &device, 1, (uintptr_t)stream, NULL));
    CHECK_OK(spw_adam_step(&options, host, 1, NULL));
    FAKE("cuStreamSynchronize", stream);
    for (int i = 0; i < 3; i++) {
        CHECK(memcmp(spans[i], before[i], bytes) == 0);
        CHECK(memcmp(spans[i + 3], old[i], bytes) == 0 && memcmp(before[i], old[i], bytes) != 0);
    }
    CHECK(memcmp(device.param_copy, host->param_copy, N * 2) == 0);
    spw_tensor broken = device;
    broken.shadow_exp_avg = NULL;
    INVALID(spw_gpu_adam_step(gpu, &options, &broken, 1, 0, NULL), "tensors[0].shadow_exp_avg: is NULL");
    broken = device;
    broken.copy_dtype = SPW_DTYPE_NONE;
    INVALID(spw_gpu_adam_step(gpu, &options, &broken, 1, 0, NULL), "tensors[0].copy_dtype: is SPW_DTYPE_NONE, but");
    broken = device;
    broken.take_copy = 1;
    INVALID(spw_gpu_adam_step(gpu, &options, &broken, 1, 0, NULL), "tensors[0].take_copy: must be 0");
    broken = device;
    broken.param_copy = (void *)(uintptr_t)device.grad;
    INVALID(spw_gpu_adam_step(gpu, &options, &broken, 1, 0, NULL), "tensors[0].param_copy: overlaps tensors[0].grad");
    for (int i = 0; i < 6; i++) FAKE("cuMemFree_v2", spans[i]);
    for (int i = 0; i < 3; i++) free(before[i]);
    FAKE("cuMemFree_v2", device.grad);
    FAKE("cuMemFree_v2", device.param_copy);
    release(&plain);
}

static int warnings;

static void count_warnings(void *user, int32_t level, const char *message) {
    (void)user;
    warnings += level == SPW_LOG_LEVEL_WARN && strstr(message, "gpu_copies.profile") != NULL;
}

// The bandwidth is measured once, read from the profile later, and measured again on request. A profile in another
// format causes one warning and is replaced.
static void link(spw_gpu *gpu) {
    CHECK(setenv("SPILLWAY_PROFILE", "gpu_copies.profile", 1) == 0);
    FILE *other = fopen("gpu_copies.profile", "w");
    CHECK(other != NULL && fputs("link a\n", other) >= 0 && fclose(other) == 0);
    spw_gpu_link first = {.struct_size = sizeof first}, second = first, third = first;
    CHECK_OK(spw_set_log(count_warnings, NULL, SPW_LOG_LEVEL_WARN));
    CHECK_OK(spw_gpu_measure_link(gpu, 0, 0, &first));
    CHECK_OK(spw_set_log(NULL, NULL, SPW_LOG_LEVEL_OFF));
    CHECK(warnings == 1);
    CHECK(first.d2h_f32 > 0 && first.d2h_native > 0 && first.h2d_f32 > 0 && first.h2d_native > 0);
    CHECK(first.step_f32 > 0 && first.step_native > 0);
    CHECK_OK(spw_gpu_measure_link(gpu, 0, 0, &second));
    CHECK(memcmp(&first, &second, sizeof first) == 0);
    CHECK_OK(spw_gpu_measure_link(gpu, 1, 0, &third));
    CHECK(third.transfer_dtype == SPW_TRANSFER_DTYPE_F32 && third.d2h_f32 == first.d2h_f32);
    CHECK_OK(spw_gpu_measure_link(gpu, 0, 1, &third));
    CHECK(third.step_f32 != first.step_f32);
    INVALID(spw_gpu_measure_link(gpu, 2, 0, &third), "accumulates: is 2");
    INVALID(spw_gpu_measure_link(gpu, 0, 0, NULL), "link_out: is NULL");
}

int main(void) {
    use_fake_driver();
    spw_gpu *gpu = open_gpu(ORDINAL);
    link(gpu);
    enter_context(ORDINAL);
    void *stream = NULL;
    FAKE("cuStreamCreateWithPriority", &stream, 1u, 0);
    gradients_and_parameters(gpu, stream);
    adam(gpu, stream);
    steps_that_are_taken_back(gpu, stream);
    FAKE("cuStreamDestroy_v2", stream);
    CHECK_OK(spw_gpu_close(gpu));
    CHECK(fake_count("fakecuda_races", ORDINAL) == 0);
    CHECK(fake_count("fakecuda_pageable_copies", ORDINAL) == 0);
    return 0;
}
