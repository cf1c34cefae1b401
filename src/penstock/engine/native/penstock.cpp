// The plain C interface, called through ctypes: one call for a forward pass, for a whole draft of
// several tokens, and for coupled sampling. Nothing of the batch is trusted before `check` has
// seen it.
#include <omp.h>

#include <cstdarg>
#include <cstdio>
#include <new>

#include "passes.h"

extern "C" {

// Sampling of `Batch`'s sequences for up to max_steps tokens each; see NativeRunner.draft.
struct DraftOrder {
  int32_t max_steps, salt;
  const int32_t* num_steps;
  const float* temperatures;
  const uint64_t* seeds;
  int32_t* token_ids;  // [num_seqs, max_steps]
  float* logits;       // [num_seqs, max_steps, vocab_size] or null
};

struct SampleOrder {
  int32_t num_rows, vocab_size, salt, num_threads;
  const float* logits;  // [num_rows, vocab_size]
  const float* temperatures;
  const uint64_t* seeds;
  const int64_t* positions;
  int32_t* token_ids;
};

}  // extern "C"

namespace penstock {
namespace {

constexpr int kErrorBytes = 256;

// Multiply-adds under which the other threads cost more to wake than they save.
constexpr double kWorkForThreads = 1e5;

__attribute__((format(printf, 2, 3))) bool refuse(char* error, const char* format, ...) {
  va_list values;
  va_start(values, format);
  std::vsnprintf(error, kErrorBytes, format, values);
  va_end(values);
  return false;
}

bool check_tokens(const Model& model, const Batch& batch, char* error) {
  for (int i = 0; i < batch.num_tokens; ++i)
    if (batch.token_ids[i] < 0 || batch.token_ids[i] >= model.weights.vocab_size)
      return refuse(error, "token_ids[%d] is %d; allowed: 0..%d", i, batch.token_ids[i],
                    model.weights.vocab_size - 1);
  int last = -1;
  for (int i = 0; i < batch.num_logits; ++i) {
    const int row = batch.logits_rows[i];
    if (row <= last || row >= batch.num_tokens)
      return refuse(error, "logits_rows[%d] is %d; must ascend within 0..%d", i, row,
                    batch.num_tokens - 1);
    last = row;
  }
  return true;
}

// One sequence, of which `ahead` positions beyond its rows will be written too.
bool check_sequence(const Model& model, const Batch& batch, int seq, int ahead, char* error) {
  const ModelWeights& w = model.weights;
  const int first = batch.query_start[seq], last = batch.query_start[seq + 1];
  const int64_t length = batch.seq_lens[seq];
  if (last < first || last > batch.num_tokens)
    return refuse(error, "query_start[%d] is %d; must not decrease, up to %d tokens", seq + 1, last,
                  batch.num_tokens);
  if (last == first) return true;
  if (length < last - first || length + ahead > w.max_positions)
    return refuse(error, "seq_lens[%d] is %lld, with %d rows and %d positions ahead; at most %d",
                  seq, (long long)length, last - first, ahead, w.max_positions);
  for (int row = first; row < last; ++row)
    if (batch.positions[row] != length - (last - row))
      return refuse(error, "positions[%d] is %d; expected %lld, since seq_lens[%d] is %lld", row,
                    batch.positions[row], (long long)(length - (last - row)), seq,
                    (long long)length);
  const int64_t blocks = (length + ahead + w.block_size - 1) / w.block_size;
  if (blocks > batch.max_blocks)
    return refuse(error, "block_tables has %d columns; sequence %d needs %lld", batch.max_blocks,
                  seq, (long long)blocks);
  const int32_t* table = batch.block_tables + (size_t)seq * batch.max_blocks;
  for (int64_t i = 0; i < blocks; ++i)
    if (table[i] < 0 || table[i] >= w.num_blocks)
      return refuse(error, "block_tables[%d, %lld] is %d; allowed: 0..%d", seq, (long long)i,
                    table[i], w.num_blocks - 1);
  return true;
}

bool check(const Model& model, const Batch& batch, const DraftOrder* order, char* error) {
  if (batch.query_start[0] != 0 || batch.query_start[batch.num_seqs] != batch.num_tokens)
    return refuse(error, "query_start must run from 0 to %d", batch.num_tokens);
  for (int seq = 0; seq < batch.num_seqs; ++seq) {
    const int steps = order ? order->num_steps[seq] : 0;
    if (order && (steps < 0 || steps > order->max_steps))
      return refuse(error, "num_steps[%d] is %d; allowed: 0..%d", seq, steps, order->max_steps);
    if (steps > 0 && batch.query_start[seq] == batch.query_start[seq + 1])
      return refuse(error, "sequence %d has no row to draft from", seq);
    if (!check_sequence(model, batch, seq, std::max(0, steps - 1), error)) return false;
  }
  return check_tokens(model, batch, error);
}

const int32_t* block_table(const Batch& batch, int seq) {
  return batch.block_tables + (size_t)seq * batch.max_blocks;
}

void plan_rows(Model& model, const Batch& batch) {
  model.plan.clear();
  for (int seq = 0; seq < batch.num_seqs; ++seq) {
    const int first = batch.query_start[seq], rows = batch.query_start[seq + 1] - first;
    if (rows == 0) continue;
    model.plan.add_sequence(batch.token_ids + first, batch.positions[first], rows,
                            block_table(batch, seq), model.weights.block_size,
                            model.rows_per_task());
  }
  model.reserve(model.plan.num_rows());
}

// Have `row`'s logits sampled as the draft's step `step` of sequence `seq`.
void plan_sample(Model& model, const DraftOrder& order, int seq, int step, int row) {
  Plan& plan = model.plan;
  const size_t place = (size_t)seq * order.max_steps + step;
  model.active.push_back(seq);
  plan.logits_rows.push_back(row);
  plan.logits.push_back(order.logits ? order.logits + place * model.weights.vocab_size : nullptr);
  plan.sampling.push_back(RowSampling::make(order.temperatures[seq], order.seeds[seq],
                                            (uint64_t)plan.positions[row] + 1, order.salt));
}

// Take the sampled tokens of `step` and plan the next one; leaves the plan empty after the last.
void advance(Model& model, const Batch& batch, const DraftOrder& order, int step, int threads) {
  struct Row {
    int seq, position;
    int32_t token;
  };
  std::vector<Row> rows;
  for (size_t i = 0; i < model.active.size(); ++i) {
    const int seq = model.active[i];
    Best best;
    for (int thread = 0; thread < threads; ++thread) {
      const Best& found = model.scratch[thread].best[i];
      best.offer(found.value, found.token);
    }
    order.token_ids[(size_t)seq * order.max_steps + step] = best.token;
    if (step + 1 < order.num_steps[seq])
      rows.push_back({seq, model.plan.positions[model.plan.logits_rows[i]] + 1, best.token});
  }
  model.plan.clear();
  model.active.clear();
  for (const Row& row : rows) {
    model.plan.add_sequence(&row.token, row.position, 1, block_table(batch, row.seq),
                            model.weights.block_size, model.rows_per_task());
    plan_sample(model, order, row.seq, step + 1, model.plan.num_rows() - 1);
  }
}

int threads_for(const Model& model) {
  const ModelWeights& w = model.weights;
  const double layer = (double)w.hidden_size *
                       ((2.0 * w.num_heads + 2.0 * w.num_kv_heads) * w.head_dim +
                        3.0 * w.intermediate_size);
  const double work = model.plan.num_rows() * layer * w.num_layers +
                      (double)model.plan.logits_rows.size() * w.vocab_size * w.hidden_size;
  return work < kWorkForThreads ? 1 : w.num_threads;
}

template <class W, class C>
void forward(Model& model) {
#pragma omp parallel num_threads(threads_for(model))
  {
    Worker worker(model.team, omp_get_thread_num(), omp_get_num_threads());
    Pass<W, C>(model, model.plan, worker).run();
  }
}

template <class W, class C>
void draft(Model& model, const Batch& batch, const DraftOrder& order) {
#pragma omp parallel num_threads(threads_for(model))
  {
    Worker worker(model.team, omp_get_thread_num(), omp_get_num_threads());
    for (int step = 0; model.plan.num_rows() > 0; ++step) {
      Pass<W, C>(model, model.plan, worker).run();
      if (worker.id == 0) advance(model, batch, order, step, worker.size);
      worker.barrier();
    }
  }
}

// Call `run` with the element types of the model's weights and of its cache.
template <class Run>
void with_types(const Model& model, Run&& run) {
  const bool weights = model.weights.weights_bf16, cache = model.weights.kv_bf16;
  if (weights && cache) return run(Bf16{}, Bf16{});
  if (weights) return run(Bf16{}, 0.0f);
  if (cache) return run(0.0f, Bf16{});
  run(0.0f, 0.0f);
}

}  // namespace
}  // namespace penstock

using namespace penstock;

#define PENSTOCK_API extern "C" __attribute__((visibility("default")))

PENSTOCK_API int32_t penstock_lanes() { return kLanes; }

PENSTOCK_API Model* penstock_create(const ModelWeights* weights) {
  try {
    return new Model(*weights);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

PENSTOCK_API void penstock_destroy(Model* model) { delete model; }

// 0, or 1 with the reason in error[kErrorBytes].
PENSTOCK_API int32_t penstock_forward(Model* model, const Batch* batch, float* logits,
                                      char* error) {
  if (!check(*model, *batch, nullptr, error)) return 1;
  try {
    plan_rows(*model, *batch);
    for (int i = 0; i < batch->num_logits; ++i) {
      model->plan.logits_rows.push_back(batch->logits_rows[i]);
      model->plan.logits.push_back(logits + (size_t)i * model->weights.vocab_size);
    }
  } catch (const std::bad_alloc&) {
    return !refuse(error, "out of memory for a batch of %d rows", batch->num_tokens);
  }
  with_types(*model, [&](auto w, auto c) { forward<decltype(w), decltype(c)>(*model); });
  return 0;
}

PENSTOCK_API int32_t penstock_draft(Model* model, const Batch* batch, const DraftOrder* order,
                                    char* error) {
  if (!check(*model, *batch, order, error)) return 1;
  try {
    plan_rows(*model, *batch);
    model->active.clear();
    for (int seq = 0; seq < batch->num_seqs; ++seq)
      if (order->num_steps[seq] > 0) {
        const int row = batch->query_start[seq + 1] - 1;
        plan_sample(*model, *order, seq, 0, row);
      }
  } catch (const std::bad_alloc&) {
    return !refuse(error, "out of memory for a batch of %d rows", batch->num_tokens);
  }
  with_types(*model, [&](auto w, auto c) {
    draft<decltype(w), decltype(c)>(*model, *batch, *order);
  });
  return 0;
}

PENSTOCK_API void penstock_sample(const SampleOrder* order) {
  constexpr int kSegment = 4096;
  const int segments = (order->vocab_size + kSegment - 1) / kSegment;
  const int64_t tasks = (int64_t)order->num_rows * segments;
  std::vector<Best> best(tasks);
#pragma omp parallel for num_threads(order->num_threads) schedule(dynamic) if (tasks > 4)
  for (int64_t task = 0; task < tasks; ++task) {
    const int64_t row = task / segments;
    const int first = (int)(task % segments) * kSegment;
    const int count = std::min(kSegment, order->vocab_size - first);
    const float* logits = order->logits + row * order->vocab_size + first;
    const RowSampling sampling =
        RowSampling::make(order->temperatures[row], order->seeds[row],
                          (uint64_t)order->positions[row], order->salt);
    // The last vector may not reach past the row: what is left goes through a padded copy.
    const int whole = count / kLanes * kLanes;
    alignas(64) float rest[kLanes] = {};
    std::copy(logits + whole, logits + count, rest);
    offer_tokens(logits, whole, first, sampling, best[task]);
    offer_tokens(rest, count - whole, first + whole, sampling, best[task]);
  }
  for (int64_t row = 0; row < order->num_rows; ++row) {
    Best chosen;
    for (int i = 0; i < segments; ++i) {
      const Best& found = best[row * segments + i];
      chosen.offer(found.value, found.token);
    }
    order->token_ids[row] = chosen.token;
  }
}
