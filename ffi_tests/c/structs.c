// Structs may grow in later releases. A struct shorter than the first release's is refused. A longer one is accepted if
// its unknown tail is zero, and refused otherwise. Arrays of tensors advance by the caller's struct_size.

#include "check.h"

// How the structs of a later release may look.
struct longer_tensor {
    spw_tensor known;
    uint64_t unknown[3];
};
struct longer_options {
    spw_adam_options known;
    uint64_t unknown[2];
};

static struct problem problem;
static spw_step_stats stats;
static spw_adam_options options;

static void short_structs(void) {
    // The first release had 72 bytes.
    const uint32_t sizes[] = {0, 4, 8, 64, 71};
    for (int i = 0; i < 5; i++) {
        options.struct_size = sizes[i];
        INVALID(spw_adam_step(&options, &problem.tensor, 1, &stats), "options: struct_size");
    }
    options.struct_size = 1u << 30;
    INVALID(spw_adam_step(&options, &problem.tensor, 1, &stats), "options: struct_size");
    options.struct_size = sizeof options;

    problem.tensor.struct_size = offsetof(spw_tensor, shadow_param) - 1;
    INVALID(spw_adam_step(&options, &problem.tensor, 1, &stats), "tensors[0]: struct_size");
    // An older tensor ends before param_low, and no tensor ends in it.
    problem.tensor.struct_size = offsetof(spw_tensor, param_low) + 4;
    INVALID(spw_adam_step(&options, &problem.tensor, 1, &stats),
            "tensors[0]: struct_size is 108, which is in the middle of spw_tensor.param_low");
    problem.tensor.struct_size = sizeof(spw_tensor);

    spw_step_stats small = {.struct_size = sizeof small - 1, .nonfinite = 7, .sum_squares = 7};
    INVALID(spw_adam_step(&options, &problem.tensor, 1, &small), "stats_out: struct_size");
    INVALID(grad_stats(problem.tensor.grad, SPW_DTYPE_BF16, 3, 1, &small), "stats_out: struct_size");
    CHECK(small.nonfinite == 7 && small.sum_squares == 7);

    spw_info counters = {.struct_size = 8, .adam_calls = 7};
    INVALID(spw_get_info(&counters), "info_out: struct_size");
    CHECK(counters.adam_calls == 7);
    const spw_thread_options threads = {4, 1};
    INVALID(spw_set_threads(&threads), "options: struct_size");

    spw_lion_options lion = {.struct_size = sizeof lion - 8};
    INVALID(spw_lion_step(&lion, &problem.tensor, 1, &stats), "options: struct_size");
    spw_adagrad_options adagrad = {.struct_size = sizeof adagrad - 8};
    INVALID(spw_adagrad_step(&adagrad, &problem.tensor, 1, &stats), "options: struct_size");
}

static void long_options(void) {
    struct longer_options later;
    memset(&later, 0xff, sizeof later);
    later.known = options;
    later.known.struct_size = sizeof later;
    memset(later.unknown, 0, sizeof later.unknown);

    for (size_t byte = 0; byte < sizeof later.unknown; byte++) {
        ((unsigned char *)later.unknown)[byte] = 1;
        INVALID(spw_adam_step(&later.known, &problem.tensor, 1, &stats), "options: struct_size is 112, but spw_adam_options has 96 bytes in");
        ((unsigned char *)later.unknown)[byte] = 0;
    }

    struct problem a = make_mixed(100, 4), b = make_mixed(100, 4);
    CHECK_OK(spw_adam_step(&later.known, &a.tensor, 1, NULL));
    CHECK_OK(spw_adam_step(&options, &b.tensor, 1, NULL));
    CHECK(same(&a, &b));
    release(&a);
    release(&b);
}

static void long_tensors(void) {
    enum { COUNT = 7 };
    struct problem near[COUNT], far[COUNT];
    spw_tensor narrow[COUNT];
    struct longer_tensor wide[COUNT];
    memset(wide, 0, sizeof wide);
    for (int i = 0; i < COUNT; i++) {
        near[i] = make_mixed(50 + (uint64_t)i, (uint64_t)i);
        far[i] = make_mixed(50 + (uint64_t)i, (uint64_t)i);
        narrow[i] = near[i].tensor;
        wide[i].known = far[i].tensor;
        wide[i].known.struct_size = sizeof wide[i];
    }
    watch_problem(&far[0]);
    watch_problem(&far[COUNT - 1]);
    wide[3].unknown[2] = 1;
    INVALID(spw_adam_step(&options, &wide[0].known, COUNT, &stats), "tensors[3]: struct_size is");
    wide[3].unknown[2] = 0;
    wide[5].known.struct_size = sizeof(spw_tensor);
    INVALID(spw_adam_step(&options, &wide[0].known, COUNT, &stats), "tensors[5].struct_size");
    wide[5].known.struct_size = sizeof wide[5];
    // A wrong size of the first struct is a wrong distance to the second one: the message has the sizes of both.
    narrow[0].struct_size = offsetof(spw_tensor, param_low);
    INVALID(spw_adam_step(&options, narrow, COUNT, &stats), "but that of tensors[0] is");
    narrow[0].struct_size = sizeof narrow[0];
    CHECK_OK(spw_adam_step(&options, &wide[0].known, COUNT, NULL));
    CHECK_OK(spw_adam_step(&options, narrow, COUNT, NULL));
    for (int i = 0; i < COUNT; i++) {
        CHECK(same(&near[i], &far[i]));
        release(&near[i]);
        release(&far[i]);
    }
}

// Outputs: a longer struct keeps its struct_size, and its unknown tail comes back zero.
static void long_outputs(void) {
    struct {
        spw_step_stats known;
        uint64_t tail;
    } later = {.known = step_stats(), .tail = 0x1234};
    later.known.struct_size = sizeof later;
    CHECK_OK(grad_stats(problem.tensor.grad, SPW_DTYPE_BF16, 300, 1, &later.known));
    CHECK(later.known.struct_size == sizeof later && later.tail == 0 && later.known.sum_squares > 0);

    struct {
        spw_info known;
        uint64_t tail;
    } counters = {.known = {.struct_size = sizeof counters}, .tail = 0x1234};
    CHECK_OK(spw_get_info(&counters.known));
    CHECK(counters.known.struct_size == sizeof counters && counters.tail == 0);
    CHECK(counters.known.adam_calls > 0 && counters.known.adam_elements >= counters.known.adam_calls);
}

int main(void) {
    problem = make_mixed(300, 1);
    stats = step_stats();
    options = adam_options();
    watch_problem(&problem);
    watch(&stats, sizeof stats);
    short_structs();
    long_options();
    unwatch_all();
    long_tensors();
    unwatch_all();
    long_outputs();
    release(&problem);
    return 0;
}
