// Spans that are misaligned, overlap within or across tensors, or exceed the address space are refused by name, and
// nothing is written. Gradients may be shared. Spans of zero elements may be NULL; no memory is read.

#include "check.h"

enum { N = 300 };
static struct problem problem, other;
static spw_adam_options options;
static spw_step_stats stats;

static void *moved(void *span, ptrdiff_t bytes) {
    return (void *)((uintptr_t)span + (uintptr_t)bytes);
}

static void misaligned(void) {
    spw_tensor tensor = problem.tensor;
    tensor.n = N - 10;
    const char *names[] = {"tensors[0].param", "tensors[0].exp_avg", "tensors[0].exp_avg_sq", "tensors[0].param_copy"};
    void **fields[] = {&tensor.param, &tensor.exp_avg, &tensor.exp_avg_sq, &tensor.param_copy};
    for (int field = 0; field < 4; field++) {
        for (ptrdiff_t by = 1; by < (field == 3 ? 2 : 4); by++) {
            void *before = *fields[field];
            *fields[field] = moved(before, by);
            INVALID(spw_adam_step(&options, &tensor, 1, &stats), names[field]);
            INVALID(spw_adam_step(&options, &tensor, 1, &stats), "aligned");
            *fields[field] = before;
        }
    }
    tensor.grad = moved(problem.spans[1], 1);
    INVALID(spw_adam_step(&options, &tensor, 1, &stats), "tensors[0].grad: address");
    INVALID(grad_stats(tensor.grad, SPW_DTYPE_BF16, 3, 1, &stats), "grad: address");
}

// Every pair of spans of one tensor that share a byte and of which one is written.
static void overlapping_within(void) {
    static const char *names[] = {"param", "grad", "exp_avg", "exp_avg_sq"};
    for (int a = 0; a < 4; a++) {
        for (int b = 0; b < 4; b++) {
            if (a == b || b == 1) continue;
            for (int edge = 0; edge < 3; edge++) {
                struct problem f32 = make_f32(3 * N, 9);
                void *spans[4] = {f32.spans[0], f32.spans[1], f32.spans[2], f32.spans[3]};
                const ptrdiff_t shift[] = {0, (N - 1) * 4, -(N - 1) * 4};
                spans[a] = moved(f32.spans[a], N * 4);
                spans[b] = moved(spans[a], shift[edge]);
                spw_tensor tensor = f32.tensor;
                tensor.n = N;
                tensor.param = spans[0];
                tensor.grad = spans[1];
                tensor.exp_avg = spans[2];
                tensor.exp_avg_sq = spans[3];
                const size_t outer = watched_count;
                watch_problem(&f32);
                INVALID(spw_adam_step(&options, &tensor, 1, &stats), "overlaps tensors[0].");
                CHECK(strstr(spw_last_error(), names[a]) != NULL && strstr(spw_last_error(), names[b]) != NULL);
                while (watched_count > outer) free(watched[--watched_count].before);

                spans[b] = moved(spans[a], N * 4);
                tensor.param = spans[0];
                tensor.grad = spans[1];
                tensor.exp_avg = spans[2];
                tensor.exp_avg_sq = spans[3];
                CHECK_OK(spw_adam_step(&options, &tensor, 1, NULL));
                release(&f32);
            }
        }
    }
}

static void overlapping_across(void) {
    spw_tensor tensors[] = {problem.tensor, other.tensor};
    tensors[1].exp_avg = moved(problem.spans[3], 40);
    tensors[1].n = N - 10;
    INVALID(spw_adam_step(&options, tensors, 2, &stats), "overlaps tensors[");
    tensors[1] = tensors[0];
    INVALID(spw_adam_step(&options, tensors, 2, &stats), "overlaps tensors[");
    tensors[1] = other.tensor;
    tensors[1].grad = problem.spans[4];
    INVALID(spw_adam_step(&options, tensors, 2, &stats), "overlaps tensors[");
    // A long span that encloses a short one, with others between them in the list.
    tensors[1] = other.tensor;
    tensors[1].param_copy = moved(problem.spans[0], N * 4 - 2);
    INVALID(spw_adam_step(&options, tensors, 2, &stats), "overlaps tensors[");
}

static void shared_gradient(void) {
    struct problem a = make_mixed(N, 1), b = make_mixed(N, 2), c = make_mixed(N, 2);
    memcpy(c.spans[1], a.spans[1], a.bytes[1]);
    spw_tensor tensors[] = {a.tensor, b.tensor};
    tensors[1].grad = tensors[0].grad;
    CHECK_OK(spw_adam_step(&options, tensors, 2, NULL));
    CHECK_OK(spw_adam_step(&options, &c.tensor, 1, NULL));
    for (int span = 0; span < 5; span++) {
        CHECK(span == 1 || memcmp(b.spans[span], c.spans[span], b.bytes[span]) == 0);
    }
    release(&a);
    release(&b);
    release(&c);
}

static void zero_length(void) {
    spw_tensor empty = {.struct_size = sizeof empty, .param_dtype = 99, .take_copy = 7};
    spw_step_stats seen = step_stats();
    CHECK_OK(spw_adam_step(&options, &empty, 1, &seen));
    CHECK(seen.nonfinite == 0 && seen.sum_squares == 0);
    seen = step_stats();
    CHECK_OK(spw_adam_step(&options, NULL, 0, &seen));
    CHECK(seen.nonfinite == 0 && seen.sum_squares == 0);
    seen = step_stats();
    CHECK_OK(grad_stats(NULL, SPW_DTYPE_F16, 0, 1, &seen));
    CHECK(seen.nonfinite == 0 && seen.sum_squares == 0);

    struct problem a = make_mixed(N, 1), b = make_mixed(N, 1);
    const spw_tensor tensors[] = {empty, a.tensor, empty, empty};
    CHECK_OK(spw_adam_step(&options, tensors, 4, NULL));
    CHECK_OK(spw_adam_step(&options, &b.tensor, 1, NULL));
    CHECK(same(&a, &b));
    // Empty spans share no byte with anything.
    spw_tensor nothing = a.tensor;
    nothing.n = 0;
    const spw_tensor twice[] = {a.tensor, nothing};
    CHECK_OK(spw_adam_step(&options, twice, 2, NULL));
    release(&a);
    release(&b);
}

static void beyond_the_address_space(void) {
    const uint64_t lengths[] = {UINT64_MAX, UINT64_MAX / 2, (uint64_t)1 << 63, (uint64_t)1 << 62};
    for (int i = 0; i < 4; i++) {
        spw_tensor tensor = problem.tensor;
        tensor.n = lengths[i];
        INVALID(spw_adam_step(&options, &tensor, 1, &stats), "tensors[0].");
        INVALID(grad_stats(problem.tensor.grad, SPW_DTYPE_BF16, lengths[i], 1, &stats), "address space");
    }
}

int main(void) {
    problem = make_mixed(N, 1);
    other = make_mixed(N, 2);
    options = adam_options();
    stats = step_stats();
    watch_problem(&problem);
    watch_problem(&other);
    watch(&stats, sizeof stats);
    misaligned();
    overlapping_within();
    overlapping_across();
    shared_gradient();
    zero_length();
    beyond_the_address_space();
    unwatch_all();
    release(&problem);
    release(&other);
    return 0;
}
