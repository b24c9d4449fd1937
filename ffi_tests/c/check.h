// Shared by the programs of this folder: checks, tensors to step, and watched memory.
//
// A program proves one promise of spillway.h. It exits 0 if the promise holds, 1 after naming the line that failed, and
// 77 after printing why it cannot run here. A program that passes prints nothing; ffi_tests/rust/c.rs checks this.

#ifndef SPILLWAY_CHECK_H
#define SPILLWAY_CHECK_H

#define _GNU_SOURCE 1

#include <spillway.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(condition) \
    ((condition) ? (void)0 : fail(__FILE__, __LINE__, "%s (last error: %s)", #condition, spw_last_error()))
#define CHECK_OK(call) check_status(__FILE__, __LINE__, #call, (call), SPW_OK, "")
// The call fails with this status, its message contains `words`, and no watched byte changes.
#define REFUSED(call, status, words) check_status(__FILE__, __LINE__, #call, (call), (status), (words))
#define INVALID(call, words) REFUSED(call, SPW_ERR_INVALID_ARGUMENT, words)

// More elements than the library steps on the caller's thread alone.
#define LARGE (5 * 65536 + 777)

static inline void fail(const char *file, int line, const char *format, ...) {
    va_list values;
    va_start(values, format);
    fprintf(stderr, "%s:%d: ", file, line);
    vfprintf(stderr, format, values);
    fprintf(stderr, "\n");
    va_end(values);
    exit(1);
}

enum { SKIPPED = 77 };

static inline void skip(const char *why) {
    puts(why);
    exit(SKIPPED);
}

// An emulated processor is about fifty times slower, so a test runs fewer rounds there.
static inline int rounds(int many) {
    return getenv("SPILLWAY_TEST_EMULATOR") == NULL ? many : (many + 3) / 4;
}

struct watched {
    const void *memory;
    void *before;
    size_t bytes;
};
static struct watched watched[32];
static size_t watched_count;

// Watches this memory: every call that is refused later must leave its bytes as they are now.
static inline void watch(const void *memory, size_t bytes) {
    struct watched *entry = &watched[watched_count++];
    *entry = (struct watched){memory, malloc(bytes + 1), bytes};
    if (bytes > 0) memcpy(entry->before, memory, bytes);
}

static inline void unwatch_all(void) {
    while (watched_count > 0) free(watched[--watched_count].before);
}

static inline void check_status(const char *file, int line, const char *call, int got, int wanted, const char *words) {
    if (got != wanted) {
        fail(file, line, "%s: %s, not %s (%s)", call, spw_status_name(got), spw_status_name(wanted), spw_last_error());
    }
    if (got == SPW_OK) return;
    if (strstr(spw_last_error(), words) == NULL) {
        fail(file, line, "%s: the message does not contain \"%s\": %s", call, words, spw_last_error());
    }
    for (size_t i = 0; i < watched_count; i++) {
        if (memcmp(watched[i].memory, watched[i].before, watched[i].bytes) != 0) {
            fail(file, line, "%s: failed as expected, but watched memory %zu changed", call, i);
        }
    }
}

static inline size_t width(uint32_t dtype) {
    return dtype == SPW_DTYPE_NONE ? 0 : dtype == SPW_DTYPE_F32 ? 4 : 2;
}

// A tensor that owns its memory. `spans` lists its spans in the order param, grad, exp_avg, exp_avg_sq, copy.
struct problem {
    spw_tensor tensor;
    void *spans[5];
    size_t bytes[5];
};

static inline uint64_t random_bits(uint64_t *state) {
    *state += 0x9e3779b97f4a7c15u;
    uint64_t bits = *state;
    bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9u;
    bits = (bits ^ (bits >> 27)) * 0x94d049bb133111ebu;
    return bits ^ (bits >> 31);
}

// Random numbers of magnitude 2^-20 to 1. They are built from bits, so no rounding mode changes them.
static inline void fill(void *to, uint32_t dtype, uint64_t n, uint64_t seed, int positive) {
    for (uint64_t i = 0; i < n; i++) {
        uint64_t bits = random_bits(&seed);
        uint32_t exponent = (uint32_t)(bits >> 32) % 14, sign = positive ? 0 : (uint32_t)(bits >> 63);
        if (dtype == SPW_DTYPE_F32) {
            ((uint32_t *)to)[i] = sign << 31 | (126 - exponent) << 23 | (uint32_t)(bits & 0x7fffff);
        } else if (dtype == SPW_DTYPE_F16) {
            ((uint16_t *)to)[i] = (uint16_t)(sign << 15 | (14 - exponent) << 10 | (bits & 0x3ff));
        } else {
            ((uint16_t *)to)[i] = (uint16_t)(sign << 15 | (126 - exponent) << 7 | (bits & 0x7f));
        }
    }
}

static inline struct problem make(uint64_t n, uint32_t param, uint32_t state, uint32_t grad, uint32_t copy,
                                  uint64_t seed) {
    const uint32_t dtypes[5] = {param, grad, state, state, copy};
    struct problem made = {.tensor = {.struct_size = sizeof(spw_tensor),
                                      .param_dtype = param,
                                      .state_dtype = state,
                                      .grad_dtype = grad,
                                      .copy_dtype = copy,
                                      .n = n}};
    for (int i = 0; i < 5; i++) {
        if (dtypes[i] == SPW_DTYPE_NONE) continue;
        made.bytes[i] = (size_t)n * width(dtypes[i]);
        made.spans[i] = malloc(made.bytes[i] + 1);
        if (made.spans[i] == NULL) fail(__FILE__, __LINE__, "out of memory");
        fill(made.spans[i], dtypes[i], n, seed * 5 + (uint64_t)i, i == 3);
    }
    made.tensor.param = made.spans[0];
    made.tensor.grad = made.spans[1];
    made.tensor.exp_avg = made.spans[2];
    made.tensor.exp_avg_sq = made.spans[3];
    made.tensor.param_copy = made.spans[4];
    return made;
}

// Mixed precision: f32 master weight and states, bf16 gradient and copy.
static inline struct problem make_mixed(uint64_t n, uint64_t seed) {
    return make(n, SPW_DTYPE_F32, SPW_DTYPE_F32, SPW_DTYPE_BF16, SPW_DTYPE_BF16, seed);
}

static inline struct problem make_f32(uint64_t n, uint64_t seed) {
    return make(n, SPW_DTYPE_F32, SPW_DTYPE_F32, SPW_DTYPE_F32, SPW_DTYPE_NONE, seed);
}

static inline void release(struct problem *problem) {
    for (int i = 0; i < 5; i++) free(problem->spans[i]);
}

static inline void watch_problem(const struct problem *problem) {
    for (int i = 0; i < 5; i++) {
        if (problem->spans[i] != NULL) watch(problem->spans[i], problem->bytes[i]);
    }
}

static inline int same(const struct problem *a, const struct problem *b) {
    for (int i = 0; i < 5; i++) {
        if (a->bytes[i] != b->bytes[i]) return 0;
        if (a->bytes[i] > 0 && memcmp(a->spans[i], b->spans[i], a->bytes[i]) != 0) return 0;
    }
    return 1;
}

static inline spw_adam_options adam_options(void) {
    spw_adam_options options = SPW_ADAM_OPTIONS_INIT;
    options.step = 3;
    options.lr = 1e-2;
    options.weight_decay = 0.1;
    options.grad_scale = 0.37;
    return options;
}

static inline spw_ds_adam_call ds_adam_call(uint64_t step) {
    spw_ds_adam_call call = SPW_DS_ADAM_CALL_INIT;
    call.step = step;
    call.lr = 1e-3f;
    call.beta1 = 0.9f;
    call.beta2 = 0.999f;
    call.eps = 1e-8f;
    return call;
}

static inline void configure_threads(uint32_t count) {
    const spw_thread_options options = {sizeof options, count};
    CHECK_OK(spw_set_threads(&options));
}

static inline spw_step_stats step_stats(void) {
    return (spw_step_stats){.struct_size = sizeof(spw_step_stats), .nonfinite = 77, .sum_squares = -1};
}

// The statistics of one gradient.
static inline spw_status grad_stats(const void *grad, uint32_t dtype, uint64_t n, double scale, spw_step_stats *stats) {
    spw_tensor tensor = SPW_TENSOR_INIT;
    tensor.grad = grad;
    tensor.grad_dtype = dtype;
    tensor.n = n;
    return spw_grad_stats(&tensor, 1, scale, stats);
}

#endif
