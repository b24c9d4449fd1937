// Units whose home is host memory or a tier have their values while they are used, in as much memory as the slots have.
// They are fetched in the recorded order. Wrong arguments, a unit that cannot be read, and more uses than slots are errors.

#define SPW_EXPERIMENTAL
#include "check.h"

#include <spillway/window.h>

enum { UNITS = 4, BYTES = 3000, FOREVER = -1 };
static unsigned char homes[UNITS][BYTES];

static unsigned char value(int unit, int step, int at) {
    return (unsigned char)(at * 7 + unit * 31 + step * 101);
}

static void write_home(int unit, int step) {
    for (int i = 0; i < BYTES; i++) homes[unit][i] = value(unit, step, i);
}

static void all_units(spw_window_unit *units) {
    for (int i = 0; i < UNITS; i++) {
        units[i] = (spw_window_unit){.struct_size = sizeof *units, .bytes = BYTES, .host = homes[i]};
        write_home(i, 0);
    }
}

static uint64_t used(spw_window *window, uint32_t unit, int step) {
    uint64_t address = 0;
    CHECK_OK(spw_window_use(window, unit, 0, FOREVER, &address));
    const unsigned char *found = (const unsigned char *)(uintptr_t)address;
    for (int i = 0; i < BYTES; i++) CHECK(found[i] == value((int)unit, step, i));
    CHECK_OK(spw_window_release(window, unit, 0));
    return address;
}

static spw_window_stats stats_of(spw_window *window) {
    spw_window_stats stats = SPW_WINDOW_STATS_INIT;
    CHECK_OK(spw_window_get_stats(window, &stats));
    return stats;
}

static void values_and_order(void) {
    spw_window_unit units[UNITS];
    all_units(units);
    const spw_window_options options = SPW_WINDOW_OPTIONS_INIT;
    spw_window *window = NULL;
    CHECK_OK(spw_window_open(&options, units, UNITS, &window));
    for (int step = 0; step < 3; step++) {
        CHECK_OK(spw_window_begin(window));
        const uint64_t late = stats_of(window).late;
        for (uint32_t i = 0; i < UNITS; i++) used(window, i, step);
        for (uint32_t i = UNITS; i > 0; i--) used(window, i - 1, step);
        // The first use of an iteration whose units have changed is late, and the others only in the first iteration.
        CHECK(stats_of(window).late - late == (step == 0 ? 2 * UNITS - 2 : 1));
        for (int i = 0; i < UNITS; i++) {
            CHECK_OK(spw_window_changed(window, (uint32_t)i));
            write_home(i, step + 1);
        }
    }
    const spw_window_stats stats = stats_of(window);
    CHECK(stats.device_bytes == 2 * 3072 && stats.peak_bytes == 2 * BYTES && stats.uses == 3 * 2 * UNITS);
    CHECK(stats.fetches == 3 * (2 * UNITS - 2) && stats.fetched_bytes == stats.fetches * BYTES);

    // Another order: a branch leaves units out.
    CHECK_OK(spw_window_begin(window));
    const uint32_t branch[5] = {2, 0, 3, 3, 1};
    for (int i = 0; i < 5; i++) used(window, branch[i], 3);
    CHECK_OK(spw_window_close(window));
    CHECK_OK(spw_window_close(NULL));
}

static void kept(void) {
    spw_window_unit units[UNITS];
    all_units(units);
    units[1].keep = 1;
    units[2].bytes = 0, units[2].host = NULL;
    spw_window_options options = SPW_WINDOW_OPTIONS_INIT;
    options.slots = 1;
    spw_window *window = NULL;
    CHECK_OK(spw_window_open(&options, units, UNITS, &window));
    for (int round = 0; round < 3; round++) {
        used(window, 1, 0);
        used(window, 0, 0);
        used(window, 3, 0);
    }
    CHECK(stats_of(window).fetches == 1 + 2 * 3 && stats_of(window).peak_bytes == BYTES);
    uint64_t address = 0;
    CHECK_OK(spw_window_use(window, 2, 0, FOREVER, &address));
    CHECK_OK(spw_window_release(window, 2, 0));
    CHECK_OK(spw_window_close(window));
}

static void refusals(void) {
    spw_window_unit units[UNITS];
    all_units(units);
    spw_window_options options = SPW_WINDOW_OPTIONS_INIT;
    spw_window *window = NULL;
    watch(&window, sizeof window);
    INVALID(spw_window_open(NULL, units, UNITS, &window), "options: is NULL");
    INVALID(spw_window_open(&options, NULL, UNITS, &window), "units: is NULL");
    INVALID(spw_window_open(&options, units, UNITS, NULL), "window_out: is NULL");
    units[1].home = 2;
    INVALID(spw_window_open(&options, units, UNITS, &window), "units[1].home: 2 is not an spw_window_home");
    units[1].home = SPW_WINDOW_HOME_TIER;
    INVALID(spw_window_open(&options, units, UNITS, &window), "units[1].host: must be NULL: the home of the unit is a tier");
    units[1].host = NULL;
    INVALID(spw_window_open(&options, units, UNITS, &window), "units[1].home: is a tier, but the window has none");
    units[1].home = SPW_WINDOW_HOME_HOST;
    INVALID(spw_window_open(&options, units, UNITS, &window), "units[1].host: is NULL");
    units[1].host = homes[1], units[1].keep = 2;
    INVALID(spw_window_open(&options, units, UNITS, &window), "units[1].keep: is 2");
    units[1].keep = 0, units[1].reserved = 1;
    INVALID(spw_window_open(&options, units, UNITS, &window), "units[1].reserved: must be 0");
    units[1].reserved = 0, units[1].bytes = UINT64_MAX;
    INVALID(spw_window_open(&options, units, UNITS, &window), "exceed the address space");
    units[1].bytes = INT64_MAX;
    INVALID(spw_window_open(&options, units, UNITS, &window), "units: exceed the address space");
    units[1].bytes = BYTES;
    unwatch_all();

    CHECK_OK(spw_window_open(&options, units, UNITS, &window));
    uint64_t address = 7;
    watch(&address, sizeof address);
    INVALID(spw_window_use(NULL, 0, 0, FOREVER, &address), "window: is NULL");
    INVALID(spw_window_use(window, 0, 0, FOREVER, NULL), "address_out: is NULL");
    INVALID(spw_window_use(window, UNITS, 0, FOREVER, &address), "unit: is 4, but there are 4 units");
    INVALID(spw_window_use(window, 0, 1, FOREVER, &address), "stream: must be 0: the window was opened without a GPU");
    INVALID(spw_window_release(window, 0, 0), "unit: 0 is not in use");
    INVALID(spw_window_release(window, UNITS, 0), "unit: is 4");
    INVALID(spw_window_changed(window, UNITS), "unit: is 4");
    INVALID(spw_window_changed(NULL, 0), "window: is NULL");
    INVALID(spw_window_begin(NULL), "window: is NULL");
    INVALID(spw_window_get_stats(window, NULL), "stats_out: is NULL");
    unwatch_all();
    CHECK_OK(spw_window_use(window, 0, 0, FOREVER, &address));
    CHECK_OK(spw_window_use(window, 1, 0, FOREVER, &address));
    watch(&address, sizeof address);
    REFUSED(spw_window_use(window, 2, 0, FOREVER, &address), SPW_ERR_BUSY, "unit 2 finds no slot: all 2 have users");
    CHECK_OK(spw_window_changed(window, 1));
    REFUSED(spw_window_use(window, 1, 0, FOREVER, &address), SPW_ERR_BUSY, "unit 1 has changed while it is used");
    unwatch_all();
    CHECK_OK(spw_window_release(window, 1, 0));
    used(window, 2, 0);
    CHECK_OK(spw_window_close(window));
}

static void put(spw_tier *tier, uint32_t extent, int unit) {
    const void *streams[1] = {homes[unit]};
    uint64_t ticket = 0;
    CHECK_OK(spw_tier_put(tier, extent, streams, NULL, &ticket));
    CHECK_OK(spw_tier_wait(tier, ticket, FOREVER, NULL));
}

// The window keeps the tier: its handle may be closed before.
static void units_of_a_tier(void) {
    spw_tier_path path = SPW_TIER_PATH_INIT;
    path.kind = SPW_TIER_PATH_KIND_MEMORY;
    spw_tier_options settings = SPW_TIER_OPTIONS_INIT;
    settings.job = "window", settings.paths = &path, settings.path_count = 1;
    spw_tier *tier = NULL;
    CHECK_OK(spw_tier_open(&settings, &tier));
    spw_window_unit units[UNITS];
    all_units(units);
    uint32_t extents[2];
    const uint64_t bytes = BYTES;
    CHECK_OK(spw_tier_define(tier, "zero", &bytes, 1, &extents[0]));
    CHECK_OK(spw_tier_define(tier, "one", &bytes, 1, &extents[1]));
    for (int i = 0; i < 2; i++) {
        units[i].home = SPW_WINDOW_HOME_TIER, units[i].host = NULL, units[i].extent = extents[i];
    }
    put(tier, extents[0], 0);
    spw_window_options options = SPW_WINDOW_OPTIONS_INIT;
    options.tier = tier;
    spw_window *window = NULL;
    units[1].stream = 1;
    INVALID(spw_window_open(&options, units, UNITS, &window), "units[1].stream: is 1, but the extent has 1 streams");
    units[1].stream = 0;
    CHECK_OK(spw_window_open(&options, units, UNITS, &window));
    used(window, 0, 0);
    uint64_t address = 0;
    // Unit 1 was never put.
    CHECK(spw_window_use(window, 1, 0, FOREVER, &address) != SPW_OK && address == 0);
    used(window, 2, 0);
    put(tier, extents[1], 1);
    used(window, 1, 0);
    CHECK_OK(spw_window_changed(window, 0));
    write_home(0, 1);
    put(tier, extents[0], 0);
    // A use polls until the unit is there.
    CHECK_OK(spw_window_changed(window, 1));
    spw_status polled;
    while ((polled = spw_window_use(window, 1, 0, 0, &address)) == SPW_ERR_TIMEOUT) INVALID(spw_window_release(window, 1, 0), "not in use");
    CHECK_OK(polled);
    CHECK_OK(spw_window_release(window, 1, 0));
    used(window, 0, 1);
    CHECK_OK(spw_tier_close(tier, FOREVER));
    CHECK_OK(spw_window_changed(window, 1));
    used(window, 1, 0);
    CHECK_OK(spw_window_close(window));
}

int main(void) {
    values_and_order();
    kept();
    refusals();
    units_of_a_tier();
    return 0;
}
