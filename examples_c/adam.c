// Trains a small network in mixed precision with spw_adam_step, and checks that it learned.
//
//     cc adam.c $(pkg-config --cflags --libs spillway) -lm -o adam && ./adam
//
// The network classifies points of the plane: inside or outside a ring. As in large-model training, the model computes
// with bfloat16 weights and produces bfloat16 gradients of a scaled loss. The optimizer keeps f32 master weights and
// states. One call per step unscales the gradient, measures its norm, steps, and writes the new bfloat16 weights.
//
// Compiles as C99 and as C++.

#include <math.h>
#include <spillway.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { HIDDEN = 32, PARAMETERS = 4 * HIDDEN + 1, POINTS = 256, STEPS = 600 };

static const float LOSS_SCALE = 1024.0f;

typedef uint16_t bf16;

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

static float uniform(void) {
    static uint32_t state = 1;
    state = state * 1664525u + 1013904223u;
    return (float)(state >> 8) / 8388608.0f - 1.0f;
}

// Mean loss over all points, and the gradient of the loss times LOSS_SCALE.
// The weights of each hidden unit are stored as [x, y, bias, output]; the output's bias follows.
static float forward_backward(const bf16 *weight, bf16 *grad, float points[POINTS][2]) {
    float sum[PARAMETERS] = {0}, loss = 0;
    for (int k = 0; k < POINTS; k++) {
        const float x = points[k][0], y = points[k][1], radius = sqrtf(x * x + y * y);
        const float target = radius > 0.4f && radius < 0.8f ? 1.0f : 0.0f;
        float hidden[HIDDEN], logit = widen(weight[4 * HIDDEN]);
        for (int i = 0; i < HIDDEN; i++) {
            const bf16 *w = weight + 4 * i;
            hidden[i] = tanhf(widen(w[0]) * x + widen(w[1]) * y + widen(w[2]));
            logit += widen(w[3]) * hidden[i];
        }
        const float probability = 1.0f / (1.0f + expf(-logit));
        loss += fmaxf(logit, 0.0f) - logit * target + log1pf(expf(-fabsf(logit)));

        const float error = (probability - target) * LOSS_SCALE / (float)POINTS;
        for (int i = 0; i < HIDDEN; i++) {
            const float back = error * widen(weight[4 * i + 3]) * (1.0f - hidden[i] * hidden[i]);
            sum[4 * i] += back * x;
            sum[4 * i + 1] += back * y;
            sum[4 * i + 2] += back;
            sum[4 * i + 3] += error * hidden[i];
        }
        sum[4 * HIDDEN] += error;
    }
    for (int i = 0; i < PARAMETERS; i++) grad[i] = narrow(sum[i]);
    return loss / (float)POINTS;
}

static void check(spw_status status) {
    if (status != SPW_OK) {
        fprintf(stderr, "%s: %s\n", spw_status_name(status), spw_last_error());
        exit(1);
    }
}

int main(void) {
    if (spw_abi_version() != SPW_ABI_VERSION) {
        fprintf(stderr, "this program was built for another version of libspillway.so\n");
        return 1;
    }

    static float points[POINTS][2], master[PARAMETERS], exp_avg[PARAMETERS], exp_avg_sq[PARAMETERS];
    static bf16 model[PARAMETERS], grad[PARAMETERS];
    for (int k = 0; k < POINTS; k++) {
        points[k][0] = uniform();
        points[k][1] = uniform();
    }
    for (int i = 0; i < PARAMETERS; i++) {
        master[i] = (i % 4 == 3 ? 0.5f : 4.0f) * uniform();
        model[i] = narrow(master[i]);
    }

    spw_adam_options options = SPW_ADAM_OPTIONS_INIT;
    options.lr = 3e-2;
    options.weight_decay = 1e-4;
    options.grad_scale = 1.0 / LOSS_SCALE;

    spw_tensor tensor = SPW_TENSOR_INIT;
    tensor.param_dtype = SPW_DTYPE_F32;
    tensor.state_dtype = SPW_DTYPE_F32;
    tensor.grad_dtype = SPW_DTYPE_BF16;
    tensor.copy_dtype = SPW_DTYPE_BF16;
    tensor.n = PARAMETERS;
    tensor.param = master;
    tensor.grad = grad;
    tensor.exp_avg = exp_avg;
    tensor.exp_avg_sq = exp_avg_sq;
    tensor.param_copy = model;

    spw_info info = SPW_INFO_INIT;
    check(spw_get_info(&info));
    printf("spillway %s, kernel %s\n", spw_version(), info.kernel);

    float first = 0, loss = 0;
    for (options.step = 1; options.step <= STEPS; options.step++) {
        loss = forward_backward(model, grad, points);
        if (options.step == 1) first = loss;

        spw_step_stats stats = SPW_STEP_STATS_INIT;
        check(spw_adam_step(&options, &tensor, 1, &stats));
        if (stats.nonfinite) {
            fprintf(stderr, "step %d: a gradient is Inf or NaN\n", (int)options.step);
            return 1;
        }
        if (options.step % 100 == 0) {
            printf("step %3d  loss %.4f  gradient norm %.4f\n", (int)options.step, loss, sqrt(stats.sum_squares));
        }
    }

    const int learned = first > 0.5f && loss < 0.15f;
    printf("loss %.4f -> %.4f: %s\n", first, loss, learned ? "learned" : "did not learn");
    return learned ? 0 : 1;
}
