// Blocks of a pool are aligned and limited; wrong frees are refused; a slice of pinned memory counts as pinned.

#include "check.h"

static void blocks(void) {
    spw_pool_options options = {.struct_size = sizeof options, .block_bytes = 3 << 20, .block_count = 2};
    spw_pool *pool = NULL;
    CHECK(spw_pool_open(&options, &pool) == SPW_OK);
    void *first = NULL, *second = NULL, *third = &options;
    CHECK(spw_pool_alloc(pool, &first) == SPW_OK && spw_pool_alloc(pool, &second) == SPW_OK);
    CHECK(spw_pool_alloc(pool, &third) == SPW_ERR_LIMIT_REACHED && third == &options);
    CHECK((size_t)first % 4096 == 0 && first != second);
    memset(first, 1, 3 << 20);
    memset(second, 2, 3 << 20);
    CHECK(((char *)first)[(3 << 20) - 1] == 1);

    spw_pool_stats stats = {.struct_size = sizeof stats};
    CHECK(spw_pool_get_stats(pool, &stats) == SPW_OK && stats.in_use == 2 && stats.high_water == 2);
    CHECK(stats.bytes >= 6 << 20 && stats.locked_bytes <= stats.bytes);
    CHECK(spw_pool_close(pool) == SPW_ERR_BUSY);
    CHECK(spw_pool_free(pool, (char *)first + 4096) == SPW_ERR_INVALID_ARGUMENT);
    CHECK(spw_pool_free(pool, &options) == SPW_ERR_INVALID_ARGUMENT);
    CHECK(spw_pool_free(pool, NULL) == SPW_ERR_INVALID_ARGUMENT);
    CHECK(spw_pool_free(pool, first) == SPW_OK && spw_pool_free(pool, first) == SPW_ERR_INVALID_ARGUMENT);

    CHECK(spw_pool_free(pool, second) == SPW_OK && spw_pool_close(pool) == SPW_OK);
}

static void refused_options(void) {
    spw_pool *pool = NULL;
    spw_pool_options none = {.struct_size = sizeof none};
    CHECK(spw_pool_open(&none, &pool) == SPW_ERR_INVALID_ARGUMENT && strstr(spw_last_error(), "block_bytes"));
    spw_pool_options huge = {.struct_size = sizeof huge, .block_bytes = UINT64_MAX, .block_count = 2};
    CHECK(spw_pool_open(&huge, &pool) == SPW_ERR_INVALID_ARGUMENT);
    spw_pool_options flags = {.struct_size = sizeof flags, .flags = 64, .block_bytes = 1, .block_count = 1};
    CHECK(spw_pool_open(&flags, &pool) == SPW_ERR_INVALID_ARGUMENT && strstr(spw_last_error(), "flags"));
    CHECK(pool == NULL && spw_pool_close(NULL) == SPW_OK);
    CHECK(spw_pool_alloc(NULL, (void **)&pool) == SPW_ERR_INVALID_ARGUMENT);
}

static void single_allocations(void) {
    void *starts[100];
    uint32_t contains = 9;
    for (size_t n = 0; n < 100; n++) {
        CHECK(spw_pinned_alloc(n * 20000, &starts[n]) == SPW_OK && (size_t)starts[n] % 4096 == 0);
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
    CHECK(spw_pinned_alloc(UINT64_MAX, starts) == SPW_ERR_INVALID_ARGUMENT);
    CHECK(spw_pinned_get_stats(&stats) == SPW_OK && stats.allocations == 0 && stats.bytes == 0);
}

int main(void) {
    blocks();
    refused_options();
    single_allocations();
    return 0;
}
