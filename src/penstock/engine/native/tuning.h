// Choice of tiles by measurement. All give the same bits.
#pragma once

#include <chrono>

#include "gemm.h"

namespace penstock {

// The least seconds of a product of `rows` rows by a panel in the cache.
template <class F, class Block>
double time_of(int rows) {
  constexpr int k_size = 1024;
  static const std::vector<char> panel(panel_bytes(F::kind, k_size) + 2 * kPrefetchBytes, 1);
  static const std::vector<char> codes(prepared_bytes(F::kArithmetic, k_size) * kPanelRows, 1);
  alignas(64) float tile[kTileFloats];
  double least = INFINITY;
  for (int i = 0; i < 16; ++i) {
    const auto start = std::chrono::steady_clock::now();
    quantized_kernel<F, Block>(codes.data(), rows, rows, panel.data(), k_size, Ahead{}, tile);
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    least = std::min(least, took.count());
  }
  return least;
}

template <class F>
void tune_packed_rows() {
  for (int rows = 8; rows <= 16; rows += 4) {
    if (time_of<F, PackedBlock<F>>(rows) > time_of<F, UnpackedBlock<F>>(rows)) break;
    packed_rows<F> = rows;
  }
}

// Set tile_rows and packed_rows to what multiplies fastest here, within some milliseconds.
inline void tune() {
  double least = INFINITY;
  int fastest = tile_rows;
  for (const int height : {4, 6, 8, 12}) {
    if (height > kMaxRows) break;
    tile_rows = height;
    const double took = time_of<Q4_K, UnpackedBlock<Q4_K>>(24);
    if (took < least) least = took, fastest = height;
  }
  tile_rows = fastest;
  for (auto kind = Kind::kQ8_0; kind <= Kind::kMXFP4; kind = (Kind)((int)kind + 1))
    with_format(kind, [](auto format) {
      using F = decltype(format);
      if constexpr (F::kFileBytes != 4 && F::kind != Kind::kInt8Rows) tune_packed_rows<F>();
    });
}

}  // namespace penstock
