// The contract between src/kernel/sve.rs and the Adam kernels written in C.
//
// A kernel steps n elements in place, in the operation order of src/kernel/rules.rs, with its bits. It touches no byte
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

struct adam_spans {
    char *param;
    const char *grad;
    char *exp_avg;
    char *exp_avg_sq;
    char *param_copy;
};

// The types of a call, in one number: the caller and the table in the kernel make it alike.
#define ADAM_TYPES(param, state, grad, copy) ((param) << 6 | (state) << 4 | (grad) << 2 | (copy))

// Steps n elements; with lanes not NULL also adds the squares of the scaled gradient to its SQUARE_LANES sums, the first
// element to lane 0. False, with nothing done, for types that have no kernel.
typedef _Bool adam_kernel(const struct adam_rule *rule, enum decay decay, unsigned types, struct adam_spans spans,
                          size_t n, double *lanes);

// Needs SVE.
adam_kernel spillway_adam_sve;
// Needs SVE with BF16.
adam_kernel spillway_adam_sve_bf16;

#endif
