// Allocations are aligned and disjoint; wrong frees and options are refused; a slice of pinned memory counts as pinned.

#include "check.h"

static void refused_options(void) {
    void *start = &start;
    spw_pinned_options flags = {.struct_size = sizeof flags, .flags = 64};
    CHECK(spw_pinned_alloc(&flags, 1, &start) == SPW_ERR_INVALID_ARGUMENT && strstr(spw_last_error(), "flags"));
    spw_pinned_options reserved = {.struct_size = sizeof reserved, .reserved = 1};
    CHECK(spw_pinned_alloc(&reserved, 1, &start) == SPW_ERR_INVALID_ARGUMENT && strstr(spw_last_error(), "reserved"));
    spw_pinned_options good = SPW_PINNED_OPTIONS_INIT;
    CHECK(spw_pinned_alloc(&good, UINT64_MAX, &start) == SPW_ERR_INVALID_ARGUMENT && start == &start);
    CHECK(spw_pinned_alloc(&good, 1, NULL) == SPW_ERR_INVALID_ARGUMENT);
}

// With any flag, an allocation has its own mapping, which ends with it.
static void flags(void) {
    spw_pinned_stats before = SPW_PINNED_STATS_INIT, stats = SPW_PINNED_STATS_INIT;
    CHECK(spw_pinned_get_stats(&before) == SPW_OK);
    for (uint32_t flags = 1; flags < 8; flags++) {
        spw_pinned_options options = {.struct_size = sizeof options, .flags = flags};
        void *start = NULL;
        CHECK(spw_pinned_alloc(&options, 3 << 20, &start) == SPW_OK && (size_t)start % 4096 == 0);
        memset(start, 1, 3 << 20);
        CHECK(spw_pinned_get_stats(&stats) == SPW_OK && stats.mapped_bytes >= before.mapped_bytes + (3 << 20));
        CHECK(!(flags & SPW_PINNED_FLAG_NO_LOCK) || stats.locked_bytes == before.locked_bytes);
        CHECK(spw_pinned_free((char *)start + 4096) == SPW_ERR_INVALID_ARGUMENT);
        CHECK(spw_pinned_free(start) == SPW_OK && spw_pinned_free(start) == SPW_ERR_INVALID_ARGUMENT);
        CHECK(spw_pinned_get_stats(&stats) == SPW_OK && stats.mapped_bytes == before.mapped_bytes);
    }
    CHECK(spw_pinned_free(&stats) == SPW_ERR_INVALID_ARGUMENT && spw_pinned_free(NULL) == SPW_ERR_INVALID_ARGUMENT);
}

static void shared_mappings(void) {
    void *starts[100];
    uint32_t contains = 9;
    for (size_t n = 0; n < 100; n++) {
        CHECK(spw_pinned_alloc(NULL, n * 20000, &starts[n]) == SPW_OK && (size_t)starts[n] % 4096 == 0);
        memset(starts[n], (int)n, n * 20000);
    }
    spw_pinned_stats stats = {.struct_size = sizeof stats};
    CHECK(spw_pinned_get_stats(&stats) == SPW_OK && stats.allocations == 100 && stats.bytes == 4950ull * 20000);
    for (size_t n = 1; n < 100; n++) {
        char *start = starts[n];
        CHECK(start[0] == (char)n && start[n * 20000 - 1] == (char)n);
        CHECK(spw_pinned_contains(start + 5, n * 20000 - 5, &contains) == SPW_OK && contains == 1);
        CHECK(spw_pinned_contains(start + 5, n * 20000, &contains) == SPW_OK && contains == 0);
    }
    for (size_t n = 0; n < 100; n++) {
        CHECK(spw_pinned_free(starts[n]) == SPW_OK && spw_pinned_free(starts[n]) == SPW_ERR_INVALID_ARGUMENT);
    }
    CHECK(spw_pinned_alloc(NULL, UINT64_MAX, starts) == SPW_ERR_INVALID_ARGUMENT);
    CHECK(spw_pinned_get_stats(&stats) == SPW_OK && stats.allocations == 0 && stats.bytes == 0);
}

int main(void) {
    refused_options();
    flags();
    shared_mappings();
    return 0;
}
