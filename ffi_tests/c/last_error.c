// Each thread has its own last message: empty at first, kept until the next failure of that thread, untouched by success
// and by the failures of others.

#include "check.h"

#include <pthread.h>

enum { THREADS = 8, ROUNDS = 2000 };
static pthread_barrier_t barrier;

static void *worker(void *argument) {
    const int id = (int)(intptr_t)argument;
    char wanted[64];
    snprintf(wanted, sizeof wanted, "Adam optimizer id %d does", id);
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

int main(void) {
    pthread_t threads[THREADS];
    INVALID(spw_get_info(NULL), "info_out");
    CHECK(pthread_barrier_init(&barrier, NULL, THREADS) == 0);
    for (intptr_t i = 0; i < THREADS; i++) {
        CHECK(pthread_create(&threads[i], NULL, worker, (void *)(1000 + i)) == 0);
    }
    for (int i = 0; i < THREADS; i++) CHECK(pthread_join(threads[i], NULL) == 0);
    CHECK(strstr(spw_last_error(), "info_out") != NULL);
    return 0;
}
