// With io_uring, the library registers pinned memory and busy files with the kernel, as /proc shows; freed memory
// is no longer registered.

#include "check.h"

#include <dirent.h>
#include <unistd.h>

enum { FOR_EVER = -1, BYTES = 64 << 20 };

static char file[4096];

// Reads the kernel's page about the only ring of this process. Returns its length, or 0.
static size_t ring_page(char *text, size_t size) {
    char path[300], link[256];
    DIR *directory = opendir("/proc/self/fd");
    CHECK(directory != NULL);
    size_t length = 0;
    for (struct dirent *entry; (entry = readdir(directory));) {
        snprintf(path, sizeof path, "/proc/self/fd/%s", entry->d_name);
        ssize_t count = readlink(path, link, sizeof link - 1);
        if (count <= 0 || strncmp(link, "anon_inode:[io_uring]", (size_t)count) != 0) continue;
        snprintf(path, sizeof path, "/proc/self/fdinfo/%s", entry->d_name);
        FILE *page = fopen(path, "r");
        CHECK(page != NULL);
        length = fread(text, 1, size - 1, page);
        fclose(page);
    }
    closedir(directory);
    text[length] = 0;
    return length;
}

// Counts the entries in use in the list under the line that begins with `heading`.
static int listed(const char *text, const char *heading) {
    const char *at = strstr(text, heading);
    int count = 0;
    while (at && (at = strchr(at, '\n')) && *++at == ' ') {
        int number;
        char first = 0;
        count += sscanf(at, " %d: %c", &number, &first) == 2 && first != '<';
    }
    return count;
}

// False also for a page that omits its lists.
static int nothing_listed(const char *text) {
    return strstr(text, "UserBufs") && listed(text, "UserBufs") == 0 && listed(text, "UserFiles") == 0;
}

int main(void) {
    static char text[1 << 16];
    const char *base = getenv("TMPDIR");
    snprintf(file, sizeof file, "%s/spillway-io-XXXXXX", base ? base : P_tmpdir);
    int fd = mkstemp(file);
    CHECK(fd >= 0 && ftruncate(fd, BYTES) == 0 && close(fd) == 0);
    spw_io_options options = {.struct_size = sizeof options, .backend = SPW_IO_BACKEND_URING, .block_bytes = 64 << 10};
    spw_io *io = NULL;
    if (spw_io_open(&options, &io) != SPW_OK) {
        puts(spw_last_error());
        return unlink(file) == 0 ? SKIPPED : 1;
    }
    void *memory = NULL;
    CHECK(spw_pinned_alloc(NULL, BYTES, &memory) == SPW_OK);
    if (ring_page(text, sizeof text) == 0 || !strstr(text, "UserBufs")) {
        puts("this kernel does not show its rings");
        return unlink(file) == 0 ? SKIPPED : 1;
    }
    CHECK(listed(text, "UserBufs") == 0);
    spw_io_request request = {.struct_size = sizeof request, .path = file, .buffer = memory, .bytes = BYTES};
    int buffers = 0, files = 0;
    // The page omits its lists while the ring's thread is inside the kernel.
    for (int n = 0; n < 500 && (buffers == 0 || files == 0); n++) {
        uint64_t handle = 0;
        CHECK(spw_io_read(io, &request, &handle) == SPW_OK);
        while (spw_io_wait(io, &handle, 1, 0, NULL) == SPW_ERR_TIMEOUT) {
            ring_page(text, sizeof text);
            if (listed(text, "UserBufs") > buffers) buffers = listed(text, "UserBufs");
            if (listed(text, "UserFiles") > files) files = listed(text, "UserFiles");
        }
    }
    CHECK(buffers == 1 && files == 1);
    CHECK(spw_pinned_free(memory) == SPW_OK);
    for (int n = 0; n < 5000 && !nothing_listed(text); n++) {
        usleep(1000);
        ring_page(text, sizeof text);
    }
    CHECK(nothing_listed(text));
    CHECK(spw_io_close(io, FOR_EVER) == SPW_OK && unlink(file) == 0);
    return 0;
}
