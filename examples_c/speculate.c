// Trains a network with gradient clipping. Each layer steps before the gradients of the other layers exist. Checks that
// the weights have the same bits as steps that wait for the norm first.
//
//     cc speculate.c $(pkg-config --cflags --libs spillway) -lm -o speculate && ./speculate
//
// Backward produces the gradient of the last layer first. The program submits it at once, and Spillway's threads
// step the layer while backward continues. The norm of all layers decides later whether that step counts. Every
// 40th batch is scaled to force clipping. Every 100th has an Inf, as a loss scale that is too large would give;
// such a batch changes nothing.
//
// Compiles as C99 and as C++.

#include <math.h>
#include <spillway.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { INPUTS = 2, HIDDEN = 24, POINTS = 128, STEPS = 600, LAYERS = 3 };

static const double MAX_NORM = 1.0;

// The weights of unit i begin at weight + i * (inputs + 1); its bias is the last of them.
enum { FIRST = HIDDEN * (INPUTS + 1), SECOND = HIDDEN * (HIDDEN + 1), THIRD = HIDDEN + 1 };
static const int SIZE[LAYERS] = {FIRST, SECOND, THIRD};

struct model {
    float weight[LAYERS][SECOND], exp_avg[LAYERS][SECOND], exp_avg_sq[LAYERS][SECOND], grad[LAYERS][SECOND];
};

static struct model model, serial;

static void check(spw_status status) {
    if (status != SPW_OK) {
        fprintf(stderr, "%s: %s\n", spw_status_name(status), spw_last_error());
        exit(1);
    }
}

static float uniform(void) {
    static uint32_t state = 1;
    state = state * 1664525u + 1013904223u;
    return (float)(state >> 8) / 8388608.0f - 1.0f;
}

static spw_tensor layer_of(struct model *of, int layer) {
    spw_tensor tensor = SPW_TENSOR_INIT;
    tensor.param_dtype = tensor.state_dtype = tensor.grad_dtype = SPW_DTYPE_F32;
    tensor.n = (uint64_t)SIZE[layer];
    tensor.param = of->weight[layer];
    tensor.grad = of->grad[layer];
    tensor.exp_avg = of->exp_avg[layer];
    tensor.exp_avg_sq = of->exp_avg_sq[layer];
    return tensor;
}

static void layer_forward(const float *weight, const float *in, int inputs, float *out) {
    for (int i = 0; i < HIDDEN; i++) {
        const float *w = weight + i * (inputs + 1);
        float sum = w[inputs];
        for (int j = 0; j < inputs; j++) sum += w[j] * in[j];
        out[i] = tanhf(sum);
    }
}

// Computes the gradients of a layer's weights from those of its outputs, and those of its inputs unless
// the pointer is NULL.
static void layer_backward(const float *weight, const float *in, int inputs, const float *out, const float *back,
                           float *grad, float *back_in) {
    if (back_in != NULL) memset(back_in, 0, sizeof *back_in * (size_t)inputs);
    for (int i = 0; i < HIDDEN; i++) {
        const float *w = weight + i * (inputs + 1);
        float *g = grad + i * (inputs + 1), error = back[i] * (1.0f - out[i] * out[i]);
        for (int j = 0; j < inputs; j++) {
            g[j] += error * in[j];
            if (back_in != NULL) back_in[j] += error * w[j];
        }
        g[inputs] += error;
    }
}

static float points[POINTS][INPUTS], hidden1[POINTS][HIDDEN], hidden2[POINTS][HIDDEN], logit[POINTS];

static float target_of(const float *point) {
    const float radius = sqrtf(point[0] * point[0] + point[1] * point[1]);
    return radius > 0.4f && radius < 0.8f ? 1.0f : 0.0f;
}

static float forward(void) {
    float loss = 0;
    for (int k = 0; k < POINTS; k++) {
        layer_forward(model.weight[0], points[k], INPUTS, hidden1[k]);
        layer_forward(model.weight[1], hidden1[k], HIDDEN, hidden2[k]);
        logit[k] = model.weight[2][HIDDEN];
        for (int j = 0; j < HIDDEN; j++) logit[k] += model.weight[2][j] * hidden2[k][j];
        loss += fmaxf(logit[k], 0.0f) - logit[k] * target_of(points[k]) + log1pf(expf(-fabsf(logit[k])));
    }
    return loss / (float)POINTS;
}

// Submits a finished layer to the engine, which owns the layer's memory until spw_spec_finish.
static void submit(spw_spec *spec, int layer, float factor) {
    for (int i = 0; i < SIZE[layer]; i++) model.grad[layer][i] *= factor;
    memcpy(serial.grad[layer], model.grad[layer], sizeof model.grad[layer]);
    const spw_tensor tensor = layer_of(&model, layer);
    check(spw_spec_submit(spec, (uint32_t)layer, &tensor, 1, NULL));
}

static void backward(spw_spec *spec, float factor) {
    static float back2[POINTS][HIDDEN], back1[POINTS][HIDDEN];
    memset(model.grad, 0, sizeof model.grad);
    for (int k = 0; k < POINTS; k++) {
        const float error = (1.0f / (1.0f + expf(-logit[k])) - target_of(points[k])) / (float)POINTS;
        for (int j = 0; j < HIDDEN; j++) {
            model.grad[2][j] += error * hidden2[k][j];
            back2[k][j] = error * model.weight[2][j];
        }
        model.grad[2][HIDDEN] += error;
    }
    submit(spec, 2, factor);
    for (int k = 0; k < POINTS; k++) {
        layer_backward(model.weight[1], hidden1[k], HIDDEN, hidden2[k], back2[k], model.grad[1], back1[k]);
    }
    submit(spec, 1, factor);
    for (int k = 0; k < POINTS; k++) {
        layer_backward(model.weight[0], points[k], INPUTS, hidden1[k], back1[k], model.grad[0], NULL);
    }
    submit(spec, 0, factor);
}

// Waits for the norm of all layers, then steps: the expected result of speculation.
static void step_serially(spw_adam_options options) {
    double sum = 0;
    for (int layer = 0; layer < LAYERS; layer++) {
        spw_step_stats stats = SPW_STEP_STATS_INIT;
        const spw_tensor tensor = layer_of(&serial, layer);
        check(spw_grad_stats(&tensor, 1, 1.0, &stats));
        if (stats.nonfinite) return;
        sum += stats.sum_squares;
    }
    const double clip = MAX_NORM / (sqrt(sum) + 1e-6);
    options.grad_scale = clip < 1.0 ? clip : 1.0;
    for (int layer = 0; layer < LAYERS; layer++) {
        const spw_tensor tensor = layer_of(&serial, layer);
        check(spw_adam_step(&options, &tensor, 1, NULL));
    }
}

int main(void) {
    for (int k = 0; k < POINTS; k++) points[k][0] = uniform(), points[k][1] = uniform();
    for (int i = 0; i < FIRST; i++) model.weight[0][i] = 3.0f * uniform();
    for (int i = 0; i < SECOND; i++) model.weight[1][i] = 0.3f * uniform();
    for (int i = 0; i < THIRD; i++) model.weight[2][i] = 0.3f * uniform();
    serial = model;

    spw_spec_options settings = SPW_SPEC_OPTIONS_INIT;
    settings.buckets = LAYERS;
    settings.undo_mode = SPW_UNDO_MODE_DELTA;
    settings.publish = SPW_SPEC_PUBLISH_FINAL;
    spw_spec *spec;
    check(spw_spec_open(&settings, &spec));

    spw_adam_options options = SPW_ADAM_OPTIONS_INIT;
    options.lr = 1e-2;
    float first = 0, loss = 0;
    for (int batch = 1; batch <= STEPS; batch++) {
        loss = forward();
        if (batch == 1) first = loss;

        check(spw_spec_begin_adam(spec, &options, MAX_NORM));
        backward(spec, batch % 100 == 0 ? INFINITY : batch % 40 == 0 ? 1e4f : 1.0f);

        spw_step_stats local = SPW_STEP_STATS_INIT;
        check(spw_spec_local_result(spec, -1, &local));
        // With several ranks, local.sum_squares would be summed and the maximum of local.nonfinite taken here.
        spw_spec_outcome outcome = SPW_SPEC_OUTCOME_INIT;
        check(spw_spec_resolve(spec, &local, &outcome));
        check(spw_spec_finish(spec, -1));

        step_serially(options);
        if (outcome.verdict != SPW_SPEC_VERDICT_SKIP) options.step++;
    }

    spw_spec_stats stats = SPW_SPEC_STATS_INIT;
    check(spw_spec_get_stats(spec, &stats));
    check(spw_spec_close(spec));
    printf("batches committed %d, clipped %d, skipped %d\n", (int)stats.commits, (int)stats.redos, (int)stats.skips);
    printf("layers stepped before the verdict %d, rolled back %d, spared %d\n", (int)stats.buckets_speculated,
           (int)(stats.buckets_redone + stats.buckets_rolled_back), (int)stats.buckets_spared);

    if (memcmp(model.weight, serial.weight, sizeof model.weight) != 0) {
        printf("the weights differ from those of the serial rule\n");
        return 1;
    }
    const int learned = first > 0.5f && loss < 0.2f && stats.redos > 0 && stats.skips == STEPS / 100;
    printf("loss %.4f -> %.4f, weights equal to the bit to waiting for the norm: %s\n", first, loss,
           learned ? "learned" : "did not learn");
    return learned ? 0 : 1;
}
