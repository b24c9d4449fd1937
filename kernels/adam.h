// The contract between kernels/src/sve.rs, sve_undo.rs and the Adam kernels written in C.
//
// A kernel works on n elements in the operation order of kernels/src/rules.rs, with its bits. It touches no byte
// outside the n elements of each span, allocates nothing and has no state. The caller has set FPCR to nearest, no
// flush, default NaN: what 16-bit stores of NaN give depends on the last.

#ifndef SPILLWAY_KERNELS_ADAM_H
#define SPILLWAY_KERNELS_ADAM_H

#include <stddef.h>
#include <stdint.h>

// Element type of a span; absent is the parameter copy that was not asked for.
enum element { ABSENT = 0, F32 = 1, F16 = 2, BF16 = 3 };

enum decay { NO_DECAY = 0, L2 = 1, DECOUPLED = 2 };

// Lanes of a tile's tree of squares: element i adds to lane i % SQUARE_LANES.
enum { SQUARE_LANES = 256 };

struct adam_rule {
    float grad_scale;
    float beta1, one_minus_beta1;
    float beta2, one_minus_beta2;
    float inv_sqrt_correction2; // 1 / sqrt(1 - beta2^t)
    float eps;
    float step_size;    // -lr / (1 - beta1^t)
    float decay_factor; // weight decay for L2, -lr * weight decay for decoupled
};

// A step in place.
struct adam_spans {
    char *param;
    const char *grad;
    char *exp_avg;
    char *exp_avg_sq;
    char *param_copy;
};

struct adam_states {
    char *param;
    char *exp_avg;
    char *exp_avg_sq;
};

// A step from one place to another or the same, which its undo takes back there.
struct adam_undo_spans {
    struct adam_states before, after;
    const char *grad;
    char *param_copy;
};

// The types of a call, in one number: the caller and the table in the kernel make it alike.
#define ADAM_TYPES(param, state, grad, copy) ((param) << 6 | (state) << 4 | (grad) << 2 | (copy))

// Every combination that has a kernel, as kernels/src/element.rs lists them.
#define ADAM_COMBINATIONS(CASE)                                                                                        \
    CASE(F32, F32, F32, ABSENT)                                                                                        \
    CASE(F32, F32, F32, F16)                                                                                           \
    CASE(F32, F32, F32, BF16)                                                                                          \
    CASE(F32, F32, F16, ABSENT)                                                                                        \
    CASE(F32, F32, F16, F16)                                                                                           \
    CASE(F32, F32, F16, BF16)                                                                                          \
    CASE(F32, F32, BF16, ABSENT)                                                                                       \
    CASE(F32, F32, BF16, F16)                                                                                          \
    CASE(F32, F32, BF16, BF16)                                                                                         \
    CASE(F16, F32, F16, ABSENT)                                                                                        \
    CASE(F16, F16, F16, ABSENT)                                                                                        \
    CASE(BF16, F32, BF16, ABSENT)                                                                                      \
    CASE(BF16, BF16, BF16, ABSENT)

// Steps n elements; with lanes not NULL also adds the squares of the scaled gradient to its SQUARE_LANES sums, the first
// element to lane 0. False, with nothing done, for types that have no kernel.
typedef _Bool adam_kernel(const struct adam_rule *rule, enum decay decay, unsigned types, struct adam_spans spans,
                          size_t n, double *lanes);

// Steps n elements from `before` to `after`, adds to lanes as above, and writes the groups of kernels/src/undo.rs to *log,
// which it moves past them; without a log, *log is NULL. n is at most a tile, or a multiple of it lies before.
typedef _Bool adam_record_kernel(const struct adam_rule *rule, enum decay decay, unsigned types,
                                 const struct adam_undo_spans *spans, size_t n, double *lanes, unsigned char **log);

// Takes the step of n elements back, by the groups at log or, if that is NULL, by the inverse formula alone. With again
// not NULL the step is done anew in the same pass, with *again for grad_scale.
typedef _Bool adam_undo_kernel(const struct adam_rule *rule, const float *again, enum decay decay, unsigned types,
                               const struct adam_undo_spans *spans, size_t n, const unsigned char *log);

// These need SVE.
adam_kernel spillway_adam_sve;
adam_record_kernel spillway_adam_sve_record;
adam_undo_kernel spillway_adam_sve_undo;
// These need SVE with BF16.
adam_kernel spillway_adam_sve_bf16;
adam_record_kernel spillway_adam_sve_bf16_record;
adam_undo_kernel spillway_adam_sve_bf16_undo;

#endif
