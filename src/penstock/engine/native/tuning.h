// Choice of the tile's shape by measurement.
#pragma once

#include <chrono>

#include "gemm.h"

namespace penstock {

// Set tile_rows to what multiplies fastest here, within some milliseconds. All give the same bits.
inline void tune() {
  using F = Q4_K;
  constexpr int k_size = 2048, rows = 24;
  std::vector<char> panel(panel_bytes(F::kind, k_size) + kPrefetchBytes, 1);
  std::vector<char> codes(prepared_bytes(F::kArithmetic, k_size) * rows, 1);
  alignas(64) float tile[kTileFloats];
  double best = INFINITY;
  int fastest = tile_rows;
  for (int round = 0; round < 8; ++round)
    for (const int candidate : {4, 6, 8, 12}) {
      if (candidate > kMaxRows) break;
      tile_rows = candidate;
      const auto start = std::chrono::steady_clock::now();
      for (int i = 0; i < 8; ++i)
        unpacked_kernel<F>(codes.data(), rows, rows, panel.data(), k_size, Ahead{}, tile);
      const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
      if (took.count() < best) best = took.count(), fastest = candidate;
    }
  tile_rows = fastest;
}

}  // namespace penstock
