// Steps optimizer state that does not fit into memory. The state lives in two directories, which may be on any disks.
//
//     cc tier.c $(pkg-config --cflags --libs spillway) -o tier
//     ./tier DIRECTORY DIRECTORY [million parameters] [MiB of memory] [steps]
//
// 1000 million parameters are 12 GB of state: ./tier /mnt/nvme /mnt/pfs 1000 2048 5
//
// Each step commits. After a restart the program resumes at the last committed step, no matter when it was killed.
// Without directories the program creates two of its own and removes them at the end.
//
// Compiles as C99 and as C++.

#ifndef _XOPEN_SOURCE
#define _XOPEN_SOURCE 700
#endif

#include <inttypes.h>
#include <spillway.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { PATHS = 2 };

static const uint64_t SUBGROUP = 4 << 20;

static void check(spw_status status, const char *what) {
    if (status != SPW_OK) {
        fprintf(stderr, "%s: %s\n", what, spw_last_error());
        exit(1);
    }
}

static void *zeros(uint64_t bytes) {
    void *memory = calloc(1, bytes);
    if (memory == NULL) {
        fprintf(stderr, "out of memory for %" PRIu64 " bytes\n", bytes);
        exit(1);
    }
    return memory;
}

// A gradient as backward would produce it: bfloat16 numbers that depend on the step.
static void backward(uint16_t *grad, uint64_t n, uint64_t step) {
    for (uint64_t i = 0; i < n; i++) {
        grad[i] = (uint16_t)(0x3c00 + (i * 2654435761u + step * 40503u) % 512);
    }
}

// The bfloat16 number nearest to a float that is not NaN; of two, the even one.
static uint16_t bf16_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// The weights of the model continue as the masters of the last commit.
static void read_weights(spw_swap *swap, uint16_t *weights, const uint64_t *elements, uint64_t subgroups) {
    float *param = (float *)zeros(SUBGROUP * sizeof *param);
    for (uint64_t subgroup = 0; subgroup < subgroups; subgroup++) {
        check(spw_swap_read(swap, subgroup, NULL, param, NULL, NULL), "reading the weights");
        for (uint64_t i = 0; i < elements[subgroup]; i++) {
            weights[subgroup * SUBGROUP + i] = bf16_of(param[i]);
        }
    }
    free(param);
}

static spw_tier *open_tier(char **directories) {
    spw_tier_path paths[PATHS] = {SPW_TIER_PATH_INIT, SPW_TIER_PATH_INIT};
    for (int i = 0; i < PATHS; i++) {
        paths[i].directory = directories[i];
    }
    spw_tier_options options = SPW_TIER_OPTIONS_INIT;
    options.mode = SPW_TIER_MODE_AUTO;
    options.job = "example";
    options.paths = paths;
    options.path_count = PATHS;
    spw_tier *tier = NULL;
    check(spw_tier_open(&options, &tier), "opening the tier");
    return tier;
}

static void report(spw_swap *swap, uint64_t step) {
    spw_swap_stats stats = SPW_SWAP_STATS_INIT;
    check(spw_swap_get_stats(swap, &stats), "reading the counters");
    printf("step %" PRIu64 ": %" PRIu64 " subgroups found in memory, %" PRIu64 " read, %" PRIu64 " written so far\n",
           step, stats.hits, stats.fetched, stats.flushed);
}

int main(int count, char **arguments) {
    static char own[PATHS][32] = {"spillway-tier-XXXXXX", "spillway-tier-XXXXXX"};
    char *directories[PATHS];
    const int given = count > PATHS;
    for (int i = 0; i < PATHS; i++) {
        directories[i] = given ? arguments[1 + i] : mkdtemp(own[i]);
        if (directories[i] == NULL) {
            fprintf(stderr, "cannot create a directory for path %d\n", i);
            return 1;
        }
    }
    const uint64_t parameters = (count > 3 ? strtoull(arguments[3], NULL, 10) : 20) * 1000000;
    const uint64_t host_bytes = (count > 4 ? strtoull(arguments[4], NULL, 10) : 256) << 20;
    const uint64_t steps = count > 5 ? strtoull(arguments[5], NULL, 10) : 3;
    const uint64_t subgroups = (parameters + SUBGROUP - 1) / SUBGROUP;

    uint64_t *elements = (uint64_t *)zeros(subgroups * sizeof *elements);
    spw_tensor *tensors = (spw_tensor *)zeros(subgroups * sizeof *tensors);
    uint16_t *grad = (uint16_t *)zeros(SUBGROUP * sizeof *grad);
    const spw_tensor empty = SPW_TENSOR_INIT;
    // The model's weights, which stay in memory.
    uint16_t *weights = (uint16_t *)zeros(parameters * sizeof *weights);
    for (uint64_t i = 0; i < subgroups; i++) {
        elements[i] = i + 1 < subgroups ? SUBGROUP : parameters - i * SUBGROUP;
        tensors[i] = empty;
        tensors[i].param_dtype = tensors[i].state_dtype = SPW_DTYPE_F32;
        tensors[i].grad_dtype = tensors[i].copy_dtype = SPW_DTYPE_BF16;
        tensors[i].n = elements[i];
        // Keeps the example small: all subgroups have the same gradient.
        tensors[i].grad = grad;
        tensors[i].param_copy = weights + i * SUBGROUP;
    }

    spw_swap_options options = SPW_SWAP_OPTIONS_INIT;
    options.host_memory = host_bytes;
    options.elements = elements;
    options.subgroups = subgroups;
    spw_swap_budget budget = SPW_SWAP_BUDGET_INIT;
    check(spw_swap_plan_budget(&options, PATHS, &budget), "planning");
    printf("%" PRIu64 " parameters: %.2f GB of state through %.2f GB of memory, %" PRIu64 " of %" PRIu64
           " subgroups stay there\n",
           parameters, budget.state_bytes / 1e9, budget.host_bytes / 1e9, budget.cached, subgroups);

    spw_tier *tier = open_tier(directories);
    spw_tier_opened_info opened = SPW_TIER_OPENED_INFO_INIT;
    check(spw_tier_get_opened(tier, &opened, NULL, 0), "reading the opened state");
    spw_swap *swap = NULL;
    check(spw_swap_open(tier, &options, &swap), "allocating memory");
    uint64_t step = 0;
    if (opened.resumed) {
        step = opened.step;
        read_weights(swap, weights, elements, subgroups);
        printf("continues after step %" PRIu64 "\n", step);
    } else {
        const float **none = (const float **)zeros(3 * subgroups * sizeof *none);
        check(spw_swap_fill(swap, none), "filling");
        check(spw_swap_commit(swap, 0, NULL, 0), "committing");
        free(none);
    }

    spw_adam_options adam = SPW_ADAM_OPTIONS_INIT;
    adam.lr = 1e-3;
    for (uint64_t end = step + steps; step < end;) {
        step++;
        backward(grad, SUBGROUP, step);
        adam.step = step;
        check(spw_swap_adam_step(swap, &adam, tensors, subgroups, NULL), "stepping");
        check(spw_swap_commit(swap, step, NULL, 0), "committing");
        report(swap, step);
    }
    // Weights began at zero and move against the sign of their gradient.
    uint64_t moved = 0;
    for (uint64_t i = 0; i < parameters; i++) {
        moved += weights[i] >> 15;
    }
    if (moved == parameters) {
        printf("learned: every weight moved\n");
    }
    check(spw_swap_close(swap), "closing");
    if (given) {
        check(spw_tier_close(tier, -1), "closing");
    } else {
        check(spw_tier_destroy(tier), "removing the files");
        for (int i = 0; i < PATHS; i++) {
            rmdir(directories[i]);
        }
    }
    free(elements);
    free(tensors);
    free(grad);
    free(weights);
    return 0;
}
