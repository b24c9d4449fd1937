// The wrong values are: a value outside an enum, a flag other than 0 or 1, a set reserved field, an option out of
// range, an unknown or destroyed id, an array of numbers that is not aligned. Each is refused by name, and nothing is
// written.

#include "check.h"

#include <math.h>

static struct problem problem;
static spw_step_stats stats;

static const uint32_t not_a_dtype[] = {5, 77, 0x80000000u, UINT32_MAX};

static void dtypes(void) {
    const spw_adam_options options = adam_options();
    for (size_t i = 0; i < sizeof not_a_dtype / sizeof *not_a_dtype; i++) {
        uint32_t *fields[] = {&problem.tensor.param_dtype, &problem.tensor.state_dtype, &problem.tensor.grad_dtype,
                              &problem.tensor.copy_dtype};
        const char *names[] = {"param_dtype", "state_dtype", "grad_dtype", "copy_dtype"};
        for (int field = 0; field < 4; field++) {
            const uint32_t before = *fields[field];
            *fields[field] = not_a_dtype[i];
            INVALID(spw_adam_step(&options, &problem.tensor, 1, &stats), names[field]);
            *fields[field] = before;
        }
        INVALID(grad_stats(problem.tensor.grad, not_a_dtype[i], 3, 1, &stats), "dtype");
    }
    INVALID(grad_stats(problem.tensor.grad, SPW_DTYPE_NONE, 3, 1, &stats), "dtype");

    problem.tensor.copy_dtype = SPW_DTYPE_NONE;
    INVALID(spw_adam_step(&options, &problem.tensor, 1, &stats), "copy_dtype");
    problem.tensor.copy_dtype = SPW_DTYPE_F32;
    REFUSED(spw_adam_step(&options, &problem.tensor, 1, &stats), SPW_ERR_UNSUPPORTED, "param_copy f32");
    problem.tensor.copy_dtype = SPW_DTYPE_BF16;
    problem.tensor.take_copy = 2;
    INVALID(spw_adam_step(&options, &problem.tensor, 1, &stats), "tensors[0].take_copy");
    problem.tensor.take_copy = 1;
    void *copy = problem.tensor.param_copy;
    problem.tensor.copy_dtype = SPW_DTYPE_NONE, problem.tensor.param_copy = NULL;
    INVALID(spw_adam_step(&options, &problem.tensor, 1, &stats), "tensors[0].take_copy: is 1, but there is no param_copy");
    problem.tensor.copy_dtype = SPW_DTYPE_BF16, problem.tensor.param_copy = copy;
    problem.tensor.take_copy = 0;
}

// The table at spw_tensor lists every combination that works; all others are refused.
static void combinations(void) {
    const spw_adam_options options = adam_options();
    int worked = 0;
    for (uint32_t param = 1; param < 4; param++) {
        for (uint32_t state = 1; state < 4; state++) {
            for (uint32_t grad = 1; grad < 4; grad++) {
                for (uint32_t copy = 0; copy < 4; copy++) {
                    struct problem one = make(5, param, state, grad, copy, 1);
                    const int wide = param == SPW_DTYPE_F32 && state == SPW_DTYPE_F32 && copy != SPW_DTYPE_F32;
                    const int half = param == SPW_DTYPE_F32 && state == SPW_DTYPE_BF16 && grad != SPW_DTYPE_F16 &&
                                     (copy == SPW_DTYPE_NONE || copy == SPW_DTYPE_BF16);
                    const int narrow = param != SPW_DTYPE_F32 && grad == param &&
                                       (state == SPW_DTYPE_F32 || state == param) && copy == SPW_DTYPE_NONE;
                    if (wide || half || narrow) {
                        CHECK_OK(spw_adam_step(&options, &one.tensor, 1, NULL));
                        worked++;
                    } else {
                        REFUSED(spw_adam_step(&options, &one.tensor, 1, &stats), SPW_ERR_UNSUPPORTED, "unsupported");
                    }
                    release(&one);
                }
            }
        }
    }
    CHECK(worked == 17);
}

static void adam_fields(void) {
    static const struct {
        size_t offset;
        double value;
        const char *name;
    } numbers[] = {
        {offsetof(spw_adam_options, lr), -1e-9, "options.lr"},
        {offsetof(spw_adam_options, lr), NAN, "options.lr"},
        {offsetof(spw_adam_options, lr), INFINITY, "options.lr"},
        {offsetof(spw_adam_options, beta1), 1, "options.beta1"},
        {offsetof(spw_adam_options, beta1), -0.1, "options.beta1"},
        {offsetof(spw_adam_options, beta2), NAN, "options.beta2"},
        {offsetof(spw_adam_options, beta2), 2, "options.beta2"},
        // Values that the kernels, which compute in f32, would read as another value.
        {offsetof(spw_adam_options, lr), 1e39, "options.lr"},
        {offsetof(spw_adam_options, beta2), 0.9999999999, "options.beta2"},
        {offsetof(spw_adam_options, weight_decay), 1e300, "options.weight_decay"},
        {offsetof(spw_adam_options, eps), 1e-50, "options.eps"},
        {offsetof(spw_adam_options, eps), -1e-8, "options.eps"},
        {offsetof(spw_adam_options, weight_decay), -0.1, "options.weight_decay"},
        {offsetof(spw_adam_options, grad_scale), NAN, "options.grad_scale"},
        {offsetof(spw_adam_options, grad_scale), 1e300, "options.grad_scale"},
    };
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
        spw_adam_options options = adam_options();
        memcpy((char *)&options + numbers[i].offset, &numbers[i].value, sizeof(double));
        INVALID(spw_adam_step(&options, &problem.tensor, 1, &stats), numbers[i].name);
        problem.tensor.options = &options;
        const spw_adam_options good = adam_options();
        INVALID(spw_adam_step(&good, &problem.tensor, 1, &stats), "tensors[0].");
        problem.tensor.options = NULL;
    }
    spw_adam_options options = adam_options();
    options.rounding_first = 1;
    REFUSED(spw_adam_step(&options, &problem.tensor, 1, &stats), SPW_ERR_UNSUPPORTED, "options.rounding_first");
    options = adam_options();
    options.step = 0;
    INVALID(spw_adam_step(&options, &problem.tensor, 1, &stats), "options.step");
    options = adam_options();
    options.weight_decay_mode = 2;
    INVALID(spw_adam_step(&options, &problem.tensor, 1, &stats), "options.weight_decay_mode");
    options = adam_options();
    options.no_bias_correction = 2;
    INVALID(spw_adam_step(&options, &problem.tensor, 1, &stats), "options.no_bias_correction");
    options = adam_options();
    options.reserved = 1;
    INVALID(spw_adam_step(&options, &problem.tensor, 1, &stats), "options.reserved");
    options = adam_options();
    options.reserved2 = 1;
    INVALID(spw_adam_step(&options, &problem.tensor, 1, &stats), "options.reserved2");
    options = adam_options();
    options.rounding = 2;
    INVALID(spw_adam_step(&options, &problem.tensor, 1, &stats), "options.rounding");
    // The states of the problem are f32.
    options.rounding = SPW_ROUNDING_STOCHASTIC;
    CHECK(spw_adam_step(&options, &problem.tensor, 1, &stats) == SPW_ERR_UNSUPPORTED);
    CHECK(strstr(spw_last_error(), "tensors[0]: stochastic rounding needs") != NULL);
}

static void other_options(void) {
    spw_adagrad_options adagrad = SPW_ADAGRAD_OPTIONS_INIT;
    adagrad.step = 0;
    INVALID(spw_adagrad_step(&adagrad, &problem.tensor, 1, &stats), "options.step");
    adagrad.step = 1;
    adagrad.lr_decay = -1;
    INVALID(spw_adagrad_step(&adagrad, &problem.tensor, 1, &stats), "options.lr_decay");
    adagrad.lr_decay = 0;
    adagrad.reserved = 5;
    INVALID(spw_adagrad_step(&adagrad, &problem.tensor, 1, &stats), "options.reserved");

    spw_lion_options lion = SPW_LION_OPTIONS_INIT;
    lion.beta2 = 1;
    INVALID(spw_lion_step(&lion, &problem.tensor, 1, &stats), "options.beta2");
    lion.beta2 = 0.99;
    lion.reserved = 5;
    INVALID(spw_lion_step(&lion, &problem.tensor, 1, &stats), "options.reserved");

    spw_signum_options signum = SPW_SIGNUM_OPTIONS_INIT;
    signum.momentum = 1;
    INVALID(spw_signum_step(&signum, &problem.tensor, 1, &stats), "options.momentum");
    signum.momentum = 0.9;
    signum.reserved = 5;
    INVALID(spw_signum_step(&signum, &problem.tensor, 1, &stats), "options.reserved");

    INVALID(grad_stats(problem.tensor.grad, SPW_DTYPE_BF16, 3, NAN, &stats), "scale");
    INVALID(spw_set_log(NULL, NULL, 5), "level");
    INVALID(spw_set_log(NULL, NULL, -1), "level");
    const spw_thread_options threads = {sizeof threads, 1000000};
    INVALID(spw_set_threads(&threads), "options.num_threads");
}

static void ids(void) {
    const int unknown = SPW_ERR_UNKNOWN_ID;
    const spw_tensor *tensor = &problem.tensor;
    const spw_ds_adam_call call = ds_adam_call(1);
    REFUSED(spw_ds_adam_update(NULL, 3, &call, tensor), unknown, "Adam optimizer id 3");
    INVALID(spw_ds_adam_create(3, 0.9f, 0.999f, 2), "adamw_mode");
    REFUSED(spw_ds_adam_destroy(3), unknown, "3");

    CHECK_OK(spw_ds_adam_create(3, 0.9f, 0.999f, 0));
    spw_ds_adam_call wrong = ds_adam_call(0);
    INVALID(spw_ds_adam_update(NULL, 3, &wrong, tensor), "call.step");
    wrong = call, wrong.bias_correction = 2;
    INVALID(spw_ds_adam_update(NULL, 3, &wrong, tensor), "call.bias_correction");
    wrong = call, wrong.grad_scale = INFINITY;
    INVALID(spw_ds_adam_update(NULL, 3, &wrong, tensor), "call.grad_scale");
    CHECK_OK(spw_ds_adam_destroy(3));
    REFUSED(spw_ds_adam_destroy(3), unknown, "3");
    REFUSED(spw_ds_adam_update(NULL, 3, &call, tensor), unknown, "Adam optimizer id 3");
}

static void misaligned(void) {
    _Alignas(8) char bytes[40] = {0};
    spw_swap_options options = SPW_SWAP_OPTIONS_INIT;
    spw_swap_budget budget = SPW_SWAP_BUDGET_INIT;
    spw_io *io;
    options.host_memory = 1 << 20;
    options.subgroups = 2;
    options.elements = (const uint64_t *)(const void *)(bytes + 4);
    INVALID(spw_swap_plan_budget(&options, 1, &budget), "elements: address");
    CHECK_OK(spw_io_open(NULL, &io));
    INVALID(spw_io_wait(io, (const uint64_t *)(const void *)(bytes + 1), 1, 0, NULL), "is not aligned to 8 bytes");
    CHECK_OK(spw_io_close(io, -1));
    // A single output may have any alignment.
    CHECK_OK(spw_pinned_contains(bytes, 1, (uint32_t *)(void *)(bytes + 1)));
    CHECK(bytes[1] == 0);
}

int main(void) {
    problem = make_mixed(300, 1);
    stats = step_stats();
    watch_problem(&problem);
    watch(&stats, sizeof stats);
    dtypes();
    combinations();
    adam_fields();
    other_options();
    ids();
    misaligned();
    unwatch_all();
    release(&problem);
    return 0;
}
