// Rounds of speculation end with the bits of the serial rule, for every event, verdict and way of publishing, for both
// ways of rolling back (a log or shadow spans), and without one. An engine that is closed rolls an open round back. Every call out
// of order returns its own status and changes nothing.

#include "check.h"

#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/eventfd.h>
#include <unistd.h>

enum { BUCKETS = 3 };
static const int64_t FOREVER = -1;

// How the engines of this program roll steps back; with SPW_UNDO_MODE_SHADOW the models have shadow spans.
static uint32_t undo = SPW_UNDO_MODE_DELTA;

static spw_spec *open_spec(uint32_t publish) {
    const spw_spec_options options = {
        .struct_size = sizeof options, .buckets = BUCKETS, .undo_mode = undo, .publish = publish};
    spw_spec *spec = NULL;
    CHECK_OK(spw_spec_open(&options, &spec));
    return spec;
}

static struct problem models[BUCKETS], twins[BUCKETS];

static void make_models(void) {
    for (int i = 0; i < BUCKETS; i++) {
        models[i] = make_mixed(i == 1 ? LARGE : 1000, 10 + (uint64_t)i);
        twins[i] = make_mixed(i == 1 ? LARGE : 1000, 10 + (uint64_t)i);
        if (undo != SPW_UNDO_MODE_SHADOW) continue;
        spw_tensor *tensor = &models[i].tensor;
        void **shadows[3] = {&tensor->shadow_param, &tensor->shadow_exp_avg, &tensor->shadow_exp_avg_sq};
        for (int span = 0; span < 3; span++) {
            CHECK((*shadows[span] = malloc(models[i].bytes[0])) != NULL);
            memset(*shadows[span], 0x55, models[i].bytes[0]);
        }
    }
}

static void release_models(void) {
    for (int i = 0; i < BUCKETS; i++) {
        const spw_tensor *tensor = &models[i].tensor;
        free(tensor->shadow_param), free(tensor->shadow_exp_avg), free(tensor->shadow_exp_avg_sq);
        release(&models[i]), release(&twins[i]);
    }
}

static void flip(void **span, void **field, void **shadow) {
    *field = *shadow, *shadow = *span, *span = *field;
}

// The steps count: shadow spans, if any, now hold the current state.
static void stood(int exp_avg, int exp_avg_sq) {
    for (int i = 0; i < BUCKETS && undo == SPW_UNDO_MODE_SHADOW; i++) {
        spw_tensor *tensor = &models[i].tensor;
        void **spans = models[i].spans;
        flip(&spans[0], &tensor->param, &tensor->shadow_param);
        if (exp_avg) flip(&spans[2], &tensor->exp_avg, &tensor->shadow_exp_avg);
        if (exp_avg_sq) flip(&spans[3], &tensor->exp_avg_sq, &tensor->shadow_exp_avg_sq);
    }
}

static void check_same(void) {
    for (int i = 0; i < BUCKETS; i++) CHECK(same(&models[i], &twins[i]));
}

// Checks that the round equals a step with this factor.
static void check_stepped(const spw_adam_options *options, double grad_scale) {
    spw_adam_options scaled = *options;
    scaled.grad_scale = grad_scale;
    for (int i = 0; i < BUCKETS; i++) CHECK_OK(spw_adam_step(&scaled, &twins[i].tensor, 1, NULL));
    stood(1, 1);
    check_same();
}

static void submit(spw_spec *spec, uint32_t bucket) {
    CHECK_OK(spw_spec_submit(spec, bucket, &models[bucket].tensor, 1, NULL));
}

static spw_step_stats local(spw_spec *spec) {
    spw_step_stats stats = {.struct_size = sizeof stats};
    CHECK_OK(spw_spec_local_result(spec, FOREVER, &stats));
    return stats;
}

static spw_spec_outcome resolve(spw_spec *spec, spw_step_stats global) {
    spw_spec_outcome outcome = {.struct_size = sizeof outcome};
    CHECK_OK(spw_spec_resolve(spec, &global, &outcome));
    return outcome;
}

static uint32_t state(spw_spec *spec, uint32_t bucket) {
    uint32_t found = 99;
    CHECK_OK(spw_spec_get_bucket(spec, bucket, &found));
    return found;
}

static void the_verdicts_end_in_the_serial_bits(uint32_t publish) {
    make_models();
    spw_spec *spec = open_spec(publish);
    spw_adam_options options = adam_options();

    // No norm limit: the steps count.
    CHECK_OK(spw_spec_begin_adam(spec, &options, 0.0));
    for (uint32_t i = BUCKETS; i-- > 0;) submit(spec, i);
    spw_step_stats mine = local(spec);
    CHECK(!mine.nonfinite && mine.sum_squares > 0);
    double squares[BUCKETS], sum = 0.0;
    uint64_t measured = 0;
    CHECK_OK(spw_spec_get_squares(spec, squares, BUCKETS, &measured));
    CHECK(measured == BUCKETS);
    for (uint32_t i = 0; i < BUCKETS; i++) sum += squares[i];
    CHECK(sum == mine.sum_squares);
    if (undo == SPW_UNDO_MODE_NONE) {
        check_same();
    } else if (publish == SPW_SPEC_PUBLISH_SPECULATIVE) {
        CHECK_OK(spw_spec_wait(spec, 0, FOREVER));
        CHECK(state(spec, 0) == SPW_SPEC_STATE_SPECULATIVE);
    }
    if (publish == SPW_SPEC_PUBLISH_FINAL) CHECK(memcmp(models[1].spans[4], twins[1].spans[4], models[1].bytes[4]) == 0);
    spw_spec_outcome outcome = resolve(spec, mine);
    CHECK(outcome.verdict == SPW_SPEC_VERDICT_COMMIT && outcome.rolled_back == 0);
    CHECK(outcome.grad_scale == (double)(float)options.grad_scale);
    const double norm = outcome.norm;
    CHECK(norm * norm > mine.sum_squares * (1 - 1e-15) && norm * norm < mine.sum_squares * (1 + 1e-15));
    for (uint32_t i = 0; i < BUCKETS; i++) CHECK_OK(spw_spec_wait(spec, i, FOREVER));
    CHECK(state(spec, 0) == SPW_SPEC_STATE_FINAL);
    CHECK_OK(spw_spec_finish(spec, FOREVER));
    check_stepped(&options, options.grad_scale);

    // The limit is half the norm: the rule of torch and DeepSpeed clips all gradients.
    options.step++;
    CHECK_OK(spw_spec_begin_adam(spec, &options, norm / 2));
    for (uint32_t i = 0; i < BUCKETS; i++) submit(spec, i);
    outcome = resolve(spec, local(spec));
    CHECK(outcome.verdict == SPW_SPEC_VERDICT_REDO);
    CHECK(outcome.grad_scale == (double)(float)(options.grad_scale * (norm / 2 / (norm + 1e-6))));
    uint32_t withdrawn[BUCKETS];
    size_t count = 0;
    CHECK_OK(spw_spec_get_rolled_back(spec, withdrawn, BUCKETS, &count));
    CHECK(count == outcome.rolled_back && (undo == SPW_UNDO_MODE_NONE ? count == 0 : count >= 1));
    CHECK_OK(spw_spec_finish(spec, FOREVER));
    check_stepped(&options, options.grad_scale * (norm / 2 / (norm + 1e-6)));

    // Another rank reports an overflow.
    options.step++;
    CHECK_OK(spw_spec_begin_adam(spec, &options, 0.0));
    for (uint32_t i = 0; i < BUCKETS; i++) submit(spec, i);
    mine = local(spec);
    mine.nonfinite = 1;
    CHECK(resolve(spec, mine).verdict == SPW_SPEC_VERDICT_SKIP);
    CHECK_OK(spw_spec_finish(spec, FOREVER));
    check_same();

    // The caller gives the verdict itself.
    CHECK_OK(spw_spec_begin_adam(spec, &options, 0.0));
    for (uint32_t i = 0; i < BUCKETS; i++) submit(spec, i);
    local(spec);
    CHECK_OK(spw_spec_resolve_as(spec, SPW_SPEC_VERDICT_REDO, 0.125, NULL));
    CHECK_OK(spw_spec_finish(spec, FOREVER));
    check_stepped(&options, 0.125);

    spw_spec_stats stats = {.struct_size = sizeof stats};
    CHECK_OK(spw_spec_get_stats(spec, &stats));
    CHECK(stats.commits == 1 && stats.redos == 2 && stats.skips == 1 && stats.aborts == 0);
    CHECK(stats.buckets_speculated + stats.buckets_spared == 4 * BUCKETS);
    CHECK(stats.buckets_committed == (undo == SPW_UNDO_MODE_NONE ? 0 : BUCKETS) && stats.seconds_exposed > 0);
    CHECK(undo != SPW_UNDO_MODE_NONE || stats.buckets_spared == 4 * BUCKETS);
    CHECK_OK(spw_spec_close(spec));
    release_models();
}

static void other_optimizers_speculate_too(void) {
    make_models();
    spw_spec *spec = open_spec(SPW_SPEC_PUBLISH_STAGED);
    spw_adagrad_options adagrad = SPW_ADAGRAD_OPTIONS_INIT;
    spw_lion_options lion = SPW_LION_OPTIONS_INIT;
    spw_signum_options signum = SPW_SIGNUM_OPTIONS_INIT;
    for (int optimizer = 0; optimizer < 3; optimizer++) {
        if (optimizer == 0) CHECK_OK(spw_spec_begin_adagrad(spec, &adagrad, 1e-3));
        if (optimizer == 1) CHECK_OK(spw_spec_begin_lion(spec, &lion, 1e-3));
        if (optimizer == 2) CHECK_OK(spw_spec_begin_signum(spec, &signum, 1e-3));
        for (uint32_t i = 0; i < BUCKETS; i++) submit(spec, i);
        const spw_spec_outcome outcome = resolve(spec, local(spec));
        CHECK(outcome.verdict == SPW_SPEC_VERDICT_REDO);
        CHECK_OK(spw_spec_finish(spec, FOREVER));
        adagrad.grad_scale = lion.grad_scale = signum.grad_scale = outcome.grad_scale;
        for (int i = 0; i < BUCKETS; i++) {
            if (optimizer == 0) CHECK_OK(spw_adagrad_step(&adagrad, &twins[i].tensor, 1, NULL));
            if (optimizer == 1) CHECK_OK(spw_lion_step(&lion, &twins[i].tensor, 1, NULL));
            if (optimizer == 2) CHECK_OK(spw_signum_step(&signum, &twins[i].tensor, 1, NULL));
        }
        stood(optimizer != 0, optimizer == 0);
        check_same();
        adagrad.grad_scale = lion.grad_scale = signum.grad_scale = 1.0;
    }
    CHECK_OK(spw_spec_close(spec));
    release_models();
}

static _Atomic uint32_t word;

static void *writer(void *fd) {
    usleep(20000);
    const uint64_t one = 1;
    CHECK(write(*(int *)fd, &one, sizeof one) == sizeof one);
    usleep(20000);
    atomic_store(&word, 1);
    return NULL;
}

static void buckets_wait_for_descriptors_and_words(void) {
    make_models();
    atomic_store(&word, 0xffffffff);
    spw_spec *spec = open_spec(SPW_SPEC_PUBLISH_FINAL);
    const spw_adam_options options = adam_options();
    CHECK_OK(spw_spec_begin_adam(spec, &options, 0.0));
    int fd = eventfd(0, 0), copy = dup(fd);
    spw_spec_event event = {.struct_size = sizeof event, .kind = SPW_SPEC_EVENT_KIND_FD, .fd = fd};
    CHECK_OK(spw_spec_submit(spec, 0, &models[0].tensor, 1, &event));
    CHECK(close(fd) == 0);
    event = (spw_spec_event){.struct_size = sizeof event, .kind = SPW_SPEC_EVENT_KIND_WORD, .value = 1,
                             .word = (const uint32_t *)&word};
    CHECK_OK(spw_spec_submit(spec, 1, &models[1].tensor, 1, &event));
    event = (spw_spec_event){.struct_size = sizeof event, .kind = SPW_SPEC_EVENT_KIND_NONE};
    CHECK_OK(spw_spec_submit(spec, 2, &models[2].tensor, 1, &event));

    spw_step_stats mine = {.struct_size = sizeof mine};
    REFUSED(spw_spec_local_result(spec, 5, &mine), SPW_ERR_TIMEOUT, "still pending: 0, 1");
    CHECK(state(spec, 0) == SPW_SPEC_STATE_PENDING && state(spec, 1) == SPW_SPEC_STATE_PENDING);
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, writer, &copy) == 0);
    mine = local(spec);
    CHECK(resolve(spec, mine).verdict == SPW_SPEC_VERDICT_COMMIT);
    CHECK_OK(spw_spec_finish(spec, FOREVER));
    check_stepped(&options, options.grad_scale);
    CHECK(pthread_join(thread, NULL) == 0 && close(copy) == 0);
    CHECK_OK(spw_spec_close(spec));
    release_models();
}

// Waits until a bucket is stepped before the verdict; without an undo it never is.
static void stepped_early(spw_spec *spec, uint32_t bucket) {
    while (undo != SPW_UNDO_MODE_NONE && state(spec, bucket) != SPW_SPEC_STATE_SPECULATIVE) usleep(100);
}

static void what_has_no_verdict_is_taken_back(void) {
    make_models();
    const spw_adam_options options = adam_options();
    int never = eventfd(0, 0);
    const spw_spec_event event = {.struct_size = sizeof event, .kind = SPW_SPEC_EVENT_KIND_FD, .fd = never};

    spw_spec *spec = open_spec(SPW_SPEC_PUBLISH_FINAL);
    for (int i = 0; i < 2; i++) {
        CHECK_OK(spw_spec_begin_adam(spec, &options, 0.0));
        submit(spec, 1);
        CHECK_OK(spw_spec_submit(spec, 0, &models[0].tensor, 1, &event));
        if (i == 1) stepped_early(spec, 1);
        CHECK_OK(spw_spec_abort(spec));
        CHECK_OK(spw_spec_finish(spec, FOREVER));
        check_same();
    }
    CHECK_OK(spw_spec_abort(spec));
    CHECK_OK(spw_spec_close(spec));

    // A new engine: after two rounds whose steps were taken back the old one only measures.
    spec = open_spec(SPW_SPEC_PUBLISH_FINAL);
    CHECK_OK(spw_spec_begin_adam(spec, &options, 0.0));
    submit(spec, 1);
    submit(spec, 2);
    CHECK_OK(spw_spec_submit(spec, 0, &models[0].tensor, 1, &event));
    stepped_early(spec, 2);
    CHECK_OK(spw_spec_close(spec));
    check_same();

    // If a verdict exists, close finishes the round.
    spec = open_spec(SPW_SPEC_PUBLISH_FINAL);
    CHECK_OK(spw_spec_begin_adam(spec, &options, 0.0));
    for (uint32_t i = 0; i < BUCKETS; i++) submit(spec, i);
    local(spec);
    CHECK_OK(spw_spec_resolve_as(spec, SPW_SPEC_VERDICT_REDO, 0.5, NULL));
    CHECK_OK(spw_spec_close(spec));
    check_stepped(&options, 0.5);
    CHECK(close(never) == 0);
    release_models();
}

static void calls_out_of_order_are_refused(void) {
    make_models();
    spw_spec *spec = open_spec(SPW_SPEC_PUBLISH_FINAL);
    spw_adam_options options = adam_options();
    spw_step_stats stats = {.struct_size = sizeof stats};
    const spw_tensor *tensor = &models[0].tensor;
    uint32_t found;

    REFUSED(spw_spec_submit(spec, 0, tensor, 1, NULL), SPW_ERR_NO_ROUND, "no round");
    REFUSED(spw_spec_local_result(spec, 0, &stats), SPW_ERR_NO_ROUND, "no round");
    REFUSED(spw_spec_resolve(spec, &stats, NULL), SPW_ERR_NO_ROUND, "no round");
    REFUSED(spw_spec_wait(spec, 0, 0), SPW_ERR_BUCKET_MISSING, "bucket 0");
    INVALID(spw_spec_get_bucket(spec, BUCKETS, &found), "bucket");
    INVALID(spw_spec_begin_adam(spec, &options, -1.0), "max_norm");
    INVALID(spw_spec_begin_adam(spec, &options, NAN), "max_norm");
    options.step = 0;
    INVALID(spw_spec_begin_adam(spec, &options, 0.0), "options.step");
    options.step = 1;
    CHECK_OK(spw_spec_begin_adam(spec, &options, 0.0));
    watch_problem(&models[1]);
    REFUSED(spw_spec_begin_adam(spec, &options, 0.0), SPW_ERR_ROUND_OPEN, "open already");
    INVALID(spw_spec_submit(spec, BUCKETS, tensor, 1, NULL), "bucket");
    INVALID(spw_spec_submit(spec, 1, NULL, 1, NULL), "tensors");
    spw_spec_event event = {.struct_size = sizeof event, .kind = 7};
    INVALID(spw_spec_submit(spec, 1, &models[1].tensor, 1, &event), "event.kind");
    event.kind = SPW_SPEC_EVENT_KIND_FD, event.fd = -1;
    INVALID(spw_spec_submit(spec, 1, &models[1].tensor, 1, &event), "event.fd");
    event.kind = SPW_SPEC_EVENT_KIND_WORD;
    INVALID(spw_spec_submit(spec, 1, &models[1].tensor, 1, &event), "event.word");
    spw_adam_options other = options;
    other.grad_scale = 3.0;
    spw_tensor own = models[1].tensor;
    own.options = &other;
    INVALID(spw_spec_submit(spec, 1, &own, 1, NULL), "tensors[0].options.grad_scale");
    own = models[1].tensor, own.exp_avg_sq = NULL;
    INVALID(spw_spec_submit(spec, 1, &own, 1, NULL), "exp_avg_sq");
    own = models[1].tensor, own.shadow_param = own.shadow_exp_avg = own.shadow_exp_avg_sq = NULL;
    if (undo != SPW_UNDO_MODE_SHADOW) {
        own.shadow_param = twins[1].spans[0];
        own.shadow_exp_avg = twins[1].spans[2], own.shadow_exp_avg_sq = twins[1].spans[3];
    }
    INVALID(spw_spec_submit(spec, 1, &own, 1, NULL), "tensors[0].shadow_param");

    submit(spec, 0);
    REFUSED(spw_spec_submit(spec, 0, tensor, 1, NULL), SPW_ERR_BUCKET_SUBMITTED, "bucket 0");
    REFUSED(spw_spec_local_result(spec, 0, &stats), SPW_ERR_BUCKET_MISSING, "bucket 1");
    REFUSED(spw_spec_resolve(spec, &stats, NULL), SPW_ERR_BUCKET_MISSING, "bucket 1");
    REFUSED(spw_spec_resolve_as(spec, SPW_SPEC_VERDICT_COMMIT, 1.0, NULL), SPW_ERR_BUCKET_MISSING, "bucket 1");
    REFUSED(spw_spec_wait(spec, 1, 1), SPW_ERR_TIMEOUT, "timed out");
    unwatch_all();
    submit(spec, 2);
    submit(spec, 1);
    stats = local(spec);
    INVALID(spw_spec_resolve_as(spec, 3, 1.0, NULL), "verdict");
    INVALID(spw_spec_resolve_as(spec, SPW_SPEC_VERDICT_REDO, NAN, NULL), "grad_scale");
    spw_step_stats bad = stats;
    bad.sum_squares = -1;
    INVALID(spw_spec_resolve(spec, &bad, NULL), "global.sum_squares");
    bad.nonfinite = 2;
    INVALID(spw_spec_resolve(spec, &bad, NULL), "global.nonfinite");
    resolve(spec, stats);
    REFUSED(spw_spec_resolve(spec, &stats, NULL), SPW_ERR_ROUND_RESOLVED, "verdict already");
    REFUSED(spw_spec_submit(spec, 1, tensor, 1, NULL), SPW_ERR_ROUND_RESOLVED, "verdict already");
    CHECK_OK(spw_spec_finish(spec, FOREVER));
    REFUSED(spw_spec_local_result(spec, 0, &stats), SPW_ERR_ROUND_RESOLVED, "verdict already");
    CHECK_OK(spw_spec_close(spec));

    spw_spec_options settings = {.struct_size = sizeof settings, .buckets = 1, .undo_mode = SPW_UNDO_MODE_ARITHMETIC};
    INVALID(spw_spec_open(&settings, &spec), "options.undo_mode");
    settings.undo_mode = SPW_UNDO_MODE_DELTA, settings.buckets = 0;
    INVALID(spw_spec_open(&settings, &spec), "options.buckets");
    settings.buckets = 1, settings.publish = 3;
    INVALID(spw_spec_open(&settings, &spec), "options.publish");
    INVALID(spw_spec_open(NULL, &spec), "options");
    INVALID(spw_spec_begin_adam(NULL, &options, 0.0), "spec");
    INVALID(spw_spec_finish(NULL, 0), "spec");
    CHECK_OK(spw_spec_close(NULL));
    release_models();
}

// Without an undo, an engine steps split masters too, with the bits of a step by itself.
static void split_masters_step_after_the_verdict(void) {
    undo = SPW_UNDO_MODE_NONE;
    spw_spec *spec = open_spec(SPW_SPEC_PUBLISH_STAGED);
    uint16_t *lows[2][BUCKETS];
    for (int i = 0; i < BUCKETS; i++) {
        for (int twin = 0; twin < 2; twin++) {
            struct problem *made = twin ? &twins[i] : &models[i];
            const uint32_t bf16 = SPW_DTYPE_BF16;
            *made = make(i == 1 ? LARGE : 1000, bf16, i == 2 ? SPW_DTYPE_F32 : bf16, bf16, SPW_DTYPE_NONE, (uint64_t)i);
            CHECK((lows[twin][i] = calloc(made->tensor.n, 2)) != NULL);
            made->tensor.param_low = lows[twin][i];
        }
    }
    spw_adam_options options = adam_options();
    double limit = 0.0;
    for (int round = 0; round < 3; round++, options.step++) {
        CHECK_OK(spw_spec_begin_adam(spec, &options, limit));
        for (uint32_t i = 0; i < BUCKETS; i++) submit(spec, i);
        const spw_step_stats mine = local(spec);
        check_same();
        const spw_spec_outcome outcome = resolve(spec, mine);
        CHECK(outcome.verdict == (limit > 0.0 ? SPW_SPEC_VERDICT_REDO : SPW_SPEC_VERDICT_COMMIT));
        CHECK(outcome.rolled_back == 0);
        CHECK_OK(spw_spec_finish(spec, FOREVER));
        check_stepped(&options, outcome.grad_scale);
        for (int i = 0; i < BUCKETS; i++) CHECK(memcmp(lows[0][i], lows[1][i], 2 * models[i].tensor.n) == 0);
        limit = outcome.norm / 2;
    }
    CHECK_OK(spw_spec_begin_adam(spec, &options, 0.0));
    for (uint32_t i = 0; i < BUCKETS; i++) submit(spec, i);
    local(spec);
    CHECK_OK(spw_spec_close(spec));
    check_same();

    spw_undo_options recording = SPW_UNDO_OPTIONS_INIT;
    recording.mode = SPW_UNDO_MODE_NONE;
    spw_undo *opened = NULL;
    INVALID(spw_undo_open(&recording, &opened), "options.mode");
    for (int i = 0; i < BUCKETS; i++) free(lows[0][i]), free(lows[1][i]);
    release_models();
}

int main(void) {
    const uint32_t modes[] = {SPW_UNDO_MODE_DELTA, SPW_UNDO_MODE_SHADOW, SPW_UNDO_MODE_NONE};
    for (int mode = 0; mode < 3; mode++) {
        undo = modes[mode];
        for (uint32_t publish = 0; publish < 3; publish++) the_verdicts_end_in_the_serial_bits(publish);
        other_optimizers_speculate_too();
        buckets_wait_for_descriptors_and_words();
        what_has_no_verdict_is_taken_back();
        calls_out_of_order_are_refused();
    }
    split_masters_step_after_the_verdict();
    return 0;
}
