// Build: forks
// A call is no cancellation point: a cancelled thread completes its call, and ends at the next point of its own. The
// library's threads take none of the program's signals, so a thread that waits for a signal gets it.

#include "check.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <unistd.h>

static atomic_int calls;

static void *steps(void *ignored) {
    (void)ignored;
    const spw_adam_options options = adam_options();
    struct problem large = make_mixed(LARGE, 8);
    for (;;) {
        CHECK_OK(spw_adam_step(&options, &large.tensor, 1, NULL));
        spw_io *io = NULL;
        CHECK_OK(spw_io_open(NULL, &io));
        CHECK_OK(spw_io_close(io, -1));
        CHECK(spw_ds_adam_destroy(1) == SPW_ERR_UNKNOWN_ID);
        int state = -1;
        CHECK(pthread_setcancelstate(PTHREAD_CANCEL_ENABLE, &state) == 0 && state == PTHREAD_CANCEL_ENABLE);
        if (atomic_fetch_add(&calls, 1) > 2) pthread_testcancel();
    }
    return NULL;
}

static void *keeps_its_state(void *ignored) {
    (void)ignored;
    int state = -1;
    CHECK(pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &state) == 0);
    CHECK(spw_ds_adam_destroy(1) == SPW_ERR_UNKNOWN_ID);
    CHECK(pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &state) == 0 && state == PTHREAD_CANCEL_DISABLE);
    return NULL;
}

int main(void) {
    alarm(60);
    configure_threads(3);
    // The workers start before the program blocks the signal.
    struct problem large = make_mixed(LARGE, 8);
    const spw_adam_options options = adam_options();
    for (int i = 0; i < 20; i++) CHECK_OK(spw_adam_step(&options, &large.tensor, 1, NULL));
    release(&large);
    sigset_t one;
    sigemptyset(&one);
    sigaddset(&one, SIGUSR1);
    CHECK(pthread_sigmask(SIG_BLOCK, &one, NULL) == 0);
    for (int i = 0; i < 20; i++) {
        int taken = 0;
        CHECK(kill(getpid(), SIGUSR1) == 0);
        CHECK(sigwait(&one, &taken) == 0 && taken == SIGUSR1);
    }

    pthread_t thread;
    void *outcome = NULL;
    for (int i = 0; i < 4; i++) {
        atomic_store(&calls, 0);
        CHECK(pthread_create(&thread, NULL, steps, NULL) == 0);
        if (i > 0) {
            while (atomic_load(&calls) < i) usleep(100);
        }
        CHECK(pthread_cancel(thread) == 0);
        CHECK(pthread_join(thread, &outcome) == 0 && outcome == PTHREAD_CANCELED);
    }
    CHECK(pthread_create(&thread, NULL, keeps_its_state, NULL) == 0);
    CHECK(pthread_join(thread, &outcome) == 0 && outcome == NULL);
    return 0;
}
