// Data at any address, offset and length is written to a file and read back; every failure is
// reported; on both backends.

#include "child.h"

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <sys/resource.h>
#include <sys/stat.h>

enum { FOR_EVER = -1, LARGEST = 3 << 20 };

static char directory[4096];
static unsigned char *memory;
static unsigned char *expected;

static const char *in_directory(const char *name) {
    static char path[8192];
    snprintf(path, sizeof path, "%s/%s", directory, name);
    return path;
}

static spw_io *open_engine(uint32_t backend) {
    spw_io_options options = {.struct_size = sizeof options, .backend = backend, .block_bytes = 64 << 10};
    spw_io *io = NULL;
    return spw_io_open(&options, &io) == SPW_OK ? io : NULL;
}

static spw_io_request request(const char *path, uint64_t offset, void *buffer, uint64_t bytes) {
    spw_io_request made = {.struct_size = sizeof made, .fd = -1, .path = path, .offset = offset, .buffer = buffer};
    made.bytes = bytes;
    return made;
}

static spw_status run(spw_io *io, bool write, spw_io_request what, uint64_t *bytes) {
    uint64_t handle = 0;
    spw_status status = write ? spw_io_write(io, &what, &handle) : spw_io_read(io, &what, &handle);
    return status != SPW_OK ? status : spw_io_wait(io, &handle, 1, FOR_EVER, bytes);
}

static void fill_bytes(unsigned char *bytes, size_t count, unsigned seed) {
    for (size_t i = 0; i < count; i++) {
        seed = seed * 1664525u + 1013904223u;
        bytes[i] = (unsigned char)(seed >> 24);
    }
}

static void round_trips(spw_io *io) {
    const size_t lengths[] = {1, 511, 4096, 4097, 70000, LARGEST - 4096};
    const size_t places[] = {0, 1, 512, 4095};
    const char *path = in_directory("round-trip");
    for (size_t l = 0; l < sizeof lengths / sizeof *lengths; l++) {
        for (size_t a = 0; a < 4; a++) {
            for (size_t o = 0; o < 4; o++) {
                size_t count = lengths[l];
                uint64_t moved = 0;
                fill_bytes(expected, count, (unsigned)(l * 16 + a * 4 + o + 1));
                memcpy(memory + places[a], expected, count);
                CHECK(run(io, true, request(path, places[o], memory + places[a], count), &moved) == SPW_OK);
                CHECK(moved == count);
                memset(memory, 0, LARGEST);
                CHECK(run(io, false, request(path, places[o], memory + places[a], count), NULL) == SPW_OK);
                CHECK(memcmp(memory + places[a], expected, count) == 0);
            }
        }
    }
    spw_io_stats stats = {.struct_size = sizeof stats};
    CHECK(spw_io_get_stats(io, &stats) == SPW_OK && stats.failed == 0 && stats.reads == 96 && stats.writes == 96);
}

static void many_and_one_wait(spw_io *io) {
    uint64_t handle = 0;
    CHECK(spw_io_wait(io, NULL, SPW_IO_ALL, 0, NULL) == SPW_OK);
    const char *path = in_directory("many");
    fill_bytes(expected, LARGEST, 7);
    memcpy(memory, expected, LARGEST);
    for (size_t n = 0; n < 96; n++) {
        spw_io_request one = request(path, n << 15, memory + (n << 15), 1 << 15);
        CHECK(spw_io_write(io, &one, &handle) == SPW_OK);
    }
    CHECK(spw_io_wait(io, NULL, SPW_IO_ALL, FOR_EVER, NULL) == SPW_OK);
    CHECK(spw_io_wait(io, &handle, 1, FOR_EVER, NULL) == SPW_ERR_INVALID_ARGUMENT);
    CHECK(spw_io_wait(io, &handle, SPW_IO_ALL, FOR_EVER, NULL) == SPW_ERR_INVALID_ARGUMENT);
    memset(memory, 0, LARGEST);
    CHECK(run(io, false, request(path, 0, memory, LARGEST), NULL) == SPW_OK);
    CHECK(memcmp(memory, expected, LARGEST) == 0);
}

// A wait for some of many operations leaves the others in flight; an error reports how many more errors there were.
static void a_wait_for_some(spw_io *io) {
    const char *path = in_directory("many");
    uint64_t handles[8];
    for (uint64_t n = 0; n < 8; n++) {
        spw_io_request one = request(path, n < 6 ? n << 15 : LARGEST, memory + (n << 15), 1 << 15);
        CHECK(spw_io_read(io, &one, &handles[n]) == SPW_OK);
    }
    CHECK(spw_io_wait(io, handles, 3, FOR_EVER, NULL) == SPW_OK);
    CHECK(spw_io_wait(io, handles, 1, 0, NULL) == SPW_ERR_INVALID_ARGUMENT);
    CHECK(spw_io_wait(io, handles + 4, 4, FOR_EVER, NULL) == SPW_ERR_SHORT_FILE);
    CHECK(strstr(spw_last_error(), "1 more operations failed"));
    spw_io_failure failure = {.struct_size = sizeof failure};
    char file[4096];
    const int number = errno;
    CHECK(spw_get_io_failure(0, &failure, file, sizeof file, NULL) == SPW_OK && failure.offset == LARGEST);
    CHECK(failure.bytes == 1 << 15 && failure.system_errno == 0 && strcmp(file, path) == 0);
    CHECK(spw_io_wait(io, NULL, SPW_IO_ALL, FOR_EVER, NULL) == SPW_OK);
    CHECK(spw_io_wait(io, NULL, 0, 0, NULL) == SPW_OK);
    CHECK(spw_io_wait(io, NULL, 1, 0, NULL) == SPW_ERR_INVALID_ARGUMENT);
    uint64_t needed = 0;
    CHECK(spw_get_io_failure(0, &failure, file, sizeof file, &needed) == SPW_OK && failure.bytes == 0);
    CHECK(needed == 1 && strcmp(file, "") == 0);
    // The number of the call finds it after later failures.
    CHECK(spw_get_io_failure(number, &failure, file, sizeof file, NULL) == SPW_OK && failure.bytes == 1 << 15);
    CHECK(strcmp(file, path) == 0);
    CHECK(run(io, false, request(in_directory("absent"), 0, memory, 1), NULL) == SPW_ERR_NOT_FOUND);
    CHECK(spw_get_io_failure(0, &failure, NULL, 0, NULL) == SPW_OK && failure.system_errno == ENOENT);
    CHECK(spw_get_io_failure(0, NULL, NULL, 0, NULL) == SPW_ERR_INVALID_ARGUMENT);
}

static void failures_are_named(spw_io *io) {
    const char *path = in_directory("short");
    CHECK(run(io, true, request(path, 0, memory, 10000), NULL) == SPW_OK);
    uint64_t moved = 42;
    CHECK(run(io, false, request(path, 0, memory, 20000), &moved) == SPW_ERR_SHORT_FILE && moved == 42);
    CHECK(strstr(spw_last_error(), "10000") && strstr(spw_last_error(), "20000") && strstr(spw_last_error(), path));
    CHECK(run(io, true, request(in_directory("no/file"), 0, memory, 1), NULL) == SPW_ERR_NOT_FOUND);
    CHECK(run(io, false, request(in_directory("absent"), 0, memory, 1), NULL) == SPW_ERR_NOT_FOUND);
    CHECK(run(io, false, request(directory, 0, memory, 1), NULL) == SPW_ERR_INVALID_ARGUMENT);
    CHECK(run(io, false, request(path, 0, NULL, 1), NULL) == SPW_ERR_INVALID_ARGUMENT);
    CHECK(run(io, false, request(path, UINT64_MAX, memory, 1), NULL) == SPW_ERR_INVALID_ARGUMENT);
    CHECK(run(io, false, request(NULL, 0, memory, 1), NULL) == SPW_ERR_IO);
    spw_io_request old = {.struct_size = 8};
    CHECK(spw_io_read(io, &old, &moved) == SPW_ERR_INVALID_ARGUMENT && moved == 42);
    const uint64_t unknown = 12345;
    CHECK(spw_io_wait(io, &unknown, 1, 0, NULL) == SPW_ERR_INVALID_ARGUMENT);
}

static void descriptors_are_borrowed(spw_io *io) {
    int fd = open(in_directory("descriptor"), O_RDWR | O_CREAT, 0600);
    fill_bytes(memory, 5000, 3);
    spw_io_request write = request(NULL, 10, memory, 5000);
    write.fd = fd;
    CHECK(run(io, true, write, NULL) == SPW_OK);
    CHECK(pread(fd, expected, 5000, 10) == 5000 && memcmp(memory, expected, 5000) == 0);
    CHECK(close(fd) == 0);
}

// Runs in a child, because the limit stays. SIGXFSZ keeps its default action, which ends the process.
static void the_file_size_limit_is_an_error(uint32_t backend) {
    pid_t child = fork();
    if (child == 0) {
        spw_io *io = open_engine(backend);
        struct rlimit limit = {1 << 20, 1 << 20};
        CHECK(signal(SIGXFSZ, SIG_DFL) != SIG_ERR && setrlimit(RLIMIT_FSIZE, &limit) == 0);
        CHECK(run(io, true, request(in_directory("limited"), 0, memory, 2 << 20), NULL) == SPW_ERR_IO);
        CHECK(strstr(spw_last_error(), "errno 27") && strstr(spw_last_error(), "limited"));
        CHECK(run(io, true, request(in_directory("limited"), 1 << 20, memory, 100), NULL) == SPW_ERR_IO);
        CHECK(spw_io_close(io, FOR_EVER) == SPW_OK);
        _exit(0);
    }
    finish(child, "a child");
}

static void a_child_gets_errors_and_can_open_its_own(spw_io *io, uint32_t backend) {
    pid_t child = fork();
    if (child == 0) {
        alarm(60);
        CHECK(run(io, false, request(in_directory("short"), 0, memory, 100), NULL) == SPW_ERR_UNSUPPORTED);
        CHECK(spw_io_wait(io, NULL, SPW_IO_ALL, FOR_EVER, NULL) == SPW_ERR_UNSUPPORTED);
        CHECK(spw_io_close(io, FOR_EVER) == SPW_OK);
        spw_io *own = open_engine(backend);
        CHECK(run(own, false, request(in_directory("short"), 0, memory, 100), NULL) == SPW_OK);
        CHECK(spw_io_close(own, FOR_EVER) == SPW_OK);
        _exit(0);
    }
    finish(child, "a child");
}

static void engines_come_and_go(uint32_t backend) {
    for (int n = 0; n < 500; n++) {
        spw_io *io = open_engine(backend);
        CHECK(io != NULL);
        uint64_t handle = 0;
        spw_io_request one = request(in_directory("short"), 0, memory, 4096);
        CHECK(spw_io_read(io, &one, &handle) == SPW_OK);
        CHECK(spw_io_close(io, FOR_EVER) == SPW_OK);
    }
}

int main(void) {
    const char *base = getenv("TMPDIR");
    snprintf(directory, sizeof directory, "%s/spillway-io-XXXXXX", base ? base : P_tmpdir);
    CHECK(mkdtemp(directory) != NULL);
    void *start = NULL;
    CHECK(spw_pinned_alloc(NULL, LARGEST + 4096, &start) == SPW_OK);
    memory = start;
    expected = malloc(LARGEST);
    const uint32_t backends[] = {SPW_IO_BACKEND_THREADS, SPW_IO_BACKEND_URING};
    for (int b = 0; b < 2; b++) {
        spw_io *io = open_engine(backends[b]);
        // The emulator has no io_uring; on other systems both backends must work.
        if (io == NULL && getenv("SPILLWAY_TEST_EMULATOR") != NULL) continue;
        CHECK(io != NULL);
        round_trips(io);
        many_and_one_wait(io);
        a_wait_for_some(io);
        failures_are_named(io);
        descriptors_are_borrowed(io);
        the_file_size_limit_is_an_error(backends[b]);
        a_child_gets_errors_and_can_open_its_own(io, backends[b]);
        CHECK(spw_io_close(io, FOR_EVER) == SPW_OK);
        engines_come_and_go(backends[b]);
    }
    CHECK(spw_io_close(NULL, 0) == SPW_OK);
    CHECK(spw_pinned_free(start) == SPW_OK && spw_pinned_free(start) == SPW_ERR_INVALID_ARGUMENT);
    const char *names[] = {"round-trip", "many", "short", "descriptor", "limited"};
    for (int n = 0; n < 5; n++) {
        unlink(in_directory(names[n]));
    }
    CHECK(rmdir(directory) == 0);
    free(expected);
    return 0;
}
