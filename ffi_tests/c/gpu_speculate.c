// Speculation beside a GPU, over the fake driver. A bucket begins when the copy of its gradient has finished, and its
// parameters go to the device once the step counts. The device steps the tail buckets. Every verdict and every way of
// publishing gives the bits of the serial rule, with all accesses ordered by events.

#define SPW_EXPERIMENTAL
#include "fake_cuda.h"

enum { BUCKETS = 4, ON_GPU = 3, ROUNDS = 9, ORDINAL = 9 };
static const uint64_t SIZES[BUCKETS] = {3000, 65, 1000, 2000};

static struct problem plain[BUCKETS], model[BUCKETS];
static uint64_t grads[BUCKETS], params[BUCKETS], states[3];
static void *staging[BUCKETS], *host_grads[BUCKETS], *copies[BUCKETS], *seen[BUCKETS];
static void *stream, *side;
static uint64_t seed = 1;

static void *pinned(size_t bytes) {
    void *start = NULL;
    CHECK_OK(spw_pinned_alloc(NULL, bytes, &start));
    return start;
}

static void take_memory(void) {
    for (int i = 0; i < BUCKETS; i++) {
        plain[i] = make(SIZES[i], SPW_DTYPE_F32, SPW_DTYPE_F32, SPW_DTYPE_BF16, SPW_DTYPE_BF16, (uint64_t)i);
        model[i] = make(SIZES[i], SPW_DTYPE_F32, SPW_DTYPE_F32, SPW_DTYPE_BF16, SPW_DTYPE_BF16, (uint64_t)i);
        const size_t bytes = plain[i].bytes[1];
        grads[i] = device_memory(plain[i].spans[1], bytes);
        params[i] = device_memory(plain[i].spans[4], bytes);
        staging[i] = pinned(bytes), host_grads[i] = pinned(bytes), copies[i] = pinned(bytes), seen[i] = pinned(bytes);
        memcpy(copies[i], plain[i].spans[4], bytes);
        model[i].tensor.grad = host_grads[i];
        model[i].tensor.param_copy = copies[i];
    }
    spw_tensor *on_gpu = &model[ON_GPU].tensor;
    const void *old[3] = {on_gpu->param, on_gpu->exp_avg, on_gpu->exp_avg_sq};
    for (int i = 0; i < 3; i++) states[i] = device_memory(old[i], model[ON_GPU].bytes[0]);
    on_gpu->param = (void *)(uintptr_t)states[0];
    on_gpu->exp_avg = (void *)(uintptr_t)states[1];
    on_gpu->exp_avg_sq = (void *)(uintptr_t)states[2];
    on_gpu->grad = (void *)(uintptr_t)grads[ON_GPU];
    on_gpu->param_copy = (void *)(uintptr_t)params[ON_GPU];
}

static void give_memory_back(void) {
    for (int i = 0; i < BUCKETS; i++) {
        FAKE("cuMemFree_v2", grads[i]);
        FAKE("cuMemFree_v2", params[i]);
        CHECK_OK(spw_pinned_free(staging[i]));
        CHECK_OK(spw_pinned_free(host_grads[i]));
        CHECK_OK(spw_pinned_free(copies[i]));
        CHECK_OK(spw_pinned_free(seen[i]));
        release(&plain[i]), release(&model[i]);
    }
    for (int i = 0; i < 3; i++) FAKE("cuMemFree_v2", states[i]);
}

static spw_gpu_copy copy_of(int bucket, uint32_t direction, void *host) {
    return (spw_gpu_copy){.struct_size = sizeof(spw_gpu_copy),
                          .direction = direction,
                          .device_dtype = SPW_DTYPE_BF16,
                          .host_dtype = SPW_DTYPE_BF16,
                          .after = SPW_GPU_AFTER_STREAM,
                          .n = SIZES[bucket],
                          .device = direction == SPW_GPU_DIRECTION_D2H ? grads[bucket] : params[bucket],
                          .host = host,
                          .handle = (uintptr_t)stream};
}

static spw_spec *open_spec(spw_gpu *gpu, uint32_t publish) {
    const spw_spec_options options = {
        .struct_size = sizeof options, .buckets = BUCKETS, .undo_mode = SPW_UNDO_MODE_DELTA, .publish = publish};
    spw_spec *spec = NULL;
    CHECK_OK(spw_spec_open(&options, &spec));
    for (int i = 0; i < ON_GPU; i++) {
        const spw_gpu_copy copy = copy_of(i, SPW_GPU_DIRECTION_H2D, copies[i]);
        CHECK_OK(spw_spec_publish_to(spec, (uint32_t)i, gpu, &copy, 1));
    }
    return spec;
}

// The framework produces a gradient on its stream.
static void backward(int bucket, int overflows) {
    fill(plain[bucket].spans[1], SPW_DTYPE_BF16, SIZES[bucket], ++seed, 0);
    if (overflows) ((uint16_t *)plain[bucket].spans[1])[SIZES[bucket] - 1] = 0x7f80;
    memcpy(staging[bucket], plain[bucket].spans[1], plain[bucket].bytes[1]);
    FAKE("cuMemcpyHtoDAsync_v2", grads[bucket], staging[bucket], plain[bucket].bytes[1], stream);
}

// A bucket of the processor: its gradient is copied to the host, and the bucket waits for the end of the copy.
static void submit(spw_spec *spec, spw_gpu *gpu, int bucket) {
    const spw_gpu_copy out = copy_of(bucket, SPW_GPU_DIRECTION_D2H, host_grads[bucket]);
    uint64_t ticket = 0, event = 0;
    CHECK_OK(spw_gpu_copy_start(gpu, &out, &ticket));
    CHECK_OK(spw_gpu_copy_stream_wait(gpu, ticket, (uintptr_t)side));
    spw_spec_event when = {.struct_size = sizeof when, .kind = SPW_SPEC_EVENT_KIND_CUDA_STREAM, .gpu = gpu, .handle = (uintptr_t)side};
    if (bucket == 1) {
        FAKE("cuEventCreate", &event, 2u);
        FAKE("cuEventRecord", event, side);
        when.kind = SPW_SPEC_EVENT_KIND_CUDA, when.handle = event;
    }
    CHECK_OK(spw_spec_submit(spec, (uint32_t)bucket, &model[bucket].tensor, 1, &when));
    if (event != 0) FAKE("cuEventDestroy_v2", event);
}

static void submit_to_gpu(spw_spec *spec, spw_gpu *gpu, int bucket) {
    const spw_spec_event when = {
        .struct_size = sizeof when, .kind = SPW_SPEC_EVENT_KIND_CUDA_STREAM, .gpu = gpu, .handle = (uintptr_t)stream};
    CHECK_OK(spw_spec_submit_gpu(spec, (uint32_t)bucket, gpu, &model[bucket].tensor, 1, (uintptr_t)stream, &when));
}

static void step_plain(const spw_adam_options *options, double scale, double wanted) {
    spw_adam_options scaled = *options;
    scaled.grad_scale = scale;
    double sum = 0;
    for (int i = 0; i < BUCKETS; i++) {
        spw_step_stats stats = {.struct_size = sizeof stats};
        CHECK_OK(spw_adam_step(&scaled, &plain[i].tensor, 1, &stats));
        sum += stats.sum_squares;
    }
    CHECK(wanted < 0 || sum == wanted);
}

// The next forward pass reads all parameters on the framework's stream.
static void forward(spw_spec *spec) {
    for (int i = 0; i < BUCKETS; i++) {
        CHECK_OK(spw_spec_stream_wait(spec, (uint32_t)i, (uintptr_t)stream, -1));
        FAKE("cuMemcpyDtoHAsync_v2", seen[i], params[i], plain[i].bytes[4], stream);
    }
    FAKE("cuStreamSynchronize", stream);
    for (int i = 0; i < BUCKETS; i++) CHECK(memcmp(seen[i], plain[i].spans[4], plain[i].bytes[4]) == 0);
}

static void check_states(void) {
    for (int i = 0; i < ON_GPU; i++) {
        CHECK(memcmp(model[i].tensor.param, plain[i].spans[0], plain[i].bytes[0]) == 0);
        CHECK(memcmp(model[i].tensor.exp_avg, plain[i].spans[2], plain[i].bytes[2]) == 0);
        CHECK(memcmp(model[i].tensor.exp_avg_sq, plain[i].spans[3], plain[i].bytes[3]) == 0);
    }
    const int order[3] = {0, 2, 3};
    for (int i = 0; i < 3; i++) {
        CHECK(memcmp((void *)(uintptr_t)states[i], plain[ON_GPU].spans[order[i]], plain[ON_GPU].bytes[0]) == 0);
    }
}

// The first copy of the library page-locks memory of spw_pinned_alloc, here for the framework's own copies too.
static void page_lock(spw_gpu *gpu) {
    const spw_gpu_copy copy = copy_of(0, SPW_GPU_DIRECTION_H2D, copies[0]);
    uint64_t ticket = 0;
    CHECK_OK(spw_gpu_copy_start(gpu, &copy, &ticket));
    CHECK_OK(spw_gpu_copy_wait(gpu, ticket, -1));
}

static void trains_with_the_same_bits(spw_gpu *gpu, uint32_t publish) {
    take_memory();
    page_lock(gpu);
    spw_spec *spec = open_spec(gpu, publish);
    for (int round = 0; round < ROUNDS; round++) {
        const uint32_t wanted[3] = {SPW_SPEC_VERDICT_COMMIT, SPW_SPEC_VERDICT_REDO, SPW_SPEC_VERDICT_SKIP};
        spw_adam_options options = adam_options();
        options.step = (uint64_t)round + 1;
        CHECK_OK(spw_spec_begin_adam(spec, &options, round % 3 == 0 ? 0 : 1e-3));
        for (int i = BUCKETS - 1; i >= 0; i--) {
            backward(i, round % 3 == 2 && i == round % BUCKETS);
            if (i == ON_GPU) submit_to_gpu(spec, gpu, i);
            else submit(spec, gpu, i);
        }
        spw_step_stats mine = {.struct_size = sizeof mine};
        spw_spec_outcome outcome = {.struct_size = sizeof outcome};
        CHECK_OK(spw_spec_local_result(spec, -1, &mine));
        CHECK_OK(spw_spec_resolve(spec, &mine, &outcome));
        CHECK(outcome.verdict == wanted[round % 3]);
        if (outcome.verdict != SPW_SPEC_VERDICT_SKIP) {
            step_plain(&options, outcome.grad_scale, round % 3 == 0 ? mine.sum_squares : -1);
        }
        forward(spec);
        CHECK_OK(spw_spec_finish(spec, -1));
        check_states();
    }
    // Before close returns, it rolls the open round back and finishes the uploads.
    const spw_adam_options options = adam_options();
    CHECK_OK(spw_spec_begin_adam(spec, &options, 0));
    backward(0, 0), submit(spec, gpu, 0);
    backward(ON_GPU, 0), submit_to_gpu(spec, gpu, ON_GPU);
    CHECK_OK(spw_spec_close(spec));
    check_states();
    FAKE("cuStreamSynchronize", stream);
    give_memory_back();
    CHECK(fake_count("fakecuda_races", ORDINAL) == 0);
}

static void refusals(spw_gpu *gpu) {
    take_memory();
    spw_spec *spec = open_spec(gpu, SPW_SPEC_PUBLISH_FINAL);
    spw_gpu_copy copy = copy_of(0, SPW_GPU_DIRECTION_D2H, copies[0]);
    INVALID(spw_spec_publish_to(spec, 0, gpu, &copy, 1), "copies[0].copy.direction: must be SPW_GPU_DIRECTION_H2D");
    copy = copy_of(0, SPW_GPU_DIRECTION_H2D, plain[0].spans[4]);
    INVALID(spw_spec_publish_to(spec, 0, gpu, &copy, 1), "are not pinned");
    copy = copy_of(0, SPW_GPU_DIRECTION_H2D, copies[0]);
    INVALID(spw_spec_publish_to(spec, BUCKETS, gpu, &copy, 1), "bucket");
    INVALID(spw_spec_publish_to(spec, 0, NULL, &copy, 1), "gpu: is NULL");
    INVALID(spw_spec_publish_to(spec, 0, gpu, NULL, 1), "copies: is NULL");
    const spw_lion_options lion = {.struct_size = sizeof lion, .lr = 1e-3, .beta1 = 0.9, .beta2 = 0.99, .grad_scale = 1};
    const spw_tensor *tensor = &model[ON_GPU].tensor;
    REFUSED(spw_spec_submit_gpu(spec, ON_GPU, gpu, tensor, 1, 0, NULL), SPW_ERR_NO_ROUND, "");
    CHECK_OK(spw_spec_begin_lion(spec, &lion, 0));
    INVALID(spw_spec_submit_gpu(spec, ON_GPU, gpu, tensor, 1, 0, NULL), "no open round of Adam");
    CHECK_OK(spw_spec_abort(spec));
    CHECK_OK(spw_spec_finish(spec, -1));
    const spw_adam_options adam = adam_options();
    CHECK_OK(spw_spec_begin_adam(spec, &adam, 0));
    INVALID(spw_spec_submit_gpu(spec, ON_GPU, NULL, tensor, 1, 0, NULL), "gpu: is NULL");
    INVALID(spw_spec_submit_gpu(spec, 0, gpu, tensor, 1, 0, NULL), "bucket: 0 has copies");
    spw_spec_event when = {.struct_size = sizeof when, .kind = SPW_SPEC_EVENT_KIND_CUDA, .gpu = gpu};
    INVALID(spw_spec_submit(spec, 0, &model[0].tensor, 1, &when), "event.handle: is 0; record the event first");
    when.gpu = NULL;
    INVALID(spw_spec_submit(spec, 0, &model[0].tensor, 1, &when), "event.gpu: is NULL");
    when.kind = 5;
    INVALID(spw_spec_submit(spec, 0, &model[0].tensor, 1, &when), "event.kind: 5");
    CHECK_OK(spw_spec_close(spec));
    give_memory_back();
}

int main(void) {
    use_fake_driver();
    spw_gpu *gpu = open_gpu(ORDINAL);
    enter_context(ORDINAL);
    FAKE("cuStreamCreateWithPriority", &stream, 1u, 0);
    FAKE("cuStreamCreateWithPriority", &side, 1u, 0);
    trains_with_the_same_bits(gpu, SPW_SPEC_PUBLISH_FINAL);
    trains_with_the_same_bits(gpu, SPW_SPEC_PUBLISH_STAGED);
    trains_with_the_same_bits(gpu, SPW_SPEC_PUBLISH_SPECULATIVE);
    refusals(gpu);
    FAKE("cuStreamDestroy_v2", stream);
    FAKE("cuStreamDestroy_v2", side);
    CHECK_OK(spw_gpu_close(gpu));
    CHECK(fake_count("fakecuda_pageable_copies", ORDINAL) == 0);
    return 0;
}
