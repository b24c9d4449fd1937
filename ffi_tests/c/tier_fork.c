// Build: forks
// A forked child that uses its parent's tier gets errors at once and does the parent no harm. No call of the child
// waits for a lock that a thread of the parent held at the fork, and none removes the parent's files.

#include "child.h"

#include <pthread.h>
#include <stdatomic.h>
#include <sys/stat.h>

enum { FOR_EVER = -1, BYTES = 200000 };
static const uint64_t size = BYTES;
static char directory[4200];
static unsigned char memory[2][BYTES];
static spw_tier *tier;
static spw_swap *swap;
static spw_tier_task *snapshot;
static atomic_int stop;

static spw_tier *open_tier(const char *job, uint32_t mode) {
    spw_tier_path path = {.struct_size = sizeof path, .directory = directory};
    spw_tier_options options = {.struct_size = sizeof options, .job = job, .paths = &path, .path_count = 1, .mode = mode};
    spw_tier *opened = NULL;
    CHECK_OK(spw_tier_open(&options, &opened));
    return opened;
}

static void *writer(void *seed) {
    const int n = *(int *)seed;
    char name[32];
    snprintf(name, sizeof name, "extent-%d", n);
    uint32_t extent = 0;
    CHECK_OK(spw_tier_define(tier, name, &size, 1, &extent));
    while (!atomic_load(&stop)) {
        const void *stream = memory[n];
        uint64_t ticket = 0;
        const spw_status begun = spw_tier_put(tier, extent, &stream, NULL, &ticket);
        if (begun == SPW_ERR_BUSY) continue;
        CHECK(begun == SPW_OK);
        CHECK_OK(spw_tier_wait(tier, ticket, FOR_EVER, NULL));
        spw_tier_path_info path = {.struct_size = sizeof path};
        CHECK_OK(spw_tier_get_path(tier, 0, &path, NULL, 0, NULL));
    }
    return NULL;
}

#define NOT_HERE(call) REFUSED(call, SPW_ERR_UNSUPPORTED, "process was forked")

static void use_all(void) {
    uint32_t extent = 0;
    uint64_t ticket = 0, step = 0;
    void *stream = memory[0];
    spw_tier_opened_info opened = {.struct_size = sizeof opened};
    spw_tier_extent_info info = {.struct_size = sizeof info};
    spw_tier_path_info path = {.struct_size = sizeof path};
    spw_tier_verify_info checked = {.struct_size = sizeof checked};
    spw_swap_stats stats = {.struct_size = sizeof stats};
    NOT_HERE(spw_tier_define(tier, "child", &size, 1, &extent));
    NOT_HERE(spw_tier_remove(tier, 0));
    NOT_HERE(spw_tier_put(tier, 0, (const void *const *)&stream, NULL, &ticket));
    NOT_HERE(spw_tier_get(tier, 0, &stream, &ticket));
    NOT_HERE(spw_tier_wait(tier, 1, FOR_EVER, NULL));
    NOT_HERE(spw_tier_commit(tier, 99, NULL, 0));
    NOT_HERE(spw_tier_rollback(tier));
    NOT_HERE(spw_tier_get_opened(tier, &opened, NULL, 0));
    NOT_HERE(spw_tier_get_extent(tier, 0, &info, NULL, 0, NULL));
    NOT_HERE(spw_tier_get_path(tier, 0, &path, NULL, 0, NULL));
    NOT_HERE(spw_tier_set_path(tier, 0, SPW_TIER_HEALTH_DRAINING));
    NOT_HERE(spw_tier_evacuate(tier, 0));
    NOT_HERE(spw_tier_end_turns(tier));
    NOT_HERE(spw_tier_verify(tier, &checked));
    NOT_HERE(spw_tier_export(tier, "nowhere", NULL, &snapshot));
    NOT_HERE(spw_tier_import(tier, "nowhere", NULL, &step));
    spw_tier_progress progress = SPW_TIER_PROGRESS_INIT;
    NOT_HERE(spw_tier_task_get_progress(snapshot, &progress));
    NOT_HERE(spw_tier_task_wait(snapshot, FOR_EVER, &step));
    CHECK_OK(spw_tier_task_close(snapshot));
    NOT_HERE(spw_swap_rollback(swap));
    NOT_HERE(spw_swap_commit(swap, 99, NULL, 0));
    NOT_HERE(spw_swap_fill(swap, (const float *const *)&stream));
    NOT_HERE(spw_swap_get_stats(swap, &stats));
    CHECK_OK(spw_swap_close(swap));
    CHECK_OK(spw_tier_close(tier, FOR_EVER));
}

static void destroy(void) {
    NOT_HERE(spw_tier_destroy(tier));
    // The parent still holds its lock.
    spw_tier_path path = {.struct_size = sizeof path, .directory = directory};
    const spw_tier_options options = {
        .struct_size = sizeof options, .job = "forked", .paths = &path, .path_count = 1, .mode = SPW_TIER_MODE_RESUME};
    spw_tier *other = NULL;
    REFUSED(spw_tier_open(&options, &other), SPW_ERR_LOCKED, "rank-0");
    // The child can open its own tier.
    spw_tier *mine = open_tier("of-the-child", SPW_TIER_MODE_CREATE);
    CHECK_OK(spw_tier_destroy(mine));
}

int main(void) {
    if (getenv("SPILLWAY_TEST_EMULATOR") != NULL) skip("threads of a forked child end or hang qemu-user");
    char here[4096], clean[16384];
    CHECK(getcwd(here, sizeof here) != NULL);
    snprintf(directory, sizeof directory, "%s/forked", here);
    snprintf(clean, sizeof clean, "rm -rf '%s'", directory);
    CHECK(system(clean) == 0 && mkdir(directory, 0700) == 0);
    tier = open_tier("forked", SPW_TIER_MODE_CREATE);
    spw_tier *below = open_tier("swapped", SPW_TIER_MODE_CREATE);
    const uint64_t elements = 1000;
    const spw_swap_options swapping = {.struct_size = sizeof swapping, .elements = &elements, .subgroups = 1, .host_memory = 1 << 24};
    CHECK_OK(spw_swap_open(below, &swapping, &swap));

    spw_tier *snapped = open_tier("snapped", SPW_TIER_MODE_CREATE);
    uint32_t extent = 0;
    uint64_t ticket = 0;
    const void *stream = memory[0];
    CHECK_OK(spw_tier_define(snapped, "held", &size, 1, &extent));
    CHECK_OK(spw_tier_put(snapped, extent, &stream, NULL, &ticket));
    CHECK_OK(spw_tier_wait(snapped, ticket, FOR_EVER, NULL));
    CHECK_OK(spw_tier_commit(snapped, 1, NULL, 0));
    char target[8192];
    snprintf(target, sizeof target, "%s/snapshot", directory);
    spw_tier_export_options slow = SPW_TIER_EXPORT_OPTIONS_INIT;
    slow.bytes_per_second = 1;
    CHECK_OK(spw_tier_export(snapped, target, &slow, &snapshot));

    int seeds[2] = {0, 1};
    pthread_t threads[2];
    for (int n = 0; n < 2; n++) {
        memset(memory[n], 17 + n, BYTES);
        CHECK(pthread_create(&threads[n], NULL, writer, &seeds[n]) == 0);
    }
    for (int i = 0; i < rounds(25); i++) {
        usleep(1000 + 531 * (useconds_t)i);
        in_child(use_all, "a child that uses all");
        in_child(destroy, "a child that destroys");
    }
    atomic_store(&stop, 1);
    for (int n = 0; n < 2; n++) CHECK(pthread_join(threads[n], NULL) == 0);
    CHECK_OK(spw_tier_commit(tier, 5, NULL, 0));
    CHECK_OK(spw_tier_close(tier, FOR_EVER));
    tier = open_tier("forked", SPW_TIER_MODE_RESUME);
    spw_tier_verify_info checked = {.struct_size = sizeof checked};
    CHECK_OK(spw_tier_verify(tier, &checked));
    CHECK(checked.extents == 2);
    CHECK_OK(spw_tier_destroy(tier));
    CHECK_OK(spw_swap_close(swap));
    CHECK_OK(spw_tier_destroy(below));
    // No child has cancelled the snapshot of its parent, which uses the tier until it is closed.
    spw_tier_progress progress = SPW_TIER_PROGRESS_INIT;
    CHECK_OK(spw_tier_task_get_progress(snapshot, &progress));
    CHECK(progress.ended == 0 && progress.step == 1 && progress.bytes == BYTES);
    REFUSED(spw_tier_task_wait(snapshot, 0, NULL), SPW_ERR_TIMEOUT, "snapshot");
    CHECK_OK(spw_tier_task_close(snapshot));
    CHECK_OK(spw_tier_destroy(snapped));
    return 0;
}
