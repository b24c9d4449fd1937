// Build: valgrind
// Memory that may not be locked is still allocated and usable, with one warning that names the limit and the
// required size. A NUMA node that does not exist causes a warning; an existing one does not. Built without
// sanitizers, which replace mlock.

#include "check.h"

#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

static char messages[1 << 14];

enum { LIMIT = 64 << 10, BLOCK = 1 << 20, BLOCKS = 4, NOBODY = 65534 };

static void keep(void *user, int32_t level, const char *message) {
    (void)user;
    size_t used = strlen(messages);
    snprintf(messages + used, sizeof messages - used, "%d: %s\n", level, message);
}

static spw_pool *open_pool(uint32_t flags, uint32_t node) {
    spw_pool_options options = {.struct_size = sizeof options, .flags = flags, .node = node};
    options.block_bytes = BLOCK;
    options.block_count = BLOCKS;
    spw_pool *pool = NULL;
    messages[0] = 0;
    CHECK(spw_pool_open(&options, &pool) == SPW_OK);
    return pool;
}

static void use(spw_pool *pool, uint64_t locked) {
    spw_pool_stats stats = {.struct_size = sizeof stats};
    void *block = NULL;
    CHECK(spw_pool_alloc(pool, &block) == SPW_OK);
    memset(block, 1, BLOCK);
    CHECK(spw_pool_get_stats(pool, &stats) == SPW_OK && stats.bytes >= BLOCK * BLOCKS && stats.high_water == 1);
    CHECK(stats.locked_bytes == locked);
    CHECK(spw_pool_free(pool, block) == SPW_OK && spw_pool_close(pool) == SPW_OK);
}

static int lines(const char *word) {
    int count = 0;
    for (const char *at = messages; (at = strstr(at, word)); at++) count++;
    return count;
}

static void little_may_be_locked(void) {
    struct rlimit limit = {LIMIT, LIMIT};
    CHECK(setrlimit(RLIMIT_MEMLOCK, &limit) == 0);
    CHECK(geteuid() != 0 || (setgid(NOBODY) == 0 && setuid(NOBODY) == 0));
    use(open_pool(0, 0), 0);
    CHECK(lines("2: ") == 1 && lines("RLIMIT_MEMLOCK is 65536 bytes") == 1 && lines("4194304 bytes") == 1);
    use(open_pool(0, 0), 0);
    CHECK(messages[0] == 0);
}

int main(void) {
    CHECK(spw_set_log(keep, NULL, SPW_LOG_LEVEL_INFO) == SPW_OK);
    pid_t child = fork();
    if (child == 0) {
        little_may_be_locked();
        _exit(0);
    }
    int status = -1;
    CHECK(waitpid(child, &status, 0) == child && status == 0);

    spw_pool *pool = open_pool(SPW_POOL_FLAG_BIND_NODE | SPW_POOL_FLAG_NO_LOCK, 900);
    CHECK(lines("2: ") == 1 && lines("NUMA node 900") == 1);
    use(pool, 0);
    pool = open_pool(SPW_POOL_FLAG_BIND_NODE | SPW_POOL_FLAG_NO_LOCK, 0);
    if (access("/sys/devices/system/node/node0", F_OK) == 0) {
        CHECK(messages[0] == 0 || strstr(messages, "not implemented")); // An emulator may lack mbind.
    }
    use(pool, 0);
    return 0;
}
