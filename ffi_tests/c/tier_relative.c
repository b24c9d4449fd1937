// A tier below a relative directory works where the process cannot search the directories above, and in paths near
// PATH_MAX. A tier that was renamed while it was open is not destroyed.

#include "check.h"

#include <errno.h>
#include <limits.h>
#include <sys/stat.h>
#include <unistd.h>

enum { FOR_EVER = -1, BYTES = 5000, NOBODY = 65534 };
static const uint64_t size = BYTES;
static unsigned char memory[BYTES];

static spw_status open_tier(const char *directory, uint32_t mode, spw_tier **tier) {
    spw_tier_path path = {.struct_size = sizeof path, .directory = directory};
    spw_tier_options options = {.struct_size = sizeof options, .job = "j", .host = "h", .paths = &path, .path_count = 1, .mode = mode};
    return spw_tier_open(&options, tier);
}

static spw_tier *opened(const char *directory) {
    spw_tier *tier = NULL;
    CHECK_OK(open_tier(directory, SPW_TIER_MODE_CREATE, &tier));
    uint32_t extent = 0;
    uint64_t ticket = 0;
    const void *stream = memory;
    CHECK_OK(spw_tier_define(tier, "extent", &size, 1, &extent));
    CHECK_OK(spw_tier_put(tier, extent, &stream, NULL, &ticket));
    CHECK_OK(spw_tier_wait(tier, ticket, FOR_EVER, NULL));
    CHECK_OK(spw_tier_commit(tier, 1, NULL, 0));
    return tier;
}

// Enters `parent/inner`, and makes `parent` unsearchable for the process.
static void enter_below_closed_parent(const char *parent) {
    CHECK(mkdir(parent, 0700) == 0 && chdir(parent) == 0 && mkdir("inner", 0700) == 0);
    if (geteuid() == 0) CHECK(chown("inner", NOBODY, NOBODY) == 0);
    CHECK(chdir("inner") == 0 && chmod("..", 0) == 0);
    if (geteuid() == 0) CHECK(setresgid(NOBODY, NOBODY, NOBODY) == 0 && setresuid(NOBODY, NOBODY, NOBODY) == 0);
    CHECK(chdir("..") == -1);
}

// A directory whose path has about `length` bytes, made and entered in parts.
static void enter_deep(size_t length) {
    char name[201], now[PATH_MAX + 300];
    memset(name, 'd', 200);
    name[200] = 0;
    for (;;) {
        CHECK(getcwd(now, sizeof now) != NULL);
        if (strlen(now) + 1 >= length) return;
        const size_t left = length - strlen(now) - 1;
        name[left < 200 ? left : 200] = 0;
        CHECK((mkdir(name, 0700) == 0 || errno == EEXIST) && chdir(name) == 0);
    }
}

static void renamed(const char *directory) {
    spw_tier *tier = opened(directory);
    CHECK(rename("j", "moved") == 0);
    REFUSED(spw_tier_destroy(tier), SPW_ERR_PATH_MISSING, "its files remain");
    CHECK(rename("moved", "j") == 0);
    CHECK_OK(spw_tier_collect(directory, "j", "h", 0));
    CHECK(access("j", F_OK) == -1);
}

int main(void) {
    // From the longest path that getcwd reports to one whose files have paths beyond PATH_MAX.
    char start[PATH_MAX];
    CHECK(getcwd(start, sizeof start) != NULL);
    for (size_t length = PATH_MAX - 40; length < PATH_MAX; length += 13) {
        enter_deep(length);
        char whole[PATH_MAX];
        CHECK(getcwd(whole, sizeof whole) != NULL);
        CHECK_OK(spw_tier_destroy(opened(".")));
        CHECK_OK(spw_tier_destroy(opened(whole)));
        CHECK(chdir(start) == 0);
    }
    enter_below_closed_parent("closed");
    renamed(".");
    CHECK_OK(spw_tier_destroy(opened(".")));
    return 0;
}
