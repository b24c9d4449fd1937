// The C functions give the bits of kernels/*.json, which kernels/golden.py computed on rational numbers.

#include "check.h"

#include <math.h>

static const char *const dtype_names[] = {"none", "f32", "f16", "bf16"};

// The value after the next `"key": `. The files keep their keys in one order, so looking ahead is enough.
static const char *value(const char **at, const char *key) {
    char quoted[64];
    snprintf(quoted, sizeof quoted, "\"%s\": ", key);
    const char *found = strstr(*at, quoted);
    if (found == NULL) fail(__FILE__, __LINE__, "the file has no key %s", key);
    *at = found + strlen(quoted);
    return **at == '"' ? *at + 1 : *at;
}

static double real(const char *options, const char *key) {
    return strtod(value(&options, key), NULL);
}

static uint32_t dtype(const char **at, const char *key) {
    const char *text = value(at, key);
    for (uint32_t i = 0; i < 4; i++) {
        const size_t length = strlen(dtype_names[i]);
        if (strncmp(text, dtype_names[i], length) == 0 && text[length] == '"') return i;
    }
    fail(__FILE__, __LINE__, "%.8s is not a type", text);
    return 0;
}

static uint64_t digits(const char *text, size_t count) {
    char copied[17] = {0};
    memcpy(copied, text, count);
    return strtoull(copied, NULL, 16);
}

// Reads a span; NULL where the text is empty.
static void *span(const char *text, uint32_t type, size_t n) {
    if (*text == '"') return NULL;
    const size_t bytes = width(type);
    CHECK(strcspn(text, "\"") == n * bytes * 2);
    char *made = malloc(n * bytes);
    for (size_t i = 0; i < n; i++) {
        const uint64_t bits = digits(text + i * bytes * 2, bytes * 2);
        if (bytes == 4) ((uint32_t *)made)[i] = (uint32_t)bits;
        if (bytes == 2) ((uint16_t *)made)[i] = (uint16_t)bits;
    }
    return made;
}

static int is_nan(uint32_t bits) {
    return (bits & 0x7fffffff) > 0x7f800000;
}

static void compare(const char *what, const char *text, uint32_t type, size_t n, const void *got) {
    void *wanted = span(text, type, n);
    CHECK((wanted == NULL) == (got == NULL));
    for (size_t i = 0; got != NULL && i < n; i++) {
        const uint32_t a = width(type) == 4 ? ((const uint32_t *)got)[i] : ((const uint16_t *)got)[i];
        const uint32_t b = width(type) == 4 ? ((const uint32_t *)wanted)[i] : ((const uint16_t *)wanted)[i];
        const int both_nan = width(type) == 4 && is_nan(a) && is_nan(b);
        if (a != b && !both_nan) fail(__FILE__, __LINE__, "%s[%zu] is %x, not %x", what, i, a, b);
    }
    free(wanted);
}

static void step(const char *optimizer, const char *options, uint64_t number, const spw_tensor *tensor,
                 spw_step_stats *stats) {
    const double lr = real(options, "lr"), decay = real(options, "weight_decay"), scale = real(options, "grad_scale");
    if (strcmp(optimizer, "adam") == 0) {
        const spw_adam_options o = {.struct_size = sizeof o, .step = number, .lr = lr, .weight_decay = decay,
                                    .weight_decay_mode = (uint32_t)real(options, "weight_decay_mode"),
                                    .beta1 = real(options, "beta1"), .beta2 = real(options, "beta2"),
                                    .eps = real(options, "eps"), .grad_scale = scale,
                                    .no_bias_correction = (uint32_t)real(options, "no_bias_correction")};
        CHECK_OK(spw_adam_step(&o, tensor, 1, stats));
    } else if (strcmp(optimizer, "adagrad") == 0) {
        const spw_adagrad_options o = {.struct_size = sizeof o, .step = number, .lr = lr,
                                       .lr_decay = real(options, "lr_decay"), .eps = real(options, "eps"),
                                       .weight_decay = decay, .grad_scale = scale};
        CHECK_OK(spw_adagrad_step(&o, tensor, 1, stats));
    } else if (strcmp(optimizer, "signum") == 0) {
        const spw_signum_options o = {.struct_size = sizeof o, .lr = lr, .momentum = real(options, "momentum"),
                                      .weight_decay = decay, .grad_scale = scale};
        CHECK_OK(spw_signum_step(&o, tensor, 1, stats));
    } else {
        const spw_lion_options o = {.struct_size = sizeof o, .lr = lr, .beta1 = real(options, "beta1"),
                                    .beta2 = real(options, "beta2"), .weight_decay = decay, .grad_scale = scale};
        CHECK_OK(spw_lion_step(&o, tensor, 1, stats));
    }
}

// One line of the file.
static void check_case(const char *optimizer, const char *at) {
    spw_tensor tensor = {.struct_size = sizeof tensor};
    tensor.param_dtype = dtype(&at, "param");
    tensor.state_dtype = dtype(&at, "state");
    tensor.grad_dtype = dtype(&at, "grad");
    tensor.copy_dtype = dtype(&at, "copy");
    tensor.n = strtoull(value(&at, "n"), NULL, 10);
    const size_t n = (size_t)tensor.n;
    const char *options = at;
    const int is_counted = strcmp(optimizer, "adam") == 0 || strcmp(optimizer, "adagrad") == 0;
    const uint64_t first = is_counted ? (uint64_t)real(options, "step") : 1;
    tensor.param = span(value(&at, "param0"), tensor.param_dtype, n);
    tensor.exp_avg = span(value(&at, "exp_avg"), tensor.state_dtype, n);
    tensor.exp_avg_sq = span(value(&at, "exp_avg_sq"), tensor.state_dtype, n);
    if (tensor.copy_dtype != SPW_DTYPE_NONE) tensor.param_copy = calloc(n, width(tensor.copy_dtype));

    for (uint64_t number = first; strstr(at, "\"grad\": ") != NULL; number++) {
        spw_step_stats stats = step_stats();
        void *grad = span(value(&at, "grad"), tensor.grad_dtype, n);
        tensor.grad = grad;
        step(optimizer, options, number, &tensor, &stats);
        free(grad);
        compare("param", value(&at, "param"), tensor.param_dtype, n, tensor.param);
        compare("exp_avg", value(&at, "exp_avg"), tensor.state_dtype, n, tensor.exp_avg);
        compare("exp_avg_sq", value(&at, "exp_avg_sq"), tensor.state_dtype, n, tensor.exp_avg_sq);
        compare("param_copy", value(&at, "param_copy"), tensor.copy_dtype, n, tensor.param_copy);
        CHECK(stats.nonfinite == (uint32_t)strtoul(value(&at, "nonfinite"), NULL, 10));
        const uint64_t bits = digits(value(&at, "sum_squares"), 16);
        double sum;
        memcpy(&sum, &bits, sizeof sum);
        CHECK(memcmp(&sum, &stats.sum_squares, sizeof sum) == 0 || (isnan(sum) && isnan(stats.sum_squares)));
    }
    free(tensor.param);
    free(tensor.exp_avg);
    free(tensor.exp_avg_sq);
    free(tensor.param_copy);
}

static int check_file(const char *folder, const char *optimizer) {
    char path[4096];
    snprintf(path, sizeof path, "%s/%s.json", folder, optimizer);
    FILE *file = fopen(path, "r");
    if (file == NULL) fail(__FILE__, __LINE__, "%s cannot be read", path);
    char *line = NULL;
    size_t room = 0;
    int cases = 0;
    while (getline(&line, &room, file) > 0) {
        if (strncmp(line, "{\"name\"", 7) != 0) continue;
        check_case(optimizer, line);
        cases++;
    }
    free(line);
    CHECK(fclose(file) == 0);
    return cases;
}

int main(void) {
    const char *folder = getenv("SPILLWAY_VECTORS");
    if (folder == NULL) skip("SPILLWAY_VECTORS is not set to a directory");
    CHECK(check_file(folder, "adam") >= 20);
    CHECK(check_file(folder, "adagrad") >= 20);
    CHECK(check_file(folder, "lion") >= 20);
    CHECK(check_file(folder, "signum") >= 20);
    return 0;
}
