// The checks of Adam, Adagrad, Lion and Signum fail exactly as the steps do, with the same message, and change
// nothing; what they pass, a step does. spw_grad_stats adds the sums of the tensors in their order.

#include "check.h"

#include <math.h> // the macros INFINITY and NAN

enum { N = 300, TENSORS = 3 };

static struct problem problems[TENSORS];
static spw_tensor tensors[TENSORS];
static spw_adam_options adam = SPW_ADAM_OPTIONS_INIT, own;
static spw_adagrad_options adagrad = SPW_ADAGRAD_OPTIONS_INIT;
static spw_lion_options lion = SPW_LION_OPTIONS_INIT;
static spw_signum_options signum = SPW_SIGNUM_OPTIONS_INIT;

typedef spw_status (*call)(void);

static spw_status step_adam(void) { return spw_adam_step(&adam, tensors, TENSORS, NULL); }
static spw_status check_adam(void) { return spw_adam_check(&adam, tensors, TENSORS); }
static spw_status step_adagrad(void) { return spw_adagrad_step(&adagrad, tensors, TENSORS, NULL); }
static spw_status check_adagrad(void) { return spw_adagrad_check(&adagrad, tensors, TENSORS); }
static spw_status step_lion(void) { return spw_lion_step(&lion, tensors, TENSORS, NULL); }
static spw_status check_lion(void) { return spw_lion_check(&lion, tensors, TENSORS); }
static spw_status step_signum(void) { return spw_signum_step(&signum, tensors, TENSORS, NULL); }
static spw_status check_signum(void) { return spw_signum_check(&signum, tensors, TENSORS); }

static void prepare(void) {
    for (int i = 0; i < TENSORS; i++) {
        problems[i] = make_f32(N, (uint64_t)i + 1);
        tensors[i] = problems[i].tensor;
        watch_problem(&problems[i]);
    }
}

static void end(void) {
    unwatch_all();
    for (int i = 0; i < TENSORS; i++) release(&problems[i]);
}

// Both calls fail alike. check_status() proves that the watched memory is unchanged after each of them.
static void refused_alike(call step, call check, const char *words) {
    INVALID(step(), words);
    char message[512];
    snprintf(message, sizeof message, "%s", spw_last_error());
    INVALID(check(), words);
    CHECK(strcmp(message, spw_last_error()) == 0);
}

static void bad_tensors(call step, call check) {
    for (int i = 0; i < TENSORS; i++) {
        const spw_tensor before = tensors[i];
        tensors[i].grad = (const void *)((uintptr_t)before.grad + 1);
        refused_alike(step, check, "aligned");
        tensors[i].grad = before.param;
        refused_alike(step, check, "overlaps");
        tensors[i].grad = NULL;
        refused_alike(step, check, "grad: is NULL");
        tensors[i] = before;
        tensors[i].state_dtype = 9;
        refused_alike(step, check, "state_dtype");
        tensors[i] = before;
        tensors[i].take_copy = 2;
        refused_alike(step, check, "take_copy");
        tensors[i] = before;
    }
}

static void adam_options_out_of_range(void) {
    const spw_adam_options good = adam;
    for (int i = -1; i < TENSORS; i++) {
        spw_adam_options *options = &adam;
        if (i >= 0) {
            own = good;
            tensors[i].options = &own;
            options = &own;
        }
        options->lr = -1;
        refused_alike(step_adam, check_adam, "options.lr");
        *options = good;
        options->beta2 = 1 - 1e-12;
        refused_alike(step_adam, check_adam, "options.beta2");
        *options = good;
        options->eps = 1e-60;
        refused_alike(step_adam, check_adam, "options.eps");
        *options = good;
        options->step = 0;
        refused_alike(step_adam, check_adam, "options.step");
        *options = good;
        options->weight_decay_mode = 7;
        refused_alike(step_adam, check_adam, "options.weight_decay_mode");
        *options = good;
        if (i >= 0) tensors[i].options = NULL;
    }
    adagrad.lr_decay = -1;
    refused_alike(step_adagrad, check_adagrad, "options.lr_decay");
    adagrad.lr_decay = 0;
    lion.beta1 = 1;
    refused_alike(step_lion, check_lion, "options.beta1");
    lion.beta1 = 0.9;
    signum.momentum = 1;
    refused_alike(step_signum, check_signum, "options.momentum");
    signum.momentum = 0.9;
}

// The watch is still on: a check that passes writes nothing either.
static void good_arguments_pass(void) {
    CHECK_OK(check_adam());
    CHECK_OK(check_adagrad());
    CHECK_OK(check_lion());
    CHECK_OK(check_signum());
    CHECK_OK(spw_adam_check(&adam, NULL, 0));
    for (int i = 0; i < TENSORS; i++) {
        for (int span = 0; span < 4; span++) {
            CHECK(memcmp(problems[i].spans[span], watched[4 * i + span].before, 4 * N) == 0);
        }
    }
}

static void statistics_of_many(void) {
    static float large[LARGE], small[N];
    static uint16_t halves[N];
    fill(large, SPW_DTYPE_F32, LARGE, 1, 0);
    fill(small, SPW_DTYPE_F32, N, 2, 0);
    fill(halves, SPW_DTYPE_BF16, N, 3, 0);
    spw_tensor given[4] = {SPW_TENSOR_INIT, SPW_TENSOR_INIT, SPW_TENSOR_INIT, SPW_TENSOR_INIT};
    const void *grads[4] = {small, large, NULL, halves};
    const uint64_t lengths[4] = {N, LARGE, 0, N};
    const uint32_t dtypes[4] = {SPW_DTYPE_F32, SPW_DTYPE_F32, SPW_DTYPE_F32, SPW_DTYPE_BF16};
    double sum = 0;
    spw_step_stats seen = step_stats();
    for (int i = 0; i < 4; i++) {
        given[i].grad = grads[i];
        given[i].grad_dtype = dtypes[i];
        given[i].n = lengths[i];
        CHECK_OK(grad_stats(grads[i], dtypes[i], lengths[i], 0.3, &seen));
        sum += seen.sum_squares;
    }
    for (uint32_t threads = 1; threads < 4; threads++) {
        configure_threads(threads);
        CHECK_OK(spw_grad_stats(given, 4, 0.3, &seen));
        CHECK(seen.nonfinite == 0 && seen.sum_squares == sum);
    }
    CHECK_OK(spw_grad_stats(NULL, 0, 1, &seen));
    CHECK(seen.nonfinite == 0 && seen.sum_squares == 0);
    given[3].grad = (const void *)((uintptr_t)halves + 1);
    INVALID(spw_grad_stats(given, 4, 1, &seen), "tensors[3].grad: address");
    given[3].grad = halves;
    given[0].grad_dtype = 0;
    INVALID(spw_grad_stats(given, 4, 1, &seen), "tensors[0].grad_dtype");
    given[0].grad_dtype = SPW_DTYPE_F32;
    INVALID(spw_grad_stats(given, 4, (double)INFINITY, &seen), "scale");
    INVALID(spw_grad_stats(given, 4, 1, NULL), "stats_out: is NULL");
    large[LARGE - 1] = NAN;
    CHECK_OK(spw_grad_stats(given, 4, 1, &seen));
    CHECK(seen.nonfinite == 1);
}

int main(void) {
    prepare();
    bad_tensors(step_adam, check_adam);
    // Adagrad, Lion and Signum ignore the span of the state that they do not keep.
    bad_tensors(step_adagrad, check_adagrad);
    bad_tensors(step_lion, check_lion);
    bad_tensors(step_signum, check_signum);
    adam_options_out_of_range();
    good_arguments_pass();
    end();
    statistics_of_many();
    return 0;
}
