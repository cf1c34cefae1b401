// Which experts compute which rows of a pass, in one layer.
#pragma once

#include <algorithm>
#include <vector>

#include "simd.h"

namespace penstock {

// Rows of one expert that are multiplied at once: [first, first + size) of Routing::rows.
struct ExpertChunk {
  int32_t expert, first, size;
};

struct Routing {
  const int num_experts, per_token;
  const bool is_normalised;     // shares sum to 1
  std::vector<int32_t> chosen;  // [rows, per_token], ascending
  std::vector<float> shares;    // of these
  std::vector<int32_t> places;  // of these: where in `rows`
  std::vector<int32_t> rows;    // by expert, then by row
  std::vector<int32_t> starts;  // [num_experts + 1]: each expert's first place in `rows`
  std::vector<ExpertChunk> chunks;
  const bool by_sigmoid;        // of a logit, else by the softmax of all
  const bool gates_shared;      // the router's last row gates the experts that every row has
  const float scale;            // of the shares
  std::vector<float> openings;  // [rows]: sigmoids of these gates

  Routing(int num_experts, int per_token, bool is_normalised, bool by_sigmoid, bool gates_shared,
          float scale)
      : num_experts(num_experts),
        per_token(per_token),
        is_normalised(is_normalised),
        starts(num_experts + 1),
        by_sigmoid(by_sigmoid),
        gates_shared(gates_shared),
        scale(scale) {}

  int router_rows() const { return num_experts + gates_shared; }

  void reserve(size_t num_rows) {
    for (auto* each : {&chosen, &places, &rows}) each->resize(num_rows * per_token);
    shares.resize(num_rows * per_token);
    openings.resize(num_rows);
    chunks.reserve(most_chunks((int)num_rows, 1));
  }

  // Chunks of at most `most` rows that `num_rows` rows may come to, however they choose.
  int most_chunks(int num_rows, int most) const {
    const int places = num_rows * per_token;
    return std::min(num_experts, places) + (num_rows > most ? places / most : 0);
  }

  // The experts with the largest logits, or sigmoids of them with `bias` added (null: none), the
  // first ones among equals, and their shares, for which `logits` is overwritten up to a whole
  // vector.
  void choose(int row, float* logits, const float* bias) {
    int32_t* best = chosen.data() + (size_t)row * per_token;
    openings[row] = gates_shared ? sigmoid(splat(logits[num_experts]))[0] : 1.0f;
    if (by_sigmoid)
      for (int i = 0; i < num_experts; i += kLanes) store(logits + i, sigmoid(load(logits + i)));
    auto score = [&](int i) { return bias ? logits[i] + bias[i] : logits[i]; };
    for (int i = 0, found = 0; i < num_experts; ++i) {
      if (found == per_token && !(score(i) > score(best[found - 1]))) continue;
      int at = found < per_token ? found++ : found - 1;
      for (; at > 0 && score(i) > score(best[at - 1]); --at) best[at] = best[at - 1];
      best[at] = i;
    }
    const VecF highest = splat(logits[best[0]]);
    std::sort(best, best + per_token);
    if (!by_sigmoid)
      for (int i = 0; i < num_experts; i += kLanes)
        store(logits + i, exp2_lanes((load(logits + i) - highest) * splat(kLog2E)));
    float total = is_normalised || !by_sigmoid ? 0.0f : 1.0f;
    for (int i = 0; i < (is_normalised ? per_token : by_sigmoid ? 0 : num_experts); ++i)
      total += logits[is_normalised ? best[i] : i];
    for (int i = 0; i < per_token; ++i)
      shares[(size_t)row * per_token + i] = logits[best[i]] / total * scale;
  }

  // Sort the rows by expert, once all have chosen, and cut them into most_chunks chunks of at most
  // `most` rows. The last ones may be empty.
  void group(int num_rows, int most) {
    const int count = num_rows * per_token;
    std::fill(starts.begin(), starts.end(), 0);
    for (int i = 0; i < count; ++i) ++starts[chosen[i] + 1];
    chunks.clear();
    for (int expert = 0; expert < num_experts; ++expert) {
      const int first = starts[expert], end = first + starts[expert + 1];
      starts[expert + 1] = end;
      for (int at = first; at < end; at += most)
        chunks.push_back({expert, at, std::min(most, end - at)});
    }
    chunks.resize(most_chunks(num_rows, most));
    for (int i = 0; i < count; ++i) {
      places[i] = starts[chosen[i]]++;
      rows[places[i]] = i / per_token;
    }
  }
};

}  // namespace penstock
