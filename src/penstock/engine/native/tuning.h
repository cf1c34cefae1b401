// Choice of tiles by measurement. All give the same bits.
#pragma once

#include <chrono>

#include "gemm.h"

namespace penstock {

constexpr int kTurns = 16;

// Lower `least` to the seconds of a product of `rows` rows by a panel in the cache.
template <class F>
void time_product(TileKernel kernel, int rows, double& least) {
  constexpr int k_size = 1024;
  // 0x3c, for scales of ordinary size: denormal numbers take many times as long on some processors.
  static const std::vector<char> panel(panel_bytes(F::kind, k_size) + 2 * kPrefetchBytes, 0x3c);
  static const std::vector<char> codes(prepared_bytes(F::kArithmetic, k_size) * kPanelRows, 0x3c);
  alignas(64) float tile[kTileFloats];
  const auto start = std::chrono::steady_clock::now();
  kernel(codes.data(), rows, rows, panel.data(), k_size, Ahead{}, tile);
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
  least = std::min(least, took.count());
}

// Set a tile's shape to the fastest, all in turn, as a processor is slower for a while at times.
template <class F, class Block>
void tune_shape() {
  constexpr TileShape shapes[] = {{3, 2}, {4, 2}, {5, 2}, {6, 2}, {8, 2}, {12, 2}, {8, 1}, {12, 1}};
  constexpr int count = kMaxRows < 12 ? 4 : kMaxRows < kOneStripFrom<F> ? 6 : 8;
  double least[count];
  std::fill_n(least, count, INFINITY);
  for (int turn = 0; turn < kTurns; ++turn)
    for (int i = 0; i < count; ++i) {
      tile_shape<Block> = shapes[i];
      time_product<F>(quantized_kernel<F, Block>, 24, least[i]);
    }
  tile_shape<Block> = shapes[std::min_element(least, least + count) - least];
}

// Whether `first` takes no longer than `second` for `rows` rows.
template <class F>
bool is_faster(TileKernel first, TileKernel second, int rows) {
  double of_first = INFINITY, of_second = INFINITY;
  for (int turn = 0; turn < kTurns; ++turn) {
    time_product<F>(first, rows, of_first);
    time_product<F>(second, rows, of_second);
  }
  return of_first <= of_second;
}

template <class F>
void tune_format() {
  tune_shape<F, PackedBlock<F>>();
  tune_shape<F, UnpackedBlock<F>>();
  for (const int rows : {8, 12, 16, kPanelRows}) {
    if (!is_faster<F>(quantized_kernel<F, PackedBlock<F>>, quantized_kernel<F, UnpackedBlock<F>>,
                      rows))
      break;
    packed_rows<F> = rows;
  }
}

template <class F>
void tune_tiles() {
  for (const int rows : {2, 4, 8, 12, kTileRows, kPanelRows})
    if (is_faster<F>(tiles_kernel<F>, kernel_for<F>(rows, 1), rows)) {
      rows_for_tiles<F> = rows;
      return;
    }
}

// Set rows of tiles to what multiplies fastest here, within some milliseconds.
inline void tune() {
  for (auto kind = Kind::kQ8_0; kind <= Kind::kMXFP4; kind = (Kind)((int)kind + 1))
    with_format(kind, [](auto format) {
      using F = decltype(format);
      if constexpr (F::kFileBytes != 4 && F::kind != Kind::kInt8Rows) {
        tune_format<F>();
        if constexpr (!kTilesArePlain) tune_tiles<F>();
      }
    });
}

}  // namespace penstock
