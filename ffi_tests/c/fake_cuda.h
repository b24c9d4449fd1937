// A GPU for the programs of this folder: the fake driver of ffi_tests/fakecuda replaces the system's driver.
//
// Its device memory is host memory. A program may read this memory after the work on it has finished.

#ifndef SPILLWAY_FAKE_CUDA_H
#define SPILLWAY_FAKE_CUDA_H

#include "check.h"

#include <spillway/gpu.h>

#include <dlfcn.h>

static void *fake_driver;

// The path of the fake driver. Without one, the program exits as ignored.
static inline const char *fake_driver_path(void) {
    const char *path = getenv("FAKE_CUDA");
    if (path == NULL) {
        puts("FAKE_CUDA is not set to the fake driver");
        exit(77);
    }
    return path;
}

// All later GPU calls of the program use the fake driver.
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

// Driver calls that a framework would make; each returns 0.
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

// The framework's own reference to the primary context, current on this thread.
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
