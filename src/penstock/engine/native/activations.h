// Rows of activations, made ready for the arithmetic that multiplies them.
#pragma once

#include "formats.h"

namespace penstock {

// Rows of a tile: with two vectors of columns, two of weights and a broadcast they fill the
// register file.
constexpr int kMaxRows = kRegisters == 32 ? 12 : 6;

// And where a panel is multiplied by several tiles: from the caches more of them read it as fast,
// and eight rows keep the products fed better than ten or eleven do.
constexpr int kMaxRowsOfSeveral = kRegisters == 32 ? 8 : 6;

// The most rows of all tiles that a panel of quantised weights is read for once.
constexpr int kPanelRows = 48;

constexpr int most_rows(int rows) { return rows > kMaxRows ? kMaxRowsOfSeveral : kMaxRows; }
constexpr int num_row_blocks(int rows) { return (rows + most_rows(rows) - 1) / most_rows(rows); }

// Call visit(row, height) for blocks of at most `most` rows, of nearly equal height: 8 rows of at
// most 6 are 4 + 4, not 6 + 2, whose second half would run at half speed.
template <class Visit>
PENSTOCK_INLINE void for_blocks(int rows, int most, Visit&& visit) {
  const int blocks = (rows + most - 1) / most;
  for (int i = 0, row = 0; i < blocks; ++i) {
    const int height = rows / blocks + (i < rows % blocks);
    visit(row, height);
    row += height;
  }
}

template <class Visit>
PENSTOCK_INLINE void for_row_blocks(int rows, Visit&& visit) {
  for_blocks(rows, most_rows(rows), visit);
}

// Integers below 2^22 in size are added to these bits, of 1.5 * 2^23, and converted to floats by
// `exact`: a subtraction, for which processors have other units than for products.
constexpr int32_t kExactBits = 0x4b400000;
PENSTOCK_INLINE VecF exact(VecI sum) { return (VecF)sum - splat(12582912.0f); }

// 32 numbers of a row: number i is about scale * code[i].
struct Codes32 {
  int8_t code[32];
  float scale, scaled_sum;  // scaled_sum: scale * the sum of the codes
  int32_t negative_sum;     // of the codes
  int32_t bytes_start;      // kExactBits + 128 * negative_sum
};

struct Codes256 {
  int8_t code[256];
  std::conditional_t<kDotsByPairs, int16_t, int32_t> half_sums[16];  // of 16 codes each
  int16_t sums[8];                                                   // of 32
  float scale;
  int32_t unused[3];
};

// The largest size below which numbers count as zeros: beyond it 127 / size is finite.
constexpr float kSmallestSize = 0x1p-120f;

// max |x|, or NaN where a number is not finite.
PENSTOCK_INLINE float largest_size(const float* x, int n) {
  VecI top = {};
  for (int i = 0; i < n; i += kLanes) {
    const VecI size = (VecI)load(x + i) & 0x7fffffff;  // sizes of floats compare as integers do
    top = top < size ? size : top;
  }
  const int32_t largest = largest_lane(top);
  return largest >= 0x7f800000 ? NAN : as_float((uint32_t)largest);
}

// code[n] = x / scale rounded to nearest, with scale = size / 127, which is returned; size: of the
// largest that shares it, NaN for scale NaN and NaN in all products. visit(i, codes i and on).
template <class Visit>
PENSTOCK_INLINE float quantize(const float* x, int n, float size, int8_t* code, Visit&& visit) {
  const bool counts = size > kSmallestSize;
  const VecF inverse = splat(127.0f / size), round_to_int = splat(12582912.0f);  // 1.5 * 2^23
  for (int i = 0; i < n; i += kLanes) {
    VecI rounded = {};
    if (counts) rounded = (VecI)(load(x + i) * inverse + round_to_int) - (VecI)round_to_int;
    const VecS narrow = __builtin_convertvector(rounded, VecS);
    std::memcpy(code + i, &narrow, sizeof narrow);
    visit(i, rounded);
  }
  return counts ? size / 127.0f : size != size ? NAN : 0.0f;
}

PENSTOCK_INLINE float quantize(const float* x, int n, float size, int8_t* code) {
  return quantize(x, n, size, code, [](int, VecI) {});
}

PENSTOCK_INLINE void quantize_block(const float* x, float size, Codes32& out) {
  VecI sums = {};
  out.scale = quantize(x, 32, size, out.code, [&](int, VecI codes) { sums += codes; });
  const int32_t sum = sum_lanes(sums);
  out.scaled_sum = out.scale * (float)sum;
  out.negative_sum = -sum;
  out.bytes_start = kExactBits - 128 * sum;
}

PENSTOCK_INLINE void quantize_block(const float* x, float size, Codes256& out) {
  int32_t sums[16] = {};
  out.scale = quantize(x, 256, size, out.code,
                       [&](int i, VecI codes) { sums[i / 16] += sum_lanes(codes); });
  for (int i = 0; i < 16; ++i) out.half_sums[i] = sums[i];
  for (int i = 0; i < 8; ++i) out.sums[i] = (int16_t)(sums[2 * i] + sums[2 * i + 1]);
}

// n numbers rounded to bfloat16, and a zero after an odd number of them.
PENSTOCK_INLINE void round_row(const float* x, int n, Bf16* out) {
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const VecF v = load(x + i);
    const VecU bits = (VecU)v;
    const VecU nearest = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    const VecH narrow = __builtin_convertvector(v == v ? nearest : 0x7fc0 + VecU{}, VecH);
    std::memcpy(out + i, &narrow, sizeof narrow);
  }
  for (; i < n; ++i) convert(x[i], out + i);
  if (n % 2) out[n] = Bf16{};
}

// k_scale: numbers that share a scale, one block of T or more.
template <class T>
static void quantize_rows(const float* rows, size_t stride, int count, int k_scale, int k_size,
                          T* out) {
  constexpr int k_block = sizeof out->code;
  for (int r = 0; r < count; ++r) {
    const float* row = rows + r * stride;
    float size = 0.0f;
    for (int k = 0; k < k_size; k += k_block) {
      if (k % k_scale == 0) size = largest_size(row + k, k_scale);
      quantize_block(row + k, size, out[(size_t)k / k_block * count + r]);
    }
  }
}

// Bytes of one row's codes of a block; 0 for rows that lie each by itself.
inline size_t codes_bytes(Arithmetic arithmetic) {
  if (arithmetic == Arithmetic::kBlocks256) return sizeof(Codes256);
  return arithmetic >= Arithmetic::kBlocks32 ? sizeof(Codes32) : 0;
}

inline size_t prepared_bytes(Arithmetic arithmetic, int k_size) {
  switch (arithmetic) {
    case Arithmetic::kBf16Pairs: return (size_t)round_up(k_size, 2) * 2;
    case Arithmetic::kBlocks32:
    case Arithmetic::kRows: return (size_t)k_size / 32 * sizeof(Codes32);
    case Arithmetic::kBlocks256: return (size_t)k_size / 256 * sizeof(Codes256);
    case Arithmetic::kFloat: break;
  }
  return (size_t)k_size * sizeof(float);
}

// Write `count` rows of k_size floats in `arithmetic`, prepared_bytes each. Quantised: the first
// block of k of every row, then the second.
inline void prepare(Arithmetic arithmetic, const float* rows, size_t stride, int count, int k_size,
                    void* out) {
  if (arithmetic == Arithmetic::kBf16Pairs)
    for (int r = 0; r < count; ++r)
      round_row(rows + r * stride, k_size, (Bf16*)out + (size_t)r * round_up(k_size, 2));
  if (arithmetic == Arithmetic::kBlocks32)
    quantize_rows(rows, stride, count, 32, k_size, (Codes32*)out);
  if (arithmetic == Arithmetic::kBlocks256)
    quantize_rows(rows, stride, count, 256, k_size, (Codes256*)out);
  if (arithmetic == Arithmetic::kRows)
    quantize_rows(rows, stride, count, k_size, k_size, (Codes32*)out);
}

}  // namespace penstock
