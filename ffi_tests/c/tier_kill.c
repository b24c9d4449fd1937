// A process that is killed at any moment leaves a tier that opens at its last committed step with all its bytes.
//
// The parent kills the child. The child opens the tier, checks the contents, and steps until it is killed. In a shared
// page the child records which step it began to commit and which commit returned. SPILLWAY_KILL_ROUNDS sets the number
// of rounds (40).
//
// ffi_tests/crash_images.sh uses the program in two parts. `tier_kill write PAGE DIR DIR` steps forever and keeps that
// page in a file. `tier_kill check ACKNOWLEDGED BEGUN DIR DIR` checks a copy of the directories.

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <spillway.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define CHECK(condition)                                                                                    \
    do {                                                                                                    \
        if (!(condition)) {                                                                                 \
            fprintf(stderr, "line %d: %s; last error: %s\n", __LINE__, #condition, spw_last_error());       \
            _exit(1);                                                                                       \
        }                                                                                                   \
    } while (0)
#define OK(call) CHECK((call) == SPW_OK)

enum { EXTENTS = 5, STREAMS = 3, FOR_EVER = -1 };
// Odd sizes, so blocks have partial ends; the fourth extent is partly empty.
static const uint64_t sizes[EXTENTS][STREAMS] = {
    {300000, 300000, 300000}, {65536, 65536, 65536}, {1, 70001, 4096}, {0, 123456, 0}, {262144, 1000, 8192}};
static const char *const names[EXTENTS] = {"a", "b", "c", "d", "e"};

static struct {
    volatile uint64_t begun, acknowledged, opens, checked;
} *page;
static char directories[2][4200];

static uint64_t mixed(uint64_t bits) {
    bits += 0x9e3779b97f4a7c15u;
    bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9u;
    bits = (bits ^ (bits >> 27)) * 0x94d049bb133111ebu;
    return bits ^ (bits >> 31);
}

static void fill(unsigned char *bytes, uint64_t count, uint64_t step, int extent, int stream) {
    uint64_t seed = mixed(step * 64 + (uint64_t)(extent * STREAMS + stream));
    for (uint64_t i = 0; i < count; i++) bytes[i] = (unsigned char)(seed >> (i % 8 * 8)) ^ (unsigned char)(i >> 8);
}

static spw_tier *open_tier(uint32_t durability) {
    spw_tier_path paths[2] = {{.struct_size = sizeof *paths, .directory = directories[0]},
                              {.struct_size = sizeof *paths, .directory = directories[1]}};
    spw_tier_options options = {.struct_size = sizeof options,
                                .job = "killed",
                                .paths = paths,
                                .path_count = 2,
                                .durability = durability,
                                .block_bytes = 65536};
    spw_tier *tier = NULL;
    OK(spw_tier_open(&options, &tier));
    return tier;
}

static void check(spw_tier *tier, const uint32_t *extents, uint64_t step) {
    for (int e = 0; e < EXTENTS; e++) {
        void *streams[STREAMS];
        for (int s = 0; s < STREAMS; s++) streams[s] = malloc(sizes[e][s] + 1);
        uint64_t ticket = 0;
        OK(spw_tier_get(tier, extents[e], streams, &ticket));
        OK(spw_tier_wait(tier, ticket, FOR_EVER, NULL));
        for (int s = 0; s < STREAMS; s++) {
            unsigned char *expected = malloc(sizes[e][s] + 1);
            fill(expected, sizes[e][s], step, e, s);
            CHECK(memcmp(expected, streams[s], sizes[e][s]) == 0);
            free(expected);
            free(streams[s]);
        }
    }
}

static void put_step(spw_tier *tier, const uint32_t *extents, uint64_t step) {
    void *memory[EXTENTS][STREAMS];
    uint64_t tickets[EXTENTS];
    for (int e = 0; e < EXTENTS; e++) {
        for (int s = 0; s < STREAMS; s++) {
            memory[e][s] = malloc(sizes[e][s] + 1);
            fill(memory[e][s], sizes[e][s], step, e, s);
        }
        const void *const *streams = (const void *const *)memory[e];
        const uint32_t split[2] = {2, 3};
        const uint64_t choice = (step + (uint64_t)e) % 3;
        spw_tier_target target = SPW_TIER_TARGET_INIT;
        if (e == 0) {
            target.path_blocks = split;
            target.path_count = 2;
        } else {
            target.path = (uint32_t)choice - 1;
        }
        OK(spw_tier_put(tier, extents[e], streams, e > 0 && choice == 0 ? NULL : &target, &tickets[e]));
    }
    for (int e = 0; e < EXTENTS; e++) {
        OK(spw_tier_wait(tier, tickets[e], FOR_EVER, NULL));
        for (int s = 0; s < STREAMS; s++) free(memory[e][s]);
    }
}

static void child(uint64_t round) {
    spw_tier *tier = open_tier(round % 2 == 0 ? SPW_TIER_DURABILITY_DATA : SPW_TIER_DURABILITY_PROCESS);
    spw_tier_opened_info found = {.struct_size = sizeof found};
    uint64_t kept = 0;
    OK(spw_tier_get_opened(tier, &found, &kept, sizeof kept));
    uint32_t extents[EXTENTS];
    for (int e = 0; e < EXTENTS; e++) OK(spw_tier_define(tier, names[e], sizes[e], STREAMS, &extents[e]));
    CHECK(found.step >= page->acknowledged && found.step <= page->begun);
    if (found.resumed) {
        CHECK(kept == found.step);
        check(tier, extents, found.step);
        if (round % 8 == 0) OK(spw_tier_verify(tier, NULL));
        page->checked++;
    }
    page->opens++;
    // A commit that began and was never seen may only reappear as this step.
    page->begun = found.step;
    page->acknowledged = found.step;
    for (uint64_t step = found.step + 1;; step++) {
        put_step(tier, extents, step);
        if (step % 5 == 0) {
            OK(spw_tier_rollback(tier));
            put_step(tier, extents, step);
        }
        page->begun = step;
        OK(spw_tier_commit(tier, step, &step, sizeof step));
        page->acknowledged = step;
    }
}

static void share_page(const char *file) {
    int fd = -1, flags = MAP_SHARED | MAP_ANONYMOUS;
    if (file != NULL) {
        fd = open(file, O_RDWR | O_CREAT, 0600);
        CHECK(fd >= 0 && ftruncate(fd, 4096) == 0);
        flags = MAP_SHARED;
    }
    page = mmap(NULL, 4096, PROT_READ | PROT_WRITE, flags, fd, 0);
    CHECK(page != MAP_FAILED);
}

static void check_copy(uint64_t acknowledged, uint64_t begun) {
    spw_tier *tier = open_tier(SPW_TIER_DURABILITY_DATA);
    spw_tier_opened_info found = {.struct_size = sizeof found};
    OK(spw_tier_get_opened(tier, &found, NULL, 0));
    CHECK(found.step >= acknowledged && found.step <= begun);
    uint32_t extents[EXTENTS];
    for (int e = 0; e < EXTENTS; e++) OK(spw_tier_define(tier, names[e], sizes[e], STREAMS, &extents[e]));
    check(tier, extents, found.step);
    OK(spw_tier_verify(tier, NULL));
    OK(spw_tier_close(tier, FOR_EVER));
    printf("%llu of %llu..%llu\n", (unsigned long long)found.step, (unsigned long long)acknowledged,
           (unsigned long long)begun);
}

int main(int count, char **arguments) {
    if (count == 5 || count == 6) {
        for (int n = 0; n < 2; n++) snprintf(directories[n], sizeof directories[n], "%s", arguments[count - 2 + n]);
        if (count == 5) {
            share_page(arguments[2]);
            child(0);
        }
        check_copy(strtoull(arguments[2], NULL, 10), strtoull(arguments[3], NULL, 10));
        return 0;
    }
    const char *wanted = getenv("SPILLWAY_KILL_ROUNDS");
    uint64_t rounds = wanted != NULL ? strtoull(wanted, NULL, 10) : 40;
    char here[4096];
    CHECK(getcwd(here, sizeof here) != NULL);
    for (int n = 0; n < 2; n++) {
        snprintf(directories[n], sizeof directories[n], "%s/path-%d", here, n);
        CHECK(mkdir(directories[n], 0700) == 0 || errno == EEXIST);
        // An earlier run may have been interrupted.
        spw_status status = spw_tier_collect(directories[n], "killed", NULL, 0);
        CHECK(status == SPW_OK || status == SPW_ERR_NOT_FOUND);
    }
    share_page(NULL);
    uint64_t random = mixed((uint64_t)time(NULL));
    // Opening a tier on an emulated processor takes a fifth of a second.
    const uint64_t slow = getenv("SPILLWAY_TEST_EMULATOR") == NULL ? 1 : 8;
    for (uint64_t round = 0; round < rounds; round++) {
        pid_t pid = fork();
        CHECK(pid >= 0);
        if (pid == 0) child(round);
        random = mixed(random);
        // Every fourth child dies early, during the open; the others die after some commits.
        usleep((useconds_t)(slow * (random % (round % 4 == 3 ? 12000 : 90000))));
        CHECK(kill(pid, SIGKILL) == 0);
        int status = 0;
        CHECK(waitpid(pid, &status, 0) == pid);
        CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
    }
    // The machine may have been slow; still, some killed child must have committed.
    CHECK(page->opens > 0);
    pid_t pid = fork();
    if (pid == 0) {
        spw_tier *tier = open_tier(SPW_TIER_DURABILITY_FULL);
        spw_tier_opened_info found = {.struct_size = sizeof found};
        OK(spw_tier_get_opened(tier, &found, NULL, 0));
        CHECK(found.step >= page->acknowledged && found.step <= page->begun);
        OK(spw_tier_verify(tier, NULL));
        OK(spw_tier_destroy(tier));
        _exit(0);
    }
    int status = 0;
    CHECK(waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    if (wanted != NULL) {
        FILE *counts = fopen("counts.txt", "w");
        CHECK(counts != NULL);
        fprintf(counts, "%llu kills, %llu opens, %llu states checked, %llu steps\n", (unsigned long long)rounds,
                (unsigned long long)page->opens, (unsigned long long)page->checked,
                (unsigned long long)page->acknowledged);
        fclose(counts);
    }
    return 0;
}
