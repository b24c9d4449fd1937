// A commit in the background holds what the extents held at the call, while later puts and updates continue. Which calls it excludes
// waits for it, its outcome is returned to any number of waits, and a tier that is closed before lives until it has ended.

#include "check.h"

enum { BYTES = 50000, STEPS = 20 };

static unsigned char written[BYTES], found[BYTES];

static spw_tier *open_tier(void) {
    spw_tier_path path = {.struct_size = sizeof path, .kind = SPW_TIER_PATH_KIND_MEMORY};
    const spw_tier_options options = {.struct_size = sizeof options, .job = "commits", .paths = &path, .path_count = 1};
    spw_tier *tier = NULL;
    CHECK_OK(spw_tier_open(&options, &tier));
    return tier;
}

static uint32_t define(spw_tier *tier) {
    const uint64_t bytes = BYTES;
    uint32_t extent = 0;
    CHECK_OK(spw_tier_define(tier, "state", &bytes, 1, &extent));
    return extent;
}

static void put(spw_tier *tier, uint32_t extent, int value) {
    const void *streams[1] = {written};
    uint64_t ticket = 0;
    memset(written, value, BYTES);
    CHECK_OK(spw_tier_put(tier, extent, streams, NULL, &ticket));
    CHECK_OK(spw_tier_wait(tier, ticket, -1, NULL));
}

static int holds(spw_tier *tier, uint32_t extent, int value) {
    void *streams[1] = {found};
    uint64_t ticket = 0;
    CHECK_OK(spw_tier_get(tier, extent, streams, &ticket));
    CHECK_OK(spw_tier_wait(tier, ticket, -1, NULL));
    return found[0] == value && memcmp(found, found + 1, BYTES - 1) == 0;
}

static void puts_beside_commits(void) {
    spw_tier *tier = open_tier();
    const uint32_t extent = define(tier);
    for (int step = 1; step < STEPS; step++) {
        spw_tier_task *commit = NULL;
        put(tier, extent, step);
        CHECK_OK(spw_tier_commit_begin(tier, (uint64_t)step, "x", 1, &commit));
        put(tier, extent, 100 + step);
        CHECK(holds(tier, extent, 100 + step));
        CHECK_OK(spw_tier_rollback(tier));
        CHECK(holds(tier, extent, step));
        uint64_t held = 0;
        CHECK_OK(spw_tier_task_wait(commit, -1, &held));
        CHECK_OK(spw_tier_task_wait(commit, 0, NULL));
        spw_tier_progress progress = SPW_TIER_PROGRESS_INIT;
        CHECK_OK(spw_tier_task_get_progress(commit, &progress));
        CHECK(held == (uint64_t)step && progress.step == held && progress.ended == 1 && progress.bytes == 0);
        CHECK_OK(spw_tier_task_close(commit));
    }
    // The library frees the tier once the commit has ended.
    spw_tier_task *commit = NULL;
    put(tier, extent, 7);
    CHECK_OK(spw_tier_commit_begin(tier, STEPS, NULL, 0, &commit));
    CHECK_OK(spw_tier_close(tier, -1));
    CHECK_OK(spw_tier_task_wait(commit, -1, NULL));
    CHECK_OK(spw_tier_task_close(commit));
}

static void updates_beside_commits(void) {
    const uint64_t elements[3] = {3000, 1, 5000};
    spw_tier *tier = open_tier();
    spw_swap_options options = {.struct_size = sizeof options, .elements = elements, .subgroups = 3, .host_memory = 1 << 20};
    options.flags = SPW_SWAP_FLAG_NO_LOCK;
    spw_swap *swap = NULL;
    CHECK_OK(spw_swap_open(tier, &options, &swap));
    struct problem plain[3];
    const float *states[9] = {NULL};
    spw_tensor tensors[3];
    spw_adam_options adam = SPW_ADAM_OPTIONS_INIT;
    for (int i = 0; i < 3; i++) {
        plain[i] = make_f32(elements[i], (uint64_t)i);
        states[3 * i] = plain[i].tensor.param;
        tensors[i] = plain[i].tensor;
        tensors[i].param = tensors[i].exp_avg = tensors[i].exp_avg_sq = NULL;
    }
    CHECK_OK(spw_swap_fill(swap, states));
    for (int i = 0; i < 3; i++) {
        memset(plain[i].tensor.exp_avg, 0, elements[i] * 4);
        memset(plain[i].tensor.exp_avg_sq, 0, elements[i] * 4);
    }
    spw_tier_task *commit = NULL;
    for (int step = 1; step <= STEPS; step++) {
        adam.step = (uint64_t)step;
        for (int i = 0; i < 3; i++) CHECK_OK(spw_adam_step(&adam, &plain[i].tensor, 1, NULL));
        CHECK_OK(spw_swap_adam_step(swap, &adam, tensors, 3, NULL));
        CHECK_OK(spw_tier_task_close(commit));
        CHECK_OK(spw_swap_commit_begin(swap, (uint64_t)step, NULL, 0, &commit));
    }
    // A step that the rollback discards.
    CHECK_OK(spw_swap_adam_step(swap, &adam, tensors, 3, NULL));
    CHECK_OK(spw_swap_rollback(swap));
    CHECK_OK(spw_tier_task_wait(commit, -1, NULL));
    for (int i = 0; i < 3; i++) {
        float *state = malloc(elements[i] * 4);
        CHECK_OK(spw_swap_read(swap, (uint64_t)i, NULL, state, NULL, NULL));
        CHECK(memcmp(state, plain[i].tensor.param, elements[i] * 4) == 0);
        free(state);
    }
    CHECK_OK(spw_swap_close(swap));
    CHECK_OK(spw_tier_task_close(commit));
    CHECK_OK(spw_tier_close(tier, -1));
    for (int i = 0; i < 3; i++) release(&plain[i]);
}

static void wrong_arguments(void) {
    spw_tier *tier = open_tier();
    spw_tier_task *commit = (spw_tier_task *)1;
    INVALID(spw_tier_commit_begin(NULL, 1, NULL, 0, &commit), "tier: is NULL");
    INVALID(spw_tier_commit_begin(tier, 1, NULL, 0, NULL), "task_out: is NULL");
    INVALID(spw_tier_commit_begin(tier, 1, NULL, 5, &commit), "payload");
    CHECK(commit == NULL || commit == (spw_tier_task *)1);
    INVALID(spw_swap_commit_begin(NULL, 1, NULL, 0, &commit), "swap: is NULL");
    INVALID(spw_tier_task_wait(NULL, -1, NULL), "task: is NULL");
    CHECK_OK(spw_tier_task_close(NULL));
    CHECK_OK(spw_tier_close(tier, -1));
}

int main(void) {
    puts_beside_commits();
    updates_beside_commits();
    wrong_arguments();
    return 0;
}
