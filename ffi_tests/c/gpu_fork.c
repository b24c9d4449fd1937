// Build: forks
// In a child of a process that uses a GPU, every GPU call returns an error status. The child may close the inherited
// handles and step on the processor; its parent goes on. A child of a process that never used a GPU may use one.

#define SPW_EXPERIMENTAL
#include "child.h"
#include "fake_cuda.h"

#include <sys/mman.h>

static void with_gpu(void (*work)(spw_gpu *), spw_gpu *gpu) {
    const pid_t child = fork();
    if (child == 0) {
        alarm(PATIENCE_SECONDS);
        work(gpu);
        _exit(0);
    }
    finish(child, "a child");
}

static void inherits(spw_gpu *gpu) {
    spw_gpu_driver driver = {.struct_size = sizeof driver};
    REFUSED(spw_gpu_probe(&driver), SPW_ERR_GPU_FORKED, "before it forked this process");
    const spw_gpu_options options = {.struct_size = sizeof options};
    spw_gpu *other = NULL;
    REFUSED(spw_gpu_open(&options, &other), SPW_ERR_GPU_FORKED, "spawn");
    spw_gpu_info info = {.struct_size = sizeof info};
    REFUSED(spw_gpu_get_info(gpu, &info), SPW_ERR_GPU_FORKED, "");
    REFUSED(spw_gpu_copy_wait(gpu, 1, -1), SPW_ERR_GPU_FORKED, "");
    REFUSED(spw_gpu_copy_stream_wait(gpu, 1, 0), SPW_ERR_GPU_FORKED, "");
    const spw_adam_options adam = adam_options();
    REFUSED(spw_gpu_adam_step(gpu, &adam, NULL, 0, 0, NULL), SPW_ERR_GPU_FORKED, "");
    struct problem mine = make_mixed(1000, 8);
    CHECK_OK(spw_adam_step(&adam, &mine.tensor, 1, NULL));
    release(&mine);
    CHECK_OK(spw_gpu_close(gpu));
}

enum { BLOCK_BYTES = 1 << 16 };
static void *block;

// Memory that the GPU can reach is not mapped in the child. What the child maps at the same addresses stays mapped when
// it closes the inherited handles.
static void maps_in_its_place(spw_gpu *gpu) {
    CHECK(msync(block, BLOCK_BYTES, MS_ASYNC) != 0);
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE;
    unsigned char *own = mmap(block, BLOCK_BYTES, PROT_READ | PROT_WRITE, flags, -1, 0);
    CHECK(own == block);
    memset(own, 7, BLOCK_BYTES);
    CHECK_OK(spw_gpu_close(gpu));
    CHECK(spw_pinned_free(block) == SPW_ERR_UNSUPPORTED);
    CHECK(own[0] == 7 && own[BLOCK_BYTES - 1] == 7);
}

// A copy into the block registers its mapping with the driver.
static void reach(spw_gpu *gpu) {
    CHECK_OK(spw_pinned_alloc(NULL, BLOCK_BYTES, &block));
    enter_context(0);
    const float value = 1.0f;
    spw_gpu_copy copy = {.struct_size = sizeof copy, .direction = SPW_GPU_DIRECTION_D2H, .device_dtype = SPW_DTYPE_F32,
                         .host_dtype = SPW_DTYPE_F32, .n = 1, .device = device_memory(&value, sizeof value), .host = block};
    uint64_t ticket = 0;
    CHECK_OK(spw_gpu_copy_start(gpu, &copy, &ticket));
    CHECK_OK(spw_gpu_copy_wait(gpu, ticket, -1));
    CHECK(*(float *)block == 1.0f);
}

static void uses_one(spw_gpu *none) {
    CHECK(none == NULL);
    CHECK_OK(spw_gpu_close(open_gpu(1)));
}

int main(void) {
    use_fake_driver();
    with_gpu(uses_one, NULL);
    spw_gpu *gpu = open_gpu(0);
    with_gpu(inherits, gpu);
    reach(gpu);
    with_gpu(maps_in_its_place, gpu);
    CHECK(*(float *)block == 1.0f);
    spw_gpu_info info = {.struct_size = sizeof info};
    CHECK_OK(spw_gpu_get_info(gpu, &info));
    CHECK(strcmp(info.name, "Fake GPU") == 0 && info.capability == 90 && info.memory_bytes >= info.free_bytes);
    CHECK_OK(spw_pinned_free(block));
    CHECK_OK(spw_gpu_close(gpu));
    return 0;
}
