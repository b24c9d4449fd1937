// The library sends messages up to the set level to the callback, with its user pointer, and prints nothing. The callback
// runs on threads that are in a call of the library, also for messages of the library's own threads. A callback may be
// replaced while other threads step, and may call the library. After spw_set_log returns, no thread runs the earlier
// callback. Without a callback the program takes the messages itself.

#include "child.h"

#include <pthread.h>
#include <stdatomic.h>
#include <time.h>

// True on the threads of this program.
static _Thread_local int of_program;

struct seen {
    atomic_int messages;
    atomic_int worst;
};

static void count(void *user, int32_t level, const char *message) {
    struct seen *seen = user;
    CHECK(of_program);
    spw_info info = SPW_INFO_INIT;
    CHECK(message != NULL && strlen(message) > 0 && spw_get_info(&info) == SPW_OK);
    atomic_fetch_add(&seen->messages, 1);
    if (level > atomic_load(&seen->worst)) atomic_store(&seen->worst, level);
}

static void linger(void *user, int32_t level, const char *message) {
    (void)level, (void)message;
    atomic_int *inside = user;
    atomic_store(inside, 1);
    nanosleep(&(struct timespec){.tv_nsec = 200000000}, NULL);
    atomic_store(inside, 0);
}

static void take_itself_off(void *user, int32_t level, const char *message) {
    (void)level, (void)message;
    CHECK_OK(spw_set_log(NULL, NULL, SPW_LOG_LEVEL_OFF));
    atomic_fetch_add((atomic_int *)user, 1);
}

static void large_step(void) {
    struct problem problem = make_mixed(LARGE, 3);
    const spw_adam_options options = adam_options();
    CHECK_OK(spw_adam_step(&options, &problem.tensor, 1, NULL));
    release(&problem);
}

static void *stepper(void *stop) {
    of_program = 1;
    while (!atomic_load((atomic_int *)stop)) large_step();
    return NULL;
}

static void open_an_engine(void *user, int32_t level, const char *message) {
    (void)level, (void)message;
    spw_io *io = NULL;
    CHECK_OK(spw_io_open(NULL, &io));
    CHECK_OK(spw_io_close(io, -1));
    atomic_fetch_add((atomic_int *)user, 1);
}

// An engine that opens sends its messages with no lock held; here the message says that the profile is malformed.
static void a_callback_may_open_an_engine(void) {
    atomic_int calls = 0;
    CHECK(setenv("SPILLWAY_PROFILE", "/dev/null", 1) == 0);
    CHECK_OK(spw_set_log(open_an_engine, &calls, SPW_LOG_LEVEL_WARN));
    alarm(60);
    spw_io *io = NULL;
    CHECK_OK(spw_io_open(NULL, &io));
    CHECK_OK(spw_io_close(io, -1));
    alarm(0);
    CHECK(calls == 1);
    CHECK_OK(spw_set_log(NULL, NULL, SPW_LOG_LEVEL_OFF));
    CHECK(unsetenv("SPILLWAY_PROFILE") == 0);
}

static void *first_step(void *unused) {
    configure_threads(4);
    large_step();
    return unused;
}

static void a_replaced_callback_has_returned(void) {
    atomic_int inside = 0, calls = 0;
    pthread_t thread;
    configure_threads(3);
    large_step();
    CHECK_OK(spw_set_log(linger, &inside, SPW_LOG_LEVEL_DEBUG));
    CHECK(pthread_create(&thread, NULL, first_step, NULL) == 0);
    while (!atomic_load(&inside)) sched_yield();
    // A forked child does not wait for a callback that a thread of the parent is running.
    const pid_t child = fork();
    if (child == 0) {
        alarm(60);
        _exit(spw_set_log(NULL, NULL, SPW_LOG_LEVEL_OFF) != SPW_OK);
    }
    finish(child, "a child");
    CHECK_OK(spw_set_log(NULL, NULL, SPW_LOG_LEVEL_OFF));
    CHECK(!atomic_load(&inside));
    CHECK(pthread_join(thread, NULL) == 0);
    CHECK(!atomic_load(&inside));

    CHECK_OK(spw_set_log(take_itself_off, &calls, SPW_LOG_LEVEL_DEBUG));
    configure_threads(2);
    large_step();
    CHECK(calls == 1);
}

static void a_program_takes_the_messages_itself(void) {
    int32_t level = 9;
    char text[500];
    uint64_t needed = 0;
    CHECK_OK(spw_set_log(NULL, NULL, SPW_LOG_LEVEL_INFO));
    CHECK(spw_log_next(&level, text, sizeof text, &needed) == SPW_OK && level == SPW_LOG_LEVEL_OFF && needed == 1);
    CHECK(text[0] == 0);
    configure_threads(3);
    large_step();
    // Its size, which takes nothing, and then the message.
    CHECK(spw_log_next(&level, NULL, 0, &needed) == SPW_OK && level == SPW_LOG_LEVEL_INFO && needed > 1);
    CHECK(spw_log_next(&level, text, sizeof text, NULL) == SPW_OK && level == SPW_LOG_LEVEL_INFO);
    CHECK(strlen(text) + 1 == needed && strstr(text, "worker threads") != NULL);
    while (level != SPW_LOG_LEVEL_OFF) CHECK_OK(spw_log_next(&level, text, sizeof text, NULL));
    INVALID(spw_log_next(NULL, text, sizeof text, NULL), "level_out");
    // More than can wait: a message says how many are lost.
    for (uint32_t i = 0; i < 280; i++) {
        configure_threads(2 + i % 2);
        large_step();
    }
    CHECK(spw_log_next(&level, text, sizeof text, NULL) == SPW_OK && level == SPW_LOG_LEVEL_WARN);
    CHECK(strstr(text, "messages before this one were lost") != NULL);
    int kept = 0;
    while (spw_log_next(&level, text, sizeof text, NULL) == SPW_OK && level != SPW_LOG_LEVEL_OFF) kept++;
    CHECK(kept == 256);
    configure_threads(4);
    large_step();
    // What waits is the parent's, not the child's.
    const pid_t child = fork();
    if (child == 0) {
        CHECK(spw_log_next(&level, text, sizeof text, NULL) == SPW_OK && level == SPW_LOG_LEVEL_OFF);
        _exit(0);
    }
    const pid_t other = fork();
    if (other == 0) {
        configure_threads(3);
        large_step();
        CHECK(spw_log_next(&level, text, sizeof text, NULL) == SPW_OK && level == SPW_LOG_LEVEL_INFO);
        CHECK(strstr(text, "2 worker threads") != NULL || strstr(text, "3 worker threads") != NULL);
        _exit(0);
    }
    finish(other, "a child that logs");
    finish(child, "a child");
    CHECK(spw_log_next(&level, text, sizeof text, NULL) == SPW_OK && level == SPW_LOG_LEVEL_INFO);
    CHECK_OK(spw_set_log(NULL, NULL, SPW_LOG_LEVEL_OFF));
}

int main(void) {
    of_program = 1;
    a_replaced_callback_has_returned();
    a_program_takes_the_messages_itself();
    a_callback_may_open_an_engine();
    struct seen info = {0}, errors = {0}, off = {0};
    CHECK_OK(spw_set_log(count, &errors, SPW_LOG_LEVEL_ERROR));
    configure_threads(2);
    large_step();
    CHECK(errors.messages == 0);
    CHECK_OK(spw_set_log(count, &off, SPW_LOG_LEVEL_OFF));
    configure_threads(3);
    large_step();
    CHECK(off.messages == 0);
    CHECK_OK(spw_set_log(count, &info, SPW_LOG_LEVEL_INFO));
    configure_threads(4);
    large_step();
    CHECK(info.messages > 0 && info.worst == SPW_LOG_LEVEL_INFO);
    // The message appears once: the next step adds none.
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
        CHECK_OK(spw_set_log(count, i % 2 ? &info : &errors, SPW_LOG_LEVEL_DEBUG));
        configure_threads(2 + (uint32_t)i % 2);
    }
    atomic_store(&stop, 1);
    CHECK(pthread_join(thread, NULL) == 0);
    CHECK_OK(spw_set_log(NULL, NULL, SPW_LOG_LEVEL_OFF));
    large_step();
    return 0;
}
