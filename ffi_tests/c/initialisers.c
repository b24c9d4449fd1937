// The macros SPW_X_INIT: struct_size, the defaults of the documentation, and zeros everywhere else. spw_struct_init makes
// the same bytes. A struct of zeros has these defaults, or the call names the field that must not be 0.

#define SPW_EXPERIMENTAL
#include "check.h"

#include <spillway/interleave.h>
#include <spillway/stage.h>

// spw_struct_init makes what the macro makes.
#define SAME(type, macro) do { \
        const type value = macro; \
        type made; \
        memset(&made, 0xff, sizeof made); \
        CHECK_OK(spw_struct_init(#type, &made, sizeof made)); \
        CHECK(memcmp(&made, &value, sizeof value) == 0); \
    } while (0)

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

    const spw_signum_options signum = SPW_SIGNUM_OPTIONS_INIT;
    CHECK(signum.struct_size == sizeof signum && signum.reserved == 0 && signum.lr == 1e-4 && signum.momentum == 0.9);
    CHECK(signum.weight_decay == 0 && signum.grad_scale == 1);

    const spw_ds_adam_call call = SPW_DS_ADAM_CALL_INIT;
    CHECK(call.struct_size == sizeof call && call.bias_correction == 1 && call.grad_scale == 1 && call.step == 0);
    CHECK(call.lr == 0 && call.beta1 == 0 && call.beta2 == 0 && call.eps == 0 && call.weight_decay == 0);

    const spw_spec_options spec = SPW_SPEC_OPTIONS_INIT;
    CHECK(spec.buckets == 0 && spec.undo_mode == SPW_UNDO_MODE_DELTA && spec.publish == SPW_SPEC_PUBLISH_FINAL);
    SAME(spw_adam_options, SPW_ADAM_OPTIONS_INIT);
    SAME(spw_adagrad_options, SPW_ADAGRAD_OPTIONS_INIT);
    SAME(spw_lion_options, SPW_LION_OPTIONS_INIT);
    SAME(spw_signum_options, SPW_SIGNUM_OPTIONS_INIT);
    SAME(spw_ds_adam_call, SPW_DS_ADAM_CALL_INIT);
    SAME(spw_spec_options, SPW_SPEC_OPTIONS_INIT);
    SAME(spw_stage_options, SPW_STAGE_OPTIONS_INIT);
}

// A struct of hand-written bindings: zeros, the size, and the two fields that they know.
static void zeros(void) {
    struct problem problem = make_f32(100, 1);
    watch_problem(&problem);
    spw_adam_options adam = {.struct_size = sizeof adam, .step = 1, .lr = 1e-3};
    INVALID(spw_adam_step(&adam, &problem.tensor, 1, NULL), "options.grad_scale: is 0");
    INVALID(spw_adam_step(&adam, &problem.tensor, 1, NULL), "SPW_ADAM_OPTIONS_INIT or spw_struct_init");
    adam.grad_scale = 1;
    INVALID(spw_adam_step(&adam, &problem.tensor, 1, NULL), "options.eps: is 0");
    const spw_adagrad_options adagrad = {.struct_size = sizeof adagrad, .step = 1, .lr = 1e-3};
    INVALID(spw_adagrad_step(&adagrad, &problem.tensor, 1, NULL), "options.grad_scale: is 0");
    const spw_lion_options lion = {.struct_size = sizeof lion, .lr = 1e-3};
    INVALID(spw_lion_step(&lion, &problem.tensor, 1, NULL), "options.grad_scale: is 0");
    const spw_signum_options signum = {.struct_size = sizeof signum, .lr = 1e-3};
    INVALID(spw_signum_step(&signum, &problem.tensor, 1, NULL), "options.grad_scale: is 0");
    CHECK_OK(spw_ds_adam_create(3, 0.9f, 0.999f, 1));
    const spw_ds_adam_call call = {.struct_size = sizeof call, .step = 1, .lr = 1e-3f, .beta1 = 0.9f};
    INVALID(spw_ds_adam_update(NULL, 3, &call, &problem.tensor), "call.grad_scale: is 0");
    CHECK_OK(spw_ds_adam_destroy(3));
    spw_spec *spec = NULL;
    const spw_spec_options options = {.struct_size = sizeof options, .buckets = 1};
    CHECK_OK(spw_spec_open(&options, &spec));
    CHECK_OK(spw_spec_close(spec));
    spw_stage *stage = NULL;
    const spw_stage_options of_stage = {.struct_size = sizeof of_stage};
    CHECK_OK(spw_stage_open(&of_stage, &stage));
    CHECK_OK(spw_stage_close(stage));
    // A recording of zeros is exact: the moments of the first step become zeros again.
    struct problem stepped = make_f32(100, 2);
    memset(stepped.tensor.exp_avg, 0, stepped.bytes[2]);
    float *exp_avg = stepped.tensor.exp_avg;
    spw_undo *undo = NULL;
    const spw_undo_options recording = {.struct_size = sizeof recording, .elements = 100, .tensors = 1};
    const spw_adam_options first = SPW_ADAM_OPTIONS_INIT;
    CHECK_OK(spw_undo_open(&recording, &undo));
    CHECK_OK(spw_undo_adam_step(undo, &first, &stepped.tensor, 1, NULL));
    CHECK(exp_avg[0] != 0 && exp_avg[99] != 0);
    CHECK_OK(spw_undo_rollback(undo));
    for (int i = 0; i < 100; i++) CHECK(exp_avg[i] == 0);
    CHECK_OK(spw_undo_close(undo));
    release(&stepped);
    // A request without a file does not read standard input.
    spw_io *io = NULL;
    uint64_t handle = 0;
    char byte = 0;
    const spw_io_request request = {.struct_size = sizeof request, .buffer = &byte, .bytes = 1};
    CHECK_OK(spw_io_open(NULL, &io));
    INVALID(spw_io_read(io, &request, &handle), "request.path: is NULL, and request.fd is 0");
    CHECK_OK(spw_io_close(io, -1));
    unwatch_all();
    // A zero that a caller may want is accepted.
    spw_adam_options signs = SPW_ADAM_OPTIONS_INIT;
    signs.beta1 = signs.beta2 = 0;
    CHECK_OK(spw_adam_step(&signs, &problem.tensor, 1, NULL));
    release(&problem);
}

static void sizes(void) {
    // Structs of an older and of a newer header.
    struct {
        spw_adam_options known;
        uint64_t unknown;
    } one;
    const spw_adam_options adam = SPW_ADAM_OPTIONS_INIT;
    memset(&one, 0xff, sizeof one);
    CHECK_OK(spw_struct_init("spw_adam_options", &one, 72));
    CHECK(one.known.struct_size == 72 && one.known.reserved == 0 && one.known.rounding == UINT32_MAX);
    CHECK_OK(spw_struct_init("spw_adam_options", &one, sizeof one));
    CHECK(one.known.struct_size == sizeof one && one.unknown == 0);
    CHECK(memcmp(&one.known.weight_decay_mode, &adam.weight_decay_mode, sizeof adam - 4) == 0);
    watch(&one, sizeof one);
    INVALID(spw_struct_init("spw_adam_option", &one, sizeof one), "\"spw_adam_option\" is no struct");
    INVALID(spw_struct_init(NULL, &one, sizeof one), "name: is NULL");
    INVALID(spw_struct_init("spw_adam_options", NULL, sizeof one), "struct_out: is NULL");
    INVALID(spw_struct_init("spw_adam_options", &one, 71), "size: is 71, but spw_adam_options has at least 72 bytes");
    INVALID(spw_struct_init("spw_adam_options", &one, UINT64_MAX), "but the limit is 4096");
    unwatch_all();
}

int main(void) {
    optimizers();
    zeros();
    sizes();
    EMPTY(spw_info, SPW_INFO_INIT);
    SAME(spw_info, SPW_INFO_INIT);
    EMPTY(spw_thread_options, SPW_THREAD_OPTIONS_INIT);
    SAME(spw_thread_options, SPW_THREAD_OPTIONS_INIT);
    EMPTY(spw_tensor, SPW_TENSOR_INIT);
    SAME(spw_tensor, SPW_TENSOR_INIT);
    EMPTY(spw_step_stats, SPW_STEP_STATS_INIT);
    SAME(spw_step_stats, SPW_STEP_STATS_INIT);
    EMPTY(spw_undo_options, SPW_UNDO_OPTIONS_INIT);
    SAME(spw_undo_options, SPW_UNDO_OPTIONS_INIT);
    EMPTY(spw_pinned_options, SPW_PINNED_OPTIONS_INIT);
    SAME(spw_pinned_options, SPW_PINNED_OPTIONS_INIT);
    EMPTY(spw_io_options, SPW_IO_OPTIONS_INIT);
    SAME(spw_io_options, SPW_IO_OPTIONS_INIT);
    EMPTY(spw_io_request, SPW_IO_REQUEST_INIT);
    SAME(spw_io_request, SPW_IO_REQUEST_INIT);
    EMPTY(spw_tier_options, SPW_TIER_OPTIONS_INIT);
    SAME(spw_tier_options, SPW_TIER_OPTIONS_INIT);
    EMPTY(spw_tier_target, SPW_TIER_TARGET_INIT);
    SAME(spw_tier_target, SPW_TIER_TARGET_INIT);
    EMPTY(spw_swap_options, SPW_SWAP_OPTIONS_INIT);
    SAME(spw_swap_options, SPW_SWAP_OPTIONS_INIT);
    EMPTY(spw_gpu_options, SPW_GPU_OPTIONS_INIT);
    SAME(spw_gpu_options, SPW_GPU_OPTIONS_INIT);
    EMPTY(spw_gpu_copy, SPW_GPU_COPY_INIT);
    SAME(spw_gpu_copy, SPW_GPU_COPY_INIT);
    EMPTY(spw_spec_event, SPW_SPEC_EVENT_INIT);
    SAME(spw_spec_event, SPW_SPEC_EVENT_INIT);
    EMPTY(spw_interleave_options, SPW_INTERLEAVE_OPTIONS_INIT);
    SAME(spw_interleave_options, SPW_INTERLEAVE_OPTIONS_INIT);
    EMPTY(spw_interleave_subgroup, SPW_INTERLEAVE_SUBGROUP_INIT);
    SAME(spw_interleave_subgroup, SPW_INTERLEAVE_SUBGROUP_INIT);
    EMPTY(spw_ds_adam_state, SPW_DS_ADAM_STATE_INIT);
    SAME(spw_ds_adam_state, SPW_DS_ADAM_STATE_INIT);
    return 0;
}
