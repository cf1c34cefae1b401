// How weights lie in a file and in memory: ggml's block formats and groups of integers
// (`QuantizedMatrix` of quantized.py names them), float32 and bfloat16.
//
// A panel holds kPanel columns of the output, in two strips of kLanes, and of these columns one
// block of k after the other. A block keeps the file's bits in another order: those that one
// instruction wants lie beside each other, in the order in which one row reads them, so that the
// processor fetches them ahead by itself.
#pragma once

#include <algorithm>
#include <vector>

#include "dot.h"

namespace penstock {

// The numbers are those of packing.py. kBf16Pairs: bfloat16 weights against activations rounded to
// bfloat16, in memory the same as kBf16.
enum class Kind : int32_t {
  kF32, kBf16, kBf16Pairs, kQ8_0, kQ4_0, kQ4_1, kQ5_0, kQ5_1, kQ4_K, kQ5_K, kQ6_K,
  kInt8_32, kInt8_128, kInt4_32, kInt4_128, kUint4_32, kUint4_128, kInt8Rows,
  kIQ4_NL, kIQ4_XS, kMXFP4
};

// What activations are multiplied as: floats, pairs of bfloat16, or int8 in blocks of that many
// with a scale each; kRows: as kBlocks32, with one scale for the whole row.
enum class Arithmetic { kFloat, kBf16Pairs, kBlocks32, kBlocks256, kRows };
constexpr int kArithmetics = 5;

// A matrix of a model: packed panels, or (the embedding) a file's rows.
struct Matrix {
  const void* data;
  Kind kind;
};

// One block of one column, taken apart. d, m: the bits of a float16, in groups of a float32.
struct Block {
  uint32_t d = 0, m = 0;
  uint8_t scale[16] = {}, low[8] = {};
  uint8_t code[256] = {};
};

PENSTOCK_INLINE uint32_t read_word(const uint8_t* p) {
  uint32_t word;
  std::memcpy(&word, p, sizeof word);
  return word;
}

PENSTOCK_INLINE float as_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

PENSTOCK_INLINE uint16_t read_half(const uint8_t* p) { return (uint16_t)(p[0] | p[1] << 8); }

// Nibbles of 32 weights: the low ones, then the high ones.
PENSTOCK_INLINE void read_nibbles(const uint8_t* p, int count, uint8_t* code) {
  for (int i = 0; i < count; ++i) {
    code[i] = p[i] & 15;
    code[i + count] = p[i] >> 4;
  }
}

// Of formats whose codes are places in a table, not numbers: its 16 values plus 128, which kOffset
// takes off again. ggml's kvalues_iq4nl, and twice the values of a float of 4 bits (e2m1).
constexpr uint8_t kIq4Values[16] = {1,   24,  45,  63,  79,  93,  106, 118,
                                    129, 141, 153, 166, 181, 197, 217, 241};
constexpr uint8_t kFp4Values[16] = {128, 129, 130, 131, 132, 134, 136, 140,
                                    128, 127, 126, 125, 124, 122, 120, 116};

// Weight = d * (code - kOffset), or d * code + m with kHasLow.
template <Kind kind_, int kFileBytes_, int kBits_, int kOffset_, bool kHasLow_>
struct Blocks32 {
  static constexpr Kind kind = kind_;
  static constexpr Arithmetic kArithmetic = Arithmetic::kBlocks32;
  static constexpr int kBlock = 32, kFileBytes = kFileBytes_, kBits = kBits_, kOffset = kOffset_;
  static constexpr bool kHasLow = kHasLow_;
  static constexpr const uint8_t* kTable = nullptr;
  // Codes, then d and m of every column.
  static constexpr int kSub = 0, kCodes = 0, kCodeBytes = 4 * kBits * kPanel, kScaleBytes = 2;
  static constexpr int kScales = kCodeBytes;
  static constexpr int kPanelBytes = kScales + (kHasLow ? 2 : 1) * kPanel * kScaleBytes;

  static void read(const uint8_t* p, Block& block) {
    block.d = read_half(p);
    p += 2;
    if (kHasLow) block.m = read_half(p), p += 2;
    if (kBits == 8) {
      for (int i = 0; i < 32; ++i) block.code[i] = p[i] ^ 0x80;
      return;
    }
    read_nibbles(p + (kBits == 5 ? 4 : 0), 16, block.code);
    if (kBits == 5)
      for (int i = 0; i < 32; ++i) block.code[i] |= (p[i / 8] >> (i % 8) & 1) << 4;
  }

  static void dequantize(const Block& block, float* out) {
    const float d = half_to_float(block.d), m = half_to_float(block.m);
    for (int i = 0; i < 32; ++i)
      out[i] = kHasLow ? d * block.code[i] + m : d * (block.code[i] - kOffset);
  }
};

using Q8_0 = Blocks32<Kind::kQ8_0, 34, 8, 128, false>;
using Q4_0 = Blocks32<Kind::kQ4_0, 18, 4, 8, false>;
using Q4_1 = Blocks32<Kind::kQ4_1, 20, 4, 0, true>;
using Q5_0 = Blocks32<Kind::kQ5_0, 22, 5, 16, false>;
using Q5_1 = Blocks32<Kind::kQ5_1, 24, 5, 0, true>;

struct IQ4_NL : Blocks32<Kind::kIQ4_NL, 18, 4, 128, false> {
  static constexpr const uint8_t* kTable = kIq4Values;

  static void dequantize(const Block& block, float* out) {
    const float d = half_to_float(block.d);
    for (int i = 0; i < 32; ++i) out[i] = d * (kTable[block.code[i]] - kOffset);
  }
};

// d is 2^(e - 128), e a byte: a float32.
struct MXFP4 : Blocks32<Kind::kMXFP4, 17, 4, 128, false> {
  static constexpr const uint8_t* kTable = kFp4Values;
  static constexpr int kScaleBytes = 4, kPanelBytes = kScales + kPanel * kScaleBytes;

  static void read(const uint8_t* p, Block& block) {
    block.d = *p < 2 ? 0x200000u << *p : (*p - 1u) << 23;
    read_nibbles(p + 1, 16, block.code);
  }

  static void dequantize(const Block& block, float* out) {
    const float d = as_float(block.d);
    for (int i = 0; i < 32; ++i) out[i] = d * (kTable[block.code[i]] - kOffset);
  }
};

// Groups of integers with float32 scales, as compressed-tensors, GPTQ and AWQ have them: weight =
// d * (code - kOffset), or d * code + m with kHasLow. In a row: d, m, codes, of two in a byte the
// low one first.
template <Kind kind_, int kBlock_, int kBits_, bool kHasLow_,
          Arithmetic kArithmetic_ = Arithmetic::kBlocks32>
struct Groups {
  static constexpr Kind kind = kind_;
  static constexpr Arithmetic kArithmetic = kArithmetic_;
  static constexpr int kBlock = kBlock_, kBits = kBits_, kOffset = kHasLow_ ? 0 : 1 << (kBits - 1);
  static constexpr bool kHasLow = kHasLow_;
  static constexpr const uint8_t* kTable = nullptr;
  static constexpr int kScaleBytes = 4, kHead = kHasLow ? 8 : 4;
  static constexpr int kFileBytes = kHead + kBlock * kBits / 8;
  // As in Blocks32, codes of 32 of k after the other.
  static constexpr int kSub = 0, kCodes = 0, kCodeBytes = 4 * kBits * kPanel;
  static constexpr int kScales = kBlock / 32 * kCodeBytes;
  static constexpr int kPanelBytes = kScales + (kHasLow ? 2 : 1) * kPanel * kScaleBytes;

  static void read(const uint8_t* p, Block& block) {
    block.d = read_word(p);
    if (kHasLow) block.m = read_word(p + 4);
    p += kHead;
    for (int i = 0; i < kBlock; ++i)
      block.code[i] = kBits == 8 ? p[i] : p[i / 2] >> (i % 2 * 4) & 15;
  }

  static void dequantize(const Block& block, float* out) {
    const float d = as_float(block.d), m = as_float(block.m);
    for (int i = 0; i < kBlock; ++i)
      out[i] = kHasLow ? d * block.code[i] + m : d * (block.code[i] - kOffset);
  }
};

using Int8_32 = Groups<Kind::kInt8_32, 32, 8, false>;
using Int8_128 = Groups<Kind::kInt8_128, 128, 8, false>;
using Int4_32 = Groups<Kind::kInt4_32, 32, 4, false>;
using Int4_128 = Groups<Kind::kInt4_128, 128, 4, false>;
using Uint4_32 = Groups<Kind::kUint4_32, 32, 4, true>;
using Uint4_128 = Groups<Kind::kUint4_128, 128, 4, true>;
using Int8Rows = Groups<Kind::kInt8Rows, 128, 8, false, Arithmetic::kRows>;

// 256 weights in sub-blocks of kSub: weight = d * scale * (code - kOffset) - m * low.
template <Kind kind_, int kFileBytes_, int kBits_, int kSub_, int kOffset_>
struct Blocks256 {
  static constexpr Kind kind = kind_;
  static constexpr Arithmetic kArithmetic = Arithmetic::kBlocks256;
  static constexpr int kBlock = 256, kFileBytes = kFileBytes_, kBits = kBits_, kSub = kSub_;
  static constexpr int kOffset = kOffset_;
  static constexpr bool kHasLow = kOffset == 0;
  static constexpr const uint8_t* kTable = nullptr;
  // d and m of every column, lows and scales of sub-blocks by pairs, and codes, 32 of k after the
  // other.
  static constexpr int kScaleBytes = 2, kScales = 0, kSubBytes = 256 / kSub * kPanel;
  static constexpr int kLows = (kHasLow ? 2 : 1) * kPanel * kScaleBytes;
  static constexpr int kSubScales = kLows + (kHasLow ? kSubBytes : 0);
  static constexpr int kCodes = kSubScales + kSubBytes, kCodeBytes = 4 * kBits * kPanel;
  static constexpr int kPanelBytes = kCodes + 8 * kCodeBytes;

  static void read(const uint8_t* p, Block& block) {
    if constexpr (kBits == 6)
      read_six_bits(p, block);
    else
      read_with_lows(p, block);
  }

  static void dequantize(const Block& block, float* out) {
    const float d = half_to_float(block.d), m = half_to_float(block.m);
    for (int i = 0; i < 256; ++i) {
      const int sub = i / kSub;
      if (kHasLow)
        out[i] = d * block.scale[sub] * block.code[i] - m * block.low[sub];
      else
        out[i] = d * (int8_t)block.scale[sub] * (block.code[i] - kOffset);
    }
  }

 private:
  static void read_with_lows(const uint8_t* p, Block& block) {
    block.d = read_half(p);
    block.m = read_half(p + 2);
    const uint8_t* packed = p + 4;  // 16 numbers of 6 bits
    for (int i = 0; i < 4; ++i) {
      block.scale[i] = packed[i] & 63;
      block.low[i] = packed[i + 4] & 63;
      block.scale[i + 4] = (packed[i + 8] & 15) | packed[i] >> 6 << 4;
      block.low[i + 4] = packed[i + 8] >> 4 | packed[i + 4] >> 6 << 4;
    }
    const uint8_t* high = p + 16;
    const uint8_t* nibbles = high + (kBits == 5 ? 32 : 0);
    for (int i = 0; i < 4; ++i) read_nibbles(nibbles + 32 * i, 32, block.code + 64 * i);
    if (kBits == 5)
      for (int i = 0; i < 256; ++i) block.code[i] |= (high[i % 32] >> (i / 32) & 1) << 4;
  }

  static void read_six_bits(const uint8_t* p, Block& block) {
    const uint8_t *nibbles = p, *high = p + 128;
    for (int half = 0; half < 2; ++half) {
      uint8_t* code = block.code + 128 * half;
      read_nibbles(nibbles + 64 * half, 64, code);
      for (int i = 0; i < 128; ++i)
        code[i] |= (high[32 * half + i % 32] >> (i / 32 * 2) & 3) << 4;
    }
    std::memcpy(block.scale, p + 192, 16);
    block.d = read_half(p + 208);
  }
};

using Q4_K = Blocks256<Kind::kQ4_K, 144, 4, 32, 0>;
using Q5_K = Blocks256<Kind::kQ5_K, 176, 5, 32, 0>;
using Q6_K = Blocks256<Kind::kQ6_K, 210, 6, 16, 32>;

struct IQ4_XS : Blocks256<Kind::kIQ4_XS, 136, 4, 32, 128> {
  static constexpr const uint8_t* kTable = kIq4Values;

  static void read(const uint8_t* p, Block& block) {
    block.d = read_half(p);
    const uint32_t high = read_half(p + 2), low = read_word(p + 4);
    for (int i = 0; i < 8; ++i) {
      block.scale[i] = (uint8_t)((low >> (4 * i) & 15) + (high >> (2 * i) & 3) * 16 - 32);
      read_nibbles(p + 8 + 16 * i, 16, block.code + 32 * i);
    }
  }

  static void dequantize(const Block& block, float* out) {
    const float d = half_to_float(block.d);
    for (int i = 0; i < 256; ++i)
      out[i] = d * (int8_t)block.scale[i / kSub] * (kTable[block.code[i]] - kOffset);
  }
};

// Plain numbers, kBlock of k interleaved: one float of each column, or a pair of bfloat16.
template <Kind kind_, Arithmetic kArithmetic_, class T_>
struct Plain {
  using T = T_;
  static constexpr Kind kind = kind_;
  static constexpr Arithmetic kArithmetic = kArithmetic_;
  static constexpr int kBlock = 4 / sizeof(T), kFileBytes = 4, kPanelBytes = 4 * kPanel;
};

using F32 = Plain<Kind::kF32, Arithmetic::kFloat, float>;
using BF16 = Plain<Kind::kBf16, Arithmetic::kFloat, Bf16>;
using BF16Pairs = Plain<Kind::kBf16Pairs, Arithmetic::kBf16Pairs, Bf16>;

// Call visit(format) with the format of `kind`.
template <class Visit>
PENSTOCK_INLINE auto with_format(Kind kind, Visit&& visit) {
  switch (kind) {
    case Kind::kBf16: return visit(BF16{});
    case Kind::kBf16Pairs: return visit(BF16Pairs{});
    case Kind::kQ8_0: return visit(Q8_0{});
    case Kind::kQ4_0: return visit(Q4_0{});
    case Kind::kQ4_1: return visit(Q4_1{});
    case Kind::kQ5_0: return visit(Q5_0{});
    case Kind::kQ5_1: return visit(Q5_1{});
    case Kind::kQ4_K: return visit(Q4_K{});
    case Kind::kQ5_K: return visit(Q5_K{});
    case Kind::kQ6_K: return visit(Q6_K{});
    case Kind::kInt8_32: return visit(Int8_32{});
    case Kind::kInt8_128: return visit(Int8_128{});
    case Kind::kInt4_32: return visit(Int4_32{});
    case Kind::kInt4_128: return visit(Int4_128{});
    case Kind::kUint4_32: return visit(Uint4_32{});
    case Kind::kUint4_128: return visit(Uint4_128{});
    case Kind::kInt8Rows: return visit(Int8Rows{});
    case Kind::kIQ4_NL: return visit(IQ4_NL{});
    case Kind::kIQ4_XS: return visit(IQ4_XS{});
    case Kind::kMXFP4: return visit(MXFP4{});
    case Kind::kF32: break;
  }
  return visit(F32{});
}

inline Arithmetic arithmetic_of(Kind kind) {
  return with_format(kind, [](auto format) { return decltype(format)::kArithmetic; });
}

// Bytes of one panel of k_size rows of k.
inline size_t panel_bytes(Kind kind, int k_size) {
  return with_format(kind, [=](auto format) {
    using F = decltype(format);
    return (size_t)(round_up(k_size, F::kBlock) / F::kBlock) * F::kPanelBytes;
  });
}

// Row `row` of a matrix that lies as in its file, as floats: out[width].
inline void dequantize_row(const Matrix& matrix, size_t row, int width, float* out) {
  with_format(matrix.kind, [=](auto format) {
    using F = decltype(format);
    if constexpr (F::kFileBytes == 4) {
      const auto* source = (const typename F::T*)matrix.data + row * width;
      for (int i = 0; i < width; ++i) out[i] = to_float(source[i]);
    } else {
      const int blocks = width / F::kBlock;
      const uint8_t* source = (const uint8_t*)matrix.data + row * blocks * F::kFileBytes;
      Block block;
      for (int i = 0; i < blocks; ++i) {
        F::read(source + (size_t)i * F::kFileBytes, block);
        F::dequantize(block, out + (size_t)i * F::kBlock);
      }
    }
  });
}

// 32 codes of column `column`: the bits above four, then words of four codes, in them two of 4 bits
// beside each other.
template <int kBits>
PENSTOCK_INLINE void pack_codes(const uint8_t* code, int column, uint8_t* out) {
  uint32_t words[8], high[2] = {};
  std::memcpy(words, code, sizeof words);
  const auto put = [&](int i, uint32_t word) {
    std::memcpy(out + 4 * (i * kPanel + column), &word, sizeof word);
  };
  if constexpr (kBits == 8) {
    for (int i = 0; i < 8; ++i) put(i, words[i]);
    return;
  }
  for (int i = 0; i < 8; ++i) {
    if (kBits == 5) high[0] |= (words[i] >> 4 & 0x01010101) << i;
    if (kBits == 6) high[i / 4] |= (words[i] >> 4 & 0x03030303) << (2 * (i % 4));
  }
  for (int i = 0; i < kBits - 4; ++i) put(i, high[i]);
  for (int i = 0; i < 4; ++i)
    put(kBits - 4 + i, (words[2 * i] & 0x0f0f0f0f) | (words[2 * i + 1] & 0x0f0f0f0f) << 4);
}

// One block of column `column` of a panel. Inlined, GCC 12 at -O3 drops IQ4_XS's from pack_matrix.
template <class F>
static __attribute__((noinline)) void pack_block(const Block& block, int column, uint8_t* panel) {
  for (int i = 0; i < F::kBlock / 32; ++i)
    pack_codes<F::kBits>(block.code + 32 * i, column, panel + F::kCodes + i * F::kCodeBytes);
  constexpr int size = F::kScaleBytes;
  uint8_t* scales = panel + F::kScales + size * column;
  std::memcpy(scales, &block.d, size);
  if (F::kHasLow) std::memcpy(scales + size * kPanel, &block.m, size);
  if constexpr (F::kSub != 0)
    for (int i = 0; i < 256 / F::kSub; ++i) {
      const int at = 2 * (i / 2 * kPanel + column) + i % 2;
      panel[F::kSubScales + at] = block.scale[i];
      if (F::kHasLow) panel[F::kLows + at] = block.low[i];
    }
}

// Pack columns whose rows in the file begin at the addresses `rows` (null: zeros) into panels.
// num_columns is a multiple of kPanel.
inline void pack_matrix(Kind kind, const uint8_t* const* rows, int num_columns, int k_size,
                        uint8_t* out) {
  with_format(kind, [=](auto format) {
    using F = decltype(format);
    const int blocks = round_up(k_size, F::kBlock) / F::kBlock;
    Block block;
    for (int first = 0; first < num_columns; first += kPanel)
      for (int i = 0; i < blocks; ++i) {
        uint8_t* panel = out + ((size_t)first / kPanel * blocks + i) * F::kPanelBytes;
        for (int column = 0; column < kPanel; ++column) {
          const uint8_t* row = rows[first + column];
          if constexpr (F::kFileBytes == 4) {
            const size_t size = sizeof(typename F::T);
            const int count = std::min(F::kBlock, k_size - i * F::kBlock);
            std::memset(panel + 4 * column, 0, 4);
            if (row) std::memcpy(panel + 4 * column, row + (size_t)i * 4, count * size);
          } else {
            if (row)
              F::read(row + (size_t)i * F::kFileBytes, block);
            else
              block = Block{};
            pack_block<F>(block, column, panel);
          }
        }
      }
  });
}

}  // namespace penstock
