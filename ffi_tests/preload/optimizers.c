// Proves that functions with the names of DeepSpeed's compiled optimizers are served by the preload library, and that a
// call that does not fit reaches the op's own function with every argument. It needs neither torch nor DeepSpeed: the
// file is compiled three times, as the C functions of libtorch_cpu.so (-DTORCH), as an op (-DOP), and as the program.
//
//     LD_PRELOAD=libspillway_preload.so program FOLDER

#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

// Stands for an at::Tensor.
typedef struct {
    void *data;
    int64_t elements;
    int32_t dtype, device;
    int64_t dimensions, sizes[1], strides[1];
} tensor;

// The last call that reached an op's own function.
typedef struct {
    const char *function;
    int id;
    size_t step;
    float numbers[5];
    bool flag;
    void *tensors[4];
} seen;

#if defined(TORCH)

int aoti_torch_get_data_ptr(tensor *t, void **out) { return *out = t->data, 0; }
int aoti_torch_get_numel(tensor *t, int64_t *out) { return *out = t->elements, 0; }
int aoti_torch_get_dtype(tensor *t, int32_t *out) { return *out = t->dtype, 0; }
int aoti_torch_get_device_type(tensor *t, int32_t *out) { return *out = t->device, 0; }
int aoti_torch_get_dim(tensor *t, int64_t *out) { return *out = t->dimensions, 0; }
int aoti_torch_get_sizes(tensor *t, int64_t **out) { return *out = t->sizes, 0; }
int aoti_torch_get_strides(tensor *t, int64_t **out) { return *out = t->strides, 0; }

#elif defined(OP)

#define NAMED(name) __asm__(name)

int create_adam(int, float, float, float, float, float, bool, bool) NAMED("_Z21create_adam_optimizerifffffbb");
int adam_step(int, size_t, float, float, float, float, float, bool, void *, void *, void *, void *)
    NAMED("_Z12ds_adam_stepimfffffbRN2at6TensorES1_S1_S1_");
int adam_rollback(int, size_t, float, float, float, float, float, bool, void *, void *, void *, void *)
    NAMED("_Z16ds_adam_rollbackimfffffbRN2at6TensorES1_S1_S1_");
int destroy_adam(int) NAMED("_Z22destroy_adam_optimizeri");
int create_adagrad(int, float, float, float, bool) NAMED("_Z24create_adagrad_optimizerifffb");
int adagrad_step(int, size_t, float, float, float, void *, void *, void *)
    NAMED("_Z15ds_adagrad_stepimfffRN2at6TensorES1_S1_");
int destroy_adagrad(int) NAMED("_Z25destroy_adagrad_optimizeri");
int create_lion(int, float, float, float, float, bool) NAMED("_Z21create_lion_optimizeriffffb");
int lion_step(int, size_t, float, float, float, float, void *, void *, void *)
    NAMED("_Z12ds_lion_stepimffffRN2at6TensorES1_S1_");
int destroy_lion(int) NAMED("_Z22destroy_lion_optimizeri");

seen last;

int create_adam(int id, float a, float b, float c, float d, float e, bool adamw, bool log) {
    last = (seen){"create_adam", id, log, {a, b, c, d, e}, adamw, {0}};
    return 0;
}

int adam_step(int id, size_t step, float a, float b, float c, float d, float e, bool bias, void *p, void *g, void *m, void *v) {
    last = (seen){"adam_step", id, step, {a, b, c, d, e}, bias, {p, g, m, v}};
    return 11;
}

int adam_rollback(int id, size_t step, float a, float b, float c, float d, float e, bool bias, void *p, void *g, void *m, void *v) {
    last = (seen){"adam_rollback", id, step, {a, b, c, d, e}, bias, {p, g, m, v}};
    return 12;
}

int destroy_adam(int id) {
    last = (seen){.function = "destroy_adam", .id = id};
    return 0;
}

int create_adagrad(int id, float a, float b, float c, bool log) {
    last = (seen){"create_adagrad", id, 0, {a, b, c}, log, {0}};
    return 0;
}

int adagrad_step(int id, size_t step, float a, float b, float c, void *p, void *g, void *v) {
    last = (seen){"adagrad_step", id, step, {a, b, c}, false, {p, g, v}};
    return 13;
}

int destroy_adagrad(int id) {
    last = (seen){.function = "destroy_adagrad", .id = id};
    return 0;
}

int create_lion(int id, float a, float b, float c, float d, bool log) {
    last = (seen){"create_lion", id, 0, {a, b, c, d}, log, {0}};
    return 0;
}

int lion_step(int id, size_t step, float a, float b, float c, float d, void *p, void *g, void *m) {
    last = (seen){"lion_step", id, step, {a, b, c, d}, false, {p, g, m}};
    return 14;
}

int destroy_lion(int id) {
    last = (seen){.function = "destroy_lion", .id = id};
    return 0;
}

// Calls every function through the op's table. Writes what each returned, and which own function it reached.
void use(tensor *p, tensor *g, tensor *m, tensor *v, int returned[10], seen reached[10]) {
#define CALL(index, call) last = (seen){0}, returned[index] = call, reached[index] = last
    CALL(0, create_adam(1, 1e-3f, 0.9f, 0.999f, 1e-8f, 0.1f, true, false));
    CALL(1, adam_step(1, 1, 1e-3f, 0.9f, 0.999f, 1e-8f, 0.1f, true, p, g, m, v));
    CALL(2, adam_rollback(1, 1, 1e-3f, 0.9f, 0.999f, 1e-8f, 0.1f, true, p, g, m, v));
    CALL(3, destroy_adam(1));
    CALL(4, create_adagrad(2, 1e-2f, 1e-8f, 0.1f, true));
    CALL(5, adagrad_step(2, 1, 1e-2f, 1e-8f, 0.1f, p, g, v));
    CALL(6, destroy_adagrad(2));
    CALL(7, create_lion(3, 1e-2f, 0.9f, 0.99f, 0.5f, true));
    CALL(8, lion_step(3, 1, 1e-2f, 0.9f, 0.99f, 0.5f, p, g, m));
    CALL(9, destroy_lion(3));
}

#else

static const seen expected[10] = {
    {"create_adam", 1, 0, {1e-3f, 0.9f, 0.999f, 1e-8f, 0.1f}, true, {0}},
    {"adam_step", 1, 1, {1e-3f, 0.9f, 0.999f, 1e-8f, 0.1f}, true, {0}},
    {"adam_rollback", 1, 1, {1e-3f, 0.9f, 0.999f, 1e-8f, 0.1f}, true, {0}},
    {"destroy_adam", 1, 0, {0}, false, {0}},
    {"create_adagrad", 2, 0, {1e-2f, 1e-8f, 0.1f}, true, {0}},
    {"adagrad_step", 2, 1, {1e-2f, 1e-8f, 0.1f}, false, {0}},
    {"destroy_adagrad", 2, 0, {0}, false, {0}},
    {"create_lion", 3, 0, {1e-2f, 0.9f, 0.99f, 0.5f}, true, {0}},
    {"lion_step", 3, 1, {1e-2f, 0.9f, 0.99f, 0.5f}, false, {0}},
    {"destroy_lion", 3, 0, {0}, false, {0}},
};
static const int own_results[10] = {0, 11, 12, 0, 0, 13, 0, 0, 14, 0};
static const bool is_a_step[10] = {false, true, true, false, false, true, false, false, true, false};

#define CHECK(condition)                                                           \
    do {                                                                           \
        if (!(condition)) {                                                        \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);        \
            exit(1);                                                               \
        }                                                                          \
    } while (0)

static tensor make(int elements, float value) {
    tensor made = {malloc(sizeof(float) * elements), elements, 6, 0, 1, {elements}, {1}};
    CHECK(made.data);
    for (int i = 0; i < elements; i++) {
        ((float *)made.data)[i] = value;
    }
    return made;
}

static void *open_in(const char *folder, const char *name) {
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    void *opened = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!opened) {
        fprintf(stderr, "%s\n", dlerror());
        exit(1);
    }
    return opened;
}

// Creations and destructions reach the op in both cases, so that calls that are left to it find their optimizer.
static void same_call(const seen *got, const seen *wanted) {
    CHECK(got->function);
    for (const char *a = got->function, *b = wanted->function; *a || *b; a++, b++) {
        CHECK(*a == *b);
    }
    CHECK(got->id == wanted->id && got->step == wanted->step && got->flag == wanted->flag);
    for (int i = 0; i < 5; i++) {
        CHECK(got->numbers[i] == wanted->numbers[i]);
    }
}

int main(int count, char **arguments) {
    CHECK(count == 2);
    open_in(arguments[1], "libtorch_cpu.so");
    void *op = open_in(arguments[1], "libop.so");
    void (*use)(tensor *, tensor *, tensor *, tensor *, int *, seen *);
    *(void **)&use = dlsym(op, "use");
    int (*counts)(const char *, uint64_t *);
    *(void **)&counts = dlsym(RTLD_DEFAULT, "spillway_preload_counts");
    CHECK(use && counts);

    tensor p = make(64, 1.0f), g = make(64, 0.5f), m = make(64, 0.0f), v = make(64, 0.0f);
    int returned[10];
    seen reached[10];
    use(&p, &g, &m, &v, returned, reached);
    for (int i = 0; i < 10; i++) {
        CHECK(returned[i] == 0);
        if (is_a_step[i]) {
            CHECK(!reached[i].function);
        } else {
            same_call(&reached[i], &expected[i]);
        }
    }
    // Lion from m = 0 and a gradient of 0.5, after Adagrad from v = 0.
    CHECK(((float *)p.data)[7] < 1.0f && ((float *)v.data)[7] > 0.25f && ((float *)m.data)[7] > 0.0f);

    float before = ((float *)p.data)[7];
    g.strides[0] = 2;
    use(&p, &g, &m, &v, returned, reached);
    for (int i = 0; i < 10; i++) {
        CHECK(returned[i] == own_results[i]);
        same_call(&reached[i], &expected[i]);
        if (is_a_step[i]) {
            CHECK(reached[i].tensors[0] == &p && reached[i].tensors[1] == &g);
            CHECK(reached[i].tensors[2] == (i == 5 ? &v : &m));
            CHECK(reached[i].tensors[3] == (i < 3 ? (void *)&v : NULL));
        }
    }
    CHECK(((float *)p.data)[7] == before);

    uint64_t found[3];
    CHECK(counts("cpu_adam", found) == 1 && found[0] == 2 && found[1] == 128 && found[2] == 2);
    CHECK(counts("cpu_adagrad", found) == 1 && found[0] == 1 && found[1] == 64 && found[2] == 1);
    CHECK(counts("cpu_lion", found) == 1 && found[0] == 1 && found[1] == 64 && found[2] == 1);
    CHECK(counts("cpu_other", found) == 0);
    return 0;
}

#endif
