// Arguments from Python, and the buffers of a model.
#pragma once

#include <algorithm>
#include <vector>

#include "attention.h"
#include "pool.h"
#include "routing.h"
#include "sampling.h"

extern "C" {

// The ctypes structures in library.py mirror these three, field for field.

// Matrices are packed in panels; in query, key and value every head begins one. Vectors are
// float32, padded with zeros to whole panels (hidden_size) or whole heads of
// round_up(head_dim, kPanel). Null: absent.
struct LayerWeights {
  penstock::Matrix query, key, value, o, gate, up, down;
  const float *input_norm, *post_norm, *qkv_bias, *o_bias, *q_norm, *k_norm;
  const float* qk_scale;  // by head and channel, for queries and keys; equal within a rotary pair
  const float *o_norm, *down_norm;  // of what attention and MLP add to the residual
  void *keys, *values;
  int32_t window;  // positions that a row sees, at most max_positions
  // [max_positions, round_up(head_dim / 2, kLanes)]. Null: nothing is rotated.
  const float *rope_cos, *rope_sin;
  // [num_experts (+ 1), hidden_size], float32; the last row gates the shared experts. With it gate,
  // up and down are those of all experts, each expert's columns padded to whole panels. Null: a
  // dense MLP.
  penstock::Matrix router;
  // Attention's gates, by head as the queries. Null: none.
  penstock::Matrix query_gate;
  // Of a recurrent layer, which has neither query, key and value nor a cache: queries, keys and
  // values side by side; the gate of its output; strength of the update; decay. Null: attention.
  // Without decay (alpha) it is a short convolution of linear_qkv times beta.
  penstock::Matrix linear_qkv, linear_z, beta, alpha;
  const float *conv, *dt_bias, *rate, *linear_norm;  // conv: [kernel, conv_stride]
  float* states;  // [num_slots, value_heads, key_dim * round_up(value_dim, kLanes)]
  float* kept;    // [num_slots, kernel - 1 + most_kept, inputs_stride]: see delta.h
  // An MLP beside the chosen experts: those that every row has. Null: none.
  penstock::Matrix shared_gate, shared_up, shared_down;
  int32_t shared_size;  // inner size of these together
  const float* sinks;  // [num_heads], base 2: see attention.h
  // Of experts; the last three of one after the other, each in whole panels.
  const float *router_bias, *gate_bias, *up_bias, *down_bias;
  const float* choice_bias;  // [num_experts], for the choice alone; null: none
  // Without a key matrix a layer has no value matrix either, and reads another's keys and values.
  int32_t head_dim, num_kv_heads, inner_size;  // the last of the MLP or each expert
  float scale;          // of the output; other than 1 with down_norm or ple_norm only
  const float* v_norm;  // of ones; null: values have no norm
  // Per-layer embeddings: norm(ple_out(activated(ple_gate x) * inputs)) is added to the output.
  penstock::Matrix ple_gate, ple_out;
  const float* ple_norm;
  // Experts beside a dense MLP: the norms of both outputs are added, before down_norm. Null: none.
  penstock::Matrix experts_gate, experts_up, experts_down;
  const float *router_norm, *experts_scale, *experts_norm, *experts_out_norm, *dense_norm;
  int32_t expert_size;
};

// head_dim, num_kv_heads and intermediate_size: with most memory of any layer.
struct ModelWeights {
  int32_t hidden_size, intermediate_size, num_layers, num_heads, num_kv_heads, head_dim;
  int32_t vocab_size, num_blocks, block_size, max_positions;
  penstock::KvKind kv_kind;
  int32_t num_threads;
  float rms_norm_eps;
  penstock::Matrix embedding;  // [vocab_size, hidden_size], rows as in the file
  penstock::Matrix lm_head;
  const float* norm;
  const LayerWeights* layers;
  float embedding_scale;
  int32_t gelu_tanh;  // the gate's activation; 0: silu
  // Without experts 0, 1, and 0. intermediate_size is one expert's.
  int32_t num_experts, experts_per_token, norm_topk_prob;
  // Of recurrent layers; without them all 0.
  int32_t key_heads, value_heads, key_dim, value_dim, kernel, strided, num_slots, most_kept;
  // Of a head, whose layer is behind the others: [hidden_size, 2 * hidden_size], over the embedding
  // and the state before; norms of both, and behind the layer. Null: none.
  penstock::Matrix head_fc;
  const float *head_embed_norm, *head_hidden_norm, *head_norm;
  int32_t sigmoid_scores, gates_shared;  // of experts
  float expert_scale;                    // of their shares
  int32_t clamped;  // the gate's activation is `clamped` of simd.h
  // Scores are query_scale (1 + query_growth log(1 + position / query_period)) q k / sqrt(head_dim).
  float query_scale, query_growth;
  int32_t query_period;
  float softcap;     // logits are softcap * tanh(logits / softcap); 0: as they are
  int32_t ple_size;  // of a layer's inputs; 0: none
  // [vocab_size, num_layers * ple_size], rows as in the file, and what is added to them: the norm of
  // a projection of the embedding, each layer's columns padded to whole panels.
  penstock::Matrix ple_embed, ple_proj;
  const float* ple_norm;
  // Of EAGLE-3: its states are head_fc, [hidden_size, 3 * hidden_size], over the inputs of three
  // layers (their numbers; the first is -1 for a head of the other kind); its layer reads embedding
  // and state side by side, and has an MLP and an output matrix of its own sizes.
  int32_t head_reads[3];
  int32_t head_vocab;
  penstock::Matrix head_lm_head;
  const int32_t* head_tokens;  // [head_vocab], their ids
  // Whether states are kept for another model that drafts, an assistant. It has head_fc over the
  // other's embedding and state, of state_size each (else hidden_size), and the matrix that gives
  // such a state: [state_size, hidden_size]. Its layers read the other's keys and values.
  int32_t has_assistant, state_size;
  penstock::Matrix head_out;
};

// RaggedBatch of batch.py. `values` holds its arrays one after the other, in the order below.
struct BatchValues {
  int32_t num_tokens, num_seqs, max_blocks, num_logits;
  const int32_t* values;
  const int32_t* moves;  // [3, num_seqs] (StateMoves of states.py), or null
  // States, [hidden_size] each: of a model with a head those before each sequence (null: zeros), and
  // of any the rows that are kept. is_head: the rows are the head's, one of each sequence.
  const float* before;
  float* after;
  const int32_t* kept_rows;
  int32_t num_kept, is_head;
  int32_t vocab;  // tokens that have logits, the first ones
  const int32_t* anchors;  // [num_seqs], of an assistant's rows: see `Carry` of runner.py
};

}  // extern "C"

namespace penstock {

struct Batch {
  int num_tokens, num_seqs, max_blocks, num_logits;
  const int32_t *token_ids, *positions, *query_start, *seq_lens, *logits_rows, *block_tables;
  const int32_t *slots, *replayed, *committed;  // null without recurrent layers
  const float* before;
  float* after;
  const int32_t* kept_rows;
  int num_kept;
  bool is_head;
  int vocab;
  const int32_t* anchors;

  explicit Batch(const BatchValues& given)
      : num_tokens(given.num_tokens),
        num_seqs(given.num_seqs),
        max_blocks(given.max_blocks),
        num_logits(given.num_logits),
        token_ids(given.values),
        positions(token_ids + num_tokens),
        query_start(positions + num_tokens),
        seq_lens(query_start + num_seqs + 1),
        logits_rows(seq_lens + num_seqs),
        block_tables(logits_rows + num_logits),
        slots(given.moves),
        replayed(slots ? slots + num_seqs : nullptr),
        committed(slots ? slots + 2 * num_seqs : nullptr),
        before(given.before),
        after(given.after),
        kept_rows(given.kept_rows),
        num_kept(given.num_kept),
        is_head(given.is_head),
        vocab(given.vocab),
        anchors(given.anchors) {}

  const int32_t* block_table(int seq) const { return block_tables + (size_t)seq * max_blocks; }
};

// Rows of activations that fit the second-level cache beside a panel. Those that were made ready
// for their arithmetic are read with fewer instructions a byte, which the cache beyond it may serve.
constexpr int kChunkBytes = 160 * 1024;
constexpr int kPreparedChunkBytes = 640 * 1024;
constexpr int kMostChunkRows = 96;
// Rows of which the sums of all splits of the longest context can be kept.
constexpr int kMostSplitRows = 8;

// Memory aligned to cache lines that grows and never shrinks; contents are lost on growth.
class Buffer {
 public:
  // Whether what is reserved is NaN until it is written, so that a value that nobody wrote is seen.
  static inline bool poisons = false;

  float* reserve(size_t count) {
    if (count > size_) {
      storage_.assign(count + 16, 0.0f);
      size_ = count;
      const size_t past = reinterpret_cast<uintptr_t>(storage_.data()) % 64;
      start_ = storage_.data() + (past ? (64 - past) / sizeof(float) : 0);
    }
    if (poisons) std::fill_n(start_, count, NAN);
    return start_;
  }
  float* get() const { return start_; }

 private:
  std::vector<float> storage_;
  size_t size_ = 0;
  float* start_ = nullptr;
};

struct ThreadScratch {
  Buffer normed, head, attention_storage, delta, ple;
  Buffer prepared[kArithmetics];
  AttentionScratch attention;
};

// Some rows of one sequence. Each of these with each key head is a piece of attention's work.
struct AttentionTask {
  const int32_t* block_table;
  int row, num_rows, first_position;
};

// What a pass does to one sequence's recurrent states: as `StateMoves` of states.py.
struct StateMove {
  int slot, row, num_rows, replayed, committed;
};

// The rows of one pass. Complete before any thread reads it, and not touched again while a late
// thread may: a draft has one for each step.
struct Plan {
  std::vector<int32_t> token_ids, positions, blocks;
  std::vector<AttentionTask> attention;
  std::vector<StateMove> moves;
  int64_t num_blocks_read = 0;  // by the attention of one layer
  std::vector<int32_t> logits_rows;
  std::vector<float*> logits;  // one destination each
  // Where tokens are sampled, for each row of logits: the batch's sequence, how, and the result.
  std::vector<int> sequences;
  std::vector<RowSampling> sampling;
  std::vector<int32_t> sampled;
  std::vector<float> confidence;  // of the sampled tokens; empty if not requested
  // With a head, or where states are kept, for each row: the state before it (null: that of the row
  // before), and where its own is kept (null: nowhere).
  std::vector<const float*> before;
  std::vector<float*> after;
  bool is_head = false;  // its rows are the head's
  int vocab = 0;         // tokens that have logits

  int num_rows() const { return (int)token_ids.size(); }
  int most_attention_rows() const {
    int most = 0;
    for (const AttentionTask& task : attention) most = std::max(most, task.num_rows);
    return most;
  }

  void clear() {
    token_ids.clear();
    positions.clear();
    blocks.clear();
    attention.clear();
    moves.clear();
    num_blocks_read = 0;
    logits_rows.clear();
    logits.clear();
    sequences.clear();
    sampling.clear();
    sampled.clear();
    confidence.clear();
    before.clear();
    after.clear();
  }

  // A row of an assistant, which sees what the row before `position` sees.
  void add_anchored(int32_t token, int position, const int32_t* block_table, int block_size) {
    const int row = num_rows(), last = std::max(0, position - 1);
    token_ids.push_back(token);
    positions.push_back(position);
    blocks.push_back(block_table[last / block_size]);
    attention.push_back({block_table, row, 1, last});
    num_blocks_read += last / block_size + 1;
  }

  void add_sequence(const int32_t* tokens, int first_position, int num_rows,
                    const int32_t* block_table, int block_size, int rows_per_task) {
    const int row = this->num_rows();
    for (int i = 0; i < num_rows; ++i) {
      token_ids.push_back(tokens[i]);
      positions.push_back(first_position + i);
      blocks.push_back(block_table[(first_position + i) / block_size]);
    }
    for (int i = 0; i < num_rows; i += rows_per_task) {
      const int size = std::min(rows_per_task, num_rows - i);
      attention.push_back({block_table, row + i, size, first_position + i});
      num_blocks_read += (first_position + i + size + block_size - 1) / block_size;
    }
  }
};

struct Model {
  std::atomic_flag in_use = ATOMIC_FLAG_INIT;
  ModelWeights weights;
  std::vector<LayerWeights> layers;
  AttentionShape shape;
  std::vector<ThreadScratch> scratch;
  int thread_limit;
  Buffer residual, query, attended, hidden, logits, splits, projected;
  Buffer router, mixed;  // logits of experts; what each expert gives for each of its rows
  Buffer query_gate;     // of attention
  Buffer ple;            // inputs of all layers
  Buffer inputs, output_gate;  // of recurrent layers: before the convolution; z
  Buffer states, joined;       // of a head: of the model's rows; its layer's input before head_fc
  Buffer chain;                // its own states in a draft, of this step and the one before
  Buffer no_state;             // zeros
  Buffer read;                 // inputs of the layers that the head reads
  Routing routing;
  size_t hidden_floats = 0;  // of a row, in the layer that needs the most

  explicit Model(const ModelWeights& given)
      : weights(given),
        layers(given.layers, given.layers + given.num_layers +
                                 (given.head_fc.data && !given.head_out.data ? 1 : 0)),
        shape{given.head_dim, given.num_kv_heads, given.block_size, given.kv_kind},
        scratch(given.num_threads),
        thread_limit(given.num_threads),
        routing(given.num_experts, given.experts_per_token, given.norm_topk_prob,
                given.sigmoid_scores, given.gates_shared, given.expert_scale) {
    weights.layers = layers.data();
    hidden_floats = inner_stride(weights.ple_size);
    for (const LayerWeights& layer : layers) {
      const bool are_beside = layer.experts_gate.data;
      const size_t each = layer.router.data && !are_beside ? weights.experts_per_token : 1;
      const size_t beside = weights.experts_per_token * inner_stride(layer.expert_size);
      hidden_floats = std::max({hidden_floats, each * inner_stride(layer.inner_size), beside,
                                inner_stride(layer.shared_size)});
    }
    reserve_scratch();
    std::fill_n(no_state.reserve(state_stride()), state_stride(), 0.0f);
  }

  bool is_assistant() const { return weights.head_out.data; }
  bool has_head() const { return weights.head_fc.data && !is_assistant(); }
  bool is_eagle() const { return has_head() && weights.head_reads[0] >= 0; }
  bool keeps_states() const { return weights.head_fc.data || weights.has_assistant; }
  size_t state_stride() const { return round_up(weights.state_size, kPanel) + kPanel; }
  size_t joined_stride() const { return round_up(2 * weights.state_size, kPanel) + kPanel; }
  size_t read_stride() const { return round_up(3 * weights.hidden_size, kPanel) + kPanel; }

  bool has_post_norms() const { return layers[0].o_norm; }
  int group() const { return weights.num_heads / weights.num_kv_heads; }
  int group(const LayerWeights& layer) const { return weights.num_heads / layer.num_kv_heads; }
  AttentionShape shape_of(const LayerWeights& layer) const {
    return {layer.head_dim, layer.num_kv_heads, weights.block_size, weights.kv_kind};
  }
  int queries_per_task() const { return std::max(kQueriesPerTask, group()); }
  int rows_per_task() const { return std::max(1, kQueriesPerTask / group()); }
  // Sums of the splits of some rows with the longest context.
  size_t split_floats() const {
    return (size_t)kMostSplitRows * shape.num_splits(weights.max_positions) *
           AttentionSums::size(weights.num_heads, shape.padded_dim());
  }
  int head_width() const { return round_up(weights.head_dim, kPanel); }
  // One panel more than needed: rows a power of two apart would share few cache sets.
  size_t residual_stride() const { return round_up(weights.hidden_size, kPanel) + kPanel; }
  size_t inner_stride(int inner_size) const { return round_up(inner_size, kPanel) + kPanel; }
  size_t ple_stride() const { return round_up(weights.ple_size, kPanel); }
  size_t router_stride() const { return round_up(routing.router_rows(), kPanel); }
  int value_size() const { return weights.value_heads * weights.value_dim; }
  int conv_size() const { return 2 * weights.key_heads * weights.key_dim + value_size(); }
  // Also of what recurrent layers give.
  size_t query_stride() const {
    const int widest = std::max(weights.num_heads * weights.head_dim, value_size());
    return round_up(widest, kPanel) + kPanel;
  }
  size_t value_stride() const { return round_up(value_size(), kPanel) + kPanel; }
  // A row of a recurrent layer's inputs: channels of the convolution, strengths, decays. Behind the
  // last of each lies room for a whole vector.
  size_t conv_stride() const { return round_up(conv_size(), kPanel) + kPanel; }
  size_t beta_start() const { return conv_stride(); }
  size_t alpha_start() const { return beta_start() + round_up(weights.value_heads, kPanel); }
  size_t inputs_stride() const { return alpha_start() + round_up(weights.value_heads, kPanel); }
  bool is_gated() const {
    return std::any_of(layers.begin(), layers.end(),
                       [](const LayerWeights& layer) { return layer.query_gate.data; });
  }

  void reserve(int rows, bool with_states) {
    if (Buffer::poisons) reserve_scratch();
    residual.reserve(rows * residual_stride());
    query.reserve(rows * query_stride());
    attended.reserve(rows * query_stride());
    hidden.reserve(rows * hidden_floats);
    if (has_post_norms()) projected.reserve(rows * residual_stride());
    if (is_gated()) query_gate.reserve(rows * query_stride());
    if (weights.ple_size) ple.reserve(rows * weights.num_layers * ple_stride());
    if (weights.value_heads) {
      inputs.reserve(rows * inputs_stride());
      output_gate.reserve(rows * value_stride());
    }
    if (with_states) states.reserve(rows * state_stride());
    if (weights.head_fc.data) joined.reserve(rows * joined_stride());
    if (is_eagle()) read.reserve(rows * read_stride());
    if (weights.num_experts == 0) return;
    router.reserve(rows * router_stride());
    mixed.reserve(rows * weights.experts_per_token * residual_stride());
    routing.reserve(rows);
  }

 private:
  void reserve_scratch() {
    for (ThreadScratch& s : scratch) prepare(s);
    splits.reserve(split_floats());
  }

  void prepare(ThreadScratch& s) {
    s.normed.reserve(kMostChunkRows * residual_stride());
    // A chunk of one head's columns, then one row turned by its position.
    s.head.reserve((size_t)(kMostChunkRows + 2) * (head_width() + kPanel));
    const int n = queries_per_task(), dim = shape.padded_dim();
    const size_t queries = (size_t)n * dim, sums = AttentionSums::size(n, dim);
    const size_t scores = (size_t)n * shape.tile_blocks() * shape.padded_block();
    float* next = s.attention_storage.reserve(queries + 2 * sums + scores + 3 * n + 7 * 16);
    auto take = [&](size_t size) {
      float* taken = next;
      next += (size + 15) / 16 * 16;
      return taken;
    };
    s.attention = {take(queries), take(scores), take(n), take(n), take(n),
                   AttentionSums(take(sums), n, dim), AttentionSums(take(sums), n, dim)};
  }
};

}  // namespace penstock
