// Extreme integers and machine limits, and the limit of address space under which calls must refuse them.
#ifndef HUGE_VALUES_H
#define HUGE_VALUES_H

#include "fake_cuda.h"

#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

static const uint64_t VALUES[] = {
    0,           1,           2,           63,          64,          65,          (1ull << 16) - 1, 1ull << 16,
    65537,       1ull << 20,  1ull << 31,  (1ull << 31) + 1, (1ull << 32) - 1, 1ull << 32, (1ull << 32) + 1, 1ull << 40,
    1ull << 48,  1ull << 56,  1ull << 61,  1ull << 62,  (1ull << 63) - 1, 1ull << 63, UINT64_MAX - 4095, UINT64_MAX,
};
enum { COUNT = sizeof VALUES / sizeof VALUES[0], ROOM = 256 << 20 };
#define EACH(value) for (uint64_t at = 0, value = 0; at < COUNT && (value = VALUES[at], 1); at++)
#define EACH32(value) for (uint64_t at = 0, value = 0; at < COUNT && (value = VALUES[at], 1); at++) if (value <= UINT32_MAX)

// Zeros that a function may read before it refuses the call; untouched pages cost nothing.
static unsigned char *zeros;

static inline void limit_address_space(uint64_t gib) {
    struct rlimit limit = {gib << 30, RLIM_INFINITY};
    CHECK(setrlimit(RLIMIT_AS, &limit) == 0);
}

// Accepts every status except SPW_ERR_INTERNAL, which reports a caught bug.
static inline spw_status sane(int line, const char *call, spw_status status) {
    if (status == SPW_ERR_INTERNAL || strcmp(spw_status_name(status), "SPW_ERR_UNKNOWN") == 0) {
        fail(__FILE__, line, "%s: %s (%s)", call, spw_status_name(status), spw_last_error());
    }
    if (status != SPW_OK && spw_last_error()[0] == 0) fail(__FILE__, line, "%s: no message", call);
    return status;
}
#define SANE(call) sane(__LINE__, #call, (call))

static inline void set_up(void) {
    if (sizeof(void *) < 8) skip("the address space has 32 bits");
    if (getenv("SPILLWAY_TEST_EMULATOR") != NULL) skip("an emulator does not limit the address space of its program");
    limit_address_space(16);
    // Other programs use this disk too: a file that grows past this size fails as on a full disk.
    const struct rlimit file_limit = {256 << 20, RLIM_INFINITY};
    CHECK(setrlimit(RLIMIT_FSIZE, &file_limit) == 0 && signal(SIGXFSZ, SIG_IGN) != SIG_ERR);
    zeros = mmap(NULL, ROOM, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    CHECK(zeros != MAP_FAILED);
}

#endif
