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

// Rows that a strip of a state is changed by before the next strip is.
constexpr int kDeltaRows = 16;
// Vectors of columns in a strip, which the first-level cache holds, and the sums that each of them
// is split into: a multiply-add waits for the one before.
constexpr int kStrip = 2, kChains = 4;

// Channels of a short convolution that one task computes.
constexpr int kConvChannels = 256;

// Inputs of the short convolution of one sequence.
class ConvInputs {
 public:
  ConvInputs(const Model& model, const LayerWeights& layer, const StateMove& move)
      : model_(model),
        w_(model.weights),
        layer_(layer),
        move_(move),
        replayed_(std::max(0, move.replayed)),
        certain_(replayed_ + move.committed),
        kept_(layer.kept + (size_t)move.slot * kept_rows(w_) * model.inputs_stride()) {}

  // Rows whose inputs a slot holds: those that the convolution reads before a state's first one,
  // and those that are kept behind it.
  static size_t kept_rows(const ModelWeights& w) { return w.kernel - 1 + w.most_kept; }

 protected:
  const Model& model_;
  const ModelWeights& w_;
  const LayerWeights& layer_;
  const StateMove& move_;
  const int replayed_;
  const int certain_;  // steps that the state takes in
  float* const kept_;

  // The inputs at place i: the convolution's of step s are those at s to s + kernel - 1.
  float* inputs(int i) const {
    const int held = w_.kernel - 1 + replayed_;
    return i < held ? kept_ + i * model_.inputs_stride()
                    : model_.inputs.get() + (move_.row + i - held) * model_.inputs_stride();
  }

  void begin(int first, int count) const {
    for (int i = 0; i < w_.kernel - 1; ++i)
      std::fill_n(kept_ + i * model_.inputs_stride() + first, count, 0.0f);
  }

  // What the next pass reads: the convolution's inputs before its first step, then those of the rows
  // that it may replay. Places rise, so that none is overwritten before it is read.
  void keep(int first, int size) const {
    const int count = w_.kernel - 1 + replayed_ + move_.num_rows - certain_;
    for (int i = 0; i < count; ++i) {
      const float* from = inputs(i + certain_) + first;
      float* to = kept_ + i * model_.inputs_stride() + first;
      if (from != to) std::memcpy(to, from, size * sizeof(float));
    }
  }

  // The convolution of a vector of channels.
  VecF convolved(int step, int channel) const {
    const size_t stride = model_.conv_stride();
    VecF sum = {};
    for (int t = 0; t < w_.kernel; ++t)
      sum = fused(load(layer_.conv + t * stride + channel), load(inputs(step + t) + channel), sum);
    return sum;
  }
};

// What a short convolution alone gives for some channels. Its inputs, gated, are all of its state.
class ShortConv : ConvInputs {
 public:
  using ConvInputs::ConvInputs;

  void run(int first, int count) const {
    if (move_.replayed < 0) begin(first, count);
    for (int i = 0; i < move_.num_rows; ++i) {
      const size_t row = move_.row + i;
      const float* gate = model_.query.get() + row * model_.query_stride();
      const float* out_gate = model_.output_gate.get() + row * model_.value_stride();
      float* x = model_.inputs.get() + row * model_.inputs_stride();
      float* out = model_.attended.get() + row * model_.query_stride();
      for (int c = first; c < first + count; c += kLanes) {
        store(x + c, load(x + c) * load(gate + c));
        store(out + c, convolved(replayed_ + i, c) * load(out_gate + c));
      }
    }
    keep(first, count);
  }
};

// What one pass does to the states of one sequence and key head, and what its rows give.
//
// A state lies strip by strip, each [key_dim, its columns].
class DeltaHead : ConvInputs {
 public:
  DeltaHead(const Model& model, const LayerWeights& layer, const StateMove& move, int key_head,
            Buffer& scratch)
      : ConvInputs(model, layer, move),
        key_head_(key_head),
        padded_key_(round_up(w_.key_dim, kLanes)),
        padded_value_(round_up(w_.value_dim, kLanes)),
        num_values_(w_.value_heads / w_.key_heads),
        states_(layer.states + (size_t)move.slot * w_.value_heads * state_size()) {
    const size_t keys = (size_t)kDeltaRows * padded_key_, values = (size_t)kDeltaRows * padded_value_;
    queries_ = scratch.reserve(2 * keys + 2 * values + padded_value_ + num_values_ * state_size());
    keys_ = queries_ + keys, value_rows_ = keys_ + keys, outs_ = value_rows_ + values;
    gated_ = outs_ + values, copies_ = gated_ + padded_value_;
  }

  void run() {
    if (move_.replayed < 0) begin_states();
    const int steps = replayed_ + move_.num_rows;
    for (int first = 0; first < steps; first += kDeltaRows)
      take_in(first, std::min(kDeltaRows, steps - first));
    for_channels([&](int first, int count) { keep(first, count); });
  }

 private:
  const int key_head_, padded_key_, padded_value_, num_values_;
  float* const states_;
  float *queries_, *keys_, *value_rows_, *outs_, *gated_, *copies_;
  float beta_[kDeltaRows], decay_[kDeltaRows];

  size_t state_size() const { return (size_t)w_.key_dim * padded_value_; }
  int value_head(int i) const {
    return w_.strided ? key_head_ + i * w_.key_heads : key_head_ * num_values_ + i;
  }
  float* state(int i) const { return states_ + value_head(i) * state_size(); }

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

  void begin_states() {
    for (int i = 0; i < num_values_; ++i) std::fill_n(state(i), state_size(), 0.0f);
    for_channels([&](int first, int count) { begin(first, count); });
  }

  void take_in(int first, int count) {
    for (int i = 0; i < count; ++i) {
      float *query = queries_ + i * padded_key_, *key = keys_ + i * padded_key_;
      convolve(first + i, first_key() + key_head_ * w_.key_dim, w_.key_dim, key);
      normalise(key, 1.0f);
      if (first + i < replayed_) continue;
      convolve(first + i, key_head_ * w_.key_dim, w_.key_dim, query);
      normalise(query, 1.0f / std::sqrt((float)w_.key_dim));
    }
    for (int value = 0; value < num_values_; ++value) {
      const int head = value_head(value);
      for (int i = 0; i < count; ++i) {
        convolve(first + i, first_value() + head * w_.value_dim, w_.value_dim,
                 value_rows_ + i * padded_value_);
        const float* input = inputs(first + i + w_.kernel - 1);
        beta_[i] = 1.0f / (1.0f + std::exp(-input[model_.beta_start() + head]));
        const float x = input[model_.alpha_start() + head] + layer_.dt_bias[head];
        decay_[i] = std::exp(layer_.rate[head] * (x > 20 ? x : std::log1p(std::exp(x))));
      }
      int column = 0;
      for (; column + kStrip * kLanes <= padded_value_; column += kStrip * kLanes)
        update<kStrip>(value, column, first, count);
      for (; column < padded_value_; column += kLanes) update<1>(value, column, first, count);
      for (int i = std::max(0, replayed_ - first); i < count; ++i)
        finish(move_.row + first + i - replayed_, head, outs_ + i * padded_value_);
    }
  }

  // out = silu of the convolution of `count` channels, then zeros up to a whole vector.
  void convolve(int step, int first, int count, float* out) const {
    for (int i = 0; i < count; i += kLanes) store(out + i, silu(convolved(step, first + i)));
    std::fill(out + count, out + round_up(count, kLanes), 0.0f);
  }

  // x = x / |x| * scale
  void normalise(float* x, float scale) const {
    VecF sum = {};
    for (int i = 0; i < padded_key_; i += kLanes) sum = fused(load(x + i), load(x + i), sum);
    const VecF factor = splat(scale / std::sqrt(sum_lanes(sum) + 1e-6f));
    for (int i = 0; i < padded_key_; i += kLanes) store(x + i, load(x + i) * factor);
  }

  // N vectors of columns, by `count` rows: state = decay * state + key x delta, where delta is beta
  // times what the value differs by from what the decayed state holds for the key; out = query x
  // state, or of a replayed row, which nobody reads, next key x state. Every sum is kChains chains
  // of multiply-adds over the key's channels.
  template <int N>
  __attribute__((noinline)) void update(int value, int column, int first, int count) {
    const size_t start = (size_t)column * w_.key_dim;
    float* const copy = copies_ + value * state_size() + start;
    float *to = first > certain_ ? copy : state(value) + start, *from = to;
    VecF sums[kChains][N], delta[N];
    const auto sum = [&](const float* reader, auto&& at) {
      std::memset(sums, 0, sizeof sums);
      over_keys([&](int k, int chain) {
        for (int n = 0; n < N; ++n)
          sums[chain][n] = fused(splat(reader[k]), at(k, n), sums[chain][n]);
      });
    };
    for (int i = 0; i < count; ++i) {
      if (first + i == certain_) to = copy;
      const float *key = keys_ + i * padded_key_, *row = value_rows_ + i * padded_value_ + column;
      const float* reader = first + i < replayed_ ? keys_ + std::min(i + 1, count - 1) * padded_key_
                                                  : queries_ + i * padded_key_;
      const VecF decay = splat(decay_[i]), beta = splat(beta_[i]);
      if (i == 0 || first + i > replayed_)
        sum(key, [&](int k, int n) { return load(from + (k * N + n) * kLanes); });
      for (int n = 0; n < N; ++n) delta[n] = beta * (load(row + n * kLanes) - decay * total(sums, n));
      sum(reader, [&](int k, int n) {
        const int place = (k * N + n) * kLanes;
        const VecF now = fused(splat(key[k]), delta[n], load(from + place) * decay);
        store(to + place, now);
        return now;
      });
      from = to;
      for (int n = 0; n < N; ++n)
        store(outs_ + i * padded_value_ + column + n * kLanes, total(sums, n));
    }
  }

  // The chains' numbers are constants, so that their sums stay in registers.
  template <class Visit>
  void over_keys(Visit&& visit) const {
    const int whole = w_.key_dim / kChains * kChains;
    for (int k = 0; k < whole; k += kChains)
#pragma GCC unroll 4
      for (int chain = 0; chain < kChains; ++chain) visit(k + chain, chain);
#pragma GCC unroll 4
    for (int chain = 0; chain < kChains; ++chain)
      if (whole + chain < w_.key_dim) visit(whole + chain, chain);
  }

  template <int N>
  static VecF total(const VecF (&sums)[kChains][N], int n) {
    return (sums[0][n] + sums[1][n]) + (sums[2][n] + sums[3][n]);
  }

  // attended = RMSNorm(out) * silu(z)
  void finish(int row, int head, float* out) const {
    const int size = w_.value_dim;
    const float* z = model_.output_gate.get() + row * model_.value_stride() + (size_t)head * size;
    rms_norm(out, layer_.linear_norm, size, w_.rms_norm_eps, out);
    for (int i = 0; i < padded_value_; i += kLanes)
      store(gated_ + i, load(out + i) * silu(load(z + i)));
    std::memcpy(model_.attended.get() + row * model_.query_stride() + (size_t)head * size, gated_,
                size * sizeof(float));
  }
};

}  // namespace penstock
