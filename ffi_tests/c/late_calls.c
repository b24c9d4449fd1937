// Build: forks
// Calls while a thread or the process ends: in destructors of a thread's data, in every round of them, in exit handlers
// and in destructors of static objects. They return statuses with their messages, and step.

#include "child.h"

#include <fcntl.h>
#include <pthread.h>

enum { ROUNDS = 3 };

static struct problem expected;
static pthread_key_t key;
static int rounds_seen;

// `exit` would run the handlers again that fail here.
#define HOLDS(condition) \
    ((condition) ? (void)0 : (fprintf(stderr, "line %d: %s (%s)\n", __LINE__, #condition, spw_last_error()), _exit(1)))

static void call_all(void) {
    HOLDS(spw_ds_adam_destroy(4711) == SPW_ERR_UNKNOWN_ID);
    HOLDS(strstr(spw_last_error(), "Adam optimizer id 4711") != NULL);
    spw_io_failure failure = SPW_IO_FAILURE_INIT;
    char path[4096];
    HOLDS(spw_get_io_failure(0, &failure, path, sizeof path, NULL) == SPW_OK && strcmp(path, "") == 0);
    spw_io *io = NULL;
    HOLDS(spw_io_open(NULL, &io) == SPW_OK);
    char byte = 0;
    const spw_io_request request = {
        .struct_size = sizeof request, .fd = -1, .path = "no such file", .buffer = &byte, .bytes = 1};
    uint64_t handle = 0;
    spw_status status = spw_io_read(io, &request, &handle);
    if (status == SPW_OK) status = spw_io_wait(io, &handle, 1, -1, NULL);
    HOLDS(status == SPW_ERR_NOT_FOUND);
    HOLDS(spw_get_io_failure(0, &failure, path, sizeof path, NULL) == SPW_OK && strcmp(path, "no such file") == 0);
    HOLDS(spw_io_close(io, -1) == SPW_OK);
    struct problem mine = make_mixed(LARGE, 8);
    const spw_adam_options options = adam_options();
    HOLDS(spw_adam_step(&options, &mine.tensor, 1, NULL) == SPW_OK);
    HOLDS(same(&mine, &expected));
    release(&mine);
}

static void in_each_round(void *value) {
    rounds_seen++;
    call_all();
    if (rounds_seen < ROUNDS) HOLDS(pthread_setspecific(key, value) == 0);
}

static void *ends(void *called_before) {
    if (called_before != NULL) call_all();
    CHECK(pthread_setspecific(key, &key) == 0);
    return NULL;
}

static void at_thread_end(void *called_before) {
    pthread_t thread;
    rounds_seen = 0;
    CHECK(pthread_create(&thread, NULL, ends, called_before) == 0);
    CHECK(pthread_join(thread, NULL) == 0);
    CHECK(rounds_seen == ROUNDS);
}

static int in_destructor;

__attribute__((destructor)) static void destructor(void) {
    if (in_destructor) call_all();
}

int main(void) {
    configure_threads(3);
    expected = make_mixed(LARGE, 8);
    const spw_adam_options options = adam_options();
    CHECK_OK(spw_adam_step(&options, &expected.tensor, 1, NULL));
    CHECK(pthread_key_create(&key, in_each_round) == 0);
    at_thread_end(NULL);
    at_thread_end(&key);
    for (int used_before = 0; used_before < 2; used_before++) {
        const pid_t child = fork();
        if (child == 0) {
            alarm(60);
            if (used_before) call_all();
            in_destructor = 1;
            CHECK(atexit(call_all) == 0);
            exit(0);
        }
        finish(child, "a child");
    }
    release(&expected);
    return 0;
}
