// With SPW_SWAP_FLAG_SPLIT_MASTER the tier holds ten bytes per parameter. A step gives the bits of spw_adam_step in
// memory if the caller passes the bf16 weights that belong to the state. Other weights cause an error, also after a
// rollback and a new open.

#include "check.h"

#include <sys/stat.h>
#include <unistd.h>

enum { SUBGROUPS = 6, STEPS = 5, FOR_EVER = -1 };
static const uint64_t SIZES[SUBGROUPS] = {5000, 0, 1, 12345, 70000, 33333};

static char directories[2][4200];
static struct problem plain[SUBGROUPS];
// Two sets of weights: the set that belongs to the state, and the set that the next step publishes.
static uint16_t *weights[2][SUBGROUPS];
static int current;

static spw_tier *open_tier(uint32_t mode) {
    spw_tier_path paths[2];
    for (int i = 0; i < 2; i++) {
        paths[i] = (spw_tier_path){.struct_size = sizeof *paths, .directory = directories[i]};
    }
    const spw_tier_options options = {.struct_size = sizeof options, .mode = mode, .job = "c-split", .paths = paths,
                                      .path_count = 2, .block_bytes = 65536};
    spw_tier *tier = NULL;
    CHECK_OK(spw_tier_open(&options, &tier));
    return tier;
}

static spw_swap_options settings(uint32_t flags) {
    spw_swap_options options = {.struct_size = sizeof options, .elements = SIZES, .subgroups = SUBGROUPS};
    options.flags = SPW_SWAP_FLAG_NO_LOCK | flags;
    options.host_memory = 4 * 1000000;
    return options;
}

static spw_swap *open_swap(spw_tier *tier) {
    const spw_swap_options options = settings(SPW_SWAP_FLAG_SPLIT_MASTER);
    spw_swap_budget whole = {.struct_size = sizeof whole}, split = whole;
    const spw_swap_options twelve = settings(0);
    CHECK_OK(spw_swap_plan_budget(&twelve, 2, &whole));
    CHECK_OK(spw_swap_plan_budget(&options, 2, &split));
    CHECK(split.state_bytes * 100 < whole.state_bytes * 88 && split.buffers < SUBGROUPS);
    CHECK(split.buffer_bytes * 100 < whole.buffer_bytes * 88 && split.masters == 3 && whole.masters == 0);
    CHECK(split.host_bytes == split.buffers * split.buffer_bytes + split.masters * split.master_bytes);
    CHECK(split.working_bytes == 5 * split.buffer_bytes + 3 * split.master_bytes);
    spw_swap *swap = NULL;
    CHECK_OK(spw_swap_open(tier, &options, &swap));
    return swap;
}

static void start(spw_swap *swap) {
    const float *states[3 * SUBGROUPS];
    for (int i = 0; i < SUBGROUPS; i++) {
        plain[i] = make(SIZES[i], SPW_DTYPE_F32, SPW_DTYPE_F32, SPW_DTYPE_BF16, SPW_DTYPE_BF16, 7 + (uint64_t)i);
        for (int set = 0; set < 2; set++) weights[set][i] = calloc((size_t)SIZES[i] + 1, 2);
        // The bf16 weights of a new model, and their master weights.
        for (uint64_t n = 0; n < SIZES[i]; n++) {
            uint32_t *master = (uint32_t *)plain[i].spans[0] + n;
            *master &= 0xffff0000u;
            weights[current][i][n] = (uint16_t)(*master >> 16);
        }
        states[3 * i] = plain[i].spans[0];
        states[3 * i + 1] = plain[i].spans[2];
        states[3 * i + 2] = plain[i].spans[3];
    }
    CHECK_OK(spw_swap_fill(swap, states));
}

// In place if `from` is `to`, else from one set into the other.
static spw_status step(spw_swap *swap, uint64_t number, int from, int to) {
    spw_adam_options options = adam_options();
    options.step = number;
    spw_tensor tensors[SUBGROUPS];
    for (int i = 0; i < SUBGROUPS; i++) {
        fill(plain[i].spans[1], SPW_DTYPE_BF16, SIZES[i], number * 31 + (uint64_t)i, 0);
        tensors[i] = plain[i].tensor;
        tensors[i].exp_avg = tensors[i].exp_avg_sq = NULL;
        tensors[i].param_dtype = from == to ? SPW_DTYPE_F32 : SPW_DTYPE_BF16;
        tensors[i].param = from == to ? NULL : weights[from][i];
        tensors[i].param_copy = weights[to][i];
    }
    return spw_swap_adam_step(swap, &options, tensors, SUBGROUPS, NULL);
}

static void step_plain(uint64_t number) {
    spw_adam_options options = adam_options();
    options.step = number;
    spw_tensor tensors[SUBGROUPS];
    for (int i = 0; i < SUBGROUPS; i++) tensors[i] = plain[i].tensor;
    CHECK_OK(spw_adam_step(&options, tensors, SUBGROUPS, NULL));
}

static void check_same(spw_swap *swap) {
    for (int i = 0; i < SUBGROUPS; i++) {
        float *got[3];
        for (int s = 0; s < 3; s++) got[s] = calloc((size_t)SIZES[i] + 1, sizeof(float));
        CHECK_OK(spw_swap_read(swap, (uint64_t)i, weights[current][i], got[0], got[1], got[2]));
        for (int s = 0; s < 3; s++) {
            CHECK(SIZES[i] == 0 || memcmp(got[s], plain[i].spans[s == 0 ? 0 : s + 1], (size_t)SIZES[i] * 4) == 0);
            free(got[s]);
        }
    }
}

int main(void) {
    char here[4096], clean[16384];
    CHECK(getcwd(here, sizeof here) != NULL);
    for (int i = 0; i < 2; i++) snprintf(directories[i], sizeof directories[i], "%s/path-%d", here, i);
    snprintf(clean, sizeof clean, "rm -rf '%s' '%s'", directories[0], directories[1]);
    CHECK(system(clean) == 0);
    for (int i = 0; i < 2; i++) CHECK(mkdir(directories[i], 0700) == 0);

    spw_tier *tier = open_tier(SPW_TIER_MODE_CREATE);
    spw_swap *swap = open_swap(tier);
    start(swap);
    CHECK_OK(spw_swap_commit(swap, 0, NULL, 0));
    for (uint64_t number = 1; number <= STEPS; number++) {
        if (number % 2 == 0) {
            CHECK_OK(step(swap, number, current, current));
        } else {
            // After one rollback, the weights of the commit still exist for the next step.
            CHECK_OK(step(swap, number + 50, current, 1 - current));
            CHECK_OK(spw_swap_rollback(swap));
            check_same(swap);
            CHECK_OK(step(swap, number, current, 1 - current));
            current = 1 - current;
        }
        step_plain(number);
        check_same(swap);
        CHECK_OK(spw_swap_commit(swap, number, NULL, 0));
    }

    // Weights that were published and then rolled back are refused, and so are missing weights.
    CHECK_OK(step(swap, 60, current, 1 - current));
    CHECK_OK(spw_swap_rollback(swap));
    REFUSED(step(swap, 60, 1 - current, 1 - current), SPW_ERR_INVALID_ARGUMENT, "weights");
    REFUSED(spw_swap_commit(swap, 61, NULL, 0), SPW_ERR_BUSY, "roll back first");
    CHECK_OK(spw_swap_rollback(swap));
    CHECK_OK(spw_swap_close(swap));
    CHECK_OK(spw_tier_close(tier, FOR_EVER));

    tier = open_tier(SPW_TIER_MODE_RESUME);
    const spw_swap_options whole = settings(0);
    INVALID(spw_swap_open(tier, &whole, &swap), "split");
    swap = open_swap(tier);
    check_same(swap);
    static float param[70000];
    INVALID(spw_swap_read(swap, 4, NULL, param, NULL, NULL), "split");
    CHECK_OK(spw_swap_read(swap, 4, NULL, NULL, param, NULL));
    INVALID(spw_swap_read(NULL, 4, weights[current][4], param, NULL, NULL), "swap");
    const void *odd = (const char *)weights[current][4] + 1;
    INVALID(spw_swap_read(swap, 4, odd, param, NULL, NULL), "is not aligned to 2 bytes (bf16)");
    weights[current][4][69999] ^= 1;
    INVALID(spw_swap_read(swap, 4, weights[current][4], param, NULL, NULL), "weights");
    weights[current][4][69999] ^= 1;
    spw_tensor tensors[SUBGROUPS];
    for (int i = 0; i < SUBGROUPS; i++) {
        tensors[i] = plain[i].tensor;
        tensors[i].param = tensors[i].exp_avg = tensors[i].exp_avg_sq = tensors[i].param_copy = NULL;
    }
    const spw_adam_options options = adam_options();
    INVALID(spw_swap_adam_step(swap, &options, tensors, SUBGROUPS, NULL), "tensors[0].param_copy");
    CHECK_OK(step(swap, STEPS + 1, current, current));
    step_plain(STEPS + 1);
    check_same(swap);
    CHECK_OK(spw_swap_close(swap));
    CHECK_OK(spw_tier_destroy(tier));
    for (int i = 0; i < SUBGROUPS; i++) {
        release(&plain[i]);
        for (int set = 0; set < 2; set++) free(weights[set][i]);
    }
    return 0;
}
