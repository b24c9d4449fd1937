// A child of a process that uses a GPU gets a status from every GPU call, may close what it inherited, and steps on the
// processor as ever; its parent goes on. A child of a process that never used a GPU may use one.

#include "fake_cuda.h"

#include <sys/wait.h>
#include <unistd.h>

enum { PATIENCE_SECONDS = 20 };

static void in_child(void (*work)(spw_gpu *), spw_gpu *gpu) {
    const pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        alarm(PATIENCE_SECONDS);
        work(gpu);
        _exit(0);
    }
    int outcome = 0;
    CHECK(waitpid(child, &outcome, 0) == child && outcome == 0);
}

static void inherits(spw_gpu *gpu) {
    spw_gpu_driver driver = {.struct_size = sizeof driver};
    REFUSED(spw_gpu_probe(&driver), SPW_ERR_GPU_FORKED, "before this child was forked");
    const spw_gpu_options options = {.struct_size = sizeof options};
    spw_gpu *other = NULL;
    REFUSED(spw_gpu_open(&options, &other), SPW_ERR_GPU_FORKED, "spawn");
    spw_gpu_info info = {.struct_size = sizeof info};
    REFUSED(spw_gpu_info_get(gpu, &info), SPW_ERR_GPU_FORKED, "");
    REFUSED(spw_gpu_copy_wait(gpu, 1, -1), SPW_ERR_GPU_FORKED, "");
    REFUSED(spw_gpu_stream_wait(gpu, 1, 0), SPW_ERR_GPU_FORKED, "");
    const spw_adam_options adam = adam_options();
    REFUSED(spw_gpu_adam_step(gpu, &adam, NULL, 0, 0, NULL), SPW_ERR_GPU_FORKED, "");
    struct problem mine = make_mixed(1000, 8);
    CHECK_OK(spw_adam_step(&adam, &mine.tensor, 1, NULL));
    release(&mine);
    CHECK_OK(spw_gpu_close(gpu));
}

static void uses_one(spw_gpu *none) {
    CHECK(none == NULL);
    CHECK_OK(spw_gpu_close(open_gpu(1)));
}

int main(void) {
    use_fake_driver();
    in_child(uses_one, NULL);
    spw_gpu *gpu = open_gpu(0);
    in_child(inherits, gpu);
    spw_gpu_info info = {.struct_size = sizeof info};
    CHECK_OK(spw_gpu_info_get(gpu, &info));
    CHECK(strcmp(info.name, "Fake GPU") == 0 && info.capability == 90 && info.memory_bytes >= info.free_bytes);
    CHECK_OK(spw_gpu_close(gpu));
    return 0;
}
