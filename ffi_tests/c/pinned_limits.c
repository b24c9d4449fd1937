// Build: valgrind
// Memory that may not be locked is still allocated and usable, with one warning that names the limit and the
// required size. A NUMA node that does not exist causes a warning; an existing one does not. Built without
// sanitizers, which replace mlock.

#include "child.h"

#include <sys/resource.h>

static char messages[1 << 14];

enum { LIMIT = 64 << 10, BYTES = 20 << 20, NOBODY = 65534 };

static void keep(void *user, int32_t level, const char *message) {
    (void)user;
    size_t used = strlen(messages);
    snprintf(messages + used, sizeof messages - used, "%d: %s\n", level, message);
}

static void use(uint32_t flags, uint32_t node) {
    const spw_pinned_options options = {.struct_size = sizeof options, .flags = flags, .node = node};
    spw_pinned_stats stats = SPW_PINNED_STATS_INIT;
    void *start = NULL;
    messages[0] = 0;
    CHECK(spw_pinned_alloc(&options, BYTES, &start) == SPW_OK);
    memset(start, 1, BYTES);
    CHECK(spw_pinned_get_stats(&stats) == SPW_OK && stats.mapped_bytes >= BYTES && stats.locked_bytes == 0);
    CHECK(spw_pinned_free(start) == SPW_OK);
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
    use(0, 0);
    CHECK(lines("2: ") == 1 && lines("RLIMIT_MEMLOCK is 65536 bytes") == 1 && lines("20971520 bytes") == 1);
    use(0, 0);
    CHECK(messages[0] == 0);
}

int main(void) {
    CHECK(spw_set_log(keep, NULL, SPW_LOG_LEVEL_INFO) == SPW_OK);
    pid_t child = fork();
    if (child == 0) {
        little_may_be_locked();
        _exit(0);
    }
    finish(child, "a child");

    use(SPW_PINNED_FLAG_BIND_NODE | SPW_PINNED_FLAG_NO_LOCK, 900);
    CHECK(lines("2: ") == 1 && lines("NUMA node 900") == 1);
    use(SPW_PINNED_FLAG_BIND_NODE | SPW_PINNED_FLAG_NO_LOCK, 0);
    if (access("/sys/devices/system/node/node0", F_OK) == 0) {
        CHECK(messages[0] == 0 || strstr(messages, "not implemented")); // An emulator may lack mbind.
    }
    return 0;
}
