// A GPU for the programs of this folder: the fake driver of ffi_tests/fakecuda, in the place of the system's.
//
// Its device memory is host memory, which a program may read once the work on it is over.

#ifndef SPILLWAY_FAKE_CUDA_H
#define SPILLWAY_FAKE_CUDA_H

#include "check.h"

#include <dlfcn.h>

static void *fake_driver;

// Where the fake driver is; a program that is run without one cannot run.
static inline const char *fake_driver_path(void) {
    const char *path = getenv("FAKE_CUDA");
    if (path == NULL) {
        puts("FAKE_CUDA names no fake driver");
        exit(77);
    }
    return path;
}

// Every GPU call of the program from now on meets the fake driver.
static inline void use_fake_driver(void) {
    const char *path = fake_driver_path();
    CHECK(setenv("SPILLWAY_CUDA_LIBRARY", path, 1) == 0);
    fake_driver = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    CHECK(fake_driver != NULL);
}

static inline void *fake_symbol(const char *name) {
    void *symbol = dlsym(fake_driver, name);
    CHECK(symbol != NULL);
    return symbol;
}

// What a framework would do with the driver; each returns 0.
#define FAKE(name, ...) CHECK(((int (*)())fake_symbol(name))(__VA_ARGS__) == 0)

static inline uint64_t fake_count(const char *name, uint32_t ordinal) {
    return ((uint64_t (*)(uint32_t))fake_symbol(name))(ordinal);
}

static inline spw_gpu *open_gpu(uint32_t ordinal) {
    const spw_gpu_options options = {.struct_size = sizeof options, .ordinal = ordinal, .chunk_bytes = 4096};
    spw_gpu *gpu = NULL;
    CHECK_OK(spw_gpu_open(&options, &gpu));
    CHECK(gpu != NULL);
    return gpu;
}

// The framework's own hold on the primary context, current on this thread.
static inline void enter_context(uint32_t ordinal) {
    void *context = NULL;
    FAKE("cuDevicePrimaryCtxRetain", &context, (int)ordinal);
    FAKE("cuCtxPushCurrent_v2", context);
}

static inline uint64_t device_memory(const void *values, size_t bytes) {
    uint64_t address = 0;
    FAKE("cuMemAlloc_v2", &address, bytes);
    memcpy((void *)(uintptr_t)address, values, bytes);
    return address;
}

#endif
