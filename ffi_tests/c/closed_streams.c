// Build: forks
// In a program without standard streams, no descriptor of the library has the number of one: what the log or the program
// writes to its standard error reaches no file of the library.

#define SPW_EXPERIMENTAL
#include "check.h"

#include <fcntl.h>
#include <spillway/arena.h>
#include <sys/wait.h>
#include <unistd.h>

static char name[64];

static spw_arena_options arena_of(const char *called, spw_arena_region *region) {
    *region = (spw_arena_region){sizeof *region, 0, "only", 4096};
    spw_arena_options options = SPW_ARENA_OPTIONS_INIT;
    options.regions = region;
    options.region_count = 1;
    options.processes = 2;
    options.name = called;
    return options;
}

// The statuses of exit say which step failed: there is no stream to say it on.
static int child(const char *file) {
    for (int fd = 0; fd < 3; fd++) close(fd);
    spw_arena_region region;
    spw_arena_options options = arena_of(NULL, &region);
    spw_arena *unnamed = NULL, *named = NULL, *other = NULL;
    if (spw_arena_create(&options, &unnamed) != SPW_OK) return 10;
    options = arena_of(name, &region);
    if (spw_arena_create(&options, &named) != SPW_OK) return 11;
    if (spw_arena_open(name, 0, 0, &other) != SPW_OK) return 12;
    const uint32_t backends[] = {SPW_IO_BACKEND_AUTO, SPW_IO_BACKEND_THREADS};
    spw_io *engines[2] = {NULL, NULL};
    for (int i = 0; i < 2; i++) {
        const spw_io_options io = {.struct_size = sizeof io, .backend = backends[i]};
        if (spw_io_open(&io, &engines[i]) != SPW_OK) return 13;
        static char bytes[8192];
        const spw_io_request request = {
            .struct_size = sizeof request, .fd = -1, .path = file, .buffer = bytes, .bytes = sizeof bytes};
        uint64_t handle = 0;
        if (spw_io_write(engines[i], &request, &handle) != SPW_OK) return 14;
        if (spw_io_wait(engines[i], &handle, 1, -1, NULL) != SPW_OK) return 15;
    }
    spw_spec *speculation = NULL;
    const spw_spec_options spec = {.struct_size = sizeof spec, .buckets = 1, .undo_mode = SPW_UNDO_MODE_DELTA};
    if (spw_spec_open(&spec, &speculation) != SPW_OK) return 16;
    struct problem large = make_mixed(LARGE, 8);
    const spw_adam_options adam = adam_options();
    if (spw_adam_step(&adam, &large.tensor, 1, NULL) != SPW_OK) return 17;
    for (int fd = 0; fd < 3; fd++) {
        if (fcntl(fd, F_GETFD) != -1) return 20 + fd;
    }
    if (spw_arena_close(other) != SPW_OK || spw_arena_close(named) != SPW_OK) return 18;
    return 0;
}

int main(void) {
    snprintf(name, sizeof name, "test-closed-%d", (int)getpid());
    CHECK(setenv("SPILLWAY_LOG", "debug", 1) == 0);
    const pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) _exit(child("closed_streams.data"));
    int outcome = -1;
    CHECK(waitpid(pid, &outcome, 0) == pid && WIFEXITED(outcome));
    unlink("closed_streams.data");
    if (WEXITSTATUS(outcome) != 0) fail(__FILE__, __LINE__, "step %d failed", WEXITSTATUS(outcome));
    return 0;
}
