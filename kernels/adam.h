// The contract between kernels/src/sve/ and the Adam kernels written in C.
//
// A kernel processes n elements with the operations, the order and the bits of kernels/src/rules.rs. It accesses no
// byte outside the n elements of each span, allocates nothing and keeps no state. The caller must set FPCR to round to
// nearest, no flush to zero, and default NaN. 16-bit stores of NaN depend on default NaN.

#ifndef SPILLWAY_KERNELS_ADAM_H
#define SPILLWAY_KERNELS_ADAM_H

#include <stddef.h>
#include <stdint.h>

// Element type of a span. ABSENT: the caller did not request a parameter copy.
enum element { ABSENT = 0, F32 = 1, F16 = 2, BF16 = 3 };

enum decay { NO_DECAY = 0, L2 = 1, DECOUPLED = 2 };

// Lanes of the sum of squares of a tile: element i adds to lane i % SQUARE_LANES.
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

// The spans of an in-place step.
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

// The spans of a step that reads `before` and writes `after`, which may be the same. The undo reads `after` and writes
// `before`.
struct adam_undo_spans {
    struct adam_states before, after;
    const char *grad;
    char *param_copy;
};

// The element types of a call as one number. The caller and the switch of the kernel use the same encoding.
#define ADAM_TYPES(param, state, grad, copy) ((param) << 6 | (state) << 4 | (grad) << 2 | (copy))

// Every type combination that has a kernel; the same list as in kernels/src/element.rs.
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
    CASE(F32, BF16, F32, ABSENT)                                                                                       \
    CASE(F32, BF16, F32, BF16)                                                                                         \
    CASE(F32, BF16, BF16, ABSENT)                                                                                      \
    CASE(F32, BF16, BF16, BF16)                                                                                        \
    CASE(F16, F32, F16, ABSENT)                                                                                        \
    CASE(F16, F16, F16, ABSENT)                                                                                        \
    CASE(BF16, F32, BF16, ABSENT)                                                                                      \
    CASE(BF16, BF16, BF16, ABSENT)

// Steps n elements. With lanes not NULL, also adds the squares of the scaled gradient to the SQUARE_LANES sums at
// lanes; the first element adds to lane 0. Returns false without changing anything if no kernel exists for the types.
typedef _Bool adam_kernel(const struct adam_rule *rule, enum decay decay, unsigned types, struct adam_spans spans,
                          size_t n, double *lanes);

// Steps n elements from `before` to `after`, and adds squares to lanes as above; lanes must not be NULL. Writes the
// groups (see log_sve.h) to *log and advances *log past them. *log is NULL for a step without a log. Each call of a
// chunk except the last must cover a whole tile (4096 elements), so that no group is split. Returns false as above.
typedef _Bool adam_record_kernel(const struct adam_rule *rule, enum decay decay, unsigned types,
                                 const struct adam_undo_spans *spans, size_t n, double *lanes, unsigned char **log);

// Rolls back the step of n elements: exactly with the groups at log, or by the inverse formula alone if log is NULL.
// With redo_scale not NULL, repeats the step in the same pass with *redo_scale as grad_scale. Returns false as above.
typedef _Bool adam_undo_kernel(const struct adam_rule *rule, const float *redo_scale, enum decay decay, unsigned types,
                               const struct adam_undo_spans *spans, size_t n, const unsigned char *log);

// Kernels that need SVE.
adam_kernel spillway_adam_sve;
adam_record_kernel spillway_adam_sve_record;
adam_undo_kernel spillway_adam_sve_undo;
// Kernels that need SVE and the BF16 extension.
adam_kernel spillway_adam_sve_bf16;
adam_record_kernel spillway_adam_sve_bf16_record;
adam_undo_kernel spillway_adam_sve_bf16_undo;

#endif
