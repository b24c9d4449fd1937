// A recorded step rolls back bit for bit: for every optimizer, at step 1 and later, by a log and by a shadow. The
// gradients are random, denormal, huge, Inf and NaN. A redo gives the bits of a first step with the other factor. A
// million cycles keep the bits; the memory of the log is bounded; misuse changes nothing.

#include "check.h"

#include <math.h>

enum { COUNT = 70001 };

// The kinds of gradients: those that training produces, and those that it must never produce.
static void fill_grad(float *grad, int kind, uint64_t seed) {
    uint64_t state = seed * 2 + 1;
    for (int i = 0; i < COUNT; i++) {
        uint32_t bits = (uint32_t)(random_bits(&state) >> 32);
        const float bell = ((float)(bits >> 8) / 8388608.0f - 1.0f) * 1e-2f;
        switch (kind) {
        case 0: grad[i] = bell; break;
        case 1: bits &= 0x807fffff; memcpy(&grad[i], &bits, 4); break;
        case 2: grad[i] = bell * 1e36f; break;
        case 3: memcpy(&grad[i], &bits, 4); break;
        default: grad[i] = i % 97 == 0 ? (i % 2 ? INFINITY : NAN) : bell; break;
        }
    }
}

struct model {
    float *param, *exp_avg, *exp_avg_sq, *grad;
    uint16_t *copy;
    spw_tensor tensor;
};

static struct model make_model(void) {
    struct model model = {0};
    model.param = calloc(COUNT, 4), model.exp_avg = calloc(COUNT, 4), model.exp_avg_sq = calloc(COUNT, 4);
    model.grad = calloc(COUNT, 4), model.copy = calloc(COUNT, 2);
    uint64_t state = 5;
    for (int i = 0; i < COUNT; i++) model.param[i] = (float)(random_bits(&state) >> 40) / 8388608.0f - 1.0f;
    spw_tensor tensor = {.struct_size = sizeof tensor, .param_dtype = SPW_DTYPE_F32, .state_dtype = SPW_DTYPE_F32,
                         .grad_dtype = SPW_DTYPE_F32, .copy_dtype = SPW_DTYPE_BF16, .n = COUNT, .param = model.param,
                         .grad = model.grad, .exp_avg = model.exp_avg, .exp_avg_sq = model.exp_avg_sq,
                         .param_copy = model.copy};
    model.tensor = tensor;
    return model;
}

static void free_model(struct model *model) {
    free(model->param), free(model->exp_avg), free(model->exp_avg_sq), free(model->grad), free(model->copy);
}

static void save(const struct model *model, float *to) {
    memcpy(to, model->param, COUNT * 4);
    memcpy(to + COUNT, model->exp_avg, COUNT * 4);
    memcpy(to + 2 * COUNT, model->exp_avg_sq, COUNT * 4);
}

// Calls one of the optimizers; the same undo object serves all.
static spw_status recorded_step(spw_undo *undo, int optimizer, struct model *model, uint64_t step, double scale) {
    spw_adam_options adam;
    spw_adagrad_options adagrad;
    spw_lion_options lion;
    adam = (spw_adam_options)SPW_ADAM_OPTIONS_INIT;
    adagrad = (spw_adagrad_options)SPW_ADAGRAD_OPTIONS_INIT;
    lion = (spw_lion_options)SPW_LION_OPTIONS_INIT;
    spw_signum_options signum = SPW_SIGNUM_OPTIONS_INIT;
    signum.grad_scale = scale, signum.weight_decay = 0.01;
    adam.step = step, adam.grad_scale = adagrad.grad_scale = lion.grad_scale = scale;
    adam.weight_decay = adagrad.weight_decay = lion.weight_decay = 0.01;
    adam.weight_decay_mode = optimizer == 1 ? SPW_WEIGHT_DECAY_L2 : SPW_WEIGHT_DECAY_DECOUPLED;
    if (undo == NULL) return spw_adam_step(&adam, &model->tensor, 1, NULL);
    if (optimizer == 2) return spw_undo_adagrad_step(undo, &adagrad, &model->tensor, 1, NULL);
    if (optimizer == 3) return spw_undo_lion_step(undo, &lion, &model->tensor, 1, NULL);
    if (optimizer == 4) return spw_undo_signum_step(undo, &signum, &model->tensor, 1, NULL);
    return spw_undo_adam_step(undo, &adam, &model->tensor, 1, NULL);
}

static spw_undo *open_undo(uint32_t mode) {
    spw_undo_options options = {.struct_size = sizeof options, .mode = mode, .elements = COUNT, .tensors = 1};
    spw_undo *undo = NULL;
    CHECK_OK(spw_undo_open(&options, &undo));
    return undo;
}

static void rollback_and_redo_are_exact(int optimizer) {
    spw_undo *undo = open_undo(SPW_UNDO_MODE_DELTA);
    struct model model = make_model(), other = make_model();
    float *before = calloc(3 * COUNT, 4), *expected = calloc(3 * COUNT, 4), *after = calloc(3 * COUNT, 4);
    for (uint64_t step = 1; step <= 10; step++) {
        fill_grad(model.grad, (int)(step - 1) % 5, step);
        memcpy(other.grad, model.grad, COUNT * 4);
        save(&model, before);
        memcpy(other.param, model.param, COUNT * 4);
        memcpy(other.exp_avg, model.exp_avg, COUNT * 4);
        memcpy(other.exp_avg_sq, model.exp_avg_sq, COUNT * 4);

        CHECK_OK(recorded_step(undo, optimizer, &model, step, 1.0));
        uint64_t bytes = 0;
        CHECK_OK(spw_undo_get_log_bytes(undo, &bytes));
        CHECK(bytes > COUNT / 2 && bytes < 14 * COUNT);
        CHECK_OK(spw_undo_rollback(undo));
        save(&model, after);
        CHECK(memcmp(before, after, 3 * COUNT * 4) == 0);

        CHECK_OK(recorded_step(undo, optimizer, &model, step, 1.0));
        CHECK_OK(spw_undo_redo(undo, 0.25));
        CHECK_OK(recorded_step(undo, optimizer, &other, step, 0.25));
        CHECK_OK(spw_undo_commit(undo, step % 2));
        save(&model, after);
        save(&other, expected);
        CHECK(memcmp(expected, after, 3 * COUNT * 4) == 0);
        CHECK(memcmp(model.copy, other.copy, COUNT * 2) == 0);
        // Inf and NaN have reached the state; the next step starts from finite numbers again.
        for (int i = 0; i < COUNT; i++) {
            if (!isfinite(model.param[i])) model.param[i] = 0.5f;
            if (!isfinite(model.exp_avg[i])) model.exp_avg[i] = 0.0f;
            if (!isfinite(model.exp_avg_sq[i])) model.exp_avg_sq[i] = 0.0f;
        }
    }
    free(before), free(expected), free(after);
    free_model(&model), free_model(&other);
    CHECK_OK(spw_undo_close(undo));
}

// Swaps the current spans and the shadow spans.
static void flip(struct model *model, struct model *shadow) {
    float *spans[3] = {model->param, model->exp_avg, model->exp_avg_sq};
    model->param = shadow->param, model->exp_avg = shadow->exp_avg, model->exp_avg_sq = shadow->exp_avg_sq;
    shadow->param = spans[0], shadow->exp_avg = spans[1], shadow->exp_avg_sq = spans[2];
    model->tensor.param = model->param, model->tensor.exp_avg = model->exp_avg;
    model->tensor.exp_avg_sq = model->exp_avg_sq;
    model->tensor.shadow_param = shadow->param, model->tensor.shadow_exp_avg = shadow->exp_avg;
    model->tensor.shadow_exp_avg_sq = shadow->exp_avg_sq;
}

static void a_shadow_is_exact_and_costs_nothing_to_drop(int optimizer) {
    spw_undo *undo = open_undo(SPW_UNDO_MODE_SHADOW);
    struct model model = make_model(), shadow = make_model(), other = make_model();
    float *before = calloc(3 * COUNT, 4), *expected = calloc(3 * COUNT, 4), *after = calloc(3 * COUNT, 4);
    flip(&model, &shadow), flip(&model, &shadow);
    if (optimizer == 2) model.tensor.exp_avg = model.tensor.shadow_exp_avg = NULL;
    if (optimizer >= 3) model.tensor.exp_avg_sq = model.tensor.shadow_exp_avg_sq = NULL;
    for (uint64_t step = 1; step <= 5; step++) {
        fill_grad(model.grad, (int)(step - 1) % 5, step);
        memcpy(other.grad, model.grad, COUNT * 4);
        save(&model, before);
        CHECK_OK(recorded_step(undo, optimizer, &model, step, 1.0));
        CHECK_OK(spw_undo_rollback(undo));
        CHECK(spw_undo_rollback(undo) == SPW_ERR_INVALID_ARGUMENT);
        save(&model, after);
        CHECK(memcmp(before, after, 3 * COUNT * 4) == 0);

        CHECK_OK(recorded_step(undo, optimizer, &model, step, 1.0));
        CHECK_OK(spw_undo_redo(undo, 0.25));
        save(&model, after);
        CHECK(memcmp(before, after, 3 * COUNT * 4) == 0);
        flip(&model, &shadow);
        if (optimizer == 2) model.tensor.exp_avg = model.tensor.shadow_exp_avg = NULL;
        if (optimizer >= 3) model.tensor.exp_avg_sq = model.tensor.shadow_exp_avg_sq = NULL;

        spw_undo *plain = open_undo(SPW_UNDO_MODE_DELTA);
        CHECK_OK(recorded_step(plain, optimizer, &other, step, 0.25));
        CHECK_OK(spw_undo_close(plain));
        save(&model, after), save(&other, expected);
        CHECK(memcmp(expected, after, COUNT * 4) == 0);
        if (optimizer != 2) CHECK(memcmp(expected + COUNT, after + COUNT, COUNT * 4) == 0);
        if (optimizer < 3) CHECK(memcmp(expected + 2 * COUNT, after + 2 * COUNT, COUNT * 4) == 0);
        CHECK(memcmp(model.copy, other.copy, COUNT * 2) == 0);
    }
    free(before), free(expected), free(after);
    free_model(&model), free_model(&shadow), free_model(&other);
    CHECK_OK(spw_undo_close(undo));
}

static void a_million_cycles_leave_the_bits(uint32_t mode) {
    spw_undo *undo = open_undo(mode);
    struct model model = make_model(), shadow = make_model();
    model.tensor.n = 64;
    fill_grad(model.grad, 0, 3);
    CHECK_OK(recorded_step(NULL, 0, &model, 1, 1.0));
    if (mode == SPW_UNDO_MODE_SHADOW) flip(&model, &shadow), flip(&model, &shadow);
    float *before = calloc(3 * COUNT, 4), *after = calloc(3 * COUNT, 4);
    save(&model, before);
    const uint64_t cycles = getenv("SPILLWAY_TEST_EMULATOR") == NULL ? 1000000 : 5000;
    for (uint64_t cycle = 0; cycle < cycles; cycle++) {
        model.grad[cycle % 64] *= -1.0f;
        CHECK_OK(recorded_step(undo, 0, &model, 2 + cycle % 50, 1.0));
        CHECK_OK(spw_undo_rollback(undo));
    }
    save(&model, after);
    CHECK(memcmp(before, after, 3 * COUNT * 4) == 0);
    free(before), free(after);
    free_model(&model), free_model(&shadow);
    CHECK_OK(spw_undo_close(undo));
}

// Resident bytes of this process.
static uint64_t resident(void) {
    FILE *file = fopen("/proc/self/statm", "r");
    unsigned long size = 0, pages = 0;
    CHECK(file != NULL && fscanf(file, "%lu %lu", &size, &pages) == 2);
    fclose(file);
    return (uint64_t)pages * 4096;
}

static void the_log_is_bounded_and_shrinks_after_a_step_that_could_not_be_predicted(void) {
    enum { MANY = 8 << 20 };
    spw_undo_options options = {.struct_size = sizeof options, .mode = SPW_UNDO_MODE_DELTA, .elements = MANY, .tensors = 1};
    spw_undo *undo = NULL;
    CHECK_OK(spw_undo_open(&options, &undo));
    struct model model = {0};
    model.param = calloc(MANY, 4), model.exp_avg = calloc(MANY, 4), model.exp_avg_sq = calloc(MANY, 4);
    model.grad = calloc(MANY, 4);
    spw_tensor tensor = {.struct_size = sizeof tensor, .param_dtype = SPW_DTYPE_F32, .state_dtype = SPW_DTYPE_F32,
                         .grad_dtype = SPW_DTYPE_F32, .n = MANY, .param = model.param, .grad = model.grad,
                         .exp_avg = model.exp_avg, .exp_avg_sq = model.exp_avg_sq};
    model.tensor = tensor;
    uint64_t state = 1, bytes = 0;
    for (int i = 0; i < MANY; i++) {
        model.param[i] = model.exp_avg[i] = model.exp_avg_sq[i] = 0.5f;
        model.grad[i] = (float)(random_bits(&state) >> 40) / 8388608.0f - 1.0f;
    }
    CHECK_OK(recorded_step(undo, 0, &model, 100, 1.0));
    const uint64_t steady = resident();
    CHECK_OK(spw_undo_get_log_bytes(undo, &bytes));
    CHECK(bytes < (uint64_t)MANY * 31 / 10);
    // Inf allows no prediction, so the log stores every old value.
    for (int i = 0; i < MANY; i++) model.grad[i] = INFINITY;
    CHECK_OK(recorded_step(undo, 0, &model, 101, 1.0));
    CHECK_OK(spw_undo_get_log_bytes(undo, &bytes));
    CHECK(bytes > (uint64_t)MANY * 12 && bytes <= (uint64_t)MANY * 13 + (uint64_t)MANY / 65536 * 128);
    CHECK(resident() > steady + (uint64_t)MANY * 8);
    CHECK_OK(spw_undo_rollback(undo));
    CHECK(resident() < steady + (uint64_t)MANY * 2);
    // The log of a first step has no moments: they were zeros.
    for (int i = 0; i < MANY; i++) {
        model.exp_avg[i] = model.exp_avg_sq[i] = 0.0f;
        model.grad[i] = (float)(random_bits(&state) >> 40) / 8388608.0f - 1.0f;
    }
    CHECK_OK(recorded_step(undo, 0, &model, 1, 1.0));
    CHECK_OK(spw_undo_get_log_bytes(undo, &bytes));
    CHECK(bytes < (uint64_t)MANY * 21 / 10);
    CHECK_OK(spw_undo_rollback(undo));
    for (int i = 0; i < MANY; i++) CHECK(model.exp_avg[i] == 0.0f && model.exp_avg_sq[i] == 0.0f);
    free(model.param), free(model.exp_avg), free(model.exp_avg_sq), free(model.grad);
    CHECK_OK(spw_undo_close(undo));
}

// The rollback of DeepSpeed's step by the inverse formula is not reported as exact, and ends the record.
static void an_arithmetic_rollback_is_not_called_exact(void) {
    spw_undo *undo = open_undo(SPW_UNDO_MODE_ARITHMETIC);
    struct model model = make_model();
    spw_ds_adam_call call = SPW_DS_ADAM_CALL_INIT;
    call.step = 1, call.lr = 1e-3f, call.beta1 = 0.9f, call.beta2 = 0.999f, call.eps = 1e-8f;
    fill_grad(model.grad, 0, 1);
    CHECK_OK(spw_ds_adam_create(77, 0.9f, 0.999f, 1));
    CHECK_OK(spw_ds_adam_update(undo, 77, &call, &model.tensor));
    uint32_t exact = 9;
    CHECK_OK(spw_ds_adam_rollback(undo, 77, &call, &model.tensor, &exact));
    CHECK(exact == 0);
    INVALID(spw_undo_rollback(undo), "no recorded step");
    CHECK_OK(spw_ds_adam_destroy(77));
    free_model(&model);
    CHECK_OK(spw_undo_close(undo));
}

static void arithmetic_is_close_and_refuses_what_it_cannot_undo(void) {
    spw_undo *undo = open_undo(SPW_UNDO_MODE_ARITHMETIC);
    struct model model = make_model();
    float *before = calloc(3 * COUNT, 4), *after = calloc(3 * COUNT, 4);
    fill_grad(model.grad, 0, 1);
    CHECK_OK(recorded_step(undo, 0, &model, 1, 1.0));
    CHECK_OK(spw_undo_commit(undo, 0));
    fill_grad(model.grad, 0, 2);
    save(&model, before);
    CHECK_OK(recorded_step(undo, 0, &model, 2, 1.0));
    CHECK_OK(spw_undo_rollback(undo));
    save(&model, after);
    for (int i = 0; i < COUNT; i++) CHECK(fabsf(after[i] - before[i]) <= 1e-6f);
    for (int i = COUNT; i < 2 * COUNT; i++) CHECK(fabsf(after[i] - before[i]) <= 1e-8f);
    for (int i = 2 * COUNT; i < 3 * COUNT; i++) CHECK(fabsf(after[i] - before[i]) <= 1e-11f);

    // Inf and NaN in the gradient; and finite gradients whose squares overflow.
    for (int kind = 4; kind >= 2; kind -= 2) {
        fill_grad(model.grad, kind, 3);
        if (kind == 2) model.grad[COUNT - 1] = 1e30f;
        CHECK_OK(recorded_step(undo, 0, &model, 3, 1.0));
        watch(model.param, COUNT * 4), watch(model.exp_avg, COUNT * 4), watch(model.exp_avg_sq, COUNT * 4);
        watch(model.copy, COUNT * 2);
        INVALID(spw_undo_rollback(undo), "Inf or NaN");
        unwatch_all();
        memcpy(model.param, before, COUNT * 4), memcpy(model.exp_avg, before + COUNT, COUNT * 4);
        memcpy(model.exp_avg_sq, before + 2 * COUNT, COUNT * 4);
    }
    free(before), free(after);
    free_model(&model);
    CHECK_OK(spw_undo_close(undo));
}

static void misuse_is_refused(void) {
    spw_undo *undo = open_undo(SPW_UNDO_MODE_DELTA);
    struct model model = make_model();
    CHECK(spw_undo_rollback(undo) == SPW_ERR_INVALID_ARGUMENT);
    CHECK(spw_undo_redo(undo, 1.0) == SPW_ERR_INVALID_ARGUMENT);
    CHECK(spw_undo_redo(undo, NAN) == SPW_ERR_INVALID_ARGUMENT);
    CHECK(spw_undo_commit(undo, 2) == SPW_ERR_INVALID_ARGUMENT);
    CHECK_OK(spw_undo_commit(undo, 0));
    CHECK(spw_undo_rollback(NULL) == SPW_ERR_INVALID_ARGUMENT);
    CHECK_OK(spw_undo_close(NULL));

    spw_undo_options small = {.struct_size = sizeof small, .mode = SPW_UNDO_MODE_DELTA, .elements = 16, .tensors = 1};
    spw_undo *narrow = NULL;
    CHECK_OK(spw_undo_open(&small, &narrow));
    float *before = calloc(3 * COUNT, 4), *after = calloc(3 * COUNT, 4);
    save(&model, before);
    CHECK(recorded_step(narrow, 0, &model, 1, 1.0) == SPW_ERR_INVALID_ARGUMENT);
    save(&model, after);
    CHECK(memcmp(before, after, 3 * COUNT * 4) == 0);
    // A refused step leaves the recorded step before it, which can still be rolled back.
    model.tensor.n = 16;
    CHECK_OK(recorded_step(narrow, 0, &model, 1, 1.0));
    model.tensor.n = COUNT;
    INVALID(recorded_step(narrow, 0, &model, 1, 1.0), "have more elements than the recording has room for");
    CHECK_OK(spw_undo_rollback(narrow));
    save(&model, after);
    CHECK(memcmp(before, after, 3 * COUNT * 4) == 0);
    small.mode = 3;
    CHECK(spw_undo_open(&small, &narrow) == SPW_ERR_INVALID_ARGUMENT);
    CHECK_OK(spw_undo_close(narrow));

    watch(model.param, COUNT * 4), watch(model.exp_avg, COUNT * 4), watch(model.exp_avg_sq, COUNT * 4);
    spw_undo *shadowed = open_undo(SPW_UNDO_MODE_SHADOW);
    INVALID(recorded_step(shadowed, 0, &model, 1, 1.0), "tensors[0].shadow_param: is NULL, but the undo mode is");
    // The index in a message also counts empty tensors.
    spw_tensor listed[3] = {model.tensor, model.tensor, model.tensor};
    listed[0].n = listed[1].n = 0;
    const spw_adam_options plain = adam_options();
    INVALID(spw_undo_adam_step(shadowed, &plain, listed, 3, NULL), "tensors[2].shadow_param: is NULL");
    listed[2].exp_avg_sq = NULL;
    INVALID(spw_undo_adam_step(undo, &plain, listed, 3, NULL), "tensors[2].exp_avg_sq: is NULL");
    struct model shadow = make_model();
    model.tensor.shadow_param = shadow.param;
    INVALID(recorded_step(shadowed, 0, &model, 1, 1.0), "tensors[0].shadow_exp_avg: is NULL, but");
    model.tensor.shadow_exp_avg = shadow.exp_avg, model.tensor.shadow_exp_avg_sq = shadow.exp_avg_sq;
    INVALID(recorded_step(undo, 0, &model, 1, 1.0), "tensors[0].shadow_param: is set, but the undo mode is not");
    model.tensor.shadow_param = model.param + 1;
    INVALID(recorded_step(shadowed, 0, &model, 1, 1.0), "overlaps tensors[0].param");
    unwatch_all();
    free_model(&shadow);
    CHECK_OK(spw_undo_close(shadowed));
    free(before), free(after);
    free_model(&model);
    CHECK_OK(spw_undo_close(undo));
}

int main(void) {
    for (int optimizer = 0; optimizer < 5; optimizer++) rollback_and_redo_are_exact(optimizer);
    for (int optimizer = 0; optimizer < 5; optimizer++) a_shadow_is_exact_and_costs_nothing_to_drop(optimizer);
    a_million_cycles_leave_the_bits(SPW_UNDO_MODE_DELTA);
    a_million_cycles_leave_the_bits(SPW_UNDO_MODE_SHADOW);
    the_log_is_bounded_and_shrinks_after_a_step_that_could_not_be_predicted();
    an_arithmetic_rollback_is_not_called_exact();
    arithmetic_is_close_and_refuses_what_it_cannot_undo();
    misuse_is_refused();
    return 0;
}
