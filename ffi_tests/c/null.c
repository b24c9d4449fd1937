// Every pointer argument of every function is passed as NULL: the status names the argument, and nothing is written.

#include "check.h"

static struct problem problem;
static spw_adam_options options;
static spw_step_stats stats;

static void adam(void) {
    INVALID(spw_adam_step(NULL, &problem.tensor, 1, &stats), "options: is NULL");
    INVALID(spw_adam_step(&options, NULL, 1, &stats), "tensors: is NULL");
    CHECK_OK(spw_adam_step(&options, NULL, 0, NULL));
}

static void adagrad_and_lion(void) {
    spw_adagrad_options adagrad = SPW_ADAGRAD_OPTIONS_INIT;
    INVALID(spw_adagrad_step(NULL, &problem.tensor, 1, &stats), "options: is NULL");
    INVALID(spw_adagrad_step(&adagrad, NULL, 1, &stats), "tensors: is NULL");

    spw_lion_options lion = SPW_LION_OPTIONS_INIT;
    INVALID(spw_lion_step(NULL, &problem.tensor, 1, &stats), "options: is NULL");
    INVALID(spw_lion_step(&lion, NULL, 1, &stats), "tensors: is NULL");
}

// A span that the optimizer needs; the one it does not need may be NULL.
static void spans(void) {
    spw_tensor tensor = problem.tensor;
    tensor.param = NULL;
    INVALID(spw_adam_step(&options, &tensor, 1, &stats), "tensors[0].param: is NULL");
    tensor = problem.tensor;
    tensor.grad = NULL;
    INVALID(spw_adam_step(&options, &tensor, 1, &stats), "tensors[0].grad: is NULL");
    tensor = problem.tensor;
    tensor.exp_avg = NULL;
    INVALID(spw_adam_step(&options, &tensor, 1, &stats), "exp_avg: is NULL");
    tensor = problem.tensor;
    tensor.exp_avg_sq = NULL;
    INVALID(spw_adam_step(&options, &tensor, 1, &stats), "exp_avg_sq: is NULL");
    tensor = problem.tensor;
    tensor.param_copy = NULL;
    INVALID(spw_adam_step(&options, &tensor, 1, &stats), "param_copy: is NULL");

    spw_adagrad_options adagrad = SPW_ADAGRAD_OPTIONS_INIT;
    tensor = problem.tensor;
    tensor.exp_avg_sq = NULL;
    INVALID(spw_adagrad_step(&adagrad, &tensor, 1, &stats), "exp_avg_sq: is NULL");
    spw_lion_options lion = SPW_LION_OPTIONS_INIT;
    tensor = problem.tensor;
    tensor.exp_avg = NULL;
    INVALID(spw_lion_step(&lion, &tensor, 1, &stats), "exp_avg: is NULL");

    struct problem own = make_f32(100, 2);
    own.tensor.exp_avg = NULL;
    CHECK_OK(spw_adagrad_step(&adagrad, &own.tensor, 1, NULL));
    own.tensor.exp_avg = own.spans[2];
    own.tensor.exp_avg_sq = NULL;
    CHECK_OK(spw_lion_step(&lion, &own.tensor, 1, NULL));
    release(&own);
}

static void deepspeed(void) {
    CHECK_OK(spw_ds_adam_create(5, 0.9f, 0.999f, 1));
    const spw_ds_adam_call call = ds_adam_call(1);
    uint32_t exact = 9;
    INVALID(spw_ds_adam_update(NULL, 5, &call, NULL), "tensor");
    INVALID(spw_ds_adam_update(NULL, 5, NULL, &problem.tensor), "call: is NULL");
    INVALID(spw_ds_adam_rollback(NULL, 5, NULL, &problem.tensor, &exact), "call: is NULL");
    INVALID(spw_ds_adam_rollback(NULL, 5, &call, &problem.tensor, NULL), "exact_out: is NULL");
    CHECK(exact == 9);
    CHECK_OK(spw_ds_adam_destroy(5));
}

int main(void) {
    problem = make_mixed(300, 1);
    options = adam_options();
    stats = step_stats();
    watch_problem(&problem);
    watch(&stats, sizeof stats);

    INVALID(spw_get_info(NULL), "info_out: is NULL");
    INVALID(spw_set_threads(NULL), "options: is NULL");
    INVALID(grad_stats(NULL, SPW_DTYPE_F32, 1, 1, &stats), "grad: is NULL");
    INVALID(grad_stats(problem.tensor.grad, SPW_DTYPE_BF16, 1, 1, NULL), "stats_out: is NULL");
    CHECK_OK(spw_set_log(NULL, NULL, SPW_LOG_LEVEL_OFF));
    adam();
    adagrad_and_lion();
    spans();
    deepspeed();

    unwatch_all();
    release(&problem);
    return 0;
}
