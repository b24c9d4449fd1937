// Build: forks
// A child forked while the engine steps a bucket gets errors from its parent's engine and never waits for it. The child
// can open its own engine; the parent's round continues undisturbed.

#include "child.h"

static const int64_t FOREVER = -1;

static spw_spec *begun(void) {
    const spw_spec_options options = {.struct_size = sizeof options,
                                      .buckets = 2,
                                      .undo_mode = SPW_UNDO_MODE_DELTA,
                                      .publish = SPW_SPEC_PUBLISH_FINAL};
    const spw_adam_options adam = adam_options();
    spw_spec *spec = NULL;
    CHECK_OK(spw_spec_open(&options, &spec));
    CHECK_OK(spw_spec_begin_adam(spec, &adam, 0.0));
    return spec;
}

static void child(spw_spec *spec, struct problem *problem) {
    // A wait for a thread that fork did not copy never ends.
    alarm(60);
    spw_step_stats stats = step_stats();
    REFUSED(spw_spec_submit(spec, 0, &problem->tensor, 1, NULL), SPW_ERR_UNSUPPORTED, "process was forked");
    REFUSED(spw_spec_local_result(spec, FOREVER, &stats), SPW_ERR_UNSUPPORTED, "process was forked");
    REFUSED(spw_spec_finish(spec, FOREVER), SPW_ERR_UNSUPPORTED, "process was forked");
    REFUSED(spw_spec_abort(spec), SPW_ERR_UNSUPPORTED, "process was forked");
    CHECK_OK(spw_spec_close(spec));
    spw_spec *own = begun();
    CHECK_OK(spw_spec_submit(own, 0, &problem->tensor, 1, NULL));
    CHECK_OK(spw_spec_close(own));
    _exit(0);
}

int main(void) {
    for (int round = 0; round < rounds(20); round++) {
        struct problem large = make_mixed(LARGE, 1), small = make_mixed(1000, 2), before = make_mixed(LARGE, 1);
        spw_spec *spec = begun();
        CHECK_OK(spw_spec_submit(spec, 1, &large.tensor, 1, NULL));
        const pid_t pid = fork();
        if (pid == 0) child(spec, &small);
        finish(pid, "a child");
        // Closing rolls the open round back.
        CHECK_OK(spw_spec_close(spec));
        CHECK(same(&large, &before));
        release(&large), release(&small), release(&before);
    }
    return 0;
}
