// One process may load several copies of the library. Each copy has its own kernel, pool, ids and last error. Unloading
// a copy that has workers does not disturb the others.

#include "check.h"

#include <dlfcn.h>
#include <unistd.h>

struct copy {
    void *handle;
    __typeof__(&spw_adam_step) step;
    __typeof__(&spw_last_error) last_error;
    __typeof__(&spw_ds_adam_create) create;
    __typeof__(&spw_ds_adam_destroy) destroy;
    __typeof__(&spw_set_threads) configure;
};

static void copy_file(const char *from, const char *to) {
    FILE *in = fopen(from, "rb"), *out = fopen(to, "wb");
    CHECK(in != NULL && out != NULL);
    static char block[1 << 16];
    for (size_t got; (got = fread(block, 1, sizeof block, in)) > 0;) CHECK(fwrite(block, 1, got, out) == got);
    CHECK(fclose(in) == 0 && fclose(out) == 0);
}

static struct copy load(const char *from, int number) {
    char file[64];
    snprintf(file, sizeof file, "./libcopy%d.so", number);
    copy_file(from, file);
    void *handle = dlopen(file, RTLD_NOW | RTLD_LOCAL);
    if (handle == NULL) fail(__FILE__, __LINE__, "%s", dlerror());
    struct copy copy = {.handle = handle};
    copy.step = (__typeof__(copy.step))dlsym(handle, "spw_adam_step");
    copy.last_error = (__typeof__(copy.last_error))dlsym(handle, "spw_last_error");
    copy.create = (__typeof__(copy.create))dlsym(handle, "spw_ds_adam_create");
    copy.destroy = (__typeof__(copy.destroy))dlsym(handle, "spw_ds_adam_destroy");
    copy.configure = (__typeof__(copy.configure))dlsym(handle, "spw_set_threads");
    CHECK(copy.step != NULL && copy.step != spw_adam_step);
    CHECK(unlink(file) == 0);
    return copy;
}

int main(void) {
    Dl_info info;
    CHECK(dladdr((void *)(uintptr_t)&spw_adam_step, &info) != 0);
    struct problem expected = make_mixed(LARGE, 8);
    const spw_adam_options options = adam_options();
    const spw_thread_options two = {sizeof two, 2};
    configure_threads(2);
    CHECK_OK(spw_adam_step(&options, &expected.tensor, 1, NULL));

    struct copy copies[3];
    for (int i = 0; i < 3; i++) copies[i] = load(info.dli_fname, i);
    CHECK_OK(spw_ds_adam_create(4, 0.9f, 0.999f, 1));
    CHECK(copies[0].create(4, 0.9f, 0.999f, 1) == SPW_OK && copies[0].destroy(4) == SPW_OK);
    CHECK(copies[0].destroy(4) == SPW_ERR_UNKNOWN_ID && copies[1].destroy(4) == SPW_ERR_UNKNOWN_ID);
    CHECK(strlen(copies[1].last_error()) > 0 && strlen(copies[2].last_error()) == 0);
    CHECK_OK(spw_ds_adam_destroy(4));

    for (int round = 0; round < 3; round++) {
        for (int i = 0; i < 3; i++) {
            struct problem mine = make_mixed(LARGE, 8);
            CHECK(copies[i].configure(&two) == SPW_OK);
            CHECK(copies[i].step(&options, &mine.tensor, 1, NULL) == SPW_OK);
            CHECK(same(&mine, &expected));
            release(&mine);
        }
    }
    // The workers of this copy sleep inside its code; they must be able to wake.
    for (int i = 0; i < 2; i++) CHECK(dlclose(copies[i].handle) == 0);
    usleep(50000);
    struct problem mine = make_mixed(LARGE, 8);
    CHECK(copies[2].step(&options, &mine.tensor, 1, NULL) == SPW_OK);
    CHECK(same(&mine, &expected));
    release(&mine);
    release(&expected);
    return 0;
}
