// SPILLWAY_KERNEL selects a kernel, and the reported name confirms the selection. Every kernel gives the same bits. A
// kernel that does not exist, or that this processor lacks, is refused, and nothing is written.
//
// The library reads the variable once, so the program runs itself once for each value. SPILLWAY_TEST_EMULATOR names the
// emulator to run it with, where the system cannot run it directly.

#include "child.h"

#include <sys/auxv.h>

static const char *const names[] = {"avx512", "avx2", "sve_bf16", "sve", "neon", "scalar"};

static int available(const char *name) {
#if defined(__x86_64__)
    if (strcmp(name, "avx512") == 0) {
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    }
    if (strcmp(name, "avx2") == 0) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#elif defined(__aarch64__)
    if (strcmp(name, "neon") == 0) return 1;
    if (strcmp(name, "sve") == 0) return (getauxval(AT_HWCAP) >> 22 & 1) != 0;
    if (strcmp(name, "sve_bf16") == 0) return (getauxval(AT_HWCAP2) >> 12 & 1) != 0;
#endif
    return strcmp(name, "scalar") == 0;
}

static uint64_t hash(uint64_t sum, const void *memory, size_t bytes) {
    for (size_t i = 0; i < bytes; i++) sum = (sum ^ ((const unsigned char *)memory)[i]) * 0x100000001b3u;
    return sum;
}

// One checksum over the results of every optimizer and every combination of types, special values included.
static uint64_t all_results(void) {
    static const uint32_t types[][4] = {{1, 1, 1, 0}, {1, 1, 1, 2}, {1, 1, 2, 2}, {1, 1, 3, 3}, {1, 1, 2, 0},
                                        {1, 1, 3, 0}, {2, 1, 2, 0}, {2, 2, 2, 0}, {3, 1, 3, 0}, {3, 3, 3, 0}};
    static const uint64_t lengths[] = {1, 15, 16, 17, 33, 4097, 70001};
    uint64_t sum = 0xcbf29ce484222325u;
    spw_adam_options adam = adam_options();
    spw_adagrad_options adagrad;
    spw_lion_options lion;
    adagrad = (spw_adagrad_options)SPW_ADAGRAD_OPTIONS_INIT;
    lion = (spw_lion_options)SPW_LION_OPTIONS_INIT;
    lion.weight_decay = adagrad.weight_decay = 0.1;
    for (size_t type = 0; type < sizeof types / sizeof *types; type++) {
        for (size_t at = 0; at < sizeof lengths / sizeof *lengths; at++) {
            for (int optimizer = 0; optimizer < 4; optimizer++) {
                const uint32_t *t = types[type];
                struct problem problem = make(lengths[at], t[0], t[1], t[2], t[3], type);
                spw_step_stats stats = step_stats();
                adam.weight_decay_mode = (uint32_t)optimizer % 2;
                if (optimizer < 2) CHECK_OK(spw_adam_step(&adam, &problem.tensor, 1, &stats));
                if (optimizer == 2) CHECK_OK(spw_adagrad_step(&adagrad, &problem.tensor, 1, &stats));
                if (optimizer == 3) CHECK_OK(spw_lion_step(&lion, &problem.tensor, 1, &stats));
                for (int span = 0; span < 5; span++) {
                    if (problem.bytes[span] > 0) sum = hash(sum, problem.spans[span], problem.bytes[span]);
                }
                sum = hash(sum, &stats, sizeof stats);
                release(&problem);
            }
        }
    }
    return sum;
}

static void forced(const char *name, const char *file) {
    spw_info info = SPW_INFO_INIT;
    CHECK_OK(spw_get_info(&info));
    CHECK(strcmp(info.kernel, name) == 0);
    const uint64_t sum = all_results();
    FILE *out = fopen(file, "wb");
    CHECK(out != NULL && fwrite(&sum, sizeof sum, 1, out) == 1 && fclose(out) == 0);
}

static void refused(const char *words) {
    spw_info info = SPW_INFO_INIT;
    struct problem problem = make_mixed(300, 1);
    const spw_adam_options options = adam_options();
    spw_adagrad_options adagrad;
    spw_lion_options lion;
    spw_step_stats stats = step_stats();
    adagrad = (spw_adagrad_options)SPW_ADAGRAD_OPTIONS_INIT;
    lion = (spw_lion_options)SPW_LION_OPTIONS_INIT;
    CHECK_OK(spw_ds_adam_create(1, 0.9f, 0.999f, 1));
    watch_problem(&problem);
    watch(&stats, sizeof stats);
    for (int again = 0; again < 2; again++) {
        REFUSED(spw_get_info(&info), SPW_ERR_UNSUPPORTED, words);
        REFUSED(spw_adam_step(&options, &problem.tensor, 1, &stats), SPW_ERR_UNSUPPORTED, words);
        REFUSED(spw_adagrad_step(&adagrad, &problem.tensor, 1, &stats), SPW_ERR_UNSUPPORTED, words);
        REFUSED(spw_lion_step(&lion, &problem.tensor, 1, &stats), SPW_ERR_UNSUPPORTED, words);
        REFUSED(grad_stats(problem.spans[1], SPW_DTYPE_BF16, 300, 1, &stats), SPW_ERR_UNSUPPORTED, words);
        const spw_ds_adam_call call = ds_adam_call(1);
        REFUSED(spw_ds_adam_update(NULL, 1, &call, &problem.tensor), SPW_ERR_UNSUPPORTED,
                words);
    }
    CHECK(info.kernel == NULL);
    unwatch_all();
    release(&problem);
}

static void again_with(const char *self, const char *kernel, const char *mode, const char *detail) {
    const pid_t child = fork();
    if (child == 0) {
        const char *emulator = getenv("SPILLWAY_TEST_EMULATOR");
        setenv("SPILLWAY_KERNEL", kernel, 1);
        if (emulator != NULL) execl(emulator, emulator, self, mode, kernel, detail, (char *)NULL);
        execl(self, self, mode, kernel, detail, (char *)NULL);
        _exit(126);
    }
    finish(child, kernel);
}

static uint64_t read_sum(const char *file) {
    uint64_t sum = 0;
    FILE *in = fopen(file, "rb");
    CHECK(in != NULL && fread(&sum, sizeof sum, 1, in) == 1 && fclose(in) == 0);
    return sum;
}

int main(int count, char **arguments) {
    if (count == 4 && strcmp(arguments[1], "forced") == 0) return forced(arguments[2], arguments[3]), 0;
    if (count == 4) return refused(arguments[3]), 0;

    char file[] = "kernels.sum.XXXXXX";
    const int handle = mkstemp(file);
    CHECK(handle >= 0 && close(handle) == 0);
    spw_info info = SPW_INFO_INIT;
    CHECK_OK(spw_get_info(&info));
    const char *best = info.kernel;
    const uint64_t unforced = all_results();
    int seen_best = 0;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        if (!available(names[i])) {
            again_with(arguments[0], names[i], "refused", names[i]);
            continue;
        }
        seen_best = seen_best || strcmp(best, names[i]) == 0;
        CHECK(seen_best);
        again_with(arguments[0], names[i], "forced", file);
        if (read_sum(file) != unforced) fail(__FILE__, __LINE__, "%s and %s differ", names[i], best);
    }
    CHECK(unlink(file) == 0);
    again_with(arguments[0], "sse9", "refused", "there is no kernel \"sse9\"");
    again_with(arguments[0], "AVX2", "refused", "avx512, avx2, sve_bf16, sve, neon, scalar");
    return 0;
}
