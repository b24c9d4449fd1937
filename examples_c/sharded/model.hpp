// The synthetic model that sharded/main.cpp trains: contiguous buffers of parameters, one per dtype, and a backward whose
// gradients depend on the parameters, the step and the micro-batch alone.

#ifndef MODEL_HPP
#define MODEL_HPP

#include <spillway.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

using spillway::bf16;

// Every layer is a matrix of weights and a scale per row: output = scale * (weight x input).
constexpr std::size_t layers = 3, rows = 512, columns = 128;
constexpr std::size_t micro_batches = 4, samples = 2, most_processes = 4;
// Elements of a block: the unit of shards, of the norm's sum, and of the states on the tier.
constexpr std::size_t block_elements = 4096;

// The elements of a buffer, padded so that 1, 2 and 4 processes have shards of whole blocks.
constexpr std::size_t padded(std::size_t elements) {
    constexpr std::size_t unit = most_processes * block_elements;
    return (elements + unit - 1) / unit * unit;
}
constexpr std::size_t weights = padded(layers * rows * columns), scales = padded(layers * rows);
constexpr std::size_t weight_blocks = weights / block_elements, blocks = weight_blocks + scales / block_elements;

// The contiguous buffers, one per dtype.
struct buffers {
    std::array<bf16, weights> weight;
    std::array<float, scales> scale;
};

inline float widened(bf16 value) {
    const std::uint32_t bits = static_cast<std::uint32_t>(value) << 16;
    float result;
    std::memcpy(&result, &bits, sizeof result);
    return result;
}

// Rounds to nearest even, as the step does for its bf16 copy.
inline bf16 rounded(float value) {
    if (std::isnan(value)) {
        return bf16{0x7fc0};
    }
    std::uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return static_cast<bf16>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// A number in [-1, 1) that depends on the arguments alone.
inline float noise(std::uint64_t kind, std::uint64_t index) {
    std::uint64_t x = (kind << 40) + index + 1;
    for (int round = 0; round < 2; round++) {
        x = (x ^ x >> 31) * 0x9e3779b97f4a7c15u;
    }
    return static_cast<float>(x >> 40) / 8388608.0f - 1.0f;
}

// The first master weights.
inline float initial_weight(std::size_t element) {
    return element < layers * rows * columns ? 0.02f * noise(1, element) : 0.0f;
}
inline float initial_scale(std::size_t element) {
    return element < layers * rows ? 1.0f : 0.0f;
}

// The gradients of one micro-batch, and its loss. Each layer learns the outputs of a fixed matrix.
inline double backward(const buffers &params, std::size_t micro_batch, std::uint64_t step, buffers &grads) {
    static std::vector<float> sums(weights), scale_sums(scales), input(columns);
    std::fill(sums.begin(), sums.end(), 0.0f);
    std::fill(scale_sums.begin(), scale_sums.end(), 0.0f);
    double loss = 0;
    for (std::size_t sample = 0; sample < samples; sample++) {
        for (std::size_t c = 0; c < columns; c++) {
            input[c] = noise(2, ((step * micro_batches + micro_batch) * samples + sample) * columns + c);
        }
        for (std::size_t row = 0; row < layers * rows; row++) {
            const bf16 *weight = &params.weight[row * columns];
            float output = 0, wanted = 0;
            for (std::size_t c = 0; c < columns; c++) {
                output += widened(weight[c]) * input[c];
                wanted += ((row * 31 + c * 17) % 64 < 32 ? 0.05f : -0.05f) * input[c];
            }
            const float error = (params.scale[row] * output - wanted) / (micro_batches * samples);
            loss += error * error * (micro_batches * samples);
            scale_sums[row] += error * output;
            for (std::size_t c = 0; c < columns; c++) {
                sums[row * columns + c] += error * params.scale[row] * input[c];
            }
        }
    }
    std::transform(sums.begin(), sums.end(), grads.weight.begin(), rounded);
    std::copy(scale_sums.begin(), scale_sums.end(), grads.scale.begin());
    return loss;
}

#endif // MODEL_HPP
