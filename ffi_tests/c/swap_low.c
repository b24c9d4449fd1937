// With SPW_SWAP_FLAG_LOW_BITS a step of parts writes the caller's parameters with the bits of spw_adam_step on tensors with
// param_low, and of f32 tensors without. A tier stores 16 low bits of each. Skips, repetitions and refusals change nothing else.

#include "check.h"

enum { N = 10000, FLAT = 3000, BLOCKS = 3, STEPS = 4 };
// A bf16 parameter of N elements lies in two subgroups, cut at a block of its sums. An f32 parameter follows.
static const uint64_t ELEMENTS[2] = {8192, N - 8192 + FLAT + 240}, FIRST = N - 8192 + 240;

// What a tier and memory have of the parameters.
struct side {
    struct problem bf16, f32;
    uint64_t sums[BLOCKS];
};

static struct side new_side(uint32_t state) {
    struct side side = {make(N, SPW_DTYPE_BF16, state, SPW_DTYPE_BF16, SPW_DTYPE_NONE, 1),
                        make(FLAT, SPW_DTYPE_F32, state, SPW_DTYPE_BF16, SPW_DTYPE_NONE, 2),
                        {0}};
    for (int s = 2; s < 4; s++) memset(side.bf16.spans[s], 0, side.bf16.bytes[s]), memset(side.f32.spans[s], 0, side.f32.bytes[s]);
    return side;
}

static void next_grads(struct side *side, uint64_t seed) {
    fill(side->bf16.spans[1], SPW_DTYPE_BF16, N, seed, 0), fill(side->f32.spans[1], SPW_DTYPE_BF16, FLAT, seed + 1, 0);
}

static spw_swap *open_swap(spw_tier *tier, uint32_t flags) {
    spw_swap_options options = {.struct_size = sizeof options, .elements = ELEMENTS, .subgroups = 2};
    options.flags = SPW_SWAP_FLAG_NO_LOCK + SPW_SWAP_FLAG_LOW_BITS + flags, options.host_memory = 1 << 20;
    spw_swap *swap = NULL;
    CHECK_OK(spw_swap_open(tier, &options, &swap));
    const float *states[6] = {NULL};
    CHECK_OK(spw_swap_fill(swap, states));
    return swap;
}

// The three parts. `out`: receives the new parameters in place of the old ones, bf16 and f32; NULL: the step is in place.
static void make_parts(struct side *side, uint32_t state, spw_tensor parts[3], void *const out[2]) {
    for (int i = 0; i < 3; i++) {
        struct problem *whole = i < 2 ? &side->bf16 : &side->f32;
        const uint64_t start = i == 1 ? 8192 : 0;
        const uint32_t dtype = i < 2 ? SPW_DTYPE_BF16 : SPW_DTYPE_F32;
        spw_tensor *part = &parts[i];
        *part = (spw_tensor){.struct_size = sizeof *part, .state_dtype = state, .grad_dtype = SPW_DTYPE_BF16};
        part->n = i == 0 ? 8192 : i == 1 ? N - 8192 : FLAT;
        part->grad = (char *)whole->spans[1] + 2 * start;
        part->param_dtype = part->copy_dtype = dtype;
        part->param_copy = (char *)(out == NULL ? whole->spans[0] : out[i == 2]) + start * width(dtype);
        part->param = out == NULL ? NULL : (char *)whole->spans[0] + start * width(dtype);
        part->low_sums = i == 2 ? NULL : side->sums + start / 4096;
    }
}

static const uint64_t SUBGROUPS[3] = {0, 1, 1};
static uint64_t firsts[3];

static spw_status step_parts(spw_swap *swap, const spw_adam_options *adam, const spw_tensor *parts) {
    return spw_swap_adam_step_parts(swap, adam, parts, SUBGROUPS, firsts, 3);
}

// The same step in memory.
static void step_in_memory(struct side *side, const spw_adam_options *adam, uint16_t *low) {
    side->bf16.tensor.param_low = low, side->bf16.tensor.low_sums = side->sums;
    CHECK_OK(spw_adam_step(adam, &side->bf16.tensor, 1, NULL));
    CHECK_OK(spw_adam_step(adam, &side->f32.tensor, 1, NULL));
}

static void check_same(spw_swap *swap, struct side *memory, struct side *tiered, const uint16_t *low) {
    static float read[3][8192];
    CHECK(memcmp(memory->bf16.spans[0], tiered->bf16.spans[0], 2 * N) == 0);
    CHECK(memcmp(memory->f32.spans[0], tiered->f32.spans[0], 4 * FLAT) == 0);
    CHECK(memcmp(memory->sums, tiered->sums, sizeof memory->sums) == 0);
    for (uint64_t subgroup = 0; subgroup < 2; subgroup++) {
        CHECK_OK(spw_swap_read(swap, subgroup, NULL, read[0], read[1], read[2]));
        const uint64_t start = 8192 * subgroup, count = subgroup == 0 ? 8192 : N - 8192;
        for (uint64_t i = 0; i < count; i++) CHECK(read[0][i] == (float)low[start + i]);
        if (memory->bf16.tensor.state_dtype != SPW_DTYPE_F32) continue;
        for (int s = 1; s < 3; s++) CHECK(memcmp(read[s], (float *)memory->bf16.spans[s + 1] + start, 4 * count) == 0);
        if (subgroup == 1) CHECK(memcmp(read[1] + FIRST, memory->f32.spans[2], 4 * FLAT) == 0);
    }
}

static spw_adam_options options_of(uint64_t step) {
    spw_adam_options adam = adam_options();
    adam.step = step;
    return adam;
}

static void steps_have_the_bits_of_memory(spw_tier *tier, uint32_t state, uint32_t flags) {
    spw_swap *swap = open_swap(tier, flags);
    struct side memory = new_side(state), tiered = new_side(state);
    uint16_t *low = calloc(N, 2);
    for (uint64_t number = 1; number <= STEPS; number++) {
        spw_adam_options adam = options_of(number);
        spw_tensor parts[3];
        next_grads(&memory, number), next_grads(&tiered, number);
        // A write of the program makes the low bits of a block zero.
        if (number == 3) ((uint16_t *)memory.bf16.spans[0])[9000] ^= 1, ((uint16_t *)tiered.bf16.spans[0])[9000] ^= 1;
        make_parts(&tiered, state, parts, NULL);
        CHECK_OK(step_parts(swap, &adam, parts));
        step_in_memory(&memory, &adam, low);
        check_same(swap, &memory, &tiered, low);
    }
    CHECK_OK(spw_swap_close(swap));
    CHECK_OK(spw_tier_rollback(tier));
    release(&memory.bf16), release(&memory.f32), release(&tiered.bf16), release(&tiered.f32), free(low);
}

// A step beside the caller leaves the parameters and writes others; it is repeated, or skipped.
static void speculative_steps_are_repeated_and_skipped(spw_tier *tier) {
    spw_swap *swap = open_swap(tier, 0);
    struct side memory = new_side(SPW_DTYPE_F32), tiered = new_side(SPW_DTYPE_F32);
    uint16_t *low = calloc(N, 2);
    void *const out[2] = {malloc(2 * N), malloc(4 * FLAT)};
    for (uint64_t number = 1; number <= 6; number++) {
        spw_adam_options adam = options_of(number);
        spw_tensor parts[3];
        uint64_t before[BLOCKS];
        const uint32_t verdict = number % 3 == 1   ? SPW_SPEC_VERDICT_COMMIT
                                 : number % 3 == 2 ? SPW_SPEC_VERDICT_SKIP
                                                   : SPW_SPEC_VERDICT_REDO;
        next_grads(&memory, number), next_grads(&tiered, number);
        memcpy(before, tiered.sums, sizeof before);
        make_parts(&tiered, SPW_DTYPE_F32, parts, out);
        CHECK_OK(spw_swap_begin(swap, &adam, SPW_SWAP_BEGIN_FLAG_SPECULATIVE));
        parts[0].param = NULL;
        INVALID(spw_swap_submit(swap, 0, parts, firsts, 1), "must name the weights of the step before");
        make_parts(&tiered, SPW_DTYPE_F32, parts, out);
        CHECK_OK(spw_swap_submit(swap, 0, parts, firsts, 1));
        CHECK_OK(spw_swap_submit(swap, 1, parts + 1, firsts + 1, 2));
        CHECK_OK(spw_swap_verdict(swap, verdict, 0.125));
        CHECK_OK(spw_swap_finish(swap, -1, NULL));
        if (verdict == SPW_SPEC_VERDICT_SKIP) {
            memcpy(tiered.sums, before, sizeof before);
        } else {
            memcpy(tiered.bf16.spans[0], out[0], 2 * N), memcpy(tiered.f32.spans[0], out[1], 4 * FLAT);
            adam.grad_scale = verdict == SPW_SPEC_VERDICT_REDO ? 0.125 : adam.grad_scale;
            step_in_memory(&memory, &adam, low);
        }
        check_same(swap, &memory, &tiered, low);
    }
    CHECK_OK(spw_swap_close(swap));
    CHECK_OK(spw_tier_rollback(tier));
    release(&memory.bf16), release(&memory.f32), release(&tiered.bf16), release(&tiered.f32);
    free(low), free(out[0]), free(out[1]);
}

static void wrong_uses_are_refused(spw_tier *tier) {
    spw_swap_options both = {.struct_size = sizeof both, .elements = ELEMENTS, .subgroups = 2, .host_memory = 1 << 20};
    spw_swap *swap = NULL;
    both.flags = SPW_SWAP_FLAG_LOW_BITS + SPW_SWAP_FLAG_SPLIT_MASTER;
    INVALID(spw_swap_open(tier, &both, &swap), "set one of them");
    swap = open_swap(tier, 0);
    struct side side = new_side(SPW_DTYPE_F32);
    const spw_adam_options adam = options_of(1);
    uint16_t low[1];
    static const char *const words[] = {
        "tensors[0].param_copy: must not be NULL, and copy_dtype", "tensors[0].param_copy: must not be NULL, and copy_dtype",
        "tensors[1].param_dtype: must be copy_dtype", "tensors[2].low_sums: is set, but the parameter is f32",
        "tensors[0].param_low: must be NULL", "tensors[1].low_sums: overlaps tensors[0].low_sums",
        "tensors[0].grad: is f16, but must be f32 or bf16"};
    for (int wrong = 0; wrong < 7; wrong++) {
        spw_tensor parts[3];
        make_parts(&side, SPW_DTYPE_F32, parts, NULL);
        if (wrong == 0) parts[0].param_copy = NULL;
        if (wrong == 1) parts[0].copy_dtype = parts[0].param_dtype = SPW_DTYPE_F16;
        if (wrong == 2) parts[1].param_dtype = SPW_DTYPE_F32;
        if (wrong == 3) parts[2].low_sums = side.sums;
        if (wrong == 4) parts[0].param_low = low;
        if (wrong == 5) parts[1].low_sums = side.sums + 1;
        if (wrong == 6) parts[0].grad_dtype = SPW_DTYPE_F16;
        INVALID(step_parts(swap, &adam, parts), words[wrong]);
    }
    CHECK_OK(spw_swap_close(swap));
    CHECK_OK(spw_tier_rollback(tier));
    release(&side.bf16), release(&side.f32);
}

int main(void) {
    spw_tier_path path = {.struct_size = sizeof path, .kind = SPW_TIER_PATH_KIND_MEMORY};
    const spw_tier_options options = {.struct_size = sizeof options, .job = "low", .paths = &path, .path_count = 1};
    spw_tier *tier = NULL;
    CHECK_OK(spw_tier_open(&options, &tier));
    firsts[2] = FIRST;
    steps_have_the_bits_of_memory(tier, SPW_DTYPE_F32, 0);
    steps_have_the_bits_of_memory(tier, SPW_DTYPE_BF16, SPW_SWAP_FLAG_BF16_MOMENTS);
    speculative_steps_are_repeated_and_skipped(tier);
    wrong_uses_are_refused(tier);
    CHECK_OK(spw_tier_close(tier, -1));
    return 0;
}
