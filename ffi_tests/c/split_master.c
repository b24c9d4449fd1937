// A step with param_low has the bits of the same step of an f32 param: param_low holds the lower halves of the masters,
// and the bf16 param is the master rounded to the nearest, ties away from zero. Wrong uses are refused.

#include "check.h"

enum { STEPS = 4 };

struct split {
    struct problem problem;
    uint16_t *low;
};

// The same start as `whole`, with split masters.
static struct split split_of(const struct problem *whole, uint32_t state, uint32_t grad, uint64_t seed) {
    const uint64_t n = whole->tensor.n;
    struct split made = {make(n, SPW_DTYPE_BF16, state, grad, SPW_DTYPE_NONE, seed), malloc(2 * n + 1)};
    for (uint64_t i = 0; i < n; i++) {
        const uint32_t master = ((const uint32_t *)whole->spans[0])[i];
        ((uint16_t *)made.problem.spans[0])[i] = (uint16_t)((master + 0x8000) >> 16);
        made.low[i] = (uint16_t)master;
    }
    for (int s = 1; s < 4; s++) memcpy(made.problem.spans[s], whole->spans[s], whole->bytes[s]);
    made.problem.tensor.param_low = made.low;
    return made;
}

static void check_same(const struct problem *whole, const struct split *split) {
    for (uint64_t i = 0; i < whole->tensor.n; i++) {
        const uint32_t master = ((const uint32_t *)whole->spans[0])[i];
        CHECK(((const uint16_t *)split->problem.spans[0])[i] == (uint16_t)((master + 0x8000) >> 16));
        CHECK(split->low[i] == (uint16_t)master);
    }
    CHECK(memcmp(whole->spans[2], split->problem.spans[2], whole->bytes[2]) == 0);
    CHECK(memcmp(whole->spans[3], split->problem.spans[3], whole->bytes[3]) == 0);
}

static spw_status step(int optimizer, uint64_t number, const spw_tensor *tensor, spw_step_stats *stats) {
    spw_adam_options adam = adam_options();
    spw_adagrad_options adagrad = SPW_ADAGRAD_OPTIONS_INIT;
    spw_lion_options lion = SPW_LION_OPTIONS_INIT;
    spw_signum_options signum = SPW_SIGNUM_OPTIONS_INIT;
    adam.step = adagrad.step = number;
    if (optimizer == 4) adam.rounding = SPW_ROUNDING_STOCHASTIC, adam.rounding_seed = 7;
    if (optimizer == 1) return spw_adagrad_step(&adagrad, tensor, 1, stats);
    if (optimizer == 2) return spw_lion_step(&lion, tensor, 1, stats);
    if (optimizer == 3) return spw_signum_step(&signum, tensor, 1, stats);
    return spw_adam_step(&adam, tensor, 1, stats);
}

static void steps_have_the_bits_of_an_f32_param(int optimizer, uint32_t state, uint32_t grad, uint64_t n) {
    struct problem whole = make(n, SPW_DTYPE_F32, state, grad, SPW_DTYPE_NONE, 11);
    struct split split = split_of(&whole, state, grad, 11);
    for (uint64_t number = 1; number <= STEPS; number++) {
        spw_step_stats seen[2] = {step_stats(), step_stats()};
        CHECK_OK(step(optimizer, number, &whole.tensor, &seen[0]));
        CHECK_OK(step(optimizer, number, &split.problem.tensor, &seen[1]));
        CHECK(memcmp(&seen[0], &seen[1], sizeof seen[0]) == 0);
        check_same(&whole, &split);
        fill(whole.spans[1], grad, n, number, 0);
        memcpy(split.problem.spans[1], whole.spans[1], whole.bytes[1]);
    }
    release(&whole), release(&split.problem), free(split.low);
}

static void wrong_uses_are_refused(void) {
    struct problem whole = make(100, SPW_DTYPE_F32, SPW_DTYPE_F32, SPW_DTYPE_BF16, SPW_DTYPE_NONE, 3);
    struct split split = split_of(&whole, SPW_DTYPE_F32, SPW_DTYPE_BF16, 3);
    watch_problem(&split.problem), watch(split.low, 200);
    spw_tensor tensor = split.problem.tensor;
    uint16_t copy[100];
    tensor.param_copy = copy, tensor.copy_dtype = SPW_DTYPE_BF16;
    INVALID(step(0, 1, &tensor, NULL), "tensors[0].param_low: is set, so param_copy and the shadow spans must be NULL");
    tensor = split.problem.tensor, tensor.param_low = (char *)split.low + 1;
    INVALID(step(0, 1, &tensor, NULL), "tensors[0].param_low: address");
    tensor = split.problem.tensor, tensor.param_low = (char *)tensor.param + 2;
    INVALID(step(0, 1, &tensor, NULL), "overlaps tensors[0].param");
    tensor = whole.tensor, tensor.param_low = split.low;
    REFUSED(step(0, 1, &tensor, NULL), SPW_ERR_UNSUPPORTED, "tensors[0]: param_low needs a bf16 param");
    unwatch_all();
    release(&whole), release(&split.problem), free(split.low);
}

// Low bits count as zero where the program has written since the last step: for 4,096 elements, in a step and without one.
static void writes_between_steps_are_seen(void) {
    enum { N = 3 * 4096 + 5, BLOCKS = 4, AT = 4096 + 17 };
    struct problem whole = make(N, SPW_DTYPE_F32, SPW_DTYPE_F32, SPW_DTYPE_BF16, SPW_DTYPE_NONE, 5);
    struct split plain = split_of(&whole, SPW_DTYPE_F32, SPW_DTYPE_BF16, 5);
    struct split summed = split_of(&whole, SPW_DTYPE_F32, SPW_DTYPE_BF16, 5);
    uint64_t sums[BLOCKS] = {0};
    summed.problem.tensor.low_sums = sums;
    for (uint64_t number = 1; number <= STEPS; number++) {
        CHECK_OK(step(0, number, &plain.problem.tensor, NULL));
        CHECK_OK(step(0, number, &summed.problem.tensor, NULL));
        CHECK(memcmp(plain.low, summed.low, 2 * N) == 0);
        ((uint16_t *)plain.problem.spans[0])[AT] ^= 0x8000;
        ((uint16_t *)summed.problem.spans[0])[AT] ^= 0x8000;
        memset(plain.low + 4096, 0, 2 * 4096);
        if (number % 2 == 0) {
            CHECK_OK(spw_low_bits_settle(&summed.problem.tensor, 1));
            CHECK(memcmp(plain.low, summed.low, 2 * N) == 0);
        }
    }
    CHECK(memcmp(plain.problem.spans[0], summed.problem.spans[0], 2 * N) == 0);

    spw_tensor tensor = summed.problem.tensor;
    watch_problem(&summed.problem), watch(summed.low, 2 * N), watch(sums, sizeof sums);
    tensor.low_sums = (uint64_t *)((char *)sums + 4);
    INVALID(step(0, 1, &tensor, NULL), "tensors[0].low_sums: address");
    INVALID(spw_low_bits_settle(&tensor, 1), "tensors[0].low_sums: address");
    tensor = summed.problem.tensor, tensor.low_sums = tensor.param;
    INVALID(step(0, 1, &tensor, NULL), "overlaps tensors[0].");
    INVALID(spw_low_bits_settle(&tensor, 1), "overlaps tensors[0].");
    tensor = summed.problem.tensor, tensor.low_sums = NULL;
    INVALID(spw_low_bits_settle(&tensor, 1), "tensors[0].low_sums: is NULL");
    tensor = summed.problem.tensor, tensor.param_low = NULL;
    INVALID(step(0, 1, &tensor, NULL), "tensors[0].low_sums: is set, but param_low is NULL");
    INVALID(spw_low_bits_settle(&tensor, 1), "tensors[0].param_low: is NULL");
    tensor = summed.problem.tensor, tensor.param_dtype = SPW_DTYPE_F16;
    INVALID(spw_low_bits_settle(&tensor, 1), "tensors[0].param_dtype: is not SPW_DTYPE_BF16");
    INVALID(spw_low_bits_settle(NULL, 1), "tensors: is NULL");
    CHECK_OK(spw_low_bits_settle(NULL, 0));
    unwatch_all();
    release(&whole), release(&plain.problem), release(&summed.problem), free(plain.low), free(summed.low);
}

int main(void) {
    const uint64_t sizes[] = {1, 17, 4097, LARGE};
    for (int i = 0; i < 4; i++) {
        for (int optimizer = 0; optimizer < 4; optimizer++) {
            for (int grad = 0; grad < 2; grad++) {
                const uint32_t grads[] = {SPW_DTYPE_F32, SPW_DTYPE_BF16};
                steps_have_the_bits_of_an_f32_param(optimizer, SPW_DTYPE_F32, grads[grad], sizes[i]);
                steps_have_the_bits_of_an_f32_param(optimizer, SPW_DTYPE_BF16, grads[grad], sizes[i]);
            }
        }
        steps_have_the_bits_of_an_f32_param(4, SPW_DTYPE_BF16, SPW_DTYPE_BF16, sizes[i]);
    }
    wrong_uses_are_refused();
    writes_between_steps_are_seen();
    return 0;
}
