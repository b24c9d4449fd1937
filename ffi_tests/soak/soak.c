// Eight threads read and write packed extents of several files through shared and short-lived engines. The memory
// is a pool's, pinned or plain, at any address; the test compares every byte that it reads. Between rounds nothing
// is in flight, and the test counts memory, locked memory, descriptors and threads. After one third of the time
// these may not grow.
//
//     soak DIRECTORY SECONDS

#define _GNU_SOURCE
#include <dirent.h>
#include <fcntl.h>
#include <malloc.h>
#include <pthread.h>
#include <spillway.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define CHECK(condition)                                                                                      \
    do {                                                                                                      \
        if (!(condition)) {                                                                                   \
            fprintf(stderr, "line %d: %s; last error: %s\n", __LINE__, #condition, spw_last_error());         \
            exit(1);                                                                                          \
        }                                                                                                     \
    } while (0)

enum { THREADS = 8, FILES = 5, BATCH = 8, ROUND_BATCHES = 6, SETTLING_ROUNDS = 5, FOR_EVER = -1, ENGINES = 3, LARGEST = 3000001 };
// The heap size of eight threads varies; worker threads of the kernel and of the thread engine start and end.
enum { SLACK_KIB = 16 << 10, SLACK_THREADS = 16 };

static const uint64_t lengths[] = {1, 511, 4096, 5000, 65536, 100001, 1 << 20, (1 << 20) + 1, LARGEST};
enum { EXTENTS = sizeof lengths / sizeof *lengths };

struct extent {
    uint64_t offset, bytes, generation;
    bool busy;
};

struct operation {
    struct extent *extent;
    unsigned char *start, *memory;
    int kind, file;
    bool write;
    uint64_t from, bytes, seed, handle;
};

struct worker {
    pthread_t thread;
    int number;
    uint64_t random;
    struct extent extents[FILES][EXTENTS];
};

struct sample {
    long rss, locked, pinned, descriptors, threads;
};

static char paths[FILES][4096];
static spw_io *engines[ENGINES];
static struct worker workers[THREADS];
static pthread_barrier_t barrier;
static atomic_bool stopping;
static atomic_uint_least64_t read_bytes, written_bytes, operations;

static uint64_t mix(uint64_t x) {
    x += 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

static uint64_t draw(struct worker *worker, uint64_t below) {
    return mix(worker->random++) % below;
}

// Each byte of an extent depends on the extent's seed and on the position of the byte.
static void fill(unsigned char *to, uint64_t seed, uint64_t from, uint64_t bytes) {
    for (uint64_t n = 0; n < bytes;) {
        uint64_t word = mix(seed + (from + n) / 8), in = (from + n) % 8;
        uint64_t count = 8 - in < bytes - n ? 8 - in : bytes - n;
        memcpy(to + n, (unsigned char *)&word + in, count);
        n += count;
    }
}

static void compare(const struct operation *op) {
    unsigned char expected[4096];
    for (uint64_t n = 0; n < op->bytes;) {
        uint64_t count = op->bytes - n < sizeof expected ? op->bytes - n : sizeof expected;
        fill(expected, op->seed, op->from + n, count);
        if (memcmp(op->memory + n, expected, count) != 0) {
            fprintf(stderr, "wrong bytes in %s at %llu\n", paths[op->file], (unsigned long long)(op->extent->offset + n));
            exit(1);
        }
        n += count;
    }
}

static uint64_t seed_of(const struct worker *worker, int file, const struct extent *extent) {
    return mix(((uint64_t)worker->number << 48) ^ ((uint64_t)file << 40) ^ (extent->offset << 8)) ^ mix(extent->generation);
}

// Takes pinned memory of its own mapping, pinned memory that shares one, or plain memory, at any address.
static void take_memory(struct worker *worker, struct operation *op) {
    uint64_t shift = draw(worker, 2) ? 0 : draw(worker, 5000);
    void *start = NULL;
    op->kind = (int)draw(worker, 3);
    const spw_pinned_options own = {.struct_size = sizeof own, .flags = SPW_PINNED_FLAG_NO_LOCK};
    if (op->kind == 0) CHECK(spw_pinned_alloc(&own, LARGEST + 5000, &start) == SPW_OK);
    if (op->kind == 1) CHECK(spw_pinned_alloc(NULL, LARGEST + 5000, &start) == SPW_OK);
    if (op->kind == 2) CHECK((start = malloc(LARGEST + 5000)) != NULL);
    op->start = start;
    op->memory = op->start + shift;
}

static void give_memory(struct operation *op) {
    if (op->kind != 2) CHECK(spw_pinned_free(op->start) == SPW_OK);
    if (op->kind == 2) free(op->start);
}

static void begin(struct worker *worker, spw_io *io, struct operation *op) {
    do {
        op->file = (int)draw(worker, FILES);
        op->extent = &worker->extents[op->file][draw(worker, EXTENTS)];
    } while (op->extent->busy);
    op->extent->busy = true;
    op->write = op->extent->generation == 0 || draw(worker, 2);
    op->from = op->write ? 0 : draw(worker, op->extent->bytes);
    op->bytes = op->write ? op->extent->bytes : 1 + draw(worker, op->extent->bytes - op->from);
    op->extent->generation += op->write;
    op->seed = seed_of(worker, op->file, op->extent);
    take_memory(worker, op);
    if (op->write) fill(op->memory, op->seed, 0, op->bytes);
    spw_io_request request = {.struct_size = sizeof request, .fd = -1, .path = paths[op->file]};
    request.offset = op->extent->offset + op->from;
    request.buffer = op->memory;
    request.bytes = op->bytes;
    request.deadline_ms = draw(worker, 4) ? 0 : 600000;
    CHECK((op->write ? spw_io_write : spw_io_read)(io, &request, &op->handle) == SPW_OK);
}

static void end(spw_io *io, struct operation *op) {
    uint64_t moved = 0;
    spw_status status = spw_io_wait(io, &op->handle, 1, FOR_EVER, &moved);
    CHECK(status == SPW_OK && moved == op->bytes);
    if (!op->write) compare(op);
    atomic_fetch_add(op->write ? &written_bytes : &read_bytes, moved);
    atomic_fetch_add(&operations, 1);
    op->extent->busy = false;
    give_memory(op);
}

static void batch(struct worker *worker) {
    spw_io *own = NULL, *io = engines[draw(worker, ENGINES)];
    if (draw(worker, 20) == 0) {
        CHECK(spw_io_open(NULL, &own) == SPW_OK);
        io = own;
    }
    struct operation ops[BATCH];
    int count = 1 + (int)draw(worker, BATCH);
    for (int n = 0; n < count; n++) begin(worker, io, &ops[n]);
    int first = (int)draw(worker, (uint64_t)count);
    for (int n = 0; n < count; n++) end(io, &ops[(first + n) % count]);
    if (own) CHECK(spw_io_close(own, FOR_EVER) == SPW_OK);
}

static void *work(void *argument) {
    struct worker *worker = argument;
    for (;;) {
        pthread_barrier_wait(&barrier); // All other threads are idle too: the main thread counts.
        pthread_barrier_wait(&barrier);
        if (atomic_load(&stopping)) return NULL;
        for (int n = 0; n < ROUND_BATCHES; n++) batch(worker);
    }
}

static long entries(const char *path) {
    DIR *directory = opendir(path);
    CHECK(directory != NULL);
    long count = -3; // Leaves out ".", ".." and the descriptor of this directory.
    while (readdir(directory)) count++;
    closedir(directory);
    return count;
}

static struct sample sample(void) {
    struct sample found = {.descriptors = entries("/proc/self/fd"), .threads = entries("/proc/self/task") + 1};
    char line[256];
    malloc_trim(0);
    FILE *status = fopen("/proc/self/status", "r");
    CHECK(status != NULL);
    while (fgets(line, sizeof line, status)) {
        sscanf(line, "VmRSS: %ld", &found.rss);
        sscanf(line, "VmLck: %ld", &found.locked);
        sscanf(line, "VmPin: %ld", &found.pinned);
    }
    fclose(status);
    return found;
}

static void print(const char *when, struct sample s) {
    printf("%-12s RSS %7ld KiB  locked %7ld KiB  pinned %7ld KiB  %3ld descriptors  %3ld threads\n", when, s.rss, s.locked,
           s.pinned, s.descriptors, s.threads);
}

static struct sample most(struct sample a, struct sample b) {
    if (b.rss > a.rss) a.rss = b.rss;
    if (b.locked > a.locked) a.locked = b.locked;
    if (b.pinned > a.pinned) a.pinned = b.pinned;
    if (b.descriptors > a.descriptors) a.descriptors = b.descriptors;
    if (b.threads > a.threads) a.threads = b.threads;
    return a;
}

static void set_up(const char *directory) {
    uint64_t offset[FILES] = {0};
    for (int file = 0; file < FILES; file++) {
        snprintf(paths[file], sizeof paths[file], "%s/soak-%d", directory, file);
        unlink(paths[file]);
    }
    for (int t = 0; t < THREADS; t++) {
        workers[t].number = t;
        workers[t].random = (uint64_t)t << 32;
        for (int file = 0; file < FILES; file++) {
            for (int e = 0; e < EXTENTS; e++) {
                workers[t].extents[file][e] = (struct extent){.offset = offset[file], .bytes = lengths[e]};
                offset[file] += lengths[e];
            }
        }
    }
    const spw_io_options options[ENGINES] = {
        {.struct_size = sizeof *options},
        {.struct_size = sizeof *options, .backend = SPW_IO_BACKEND_THREADS, .block_bytes = 256 << 10},
        {.struct_size = sizeof *options, .flags = SPW_IO_FLAG_NO_DIRECT, .queue_depth = 7},
    };
    for (int n = 0; n < ENGINES; n++) CHECK(spw_io_open(&options[n], &engines[n]) == SPW_OK);
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

int main(int count, char **arguments) {
    if (count != 3) {
        fprintf(stderr, "usage: soak DIRECTORY SECONDS\n");
        return 2;
    }
    mallopt(M_MMAP_THRESHOLD, 128 << 10); // A fixed threshold, so that freed memory returns to the system.
    void *large = NULL; // The threads of the library begin with it, and stay.
    CHECK(spw_pinned_alloc(NULL, 32 << 20, &large) == SPW_OK && spw_pinned_free(large) == SPW_OK);
    double seconds = atof(arguments[2]), start = now();
    struct sample before = sample(), settled = {0}, later = {0};
    set_up(arguments[1]);
    CHECK(pthread_barrier_init(&barrier, NULL, THREADS + 1) == 0);
    for (int t = 0; t < THREADS; t++) CHECK(pthread_create(&workers[t].thread, NULL, work, &workers[t]) == 0);
    bool again = true;
    for (long rounds = 0; again; rounds++) {
        pthread_barrier_wait(&barrier);
        struct sample here = sample();
        double passed = now() - start;
        // A short soak on a busy machine has few rounds.
        bool first_third = passed < seconds / 3 || rounds < SETTLING_ROUNDS;
        again = passed < seconds || rounds < 2 * SETTLING_ROUNDS;
        if (rounds > 0 && first_third) settled = most(settled, here);
        if (!first_third) later = here;
        atomic_store(&stopping, !again);
        pthread_barrier_wait(&barrier);
    }
    for (int t = 0; t < THREADS; t++) pthread_join(workers[t].thread, NULL);
    for (int n = 0; n < ENGINES; n++) CHECK(spw_io_close(engines[n], FOR_EVER) == SPW_OK);
    struct sample after = sample();
    for (int n = 0; n < 1000 && after.threads > before.threads; n++) { // Threads end on their own, a moment later.
        usleep(5000);
        after = sample();
    }
    for (int file = 0; file < FILES; file++) unlink(paths[file]);
    printf("%.0f s, %llu operations, %.1f GB read and compared, %.1f GB written\n", now() - start,
           (unsigned long long)operations, (double)read_bytes / 1e9, (double)written_bytes / 1e9);
    print("at start", before);
    print("first third", settled);
    print("last round", later);
    print("closed", after);
    CHECK(settled.rss > 0 && later.rss <= settled.rss + SLACK_KIB);
    CHECK(later.locked <= settled.locked && later.pinned <= settled.pinned);
    CHECK(later.descriptors <= settled.descriptors && later.threads <= settled.threads + SLACK_THREADS);
    CHECK(after.descriptors == before.descriptors && after.pinned == before.pinned && after.threads == before.threads);
    return 0;
}
