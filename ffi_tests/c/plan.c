// Plans through the C interface: the figures of the papers, the limits of every choice, and
// refusals that write nothing.

#define SPW_EXPERIMENTAL
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

    CHECK(best.to_host_bytes == 36ull * 1200000000 + 14ull * 200000000);

    best = plan(&V100, SPW_PLAN_MODE_MODEL, 0, NULL);
    CHECK(near(best.serial_seconds / best.exposed_seconds, 1.80) && best.gpu == 15);
    CHECK(near(5 / plan(&H100, SPW_PLAN_MODE_STRIDE, 2, NULL).exposed_seconds, 3.53));
    CHECK(near(5 / plan(&V100, SPW_PLAN_MODE_STRIDE, 3, NULL).exposed_seconds, 2.30));
    CHECK(plan(&V100, SPW_PLAN_MODE_EQ1, 0, NULL).gpu == 16);
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
    options.mode = 4;
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
    unwatch_all();
    options = (spw_plan_options){sizeof options, SPW_PLAN_MODE_MODEL, 0, 0, 0};
    CHECK_OK(spw_plan_interleave(&H100, &FIFTY, &options, NULL, NULL));
    shape = FIFTY;
    shape.count = 0;
    CHECK_OK(spw_plan_interleave(&H100, &shape, &options, NULL, &result));
    CHECK(result.exposed_seconds == 0 && result.gpu == 0);
}

// SysX: Figures 2 and 8, and an operation list that a program can follow.
static void pipeline(void) {
    spw_pipeline_options options = SPW_PIPELINE_OPTIONS_INIT;
    options.devices = 4, options.micro_batches = 4, options.stages = 8, options.split = 2;
    options.flags = SPW_PIPELINE_FLAG_RECOMPUTE;
    spw_pipeline_unit unit = SPW_PIPELINE_UNIT_INIT;
    unit.forward = 0.5, unit.backward = 1, unit.fetch = 1, unit.offload = 1, unit.optimizer = 2;
    unit.param_bytes = 100, unit.input_bytes = 8;
    spw_pipeline *mobius = NULL, *sysx = NULL;
    CHECK_OK(spw_plan_pipeline(&options, &unit, 1, &mobius));
    options.schedule = SPW_PIPELINE_SCHEDULE_DECOUPLED;
    options.flags |= SPW_PIPELINE_FLAG_ASYNC_OPTIMIZER;
    CHECK_OK(spw_plan_pipeline(&options, &unit, 1, &sysx));
    spw_pipeline_result result = SPW_PIPELINE_RESULT_INIT;
    CHECK_OK(spw_pipeline_get_result(mobius, &result));
    CHECK(near(result.iteration_bubble_ratio, 21.0 / 45) && near(result.passes_bubble_ratio, 9.0 / 33));
    CHECK(isnan(result.closed_bubble_ratio) && result.checkpoints == 0);
    CHECK_OK(spw_pipeline_close(mobius));
    CHECK_OK(spw_pipeline_get_result(sysx, &result));
    CHECK(near(result.iteration_bubble_ratio, 0.25) && near(result.passes_bubble_ratio, 3.0 / 27));

    // The structs of a newer caller are longer; the first one says how long.
    typedef struct {
        spw_pipeline_operation known;
        uint64_t newer;
    } longer;
    longer *list = calloc((size_t)result.operations, sizeof *list);
    uint32_t *before = calloc((size_t)result.dependencies, sizeof *before);
    CHECK(list && before);
    list[0].known.struct_size = sizeof *list;
    CHECK_OK(spw_pipeline_get_operations(sysx, 0, result.operations, &list[0].known));
    CHECK_OK(spw_pipeline_get_dependencies(sysx, 0, result.dependencies, before));
    uint64_t forward = 0, fetched = 0;
    for (uint64_t i = 0; i < result.operations; i++) {
        const spw_pipeline_operation *one = &list[i].known;
        CHECK(one->struct_size == sizeof *list && list[i].newer == 0);
        forward += one->kind == SPW_PIPELINE_KIND_FORWARD;
        fetched += one->kind == SPW_PIPELINE_KIND_FETCH ? one->bytes : 0;
        for (uint64_t k = 0; k < one->dependencies; k++) {
            const spw_pipeline_operation *needed = &list[before[one->first_dependency + k]].known;
            CHECK(needed->begins < one->begins && needed->end <= one->end);
        }
    }
    CHECK(forward == 8 * 4 && fetched == result.fetched_bytes);
    spw_pipeline_change change = SPW_PIPELINE_CHANGE_INIT;
    CHECK_OK(spw_pipeline_get_changes(sysx, 0, 1, &change));
    CHECK(change.memory == SPW_PIPELINE_MEMORY_PARAMETERS && change.resident == 200 && !change.freed);
    spw_pipeline_device device = SPW_PIPELINE_DEVICE_INIT;
    CHECK_OK(spw_pipeline_get_device(sysx, 3, &device));
    CHECK(near(device.busy, 24) && device.parameters == 400);
    uint64_t needed = 0;
    CHECK_OK(spw_pipeline_get_svg(sysx, 800, NULL, 0, &needed));
    char *text = malloc((size_t)needed);
    CHECK_OK(spw_pipeline_get_svg(sysx, 800, text, (size_t)needed, NULL));
    CHECK(strstr(text, "</svg>"));
    free(text);

    INVALID(spw_pipeline_get_device(sysx, 4, &device), "device");
    INVALID(spw_pipeline_get_operations(sysx, 1, result.operations, &list[0].known), "count");
    INVALID(spw_pipeline_get_operations(sysx, UINT64_MAX, 2, &list[0].known), "count");
    INVALID(spw_pipeline_get_operations(sysx, 0, 1, NULL), "operations_out");
    list[0].known.struct_size = 4;
    INVALID(spw_pipeline_get_operations(sysx, 0, 1, &list[0].known), "struct_size");
    INVALID(spw_pipeline_get_changes(sysx, result.changes, 1, &change), "count");
    INVALID(spw_pipeline_get_dependencies(sysx, 0, UINT64_MAX, before), "count");
    INVALID(spw_pipeline_get_svg(sysx, 7, NULL, 0, NULL), "width");
    INVALID(spw_pipeline_get_result(NULL, &result), "pipeline");
    INVALID(spw_pipeline_get_result(sysx, NULL), "result_out");
    free(list);
    free(before);
    CHECK_OK(spw_pipeline_close(sysx));
    CHECK_OK(spw_pipeline_close(NULL));

    spw_pipeline *none = NULL;
    INVALID(spw_plan_pipeline(&options, &unit, 1, NULL), "pipeline_out");
    INVALID(spw_plan_pipeline(NULL, &unit, 1, &none), "options");
    INVALID(spw_plan_pipeline(&options, NULL, 1, &none), "units");
    INVALID(spw_plan_pipeline(&options, &unit, 0, &none), "unit_count");
    INVALID(spw_plan_pipeline(&options, &unit, UINT64_MAX, &none), "count");
    unit.reserved = 1;
    INVALID(spw_plan_pipeline(&options, &unit, 1, &none), "reserved");
    unit.reserved = 0;
    options.schedule = 3;
    INVALID(spw_plan_pipeline(&options, &unit, 1, &none), "schedule");
    options.schedule = SPW_PIPELINE_SCHEDULE_DECOUPLED;
    options.flags = 8;
    INVALID(spw_plan_pipeline(&options, &unit, 1, &none), "flags");
    options.flags = SPW_PIPELINE_FLAG_RECOMPUTE;
    options.stages = options.split = options.micro_batches = UINT32_MAX;
    INVALID(spw_plan_pipeline(&options, &unit, 1, &none), "stages");
    CHECK(none == NULL);
}

int main(void) {
    papers_figures();
    pipeline();
    refusals();
    return 0;
}
