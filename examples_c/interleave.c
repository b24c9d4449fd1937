// Trains a small network whose optimizer steps are split between CPU and GPU by spw_interleave. Checks that it learned,
// and that its weights have the same bits as after steps on the CPU alone.
//
//     cc interleave.c $(pkg-config --cflags --libs spillway) -lm -o interleave && ./interleave [trace.json]
//
// The network fits a sum of waves. Its parameters are split into subgroups, and a plan says which of them the GPU
// updates. This example uses a new plan at every step: the model's choice, one based on the timings, or a random one.
// With SPW_INTERLEAVE_BACKEND_HOST, threads replace the GPU, so the program runs on any machine. With an argument, the
// program writes the last step as a trace for ui.perfetto.dev.
//
// Compiles as C99 and as C++.

#define SPW_EXPERIMENTAL
#include <math.h>
#include <spillway.h>
#include <spillway/plan.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { HIDDEN = 64, SUBGROUP = 24, PARAMETERS = 3 * HIDDEN, SUBGROUPS = PARAMETERS / SUBGROUP, POINTS = 64, STEPS = 400 };

typedef uint16_t bf16;

// The state that a step changes.
struct states {
    float master[PARAMETERS], exp_avg[PARAMETERS], exp_avg_sq[PARAMETERS];
    bf16 model[PARAMETERS], grad[PARAMETERS];
};

static float widen(bf16 half) {
    uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static bf16 narrow(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return (bf16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static uint32_t draw(void) {
    static uint32_t state = 1;
    state = state * 1664525u + 1013904223u;
    return state >> 8;
}

static float uniform(void) {
    return (float)draw() / 8388608.0f - 1.0f;
}

// Mean squared error over all points, and its gradient. The weights of each hidden unit are stored
// as [x, bias, output].
static float forward_backward(const bf16 *weight, bf16 *grad) {
    float sum[PARAMETERS] = {0}, loss = 0;
    for (int k = 0; k < POINTS; k++) {
        const float x = 2.0f * (float)k / (float)(POINTS - 1) - 1.0f;
        const float target = sinf(4.0f * x) + 0.5f * cosf(7.0f * x);
        float hidden[HIDDEN], output = 0;
        for (int i = 0; i < HIDDEN; i++) {
            hidden[i] = tanhf(widen(weight[3 * i]) * x + widen(weight[3 * i + 1]));
            output += widen(weight[3 * i + 2]) * hidden[i];
        }
        const float error = (output - target) / (float)POINTS;
        loss += (output - target) * error;
        for (int i = 0; i < HIDDEN; i++) {
            const float back = error * widen(weight[3 * i + 2]) * (1.0f - hidden[i] * hidden[i]);
            sum[3 * i] += back * x;
            sum[3 * i + 1] += back;
            sum[3 * i + 2] += error * hidden[i];
        }
    }
    for (int i = 0; i < PARAMETERS; i++) grad[i] = narrow(sum[i]);
    return loss;
}

static void check(spw_status status) {
    if (status != SPW_OK) {
        fprintf(stderr, "%s: %s\n", spw_status_name(status), spw_last_error());
        exit(1);
    }
}

static spw_interleave *open_update(struct states *states) {
    const spw_interleave_subgroup none = SPW_INTERLEAVE_SUBGROUP_INIT;
    spw_interleave_subgroup subgroups[SUBGROUPS];
    for (int i = 0; i < SUBGROUPS; i++) {
        subgroups[i] = none;
        subgroups[i].n = SUBGROUP;
        subgroups[i].param = states->master + i * SUBGROUP;
        subgroups[i].exp_avg = states->exp_avg + i * SUBGROUP;
        subgroups[i].exp_avg_sq = states->exp_avg_sq + i * SUBGROUP;
        subgroups[i].grad = states->grad + i * SUBGROUP;
        subgroups[i].param_copy = states->model + i * SUBGROUP;
    }
    spw_interleave_options options = SPW_INTERLEAVE_OPTIONS_INIT;
    options.backend = SPW_INTERLEAVE_BACKEND_HOST;
    options.transfer_dtype = SPW_TRANSFER_DTYPE_F32;
    options.grad_dtype = SPW_DTYPE_BF16;
    options.copy_dtype = SPW_DTYPE_BF16;
    spw_interleave *update;
    check(spw_interleave_open(&options, subgroups, SUBGROUPS, &update));
    return update;
}

// Rates of an H100 behind PCIe 5: 2 G parameters a second on the CPU, 100 on the GPU, 55 GB/s of link.
static spw_interleave_rates rates_of_a_machine(void) {
    spw_interleave_rates rates = SPW_INTERLEAVE_RATES_INIT;
    rates.cpu = 2e9;
    rates.gpu = 100e9;
    rates.h2d = rates.d2h = 55e9 / 4;
    return rates;
}

// Prints the model's plan for 50 subgroups of 100 M parameters on that machine.
static void print_plan(void) {
    const spw_interleave_rates rates = rates_of_a_machine();
    spw_plan_shape shape = SPW_PLAN_SHAPE_INIT;
    spw_plan_options options = SPW_PLAN_OPTIONS_INIT;
    spw_plan_result result = SPW_PLAN_RESULT_INIT;
    shape.count = 50;
    shape.size = 100000000;
    check(spw_plan_interleave(&rates, &shape, &options, NULL, &result));
    printf("plan for 5 G parameters: %d of 50 subgroups on the GPU, %.2f s in place of %.2f s, %.1f GiB of GPU memory\n",
           (int)result.gpu, result.exposed_seconds, result.serial_seconds, (double)result.gpu_bytes / (1 << 30));
}

// Sets the caller's own plan: each subgroup runs at a random place.
static void set_any_plan(spw_interleave *update) {
    uint32_t sites[SUBGROUPS];
    for (int i = 0; i < SUBGROUPS; i++) sites[i] = draw() % 3;
    check(spw_interleave_set_plan(update, sites, SUBGROUPS));
}

static void write_trace(spw_interleave *update, const char *path) {
    uint64_t bytes;
    check(spw_interleave_get_trace(update, NULL, 0, &bytes));
    char *text = (char *)malloc((size_t)bytes);
    check(spw_interleave_get_trace(update, text, (size_t)bytes, &bytes));
    FILE *file = fopen(path, "w");
    if (file == NULL || fputs(text, file) < 0 || fclose(file) != 0) {
        fprintf(stderr, "cannot write %s\n", path);
        exit(1);
    }
    free(text);
}

// One step of all subgroups on the CPU, for comparison.
static void plain_step(struct states *states, const spw_adam_options *options) {
    spw_tensor tensor = SPW_TENSOR_INIT;
    tensor.param_dtype = tensor.state_dtype = SPW_DTYPE_F32;
    tensor.grad_dtype = tensor.copy_dtype = SPW_DTYPE_BF16;
    tensor.n = PARAMETERS;
    tensor.param = states->master;
    tensor.grad = states->grad;
    tensor.exp_avg = states->exp_avg;
    tensor.exp_avg_sq = states->exp_avg_sq;
    tensor.param_copy = states->model;
    check(spw_adam_step(options, &tensor, 1, NULL));
}

int main(int argc, char **argv) {
    if (spw_abi_version() != SPW_ABI_VERSION) {
        fprintf(stderr, "this program was built for another version of libspillway.so\n");
        return 1;
    }
    print_plan();

    static struct states spread, plain;
    for (int i = 0; i < PARAMETERS; i++) {
        spread.master[i] = (i % 3 == 2 ? 0.3f : 4.0f) * uniform();
        spread.model[i] = narrow(spread.master[i]);
    }
    plain = spread;

    spw_interleave *update = open_update(&spread);
    const spw_interleave_rates rates = rates_of_a_machine();
    check(spw_interleave_calibrate(update, &rates));
    spw_adam_options options = SPW_ADAM_OPTIONS_INIT;
    options.lr = 1e-2;

    float first = 0, loss = 0;
    for (options.step = 1; options.step <= STEPS; options.step++) {
        // The plan may change before the first gradient; gradients may arrive in any order.
        if (options.step % 2 == 0) check(spw_interleave_replan(update, 0.0, NULL));
        else set_any_plan(update);

        loss = forward_backward(spread.model, spread.grad);
        if (options.step == 1) first = loss;
        for (int i = SUBGROUPS - 1; i >= 0; i--) check(spw_interleave_grad_ready(update, (uint64_t)i, 0));
        check(spw_interleave_begin(update, &options, 1, 0));
        // The next forward pass may begin with the first subgroup while others are still in flight.
        for (int i = 0; i < SUBGROUPS; i++) check(spw_interleave_stream_wait_params(update, (uint64_t)i, 0));

        forward_backward(plain.model, plain.grad);
        plain_step(&plain, &options);
        if (options.step % 100 == 0) printf("step %3d  loss %.5f\n", (int)options.step, loss);
    }
    if (argc > 1) write_trace(update, argv[1]);

    // The states are complete in host memory only when there are no residents and no flush is in flight.
    const uint32_t on_cpu[SUBGROUPS] = {SPW_PLACEMENT_CPU};
    check(spw_interleave_set_plan(update, on_cpu, SUBGROUPS));
    check(spw_interleave_drain(update));
    check(spw_interleave_close(update));

    const int same = memcmp(&spread, &plain, sizeof plain) == 0;
    const int learned = first > 0.3f && loss < 0.02f;
    printf("loss %.4f -> %.5f: %s, bits of the CPU's steps: %s\n", first, loss, learned ? "learned" : "did not learn",
           same ? "the same" : "others");
    return learned && same ? 0 : 1;
}
