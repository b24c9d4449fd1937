// Sixteen stages on two threads step to the bits of one serial step, never keep more threads at work than the pool
// has, and are rolled back to the bit. Their copies lie in an arena, whose readers see whole steps only.

#define SPW_EXPERIMENTAL
#include "check.h"

#include <fcntl.h>
#include <spillway/arena.h>
#include <spillway/stage.h>
#include <sys/eventfd.h>
#include <unistd.h>

enum { STAGES = 16, THREADS = 2, FOREVER = -1, BAD = 11 };

static spw_stage *stages[STAGES];
static struct problem problems[STAGES], serial[STAGES];
static spw_arena *arena;

static uint64_t elements(int stage) {
    static const uint64_t sizes[4] = {LARGE, 70001, 1000, 1};
    return sizes[stage % 4];
}

static void open_all(uint32_t undo, uint32_t publish) {
    spw_arena_region regions[STAGES];
    static char names[STAGES][32];
    for (int i = 0; i < STAGES; i++) {
        snprintf(names[i], sizeof names[i], "stage-%d", i);
        regions[i] = (spw_arena_region){sizeof *regions, 0, names[i], elements(i) * 2};
    }
    spw_arena_options options = SPW_ARENA_OPTIONS_INIT;
    options.regions = regions;
    options.region_count = STAGES;
    CHECK_OK(spw_arena_create(&options, &arena));
    for (int i = 0; i < STAGES; i++) {
        const spw_stage_options own = {sizeof own, i % 3, (uint32_t)i % 3, undo, publish, 0};
        CHECK_OK(spw_stage_open(&own, &stages[i]));
        problems[i] = make_mixed(elements(i), (uint64_t)i);
        serial[i] = make_mixed(elements(i), (uint64_t)i);
        spw_arena_region_info info = SPW_ARENA_REGION_INFO_INIT;
        CHECK_OK(spw_arena_get_region(arena, (uint32_t)i, &info, NULL, 0, NULL));
        problems[i].tensor.param_copy = info.address;
    }
}

static void close_all(void) {
    for (int i = 0; i < STAGES; i++) {
        CHECK_OK(spw_stage_close(stages[i]));
        release(&problems[i]), release(&serial[i]);
    }
    CHECK_OK(spw_arena_close(arena));
}

// The step of one call over all stages' tensors.
static void step_serially(const spw_adam_options *adam) {
    spw_tensor tensors[STAGES];
    for (int i = 0; i < STAGES; i++) tensors[i] = serial[i].tensor;
    CHECK_OK(spw_adam_step(adam, tensors, STAGES, NULL));
}

static void submit(int i, const spw_adam_options *adam, uint64_t generation, const spw_spec_event *event) {
    const spw_stage_target target = {sizeof target, (uint32_t)i, arena, generation};
    CHECK_OK(spw_stage_submit_adam(stages[i], adam, &problems[i].tensor, 1, event, &target));
}

static int same_states(int i) {
    for (int span = 0; span < 4; span++) {
        if (memcmp(problems[i].spans[span], serial[i].spans[span], problems[i].bytes[span]) != 0) return 0;
    }
    return 1;
}

static void check_all(uint64_t generation) {
    for (int i = 0; i < STAGES; i++) {
        CHECK(same_states(i));
        if (generation == 0) continue;
        uint64_t seen = 0;
        unsigned char *copy = malloc(serial[i].bytes[4]);
        CHECK_OK(spw_arena_read(arena, (uint32_t)i, 0, 0, copy, serial[i].bytes[4], 0, &seen));
        CHECK(seen == generation && memcmp(copy, serial[i].spans[4], serial[i].bytes[4]) == 0);
        free(copy);
    }
}

static void run_rounds(uint32_t publish) {
    open_all(SPW_UNDO_MODE_DELTA, publish);
    spw_adam_options adam = adam_options();
    spw_step_stats stats = step_stats();
    uint64_t generation = 0;
    for (uint64_t step = 1; step <= 6; step++) {
        // Even steps have one gradient that is not finite, so every stage is rolled back.
        const int bad = step % 2 == 0;
        adam.step = step;
        uint16_t *gradient = problems[BAD].spans[1], before = gradient[0];
        if (bad) gradient[0] = 0x7f80;
        for (int i = STAGES - 1; i >= 0; i--) submit(i, &adam, step, NULL);
        int nonfinite = 0;
        for (int i = 0; i < STAGES; i++) {
            CHECK_OK(spw_stage_wait(stages[i], FOREVER, &stats));
            CHECK((int)stats.nonfinite == (bad && i == BAD));
            nonfinite |= (int)stats.nonfinite;
            // The program cannot end the write of a stage.
            INVALID(spw_arena_write_end(arena, (uint32_t)i), "region");
            INVALID(spw_arena_write_abort(arena, (uint32_t)i, 1), "region");
        }
        for (int i = 0; i < STAGES; i++) {
            CHECK_OK(nonfinite ? spw_stage_rollback(stages[i]) : spw_stage_commit(stages[i]));
        }
        for (int i = 0; i < STAGES; i++) CHECK_OK(spw_stage_finish(stages[i], FOREVER));
        gradient[0] = before;
        if (!bad) {
            generation = step;
            step_serially(&adam);
        }
        check_all(generation);
    }
    // A later clip factor: the steps are rolled back and repeated.
    adam.step = 7;
    for (int i = 0; i < STAGES; i++) submit(i, &adam, 7, NULL);
    for (int i = 0; i < STAGES; i++) CHECK_OK(spw_stage_wait(stages[i], FOREVER, &stats));
    for (int i = 0; i < STAGES; i++) CHECK_OK(spw_stage_redo(stages[i], 0.125));
    for (int i = 0; i < STAGES; i++) CHECK_OK(spw_stage_finish(stages[i], FOREVER));
    adam.grad_scale = 0.125;
    step_serially(&adam);
    check_all(7);
    close_all();
}

static void check_events(void) {
    open_all(SPW_UNDO_MODE_DELTA, SPW_SPEC_PUBLISH_STAGED);
    spw_adam_options adam = adam_options();
    spw_step_stats stats = step_stats();
    static uint32_t word;
    const int fd = eventfd(0, EFD_CLOEXEC);
    CHECK(fd >= 0);
    const spw_spec_event by_fd = {.struct_size = sizeof by_fd, .kind = SPW_SPEC_EVENT_KIND_FD, .fd = fd};
    const spw_spec_event by_word = {
        .struct_size = sizeof by_word, .kind = SPW_SPEC_EVENT_KIND_WORD, .value = 1, .word = &word};
    submit(0, &adam, 1, &by_fd);
    submit(1, &adam, 1, &by_word);
    // The others use the processors meanwhile.
    for (int i = 2; i < STAGES; i++) submit(i, &adam, 1, NULL);
    for (int i = 2; i < STAGES; i++) CHECK_OK(spw_stage_wait(stages[i], FOREVER, &stats));
    uint32_t state = 77;
    for (int i = 0; i < 2; i++) {
        REFUSED(spw_stage_wait(stages[i], 1, &stats), SPW_ERR_TIMEOUT, "still pending");
        REFUSED(spw_stage_commit(stages[i]), SPW_ERR_BUSY, "");
        CHECK_OK(spw_stage_get_state(stages[i], &state));
        CHECK(state == SPW_SPEC_STATE_PENDING);
    }
    spw_stage_cores cores = SPW_STAGE_CORES_INIT;
    CHECK_OK(spw_stage_get_cores(&cores));
    CHECK(cores.in_use == 0 && cores.waiting == 0 && cores.threads == THREADS);
    CHECK(eventfd_write(fd, 1) == 0);
    __atomic_store_n(&word, 1, __ATOMIC_RELEASE);
    for (int i = 0; i < 2; i++) CHECK_OK(spw_stage_wait(stages[i], FOREVER, &stats));
    CHECK_OK(spw_stage_get_state(stages[0], &state));
    CHECK(state == SPW_SPEC_STATE_SPECULATIVE);
    for (int i = 0; i < STAGES; i++) CHECK_OK(spw_stage_commit(stages[i]));
    for (int i = 0; i < STAGES; i++) CHECK_OK(spw_stage_finish(stages[i], FOREVER));
    step_serially(&adam);
    check_all(1);
    // Closing with jobs in flight: some wait for an event that never comes, some run. All are rolled back.
    eventfd_t value;
    CHECK(eventfd_read(fd, &value) == 0);
    for (int i = 0; i < STAGES; i++) submit(i, &adam, 2, i % 2 == 0 ? &by_fd : NULL);
    for (int i = 0; i < STAGES; i++) {
        CHECK_OK(spw_stage_close(stages[i]));
        stages[i] = NULL;
    }
    check_all(1);
    close_all();
    close(fd);
}

static void check_shadows(void) {
    struct problem own = make_mixed(LARGE, 5), shadow = make_mixed(LARGE, 6), wanted = make_mixed(LARGE, 5);
    const spw_stage_options options = {sizeof options, 0, 0, SPW_UNDO_MODE_SHADOW, SPW_SPEC_PUBLISH_FINAL, 0};
    spw_stage *stage = NULL;
    CHECK_OK(spw_stage_open(&options, &stage));
    const spw_adam_options adam = adam_options();
    spw_step_stats stats = step_stats();
    INVALID(spw_stage_submit_adam(stage, &adam, &own.tensor, 1, NULL, NULL), "shadow_param");
    own.tensor.shadow_param = shadow.spans[0];
    own.tensor.shadow_exp_avg = shadow.spans[2];
    own.tensor.shadow_exp_avg_sq = shadow.spans[3];
    CHECK_OK(spw_stage_submit_adam(stage, &adam, &own.tensor, 1, NULL, NULL));
    CHECK_OK(spw_stage_wait(stage, FOREVER, &stats));
    CHECK_OK(spw_stage_commit(stage));
    CHECK_OK(spw_stage_finish(stage, FOREVER));
    CHECK(memcmp(own.spans[0], wanted.spans[0], own.bytes[0]) == 0);
    CHECK_OK(spw_adam_step(&adam, &wanted.tensor, 1, NULL));
    CHECK(memcmp(shadow.spans[0], wanted.spans[0], own.bytes[0]) == 0);
    CHECK(memcmp(own.spans[4], wanted.spans[4], own.bytes[4]) == 0);
    CHECK_OK(spw_stage_close(stage));
    release(&own), release(&shadow), release(&wanted);
}

static void check_arguments(void) {
    spw_stage_options options = SPW_STAGE_OPTIONS_INIT;
    spw_stage *stage = NULL;
    options.undo_mode = SPW_UNDO_MODE_ARITHMETIC;
    INVALID(spw_stage_open(&options, &stage), "options.undo_mode");
    options = (spw_stage_options)SPW_STAGE_OPTIONS_INIT, options.publish = SPW_SPEC_PUBLISH_SPECULATIVE;
    INVALID(spw_stage_open(&options, &stage), "options.publish");
    INVALID(spw_stage_open(NULL, &stage), "options");
    options = (spw_stage_options)SPW_STAGE_OPTIONS_INIT;
    CHECK_OK(spw_stage_open(&options, &stage));
    const spw_adam_options adam = adam_options();
    spw_step_stats stats = step_stats();
    struct problem problem = make_mixed(1000, 1);
    watch_problem(&problem);
    REFUSED(spw_stage_wait(stage, 0, &stats), SPW_ERR_NO_ROUND, "submit one first");
    REFUSED(spw_stage_commit(stage), SPW_ERR_NO_ROUND, "");
    CHECK_OK(spw_stage_rollback(stage));
    CHECK_OK(spw_stage_finish(stage, 0));
    INVALID(spw_stage_redo(stage, 1e300), "grad_scale");
    INVALID(spw_stage_submit_adam(stage, NULL, &problem.tensor, 1, NULL, NULL), "options");
    INVALID(spw_stage_submit_adam(stage, &adam, NULL, 1, NULL, NULL), "tensors");
    spw_arena_region region = {sizeof region, 0, "small", 1000};
    spw_arena_options small = SPW_ARENA_OPTIONS_INIT;
    small.regions = &region;
    small.region_count = 1;
    CHECK_OK(spw_arena_create(&small, &arena));
    spw_stage_target target = {sizeof target, 0, arena, 1};
    INVALID(spw_stage_submit_adam(stage, &adam, &problem.tensor, 1, NULL, &target), "param_copy");
    spw_tensor no_copy = problem.tensor;
    no_copy.param_copy = NULL, no_copy.copy_dtype = SPW_DTYPE_NONE;
    target.generation = 0;
    INVALID(spw_stage_submit_adam(stage, &adam, &no_copy, 1, NULL, &target), "target.generation");
    target.generation = 1;
    CHECK_OK(spw_arena_write_begin(arena, 0, 1, NULL));
    REFUSED(spw_stage_submit_adam(stage, &adam, &no_copy, 1, NULL, &target), SPW_ERR_BUSY, "is writing it");
    CHECK_OK(spw_arena_write_abort(arena, 0, 0));
    REFUSED(spw_stage_submit_adam(stage, &adam, &no_copy, 1, NULL, &target), SPW_ERR_ARENA_TORN, "cover only a part");
    target.arena = NULL;
    INVALID(spw_stage_submit_adam(stage, &adam, &problem.tensor, 1, NULL, &target), "arena");
    unwatch_all();
    // After every refusal the stage takes a job; a second job has to wait for the verdict of the first.
    CHECK_OK(spw_stage_submit_adam(stage, &adam, &problem.tensor, 1, NULL, NULL));
    REFUSED(spw_stage_submit_adam(stage, &adam, &problem.tensor, 1, NULL, NULL), SPW_ERR_ROUND_OPEN, "");
    CHECK_OK(spw_stage_close(stage));
    CHECK_OK(spw_stage_close(NULL));
    CHECK_OK(spw_arena_close(arena));
    release(&problem);
}

int main(void) {
    configure_threads(THREADS);
    check_arguments();
    for (int round = 0; round < rounds(3); round++) {
        run_rounds(SPW_SPEC_PUBLISH_FINAL);
        run_rounds(SPW_SPEC_PUBLISH_STAGED);
    }
    check_events();
    check_shadows();
    spw_stage_cores cores = SPW_STAGE_CORES_INIT;
    CHECK_OK(spw_stage_get_cores(&cores));
    CHECK(cores.peak_threads >= 1 && cores.peak_threads <= THREADS && cores.in_use == 0);
    return 0;
}
