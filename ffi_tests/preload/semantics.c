// Prints the results of libaio's functions for a table of cases. The outputs with and without the
// preload must be equal.
//
//     semantics FILE        FILE lies on a file system with O_DIRECT
//
// The program prints a line only if libaio defines the result; timing is printed as "early" or "late".

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <libaio.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { BLOCK = 4096, MANY = 64 };

int io_queue_wait(io_context_t ctx, struct timespec *timeout);  // exported, but not in <libaio.h>

static const char *path;
static char *buffer;  // MANY blocks, aligned

static void say(const char *name, long value) { printf("%-44s %ld\n", name, value); }

static io_context_t context(int events) {
  io_context_t ctx = NULL;
  if (io_setup(events, &ctx) != 0) { printf("io_setup failed\n"); exit(1); }
  return ctx;
}

static int file(int flags) {
  int fd = open(path, flags | O_CREAT, 0600);
  if (fd < 0) { perror(path); exit(1); }
  return fd;
}

static double seconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

static long submit(io_context_t ctx, struct iocb *iocb) { return io_submit(ctx, 1, &iocb); }

// Submits one request and waits for its event: the submission's error, or the event's result.
static long one(io_context_t ctx, struct iocb *iocb) {
  struct io_event event = {0};
  iocb->data = &event;
  long accepted = submit(ctx, iocb);
  if (accepted != 1) return accepted * 1000;
  if (io_getevents(ctx, 1, 1, &event, NULL) != 1) return -99999;
  if (event.obj != iocb || event.data != &event || event.res2 != 0) return -88888;
  return (long)event.res;
}

static void setup_cases(void) {
  io_context_t ctx = (io_context_t)8, kept = NULL;
  say("setup: context not zero", io_setup(4, &ctx));
  ctx = NULL;
  say("setup: no events", io_setup(0, &ctx));
  say("setup: negative", io_setup(-1, &ctx));
  say("setup: null", io_setup(4, NULL));
  say("queue_init: zero", io_queue_init(0, &ctx));
  ctx = (io_context_t)8;
  say("queue_init: clears", io_queue_init(4, &ctx));
  kept = ctx;
  say("queue_release", io_queue_release(ctx));
  say("destroy twice", io_destroy(kept));
  say("destroy null", io_destroy(NULL));
  struct iocb *none = NULL;
  struct io_event event;
  say("submit: destroyed context", io_submit(kept, 1, &none));
  say("getevents: null context", io_getevents(NULL, 0, 1, &event, NULL));
}

static void submit_cases(void) {
  io_context_t ctx = context(8);
  int fd = file(O_RDWR), read_only = open(path, O_RDONLY), write_only = open(path, O_WRONLY), dir = open("/", O_RDONLY);
  struct iocb good, bad, last, *list[3] = {&good, &bad, &last};
  struct io_event events[4];
  io_prep_pwrite(&good, fd, buffer, BLOCK, 0);
  io_prep_pwrite(&last, fd, buffer, BLOCK, BLOCK);
  say("submit: none", io_submit(ctx, 0, list));
  say("submit: negative", io_submit(ctx, -1, list));
  say("submit: null list", io_submit(ctx, 1, NULL));
  struct iocb *hole[1] = {NULL}, *wild[1] = {(struct iocb *)16};
  say("submit: null request", io_submit(ctx, 1, hole));
  say("submit: wild request", io_submit(ctx, 1, wild));
  io_prep_pwrite(&bad, -1, buffer, BLOCK, 0);
  say("submit: first bad", submit(ctx, &bad));
  say("submit: second bad", io_submit(ctx, 3, list));
  say("submit: its events", io_getevents(ctx, 1, 4, events, NULL));
  io_prep_pread(&bad, write_only, buffer, BLOCK, 0);
  say("submit: read of write-only", one(ctx, &bad));
  io_prep_pwrite(&bad, read_only, buffer, BLOCK, 0);
  say("submit: write of read-only", one(ctx, &bad));
  io_prep_pread(&bad, dir, buffer, BLOCK, 0);
  say("submit: read of directory", one(ctx, &bad));
  io_prep_pread(&bad, fd, buffer, BLOCK, -1);
  say("submit: negative offset", one(ctx, &bad));
  io_prep_pread(&bad, fd, buffer, BLOCK, INT64_MAX - 10);
  say("submit: offset overflows", one(ctx, &bad));
  io_prep_pread(&bad, fd, buffer, (size_t)-5, 0);
  say("submit: negative length", one(ctx, &bad));
  io_prep_pread(&bad, fd, (void *)-4096L, BLOCK, 0);
  say("submit: kernel address", one(ctx, &bad));
  io_prep_pread(&bad, fd, NULL, BLOCK, 0);
  say("event: null buffer", one(ctx, &bad));
  io_prep_pread(&bad, fd, buffer, 0, 0);
  say("event: zero bytes", one(ctx, &bad));
  io_prep_pread(&bad, fd, buffer, BLOCK, 1 << 30);
  say("event: past the end", one(ctx, &bad));
  io_prep_pread(&bad, fd, buffer, BLOCK, BLOCK + 100);
  say("event: short", one(ctx, &bad));
  io_prep_pread(&bad, fd, buffer, BLOCK, 0);
  bad.aio_lio_opcode = IO_CMD_NOOP;
  say("submit: noop", one(ctx, &bad));
  bad.aio_lio_opcode = 99;
  say("submit: unknown command", one(ctx, &bad));
  io_prep_pread(&bad, fd, buffer, BLOCK, 0);
  bad.u.c.__pad3 = 1;
  say("submit: reserved field", one(ctx, &bad));
  io_prep_pread(&bad, fd, buffer, BLOCK, 0);
  bad.aio_rw_flags = 1 << 30;
  say("submit: unknown rw flag", one(ctx, &bad));
  io_prep_pwrite(&bad, fd, buffer, BLOCK, 0);
  bad.aio_rw_flags = RWF_DSYNC;
  say("event: RWF_DSYNC", one(ctx, &bad));
  bad.aio_rw_flags = RWF_HIPRI;
  say("event: RWF_HIPRI", one(ctx, &bad));
  bad.aio_rw_flags = RWF_APPEND;
  say("event: RWF_APPEND", one(ctx, &bad));
  say("event: it appended", lseek(fd, 0, SEEK_END));
  int direct = file(O_RDWR | O_DIRECT);
  io_prep_pread(&bad, direct, buffer, BLOCK, 0);
  say("event: direct read", one(ctx, &bad));
  io_prep_pread(&bad, direct, buffer + 1, BLOCK, 0);
  say("event: direct, unaligned buffer", one(ctx, &bad));
  io_prep_pwrite(&bad, direct, buffer, 100, 0);
  say("event: direct, unaligned length", one(ctx, &bad));
  struct rlimit saved, small = {BLOCK, RLIM_INFINITY};
  getrlimit(RLIMIT_FSIZE, &saved);
  signal(SIGXFSZ, SIG_IGN);
  setrlimit(RLIMIT_FSIZE, &small);
  io_prep_pwrite(&bad, fd, buffer, BLOCK, 2 * BLOCK);
  say("event: file size limit", one(ctx, &bad));
  io_prep_pwrite(&bad, fd, buffer, 2 * BLOCK, 0);
  say("event: up to the limit", one(ctx, &bad));
  setrlimit(RLIMIT_FSIZE, &saved);
  say("destroy", io_destroy(ctx));
  close(fd), close(read_only), close(write_only), close(dir), close(direct);
}

static void vector_and_sync_cases(void) {
  io_context_t ctx = context(8);
  int fd = file(O_RDWR | O_TRUNC);
  struct iocb iocb;
  struct iovec vector[2] = {{buffer, 100}, {buffer + BLOCK, 200}};
  memset(buffer, 7, 2 * BLOCK);
  io_prep_pwritev(&iocb, fd, vector, 2, 50);
  say("vector: write", one(ctx, &iocb));
  memset(buffer, 0, 2 * BLOCK);
  io_prep_preadv(&iocb, fd, vector, 2, 50);
  say("vector: read", one(ctx, &iocb));
  say("vector: bytes", buffer[99] + buffer[BLOCK] + buffer[BLOCK + 199] + buffer[BLOCK + 200]);
  io_prep_preadv(&iocb, fd, vector, 0, 0);
  say("vector: none", one(ctx, &iocb));
  io_prep_preadv(&iocb, fd, vector, 1025, 0);
  say("vector: too many", one(ctx, &iocb));
  io_prep_preadv(&iocb, fd, NULL, 1, 0);
  say("vector: null", one(ctx, &iocb));
  vector[1].iov_len = (size_t)-1;
  io_prep_preadv(&iocb, fd, vector, 2, 0);
  say("vector: negative length", one(ctx, &iocb));
  io_prep_fsync(&iocb, fd);
  say("fsync", one(ctx, &iocb));
  io_prep_fdsync(&iocb, fd);
  say("fdsync", one(ctx, &iocb));
  iocb.u.c.nbytes = 1;
  say("fdsync with bytes", one(ctx, &iocb));
  int ends[2];
  if (pipe(ends) != 0) exit(1);
  io_prep_fsync(&iocb, ends[0]);
  say("fsync of a pipe", one(ctx, &iocb));
  io_prep_fsync(&iocb, -1);
  say("fsync of nothing", one(ctx, &iocb));
  io_prep_poll(&iocb, ends[1], POLLOUT);
  say("poll: ready", one(ctx, &iocb));
  io_prep_poll(&iocb, fd, POLLIN);
  say("poll: of a file", one(ctx, &iocb));
  io_prep_poll(&iocb, ends[0], POLLIN);
  say("poll: submitted", submit(ctx, &iocb));
  struct io_event event;
  struct timespec now = {0, 0};
  say("poll: not yet", io_getevents(ctx, 1, 1, &event, &now));
  if (write(ends[1], "x", 1) != 1) exit(1);
  say("poll: event", io_getevents(ctx, 1, 1, &event, NULL));
  say("poll: mask", (long)event.res & POLLIN);  // Linux's aio may add bits that were not requested
  if (read(ends[0], buffer, 1) != 1) exit(1);
  say("cancel: submitted", submit(ctx, &iocb));
  say("cancel: poll", io_cancel(ctx, &iocb, &event));
  say("cancel: event", io_getevents(ctx, 1, 1, &event, NULL));
  say("cancel: result", (long)event.res);
  say("cancel: nothing", io_cancel(ctx, &iocb, &event));
  say("cancel: null", io_cancel(ctx, NULL, &event));
  say("poll: left behind", submit(ctx, &iocb));
  say("destroy with a poll", io_destroy(ctx));
  close(fd), close(ends[0]), close(ends[1]);
}

static void wait_cases(void) {
  io_context_t ctx = context(MANY);
  int fd = file(O_RDWR), told = eventfd(0, EFD_SEMAPHORE);
  struct iocb iocbs[8], *list[8];
  struct io_event events[8];
  struct timespec none = {0, 0}, tenth = {0, 100000000};
  say("wait: zero timeout", io_getevents(ctx, 1, 8, events, &none));
  say("wait: min above nr", io_getevents(ctx, 2, 1, events, &tenth));
  say("wait: min above nr, no wait", io_getevents(ctx, 2, 1, events, &none));
  say("wait: negative min", io_getevents(ctx, -1, 1, events, NULL));
  say("wait: for nothing", io_getevents(ctx, 0, 8, events, NULL));
  say("wait: no room", io_getevents(ctx, 0, 0, NULL, NULL));
  double start = seconds();
  say("wait: times out", io_getevents(ctx, 1, 8, events, &tenth));
  double took = seconds() - start;
  say("wait: after the time", took > 0.09 && took < 20);
  for (int i = 0; i < 8; i++) {
    io_prep_pwrite(&iocbs[i], fd, buffer, BLOCK, (long long)i * BLOCK);
    io_set_eventfd(&iocbs[i], told);
    list[i] = &iocbs[i];
  }
  say("wait: submit 8", io_submit(ctx, 8, list));
  say("wait: 3 of 8", io_getevents(ctx, 3, 3, events, NULL));
  say("wait: wild events", io_getevents(ctx, 1, 1, (struct io_event *)16, NULL));
  // All writes have ended before the wait that times out.
  uint64_t ended = 0;
  for (int i = 0; i < 8 && read(told, &ended, sizeof ended) == sizeof ended; i++) continue;
  start = seconds();
  say("wait: fewer than min", io_getevents(ctx, 8, 8, events, &tenth));
  say("wait: only at the timeout", seconds() - start > 0.09);
  say("wait: empty again", io_pgetevents(ctx, 0, 8, events, &none, NULL));
  say("queue_wait", io_queue_wait(ctx, &none));
  say("destroy", io_destroy(ctx));
  close(fd), close(told);
}

static void full_cases(void) {
  enum { ASKED = 16, MOST = 100000 };
  io_context_t ctx = context(ASKED);
  int fd = file(O_RDWR);
  static struct iocb iocb;
  static struct io_event events[1024];
  long accepted = 0, result = 1;
  io_prep_pread(&iocb, fd, buffer, 512, 0);
  while (accepted < MOST && (result = submit(ctx, &iocb)) == 1) accepted++;
  say("full: EAGAIN", result);
  say("full: at least what was asked", accepted >= ASKED);
  long fetched = 0;
  struct timespec none = {0, 0}, minute = {60, 0};
  for (long got = 1; got > 0 && fetched < accepted; fetched += got) got = io_getevents(ctx, 1, 1024, events, &minute);
  fetched += io_getevents(ctx, 0, 1024, events, &none);
  say("full: all events come", fetched == accepted);
  say("full: room again", one(ctx, &iocb));
  say("destroy", io_destroy(ctx));
  close(fd);
}

static long called;
static void count_call(io_context_t ctx, struct iocb *iocb, long res, long res2) {
  called += ctx != NULL && iocb != NULL && res == BLOCK && res2 == 0;
}

static void eventfd_cases(void) {
  io_context_t ctx = context(MANY);
  int fd = file(O_RDWR), bell = eventfd(0, 0), quick = eventfd(0, EFD_NONBLOCK);
  struct iocb iocbs[8], *list[8];
  struct io_event events[8];
  for (int i = 0; i < 8; i++) {
    io_prep_pwrite(&iocbs[i], fd, buffer, BLOCK, (long long)i * BLOCK);
    if (i != 3) io_set_eventfd(&iocbs[i], i % 2 ? bell : quick);
    list[i] = &iocbs[i];
  }
  iocbs[5].aio_fildes = fd, iocbs[5].u.c.buf = NULL;  // a failure rings too
  say("eventfd: submit", io_submit(ctx, 8, list));
  for (int turn = 0; turn < 2; turn++) {
    uint64_t rung = 0, sum = 0;
    for (int wanted = turn ? 4 : 3; sum < (uint64_t)wanted; sum += rung) {
      struct pollfd ready = {turn ? quick : bell, POLLIN, 0};
      if (poll(&ready, 1, 5000) != 1 || read(ready.fd, &rung, sizeof rung) != sizeof rung) break;
    }
    say("eventfd: rung", (long)sum);
  }
  struct timespec second = {1, 0};
  say("eventfd: events", io_getevents(ctx, 8, 8, events, &second));
  struct iocb bad;
  io_prep_pwrite(&bad, fd, buffer, BLOCK, 0);
  io_set_eventfd(&bad, fd);
  say("eventfd: not one", one(ctx, &bad));
  io_set_eventfd(&bad, 9999);
  say("eventfd: closed", one(ctx, &bad));
  for (int i = 0; i < 4; i++) {
    io_prep_pwrite(&iocbs[i], fd, buffer, BLOCK, 0);
    io_set_callback(&iocbs[i], count_call);
  }
  say("queue_run: submit", io_submit(ctx, 4, list));
  for (int i = 0; i < 1000 && called < 4; i++) {
    if (io_queue_run(ctx) < 0) break;
    usleep(1000);
  }
  say("queue_run: called", called);
  say("destroy", io_destroy(ctx));
  close(fd), close(bell), close(quick);
}

static volatile sig_atomic_t signals;
static void on_signal(int number) { signals += number == SIGUSR1; }

struct waiter { io_context_t ctx; long result; sigset_t *mask; };
static long result_of(struct waiter *waiter) { return __atomic_load_n(&waiter->result, __ATOMIC_RELAXED); }
static void *wait_one(void *argument) {
  struct waiter *waiter = argument;
  struct io_event event;
  long result = io_pgetevents(waiter->ctx, 1, 1, &event, NULL, waiter->mask);
  __atomic_store_n(&waiter->result, result, __ATOMIC_RELAXED);
  return NULL;
}

static void signal_cases(void) {
  struct sigaction action = {.sa_handler = on_signal};
  sigaction(SIGUSR1, &action, NULL);
  io_context_t ctx = context(4);
  struct io_event event;
  pthread_t thread;
  struct waiter waiter = {ctx, 0, NULL};
  pthread_create(&thread, NULL, wait_one, &waiter);
  // A signal before the wait interrupts nothing.
  for (usleep(100000); result_of(&waiter) == 0; usleep(50000)) pthread_kill(thread, SIGUSR1);
  pthread_join(thread, NULL);
  say("signal: interrupts", waiter.result);
  sigset_t blocked, open;
  sigemptyset(&open);
  sigemptyset(&blocked);
  sigaddset(&blocked, SIGUSR1);
  pthread_sigmask(SIG_BLOCK, &blocked, NULL);
  signals = 0;
  raise(SIGUSR1);
  say("signal: pending, blocked", signals);
  say("signal: let in by the mask", io_pgetevents(ctx, 1, 1, &event, NULL, &open));
  say("signal: handled", signals);
  sigset_t now;
  pthread_sigmask(SIG_BLOCK, NULL, &now);
  say("signal: mask is back", sigismember(&now, SIGUSR1));
  say("signal: wild mask", io_pgetevents(ctx, 0, 1, &event, NULL, (sigset_t *)16));
  say("destroy", io_destroy(ctx));
}

static void *submit_and_exit(void *argument) {
  struct waiter *waiter = argument;
  static struct iocb iocbs[MANY], *list[MANY];
  int fd = file(O_RDWR | O_DIRECT | O_TRUNC);
  for (int i = 0; i < MANY; i++) {
    // Writes into holes, so that the kernel queues the requests to a worker.
    io_prep_pwrite(&iocbs[i], fd, buffer + i * BLOCK, BLOCK, (long long)i * 64 * BLOCK);
    list[i] = &iocbs[i];
  }
  waiter->result = io_submit(waiter->ctx, MANY, list);
  return NULL;
}

static void thread_cases(void) {
  io_context_t ctx = context(MANY);
  struct waiter waiters[4], submitter = {ctx, 0, NULL};
  pthread_t threads[4], thread;
  struct io_event events[MANY];
  struct timespec minute = {60, 0};
  pthread_create(&thread, NULL, submit_and_exit, &submitter);
  pthread_join(thread, NULL);
  say("threads: submitted by one that exits", submitter.result);
  say("threads: events", io_getevents(ctx, MANY, MANY, events, &minute));
  long failed = 0;
  for (int i = 0; i < MANY; i++) failed += events[i].res != BLOCK;
  say("threads: failed", failed);
  int ends[2];
  if (pipe(ends) != 0) exit(1);
  for (int i = 0; i < 4; i++) {
    waiters[i] = (struct waiter){ctx, 0, NULL};
    pthread_create(&threads[i], NULL, wait_one, &waiters[i]);
  }
  usleep(100000);
  struct iocb polls[2];
  for (int i = 0; i < 2; i++) {
    io_prep_poll(&polls[i], ends[1], POLLOUT);
    say("threads: submit beside waiters", submit(ctx, &polls[i]));
  }
  // Two have their event before the context ends.
  for (int have = 0; have < 2; usleep(1000)) {
    have = 0;
    for (int i = 0; i < 4; i++) have += result_of(&waiters[i]) != 0;
  }
  say("threads: destroy beside waiters", io_destroy(ctx));
  long sum = 0;
  for (int i = 0; i < 4; i++) {
    pthread_join(threads[i], NULL);
    sum += waiters[i].result;
  }
  say("threads: two got an event, two EINVAL", sum);
}

static void fork_cases(void) {
  io_context_t ctx = context(4);
  int fd = file(O_RDWR);
  struct iocb iocb;
  io_prep_pread(&iocb, fd, buffer, BLOCK, 0);
  fflush(stdout);
  pid_t child = fork();
  if (child == 0) {
    say("fork: parent's context", submit(ctx, &iocb));
    say("fork: own context", one(context(4), &iocb));
    fflush(stdout);
    _exit(0);
  }
  waitpid(child, NULL, 0);
  say("fork: parent goes on", one(ctx, &iocb));
  say("destroy", io_destroy(ctx));
  close(fd);
}

// Linux performs a buffered transfer inside io_submit: its event exists when io_submit returns.
static void *submit_two(void *ctx) {
  static struct iocb parts[2];
  int fd = file(O_RDWR);
  for (int i = 0; i < 2; i++) {
    usleep(20000);
    io_prep_pwrite(&parts[i], fd, buffer, BLOCK, i * BLOCK);
    if (submit(ctx, &parts[i]) != 1) abort();
  }
  close(fd);
  return NULL;
}

static void order_cases(void) {
  io_context_t ctx = context(8);
  int fd = file(O_RDWR), direct = file(O_RDWR | O_DIRECT), told = eventfd(0, EFD_NONBLOCK);
  struct iocb first, second, third, *list[3] = {&first, &second, &third};
  struct io_event events[4];
  struct iovec parts[2] = {{buffer, 100}, {buffer + BLOCK, 200}};
  uint64_t words = 0;
  io_prep_pwrite(&first, fd, buffer, 2 * BLOCK, 0);
  io_set_eventfd(&first, told);
  say("order: buffered write", submit(ctx, &first));
  say("order: its eventfd", read(told, &words, sizeof words) == sizeof words ? (long)words : -1);
  say("order: its event, without a wait", io_getevents(ctx, 0, 4, events, NULL));
  say("order: its result", (long)events[0].res);
  io_prep_preadv(&first, fd, parts, 2, 2 * BLOCK - 150);
  io_prep_pwrite(&second, direct, buffer, BLOCK, 2 * BLOCK);
  io_prep_pread(&third, fd, buffer, BLOCK, 100 * BLOCK);
  say("order: buffered, direct, buffered", io_submit(ctx, 3, list));
  int got = io_getevents(ctx, 2, 4, events, NULL);
  if (got == 2) got += io_getevents(ctx, 1, 2, events + 2, NULL);
  say("order: their events", got);
  for (int i = 0; i < 3; i++) {
    for (int j = 0; j < got; j++) {
      if (events[j].obj == list[i]) say("order: a result", (long)events[j].res);
    }
  }
  io_prep_pread(&first, fd, (void *)16, BLOCK, 0);
  io_prep_pread(&second, -1, buffer, BLOCK, 0);
  say("order: wild buffer, then a bad descriptor", io_submit(ctx, 2, list));
  say("order: its event", io_getevents(ctx, 0, 4, events, NULL));
  say("order: its error", (long)events[0].res);
  pthread_t thread;
  if (pthread_create(&thread, NULL, submit_two, ctx) != 0) abort();
  say("order: a thread that waits for two", io_getevents(ctx, 2, 4, events, NULL));
  pthread_join(thread, NULL);
  io_prep_pwrite(&first, fd, buffer, BLOCK, 0);
  say("order: not fetched", submit(ctx, &first));
  say("order: destroy", io_destroy(ctx));
  close(fd), close(direct), close(told);
}

int main(int count, char **arguments) {
  if (count != 2) return 2;
  path = arguments[1];
  alarm(100);
  setvbuf(stdout, NULL, _IOLBF, 0);
  if (posix_memalign((void **)&buffer, BLOCK, MANY * BLOCK) != 0) return 1;
  memset(buffer, 1, MANY * BLOCK);
  setup_cases();
  submit_cases();
  vector_and_sync_cases();
  wait_cases();
  full_cases();
  eventfd_cases();
  signal_cases();
  thread_cases();
  fork_cases();
  order_cases();
  unlink(path);
  return 0;
}
