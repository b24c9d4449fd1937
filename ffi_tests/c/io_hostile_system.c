// Cases: a full file system, 4096-byte sectors, no O_DIRECT, and a user who may lock no memory. Each works
// or reports why not.
// Needs root, to mount; without it the test is ignored.

#include "child.h"

#include <fcntl.h>
#include <sched.h>
#include <stdbool.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>

enum { FOR_EVER = -1, BYTES = 3000001, NOBODY = 65534 };

static char directory[4096];
static unsigned char *memory;
static unsigned char *expected;

static const char *in_directory(const char *name) {
    static char path[8192];
    snprintf(path, sizeof path, "%s/%s", directory, name);
    return path;
}

static spw_io *open_engine(uint32_t backend) {
    spw_io_options options = {.struct_size = sizeof options, .backend = backend};
    spw_io *io = NULL;
    CHECK(spw_io_open(&options, &io) == SPW_OK);
    return io;
}

static spw_status run(spw_io *io, bool write, const char *path, uint64_t offset, void *buffer, uint64_t bytes) {
    spw_io_request what = {.struct_size = sizeof what, .path = path, .offset = offset, .buffer = buffer};
    what.bytes = bytes;
    uint64_t handle = 0;
    spw_status status = write ? spw_io_write(io, &what, &handle) : spw_io_read(io, &what, &handle);
    return status != SPW_OK ? status : spw_io_wait(io, &handle, 1, FOR_EVER, NULL);
}

static void round_trip(spw_io *io, const char *path) {
    for (size_t i = 0; i < BYTES; i++) {
        expected[i] = (unsigned char)(i * 2654435761u >> 13);
    }
    for (uint64_t offset = 0; offset < 1025; offset += 512) {
        memcpy(memory + offset, expected, BYTES);
        CHECK(run(io, true, path, offset, memory + offset, BYTES) == SPW_OK);
        memset(memory, 0, BYTES + 4096);
        CHECK(run(io, false, path, offset, memory + offset, BYTES) == SPW_OK);
        CHECK(memcmp(memory + offset, expected, BYTES) == 0);
    }
}

static void a_full_file_system(uint32_t backend) {
    CHECK(mount("none", directory, "tmpfs", 0, "size=8m") == 0);
    spw_io *io = open_engine(backend);
    round_trip(io, in_directory("fits"));
    spw_status status = SPW_OK;
    for (uint64_t n = 0; status == SPW_OK && n < 10; n++) {
        status = run(io, true, in_directory("full"), n * BYTES, memory, BYTES);
    }
    CHECK(status == SPW_ERR_NO_SPACE && strstr(spw_last_error(), "full") && strstr(spw_last_error(), "errno 28"));
    CHECK(run(io, false, in_directory("fits"), 1024, memory, BYTES) == SPW_OK);
    CHECK(memcmp(memory, expected, BYTES) == 0);
    CHECK(spw_io_close(io, FOR_EVER) == SPW_OK);
    CHECK(umount(directory) == 0);
}

static void a_file_system_without_direct_io(uint32_t backend) {
    CHECK(mount("none", directory, "ramfs", 0, NULL) == 0);
    spw_io *io = open_engine(backend);
    round_trip(io, in_directory("buffered"));
    char words[256];
    CHECK(spw_io_describe(io, words, sizeof words, NULL) == SPW_OK && strstr(words, "does not support O_DIRECT"));
    CHECK(spw_io_close(io, FOR_EVER) == SPW_OK);
    CHECK(umount(directory) == 0);
}

// Whether the system reports the alignment of direct I/O (STATX_DIOALIGN). Older kernels and emulators leave the number
// out; older headers lack its name.
static bool alignment_is_told(const char *path) {
    enum { DIOALIGN = 0x2000, STX_DIO_OFFSET_ALIGN = 0x9c };
    struct statx found = {0};
    uint32_t alignment = 0;
    CHECK(statx(AT_FDCWD, path, 0, DIOALIGN, &found) == 0);
    memcpy(&alignment, (const char *)&found + STX_DIO_OFFSET_ALIGN, sizeof alignment);
    return alignment != 0;
}

// A loop device over a file on tmpfs, if the tools are installed.
static bool sectors_of_4096_bytes(uint32_t backend) {
    char command[16384];
    const char *set_up = "d=%s; mount -t tmpfs none $d && truncate -s 64m $d/image && mkdir $d/mounted &&"
                         " l=$(losetup -f --show -b 4096 --direct-io=on $d/image) && mkfs.ext4 -qF $l && mount $l"
                         " $d/mounted && losetup -d $l";
    snprintf(command, sizeof command, set_up, directory);
    if (system(command) != 0) {
        umount(directory);
        return false;
    }
    spw_io *io = open_engine(backend);
    round_trip(io, in_directory("mounted/sectors"));
    spw_io_stats stats = {.struct_size = sizeof stats};
    CHECK(spw_io_get_stats(io, &stats) == SPW_OK);
    CHECK(stats.direct_bytes > stats.buffered_bytes || !alignment_is_told(in_directory("mounted/sectors")));
    CHECK(spw_io_close(io, FOR_EVER) == SPW_OK);
    CHECK(umount(in_directory("mounted")) == 0 && umount(directory) == 0);
    return true;
}

static void a_user_who_may_lock_little(uint32_t backend, rlim_t bytes) {
    CHECK(mount("none", directory, "tmpfs", 0, "mode=777") == 0);
    pid_t child = fork();
    if (child == 0) {
        struct rlimit limit = {bytes, bytes};
        CHECK(setrlimit(RLIMIT_MEMLOCK, &limit) == 0 && setgid(NOBODY) == 0 && setuid(NOBODY) == 0);
        void *start = NULL;
        CHECK(spw_pinned_alloc(NULL, BYTES + 4096, &start) == SPW_OK);
        memory = start;
        spw_pinned_stats stats = {.struct_size = sizeof stats};
        CHECK(spw_pinned_get_stats(&stats) == SPW_OK);
#ifndef __SANITIZE_ADDRESS__ // The sanitizer replaces mlock and always reports success.
        CHECK(stats.locked_bytes == 0);
#endif
        spw_io *io = open_engine(backend);
        round_trip(io, in_directory("locked"));
        CHECK(spw_io_close(io, FOR_EVER) == SPW_OK && spw_pinned_free(start) == SPW_OK);
        _exit(0);
    }
    finish(child, "a user with little locked memory");
    CHECK(umount(directory) == 0);
}

int main(void) {
    if (geteuid() != 0 || unshare(CLONE_NEWNS) != 0 || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) != 0) {
        puts("needs root, to mount file systems");
        return SKIPPED;
    }
    const char *base = getenv("TMPDIR");
    snprintf(directory, sizeof directory, "%s/spillway-io-XXXXXX", base ? base : P_tmpdir);
    CHECK(mkdtemp(directory) != NULL);
    void *start = NULL;
    CHECK(spw_pinned_alloc(NULL, BYTES + 4096, &start) == SPW_OK);
    expected = malloc(BYTES);
    bool sectors = true;
    const uint32_t backends[] = {SPW_IO_BACKEND_THREADS, SPW_IO_BACKEND_AUTO};
    for (int b = 0; b < 2; b++) {
        memory = start;
        a_full_file_system(backends[b]);
        a_file_system_without_direct_io(backends[b]);
        sectors = sectors && sectors_of_4096_bytes(backends[b]);
        a_user_who_may_lock_little(backends[b], 64 << 10);
        a_user_who_may_lock_little(backends[b], 0);
    }
    // All other checks have passed by now.
    if (!sectors && getenv("SPILLWAY_TEST_EMULATOR") == NULL) {
        fputs("no loop device with 4096-byte sectors: load the kernel module loop\n", stderr);
        return 1;
    }
    CHECK(rmdir(directory) == 0 && spw_pinned_free(start) == SPW_OK);
    free(expected);
    return 0;
}
