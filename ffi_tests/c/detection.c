// Build: valgrind
// The library chooses the kernel when it runs, from the features that the processor reports. Under valgrind, which
// hides AVX-512, steps use AVX2 and give the same bits as without valgrind; valgrind reports no error.

#include "check.h"

int main(void) {
    spw_info info = SPW_INFO_INIT;
    CHECK_OK(spw_get_info(&info));
    if (getenv("UNDER_VALGRIND") != NULL) CHECK(strcmp(info.kernel, "avx512") != 0);

    struct problem problem = make_mixed(70001, 1);
    const spw_adam_options options = adam_options();
    spw_step_stats stats = step_stats();
    for (uint32_t threads = 1; threads < 3; threads++) {
        configure_threads(threads);
        CHECK_OK(spw_adam_step(&options, &problem.tensor, 1, &stats));
    }
    uint64_t sum = 0xcbf29ce484222325u;
    for (int span = 0; span < 5; span++) {
        const unsigned char *bytes = problem.spans[span];
        for (size_t i = 0; i < problem.bytes[span]; i++) sum = (sum ^ bytes[i]) * 0x100000001b3u;
    }
    release(&problem);
    configure_threads(1);
    // The first run prints its checksum; the run under valgrind receives that checksum as an argument.
    char text[32];
    snprintf(text, sizeof text, "%016llx", (unsigned long long)sum);
    const char *expected = getenv("EXPECTED_SUM");
    if (expected == NULL) puts(text);
    return expected == NULL || strcmp(expected, text) == 0 ? 0 : 1;
}
