// Each fault of the driver, the device or its memory has its own status and a message that says what to do. The library
// looks for a driver only on request, and a fault never makes it print, abort or hang.

#define SPW_EXPERIMENTAL
#include "child.h"
#include "fake_cuda.h"

static spw_status probe(void) {
    spw_gpu_driver driver = {.struct_size = sizeof driver};
    const spw_status status = spw_gpu_probe(&driver);
    CHECK(status == SPW_OK || (driver.devices == 0 && driver.cuda_version == 0));
    return status;
}

static spw_status open_close(void) {
    const spw_gpu_options options = {.struct_size = sizeof options, .ordinal = 3};
    spw_gpu *gpu = NULL;
    const spw_status status = spw_gpu_open(&options, &gpu);
    CHECK((gpu != NULL) == (status == SPW_OK));
    CHECK_OK(spw_gpu_close(gpu));
    return status;
}

struct state {
    const char *name, *value;
    spw_status (*call)(void);
    spw_status status;
    const char *words;
};

static const struct state STATES[] = {
    {"SPILLWAY_CUDA_LIBRARY", "libno-such-driver.so.1", probe, SPW_ERR_NO_DEVICE, "cannot load the CUDA driver"},
    {"SPILLWAY_CUDA_LIBRARY", "libno-such-driver.so.1", open_close, SPW_ERR_NO_DEVICE, "libno-such-driver.so.1"},
    {"SPILLWAY_CUDA_LIBRARY", "libm.so.6", probe, SPW_ERR_DRIVER_TOO_OLD, "the library has no cu"},
    {"FAKECUDA_INIT", "100", probe, SPW_ERR_NO_DEVICE, "CUDA_ERROR_NO_DEVICE (100)"},
    {"FAKECUDA_INIT", "34", probe, SPW_ERR_DRIVER_STUB, "from LD_LIBRARY_PATH"},
    {"FAKECUDA_INIT", "803", probe, SPW_ERR_DRIVER_TOO_OLD, "reboot"},
    {"FAKECUDA_INIT", "999", probe, SPW_ERR_NO_DEVICE, "does not respond"},
    {"FAKECUDA_INIT", "123", probe, SPW_ERR_GPU, "CUDA error 123"},
    {"FAKECUDA_VERSION", "11080", probe, SPW_ERR_DRIVER_TOO_OLD, "the driver supports CUDA 11.8"},
    {"FAKECUDA_DEVICES", "0", probe, SPW_ERR_NO_DEVICE, "no GPU is visible"},
    {"FAKECUDA_DEVICES", "3", open_close, SPW_ERR_INVALID_ARGUMENT, "options.ordinal: is 3, but 3 devices"},
    {"FAKECUDA_CAPABILITY", "61", open_close, SPW_ERR_UNSUPPORTED, "compute capability 6.1"},
    {"FAKECUDA_FAIL", "cuModuleLoadDataEx=218", open_close, SPW_ERR_GPU_JIT, "compiling cast.ptx"},
    {"FAKECUDA_FAIL", "cuModuleLoadDataEx=222", open_close, SPW_ERR_DRIVER_TOO_OLD, "UNSUPPORTED_PTX_VERSION"},
    {"FAKECUDA_FAIL", "cuDevicePrimaryCtxRetain=2", open_close, SPW_ERR_GPU_OUT_OF_MEMORY, "primary context of GPU 3"},
    {"FAKECUDA_FAIL", "cuStreamCreateWithPriority=719", open_close, SPW_ERR_GPU_LOST, "the CUDA context is lost"},
    {"FAKECUDA_VERSION", "12000", probe, SPW_OK, ""},
    {"FAKECUDA_VERSION", "13000", open_close, SPW_OK, ""},
};

// Each case runs in a process of its own, because a process that has found a driver keeps it.
static void check_state(const struct state *state) {
    const pid_t child = fork();
    if (child == 0) {
        CHECK(setenv("SPILLWAY_CUDA_LIBRARY", fake_driver_path(), 1) == 0);
        CHECK(setenv(state->name, state->value, 1) == 0);
        const spw_status status = state->call();
        if (status != state->status || (status != SPW_OK && !strstr(spw_last_error(), state->words))) {
            fail(__FILE__, __LINE__, "%s=%s: %s: %s", state->name, state->value, spw_status_name(status), spw_last_error());
        }
        _exit(0);
    }
    finish(child, "a child");
}

int main(void) {
    fake_driver_path();
    CHECK(dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD) == NULL);
    INVALID(spw_gpu_open(NULL, NULL), "options: is NULL");
    CHECK_OK(spw_gpu_close(NULL));
    INVALID(spw_gpu_get_info(NULL, NULL), "gpu: is NULL");
    INVALID(spw_gpu_copy_start(NULL, NULL, NULL), "gpu: is NULL");
    INVALID(spw_gpu_copy_wait(NULL, 1, 0), "gpu: is NULL");
    INVALID(spw_gpu_copy_stream_wait(NULL, 1, 0), "gpu: is NULL");
    INVALID(spw_gpu_adam_step(NULL, NULL, NULL, 0, 0, NULL), "gpu: is NULL");
    for (size_t i = 0; i < sizeof STATES / sizeof *STATES; i++) check_state(&STATES[i]);

    // The real state of this machine: a GPU, or a status that says why there is none.
    spw_gpu_driver driver = {.struct_size = sizeof driver};
    const spw_status status = spw_gpu_probe(&driver);
    CHECK(status == SPW_OK ? driver.devices > 0 : status >= SPW_ERR_NO_DEVICE && strlen(spw_last_error()) > 20);
    return 0;
}
