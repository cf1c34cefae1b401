// Prefetch of the memory that attention will read, during matrix products.
#pragma once

#include <cmath>

#include "model.h"

namespace penstock {

// Keys and values that the shared cache is taken to hold beside the weights of a layer.
constexpr double kUpcomingBytes = 12 << 20;

// The cache's blocks that the next attention reads, piece by piece and evenly over the products
// before it: with many rows those wait for the processor, and attention for memory. Of every
// `num_threads` blocks a thread fetches one.
class Upcoming {
 public:
  Upcoming(const Model& model, const Plan& plan, int thread, int num_threads)
      : model_(model),
        plan_(plan),
        thread_(thread),
        num_threads_(num_threads) {
    const ModelWeights& w = model.weights;
    set_sizes(model.layers[0]);
    const int spare = num_spare_blocks(num_row_blocks(plan.num_rows()));
    const double bytes = (double)plan.num_blocks_read * (sizes_[0] + sizes_[1]);
    if (spare == 0 || plan.num_rows() > kMostChunkRows || bytes > kUpcomingBytes) return;
    const double heads = (double)w.num_heads * w.head_dim +
                         (w.num_heads + 2.0 * w.num_kv_heads) * model.head_width();
    // Experts have too few rows each for spare blocks.
    const double inner = w.num_experts ? 0.0 : 3.0 * w.intermediate_size;
    const double columns = w.hidden_size * (heads + inner);
    step_ = std::min(64, (int)std::ceil(bytes * kPanel / (spare * columns)));
  }

  // From here on what `layer` will read; nothing after the last layer.
  void start(int layer) {
    task_ = step_ && layer < model_.weights.num_layers ? 0 : plan_.attention.size();
    if (task_ == plan_.attention.size()) return;
    memory_[0] = (const char*)model_.layers[layer].keys;
    if (!memory_[0]) {  // a recurrent layer
      task_ = plan_.attention.size();
      return;
    }
    memory_[1] = (const char*)model_.layers[layer].values;
    set_sizes(model_.layers[layer]);
    window_ = model_.layers[layer].window;
    half_ = 0;
    offset_ = 0;
    block_ = thread_;
    find_sequence();
  }

  // The next piece, for a product of k_size steps.
  Ahead operator()(int k_size) {
    if (task_ == plan_.attention.size()) return {};
    const size_t block = plan_.attention[task_].block_table[first_ + block_];
    const Ahead piece{memory_[half_] + block * sizes_[half_] + offset_, step_};
    offset_ += (size_t)k_size * step_;
    if (offset_ < sizes_[half_]) return piece;
    offset_ = 0;
    half_ = !half_;
    if (half_ == 0) {
      block_ += num_threads_;
      find_sequence();
    }
    return piece;
  }

 private:
  const Model& model_;
  const Plan& plan_;
  const int thread_, num_threads_;
  size_t sizes_[2];  // of a block's keys, and of its values
  const char* memory_[2] = {};
  size_t task_ = 0, offset_ = 0;
  int block_ = 0, half_ = 0, step_ = 0;
  int window_ = 0, first_ = 0;  // of the layer; the sequence's first block in it

  void set_sizes(const LayerWeights& layer) {
    const AttentionShape shape = model_.shape_of(layer);
    sizes_[0] = shape.key_bytes() * shape.kv_heads;
    sizes_[1] = shape.value_bytes() * shape.kv_heads;
  }

  // block_ counts on from the sequence before: find the one in which it lies.
  void find_sequence() {
    for (; task_ < plan_.attention.size(); ++task_) {
      const AttentionTask& work = plan_.attention[task_];
      const int length = work.first_position + work.num_rows;
      first_ = std::max(0, work.first_position + 1 - window_) / model_.shape.block_size;
      const int blocks = (length + model_.shape.block_size - 1) / model_.shape.block_size - first_;
      if (block_ < blocks) return;
      block_ -= blocks;
    }
  }
};

}  // namespace penstock
