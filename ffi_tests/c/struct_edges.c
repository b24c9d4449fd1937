// The library reads and writes no byte behind a struct. Each struct lies at the end of a page, before a page that cannot
// be accessed, so that such an access ends the program.

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include <spillway.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

// Runs a call that has to succeed.
#define OK(call)                                                              \
    do {                                                                      \
        if ((call) != SPW_OK) {                                               \
            fprintf(stderr, "%s: %s: %s\n", __func__, #call, spw_last_error()); \
            exit(1);                                                          \
        }                                                                     \
    } while (0)

// A copy of `bytes` bytes that ends where a page without access begins.
static void *edge(const void *from, size_t bytes) {
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    char *start = (char *)mmap(NULL, 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (start == (char *)MAP_FAILED || mprotect(start + page, page, PROT_NONE) != 0) {
        perror("mmap");
        exit(1);
    }
    return memcpy(start + page - bytes, from, bytes);
}

// A struct of the header as its initialiser makes it, at the edge.
#define EDGE(type, init, name)    \
    const type name##_made = init; \
    type *name = (type *)edge(&name##_made, sizeof(type))

enum { N = 1000 };
static float param[N], grad[N], exp_avg[N], exp_avg_sq[N];

static void optimizers(void) {
    EDGE(spw_thread_options, SPW_THREAD_OPTIONS_INIT, threads);
    EDGE(spw_adam_options, SPW_ADAM_OPTIONS_INIT, adam);
    EDGE(spw_adagrad_options, SPW_ADAGRAD_OPTIONS_INIT, adagrad);
    EDGE(spw_lion_options, SPW_LION_OPTIONS_INIT, lion);
    EDGE(spw_undo_options, SPW_UNDO_OPTIONS_INIT, recorded);
    EDGE(spw_tensor, SPW_TENSOR_INIT, tensor);
    EDGE(spw_step_stats, SPW_STEP_STATS_INIT, step);
    EDGE(spw_info, SPW_INFO_INIT, info);
    tensor->n = N;
    tensor->param_dtype = tensor->state_dtype = tensor->grad_dtype = SPW_DTYPE_F32;
    tensor->param = param;
    tensor->grad = grad;
    tensor->exp_avg = exp_avg;
    tensor->exp_avg_sq = exp_avg_sq;
    threads->num_threads = 2;
    OK(spw_set_threads(threads));
    OK(spw_adam_step(adam, tensor, 1, step));
    OK(spw_grad_stats(tensor, 1, 1.0, step));
    if (step->sum_squares != (double)N) exit(1);

    recorded->mode = SPW_UNDO_MODE_DELTA;
    recorded->elements = N;
    recorded->tensors = 1;
    spw_undo *undo = NULL;
    OK(spw_undo_open(recorded, &undo));
    const float before = param[0];
    adam->step = 2;
    OK(spw_undo_adam_step(undo, adam, tensor, 1, step));
    if (param[0] == before) exit(1);
    OK(spw_undo_rollback(undo));
    if (param[0] != before) exit(1);
    OK(spw_undo_close(undo));

    OK(spw_get_info(info));
    if (info->adam_calls == 0) exit(1);
    tensor->exp_avg_sq = NULL;
    OK(spw_lion_step(lion, tensor, 1, step));
    tensor->exp_avg_sq = exp_avg_sq;
    tensor->exp_avg = NULL;
    OK(spw_adagrad_step(adagrad, tensor, 1, step));
}

static void memory_and_io(const char *file) {
    EDGE(spw_pinned_options, SPW_PINNED_OPTIONS_INIT, options);
    EDGE(spw_pinned_stats, SPW_PINNED_STATS_INIT, pinned);
    EDGE(spw_io_options, SPW_IO_OPTIONS_INIT, engine);
    EDGE(spw_io_request, SPW_IO_REQUEST_INIT, request);
    EDGE(spw_io_stats, SPW_IO_STATS_INIT, counts);
    EDGE(spw_io_failure, SPW_IO_FAILURE_INIT, failure);
    options->flags = SPW_PINNED_FLAG_NO_LOCK;
    void *start = NULL;
    OK(spw_pinned_alloc(options, 4096, &start));
    OK(spw_pinned_get_stats(pinned));
    if (pinned->allocations != 1) exit(1);
    OK(spw_pinned_free(start));

    engine->backend = SPW_IO_BACKEND_THREADS;
    spw_io *io = NULL;
    OK(spw_io_open(engine, &io));
    uint64_t handle = 0;
    request->path = file;
    request->fd = -1;
    request->buffer = param;
    request->bytes = sizeof param;
    OK(spw_io_write(io, request, &handle));
    OK(spw_io_wait(io, &handle, 1, -1, NULL));
    OK(spw_io_get_stats(io, counts));
    if (counts->writes != 1) exit(1);
    request->path = "no/such/file";
    if (spw_io_read(io, request, &handle) == SPW_OK && spw_io_wait(io, &handle, 1, -1, NULL) == SPW_OK) exit(1);
    OK(spw_get_io_failure(0, failure, NULL, 0, NULL));
    OK(spw_io_close(io, -1));
}

static void storage(const char *folder) {
    EDGE(spw_tier_path, SPW_TIER_PATH_INIT, path);
    EDGE(spw_tier_options, SPW_TIER_OPTIONS_INIT, options);
    EDGE(spw_tier_steps_info, SPW_TIER_STEPS_INFO_INIT, steps);
    EDGE(spw_tier_target, SPW_TIER_TARGET_INIT, target);
    EDGE(spw_tier_opened_info, SPW_TIER_OPENED_INFO_INIT, opened);
    EDGE(spw_tier_extent_info, SPW_TIER_EXTENT_INFO_INIT, extent);
    EDGE(spw_tier_path_info, SPW_TIER_PATH_INFO_INIT, found);
    EDGE(spw_tier_verify_info, SPW_TIER_VERIFY_INFO_INIT, verified);
    path->directory = folder;
    options->job = "sizes";
    options->paths = path;
    options->path_count = 1;
    spw_tier *tier = NULL;
    OK(spw_tier_get_steps(options, steps));
    OK(spw_tier_open(options, &tier));
    OK(spw_tier_get_opened(tier, opened, NULL, 0));
    const uint64_t bytes = sizeof param;
    const void *streams[1] = {param};
    uint32_t id = 0;
    uint64_t ticket = 0;
    OK(spw_tier_define(tier, "weights", &bytes, 1, &id));
    OK(spw_tier_put(tier, id, streams, target, &ticket));
    OK(spw_tier_wait(tier, ticket, -1, NULL));
    OK(spw_tier_commit(tier, 1, NULL, 0));
    OK(spw_tier_get_extent(tier, 0, extent, NULL, 0, NULL));
    OK(spw_tier_get_path(tier, 0, found, NULL, 0, NULL));
    OK(spw_tier_verify(tier, verified));
    if (extent->bytes != bytes || found->written_bytes == 0 || verified->damaged != 0) exit(1);
    OK(spw_tier_destroy(tier));
}

int main(void) {
    char folder[] = "sizes-XXXXXX", file[32];
    if (mkdtemp(folder) == NULL) return 1;
    snprintf(file, sizeof file, "%s/file", folder);
    for (int i = 0; i < N; i++) {
        grad[i] = 1.0f;
    }
    optimizers();
    memory_and_io(file);
    unlink(file);
    storage(folder);
    rmdir(folder);
    return 0;
}
