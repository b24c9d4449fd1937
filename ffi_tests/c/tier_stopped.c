// Build: forks
// If a process is stopped for longer than the I/O timeout (SIGSTOP, a paused container), none of its paths fails.

#include "check.h"

#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

// A busy disk that runs does not reach the I/O timeout; a stop lasts longer.
enum { FOR_EVER = -1, EXTENTS = 8, BYTES = 4 << 20, STALL_MS = 5000, STOP_MS = 6500 };
static const uint64_t size = BYTES;
static char directory[4200];
static volatile int *steps;

// Writes forever, so a stop finds transfers in flight.
static void run(void) {
    spw_tier_path path = {.struct_size = sizeof path, .directory = directory};
    spw_tier_options options = {.struct_size = sizeof options, .job = "stopped", .paths = &path, .path_count = 1};
    options.io_timeout_ms = STALL_MS;
    options.durability = SPW_TIER_DURABILITY_PROCESS;
    spw_tier *tier = NULL;
    CHECK_OK(spw_tier_open(&options, &tier));
    void *memory = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(memory != MAP_FAILED);
    memset(memory, 3, BYTES);
    uint32_t extents[EXTENTS];
    for (int n = 0; n < EXTENTS; n++) {
        char name[32];
        snprintf(name, sizeof name, "extent-%d", n);
        CHECK_OK(spw_tier_define(tier, name, &size, 1, &extents[n]));
    }
    for (;; ++*steps) {
        uint64_t tickets[EXTENTS];
        const void *stream = memory;
        for (int n = 0; n < EXTENTS; n++) CHECK_OK(spw_tier_put(tier, extents[n], &stream, NULL, &tickets[n]));
        for (int n = 0; n < EXTENTS; n++) CHECK_OK(spw_tier_wait(tier, tickets[n], FOR_EVER, NULL));
        spw_tier_path_info info = {.struct_size = sizeof info};
        CHECK_OK(spw_tier_get_path(tier, 0, &info, NULL, 0, NULL));
        CHECK(info.health == SPW_TIER_HEALTH_HEALTHY);
    }
}

int main(void) {
    char here[4096], clean[16384];
    CHECK(getcwd(here, sizeof here) != NULL);
    snprintf(directory, sizeof directory, "%s/stopped", here);
    snprintf(clean, sizeof clean, "rm -rf '%s'", directory);
    CHECK(system(clean) == 0 && mkdir(directory, 0700) == 0);
    steps = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(steps != MAP_FAILED);
    const pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        run();
        _exit(0);
    }
    int outcome = 0;
    for (int i = 0; i < rounds(2); i++) {
        const int before = *steps;
        for (int tries = 0; *steps < before + 2 && waitpid(child, &outcome, WNOHANG) == 0; tries++) {
            CHECK(tries < 6000);
            usleep(10000);
        }
        usleep(1000 + 777 * (useconds_t)i);
        if (kill(child, SIGSTOP) != 0) break;
        usleep(STOP_MS * 1000);
        CHECK(kill(child, SIGCONT) == 0);
    }
    usleep(200000);
    CHECK(waitpid(child, &outcome, WNOHANG) == 0);
    CHECK(kill(child, SIGKILL) == 0 && waitpid(child, &outcome, 0) == child);
    CHECK(system(clean) == 0);
    return 0;
}
