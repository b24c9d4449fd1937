// This library, preloaded under both ops, makes one of many requests fail. For Spillway's threads the request is a call
// of pread or pwrite; for DeepSpeed's op it is a completion of libaio. Before fault_arm() the library changes nothing.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>
#include <time.h>

struct io_event {
    void *data;
    void *obj;
    int64_t res;
    int64_t res2;
};

enum { SHORT = -1 };

static atomic_long left; // Requests until the fault, which happens when this becomes 0.
static atomic_int fault; // An errno, or SHORT for half of the bytes.
static atomic_int no_contexts;

void fault_arm(long nth, int number) {
    atomic_store(&fault, number);
    atomic_store(&left, nth);
}

// True after the fault has happened.
int fault_struck(void) { return atomic_load(&left) <= 0; }

void fault_no_contexts(void) { atomic_store(&no_contexts, 1); }

static int strikes(void) { return atomic_load(&left) > 0 && atomic_fetch_sub(&left, 1) == 1; }

static void *next(const char *name) { return dlsym(RTLD_NEXT, name); }

ssize_t pread(int fd, void *buffer, size_t bytes, off_t offset) {
    static ssize_t (*real)(int, void *, size_t, off_t);
    real = real ? real : next("pread");
    if (!strikes()) {
        return real(fd, buffer, bytes, offset);
    }
    if (fault == SHORT) {
        return real(fd, buffer, bytes / 2, offset);
    }
    errno = fault;
    return -1;
}

ssize_t pwrite(int fd, const void *buffer, size_t bytes, off_t offset) {
    static ssize_t (*real)(int, const void *, size_t, off_t);
    real = real ? real : next("pwrite");
    if (!strikes()) {
        return real(fd, buffer, bytes, offset);
    }
    if (fault == SHORT) {
        return real(fd, buffer, bytes / 2, offset);
    }
    errno = fault;
    return -1;
}

ssize_t pread64(int fd, void *buffer, size_t bytes, off_t offset) { return pread(fd, buffer, bytes, offset); }
ssize_t pwrite64(int fd, const void *buffer, size_t bytes, off_t offset) { return pwrite(fd, buffer, bytes, offset); }

// Looks the symbol up in libaio itself, which is loaded with DeepSpeed's op and is not in the global scope.
static void *of_libaio(const char *name, const char *version) {
    void *library = dlopen("libaio.so.1", RTLD_NOW);
    return library ? dlvsym(library, name, version) : NULL;
}

int io_pgetevents(void *context, long least, long most, struct io_event *events, struct timespec *timeout, void *mask) {
    static int (*real)(void *, long, long, struct io_event *, struct timespec *, void *);
    real = real ? real : of_libaio("io_pgetevents", "LIBAIO_0.5");
    int count = real(context, least, most, events, timeout, mask);
    for (int n = 0; n < count; n++) {
        if (strikes()) {
            events[n].res = fault == SHORT ? events[n].res / 2 : -fault;
        }
    }
    return count;
}

// The same error as when fs.aio-max-nr is used up.
int io_queue_init(int entries, void **context) {
    static int (*real)(int, void **);
    if (atomic_load(&no_contexts)) {
        return -EAGAIN;
    }
    real = real ? real : of_libaio("io_queue_init", "LIBAIO_0.1");
    return real(entries, context);
}
