// 8-bit moments: a step has the bits of a step of the decoded moments in f32, whose results are encoded. Each optimizer and
// gradient type, split masters, the speculation without undo; wrong uses are refused before anything is written.

#include "check.h"

enum { STEPS = 3 };

struct coded {
    uint8_t *codes[2];
    uint16_t *scales[2];
    uint64_t n;
};

static struct coded zeros(uint64_t n) {
    struct coded made = {.n = n};
    for (int i = 0; i < 2; i++) made.codes[i] = calloc(n + 1, 1), made.scales[i] = calloc(n / 32 + 2, 2);
    return made;
}

static void drop(struct coded *coded) {
    for (int i = 0; i < 2; i++) free(coded->codes[i]), free(coded->scales[i]);
}

static void name_in(struct coded *coded, spw_tensor *tensor) {
    tensor->state_dtype = SPW_DTYPE_CODES;
    tensor->exp_avg = coded->codes[0], tensor->exp_avg_scale = coded->scales[0];
    tensor->exp_avg_sq = coded->codes[1], tensor->exp_avg_sq_scale = coded->scales[1];
}

static spw_status step(int optimizer, uint64_t number, const spw_tensor *tensor, spw_step_stats *stats) {
    spw_adam_options adam = adam_options();
    spw_adagrad_options adagrad = SPW_ADAGRAD_OPTIONS_INIT;
    spw_lion_options lion = SPW_LION_OPTIONS_INIT;
    spw_signum_options signum = SPW_SIGNUM_OPTIONS_INIT;
    adam.step = adagrad.step = number;
    if (optimizer == 1) return spw_adagrad_step(&adagrad, tensor, 1, stats);
    if (optimizer == 2) return spw_lion_step(&lion, tensor, 1, stats);
    if (optimizer == 3) return spw_signum_step(&signum, tensor, 1, stats);
    return spw_adam_step(&adam, tensor, 1, stats);
}

static void read_moments(const struct coded *coded, void *const to[2]) {
    for (uint32_t i = 0; i < 2; i++)
        CHECK_OK(spw_codes_read(SPW_MOMENT_FIRST + i, coded->codes[i], coded->scales[i], coded->n, to[i]));
}

static void write_moments(struct coded *coded, void *const from[2]) {
    for (uint32_t i = 0; i < 2; i++)
        CHECK_OK(spw_codes_write(SPW_MOMENT_FIRST + i, from[i], coded->n, coded->codes[i], coded->scales[i]));
}

static void check_same(const struct coded *one, const struct coded *other, int moment) {
    CHECK(memcmp(one->codes[moment], other->codes[moment], one->n) == 0);
    CHECK(memcmp(one->scales[moment], other->scales[moment], (one->n + 31) / 32 * 2) == 0);
}

static void steps_are_those_of_the_decoded_moments(int optimizer, uint32_t grad, uint64_t n) {
    struct problem plain = make(n, SPW_DTYPE_F32, SPW_DTYPE_F32, grad, SPW_DTYPE_BF16, 3);
    struct problem other = make(n, SPW_DTYPE_F32, SPW_DTYPE_F32, grad, SPW_DTYPE_BF16, 3);
    struct coded coded = zeros(n), expected = zeros(n);
    name_in(&coded, &other.tensor);
    void *moments[2] = {plain.tensor.exp_avg, plain.tensor.exp_avg_sq};
    for (uint64_t number = 1; number <= STEPS; number++) {
        read_moments(&coded, moments);
        spw_step_stats seen[2] = {step_stats(), step_stats()};
        CHECK_OK(step(optimizer, number, &plain.tensor, &seen[0]));
        CHECK_OK(step(optimizer, number, &other.tensor, &seen[1]));
        CHECK(memcmp(&seen[0], &seen[1], sizeof seen[0]) == 0);
        CHECK(memcmp(plain.spans[0], other.spans[0], plain.bytes[0]) == 0);
        CHECK(memcmp(plain.spans[4], other.spans[4], plain.bytes[4]) == 0);
        write_moments(&expected, moments);
        if (optimizer != 1) check_same(&coded, &expected, 0);
        if (optimizer < 2) check_same(&coded, &expected, 1);
    }
    release(&plain), release(&other), drop(&coded), drop(&expected);
}

// A round of a speculation without undo has the bits of a step.
static void a_round_steps_codes(uint64_t n) {
    struct problem one = make(n, SPW_DTYPE_F32, SPW_DTYPE_F32, SPW_DTYPE_BF16, SPW_DTYPE_NONE, 5);
    struct problem two = make(n, SPW_DTYPE_F32, SPW_DTYPE_F32, SPW_DTYPE_BF16, SPW_DTYPE_NONE, 5);
    struct coded codes[2] = {zeros(n), zeros(n)};
    name_in(&codes[0], &one.tensor), name_in(&codes[1], &two.tensor);
    CHECK_OK(step(0, 1, &one.tensor, NULL));
    spw_spec_options options = SPW_SPEC_OPTIONS_INIT;
    options.buckets = 1, options.undo_mode = SPW_UNDO_MODE_NONE;
    spw_spec *spec = NULL;
    CHECK_OK(spw_spec_open(&options, &spec));
    spw_adam_options adam = adam_options();
    adam.step = 1;
    CHECK_OK(spw_spec_begin_adam(spec, &adam, 0.0));
    CHECK_OK(spw_spec_submit(spec, 0, &two.tensor, 1, NULL));
    spw_step_stats stats = step_stats();
    CHECK_OK(spw_spec_local_result(spec, -1, &stats));
    CHECK_OK(spw_spec_resolve(spec, &stats, NULL));
    CHECK_OK(spw_spec_finish(spec, -1));
    CHECK_OK(spw_spec_close(spec));
    CHECK(memcmp(one.spans[0], two.spans[0], one.bytes[0]) == 0);
    check_same(&codes[0], &codes[1], 0), check_same(&codes[0], &codes[1], 1);
    release(&one), release(&two), drop(&codes[0]), drop(&codes[1]);
}

static void wrong_uses_are_refused(void) {
    enum { N = 100 };
    struct problem plain = make(N, SPW_DTYPE_F32, SPW_DTYPE_F32, SPW_DTYPE_BF16, SPW_DTYPE_NONE, 7);
    struct coded coded = zeros(N);
    spw_tensor good = plain.tensor;
    name_in(&coded, &good);
    watch_problem(&plain), watch(coded.codes[0], N), watch(coded.scales[0], 8);
    spw_tensor tensor = good;
    tensor.exp_avg_scale = NULL;
    INVALID(step(0, 1, &tensor, NULL), "tensors[0].exp_avg_scale: is NULL");
    tensor = good, tensor.exp_avg_sq = NULL;
    INVALID(step(0, 1, &tensor, NULL), "tensors[0].exp_avg_sq: is NULL");
    tensor = good, tensor.exp_avg_sq = NULL, tensor.exp_avg_sq_scale = NULL;
    INVALID(step(0, 1, &tensor, NULL), "tensors[0].exp_avg_sq: is NULL");
    tensor = good, tensor.exp_avg_scale = (char *)coded.scales[0] + 1;
    INVALID(step(0, 1, &tensor, NULL), "tensors[0].exp_avg_scale: address");
    tensor = good, tensor.exp_avg_scale = coded.scales[1];
    INVALID(step(0, 1, &tensor, NULL), "overlaps tensors[0].");
    tensor = plain.tensor, tensor.exp_avg_scale = coded.scales[0];
    INVALID(step(0, 1, &tensor, NULL), "tensors[0].exp_avg_scale: or exp_avg_sq_scale is set");
    tensor = good, tensor.shadow_param = plain.spans[1];
    INVALID(step(0, 1, &tensor, NULL), "tensors[0].");
    tensor = good, tensor.param_dtype = SPW_DTYPE_CODES;
    INVALID(step(0, 1, &tensor, NULL), "tensors[0].param_dtype: is SPW_DTYPE_CODES, which is for state_dtype only");

    float values[N];
    INVALID(spw_codes_read(3, coded.codes[0], coded.scales[0], N, values), "moment: 3 is not an spw_moment");
    INVALID(spw_codes_read(SPW_MOMENT_FIRST, NULL, coded.scales[0], N, values), "codes: is NULL");
    INVALID(spw_codes_write(SPW_MOMENT_FIRST, NULL, N, coded.codes[0], coded.scales[0]), "values: is NULL");
    INVALID(spw_codes_write(SPW_MOMENT_FIRST, values, UINT64_MAX, coded.codes[0], coded.scales[0]), "exceed");
    CHECK_OK(spw_codes_read(SPW_MOMENT_FIRST, NULL, NULL, 0, NULL));
    unwatch_all();
    release(&plain), drop(&coded);
}

int main(void) {
    const uint64_t sizes[] = {1, 31, 33, 4097, LARGE};
    for (int i = 0; i < 5; i++) {
        for (int optimizer = 0; optimizer < 4; optimizer++) {
            steps_are_those_of_the_decoded_moments(optimizer, SPW_DTYPE_F32, sizes[i]);
            steps_are_those_of_the_decoded_moments(optimizer, SPW_DTYPE_BF16, sizes[i]);
        }
        a_round_steps_codes(sizes[i]);
    }
    wrong_uses_are_refused();
    return 0;
}
