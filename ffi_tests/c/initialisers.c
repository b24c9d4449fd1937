// The macros SPW_X_INIT: struct_size, the defaults of the documentation, and zeros everywhere else.

#define SPW_EXPERIMENTAL
#include "check.h"

#include <spillway/interleave.h>

// All bytes after struct_size are zero.
#define EMPTY(type, macro) do { \
        const type value = macro; \
        static const type zero; \
        CHECK(value.struct_size == sizeof value); \
        CHECK(memcmp((const char *)&value + 4, (const char *)&zero + 4, sizeof value - 4) == 0); \
    } while (0)

static void optimizers(void) {
    const spw_adam_options adam = SPW_ADAM_OPTIONS_INIT;
    CHECK(adam.struct_size == sizeof adam && adam.weight_decay_mode == SPW_WEIGHT_DECAY_DECOUPLED && adam.step == 1);
    CHECK(adam.lr == 1e-3 && adam.beta1 == 0.9 && adam.beta2 == 0.999 && adam.eps == 1e-8);
    CHECK(adam.weight_decay == 0 && adam.grad_scale == 1 && adam.no_bias_correction == 0 && adam.reserved == 0);

    const spw_adagrad_options adagrad = SPW_ADAGRAD_OPTIONS_INIT;
    CHECK(adagrad.struct_size == sizeof adagrad && adagrad.reserved == 0 && adagrad.step == 1);
    CHECK(adagrad.lr == 1e-2 && adagrad.lr_decay == 0 && adagrad.eps == 1e-10);
    CHECK(adagrad.weight_decay == 0 && adagrad.grad_scale == 1);

    const spw_lion_options lion = SPW_LION_OPTIONS_INIT;
    CHECK(lion.struct_size == sizeof lion && lion.reserved == 0 && lion.lr == 1e-4 && lion.beta1 == 0.9);
    CHECK(lion.beta2 == 0.99 && lion.weight_decay == 0 && lion.grad_scale == 1);

    const spw_ds_adam_call call = SPW_DS_ADAM_CALL_INIT;
    CHECK(call.struct_size == sizeof call && call.bias_correction == 1 && call.grad_scale == 1 && call.step == 0);
    CHECK(call.lr == 0 && call.beta1 == 0 && call.beta2 == 0 && call.eps == 0 && call.weight_decay == 0);
}

// A request names no descriptor: 0 would be standard input.
static void request(void) {
    const spw_io_request request = SPW_IO_REQUEST_INIT;
    CHECK(request.struct_size == sizeof request && request.fd == -1 && request.path == NULL && request.offset == 0);
    CHECK(request.buffer == NULL && request.bytes == 0 && request.deadline_ms == 0);
}

int main(void) {
    optimizers();
    request();
    EMPTY(spw_info, SPW_INFO_INIT);
    EMPTY(spw_thread_options, SPW_THREAD_OPTIONS_INIT);
    EMPTY(spw_tensor, SPW_TENSOR_INIT);
    EMPTY(spw_step_stats, SPW_STEP_STATS_INIT);
    EMPTY(spw_undo_options, SPW_UNDO_OPTIONS_INIT);
    EMPTY(spw_pinned_options, SPW_PINNED_OPTIONS_INIT);
    EMPTY(spw_io_options, SPW_IO_OPTIONS_INIT);
    EMPTY(spw_tier_options, SPW_TIER_OPTIONS_INIT);
    EMPTY(spw_tier_target, SPW_TIER_TARGET_INIT);
    EMPTY(spw_swap_options, SPW_SWAP_OPTIONS_INIT);
    EMPTY(spw_gpu_options, SPW_GPU_OPTIONS_INIT);
    EMPTY(spw_gpu_copy, SPW_GPU_COPY_INIT);
    EMPTY(spw_spec_options, SPW_SPEC_OPTIONS_INIT);
    EMPTY(spw_spec_event, SPW_SPEC_EVENT_INIT);
    EMPTY(spw_interleave_options, SPW_INTERLEAVE_OPTIONS_INIT);
    EMPTY(spw_interleave_subgroup, SPW_INTERLEAVE_SUBGROUP_INIT);
    EMPTY(spw_ds_adam_state, SPW_DS_ADAM_STATE_INIT);
    return 0;
}
