// C++17 classes over the C interface of Spillway. Header-only; link with -lspillway.
//
// - Every object is a move-only class that closes itself. `get()` returns the C handle, for calls that have no method.
// - A call that fails throws `spillway::error` with the status and the message of spw_last_error(). A timeout is no
//   error: calls with a timeout return an empty optional or false.
// - Messages of the log go to a function: `spillway::log log(SPW_LOG_LEVEL_WARN, receive);`
// - Option structs are those of C, with defaults: `auto options = spillway::make<spw_adam_options>();`
// - Arrays are `spillway::span<T>`, which any container with data() and size() converts to. The element type selects
//   the dtype: float, spillway::f16 or spillway::bf16.
// - The classes of experimental headers are there if SPW_EXPERIMENTAL is defined before the include.
// - The rules of spillway.h on thread safety and memory lifetime apply to these classes.
//
// Example:
//
//     #include <spillway.hpp>
//     #include <vector>
//
//     int main() {
//         std::vector<float> param(1000, 1.0f), grad(1000, 0.1f), exp_avg(1000), exp_avg_sq(1000);
//         auto options = spillway::make<spw_adam_options>();
//         options.lr = 1e-3;
//         spillway::adam_step(options, spillway::tensor(param, grad, exp_avg, exp_avg_sq));
//         return param[0] < 1.0f ? 0 : 1;
//     }

#ifndef SPILLWAY_HPP
#define SPILLWAY_HPP

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "spillway.h"
#ifdef SPW_EXPERIMENTAL
#include "spillway/gpu.h"
#include "spillway/interleave.h"
#include "spillway/stage.h"
#endif

namespace spillway {

// A failed call.
class error : public std::runtime_error {
public:
    error(spw_status status, const std::string &message)
        : std::runtime_error(std::string(spw_status_name(status)) + ": " + message), status_(status) {}
    spw_status status() const noexcept { return status_; }
    // The status's name, for example "SPW_ERR_NO_SPACE".
    const char *name() const noexcept { return spw_status_name(status_); }

private:
    spw_status status_;
};

// Throws if `status` is not SPW_OK.
inline void check(spw_status status) {
    if (status != SPW_OK) {
        throw error(status, spw_last_error());
    }
}

// False after a timeout; throws after any other failure.
inline bool check_in_time(spw_status status) {
    if (status == SPW_ERR_TIMEOUT) {
        return false;
    }
    check(status);
    return true;
}

// Throws if the loaded library has another binary interface than this header.
inline void check_library() {
    if (spw_abi_version() != SPW_ABI_VERSION) {
        throw error(SPW_ERR_UNSUPPORTED, "the library has ABI " + std::to_string(spw_abi_version()) +
                                             ", the header has ABI " + std::to_string(SPW_ABI_VERSION));
    }
}

// A time limit; zero and less polls. Without one a call waits until the end.
using timeout = std::optional<std::chrono::milliseconds>;

inline std::int64_t milliseconds(timeout limit) {
    return limit ? std::max<std::int64_t>(limit->count(), 0) : -1;
}

// The C string of `text`. Text with a NUL inside would be truncated, so it is an error that names `argument`.
inline const char *c_string(const std::string &text, const char *argument) {
    if (text.find('\0') != std::string::npos) {
        throw error(SPW_ERR_INVALID_ARGUMENT, std::string(argument) + ": contains a NUL");
    }
    return text.c_str();
}

// The text that a C function writes. Its last arguments are the buffer, the size of the buffer, and the needed size.
template <class Call, class... Arguments>
std::string text(Call call, Arguments... arguments) {
    std::string room;
    std::uint64_t needed = 0;
    check(call(arguments..., nullptr, 0, &needed));
    // The text may grow between two calls.
    while (needed > room.size()) {
        room.resize(needed);
        check(call(arguments..., &room[0], room.size(), &needed));
    }
    room.resize(std::char_traits<char>::length(room.c_str()));
    return room;
}

// Sends messages of the log up to `level` to `receive(level, message)`; see spw_set_log. An exception from `receive`
// ends the program. The default is restored when the object ends.
class log {
public:
    using function = std::function<void(spw_log_level, const char *)>;
    log(spw_log_level level, function receive) : receive_(new function(std::move(receive))) {
        check(spw_set_log(
            [](void *user, std::int32_t of, const char *message) noexcept {
                (*static_cast<function *>(user))(static_cast<spw_log_level>(of), message);
            },
            receive_.get(), level));
    }
    log(const log &) = delete;
    log &operator=(const log &) = delete;
    ~log() { (void)spw_set_log(nullptr, nullptr, SPW_LOG_LEVEL_OFF); }

private:
    std::unique_ptr<function> receive_;
};

// The C struct with its struct_size and its defaults; every other field is 0.
template <class T>
T make() {
    T value{};
    value.struct_size = sizeof(T);
    return value;
}
#define SPW_MAKE(name, NAME)                 \
    template <>                              \
    inline spw_##name##_options make() {     \
        return SPW_##NAME##_OPTIONS_INIT;    \
    }
SPW_OPTIMIZERS(SPW_MAKE)
#undef SPW_MAKE
template <>
inline spw_ds_adam_call make() {
    return SPW_DS_ADAM_CALL_INIT;
}
template <>
inline spw_spec_options make() {
    return SPW_SPEC_OPTIONS_INIT;
}
#ifdef SPW_EXPERIMENTAL
template <>
inline spw_stage_options make() {
    return SPW_STAGE_OPTIONS_INIT;
}
#endif

// The struct that a C function writes. It is the last argument of the function.
template <class T, class Call, class... Arguments>
T read(Call call, Arguments... arguments) {
    auto value = make<T>();
    check(call(arguments..., &value));
    return value;
}
inline spw_info info() { return read<spw_info>(spw_get_info); }
inline void set_threads(std::uint32_t count) {
    auto options = make<spw_thread_options>();
    options.num_threads = count;
    check(spw_set_threads(&options));
}

// Bits of an IEEE binary16 number, and of a bfloat16 number.
enum class f16 : std::uint16_t {};
enum class bf16 : std::uint16_t {};

// The dtype of an element type.
template <class T>
constexpr std::uint32_t dtype_of() {
    using U = std::remove_cv_t<T>;
    static_assert(std::is_same_v<U, float> || std::is_same_v<U, f16> || std::is_same_v<U, bf16>,
                  "elements are float, spillway::f16 or spillway::bf16; 8-bit moments are spillway::coded_moment");
    return std::is_same_v<U, float> ? SPW_DTYPE_F32 : std::is_same_v<U, f16> ? SPW_DTYPE_F16 : SPW_DTYPE_BF16;
}

// Address and number of elements of the caller's memory.
template <class T>
class span {
public:
    constexpr span() noexcept = default;
    constexpr span(T *data, std::size_t size) noexcept : data_(data), size_(size) {}
    template <class C, class = std::enable_if_t<std::is_convertible_v<decltype(std::declval<C &>().data()), T *>>>
    constexpr span(C &&container) noexcept : data_(container.data()), size_(container.size()) {}
    constexpr T *data() const noexcept { return data_; }
    constexpr std::size_t size() const noexcept { return size_; }
    constexpr std::size_t bytes() const noexcept { return size_ * sizeof(T); }

private:
    T *data_ = nullptr;
    std::size_t size_ = 0;
};

template <class C>
span(C &&) -> span<std::remove_pointer_t<decltype(std::declval<C &>().data())>>;

// One tensor of a step. Arrays of different lengths throw std::length_error. An empty `exp_avg_sq` (Lion,
// Signum) or `exp_avg` (Adagrad) is the NULL of C.
template <class P, class G, class M, class V>
spw_tensor tensor(P &&param, const G &grad, M &&exp_avg, V &&exp_avg_sq) {
    auto p = span(param);
    auto g = span(grad);
    auto m = span(exp_avg);
    auto v = span(exp_avg_sq);
    for (std::size_t other : {g.size(), m.size() ? m.size() : p.size(), v.size() ? v.size() : p.size()}) {
        if (other != p.size()) {
            throw std::length_error("spillway::tensor: arrays of different lengths");
        }
    }
    auto result = make<spw_tensor>();
    result.n = p.size();
    result.param_dtype = dtype_of<std::remove_pointer_t<decltype(p.data())>>();
    result.grad_dtype = dtype_of<std::remove_pointer_t<decltype(g.data())>>();
    result.state_dtype = m.size() ? dtype_of<std::remove_pointer_t<decltype(m.data())>>()
                                  : dtype_of<std::remove_pointer_t<decltype(v.data())>>();
    result.param = p.data();
    result.grad = g.data();
    result.exp_avg = m.size() ? m.data() : nullptr;
    result.exp_avg_sq = v.size() ? v.data() : nullptr;
    return result;
}

// As above; `copy` receives the new parameters in 16 bits.
template <class P, class G, class M, class V, class C>
spw_tensor tensor(P &&param, const G &grad, M &&exp_avg, V &&exp_avg_sq, C &&copy) {
    auto result = tensor(param, grad, exp_avg, exp_avg_sq);
    auto c = span(copy);
    if (c.size() != result.n) {
        throw std::length_error("spillway::tensor: arrays of different lengths");
    }
    result.copy_dtype = dtype_of<std::remove_pointer_t<decltype(c.data())>>();
    result.param_copy = c.data();
    return result;
}

// An 8-bit moment: a code for each element, and a bf16 scale for each 32. Zeros are a moment of zeros.
struct coded_moment {
    span<std::uint8_t> codes;
    span<std::uint16_t> scales;
};

// One tensor of a step with 8-bit moments.
template <class P, class G>
spw_tensor tensor(P &&param, const G &grad, coded_moment exp_avg, coded_moment exp_avg_sq) {
    auto p = span(param);
    auto g = span(grad);
    for (const coded_moment &moment : {exp_avg, exp_avg_sq}) {
        if (moment.codes.size() != p.size() || moment.scales.size() != (p.size() + 31) / 32 || g.size() != p.size()) {
            throw std::length_error("spillway::tensor: arrays of different lengths, or a moment without a scale for each 32 codes");
        }
    }
    auto result = make<spw_tensor>();
    result.n = p.size();
    result.param_dtype = dtype_of<std::remove_pointer_t<decltype(p.data())>>();
    result.grad_dtype = dtype_of<std::remove_pointer_t<decltype(g.data())>>();
    result.state_dtype = SPW_DTYPE_CODES;
    result.param = p.data();
    result.grad = g.data();
    result.exp_avg = exp_avg.codes.data();
    result.exp_avg_scale = exp_avg.scales.data();
    result.exp_avg_sq = exp_avg_sq.codes.data();
    result.exp_avg_sq_scale = exp_avg_sq.scales.data();
    return result;
}

// The tensors of one call: one, or an array of them.
class tensors {
public:
    tensors(const spw_tensor &one) noexcept : data_(&one), size_(1) {}
    template <class C, class = decltype(std::declval<const C &>().data())>
    tensors(const C &all) noexcept : data_(all.data()), size_(all.size()) {}
    const spw_tensor *data() const noexcept { return data_; }
    std::uint64_t size() const noexcept { return size_; }

private:
    const spw_tensor *data_;
    std::uint64_t size_;
};

// For each optimizer, as adam_step and adam_check, lion_step and lion_check:
// One step of every tensor, in place. `stats` (may be null) receives the statistics of the scaled gradients.
// The check fails as the step of these arguments would, and changes nothing.
#define SPW_STEPS(name, NAME)                                                                                      \
    inline void name##_step(const spw_##name##_options &options, tensors all, spw_step_stats *stats = nullptr) {   \
        check(spw_##name##_step(&options, all.data(), all.size(), stats));                                         \
    }                                                                                                              \
    inline void name##_check(const spw_##name##_options &options, tensors all) {                                   \
        check(spw_##name##_check(&options, all.data(), all.size()));                                               \
    }
SPW_OPTIMIZERS(SPW_STEPS)
#undef SPW_STEPS

// Statistics of the gradients of tensors, each times `scale`; the other spans are not used.
inline spw_step_stats grad_stats(tensors all, double scale = 1) {
    return read<spw_step_stats>(spw_grad_stats, all.data(), all.size(), scale);
}

// `source` in the form of spw_grad_accumulate, to be added to `sum`.
template <class D, class S>
spw_grad_tensor grad_tensor(D &&sum, const S &source) {
    auto to = span(sum);
    auto from = span(source);
    if (to.size() != from.size()) {
        throw std::length_error("spillway::grad_tensor: arrays of different lengths");
    }
    auto result = make<spw_grad_tensor>();
    result.n = to.size();
    result.dst = to.data();
    result.dst_dtype = dtype_of<std::remove_pointer_t<decltype(to.data())>>();
    result.src = from.data();
    result.src_dtype = dtype_of<std::remove_pointer_t<decltype(from.data())>>();
    return result;
}
// Adds the source of each tensor, times `scale`, to its sum; the statistics are those of the sums.
inline spw_step_stats grad_accumulate(span<const spw_grad_tensor> all, double scale = 1) {
    return read<spw_step_stats>(spw_grad_accumulate, all.data(), all.size(), scale);
}
inline spw_step_stats grad_accumulate(const spw_grad_tensor &one, double scale = 1) {
    return grad_accumulate(span<const spw_grad_tensor>(&one, 1), scale);
}

// The checksum of each piece of memory: piece i is `bytes[i]` bytes at `data[i]`.
inline std::vector<std::uint64_t> checksums(span<const void *const> data, span<const std::uint64_t> bytes) {
    if (data.size() != bytes.size()) {
        throw std::length_error("spillway::checksums: arrays of different lengths");
    }
    std::vector<std::uint64_t> sums(data.size());
    check(spw_checksums(data.data(), bytes.data(), sums.size(), sums.data()));
    return sums;
}

// Copies pieces of memory by all threads: `bytes[i]` bytes from `from[i]` to `to[i]`.
inline void copies(span<void *const> to, span<const void *const> from, span<const std::uint64_t> bytes) {
    if (to.size() != from.size() || to.size() != bytes.size()) {
        throw std::length_error("spillway::copies: arrays of different lengths");
    }
    check(spw_copies(to.data(), from.data(), bytes.data(), to.size()));
}

// Zeroes the low bits of what other code has written to split masters, as the next step would, and stores the sums.
inline void low_bits_settle(span<const spw_tensor> tensors) {
    check(spw_low_bits_settle(tensors.data(), tensors.size()));
}

// The values of a moment's 8-bit codes. `scales` has one bf16 for each 32 codes.
inline void codes_read(spw_moment moment, span<const std::uint8_t> codes, span<const std::uint16_t> scales,
                       span<float> values) {
    if (codes.size() != values.size() || scales.size() != (codes.size() + 31) / 32) {
        throw std::length_error("spillway::codes_read: arrays that do not fit each other");
    }
    check(spw_codes_read(moment, codes.data(), scales.data(), codes.size(), values.data()));
}

// Replaces the 8-bit codes of a moment and their scales by those of `values`.
inline void codes_write(spw_moment moment, span<const float> values, span<std::uint8_t> codes,
                        span<std::uint16_t> scales) {
    if (codes.size() != values.size() || scales.size() != (codes.size() + 31) / 32) {
        throw std::length_error("spillway::codes_write: arrays that do not fit each other");
    }
    check(spw_codes_write(moment, values.data(), values.size(), codes.data(), scales.data()));
}

// Owner of a C handle.
template <class T, class Close>
class object {
public:
    T *get() const noexcept { return handle_.get(); }
    // Gives the handle up; the caller closes it.
    T *release() noexcept { return handle_.release(); }

protected:
    explicit object(T *handle) : handle_(handle) {}

private:
    std::unique_ptr<T, Close> handle_;
};

namespace detail {
// Destructors cannot report a status. Close an object by hand to see it: spw_tier_close(tier.release(), 1000).
struct close {
    void operator()(spw_undo *object) const noexcept { (void)spw_undo_close(object); }
    void operator()(spw_io *object) const noexcept { (void)spw_io_close(object, -1); }
    void operator()(spw_tier *object) const noexcept { (void)spw_tier_close(object, -1); }
    void operator()(spw_tier_task *object) const noexcept { (void)spw_tier_task_close(object); }
    void operator()(spw_swap *object) const noexcept { (void)spw_swap_close(object); }
    void operator()(spw_spec *object) const noexcept { (void)spw_spec_close(object); }
#ifdef SPW_EXPERIMENTAL
    void operator()(spw_gpu *object) const noexcept { (void)spw_gpu_close(object); }
    void operator()(spw_interleave *object) const noexcept { (void)spw_interleave_close(object); }
#endif
};

template <class T, class Call, class... Arguments>
T *open(Call call, Arguments... arguments) {
    T *handle = nullptr;
    check(call(arguments..., &handle));
    return handle;
}
} // namespace detail

// A recording of one step, for rollback.
class undo : public object<spw_undo, detail::close> {
public:
    explicit undo(const spw_undo_options &options) : object(detail::open<spw_undo>(spw_undo_open, &options)) {}
    // A recorded step of each optimizer: adam_step, lion_step and so on.
#define SPW_STEP(name, NAME)                                                                                       \
    void name##_step(const spw_##name##_options &options, tensors all, spw_step_stats *stats = nullptr) {          \
        check(spw_undo_##name##_step(get(), &options, all.data(), all.size(), stats));                             \
    }
    SPW_OPTIMIZERS(SPW_STEP)
#undef SPW_STEP
    std::uint64_t log_bytes() {
        std::uint64_t bytes = 0;
        check(spw_undo_get_log_bytes(get(), &bytes));
        return bytes;
    }
    void rollback() { check(spw_undo_rollback(get())); }
    void redo(double grad_scale) { check(spw_undo_redo(get(), grad_scale)); }
    void commit(bool release_memory = false) { check(spw_undo_commit(get(), release_memory)); }
};

// Pinned memory of `size` elements, freed with the object.
template <class T>
class pinned {
public:
    explicit pinned(std::size_t size) : size_(size) {
        if (size > static_cast<std::size_t>(-1) / sizeof(T)) {
            throw std::length_error("spillway::pinned: the size exceeds the address space");
        }
        void *start = nullptr;
        check(spw_pinned_alloc(nullptr, size * sizeof(T), &start));
        memory_.reset(static_cast<T *>(start));
    }
    T *data() const noexcept { return memory_.get(); }
    // 0 after the memory was moved to another object.
    std::size_t size() const noexcept { return memory_ ? size_ : 0; }
    T &operator[](std::size_t index) const noexcept { return data()[index]; }
    T *begin() const noexcept { return data(); }
    T *end() const noexcept { return data() + size(); }

private:
    static_assert(std::is_trivial_v<T>, "pinned memory holds numbers");
    struct free {
        void operator()(T *start) const noexcept { (void)spw_pinned_free(start); }
    };
    std::unique_ptr<T, free> memory_;
    std::size_t size_;
};

inline spw_pinned_stats pinned_stats() { return read<spw_pinned_stats>(spw_pinned_get_stats); }
// True if all of the memory lies in one allocation of pinned memory.
template <class C>
bool is_pinned(const C &memory) {
    auto bytes = span(memory);
    std::uint32_t contains = 0;
    check(spw_pinned_contains(bytes.data(), bytes.bytes(), &contains));
    return contains != 0;
}

// An I/O engine. Thread-safe.
class io : public object<spw_io, detail::close> {
public:
    explicit io(const spw_io_options &options = make<spw_io_options>()) : object(detail::open<spw_io>(spw_io_open, &options)) {}
    // Starts a transfer and returns its handle. The memory stays in use until the wait for the handle.
    template <class C>
    std::uint64_t read(const std::string &path, std::uint64_t offset, C &&into) const {
        auto bytes = span(into);
        return start(spw_io_read, path, offset, bytes.data(), bytes.bytes());
    }
    template <class C>
    std::uint64_t write(const std::string &path, std::uint64_t offset, const C &from) const {
        auto bytes = span(from);
        using element = std::remove_const_t<std::remove_pointer_t<decltype(bytes.data())>>;
        return start(spw_io_write, path, offset, const_cast<element *>(bytes.data()), bytes.bytes());
    }
    std::uint64_t sync(const std::string &path) const { return start(spw_io_sync, path, 0, nullptr, 0); }
    // The bytes that the operation moved; empty after a timeout, when the operation stays in flight.
    std::optional<std::uint64_t> wait(std::uint64_t handle, timeout limit = {}) const {
        std::uint64_t bytes = 0;
        return check_in_time(spw_io_wait(get(), &handle, 1, milliseconds(limit), &bytes)) ? std::optional(bytes)
                                                                                         : std::nullopt;
    }
    bool wait(span<const std::uint64_t> handles, timeout limit = {}) const {
        return check_in_time(spw_io_wait(get(), handles.data(), handles.size(), milliseconds(limit), nullptr));
    }
    bool wait_all(timeout limit = {}) const {
        return check_in_time(spw_io_wait(get(), nullptr, SPW_IO_ALL, milliseconds(limit), nullptr));
    }

    spw_io_stats stats() const { return spillway::read<spw_io_stats>(spw_io_get_stats, get()); }
    std::string describe() const { return text(spw_io_describe, get()); }

private:
    template <class Call>
    std::uint64_t start(Call call, const std::string &path, std::uint64_t offset, void *buffer,
                        std::uint64_t bytes) const {
        auto request = make<spw_io_request>();
        request.path = c_string(path, "path");
        request.offset = offset;
        request.buffer = buffer;
        request.bytes = bytes;
        std::uint64_t handle = 0;
        check(call(get(), &request, &handle));
        return handle;
    }
};

// A commit or an export that continues beside the caller. Thread-safe.
class task : public object<spw_tier_task, detail::close> {
public:
    explicit task(spw_tier_task *handle) : object(handle) {}
    // The step that was committed or exported; empty after a timeout.
    std::optional<std::uint64_t> wait(timeout limit = {}) const {
        std::uint64_t step = 0;
        return check_in_time(spw_tier_task_wait(get(), milliseconds(limit), &step)) ? std::optional(step) : std::nullopt;
    }
    spw_tier_progress progress() const { return read<spw_tier_progress>(spw_tier_task_get_progress, get()); }
};

// A virtual tier. Thread-safe.
class tier : public object<spw_tier, detail::close> {
public:
    explicit tier(const spw_tier_options &options) : object(detail::open<spw_tier>(spw_tier_open, &options)) {}
    // An extent of this tier: its number in C, and its number of streams.
    struct extent {
        std::uint32_t number;
        std::size_t streams;
    };
    // Finds or creates the extent `name` with one stream per entry of `stream_bytes`.
    extent define(const std::string &name, span<const std::uint64_t> stream_bytes) const {
        extent found{0, stream_bytes.size()};
        check(spw_tier_define(get(), c_string(name, "name"), stream_bytes.data(), stream_bytes.size(), &found.number));
        return found;
    }
    // Starts to write an extent (put) or to read it (fetch), with one address per stream, and returns a ticket. The
    // streams stay in use until the wait for the ticket. Another number of addresses throws std::length_error.
    std::uint64_t put(extent to, span<const void *const> streams, const spw_tier_target *target = nullptr) const {
        std::uint64_t ticket = 0;
        check_streams(to, streams.size());
        check(spw_tier_put(get(), to.number, streams.data(), target, &ticket));
        return ticket;
    }
    std::uint64_t fetch(extent from, span<void *const> streams) const {
        std::uint64_t ticket = 0;
        check_streams(from, streams.size());
        check(spw_tier_get(get(), from.number, streams.data(), &ticket));
        return ticket;
    }
    // The generation that was put or read; empty after a timeout, when the transfer stays in flight.
    std::optional<std::uint64_t> wait(std::uint64_t ticket, timeout limit = {}) const {
        std::uint64_t generation = 0;
        return check_in_time(spw_tier_wait(get(), ticket, milliseconds(limit), &generation)) ? std::optional(generation)
                                                                                            : std::nullopt;
    }
    // Makes all puts durable as one step, with a payload that the next open returns.
    void commit(std::uint64_t step, span<const char> payload = {}) const {
        check(spw_tier_commit(get(), step, payload.data(), payload.size()));
    }
    // As above, while puts and gets continue.
    task commit_begin(std::uint64_t step, span<const char> payload = {}) const {
        return task(detail::open<spw_tier_task>(spw_tier_commit_begin, get(), step, payload.data(), payload.size()));
    }
    // Writes the committed state to a new file or directory; null options export all of it.
    task export_to(const std::string &path, const spw_tier_export_options *options = nullptr) const {
        return task(detail::open<spw_tier_task>(spw_tier_export, get(), c_string(path, "path"), options));
    }
    // Takes extents of an export, those that match `names` (empty: all), and returns its step.
    std::uint64_t import(const std::string &path, const std::string &names = {}) const {
        std::uint64_t step = 0;
        check(spw_tier_import(get(), c_string(path, "path"), names.empty() ? nullptr : c_string(names, "names"), &step));
        return step;
    }
    void rollback() const { check(spw_tier_rollback(get())); }
    void remove(extent one) const { check(spw_tier_remove(get(), one.number)); }
    void set_path(std::uint32_t number, spw_tier_health health) const { check(spw_tier_set_path(get(), number, health)); }
    void evacuate(std::uint32_t number) const { check(spw_tier_evacuate(get(), number)); }
    void end_turns() const { check(spw_tier_end_turns(get())); }
    spw_tier_opened_info opened() const {
        auto info = make<spw_tier_opened_info>();
        check(spw_tier_get_opened(get(), &info, nullptr, 0));
        return info;
    }
    // The payload of the commit that the open found.
    std::vector<char> payload() const {
        std::vector<char> bytes(opened().payload_bytes);
        auto info = make<spw_tier_opened_info>();
        check(spw_tier_get_opened(get(), &info, bytes.data(), bytes.size()));
        return bytes;
    }
    spw_tier_verify_info verify() const { return read<spw_tier_verify_info>(spw_tier_verify, get()); }
    spw_tier_path_info path(std::uint32_t number) const {
        auto info = make<spw_tier_path_info>();
        check(spw_tier_get_path(get(), number, &info, nullptr, 0, nullptr));
        return info;
    }
    spw_tier_extent_info extent_info(std::uint64_t index) const {
        auto info = make<spw_tier_extent_info>();
        check(spw_tier_get_extent(get(), index, &info, nullptr, 0, nullptr));
        return info;
    }
    // Deletes the files of the tier, and closes it whatever the outcome.
    void destroy() { check(spw_tier_destroy(release())); }
    // Deletes the files of a tier that no live process has.
    static void collect(const std::string &directory, const std::string &job, const std::string &host = {},
                        std::uint32_t rank = 0) {
        check(spw_tier_collect(c_string(directory, "directory"), c_string(job, "job"),
                               host.empty() ? nullptr : c_string(host, "host"), rank));
    }
    // The steps at which an open with these options can resume.
    static spw_tier_steps_info steps(const spw_tier_options &options) {
        return read<spw_tier_steps_info>(spw_tier_get_steps, &options);
    }

private:
    static void check_streams(extent one, std::size_t addresses) {
        if (addresses != one.streams) {
            throw std::length_error("spillway::tier: one address per stream of the extent is needed");
        }
    }
};

// Adam over states that are stored on a tier. Not thread-safe. The tier stays open as long as the update.
class swap : public object<spw_swap, detail::close> {
public:
    swap(const tier &storage, const spw_swap_options &options) : object(detail::open<spw_swap>(spw_swap_open, storage.get(), &options)),
          subgroups_(options.subgroups) {}
    // Sets all states: addresses of param, exp_avg and exp_avg_sq of each subgroup; NULL is zeros. Another number of
    // addresses throws std::length_error.
    void fill(span<const float *const> states) {
        if (states.size() != 3 * subgroups_) {
            throw std::length_error("spillway::swap: three addresses per subgroup are needed");
        }
        check(spw_swap_fill(get(), states.data()));
    }
    // Steps all subgroups: one tensor each, whose states are on the tier.
    void adam_step(const spw_adam_options &options, tensors all, spw_step_stats *stats = nullptr) {
        check(spw_swap_adam_step(get(), &options, all.data(), all.size(), stats));
    }
    // Steps parts of subgroups: `subgroups` and `firsts` have one number for each tensor.
    void adam_step_parts(const spw_adam_options &options, tensors all, span<const std::uint64_t> subgroups,
                         span<const std::uint64_t> firsts) {
        if (subgroups.size() != all.size() || firsts.size() != all.size()) {
            throw std::length_error("spillway::swap: one subgroup and one first element per tensor are needed");
        }
        check(spw_swap_adam_step_parts(get(), &options, all.data(), subgroups.data(), firsts.data(), all.size()));
    }
    // Copies the f32 state of a subgroup; null skips a part.
    void read_state(std::uint64_t subgroup, float *param, float *exp_avg, float *exp_avg_sq, const void *weights = nullptr) {
        check(spw_swap_read(get(), subgroup, weights, param, exp_avg, exp_avg_sq));
    }
    void write_state(std::uint64_t subgroup, const float *param, const float *exp_avg, const float *exp_avg_sq) {
        check(spw_swap_write(get(), subgroup, param, exp_avg, exp_avg_sq));
    }
    // A step beside the caller, see spw_swap_begin; `flags` is a sum of spw_swap_begin_flag.
    void begin(const spw_adam_options &options, std::uint32_t flags = 0) { check(spw_swap_begin(get(), &options, flags)); }
    void submit(std::uint64_t subgroup, const spw_tensor &tensor) { check(spw_swap_submit(get(), subgroup, &tensor, nullptr, 1)); }
    void verdict(spw_spec_verdict verdict, double grad_scale = 1) { check(spw_swap_verdict(get(), verdict, grad_scale)); }
    // The next subgroup whose copy is written; empty after a timeout.
    std::optional<std::uint64_t> next_published(timeout limit = {}) {
        std::uint64_t subgroup = 0;
        return check_in_time(spw_swap_next_published(get(), milliseconds(limit), &subgroup)) ? std::optional(subgroup)
                                                                                             : std::nullopt;
    }
    // False after a timeout; the step is then still open.
    bool finish(timeout limit = {}, spw_step_stats *stats = nullptr) {
        return check_in_time(spw_swap_finish(get(), milliseconds(limit), stats));
    }
    void commit(std::uint64_t step, span<const char> payload = {}) {
        check(spw_swap_commit(get(), step, payload.data(), payload.size()));
    }
    task commit_begin(std::uint64_t step, span<const char> payload = {}) {
        return task(detail::open<spw_tier_task>(spw_swap_commit_begin, get(), step, payload.data(), payload.size()));
    }
    void rollback() { check(spw_swap_rollback(get())); }
    spw_swap_stats stats() const { return read<spw_swap_stats>(spw_swap_get_stats, get()); }
    std::string trace() { return text(spw_swap_get_trace, get()); }
    // The memory that an update with these options takes on a tier with so many paths.
    static spw_swap_budget budget(const spw_swap_options &options, std::uint64_t paths) {
        return read<spw_swap_budget>(spw_swap_plan_budget, &options, paths);
    }

private:
    std::uint64_t subgroups_;
};

// Steps before the norm of the whole gradient is known, then a verdict. Thread-safe.
class speculation : public object<spw_spec, detail::close> {
public:
    explicit speculation(const spw_spec_options &options) : object(detail::open<spw_spec>(spw_spec_open, &options)) {}
    // A round of the optimizer whose options these are.
#define SPW_BEGIN(name, NAME)                                                               \
    void begin(const spw_##name##_options &options, double max_norm = 0) const {            \
        check(spw_spec_begin_##name(get(), &options, max_norm));                            \
    }
    SPW_OPTIMIZERS(SPW_BEGIN)
#undef SPW_BEGIN
    void submit(std::uint32_t bucket, tensors all, const spw_spec_event *event = nullptr) const {
        check(spw_spec_submit(get(), bucket, all.data(), all.size(), event));
    }
    // This rank's sum of squares and finiteness, once all buckets are measured.
    std::optional<spw_step_stats> local_result(timeout limit = {}) const {
        auto stats = make<spw_step_stats>();
        return check_in_time(spw_spec_local_result(get(), milliseconds(limit), &stats)) ? std::optional(stats)
                                                                                       : std::nullopt;
    }
    // The sum of squares of each bucket, once all buckets are measured.
    std::vector<double> squares() const {
        std::uint64_t count = 0;
        check(spw_spec_get_squares(get(), nullptr, 0, &count));
        std::vector<double> found(count);
        check(spw_spec_get_squares(get(), found.data(), found.size(), &count));
        return found;
    }
    spw_spec_outcome resolve(const spw_step_stats &all_ranks) const {
        auto outcome = make<spw_spec_outcome>();
        check(spw_spec_resolve(get(), &all_ranks, &outcome));
        return outcome;
    }
    // The verdict of the caller, with the gradient factor of SPW_SPEC_VERDICT_REDO.
    spw_spec_outcome resolve_as(spw_spec_verdict verdict, double grad_scale = 1) const {
        return read<spw_spec_outcome>(spw_spec_resolve_as, get(), static_cast<std::uint32_t>(verdict), grad_scale);
    }
    spw_spec_state bucket(std::uint32_t number) const {
        std::uint32_t state = 0;
        check(spw_spec_get_bucket(get(), number, &state));
        return static_cast<spw_spec_state>(state);
    }
    // The buckets whose copies the verdict invalidated.
    std::vector<std::uint32_t> rolled_back() const {
        std::uint64_t count = 0;
        check(spw_spec_get_rolled_back(get(), nullptr, 0, &count));
        std::vector<std::uint32_t> buckets(count);
        check(spw_spec_get_rolled_back(get(), buckets.data(), buckets.size(), &count));
        return buckets;
    }
    spw_spec_stats stats() const { return read<spw_spec_stats>(spw_spec_get_stats, get()); }
    bool wait(std::uint32_t bucket, timeout limit = {}) const {
        return check_in_time(spw_spec_wait(get(), bucket, milliseconds(limit)));
    }
    bool finish(timeout limit = {}) const { return check_in_time(spw_spec_finish(get(), milliseconds(limit))); }
    void abort() const { check(spw_spec_abort(get())); }
};

#ifdef SPW_EXPERIMENTAL
// A GPU. Thread-safe.
class gpu : public object<spw_gpu, detail::close> {
public:
    explicit gpu(const spw_gpu_options &options = make<spw_gpu_options>())
        : object(detail::open<spw_gpu>(spw_gpu_open, &options)) {}
    spw_gpu_info info() const {
        auto result = make<spw_gpu_info>();
        check(spw_gpu_get_info(get(), &result));
        return result;
    }
    void adam_step(const spw_adam_options &options, tensors all, std::uint64_t stream = 0,
                   spw_step_stats *stats = nullptr) const {
        check(spw_gpu_adam_step(get(), &options, all.data(), all.size(), stream, stats));
    }
    // Queues a copy and returns its ticket.
    std::uint64_t copy(const spw_gpu_copy &one) const {
        std::uint64_t ticket = 0;
        check(spw_gpu_copy_start(get(), &one, &ticket));
        return ticket;
    }
    bool wait(std::uint64_t ticket, timeout limit = {}) const {
        return check_in_time(spw_gpu_copy_wait(get(), ticket, milliseconds(limit)));
    }
};

// An update divided between CPU and GPU. Thread-safe.
class interleave : public object<spw_interleave, detail::close> {
public:
    interleave(const spw_interleave_options &options, span<const spw_interleave_subgroup> subgroups)
        : object(detail::open<spw_interleave>(spw_interleave_open, &options, subgroups.data(), subgroups.size())) {}
    void grad_ready(std::uint64_t subgroup, std::uint64_t stream = 0) const {
        check(spw_interleave_grad_ready(get(), subgroup, stream));
    }
    void begin(const spw_adam_options &options, std::uint64_t stream = 0) const {
        check(spw_interleave_begin(get(), &options, 1, stream));
    }
    void stream_wait_params(std::uint64_t subgroup, std::uint64_t stream = 0) const {
        check(spw_interleave_stream_wait_params(get(), subgroup, stream));
    }
    void finish() const { check(spw_interleave_finish(get())); }
    void drain() const { check(spw_interleave_drain(get())); }
};
#endif // SPW_EXPERIMENTAL

} // namespace spillway

#endif // SPILLWAY_HPP
