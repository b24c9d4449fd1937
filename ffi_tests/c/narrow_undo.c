// A recorded step of narrow states, split masters or 8-bit moments, is rolled back to every byte, and repeated with another
// factor: by a recording and by a speculation, with and without a copy that counts. Without a log it is refused.

#include "check.h"

enum { SPANS = 9 };

// Kinds of narrow states.
enum { CODES, CODES_TAKEN, CODES_SPLIT, FLOATS_SPLIT, BF16_SPLIT, KINDS };

struct narrow {
    struct problem problem;
    void *spans[SPANS];
    size_t bytes[SPANS];
};

static void *more(struct narrow *made, int span, size_t bytes) {
    made->bytes[span] = bytes, made->spans[span] = calloc(bytes + 8, 1);
    return made->spans[span];
}

static struct narrow make_narrow(int kind, uint64_t n, uint64_t seed) {
    const int split = kind >= CODES_SPLIT, codes = kind <= CODES_SPLIT;
    const uint32_t param = split ? SPW_DTYPE_BF16 : SPW_DTYPE_F32;
    const uint32_t state = kind == FLOATS_SPLIT ? SPW_DTYPE_F32 : SPW_DTYPE_BF16;
    struct narrow made = {make(n, param, state, SPW_DTYPE_BF16, split ? SPW_DTYPE_NONE : SPW_DTYPE_BF16, seed), {0}, {0}};
    for (int i = 0; i < 5; i++) made.spans[i] = made.problem.spans[i], made.bytes[i] = made.problem.bytes[i];
    spw_tensor *tensor = &made.problem.tensor;
    if (split) {
        tensor->param_low = more(&made, 5, 2 * n), tensor->low_sums = more(&made, 6, 8 * ((n + 4095) / 4096));
    } else {
        for (uint64_t i = 0; i < n; i++) {
            const uint32_t master = ((const uint32_t *)made.spans[0])[i];
            ((uint16_t *)made.spans[4])[i] = (uint16_t)((master + 0x7fff + (master >> 16 & 1)) >> 16);
        }
        tensor->take_copy = kind == CODES_TAKEN;
    }
    if (codes) {
        float *values = malloc(4 * n + 1);
        tensor->state_dtype = SPW_DTYPE_CODES;
        for (uint32_t i = 0; i < 2; i++) {
            void *scales = more(&made, 7 + (int)i, 2 * ((n + 31) / 32));
            fill(values, SPW_DTYPE_F32, n, seed + i, i == 1);
            CHECK_OK(spw_codes_write(SPW_MOMENT_FIRST + i, values, n, made.spans[2 + i], scales));
        }
        tensor->exp_avg_scale = made.spans[7], tensor->exp_avg_sq_scale = made.spans[8];
        free(values);
    }
    return made;
}

static void drop_narrow(struct narrow *made) {
    for (int i = 5; i < SPANS; i++) free(made->spans[i]);
    release(&made->problem);
}

static void check_equal(const struct narrow *one, const struct narrow *other) {
    for (int i = 0; i < SPANS; i++) CHECK(one->bytes[i] == 0 || memcmp(one->spans[i], other->spans[i], one->bytes[i]) == 0);
}

// Narrow moments are rounded at random.
static spw_adam_options options_of(int kind, uint64_t number) {
    spw_adam_options adam = adam_options();
    adam.step = number, adam.rounding_seed = 5;
    adam.rounding = kind == FLOATS_SPLIT ? SPW_ROUNDING_NEAREST : SPW_ROUNDING_STOCHASTIC;
    return adam;
}

static void a_recording_rolls_back_and_redoes(int kind, uint64_t n) {
    struct narrow ours = make_narrow(kind, n, 3), theirs = make_narrow(kind, n, 3);
    spw_undo_options options = SPW_UNDO_OPTIONS_INIT;
    options.mode = SPW_UNDO_MODE_DELTA, options.elements = n, options.tensors = 1;
    spw_undo *undo = NULL;
    CHECK_OK(spw_undo_open(&options, &undo));
    for (uint64_t number = 1; number <= 3; number++) {
        const spw_adam_options adam = options_of(kind, number);
        CHECK_OK(spw_undo_adam_step(undo, &adam, &ours.problem.tensor, 1, NULL));
        CHECK(memcmp(ours.spans[2], theirs.spans[2], ours.bytes[2]) != 0 || n == 1);
        uint64_t used = 0;
        CHECK_OK(spw_undo_get_log_bytes(undo, &used));
        CHECK(used >= 4 * n && used <= 13 * n + 4096);
        CHECK_OK(spw_undo_rollback(undo));
        check_equal(&ours, &theirs);
        CHECK_OK(spw_undo_adam_step(undo, &adam, &ours.problem.tensor, 1, NULL));
        CHECK_OK(spw_undo_redo(undo, 0.5));
        spw_adam_options half = adam;
        half.grad_scale = 0.5;
        CHECK_OK(spw_adam_step(&half, &theirs.problem.tensor, 1, NULL));
        check_equal(&ours, &theirs);
        fill(ours.spans[1], SPW_DTYPE_BF16, n, number, 0), fill(theirs.spans[1], SPW_DTYPE_BF16, n, number, 0);
    }
    CHECK_OK(spw_undo_close(undo));
    drop_narrow(&ours), drop_narrow(&theirs);
}

// A rollback keeps what the program has written to a copy that counts.
static void a_rollback_keeps_what_was_written(uint64_t n) {
    struct narrow ours = make_narrow(CODES_TAKEN, n, 4);
    ((uint16_t *)ours.spans[4])[n / 2] = 0x4120;
    spw_undo_options options = SPW_UNDO_OPTIONS_INIT;
    options.mode = SPW_UNDO_MODE_DELTA, options.elements = n, options.tensors = 1;
    spw_undo *undo = NULL;
    CHECK_OK(spw_undo_open(&options, &undo));
    const spw_adam_options adam = options_of(CODES_TAKEN, 1);
    CHECK_OK(spw_undo_adam_step(undo, &adam, &ours.problem.tensor, 1, NULL));
    CHECK_OK(spw_undo_rollback(undo));
    CHECK(((const float *)ours.spans[0])[n / 2] == 10.0f && ((const uint16_t *)ours.spans[4])[n / 2] == 0x4120);
    CHECK_OK(spw_undo_close(undo));
    drop_narrow(&ours);
}

enum { COMMIT, REDO, SKIP };

static void a_speculation_steps_before_its_verdict(int kind, uint64_t n, int verdict, uint32_t publish) {
    struct narrow ours = make_narrow(kind, n, 6), theirs = make_narrow(kind, n, 6);
    // A gradient of Inf ends in a skip.
    if (verdict == SKIP) ((uint16_t *)ours.spans[1])[n - 1] = 0x7f80;
    spw_spec_options options = SPW_SPEC_OPTIONS_INIT;
    options.buckets = 1, options.publish = publish;
    spw_spec *spec = NULL;
    CHECK_OK(spw_spec_open(&options, &spec));
    spw_adam_options adam = options_of(kind, 1);
    CHECK_OK(spw_spec_begin_adam(spec, &adam, verdict == REDO ? 1e-3 : 0.0));
    CHECK_OK(spw_spec_submit(spec, 0, &ours.problem.tensor, 1, NULL));
    spw_step_stats stats = step_stats();
    CHECK_OK(spw_spec_local_result(spec, -1, &stats));
    CHECK_OK(spw_spec_resolve(spec, &stats, NULL));
    CHECK_OK(spw_spec_finish(spec, -1));
    spw_spec_stats counts = SPW_SPEC_STATS_INIT;
    CHECK_OK(spw_spec_get_stats(spec, &counts));
    CHECK(counts.buckets_speculated == 1);
    CHECK_OK(spw_spec_close(spec));
    if (verdict == REDO) {
        options.undo_mode = SPW_UNDO_MODE_NONE;
        spw_spec *plain = NULL;
        CHECK_OK(spw_spec_open(&options, &plain));
        CHECK_OK(spw_spec_begin_adam(plain, &adam, 1e-3));
        CHECK_OK(spw_spec_submit(plain, 0, &theirs.problem.tensor, 1, NULL));
        CHECK_OK(spw_spec_local_result(plain, -1, &stats));
        CHECK_OK(spw_spec_resolve(plain, &stats, NULL));
        CHECK_OK(spw_spec_finish(plain, -1));
        CHECK_OK(spw_spec_close(plain));
    }
    if (verdict == COMMIT) CHECK_OK(spw_adam_step(&adam, &theirs.problem.tensor, 1, NULL));
    if (verdict == SKIP) ((uint16_t *)theirs.spans[1])[n - 1] = 0x7f80;
    check_equal(&ours, &theirs);
    drop_narrow(&ours), drop_narrow(&theirs);
}

static void a_rollback_without_a_log_is_refused(int kind) {
    struct narrow ours = make_narrow(kind, 100, 8);
    for (int i = 0; i < SPANS; i++) {
        if (ours.bytes[i] > 0) watch(ours.spans[i], ours.bytes[i]);
    }
    spw_undo_options options = SPW_UNDO_OPTIONS_INIT;
    options.mode = SPW_UNDO_MODE_ARITHMETIC, options.elements = 100, options.tensors = 1;
    spw_undo *undo = NULL;
    CHECK_OK(spw_undo_open(&options, &undo));
    const spw_adam_options adam = options_of(kind, 1);
    REFUSED(spw_undo_adam_step(undo, &adam, &ours.problem.tensor, 1, NULL), SPW_ERR_UNSUPPORTED,
            "their steps are undone from a log only; record with the delta mode");
    CHECK_OK(spw_undo_close(undo));
    unwatch_all();
    drop_narrow(&ours);
}

int main(void) {
    const uint64_t sizes[] = {1, 33, 4097, LARGE};
    for (int kind = 0; kind < KINDS; kind++) {
        for (int i = 0; i < 4; i++) {
            a_recording_rolls_back_and_redoes(kind, sizes[i]);
            for (int verdict = COMMIT; verdict <= SKIP; verdict++) {
                for (uint32_t publish = 0; publish < 3; publish++) {
                    // A step that withholds the copy cannot take it.
                    if (kind == CODES_TAKEN && publish == SPW_SPEC_PUBLISH_FINAL) continue;
                    a_speculation_steps_before_its_verdict(kind, sizes[i], verdict, publish);
                }
            }
        }
        a_rollback_without_a_log_is_refused(kind);
    }
    a_rollback_keeps_what_was_written(5000);
    return 0;
}
