// State on a tier is stepped with the bits of spw_adam_step in memory, through fewer buffers than subgroups. The state
// survives a commit, a rollback, an open in a new process and a full disk. Every wrong argument is refused.

#include "check.h"

#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

enum { SUBGROUPS = 8, STEPS = 6, FOR_EVER = -1, SMALL_DISK = 1200 << 10, LIMIT = 8 << 20 };
static const uint64_t SIZES[SUBGROUPS] = {5000, 0, 1, 12345, 70000, 4096, 3, 33333};
static const uint32_t GRADS[3] = {SPW_DTYPE_BF16, SPW_DTYPE_F16, SPW_DTYPE_F32};
static const uint32_t COPIES[3] = {SPW_DTYPE_BF16, SPW_DTYPE_NONE, SPW_DTYPE_F16};

static char directories[2][4200];
// The same steps, in memory.
static struct problem plain[SUBGROUPS];
// The inputs of the tiered update: gradients and copies.
static spw_tensor tensors[SUBGROUPS];
static void *copies[SUBGROUPS];

static spw_tier *open_tier(uint32_t mode, uint64_t limit) {
    spw_tier_path paths[2];
    for (int i = 0; i < 2; i++) {
        paths[i] = (spw_tier_path){.struct_size = sizeof *paths, .directory = directories[i], .limit_bytes = limit};
    }
    const spw_tier_options options = {.struct_size = sizeof options, .mode = mode, .job = "c-swap", .paths = paths,
                                      .path_count = 2, .block_bytes = 65536};
    spw_tier *tier = NULL;
    CHECK_OK(spw_tier_open(&options, &tier));
    return tier;
}

static spw_swap_options settings(uint64_t buffers) {
    spw_swap_options options = {.struct_size = sizeof options, .elements = SIZES, .subgroups = SUBGROUPS};
    options.flags = SPW_SWAP_FLAG_NO_LOCK;
    options.host_memory = 1 << 30;
    spw_swap_budget budget = {.struct_size = sizeof budget};
    CHECK_OK(spw_swap_plan_budget(&options, 2, &budget));
    CHECK(budget.buffers == SUBGROUPS && budget.cached == SUBGROUPS && budget.step_bytes == 0);
    options.host_memory = buffers * budget.buffer_bytes + 17;
    return options;
}

static spw_swap *open_swap(spw_tier *tier, uint64_t buffers) {
    const spw_swap_options options = settings(buffers);
    spw_swap *swap = NULL;
    CHECK_OK(spw_swap_open(tier, &options, &swap));
    return swap;
}

// Starts a new run: states from a seed, in memory and, by fill_swap, on the tier.
static void start(uint64_t seed) {
    for (int i = 0; i < SUBGROUPS; i++) {
        release(&plain[i]);
        free(copies[i]);
        plain[i] = make(SIZES[i], SPW_DTYPE_F32, SPW_DTYPE_F32, GRADS[i % 3], COPIES[i % 3], seed + (uint64_t)i);
        tensors[i] = plain[i].tensor;
        tensors[i].param = tensors[i].exp_avg = tensors[i].exp_avg_sq = NULL;
        tensors[i].param_copy = copies[i] = plain[i].bytes[4] == 0 ? NULL : calloc(1, plain[i].bytes[4]);
    }
}

static void fill_swap(spw_swap *swap) {
    const float *states[3 * SUBGROUPS];
    for (int i = 0; i < SUBGROUPS; i++) {
        states[3 * i] = plain[i].spans[0];
        states[3 * i + 1] = plain[i].spans[2];
        states[3 * i + 2] = plain[i].spans[3];
    }
    CHECK_OK(spw_swap_fill(swap, states));
}

static void new_gradients(uint64_t step) {
    for (int i = 0; i < SUBGROUPS; i++) fill(plain[i].spans[1], GRADS[i % 3], SIZES[i], step * 977 + (uint64_t)i, 0);
}

static spw_adam_options at(uint64_t step) {
    spw_adam_options options = adam_options();
    options.step = step;
    return options;
}

static double step_plain(const spw_adam_options *options) {
    spw_tensor all[SUBGROUPS];
    for (int i = 0; i < SUBGROUPS; i++) all[i] = plain[i].tensor;
    spw_step_stats stats = step_stats();
    CHECK_OK(spw_adam_step(options, all, SUBGROUPS, &stats));
    return stats.sum_squares;
}

static double step_swap(spw_swap *swap, const spw_adam_options *options) {
    spw_step_stats stats = step_stats();
    CHECK_OK(spw_swap_adam_step(swap, options, tensors, SUBGROUPS, &stats));
    CHECK(stats.nonfinite == 0);
    return stats.sum_squares;
}

static void step_both(spw_swap *swap, uint64_t step) {
    const spw_adam_options options = at(step);
    new_gradients(step);
    const double plain_sum = step_plain(&options), swap_sum = step_swap(swap, &options);
    CHECK(memcmp(&plain_sum, &swap_sum, sizeof plain_sum) == 0);
    for (int i = 0; i < SUBGROUPS; i++) {
        CHECK(copies[i] == NULL || memcmp(copies[i], plain[i].spans[4], plain[i].bytes[4]) == 0);
    }
}

static void check_same(spw_swap *swap) {
    for (int i = 0; i < SUBGROUPS; i++) {
        float *got[3];
        for (int s = 0; s < 3; s++) got[s] = calloc((size_t)SIZES[i] + 1, sizeof(float));
        CHECK_OK(spw_swap_read(swap, (uint64_t)i, NULL, got[0], got[1], got[2]));
        for (int s = 0; s < 3; s++) {
            CHECK(SIZES[i] == 0 || memcmp(got[s], plain[i].spans[s == 0 ? 0 : s + 1], (size_t)SIZES[i] * 4) == 0);
            free(got[s]);
        }
    }
}

// Two subgroups stay in memory; six stream through it.
static void steps_have_the_bits_of_steps_in_memory(void) {
    start(1);
    spw_tier *tier = open_tier(SPW_TIER_MODE_CREATE, 0);
    spw_swap *swap = open_swap(tier, 7);
    spw_swap_budget budget = {.struct_size = sizeof budget};
    const spw_swap_options opened = settings(7);
    CHECK_OK(spw_swap_plan_budget(&opened, 2, &budget));
    CHECK(budget.buffers == 7 && budget.cached == 2 && budget.host_bytes == 7 * budget.buffer_bytes);
    CHECK(budget.step_bytes < budget.state_bytes && budget.state_bytes >= 12 * 124778);
    fill_swap(swap);
    check_same(swap);
    for (uint64_t step = 1; step <= STEPS; step++) step_both(swap, step);
    check_same(swap);
    CHECK_OK(spw_swap_commit(swap, STEPS, "six", 4));
    spw_swap_stats stats = {.struct_size = sizeof stats};
    CHECK_OK(spw_swap_get_stats(swap, &stats));
    CHECK(stats.rounds == STEPS + 1 && stats.hits == 2 * STEPS && stats.fetched == 6 * STEPS);
    CHECK(stats.flushed == 6 * (STEPS + 1) + 2 && stats.exposed_seconds >= 0);
    // Only one part of a state.
    float *param = calloc((size_t)SIZES[4], sizeof *param);
    CHECK_OK(spw_swap_read(swap, 4, NULL, param, NULL, NULL));
    CHECK(memcmp(param, plain[4].spans[0], (size_t)SIZES[4] * 4) == 0);
    free(param);
    // Uncommitted steps are lost on close.
    const spw_adam_options options = at(99);
    step_swap(swap, &options);
    CHECK_OK(spw_swap_close(swap));
    CHECK_OK(spw_tier_close(tier, FOR_EVER));
}

static void a_new_open_goes_on_at_the_commit(void) {
    spw_tier *tier = open_tier(SPW_TIER_MODE_RESUME, 0);
    spw_tier_opened_info found = {.struct_size = sizeof found};
    char note[4] = "";
    CHECK_OK(spw_tier_get_opened(tier, &found, note, sizeof note));
    CHECK(found.step == STEPS && strcmp(note, "six") == 0);
    spw_swap *swap = open_swap(tier, 3);
    check_same(swap);
    for (uint64_t step = STEPS + 1; step <= STEPS + 3; step++) step_both(swap, step);
    check_same(swap);
    CHECK_OK(spw_swap_close(swap));
    CHECK_OK(spw_tier_destroy(tier));
}

// Speculation: step with each gradient as it arrives. If the norm later passes the limit, roll back and step again with
// the clip coefficient. A step with a NaN is rolled back and skipped.
static void a_step_is_taken_back_and_done_again_clipped(void) {
    start(2);
    spw_tier *tier = open_tier(SPW_TIER_MODE_CREATE, 0);
    spw_swap *swap = open_swap(tier, 6);
    fill_swap(swap);
    CHECK_OK(spw_swap_commit(swap, 0, NULL, 0));
    int clipped = 0;
    for (uint64_t step = 1; step <= STEPS; step++) {
        spw_adam_options options = at(step);
        options.grad_scale = 1;
        new_gradients(step);
        const double limit = step % 2 == 0 ? 1e18 : 0.25;
        if (step_swap(swap, &options) > limit) {
            CHECK_OK(spw_swap_rollback(swap));
            if (step == 1) check_same(swap);
            options.grad_scale = 0.0173;
            step_swap(swap, &options);
            clipped++;
        }
        step_plain(&options);
        CHECK_OK(spw_swap_commit(swap, step, NULL, 0));
    }
    CHECK(clipped == STEPS / 2);
    check_same(swap);
    ((uint16_t *)plain[4].spans[1])[69999] = 0x7fff;
    ((uint32_t *)plain[5].spans[1])[7] = 0x7fc00000;
    const spw_adam_options options = at(STEPS + 1);
    spw_step_stats stats = step_stats();
    CHECK_OK(spw_swap_adam_step(swap, &options, tensors, SUBGROUPS, &stats));
    CHECK(stats.nonfinite == 1);
    CHECK_OK(spw_swap_rollback(swap));
    check_same(swap);
    CHECK_OK(spw_swap_close(swap));
    CHECK_OK(spw_tier_destroy(tier));
}

static void beside(spw_swap *swap, uint64_t step, uint32_t verdict) {
    spw_adam_options options = at(step);
    new_gradients(step);
    CHECK_OK(spw_swap_begin(swap, &options, SPW_SWAP_BEGIN_FLAG_SPECULATIVE | SPW_SWAP_BEGIN_FLAG_STATS));
    for (uint64_t i = 0; i < SUBGROUPS; i++) {
        const uint64_t subgroup = (3 * i + step) % SUBGROUPS;
        CHECK_OK(spw_swap_submit(swap, subgroup, &tensors[subgroup], NULL, 1));
    }
    REFUSED(spw_swap_finish(swap, FOR_EVER, NULL), SPW_ERR_ROUND_OPEN, "verdict");
    uint64_t named = 0;
    REFUSED(spw_swap_next_published(swap, 0, &named), SPW_ERR_TIMEOUT, "ask again");
    CHECK_OK(spw_swap_verdict(swap, verdict, 0.0173));
    if (step % 2 == 0) {
        for (int i = 0; i < SUBGROUPS && verdict != SPW_SPEC_VERDICT_SKIP; i++) {
            CHECK_OK(spw_swap_next_published(swap, FOR_EVER, &named));
        }
        REFUSED(spw_swap_next_published(swap, FOR_EVER, &named), SPW_ERR_NOT_FOUND, "finish it");
    }
    spw_step_stats stats = step_stats();
    CHECK_OK(spw_swap_finish(swap, FOR_EVER, &stats));
    if (verdict == SPW_SPEC_VERDICT_REDO) options.grad_scale = 0.0173;
    if (verdict != SPW_SPEC_VERDICT_SKIP) {
        const double sum = step_plain(&options);
        CHECK(memcmp(&sum, &stats.sum_squares, sizeof sum) == 0);
    }
    for (int i = 0; i < SUBGROUPS; i++) {
        CHECK(copies[i] == NULL || memcmp(copies[i], plain[i].spans[4], plain[i].bytes[4]) == 0);
    }
}

// Each verdict leaves the bits of the same steps in memory, in states and copies.
static void steps_beside_the_caller_have_the_bits_of_steps_in_memory(void) {
    start(6);
    spw_tier *tier = open_tier(SPW_TIER_MODE_CREATE, 0);
    spw_swap *swap = open_swap(tier, 5);
    fill_swap(swap);
    const spw_adam_options options = at(1);
    REFUSED(spw_swap_submit(swap, 0, &tensors[0], NULL, 1), SPW_ERR_NO_ROUND, "begin one first");
    REFUSED(spw_swap_verdict(swap, SPW_SPEC_VERDICT_SKIP, 0), SPW_ERR_NO_ROUND, "begin one first");
    REFUSED(spw_swap_finish(swap, 0, NULL), SPW_ERR_NO_ROUND, "begin one first");
    uint64_t named;
    REFUSED(spw_swap_next_published(swap, 0, &named), SPW_ERR_NO_ROUND, "begin one first");
    INVALID(spw_swap_next_published(swap, 0, NULL), "subgroup_out");
    INVALID(spw_swap_begin(NULL, &options, 0), "swap");
    INVALID(spw_swap_begin(swap, NULL, 0), "options");
    INVALID(spw_swap_begin(swap, &options, 8), "flags");
    step_both(swap, 1);
    CHECK_OK(spw_swap_begin(swap, &options, 0));
    REFUSED(spw_swap_begin(swap, &options, 0), SPW_ERR_ROUND_OPEN, "is open already");
    REFUSED(spw_swap_commit(swap, 1, NULL, 0), SPW_ERR_ROUND_OPEN, "is open already");
    REFUSED(spw_swap_verdict(swap, SPW_SPEC_VERDICT_SKIP, 0), SPW_ERR_ROUND_RESOLVED, "already");
    INVALID(spw_swap_verdict(swap, 3, 0), "verdict");
    INVALID(spw_swap_submit(swap, SUBGROUPS, &tensors[0], NULL, 1), "is 8");
    INVALID(spw_swap_submit(swap, 4, &tensors[3], NULL, 1), "count");
    const uint64_t firsts[2] = {0, 1};
    INVALID(spw_swap_submit(swap, 3, &tensors[3], &firsts[1], 1), "firsts[0]");
    CHECK_OK(spw_swap_submit(swap, 0, &tensors[0], firsts, 1));
    REFUSED(spw_swap_submit(swap, 0, &tensors[0], firsts, 1), SPW_ERR_BUCKET_SUBMITTED, "subgroup 0");
    REFUSED(spw_swap_finish(swap, 0, NULL), SPW_ERR_BUCKET_MISSING, "subgroup 1");
    // Only the gradient of subgroup 0 was read; there is no commit yet.
    CHECK_OK(spw_swap_close(swap));
    const spw_swap_options again = settings(5);
    REFUSED(spw_swap_open(tier, &again, &swap), SPW_ERR_BUSY, "roll the tier back first");
    CHECK_OK(spw_tier_rollback(tier));
    swap = open_swap(tier, 5);
    start(6);
    fill_swap(swap);
    step_both(swap, 1);
    for (uint64_t step = 2; step <= 3 * STEPS; step++) {
        beside(swap, step, (uint32_t)(step % 3));
        if (step % 4 == 0) CHECK_OK(spw_swap_commit(swap, step, NULL, 0));
    }
    check_same(swap);
    step_both(swap, 99);
    check_same(swap);
    CHECK_OK(spw_swap_close(swap));
    CHECK_OK(spw_tier_destroy(tier));
}

// Open refuses paths whose limits do not hold two slots. Paths that do hold them also pass the next open, which finds
// one slot used.
static void what_does_not_fit_is_said_and_loses_nothing(void) {
    start(3);
    spw_tier *tier = open_tier(SPW_TIER_MODE_CREATE, 700 << 10);
    spw_swap_options options = settings(4);
    spw_swap *swap = NULL;
    REFUSED(spw_swap_open(tier, &options, &swap), SPW_ERR_NO_SPACE, "limit_bytes");
    CHECK_OK(spw_tier_destroy(tier));

    // The planner counts every piece at the size of the largest one.
    tier = open_tier(SPW_TIER_MODE_CREATE, LIMIT);
    swap = open_swap(tier, 4);
    fill_swap(swap);
    CHECK_OK(spw_swap_commit(swap, 0, NULL, 0));
    CHECK_OK(spw_swap_close(swap));
    CHECK_OK(spw_tier_close(tier, FOR_EVER));
    tier = open_tier(SPW_TIER_MODE_RESUME, LIMIT);
    swap = open_swap(tier, 4);
    step_both(swap, 1);
    CHECK_OK(spw_swap_commit(swap, 1, NULL, 0));
    step_both(swap, 2);
    check_same(swap);
    CHECK_OK(spw_swap_close(swap));
    CHECK_OK(spw_tier_destroy(tier));
}

static int resize_disks(unsigned long flags, int bytes) {
    char size[64];
    snprintf(size, sizeof size, "size=%d,mode=0700", bytes);
    for (int i = 0; i < 2; i++) {
        if (mount("tmpfs", directories[i], "tmpfs", flags, size) != 0) return 0;
    }
    return 1;
}

static void a_full_disk_loses_nothing(void) {
    // Mounting needs root.
    if (!resize_disks(0, SMALL_DISK)) return;
    start(4);
    spw_tier *tier = open_tier(SPW_TIER_MODE_CREATE, 0);
    spw_swap *swap = open_swap(tier, 4);
    fill_swap(swap);
    CHECK_OK(spw_swap_commit(swap, 0, NULL, 0));
    new_gradients(1);
    spw_adam_options options = at(1);
    REFUSED(spw_swap_adam_step(swap, &options, tensors, SUBGROUPS, NULL), SPW_ERR_NO_SPACE, "bytes");
    REFUSED(spw_swap_adam_step(swap, &options, tensors, SUBGROUPS, NULL), SPW_ERR_BUSY, "roll back first");
    REFUSED(spw_swap_commit(swap, 1, NULL, 0), SPW_ERR_BUSY, "roll back first");
    REFUSED(spw_swap_read(swap, 0, NULL, NULL, NULL, NULL), SPW_ERR_BUSY, "roll back first");
    CHECK_OK(spw_swap_rollback(swap));
    check_same(swap);
    CHECK_OK(spw_swap_close(swap));
    CHECK_OK(spw_tier_close(tier, FOR_EVER));
    // With more space the update continues.
    CHECK(resize_disks(MS_REMOUNT, 2 * SMALL_DISK));
    tier = open_tier(SPW_TIER_MODE_RESUME, 0);
    swap = open_swap(tier, 4);
    check_same(swap);
    step_both(swap, 1);
    CHECK_OK(spw_swap_commit(swap, 1, NULL, 0));
    check_same(swap);
    CHECK_OK(spw_swap_close(swap));
    CHECK_OK(spw_tier_destroy(tier));
    for (int i = 0; i < 2; i++) {
        // A ring releases its files a short time after it is closed.
        for (int wait = 0; umount(directories[i]) != 0 && wait < 500; wait++) usleep(10000);
    }
}

static void wrong_options_are_refused(spw_tier *tier) {
    spw_swap *swap = NULL;
    spw_swap_budget budget = {.struct_size = sizeof budget, .buffers = 5};
    const spw_swap_options right = settings(4);
    spw_swap_options wrong = right;
    const double ratio[2] = {1, -1}, nothing[2] = {0, 0};
    watch(&swap, sizeof swap);
    watch(&budget, sizeof budget);
    INVALID(spw_swap_plan_budget(NULL, 2, &budget), "options");
    INVALID(spw_swap_plan_budget(&right, 2, NULL), "budget_out");
    INVALID(spw_swap_plan_budget(&right, 5000, &budget), "paths");
    INVALID(spw_swap_open(NULL, &right, &swap), "tier");
    INVALID(spw_swap_open(tier, NULL, &swap), "options");
    INVALID(spw_swap_open(tier, &right, NULL), "swap_out");
    wrong.struct_size = 8;
    INVALID(spw_swap_open(tier, &wrong, &swap), "struct_size");
    wrong = right, wrong.flags = 1u << 31;
    INVALID(spw_swap_open(tier, &wrong, &swap), "options.flags");
    wrong = right, wrong.elements = NULL;
    INVALID(spw_swap_open(tier, &wrong, &swap), "options.elements");
    wrong = right, wrong.subgroups = UINT64_MAX;
    INVALID(spw_swap_open(tier, &wrong, &swap), "options.subgroups");
    wrong = right, wrong.host_memory = 100;
    INVALID(spw_swap_open(tier, &wrong, &swap), "3 buffers of");
    wrong = right, wrong.ratio = ratio;
    INVALID(spw_swap_open(tier, &wrong, &swap), "");
    wrong = right, wrong.speeds = nothing;
    INVALID(spw_swap_open(tier, &wrong, &swap), "");
    unwatch_all();
}

static void wrong_arguments_are_refused(void) {
    start(5);
    spw_tier *tier = open_tier(SPW_TIER_MODE_CREATE, 0);
    wrong_options_are_refused(tier);
    spw_swap *swap = open_swap(tier, 4);
    const spw_adam_options options = at(1);
    float *param = calloc(8, sizeof *param);
    INVALID(spw_swap_read(swap, 0, NULL, param, NULL, NULL), "never written");
    fill_swap(swap);
    CHECK_OK(spw_swap_commit(swap, 0, NULL, 0));

    spw_step_stats stats = step_stats();
    spw_swap_stats counts = {.struct_size = 4};
    watch(&stats, sizeof stats);
    watch(&counts, sizeof counts);
    for (int i = 0; i < SUBGROUPS; i++) {
        if (copies[i] != NULL) watch(copies[i], plain[i].bytes[4]);
    }
    INVALID(spw_swap_fill(NULL, NULL), "swap");
    INVALID(spw_swap_fill(swap, NULL), "states");
    INVALID(spw_swap_get_stats(NULL, &counts), "swap");
    INVALID(spw_swap_get_stats(swap, NULL), "stats_out");
    INVALID(spw_swap_get_stats(swap, &counts), "struct_size");
    INVALID(spw_swap_read(NULL, 0, NULL, param, NULL, NULL), "swap");
    INVALID(spw_swap_read(swap, SUBGROUPS, NULL, param, NULL, NULL), "is 8");
    INVALID(spw_swap_read(swap, UINT64_MAX, NULL, param, NULL, NULL), "subgroup");
    INVALID(spw_swap_commit(NULL, 1, NULL, 0), "swap");
    INVALID(spw_swap_commit(swap, 1, NULL, 3), "payload");
    INVALID(spw_swap_rollback(NULL), "swap");
    CHECK_OK(spw_swap_close(NULL));

    INVALID(spw_swap_adam_step(NULL, &options, tensors, SUBGROUPS, &stats), "swap");
    INVALID(spw_swap_adam_step(swap, NULL, tensors, SUBGROUPS, &stats), "options");
    INVALID(spw_swap_adam_step(swap, &options, NULL, SUBGROUPS, &stats), "tensors");
    INVALID(spw_swap_adam_step(swap, &options, tensors, SUBGROUPS - 1, &stats), "count");
    spw_tensor kept = tensors[4];
    tensors[4].n--;
    INVALID(spw_swap_adam_step(swap, &options, tensors, SUBGROUPS, &stats), "tensors[4].n");
    tensors[4] = kept, tensors[4].param = plain[4].spans[0];
    INVALID(spw_swap_adam_step(swap, &options, tensors, SUBGROUPS, &stats), "tensors[4].param");
    tensors[4] = kept, tensors[4].state_dtype = SPW_DTYPE_BF16;
    INVALID(spw_swap_adam_step(swap, &options, tensors, SUBGROUPS, &stats), "tensors[4].state_dtype");
    tensors[4] = kept, tensors[4].param_copy = plain[4].spans[0], tensors[4].copy_dtype = SPW_DTYPE_F32;
    INVALID(spw_swap_adam_step(swap, &options, tensors, SUBGROUPS, &stats), "tensors[4].copy_dtype: must be of 16 bits");
    tensors[4] = kept, tensors[4].grad = NULL;
    INVALID(spw_swap_adam_step(swap, &options, tensors, SUBGROUPS, &stats), "tensors[4].grad");
    tensors[4] = kept, tensors[4].shadow_param = plain[4].spans[0];
    INVALID(spw_swap_adam_step(swap, &options, tensors, SUBGROUPS, &stats), "shadow");
    tensors[4] = kept, tensors[6].param_copy = tensors[3].param_copy;
    INVALID(spw_swap_adam_step(swap, &options, tensors, SUBGROUPS, &stats), "overlap");
    tensors[6].param_copy = copies[6];
    CHECK_OK(spw_ds_adam_create(3, 0.9f, 0.999f, 1));
    spw_ds_adam_call calls[SUBGROUPS];
    for (int i = 0; i < SUBGROUPS; i++) calls[i] = ds_adam_call(1);
    calls[3].bias_correction = 2;
    INVALID(spw_swap_ds_adam_step(swap, 3, calls, tensors, SUBGROUPS, NULL, NULL), "calls[3].bias_correction");
    CHECK_OK(spw_ds_adam_destroy(3));
    unwatch_all();

    // Every one of these calls was refused before any step.
    check_same(swap);
    step_both(swap, 1);
    check_same(swap);
    free(param);
    CHECK_OK(spw_swap_close(swap));
    CHECK_OK(spw_tier_destroy(tier));
}

int main(void) {
    char here[4096], clean[16384];
    CHECK(getcwd(here, sizeof here) != NULL);
    for (int i = 0; i < 2; i++) snprintf(directories[i], sizeof directories[i], "%s/path-%d", here, i);
    snprintf(clean, sizeof clean, "rm -rf '%s' '%s'", directories[0], directories[1]);
    CHECK(system(clean) == 0);
    for (int i = 0; i < 2; i++) CHECK(mkdir(directories[i], 0700) == 0);
    steps_have_the_bits_of_steps_in_memory();
    a_new_open_goes_on_at_the_commit();
    a_step_is_taken_back_and_done_again_clipped();
    steps_beside_the_caller_have_the_bits_of_steps_in_memory();
    what_does_not_fit_is_said_and_loses_nothing();
    a_full_disk_loses_nothing();
    wrong_arguments_are_refused();
    for (int i = 0; i < SUBGROUPS; i++) {
        release(&plain[i]);
        free(copies[i]);
    }
    return 0;
}
