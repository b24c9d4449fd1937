// Proves that spillway.hpp does the same as the C calls: options, arrays and dtypes, exceptions, timeouts, and owning
// handles that close their object once.

#define SPW_EXPERIMENTAL
#include <array>
#include <spillway.hpp>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <string>
#include <vector>

#define CHECK(condition)                                                     \
    do {                                                                     \
        if (!(condition)) {                                                  \
            std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
            std::exit(1);                                                    \
        }                                                                    \
    } while (0)

namespace fs = std::filesystem;
using std::chrono::milliseconds;

template <class Call>
static spw_status status_of(Call call) {
    try {
        call();
    } catch (const spillway::error &failure) {
        CHECK(std::strstr(failure.what(), failure.name()) == failure.what());
        CHECK(std::strlen(failure.what()) > std::strlen(failure.name()) + 2);
        return failure.status();
    }
    return SPW_OK;
}

template <class Call>
static bool too_long(Call call) {
    try {
        call();
    } catch (const std::length_error &) {
        return true;
    }
    return false;
}

// A step through the class gives the bits of the C call, and the array types set the dtypes.
static void steps() {
    constexpr std::size_t n = 1000;
    std::vector<float> param(n, 1.0f), exp_avg(n), exp_avg_sq(n), plain(n, 1.0f), m(n), v(n);
    std::vector<spillway::bf16> grad(n, spillway::bf16{0x3f80}), copy(n);
    auto options = spillway::make<spw_adam_options>();
    auto stats = spillway::make<spw_step_stats>();
    auto tensor = spillway::tensor(param, grad, exp_avg, exp_avg_sq, copy);
    CHECK(tensor.grad_dtype == SPW_DTYPE_BF16 && tensor.param_dtype == SPW_DTYPE_F32);
    CHECK(tensor.state_dtype == SPW_DTYPE_F32 && tensor.copy_dtype == SPW_DTYPE_BF16 && tensor.n == n);
    spillway::adam_step(options, tensor, &stats);
    CHECK(stats.sum_squares == n && stats.nonfinite == 0);

    spw_adam_options same = SPW_ADAM_OPTIONS_INIT;
    auto other = spillway::tensor(plain, grad, m, v);
    spillway::check(spw_adam_step(&same, &other, 1, nullptr));
    CHECK(param == plain && param[0] < 1.0f && exp_avg == m && exp_avg_sq == v);
    CHECK(static_cast<std::uint16_t>(copy[0]) != 0);

    std::vector<float> none;
    spillway::lion_step(spillway::make<spw_lion_options>(), spillway::tensor(param, grad, exp_avg, none));
    spillway::signum_step(spillway::make<spw_signum_options>(), spillway::tensor(param, grad, exp_avg, none));
    spillway::signum_check(spillway::make<spw_signum_options>(), spillway::tensor(param, grad, exp_avg, none));
    spillway::adagrad_step(spillway::make<spw_adagrad_options>(), spillway::tensor(param, grad, none, exp_avg_sq));
    CHECK(status_of([&] { spillway::adam_step(options, spillway::tensor(param, grad, exp_avg, none)); }) ==
          SPW_ERR_INVALID_ARGUMENT);
    std::vector<float> shorter(n - 1);
    CHECK(too_long([&] { (void)spillway::tensor(param, shorter, exp_avg, exp_avg_sq); }));
    const auto views = spillway::tensor(spillway::span(param.data(), 8), spillway::span(grad.data(), 8),
                                        spillway::span(exp_avg.data(), 8), spillway::span(exp_avg_sq.data(), 8));
    CHECK(views.n == 8 && views.param == param.data());
    // Two micro-batches add up; the statistics are those of the sum.
    std::vector<float> sum(n);
    spillway::grad_accumulate(spillway::grad_tensor(sum, grad));
    const auto of_sum = spillway::grad_accumulate(spillway::grad_tensor(sum, grad));
    CHECK(sum[0] == 2.0f && of_sum.sum_squares == 4.0 * n);
    CHECK(spillway::grad_stats(other).sum_squares == n);
    CHECK(too_long([&] { (void)spillway::grad_tensor(shorter, grad); }));
    // Equal bytes have equal checksums.
    const std::vector<const void *> places{sum.data(), sum.data() + 1, grad.data()};
    const std::vector<std::uint64_t> sizes{4, 4, 4};
    const auto sums = spillway::checksums(places, sizes);
    CHECK(sums.size() == 3 && sums[0] == sums[1] && sums[0] != sums[2]);
    CHECK(too_long([&] { (void)spillway::checksums(places, spillway::span(sizes.data(), 2)); }));

    // The program has written to the parameter since the sum was stored: its low bits count as zero.
    std::uint16_t high[4] = {0x3f80, 0x3f80, 0x3f80, 0x3f80}, low[4] = {1, 2, 3, 4};
    std::uint64_t low_sum = 0;
    auto split = spillway::make<spw_tensor>();
    split.n = 4, split.param_dtype = SPW_DTYPE_BF16, split.param = high, split.param_low = low, split.low_sums = &low_sum;
    spillway::low_bits_settle(spillway::span<const spw_tensor>(&split, 1));
    CHECK(low_sum != 0 && low[0] == 1 && low[3] == 4);
    high[1] = 0x4000;
    spillway::low_bits_settle(spillway::span<const spw_tensor>(&split, 1));
    CHECK(low[0] == 0 && low[1] == 0 && low[2] == 0 && low[3] == 0);
    const auto call = spillway::make<spw_ds_adam_call>();
    CHECK(call.grad_scale == 1.0f && call.bias_correction == 1);

    // What codes stand for has the same codes.
    std::array<float, 33> values{}, back{};
    values[0] = 1.0f, values[32] = 0.25f;
    std::array<std::uint8_t, 33> codes{};
    std::array<std::uint16_t, 2> scales{};
    const spillway::span<const float> from(values.data(), 33);
    spillway::codes_write(SPW_MOMENT_SECOND, from, spillway::span(codes.data(), 33), spillway::span(scales.data(), 2));
    const spillway::span<const std::uint8_t> read(codes.data(), 33);
    const spillway::span<const std::uint16_t> of(scales.data(), 2);
    spillway::codes_read(SPW_MOMENT_SECOND, read, of, spillway::span(back.data(), 33));
    CHECK(codes[0] == 255 && codes[1] == 0 && codes[32] == 255 && back[1] == 0.0f);
    CHECK(back[0] > 0.99f && back[0] < 1.01f && back[32] > 0.249f && back[32] < 0.253f);
    CHECK(too_long([&] { spillway::codes_read(SPW_MOMENT_FIRST, read, of, spillway::span(back.data(), 32)); }));
}

static void coded_steps() {
    // A step of 8-bit moments from zeros moves each parameter by the learning rate.
    std::vector<float> param(33), grad(33, 0.5f);
    std::vector<std::uint8_t> first(33), second(33);
    std::vector<std::uint16_t> first_scales(2), second_scales(2);
    auto options = spillway::make<spw_adam_options>();
    options.lr = 0.25;
    const spillway::coded_moment exp_avg{first, first_scales}, exp_avg_sq{second, second_scales};
    spillway::adam_step(options, spillway::tensor(param, grad, exp_avg, exp_avg_sq));
    CHECK(param[0] < -0.2499f && param[0] > -0.2501f && param[32] == param[0] && first[32] != 0 && second_scales[1] != 0);
    const spillway::coded_moment short_scales{second, {second_scales.data(), 1}};
    CHECK(too_long([&] { (void)spillway::tensor(param, grad, exp_avg, short_scales); }));
}

// A recording rolls back bit for bit, and moves with its owner.
static void undo() {
    std::vector<float> param(500, 2.0f), grad(500, 0.25f), exp_avg(500), exp_avg_sq(500);
    const auto before = param;
    auto options = spillway::make<spw_undo_options>();
    options.elements = 500;
    options.tensors = 1;
    spillway::undo first(options);
    spillway::undo recording = std::move(first);
    CHECK(first.get() == nullptr && recording.get() != nullptr);
    const auto tensor = spillway::tensor(param, grad, exp_avg, exp_avg_sq);
    recording.adam_step(spillway::make<spw_adam_options>(), tensor);
    CHECK(param != before);
    recording.rollback();
    CHECK(param == before && exp_avg[7] == 0.0f);
    CHECK(status_of([&] { recording.rollback(); }) == SPW_ERR_INVALID_ARGUMENT);
}

// Transfers of pinned memory; a wait names a missing file.
static void files() {
    const std::string path = (fs::current_path() / "objects.bin").string();
    spillway::pinned<std::uint32_t> out(3000), back(3000);
    for (std::uint32_t i = 0; i < out.size(); i++) {
        out[i] = i * 2654435761u;
    }
    spillway::io io;
    CHECK(too_long([] { spillway::pinned<float> huge((std::size_t{1} << 62) + 16); }));
    spillway::pinned<float> moved(4), owner(std::move(moved));
    CHECK(moved.size() == 0 && owner.size() == 4);
    CHECK(status_of([&] { io.read(std::string("a\0b", 3), 0, back); }) == SPW_ERR_INVALID_ARGUMENT);
    const std::uint64_t write = io.write(path, 0, out);
    CHECK(io.wait(write).value() == out.size() * 4);
    const std::vector<std::uint64_t> reads{io.read(path, 0, back)};
    CHECK(io.wait(reads, milliseconds(60000)));
    CHECK(std::memcmp(out.data(), back.data(), out.size() * 4) == 0);
    CHECK(io.wait_all(milliseconds(0)));
    CHECK(status_of([&] { io.read(path + ".missing", 0, back); }) == SPW_ERR_NOT_FOUND);
    CHECK(status_of([&] { (void)io.wait(write); }) == SPW_ERR_INVALID_ARGUMENT);
}

static spillway::tier open(const std::string &directory) {
    auto path = spillway::make<spw_tier_path>();
    path.directory = directory.c_str();
    auto options = spillway::make<spw_tier_options>();
    options.job = "objects";
    options.paths = &path;
    options.path_count = 1;
    return spillway::tier(options);
}

// A commit outlives the object; an update steps the state on the tier.
static void tier() {
    const fs::path directory = fs::current_path() / "objects-tier";
    fs::remove_all(directory);
    fs::remove_all(fs::current_path() / "objects-export");
    fs::create_directory(directory);
    std::vector<float> state(5000, 3.0f), found(5000);
    const std::vector<std::uint64_t> sizes{state.size() * 4};
    {
        spillway::tier tier = open(directory.string());
        CHECK(!tier.opened().resumed);
        const auto extent = tier.define("state", sizes);
        const std::vector<const void *> from{state.data()};
        CHECK(tier.wait(tier.put(extent, from)).has_value());
        tier.commit(6);
        auto commit = tier.commit_begin(7, std::string("payload"));
        CHECK(commit.wait().value() == 7 && commit.progress().ended);
        auto written = tier.export_to((fs::current_path() / "objects-export").string());
        CHECK(written.wait().value() == 7 && written.progress().bytes == written.progress().written);
        CHECK(tier.verify().damaged == 0);
        CHECK(status_of([&] { tier.define(std::string("n\0one", 5), sizes); }) == SPW_ERR_INVALID_ARGUMENT);
        CHECK(too_long([&] { tier.put(extent, std::vector<const void *>()); }));
        CHECK(status_of([&] { (void)open(directory.string()); }) == SPW_ERR_LOCKED);
    }
    spillway::tier tier = open(directory.string());
    CHECK(tier.opened().resumed && tier.opened().step == 7 && tier.opened().payload_bytes == 7);
    const auto payload = tier.payload();
    CHECK(std::string(payload.begin(), payload.end()) == "payload");
    const std::vector<void *> to{found.data()};
    CHECK(tier.wait(tier.fetch(tier.define("state", sizes), to)).has_value() && found == state);

    const std::vector<std::uint64_t> elements{1000, 24};
    auto options = spillway::make<spw_swap_options>();
    options.host_memory = 1 << 20;
    options.elements = elements.data();
    options.subgroups = elements.size();
    spillway::swap update(tier, options);
    CHECK(update.stats().rounds == 0);
    update.fill(std::vector<const float *>(3 * elements.size()));
    std::vector<float> grad(1000, 1.0f);
    std::vector<spw_tensor> all(2, spillway::make<spw_tensor>());
    for (std::size_t i = 0; i < all.size(); i++) {
        all[i].n = elements[i];
        all[i].param_dtype = all[i].state_dtype = all[i].grad_dtype = SPW_DTYPE_F32;
        all[i].grad = grad.data();
    }
    update.adam_step(spillway::make<spw_adam_options>(), all);
    CHECK(update.commit_begin(8).wait().value() == 8);
    CHECK(update.stats().rounds == 2);
    update.write_state(1, std::vector<float>(24, 5.0f).data(), nullptr, nullptr);
    float read[24] = {};
    update.read_state(1, read, nullptr, nullptr);
    CHECK(read[0] == 5.0f && read[23] == 5.0f);
    CHECK(spillway::swap::budget(options, 1).host_bytes > 0);
    update.begin(spillway::make<spw_adam_options>());
    for (std::size_t i = 0; i < all.size(); i++) {
        update.submit(i, all[i]);
    }
    CHECK(update.finish());
    CHECK(status_of([&] { update.adam_step(spillway::make<spw_adam_options>(), all[0]); }) == SPW_ERR_INVALID_ARGUMENT);
}

// A round with clipping ends with the bits of a step with the clipped factor.
static void speculation() {
    std::vector<float> param(100, 1.0f), grad(100, 1.0f), exp_avg(100), exp_avg_sq(100);
    std::vector<float> same(100, 1.0f), m(100), v(100);
    auto options = spillway::make<spw_spec_options>();
    options.buckets = 1;
    spillway::speculation engine(options);
    auto adam = spillway::make<spw_adam_options>();
    const auto tensor = spillway::tensor(param, grad, exp_avg, exp_avg_sq);
    engine.begin(adam, 1.0);
    engine.submit(0, tensor);
    const auto stats = engine.local_result();
    CHECK(stats.has_value() && stats->sum_squares == 100 && engine.squares() == std::vector<double>{100});
    const auto outcome = engine.resolve(*stats);
    CHECK(outcome.verdict == SPW_SPEC_VERDICT_REDO && engine.finish(milliseconds(60000)));
    adam.grad_scale = outcome.grad_scale;
    spillway::adam_step(adam, spillway::tensor(same, grad, m, v));
    CHECK(param == same && exp_avg == m);
    // The caller's own verdict.
    engine.begin(adam);
    engine.submit(0, tensor);
    CHECK(engine.local_result().has_value());
    CHECK(engine.resolve_as(SPW_SPEC_VERDICT_SKIP).verdict == SPW_SPEC_VERDICT_SKIP && engine.finish());
    CHECK(param == same && engine.stats().skips == 1 && engine.bucket(0) == SPW_SPEC_STATE_FINAL);
}

// Messages of the log arrive while the object lives.
static void messages() {
    std::vector<std::string> lines;
    const auto step = [] {
        std::vector<float> param(500000, 1.0f), grad(500000, 1.0f), m(500000), v(500000);
        spillway::adam_step(spillway::make<spw_adam_options>(), spillway::tensor(param, grad, m, v));
    };
    {
        spillway::log log(SPW_LOG_LEVEL_INFO, [&](spw_log_level, const char *message) { lines.push_back(message); });
        spillway::set_threads(2);
        step();
    }
    const auto count = lines.size();
    CHECK(count > 0 && spillway::info().num_threads == 2);
    spillway::set_threads(3);
    step();
    CHECK(lines.size() == count);
}

// An update on host threads, and a machine without a GPU.
static void devices() {
    std::vector<float> param(64, 1.0f), grad(64, 1.0f), exp_avg(64), exp_avg_sq(64);
    std::vector<spw_interleave_subgroup> subgroups(1, spillway::make<spw_interleave_subgroup>());
    subgroups[0].n = 64;
    subgroups[0].param = param.data();
    subgroups[0].grad = grad.data();
    subgroups[0].exp_avg = exp_avg.data();
    subgroups[0].exp_avg_sq = exp_avg_sq.data();
    auto options = spillway::make<spw_interleave_options>();
    options.backend = SPW_INTERLEAVE_BACKEND_HOST;
    options.grad_dtype = SPW_DTYPE_F32;
    spillway::interleave update(options, subgroups);
    update.grad_ready(0);
    update.begin(spillway::make<spw_adam_options>());
    update.stream_wait_params(0);
    update.drain();
    CHECK(param[0] < 1.0f);

    setenv("SPILLWAY_CUDA_LIBRARY", "libmissing.so", 1);
    CHECK(status_of([] { spillway::gpu(); }) == SPW_ERR_NO_DEVICE);
}

int main() {
    spillway::check_library();
    steps();
    coded_steps();
    undo();
    files();
    tier();
    speculation();
    messages();
    devices();
    return 0;
}
