// Products of tiles of int8 as AMX has them, behind five operations on eight tiles of at most 16
// rows of 64 bytes: by AMX, by ARM's int8 matrix instructions, and in plain C++, which says what
// the others have to give. int32 sums are exact, so all give equal bits.
#pragma once

#include <algorithm>
#include <type_traits>

#include "simd.h"

namespace penstock {

constexpr int kTileRows = 16;

// Rows of every tile and bytes of each of its rows, as the processor reads them.
struct alignas(64) TileShapes {
  uint8_t palette = 1, unused[15] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  void set(int tile, int num_rows, int bytes) {
    rows[tile] = (uint8_t)num_rows;
    row_bytes[tile] = (uint16_t)bytes;
  }
};

// What a processor refuses ends the program here, too.
class PlainTiles {
 public:
  void configure(const TileShapes& shapes) {
    shapes_ = shapes;
    std::memset(bytes_, 0, sizeof bytes_);
    for (int i = 0; i < 8; ++i)
      require(shapes.palette == 1 && shapes.rows[i] <= kTileRows && shapes.row_bytes[i] <= 64);
  }

  // Read rows that begin `stride` bytes apart.
  template <int tile>
  void load(const void* from, size_t stride) {
    require(shapes_.rows[tile] > 0);
    for (int r = 0; r < shapes_.rows[tile]; ++r)
      std::memcpy(bytes_[tile][r], (const char*)from + r * stride, shapes_.row_bytes[tile]);
  }

  template <int tile>
  void zero() {
    require(shapes_.rows[tile] > 0);
    std::memset(bytes_[tile], 0, sizeof bytes_[tile]);
  }

  // sum[r][c] += products of row r of `a`, signed, with bytes 4 * c to 4 * c + 3 of `b`'s rows.
  template <int sum, int a, int b, bool kSigned>
  void multiply() {
    const int rows = shapes_.rows[sum], columns = shapes_.row_bytes[sum] / 4;
    require(rows == shapes_.rows[a] && 4 * columns == shapes_.row_bytes[b]);
    require(4 * shapes_.rows[b] == shapes_.row_bytes[a] && rows * columns > 0);
    for (int r = 0; r < rows; ++r) {
      int32_t sums[16];
      std::memcpy(sums, bytes_[sum][r], sizeof sums);
      for (int k = 0; k < shapes_.row_bytes[a]; ++k)
        for (int c = 0; c < columns; ++c) {
          const uint8_t weight = bytes_[b][k / 4][4 * c + k % 4];
          sums[c] += (int8_t)bytes_[a][r][k] * (kSigned ? (int8_t)weight : (int)weight);
        }
      std::memcpy(bytes_[sum][r], sums, sizeof sums);
    }
  }

  template <int tile>
  void store(void* to, size_t stride) const {
    require(shapes_.rows[tile] > 0);
    for (int r = 0; r < shapes_.rows[tile]; ++r)
      std::memcpy((char*)to + r * stride, bytes_[tile][r], shapes_.row_bytes[tile]);
  }

 private:
  TileShapes shapes_;
  uint8_t bytes_[8][kTileRows][64];

  static void require(bool holds) {
    if (!holds) __builtin_trap();
  }
};

#if defined(__AMX_INT8__)
// In assembly, because GCC's intrinsics take no tile's number from a template. The tiles are the
// thread's own; while they are in use every switch of threads saves them.
class AmxTiles {
 public:
  AmxTiles() = default;
  AmxTiles(const AmxTiles&) = delete;
  AmxTiles& operator=(const AmxTiles&) = delete;
  ~AmxTiles() { asm volatile("tilerelease"); }

  void configure(const TileShapes& shapes) { asm volatile("ldtilecfg %0" : : "m"(shapes)); }

  template <int tile>
  void load(const void* from, size_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(tile) : "memory");
  }

  template <int tile>
  void zero() {
    asm volatile("tilezero %%tmm%c0" : : "i"(tile));
  }

  template <int sum, int a, int b, bool kSigned>
  void multiply() {
    if constexpr (kSigned)
      asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(sum), "i"(a), "i"(b));
    else
      asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(sum), "i"(a), "i"(b));
  }

  template <int tile>
  void store(void* to, size_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(tile) : "memory");
  }
};
#endif

#if defined(__ARM_FEATURE_MATMUL_INT8)
// By products of 2 x 8 with 8 x 2, for tiles of a vector's width. What is loaded stays where it
// lies until it is multiplied; only tiles 0 to 3 are zeroed and stored.
class I8mmTiles {
 public:
  void configure(const TileShapes& shapes) { shapes_ = shapes; }

  template <int tile>
  void load(const void* from, size_t stride) {
    from_[tile] = (const char*)from;
    strides_[tile] = stride;
  }

  template <int tile>
  void zero() {
    std::memset(sums_[tile], 0, sizeof sums_[tile]);
  }

  template <int sum, int a, int b, bool kSigned>
  void multiply() {
    const int rows = shapes_.rows[a], eights = shapes_.rows[b] / 2;
    uint8x16_t columns[8][2];  // 8 of k of two columns
    for (int i = 0; i < eights; ++i) {
      const char* word = from_[b] + 2 * i * strides_[b];
      const auto low = load_as<uint32x4_t>(word), high = load_as<uint32x4_t>(word + strides_[b]);
      columns[i][0] = (uint8x16_t)vzip1q_u32(low, high);
      columns[i][1] = (uint8x16_t)vzip2q_u32(low, high);
    }
    for (int r = 0; r < rows; r += 2) {
      const auto* row = (const int8_t*)from_[a] + r * strides_[a];
      const int8_t* next = row + (r + 1 < rows ? strides_[a] : 0);
      int32x4_t sums[2] = {};  // of a column: of this row, of the next
      for (int i = 0; i < eights; ++i) {
        const int8x16_t x = vcombine_s8(vld1_s8(row + 8 * i), vld1_s8(next + 8 * i));
        for (int j = 0; j < 2; ++j)
          sums[j] = kSigned ? vmmlaq_s32(sums[j], (int8x16_t)columns[i][j], x)
                            : vusmmlaq_s32(sums[j], columns[i][j], x);
      }
      sums_[sum][r] += vuzp1q_s32(sums[0], sums[1]);
      sums_[sum][r + 1] += vuzp2q_s32(sums[0], sums[1]);
    }
  }

  template <int tile>
  void store(void* to, size_t stride) const {
    for (int r = 0; r < shapes_.rows[tile]; ++r)
      std::memcpy((char*)to + r * stride, &sums_[tile][r], sizeof sums_[tile][r]);
  }

 private:
  TileShapes shapes_;
  const char* from_[8];
  size_t strides_[8];
  int32x4_t sums_[4][kTileRows];
};
#endif

// PENSTOCK_TILES_PLAIN takes plain C++ on any processor, for tests.
#if defined(PENSTOCK_TILES_PLAIN)
using Tiles = PlainTiles;
constexpr bool kHasTiles = true;
#elif defined(__AMX_INT8__) && !defined(PENSTOCK_PORTABLE)
using Tiles = AmxTiles;
constexpr bool kHasTiles = true;
#elif defined(__ARM_FEATURE_MATMUL_INT8) && !defined(PENSTOCK_PORTABLE)
using Tiles = I8mmTiles;
constexpr bool kHasTiles = true;
#else
using Tiles = PlainTiles;
constexpr bool kHasTiles = false;
#endif
constexpr bool kTilesArePlain = std::is_same_v<Tiles, PlainTiles>;

// Sums of products of random tiles in random shapes.
template <class T>
static void random_tiles(uint32_t seed, int32_t (*sums)[kTileRows * kLanes]) {
  const auto random = [&] { return (seed = seed * 1664525 + 1013904223) >> 16; };
  for (int i = 0; i < 2; ++i) std::fill_n(sums[i], kTileRows * kLanes, 0);
  alignas(64) int8_t a[kTileRows][64], b[kTileRows][4 * kLanes];
  for (auto& row : a)
    for (int8_t& byte : row) byte = (int8_t)random();
  for (auto& row : b)
    for (int8_t& byte : row) byte = (int8_t)random();
  const int rows = 1 + random() % kTileRows, words = 2 * (1 + random() % 8);
  TileShapes shapes;
  for (int i = 0; i < 2; ++i) shapes.set(i, rows, 4 * kLanes);
  shapes.set(2, rows, 4 * words);
  shapes.set(3, words, 4 * kLanes);
  T tiles;
  tiles.configure(shapes);
  tiles.template zero<0>();
  tiles.template zero<1>();
  tiles.template load<2>(a, sizeof a[0]);
  tiles.template load<3>(b, sizeof b[0]);
  tiles.template multiply<0, 2, 3, true>();
  for (int i = 0; i < 2; ++i) tiles.template multiply<1, 2, 3, false>();
  tiles.template store<0>(sums[0], 4 * kLanes);
  tiles.template store<1>(sums[1], 4 * kLanes);
}

// Whether T's products are those of PlainTiles, to the bit.
template <class T>
static bool tiles_agree() {
  int32_t sums[2][2][kTileRows * kLanes];
  for (uint32_t seed = 0; seed < 64; ++seed) {
    random_tiles<T>(seed, sums[0]);
    random_tiles<PlainTiles>(seed, sums[1]);
    if (std::memcmp(sums[0], sums[1], sizeof sums[0]) != 0) return false;
  }
  return true;
}

}  // namespace penstock
