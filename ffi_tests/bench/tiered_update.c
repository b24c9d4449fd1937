// Steps state on a tier. Prints the speed, the bytes that each path moved, and the memory in use next to the planner's
// estimate. ffi_tests/bench/records/tier_*.json describe the runs.
//
//     cc -O2 tiered_update.c -lspillway -o tiered_update
//     ./tiered_update MI_PARAMETERS MI_IN_A_SUBGROUP MIB STEPS SPLIT DIRECTORY...       SPLIT: 1 for a split master
//
// All subgroups share one gradient, and none publishes its weights unless the master is split: the memory in use is
// that of the update itself. The first step is not counted, because it grows the files and measures the speeds.

#define _GNU_SOURCE
#include <spillway.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { MOST_PATHS = 8 };

static void check(spw_status status, const char *what) {
    if (status == SPW_OK) return;
    fprintf(stderr, "%s: %s\n", what, spw_last_error());
    exit(1);
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

// Reads a line of /proc/self/status, in bytes.
static double memory(const char *name) {
    FILE *file = fopen("/proc/self/status", "r");
    char line[256];
    double bytes = 0;
    while (file != NULL && fgets(line, sizeof line, file) != NULL) {
        if (strncmp(line, name, strlen(name)) == 0) bytes = strtod(line + strlen(name) + 1, NULL) * 1024;
    }
    if (file != NULL) fclose(file);
    return bytes;
}

static int rising(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void moved(spw_tier *tier, int paths, double *read, double *written) {
    for (int i = 0; i < paths; i++) {
        spw_tier_path_info info = {.struct_size = sizeof info};
        check(spw_tier_get_path(tier, (uint32_t)i, &info, NULL, 0, NULL), "reading a path");
        read[i] = (double)info.read_bytes - read[i];
        written[i] = (double)info.written_bytes - written[i];
    }
}

int main(int count, char **arguments) {
    enum { FIXED = 6 };
    if (count <= FIXED || count > FIXED + MOST_PATHS) return 2;
    const uint64_t parameters = strtoull(arguments[1], NULL, 10) << 20, subgroup = strtoull(arguments[2], NULL, 10) << 20;
    const uint64_t steps = strtoull(arguments[4], NULL, 10);
    const int split = arguments[5][0] == '1', path_count = count - FIXED;
    const uint64_t subgroups = (parameters + subgroup - 1) / subgroup;
    spw_tier_path paths[MOST_PATHS] = {0};
    for (int i = 0; i < path_count; i++) {
        paths[i].struct_size = sizeof *paths;
        paths[i].directory = arguments[FIXED + i];
    }
    uint64_t *elements = calloc(subgroups, sizeof *elements);
    spw_tensor *tensors = calloc(subgroups, sizeof *tensors);
    const float **zeros = calloc(3 * subgroups, sizeof *zeros);
    uint16_t *grad = malloc(subgroup * 2), *weights = split ? calloc(parameters, 2) : NULL;
    double *seconds = calloc(steps, sizeof *seconds);
    for (uint64_t i = 0; i < subgroup; i++) grad[i] = (uint16_t)(0x3c00 + i * 2654435761u % 512);
    for (uint64_t i = 0; split && i < parameters; i++) weights[i] = 0;
    for (uint64_t i = 0; i < subgroups; i++) {
        elements[i] = i + 1 < subgroups ? subgroup : parameters - i * subgroup;
        tensors[i] = (spw_tensor){.struct_size = sizeof *tensors, .param_dtype = SPW_DTYPE_F32,
                                  .state_dtype = SPW_DTYPE_F32, .grad_dtype = SPW_DTYPE_BF16, .n = elements[i],
                                  .grad = grad};
        if (!split) continue;
        tensors[i].copy_dtype = SPW_DTYPE_BF16;
        tensors[i].param_copy = weights + i * subgroup;
    }
    const spw_tier_options where = {.struct_size = sizeof where, .mode = SPW_TIER_MODE_CREATE, .job = "tiered-update",
                                    .paths = paths, .path_count = (uint64_t)path_count};
    spw_tier *tier = NULL;
    check(spw_tier_open(&where, &tier), "opening the tier");
    spw_swap_options options = {.struct_size = sizeof options, .elements = elements, .subgroups = subgroups};
    options.flags = split ? SPW_SWAP_FLAG_SPLIT_MASTER : 0;
    options.host_memory = strtoull(arguments[3], NULL, 10) << 20;
    const double before = memory("VmRSS:");
    spw_swap *swap = NULL;
    check(spw_swap_open(tier, &options, &swap), "allocating memory");
    spw_swap_budget budget = {.struct_size = sizeof budget};
    check(spw_swap_plan_budget(&options, (uint64_t)path_count, &budget), "reading the budget");
    check(spw_swap_fill(swap, zeros), "filling");
    check(spw_swap_commit(swap, 0, NULL, 0), "committing");

    spw_adam_options adam = SPW_ADAM_OPTIONS_INIT;
    double read[MOST_PATHS] = {0}, written[MOST_PATHS] = {0};
    for (uint64_t step = 0; step <= steps; step++) {
        if (step == 1) moved(tier, path_count, read, written);
        adam.step = step + 1;
        const double began = now();
        check(spw_swap_adam_step(swap, &adam, tensors, subgroups, NULL), "stepping");
        if (step > 0) seconds[step - 1] = now() - began;
    }
    moved(tier, path_count, read, written);
    qsort(seconds, steps, sizeof *seconds, rising);
    const double median = seconds[steps / 2], peak = memory("VmHWM:");
    printf("state %.3f GB, cached %llu of %llu subgroups\n", (double)budget.state_bytes / 1e9,
           (unsigned long long)budget.cached, (unsigned long long)subgroups);
    printf("step %.4f s median, %.4f to %.4f\n", median, seconds[0], seconds[steps - 1]);
    double all = 0;
    for (int i = 0; i < path_count; i++) {
        all += read[i] + written[i];
        printf("path %d: %.3f GB read, %.3f GB written in a step\n", i, read[i] / 1e9 / (double)steps,
               written[i] / 1e9 / (double)steps);
    }
    printf("moved %.3f GB/s\n", all / (double)steps / median / 1e9);
    printf("memory: planned %.3f GB, used %.3f GB, ratio %.4f; peak of the process %.3f GB\n",
           (double)budget.host_bytes / 1e9, (peak - before) / 1e9, (peak - before) / (double)budget.host_bytes,
           peak / 1e9);
    check(spw_swap_close(swap), "closing");
    check(spw_tier_destroy(tier), "removing the files");
    return 0;
}
