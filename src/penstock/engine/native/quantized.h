// Tiles of quantised weights. A few unpack weights in registers; more share blocks that are unpacked
// once, in the first-level cache. Within a block of activations the sum is an exact
// integer, and over blocks it is one chain of fused multiply-adds: the same bits either way.
#pragma once

#include <climits>

#include "activations.h"

namespace penstock {

// What to fetch into the second-level cache meanwhile: `step` bytes further for every k. Several
// blocks of rows share the panel that they multiply, and between them fetch the next one.
struct Ahead {
  const char* at = nullptr;
  int step = 0;
};

// How far ahead weights are fetched: across the page boundaries where the hardware's prefetcher
// stops. With one row (and quantised weights, with two) it keeps up, and fetching by hand costs, but
// for codes of 6 bits, as the scales between them are a stream of their own.
constexpr int kPrefetchBytes = 8192;

constexpr int kMaxPanels = 4;
constexpr int kTileStride = kMaxPanels * kPanel;

// Lines of a panel to fetch while a tile is computed: so many in each 32 of k. All at once they would
// wait for each other.
struct Lines {
  const char* at;
  int count;

  void fetch(int group) const {
    const char* line = at + 64 * group * count;
    for (int i = 0; i < count; ++i) __builtin_prefetch(line + 64 * i, 0, 2);
  }
};

PENSTOCK_INLINE void fetch(const char* at, int bytes) {
  for (int i = 0; i < bytes; i += 64) __builtin_prefetch(at + i, 0, 2);
}

// Codes 4 * v to 4 * v + 3 of 32, for every lane of a strip, as bytes: pack_codes undone.
template <int kBits>
PENSTOCK_INLINE VecI unpack(const uint8_t* strip, int v) {
  constexpr int size = 4 * kPanel;
  if constexpr (kBits == 8) return load_as<VecI>(strip + v * size);
  VecU codes = load_as<VecU>(strip + (kBits - 4 + v / 2) * size);
  codes = (v % 2 ? codes >> 4 : codes) & 0x0f0f0f0fu;
  if constexpr (kBits == 5) {
    const VecU high = load_as<VecU>(strip);
    codes |= (v < 4 ? high << (4 - v) : high >> (v - 4)) & 0x10101010u;
  }
  if constexpr (kBits == 6) {
    const VecU high = load_as<VecU>(strip + v / 4 * size);
    const int at = 2 * (v % 4);
    codes |= (at < 4 ? high << (4 - at) : high >> (at - 4)) & 0x30303030u;
  }
  return (VecI)codes;
}

// Whether a code is a byte that stands for byte - 128, and whether it is multiplied as such, with its
// sign.
template <class F>
constexpr bool kIsByte = F::kBits == 8 || F::kTable != nullptr;
template <class F>
constexpr bool kIsSigned = kIsByte<F> && kDotsSmallCodes;
template <class F>
constexpr int kOffsetLeft = kIsSigned<F> ? 0 : F::kOffset;

// Numbers of 16 bits, of pairs: the first ones or the second ones, as a sum of weighted products
// wants them.
PENSTOCK_INLINE VecI weight_of(VecI pairs, bool second) {
  if (!kDotsByPairs) return second ? pairs >> 16 : pairs << 16 >> 16;
  return second ? (pairs & (int32_t)0xffff0000) | (VecI)((VecU)pairs >> 16)
                : pairs << 16 | (pairs & 0xffff);
}

// A block of a panel as it lies in memory. `strip`: which kLanes of its columns.
template <class F>
class PackedBlock {
 public:
  void take(const char* block) { block_ = (const uint8_t*)block; }

  // Codes 4 * v to 4 * v + 3 of the 32 of `group`, ready for products.
  VecI code(int group, int v, int strip) const {
    const uint8_t* codes = block_ + F::kCodes + group * F::kCodeBytes;
    VecI word = unpack<F::kBits>(codes + 4 * strip * kLanes, v);
    if constexpr (F::kTable != nullptr) word = look_up(F::kTable, word);
    return kIsSigned<F> ? word ^ (int32_t)0x80808080 : word;
  }
  VecF d(int strip) const { return scale(F::kScales, strip); }
  VecF m(int strip) const { return scale(F::kScales + kPanel * F::kScaleBytes, strip); }

  // Of 256 codes: scales and minima of sub-blocks 2 * i and 2 * i + 1, and the scale of one.
  VecI scales(int i, int strip) const { return bytes(F::kSubScales, i, strip); }
  VecI lows(int i, int strip) const { return bytes(F::kLows, i, strip); }
  VecI weight(int sub, int strip) const { return weight_of(scales(sub / 2, strip), sub % 2); }

 private:
  const uint8_t* block_;

  VecF scale(int at, int strip) const {
    const uint8_t* scales = block_ + at + F::kScaleBytes * strip * kLanes;
    if constexpr (F::kScaleBytes == 4)
      return load((const float*)scales);
    else
      return load_half((const uint16_t*)scales);
  }
  VecI bytes(int at, int i, int strip) const {
    return load_byte_pairs((const int8_t*)block_ + at + 2 * (i * kPanel + strip * kLanes));
  }
};

// The same, taken apart.
template <class F>
class alignas(64) UnpackedBlock {
 public:
  void take(const char* packed) {
    PackedBlock<F> block;
    block.take(packed);
    for (int group = 0; group < F::kBlock / 32; ++group)
#pragma GCC unroll 8
      for (int v = 0; v < 8; ++v)
        for (int s = 0; s < 2; ++s) codes_[group][v][s] = block.code(group, v, s);
    for (int s = 0; s < 2; ++s) {
      d_[s] = block.d(s);
      if constexpr (F::kHasLow) m_[s] = block.m(s);
      if constexpr (F::kSub != 0) {
        for (int i = 0; i < kSubs; ++i) weights_[i][s] = block.weight(i, s);
        if constexpr (kOffsetLeft<F> != 0 && kDotsByPairs)
          for (int i = 0; i < kSubs / 2; ++i) pairs_[i][s] = block.scales(i, s);
        if constexpr (F::kHasLow)
          for (int i = 0; i < kSubs / 2; ++i) pairs_[i][s] = block.lows(i, s);
      }
    }
  }

  VecI code(int group, int v, int strip) const { return codes_[group][v][strip]; }
  VecF d(int strip) const { return d_[strip]; }
  VecF m(int strip) const { return m_[strip]; }
  VecI scales(int i, int strip) const { return pairs_[i][strip]; }
  VecI lows(int i, int strip) const { return pairs_[i][strip]; }
  VecI weight(int sub, int strip) const { return weights_[sub][strip]; }

 private:
  static constexpr int kSubs = F::kSub ? F::kBlock / F::kSub : 2;
  VecI codes_[F::kBlock / 32][8][2], weights_[kSubs][2], pairs_[kSubs / 2][2];
  VecF d_[2], m_[2];
};

PENSTOCK_INLINE int32_t four_codes(const int8_t* code) {
  int32_t word;
  std::memcpy(&word, code, sizeof word);
  return word;
}

// How many words of codes are summed before the sums are widened: of pairs in 16 bits, each product
// at most 2 * 127 * (2^bits - 1).
template <class F>
constexpr int kWordsAtOnce = !kDotsByPairs ? 8
                             : kIsByte<F>  ? 1
                             : F::kBits == 4 ? 8
                             : F::kBits == 5 ? 4
                                             : 2;

// total + weight x sums of add_dots. Without kWeighted the weight is 1.
template <bool kWeighted>
PENSTOCK_INLINE VecI add_weighted(VecI total, VecI sums, [[maybe_unused]] VecI weight) {
  if constexpr (kDotsByPairs) return dot_pairs(total, sums, kWeighted ? weight : splat_int(0x10001));
  return kWeighted ? total + sums * weight : total + sums;
}

// total[Rows][Strips] += weight[Strips] x sums of products of codes [4 * first, 4 * last) of 32 of
// `group` with those of the rows at `k`. start(row): what a sum that is not of pairs begins from.
template <class F, int Rows, int Strips, int first, int last, bool kWeighted, class Block,
          class Codes, class Start>
PENSTOCK_INLINE void add_products(const Block& block, int group, const Codes* a, int k, int strip,
                                  const VecI* weight, Start&& start, VecI (*total)[Strips]) {
  VecI sums[Rows][Strips];
#pragma GCC unroll 8
  for (int v = first; v < last; ++v) {
    VecI codes[Strips];
    for (int s = 0; s < Strips; ++s) codes[s] = block.code(group, v, strip + s);
    const bool begins = (v - first) % kWordsAtOnce<F> == 0;
    const bool ends = (v - first + 1) % kWordsAtOnce<F> == 0 || v + 1 == last;
#pragma GCC unroll 12
    for (int r = 0; r < Rows; ++r) {
      const int32_t x = four_codes(a[r].code + k + 4 * v);
#pragma GCC unroll 2
      for (int s = 0; s < Strips; ++s) {
        VecI before = begins ? VecI{} : sums[r][s];
        if (begins && !kDotsByPairs) before = start(r);
        sums[r][s] = add_dots<kIsSigned<F>>(before, codes[s], x);
        keep(sums[r][s]);
        if (ends) total[r][s] = add_weighted<kWeighted>(total[r][s], sums[r][s], weight[s]);
      }
    }
  }
}

// sum[Rows][Strips] += a block of a panel x those of rows; `count` codes further a row's next
// begin. The block begins at `k` of those whose time `ahead` is spread over.
template <class F, int Rows, int Strips, class Block>
PENSTOCK_INLINE void add_block(const Block& block, const Codes32* a, size_t count, int strip,
                               Lines ahead, int k, VecF (*sum)[Strips]) {
  for (int group = 0; group < F::kBlock / 32; ++group, a += count) {
    ahead.fetch(k / 32 + group);
    const auto start = [=](int r) {
      if (kOffsetLeft<F> == 128) return splat_int(a[r].bytes_start);
      if (kOffsetLeft<F>) return splat_int(a[r].negative_sum) * kOffsetLeft<F> + kExactBits;
      return splat_int(kExactBits);
    };
    VecI total[Rows][Strips];
#pragma GCC unroll 12
    for (int r = 0; r < Rows; ++r)
      for (int s = 0; s < Strips; ++s) total[r][s] = kDotsByPairs ? start(r) : VecI{};
    constexpr VecI no_weight[2] = {};
    add_products<F, Rows, Strips, 0, 8, false>(block, group, a, 0, strip, no_weight, start, total);
#pragma GCC unroll 2
    for (int s = 0; s < Strips; ++s) {
      const VecF d = block.d(strip + s);
      VecF m = {};
      if constexpr (F::kHasLow) m = block.m(strip + s);
#pragma GCC unroll 12
      for (int r = 0; r < Rows; ++r) {
        sum[r][s] = fused(exact(total[r][s]), d * splat(a[r].scale), sum[r][s]);
        if constexpr (F::kHasLow) sum[r][s] = fused(m, splat(a[r].scaled_sum), sum[r][s]);
      }
    }
  }
}

// sum + that over pairs of sub-blocks of numbers x sums of the row's activations.
template <int Pairs>
PENSTOCK_INLINE VecI dot_sums(VecI sum, const int16_t* sums, const VecI* numbers) {
#pragma GCC unroll 8
  for (int i = 0; i < Pairs; ++i) {
    int32_t pair;
    std::memcpy(&pair, sums + 2 * i, sizeof pair);
    sum = dot_pairs(sum, numbers[i], splat_int(pair));
  }
  return sum;
}

template <class F, int Rows, int Strips, class Block>
PENSTOCK_INLINE void add_block(const Block& block, const Codes256* a, size_t, int strip,
                               Lines ahead, int, VecF (*sum)[Strips]) {
  constexpr int pairs = 128 / F::kSub, half = F::kSub == 32 ? 8 : 4;
  constexpr bool kOffsetLater = kOffsetLeft<F> != 0 && kDotsByPairs;
  VecI total[Rows][Strips] = {};
  // First what lies first in memory.
#pragma GCC unroll 2
  for (int s = 0; s < Strips && (F::kHasLow || kOffsetLater); ++s) {
    VecF m = {};
    VecI numbers[pairs];
    if constexpr (F::kHasLow) m = -block.m(strip + s);
    for (int i = 0; i < pairs; ++i) {
      if constexpr (F::kHasLow) numbers[i] = block.lows(i, strip + s);
      if constexpr (kOffsetLater) numbers[i] = block.scales(i, strip + s);
    }
#pragma GCC unroll 12
    for (int r = 0; r < Rows; ++r) {
      if constexpr (F::kHasLow) {
        const VecI low = dot_sums<pairs>(splat_int(kExactBits), a[r].sums, numbers);
        sum[r][s] = fused(exact(low), m * splat(a[r].scale), sum[r][s]);
      }
      if constexpr (kOffsetLater) {
        const int16_t* sums = F::kSub == 32 ? a[r].sums : a[r].half_sums;
        total[r][s] = -kOffsetLeft<F> * dot_sums<pairs>(VecI{}, sums, numbers);
      }
    }
  }
  for (int group = 0; group < 8; ++group) {
    ahead.fetch(group);
#pragma GCC unroll 2
    for (int sub = 0; sub < 8 / half; ++sub) {
      VecI weight[Strips];
      for (int s = 0; s < Strips; ++s) weight[s] = block.weight(group * 8 / half + sub, strip + s);
      const auto start = [=](int r) {
        if constexpr (kOffsetLeft<F> == 0 || kDotsByPairs) return VecI{};
        const auto* offset = a[r].half_sums + 2 * group;
        if (half == 4) return splat_int(offset[sub]) * -kOffsetLeft<F>;
        return (splat_int(offset[0]) + splat_int(offset[1])) * -kOffsetLeft<F>;
      };
      if (sub == 0)
        add_products<F, Rows, Strips, 0, half, true>(block, group, a, 32 * group, strip, weight,
                                                     start, total);
      else
        add_products<F, Rows, Strips, 8 - half, 8, true>(block, group, a, 32 * group, strip, weight,
                                                         start, total);
    }
  }
#pragma GCC unroll 2
  for (int s = 0; s < Strips; ++s) {
    const VecF d = block.d(strip + s);
#pragma GCC unroll 12
    for (int r = 0; r < Rows; ++r)
      sum[r][s] = fused(__builtin_convertvector(total[r][s], VecF), d * splat(a[r].scale),
                        sum[r][s]);
  }
}

template <class F>
using CodesOf = std::conditional_t<F::kArithmetic == Arithmetic::kBlocks256, Codes256, Codes32>;

// Codes of a row that one block of a panel is multiplied by.
template <class F>
constexpr int kCodesOfBlock = F::kBlock / (int)sizeof(CodesOf<F>::code);

// Most rows of a tile, and how many strips it multiplies at once, by kind of its blocks: as measured
// (tuning.h). One strip at a time leaves registers for more rows.
struct TileShape {
  int rows, strips;
};
template <class Block>
inline TileShape tile_shape = {4, 2};

// Rows from which a tile may have one strip. A few rows read a panel in the order of memory.
template <class F>
constexpr int kOneStripFrom = F::kArithmetic == Arithmetic::kBlocks256 ? 7 : INT_MAX;

// tile[Rows][kPanel] += rows x blocks; `tile` has rows of kTileStride.
template <class F, int Rows, int strips, class Block>
static __attribute__((noinline)) void add_tile(const Block* blocks, int num_blocks,
                                               const CodesOf<F>* a, size_t count, Lines ahead,
                                               float* tile) {
  for (int first = 0; first < 2; first += strips, ahead.at += 64 * 8 * ahead.count) {
    VecF sum[Rows][strips];
    float* at = tile + first * kLanes;
    for (int r = 0; r < Rows; ++r)
      for (int s = 0; s < strips; ++s) sum[r][s] = load(at + r * kTileStride + s * kLanes);
    const CodesOf<F>* codes = a;
    for (int i = 0; i < num_blocks; ++i, codes += kCodesOfBlock<F> * count)
      add_block<F, Rows, strips>(blocks[i], codes, count, first, ahead, i * F::kBlock, sum);
    for (int r = 0; r < Rows; ++r)
      for (int s = 0; s < strips; ++s) store(at + r * kTileStride + s * kLanes, sum[r][s]);
  }
}

template <class F, class Block>
using AddTile = void (*)(const Block* blocks, int num_blocks, const CodesOf<F>* a, size_t count,
                         Lines ahead, float* tile);

template <class F, class Block, int Rows = kMaxRows>
static AddTile<F, Block> add_tile_for(int rows, int strips) {
  if constexpr (Rows > 1)
    if (rows < Rows) return add_tile_for<F, Block, Rows - 1>(rows, strips);
  if constexpr (Rows >= kOneStripFrom<F>)
    if (strips == 1) return add_tile<F, Rows, 1, Block>;
  return add_tile<F, Rows, 2, Block>;
}

// Rows up to which tiles unpack in registers: as measured.
template <class F>
inline int packed_rows = 4;

// tile[height][kPanel] = rows x a panel.
template <class F, class Block>
static __attribute__((noinline)) void quantized_kernel(const char* rows, size_t count, int height,
                                                       const char* panel, int k_size, Ahead ahead,
                                                       float* tile) {
  constexpr int together = 256 / F::kBlock;
  Block blocks[together];
  const auto* a = (const CodesOf<F>*)rows;
  for (int r = 0; r < height; ++r) std::memset(tile + r * kTileStride, 0, kPanel * sizeof(float));
  const TileShape most = tile_shape<Block>;
  const int tiles = (height + most.rows - 1) / most.rows;
  const auto turns = [&](int of_tile) { return of_tile < kOneStripFrom<F> ? 1 : 2 / most.strips; };
  const int groups = 8 * turns(height / tiles) * tiles;
  Lines next{nullptr, (together * F::kPanelBytes + 64 * groups - 1) / (64 * groups)};
  if (height <= 2 && F::kBits != 6) next.count = 0;
  for (int k = 0; k < k_size; k += 256, a += 256 / sizeof(a->code) * count) {
    const int num_blocks = std::min(together, (k_size - k) / F::kBlock);
    for (int i = 0; i < num_blocks; ++i, panel += F::kPanelBytes) blocks[i].take(panel);
    next.at = panel + kPrefetchBytes;
    if (ahead.at) fetch(ahead.at + (size_t)k * ahead.step, 256 * ahead.step);
    for_blocks(height, most.rows, [&](int row, int of_tile) {
      add_tile_for<F, Block>(of_tile, most.strips)(blocks, num_blocks, a + row, count, next,
                                                   tile + row * kTileStride);
      next.at += 64 * 8 * turns(of_tile) * next.count;
    });
  }
}

}  // namespace penstock
