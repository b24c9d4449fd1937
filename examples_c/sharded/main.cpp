// Trains over several processes with the data flow of Megatron's distributed optimizer, states on a tier.
//
//     c++ -std=c++17 -O2 main.cpp $(pkg-config --cflags --libs spillway) -pthread -o sharded
//     ./sharded DIRECTORY PROCESSES STEPS
//
// Every process has all parameters in contiguous buffers, one per dtype: bf16 weights and f32 scales. It owns one shard
// of each buffer: the f32 main gradients of the shard in memory, and master weights and moments on its tier.
//
// | part of a step | processes |
// |---|---|
// | backward of a micro-batch, with gradients in the dtype of the parameters | one process per micro-batch |
// | reduce-scatter: sum of the micro-batches in f32, with sums of squares | each process for its shard |
// | clipping by the norm of the whole gradient, AdamW, bf16 copy, commit | each process for its shard |
// | all-gather of the parameters | all |
//
// Killed at any moment, in any process, and started again with the same arguments, the program continues at the last step
// that all processes have committed. The result has the same bits for 1, 2 and 4 processes, killed or not: no sum
// depends on the number of processes.

#include <spillway.hpp>

#include <array>
#include <cinttypes>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <vector>

#include "model.hpp"
#include "processes.hpp"

// The memory through which the processes exchange data.
struct exchange {
    std::array<buffers, micro_batches> grads;
    buffers params;
    std::array<double, micro_batches> loss;
    std::array<double, blocks> sum_squares;
    std::array<std::uint64_t, blocks> digest;
    std::array<std::int64_t, most_processes> last_step;
};
using processes = group<exchange>;

// A block of a shard: its number among all blocks, and its first element in its buffer.
struct block {
    std::size_t number;
    std::size_t start;
    bool is_weight() const { return number < weight_blocks; }
};

std::vector<block> shard_of(unsigned rank, unsigned size) {
    std::vector<block> mine;
    for (std::size_t number = 0; number < blocks; number++) {
        const std::size_t first = number < weight_blocks ? 0 : weight_blocks;
        const std::size_t count = first == 0 ? weight_blocks : blocks - weight_blocks;
        if ((number - first) / (count / size) == rank) {
            mine.push_back({number, (number - first) * block_elements});
        }
    }
    return mine;
}

// One process of the run.
class trainer {
public:
    trainer(const processes &all, const char *directory) : all_(all), mine_(shard_of(all.rank, all.size)) {
        open(directory);
        gather();
    }

    std::uint64_t step() const { return step_; }

    // Returns the loss before the step.
    double train() {
        exchange &shared = *all_.shared;
        const std::uint64_t next = step_ + 1;
        for (std::size_t m = all_.rank; m < micro_batches; m += all_.size) {
            shared.loss[m] = backward(*params_, m, next, shared.grads[m]);
        }
        all_.barrier();
        reduce_scatter();
        all_.barrier();
        double total = 0, loss = 0;
        for (double part : shared.sum_squares) total += part;
        for (double part : shared.loss) loss += part;
        if (std::isfinite(total)) { // else every process skips the update
            update(next, total);
        }
        swap_->commit(next);
        step_ = next;
        // No process changes its tier again before all have committed: a killed run finds this step or the one before it
        // in every process.
        gather();
        return loss;
    }

    // A digest of all states and parameters. All processes call it.
    std::uint64_t digest() {
        std::vector<float> states(3 * block_elements);
        for (std::size_t i = 0; i < mine_.size(); i++) {
            float *param = states.data();
            spillway::check(spw_swap_read(swap_->get(), i, nullptr, param, param + block_elements, param + 2 * block_elements));
            all_.shared->digest[mine_[i].number] = hash(0, states.data(), states.size() * sizeof(float));
        }
        all_.barrier();
        const std::uint64_t of_states = hash(0, all_.shared->digest.data(), sizeof all_.shared->digest);
        return hash(of_states, params_.get(), sizeof *params_);
    }

private:
    // Opens this process's tier at the last step that every process has committed, or starts anew.
    void open(const char *directory) {
        auto path = spillway::make<spw_tier_path>();
        path.directory = directory;
        auto options = spillway::make<spw_tier_options>();
        options.job = "sharded";
        options.rank = all_.rank;
        options.world = all_.size;
        options.paths = &path;
        options.path_count = 1;
        auto steps = spillway::make<spw_tier_steps_info>();
        spillway::check(spw_tier_get_steps(&options, &steps));
        auto &last = all_.shared->last_step;
        last[all_.rank] = steps.committed ? static_cast<std::int64_t>(steps.last) : -1;
        all_.barrier();
        const auto [least, most] = std::minmax_element(last.begin(), last.begin() + all_.size);
        const std::int64_t common = *least;
        if (common < 0 && *most > 0) {
            throw std::runtime_error("the committed states of another process are missing");
        }
        if (common >= 0) {
            options.mode = SPW_TIER_MODE_RESUME;
            options.flags = SPW_TIER_FLAG_AT_STEP;
            options.at_step = step_ = static_cast<std::uint64_t>(common);
        } else if (steps.exists) { // killed before every process had its first commit
            spillway::check(spw_tier_collect(directory, options.job, nullptr, all_.rank));
        }
        tier_ = std::make_unique<spillway::tier>(options);

        const std::vector<std::uint64_t> elements(mine_.size(), block_elements);
        auto update = spillway::make<spw_swap_options>();
        update.host_memory = 1 << 20;
        update.elements = elements.data();
        update.subgroups = elements.size();
        swap_ = std::make_unique<spillway::swap>(*tier_, update);
        if (common < 0) {
            std::vector<float> params(mine_.size() * block_elements);
            std::vector<const float *> states(3 * mine_.size()); // null: moments are zeros
            for (std::size_t i = 0; i < mine_.size(); i++) {
                states[3 * i] = &params[i * block_elements];
                for (std::size_t k = 0; k < block_elements; k++) {
                    const std::size_t element = mine_[i].start + k;
                    params[i * block_elements + k] = mine_[i].is_weight() ? initial_weight(element) : initial_scale(element);
                }
            }
            swap_->fill(states);
            swap_->commit(0);
        }
        // The shard of the parameters, from the master weights.
        std::vector<float> master(block_elements);
        for (std::size_t i = 0; i < mine_.size(); i++) {
            spillway::check(spw_swap_read(swap_->get(), i, nullptr, master.data(), nullptr, nullptr));
            if (mine_[i].is_weight()) {
                std::transform(master.begin(), master.end(), &params_->weight[mine_[i].start], rounded);
            } else {
                std::copy(master.begin(), master.end(), &params_->scale[mine_[i].start]);
            }
        }
    }

    // Main gradients of the shard: the micro-batches are added in their order, with the sum of squares of each block.
    void reduce_scatter() {
        std::fill(main_grads_.begin(), main_grads_.end(), 0.0f);
        for (std::size_t i = 0; i < mine_.size(); i++) {
            auto one = spillway::make<spw_grad_tensor>();
            one.n = block_elements;
            one.dst = &main_grads_[i * block_elements];
            one.dst_dtype = SPW_DTYPE_F32;
            one.src_dtype = mine_[i].is_weight() ? SPW_DTYPE_BF16 : SPW_DTYPE_F32;
            auto stats = spillway::make<spw_step_stats>();
            for (const buffers &grads : all_.shared->grads) {
                one.src = address(grads, mine_[i]);
                spillway::check(spw_grad_accumulate(&one, 1, 1.0, &stats));
            }
            all_.shared->sum_squares[mine_[i].number] = stats.sum_squares;
        }
    }

    // AdamW on the shard. Weights receive their bf16 copy in the same pass; scales are f32 and are read.
    void update(std::uint64_t next, double sum_squares) {
        constexpr double max_norm = 25; // about half of the steps exceed it
        auto adam = spillway::make<spw_adam_options>();
        adam.lr = 2e-3;
        adam.weight_decay = 0.01;
        adam.step = next;
        adam.grad_scale = std::min(1.0, max_norm / (std::sqrt(sum_squares) + 1e-6));
        std::vector<spw_tensor> tensors(mine_.size(), spillway::make<spw_tensor>());
        for (std::size_t i = 0; i < mine_.size(); i++) {
            tensors[i].param_dtype = tensors[i].state_dtype = tensors[i].grad_dtype = SPW_DTYPE_F32;
            tensors[i].n = block_elements;
            tensors[i].grad = &main_grads_[i * block_elements];
            if (mine_[i].is_weight()) {
                tensors[i].copy_dtype = SPW_DTYPE_BF16;
                tensors[i].param_copy = &params_->weight[mine_[i].start];
            }
        }
        swap_->adam_step(adam, tensors);
        for (std::size_t i = 0; i < mine_.size(); i++) {
            if (!mine_[i].is_weight()) {
                float *scale = &params_->scale[mine_[i].start];
                spillway::check(spw_swap_read(swap_->get(), i, nullptr, scale, nullptr, nullptr));
            }
        }
    }

    // All-gather: this process's shard to all, and theirs to this process.
    void gather() {
        buffers &shared = all_.shared->params;
        for (const block &one : mine_) {
            const std::size_t bytes = block_elements * (one.is_weight() ? sizeof(bf16) : sizeof(float));
            std::memcpy(const_cast<void *>(address(shared, one)), address(*params_, one), bytes);
        }
        all_.barrier();
        *params_ = shared;
        all_.barrier();
    }

    static const void *address(const buffers &of, const block &one) {
        return one.is_weight() ? static_cast<const void *>(&of.weight[one.start]) : &of.scale[one.start];
    }

    static std::uint64_t hash(std::uint64_t seed, const void *data, std::size_t bytes) {
        std::uint64_t result = seed ^ 0xcbf29ce484222325u;
        for (std::size_t i = 0; i < bytes; i++) {
            result = (result ^ static_cast<const unsigned char *>(data)[i]) * 0x100000001b3u;
        }
        return result;
    }

    const processes &all_;
    const std::vector<block> mine_;
    const std::unique_ptr<buffers> params_ = std::make_unique<buffers>();
    std::vector<float> main_grads_ = std::vector<float>(mine_.size() * block_elements);
    std::uint64_t step_ = 0;
    std::unique_ptr<spillway::tier> tier_;
    std::unique_ptr<spillway::swap> swap_;
};

int main(int count, char **arguments) {
    const unsigned long size = count == 4 ? std::strtoul(arguments[2], nullptr, 10) : 0;
    if (size != 1 && size != 2 && size != 4) {
        std::fprintf(stderr, "usage: %s DIRECTORY PROCESSES STEPS, with 1, 2 or 4 processes\n", arguments[0]);
        return 2;
    }
    const std::uint64_t steps = std::strtoull(arguments[3], nullptr, 10);
    return launch<exchange>(static_cast<unsigned>(size), [&](const processes &all) {
        spillway::check_library();
        trainer one(all, arguments[1]);
        if (all.rank == 0) {
            std::printf("starts after step %" PRIu64 "\n", one.step());
        }
        while (one.step() < steps) {
            const double loss = one.train();
            if (all.rank == 0) {
                std::printf("step %" PRIu64 ": loss %.3f\n", one.step(), loss);
                std::fflush(stdout);
            }
        }
        const std::uint64_t digest = one.digest();
        if (all.rank == 0) {
            std::printf("digest %016" PRIx64 "\n", digest);
        }
    });
}
