// Build: forks
// A writer that is stopped (SIGSTOP) is waited for: readers time out, and read its whole step once it goes on. Signals
// neither end a reader's wait nor shorten it.

#define SPW_EXPERIMENTAL
#include "check.h"

#include <signal.h>
#include <spillway/arena.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { BYTES = 100000, WAIT_MS = 300 };

static volatile sig_atomic_t signals;

static void count(int number) {
    (void)number;
    signals += 1;
}

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

int main(void) {
    alarm(120);
    spw_arena_region region = {sizeof region, 0, "step", BYTES};
    spw_arena_options options = SPW_ARENA_OPTIONS_INIT;
    options.regions = &region;
    options.region_count = 1;
    spw_arena *arena = NULL;
    CHECK_OK(spw_arena_create(&options, &arena));
    spw_arena_info info = SPW_ARENA_INFO_INIT;
    CHECK_OK(spw_arena_get_info(arena, &info));
    int begun[2];
    CHECK(pipe(begun) == 0);
    const pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        spw_arena *own = NULL;
        CHECK_OK(spw_arena_open_fd(info.fd, SPW_ARENA_OPEN_FLAG_WRITE, &own));
        spw_arena_region_info found = SPW_ARENA_REGION_INFO_INIT;
        CHECK_OK(spw_arena_get_region(own, 0, &found, NULL, 0, NULL));
        CHECK_OK(spw_arena_write_begin(own, 0, 1, NULL));
        memset(found.address, 1, BYTES / 2);
        CHECK(write(begun[1], "x", 1) == 1);
        raise(SIGSTOP);
        memset(found.address, 1, BYTES);
        CHECK_OK(spw_arena_write_end(own, 0));
        _exit(0);
    }
    char byte;
    CHECK(read(begun[0], &byte, 1) == 1);
    CHECK(waitpid(pid, NULL, WUNTRACED) == pid);

    struct sigaction action = {.sa_handler = count};
    CHECK(sigaction(SIGALRM, &action, NULL) == 0);
    const struct itimerval often = {{0, 2000}, {0, 2000}}, never = {{0, 0}, {0, 0}};
    CHECK(setitimer(ITIMER_REAL, &often, NULL) == 0);
    static unsigned char copy[BYTES];
    char words[64];
    snprintf(words, sizeof words, "process %d is writing region \"step\"", (int)pid);
    const double start = seconds();
    REFUSED(spw_arena_read(arena, 0, 0, 0, copy, BYTES, WAIT_MS, NULL), SPW_ERR_TIMEOUT, words);
    CHECK(seconds() - start >= WAIT_MS / 1000.0);
    CHECK(signals > 0);
    CHECK_OK(kill(pid, SIGCONT) == 0 ? SPW_OK : SPW_ERR_SYSTEM);
    uint64_t generation = 0;
    CHECK_OK(spw_arena_read(arena, 0, 1, 0, copy, BYTES, -1, &generation));
    CHECK(setitimer(ITIMER_REAL, &never, NULL) == 0);
    CHECK(generation == 1);
    for (int i = 0; i < BYTES; i++) CHECK(copy[i] == 1);
    CHECK(waitpid(pid, NULL, 0) == pid);
    CHECK_OK(spw_arena_close(arena));
    return 0;
}
