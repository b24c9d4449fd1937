// The bits of a step depend on its tensors alone. Neither the number of workers (1 to 8), nor the number of threads
// that step at once, nor a split of a parameter into several tensors changes them.

#include "check.h"

#include <dirent.h>
#include <pthread.h>

enum { CALLERS = 8, STEPS = 6 };
static struct problem serial[CALLERS];
static spw_step_stats serial_stats[CALLERS][STEPS];
static pthread_barrier_t barrier;

// Some of the callers' tensors are stepped on the caller's thread, others by the pool.
static uint64_t length(int caller) {
    return caller % 3 == 0 ? 5000 + (uint64_t)caller : LARGE + (uint64_t)caller;
}

static void train(struct problem *problem, spw_step_stats *stats) {
    spw_adam_options options = adam_options();
    for (int step = 0; step < STEPS; step++) {
        options.step = (uint64_t)step + 1;
        stats[step] = step_stats();
        CHECK_OK(spw_adam_step(&options, &problem->tensor, 1, &stats[step]));
    }
}

static void *caller(void *argument) {
    const int id = (int)(intptr_t)argument;
    for (int round = 0; round < rounds(3); round++) {
        struct problem mine = make_mixed(length(id), (uint64_t)id);
        spw_step_stats stats[STEPS];
        pthread_barrier_wait(&barrier);
        train(&mine, stats);
        CHECK(same(&mine, &serial[id]));
        CHECK(memcmp(stats, serial_stats[id], sizeof stats) == 0);
        release(&mine);
    }
    return NULL;
}

static void callers_at_once(void) {
    pthread_t threads[CALLERS];
    CHECK(pthread_barrier_init(&barrier, NULL, CALLERS) == 0);
    for (intptr_t i = 0; i < CALLERS; i++) CHECK(pthread_create(&threads[i], NULL, caller, (void *)i) == 0);
    for (int i = 0; i < CALLERS; i++) CHECK(pthread_join(threads[i], NULL) == 0);
}

static int threads_of_this_process(void) {
    DIR *tasks = opendir("/proc/self/task");
    if (tasks == NULL) return 1;
    int count = 0;
    for (const struct dirent *entry; (entry = readdir(tasks)) != NULL;) count += entry->d_name[0] != '.';
    closedir(tasks);
    return count;
}

// Work of at most one chunk starts no worker, although workers that are awake would share it.
static void middle_sizes_start_no_thread(int threads_at_start) {
    configure_threads(3);
    struct problem middle = make_mixed(50001, 9);
    spw_step_stats stats[STEPS];
    train(&middle, stats);
    CHECK(threads_of_this_process() == threads_at_start);
    release(&middle);
}

static void numbers_of_workers(void) {
    for (uint32_t workers = 1; workers <= 8; workers += 8 / (uint32_t)rounds(8)) {
        spw_info info = SPW_INFO_INIT;
        configure_threads(workers);
        CHECK_OK(spw_get_info(&info));
        CHECK(info.num_threads == workers);
        struct problem mine = make_mixed(length(1), 1);
        spw_step_stats stats[STEPS];
        train(&mine, stats);
        CHECK(same(&mine, &serial[1]) && memcmp(stats, serial_stats[1], sizeof stats) == 0);
        CHECK_OK(spw_get_info(&info));
        CHECK(info.num_threads == workers);
        release(&mine);
    }
}

// One tensor, split into up to 40 pieces of random length, some of them empty.
static void random_splits(void) {
    uint64_t random = 5;
    for (int round = 0; round < rounds(12); round++) {
        struct problem mine = make_mixed(length(1), 1);
        configure_threads(1 + (uint32_t)round % 3);
        spw_tensor pieces[40];
        size_t count = 0;
        for (uint64_t at = 0; at < mine.tensor.n; count++) {
            const uint64_t longest = count % 2 ? 100 : 60000;
            uint64_t n = count == 39 ? UINT64_MAX : random_bits(&random) % longest;
            if (n > mine.tensor.n - at) n = mine.tensor.n - at;
            spw_tensor piece = mine.tensor;
            piece.n = n;
            piece.param = (float *)mine.spans[0] + at;
            piece.grad = (uint16_t *)mine.spans[1] + at;
            piece.exp_avg = (float *)mine.spans[2] + at;
            piece.exp_avg_sq = (float *)mine.spans[3] + at;
            piece.param_copy = (uint16_t *)mine.spans[4] + at;
            pieces[count] = piece;
            at += n;
        }
        spw_adam_options options = adam_options();
        for (options.step = 1; options.step <= STEPS; options.step++) {
            CHECK_OK(spw_adam_step(&options, pieces, count, NULL));
        }
        CHECK(same(&mine, &serial[1]));
        release(&mine);
    }
}

int main(void) {
    const int threads_at_start = threads_of_this_process();
    configure_threads(1);
    for (int i = 0; i < CALLERS; i++) {
        serial[i] = make_mixed(length(i), (uint64_t)i);
        train(&serial[i], serial_stats[i]);
        struct problem start = make_mixed(length(i), (uint64_t)i);
        CHECK(!same(&serial[i], &start));
        release(&start);
    }
    // With one worker the caller's thread does the work: the library has created no thread so far.
    CHECK(threads_of_this_process() == threads_at_start);
    middle_sizes_start_no_thread(threads_at_start);
    numbers_of_workers();
    random_splits();
    configure_threads(3);
    callers_at_once();
    for (int i = 0; i < CALLERS; i++) release(&serial[i]);
    return 0;
}
