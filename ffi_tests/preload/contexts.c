// More contexts than the process may have descriptors, contexts of other callers of the kernel, and threads that end
// before their requests complete.
//
//     contexts pool FILE      creates 900 contexts under a limit of 300 descriptors, and reads on each beside 200 open files
//     contexts raw FILE       submits with libaio's functions on a context that a system call has made
//     contexts ending FILE    buffered reads of threads that end at once: all arrive, with all bytes

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <libaio.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#define CHECK(condition) \
  ((condition) ? (void)0 : (printf("line %d: %s, errno %d\n", __LINE__, #condition, errno), exit(1)))

enum { BLOCK = 4096, CONTEXTS = 900, DESCRIPTORS = 300, FILES = 200, THREADS = 64, READS = 48, BYTES = 16 * BLOCK };

static const char *path;

static char expected(long long at) { return (char)(at / BLOCK * 7 + 1); }

static int written_file(long long blocks) {
  int fd = open(path, O_RDWR | O_CREAT | O_TRUNC, 0600);
  CHECK(fd >= 0);
  static char block[BLOCK];
  for (long long i = 0; i < blocks; i++) {
    memset(block, expected(i * BLOCK), BLOCK);
    CHECK(write(fd, block, BLOCK) == BLOCK);
  }
  CHECK(fsync(fd) == 0);
  return fd;
}

static void read_on(io_context_t ctx, int fd, long long at) {
  static char bytes[BLOCK];
  struct iocb iocb, *list[1] = {&iocb};
  io_prep_pread(&iocb, fd, bytes, BLOCK, at);
  struct io_event event = {0};
  CHECK(io_submit(ctx, 1, list) == 1 && io_getevents(ctx, 1, 1, &event, NULL) == 1);
  CHECK(event.obj == &iocb && event.res == BLOCK && bytes[BLOCK - 1] == expected(at));
}

static void pool(void) {
  static io_context_t contexts[CONTEXTS];
  int fd = written_file(8), files[FILES];
  struct rlimit few = {DESCRIPTORS, DESCRIPTORS};
  CHECK(setrlimit(RLIMIT_NOFILE, &few) == 0);
  for (int i = 0; i < CONTEXTS; i++) CHECK(io_setup(4, &contexts[i]) == 0);
  for (int i = 0; i < FILES; i++) CHECK((files[i] = open(path, O_RDONLY)) >= 0);
  for (int i = 0; i < CONTEXTS; i++) read_on(contexts[i], i % 2 ? fd : files[i % FILES], i % 8 * BLOCK);
  for (int i = 0; i < CONTEXTS; i++) CHECK(io_destroy(contexts[i]) == 0 && io_destroy(contexts[i]) == -EINVAL);
}

static void raw(void) {
  int fd = written_file(8);
  io_context_t ctx = NULL, own = NULL;
  CHECK(io_setup(4, &own) == 0);
  CHECK(syscall(SYS_io_setup, 4, &ctx) == 0);
  read_on(ctx, fd, BLOCK);
  read_on(own, fd, 2 * BLOCK);
  struct iocb iocb, *list[1] = {&iocb};
  io_prep_pread(&iocb, 9999, NULL, BLOCK, 0);
  CHECK(io_submit(ctx, 1, list) == -EBADF && io_submit(own, 1, list) == -EBADF);
  CHECK(io_submit((io_context_t)8, 1, list) == -EINVAL);
  CHECK(io_destroy(ctx) == 0 && io_destroy(ctx) == -EINVAL && io_destroy(own) == 0);
}

static io_context_t shared;
static int shared_fd;
static struct iocb iocbs[THREADS * READS];
static char *memory;

static void *submits_and_ends(void *argument) {
  long first = (long)argument * READS;
  for (long i = first; i < first + READS; i++) {
    struct iocb *list[1] = {&iocbs[i]};
    io_prep_pread(&iocbs[i], shared_fd, memory + i * BYTES, BYTES, i * BYTES);
    // With a priority, a buffered request of the kernel's too may complete after io_submit.
    iocbs[i].aio_reqprio = 2 << 13 | 4;
    iocbs[i].u.c.flags |= 1 << 1;
    CHECK(io_submit(shared, 1, list) == 1);
  }
  return NULL;
}

static void ending(void) {
  const long total = THREADS * READS;
  shared_fd = written_file(total * BYTES / BLOCK);
  CHECK(io_setup((int)total, &shared) == 0);
  CHECK(posix_memalign((void **)&memory, BLOCK, total * BYTES) == 0);
  CHECK(posix_fadvise(shared_fd, 0, 0, POSIX_FADV_DONTNEED) == 0);
  pthread_t threads[THREADS];
  for (long i = 0; i < THREADS; i++) CHECK(pthread_create(&threads[i], NULL, submits_and_ends, (void *)i) == 0);
  for (long i = 0; i < THREADS; i++) CHECK(pthread_join(threads[i], NULL) == 0);
  long failed = 0;
  for (long fetched = 0; fetched < total;) {
    struct io_event events[64];
    long got = io_getevents(shared, 1, 64, events, NULL);
    CHECK(got > 0);
    for (long i = 0; i < got; i++) failed += events[i].res != BYTES;
    fetched += got;
  }
  if (failed > 0) printf("%ld of %ld reads failed\n", failed, total);
  CHECK(failed == 0);
  for (long at = 0; at < total * BYTES; at += BLOCK) CHECK(memory[at] == expected(at));
}

int main(int count, char **arguments) {
  if (count < 3) return 2;
  alarm(60);
  path = arguments[2];
  if (strcmp(arguments[1], "pool") == 0) pool();
  else if (strcmp(arguments[1], "raw") == 0) raw();
  else ending();
  return unlink(path) != 0;
}
