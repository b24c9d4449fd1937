// Build: forks
// If the file system of a path does not answer (fsfreeze), an open fails at the I/O timeout, and a degraded open works
// without the path. The blocked call keeps the lock until it returns; then the tier opens as before.

#include "check.h"

#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

// The short timeout is for opens that must fail. A loaded machine has the default timeout to do what must succeed.
enum { DEFAULT_MS = 0, STALL_MS = 1000 };
static char here[4096], frozen[4200], healthy[4200];

static int shell(const char *format) {
    char command[16384];
    snprintf(command, sizeof command, format, here, here, here);
    return system(command);
}

static void thaw(void) {
    (void)!shell("fsfreeze -u '%s/frozen' 2>&-; umount -l '%s/frozen' 2>&-; rm -rf '%s/frozen.img'");
}

static spw_status open_both(uint32_t flags, uint32_t timeout_ms, spw_tier **tier) {
    spw_tier_path paths[2] = {{.struct_size = sizeof *paths, .directory = healthy},
                              {.struct_size = sizeof *paths, .directory = frozen}};
    spw_tier_options options = {.struct_size = sizeof options, .job = "frozen", .paths = paths, .path_count = 2};
    options.io_timeout_ms = timeout_ms;
    options.flags = flags;
    return spw_tier_open(&options, tier);
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

int main(void) {
    if (geteuid() != 0) skip("mounting and freezing need root");
    CHECK(getcwd(here, sizeof here) != NULL);
    snprintf(frozen, sizeof frozen, "%s/frozen", here), snprintf(healthy, sizeof healthy, "%s/healthy", here);
    thaw();
    CHECK(shell("rm -rf '%s/healthy' && mkdir -p '%s/healthy' '%s/frozen'") == 0);
    if (shell("truncate -s 64m '%s/frozen.img' && mkfs.ext4 -qF '%s/frozen.img' 2>&-") != 0) skip("no mkfs.ext4");
    if (shell("mount -o loop '%s/frozen.img' '%s/frozen' 2>&-") != 0) skip("no loop devices");
    atexit(thaw);
    spw_tier *tier = NULL;
    CHECK_OK(open_both(0, DEFAULT_MS, &tier));
    const uint64_t size = 4096;
    uint32_t extent;
    CHECK_OK(spw_tier_define(tier, "a", &size, 1, &extent));
    CHECK_OK(spw_tier_commit(tier, 1, NULL, 0));
    CHECK_OK(spw_tier_close(tier, -1));

    CHECK(shell("fsfreeze -f '%s/frozen'") == 0);
    double began = now();
    CHECK(open_both(0, STALL_MS, &tier) == SPW_ERR_DEADLINE && strstr(spw_last_error(), "frozen"));
    CHECK(now() - began < 20);
    began = now();
    CHECK_OK(open_both(SPW_TIER_FLAG_DEGRADED, STALL_MS, &tier));
    CHECK(now() - began < 20);
    CHECK_OK(spw_tier_close(tier, -1));
    CHECK(shell("fsfreeze -u '%s/frozen'") == 0);

    // The open that failed has its lock, or is in flight, for a moment longer.
    spw_status status = SPW_ERR_LOCKED;
    for (int i = 0; i < 400 && (status == SPW_ERR_LOCKED || status == SPW_ERR_DEADLINE); i++) {
        status = open_both(0, DEFAULT_MS, &tier);
        nanosleep(&(struct timespec){.tv_nsec = 50000000}, NULL);
    }
    CHECK(status == SPW_OK);
    CHECK_OK(spw_tier_close(tier, -1));
    return 0;
}
