// Build: forks
// A program with more rights than its caller reads no variable of the environment: it loads no library that its caller
// names, and its caller's wrong values fail no call.

#define SPW_EXPERIMENTAL
#include "fake_cuda.h"

#include <fcntl.h>
#include <sys/auxv.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

static const char *const NAMES[] = {"SPILLWAY_KERNEL",  "SPILLWAY_NUM_THREADS", "SPILLWAY_OPENMP",
                                    "LOCAL_WORLD_SIZE", "SPILLWAY_IO"};
enum { COUNT = sizeof NAMES / sizeof *NAMES, OTHER_GROUP = 1, NOT_SECURE = 3 };

static void set_wrong_values(const char *value) {
    for (int i = 0; i < COUNT; i++) CHECK(setenv(NAMES[i], value, 1) == 0);
}

static void call_all(void) {
    spw_info info = SPW_INFO_INIT;
    CHECK_OK(spw_get_info(&info));
    struct problem large = make_mixed(LARGE, 8);
    const spw_adam_options options = adam_options();
    CHECK_OK(spw_adam_step(&options, &large.tensor, 1, NULL));
    release(&large);
    spw_io *io = NULL;
    CHECK_OK(spw_io_open(NULL, &io));
    CHECK_OK(spw_io_close(io, -1));
}

static int privileged(void) {
    if (getauxval(AT_SECURE) == 0) return NOT_SECURE;
    CHECK(getenv("SPILLWAY_CUDA_LIBRARY") != NULL && getenv("SPILLWAY_KERNEL") != NULL);
    call_all();
    const spw_gpu_options options = {.struct_size = sizeof options, .chunk_bytes = 4096};
    spw_gpu *gpu = NULL;
    const spw_status status = spw_gpu_open(&options, &gpu);
    // A machine with a GPU opens its own driver.
    if (status == SPW_OK) return spw_gpu_close(gpu) != SPW_OK;
    CHECK(strstr(spw_last_error(), "libfakecuda") == NULL);
    return 0;
}

static void copy_of(const char *from, const char *to) {
    static char bytes[1 << 16];
    const int in = open(from, O_RDONLY), out = open(to, O_WRONLY | O_CREAT | O_EXCL, 0700);
    CHECK(in >= 0 && out >= 0);
    for (ssize_t got; (got = read(in, bytes, sizeof bytes)) != 0;) CHECK(got > 0 && write(out, bytes, (size_t)got) == got);
    // The owner first: its change takes the bit away.
    CHECK(fchown(out, 0, OTHER_GROUP) == 0 && fchmod(out, 02755) == 0);
    CHECK(close(in) == 0 && close(out) == 0);
}

// In a child, whose library has not read its settings.
static void in_child(int (*work)(void), int wanted) {
    const pid_t child = fork();
    if (child == 0) _exit(work());
    int outcome = -1;
    CHECK(waitpid(child, &outcome, 0) == child && WIFEXITED(outcome) && WEXITSTATUS(outcome) == wanted);
}

static int with_blanks(void) {
    set_wrong_values(" ");
    call_all();
    return 0;
}

static int with_bytes_that_are_no_text(void) {
    for (int i = 0; i < COUNT; i++) {
        if (strcmp(NAMES[i], "SPILLWAY_IO") == 0) continue;
        CHECK(setenv(NAMES[i], "\xff\xfe", 1) == 0);
        struct problem large = make_mixed(LARGE, 8);
        const spw_adam_options options = adam_options();
        REFUSED(spw_adam_step(&options, &large.tensor, 1, NULL), SPW_ERR_INVALID_ARGUMENT, NAMES[i]);
        CHECK(strstr(spw_last_error(), "not UTF-8") != NULL);
        CHECK(unsetenv(NAMES[i]) == 0);
    }
    CHECK(setenv("SPILLWAY_IO", "\xff", 1) == 0);
    spw_io *io = NULL;
    INVALID(spw_io_open(NULL, &io), "SPILLWAY_IO");
    return 0;
}

int main(int count, char **arguments) {
    (void)arguments;
    if (count > 1) return privileged();
    in_child(with_blanks, 0);
    in_child(with_bytes_that_are_no_text, 0);
    if (geteuid() != 0) skip("only root can give a program the rights of another group");
    const char *driver = fake_driver_path();
    char copy[] = "./privileged-XXXXXX";
    CHECK(mkdtemp(copy) != NULL);
    char program[64];
    snprintf(program, sizeof program, "%s/program", copy);
    copy_of("/proc/self/exe", program);
    const pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        set_wrong_values("nonsense");
        CHECK(setenv("SPILLWAY_CUDA_LIBRARY", driver, 1) == 0 && setenv("SPILLWAY_LOG", "debug", 1) == 0);
        execl(program, program, "privileged", NULL);
        _exit(1);
    }
    int outcome = -1;
    CHECK(waitpid(child, &outcome, 0) == child && WIFEXITED(outcome));
    CHECK(unlink(program) == 0 && rmdir(copy) == 0);
    if (WEXITSTATUS(outcome) == NOT_SECURE) skip("this file system gives programs no rights of another group");
    CHECK(WEXITSTATUS(outcome) == 0);
    return 0;
}
