// Build: forks
// An impossible count or size returns a status; it never aborts and never allocates gigabytes that nobody uses.
// Every function with a count or size is called with the extreme integers and machine limits, under a limit of 16
// GiB of address space.
//
// The address sanitizer reserves terabytes, so the program is built without it. No library can check lengths of memory
// that the caller promises to own, such as elements of a tensor, bytes of a transfer or handles of a wait. These stay
// within the program's memory. A call may succeed where the value is valid.

#define SPW_EXPERIMENTAL
#include "huge_values.h"

#include <spillway/plan.h>

static void pinned(void) {
    // Calls that allocate real memory if the size is valid.
    limit_address_space(1);
    EACH(value) {
        for (uint32_t flags = 0; flags < 8; flags++) {
            if (value > 65 && value < (1ull << 31) && flags > 1) continue;
            const spw_pinned_options options = {
                .struct_size = sizeof options, .flags = flags | SPW_PINNED_FLAG_NO_LOCK, .node = UINT32_MAX};
            void *start = NULL;
            if (SANE(spw_pinned_alloc(&options, value, &start)) != SPW_OK) continue;
            CHECK(value < 1ull << 30);
            CHECK_OK(spw_pinned_free(start));
        }
    }
    EACH(value) {
        void *start = NULL;
        if (SANE(spw_pinned_alloc(NULL, value, &start)) == SPW_OK) {
            uint32_t contains = 7;
            CHECK_OK(spw_pinned_contains(start, UINT64_MAX, &contains));
            CHECK(contains == 0 && value < 1ull << 31);
            CHECK_OK(spw_pinned_free(start));
        }
        SANE(spw_pinned_free((void *)(uintptr_t)value));
    }
    limit_address_space(16);
}

static void threads(void) {
    EACH32(value) {
        const spw_thread_options options = {sizeof options, (uint32_t)value};
        CHECK((SANE(spw_set_threads(&options)) == SPW_OK) == (value <= 4096));
    }
    configure_threads(2);
}

static void tensors(void) {
    spw_adam_options adam = adam_options();
    const spw_lion_options lion = SPW_LION_OPTIONS_INIT;
    spw_adagrad_options adagrad = SPW_ADAGRAD_OPTIONS_INIT;
    adagrad.step = 1;
    spw_undo *undo = NULL;
    const spw_undo_options undo_options = {.struct_size = sizeof undo_options, .elements = 1, .tensors = 1};
    CHECK_OK(spw_undo_open(&undo_options, &undo));
    // An array in which only the first struct has contents.
    spw_tensor *many = (spw_tensor *)zeros;
    EACH(value) {
        many->struct_size = sizeof *many;
        SANE(spw_adam_step(&adam, many, value, NULL));
        SANE(spw_lion_step(&lion, many, value, NULL));
        SANE(spw_adagrad_step(&adagrad, many, value, NULL));
        SANE(spw_undo_adam_step(undo, &adam, many, value, NULL));
        SANE(spw_undo_lion_step(undo, &lion, many, value, NULL));
        SANE(spw_undo_adagrad_step(undo, &adagrad, many, value, NULL));
    }
    // More elements than any address space holds.
    struct problem good = make_mixed(100, 1);
    spw_step_stats stats = step_stats();
    EACH(value) {
        if (value > 0 && value < 1ull << 56) continue;
        spw_tensor tensor = good.tensor;
        tensor.n = value;
        SANE(spw_adam_step(&adam, &tensor, 1, &stats));
        SANE(spw_undo_adam_step(undo, &adam, &tensor, 1, &stats));
        SANE(grad_stats(good.tensor.grad, SPW_DTYPE_BF16, value, 1, &stats));
        CHECK_OK(spw_ds_adam_create(7, 0.9f, 0.99f, 1));
        const spw_ds_adam_call call = ds_adam_call(value);
        SANE(spw_ds_adam_update(NULL, 7, &call, &tensor));
        CHECK_OK(spw_ds_adam_destroy(7));
    }
    release(&good);
    CHECK_OK(spw_undo_close(undo));
    for (uint32_t mode = 0; mode < 3; mode++) {
        EACH(value) {
            for (int swapped = 0; swapped < 3; swapped++) {
                const spw_undo_options options = {sizeof options, mode, swapped == 1 ? 1 : value, swapped ? value : 1};
                if (SANE(spw_undo_open(&options, &undo)) != SPW_OK) continue;
                uint64_t bytes = 1;
                CHECK_OK(spw_undo_get_log_bytes(undo, &bytes));
                CHECK_OK(spw_undo_commit(undo, 1));
                CHECK_OK(spw_undo_close(undo));
            }
        }
    }
}

static void speculation(void) {
    spw_adam_options adam = adam_options();
    EACH32(value) {
        const spw_spec_options options = {sizeof options, (uint32_t)value, SPW_UNDO_MODE_DELTA, SPW_SPEC_PUBLISH_FINAL};
        spw_spec *spec = NULL;
        if (SANE(spw_spec_open(&options, &spec)) != SPW_OK) continue;
        CHECK(value <= 1ull << 20);
        CHECK_OK(spw_spec_begin_adam(spec, &adam, 1));
        memset(zeros, 0, sizeof(spw_tensor));
        ((spw_tensor *)zeros)->struct_size = sizeof(spw_tensor);
        EACH(other) {
            uint32_t state = 0, buckets[1];
            uint64_t found = 0;
            double squares[1];
            SANE(spw_spec_submit(spec, (uint32_t)other, (spw_tensor *)zeros, other, NULL));
            SANE(spw_spec_get_bucket(spec, (uint32_t)other, &state));
            SANE(spw_spec_wait(spec, (uint32_t)other, 0));
            SANE(spw_spec_publish_to(spec, (uint32_t)other, NULL, (spw_gpu_copy *)zeros, other));
            CHECK_OK(spw_spec_get_rolled_back(spec, buckets, other == 0 ? 0 : 1, &found));
            SANE(spw_spec_get_squares(spec, squares, other == 0 ? 0 : 1, &found));
        }
        CHECK_OK(spw_spec_abort(spec));
        CHECK_OK(spw_spec_close(spec));
    }
}

static void plans(void) {
    const spw_interleave_rates rates = {sizeof rates, 0, 2e9, 0, 25e9, 8e9, 8e9, 0, 0};
    spw_plan_result result = {.struct_size = sizeof result};
    EACH(value) {
        for (int field = 0; field < 5; field++) {
            spw_plan_shape shape = {sizeof shape, SPW_TRANSFER_DTYPE_F32, 1, 2, 20, NULL, 1000000, 1 << 20};
            if (field == 0) shape.count = value;
            if (field == 1) shape.size = value;
            if (field == 2) shape.chunk = value;
            if (field == 3) shape.slots = (uint32_t)value;
            if (field == 4) shape.count = 1, shape.size = value, shape.chunk = 1;
            if (field == 0 && value > 64 && value <= 65536) shape.size = 16;
            // The largest valid count runs once: a plan of 65536 subgroups takes a second.
            if (shape.count > 64 && shape.count < 65536) continue;
            spw_plan_options options = {sizeof options, SPW_PLAN_MODE_EQ1, 0, 0, 0.1};
            SANE(spw_plan_interleave(&rates, &shape, &options, NULL, &result));
        }
        for (uint32_t mode = 0; mode < 4; mode++) {
            const spw_plan_shape shape = {sizeof shape, SPW_TRANSFER_DTYPE_NATIVE, 0, 2, 12, NULL, 1000000, 1 << 20};
            spw_plan_options options = {sizeof options, mode, value, 0, 0.1};
            SANE(spw_plan_interleave(&rates, &shape, &options, NULL, &result));
            options.parameter = 2, options.residents = value;
            SANE(spw_plan_interleave(&rates, &shape, &options, NULL, &result));
        }
    }
}

static void interleaved(void) {
    float memory[4] = {0};
    CHECK_OK(spw_ds_adam_create(9, 0.9f, 0.999f, 1));
    EACH(value) {
        for (int field = 0; field < 4; field++) {
            spw_interleave_options options = {.struct_size = sizeof options, .grad_dtype = SPW_DTYPE_F32};
            // The memory of these elements is missing; no call reads it before a step.
            spw_interleave_subgroup subgroup = {.struct_size = sizeof subgroup, .n = 1, .param = memory,
                                                .exp_avg = memory + 1, .exp_avg_sq = memory + 2, .grad = memory + 3};
            uint64_t count = 1;
            if (field == 0) count = value > 1 && value <= 65536 ? 0 : value;
            if (field == 1) options.slots = (uint32_t)value;
            if (field == 2) options.chunk = value;
            if (field == 3) subgroup.n = value;
            spw_interleave *update = NULL;
            if (SANE(spw_interleave_open(&options, &subgroup, count, &update)) != SPW_OK) continue;
            if (field < 3) {
                const spw_adam_options adam = adam_options();
                const spw_ds_adam_call call = ds_adam_call(1);
                uint64_t needed = 0, away = 0;
                uint32_t ready = 0;
                EACH(other) {
                    SANE(spw_interleave_set_plan(update, (uint32_t *)(zeros + (64 << 20)), other));
                    SANE(spw_interleave_grad_ready(update, other + 1, 0));
                    SANE(spw_interleave_release_params(update, other + 1, 0));
                    SANE(spw_interleave_stream_wait_params(update, other + 1, 0));
                    SANE(spw_interleave_get_ready(update, other, &ready));
                    SANE(spw_interleave_get_trace(update, NULL, other, &needed));
                    SANE(spw_interleave_get_in_flight(update, (uint64_t *)zeros, other <= 1 ? other : 1, &away));
                    // The value 1 would start the step.
                    if (other == 1) continue;
                    SANE(spw_interleave_begin(update, &adam, other, 0));
                    SANE(spw_interleave_begin_ds_adam(update, 9, &call, other, 0));
                    SANE(spw_interleave_begin_ds_adam(update, 9, NULL, other, 0));
                }
            }
            CHECK_OK(spw_interleave_close(update));
        }
    }
    CHECK_OK(spw_ds_adam_destroy(9));
}

int main(void) {
    set_up();
    pinned();
    threads();
    tensors();
    speculation();
    plans();
    interleaved();
    return 0;
}
