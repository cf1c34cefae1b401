// Rows times packed weights. Every output element is one chain of multiply-adds over k from 0 to
// K - 1, starting from zero, in whichever tile shape it is computed: that is what makes logits
// independent of the batch.
#pragma once

#include "tiles.h"

namespace penstock {

// Panels computed side by side: a multiply-add takes four cycles and two start in each, so that
// fewer than eight sums at a time would wait for themselves.
constexpr int panels_at_once(int rows) {
  return rows == 1 ? 4 : rows == 2 ? 2 : 1;
}

// sum += one word of k (a float, or two bfloat16) of a panel x those of `rows` rows at `a`.
template <class F, int Rows>
PENSTOCK_INLINE void add_word(const char* panel, const char* a, size_t row_bytes, VecF (*sum)[2]) {
  const VecU left = load_as<VecU>(panel), right = load_as<VecU>(panel + 4 * kLanes);
  if constexpr (F::kind == Kind::kBf16Pairs) {
#pragma GCC unroll 12
    for (int r = 0; r < Rows; ++r) {
      uint32_t x;
      std::memcpy(&x, a + r * row_bytes, sizeof x);
      sum[r][0] = dot_bf16(sum[r][0], left, x);
      sum[r][1] = dot_bf16(sum[r][1], right, x);
    }
  } else {
#pragma GCC unroll 2
    for (int i = 0; i < F::kBlock; ++i) {
      VecU words[2] = {left, right};
      if (F::kBlock == 2)
        for (VecU& word : words) word = i ? word & 0xffff0000u : word << 16;
#pragma GCC unroll 12
      for (int r = 0; r < Rows; ++r) {
        const VecF x = splat(((const float*)(a + r * row_bytes))[i]);
        sum[r][0] = fused(x, (VecF)words[0], sum[r][0]);
        sum[r][1] = fused(x, (VecF)words[1], sum[r][1]);
      }
    }
  }
}

// tile[Rows][Panels * kPanel] = rows x panels of plain numbers.
template <class F, int Rows, int Panels>
static __attribute__((noinline)) void plain_kernel(const char* rows, size_t row_bytes, int,
                                                   const char* panels, int k_size, Ahead ahead,
                                                   float* tile) {
  constexpr int a_step = F::kArithmetic == Arithmetic::kFloat ? 4 * F::kBlock : 4;
  const int words = (k_size + F::kBlock - 1) / F::kBlock;
  const size_t panel_size = (size_t)words * F::kPanelBytes;
  VecF sum[Panels][Rows][2] = {};
  const char* row = panels;
  for (int i = 0; i < words; ++i, row += F::kPanelBytes) {
    if (ahead.at)
      for (int j = 0; j < F::kBlock; ++j)
        __builtin_prefetch(ahead.at + ((size_t)i * F::kBlock + j) * ahead.step, 0, 2);
#pragma GCC unroll 4
    for (int p = 0; p < Panels; ++p) {
      if (Panels <= 2 && !ahead.at)
        for (int at = 0; at < F::kPanelBytes; at += 64)
          __builtin_prefetch(row + p * panel_size + kPrefetchBytes / Panels + at);
      add_word<F, Rows>(row + p * panel_size, rows + (size_t)i * a_step, row_bytes, sum[p]);
    }
  }
  for (int r = 0; r < Rows; ++r)
    for (int p = 0; p < Panels; ++p)
      for (int s = 0; s < 2; ++s)
        store(tile + r * kTileStride + p * kPanel + s * kLanes, sum[p][r][s]);
}

// stride: of plain rows, bytes from one to the next; of quantised ones, codes from a block of k to
// the next.
using TileKernel = void (*)(const char* rows, size_t stride, int height, const char* panels,
                            int k_size, Ahead ahead, float* tile);

template <class F, int Rows>
PENSTOCK_INLINE TileKernel plain_kernel_for(int panels) {
  constexpr int most = panels_at_once(Rows);
  if constexpr (most >= 4) {
    if (panels == 4) return plain_kernel<F, Rows, 4>;
    if (panels == 3) return plain_kernel<F, Rows, 3>;
  }
  if constexpr (most >= 2)
    if (panels == 2) return plain_kernel<F, Rows, 2>;
  return plain_kernel<F, Rows, 1>;
}

template <class F, int Rows = kMaxRows>
static TileKernel kernel_for(int rows, int panels) {
  if constexpr (F::kFileBytes != 4) {
    if constexpr (kHasTiles)
      if (rows >= rows_for_tiles<F>) return tiles_kernel<F>;
    if (rows > packed_rows<F>) return quantized_kernel<F, UnpackedBlock<F>>;
    return quantized_kernel<F, PackedBlock<F>>;
  } else {
    if constexpr (Rows > 1)
      if (rows < Rows) return kernel_for<F, Rows - 1>(rows, panels);
    return plain_kernel_for<F, Rows>(panels);
  }
}

inline TileKernel kernel_for(Kind kind, int rows, int panels) {
  return with_format(kind, [=](auto format) {
    using F = decltype(format);
    if constexpr (F::kind == Kind::kBf16Pairs && !kDotsBf16)
      return kernel_for<F32>(rows, panels);  // never asked for: see penstock_has_bf16_pairs
    else if constexpr (F::kind == Kind::kInt8Rows)
      return kernel_for<Int8_128>(rows, panels);  // they differ in the activations' scales alone
    else
      return kernel_for<F>(rows, panels);
  });
}

inline int panels_at_once(Kind kind, int rows) {
  return kind <= Kind::kBf16Pairs ? panels_at_once(rows) : 1;
}

// Blocks of rows that need not fetch the next panel, because the others can.
constexpr int num_spare_blocks(int blocks) { return blocks >= 4 ? blocks / 2 : 0; }

// Rows as a matrix wants them, and the matrix. row_bytes: from a row to the next; stride: as a kernel
// takes it.
struct Product {
  const char* rows;
  size_t row_bytes, stride;
  const Matrix* matrix;
};

constexpr int kTileFloats = std::max(kMaxRows, kPanelRows) * kTileStride;

// Multiply `rows` rows by panels [first, last) of each product's matrix and hand every finished
// tile to finish(row, num_rows, panel, num_panels, tile) while it is still in the first-level
// cache; the next product's lies kTileFloats further. With spare blocks of rows, each of them
// fetches what upcoming(k_size) names, too.
template <size_t N, class Upcoming, class Finish>
PENSTOCK_INLINE void multiply(const Product (&products)[N], int rows, int k_size, int first,
                              int last, Upcoming&& upcoming, Finish&& finish) {
  alignas(64) float tile[N * kTileFloats];
  int at_once = kMaxPanels;
  bool is_quantized = true;
  for (const Product& product : products) {
    at_once = std::min(at_once, panels_at_once(product.matrix->kind, rows));
    is_quantized = is_quantized && product.matrix->kind > Kind::kBf16Pairs;
  }
  const int most = is_quantized ? kPanelRows : most_rows(rows);
  const int blocks = is_quantized ? 1 : num_row_blocks(rows);
  for (int panel = first; panel < last; panel += at_once) {
    const int width = std::min(at_once, last - panel);
    int left = blocks - num_spare_blocks(blocks);
    size_t fetched[N] = {};
    for_blocks(rows, most, [&](int row, int height) {
      const bool fetches = blocks > 1 && left > 0;
      for (size_t i = 0; i < N; ++i) {
        const Product& product = products[i];
        const Kind kind = product.matrix->kind;
        const size_t size = panel_bytes(kind, k_size);
        const char* weights = (const char*)product.matrix->data + panel * size;
        Ahead ahead;
        if (fetches) {
          const int64_t missing = std::max<int64_t>(0, (int64_t)(size - fetched[i]));
          const int step = (int)((missing / left + k_size - 1) / k_size);
          ahead = {weights + size + fetched[i], step};
          fetched[i] += (size_t)k_size * step;
        } else if (rows > kMaxRows) {
          ahead = upcoming(k_size);
        }
        kernel_for(kind, height, width)(product.rows + row * product.row_bytes, product.stride,
                                        height, weights, k_size, ahead, tile + i * kTileFloats);
      }
      left -= fetches;
      finish(row, height, panel, width, tile);
    });
  }
}

}  // namespace penstock
