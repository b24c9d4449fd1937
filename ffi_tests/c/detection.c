// Build: valgrind
// The kernel is chosen from what the processor says when the library runs: under valgrind, which hides AVX-512, steps run
// on AVX2 with the bits that the program was given; and valgrind sees no error in them.

#include "check.h"

int main(void) {
    const char *name = NULL;
    CHECK_OK(spw_kernel_name(&name));
    if (getenv("UNDER_VALGRIND") != NULL) CHECK(strcmp(name, "avx512") != 0);

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
    // The first run tells its sum, the run under valgrind is told it.
    char text[32];
    snprintf(text, sizeof text, "%016llx", (unsigned long long)sum);
    const char *expected = getenv("EXPECTED_SUM");
    if (expected == NULL) puts(text);
    return expected == NULL || strcmp(expected, text) == 0 ? 0 : 1;
}
