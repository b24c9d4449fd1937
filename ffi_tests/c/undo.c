// A recorded step comes back to the bit: for every optimizer, over random, denormal, huge, Inf and NaN gradients, at step 1
// and later; a redo has the bits of stepping with the other factor in the first place; and misuse changes nothing.

#include "check.h"

#include <math.h>

enum { COUNT = 70001 };

// What a gradient of training can be, and what it must never be.
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

// Which of the optimizers; the object decides nothing but the call.
static spw_status recorded_step(spw_undo *undo, int optimizer, struct model *model, uint64_t step, double scale) {
    spw_adam_options adam;
    spw_adagrad_options adagrad;
    spw_lion_options lion;
    CHECK_OK(spw_adam_options_init(&adam, sizeof adam));
    CHECK_OK(spw_adagrad_options_init(&adagrad, sizeof adagrad));
    CHECK_OK(spw_lion_options_init(&lion, sizeof lion));
    adam.step = step, adam.grad_scale = adagrad.grad_scale = lion.grad_scale = scale;
    adam.weight_decay = adagrad.weight_decay = lion.weight_decay = 0.01;
    adam.weight_decay_mode = optimizer == 1 ? SPW_WEIGHT_DECAY_L2 : SPW_WEIGHT_DECAY_DECOUPLED;
    if (optimizer == 2) return spw_undo_adagrad_step(undo, &adagrad, &model->tensor, 1, NULL);
    if (optimizer == 3) return spw_undo_lion_step(undo, &lion, &model->tensor, 1, NULL);
    return spw_undo_adam_step(undo, &adam, &model->tensor, 1, NULL);
}

static spw_undo *open_undo(uint32_t mode) {
    spw_undo_options options = {.struct_size = sizeof options, .mode = mode, .elements = COUNT, .tensors = 1};
    spw_undo *undo = NULL;
    CHECK_OK(spw_undo_open(&options, &undo));
    return undo;
}

static void rollback_and_redo_are_exact(int optimizer) {
    spw_undo *undo = open_undo(SPW_UNDO_DELTA);
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
        CHECK_OK(spw_undo_log_bytes(undo, &bytes));
        CHECK(bytes > COUNT && bytes < 14 * COUNT);
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
        // Inf and NaN have come this far; the next step starts from numbers again.
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

static void a_hundred_thousand_cycles_leave_the_bits(void) {
    spw_undo *undo = open_undo(SPW_UNDO_DELTA);
    struct model model = make_model();
    model.tensor.n = 64;
    fill_grad(model.grad, 0, 3);
    CHECK_OK(recorded_step(undo, 0, &model, 1, 1.0));
    float *before = calloc(3 * COUNT, 4), *after = calloc(3 * COUNT, 4);
    save(&model, before);
    for (uint64_t cycle = 0; cycle < 100000; cycle++) {
        model.grad[cycle % 64] *= -1.0f;
        CHECK_OK(recorded_step(undo, 0, &model, 2 + cycle % 50, 1.0));
        CHECK_OK(spw_undo_rollback(undo));
    }
    save(&model, after);
    CHECK(memcmp(before, after, 3 * COUNT * 4) == 0);
    free(before), free(after);
    free_model(&model);
    CHECK_OK(spw_undo_close(undo));
}

static void arithmetic_is_close_and_refuses_what_it_cannot_undo(void) {
    spw_undo *undo = open_undo(SPW_UNDO_ARITHMETIC);
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

    fill_grad(model.grad, 4, 3);
    CHECK_OK(recorded_step(undo, 0, &model, 3, 1.0));
    save(&model, before);
    CHECK(spw_undo_rollback(undo) == SPW_ERR_INVALID_ARGUMENT);
    CHECK(strstr(spw_last_error(), "Inf or NaN") != NULL);
    save(&model, after);
    CHECK(memcmp(before, after, 3 * COUNT * 4) == 0);
    free(before), free(after);
    free_model(&model);
    CHECK_OK(spw_undo_close(undo));
}

static void misuse_is_refused(void) {
    spw_undo *undo = open_undo(SPW_UNDO_DELTA);
    struct model model = make_model();
    CHECK(spw_undo_rollback(undo) == SPW_ERR_INVALID_ARGUMENT);
    CHECK(spw_undo_redo(undo, 1.0) == SPW_ERR_INVALID_ARGUMENT);
    CHECK(spw_undo_redo(undo, NAN) == SPW_ERR_INVALID_ARGUMENT);
    CHECK(spw_undo_commit(undo, 2) == SPW_ERR_INVALID_ARGUMENT);
    CHECK_OK(spw_undo_commit(undo, 0));
    CHECK(spw_undo_rollback(NULL) == SPW_ERR_INVALID_ARGUMENT);
    CHECK_OK(spw_undo_close(NULL));

    spw_undo_options small = {.struct_size = sizeof small, .mode = SPW_UNDO_DELTA, .elements = 16, .tensors = 1};
    spw_undo *narrow = NULL;
    CHECK_OK(spw_undo_open(&small, &narrow));
    float *before = calloc(3 * COUNT, 4), *after = calloc(3 * COUNT, 4);
    save(&model, before);
    CHECK(recorded_step(narrow, 0, &model, 1, 1.0) == SPW_ERR_INVALID_ARGUMENT);
    save(&model, after);
    CHECK(memcmp(before, after, 3 * COUNT * 4) == 0);
    small.mode = 2;
    CHECK(spw_undo_open(&small, &narrow) == SPW_ERR_INVALID_ARGUMENT);
    CHECK_OK(spw_undo_close(narrow));
    free(before), free(after);
    free_model(&model);
    CHECK_OK(spw_undo_close(undo));
}

int main(void) {
    for (int optimizer = 0; optimizer < 4; optimizer++) rollback_and_redo_are_exact(optimizer);
    a_hundred_thousand_cycles_leave_the_bits();
    arithmetic_is_close_and_refuses_what_it_cannot_undo();
    misuse_is_refused();
    return 0;
}
