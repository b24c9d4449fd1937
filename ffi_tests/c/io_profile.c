// The library reads the profile that SPILLWAY_PROFILE names. A profile that is malformed, of another version or of
// another file system causes a warning that names it; no call fails.

#include "check.h"

#include <sys/statfs.h>
#include <sys/statvfs.h>
#include <unistd.h>

enum { FOR_EVER = -1, BYTES = 1 << 20 };

static char directory[4096], profile[8192], file[8192], messages[1 << 16];
static unsigned char *memory;

static void keep(void *user, int32_t level, const char *message) {
    (void)user;
    size_t used = strlen(messages);
    snprintf(messages + used, sizeof messages - used, "%d: %s\n", level, message);
}

static void write_profile(const char *text) {
    FILE *to = fopen(profile, "w");
    CHECK(to != NULL && fputs(text, to) >= 0 && fclose(to) == 0);
}

static spw_io_stats stats;
static char words[9000];

// The number of requests that a read of one MiB takes.
static uint64_t requests(void) {
    messages[0] = 0;
    spw_io *io = NULL;
    uint64_t handle = 0;
    CHECK(spw_io_open(NULL, &io) == SPW_OK);
    spw_io_request request = {.struct_size = sizeof request, .path = file, .buffer = memory, .bytes = BYTES};
    CHECK(spw_io_read(io, &request, &handle) == SPW_OK && spw_io_wait(io, &handle, 1, FOR_EVER, NULL) == SPW_OK);
    stats = (spw_io_stats){.struct_size = sizeof stats};
    CHECK(spw_io_get_stats(io, &stats) == SPW_OK && stats.failed == 0);
    CHECK(spw_io_describe(io, words, sizeof words, NULL) == SPW_OK);
    CHECK(spw_io_close(io, FOR_EVER) == SPW_OK);
    return stats.requests;
}

static void a_good_one_changes_the_requests(void) {
    struct statfs kind;
    struct statvfs id;
    CHECK(statfs(directory, &kind) == 0 && statvfs(directory, &id) == 0);
    if (id.f_fsid == 0) return; // The device number is used then; the library's own test has that case.
    char text[1024];
    const char *format = "{\"version\": 2, \"filesystems\": {\"%lx-%lx\": {\"backend\": \"io_uring\", "
                         "\"block_bytes\": 65536, \"queue_depth\": 4}}}\n";
    snprintf(text, sizeof text, format, (unsigned long)kind.f_type, id.f_fsid);
    write_profile(text);
    CHECK(requests() == BYTES / 65536 && strstr(messages, profile) && !strstr(messages, "2: "));
    CHECK(stats.queue_depth == 4 && stats.block_bytes == 65536 && strstr(words, profile));
    snprintf(text, sizeof text, format, (unsigned long)kind.f_type, id.f_fsid + 1);
    write_profile(text);
    CHECK(requests() < BYTES / 65536 && strstr(messages, "2: ") && strstr(messages, "has no entry"));
}

int main(void) {
    const char *base = getenv("TMPDIR");
    snprintf(directory, sizeof directory, "%s/spillway-io-XXXXXX", base ? base : P_tmpdir);
    CHECK(mkdtemp(directory) != NULL);
    snprintf(profile, sizeof profile, "%s/profile", directory);
    snprintf(file, sizeof file, "%s/file", directory);
    void *start = NULL;
    CHECK(spw_pinned_alloc(NULL, BYTES, &start) == SPW_OK);
    memory = start;
    FILE *to = fopen(file, "w");
    CHECK(to != NULL && fwrite(memory, 1, BYTES, to) == BYTES && fclose(to) == 0);
    CHECK(spw_set_log(keep, NULL, SPW_LOG_LEVEL_INFO) == SPW_OK && setenv("SPILLWAY_PROFILE", profile, 1) == 0);

    uint64_t normal = requests(); // The profile does not exist yet.
    CHECK(normal > 0 && !strstr(messages, "profile") && stats.queue_depth == 32 && stats.block_bytes == BYTES);
    const char *bad[] = {"queue_depth = 3\n", "{\"version\": 1}",
                         "{\"version\": 2, \"filesystems\": {\"x\": {}}}"};
    for (int n = 0; n < 3; n++) {
        write_profile(bad[n]);
        CHECK(requests() == normal && strstr(messages, "2: ") && strstr(messages, profile));
        CHECK(requests() == normal && !strstr(messages, profile)); // The warning appears once.
    }
    CHECK(unlink(profile) == 0 && symlink(profile, profile) == 0);
    CHECK(requests() == normal && strstr(messages, profile) && unlink(profile) == 0);
    a_good_one_changes_the_requests();

    CHECK(spw_set_log(NULL, NULL, SPW_LOG_LEVEL_OFF) == SPW_OK);
    CHECK(spw_pinned_free(start) == SPW_OK);
    unlink(profile);
    unlink(file);
    CHECK(rmdir(directory) == 0);
    return 0;
}
