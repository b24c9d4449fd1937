// Plans through the C interface: the figures of the papers, the limits of every choice, and
// refusals that write nothing.

#include "check.h"

#include <spillway/plan.h>

#include <math.h>

// The machines of Deep Optimizer States, per GPU: step, rounding, GPU step, link; parameters per second.
static const spw_interleave_rates H100 = {sizeof H100, 0, 2e9, 15.5e9, 25e9, 13.75e9, 13.75e9, 0, 0};
static const spw_interleave_rates V100 = {sizeof V100, 0, 2e9, 8.7e9, 35e9, 3e9, 3e9, 0, 0};
static const spw_plan_shape FIFTY = {.struct_size = sizeof FIFTY, .count = 50, .size = 100000000};

static int near(double value, double expected) {
    return fabs(value / expected - 1) < 0.02;
}

static spw_plan_result plan(const spw_interleave_rates *rates, uint32_t mode, uint64_t parameter, uint32_t *sites) {
    const spw_plan_options options = {sizeof options, mode, parameter, 0, 0};
    spw_plan_result result = {.struct_size = sizeof result};
    CHECK_OK(spw_plan_interleave(rates, &FIFTY, &options, sites, &result));
    return result;
}

static void papers_figures(void) {
    uint32_t sites[50];
    spw_plan_result best = plan(&H100, SPW_PLAN_MODE_MODEL, 0, sites);
    CHECK(near(best.serial_seconds / best.exposed_seconds, 3.58) && best.gpu == 36);
    uint64_t on_gpu = 0;
    for (int i = 0; i < 50; i++) on_gpu += sites[i] == SPW_PLACEMENT_GPU;
    CHECK(on_gpu == best.gpu);

    spw_plan_result again = {.struct_size = sizeof again};
    CHECK_OK(spw_plan_predict(&H100, &FIFTY, sites, 0, &again));
    CHECK(again.exposed_seconds == best.exposed_seconds && again.to_host_bytes == best.to_host_bytes);
    CHECK(best.to_host_bytes == 36ull * 1200000000 + 14ull * 200000000);

    best = plan(&V100, SPW_PLAN_MODE_MODEL, 0, NULL);
    CHECK(near(best.serial_seconds / best.exposed_seconds, 1.80) && best.gpu == 15);
    CHECK(near(5 / plan(&H100, SPW_PLAN_MODE_STRIDE, 2, NULL).exposed_seconds, 3.53));
    CHECK(near(5 / plan(&V100, SPW_PLAN_MODE_STRIDE, 3, NULL).exposed_seconds, 2.30));
    CHECK(plan(&V100, SPW_PLAN_MODE_PAPER, 0, NULL).gpu == 25 && plan(&V100, SPW_PLAN_MODE_EQ1, 0, NULL).gpu == 16);

    double ratio = 0, share = 0;
    CHECK_OK(spw_plan_share(&H100, 0, 1, &ratio, &share));
    CHECK(near(ratio, 0.489) && near(share, 1 / 1.489));
    CHECK_OK(spw_plan_share(&V100, 0, 1, &ratio, &share));
    CHECK(near(ratio, 2.295));
    spw_interleave_rates slow_link = H100;
    slow_link.h2d = 0.8e9;
    CHECK_OK(spw_plan_share(&slow_link, 0, 1, &ratio, &share));
    CHECK(isinf(ratio) && share == 0);
}

static void superoffload(void) {
    const spw_plan_bucket bucket = {sizeof bucket, 0, 0.14e-3, 2e-3, 0.07e-3, 0.1e-3, 0.5 / 300};
    uint64_t kept = 0, printed = 0;
    CHECK_OK(spw_plan_tail(&bucket, 300, 300, &kept, &printed));
    CHECK(kept == 51 && printed == 2);
    CHECK_OK(spw_plan_tail(&bucket, 300, 10, &kept, NULL));
    CHECK(kept == 10);

    // The best is 7: the search finds it from measured times alone.
    uint64_t tried[64], next = 0, best = 0;
    double seconds[64];
    for (size_t n = 0; n < 64; n++) {
        CHECK_OK(spw_plan_tail_next(tried, seconds, n, 2, 40, &next, &best));
        int known = 0;
        for (size_t i = 0; i < n; i++) known |= tried[i] == next;
        if (known) break;
        tried[n] = next;
        seconds[n] = 1 + 0.01 * fabs((double)next - 7);
    }
    CHECK(next == 7 && best == 7);

    const spw_plan_load load = {sizeof load, 0, 990e12, 450e9, 4 * 1024, 7e9, 0};
    double flow = 0, efficiency = 0;
    CHECK_OK(spw_plan_weights(&load, &flow, &efficiency));
    CHECK(flow == 1 && efficiency > 0.6 && efficiency < 0.7);
    uint32_t wire = 9;
    const spw_plan_probe probe = {sizeof probe, 0, 13e9, 27e9, 2e9, 2e9};
    CHECK_OK(spw_plan_cast(&probe, &wire));
    CHECK(wire == SPW_TRANSFER_DTYPE_NATIVE);
}

static void trace(void) {
    uint32_t sites[50] = {0, 1};
    uint64_t needed = 0;
    CHECK_OK(spw_plan_get_trace(&H100, &FIFTY, sites, 1.0, NULL, 0, &needed));
    char *text = malloc((size_t)needed);
    CHECK_OK(spw_plan_get_trace(&H100, &FIFTY, sites, 1.0, text, (size_t)needed, &needed));
    CHECK(strlen(text) + 1 == needed && strstr(text, "\"prefetch 1\"") && strstr(text, "traceEvents"));
    CHECK_OK(spw_plan_get_trace(&H100, &FIFTY, sites, 1.0, text, 9, NULL));
    CHECK(strlen(text) == 8 && strncmp(text, "{\"displa", 8) == 0);
    free(text);
}

static void refusals(void) {
    spw_plan_options options = {sizeof options, SPW_PLAN_MODE_MODEL, 0, 0, 0};
    spw_plan_result result = {.struct_size = sizeof result, .gpu = 77};
    uint32_t sites[50];
    memset(sites, 7, sizeof sites);
    watch(&result, sizeof result);
    watch(sites, sizeof sites);
    spw_interleave_rates rates = H100;
    spw_plan_shape shape = FIFTY;
    INVALID(spw_plan_interleave(NULL, &shape, &options, sites, &result), "rates");
    INVALID(spw_plan_interleave(&rates, NULL, &options, sites, &result), "shape");
    INVALID(spw_plan_interleave(&rates, &shape, NULL, sites, &result), "options");
    const double bad[] = {0, -1, NAN, INFINITY};
    for (int i = 0; i < 4; i++) {
        rates.cpu = bad[i];
        INVALID(spw_plan_interleave(&rates, &shape, &options, sites, &result), "rates.cpu");
    }
    rates = H100;
    options.mode = 5;
    INVALID(spw_plan_interleave(&rates, &shape, &options, sites, &result), "options.mode");
    options.mode = SPW_PLAN_MODE_COUNT;
    options.parameter = 51;
    INVALID(spw_plan_interleave(&rates, &shape, &options, sites, &result), "51");
    options.parameter = 0;
    options.residents = UINT64_MAX;
    INVALID(spw_plan_interleave(&rates, &shape, &options, sites, &result), "residents");
    options.residents = 0;
    options.backward = -1;
    INVALID(spw_plan_interleave(&rates, &shape, &options, sites, &result), "backward");
    options.backward = 0;
    shape.count = UINT64_MAX;
    INVALID(spw_plan_interleave(&rates, &shape, &options, sites, &result), "shape.count");
    shape = FIFTY;
    shape.size = UINT64_MAX;
    INVALID(spw_plan_interleave(&rates, &shape, &options, sites, &result), "2^56");
    shape = FIFTY;
    shape.slots = 99;
    INVALID(spw_plan_interleave(&rates, &shape, &options, sites, &result), "slots");
    INVALID(spw_plan_predict(&rates, &FIFTY, sites, 0, &result), "placements[0]");
    INVALID(spw_plan_predict(&rates, &FIFTY, NULL, 0, &result), "placements");
    unwatch_all();
    options = (spw_plan_options){sizeof options, SPW_PLAN_MODE_MODEL, 0, 0, 0};
    CHECK_OK(spw_plan_interleave(&H100, &FIFTY, &options, NULL, NULL));
    shape = FIFTY;
    shape.count = 0;
    CHECK_OK(spw_plan_interleave(&H100, &shape, &options, NULL, &result));
    CHECK(result.exposed_seconds == 0 && result.gpu == 0);
}

int main(void) {
    papers_figures();
    superoffload();
    trace();
    refusals();
    return 0;
}
