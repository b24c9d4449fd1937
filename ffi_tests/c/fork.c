// Build: forks
// A child made by fork computes the same bits as its parent. Cases: the parent already had a pool, another thread of
// the parent steps or changes the pool, a grandchild steps, and the child sets its own number of workers.

#include "child.h"

#include <pthread.h>
#include <stdatomic.h>

static struct problem expected;

static void step_and_compare(void) {
    struct problem mine = make_mixed(LARGE, 8);
    const spw_adam_options options = adam_options();
    CHECK_OK(spw_adam_step(&options, &mine.tensor, 1, NULL));
    CHECK(same(&mine, &expected));
    release(&mine);
}

static void several_steps(void) {
    for (int i = 0; i < 3; i++) step_and_compare();
    for (uint32_t workers = 1; workers < 4; workers++) {
        configure_threads(workers);
        step_and_compare();
    }
    REFUSED(spw_ds_adam_destroy(1), SPW_ERR_UNKNOWN_ID, "1");
    CHECK_OK(spw_ds_adam_create(1, 0.9f, 0.999f, 1));
    CHECK_OK(spw_ds_adam_destroy(1));
}

static void grandchild(void) {
    step_and_compare();
    in_child(several_steps, "a child of the child");
    step_and_compare();
}

static void *stepper(void *stop) {
    while (!atomic_load((atomic_int *)stop)) step_and_compare();
    return NULL;
}

static void *configurer(void *stop) {
    for (uint32_t i = 0; !atomic_load((atomic_int *)stop); i++) {
        configure_threads(1 + i % 4);
        usleep(500);
    }
    return NULL;
}

static void while_another_thread(void *(*works)(void *), const char *what) {
    atomic_int stop = 0;
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, works, &stop) == 0);
    for (int i = 0; i < rounds(15); i++) {
        usleep(1000 + 700 * (useconds_t)i);
        in_child(step_and_compare, what);
        step_and_compare();
    }
    atomic_store(&stop, 1);
    CHECK(pthread_join(thread, NULL) == 0);
}

int main(void) {
    configure_threads(1);
    expected = make_mixed(LARGE, 8);
    const spw_adam_options options = adam_options();
    CHECK_OK(spw_adam_step(&options, &expected.tensor, 1, NULL));

    configure_threads(2);
    in_child(several_steps, "a child before the pool");
    step_and_compare();
    in_child(several_steps, "a child after the pool");
    in_child(grandchild, "a child with a child");
    step_and_compare();
    while_another_thread(stepper, "a child while another thread steps");
    while_another_thread(configurer, "a child while another thread changes the pool");
    release(&expected);
    return 0;
}
