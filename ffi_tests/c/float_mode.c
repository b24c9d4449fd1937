// A step keeps the float mode and the affinity of the caller's thread, and no float mode changes a bit of the result.
// The modes are flush-to-zero, denormals-are-zero (as -ffast-math sets them) and every rounding mode. The pool's
// threads inherit the mode of the thread that creates them.

#include "check.h"

#include <sched.h>

#if !defined(__x86_64__)
int main(void) {
    skip("MXCSR exists on x86-64 only");
}
#else
#include <xmmintrin.h>

static const unsigned modes[] = {
    0x1f80,           // IEEE
    0x1f80 | 0x8040,  // flush-to-zero, denormals-are-zero
    0x1f80 | 0x2000,  // down
    0x1f80 | 0x4000,  // up
    0x1f80 | 0x6000,  // toward zero
    0x1fbf | 0x8040,  // with every exception flag raised
};

struct outcome {
    struct problem problem[3];
    spw_step_stats stats[4];
};

// Gradients and states so small that flushing would make them zero, and coefficients that are denormal in f32.
static struct problem tiny(uint64_t n, uint64_t seed) {
    struct problem made = make_f32(n, seed);
    for (int span = 0; span < 4; span++) {
        uint32_t *bits = made.spans[span];
        for (uint64_t i = 0; i < n; i += 2) bits[i] = (bits[i] & 0x80000000u) | (bits[i] & 0x7fffff);
    }
    return made;
}

static struct outcome run(uint64_t n, double lr, double eps, double weight_decay, double scale) {
    struct outcome out;
    for (int i = 0; i < 3; i++) out.problem[i] = tiny(n, 7);
    for (int i = 0; i < 4; i++) out.stats[i] = step_stats();
    spw_adam_options adam = {.struct_size = sizeof adam, .step = 2, .lr = lr, .beta1 = 0.9, .beta2 = 0.999, .eps = eps,
                             .weight_decay = weight_decay, .grad_scale = scale};
    const spw_adagrad_options adagrad = {.struct_size = sizeof adagrad, .step = 2, .lr = lr, .lr_decay = 0.1,
                                         .eps = eps, .weight_decay = weight_decay, .grad_scale = scale};
    const spw_lion_options lion = {.struct_size = sizeof lion, .lr = lr, .beta1 = 0.9, .beta2 = 0.99,
                                   .weight_decay = weight_decay, .grad_scale = scale};
    for (uint32_t mode = 0; mode < 2; mode++) {
        adam.weight_decay_mode = mode;
        CHECK_OK(spw_adam_step(&adam, &out.problem[0].tensor, 1, &out.stats[0]));
    }
    CHECK_OK(spw_ds_adam_create(1, 0.9f, 0.999f, 1));
    for (uint64_t step = 1; step < 4; step++) {
        spw_ds_adam_call call = ds_adam_call(step);
        call.weight_decay = 0.1f;
        CHECK_OK(spw_ds_adam_update(NULL, 1, &call, &out.problem[0].tensor));
    }
    CHECK_OK(spw_adagrad_step(&adagrad, &out.problem[1].tensor, 1, &out.stats[1]));
    CHECK_OK(spw_lion_step(&lion, &out.problem[2].tensor, 1, &out.stats[2]));
    CHECK_OK(grad_stats(out.problem[0].tensor.grad, SPW_DTYPE_F32, n, scale, &out.stats[3]));
    return out;
}

static void compare(uint64_t n, double lr, double eps, double weight_decay, double scale) {
    static const char *optimizers[] = {"adam", "adagrad", "lion"};
    configure_threads(3);
    struct outcome ieee = run(n, lr, eps, weight_decay, scale);
    for (size_t i = 1; i < sizeof modes / sizeof *modes; i++) {
        // A thread in this mode creates the workers, and they inherit the mode.
        configure_threads(3);
        _mm_setcsr(modes[i]);
        struct outcome other = run(n, lr, eps, weight_decay, scale);
        // Arithmetic may raise exception flags; the control bits stay.
        const unsigned after = _mm_getcsr() & ~0x3fu;
        _mm_setcsr(0x1f80);
        CHECK(after == (modes[i] & ~0x3fu));
        for (int k = 0; k < 3; k++) {
            if (!same(&ieee.problem[k], &other.problem[k])) {
                fail(__FILE__, __LINE__, "%s: wrong bits in float mode %#x (n %llu, lr %g, eps %g, decay %g, scale %g)",
                     optimizers[k], modes[i], (unsigned long long)n, lr, eps, weight_decay, scale);
            }
        }
        if (memcmp(ieee.stats, other.stats, sizeof ieee.stats) != 0) {
            fail(__FILE__, __LINE__, "wrong statistics in float mode %#x (n %llu, scale %g)", modes[i],
                 (unsigned long long)n, scale);
        }
        for (int k = 0; k < 3; k++) release(&other.problem[k]);
    }
    for (int k = 0; k < 3; k++) release(&ieee.problem[k]);
}

int main(void) {
    cpu_set_t before, after;
    CHECK(sched_getaffinity(0, sizeof before, &before) == 0);
    const uint64_t lengths[] = {1000, LARGE};
    for (int i = 0; i < 2; i++) {
        compare(lengths[i], 1e-2, 1e-8, 0.1, 0.37);
        compare(lengths[i], 1e-2, 1e-40, 0, 1);
        compare(lengths[i], 1e-41, 1e-8, 0.1, 1);
        compare(lengths[i], 1e-20, 1e-8, 1e-20, 1);
        compare(lengths[i], 1e-2, 0, 1e-40, 1e-40);
    }
    CHECK(sched_getaffinity(0, sizeof after, &after) == 0);
    CHECK(CPU_EQUAL(&before, &after));
    return 0;
}
#endif
