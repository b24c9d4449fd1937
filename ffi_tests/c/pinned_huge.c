// A large allocation uses the 2 MiB pages that the administrator reserved, as the system says. It then works like any other:
// locked memory, direct I/O, unchanged bytes. The test reserves the pages itself and releases them.

#include "check.h"
#include <spillway.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

// Small allocations share a larger mapping.
enum { HUGE_PAGE = 2 << 20, PAGES = 10, TRIES = 20, FOR_EVER = -1 };
// More pages than the memory needs: programs that run at the same time take reserved pages, too.
enum { EXTRA = 64 };

static const char setting[] = "/proc/sys/vm/nr_hugepages";
static long before = -1;

static long number_in(const char *path, const char *format) {
    char line[256];
    long found = -1;
    FILE *file = fopen(path, "r");
    CHECK(file != NULL);
    while (found < 0 && fgets(line, sizeof line, file)) sscanf(line, format, &found);
    fclose(file);
    return found;
}

static int reserve(long pages) {
    FILE *file = fopen(setting, "w");
    if (file == NULL) return 0;
    int written = fprintf(file, "%ld\n", pages) > 0;
    return fclose(file) == 0 && written;
}

static unsigned char *allocate(void) {
    void *start = NULL;
    CHECK(spw_pinned_alloc(NULL, (uint64_t)PAGES * HUGE_PAGE, &start) == SPW_OK);
    return start;
}

static long reserved_pages_in_use(void) {
    return number_in("/proc/self/status", "HugetlbPages: %ld") / (HUGE_PAGE >> 10);
}

static void move(spw_io *io, spw_status (*begin)(const spw_io *, const spw_io_request *, uint64_t *), const char *path,
                 unsigned char *block) {
    const spw_io_request request = {
        .struct_size = sizeof request, .fd = -1, .path = path, .buffer = block, .bytes = HUGE_PAGE};
    uint64_t handle = 0, moved = 0;
    CHECK(begin(io, &request, &handle) == SPW_OK && spw_io_wait(io, &handle, 1, FOR_EVER, &moved) == SPW_OK);
    CHECK(moved == HUGE_PAGE);
}

static void goes_to_a_file_and_back(unsigned char *from) {
    char path[] = "pinned_huge.XXXXXX";
    int fd = mkstemp(path);
    CHECK(fd >= 0);
    spw_io *io = NULL;
    CHECK(spw_io_open(NULL, &io) == SPW_OK);
    unsigned char *to = from + HUGE_PAGE;
    for (size_t n = 0; n < HUGE_PAGE; n++) from[n] = (unsigned char)(n * 2654435761u >> 13);
    memset(to, 0, HUGE_PAGE);
    move(io, spw_io_write, path, from);
    move(io, spw_io_read, path, to);
    CHECK(memcmp(from, to, HUGE_PAGE) == 0);
    spw_io_stats stats = {.struct_size = sizeof stats};
    CHECK(spw_io_get_stats(io, &stats) == SPW_OK && stats.bounced_bytes == 0);
    CHECK(spw_io_close(io, FOR_EVER) == SPW_OK);
    unlink(path);
    close(fd);
}

static unsigned char *allocate_reserved_pages(void) {
    for (int n = 0; n < TRIES; n++) {
        CHECK(reserve(before + PAGES + EXTRA));
        if (number_in("/proc/meminfo", "HugePages_Free: %ld") < PAGES) continue;
        unsigned char *start = allocate();
        if (reserved_pages_in_use() == PAGES) return start;
        CHECK(spw_pinned_free(start) == SPW_OK);
    }
    if (number_in("/proc/meminfo", "HugePages_Free: %ld") < PAGES) skip("too few free 2 MiB pages");
    fail(__FILE__, __LINE__, "there are reserved pages, but the allocation does not use them");
    return NULL;
}

static void an_allocation_takes_them(void) {
    unsigned char *start = allocate_reserved_pages();
    spw_pinned_stats stats = SPW_PINNED_STATS_INIT;
    CHECK(spw_pinned_get_stats(&stats) == SPW_OK);
    CHECK(stats.mapped_bytes == (uint64_t)PAGES * HUGE_PAGE && stats.locked_bytes == stats.mapped_bytes);
    goes_to_a_file_and_back(start);
    CHECK(spw_pinned_free(start) == SPW_OK);
    CHECK(reserved_pages_in_use() == 0);
}

int main(void) {
    if (getenv("SPILLWAY_TEST_EMULATOR") != NULL) skip("the emulator does not support reserved pages");
    if (access("/sys/kernel/mm/hugepages/hugepages-2048kB", F_OK) != 0) skip("this kernel has no 2 MiB pages");
    before = number_in(setting, "%ld");
    if (!reserve(before)) skip("reserving 2 MiB pages needs root and a writable /proc/sys");
    // The setting is restored in every case, also if the child dies.
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        an_allocation_takes_them();
        return 0;
    }
    int status = -1;
    pid_t ended = waitpid(child, &status, 0);
    CHECK(reserve(before));
    CHECK(ended == child && WIFEXITED(status));
    return WEXITSTATUS(status);
}
