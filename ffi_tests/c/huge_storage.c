// Build: forks
// Like huge_sizes: impossible counts and sizes, passed to files, tiers, tiered updates and a GPU.

#define SPW_EXPERIMENTAL
#include "huge_values.h"

#include <spillway/gpu.h>

static void engine(void) {
    EACH(value) {
        for (int field = 0; field < 5; field++) {
            spw_io_options options = {.struct_size = sizeof options, .backend = SPW_IO_BACKEND_THREADS};
            if (field == 0) options.queue_depth = (uint32_t)value;
            if (field == 1) options.block_bytes = value;
            if (field == 2) options.workers = (uint32_t)value;
            if (field == 3) options.turns = (uint32_t)value;
            if (field == 4) options.turn_timeout_ms = value;
            spw_io *io = NULL;
            if (SANE(spw_io_open(&options, &io)) == SPW_OK) CHECK_OK(spw_io_close(io, -1));
        }
    }
    spw_io *io = NULL;
    CHECK_OK(spw_io_open(NULL, &io));
    char path[] = "huge_sizes.XXXXXX", text[64];
    const int fd = mkstemp(path);
    CHECK(fd >= 0 && ftruncate(fd, 10000) == 0);
    EACH(value) {
        uint64_t handle = 0, moved = 0;
        spw_io_request request = {.struct_size = sizeof request, .fd = fd, .buffer = zeros, .bytes = 100};
        request.offset = value;
        if (SANE(spw_io_read(io, &request, &handle)) == SPW_OK) SANE(spw_io_wait(io, &handle, 1, -1, &moved));
        if (value > 1ull << 50 && SANE(spw_io_write(io, &request, &handle)) == SPW_OK) {
            CHECK(SANE(spw_io_wait(io, &handle, 1, -1, &moved)) != SPW_OK);
        }
        request.offset = 0, request.bytes = value <= ROOM || value > INT64_MAX ? value : 0;
        if (SANE(spw_io_read(io, &request, &handle)) == SPW_OK) SANE(spw_io_wait(io, &handle, 1, -1, &moved));
        request.bytes = 1, request.deadline_ms = value;
        if (SANE(spw_io_read(io, &request, &handle)) == SPW_OK) SANE(spw_io_wait(io, &handle, 1, (int64_t)value, &moved));
        SANE(spw_io_wait(io, &value, 1, 0, &moved));
        // No operation has the handle 0, so the wait refuses the first one.
        SANE(spw_io_wait(io, (uint64_t *)(zeros + (64 << 20)), value <= 65537 || value > 1ull << 60 ? value : 0, 0, NULL));
        SANE(spw_io_wait(io, NULL, value, 0, NULL));
        SANE(spw_io_describe(io, text, value < sizeof text ? value : sizeof text, NULL));
    }
    SANE(spw_io_wait(io, NULL, SPW_IO_ALL, -1, NULL));
    CHECK_OK(spw_io_close(io, -1));
    CHECK(unlink(path) == 0 && close(fd) == 0);
}

static spw_tier *open_tier(const char *directory, int field, uint64_t value) {
    spw_tier_path path = {.struct_size = sizeof path, .directory = directory};
    spw_tier_options options = {.struct_size = sizeof options, .job = "huge", .host = "one", .paths = &path,
                                .path_count = 1, .block_bytes = 4096, .io_backend = SPW_IO_BACKEND_THREADS};
    if (field == 0) options.path_count = value > 1 && value <= 256 ? 0 : value;
    if (field == 1) options.block_bytes = value;
    if (field == 2) options.io_timeout_ms = value;
    if (field == 3) options.queue_depth = (uint32_t)value;
    if (field == 4) path.limit_bytes = value;
    if (field == 5) path.reserve_bytes = value;
    if (field == 6) options.world = (uint32_t)value;
    if (field == 7) options.at_step = value, options.flags = SPW_TIER_FLAG_AT_STEP;
    spw_tier *tier = NULL;
    spw_tier_steps_info steps = {.struct_size = sizeof steps};
    SANE(spw_tier_get_steps(&options, &steps));
    SANE(spw_tier_open(&options, &tier));
    return tier;
}

static void tiered(void) {
    char directory[] = "huge_sizes_tier.XXXXXX";
    CHECK(mkdtemp(directory) != NULL);
    const void *memory[64];
    for (int i = 0; i < 64; i++) memory[i] = zeros;
    uint64_t ticket = 0;
    EACH(value) {
        for (int field = 0; field < 8; field++) {
            spw_tier *tier = open_tier(directory, field, value);
            if (tier == NULL) continue;
            const uint64_t bytes = 100;
            uint32_t extent = 0;
            if (SANE(spw_tier_define(tier, "one", &bytes, 1, &extent)) == SPW_OK &&
                SANE(spw_tier_put(tier, extent, memory, NULL, &ticket)) == SPW_OK) {
                SANE(spw_tier_wait(tier, ticket, 60000, NULL));
            }
            SANE(spw_tier_destroy(tier));
        }
    }
    // An open that times out after a millisecond keeps the directory until its system call returns.
    spw_tier *tier = NULL;
    for (int tries = 0; tier == NULL && tries < 3000; tries++) {
        usleep(tries > 0 ? 10000 : 0);
        tier = open_tier(directory, 4, 64 << 20);
    }
    CHECK(tier != NULL);
    uint32_t small = 0;
    EACH(value) {
        char name[32];
        uint32_t extent = 0;
        snprintf(name, sizeof name, "extent %llx", (unsigned long long)value);
        uint64_t streams[64] = {value, value};
        if (SANE(spw_tier_define(tier, name, streams, value <= 64 ? value : 2, &extent)) == SPW_OK && value > 64) {
            if (value <= 1 << 20 && SANE(spw_tier_put(tier, extent, memory, NULL, &ticket)) == SPW_OK) {
                SANE(spw_tier_wait(tier, ticket, 60000, NULL));
                small = extent;
            }
        }
        SANE(spw_tier_define(tier, name, streams, value > 64 ? value : 65, &extent));
        const uint32_t blocks[1] = {(uint32_t)value};
        spw_tier_target target = SPW_TIER_TARGET_INIT;
        target.path = (uint32_t)value;
        SANE(spw_tier_put(tier, (uint32_t)value | 1u << 20, memory, &target, &ticket));
        target.path_count = value;
        SANE(spw_tier_put(tier, small, memory, &target, &ticket));
        target.path_blocks = blocks, target.path_count = value > 1 && value <= 65536 ? 1 : value;
        SANE(spw_tier_put(tier, small, memory, &target, &ticket));
        SANE(spw_tier_get(tier, (uint32_t)value | 1u << 20, (void *const *)memory, &ticket));
        SANE(spw_tier_wait(tier, value | 1ull << 40, 0, NULL));
        spw_tier_extent_info info = {.struct_size = sizeof info};
        SANE(spw_tier_get_extent(tier, value, &info, name, value < sizeof name ? value : sizeof name, NULL));
        spw_tier_path_info path = {.struct_size = sizeof path};
        SANE(spw_tier_get_path(tier, (uint32_t)value, &path, name, value < sizeof name ? value : sizeof name, NULL));
        SANE(spw_tier_evacuate(tier, (uint32_t)value | 2));
        SANE(spw_tier_set_path(tier, (uint32_t)value | 2, SPW_TIER_HEALTH_HEALTHY));
        SANE(spw_tier_remove(tier, (uint32_t)value | 1u << 20));
        if (value > 1ull << 30) INVALID(spw_tier_commit(tier, 1, zeros, value), "payload_bytes");
        SANE(spw_tier_commit(tier, 1, NULL, value));
        spw_tier_opened_info opened = {.struct_size = sizeof opened};
        SANE(spw_tier_get_opened(tier, &opened, zeros, value));
    }
    SANE(spw_tier_rollback(tier));
    CHECK_OK(spw_ds_adam_create(9, 0.9f, 0.999f, 1));
    EACH(value) {
        for (int field = 0; field < 3; field++) {
            const uint64_t elements[2] = {field == 0 ? value : 1000, 1000};
            spw_swap_options options = {.struct_size = sizeof options, .flags = SPW_SWAP_FLAG_NO_LOCK, .elements = elements};
            options.subgroups = field == 1 && value > 2 ? (value > 1ull << 20 ? value : 2) : 2;
            options.host_memory = field == 2 ? value : 1 << 20;
            if (field == 0 && value > 65537) options.host_memory = value < UINT64_MAX / 64 ? value * 64 : UINT64_MAX;
            if (field == 0 && value >= 1ull << 20 && value < 1ull << 33) continue;
            spw_swap_budget budget = {.struct_size = sizeof budget};
            SANE(spw_swap_plan_budget(&options, value, &budget));
            SANE(spw_swap_plan_budget(&options, 1, &budget));
            spw_swap *swap = NULL;
            if (SANE(spw_swap_open(tier, &options, &swap)) != SPW_OK) continue;
            if (field > 0) {
                SANE(spw_swap_read(swap, value, NULL, (float *)zeros, NULL, NULL));
                SANE(spw_swap_write(swap, value | 2, (float *)zeros, (float *)zeros, (float *)zeros));
                SANE(spw_swap_commit(swap, 1, zeros, value > 1ull << 30 ? value : 0));
                const spw_adam_options adam = adam_options();
                const spw_ds_adam_call call = ds_adam_call(1);
                memset(zeros, 0, sizeof(spw_tensor));
                ((spw_tensor *)zeros)->struct_size = sizeof(spw_tensor);
                SANE(spw_swap_adam_step(swap, &adam, (spw_tensor *)zeros, value, NULL));
                SANE(spw_swap_ds_adam_step(swap, 9, NULL, (spw_tensor *)zeros, value, NULL, NULL));
                SANE(spw_swap_ds_adam_step(swap, 9, &call, (spw_tensor *)zeros, value, NULL, NULL));
            }
            CHECK_OK(spw_swap_close(swap));
            SANE(spw_tier_rollback(tier));
        }
    }
    CHECK_OK(spw_ds_adam_destroy(9));
    CHECK_OK(spw_tier_destroy(tier));
    char command[64];
    snprintf(command, sizeof command, "rm -rf %s", directory);
    CHECK(system(command) == 0);
}

static void gpu(void) {
    use_fake_driver();
    EACH(value) {
        for (int field = 0; field < 2; field++) {
            spw_gpu_options options = {sizeof options, field ? 0 : (uint32_t)value, field ? value : 4096};
            spw_gpu *gpu = NULL;
            if (SANE(spw_gpu_open(&options, &gpu)) == SPW_OK) CHECK_OK(spw_gpu_close(gpu));
        }
    }
    spw_gpu *gpu = open_gpu(0);
    spw_adam_options adam = adam_options();
    EACH(value) {
        uint64_t ticket = 0;
        if (value == 0 || value > 1ull << 60) {
            const spw_gpu_copy copy = {.struct_size = sizeof copy, .device_dtype = SPW_DTYPE_F32,
                                       .host_dtype = SPW_DTYPE_F32, .n = value, .device = 4096, .host = zeros};
            SANE(spw_gpu_copy_start(gpu, &copy, &ticket));
        }
        SANE(spw_gpu_copy_wait(gpu, value, (int64_t)value));
        SANE(spw_gpu_copy_stream_wait(gpu, value, 0));
        memset(zeros, 0, sizeof(spw_tensor));
        ((spw_tensor *)zeros)->struct_size = sizeof(spw_tensor);
        SANE(spw_gpu_adam_step(gpu, &adam, (spw_tensor *)zeros, value, 0, NULL));
    }
    CHECK_OK(spw_gpu_close(gpu));
}

int main(void) {
    set_up();
    engine();
    tiered();
    gpu();
    return 0;
}
