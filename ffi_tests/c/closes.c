// Build: forks
// A close with a timeout returns at its timeout and frees the object, while the file system of its files does not answer
// (fsfreeze); with one path and with several. Afterwards the tier opens again.

#include "check.h"

#include <fcntl.h>
#include <time.h>
#include <unistd.h>

enum { BYTES = 1 << 20, PATHS = 3, EXTENTS = 6 };
static char here[4096], frozen[4200], places[PATHS][4300];
static char data[EXTENTS][BYTES];

static int shell(const char *format) {
    char command[16384];
    snprintf(command, sizeof command, format, here, here, here);
    return system(command);
}

static void thaw(void) {
    (void)!shell("fsfreeze -u '%s/slow' 2>&-; umount -l '%s/slow' 2>&-; rm -rf '%s/slow.img'");
}

static spw_status open_tier(spw_tier **tier) {
    spw_tier_path paths[PATHS] = {{0}};
    for (int i = 0; i < PATHS; i++) paths[i].struct_size = sizeof *paths, paths[i].directory = places[i];
    spw_tier_options options = {.struct_size = sizeof options, .job = "closes", .paths = paths, .path_count = PATHS};
    return spw_tier_open(&options, tier);
}

static void put(spw_tier *tier, uint32_t extent, uint64_t *ticket) {
    const void *streams[] = {data[extent]};
    CHECK_OK(spw_tier_put(tier, extent, streams, NULL, ticket));
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

int main(void) {
    if (geteuid() != 0) skip("mounting and freezing need root");
    CHECK(getcwd(here, sizeof here) != NULL);
    snprintf(frozen, sizeof frozen, "%s/slow", here);
    for (int i = 0; i < PATHS; i++) snprintf(places[i], sizeof places[i], "%s/%d", frozen, i);
    thaw();
    CHECK(shell("mkdir -p '%s/slow'") == 0);
    if (shell("truncate -s 128m '%s/slow.img' && mkfs.ext4 -qF '%s/slow.img' 2>&-") != 0) skip("no mkfs.ext4");
    if (shell("mount -o loop '%s/slow.img' '%s/slow' 2>&-") != 0) skip("no loop devices");
    atexit(thaw);
    CHECK(shell("mkdir '%s/slow/0' '%s/slow/1' '%s/slow/2'") == 0);

    // The files have their space, so that only the writes wait.
    char file[4300];
    snprintf(file, sizeof file, "%s/file", frozen);
    const int fd = open(file, O_RDWR | O_CREAT, 0600);
    CHECK(fd >= 0 && write(fd, data[0], BYTES) == BYTES && fsync(fd) == 0);
    spw_tier *tier = NULL;
    CHECK_OK(open_tier(&tier));
    const uint64_t size = BYTES;
    uint64_t ticket;
    for (uint64_t step = 1; step <= 3; step++) {
        for (uint32_t i = 0; i < EXTENTS; i++) {
            char name[2] = {(char)('a' + i), 0};
            uint32_t extent;
            CHECK_OK(spw_tier_define(tier, name, &size, 1, &extent));
            CHECK(extent == i);
            put(tier, i, &ticket);
            CHECK_OK(spw_tier_wait(tier, ticket, -1, NULL));
        }
        CHECK_OK(spw_tier_commit(tier, step, NULL, 0));
    }

    spw_io *io = NULL;
    CHECK_OK(spw_io_open(NULL, &io));
    CHECK(shell("fsfreeze -f '%s/slow'") == 0);
    spw_io_request request = SPW_IO_REQUEST_INIT;
    request.fd = fd, request.buffer = data[0], request.bytes = BYTES;
    CHECK_OK(spw_io_write(io, &request, &ticket));
    double began = now();
    REFUSED(spw_io_close(io, 0), SPW_ERR_TIMEOUT, "in flight");
    CHECK(now() - began < 20);
    for (uint32_t i = 0; i < EXTENTS; i++) put(tier, i, &ticket);
    began = now();
    REFUSED(spw_tier_close(tier, 0), SPW_ERR_TIMEOUT, "in flight");
    CHECK(now() - began < 20);
    CHECK(shell("fsfreeze -u '%s/slow'") == 0);

    // The writes in flight hold the lock for a moment longer.
    spw_status status = SPW_ERR_LOCKED;
    for (int i = 0; i < 400 && status == SPW_ERR_LOCKED; i++) {
        status = open_tier(&tier);
        nanosleep(&(struct timespec){.tv_nsec = 50000000}, NULL);
    }
    CHECK(status == SPW_OK);
    spw_tier_opened_info info = SPW_TIER_OPENED_INFO_INIT;
    CHECK_OK(spw_tier_get_opened(tier, &info, NULL, 0));
    CHECK(info.step == 3);
    CHECK_OK(spw_tier_close(tier, -1));
    CHECK(close(fd) == 0);
    return 0;
}
