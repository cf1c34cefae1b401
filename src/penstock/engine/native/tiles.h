// Tiles of quantised weights and many rows by a matrix unit (amx.h). Integer sums are those of
// quantized.h, and floats follow in the same order: the same bits.
//
// Where 256 codes have sub-scales, code x sub-scale is multiplied, as two bytes: so the unit sums
// over 256, and no sub-block's sums have to be scaled by themselves.
#pragma once

#include <climits>

#include "amx.h"
#include "quantized.h"

namespace penstock {

// Rows from which tiles multiply, as measured (tuning.h). In plain C++ they are never the fastest.
template <class F>
inline int rows_for_tiles = kTilesArePlain ? 2 : INT_MAX;

typedef uint8_t VecB4 __attribute__((vector_size(4 * kLanes)));
typedef uint16_t VecW2 __attribute__((vector_size(4 * kLanes)));

// 256 of k of a panel for a matrix unit, and its sums with up to kTileRows rows.
template <class F>
class alignas(64) TileBlock {
 public:
  // Of a step: words of four of k.
  static constexpr bool kHasSubs = F::kSub != 0;
  static constexpr int kParts = kHasSubs ? 2 : 1, kWords = kHasSubs ? 16 : 8;
  static constexpr int kSteps = 64 / kWords;

  static TileShapes shapes(int rows) {
    TileShapes shapes;
    for (int i = 0; i < 4; ++i) shapes.set(i, rows, 4 * kLanes);
    shapes.set(4, rows, 4 * kWords);
    for (int i = 5; i < 7; ++i) shapes.set(i, kWords, 4 * kLanes);
    return shapes;
  }

  void unpack(const char* panel, int step) {
    PackedBlock<F> block;
    block.take(panel + step * 4 * kWords / F::kBlock * F::kPanelBytes);
    for (int first = 0; first < kWords; first += 8) {
      const int group = (step * kWords + first) / 8 % (F::kBlock / 32);
#pragma GCC unroll 2
      for (int s = 0; s < 2; ++s) {
        VecI weights[2] = {};
        if constexpr (kHasSubs)
          for (int i = 0; i < 2; ++i) weights[i] = block.weight((group * 32 + i * 16) / F::kSub, s);
        VecI* low = words_[step][s][0] + first;
        VecI* high = words_[step][s][kParts - 1] + first;
#pragma GCC unroll 8
        for (int v = 0; v < 8; ++v) {
          const VecI code = block.code(group, v, s);
          if constexpr (kHasSubs)
            split(code, weights[v / 4], low[v], high[v]);
          else
            low[v] = less_offset(code);
        }
      }
    }
  }

  // `a`: the step's codes of the first row, `row_bytes` before those of the next.
  void multiply(Tiles& tiles, int step, const int8_t* a, size_t row_bytes) {
    tiles.load<4>(a, row_bytes);
    if constexpr (kHasSubs) {
      add_part<0, 0>(tiles, step);
      add_part<0, 1>(tiles, step);
      add_part<1, 0>(tiles, step);
      add_part<1, 1>(tiles, step);
    } else if (step % 2 == 0) {
      add_sums<0>(tiles, step);
    } else {  // other tiles, so that one step need not wait for another
      add_sums<2>(tiles, step);
    }
  }

  // Before and after all steps: the sums over 256.
  void begin(Tiles& tiles) {
    if constexpr (kHasSubs) {
      tiles.zero<0>();
      tiles.zero<1>();
      tiles.zero<2>();
      tiles.zero<3>();
    }
  }
  void end(Tiles& tiles) {
    if constexpr (kHasSubs) {
      tiles.store<0>(sums_[0][0], sizeof(VecI));
      tiles.store<1>(sums_[0][1], sizeof(VecI));
      tiles.store<2>(sums_[1][0], sizeof(VecI));
      tiles.store<3>(sums_[1][1], sizeof(VecI));
    }
  }

  // tile[rows] += the sums, scaled, of rows [skipped, rows) at `a`; as add_block.
  void add_scaled(const char* panel, const Codes256* a, size_t, int, int skipped, int rows,
                  float* tile) const {
    PackedBlock<F> block;
    block.take(panel);
    for (int s = 0; s < 2; ++s) {
      const VecF d = block.d(s);
      VecF m = {};
      VecI lows[4] = {};
      if constexpr (F::kHasLow) {
        m = -block.m(s);
        for (int i = 0; i < 4; ++i) lows[i] = block.lows(i, s);
      }
      for (int r = skipped; r < rows; ++r) {
        float* out = tile + r * kTileStride + s * kLanes;
        VecF sum = load(out);
        if constexpr (F::kHasLow) {
          VecI low = {};
          for (int i = 0; i < 4; ++i)
            low = dot_pairs(low, lows[i], splat_int(load_as<int32_t>(a[r].sums + 2 * i)));
          sum = fused(__builtin_convertvector(low, VecF), m * splat(a[r].scale), sum);
        }
        const VecI total = (sums_[1][s][r] << kShift) + sums_[0][s][r];
        store(out, fused(__builtin_convertvector(total, VecF), d * splat(a[r].scale), sum));
      }
    }
  }

  void add_scaled(const char* panel, const Codes32* a, size_t count, int steps, int skipped,
                  int rows, float* tile) const {
    for (int s = 0; s < 2; ++s) {
      VecF d[kSteps], m[kSteps];
      for (int i = 0; i < steps; ++i) {
        PackedBlock<F> block;
        block.take(panel + i * 32 / F::kBlock * F::kPanelBytes);
        d[i] = block.d(s);
        if constexpr (F::kHasLow) m[i] = block.m(s);
      }
      for (int r = skipped; r < rows; ++r) {
        float* out = tile + r * kTileStride + s * kLanes;
        VecF sum = load(out);
        for (int i = 0; i < steps; ++i) {
          const Codes32& x = a[i * count + r];
          const VecF value = __builtin_convertvector(sums_[i][s][r], VecF);
          sum = fused(value, d[i] * splat(x.scale), sum);
          if constexpr (F::kHasLow) sum = fused(m[i], splat(x.scaled_sum), sum);
        }
        store(out, sum);
      }
    }
  }

 private:
  // Code x sub-scale as part[1] * 2^kShift + part[0]. Where both are small, each part is a product
  // with half of the sub-scale's six bits, below 256.
  static constexpr bool kIsSmall = kHasSubs && F::kOffset == 0 && F::kBits <= 5;
  static constexpr int kShift = kIsSmall ? 3 : 8;

  VecI words_[kSteps][2][kParts][kWords];
  VecI sums_[kHasSubs ? 2 : kSteps][2][kTileRows];

  static VecI less_offset(VecI code) { return (VecI)((VecB4)code - (uint8_t)kOffsetLeft<F>); }

  static void split(VecI code, VecI weight, VecI& low, VecI& high) {
    weight = weight << 16 | (weight & 0xffff);
    if constexpr (kIsSmall) {
      const VecW2 codes = (VecW2)code, weights = (VecW2)weight;
      low = (VecI)(codes * (weights & 7));
      high = (VecI)(codes * (weights >> 3));
    } else {
      const VecH2 codes = (VecH2)less_offset(code), weights = (VecH2)weight;
      const VecU even = (VecU)((codes << 8 >> 8) * weights), odd = (VecU)((codes >> 8) * weights);
      low = (VecI)((even & 0x00ff00ff) | (odd << 8 & 0xff00ff00));
      high = (VecI)((even >> 8 & 0x00ff00ff) | (odd & 0xff00ff00));
    }
  }

  template <int strip, int part>
  void add_part(Tiles& tiles, int step) {
    tiles.load<5 + strip>(words_[step][strip][part], sizeof(VecI));
    tiles.multiply<strip + 2 * part, 4, 5 + strip, part == 1 && !kIsSmall>();
  }

  template <int first>
  void add_sums(Tiles& tiles, int step) {
    tiles.zero<first>();
    tiles.zero<first + 1>();
    tiles.load<5>(words_[step][0], sizeof(VecI));
    tiles.multiply<first, 4, 5, true>();
    tiles.load<6>(words_[step][1], sizeof(VecI));
    tiles.multiply<first + 1, 4, 6, true>();
    tiles.store<first>(sums_[step][0], sizeof(VecI));
    tiles.store<first + 1>(sums_[step][1], sizeof(VecI));
  }
};

// tile[height][kPanel] = rows x a panel.
template <class F>
static __attribute__((noinline)) void tiles_kernel(const char* rows, size_t count, int height,
                                                   const char* panel, int k_size, Ahead ahead,
                                                   float* tile) {
  using Block = TileBlock<F>;
  constexpr int step_size = 4 * Block::kWords, block_bytes = 256 / F::kBlock * F::kPanelBytes;
  const auto* a = (const CodesOf<F>*)rows;
  for (int r = 0; r < height; ++r) std::memset(tile + r * kTileStride, 0, kPanel * sizeof(float));
  // Blocks of rows are all as tall: the last one begins among the rows of the one before.
  const int blocks = (height + kTileRows - 1) / kTileRows, tall = (height + blocks - 1) / blocks;
  const int steps_of_all = blocks * Block::kSteps;
  Lines next{nullptr, (block_bytes + 64 * steps_of_all - 1) / (64 * steps_of_all)};
  Block block;
  Tiles tiles;
  tiles.configure(Block::shapes(tall));
  for (int k = 0; k < k_size; k += 256, a += 256 / sizeof(a->code) * count) {
    const int steps = std::min(Block::kSteps, (k_size - k) / step_size);
    next.at = panel + block_bytes + kPrefetchBytes;
    if (ahead.at) fetch(ahead.at + (size_t)k * ahead.step, 256 * ahead.step);
    for (int row = 0; row < height; row += tall, next.at += 64 * Block::kSteps * next.count) {
      const int first = std::min(row, height - tall);
      block.begin(tiles);
      for (int step = 0; step < steps; ++step) {
        if (row == 0) block.unpack(panel, step);
        next.fetch(step);
        const int k_code = step * step_size;
        const CodesOf<F>& codes = a[k_code / sizeof(a->code) * count + first];
        block.multiply(tiles, step, codes.code + k_code % sizeof(a->code), sizeof codes);
      }
      block.end(tiles);
      block.add_scaled(panel, a + first, count, steps, row - first, tall,
                       tile + first * kTileStride);
    }
    panel += block_bytes;
  }
}

}  // namespace penstock
