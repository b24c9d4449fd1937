// Each thread has its own last message: empty at first, kept until the next failure of that thread, untouched by success
// and by the failures of others. Its address stays valid until the thread ends. The number that a failing call leaves in
// errno finds its message from any thread, and never the message of another call.

#include "check.h"

#include <errno.h>
#include <pthread.h>

enum { THREADS = 8, ROUNDS = 2000, TASKS = 48 };
static pthread_barrier_t barrier;
static struct {
    int id, number;
} tasks[THREADS][TASKS];

static void named(int id, char wanted[64]) {
    snprintf(wanted, 64, "Adam optimizer id %d does", id);
}

static void *worker(void *argument) {
    const int id = (int)(intptr_t)argument;
    char wanted[64];
    named(id, wanted);
    CHECK(spw_last_error() != NULL && strcmp(spw_last_error(), "") == 0);
    pthread_barrier_wait(&barrier);
    for (int round = 0; round < ROUNDS; round++) {
        REFUSED(spw_ds_adam_destroy(id), SPW_ERR_UNKNOWN_ID, wanted);
        spw_info info = SPW_INFO_INIT;
        CHECK_OK(spw_get_info(&info));
        CHECK(strstr(spw_last_error(), wanted) != NULL);
    }
    return NULL;
}

static void each_thread_has_its_own_message(void) {
    pthread_t threads[THREADS];
    INVALID(spw_get_info(NULL), "info_out");
    for (intptr_t i = 0; i < THREADS; i++) {
        CHECK(pthread_create(&threads[i], NULL, worker, (void *)(1000 + i)) == 0);
    }
    for (int i = 0; i < THREADS; i++) CHECK(pthread_join(threads[i], NULL) == 0);
    CHECK(strstr(spw_last_error(), "info_out") != NULL);
}

// Tasks of a runtime that moves them: each fails on one thread and reads its message on another one, while the threads
// run other tasks, which fail too.
static void *carrier(void *argument) {
    const int own = (int)(intptr_t)argument, other = (own + 1) % THREADS;
    for (int round = 0; round < rounds(20); round++) {
        for (int task = 0; task < TASKS; task++) {
            tasks[own][task].id = 100000 + (round * THREADS + own) * TASKS + task;
            CHECK(spw_ds_adam_destroy(tasks[own][task].id) == SPW_ERR_UNKNOWN_ID);
            tasks[own][task].number = errno;
        }
        pthread_barrier_wait(&barrier);
        for (int task = 0; task < TASKS; task++) {
            char text[200], wanted[64];
            named(tasks[other][task].id, wanted);
            CHECK(spw_ds_adam_destroy(1) == SPW_ERR_UNKNOWN_ID);
            CHECK(spw_error_text(tasks[other][task].number, text, sizeof text, NULL) == SPW_OK);
            CHECK(strstr(text, wanted) != NULL);
        }
        pthread_barrier_wait(&barrier);
    }
    return NULL;
}

static void a_number_finds_its_message_on_another_thread(void) {
    pthread_t threads[THREADS];
    for (intptr_t i = 0; i < THREADS; i++) CHECK(pthread_create(&threads[i], NULL, carrier, (void *)i) == 0);
    for (int i = 0; i < THREADS; i++) CHECK(pthread_join(threads[i], NULL) == 0);
}

static void a_number_never_finds_another_message(void) {
    char text[200], wanted[64];
    CHECK(spw_ds_adam_destroy(7) == SPW_ERR_UNKNOWN_ID);
    const int first = errno;
    const char *before = spw_last_error();
    uint64_t needed = 0;
    CHECK_OK(spw_error_text(first, NULL, 0, &needed));
    CHECK(needed == strlen(before) + 1);
    for (int id = 8; id < 8 + 1023; id++) {
        CHECK(spw_ds_adam_destroy(id) == SPW_ERR_UNKNOWN_ID);
        // The text at the old address is that of the last call.
        named(id, wanted);
        CHECK(strstr(before, wanted) != NULL);
    }
    named(7, wanted);
    CHECK(spw_error_text(first, text, sizeof text, NULL) == SPW_OK && strstr(text, wanted) != NULL);
    CHECK(spw_ds_adam_destroy(5000) == SPW_ERR_UNKNOWN_ID);
    REFUSED(spw_error_text(first, text, sizeof text, NULL), SPW_ERR_NOT_FOUND, "in errno");
    REFUSED(spw_error_text(ENOENT, text, sizeof text, NULL), SPW_ERR_NOT_FOUND, "in errno");
    REFUSED(spw_error_text(-1, text, sizeof text, NULL), SPW_ERR_NOT_FOUND, "in errno");
    CHECK(spw_error_text(0, text, 8, &needed) == SPW_OK && strlen(text) == 7 && needed > 8);
}

int main(void) {
    CHECK(pthread_barrier_init(&barrier, NULL, THREADS) == 0);
    each_thread_has_its_own_message();
    a_number_finds_its_message_on_another_thread();
    a_number_never_finds_another_message();
    return 0;
}
