// Choice of tiles by measurement. All give the same bits.
#pragma once

#include <chrono>

#include "gemm.h"

namespace penstock {

// The least seconds of a product of `rows` rows by a panel in the cache.
template <class F>
double time_of(TileKernel kernel, int rows) {
  constexpr int k_size = 1024;
  static const std::vector<char> panel(panel_bytes(F::kind, k_size) + 2 * kPrefetchBytes, 1);
  static const std::vector<char> codes(prepared_bytes(F::kArithmetic, k_size) * kPanelRows, 1);
  alignas(64) float tile[kTileFloats];
  double least = INFINITY;
  for (int i = 0; i < 16; ++i) {
    const auto start = std::chrono::steady_clock::now();
    kernel(codes.data(), rows, rows, panel.data(), k_size, Ahead{}, tile);
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    least = std::min(least, took.count());
  }
  return least;
}

// Set `height` to the fastest of `heights` that is at most `most`.
template <class F, class Block, size_t N>
void tune_height(int& height, const int (&heights)[N], int most) {
  double least = INFINITY;
  int fastest = height;
  for (const int one : heights) {
    if (one > most) break;
    height = one;
    const double took = time_of<F>(quantized_kernel<F, Block>, 24);
    if (took < least) least = took, fastest = one;
  }
  height = fastest;
}

template <class F>
void tune_packed() {
  tune_height<F, PackedBlock<F>>(packed_tile_rows<F>, {3, 4, 5, 6, 8}, kPackedRows);
  for (const int rows : {8, 12, 16, kPanelRows}) {
    const double packed = time_of<F>(quantized_kernel<F, PackedBlock<F>>, rows);
    if (packed > time_of<F>(quantized_kernel<F, UnpackedBlock<F>>, rows)) break;
    packed_rows<F> = rows;
  }
}

template <class F>
void tune_tiles() {
  for (const int rows : {2, 4, 8, 12, kTileRows, kPanelRows})
    if (time_of<F>(tiles_kernel<F>, rows) < time_of<F>(kernel_for<F>(rows, 1), rows)) {
      rows_for_tiles<F> = rows;
      return;
    }
}

// Set rows of tiles to what multiplies fastest here, within some milliseconds.
inline void tune() {
  tune_height<Q4_K, UnpackedBlock<Q4_K>>(tile_rows, {4, 6, 8, 12}, kMaxRows);
  for (auto kind = Kind::kQ8_0; kind <= Kind::kMXFP4; kind = (Kind)((int)kind + 1))
    with_format(kind, [](auto format) {
      using F = decltype(format);
      if constexpr (F::kFileBytes != 4 && F::kind != Kind::kInt8Rows) {
        tune_packed<F>();
        if constexpr (!kTilesArePlain) tune_tiles<F>();
      }
    });
}

}  // namespace penstock
