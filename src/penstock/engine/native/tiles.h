// Tiles of quantised weights and many rows by a matrix unit (amx.h). Integer sums are those of
// quantized.h, and floats follow in the same order: the same bits.
//
// Where 256 codes have sub-scales, code x sub-scale is multiplied, as two bytes: so the unit sums
// over 256, and no sub-block's sums have to be scaled by themselves.
#pragma once

#include <climits>
#include <optional>

#include "amx.h"
#include "quantized.h"

namespace penstock {

// Rows from which tiles multiply, as measured (tuning.h). In plain C++ they are never the fastest.
template <class F>
inline int rows_for_tiles = kTilesArePlain ? 2 : INT_MAX;

typedef uint8_t VecB4 __attribute__((vector_size(4 * kLanes)));
typedef uint16_t VecW2 __attribute__((vector_size(4 * kLanes)));

// (byte - offset) x weight, of each byte of `codes`, in 16 bits: their low and their high bytes. The
// weights are of 16 bits, in pairs.
PENSTOCK_INLINE void multiply_bytes(VecI codes, VecI weights, int offset, VecI& low, VecI& high) {
  const VecH2 less = (VecH2)weights * (int16_t)offset;
#if defined(__AVX512BW__) && !defined(PENSTOCK_PORTABLE)
  const VecI bytes = weights & 0x00ff00ff;
  const __m512i first = _mm512_maddubs_epi16((__m512i)codes, (__m512i)bytes);
  const __m512i second = _mm512_maddubs_epi16((__m512i)codes, (__m512i)(bytes << 8));
  const __m512i even = (__m512i)((VecH2)first - less), odd = (__m512i)((VecH2)second - less);
  constexpr uint64_t kOdd = 0xaaaaaaaaaaaaaaaa;
  constexpr uint64_t to_odd[] = {0x0606040402020000, 0x0e0e0c0c0a0a0808};
  constexpr uint64_t to_even[] = {0x0707050503030101, 0x0f0f0d0d0b0b0909};
  const auto places = [](const uint64_t* from) {
    return _mm512_maskz_broadcast_i32x4(0xffff, load_as<__m128i>(from));
  };
  low = (VecI)_mm512_mask_shuffle_epi8(even, kOdd, odd, places(to_odd));
  high = (VecI)_mm512_mask_shuffle_epi8(odd, ~kOdd, even, places(to_even));
#else
  const VecH2 even = (VecH2)(codes & 0x00ff00ff) * (VecH2)weights - less;
  const VecH2 odd = (VecH2)((VecU)codes >> 8 & 0x00ff00ff) * (VecH2)weights - less;
  const VecU first = (VecU)even, second = (VecU)odd;
  low = (VecI)((first & 0x00ff00ff) | (second << 8 & 0xff00ff00));
  high = (VecI)((first >> 8 & 0x00ff00ff) | (second & 0xff00ff00));
#endif
}

// kSize of k of a panel for a matrix unit, and its sums with up to kTileRows rows. Two of the sums:
// vectors scale one while the unit adds to the other, and unpack what it multiplies next.
//
// It takes few of the eight tiles: in slow minutes of a shared processor products with six took less
// time than with seven or eight, and otherwise as much.
template <class F>
class alignas(64) TileBlock {
 public:
  // Of a step: words of four of k.
  static constexpr bool kHasSubs = F::kSub != 0;
  static constexpr int kWords = kHasSubs ? 16 : 8, kParts = kHasSubs ? 4 : 2;
  static constexpr int kSteps = 4, kStepSize = 4 * kWords, kSize = kSteps * kStepSize;

  static TileShapes shapes(int rows) {
    TileShapes shapes;
    for (int i = 0; i < 4; ++i) shapes.set(i, rows, 4 * kLanes);
    shapes.set(4, rows, 4 * kWords);
    shapes.set(5, kWords, 4 * kLanes);
    return shapes;
  }

  // Part `part` of kParts of a step: 8 words of a strip.
  void unpack(const char* panel, int step, int part) {
    const int strip = part % 2, first = part / 2 * 8;
    const int group = (step * kWords + first) / 8 % (F::kBlock / 32);
    PackedBlock<F> block;
    block.take(panel + step * kStepSize / F::kBlock * F::kPanelBytes);
    VecI weights[2] = {};
    if constexpr (kHasSubs)
      for (int i = 0; i < 2; ++i) weights[i] = block.weight((group * 32 + i * 16) / F::kSub, strip);
    VecI* low = words_[step][strip][0] + first;
    VecI* high = words_[step][strip][kHasSubs] + first;
#pragma GCC unroll 8
    for (int v = 0; v < 8; ++v) {
      const VecI code = block.code(group, v, strip);
      if constexpr (kHasSubs)
        split(code, weights[v / 4], low[v], high[v]);
      else
        low[v] = less_offset(code);
    }
  }

  // `a`: the step's codes of the first row, `row_bytes` before those of the next. meanwhile(part) is
  // called between the unit's instructions, so that both are at work.
  template <class Meanwhile>
  void multiply(Tiles& tiles, int turn, int step, const int8_t* a, size_t row_bytes,
                Meanwhile&& meanwhile) {
    tiles.load<4>(a, row_bytes);
    if constexpr (kHasSubs) {
      add_strip<0>(tiles, step, meanwhile);
      add_strip<1>(tiles, step, meanwhile);
    } else {
      add_sums(tiles, turn, step, meanwhile);
    }
  }

  // Before and after all steps: the sums over kSize.
  void begin(Tiles& tiles) {
    if constexpr (kHasSubs) {
      tiles.zero<0>();
      tiles.zero<1>();
      tiles.zero<2>();
      tiles.zero<3>();
    }
  }
  void end(Tiles& tiles, int turn) {
    if constexpr (kHasSubs) {
      tiles.store<0>(sums_[turn][0][0], sizeof(VecI));
      tiles.store<1>(sums_[turn][0][1], sizeof(VecI));
      tiles.store<2>(sums_[turn][1][0], sizeof(VecI));
      tiles.store<3>(sums_[turn][1][1], sizeof(VecI));
    }
  }

  // Sums of a block that begins at `panel`, to be scaled: of rows [skipped, rows) at `codes`.
  struct Summed {
    const char* panel;
    const CodesOf<F>* codes;
    float* tile;
    int turn, steps, skipped, rows;
  };

  // tile[rows] += part `part` of kSteps of the sums, scaled; as add_block. `count`: codes from a block
  // of k to the next.
  void add_scaled(const Summed& of, [[maybe_unused]] size_t count, int part) const {
    const int strip = part / 2, middle = (of.skipped + of.rows) / 2;
    const int first = part % 2 ? middle : of.skipped, last = part % 2 ? of.rows : middle;
    if constexpr (F::kArithmetic == Arithmetic::kBlocks256)
      add_scaled_256(of, strip, first, last);
    else
      add_scaled_32(of, count, strip, first, last);
  }

 private:
  // Code x sub-scale as part[1] * 2^kShift + part[0]. Where both are small, each part is a product
  // with half of the sub-scale's six bits, below 256.
  static constexpr bool kIsSmall = kHasSubs && F::kOffset == 0 && F::kBits <= 5;
  static constexpr int kShift = kIsSmall ? 3 : 8;

  VecI words_[kSteps][2][1 + kHasSubs][kWords];
  VecI sums_[2][kHasSubs ? 2 : kSteps][2][kTileRows];

  static VecI less_offset(VecI code) { return (VecI)((VecB4)code - (uint8_t)kOffsetLeft<F>); }

  static void split(VecI code, VecI weight, VecI& low, VecI& high) {
    weight = weight << 16 | (weight & 0xffff);
    if constexpr (kIsSmall) {
      const VecW2 codes = (VecW2)code, weights = (VecW2)weight;
      low = (VecI)(codes * (weights & 7));
      high = (VecI)(codes * (weights >> 3));
    } else {
      if constexpr (kIsSigned<F>) code ^= (int32_t)0x80808080;
      multiply_bytes(code, weight, F::kOffset, low, high);
    }
  }

  void add_scaled_256(const Summed& of, int s, int first, int last) const {
    PackedBlock<F> block;
    block.take(of.panel);
    const VecF d = block.d(s);
    VecF m = {};
    VecI lows[4] = {};
    if constexpr (F::kHasLow) {
      m = -block.m(s);
      for (int i = 0; i < 4; ++i) lows[i] = block.lows(i, s);
    }
    for (int r = first; r < last; ++r) {
      const Codes256& x = of.codes[r];
      float* out = of.tile + r * kTileStride + s * kLanes;
      VecF sum = load(out);
      if constexpr (F::kHasLow) {
        VecI low = {};
        for (int i = 0; i < 4; ++i)
          low = dot_pairs(low, lows[i], splat_int(load_as<int32_t>(x.sums + 2 * i)));
        sum = fused(__builtin_convertvector(low, VecF), m * splat(x.scale), sum);
      }
      const VecI total = (sums_[of.turn][1][s][r] << kShift) + sums_[of.turn][0][s][r];
      store(out, fused(__builtin_convertvector(total, VecF), d * splat(x.scale), sum));
    }
  }

  void add_scaled_32(const Summed& of, size_t count, int s, int first, int last) const {
    VecF d[kSteps], m[kSteps];
    for (int i = 0; i < of.steps; ++i) {
      PackedBlock<F> block;
      block.take(of.panel + i * 32 / F::kBlock * F::kPanelBytes);
      d[i] = block.d(s);
      if constexpr (F::kHasLow) m[i] = block.m(s);
    }
    for (int r = first; r < last; ++r) {
      float* out = of.tile + r * kTileStride + s * kLanes;
      VecF sum = load(out);
      for (int i = 0; i < of.steps; ++i) {
        const Codes32& x = of.codes[i * count + r];
        const VecF value = __builtin_convertvector(sums_[of.turn][i][s][r], VecF);
        sum = fused(value, d[i] * splat(x.scale), sum);
        if constexpr (F::kHasLow) sum = fused(m[i], splat(x.scaled_sum), sum);
      }
      store(out, sum);
    }
  }

  template <int strip, class Meanwhile>
  void add_strip(Tiles& tiles, int step, Meanwhile&& meanwhile) {
    tiles.load<5>(words_[step][strip][0], sizeof(VecI));
    meanwhile(2 * strip);
    tiles.multiply<strip, 4, 5, false>();
    tiles.load<5>(words_[step][strip][1], sizeof(VecI));
    meanwhile(2 * strip + 1);
    tiles.multiply<strip + 2, 4, 5, !kIsSmall>();
  }

  template <class Meanwhile>
  void add_sums(Tiles& tiles, int turn, int step, Meanwhile&& meanwhile) {
    tiles.zero<0>();
    tiles.zero<1>();
    tiles.load<5>(words_[step][0][0], sizeof(VecI));
    meanwhile(0);
    tiles.multiply<0, 4, 5, true>();
    tiles.load<5>(words_[step][1][0], sizeof(VecI));
    meanwhile(1);
    tiles.multiply<1, 4, 5, true>();
    tiles.store<0>(sums_[turn][step][0], sizeof(VecI));
    tiles.store<1>(sums_[turn][step][1], sizeof(VecI));
  }
};

// tile[height][kPanel] = rows x a panel.
template <class F>
static __attribute__((noinline)) void tiles_kernel(const char* rows, size_t count, int height,
                                                   const char* panel, int k_size, Ahead ahead,
                                                   float* tile) {
  using Block = TileBlock<F>;
  constexpr int size = Block::kSize, block_bytes = size / F::kBlock * F::kPanelBytes;
  const auto* a = (const CodesOf<F>*)rows;
  for (int r = 0; r < height; ++r) std::memset(tile + r * kTileStride, 0, kPanel * sizeof(float));
  // Blocks of rows are all as tall: the last one begins among the rows of the one before.
  const int blocks = (height + kTileRows - 1) / kTileRows, tall = (height + blocks - 1) / blocks;
  const int steps_of_all = blocks * Block::kSteps;
  Lines next{nullptr, (block_bytes + 64 * steps_of_all - 1) / (64 * steps_of_all)};
  Block block;
  Tiles tiles;
  tiles.configure(Block::shapes(tall));
  for (int part = 0; part < Block::kParts; ++part) block.unpack(panel, 0, part);
  std::optional<typename Block::Summed> summed;
  int turn = 0;
  for (int k = 0; k < k_size; k += size, panel += block_bytes) {
    const int steps = std::min(Block::kSteps, (k_size - k) / Block::kStepSize);
    next.at = panel + block_bytes + kPrefetchBytes;
    if (ahead.at) fetch(ahead.at + (size_t)k * ahead.step, size * ahead.step);
    for (int row = 0; row < height; row += tall, next.at += 64 * Block::kSteps * next.count) {
      const int first = std::min(row, height - tall);
      const bool has_next = row + tall >= height && k + size < k_size;
      block.begin(tiles);
      for (int step = 0; step < steps; ++step) {
        const int k_code = step * Block::kStepSize;
        const CodesOf<F>& codes = a[k_code / sizeof(a->code) * count + first];
        block.multiply(tiles, turn, step, codes.code + k_code % sizeof(a->code), sizeof codes,
                       [&](int part) {
                         if (step + 1 == steps) {
                           if (has_next) block.unpack(panel + block_bytes, 0, part);
                         } else if (row == 0) {
                           block.unpack(panel, step + 1, part);
                         }
                       });
        next.fetch(step);
        if (summed) block.add_scaled(*summed, count, step);
      }
      block.end(tiles, turn);
      for (int part = steps; summed && part < Block::kSteps; ++part)
        block.add_scaled(*summed, count, part);
      summed = {panel, a + first, tile + first * kTileStride, turn, steps, row - first, tall};
      turn ^= 1;
    }
    a += size / sizeof(a->code) * count;
  }
  for (int part = 0; summed && part < Block::kSteps; ++part)
    block.add_scaled(*summed, count, part);
}

}  // namespace penstock
