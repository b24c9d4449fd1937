// Build: forks
// A window in device memory: readers on two streams see their units, and a slot is overwritten only after the work of its
// last reader. In a forked child every call is an error, and a close does nothing.

#define SPW_EXPERIMENTAL
#include "child.h"
#include "fake_cuda.h"

#include <spillway/window.h>

enum { UNITS = 5, BYTES = 4096, ORDINAL = 9 };

static spw_window *window;

static void inherits(void) {
    uint64_t address = 0;
    spw_window_stats stats = SPW_WINDOW_STATS_INIT;
    REFUSED(spw_window_use(window, 0, 0, -1, &address), SPW_ERR_UNSUPPORTED, "the window was opened by process");
    REFUSED(spw_window_release(window, 0, 0), SPW_ERR_UNSUPPORTED, "");
    REFUSED(spw_window_changed(window, 0), SPW_ERR_UNSUPPORTED, "");
    REFUSED(spw_window_begin(window), SPW_ERR_UNSUPPORTED, "");
    REFUSED(spw_window_get_stats(window, &stats), SPW_ERR_UNSUPPORTED, "");
    CHECK_OK(spw_window_close(window));
}

int main(void) {
    use_fake_driver();
    spw_gpu *gpu = open_gpu(ORDINAL);
    enter_context(ORDINAL);
    void *streams[2] = {NULL, NULL};
    for (int i = 0; i < 2; i++) FAKE("cuStreamCreateWithPriority", &streams[i], 1u, 0);
    unsigned char *block = NULL, *homes[UNITS];
    // One allocation, so that the window registers all of it with the driver.
    CHECK_OK(spw_pinned_alloc(NULL, 3 * UNITS * BYTES, (void **)&block));
    unsigned char *seen = block + UNITS * BYTES;
    spw_window_unit units[UNITS];
    for (int i = 0; i < UNITS; i++) {
        homes[i] = block + i * BYTES;
        memset(homes[i], i + 1, BYTES);
        units[i] = (spw_window_unit){.struct_size = sizeof *units, .bytes = BYTES, .host = homes[i]};
    }
    spw_window_options options = SPW_WINDOW_OPTIONS_INIT;
    options.gpu = gpu;
    static unsigned char pageable[BYTES];
    units[1].host = pageable;
    INVALID(spw_window_open(&options, units, UNITS, &window), "units[1].host: 4096 bytes at");
    units[1].host = homes[1];
    CHECK_OK(spw_window_open(&options, units, UNITS, &window));
    CHECK_OK(spw_gpu_close(gpu));

    for (int step = 0; step < 3; step++) {
        CHECK_OK(spw_window_begin(window));
        for (int i = 0; i < 2 * UNITS; i++) {
            const uint32_t unit = (uint32_t)(i < UNITS ? i : 2 * UNITS - 1 - i);
            void *stream = streams[i / 3 % 2];
            uint64_t address = 0;
            CHECK_OK(spw_window_use(window, unit, (uintptr_t)stream, -1, &address));
            FAKE("cuMemcpyDtoHAsync_v2", seen + i * BYTES, address, (size_t)BYTES, stream);
            CHECK_OK(spw_window_release(window, unit, (uintptr_t)stream));
        }
        for (int i = 0; i < 2; i++) FAKE("cuStreamSynchronize", streams[i]);
        for (int i = 0; i < 2 * UNITS; i++) {
            const int unit = i < UNITS ? i : 2 * UNITS - 1 - i;
            CHECK(seen[i * BYTES] == unit + 1 + step && seen[(i + 1) * BYTES - 1] == unit + 1 + step);
        }
        for (int i = 0; i < UNITS; i++) {
            CHECK_OK(spw_window_changed(window, (uint32_t)i));
            memset(homes[i], i + 2 + step, BYTES);
        }
    }
    spw_window_stats stats = SPW_WINDOW_STATS_INIT;
    CHECK_OK(spw_window_get_stats(window, &stats));
    CHECK(stats.device_bytes == 2 * BYTES && stats.peak_bytes == 2 * BYTES && stats.fetches == 3 * (2 * UNITS - 2));
    in_child(inherits, "a child with its parent's window");
    CHECK_OK(spw_window_close(window));
    CHECK(fake_count("fakecuda_races", ORDINAL) == 0 && fake_count("fakecuda_pageable_copies", ORDINAL) == 0);
    for (int i = 0; i < 2; i++) FAKE("cuStreamDestroy_v2", streams[i]);
    CHECK_OK(spw_pinned_free(block));
    return 0;
}
