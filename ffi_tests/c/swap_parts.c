// spw_swap_adam_step_parts steps parts of many tensors in the subgroups of a tier with the bits of spw_adam_step in
// memory. Elements without a part do not change. Every wrong argument is refused before a step.

#include "check.h"

enum { TENSORS = 5, SUBGROUPS = 3, STEPS = 5 };
// The tensors lie one after another; each subgroup has 5000 elements of them, and the last one the rest.
static const uint64_t SIZES[TENSORS] = {3000, 7000, 1, 12, 2500}, MOST = 5000, ELEMENTS[SUBGROUPS] = {5000, 5000, 2513};
static const uint32_t COPIES[TENSORS] = {SPW_DTYPE_F32, SPW_DTYPE_BF16, SPW_DTYPE_F32, SPW_DTYPE_F16, SPW_DTYPE_NONE};

static struct problem plain[TENSORS];
static void *copies[TENSORS];
static spw_tensor parts[TENSORS + SUBGROUPS];
static uint64_t subgroups[TENSORS + SUBGROUPS], firsts[TENSORS + SUBGROUPS], count;
static spw_adam_options own;

static spw_tier *open_tier(void) {
    spw_tier_path path = {.struct_size = sizeof path, .kind = SPW_TIER_PATH_KIND_MEMORY};
    const spw_tier_options options = {.struct_size = sizeof options, .job = "parts", .paths = &path, .path_count = 1};
    spw_tier *tier = NULL;
    CHECK_OK(spw_tier_open(&options, &tier));
    return tier;
}

static spw_swap *open_swap(spw_tier *tier, uint32_t flags) {
    spw_swap_options options = {.struct_size = sizeof options, .elements = ELEMENTS, .subgroups = SUBGROUPS};
    options.flags = SPW_SWAP_FLAG_NO_LOCK + flags, options.host_memory = 1 << 20;
    spw_swap *swap = NULL;
    CHECK_OK(spw_swap_open(tier, &options, &swap));
    return swap;
}

// A part for every piece of a tensor in a subgroup. Tensor 1 has options of its own.
static void make_parts(void) {
    uint64_t begin = 0;
    count = 0;
    for (int i = 0; i < TENSORS; i++) {
        for (uint64_t at = begin; at < begin + SIZES[i];) {
            const uint64_t subgroup = at / MOST, end = (subgroup + 1) * MOST, start = at - begin;
            const uint64_t n = (end < begin + SIZES[i] ? end : begin + SIZES[i]) - at;
            spw_tensor *part = &parts[count];
            *part = plain[i].tensor;
            part->n = n, part->param = part->exp_avg = part->exp_avg_sq = NULL;
            part->grad = (const char *)part->grad + start * 4;
            part->copy_dtype = COPIES[i];
            part->param_copy = COPIES[i] == SPW_DTYPE_NONE ? NULL : (char *)copies[i] + start * width(COPIES[i]);
            part->options = i == 1 ? &own : NULL;
            subgroups[count] = subgroup, firsts[count] = at % MOST, count++;
            at += n;
        }
        begin += SIZES[i];
    }
}

static void start(spw_swap *swap) {
    float *flat[3];
    for (int s = 0; s < 3; s++) flat[s] = calloc(SUBGROUPS * MOST, 4);
    uint64_t begin = 0;
    for (int i = 0; i < TENSORS; i++) {
        plain[i] = make(SIZES[i], SPW_DTYPE_F32, SPW_DTYPE_F32, SPW_DTYPE_F32, SPW_DTYPE_NONE, (uint64_t)i);
        plain[i].tensor.options = i == 1 ? &own : NULL;
        if (COPIES[i] != SPW_DTYPE_NONE) copies[i] = calloc(SIZES[i], width(COPIES[i]));
        for (int s = 0; s < 3; s++) memcpy(flat[s] + begin, plain[i].spans[s == 0 ? 0 : s + 1], SIZES[i] * 4);
        begin += SIZES[i];
    }
    const float *states[3 * SUBGROUPS];
    for (int i = 0; i < 3 * SUBGROUPS; i++) states[i] = flat[i % 3] + (uint64_t)(i / 3) * MOST;
    CHECK_OK(spw_swap_fill(swap, states));
    for (int s = 0; s < 3; s++) free(flat[s]);
    make_parts();
}

static void check_same(spw_swap *swap) {
    float *flat[3];
    for (int s = 0; s < 3; s++) flat[s] = calloc(SUBGROUPS * MOST, 4);
    for (uint64_t i = 0; i < SUBGROUPS; i++) {
        CHECK_OK(spw_swap_read(swap, i, NULL, flat[0] + i * MOST, flat[1] + i * MOST, flat[2] + i * MOST));
    }
    uint64_t begin = 0;
    for (int i = 0; i < TENSORS; i++) {
        for (int s = 0; s < 3; s++) {
            CHECK(memcmp(flat[s] + begin, plain[i].spans[s == 0 ? 0 : s + 1], SIZES[i] * 4) == 0);
        }
        begin += SIZES[i];
    }
    for (int s = 0; s < 3; s++) free(flat[s]);
}

static void steps_have_the_bits_of_steps_in_memory(spw_swap *swap) {
    for (uint64_t step = 1; step <= STEPS; step++) {
        spw_adam_options options = adam_options();
        options.step = step, own = options, own.lr = 0.5, own.step = step + 9;
        for (int i = 0; i < TENSORS; i++) {
            // In step 3, tensor 4 has no part.
            if (step == 3 && i == 4) continue;
            struct problem copy = plain[i];
            copy.tensor.copy_dtype = COPIES[i] == SPW_DTYPE_F32 ? SPW_DTYPE_NONE : COPIES[i];
            void *expected = calloc(SIZES[i], 4);
            copy.tensor.param_copy = copy.tensor.copy_dtype == SPW_DTYPE_NONE ? NULL : expected;
            CHECK_OK(spw_adam_step(&options, &copy.tensor, 1, NULL));
            if (COPIES[i] == SPW_DTYPE_F32) memcpy(expected, plain[i].spans[0], SIZES[i] * 4);
            plain[i].tensor.param_copy = expected;
        }
        CHECK_OK(spw_swap_adam_step_parts(swap, &options, parts, subgroups, firsts, step == 3 ? count - 1 : count));
        for (int i = 0; i < TENSORS; i++) {
            if (step == 3 && i == 4) continue;
            CHECK(copies[i] == NULL || memcmp(copies[i], plain[i].tensor.param_copy, SIZES[i] * width(COPIES[i])) == 0);
            free(plain[i].tensor.param_copy);
            plain[i].tensor.param_copy = NULL;
        }
        check_same(swap);
        for (int i = 0; i < TENSORS; i++) fill(plain[i].spans[1], SPW_DTYPE_F32, SIZES[i], step * 31 + (uint64_t)i, 0);
    }
    CHECK_OK(spw_swap_commit(swap, STEPS, NULL, 0));
    CHECK_OK(spw_swap_adam_step_parts(swap, &own, NULL, NULL, NULL, 0));
    check_same(swap);
}

static void wrong_arguments_are_refused(spw_swap *swap) {
    const spw_adam_options options = adam_options();
    for (int i = 0; i < TENSORS; i++) {
        if (copies[i] != NULL) watch(copies[i], SIZES[i] * width(COPIES[i]));
    }
#define STEP() spw_swap_adam_step_parts(swap, &options, parts, subgroups, firsts, count)
    INVALID(spw_swap_adam_step_parts(NULL, &options, parts, subgroups, firsts, count), "swap");
    INVALID(spw_swap_adam_step_parts(swap, NULL, parts, subgroups, firsts, count), "options");
    INVALID(spw_swap_adam_step_parts(swap, &options, NULL, subgroups, firsts, count), "tensors");
    INVALID(spw_swap_adam_step_parts(swap, &options, parts, NULL, firsts, count), "subgroups: is NULL");
    INVALID(spw_swap_adam_step_parts(swap, &options, parts, subgroups, NULL, count), "firsts: is NULL");
    subgroups[count - 1] = SUBGROUPS;
    INVALID(STEP(), "must be less than the 3 subgroups");
    subgroups[count - 1] = 2, firsts[count - 1] += 1;
    INVALID(STEP(), "exceeds the 2513 elements of subgroup 2");
    firsts[count - 1] = UINT64_MAX;
    INVALID(STEP(), "exceeds the 2513 elements");
    make_parts();
    firsts[1] -= 1;
    INVALID(STEP(), "firsts[1]: must not be below the end of the part before");
    make_parts();
    subgroups[0] = 1, firsts[0] = 0;
    INVALID(STEP(), "firsts[1]: must not be below");
    make_parts();
    parts[2].param = copies[0];
    INVALID(STEP(), "tensors[2].param: must be NULL");
    make_parts();
    parts[1].grad = NULL;
    INVALID(STEP(), "tensors[1].grad: is NULL");
    make_parts();
    parts[1].copy_dtype = 9;
    INVALID(STEP(), "tensors[1].copy_dtype");
    make_parts();
    parts[2].param_copy = parts[0].param_copy;
    INVALID(STEP(), "overlaps");
    make_parts();
    own.lr = -1;
    INVALID(STEP(), "lr");
    own.lr = 1;
    unwatch_all();
    check_same(swap);
}

int main(void) {
    spw_tier *tier = open_tier();
    spw_swap *swap = open_swap(tier, 0);
    start(swap);
    steps_have_the_bits_of_steps_in_memory(swap);
    wrong_arguments_are_refused(swap);
    CHECK_OK(spw_swap_close(swap));
    CHECK_OK(spw_tier_destroy(tier));

    tier = open_tier(), swap = open_swap(tier, SPW_SWAP_FLAG_SPLIT_MASTER);
    const spw_adam_options options = adam_options();
    REFUSED(spw_swap_adam_step_parts(swap, &options, parts, subgroups, firsts, count), SPW_ERR_UNSUPPORTED, "split");
    CHECK_OK(spw_swap_close(swap));
    CHECK_OK(spw_tier_destroy(tier));
    for (int i = 0; i < TENSORS; i++) release(&plain[i]), free(copies[i]);
    return 0;
}
