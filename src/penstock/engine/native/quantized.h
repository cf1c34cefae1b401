// Tiles of quantised weights. A weight is unpacked once for all rows of a tile; within a block of
// activations the sum is an exact integer, and over blocks it is one chain of fused multiply-adds:
// the same bits in whichever tile shape it is computed.
#pragma once

#include "activations.h"

namespace penstock {

// What to fetch into the second-level cache meanwhile: `step` bytes further for every k. Several
// blocks of rows share the panel that they multiply, and between them fetch the next one.
struct Ahead {
  const char* at = nullptr;
  int step = 0;
};

// How far ahead weights are fetched: across the page boundaries where the hardware's prefetcher
// stops. With one row (and quantised weights, with two) it keeps up, and fetching by hand costs.
constexpr int kPrefetchBytes = 8192;

constexpr int kMaxPanels = 4;
constexpr int kTileStride = kMaxPanels * kPanel;

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

// Whether a code is multiplied as a byte that stands for byte - 128.
template <class F>
constexpr bool kIsByte = F::kBits == 8 || F::kTable != nullptr;

PENSTOCK_INLINE int32_t four_codes(const int8_t* code) {
  int32_t word;
  std::memcpy(&word, code, sizeof word);
  return word;
}

// How many products of pairs fit 16 bits, of codes of kBits with bytes up to 127.
constexpr int pairs_at_once(int kBits) {
  return kBits == 4 ? 8 : kBits == 5 ? 4 : 2;  // each times 2 * 127 * (2^kBits - 1) <= 32767
}

// sum[Rows][Strips] += codes [4 * first, 4 * last) of 32 of each strip x those of the rows' blocks.
template <class F, int Rows, int Strips, int first, int last, class Codes>
PENSTOCK_INLINE void dot_codes(const uint8_t* strips, const Codes* a, int k, VecI (*sum)[Strips]) {
  [[maybe_unused]] VecI pairs[Rows][Strips];
#pragma GCC unroll 8
  for (int v = first; v < last; ++v) {
    VecI codes[Strips];
#pragma GCC unroll 2
    for (int s = 0; s < Strips; ++s) {
      codes[s] = unpack<F::kBits>(strips + 4 * s * kLanes, v);
      if constexpr (F::kTable != nullptr) codes[s] = look_up(F::kTable, codes[s]);
    }
#pragma GCC unroll 12
    for (int r = 0; r < Rows; ++r) {
      const int32_t x = four_codes(a[r].code + k + 4 * v);
#pragma GCC unroll 2
      for (int s = 0; s < Strips; ++s) {
        if constexpr (kIsByte<F> && kDotsSmallCodes) {
          sum[r][s] = dot_signed(sum[r][s], codes[s], x);
        } else if constexpr (!kDotsByPairs) {
          sum[r][s] = dot_bytes(sum[r][s], codes[s], x);
        } else {
          constexpr int at_once = pairs_at_once(F::kBits);
          const VecI products = pair_products(codes[s], x);
          pairs[r][s] = v % at_once ? add_pairs(pairs[r][s], products) : products;
          if ((v + 1) % at_once == 0 || v + 1 == last) sum[r][s] += sum_pairs(pairs[r][s]);
        }
      }
    }
  }
}

// What a sum starts with: minus the offset of its codes times the sum of the activations.
template <class F>
PENSTOCK_INLINE VecI start_of(int32_t negative_sum) {
  constexpr bool has_offset = F::kOffset && !(kIsByte<F> && kDotsSmallCodes);
  return has_offset ? splat_int(negative_sum) * F::kOffset : VecI{};
}

// Of a strip's columns from `column` on, the scales (or minima) that begin at `scales`.
template <class F>
PENSTOCK_INLINE VecF load_scales(const uint8_t* scales, int column) {
  if constexpr (F::kScaleBytes == 4)
    return load((const float*)scales + column);
  else
    return load_half((const uint16_t*)scales + column);
}

// One block of a panel: sum[Rows][Strips] for strips from `strip` on.
template <class F, int Rows, int Strips>
PENSTOCK_INLINE void add_block(const uint8_t* block, int strip, const Codes32* a,
                               VecF (*sum)[Strips]) {
  const uint8_t *scales = block + F::kScales, *lows = scales + kPanel * F::kScaleBytes;
  const uint8_t* strips = block + 4 * strip * kLanes;
  for (int k = 0; k < F::kBlock; k += 32, a += Rows, strips += F::kCodeBytes) {
    VecI dot[Rows][Strips];
#pragma GCC unroll 12
    for (int r = 0; r < Rows; ++r)
      for (int s = 0; s < Strips; ++s) dot[r][s] = start_of<F>(a[r].negative_sum);
    dot_codes<F, Rows, Strips, 0, 8>(strips, a, 0, dot);
#pragma GCC unroll 2
    for (int s = 0; s < Strips; ++s) {
      const VecF d = load_scales<F>(scales, (strip + s) * kLanes);
      VecF m = {};
      if constexpr (F::kHasLow) m = load_scales<F>(lows, (strip + s) * kLanes);
#pragma GCC unroll 12
      for (int r = 0; r < Rows; ++r) {
        const VecF value = __builtin_convertvector(dot[r][s], VecF);
        sum[r][s] = fused(value, d * splat(a[r].scale), sum[r][s]);
        if constexpr (F::kHasLow) sum[r][s] = fused(m, splat(a[r].scaled_sum), sum[r][s]);
      }
    }
  }
}

// total += scale of sub-block `sub` x what its codes [4 * first, 4 * last) of 32 give.
template <class F, int Rows, int Strips, int first, int last>
PENSTOCK_INLINE void add_sub_block(const uint8_t* strips, const uint8_t* scales, const Codes256* a,
                                   int k, VecI (*total)[Strips]) {
  VecI dot[Rows][Strips];
#pragma GCC unroll 12
  for (int r = 0; r < Rows; ++r) {
    const int32_t* sums = a[r].negative_sums + (k + 4 * first) / 16;
    const int32_t sum = F::kSub == 32 ? sums[0] + sums[1] : sums[0];
    for (int s = 0; s < Strips; ++s) dot[r][s] = start_of<F>(sum);
  }
  dot_codes<F, Rows, Strips, first, last>(strips, a, k, dot);
#pragma GCC unroll 2
  for (int s = 0; s < Strips; ++s) {
    // A six-bit code's scale has a sign.
    const VecI scale = F::kHasLow ? load_bytes(scales + s * kLanes)
                                  : load_bytes((const int8_t*)scales + s * kLanes);
#pragma GCC unroll 12
    for (int r = 0; r < Rows; ++r) total[r][s] += dot[r][s] * scale;
  }
}

// sum -= m x lows x sums of activations, of a block.
template <class F, int Rows, int Strips>
PENSTOCK_INLINE void subtract_lows(const uint8_t* block, int strip, const Codes256* a,
                                   VecF (*sum)[Strips]) {
#pragma GCC unroll 2
  for (int s = 0; s < Strips; ++s) {
    const int column = (strip + s) * kLanes;
    const VecF m = -load_half((const uint16_t*)block + kPanel + column);
    VecI lows[4];
    for (int i = 0; i < 4; ++i)
      lows[i] = load_byte_pairs(block + F::kLows + 2 * (i * kPanel + column));
#pragma GCC unroll 12
    for (int r = 0; r < Rows; ++r) {
      VecI low = {};
      for (int i = 0; i < 4; ++i) {
        int32_t pair;
        std::memcpy(&pair, a[r].sums + 2 * i, sizeof pair);
        low = dot_pairs(low, lows[i], pair);
      }
      const VecF value = __builtin_convertvector(low, VecF);
      sum[r][s] = fused(value, m * splat(a[r].scale), sum[r][s]);
    }
  }
}

template <class F, int Rows, int Strips>
PENSTOCK_INLINE void add_block(const uint8_t* block, int strip, const Codes256* a,
                               VecF (*sum)[Strips]) {
  if constexpr (F::kHasLow) subtract_lows<F, Rows, Strips>(block, strip, a, sum);
  VecI total[Rows][Strips] = {};
  const uint8_t* group = block + F::kGroups;
  for (int k = 0; k < 256; k += 64, group += F::kGroupBytes) {
    const uint8_t* scales = group + strip * kLanes;
    const uint8_t* strips = group + F::kGroupScales * kPanel + 4 * strip * kLanes;
#pragma GCC unroll 2
    for (int i = 0; i < 64; i += 32, strips += F::kCodeBytes) {
      if constexpr (F::kSub == 32) {
        add_sub_block<F, Rows, Strips, 0, 8>(strips, scales, a, k + i, total);
        scales += kPanel;
      } else {
        add_sub_block<F, Rows, Strips, 0, 4>(strips, scales, a, k + i, total);
        add_sub_block<F, Rows, Strips, 4, 8>(strips, scales + kPanel, a, k + i, total);
        scales += 2 * kPanel;
      }
    }
  }
#pragma GCC unroll 2
  for (int s = 0; s < Strips; ++s) {
    const VecF d = load_half((const uint16_t*)block + (strip + s) * kLanes);
#pragma GCC unroll 12
    for (int r = 0; r < Rows; ++r) {
      const VecF value = __builtin_convertvector(total[r][s], VecF);
      sum[r][s] = fused(value, d * splat(a[r].scale), sum[r][s]);
    }
  }
}

template <Arithmetic arithmetic>
using CodesOf = std::conditional_t<arithmetic == Arithmetic::kBlocks256, Codes256, Codes32>;

// Strips side by side: what one row's block of activations is good for. More rows would not leave
// registers for the sums.
constexpr int strips_at_once(int rows) { return 2 * rows <= kMaxRows ? 2 : 1; }

// tile[Rows][kPanel] = a[Rows][k_size] x a panel; `tile` has rows of kTileStride floats.
template <class F, int Rows>
static __attribute__((noinline)) void quantized_kernel(const char* rows, size_t, const char* panel,
                                                       int k_size, Ahead ahead, float* tile) {
  constexpr int Strips = strips_at_once(Rows);
  using Codes = CodesOf<F::kArithmetic>;
  constexpr int a_step = F::kBlock / (int)sizeof(Codes::code) * Rows;
  for (int strip = 0; strip < 2; strip += Strips) {
    const Codes* a = (const Codes*)rows;
    const uint8_t* block = (const uint8_t*)panel;
    VecF sum[Rows][Strips] = {};
    for (int k = 0; k < k_size; k += F::kBlock, a += a_step, block += F::kPanelBytes) {
      if (strip == 0) {
        if (ahead.at)
          fetch(ahead.at + (size_t)k * ahead.step, F::kBlock * ahead.step);
        else if (Rows > 2)
          fetch((const char*)block + kPrefetchBytes, F::kPanelBytes);
      }
      add_block<F, Rows, Strips>(block, strip, a, sum);
    }
    for (int r = 0; r < Rows; ++r)
      for (int s = 0; s < Strips; ++s)
        store(tile + r * kTileStride + (strip + s) * kLanes, sum[r][s]);
  }
}

}  // namespace penstock
