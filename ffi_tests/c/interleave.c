// Every plan of an interleaved update gives the bits of spw_adam_step. Calls out of order change nothing. Another
// thread can wait for parameters. A child made by fork gets an error and does not hang.

#define SPW_EXPERIMENTAL
#include "child.h"

#include <spillway/interleave.h>

#include <pthread.h>

enum { SUBGROUPS = 6, STEPS = 20 };
static const uint64_t SIZES[SUBGROUPS] = {70000, 33, 0, 4096, 70000, 1};

static struct problem ours[SUBGROUPS], plain[SUBGROUPS];
static uint64_t seed = 1;

static void make_all(uint32_t grad, uint32_t copy) {
    for (int i = 0; i < SUBGROUPS; i++) {
        ours[i] = make(SIZES[i], SPW_DTYPE_F32, SPW_DTYPE_F32, grad, copy, (uint64_t)i);
        plain[i] = make(SIZES[i], SPW_DTYPE_F32, SPW_DTYPE_F32, grad, copy, (uint64_t)i);
    }
}

static void release_all(void) {
    for (int i = 0; i < SUBGROUPS; i++) {
        release(&ours[i]);
        release(&plain[i]);
    }
}

static spw_interleave_options options_of(uint32_t wire, uint32_t fetch, uint32_t grad, uint32_t copy) {
    return (spw_interleave_options){.struct_size = sizeof(spw_interleave_options),
                                    .backend = SPW_INTERLEAVE_BACKEND_HOST,
                                    .transfer_dtype = wire,
                                    .fetch_gradients = fetch,
                                    .grad_dtype = grad,
                                    .copy_dtype = copy,
                                    .chunk = 10000};
}

static void describe(spw_interleave_subgroup subgroups[SUBGROUPS]) {
    for (int i = 0; i < SUBGROUPS; i++) {
        const spw_tensor *tensor = &ours[i].tensor;
        subgroups[i] = (spw_interleave_subgroup){sizeof(spw_interleave_subgroup), 0, tensor->n, tensor->param,
                                                 tensor->exp_avg, tensor->exp_avg_sq, (void *)tensor->grad,
                                                 tensor->param_copy, NULL};
    }
}

static spw_interleave *open_update(const spw_interleave_options *options) {
    spw_interleave_subgroup subgroups[SUBGROUPS];
    spw_interleave *update = NULL;
    describe(subgroups);
    CHECK_OK(spw_interleave_open(options, subgroups, SUBGROUPS, &update));
    return update;
}

static void gradients(spw_interleave *update) {
    for (int i = 0; i < SUBGROUPS; i++) {
        fill(ours[i].spans[1], ours[i].tensor.grad_dtype, SIZES[i], ++seed, 0);
        memcpy(plain[i].spans[1], ours[i].spans[1], ours[i].bytes[1]);
        CHECK_OK(spw_interleave_grad_ready(update, (uint64_t)i, 0));
    }
}

// One step of the interleaved update and of the plain one; each subgroup has its own learning rate.
static void step(spw_interleave *update, uint64_t number) {
    spw_adam_options options[SUBGROUPS];
    for (int i = 0; i < SUBGROUPS; i++) {
        options[i] = adam_options();
        options[i].step = number;
        options[i].lr = 1e-3 * (i + 1);
        CHECK_OK(spw_adam_step(&options[i], &plain[i].tensor, 1, NULL));
    }
    CHECK_OK(spw_interleave_begin(update, options, SUBGROUPS, 0));
}

static void same_copies(void) {
    for (int i = 0; i < SUBGROUPS; i++) {
        CHECK(ours[i].bytes[4] == 0 || memcmp(ours[i].spans[4], plain[i].spans[4], ours[i].bytes[4]) == 0);
    }
}

static void trains_with_the_same_bits(uint32_t wire, uint32_t fetch, uint32_t grad, uint32_t copy) {
    make_all(grad, copy);
    const spw_interleave_options options = options_of(wire, fetch, grad, copy);
    spw_interleave *update = open_update(&options);
    for (uint64_t number = 1; number <= STEPS; number++) {
        uint32_t sites[SUBGROUPS], read[SUBGROUPS];
        for (int i = 0; i < SUBGROUPS; i++) sites[i] = (uint32_t)(random_bits(&seed) % 3);
        CHECK_OK(spw_interleave_set_plan(update, sites, SUBGROUPS));
        CHECK_OK(spw_interleave_get_plan(update, read));
        CHECK(memcmp(sites, read, sizeof sites) == 0);
        gradients(update);
        step(update, number);
        CHECK_OK(spw_interleave_finish(update));
        same_copies();
    }
    const uint32_t on_cpu[SUBGROUPS] = {0};
    uint64_t away = 99, bytes = 0;
    CHECK_OK(spw_interleave_get_trace(update, NULL, 0, &bytes));
    CHECK(bytes > 100);
    CHECK_OK(spw_interleave_set_plan(update, on_cpu, SUBGROUPS));
    CHECK_OK(spw_interleave_drain(update));
    CHECK_OK(spw_interleave_get_in_flight(update, NULL, 0, &away));
    CHECK(away == 0);
    for (int i = 0; i < SUBGROUPS; i++) CHECK(same(&ours[i], &plain[i]));
    CHECK_OK(spw_interleave_close(update));
    release_all();
}

static void *wait_for_all(void *update) {
    uint32_t ready = 0;
    for (uint64_t i = 0; i < SUBGROUPS; i++) {
        CHECK_OK(spw_interleave_stream_wait_params(update, i, 0));
        CHECK_OK(spw_interleave_get_ready(update, i, &ready));
        CHECK(ready == 1);
    }
    return NULL;
}

// Refused calls leave the spans unchanged. Then other threads wait for a step, and the process forks in
// the middle of it.
static void order_threads_and_fork(void) {
    make_all(SPW_DTYPE_BF16, SPW_DTYPE_BF16);
    const spw_interleave_options options = options_of(SPW_TRANSFER_DTYPE_NATIVE, 0, SPW_DTYPE_BF16, SPW_DTYPE_BF16);
    spw_interleave *update = open_update(&options);
    spw_adam_options adam = adam_options();
    adam.step = 1;
    for (int i = 0; i < SUBGROUPS; i++) watch_problem(&ours[i]);
    uint32_t sites[SUBGROUPS] = {1, 0, 1, 0, 0, 2};
    INVALID(spw_interleave_begin(update, &adam, 1, 0), "no gradient");
    INVALID(spw_interleave_grad_ready(update, SUBGROUPS, 0), "subgroup");
    INVALID(spw_interleave_grad_ready(update, UINT64_MAX, 0), "subgroup");
    INVALID(spw_interleave_set_plan(update, sites, SUBGROUPS - 1), "count");
    INVALID(spw_interleave_replan(update, 0, NULL), "rates");
    sites[3] = 3;
    INVALID(spw_interleave_set_plan(update, sites, SUBGROUPS), "placements[3]");
    sites[3] = 0;
    unwatch_all();

    CHECK_OK(spw_interleave_set_plan(update, sites, SUBGROUPS));
    gradients(update);
    INVALID(spw_interleave_grad_ready(update, 1, 0), "already");
    REFUSED(spw_interleave_set_plan(update, sites, SUBGROUPS), SPW_ERR_BUSY, "plan");
    const spw_adam_options two[2] = {adam, adam};
    INVALID(spw_interleave_begin(update, two, 2, 0), "count");
    for (uint64_t i = 0; i < SUBGROUPS; i += 2) CHECK_OK(spw_interleave_release_params(update, i, 0));
    step(update, 1);

    const pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        alarm(60);
        REFUSED(spw_interleave_finish(update), SPW_ERR_UNSUPPORTED, "process was forked");
        REFUSED(spw_interleave_grad_ready(update, 0, 0), SPW_ERR_UNSUPPORTED, "process was forked");
        CHECK_OK(spw_interleave_close(update));
        _exit(0);
    }
    pthread_t threads[3];
    for (int i = 0; i < 3; i++) CHECK(pthread_create(&threads[i], NULL, wait_for_all, update) == 0);
    for (int i = 0; i < 3; i++) CHECK(pthread_join(threads[i], NULL) == 0);
    same_copies();
    finish(child, "a child");

    // The resident subgroup is away. A list that is too short is filled, and the call reports the full count.
    uint64_t away[1] = {99}, count = 0;
    CHECK_OK(spw_interleave_drain(update));
    CHECK_OK(spw_interleave_get_in_flight(update, away, 1, &count));
    CHECK(count == 1 && away[0] == 5);
    CHECK_OK(spw_interleave_close(update));
    release_all();
}

// Closing an update finishes the work in flight first: the caller may free the memory right after.
static void closes_in_the_middle(void) {
    for (int round = 0; round < 5; round++) {
        make_all(SPW_DTYPE_F16, SPW_DTYPE_F16);
        const spw_interleave_options options = options_of(SPW_TRANSFER_DTYPE_F32, 1, SPW_DTYPE_F16, SPW_DTYPE_F16);
        const uint32_t sites[SUBGROUPS] = {1, 0, 1, 1, 0, 1};
        spw_interleave *update = open_update(&options);
        CHECK_OK(spw_interleave_set_plan(update, sites, SUBGROUPS));
        gradients(update);
        step(update, 1);
        CHECK_OK(spw_interleave_close(update));
        release_all();
    }
}

static void bad_arguments(void) {
    make_all(SPW_DTYPE_BF16, SPW_DTYPE_BF16);
    spw_interleave_subgroup subgroups[SUBGROUPS];
    spw_interleave *update = NULL;
    describe(subgroups);
    const spw_interleave_options good = options_of(SPW_TRANSFER_DTYPE_NATIVE, 0, SPW_DTYPE_BF16, SPW_DTYPE_BF16);
    spw_interleave_options options = good;
    INVALID(spw_interleave_open(NULL, subgroups, SUBGROUPS, &update), "options");
    INVALID(spw_interleave_open(&options, NULL, SUBGROUPS, &update), "subgroups");
    INVALID(spw_interleave_open(&options, subgroups, SUBGROUPS, NULL), "interleave_out");
    options.backend = SPW_INTERLEAVE_BACKEND_CUDA;
    INVALID(spw_interleave_open(&options, subgroups, SUBGROUPS, &update), "gpu: is NULL");
    options.backend = 2;
    INVALID(spw_interleave_open(&options, subgroups, SUBGROUPS, &update), "backend");
    options = good;
    options.transfer_dtype = 3;
    INVALID(spw_interleave_open(&options, subgroups, SUBGROUPS, &update), "transfer_dtype");
    options = good;
    options.slots = 9;
    INVALID(spw_interleave_open(&options, subgroups, SUBGROUPS, &update), "slots");
    options = good;
    options.copy_dtype = SPW_DTYPE_NONE;
    INVALID(spw_interleave_open(&options, subgroups, SUBGROUPS, &update), "subgroups[0].param_copy");
    options = good;
    subgroups[3].exp_avg = NULL;
    INVALID(spw_interleave_open(&options, subgroups, SUBGROUPS, &update), "subgroups[3].exp_avg");
    describe(subgroups);
    subgroups[4].param = (char *)subgroups[4].param + 1;
    INVALID(spw_interleave_open(&options, subgroups, SUBGROUPS, &update), "subgroups[4].param");
    describe(subgroups);
    subgroups[1].n = UINT64_MAX;
    INVALID(spw_interleave_open(&options, subgroups, SUBGROUPS, &update), "subgroups");
    CHECK(update == NULL);
    describe(subgroups);
    CHECK_OK(spw_interleave_open(&good, subgroups, SUBGROUPS, &update));
    INVALID(spw_interleave_grad_ready(update, 0, 7), "stream");
    CHECK_OK(spw_interleave_close(update));
    update = NULL;
    INVALID(spw_interleave_finish(NULL), "interleave: is NULL");
    INVALID(spw_interleave_begin(NULL, NULL, 0, 0), "interleave: is NULL");
    CHECK_OK(spw_interleave_close(NULL));

    CHECK_OK(spw_interleave_open(&good, NULL, 0, &update));
    const spw_adam_options adam = adam_options();
    CHECK_OK(spw_interleave_begin(update, &adam, 1, 0));
    CHECK_OK(spw_interleave_drain(update));
    CHECK_OK(spw_interleave_close(update));
    release_all();
}

int main(void) {
    configure_threads(2);
    trains_with_the_same_bits(SPW_TRANSFER_DTYPE_NATIVE, 0, SPW_DTYPE_BF16, SPW_DTYPE_BF16);
    trains_with_the_same_bits(SPW_TRANSFER_DTYPE_NATIVE, 1, SPW_DTYPE_F16, SPW_DTYPE_F16);
    trains_with_the_same_bits(SPW_TRANSFER_DTYPE_F32, 0, SPW_DTYPE_F16, SPW_DTYPE_BF16);
    trains_with_the_same_bits(SPW_TRANSFER_DTYPE_F32, 1, SPW_DTYPE_BF16, SPW_DTYPE_BF16);
    trains_with_the_same_bits(SPW_TRANSFER_DTYPE_DELIVERED, 0, SPW_DTYPE_F32, SPW_DTYPE_NONE);
    order_threads_and_fork();
    closes_in_the_middle();
    bad_arguments();
    return 0;
}
