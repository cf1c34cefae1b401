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

  Routing(int num_experts, int per_token, bool is_normalised)
      : num_experts(num_experts),
        per_token(per_token),
        is_normalised(is_normalised),
        starts(num_experts + 1) {}

  void reserve(size_t num_rows) {
    for (auto* each : {&chosen, &places, &rows}) each->resize(num_rows * per_token);
    shares.resize(num_rows * per_token);
    chunks.reserve(most_chunks((int)num_rows, 1));
  }

  // Chunks of at most `most` rows that `num_rows` rows may come to, however they choose.
  int most_chunks(int num_rows, int most) const {
    const int places = num_rows * per_token;
    return std::min(num_experts, places) + (num_rows > most ? places / most : 0);
  }

  // The experts with the largest logits, the first ones among equals, and their softmax, for which
  // `logits` is overwritten up to a whole vector.
  void choose(int row, float* logits) {
    int32_t* best = chosen.data() + (size_t)row * per_token;
    for (int i = 0, found = 0; i < num_experts; ++i) {
      if (found == per_token && !(logits[i] > logits[best[found - 1]])) continue;
      int at = found < per_token ? found++ : found - 1;
      for (; at > 0 && logits[i] > logits[best[at - 1]]; --at) best[at] = best[at - 1];
      best[at] = i;
    }
    const VecF highest = splat(logits[best[0]]);
    std::sort(best, best + per_token);
    for (int i = 0; i < num_experts; i += kLanes)
      store(logits + i, exp2_lanes((load(logits + i) - highest) * splat(kLog2E)));
    float total = 0.0f;
    for (int i = 0; i < (is_normalised ? per_token : num_experts); ++i)
      total += logits[is_normalised ? best[i] : i];
    for (int i = 0; i < per_token; ++i)
      shares[(size_t)row * per_token + i] = logits[best[i]] / total;
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
