// Build: forks
// A count or size that cannot be is a status, never an abort and never gigabytes that nobody uses: every function that
// takes one is called with the values at which integers and machines end, under a limit of 16 GiB of address space.
//
// The address sanitizer reserves terabytes, so that the program is built without. Left out are lengths of memory that the
// caller promises to be there (elements of a tensor, bytes of a transfer, handles of a wait) beyond what the program has:
// no library can tell. A call may succeed where a value is good.

#include "fake_cuda.h"

#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

static const uint64_t VALUES[] = {
    0,           1,           2,           63,          64,          65,          (1ull << 16) - 1, 1ull << 16,
    65537,       1ull << 20,  1ull << 31,  (1ull << 31) + 1, (1ull << 32) - 1, 1ull << 32, (1ull << 32) + 1, 1ull << 40,
    1ull << 48,  1ull << 56,  1ull << 61,  1ull << 62,  (1ull << 63) - 1, 1ull << 63, UINT64_MAX - 4095, UINT64_MAX,
};
enum { COUNT = sizeof VALUES / sizeof VALUES[0], ROOM = 256 << 20 };
#define EACH(value) for (uint64_t at = 0, value = 0; at < COUNT && (value = VALUES[at], 1); at++)
#define EACH32(value) for (uint64_t at = 0, value = 0; at < COUNT && (value = VALUES[at], 1); at++) if (value <= UINT32_MAX)

// Zeros for whatever a function may read before it refuses; untouched pages cost nothing.
static unsigned char *zeros;

static void limit_address_space(uint64_t gib) {
    struct rlimit limit = {gib << 30, RLIM_INFINITY};
    CHECK(setrlimit(RLIMIT_AS, &limit) == 0);
}

// Any status but that of a caught bug.
static spw_status sane(int line, const char *call, spw_status status) {
    if (status == SPW_ERR_INTERNAL || strcmp(spw_status_name(status), "SPW_ERR_UNKNOWN") == 0) {
        fail(__FILE__, line, "%s: %s (%s)", call, spw_status_name(status), spw_last_error());
    }
    if (status != SPW_OK && spw_last_error()[0] == 0) fail(__FILE__, line, "%s: no message", call);
    return status;
}
#define SANE(call) sane(__LINE__, #call, (call))

static void pools(void) {
    // These take real memory where the size is good.
    limit_address_space(1);
    EACH(value) {
        for (int swapped = 0; swapped < 2; swapped++) {
            for (uint32_t flags = 0; flags < 8; flags++) {
                if (value > 65 && value < (1ull << 31) && flags > 1) continue;
                spw_pool_options options = {.struct_size = sizeof options, .flags = flags | SPW_POOL_NO_LOCK};
                options.block_bytes = swapped ? value : 4096;
                options.block_count = swapped ? 2 : value;
                options.node = UINT32_MAX;
                if (value == 1ull << 20) continue;
                spw_pool *pool = NULL;
                if (SANE(spw_pool_open(&options, &pool)) != SPW_OK) continue;
                CHECK(options.block_bytes * options.block_count < 1ull << 30);
                CHECK_OK(spw_pool_close(pool));
            }
        }
    }
    const spw_pool_options both[] = {
        {sizeof *both, 0, 4096, 1ull << 40, 0, 0}, {sizeof *both, 0, 1, UINT64_MAX, 0, 0},
        {sizeof *both, 0, UINT64_MAX, UINT64_MAX, 0, 0}, {sizeof *both, 0, 1ull << 32, 1ull << 32, 0, 0},
        {sizeof *both, 0, 1ull << 33, (1ull << 31) + 1, 0, 0},
    };
    for (int i = 0; i < 5; i++) {
        spw_pool *pool = NULL;
        CHECK(SANE(spw_pool_open(&both[i], &pool)) != SPW_OK && pool == NULL);
    }
    const spw_pool_options good = {.struct_size = sizeof good, .block_bytes = 5000, .block_count = 2};
    spw_pool *pool = NULL;
    void *block = NULL;
    CHECK_OK(spw_pool_open(&good, &pool));
    CHECK_OK(spw_pool_alloc(pool, &block));
    EACH(value) {
        uint32_t contains = 7;
        SANE(spw_pool_contains(pool, block, value, &contains));
        CHECK(contains == (value <= 2 * 8192));
        SANE(spw_pool_contains(pool, (void *)(uintptr_t)value, value, &contains));
        if (SANE(spw_pool_register(pool, (char *)block + 16384, value)) == SPW_OK) {
            CHECK_OK(spw_pool_unregister(pool, (char *)block + 16384));
        }
        SANE(spw_pool_register(pool, (void *)(uintptr_t)value, UINT64_MAX));
        SANE(spw_pool_free(pool, (void *)(uintptr_t)value));
    }
    CHECK_OK(spw_pool_free(pool, block));
    CHECK_OK(spw_pool_close(pool));
    EACH(value) {
        void *start = NULL;
        if (SANE(spw_pinned_alloc(value, &start)) == SPW_OK) {
            uint32_t contains = 7;
            CHECK_OK(spw_pinned_contains(start, UINT64_MAX, &contains));
            CHECK(contains == 0 && value < 1ull << 31);
            CHECK_OK(spw_pinned_free(start));
        }
        SANE(spw_pinned_free((void *)(uintptr_t)value));
    }
    limit_address_space(16);
}

static void threads(void) {
    EACH32(value) {
        const spw_thread_options options = {sizeof options, (uint32_t)value};
        CHECK((SANE(spw_threads_configure(&options)) == SPW_OK) == (value <= 4096));
    }
    configure_threads(2);
}

static void tensors(void) {
    spw_adam_options adam = adam_options();
    spw_lion_options lion;
    spw_adagrad_options adagrad;
    CHECK_OK(spw_lion_options_init(&lion, sizeof lion));
    CHECK_OK(spw_adagrad_options_init(&adagrad, sizeof adagrad));
    adagrad.step = 1;
    spw_adam *object = NULL;
    spw_undo *undo = NULL;
    CHECK_OK(spw_adam_open(&adam, &object));
    const spw_undo_options undo_options = {.struct_size = sizeof undo_options, .elements = 1, .tensors = 1};
    CHECK_OK(spw_undo_open(&undo_options, &undo));
    // An array of which only the first struct says anything.
    spw_tensor *many = (spw_tensor *)zeros;
    EACH(value) {
        SANE(spw_adam_options_init((spw_adam_options *)zeros, value <= 4096 ? 0 : value));
        SANE(spw_adagrad_options_init((spw_adagrad_options *)zeros, value <= 4096 ? 0 : value));
        SANE(spw_lion_options_init((spw_lion_options *)zeros, value <= 4096 ? 0 : value));
        many->struct_size = sizeof *many;
        SANE(spw_adam_step(&adam, many, value, NULL));
        SANE(spw_lion_step(&lion, many, value, NULL));
        SANE(spw_adagrad_step(&adagrad, many, value, NULL));
        SANE(spw_adam_advance(object, many, value, NULL));
        SANE(spw_undo_adam_step(undo, &adam, many, value, NULL));
        SANE(spw_undo_lion_step(undo, &lion, many, value, NULL));
        SANE(spw_undo_adagrad_step(undo, &adagrad, many, value, NULL));
    }
    // Elements past any address space.
    struct problem good = make_mixed(100, 1);
    spw_step_stats stats = step_stats();
    EACH(value) {
        SANE(spw_dtype_size((uint32_t)value));
        if (value > 0 && value < 1ull << 56) continue;
        spw_tensor tensor = good.tensor;
        tensor.n = value;
        SANE(spw_adam_step(&adam, &tensor, 1, &stats));
        SANE(spw_undo_adam_step(undo, &adam, &tensor, 1, &stats));
        SANE(spw_grad_stats(good.tensor.grad, SPW_DTYPE_BF16, value, 1, &stats));
        CHECK_OK(spw_ds_adam_create(7, 0.9f, 0.99f, 1));
        SANE(spw_ds_adam_update(7, value, 1e-3f, 0.9f, 0.99f, 1e-8f, 0, 1, &tensor));
        CHECK_OK(spw_ds_adam_destroy(7));
    }
    release(&good);
    CHECK_OK(spw_adam_close(object));
    CHECK_OK(spw_undo_close(undo));
    for (uint32_t mode = 0; mode < 3; mode++) {
        EACH(value) {
            for (int swapped = 0; swapped < 3; swapped++) {
                const spw_undo_options options = {sizeof options, mode, swapped == 1 ? 1 : value, swapped ? value : 1};
                if (SANE(spw_undo_open(&options, &undo)) != SPW_OK) continue;
                uint64_t bytes = 1;
                CHECK_OK(spw_undo_log_bytes(undo, &bytes));
                CHECK_OK(spw_undo_commit(undo, 1));
                CHECK_OK(spw_undo_close(undo));
            }
        }
    }
}

static void speculation(void) {
    spw_adam_options adam = adam_options();
    EACH32(value) {
        const spw_spec_options options = {sizeof options, (uint32_t)value, SPW_UNDO_DELTA, SPW_SPEC_PUBLISH_FINAL};
        spw_spec *spec = NULL;
        if (SANE(spw_spec_open(&options, &spec)) != SPW_OK) continue;
        CHECK(value <= 1ull << 20);
        CHECK_OK(spw_spec_begin_adam(spec, &adam, 1));
        memset(zeros, 0, sizeof(spw_tensor));
        ((spw_tensor *)zeros)->struct_size = sizeof(spw_tensor);
        EACH(other) {
            uint32_t state = 0, buckets[1];
            size_t found = 0;
            SANE(spw_spec_submit(spec, (uint32_t)other, (spw_tensor *)zeros, other, NULL));
            SANE(spw_spec_ready(spec, (uint32_t)other, &state));
            SANE(spw_spec_wait(spec, (uint32_t)other, 0));
            SANE(spw_spec_publish_to(spec, (uint32_t)other, NULL, (spw_gpu_copy *)zeros, other));
            CHECK_OK(spw_spec_withdrawn(spec, buckets, other == 0 ? 0 : 1, &found));
        }
        CHECK_OK(spw_spec_abort(spec));
        CHECK_OK(spw_spec_close(spec));
    }
}

static void plans(void) {
    const spw_plan_rates rates = {sizeof rates, 0, 2e9, 0, 25e9, 8e9, 8e9, 0, 0};
    uint32_t *sites = (uint32_t *)(zeros + (64 << 20));
    spw_plan_result result = {.struct_size = sizeof result};
    uint64_t needed = 0;
    EACH(value) {
        for (int field = 0; field < 5; field++) {
            spw_plan_shape shape = {sizeof shape, SPW_WIRE_F32, 1, 2, 20, NULL, 1000000, 1 << 20};
            if (field == 0) shape.count = value;
            if (field == 1) shape.size = value;
            if (field == 2) shape.chunk = value;
            if (field == 3) shape.slots = (uint32_t)value;
            if (field == 4) shape.count = 1, shape.size = value, shape.chunk = 1;
            if (field == 0 && value > 64 && value <= 65536) shape.size = 16;
            sites[0] = SPW_SITE_GPU;
            SANE(spw_plan_predict(&rates, &shape, sites, 0.1, &result));
            // The largest that is good once: a plan of 65536 subgroups takes a second.
            if (shape.count > 64 && shape.count < 65536) continue;
            SANE(spw_plan_trace(&rates, &shape, sites, 0.1, NULL, value, &needed));
            spw_plan_options options = {sizeof options, SPW_PLAN_EQ1, 0, 0, 0.1};
            SANE(spw_plan_interleave(&rates, &shape, &options, NULL, &result));
        }
        for (uint32_t mode = 0; mode < 5; mode++) {
            const spw_plan_shape shape = {sizeof shape, SPW_WIRE_NATIVE, 0, 2, 12, NULL, 1000000, 1 << 20};
            spw_plan_options options = {sizeof options, mode, value, 0, 0.1};
            SANE(spw_plan_interleave(&rates, &shape, &options, NULL, &result));
            options.parameter = 2, options.residents = value;
            SANE(spw_plan_interleave(&rates, &shape, &options, NULL, &result));
        }
        const spw_plan_bucket bucket = {sizeof bucket, 0, 0.01, 0.5, 0.01, 0.001, 0.02};
        uint64_t kept = 0, printed = 0, next = 0, best = 0;
        SANE(spw_plan_tail(&bucket, value, value, &kept, &printed));
        SANE(spw_plan_tail(&bucket, UINT32_MAX, value, &kept, &printed));
        const double seconds = 1.5;
        SANE(spw_plan_tail_next(&value, &seconds, 1, value, value, &next, &best));
        SANE(spw_plan_tail_next(&value, &seconds, 1, 3, 8, &next, &best));
        SANE(spw_plan_tail_next(NULL, NULL, 0, value, 8, &next, &best));
    }
}

static void interleaved(void) {
    float memory[4] = {0};
    EACH(value) {
        for (int field = 0; field < 4; field++) {
            spw_interleave_options options = {.struct_size = sizeof options, .grad_dtype = SPW_DTYPE_F32};
            // Elements that are not there, which nothing looks at before a step.
            spw_interleave_subgroup subgroup = {.struct_size = sizeof subgroup, .n = 1, .param = memory,
                                                .exp_avg = memory + 1, .exp_avg_sq = memory + 2, .grad = memory + 3};
            size_t count = 1;
            if (field == 0) count = value > 1 && value <= 65536 ? 0 : value;
            if (field == 1) options.slots = (uint32_t)value;
            if (field == 2) options.chunk = value;
            if (field == 3) subgroup.n = value;
            spw_interleave *update = NULL;
            if (SANE(spw_interleave_open(&options, &subgroup, count, &update)) != SPW_OK) continue;
            if (field < 3) {
                spw_adam_options adam = adam_options();
                uint64_t needed = 0, away = 0;
                uint32_t ready = 0;
                EACH(other) {
                    SANE(spw_interleave_set_plan(update, (uint32_t *)(zeros + (64 << 20)),
                                                 other <= 65537 ? other : UINT64_MAX));
                    SANE(spw_interleave_gradient(update, other + 1, 0));
                    SANE(spw_interleave_params_free(update, other + 1, 0));
                    SANE(spw_interleave_publish(update, other + 1, 0));
                    SANE(spw_interleave_is_ready(update, other, &ready));
                    SANE(spw_interleave_trace(update, NULL, other, &needed));
                    SANE(spw_interleave_away(update, (uint64_t *)zeros, other <= 1 ? other : 1, &away));
                    if (other > 1ull << 32) SANE(spw_interleave_begin(update, &adam, other, 0));
                    if (other > 1ull << 32) SANE(spw_interleave_begin_ds_adam(update, 9, NULL, other, 0));
                }
            }
            CHECK_OK(spw_interleave_close(update));
        }
    }
}

static void engine(void) {
    EACH(value) {
        for (int field = 0; field < 5; field++) {
            spw_io_options options = {.struct_size = sizeof options, .backend = SPW_IO_THREADS};
            if (field == 0) options.queue_depth = (uint32_t)value;
            if (field == 1) options.block_bytes = value;
            if (field == 2) options.workers = (uint32_t)value;
            if (field == 3) options.deadline_ms = value;
            if (field == 4) options.file_mode = (uint32_t)value;
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
        uint32_t holds = 0;
        spw_io_request request = {.struct_size = sizeof request, .fd = fd, .buffer = zeros, .bytes = 100};
        request.offset = value;
        if (SANE(spw_io_read(io, &request, &handle)) == SPW_OK) SANE(spw_io_wait(io, handle, -1, &moved));
        if (value > 1ull << 50 && SANE(spw_io_write(io, &request, &handle)) == SPW_OK) {
            CHECK(SANE(spw_io_wait(io, handle, -1, &moved)) != SPW_OK);
        }
        request.offset = 0, request.bytes = value <= ROOM || value > INT64_MAX ? value : 0;
        if (SANE(spw_io_read(io, &request, &handle)) == SPW_OK) SANE(spw_io_wait(io, handle, -1, &moved));
        request.bytes = 1, request.deadline_ms = value;
        if (SANE(spw_io_read(io, &request, &handle)) == SPW_OK) SANE(spw_io_wait(io, handle, (int64_t)value, &moved));
        SANE(spw_io_wait(io, value, 0, &moved));
        SANE(spw_io_cancel(io, value));
        SANE(spw_io_holds_memory(io, value, &holds));
        // No operation has the handle 0, so that the first is refused.
        SANE(spw_io_wait_many(io, (uint64_t *)(zeros + (64 << 20)), value <= 65537 || value > 1ull << 60 ? value : 0, 0));
        SANE(spw_io_wait_many(io, NULL, value, 0));
        SANE(spw_io_describe(io, text, value < sizeof text ? value : sizeof text));
    }
    SANE(spw_io_wait_all(io, -1, NULL));
    CHECK_OK(spw_io_close(io, -1));
    CHECK(unlink(path) == 0 && close(fd) == 0);
}

static spw_tier *open_tier(const char *directory, int field, uint64_t value) {
    spw_tier_path path = {.struct_size = sizeof path, .directory = directory};
    spw_tier_options options = {.struct_size = sizeof options, .job = "huge", .host = "one", .paths = &path,
                                .path_count = 1, .block_bytes = 4096, .io_backend = SPW_IO_THREADS};
    if (field == 0) options.path_count = value > 1 && value <= 256 ? 0 : value;
    if (field == 1) options.block_bytes = value;
    if (field == 2) options.stall_ms = value;
    if (field == 3) options.queue_depth = (uint32_t)value;
    if (field == 4) path.limit_bytes = value;
    if (field == 5) path.reserve_bytes = value;
    if (field == 6) options.world = (uint32_t)value;
    if (field == 7) options.at_step = value, options.flags = SPW_TIER_AT_STEP;
    spw_tier *tier = NULL;
    spw_tier_steps_info steps = {.struct_size = sizeof steps};
    SANE(spw_tier_steps(&options, &steps));
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
                SANE(spw_tier_put(tier, extent, memory, -1, &ticket)) == SPW_OK) {
                SANE(spw_tier_wait(tier, ticket, 60000, NULL));
            }
            SANE(spw_tier_destroy(tier));
        }
    }
    spw_tier *tier = open_tier(directory, 4, 64 << 20);
    CHECK(tier != NULL);
    uint32_t small = 0;
    EACH(value) {
        char name[32];
        uint32_t extent = 0;
        snprintf(name, sizeof name, "extent %llx", (unsigned long long)value);
        uint64_t streams[64] = {value, value};
        if (SANE(spw_tier_define(tier, name, streams, value <= 64 ? value : 2, &extent)) == SPW_OK && value > 64) {
            if (value <= 1 << 20 && SANE(spw_tier_put(tier, extent, memory, -1, &ticket)) == SPW_OK) {
                SANE(spw_tier_wait(tier, ticket, 60000, NULL));
                small = extent;
            }
        }
        SANE(spw_tier_define(tier, name, streams, value > 64 ? value : 65, &extent));
        const uint32_t blocks[1] = {(uint32_t)value};
        SANE(spw_tier_put_striped(tier, small, memory, blocks, value > 1 && value <= 65536 ? 1 : value, &ticket));
        SANE(spw_tier_put(tier, (uint32_t)value | 1u << 20, memory, (int32_t)value, &ticket));
        SANE(spw_tier_get(tier, (uint32_t)value | 1u << 20, (void *const *)memory, &ticket));
        SANE(spw_tier_wait(tier, value | 1ull << 40, 0, NULL));
        spw_tier_extent_info info = {.struct_size = sizeof info};
        SANE(spw_tier_extent_get(tier, value, &info, name, value < sizeof name ? value : sizeof name));
        spw_tier_path_info path = {.struct_size = sizeof path};
        SANE(spw_tier_path_get(tier, (uint32_t)value, &path, name, value < sizeof name ? value : sizeof name));
        SANE(spw_tier_evacuate(tier, (uint32_t)value | 2));
        SANE(spw_tier_path_set(tier, (uint32_t)value | 2, SPW_TIER_HEALTHY));
        SANE(spw_tier_remove(tier, (uint32_t)value | 1u << 20));
        if (value > 1ull << 30) INVALID(spw_tier_commit(tier, 1, zeros, value), "payload_bytes");
        SANE(spw_tier_commit(tier, 1, NULL, value));
        spw_tier_opened_info opened = {.struct_size = sizeof opened};
        SANE(spw_tier_opened(tier, &opened, zeros, value));
    }
    SANE(spw_tier_rollback(tier));
    EACH(value) {
        for (int field = 0; field < 4; field++) {
            const uint64_t elements[2] = {field == 0 ? value : 1000, 1000};
            spw_swap_options options = {.struct_size = sizeof options, .flags = SPW_SWAP_NO_LOCK, .elements = elements};
            options.subgroups = field == 1 && value > 2 ? (value > 1ull << 20 ? value : 2) : 2;
            options.host_bytes = field == 2 ? value : 1 << 20;
            options.patience_seconds = field == 3 ? (double)value : 1;
            if (field == 0 && value > 65537) options.host_bytes = value < UINT64_MAX / 64 ? value * 64 : UINT64_MAX;
            if (field == 0 && value >= 1ull << 20 && value < 1ull << 33) continue;
            spw_swap_budget budget = {.struct_size = sizeof budget};
            SANE(spw_swap_plan(&options, value, &budget));
            SANE(spw_swap_plan(&options, 1, &budget));
            spw_swap *swap = NULL;
            if (SANE(spw_swap_open(tier, &options, &swap)) != SPW_OK) continue;
            if (field > 0) {
                SANE(spw_swap_read(swap, value, (float *)zeros, NULL, NULL));
                SANE(spw_swap_write(swap, value | 2, (float *)zeros, (float *)zeros, (float *)zeros));
                SANE(spw_swap_commit(swap, 1, zeros, value > 1ull << 30 ? value : 0));
                spw_adam_options adam = adam_options();
                memset(zeros, 0, sizeof(spw_tensor));
                ((spw_tensor *)zeros)->struct_size = sizeof(spw_tensor);
                SANE(spw_swap_adam_step(swap, &adam, (spw_tensor *)zeros, value, NULL));
                SANE(spw_swap_ds_adam_step(swap, 9, NULL, (spw_tensor *)zeros, value, NULL, NULL));
            }
            CHECK_OK(spw_swap_close(swap));
            SANE(spw_tier_rollback(tier));
        }
    }
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
        SANE(spw_gpu_stream_wait(gpu, value, 0));
        memset(zeros, 0, sizeof(spw_tensor));
        ((spw_tensor *)zeros)->struct_size = sizeof(spw_tensor);
        SANE(spw_gpu_adam_step(gpu, &adam, (spw_tensor *)zeros, value, 0, NULL));
    }
    CHECK_OK(spw_gpu_close(gpu));
}

int main(void) {
    if (sizeof(void *) < 8) skip("an address space of 32 bits");
    if (getenv("SPILLWAY_TEST_EMULATOR") != NULL) skip("an emulator does not limit the address space of its program");
    limit_address_space(16);
    // The disk belongs to others, too: a file that grows past this is refused as on a full one.
    const struct rlimit file_limit = {256 << 20, RLIM_INFINITY};
    CHECK(setrlimit(RLIMIT_FSIZE, &file_limit) == 0 && signal(SIGXFSZ, SIG_IGN) != SIG_ERR);
    zeros = mmap(NULL, ROOM, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    CHECK(zeros != MAP_FAILED);
    pools();
    threads();
    tensors();
    speculation();
    plans();
    interleaved();
    engine();
    tiered();
    gpu();
    return 0;
}
