// Does Adam steps whose instructions callgrind counts: steps CASE ELEMENTS TENSORS
//
// CASE: f32; fused, which reads a bf16 gradient, writes a bf16 copy and sums the squares; or undo, which records the
// step in a log and rolls it back. Each tensor has ELEMENTS elements. Only the second call is counted: the first one
// starts threads and takes memory.

#include <spillway.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <valgrind/callgrind.h>

static spw_tensor *tensors;
static uint64_t count;
static spw_undo *undo;

static void *values(uint64_t bytes) {
    void *start = NULL;
    if (posix_memalign(&start, 4096, bytes + 4096) != 0) exit(2);
    // Small positive numbers in f32 and in bf16.
    for (uint64_t i = 0; i < bytes / 2; i++) ((uint16_t *)start)[i] = (uint16_t)(0x3a00 + i % 97);
    return start;
}

static void check(spw_status status) {
    if (status == SPW_OK) return;
    fprintf(stderr, "%s\n", spw_last_error());
    exit(2);
}

static void step(const char *what, uint64_t number) {
    spw_adam_options options = SPW_ADAM_OPTIONS_INIT;
    spw_step_stats stats = SPW_STEP_STATS_INIT;
    options.lr = 1e-3;
    options.step = number;
    if (!strcmp(what, "undo")) {
        check(spw_undo_adam_step(undo, &options, tensors, count, NULL));
        check(spw_undo_rollback(undo));
    } else {
        check(spw_adam_step(&options, tensors, count, !strcmp(what, "fused") ? &stats : NULL));
    }
}

int main(int argc, char **argv) {
    if (argc != 4) return 2;
    const char *what = argv[1];
    const uint64_t n = strtoull(argv[2], NULL, 10);
    const int fused = !strcmp(what, "fused");
    count = strtoull(argv[3], NULL, 10);
    tensors = calloc(count, sizeof *tensors);
    if (tensors == NULL) return 2;
    char *spans[5];
    for (int i = 0; i < 5; i++) spans[i] = values(4 * n * count);
    for (uint64_t i = 0; i < count; i++) {
        tensors[i] = (spw_tensor)SPW_TENSOR_INIT;
        tensors[i].n = n;
        tensors[i].param_dtype = tensors[i].state_dtype = SPW_DTYPE_F32;
        tensors[i].grad_dtype = fused ? SPW_DTYPE_BF16 : SPW_DTYPE_F32;
        tensors[i].copy_dtype = fused ? SPW_DTYPE_BF16 : SPW_DTYPE_NONE;
        tensors[i].param = spans[0] + 4 * n * i;
        tensors[i].grad = spans[1] + 4 * n * i;
        tensors[i].exp_avg = spans[2] + 4 * n * i;
        tensors[i].exp_avg_sq = spans[3] + 4 * n * i;
        tensors[i].param_copy = fused ? spans[4] + 4 * n * i : NULL;
    }
    if (!strcmp(what, "undo")) {
        spw_undo_options options = SPW_UNDO_OPTIONS_INIT;
        options.mode = SPW_UNDO_MODE_DELTA;
        options.elements = n * count;
        options.tensors = count;
        check(spw_undo_open(&options, &undo));
    }
    step(what, 1);
    CALLGRIND_TOGGLE_COLLECT;
    step(what, 2);
    CALLGRIND_TOGGLE_COLLECT;
    if (undo != NULL) spw_undo_close(undo);
    return 0;
}
