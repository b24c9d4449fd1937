// A tier opens at the commit before its last one until a write begins; every other step is refused.

#include "check.h"

#include <sys/stat.h>
#include <unistd.h>

enum { FOR_EVER = -1, BYTES = 50000 };
static char directories[2][4200];
static unsigned char memory[BYTES];

static spw_tier_options settings(spw_tier_path *paths) {
    for (int n = 0; n < 2; n++) paths[n] = (spw_tier_path){.struct_size = sizeof *paths, .directory = directories[n]};
    return (spw_tier_options){.struct_size = sizeof(spw_tier_options), .job = "steps", .paths = paths, .path_count = 2};
}

static spw_status open_at(uint64_t step, spw_tier **tier) {
    spw_tier_path paths[2];
    spw_tier_options options = settings(paths);
    options.flags = SPW_TIER_FLAG_AT_STEP;
    options.at_step = step;
    return spw_tier_open(&options, tier);
}

static spw_tier *open_with(uint32_t flags) {
    spw_tier_path paths[2];
    spw_tier_options options = settings(paths);
    options.flags = flags;
    spw_tier *tier = NULL;
    CHECK_OK(spw_tier_open(&options, &tier));
    return tier;
}

static spw_tier *open_last(void) { return open_with(0); }

static spw_tier_steps_info steps(void) {
    spw_tier_path paths[2];
    spw_tier_options options = settings(paths);
    spw_tier_steps_info info = {.struct_size = sizeof info};
    CHECK_OK(spw_tier_get_steps(&options, &info));
    return info;
}

static void put(spw_tier *tier, int step) {
    const uint64_t sizes[1] = {BYTES};
    const void *streams[1] = {memory};
    uint32_t extent = 0;
    uint64_t ticket = 0;
    memset(memory, step, BYTES);
    CHECK_OK(spw_tier_define(tier, "state", sizes, 1, &extent));
    CHECK_OK(spw_tier_put(tier, extent, streams, NULL, &ticket));
    CHECK_OK(spw_tier_wait(tier, ticket, FOR_EVER, NULL));
}

static void step_to(spw_tier *tier, int step) {
    put(tier, step);
    CHECK_OK(spw_tier_commit(tier, (uint64_t)step, &step, sizeof step));
}

static int is_at(spw_tier *tier, int step) {
    spw_tier_opened_info found = {.struct_size = sizeof found};
    int kept = -1;
    CHECK_OK(spw_tier_get_opened(tier, &found, &kept, sizeof kept));
    uint64_t ticket = 0;
    void *streams[1] = {memory};
    memset(memory, 0, BYTES);
    CHECK_OK(spw_tier_get(tier, 0, streams, &ticket));
    CHECK_OK(spw_tier_wait(tier, ticket, FOR_EVER, NULL));
    for (int i = 0; i < BYTES; i++) {
        if (memory[i] != (unsigned char)step) return 0;
    }
    return found.step == (uint64_t)step && kept == step;
}

static void the_step_before_is_opened(void) {
    spw_tier *tier = NULL;
    spw_tier_steps_info found = steps();
    CHECK(found.committed == 0 && found.has_before == 0 && found.first == 0);
    CHECK(access("path-0/steps", F_OK) != 0);
    REFUSED(open_at(0, &tier), SPW_ERR_NO_STATE, "steps");
    // Step 0 is a valid step.
    tier = open_last();
    step_to(tier, 0);
    CHECK_OK(spw_tier_close(tier, FOR_EVER));
    found = steps();
    CHECK(found.committed == 1 && found.last == 0 && found.has_before == 0 && found.first == 1);
    CHECK_OK(open_at(0, &tier));
    for (int step = 1; step <= 3; step++) step_to(tier, step);
    CHECK_OK(spw_tier_close(tier, FOR_EVER));

    found = steps();
    CHECK(found.last == 3 && found.has_before == 1 && found.before == 2 && found.first == 0);
    REFUSED(open_at(1, &tier), SPW_ERR_NO_STEP, "step 1: available steps: [3, 2]");
    CHECK_OK(open_at(2, &tier));
    CHECK(is_at(tier, 2));
    CHECK_OK(spw_tier_close(tier, FOR_EVER));
    found = steps();
    CHECK(found.last == 2);
    REFUSED(open_at(3, &tier), SPW_ERR_NO_STEP, "step 3");
    tier = open_last();
    CHECK(is_at(tier, 2));
    step_to(tier, 13);
    CHECK_OK(spw_tier_close(tier, FOR_EVER));
}

static void what_was_put_since_takes_its_place(void) {
    spw_tier *tier = open_last();
    step_to(tier, 14);
    put(tier, 15);
    CHECK_OK(spw_tier_close(tier, FOR_EVER));
    CHECK(steps().before == 13);
    REFUSED(open_at(13, &tier), SPW_ERR_NO_STEP, "overwritten since");
    tier = open_last();
    CHECK(is_at(tier, 14));
    CHECK_OK(spw_tier_close(tier, FOR_EVER));
}

static void a_commit_in_the_background_keeps_the_step_before_if_asked(void) {
    for (uint32_t flags = 0; flags <= SPW_TIER_FLAG_KEEP_BEFORE; flags += SPW_TIER_FLAG_KEEP_BEFORE) {
        spw_tier *tier = open_with(flags);
        spw_tier_task *commit = NULL;
        step_to(tier, 13);
        put(tier, 14);
        const int step = 14;
        CHECK_OK(spw_tier_commit_begin(tier, 14, &step, sizeof step, &commit));
        CHECK_OK(spw_tier_task_wait(commit, FOR_EVER, NULL));
        CHECK_OK(spw_tier_task_close(commit));
        for (int put_since = 15; put_since < 20; put_since++) put(tier, put_since);
        CHECK_OK(spw_tier_close(tier, FOR_EVER));
        if (flags == 0) {
            REFUSED(open_at(13, &tier), SPW_ERR_NO_STEP, "overwritten since");
        } else {
            CHECK_OK(open_at(13, &tier));
            CHECK(is_at(tier, 13));
            CHECK_OK(spw_tier_close(tier, FOR_EVER));
        }
    }
    spw_tier *tier = open_last();
    step_to(tier, 14);
    CHECK_OK(spw_tier_close(tier, FOR_EVER));
}

static void wrong_arguments_are_refused(void) {
    spw_tier_path paths[2];
    spw_tier_options options = settings(paths), wrong = options;
    spw_tier_steps_info info = {.struct_size = sizeof info};
    spw_tier *tier = NULL;
    INVALID(spw_tier_get_steps(NULL, &info), "options");
    INVALID(spw_tier_get_steps(&options, NULL), "info");
    info.struct_size = 8;
    INVALID(spw_tier_get_steps(&options, &info), "info");
    info.struct_size = sizeof info;
    wrong.at_step = 14;
    INVALID(spw_tier_open(&wrong, &tier), "options.at_step");
    wrong.flags = SPW_TIER_FLAG_AT_STEP;
    wrong.mode = SPW_TIER_MODE_CREATE;
    INVALID(spw_tier_open(&wrong, &tier), "options.at_step");
    wrong = options, wrong.at_tag = 1;
    INVALID(spw_tier_open(&wrong, &tier), "options.at_tag");
    wrong = options, wrong.world = 2;
    REFUSED(spw_tier_get_steps(&wrong, &info), SPW_ERR_FOREIGN, "rank 0 of 1");
    // A caller built with an older header has no at_step: its last field is io_backend.
    options.struct_size = (uint32_t)offsetof(spw_tier_options, at_step);
    CHECK_OK(spw_tier_open(&options, &tier));
    REFUSED(spw_tier_get_steps(&options, &info), SPW_ERR_LOCKED, "");
    CHECK_OK(spw_tier_destroy(tier));
}

int main(void) {
    char here[4096], clean[16384];
    CHECK(getcwd(here, sizeof here) != NULL);
    for (int n = 0; n < 2; n++) snprintf(directories[n], sizeof directories[n], "%s/path-%d", here, n);
    snprintf(clean, sizeof clean, "rm -rf '%s' '%s'", directories[0], directories[1]);
    CHECK(system(clean) == 0);
    for (int n = 0; n < 2; n++) CHECK(mkdir(directories[n], 0700) == 0);
    the_step_before_is_opened();
    what_was_put_since_takes_its_place();
    a_commit_in_the_background_keeps_the_step_before_if_asked();
    wrong_arguments_are_refused();
    return 0;
}
