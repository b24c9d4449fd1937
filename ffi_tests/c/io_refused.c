// In a process that may not create or not use a ring of io_uring (a seccomp filter, as in containers), I/O uses threads
// and the reason is reported. A caller that requires io_uring gets an error.

#include "check.h"

#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stdbool.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

enum { FOR_EVER = -1, BYTES = 3000001 };

static char file[4096], messages[1 << 14];
static unsigned char written[BYTES], found[BYTES];

static void keep(void *user, int32_t level, const char *message) {
    (void)user, (void)level;
    strncat(messages, message, sizeof messages - strlen(messages) - 1);
}

static bool refuse(unsigned call, unsigned error) {
    struct sock_filter rules[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, call, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | error),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {.len = sizeof rules / sizeof *rules, .filter = rules};
    return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

static void move(spw_io *io, bool write, void *buffer) {
    spw_io_request request = {.struct_size = sizeof request, .path = file, .offset = 77, .buffer = buffer};
    request.bytes = BYTES;
    uint64_t handle = 0;
    CHECK((write ? spw_io_write : spw_io_read)(io, &request, &handle) == SPW_OK);
    CHECK(spw_io_wait(io, &handle, 1, FOR_EVER, NULL) == SPW_OK);
}

static int child(unsigned call, unsigned error) {
    if (!refuse(call, error)) return SKIPPED;
    CHECK(spw_set_log(keep, NULL, SPW_LOG_LEVEL_INFO) == SPW_OK);
    spw_io_options options = {.struct_size = sizeof options, .backend = SPW_IO_BACKEND_URING};
    spw_io *io = NULL;
    CHECK(spw_io_open(&options, &io) == SPW_ERR_SYSTEM && io == NULL && strstr(spw_last_error(), "io_uring"));
    CHECK(spw_io_open(NULL, &io) == SPW_OK);
    char number[32], words[512];
    snprintf(number, sizeof number, "(errno %u)", error);
    CHECK(spw_io_describe(io, words, sizeof words, NULL) == SPW_OK && strncmp(words, "threads; ", 9) == 0);
    CHECK(strstr(words, number) && strstr(messages, number) && strstr(messages, "8 threads"));
    move(io, true, written);
    move(io, false, found);
    CHECK(memcmp(written, found, BYTES) == 0);
    CHECK(spw_io_close(io, FOR_EVER) == SPW_OK);
    return 0;
}

int main(void) {
    const char *base = getenv("TMPDIR");
    snprintf(file, sizeof file, "%s/spillway-io-XXXXXX", base ? base : P_tmpdir);
    int fd = mkstemp(file);
    CHECK(fd >= 0 && close(fd) == 0);
    for (size_t n = 0; n < BYTES; n++) written[n] = (unsigned char)(n * 2654435761u >> 13);
    const unsigned errors[] = {EPERM, ENOSYS};
    const unsigned calls[] = {SYS_io_uring_setup, SYS_io_uring_enter, SYS_io_uring_register};
    int worst = 0;
    for (int n = 0; n < 6; n++) {
        pid_t pid = fork();
        if (pid == 0) exit(child(calls[n / 2], errors[n % 2]));
        int status = -1;
        CHECK(waitpid(pid, &status, 0) == pid && WIFEXITED(status));
        if (WEXITSTATUS(status) > worst) worst = WEXITSTATUS(status);
    }
    CHECK(unlink(file) == 0);
    if (worst == SKIPPED) puts("no seccomp filters here");
    return worst;
}
