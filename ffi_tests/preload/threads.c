// Several threads submit on one context while several others fetch: every event arrives once, and
// the bytes are correct.
//
//     threads FILE             exits 0 if no event was lost, duplicated or wrong
//     threads FILE leave       fails one write, leaves it and another unfetched, and exits

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <libaio.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { BLOCK = 4096, SUBMITTERS = 4, FETCHERS = 3, ROUNDS = 400, BATCH = 8, TOTAL = SUBMITTERS * ROUNDS * BATCH };

static io_context_t ctx;
static int fd;
static atomic_int fetched, wrong;
static struct iocb iocbs[TOTAL];
static atomic_uchar seen[TOTAL];

static void *submitter(void *argument) {
  int first = (int)(long)argument * ROUNDS * BATCH;
  char *block;
  if (posix_memalign((void **)&block, BLOCK, ROUNDS * BATCH * BLOCK) != 0) abort();
  for (int round = 0; round < ROUNDS; round++) {
    struct iocb *list[BATCH];
    for (int i = 0; i < BATCH; i++) {
      int number = first + round * BATCH + i;
      char *bytes = block + (round * BATCH + i) * BLOCK;
      memset(bytes, number % 251, BLOCK);
      io_prep_pwrite(&iocbs[number], fd, bytes, BLOCK, (long long)number * BLOCK);
      list[i] = &iocbs[number];
    }
    for (int done = 0; done < BATCH;) {
      int result = io_submit(ctx, BATCH - done, list + done);
      if (result > 0) done += result;
      else if (result != -EAGAIN) { printf("io_submit: %d\n", result); abort(); }
      else usleep(200);
    }
  }
  return NULL;  // The blocks stay: events may still be pending
}

static void *fetcher(void *argument) {
  int min = (int)(long)argument % 4;
  struct io_event events[16];
  struct timespec patience = {0, 20000000};
  while (fetched < TOTAL) {
    int got = io_getevents(ctx, min, 1 + 5 * min, events, min ? &patience : NULL);
    if (got < 0) { printf("io_getevents: %d\n", got); abort(); }
    for (int i = 0; i < got; i++) {
      long number = events[i].obj - iocbs;
      wrong += events[i].res != BLOCK || atomic_fetch_add(&seen[number], 1) != 0;
    }
    fetched += got;
    if (min == 0) usleep(100);
  }
  return NULL;
}

static int leave(void) {
  static char bytes[BLOCK];
  struct iocb good, bad, *list[2] = {&good, &bad};
  io_prep_pwrite(&good, fd, bytes, BLOCK, 0);
  io_prep_pwrite(&bad, fd, NULL, BLOCK, 3 * BLOCK);
  return io_submit(ctx, 2, list) != 2;
}

int main(int count, char **arguments) {
  if (count < 2) return 2;
  alarm(60);
  int direct = count == 2 ? O_DIRECT : 0;
  fd = open(arguments[1], O_RDWR | O_CREAT | O_TRUNC | direct, 0600);
  if (fd < 0 || io_setup(64, &ctx) != 0) return 1;
  if (count > 2) return leave();
  pthread_t threads[SUBMITTERS + FETCHERS];
  for (long i = 0; i < SUBMITTERS; i++) pthread_create(&threads[i], NULL, submitter, (void *)i);
  for (long i = 0; i < FETCHERS; i++) pthread_create(&threads[SUBMITTERS + i], NULL, fetcher, (void *)i);
  for (int i = 0; i < SUBMITTERS + FETCHERS; i++) pthread_join(threads[i], NULL);
  char *block;
  if (posix_memalign((void **)&block, BLOCK, BLOCK) != 0) return 1;
  for (int number = 0; number < TOTAL; number++) {
    wrong += pread(fd, block, BLOCK, (off_t)number * BLOCK) != BLOCK || block[BLOCK / 2] != (char)(number % 251);
  }
  printf("events %d of %d, wrong %d\n", fetched, TOTAL, wrong);
  return fetched != TOTAL || wrong != 0 || io_destroy(ctx) != 0;
}
