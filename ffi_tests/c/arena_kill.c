// Build: forks
// A writer that is killed at any moment never lets a reader see a mixed step: the reader gets one whole step, or
// SPW_ERR_ARENA_TORN, and a new writer takes over. A process that is killed before it posts its verdict is noticed.
//
// Every round starts a writer in a child, and kills it after a random time. SPILLWAY_KILL_ROUNDS sets the number of
// rounds (60); counts.txt has the results.

#define SPW_EXPERIMENTAL
#include "check.h"

#include <signal.h>
#include <spillway/arena.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { WORDS = 1 << 15, BYTES = WORDS * 8, FOREVER = -1 };

static uint64_t copy[WORDS];

static const char *name(void) {
    static char text[64];
    snprintf(text, sizeof text, "kill-%d", (int)getpid());
    return text;
}

static spw_arena *create(void) {
    spw_arena_region region = SPW_ARENA_REGION_INIT;
    region.name = "step";
    region.bytes = BYTES;
    spw_arena_options options = SPW_ARENA_OPTIONS_INIT;
    options.name = name();
    options.regions = &region;
    options.region_count = 1;
    options.processes = 2;
    spw_arena *arena = NULL;
    CHECK_OK(spw_arena_create(&options, &arena));
    return arena;
}

static spw_arena *opened(const char *of, uint32_t flags) {
    spw_arena *arena = NULL;
    CHECK_OK(spw_arena_open(of, flags, 0, &arena));
    return arena;
}

static void write_forever(const char *of, int ready) {
    spw_arena *arena = opened(of, SPW_ARENA_OPEN_FLAG_WRITE);
    spw_arena_region_info info = SPW_ARENA_REGION_INFO_INIT;
    CHECK_OK(spw_arena_get_region(arena, 0, &info, NULL, 0, NULL));
    volatile uint64_t *words = info.address;
    for (uint64_t step = info.generation + 1;; step++) {
        uint32_t torn = 0;
        CHECK_OK(spw_arena_write_begin(arena, 0, step, &torn));
        for (int i = 0; i < WORDS; i++) words[i] = step;
        CHECK_OK(spw_arena_write_end(arena, 0));
        if (ready >= 0) {
            CHECK(write(ready, "x", 1) == 1);
            ready = -1;
        }
    }
}

// Reads until the writer is dead. Every read is one whole step, or torn.
static void check_reads(spw_arena *reader, int *torn, uint64_t *last) {
    uint64_t generation = 0;
    const int status = spw_arena_read(reader, 0, 0, 0, copy, BYTES, 20000, &generation);
    if (status == SPW_ERR_ARENA_TORN) {
        CHECK(strstr(spw_last_error(), "step") != NULL);
        *torn += 1;
        return;
    }
    CHECK(status == SPW_OK);
    CHECK(generation >= *last);
    *last = generation;
    for (int i = 0; i < WORDS; i++) CHECK(copy[i] == generation);
}

static void kill_writers(int count) {
    spw_arena *owner = create();
    spw_arena *reader = opened(name(), 0);
    const char *of = name();
    uint64_t seed = 17, last = 0;
    int torn = 0;
    for (int round = 0; round < count; round++) {
        int ready[2];
        CHECK(pipe(ready) == 0);
        const pid_t pid = fork();
        CHECK(pid >= 0);
        if (pid == 0) write_forever(of, ready[1]);
        char byte;
        close(ready[1]);
        CHECK(read(ready[0], &byte, 1) == 1);
        close(ready[0]);
        const struct timespec wait = {0, (long)(random_bits(&seed) % 3000000)};
        for (int i = 0; i < 3; i++) check_reads(reader, &torn, &last);
        CHECK(torn == 0 || round > 0);
        nanosleep(&wait, NULL);
        CHECK(kill(pid, SIGKILL) == 0);
        CHECK(waitpid(pid, NULL, 0) == pid);
        check_reads(reader, &torn, &last);
    }
    // After a last writer that ends well, the region is whole.
    spw_arena_region_info info = SPW_ARENA_REGION_INFO_INIT;
    CHECK_OK(spw_arena_get_region(owner, 0, &info, NULL, 0, NULL));
    CHECK_OK(spw_arena_write_begin(owner, 0, info.generation + 1, NULL));
    for (int i = 0; i < WORDS; i++) ((uint64_t *)info.address)[i] = info.generation + 1;
    CHECK_OK(spw_arena_write_end(owner, 0));
    CHECK_OK(spw_arena_read(reader, 0, info.generation + 1, 0, copy, BYTES, 0, NULL));
    FILE *counts = fopen("counts.txt", "w");
    CHECK(counts != NULL);
    fprintf(counts, "%d kills of a writer, %d torn reads, generation %llu\n", count, torn, (unsigned long long)last);
    CHECK(fclose(counts) == 0);
    CHECK_OK(spw_arena_close(reader));
    CHECK_OK(spw_arena_close(owner));
}

static void kill_before_the_verdict(void) {
    spw_arena *owner = create();
    const char *of = name();
    CHECK_OK(spw_arena_join(owner, 0));
    int joined[2];
    CHECK(pipe(joined) == 0);
    const pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        spw_arena *arena = opened(of, SPW_ARENA_OPEN_FLAG_WRITE);
        CHECK_OK(spw_arena_join(arena, 1));
        CHECK(write(joined[1], "x", 1) == 1);
        for (;;) pause();
    }
    char byte;
    CHECK(read(joined[0], &byte, 1) == 1);
    const spw_step_stats mine = {sizeof mine, 0, 2.0};
    spw_arena_verdict verdict = SPW_ARENA_VERDICT_INIT;
    CHECK_OK(spw_arena_post(owner, 0, 1, &mine, 0));
    REFUSED(spw_arena_wait_verdict(owner, 1, 30, &verdict), SPW_ERR_TIMEOUT, "process 1 has not posted");
    CHECK(kill(pid, SIGKILL) == 0);
    CHECK(waitpid(pid, NULL, 0) == pid);
    REFUSED(spw_arena_wait_verdict(owner, 1, FOREVER, &verdict), SPW_ERR_ARENA_PEER_ENDED, "ended before it posted");
    CHECK_OK(spw_arena_close(owner));
}

static void kill_the_owner(void) {
    int created[2];
    CHECK(pipe(created) == 0);
    const char *of = name();
    const pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        spw_arena_region region = {sizeof region, 0, "step", BYTES};
        spw_arena_options options = SPW_ARENA_OPTIONS_INIT;
        options.name = of;
        options.regions = &region;
        options.region_count = 1;
        spw_arena *arena = NULL;
        CHECK_OK(spw_arena_create(&options, &arena));
        CHECK(write(created[1], "x", 1) == 1);
        for (;;) pause();
    }
    char byte;
    CHECK(read(created[0], &byte, 1) == 1);
    spw_arena *arena = opened(of, 0), *none = NULL;
    REFUSED(spw_arena_collect(of), SPW_ERR_ARENA_EXISTS, "owns it");
    CHECK(kill(pid, SIGKILL) == 0);
    CHECK(waitpid(pid, NULL, 0) == pid);
    spw_arena_info info = SPW_ARENA_INFO_INIT;
    CHECK_OK(spw_arena_get_info(arena, &info));
    CHECK(!info.owner_lives && info.owner_pid == (uint32_t)pid);
    REFUSED(spw_arena_open(of, 0, 0, &none), SPW_ERR_ARENA_PEER_ENDED, "has ended");
    CHECK_OK(spw_arena_collect(of));
    REFUSED(spw_arena_open(of, 0, 0, &none), SPW_ERR_ARENA_MISSING, "does not exist");
    CHECK_OK(spw_arena_read(arena, 0, 0, 0, copy, BYTES, 0, NULL));
    CHECK_OK(spw_arena_close(arena));
}

int main(void) {
    const char *chosen = getenv("SPILLWAY_KILL_ROUNDS");
    alarm(chosen == NULL ? 300 : 3600);
    kill_writers(rounds(chosen == NULL ? 60 : atoi(chosen)));
    kill_before_the_verdict();
    kill_the_owner();
    return 0;
}
