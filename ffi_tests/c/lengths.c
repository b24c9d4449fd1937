// Counts of elements are 64-bit: steps and statistics over more than 2^31 and 2^33 elements reach the last one.
//
// Such spans need more memory than a test may take. Each span maps the same 2 MiB of zeros again and again: a step of
// zeros writes zeros, so one physical byte may be stepped many times. Around 2^31, 2^32, 2^33 and the end lie private
// pages with other numbers; the test compares these with a short tensor.

#include "check.h"

#include <sys/mman.h>
#include <unistd.h>

enum { WINDOW = 2 << 20, PAGE = 1 << 16, MARKS = 6 };

static uint64_t marks[MARKS];
static int mark_count;

// Each marked place begins at a multiple of 32 Ki elements, so it fills whole pages for every dtype.
static void choose_marks(uint64_t n) {
    const uint64_t wanted[MARKS] = {0, (1ull << 30), (1ull << 31), (1ull << 32), (1ull << 33), n};
    mark_count = 0;
    for (int i = 0; i < MARKS; i++) {
        uint64_t at = wanted[i] / 32768 * 32768;
        if (at + 32768 > n && i + 1 < MARKS) continue;
        if (at + 1 > n) continue;
        marks[mark_count++] = at;
    }
}

static uint64_t mark_length(int mark, uint64_t n) {
    return n - marks[mark] < 32768 ? n - marks[mark] : 32768;
}

static char *zeros(size_t bytes, size_t *mapped) {
    const int file = memfd_create("zeros", 0);
    if (file < 0 || ftruncate(file, WINDOW) != 0) skip("no memfd");
    *mapped = (bytes + WINDOW - 1) / WINDOW * WINDOW + WINDOW;
    char *span = mmap(NULL, *mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (span == MAP_FAILED) skip("no address space for spans of this length");
    for (size_t at = 0; at < *mapped; at += WINDOW) {
        if (mmap(span + at, WINDOW, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0) == MAP_FAILED) {
            skip("too few mappings allowed (vm.max_map_count)");
        }
    }
    close(file);
    return span;
}

// A span of zeros with private numbers at the marked places; `together` holds the same numbers one after the other.
static char *span_of(uint32_t dtype, uint64_t n, const char *together, size_t *mapped) {
    char *span = zeros((size_t)n * width(dtype), mapped);
    for (int i = 0; i < mark_count; i++) {
        const size_t bytes = (size_t)mark_length(i, n) * width(dtype), whole = (bytes + PAGE - 1) / PAGE * PAGE;
        char *at = span + marks[i] * width(dtype);
        CHECK(mmap(at, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == at);
        memcpy(at, together + (size_t)i * 32768 * width(dtype), bytes);
    }
    return span;
}

static void compare(const char *name, uint32_t dtype, uint64_t n, const char *span, const char *expected) {
    for (int i = 0; i < mark_count; i++) {
        const size_t bytes = (size_t)mark_length(i, n) * width(dtype);
        if (memcmp(span + marks[i] * width(dtype), expected + (size_t)i * 32768 * width(dtype), bytes) != 0) {
            fail(__FILE__, __LINE__, "%s at element %llu of %llu differs", name, (unsigned long long)marks[i],
                 (unsigned long long)n);
        }
    }
    // The elements around a marked place were zeros and stay zeros.
    for (uint64_t at = 65536; at < n; at += n / 7) {
        uint32_t bits = 0;
        int inside = 0;
        for (int i = 0; i < mark_count; i++) inside |= at >= marks[i] && at < marks[i] + 32768;
        if (!inside) CHECK(memcmp(span + at * width(dtype), &bits, width(dtype)) == 0);
    }
}

static void step(int lion, uint64_t n, uint32_t param, uint32_t grad, uint32_t copy) {
    choose_marks(n);
    CHECK(mark_count >= 4 && marks[mark_count - 1] + mark_length(mark_count - 1, n) == n);
    struct problem little = make((uint64_t)mark_count * 32768, param, param, grad, copy, 3);
    const uint32_t dtypes[5] = {param, grad, param, lion ? 0 : param, copy};
    spw_tensor tensor = little.tensor;
    void *spans[5] = {NULL};
    size_t mapped[5] = {0};
    for (int i = 0; i < 5; i++) {
        if (dtypes[i] != SPW_DTYPE_NONE) spans[i] = span_of(dtypes[i], n, little.spans[i], &mapped[i]);
    }
    tensor.n = n;
    tensor.param = spans[0];
    tensor.grad = spans[1];
    tensor.exp_avg = spans[2];
    tensor.exp_avg_sq = spans[3];
    tensor.param_copy = spans[4];

    spw_adam_options adam = adam_options();
    spw_lion_options options = SPW_LION_OPTIONS_INIT;
    options.weight_decay = 0.1;
    const spw_tensor *both[] = {&tensor, &little.tensor};
    for (int i = 0; i < 2; i++) {
        if (lion) CHECK_OK(spw_lion_step(&options, both[i], 1, NULL));
        if (!lion) CHECK_OK(spw_adam_step(&adam, both[i], 1, NULL));
    }
    static const char *names[] = {"param", "grad", "exp_avg", "exp_avg_sq", "param_copy"};
    for (int i = 0; i < 5; i++) {
        if (spans[i] == NULL) continue;
        compare(names[i], dtypes[i], n, spans[i], little.spans[i]);
        CHECK(munmap(spans[i], mapped[i]) == 0);
    }
    release(&little);
}

static void statistics(uint64_t n) {
    uint16_t *grad = mmap(NULL, n * 2, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (grad == MAP_FAILED) skip("no address space for a gradient of this length");
    madvise(grad, n * 2, MADV_HUGEPAGE);
    const uint64_t places[] = {0, (1ull << 31) - 1, 1ull << 31, 1ull << 32, 1ull << 33, n - 1};
    double sum = 0;
    for (int i = 0; i < 6; i++) {
        grad[places[i]] = (uint16_t)(0x3f80 + 0x80 * i);  // 2^i
        sum += (double)(1 << 2 * i);
    }
    spw_step_stats stats = step_stats();
    CHECK_OK(grad_stats(grad, SPW_DTYPE_BF16, n, 1, &stats));
    CHECK(stats.nonfinite == 0 && stats.sum_squares == sum);
    grad[n - 1] = 0x7f80;
    CHECK_OK(grad_stats(grad, SPW_DTYPE_BF16, n, 1, &stats));
    CHECK(stats.nonfinite == 1);
    CHECK(munmap(grad, n * 2) == 0);
}

int main(void) {
    if (sizeof(void *) < 8) skip("the address space has 32 bits");
    statistics((1ull << 33) + 12345);
    step(0, (1ull << 31) + 70001, SPW_DTYPE_F32, SPW_DTYPE_BF16, SPW_DTYPE_BF16);
    step(1, (1ull << 33) + 70001, SPW_DTYPE_BF16, SPW_DTYPE_BF16, SPW_DTYPE_NONE);
    return 0;
}
