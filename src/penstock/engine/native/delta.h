// Gated DeltaNet: a short convolution over the inputs of queries, keys and values, and a state
// [key_dim, value_dim] for each value head, which every row changes.
//
// A row changes a state in one fixed order of operations, whichever rows a pass has beside it. A
// sequence's rows come one after the other: first those that a pass before has kept and that turned
// out to be of the text, then this pass's. Behind the last row that is certain the rest is computed
// on a copy, which stays in the cache, and their inputs are kept.
#pragma once

#include "model.h"

namespace penstock {

// What one pass does to the states of one sequence and key head, and what its rows give.
class DeltaHead {
 public:
  DeltaHead(const Model& model, const LayerWeights& layer, const StateMove& move, int key_head,
            Buffer& scratch)
      : model_(model),
        w_(model.weights),
        layer_(layer),
        move_(move),
        key_head_(key_head),
        padded_key_(round_up(w_.key_dim, kLanes)),
        padded_value_(round_up(w_.value_dim, kLanes)),
        num_values_(w_.value_heads / w_.key_heads),
        replayed_(std::max(0, move.replayed)),
        kept_(layer.kept + (size_t)move.slot * kept_rows(w_) * model.inputs_stride()),
        states_(layer.states + (size_t)move.slot * w_.value_heads * state_size()) {
    float* next = scratch.reserve(2 * padded_key_ + 3 * padded_value_ + 4 * kLanes +
                                  (size_t)num_values_ * state_size());
    query_ = next, key_ = query_ + padded_key_ + kLanes, value_ = key_ + padded_key_ + kLanes;
    out_ = value_ + padded_value_ + kLanes, delta_ = out_ + padded_value_ + kLanes;
    copies_ = delta_ + padded_value_;
  }

  // Rows whose inputs a slot holds: those that the convolution reads before a state's first one,
  // and those that are kept behind it.
  static size_t kept_rows(const ModelWeights& w) { return w.kernel - 1 + w.most_kept; }

  void run() {
    if (move_.replayed < 0) begin();
    const int certain = replayed_ + move_.committed, steps = replayed_ + move_.num_rows;
    bool is_copy = false;
    for (int step = 0; step < steps; ++step) {
      if (step == certain) copy_states(), is_copy = true;
      const int row = step < replayed_ ? -1 : move_.row + step - replayed_;
      take_in(step, row, is_copy);
    }
    for_channels([&](int first, int count) { keep(certain, steps - certain, first, count); });
  }

 private:
  const Model& model_;
  const ModelWeights& w_;
  const LayerWeights& layer_;
  const StateMove& move_;
  const int key_head_, padded_key_, padded_value_, num_values_, replayed_;
  float *const kept_, *const states_;
  float *query_, *key_, *value_, *out_, *delta_, *copies_;

  size_t state_size() const { return (size_t)w_.key_dim * padded_value_; }
  int value_head(int i) const {
    return w_.strided ? key_head_ + i * w_.key_heads : key_head_ * num_values_ + i;
  }
  float* state(int i) const { return states_ + value_head(i) * state_size(); }

  // The inputs at place i: the convolution's of step s are those at s to s + kernel - 1.
  float* inputs(int i) const {
    const int held = w_.kernel - 1 + replayed_;
    return i < held ? kept_ + i * model_.inputs_stride()
                    : model_.inputs.get() + (move_.row + i - held) * model_.inputs_stride();
  }

  int first_key() const { return w_.key_heads * w_.key_dim; }
  int first_value() const { return 2 * first_key(); }

  // Call visit(first, count) for the ranges of inputs that only this task reads and writes.
  template <class Visit>
  void for_channels(Visit&& visit) const {
    visit(key_head_ * w_.key_dim, w_.key_dim);
    visit(first_key() + key_head_ * w_.key_dim, w_.key_dim);
    for (int i = 0; i < num_values_; ++i) {
      visit(first_value() + value_head(i) * w_.value_dim, w_.value_dim);
      visit(model_.beta_start() + value_head(i), 1);
      visit(model_.alpha_start() + value_head(i), 1);
    }
  }

  void begin() {
    for (int i = 0; i < num_values_; ++i) std::fill_n(state(i), state_size(), 0.0f);
    for_channels([&](int first, int count) {
      for (int i = 0; i < w_.kernel - 1; ++i)
        std::fill_n(kept_ + i * model_.inputs_stride() + first, count, 0.0f);
    });
  }

  void copy_states() {
    for (int i = 0; i < num_values_; ++i)
      std::memcpy(copies_ + i * state_size(), state(i), state_size() * sizeof(float));
  }

  // What the next pass reads: the convolution's inputs before its first step, then those of the rows
  // that it may replay. Places rise, so that none is overwritten before it is read.
  void keep(int certain, int count, int first, int size) const {
    for (int i = 0; i < w_.kernel - 1 + count; ++i) {
      const float* from = inputs(i + certain) + first;
      float* to = kept_ + i * model_.inputs_stride() + first;
      if (from != to) std::memcpy(to, from, size * sizeof(float));
    }
  }

  // row: of the pass, which gets what the step gives; -1: it is replayed
  void take_in(int step, int row, bool is_copy) {
    convolve(step, key_head_ * w_.key_dim, w_.key_dim, query_);
    convolve(step, first_key() + key_head_ * w_.key_dim, w_.key_dim, key_);
    normalise(query_, 1.0f / std::sqrt((float)w_.key_dim));
    normalise(key_, 1.0f);
    const float* input = inputs(step + w_.kernel - 1);
    for (int i = 0; i < num_values_; ++i) {
      const int head = value_head(i);
      convolve(step, first_value() + head * w_.value_dim, w_.value_dim, value_);
      const float beta = 1.0f / (1.0f + std::exp(-input[model_.beta_start() + head]));
      const float x = input[model_.alpha_start() + head] + layer_.dt_bias[head];
      const float decay = std::exp(layer_.rate[head] * (x > 20 ? x : std::log1p(std::exp(x))));
      update(is_copy ? copies_ + i * state_size() : state(i), beta, decay, row >= 0);
      if (row >= 0) finish(row, head);
    }
  }

  // out = silu of the convolution of `count` channels, then zeros up to a whole vector.
  void convolve(int step, int first, int count, float* out) const {
    const size_t stride = model_.conv_stride();
    for (int i = 0; i < count; i += kLanes) {
      VecF sum = {};
      for (int t = 0; t < w_.kernel; ++t)
        sum = fused(load(layer_.conv + t * stride + first + i), load(inputs(step + t) + first + i),
                    sum);
      store(out + i, silu(sum));
    }
    std::fill(out + count, out + round_up(count, kLanes), 0.0f);
  }

  // x = x / |x| * scale
  void normalise(float* x, float scale) const {
    VecF sum = {};
    for (int i = 0; i < padded_key_; i += kLanes) sum = fused(load(x + i), load(x + i), sum);
    const VecF factor = splat(scale / std::sqrt(sum_lanes(sum) + 1e-6f));
    for (int i = 0; i < padded_key_; i += kLanes) store(x + i, load(x + i) * factor);
  }

  void update(float* state, float beta, float decay, bool reads) {
    int i = 0;
    for (; i + 8 * kLanes <= padded_value_; i += 8 * kLanes)
      update_strip<8>(state + i, i, beta, decay, reads);
    for (; i + 4 * kLanes <= padded_value_; i += 4 * kLanes)
      update_strip<4>(state + i, i, beta, decay, reads);
    for (; i < padded_value_; i += kLanes) update_strip<1>(state + i, i, beta, decay, reads);
  }

  // N vectors of columns: state = decay * state + key x delta, where delta is beta times what the
  // value differs by from what the decayed state holds for the key; out = query x state. Every
  // element is one chain of multiply-adds over the key's channels.
  template <int N>
  __attribute__((noinline)) void update_strip(float* state, int column, float beta, float decay,
                                              bool reads) {
    VecF sum[N] = {};
    for (int k = 0; k < w_.key_dim; ++k) {
      const VecF key = splat(key_[k]);
      for (int n = 0; n < N; ++n)
        sum[n] = fused(key, load(state + (size_t)k * padded_value_ + n * kLanes), sum[n]);
    }
    VecF delta[N];
    for (int n = 0; n < N; ++n) {
      delta[n] = splat(beta) * (load(value_ + column + n * kLanes) - splat(decay) * sum[n]);
      sum[n] = VecF{};
    }
    for (int k = 0; k < w_.key_dim; ++k) {
      const VecF key = splat(key_[k]), query = splat(query_[k]);
      for (int n = 0; n < N; ++n) {
        float* at = state + (size_t)k * padded_value_ + n * kLanes;
        const VecF now = fused(key, delta[n], load(at) * splat(decay));
        store(at, now);
        if (reads) sum[n] = fused(query, now, sum[n]);
      }
    }
    for (int n = 0; n < N; ++n) store(out_ + column + n * kLanes, sum[n]);
  }

  // attended = RMSNorm(out) * silu(z)
  void finish(int row, int head) {
    const int size = w_.value_dim;
    const float* z = model_.output_gate.get() + row * model_.value_stride() + (size_t)head * size;
    rms_norm(out_, layer_.linear_norm, size, w_.rms_norm_eps, out_);
    for (int i = 0; i < padded_value_; i += kLanes)
      store(delta_ + i, load(out_ + i) * silu(load(z + i)));
    std::memcpy(model_.attended.get() + row * model_.query_stride() + (size_t)head * size, delta_,
                size * sizeof(float));
  }
};

}  // namespace penstock
