// Data that was written to a tier and committed is read back, and every failure is reported.

#include "check.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

enum { FOR_EVER = -1, BLOCK = 4096 };
static const uint64_t sizes[3] = {100000, 5, 40960};
static char paths_given[3][4200];
static unsigned char put_memory[3][100000], got_memory[3][100000];

static spw_tier_options settings(spw_tier_path *paths, int count) {
    for (int n = 0; n < count; n++) {
        paths[n] = (spw_tier_path){.struct_size = sizeof *paths, .directory = paths_given[n]};
    }
    spw_tier_options options = {.struct_size = sizeof options, .job = "c-test", .paths = paths, .block_bytes = BLOCK};
    options.path_count = (uint64_t)count;
    return options;
}

static spw_tier *open_two(uint32_t mode) {
    spw_tier_path paths[2];
    spw_tier_options options = settings(paths, 2);
    options.mode = mode;
    spw_tier *tier = NULL;
    CHECK_OK(spw_tier_open(&options, &tier));
    return tier;
}

static void put(spw_tier *tier, uint32_t extent, int seed, int32_t path) {
    const void *streams[3];
    for (int s = 0; s < 3; s++) {
        for (uint64_t i = 0; i < sizes[s]; i++) put_memory[s][i] = (unsigned char)(i * 7 + (uint64_t)(seed + s) + i / 251);
        streams[s] = put_memory[s];
    }
    uint64_t ticket = 0, generation = 0;
    spw_tier_target target = SPW_TIER_TARGET_INIT;
    target.path = (uint32_t)path;
    CHECK_OK(spw_tier_put(tier, extent, streams, path < 0 ? NULL : &target, &ticket));
    CHECK_OK(spw_tier_wait(tier, ticket, FOR_EVER, &generation));
    CHECK(generation > 0);
    INVALID(spw_tier_wait(tier, ticket, 0, NULL), "ticket");
}

static spw_status get(spw_tier *tier, uint32_t extent) {
    void *streams[3] = {got_memory[0], got_memory[1], got_memory[2]};
    uint64_t ticket = 0;
    CHECK_OK(spw_tier_get(tier, extent, streams, &ticket));
    return spw_tier_wait(tier, ticket, FOR_EVER, NULL);
}

static int holds(int seed) {
    for (int s = 0; s < 3; s++) {
        for (uint64_t i = 0; i < sizes[s]; i++) {
            if (got_memory[s][i] != (unsigned char)(i * 7 + (uint64_t)(seed + s) + i / 251)) return 0;
        }
    }
    return 1;
}

static uint32_t define(spw_tier *tier, const char *name) {
    uint32_t extent = 99;
    CHECK_OK(spw_tier_define(tier, name, sizes, 3, &extent));
    return extent;
}

static void steps_come_back(void) {
    spw_tier *tier = open_two(SPW_TIER_MODE_CREATE);
    uint32_t first = define(tier, "first"), second = define(tier, "second");
    put(tier, first, 1, 0);
    put(tier, second, 2, 1);
    CHECK_OK(spw_tier_commit(tier, 7, "note", 5));
    put(tier, first, 3, -1);
    CHECK_OK(get(tier, first));
    CHECK(holds(3));
    CHECK_OK(spw_tier_rollback(tier));
    CHECK_OK(get(tier, first));
    CHECK(holds(1));
    put(tier, second, 4, -1);
    CHECK_OK(spw_tier_close(tier, FOR_EVER));

    tier = open_two(SPW_TIER_MODE_RESUME);
    spw_tier_opened_info found = {.struct_size = sizeof found};
    char note[5] = "";
    CHECK_OK(spw_tier_get_opened(tier, &found, note, sizeof note));
    CHECK(found.resumed == 1 && found.step == 7 && found.payload_bytes == 5 && strcmp(note, "note") == 0);
    CHECK(define(tier, "first") == first && define(tier, "second") == second);
    CHECK_OK(get(tier, second));
    CHECK(holds(2));

    spw_tier_extent_info extent = {.struct_size = sizeof extent};
    char name[4] = "";
    CHECK_OK(spw_tier_get_extent(tier, 1, &extent, name, sizeof name, NULL));
    CHECK(extent.extent == second && extent.bytes == 140965 && extent.streams == 3 && extent.committed == 1);
    CHECK(extent.blocks == 25 + 1 + 10 && extent.lost == 0 && strcmp(name, "sec") == 0);
    REFUSED(spw_tier_get_extent(tier, 2, &extent, NULL, 0, NULL), SPW_ERR_NOT_FOUND, "extent 2");
    spw_tier_path_info path = {.struct_size = sizeof path};
    char words[8192];
    CHECK_OK(spw_tier_get_path(tier, 1, &path, words, sizeof words, NULL));
    CHECK(path.health == SPW_TIER_HEALTH_HEALTHY && path.kind == SPW_TIER_PATH_KIND_DIRECTORY && path.blocks == 36);
    CHECK(path.read_bytes >= 140965 && path.wear_bytes >= 140965 && strstr(words, "rank-0") != NULL);
    REFUSED(spw_tier_get_path(tier, 2, &path, NULL, 0, NULL), SPW_ERR_NOT_FOUND, "path 2");
    // The number of a path is no file.
    spw_io_failure failure = {.struct_size = sizeof failure};
    CHECK(spw_get_io_failure(0, &failure, words, sizeof words, NULL) == SPW_OK && words[0] == 0);
    CHECK_OK(spw_tier_close(tier, FOR_EVER));
}

// A file of one extent, and its import under a pattern.
static void tensors_travel(spw_tier *tier) {
    char file[4300];
    snprintf(file, sizeof file, "%s/some.safetensors", paths_given[2]);
    spw_tier_export_options some = SPW_TIER_EXPORT_OPTIONS_INIT;
    some.flags = SPW_TIER_EXPORT_FLAG_SAFETENSORS;
    spw_tier_task *export = NULL;
    some.first = 5;
    some.end = 5;
    INVALID(spw_tier_export(tier, file, &some, &export), "options.end");
    some.first = some.end = 0;
    some.names = "";
    INVALID(spw_tier_export(tier, file, &some, &export), "options.names");
    some.names = "nothing";
    INVALID(spw_tier_export(tier, file, &some, &export), "nothing");
    some.names = "nothing\nfir?t";
    some.dtype = "F128";
    INVALID(spw_tier_export(tier, file, &some, &export), "F128");
    some.dtype = NULL;
    uint64_t step = 0, imported = 0;
    CHECK_OK(spw_tier_export(tier, file, &some, &export));
    CHECK_OK(spw_tier_task_wait(export, FOR_EVER, &step));
    CHECK_OK(spw_tier_task_close(export));
    INVALID(spw_tier_import(tier, file, "second", &imported), "second");
    CHECK_OK(spw_tier_import(tier, file, "*st", &imported));
    CHECK(imported == step);
    // A directory has whole extents, of some names or of all.
    char directory[4300];
    snprintf(directory, sizeof directory, "%s/some", paths_given[2]);
    some.flags = 4;
    INVALID(spw_tier_export(tier, directory, &some, &export), "options.flags");
    some.flags = 0;
    some.first = 1;
    INVALID(spw_tier_export(tier, directory, &some, &export), "options.first");
    some.first = 0;
    CHECK_OK(spw_tier_export(tier, directory, &some, &export));
    CHECK_OK(spw_tier_task_wait(export, FOR_EVER, &step));
    CHECK_OK(spw_tier_task_close(export));
    INVALID(spw_tier_import(tier, directory, "second", &imported), "second");
    CHECK_OK(spw_tier_import(tier, directory, NULL, &imported));
    CHECK(imported == step);
}

static void paths_drain_and_exports_travel(void) {
    spw_tier *tier = open_two(SPW_TIER_MODE_RESUME);
    uint32_t second = define(tier, "second");
    CHECK_OK(spw_tier_evacuate(tier, 1));
    char out[4300];
    snprintf(out, sizeof out, "%s/export", paths_given[2]);
    // A move is no put: a snapshot is of the last commit.
    char snapped[4300];
    snprintf(snapped, sizeof snapped, "%s/snapshot", paths_given[2]);
    spw_tier_task *snapshot = NULL;
    spw_tier_progress progress = SPW_TIER_PROGRESS_INIT;
    INVALID(spw_tier_export(tier, NULL, NULL, &snapshot), "path");
    CHECK_OK(spw_tier_export(tier, snapped, NULL, &snapshot));
    uint64_t held = 0;
    CHECK_OK(spw_tier_task_wait(snapshot, FOR_EVER, &held));
    CHECK_OK(spw_tier_task_get_progress(snapshot, &progress));
    CHECK(progress.ended == 1 && progress.step == held && progress.written == progress.bytes && held < 8);
    CHECK_OK(spw_tier_task_close(snapshot));
    REFUSED(spw_tier_export(tier, snapped, NULL, &snapshot), SPW_ERR_IO, "snapshot");
    CHECK_OK(spw_tier_task_close(NULL));
    tensors_travel(tier);
    CHECK_OK(spw_tier_commit(tier, 8, NULL, 0));
    spw_tier_path_info path = {.struct_size = sizeof path};
    CHECK_OK(spw_tier_get_path(tier, 1, &path, NULL, 0, NULL));
    CHECK(path.health == SPW_TIER_HEALTH_DRAINING && path.blocks == 0);
    CHECK_OK(spw_tier_set_path(tier, 1, SPW_TIER_HEALTH_HEALTHY));
    INVALID(spw_tier_set_path(tier, 1, SPW_TIER_HEALTH_MISSING), "health");
    uint64_t step = 0;
    spw_tier_export_options fast = SPW_TIER_EXPORT_OPTIONS_INIT;
    fast.flags = SPW_TIER_EXPORT_FLAG_FAST;
    CHECK_OK(spw_tier_export(tier, out, &fast, &snapshot));
    CHECK_OK(spw_tier_task_wait(snapshot, FOR_EVER, &step));
    CHECK_OK(spw_tier_task_close(snapshot));
    CHECK(step == 8);
    const uint32_t stripes[2] = {10, 5};
    const void *streams[3] = {put_memory[0], put_memory[1], put_memory[2]};
    uint64_t ticket = 0;
    spw_tier_target target = SPW_TIER_TARGET_INIT;
    target.path_blocks = stripes;
    target.path_count = 2;
    CHECK_OK(spw_tier_put(tier, second, streams, &target, &ticket));
    CHECK_OK(spw_tier_wait(tier, ticket, FOR_EVER, NULL));
    CHECK_OK(spw_tier_get_path(tier, 1, &path, NULL, 0, NULL));
    CHECK(path.blocks == 26);
    CHECK_OK(spw_tier_commit(tier, 9, NULL, 0));
    CHECK_OK(spw_tier_import(tier, out, NULL, &step));
    CHECK(step == 8);
    CHECK_OK(get(tier, second));
    CHECK(holds(2));
    CHECK_OK(spw_tier_close(tier, FOR_EVER));
}

static void damage_is_named(void) {
    spw_tier *tier = open_two(SPW_TIER_MODE_RESUME);
    uint32_t first = define(tier, "first");
    put(tier, first, 5, 0);
    CHECK_OK(spw_tier_commit(tier, 10, NULL, 0));
    CHECK_OK(spw_tier_verify(tier, NULL));
    // Locates a byte of the second block by its written contents.
    char file[4800], host[256] = "";
    CHECK(gethostname(host, sizeof host) == 0);
    snprintf(file, sizeof file, "%s/c-test/%s/rank-0/data", paths_given[0], host);
    int fd = open(file, O_RDWR);
    CHECK(fd >= 0);
    static unsigned char page[BLOCK];
    off_t at = 0;
    while (pread(fd, page, BLOCK, at) == BLOCK && memcmp(page, put_memory[0] + BLOCK, BLOCK) != 0) at += BLOCK;
    page[100] ^= 1;
    CHECK(pwrite(fd, page, BLOCK, at) == BLOCK && close(fd) == 0);
    char words[64];
    snprintf(words, sizeof words, "\"first\", block 1 at offset %lld", (long long)at);
    spw_tier_verify_info checked = {.struct_size = sizeof checked};
    REFUSED(spw_tier_verify(tier, &checked), SPW_ERR_CORRUPT, words);
    CHECK(checked.extents == 2 && checked.blocks == 72 && checked.bytes == 2 * 140965 && checked.damaged == 1);
    REFUSED(get(tier, first), SPW_ERR_CORRUPT, words);
    CHECK_OK(spw_tier_close(tier, FOR_EVER));
}

static void live_and_foreign_directories_are_refused(void) {
    int ready[2], done[2];
    CHECK(pipe(ready) == 0 && pipe(done) == 0);
    pid_t pid = fork();
    if (pid == 0) {
        spw_tier *tier = open_two(SPW_TIER_MODE_RESUME);
        char byte = 1;
        CHECK(write(ready[1], &byte, 1) == 1 && read(done[0], &byte, 1) == 1);
        CHECK_OK(spw_tier_close(tier, FOR_EVER));
        // The parent checks for leaks. In a child, the sanitizer cannot stop ending threads and reports
        // their memory as leaks.
        _exit(0);
    }
    char byte = 0, words[64];
    CHECK(read(ready[0], &byte, 1) == 1);
    spw_tier_path paths[2];
    spw_tier_options options = settings(paths, 2);
    spw_tier *tier = NULL;
    snprintf(words, sizeof words, "process %d on ", (int)pid);
    REFUSED(spw_tier_open(&options, &tier), SPW_ERR_LOCKED, words);
    REFUSED(spw_tier_collect(paths_given[0], "c-test", NULL, 0), SPW_ERR_LOCKED, words);
    int status = 0;
    CHECK(write(done[1], &byte, 1) == 1 && waitpid(pid, &status, 0) == pid && status == 0);

    options.mode = SPW_TIER_MODE_CREATE;
    REFUSED(spw_tier_open(&options, &tier), SPW_ERR_FOREIGN, "step 10 of job \"c-test\"");
    options.mode = SPW_TIER_MODE_RESUME;
    options.world = 2;
    REFUSED(spw_tier_open(&options, &tier), SPW_ERR_FOREIGN, "rank 0 of 1");
    options.rank = 1;
    REFUSED(spw_tier_open(&options, &tier), SPW_ERR_NO_STATE, "rank-1");
    options.world = options.rank = 0;
    options.path_count = 1;
    REFUSED(spw_tier_open(&options, &tier), SPW_ERR_PATH_MISSING, "path-1");
    // If the disk of a known path is not mounted, the tier reports the path as missing under its earlier name.
    options.path_count = 2;
    paths[1].directory = "not/mounted";
    REFUSED(spw_tier_open(&options, &tier), SPW_ERR_PATH_MISSING, "path-1");
    options.flags = SPW_TIER_FLAG_DEGRADED;
    CHECK_OK(spw_tier_open(&options, &tier));
    spw_tier_opened_info found = {.struct_size = sizeof found};
    CHECK_OK(spw_tier_get_opened(tier, &found, NULL, 0));
    CHECK(found.missing_paths == 1 && found.lost_extents == 0);
    CHECK_OK(spw_tier_close(tier, FOR_EVER));
}

static void wrong_arguments_are_refused(void) {
    spw_tier_path paths[2];
    spw_tier_options options = settings(paths, 2), wrong = options;
    spw_tier *tier = NULL;
    INVALID(spw_tier_open(NULL, &tier), "options");
    INVALID(spw_tier_open(&options, NULL), "tier_out");
    wrong.job = NULL;
    INVALID(spw_tier_open(&wrong, &tier), "job");
    wrong.job = "../up";
    INVALID(spw_tier_open(&wrong, &tier), "options.job");
    wrong = options, wrong.path_count = 0;
    INVALID(spw_tier_open(&wrong, &tier), "options.paths");
    wrong = options, wrong.block_bytes = 5000;
    INVALID(spw_tier_open(&wrong, &tier), "options.block_bytes");
    wrong = options, wrong.mode = 4;
    INVALID(spw_tier_open(&wrong, &tier), "options.mode");
    wrong = options, wrong.durability = 3;
    INVALID(spw_tier_open(&wrong, &tier), "options.durability");
    wrong = options, wrong.flags = 16;
    INVALID(spw_tier_open(&wrong, &tier), "options.flags");
    // All structs of the array have the size of the first one: the last would be read beyond the array.
    paths[1].struct_size = 4000;
    INVALID(spw_tier_open(&options, &tier), "options.paths[1].struct_size");
    paths[1].struct_size = sizeof *paths;
    paths[1].directory = NULL;
    INVALID(spw_tier_open(&options, &tier), "directory");
    // The earlier open worked without the second path, and no data lay there. That path is therefore no longer missing,
    // and the error is about the listed directory.
    paths[1].directory = "not/mounted";
    REFUSED(spw_tier_open(&options, &tier), SPW_ERR_NOT_FOUND, "not/mounted");

    tier = open_two(SPW_TIER_MODE_RESUME);
    uint32_t extent = 0;
    uint64_t ticket = 0, other[1] = {9};
    const void *streams[3] = {put_memory[0], NULL, put_memory[2]};
    INVALID(spw_tier_define(tier, NULL, sizes, 3, &extent), "name");
    INVALID(spw_tier_define(tier, "", sizes, 3, &extent), "name");
    INVALID(spw_tier_define(tier, "x", NULL, 3, &extent), "stream_bytes");
    INVALID(spw_tier_define(tier, "x", sizes, 0, &extent), "streams");
    REFUSED(spw_tier_define(tier, "first", other, 1, &extent), SPW_ERR_FOREIGN, "first");
    INVALID(spw_tier_put(tier, 77, streams, NULL, &ticket), "77");
    INVALID(spw_tier_put(tier, 0, streams, NULL, &ticket), "streams[1]");
    INVALID(spw_tier_put(tier, 0, NULL, NULL, &ticket), "streams");
    streams[1] = put_memory[1];
    spw_tier_target target = SPW_TIER_TARGET_INIT;
    target.path = 5;
    INVALID(spw_tier_put(tier, 0, streams, &target, &ticket), "no path 5");
    target.path_count = 1;
    INVALID(spw_tier_put(tier, 0, streams, &target, &ticket), "target.path_blocks");
    target.path_count = 0, target.path_blocks = &extent;
    INVALID(spw_tier_put(tier, 0, streams, &target, &ticket), "target.path_count");
    CHECK_OK(spw_tier_rollback(tier));
    INVALID(spw_tier_commit(tier, 1, NULL, 4), "payload");
    INVALID(spw_tier_define(NULL, "x", sizes, 3, &extent), "tier");
    CHECK_OK(spw_tier_close(NULL, 0));
    CHECK_OK(spw_tier_destroy(NULL));
    CHECK_OK(spw_tier_remove(tier, 0));
    CHECK_OK(spw_tier_commit(tier, 11, NULL, 0));
    INVALID(spw_tier_remove(tier, 0), "0 does not exist");
    CHECK_OK(spw_tier_destroy(tier));
    REFUSED(spw_tier_collect(paths_given[0], "c-test", NULL, 0), SPW_ERR_NOT_FOUND, "c-test");
}

int main(void) {
    char here[4096], clean[16384];
    CHECK(getcwd(here, sizeof here) != NULL);
    for (int n = 0; n < 3; n++) snprintf(paths_given[n], sizeof paths_given[n], "%s/path-%d", here, n);
    snprintf(clean, sizeof clean, "rm -rf '%s' '%s' '%s'", paths_given[0], paths_given[1], paths_given[2]);
    CHECK(system(clean) == 0);
    for (int n = 0; n < 3; n++) CHECK(mkdir(paths_given[n], 0700) == 0);
    steps_come_back();
    paths_drain_and_exports_travel();
    damage_is_named();
    live_and_foreign_directories_are_refused();
    wrong_arguments_are_refused();
    return 0;
}
