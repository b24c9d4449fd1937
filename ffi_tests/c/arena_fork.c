// Build: forks
// A forked child gets errors from its parent's arena and stage, ends none of its parent's locks, and may read the
// memory that it inherited. It opens its own arena handle. Another user's process may not open the arena.

#define SPW_EXPERIMENTAL
#include "child.h"

#include <fcntl.h>
#include <spillway/arena.h>
#include <spillway/stage.h>
#include <sys/stat.h>

enum { BYTES = 8192, FOREVER = -1, OTHER_USER = 65534 };

static char name[64];

static spw_arena *create(const char *of) {
    spw_arena_region region = {sizeof region, 0, "copies", BYTES};
    spw_arena_options options = SPW_ARENA_OPTIONS_INIT;
    options.name = of;
    options.regions = &region;
    options.region_count = 1;
    options.processes = 1;
    spw_arena *arena = NULL;
    CHECK_OK(spw_arena_create(&options, &arena));
    return arena;
}

static void child(spw_arena *arena, spw_stage *stage, const unsigned char *memory) {
    alarm(60);
    spw_arena_snapshot snapshot = SPW_ARENA_SNAPSHOT_INIT;
    spw_arena_info info = SPW_ARENA_INFO_INIT;
    spw_step_stats stats = step_stats();
    spw_adam_options adam = adam_options();
    struct problem problem = make_mixed(1000, 1);
    REFUSED(spw_arena_read_begin(arena, 0, 0, FOREVER, &snapshot), SPW_ERR_UNSUPPORTED, "process was forked");
    REFUSED(spw_arena_write_end(arena, 0), SPW_ERR_UNSUPPORTED, "process was forked");
    REFUSED(spw_arena_get_info(arena, &info), SPW_ERR_UNSUPPORTED, "process was forked");
    REFUSED(spw_stage_wait(stage, FOREVER, &stats), SPW_ERR_UNSUPPORTED, "the stage was opened by process");
    REFUSED(spw_stage_submit_adam(stage, &adam, &problem.tensor, 1, NULL, NULL), SPW_ERR_UNSUPPORTED,
            "process was forked");
    CHECK(memory[BYTES - 1] == 0);
    CHECK_OK(spw_arena_close(arena));
    CHECK_OK(spw_stage_close(stage));
    spw_arena *own = NULL;
    CHECK_OK(spw_arena_open(name, 0, 0, &own));
    REFUSED(spw_arena_read_begin(own, 0, 0, 10, &snapshot), SPW_ERR_TIMEOUT, "is writing region");
    CHECK_OK(spw_arena_close(own));
    // The child has a gate and a pool of its own.
    const spw_stage_options options = SPW_STAGE_OPTIONS_INIT;
    CHECK_OK(spw_stage_open(&options, &stage));
    CHECK_OK(spw_stage_submit_adam(stage, &adam, &problem.tensor, 1, NULL, NULL));
    CHECK_OK(spw_stage_wait(stage, FOREVER, &stats));
    CHECK_OK(spw_stage_close(stage));
    _exit(0);
}

// A process of another user: it may not open the file, and a name that it took is refused.
static void check_other_user(spw_arena *arena) {
    spw_arena_info info = SPW_ARENA_INFO_INIT;
    CHECK_OK(spw_arena_get_info(arena, &info));
    char taken[64], path[128];
    snprintf(taken, sizeof taken, "taken-%d", (int)getpid());
    snprintf(path, sizeof path, "/dev/shm/spillway-%s", taken);
    const pid_t pid = fork();
    if (pid == 0) {
        CHECK(setgid(OTHER_USER) == 0 && setuid(OTHER_USER) == 0);
        spw_arena *own = NULL;
        REFUSED(spw_arena_open(name, 0, 0, &own), SPW_ERR_ARENA_FOREIGN, "belongs to user 0");
        REFUSED(spw_arena_open(name, SPW_ARENA_OPEN_FLAG_WRITE, 0, &own), SPW_ERR_ARENA_FOREIGN, "belongs to user 0");
        REFUSED(spw_arena_collect(name), SPW_ERR_ARENA_FOREIGN, "belongs to user 0");
        REFUSED(spw_arena_open_fd(info.fd, 0, &own), SPW_ERR_ARENA_FOREIGN, "user 0");
        const int fd = open(path, O_CREAT | O_RDWR | O_EXCL, 0666);
        CHECK(fd >= 0 && fchmod(fd, 0666) == 0 && ftruncate(fd, 1 << 20) == 0);
        _exit(0);
    }
    finish(pid, "a child");
    spw_arena_region region = {sizeof region, 0, "copies", BYTES};
    spw_arena_options options = SPW_ARENA_OPTIONS_INIT;
    options.name = taken;
    options.regions = &region;
    options.region_count = 1;
    options.flags = SPW_ARENA_FLAG_COLLECT;
    spw_arena *own = NULL;
    REFUSED(spw_arena_create(&options, &own), SPW_ERR_ARENA_FOREIGN, "belongs to");
    REFUSED(spw_arena_open(taken, 0, 0, &own), SPW_ERR_ARENA_FOREIGN, "belongs to");
    CHECK(unlink(path) == 0);
}

int main(void) {
    snprintf(name, sizeof name, "fork-%d", (int)getpid());
    spw_arena *arena = create(name);
    spw_arena_region_info region = SPW_ARENA_REGION_INFO_INIT;
    CHECK_OK(spw_arena_get_region(arena, 0, &region, NULL, 0, NULL));
    const spw_stage_options options = SPW_STAGE_OPTIONS_INIT;
    spw_stage *stage = NULL;
    CHECK_OK(spw_stage_open(&options, &stage));
    spw_adam_options adam = adam_options();
    spw_step_stats stats = step_stats();
    for (int round = 0; round < rounds(20); round++) {
        struct problem large = make_mixed(LARGE, 1), before = make_mixed(LARGE, 1);
        CHECK_OK(spw_stage_submit_adam(stage, &adam, &large.tensor, 1, NULL, NULL));
        CHECK_OK(spw_arena_write_begin(arena, 0, (uint64_t)round + 1, NULL));
        const pid_t pid = fork();
        if (pid == 0) child(arena, stage, region.address);
        finish(pid, "a child");
        // The child's end released none of the parent's locks.
        spw_arena *other = NULL;
        spw_arena_snapshot snapshot = SPW_ARENA_SNAPSHOT_INIT;
        CHECK_OK(spw_arena_open(name, 0, 0, &other));
        REFUSED(spw_arena_read_begin(other, 0, 0, 0, &snapshot), SPW_ERR_TIMEOUT, "is writing region");
        CHECK_OK(spw_arena_write_end(arena, 0));
        CHECK_OK(spw_arena_read_begin(other, 0, (uint64_t)round + 1, 0, &snapshot));
        CHECK_OK(spw_arena_close(other));
        CHECK_OK(spw_stage_wait(stage, FOREVER, &stats));
        CHECK_OK(spw_stage_rollback(stage));
        CHECK_OK(spw_stage_finish(stage, FOREVER));
        CHECK(memcmp(large.spans[0], before.spans[0], large.bytes[0]) == 0);
        CHECK(memcmp(large.spans[2], before.spans[2], large.bytes[2]) == 0);
        release(&large), release(&before);
    }
    if (geteuid() == 0) check_other_user(arena);
    CHECK_OK(spw_stage_close(stage));
    CHECK_OK(spw_arena_close(arena));
    return 0;
}
