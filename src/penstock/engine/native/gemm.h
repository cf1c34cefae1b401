// Rows times packed weights. Every output element is one chain of fused multiply-adds over k from 0
// to K - 1, starting from zero, in whichever tile shape it is computed: that is what makes logits
// independent of the batch.
#pragma once

#include "simd.h"

namespace penstock {

// Rows of a tile: with two vectors of columns, two of weights and a broadcast they fill the
// register file.
constexpr int kMaxRows = kRegisters == 32 ? 12 : 6;
constexpr int kMaxPanels = 4;

// Panels computed side by side: a multiply-add takes four cycles and two start in each, so that
// fewer than eight sums at a time would wait for themselves.
constexpr int panels_at_once(int rows) {
  return rows == 1 ? 4 : rows == 2 ? 2 : 1;
}

// How far ahead weights are fetched: across the page boundaries where the hardware's prefetcher
// stops. With one row, four streams keep it busy enough, and fetching more by hand costs.
constexpr int kPrefetchBytes = 8192;

constexpr int kTileStride = kMaxPanels * kPanel;

// What to fetch into the second-level cache meanwhile: `step` bytes further for every k. Several
// blocks of rows share the panel that they multiply, and between them fetch the next one.
struct Ahead {
  const char* at = nullptr;
  int step = 0;
};

// tile[Rows][Panels * kPanel] = a[Rows][k_size] x panels; `tile` has rows of kTileStride floats.
template <int Rows, int Panels, class W>
static __attribute__((noinline)) void panel_kernel(const float* a, size_t lda, const W* panels,
                                                   int k_size, Ahead ahead, float* tile) {
  const size_t panel_size = (size_t)k_size * kPanel;
  VecF sum[Rows][2 * Panels] = {};
  for (int k = 0; k < k_size; ++k) {
    const W* row = panels + (size_t)k * kPanel;
    if (ahead.at) __builtin_prefetch(ahead.at + (size_t)k * ahead.step, 0, 2);
#pragma GCC unroll 4
    for (int p = 0; p < Panels; ++p) {
      if (Panels <= 2 && !ahead.at)
        __builtin_prefetch((const char*)(row + p * panel_size) + kPrefetchBytes / Panels);
      VecF left, right;
      load_panel_row(row + p * panel_size, left, right);
#pragma GCC unroll 12
      for (int r = 0; r < Rows; ++r) {
        VecF x = splat(a[r * lda + k]);
        sum[r][2 * p] = fused(x, left, sum[r][2 * p]);
        sum[r][2 * p + 1] = fused(x, right, sum[r][2 * p + 1]);
      }
    }
  }
  for (int r = 0; r < Rows; ++r)
    for (int j = 0; j < 2 * Panels; ++j) store(tile + r * kTileStride + j * kLanes, sum[r][j]);
}

template <class W>
using PanelKernel = void (*)(const float*, size_t, const W*, int, Ahead, float*);

template <class W, int Rows>
PENSTOCK_INLINE PanelKernel<W> kernel_for_panels(int panels) {
  constexpr int most = panels_at_once(Rows);
  if constexpr (most >= 4) {
    if (panels == 4) return panel_kernel<Rows, 4, W>;
    if (panels == 3) return panel_kernel<Rows, 3, W>;
  }
  if constexpr (most >= 2)
    if (panels == 2) return panel_kernel<Rows, 2, W>;
  return panel_kernel<Rows, 1, W>;
}

template <class W, int Rows = kMaxRows>
static PanelKernel<W> kernel_for(int rows, int panels) {
  if constexpr (Rows > 1)
    if (rows < Rows) return kernel_for<W, Rows - 1>(rows, panels);
  return kernel_for_panels<W, Rows>(panels);
}

constexpr int num_row_blocks(int rows) { return (rows + kMaxRows - 1) / kMaxRows; }

// Blocks of rows that need not fetch the next panel, because the others can.
constexpr int num_spare_blocks(int blocks) { return blocks >= 4 ? blocks / 2 : 0; }

// Call visit(row, height) for blocks of at most kMaxRows rows of nearly equal height: 8 rows are
// 4 + 4, not 6 + 2, whose second half would run at half speed.
template <class Visit>
PENSTOCK_INLINE void for_row_blocks(int rows, Visit&& visit) {
  const int blocks = num_row_blocks(rows);
  for (int i = 0, row = 0; i < blocks; ++i) {
    const int height = rows / blocks + (i < rows % blocks);
    visit(row, height);
    row += height;
  }
}

// Multiply `rows` rows by panels [first, last) and hand each finished tile to
// finish(row, num_rows, panel, num_panels, tile) while it is still in the first-level cache. With
// spare blocks of rows, each of them fetches what upcoming(k_size) names, too.
template <class W, class Upcoming, class Finish>
PENSTOCK_INLINE void multiply(const float* a, size_t lda, int rows, const W* packed, int k_size,
                              int first, int last, Upcoming&& upcoming, Finish&& finish) {
  alignas(64) float tile[kMaxRows * kTileStride];
  const int at_once = panels_at_once(rows), blocks = num_row_blocks(rows);
  for (int panel = first; panel < last; panel += at_once) {
    const int width = last - panel < at_once ? last - panel : at_once;
    const W* weights = packed + (size_t)panel * k_size * kPanel;
    const char* next_panel = (const char*)(weights + (size_t)k_size * kPanel);
    int left = blocks - num_spare_blocks(blocks);
    const int step = (kPanel * sizeof(W) + left - 1) / left;
    for_row_blocks(rows, [&](int row, int height) {
      Ahead ahead;
      if (blocks > 1) ahead = left-- > 0 ? Ahead{next_panel, step} : upcoming(k_size);
      next_panel += (size_t)k_size * step;
      kernel_for<W>(height, width)(a + row * lda, lda, weights, k_size, ahead, tile);
      finish(row, height, panel, width, tile);
    });
  }
}

}  // namespace penstock
