// Build: probe
// A panic inside the library returns SPW_ERR_INTERNAL with the panic's message. Nothing is printed, and
// the process goes on.

#include "check.h"

#include <pthread.h>

extern spw_status spw_probe_panic(void);

static void *worker(void *unused) {
    (void)unused;
    for (int i = 0; i < 100; i++) REFUSED(spw_probe_panic(), SPW_ERR_INTERNAL, "probe");
    return NULL;
}

int main(void) {
    pthread_t threads[4];
    for (int i = 0; i < 4; i++) CHECK(pthread_create(&threads[i], NULL, worker, NULL) == 0);
    worker(NULL);
    for (int i = 0; i < 4; i++) CHECK(pthread_join(threads[i], NULL) == 0);

    struct problem problem = make_mixed(LARGE, 1);
    const spw_adam_options options = adam_options();
    CHECK_OK(spw_adam_step(&options, &problem.tensor, 1, NULL));
    release(&problem);
    return 0;
}
