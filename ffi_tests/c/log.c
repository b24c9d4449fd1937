// Messages go to the callback with its user pointer, up to its level, and nowhere else; a callback may be replaced while
// other threads step, and may call the library itself.

#include "check.h"

#include <pthread.h>
#include <stdatomic.h>

struct seen {
    atomic_int messages;
    atomic_int worst;
};

static void count(void *user, int32_t level, const char *message) {
    struct seen *seen = user;
    uint32_t threads;
    CHECK(message != NULL && strlen(message) > 0 && spw_threads_count(&threads) == SPW_OK);
    atomic_fetch_add(&seen->messages, 1);
    if (level > atomic_load(&seen->worst)) atomic_store(&seen->worst, level);
}

static void large_step(void) {
    struct problem problem = make_mixed(LARGE, 3);
    const spw_adam_options options = adam_options();
    CHECK_OK(spw_adam_step(&options, &problem.tensor, 1, NULL));
    release(&problem);
}

static void *stepper(void *stop) {
    while (!atomic_load((atomic_int *)stop)) large_step();
    return NULL;
}

int main(void) {
    struct seen info = {0}, errors = {0}, off = {0};
    CHECK_OK(spw_set_log(count, &errors, SPW_LOG_ERROR));
    configure_threads(2);
    large_step();
    CHECK(errors.messages == 0);
    CHECK_OK(spw_set_log(count, &off, SPW_LOG_OFF));
    configure_threads(3);
    large_step();
    CHECK(off.messages == 0);
    CHECK_OK(spw_set_log(count, &info, SPW_LOG_INFO));
    configure_threads(4);
    large_step();
    CHECK(info.messages > 0 && info.worst == SPW_LOG_INFO);
    // Said once: the next step adds nothing.
    const int said = info.messages;
    large_step();
    CHECK(info.messages == said);
    INVALID(spw_set_log(count, &off, 9), "level");
    configure_threads(2);
    large_step();
    CHECK(info.messages > said && off.messages == 0);

    atomic_int stop = 0;
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, stepper, &stop) == 0);
    for (int i = 0; i < 300; i++) {
        CHECK_OK(spw_set_log(count, i % 2 ? &info : &errors, SPW_LOG_DEBUG));
        configure_threads(2 + (uint32_t)i % 2);
    }
    atomic_store(&stop, 1);
    CHECK(pthread_join(thread, NULL) == 0);
    CHECK_OK(spw_set_log(NULL, NULL, SPW_LOG_OFF));
    large_step();
    return 0;
}
