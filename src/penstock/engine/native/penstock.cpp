// The plain C interface, called through ctypes: one call for a forward pass (with the target's
// samples, if they are wanted), for a whole draft of several tokens, and for coupled sampling of
// logits. Nothing of the batch is trusted before `check` has
// seen it.
#include <cstdarg>
#include <cstdio>
#include <exception>

#include "passes.h"
#include "tuning.h"

extern "C" {

// When drafts end before their limit: with the token that brings the product of acceptance[seq,
// bin of its confidence] under least[seq]. That token is not part of the draft.
struct Stop {
  int32_t num_bins;
  const float* edges;       // [num_bins - 1], ascending
  const float* acceptance;  // [num_seqs, num_bins]
  const float* least;       // [num_seqs]
  float* survival;          // [num_seqs], all 1 at first
  float* confidence;        // [num_seqs, max_steps]
};

// Sampling of `Batch`'s sequences for up to max_steps tokens each; see NativeRunner.draft.
struct DraftOrder {
  int32_t max_steps;
  const int32_t *num_steps, *salts;
  const double* temperatures;
  const uint64_t* seeds;
  int32_t* token_ids;  // [num_seqs, max_steps]
  float* logits;       // [num_seqs, max_steps, vocab] or null
  const Stop* stop;    // or null
};

// Coupled samples of a forward pass's rows of logits: those of request i are [row_start[i],
// row_start[i + 1]) of them. The logits of some rows come back, too.
struct TargetOrder {
  int32_t num_requests, salt, num_kept;
  const int32_t* row_start;
  const double* temperatures;
  const uint64_t* seeds;
  int32_t* token_ids;   // [num_logits]
  const int32_t* kept;  // [num_kept] of the rows of logits, rising
  float* logits;        // [num_kept, vocab_size]
};

struct SampleOrder {
  int32_t num_rows, vocab_size;
  const float* logits;  // [num_rows, vocab_size]
  const int32_t* salts;
  const double* temperatures;
  const uint64_t* seeds;
  const int64_t* positions;
  int32_t* token_ids;
};

}  // extern "C"

namespace penstock {
namespace {

constexpr int kErrorBytes = 256;

// Multiply-adds under which the other threads cost more to wake than they save.
constexpr double kWorkForThreads = 2e5;

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
  const int32_t* table = batch.block_table(seq);
  for (int64_t i = 0; i < blocks; ++i)
    if (table[i] < 0 || table[i] >= w.num_blocks)
      return refuse(error, "block_tables[%d, %lld] is %d; allowed: 0..%d", seq, (long long)i,
                    table[i], w.num_blocks - 1);
  return true;
}

bool check_temperatures(const double* temperatures, int count, char* error) {
  for (int i = 0; i < count; ++i)
    if (!(temperatures[i] >= 0) || std::isinf(temperatures[i]))
      return refuse(error, "temperatures[%d] is %g; must be finite and at least 0", i,
                    temperatures[i]);
  return true;
}

// What a batch does to recurrent states.
bool check_moves(const Model& model, const Batch& batch, const DraftOrder* order, char* error) {
  const ModelWeights& w = model.weights;
  if (w.num_slots == 0 || batch.is_head) return true;
  if (order || !batch.slots) return refuse(error, "a model with recurrent states does not draft");
  for (int seq = 0; seq < batch.num_seqs; ++seq) {
    const int rows = batch.query_start[seq + 1] - batch.query_start[seq];
    const int slot = batch.slots[seq], replayed = batch.replayed[seq];
    const int committed = batch.committed[seq];
    if (slot < 0 || slot >= w.num_slots || replayed < -1 || replayed > w.most_kept ||
        committed < 0 || committed > rows || rows - committed > w.most_kept)
      return refuse(error, "sequence %d: slot %d, %d rows replayed, %d of %d committed", seq, slot,
                    replayed, committed, rows);
  }
  return true;
}

// Rows of a head, and states of a model with one.
bool check_head(const Model& model, const Batch& batch, char* error) {
  const bool is_assistant = model.is_assistant(), has_head = model.has_head() || is_assistant;
  if (batch.is_head && !(has_head && batch.before && (batch.anchors || !is_assistant)))
    return refuse(error, "this model has no head, or the batch no states before its rows");
  if (is_assistant && !batch.is_head) return refuse(error, "an assistant has no rows of a text");
  const int most = model.weights.vocab_size, least = model.is_eagle() ? most : 1;
  if (batch.vocab < least || batch.vocab > most)
    return refuse(error, "vocab is %d; allowed: %d..%d", batch.vocab, least, most);
  for (int seq = 0; batch.is_head && seq < batch.num_seqs; ++seq)
    if (batch.query_start[seq + 1] != seq + 1)
      return refuse(error, "sequence %d has not one row of the head", seq);
  for (int seq = 0; is_assistant && seq < batch.num_seqs; ++seq)
    if (batch.anchors[seq] < 0 || batch.anchors[seq] > batch.positions[seq])
      return refuse(error, "anchors[%d] is %d; allowed: 0..%d", seq, batch.anchors[seq],
                    batch.positions[seq]);
  for (int i = 0; i < batch.num_kept; ++i)
    if (batch.kept_rows[i] < 0 || batch.kept_rows[i] >= batch.num_tokens)
      return refuse(error, "kept_rows[%d] is %d; must be within 0..%d", i, batch.kept_rows[i],
                    batch.num_tokens - 1);
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
  if (order && !check_temperatures(order->temperatures, batch.num_seqs, error)) return false;
  if (!check_moves(model, batch, order, error) || !check_head(model, batch, error)) return false;
  return check_tokens(model, batch, error);
}

bool check_target(const Batch& batch, const TargetOrder& order, char* error) {
  const int count = order.num_requests;
  if (order.row_start[0] != 0 || order.row_start[count] != batch.num_logits)
    return refuse(error, "row_start must run from 0 to %d", batch.num_logits);
  for (int i = 0; i < count; ++i)
    if (order.row_start[i + 1] < order.row_start[i])
      return refuse(error, "row_start[%d] is %d; must not decrease", i + 1, order.row_start[i + 1]);
  for (int i = 0, next = 0; i < order.num_kept; next = order.kept[i++] + 1)
    if (order.kept[i] < next || order.kept[i] >= batch.num_logits)
      return refuse(error, "kept[%d] is %d; allowed: %d..%d", i, order.kept[i], next,
                    batch.num_logits - 1);
  return check_temperatures(order.temperatures, count, error);
}

void plan_rows(Model& model, const Batch& batch, Plan& plan) {
  plan.clear();
  for (int seq = 0; seq < batch.num_seqs; ++seq) {
    const int first = batch.query_start[seq], rows = batch.query_start[seq + 1] - first;
    if (rows == 0) continue;
    if (model.is_assistant())
      plan.add_anchored(batch.token_ids[first], batch.anchors[seq], batch.block_table(seq),
                        model.weights.block_size);
    else
      plan.add_sequence(batch.token_ids + first, batch.positions[first], rows,
                        batch.block_table(seq), model.weights.block_size, model.rows_per_task());
    if (batch.slots && !batch.is_head)
      plan.moves.push_back({batch.slots[seq], plan.num_rows() - rows, rows, batch.replayed[seq],
                            batch.committed[seq]});
  }
  const bool keeps_states = model.keeps_states() || batch.num_kept;
  model.reserve(plan.num_rows(), keeps_states);
  plan.is_head = batch.is_head;
  plan.vocab = batch.vocab;
  if (!keeps_states) return;
  plan.before.resize(plan.num_rows());
  plan.after.resize(plan.num_rows());
  const size_t width = model.weights.state_size;
  for (int seq = 0; seq < batch.num_seqs; ++seq)
    if (batch.query_start[seq] < batch.query_start[seq + 1])
      plan.before[batch.query_start[seq]] =
          batch.before ? batch.before + seq * width : model.no_state.get();
  for (int i = 0; i < batch.num_kept; ++i)
    plan.after[batch.kept_rows[i]] = batch.after + i * width;
}

// Where the head keeps its state of a sequence in a draft's step.
float* chain_state(const Model& model, const Batch& batch, int seq, int step) {
  const size_t place = (size_t)(step % 2) * batch.num_seqs + seq;
  return model.chain.get() + place * model.state_stride();
}

// Have `row`'s logits sampled as the draft's step `step` of sequence `seq`.
void plan_sample(const Model& model, const Batch& batch, const DraftOrder& order, int seq, int step,
                 int row, Plan& plan) {
  const int last = batch.query_start[seq + 1] - 1;  // of the rows that the draft goes on from
  const size_t vocab_size = plan.vocab;
  const size_t place = (size_t)seq * order.max_steps + step;
  plan.logits.push_back(order.logits ? order.logits + place * vocab_size
                                     : model.logits.get() + plan.logits.size() * vocab_size);
  plan.sequences.push_back(seq);
  plan.logits_rows.push_back(row);
  plan.sampling.push_back(RowSampling::make(order.temperatures[seq], order.seeds[seq],
                                            (uint64_t)batch.positions[last] + 1 + step,
                                            order.salts[seq]));
  plan.sampled.push_back(0);
  if (order.stop) plan.confidence.push_back(0);
}

// Have the target's own samples drawn from the batch's rows of logits.
void plan_target(Model& model, const Batch& batch, const TargetOrder& order, Plan& plan) {
  const size_t vocab_size = model.weights.vocab_size;
  model.logits.reserve((size_t)batch.num_logits * vocab_size);
  int num_kept = 0;
  for (int i = 0; i < order.num_requests; ++i)
    for (int j = order.row_start[i]; j < order.row_start[i + 1]; ++j) {
      const int row = batch.logits_rows[j];
      const bool is_kept = num_kept < order.num_kept && order.kept[num_kept] == j;
      plan.logits_rows.push_back(row);
      plan.logits.push_back(is_kept ? order.logits + num_kept++ * vocab_size
                                    : model.logits.get() + (size_t)j * vocab_size);
      plan.sampling.push_back(RowSampling::make(order.temperatures[i], order.seeds[i],
                                                (uint64_t)plan.positions[row] + 1, order.salt));
      plan.sampled.push_back(0);
    }
}

// True if a draft ends before the token that was sampled in its step `step`.
bool ends_before(const DraftOrder& order, int seq, int step, float confidence) {
  const Stop& stop = *order.stop;
  stop.confidence[(size_t)seq * order.max_steps + step] = confidence;
  const float* last = stop.edges + stop.num_bins - 1;
  const auto bin = std::upper_bound(stop.edges, last, confidence) - stop.edges;
  stop.survival[seq] *= stop.acceptance[(size_t)seq * stop.num_bins + bin];
  return stop.survival[seq] < stop.least[seq];
}

// Take the tokens sampled in `done` and plan the step that follows; empty after the last one. Logits
// that are not finite end their draft.
void advance(const Model& model, const Batch& batch, const DraftOrder& order, int step,
             const Plan& done, Plan& next) {
  next.clear();
  next.is_head = batch.is_head;
  next.vocab = batch.vocab;
  for (size_t i = 0; i < done.sequences.size(); ++i) {
    const int seq = done.sequences[i];
    if (done.sampled[i] < 0) continue;
    if (order.stop && ends_before(order, seq, step, done.confidence[i])) continue;
    order.token_ids[(size_t)seq * order.max_steps + step] = done.sampled[i];
    if (step + 1 == order.num_steps[seq]) continue;
    const int position = done.positions[done.logits_rows[i]] + 1;
    if (model.is_assistant())
      next.add_anchored(done.sampled[i], batch.anchors[seq], batch.block_table(seq),
                        model.weights.block_size);
    else
      next.add_sequence(&done.sampled[i], position, 1, batch.block_table(seq),
                        model.weights.block_size, model.rows_per_task());
    if (batch.is_head) {
      next.before.push_back(chain_state(model, batch, seq, step));
      next.after.push_back(chain_state(model, batch, seq, step + 1));
    }
    plan_sample(model, batch, order, seq, step + 1, next.num_rows() - 1, next);
  }
}

int threads_for(const Model& model, const Plan& plan) {
  const ModelWeights& w = model.weights;
  const double layer = (double)w.hidden_size *
                       ((2.0 * w.num_heads + 2.0 * w.num_kv_heads) * w.head_dim +
                        3.0 * w.intermediate_size * w.experts_per_token + w.num_experts);
  const bool is_one = plan.is_head && !model.is_assistant();
  const double work = plan.num_rows() * layer * (is_one ? 1 : w.num_layers) +
                      (double)plan.logits_rows.size() * w.vocab_size * w.hidden_size;
  return work < kWorkForThreads ? 1 : model.thread_limit;
}

// A forward pass (no order) or a draft. Late threads read `model` and `plans`; the batch and the
// order are the caller's and are read only within tasks.
class PassJob : public Job {
 public:
  Model* model = nullptr;
  const Batch* batch = nullptr;
  const DraftOrder* order = nullptr;
  int max_steps = 0;
  std::vector<Plan> plans;
  bool taken = false;

  void run(Worker& worker) override {
    switch (model->shape.kind) {
      case KvKind::kF32: return steps<float>(worker);
      case KvKind::kBf16: return steps<Bf16>(worker);
      case KvKind::kInt8: return steps<int8_t>(worker);
    }
  }

 private:
  template <class C>
  void steps(Worker& worker) {
    Pass<C>(*model, plans[0], worker).run();
    for (int step = 0; step < max_steps; ++step) {
      worker.for_each(1, [&](int64_t) {
        advance(*model, *batch, *order, step, plans[step], plans[step + 1]);
      });
      if (plans[step + 1].num_rows() == 0) return;
      Pass<C>(*model, plans[step + 1], worker).run();
    }
  }
};

// Pool of jobs. A late thread may still read one, so none is ever freed, and one is reused only
// when no thread is in it.
class JobStore {
 public:
  static JobStore& instance() {
    static JobStore& store = *new JobStore;
    return store;
  }

  PassJob& take(Model& model) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& job : jobs_)
      if (!job->taken && Pool::is_idle(*job)) return prepare(*job, model);
    jobs_.push_back(std::make_unique<PassJob>());
    return prepare(*jobs_.back(), model);
  }

  void give_back(PassJob& job) {
    std::lock_guard<std::mutex> lock(mutex_);
    job.taken = false;
  }

  // Until no late thread reads `model`, which is about to go.
  void await_leavers(const Model* model) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& job : jobs_)
      while (job->model == model && !Pool::is_idle(*job)) sched_yield();
  }

 private:
  static PassJob& prepare(PassJob& job, Model& model) {
    job.model = &model;
    job.taken = true;
    return job;
  }

  std::mutex mutex_;
  std::vector<std::unique_ptr<PassJob>> jobs_;
};

// Plan and carry out a forward pass, with the target's samples or with logits, or a draft; what is
// asked for has been checked.
void execute(Model& model, const Batch& batch, const DraftOrder* order, const TargetOrder* target,
             float* logits) {
  PassJob& job = JobStore::instance().take(model);
  struct Lease {
    PassJob& job;
    ~Lease() { JobStore::instance().give_back(job); }
  } lease{job};
  job.batch = &batch;
  job.order = order;
  job.max_steps = order ? order->max_steps : 0;
  if ((int)job.plans.size() <= job.max_steps) job.plans.resize(job.max_steps + 1);
  Plan& plan = job.plans[0];
  plan_rows(model, batch, plan);
  if (order) {
    if (!order->logits) model.logits.reserve((size_t)batch.num_seqs * model.weights.vocab_size);
    if (batch.is_head) model.chain.reserve(2 * batch.num_seqs * model.state_stride());
    for (int seq = 0; batch.is_head && seq < batch.num_seqs; ++seq)
      plan.after[seq] = chain_state(model, batch, seq, 0);
    for (int seq = 0; seq < batch.num_seqs; ++seq)
      if (order->num_steps[seq] > 0)
        plan_sample(model, batch, *order, seq, 0, batch.query_start[seq + 1] - 1, plan);
  } else if (target) {
    plan_target(model, batch, *target, plan);
  } else {
    for (int i = 0; i < batch.num_logits; ++i) {
      plan.logits_rows.push_back(batch.logits_rows[i]);
      plan.logits.push_back(logits + (size_t)i * batch.vocab);
    }
  }
  if (Buffer::poisons)
    for (float* row : plan.logits) std::fill_n(row, model.weights.vocab_size, NAN);
  const int phases = (Pass<float>::num_phases(model) + 1) * (job.max_steps + 1);
  Pool::instance().run(job, threads_for(model, plan), phases);
  if (target) std::copy(plan.sampled.begin(), plan.sampled.end(), target->token_ids);
}

int32_t guarded(Model& model, const BatchValues& values, const DraftOrder* order,
                const TargetOrder* target, float* logits, char* error) {
  const Batch batch(values);
  if (!check(model, batch, order, error)) return 1;
  if (target && !check_target(batch, *target, error)) return 1;
  if (model.in_use.test_and_set()) return !refuse(error, "another thread is using this runner");
  bool done = true;
  try {
    execute(model, batch, order, target, logits);
  } catch (const std::exception& failure) {
    done = refuse(error, "%s, for a batch of %d rows", failure.what(), batch.num_tokens);
  }
  model.in_use.clear();
  return !done;
}

}  // namespace
}  // namespace penstock

using namespace penstock;

#define PENSTOCK_API extern "C" __attribute__((visibility("default")))

PENSTOCK_API int32_t penstock_lanes() { return kLanes; }

// The digest of the sources, as CMakeLists.txt computes it.
PENSTOCK_API const char* penstock_sources() { return PENSTOCK_SOURCES; }

// True if products of pairs of bfloat16 (Kind::kBf16Pairs) are available.
PENSTOCK_API int32_t penstock_has_bf16_pairs() { return kDotsBf16; }

// False if products of tiles by the processor's matrix unit are wrong; true where they are in plain
// C++.
PENSTOCK_API int32_t penstock_tiles_agree() { return kTilesArePlain || tiles_agree<Tiles>(); }

PENSTOCK_API size_t penstock_matrix_bytes(int32_t kind, int32_t num_columns, int32_t k_size) {
  return num_columns / kPanel * panel_bytes((Kind)kind, k_size);
}

// As pack_matrix; sizes have been checked.
PENSTOCK_API void penstock_pack(int32_t kind, const uint8_t* const* rows, int32_t num_columns,
                                int32_t k_size, uint8_t* out) {
  pack_matrix((Kind)kind, rows, num_columns, k_size, out);
}

PENSTOCK_API Model* penstock_create(const ModelWeights* weights) {
  static const bool is_tuned = (tune(), true);
  (void)is_tuned;
  try {
    return new Model(*weights);
  } catch (const std::exception&) {
    return nullptr;
  }
}

PENSTOCK_API void penstock_destroy(Model* model) {
  JobStore::instance().await_leavers(model);
  delete model;
}

// By the thread that uses the model next.
PENSTOCK_API void penstock_limit_threads(Model* model, int32_t limit) {
  model->thread_limit = std::clamp(limit, 1, model->weights.num_threads);
}

// Of all models, while none computes: see Buffer.
PENSTOCK_API void penstock_poison(int32_t wanted) { Buffer::poisons = wanted != 0; }

// 0, or 1 with the reason in error[kErrorBytes].
PENSTOCK_API int32_t penstock_forward(Model* model, const BatchValues* batch, float* logits,
                                      char* error) {
  return guarded(*model, *batch, nullptr, nullptr, logits, error);
}

PENSTOCK_API int32_t penstock_forward_sampled(Model* model, const BatchValues* batch,
                                              const TargetOrder* order, char* error) {
  return guarded(*model, *batch, nullptr, order, nullptr, error);
}

PENSTOCK_API int32_t penstock_draft(Model* model, const BatchValues* batch, const DraftOrder* order,
                                    char* error) {
  return guarded(*model, *batch, order, nullptr, nullptr, error);
}

PENSTOCK_API int32_t penstock_sample(const SampleOrder* order, char* error) {
  if (!check_temperatures(order->temperatures, order->num_rows, error)) return 1;
  for (int row = 0; row < order->num_rows; ++row)
    order->token_ids[row] =
        sample_row(order->logits + (size_t)row * order->vocab_size, order->vocab_size,
                   RowSampling::make(order->temperatures[row], order->seeds[row],
                                     (uint64_t)order->positions[row], order->salts[row]));
  return 0;
}
