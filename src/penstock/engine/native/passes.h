// One forward pass, as phases whose tasks the threads of a job share out.
#pragma once

#include "delta.h"
#include "upcoming.h"

namespace penstock {

// Rows that stay in the second-level cache, in the arithmetic in which `matrix` multiplies them.
inline int chunk_rows(const Matrix& matrix, int k_size) {
  const Arithmetic arithmetic = arithmetic_of(matrix.kind);
  const int bytes = arithmetic == Arithmetic::kFloat ? kChunkBytes : kPreparedChunkBytes;
  const int fitting = (int)(bytes / prepared_bytes(arithmetic, k_size));
  return std::clamp(fitting, kMaxRows, kMostChunkRows) / kMaxRows * kMaxRows;
}

// Rows of a phase, cut into chunks of at most `most`.
struct Chunks {
  int total, rows, count;

  Chunks(int total, int most) : total(total) {
    count = std::max(1, (total + most - 1) / most);
    rows = std::max(1, round_up((total + count - 1) / count, kMaxRows));
    count = (total + rows - 1) / rows;
  }
  int first(int chunk) const { return chunk * rows; }
  int size(int chunk) const { return std::min(rows, total - chunk * rows); }
  int longest() const { return size(0); }
  int expert(int) const { return 0; }
  int row(int chunk, int i) const { return first(chunk) + i; }
};

// The same of the rows that experts have. Their number follows from the batch alone, because a late
// thread must count as many; some may be empty.
struct ExpertChunks {
  const Routing& routing;
  const int total, most, count;

  ExpertChunks(const Routing& routing, int total, int most)
      : routing(routing), total(total), most(most), count(routing.most_chunks(total, most)) {}
  int first(int chunk) const { return routing.chunks[chunk].first; }
  int size(int chunk) const { return routing.chunks[chunk].size; }
  int longest() const { return std::min(most, total); }
  int expert(int chunk) const { return routing.chunks[chunk].expert; }
  int row(int chunk, int i) const { return routing.rows[first(chunk) + i]; }
};

// One thread's rows of one chunk, in every arithmetic that a matrix asks for.
class Inputs {
 public:
  explicit Inputs(Buffer* buffers) : buffers_(buffers) {}

  // From here on these rows.
  void hold(const float* rows, size_t stride, int count, int k_size) {
    rows_ = rows;
    stride_ = stride;
    count_ = count;
    k_size_ = k_size;
    ready_ = 0;
  }

  Product times(const Matrix& matrix) {
    const Arithmetic arithmetic = arithmetic_of(matrix.kind);
    if (arithmetic == Arithmetic::kFloat)
      return {(const char*)rows_, stride_ * sizeof(float), stride_ * sizeof(float), &matrix};
    const size_t row_bytes = prepared_bytes(arithmetic, k_size_);
    Buffer& buffer = buffers_[(int)arithmetic];
    if (!(ready_ & 1 << (int)arithmetic)) {
      buffer.reserve(row_bytes / sizeof(float) * count_);
      prepare(arithmetic, rows_, stride_, count_, k_size_, buffer.get());
      ready_ |= 1 << (int)arithmetic;
    }
    const size_t codes = codes_bytes(arithmetic);
    return {(const char*)buffer.get(), codes ? codes : row_bytes,
            codes ? (size_t)count_ : row_bytes, &matrix};
  }

 private:
  Buffer* const buffers_;
  const float* rows_ = nullptr;
  size_t stride_ = 0;
  int count_ = 0, k_size_ = 0;
  int ready_ = 0;  // a bit for each arithmetic
};

// One thread's part in a forward pass. C: element type of the cache.
//
// The model's buffers may be looked at within tasks only: a late thread can still be on its way
// through an old pass while they grow for the next.
template <class C>
class Pass {
 public:
  Pass(Model& model, Plan& plan, Worker& worker)
      : model_(model),
        weights_(model.weights),
        plan_(plan),
        worker_(worker),
        scratch_(model.scratch[worker.id]),
        inputs_(scratch_.prepared),
        upcoming_(model, plan, worker.id, worker.size) {}

  static int num_phases(const Model& model) {
    const int experts = model.weights.num_experts ? 6 : 0;
    const int by_layer = 6 + experts + (model.has_post_norms() ? 2 : 0);
    const int ple = model.weights.ple_size ? 3 : 0;
    // Gated and recurrent layers have one more, and a head at most eight beside the model's.
    return 11 + ple + (by_layer + 1 + ple) * model.weights.num_layers;
  }

  void run() {
    if (plan_.is_head) return model_.is_assistant() ? run_assistant() : run_head();
    embed();
    if (weights_.ple_size) embed_layers();
    upcoming_.start(0);
    for (int i = 0; i < weights_.num_layers; ++i) {
      const LayerWeights& layer = model_.layers[i];
      const bool is_recurrent = layer.linear_qkv.data;
      if (model_.is_eagle()) read_input(i);
      if (!is_recurrent)
        attend_in(layer);
      else
        layer.alpha.data ? recur(layer) : convolve(layer);
      upcoming_.start(i + 1);
      finish_layer(layer, is_recurrent ? model_.value_size() : weights_.num_heads * layer.head_dim);
      if (layer.ple_norm) add_layer_inputs(layer, i);
    }
    if (!plan_.logits_rows.empty()) unembed(weights_.norm);
    if (!plan_.sampling.empty()) sample();
    if (model_.has_head())
      write_head();
    else if (!plan_.after.empty())
      keep_states(weights_.norm);
  }

 private:
  Model& model_;
  const ModelWeights& weights_;
  Plan& plan_;
  Worker& worker_;
  ThreadScratch& scratch_;
  Inputs inputs_;
  Upcoming upcoming_;
  int expert_ = 0;  // of the chunk that `project` is at

  void attend_in(const LayerWeights& layer) {
    project_heads(layer);
    attend_all(layer);
    if (layer.query_gate.data) gate_attended(layer);
  }

  // What is added to the residual, from what attention (or a recurrent layer) gives on.
  void finish_layer(const LayerWeights& layer, int attended_size) {
    add_projection(model_.attended, model_.query_stride(), attended_size, layer.o, layer.o_bias,
                   layer.o_norm);
    if (layer.router.data && !layer.experts_gate.data) return mix_experts(layer);
    gate(layer, layer.post_norm, {&layer.gate, &layer.up}, layer.inner_size,
         chunks_for(plan_.num_rows(), layer.gate, weights_.hidden_size));
    project_out(model_.hidden, model_.inner_stride(layer.inner_size), layer.inner_size, layer.down,
                nullptr, layer.down_norm);
    const float scale = layer.ple_norm ? 1.0f : layer.scale;
    if (layer.experts_gate.data)
      mix_experts(layer, scale);
    else if (layer.down_norm)
      add_normed(layer.down_norm, scale);
  }

  // --- the head -----------------------------------------------------------------------------------

  // Rows of the head: from the states before them to their own, and to the tokens that follow.
  void run_head() {
    const LayerWeights& layer = model_.layers[weights_.num_layers];
    join();
    attend_in(layer);
    finish_layer(layer, weights_.num_heads * layer.head_dim);
    if (!plan_.logits_rows.empty()) unembed(weights_.head_norm);
    if (!plan_.sampling.empty()) sample();
    keep_states(model_.is_eagle() ? nullptr : weights_.head_norm);
  }

  // The same of an assistant, which has no keys and values of its own.
  void run_assistant() {
    join();
    for (const LayerWeights& layer : model_.layers) {
      attend_in(layer);
      finish_layer(layer, weights_.num_heads * layer.head_dim);
    }
    if (!plan_.logits_rows.empty()) unembed(weights_.norm);
    if (!plan_.sampling.empty()) sample();
    auto state = [&](int row) { return model_.states.get() + row * model_.state_stride(); };
    project_normed<1>(weights_.norm, {&weights_.head_out}, weights_.state_size,
                      [&](int row, int) { return state(row); });
    worker_.for_each(plan_.num_rows(), [&](int64_t row) {
      if (plan_.after[row])
        std::memcpy(plan_.after[row], state((int)row), weights_.state_size * sizeof(float));
    });
  }

  // The head's keys and values of the model's rows, after the model's layers.
  void write_head() {
    if (model_.is_eagle())
      fuse(model_.read, model_.read_stride(), 3 * weights_.hidden_size);
    keep_states(model_.is_eagle() ? nullptr : weights_.norm);
    join();
    const LayerWeights& layer = model_.layers[weights_.num_layers];
    project_heads(layer, weights_.num_heads, 2 * layer.num_kv_heads);
  }

  // read = the input of a layer, if EAGLE-3 reads it
  void read_input(int layer) {
    const int width = weights_.hidden_size;
    for (int place = 0; place < 3; ++place)
      if (weights_.head_reads[place] == layer)
        worker_.for_each(plan_.num_rows(), [&](int64_t row) {
          std::memcpy(model_.read.get() + row * model_.read_stride() + (size_t)place * width,
                      residual((int)row), width * sizeof(float));
        });
  }

  // states = RMSNorm(residual), or residual, and a copy of those that are kept
  void keep_states(const float* norm) {
    const int width = weights_.hidden_size;
    worker_.for_each(plan_.num_rows(), [&](int64_t row) {
      float* state = model_.states.get() + row * model_.state_stride();
      if (norm)
        rms_norm(residual((int)row), norm, width, weights_.rms_norm_eps, state);
      else
        std::memcpy(state, residual((int)row), width * sizeof(float));
      if (plan_.after[row]) std::memcpy(plan_.after[row], state, width * sizeof(float));
    });
  }

  // joined = RMSNorm(embedding), RMSNorm(state before), of an assistant both as they are;
  // residual = head_fc x joined, or of EAGLE-3 the state before
  void join() {
    const int width = weights_.state_size;
    const size_t stride = model_.joined_stride();
    const bool is_eagle = model_.is_eagle();
    worker_.for_each(plan_.num_rows(), [&](int64_t row) {
      const float* before = plan_.before[row];
      if (!before) before = model_.states.get() + (row - 1) * model_.state_stride();
      float *out = model_.joined.get() + row * stride, *x = scratch_.normed.get();
      if (model_.is_assistant()) {
        embed_row(plan_.token_ids[row], out);
        return (void)std::memcpy(out + width, before, width * sizeof(float));
      }
      embed_row(plan_.token_ids[row], x);
      rms_norm(x, weights_.head_embed_norm, width, weights_.rms_norm_eps, out);
      std::memcpy(x, before, width * sizeof(float));  // behind which there may be anything
      rms_norm(x, weights_.head_hidden_norm, width, weights_.rms_norm_eps, out + width);
      if (is_eagle) std::memcpy(residual((int)row), x, round_up(width, kPanel) * sizeof(float));
    });
    if (!is_eagle) fuse(model_.joined, stride, 2 * width);
  }

  // residual = head_fc x rows of `input`
  void fuse(const Buffer& input, size_t stride, int k_size) {
    const Matrix& matrix = weights_.head_fc;
    const Chunks chunks = chunks_for(plan_.num_rows(), matrix, k_size);
    const int panels = round_up(weights_.hidden_size, kPanel) / kPanel;
    project(
        chunks, {&matrix}, k_size, panels, group_for(chunks, matrix, panels), stride,
        [&](int chunk) { return input.get() + chunks.first(chunk) * stride; },
        [&](int row, int height, int panel, int columns, const float* tile) {
          for (int r = 0; r < height; ++r)
            std::memcpy(residual(row + r) + panel * kPanel, tile + r * kTileStride,
                        columns * kPanel * sizeof(float));
        });
  }

  float* residual(int row) { return model_.residual.get() + row * model_.residual_stride(); }
  float* projected(int row) { return model_.projected.get() + row * model_.residual_stride(); }

  void embed() {
    worker_.for_each(plan_.num_rows(),
                     [&](int64_t row) { embed_row(plan_.token_ids[row], residual((int)row)); });
  }

  void embed_row(int token, float* target) const {
    const int width = weights_.state_size;
    dequantize_row(weights_.embedding, token, width, target);
    std::fill(target + width, target + round_up(width, kPanel), 0.0f);
    for (int i = 0; i < width; i += kLanes)
      store(target + i, load(target + i) * splat(weights_.embedding_scale));
  }

  // ple = what every row's token adds to each layer, before the layer's gate
  void embed_layers() {
    const int size = weights_.ple_size, width = weights_.hidden_size;
    const size_t padded = model_.ple_stride(), stride = weights_.num_layers * padded;
    const Chunks chunks = chunks_for(plan_.num_rows(), weights_.ple_proj, width);
    const int panels = (int)(stride / kPanel);
    project(
        chunks, {&weights_.ple_proj}, width, panels, group_for(chunks, weights_.ple_proj, panels),
        model_.residual_stride(), [&](int chunk) { return residual(chunks.first(chunk)); },
        [&](int row, int height, int panel, int count, const float* tile) {
          for (int r = 0; r < height; ++r)
            std::memcpy(model_.ple.get() + (row + r) * stride + panel * kPanel,
                        tile + r * kTileStride, count * kPanel * sizeof(float));
        });
    // The projection's factor is hidden_size^-0.5, which the norm undoes but for its eps.
    const float eps = weights_.rms_norm_eps * width;
    const VecF own = splat(std::sqrt((float)size)), half = splat(std::sqrt(0.5f));
    worker_.for_each(plan_.num_rows(), [&](int64_t row) {
      const int total = weights_.num_layers * size;
      float* token = scratch_.ple.reserve(round_up(total, kPanel) + kPanel);
      dequantize_row(weights_.ple_embed, plan_.token_ids[row], total, token);
      for (int layer = 0; layer < weights_.num_layers; ++layer) {
        float* x = model_.ple.get() + row * stride + layer * padded;
        rms_norm(x, weights_.ple_norm, size, eps, x);
        for (int i = 0; i < size; i += kLanes)
          store(x + i, fused(load(token + layer * size + i), own, load(x + i)) * half);
      }
    });
  }

  // residual = (residual + what the layer's inputs add) * scale
  void add_layer_inputs(const LayerWeights& layer, int index) {
    const Chunks chunks = chunks_for(plan_.num_rows(), layer.ple_gate, weights_.hidden_size);
    const size_t padded = model_.ple_stride(), stride = model_.inner_stride(weights_.ple_size);
    const int panels = (int)(padded / kPanel);
    project(
        chunks, {&layer.ple_gate}, weights_.hidden_size, panels,
        group_for(chunks, layer.ple_gate, panels), model_.residual_stride(),
        [&](int chunk) { return residual(chunks.first(chunk)); },
        [&](int row, int height, int panel, int width, const float* tile) {
          for (int r = 0; r < height; ++r) {
            const size_t place = (size_t)(row + r) * weights_.num_layers + index;
            const float* inputs = model_.ple.get() + place * padded + panel * kPanel;
            float* target = model_.hidden.get() + (row + r) * stride + panel * kPanel;
            for (int i = 0; i < width * kPanel; i += kLanes)
              store(target + i, gated(load(tile + r * kTileStride + i), load(inputs + i)));
          }
        });
    add_projection(model_.hidden, stride, weights_.ple_size, layer.ple_out, nullptr, layer.ple_norm,
                   layer.scale);
  }

  // RMSNorm of rows row_of(0..count) into this thread's scratch.
  template <class RowOf>
  const float* normed(int count, const float* weight, RowOf&& row_of) {
    for (int i = 0; i < count; ++i)
      rms_norm(residual(row_of(i)), weight, weights_.hidden_size, weights_.rms_norm_eps,
               scratch_.normed.get() + i * model_.residual_stride());
    return scratch_.normed.get();
  }

  Chunks chunks_for(int rows, const Matrix& matrix, int k_size) const {
    return {rows, chunk_rows(matrix, k_size)};
  }

  // Panels of one task: enough tasks that no thread waits long for another's last one, but not so
  // few panels that few rows wait for their own sums, unless threads would have nothing to do.
  template <class Cut>
  int group_for(const Cut& chunks, const Matrix& matrix, int panels) const {
    int group = kMaxPanels;
    const int at_once = panels_at_once(matrix.kind, chunks.longest());
    auto tasks = [&] { return chunks.count * ((panels + group - 1) / group); };
    while (group > 1 && tasks() < worker_.size * (group > at_once ? 8 : 1)) group /= 2;
    return group;
  }

  // Every (chunk of rows, group of panels) once, of N matrices side by side, with `panels` for each
  // expert. `input(chunk)` gives the chunk's first row, and is asked again only when a thread comes
  // to another chunk.
  template <size_t N, class Cut, class Input, class Finish>
  void project(const Cut& chunks, const Matrix* const (&matrices)[N], int k_size, int panels,
               int group, size_t stride, Input&& input, Finish&& finish) {
    const int groups = (panels + group - 1) / group;
    int held = -1;
    Product products[N] = {};
    worker_.for_each((int64_t)chunks.count * groups, [&](int64_t task) {
      const int chunk = (int)(task / groups), first = (int)(task % groups) * group;
      if (chunk != held) {
        inputs_.hold(input(held = chunk), stride, chunks.size(chunk), k_size);
        expert_ = chunks.expert(chunk);
        for (size_t i = 0; i < N; ++i) products[i] = inputs_.times(*matrices[i]);
      }
      const int before = expert_ * panels;
      multiply(products, chunks.size(chunk), k_size, before + first,
               before + std::min(first + group, panels), upcoming_,
               [&](int row, int height, int panel, int width, const float* tile) {
                 finish(chunks.first(chunk) + row, height, panel - before, width, tile);
               });
    });
  }

  // Queries, keys and values, head by head: product, bias, norm, rotation, and the cache's slots.
  void project_heads(const LayerWeights& layer) {
    const int gates = layer.query_gate.data ? weights_.num_heads : 0;
    const int own = layer.key.data ? 2 * layer.num_kv_heads : 0;
    project_heads(layer, 0, weights_.num_heads + own + gates);
  }

  // `heads` of these alone.
  void project_heads(const LayerWeights& layer, int first_head, int heads) {
    // EAGLE-3's layer has no norm, as the two parts of what it reads are normed.
    const int k_size = layer.input_norm ? weights_.hidden_size : 2 * weights_.hidden_size;
    const Chunks chunks = chunks_for(plan_.num_rows(), layer.query, k_size);
    const int panels = head_width(layer) / kPanel;
    const int stride = head_width(layer) + kPanel;
    float* product = scratch_.head.get();
    int held = -1;
    worker_.for_each((int64_t)chunks.count * heads, [&](int64_t task) {
      const int chunk = (int)(task / heads), head = first_head + (int)(task % heads);
      const int first = chunks.first(chunk), size = chunks.size(chunk);
      if (chunk != held && layer.input_norm)
        inputs_.hold(normed(size, layer.input_norm, [&](int i) { return first + i; }),
                     model_.residual_stride(), size, k_size);
      else if (chunk != held)
        inputs_.hold(model_.joined.get() + first * model_.joined_stride(),
                     model_.joined_stride(), size, k_size);
      held = chunk;
      const auto [matrix, start] = matrix_of(layer, head);
      const Product products[] = {inputs_.times(*matrix)};
      multiply(products, size, k_size, (head - start) * panels, (head - start + 1) * panels,
               upcoming_,
               [&, begin = (head - start) * panels](int row, int height, int panel, int width,
                                                    const float* tile) {
                 float* target = product + row * stride + (panel - begin) * kPanel;
                 for (int r = 0; r < height; ++r)
                   std::memcpy(target + r * stride, tile + r * kTileStride,
                               width * kPanel * sizeof(float));
               });
      for (int i = 0; i < size; ++i) finish_head(layer, head, first + i, product + i * stride);
    });
  }

  // Where the columns of a head lie (queries, then keys, then values, then gates): the matrix, and
  // its first head.
  std::pair<const Matrix*, int> matrix_of(const LayerWeights& layer, int head) const {
    const int first_key = weights_.num_heads, first_value = first_key + layer.num_kv_heads;
    if (head < first_key) return {&layer.query, 0};
    if (head < first_value) return {&layer.key, first_key};
    const int first_gate = first_value + layer.num_kv_heads;
    if (head < first_gate) return {&layer.value, first_value};
    return {&layer.query_gate, first_gate};
  }

  int head_width(const LayerWeights& layer) const { return round_up(layer.head_dim, kPanel); }

  void finish_head(const LayerWeights& layer, int head, int row, float* x) {
    const int width = head_width(layer), dim = layer.head_dim;
    if (layer.qkv_bias)
      for (int i = 0; i < width; i += kLanes)
        store(x + i, load(x + i) + load(layer.qkv_bias + (size_t)head * width + i));
    const int first_key = weights_.num_heads, first_value = first_key + layer.num_kv_heads;
    const int first_gate = first_value + layer.num_kv_heads;
    if (head >= first_gate) {
      std::memcpy(model_.query_gate.get() + row * model_.query_stride() +
                      (size_t)(head - first_gate) * dim,
                  x, dim * sizeof(float));
      return;
    }
    if (head >= first_value) {
      if (layer.v_norm) rms_norm(x, layer.v_norm, dim, weights_.rms_norm_eps, x);
      return store_value(layer, head - first_value, row, x);
    }

    const float* norm = head < first_key ? layer.q_norm : layer.k_norm;
    if (norm) rms_norm(x, norm, dim, weights_.rms_norm_eps, x);
    if (layer.qk_scale)
      for (int i = 0; i < width; i += kLanes)
        store(x + i, load(x + i) * load(layer.qk_scale + (size_t)head * width + i));
    float* turned = scratch_.head.get() + (size_t)kMostChunkRows * (width + kPanel);
    rotate(layer, x, plan_.positions[row], turned);
    if (head >= first_key) return store_key(layer, head - first_key, row, turned);

    // Scores are powers of two, so that the softmax needs no multiplication.
    float factor = kLog2E / std::sqrt((float)dim) * weights_.query_scale;
    if (weights_.query_growth != 0) {
      const int periods = plan_.positions[row] / weights_.query_period;
      factor *= 1.0f + weights_.query_growth * std::log1p((float)periods);
    }
    const VecF scale = splat(factor);
    for (int i = 0; i < dim; i += kLanes) store(turned + i, load(turned + i) * scale);
    std::memcpy(model_.query.get() + row * model_.query_stride() + (size_t)head * dim, turned,
                dim * sizeof(float));
  }

  // The halves may end inside a vector; the first one's overhang is overwritten by the second.
  void rotate(const LayerWeights& layer, const float* x, int position, float* out) const {
    const int half = layer.head_dim / 2;
    if (!layer.rope_cos) return (void)std::memcpy(out, x, 2 * half * sizeof(float));
    const size_t offset = (size_t)position * round_up(half, kLanes);
    const float *cos = layer.rope_cos + offset, *sin = layer.rope_sin + offset;
    for (int i = 0; i < half; i += kLanes)
      store(out + i, load(x + i) * load(cos + i) - load(x + half + i) * load(sin + i));
    for (int i = 0; i < half; i += kLanes)
      store(out + half + i, load(x + half + i) * load(cos + i) + load(x + i) * load(sin + i));
  }

  // attended *= sigmoid(gate)
  void gate_attended(const LayerWeights& layer) {
    const int width = weights_.num_heads * layer.head_dim;
    worker_.for_each(plan_.num_rows(), [&](int64_t row) {
      const size_t start = row * model_.query_stride();
      const float* gate = model_.query_gate.get() + start;
      float* target = model_.attended.get() + start;
      for (int i = 0; i < width; i += kLanes) {
        const VecF open = splat(1.0f) + exp2_lanes(load(gate + i) * splat(-kLog2E));
        store(target + i, load(target + i) / open);
      }
    });
  }

  // attended = what a recurrent layer gives, before its last projection
  void recur(const LayerWeights& layer) {
    const size_t stride = model_.inputs_stride();
    project_normed<1>(layer.input_norm, {&layer.linear_qkv}, model_.conv_size(),
                      [&](int row, int) { return model_.inputs.get() + row * stride; });
    project_normed<1>(layer.input_norm, {&layer.linear_z}, model_.value_size(), [&](int row, int) {
      return model_.output_gate.get() + row * model_.value_stride();
    });
    project_normed<2>(layer.input_norm, {&layer.beta, &layer.alpha}, weights_.value_heads,
                      [&](int row, int which) {
                        const size_t start = which ? model_.alpha_start() : model_.beta_start();
                        return model_.inputs.get() + row * stride + start;
                      });
    const int64_t heads = weights_.key_heads;
    worker_.for_each(plan_.moves.size() * heads, [&](int64_t task) {
      DeltaHead(model_, layer, plan_.moves[task / heads], (int)(task % heads), scratch_.delta)
          .run();
    });
  }

  // attended = what a short convolution gives, before its last projection
  void convolve(const LayerWeights& layer) {
    const Buffer* const targets[] = {&model_.query, &model_.output_gate, &model_.inputs};
    const size_t strides[] = {model_.query_stride(), model_.value_stride(), model_.inputs_stride()};
    project_normed<3>(
        layer.input_norm, {&layer.beta, &layer.linear_z, &layer.linear_qkv}, model_.value_size(),
        [&](int row, int which) { return targets[which]->get() + row * strides[which]; });
    const int64_t pieces = (model_.value_size() + kConvChannels - 1) / kConvChannels;
    worker_.for_each(plan_.moves.size() * pieces, [&](int64_t task) {
      const int first = (int)(task % pieces) * kConvChannels;
      ShortConv(model_, layer, plan_.moves[task / pieces])
          .run(first, std::min(kConvChannels, model_.value_size() - first));
    });
  }

  // at(row, i) = normed rows x matrix i, in whole panels
  template <size_t N, class At>
  void project_normed(const float* norm, const Matrix* const (&matrices)[N], int width, At&& at) {
    const Chunks chunks = chunks_for(plan_.num_rows(), *matrices[0], weights_.hidden_size);
    const int panels = round_up(width, kPanel) / kPanel;
    project(
        chunks, matrices, weights_.hidden_size, panels, group_for(chunks, *matrices[0], panels),
        model_.residual_stride(),
        [&](int chunk) {
          return normed(chunks.size(chunk), norm, [&](int i) { return chunks.row(chunk, i); });
        },
        [&](int row, int height, int panel, int count, const float* tile) {
          for (int r = 0; r < height; ++r)
            for (size_t i = 0; i < N; ++i)
              std::memcpy(at(row + r, (int)i) + panel * kPanel,
                          tile + i * kTileFloats + r * kTileStride, count * kPanel * sizeof(float));
        });
  }

  size_t cache_head(const LayerWeights& layer, int row, int kv_head) const {
    return (size_t)plan_.blocks[row] * layer.num_kv_heads + kv_head;
  }

  void store_key(const LayerWeights& layer, int kv_head, int row, float* x) const {
    const AttentionShape shape = model_.shape_of(layer);
    const int slot = plan_.positions[row] % weights_.block_size;
    char* head = (char*)layer.keys + cache_head(layer, row, kv_head) * shape.key_bytes();
    store_cached(x, layer.head_dim, (C*)head, head + shape.key_codes(), slot,
                 [&](int column) { return shape.key_at(column, slot); });
  }

  void store_value(const LayerWeights& layer, int kv_head, int row, float* x) const {
    const AttentionShape shape = model_.shape_of(layer);
    const int slot = plan_.positions[row] % weights_.block_size;
    char* head = (char*)layer.values + cache_head(layer, row, kv_head) * shape.value_bytes();
    store_cached(x, layer.head_dim, (C*)head, head + shape.value_codes(), slot,
                 [&](int column) { return shape.value_at(column, slot); });
  }

  // x is overwritten; its head is followed by room for whole vectors.
  template <class At>
  void store_cached(float* x, int dim, C* target, char* scales, int slot, At&& at) const {
    const int padded = round_up(dim, kLanes);
    std::fill(x + dim, x + padded, 0.0f);
    const float scale = Element<C>::encode(x, padded);
    for (int i = 0; i < dim; ++i) target[at(i)] = ((const C*)x)[i];
    if (std::is_same_v<C, int8_t>) std::memcpy(scales + slot * sizeof scale, &scale, sizeof scale);
  }

  void attend_all(const LayerWeights& layer) {
    const int64_t pairs = (int64_t)plan_.attention.size() * layer.num_kv_heads;
    const int splits = splits_at_once(layer);
    const int queries = plan_.most_attention_rows() * model_.group(layer);
    const int dim = head_width(layer);
    auto kept = [&](int64_t pair, int split) {
      const size_t place = (size_t)pair * splits + split;
      return AttentionSums(model_.splits.get() + place * AttentionSums::size(queries, dim),
                           queries, dim);
    };
    if (splits > 1)
      worker_.for_each(pairs * splits, [&](int64_t task) {
        const int64_t pair = task / splits;
        const Attention<C> work = attention_of(layer, pair);
        const int split = (int)(task % splits);
        if (work.sees(split)) work.attend(split, kept(pair, split));
      });
    worker_.for_each(pairs, [&](int64_t pair) {
      const Attention<C> work = attention_of(layer, pair);
      work.finish([&](int split) {
        if (splits > 1) return kept(pair, split);
        work.attend(split, scratch_.attention.split);
        return scratch_.attention.split;
      });
    });
  }

  Attention<C> attention_of(const LayerWeights& layer, int64_t pair) const {
    const AttentionTask& work = plan_.attention[pair / layer.num_kv_heads];
    const int kv_head = (int)(pair % layer.num_kv_heads), group = model_.group(layer);
    const size_t start =
        work.row * model_.query_stride() + (size_t)kv_head * group * layer.head_dim;
    return {model_.shape_of(layer),
            (const char*)layer.keys,
            (const char*)layer.values,
            work.block_table,
            model_.query.get() + start,
            model_.attended.get() + start,
            model_.query_stride(),
            work.first_position,
            work.num_rows,
            group,
            kv_head,
            layer.window,
            scratch_.attention,
            layer.sinks ? layer.sinks + (size_t)kv_head * model_.group() : nullptr};
  }

  // Splits of each task that threads share out: those of the longest context, where that would
  // keep one thread busy while others have nothing to do, if their sums can be kept; else 1.
  int splits_at_once(const LayerWeights& layer) const {
    int64_t positions = 0, longest = 0;
    for (const AttentionTask& work : plan_.attention) {
      const int64_t length = work.first_position + work.num_rows;
      positions += length;
      longest = std::max(longest, length);
    }
    const bool is_even = 2 * longest * worker_.size <= positions * layer.num_kv_heads;
    if (worker_.size == 1 || is_even) return 1;
    const int splits = model_.shape.num_splits((int)longest);
    const size_t pairs = plan_.attention.size() * layer.num_kv_heads;
    const int queries = plan_.most_attention_rows() * model_.group(layer);
    const size_t floats = pairs * splits * AttentionSums::size(queries, head_width(layer));
    return floats > model_.split_floats() ? 1 : splits;
  }

  // residual += input x matrix (+ bias), or that product's RMSNorm, for which whole rows are needed;
  // with that the sum is multiplied by `scale`. gated: a row's product is multiplied by its opening.
  void add_projection(const Buffer& input, size_t stride, int k_size, const Matrix& matrix,
                      const float* bias, const float* norm, float scale = 1.0f,
                      bool gated = false) {
    project_out(input, stride, k_size, matrix, bias, norm, gated);
    if (norm) add_normed(norm, scale);
  }

  // residual += input x matrix (+ bias); if it is to be normed, projected = that product
  void project_out(const Buffer& input, size_t stride, int k_size, const Matrix& matrix,
                   const float* bias, bool norm, bool gated = false) {
    const Chunks chunks = chunks_for(plan_.num_rows(), matrix, k_size);
    const int panels = round_up(weights_.hidden_size, kPanel) / kPanel;
    project(
        chunks, {&matrix}, k_size, panels, group_for(chunks, matrix, panels), stride,
        [&](int chunk) { return input.get() + chunks.first(chunk) * stride; },
        [&](int row, int height, int panel, int width, const float* tile) {
          for (int r = 0; r < height; ++r) {
            float* target = (norm ? projected(row + r) : residual(row + r)) + panel * kPanel;
            for (int i = 0; i < width * kPanel; i += kLanes) {
              VecF value = load(tile + r * kTileStride + i);
              if (bias) value += load(bias + panel * kPanel + i);
              if (gated) value *= splat(model_.routing.openings[row + r]);
              store(target + i, norm ? value : load(target + i) + value);
            }
          }
        });
  }

  void add_normed(const float* weight, float scale) {
    const int width = weights_.hidden_size;
    worker_.for_each(plan_.num_rows(), [&](int64_t row) {
      float *target = residual((int)row), *x = projected((int)row);
      rms_norm(x, weight, width, weights_.rms_norm_eps, x);
      for (int i = 0; i < width; i += kLanes)
        store(target + i, (load(target + i) + load(x + i)) * splat(scale));
    });
  }

  VecF gated(VecF gate, VecF up) const {
    if (weights_.clamped) return clamped(gate, up);
    return (weights_.gelu_tanh ? gelu_tanh(gate) : silu(gate)) * up;
  }

  // hidden = gated(gate, up), of all rows or of every expert's
  template <class Cut>
  void gate(const LayerWeights& layer, const float* norm, const Matrix* const (&matrices)[2],
            int inner_size, const Cut& chunks) {
    const int panels = round_up(inner_size, kPanel) / kPanel;
    const size_t stride = model_.inner_stride(inner_size);
    project(
        chunks, matrices, weights_.hidden_size, panels, group_for(chunks, *matrices[0], panels),
        model_.residual_stride(),
        [&](int chunk) {
          return normed(chunks.size(chunk), norm, [&](int i) { return chunks.row(chunk, i); });
        },
        [&](int row, int height, int panel, int width, const float* tile) {
          for (int r = 0; r < height; ++r) {
            float* target = model_.hidden.get() + (row + r) * stride + panel * kPanel;
            const float *gate = tile + r * kTileStride, *up = gate + kTileFloats;
            const size_t column = (size_t)(expert_ * panels + panel) * kPanel;
            for (int i = 0; i < width * kPanel; i += kLanes) {
              VecF x = load(gate + i), y = load(up + i);
              if (layer.gate_bias) x += load(layer.gate_bias + column + i);
              if (layer.up_bias) y += load(layer.up_bias + column + i);
              store(target + i, gated(x, y));
            }
          }
        });
  }

  // residual += the sum of what a row's experts give, each times its share, in ascending order;
  // then what the shared ones give, computed from the same input. If they are beside a dense MLP,
  // both outputs are normed, added and normed again before.
  void mix_experts(const LayerWeights& layer, float scale = 1.0f) {
    const bool beside = layer.experts_gate.data;
    const Matrix& first = beside ? layer.experts_gate : layer.gate;
    const Matrix& second = beside ? layer.experts_up : layer.up;
    const Matrix& down = beside ? layer.experts_down : layer.down;
    const int inner_size = beside ? layer.expert_size : layer.inner_size;
    const int num_rows = plan_.num_rows(), per_token = weights_.experts_per_token;
    const int most =
        std::min(chunk_rows(first, weights_.hidden_size), chunk_rows(down, inner_size));
    const ExpertChunks chunks(model_.routing, num_rows, most);
    route(layer, beside ? layer.router_norm : layer.post_norm, most);
    gate(layer, beside ? layer.experts_norm : layer.post_norm, {&first, &second}, inner_size,
         chunks);
    const int panels = round_up(weights_.hidden_size, kPanel) / kPanel;
    const size_t hidden_stride = model_.inner_stride(inner_size);
    const size_t stride = model_.residual_stride();
    project(
        chunks, {&down}, inner_size, panels, group_for(chunks, down, panels), hidden_stride,
        [&](int chunk) { return model_.hidden.get() + chunks.first(chunk) * hidden_stride; },
        [&](int row, int height, int panel, int width, const float* tile) {
          for (int r = 0; r < height; ++r)
            std::memcpy(model_.mixed.get() + (row + r) * stride + panel * kPanel,
                        tile + r * kTileStride, width * kPanel * sizeof(float));
        });
    if (layer.shared_up.data)
      gate(layer, layer.post_norm, {&layer.shared_gate, &layer.shared_up}, layer.shared_size,
           chunks_for(num_rows, layer.shared_gate, weights_.hidden_size));
    worker_.for_each(num_rows, [&](int64_t row) {
      float* target = beside ? scratch_.normed.get() : residual((int)row);
      const int32_t* places = model_.routing.places.data() + row * per_token;
      const float* shares = model_.routing.shares.data() + row * per_token;
      const int32_t* experts = model_.routing.chosen.data() + row * per_token;
      for (int i = 0; i < panels * kPanel; i += kLanes) {
        VecF sum = {};
        for (int j = 0; j < per_token; ++j) {
          VecF value = load(model_.mixed.get() + places[j] * stride + i);
          if (layer.down_bias)
            value += load(layer.down_bias + (size_t)experts[j] * panels * kPanel + i);
          sum = fused(splat(shares[j]), value, sum);
        }
        store(target + i, beside ? sum : load(target + i) + sum);
      }
      if (beside) add_beside(layer, (int)row, target, scale);
    });
    if (layer.shared_up.data)
      add_projection(model_.hidden, model_.inner_stride(layer.shared_size), layer.shared_size,
                     layer.shared_down, nullptr, nullptr, 1.0f, model_.routing.gates_shared);
  }

  // residual = (residual + norm(norm(projected) + norm(mixed))) * scale
  void add_beside(const LayerWeights& layer, int row, float* mixed, float scale) {
    const int width = weights_.hidden_size;
    const float eps = weights_.rms_norm_eps;
    float *target = residual(row), *dense = projected(row);
    rms_norm(dense, layer.dense_norm, width, eps, dense);
    rms_norm(mixed, layer.experts_out_norm, width, eps, mixed);
    for (int i = 0; i < width; i += kLanes) store(dense + i, load(dense + i) + load(mixed + i));
    rms_norm(dense, layer.down_norm, width, eps, dense);
    for (int i = 0; i < width; i += kLanes)
      store(target + i, (load(target + i) + load(dense + i)) * splat(scale));
  }

  // model.routing = each row's experts, and each expert's rows in chunks of at most `most`
  void route(const LayerWeights& layer, const float* norm, int most) {
    const size_t stride = model_.router_stride();
    project_normed<1>(norm, {&layer.router}, model_.routing.router_rows(),
                      [&](int row, int) { return model_.router.get() + row * stride; });
    worker_.for_each(plan_.num_rows(), [&](int64_t row) {
      Routing& routing = model_.routing;
      float* logits = model_.router.get() + row * stride;
      if (layer.router_bias)
        for (int i = 0; i < weights_.num_experts; i += kLanes)
          store(logits + i, load(logits + i) + load(layer.router_bias + i));
      routing.choose((int)row, logits, layer.choice_bias);
      for (int i = (int)row * routing.per_token; i < ((int)row + 1) * routing.per_token; ++i)
        if (layer.experts_scale) routing.shares[i] *= layer.experts_scale[routing.chosen[i]];
    });
    worker_.for_each(1, [&](int64_t) { model_.routing.group(plan_.num_rows(), most); });
  }

  void unembed(const float* norm) {
    const bool is_own = plan_.is_head && model_.is_eagle();
    const Matrix& matrix = is_own ? weights_.head_lm_head : weights_.lm_head;
    const int vocab = is_own ? weights_.head_vocab : plan_.vocab;
    if (is_own)  // of the other tokens
      worker_.for_each(plan_.logits_rows.size(), [&](int64_t row) {
        std::fill_n(plan_.logits[row], plan_.vocab, -std::numeric_limits<float>::infinity());
      });
    const int num_rows = (int)plan_.logits_rows.size();
    const Chunks chunks = chunks_for(num_rows, matrix, weights_.hidden_size);
    const int panels = round_up(vocab, kPanel) / kPanel;
    project(
        chunks, {&matrix}, weights_.hidden_size, panels, kMaxPanels, model_.residual_stride(),
        [&](int chunk) {
          return normed(chunks.size(chunk), norm,
                        [&](int i) { return plan_.logits_rows[chunks.first(chunk) + i]; });
        },
        [&](int row, int height, int panel, int width, const float* tile) {
          const int token = panel * kPanel;
          const int count = std::min(width * kPanel, vocab - token);
          for (int r = 0; r < height; ++r) {
            float* logits = plan_.logits[row + r];
            const float* own = tile + r * kTileStride;
            float capped[kTileStride];
            if (weights_.softcap) {
              for (int i = 0; i < count; i += kLanes)
                store(capped + i, softcap(load(own + i), weights_.softcap));
              own = capped;
            }
            if (is_own)
              for (int i = 0; i < count; ++i) logits[weights_.head_tokens[token + i]] = own[i];
            else
              std::memcpy(logits + token, own, count * sizeof(float));
          }
        });
  }

  void sample() {
    worker_.for_each(plan_.sampling.size(), [&](int64_t row) {
      const float* logits = plan_.logits[row];
      const RowSampling& sampling = plan_.sampling[row];
      plan_.sampled[row] = sample_row(logits, plan_.vocab, sampling);
      if (!plan_.confidence.empty())
        plan_.confidence[row] =
            plan_.sampled[row] < 0
                ? 0.0f
                : confidence_of(logits, plan_.vocab, sampling, plan_.sampled[row]);
    });
  }
};

}  // namespace penstock
