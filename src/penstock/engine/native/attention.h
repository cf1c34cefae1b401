// Causal attention over the paged cache: online softmax over tiles of a fixed number of positions.
// A context is cut into splits of whole tiles, always from position 0, whose sums are added in
// their order, by one thread or by several: a row's arithmetic depends on nothing but its position.
//
// A block's keys are stored [kv_head][head_dim][block_size] and its values [kv_head][strip]
// [block_size][kPanel], strips of kPanel columns: both products are then sums of broadcast times
// vector, and the query heads that share a key head read it once. Numbers of fewer than 32 bits lie
// in pairs of neighbours along the sum (columns of keys, positions of values), one pair a lane. In
// 8 bits, the scales of the block's positions follow. Columns and positions are padded.
#pragma once

#include <limits>
#include <type_traits>

#include "gemm.h"

namespace penstock {

constexpr int kTilePositions = 128, kSplitPositions = 512;
// Queries that read a tile of keys and values together: what they need fits the second-level cache.
constexpr int kQueriesPerTask = 96;

// Number format of the cache, as in library.py.
enum class KvKind : int32_t { kF32 = 0, kBf16 = 1, kInt8 = 2 };

struct AttentionShape {
  int head_dim, kv_heads, block_size;
  KvKind kind;

  int item_bytes() const { return kind == KvKind::kF32 ? 4 : kind == KvKind::kBf16 ? 2 : 1; }
  int pair() const { return kind == KvKind::kF32 ? 1 : 2; }
  int padded_dim() const { return round_up(head_dim, kPanel); }
  int padded_block() const { return round_up(block_size, kLanes); }
  int value_rows() const { return round_up(block_size, pair()); }
  int tile_blocks() const {
    return block_size >= kTilePositions ? 1 : kTilePositions / block_size;
  }
  int tile() const { return tile_blocks() * block_size; }
  int split() const { return kSplitPositions / tile() * tile(); }
  int num_splits(int positions) const { return (positions + split() - 1) / split(); }
  // Of one KV head in a block: bytes of the numbers, and with the scales.
  size_t key_codes() const { return (size_t)head_dim * padded_block() * item_bytes(); }
  size_t value_codes() const { return (size_t)value_rows() * padded_dim() * item_bytes(); }
  size_t key_bytes() const { return key_codes() + scale_bytes(padded_block()); }
  size_t value_bytes() const { return value_codes() + scale_bytes(value_rows()); }
  // Index of a number of the block.
  size_t key_at(int column, int slot) const {
    return ((size_t)column / pair() * padded_block() + slot) * pair() + column % pair();
  }
  size_t value_at(int column, int slot) const {
    const size_t row = (size_t)column / kPanel * (value_rows() / pair()) + slot / pair();
    return (row * kPanel + column % kPanel) * pair() + slot % pair();
  }

 private:
  size_t scale_bytes(int slots) const {
    return kind == KvKind::kInt8 ? slots * sizeof(float) : 0;
  }
};

// Softmax sums over a part of the context, for each query: of weights times values, the highest
// score (base 2), and the total of exp2(score - highest); 0 where the query saw nothing.
struct AttentionSums {
  float *sum, *highest, *total;

  AttentionSums() = default;
  AttentionSums(float* memory, int queries, int padded_dim)
      : sum(memory), highest(sum + (size_t)queries * padded_dim), total(highest + queries) {}
  static size_t size(int queries, int padded_dim) { return (size_t)queries * (padded_dim + 2); }

  void clear(int queries, int padded_dim) const {
    std::fill(sum, sum + (size_t)queries * padded_dim, 0.0f);
    std::fill(highest, highest + queries, -std::numeric_limits<float>::infinity());
    std::fill(total, total + queries, 0.0f);
  }

  // Add those of the positions that follow.
  void add(const AttentionSums& next, int queries, int padded_dim) const {
    for (int i = 0; i < queries; ++i) {
      if (next.total[i] == 0) continue;
      const float peak = highest[i] < next.highest[i] ? next.highest[i] : highest[i];
      const VecF before = exp2_lanes(splat(highest[i] - peak));
      const VecF after = exp2_lanes(splat(next.highest[i] - peak));
      highest[i] = peak;
      total[i] = total[i] * before[0] + next.total[i] * after[0];
      float* row = sum + (size_t)i * padded_dim;
      const float* other = next.sum + (size_t)i * padded_dim;
      for (int j = 0; j < padded_dim; j += kLanes)
        store(row + j, fused(load(row + j), before, load(other + j) * after));
    }
  }
};

// 2^x for x <= 0, with a relative error under 2e-7: exactly 1 at 0, exactly 0 below 2^-127. NaN
// stays NaN. 2^f on [-1/2, 1/2] is the minimax polynomial of degree 5 that is 1 at 0.
PENSTOCK_INLINE VecF exp2_below_one(VecF x) {
  const VecF lowest = splat(-127.0f), round_to_int = splat(12582912.0f);  // 1.5 * 2^23
  const VecF y = x < lowest ? lowest : x;
  const VecF shifted = y + round_to_int;
  const VecF f = y - (shifted - round_to_int);
  VecF p = splat(0x1.5bba14p-10f);
  p = fused(p, f, splat(0x1.3cea88p-7f));
  p = fused(p, f, splat(0x1.c6b752p-5f));
  p = fused(p, f, splat(0x1.ebf9bcp-3f));
  p = fused(p, f, splat(0x1.62e42ap-1f));
  p = fused(p, f, splat(1.0f));
  return (VecF)((VecI)p + ((VecI)shifted << 23));
}

struct AttentionScratch {
  float *query, *score, *query_unit, *weight_unit, *rescale;
  AttentionSums split, all;
};

// How numbers of the cache are multiplied. A lane's word has one number or two, and kSteps times
// is `part` of it multiplied by one factor of 32 bits. `put` writes numbers i to i + kLanes - 1 of
// a row as factors; `factors` all n at x, to where they lie or before: they are factors times what
// is returned. `encode` turns n numbers into the cache's, in place, and returns their scale.
template <class C>
struct Element;

template <>
struct Element<float> {
  using Sum = VecF;
  static constexpr int kPair = 1, kSteps = 1, kWordBytes = 4;
  PENSTOCK_INLINE VecU part(const char* p, int) { return load_as<VecU>(p); }
  PENSTOCK_INLINE VecF add(VecF sum, VecU part, const float* factor) {
    return fused(splat(*factor), (VecF)part, sum);
  }
  PENSTOCK_INLINE void put(VecF x, int i, float* row) { store(row + i, x); }
  PENSTOCK_INLINE float factors(const float* x, int n, float* row) {
    for (int i = 0; i < n; i += kLanes) put(load(x + i), i, row);
    return 1.0f;
  }
  PENSTOCK_INLINE float encode(float*, int) { return 1.0f; }
};

template <>
struct Element<Bf16> {
  using Sum = VecF;
  static constexpr int kPair = 2, kSteps = kDotsBf16 ? 1 : 2, kWordBytes = 4;
  PENSTOCK_INLINE VecU part(const char* p, int step) {
    const VecU word = load_as<VecU>(p);
    return kDotsBf16 ? word : step ? word & 0xffff0000u : word << 16;
  }
  PENSTOCK_INLINE VecF add(VecF sum, VecU part, const float* factor) {
    if constexpr (!kDotsBf16) return fused(splat(*factor), (VecF)part, sum);
    uint32_t pair;
    std::memcpy(&pair, factor, sizeof pair);
    return dot_bf16(sum, part, pair);
  }
  PENSTOCK_INLINE void put(VecF x, int i, float* row) {
    if constexpr (!kDotsBf16) return store(row + i, x);
#if defined(__AVX512BF16__)
    const __m256bh narrow = _mm512_cvtneps_pbh(x);
    std::memcpy((Bf16*)row + i, &narrow, sizeof narrow);
#else
    float wide[kLanes];
    store(wide, x);
    round_row(wide, kLanes, (Bf16*)row + i);
#endif
  }
  PENSTOCK_INLINE float factors(const float* x, int n, float* row) {
    for (int i = 0; i < n; i += kLanes) put(load(x + i), i, row);
    return 1.0f;
  }
  PENSTOCK_INLINE float encode(float* x, int n) {
    round_row(x, n, (Bf16*)x);
    return 1.0f;
  }
};

// Widened to 16 bits, as the factors are: int32 sums are exact up to 1,000 products.
template <>
struct Element<int8_t> {
  using Sum = VecI;
  static constexpr int kPair = 2, kSteps = 1, kWordBytes = 2;
  static constexpr float kLargest = 16383.0f, kSmallest = 0x1p-100f;
  PENSTOCK_INLINE VecU part(const char* p, int) {
    return (VecU)load_byte_pairs((const int8_t*)p);
  }
  PENSTOCK_INLINE VecI add(VecI sum, VecU part, const float* factor) {
    int32_t pair;
    std::memcpy(&pair, factor, sizeof pair);
    return dot_pairs(sum, (VecI)part, splat_int(pair));
  }
  PENSTOCK_INLINE float factors(const float* x, int n, float* row) {
    const float size = largest_size(x, n);
    const bool counts = size > kSmallest;
    const VecF inverse = splat(kLargest / size), round_to_int = splat(12582912.0f);
    for (int i = 0; i < n; i += kLanes) {
      VecI rounded = {};
      if (counts) rounded = (VecI)(load(x + i) * inverse + round_to_int) - (VecI)round_to_int;
      const VecH narrow = __builtin_convertvector(rounded, VecH);
      std::memcpy((char*)row + 2 * i, &narrow, sizeof narrow);
    }
    return counts ? size / kLargest : size != size ? NAN : 0.0f;
  }
  PENSTOCK_INLINE float encode(float* x, int n) {
    return quantize(x, n, largest_size(x, n), (int8_t*)x);
  }
};

// Rows of factors times some vectors of the cache, of which a piece of `piece_values` values after
// the other lies in memory, and of each the words of one vector `stride` bytes apart.
struct BlockProduct {
  const float* factors;
  size_t row_factors;
  int piece_factors, num_values, piece_values;
  size_t stride;
  // Where there are scales, c = c * rescale + sum * unit, with those of each row; else c = sum.
  const float *rescale, *unit;
  float* c;
  size_t row_c;
};

// `at` has the addresses of each piece's vectors, and `ahead`, unless it is null, what is fetched
// meanwhile.
template <class C, int Rows, int Vecs>
static __attribute__((noinline)) void block_kernel(const BlockProduct& p, int row, int vector,
                                                   const char* const* at,
                                                   const char* const* ahead) {
  using E = Element<C>;
  typename E::Sum sum[Rows][Vecs] = {};
  const float* a = p.factors + row * p.row_factors;
  const size_t row_factors = p.row_factors;
  auto add_word = [&](size_t offset, const float* factor, auto mask) {
#pragma GCC unroll 2
    for (int i = 0; i < E::kSteps; ++i) {
      VecU part[Vecs];
#pragma GCC unroll 8
      for (int j = 0; j < Vecs; ++j) {
        part[j] = E::part(at[j] + offset, i);
        if constexpr (decltype(mask)::value) part[j] &= E::kSteps == 2 && !i ? ~0u : 0xffffu;
      }
#pragma GCC unroll 12
      for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 8
        for (int j = 0; j < Vecs; ++j)
          sum[r][j] = E::add(sum[r][j], part[j], factor + r * row_factors + i);
    }
  };
  for (int done = 0; done < p.num_values; done += p.piece_values) {
    const int values = std::min(p.piece_values, p.num_values - done);
    size_t offset = 0;
    const float* factor = a;
    for (int k = 0; k < values / E::kPair; ++k, offset += p.stride, factor += E::kSteps) {
      if (ahead)
        // To the second level, which takes more lines at a time.
        for (int j = 0; j < Vecs; j += kLanes == 16 ? 1 : 2)
          __builtin_prefetch(ahead[j] + offset, 0, 2);
      add_word(offset, factor, std::false_type{});
    }
    // The other half of the last pair may be anything.
    if (values % E::kPair) add_word(offset, factor, std::true_type{});
    a += p.piece_factors;
    at += Vecs;
    if (ahead) ahead += Vecs;
  }
  // Unrolled, or the sums would live in memory.
#pragma GCC unroll 12
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 8
    for (int j = 0; j < Vecs; ++j) {
      float* c = p.c + (row + r) * p.row_c + (vector + j) * kLanes;
      if (p.unit) {
        VecF value;
        if constexpr (std::is_same_v<C, int8_t>)
          value = __builtin_convertvector(sum[r][j], VecF);
        else
          value = sum[r][j];
        value *= splat(p.unit[row + r]);
        store(c, fused(splat(p.rescale[row + r]), load(c), value));
      } else {
        std::memcpy(c, &sum[r][j], sizeof sum[r][j]);
      }
    }
}

// Vectors computed side by side: few rows are too few sums to keep the multiply-adds busy.
constexpr int vectors_at_once(int rows) { return rows == 1 ? 8 : rows <= 3 ? 4 : 2; }

using BlockKernel = void (*)(const BlockProduct&, int row, int vector, const char* const* at,
                             const char* const* ahead);

template <class C, int Rows = kMaxRows>
static BlockKernel block_kernel_for(int rows, int vectors) {
  if constexpr (Rows > 1)
    if (rows < Rows) return block_kernel_for<C, Rows - 1>(rows, vectors);
  if constexpr (vectors_at_once(Rows) >= 8)
    if (vectors == 8) return block_kernel<C, Rows, 8>;
  if constexpr (vectors_at_once(Rows) >= 4)
    if (vectors == 4) return block_kernel<C, Rows, 4>;
  return vectors == 2 ? block_kernel<C, Rows, 2> : block_kernel<C, Rows, 1>;
}

// Words of the factors of n numbers.
template <class C>
constexpr int factor_words(int n) {
  return n / Element<C>::kPair * Element<C>::kSteps;
}

// Bytes of the cache that all rows read, one tile of them after the other, from the first level.
constexpr int kSpanBytes = 16 * 1024;

// c of rows [first, last) and all vectors; at(piece, vector) is the address of a piece's vector,
// and ahead(piece, vector) of what is fetched with it, once.
template <class C, class At, class Next>
static void multiply_blocks(const BlockProduct& p, int first, int last, int num_vectors, At&& at,
                            Next&& ahead) {
  if (first >= last) return;
  constexpr int word_bytes = kLanes * Element<C>::kWordBytes;
  const int pieces = (p.num_values + p.piece_values - 1) / p.piece_values;
  const int blocks = num_row_blocks(last - first);
  const int most = vectors_at_once((last - first + blocks - 1) / blocks);
  const int words = std::max(p.num_values / Element<C>::kPair, pieces);
  const int fitting = kSpanBytes / (words * word_bytes);
  const int span = std::max(fitting / most, 1) * most;
  auto count_at = [&](int vector) {
    int count = most;
    while (count > num_vectors - vector) count /= 2;
    return count;
  };
  const char* here[std::max(8 * kTilePositions, kSpanBytes / word_bytes)];
  const char* next[std::max(8 * kTilePositions, kSpanBytes / word_bytes)];
  for (int begin = 0; begin < num_vectors; begin += span) {
    const int end = std::min(begin + span, num_vectors);
    for (int vector = begin, i = 0; vector < end; vector += count_at(vector))
      for (int piece = 0; piece < pieces; ++piece)
        for (int j = 0; j < count_at(vector); ++j, ++i) {
          here[i] = at(piece, vector + j);
          next[i] = ahead(piece, vector + j);
        }
    for_row_blocks(last - first, [&](int row, int height) {
      for (int vector = begin, count; vector < end; vector += count) {
        const int place = (vector - begin) * pieces;
        count = count_at(vector);
        block_kernel_for<C>(height, count)(p, first + row, vector, here + place,
                                           row == 0 ? next + place : nullptr);
      }
    });
  }
}

// One sequence's rows at consecutive positions from `first_position`, for `heads` query heads that
// share `kv_head`. `query` and `out` point at the first row's first head; queries are scaled by
// log2(e) / sqrt(head_dim) already. A row sees `window` positions, its own included. rows * heads is
// at most what the scratch was made for. A head's sink, if it has one, is a score (base 2) of no
// position, which takes part in the total alone, once and last.
template <class C>
struct Attention {
  const AttentionShape shape;
  const char *keys, *values;
  const int32_t* block_table;
  const float* query;
  float* out;
  size_t stride;
  int first_position, rows, heads, kv_head, window;
  const AttentionScratch& scratch;
  const float* sinks;  // of the first head, or null

  int queries() const { return rows * heads; }
  int length() const { return first_position + rows; }
  int first_seen() const { return std::max(0, first_position + 1 - window); }
  bool sees(int split) const {
    return split >= first_seen() / shape.split() && split < shape.num_splits(length());
  }

  // The sums over one split of the context.
  void attend(int split, const AttentionSums& sums) const {
    load_queries();
    sums.clear(queries(), shape.padded_dim());
    const int tile = shape.tile(), end = std::min(length(), (split + 1) * shape.split());
    for (int start = std::max(split * shape.split(), first_seen() / tile * tile); start < end;
         start += tile)
      attend_tile(start, sums);
  }

  // All splits one after the other; `part(split)` has the sums of each.
  template <class Part>
  void finish(Part&& part) const {
    const int dim = shape.head_dim, padded_dim = shape.padded_dim();
    const AttentionSums& all = scratch.all;
    all.clear(queries(), padded_dim);
    for (int i = first_seen() / shape.split(); i < shape.num_splits(length()); ++i)
      all.add(part(i), queries(), padded_dim);
    for (int i = 0; i < queries(); ++i) {
      float* target = out + (i / heads) * stride + (size_t)(i % heads) * dim;
      const float* source = all.sum + (size_t)i * padded_dim;
      float before = 1.0f, total = all.total[i];
      if (sinks) {
        const float highest = all.highest[i], sink = sinks[i % heads];
        const float peak = highest < sink ? sink : highest;
        before = exp2_lanes(splat(highest - peak))[0];
        total = total * before + exp2_lanes(splat(sink - peak))[0];
      }
      for (int j = 0; j < dim; ++j) target[j] = source[j] * before / total;
    }
  }

 private:
  void load_queries() const {
    const int dim = shape.head_dim, padded_dim = shape.padded_dim();
    for (int i = 0; i < queries(); ++i) {
      float* row = scratch.score;  // not in use yet
      std::memcpy(row, query + (i / heads) * stride + (size_t)(i % heads) * dim,
                  dim * sizeof(float));
      std::fill(row + dim, row + padded_dim, 0.0f);
      scratch.query_unit[i] = Element<C>::factors(
          row, padded_dim, scratch.query + i * (size_t)factor_words<C>(padded_dim));
    }
  }

  void attend_tile(int start, const AttentionSums& sums) const {
    using E = Element<C>;
    const int padded_dim = shape.padded_dim(), padded_block = shape.padded_block();
    const int block_size = shape.block_size, tile = shape.tile();
    const int in_tile = std::min(tile, length() - start);
    const int num_blocks = (in_tile + block_size - 1) / block_size;
    const int first_row = std::max(0, start - first_position);
    // Behind these rows the window of each begins in a later tile.
    const int end_row = std::min(rows, start + tile + window - 1 - first_position);
    const int first = first_row * heads, last = end_row * heads;
    // While keys are read the tile's values are fetched, and with these the next tile's keys.
    const char *key[2 * kTilePositions], *value[kTilePositions];
    const int first_block = start / block_size, end_block = (length() - 1) / block_size + 1;
    const size_t key_bytes = shape.key_bytes(), value_bytes = shape.value_bytes();
    for (int i = 0; i < num_blocks + shape.tile_blocks(); ++i)
      key[i] = keys + place(std::min(first_block + i, end_block - 1)) * key_bytes;
    const char* const* next_key = key + num_blocks;
    for (int i = 0; i < num_blocks; ++i) value[i] = values + place(first_block + i) * value_bytes;
    const int vectors = padded_block / kLanes;
    const size_t vector_bytes = kLanes * E::kWordBytes;
    const size_t key_stride = padded_block * E::kWordBytes;
    const BlockProduct scores{scratch.query, (size_t)factor_words<C>(padded_dim), 0, shape.head_dim,
                              shape.head_dim, key_stride, nullptr, nullptr, scratch.score,
                              score_width()};
    multiply_blocks<C>(
        scores, first, last, num_blocks * vectors,
        [&](int, int i) { return key[i / vectors] + i % vectors * vector_bytes; },
        [&](int, int i) { return value[i / vectors] + i % vectors * vector_bytes; });

    softmax(start, in_tile, num_blocks, first, last, key, value, sums);

    const size_t strip_bytes = (size_t)shape.value_rows() / E::kPair * kPanel * E::kWordBytes;
    auto offset = [&](int i) { return i / 2 * strip_bytes + i % 2 * vector_bytes; };
    BlockProduct weighted{scratch.score, weight_words(), factor_words<C>(padded_block), in_tile,
                          block_size, kPanel * E::kWordBytes, scratch.rescale, scratch.weight_unit,
                          sums.sum, (size_t)padded_dim};
    auto multiply_values = [&](int from, int to) {
      multiply_blocks<C>(
          weighted, from, to, padded_dim / kLanes,
          [&](int block, int i) { return value[block] + offset(i); },
          [&](int block, int i) { return next_key[block] + offset(i); });
    };
    // Rows on the diagonal stop at their own position: a weight of 0 would not hide a NaN. Integers
    // are always finite.
    int row = first_row;
    if constexpr (!std::is_same_v<C, int8_t>)
      for (; row < end_row && first_position + row + 1 < start + in_tile; ++row) {
        weighted.num_values = first_position + row + 1 - start;
        multiply_values(row * heads, (row + 1) * heads);
      }
    weighted.num_values = in_tile;
    multiply_values(row * heads, last);
  }

  size_t place(int block) const { return (size_t)block_table[block] * shape.kv_heads + kv_head; }
  size_t score_width() const { return (size_t)shape.tile_blocks() * shape.padded_block(); }
  size_t weight_words() const { return factor_words<C>((int)score_width()); }

  // Turn a tile's scores of some queries (base 2) into factors of the weights, which are
  // exp2(score - highest), and update the running maximum, total and the factor for earlier sums.
  // In passes, because a row's steps wait for each other, and those of several rows do not.
  void softmax(int start, int in_tile, int num_blocks, int first, int last,
               const char* const* key, const char* const* value,
               const AttentionSums& sums) const {
    const int padded = shape.padded_block(), width = num_blocks * padded;
    float key_scale[kTilePositions * kLanes], value_scale[kTilePositions * kLanes];
    if constexpr (std::is_same_v<C, int8_t>)
      for (int i = 0; i < num_blocks; ++i) {
        const size_t bytes = shape.block_size * sizeof(float);
        std::memcpy(key_scale + i * padded, key[i] + shape.key_codes(), bytes);
        std::memcpy(value_scale + i * padded, value[i] + shape.value_codes(), bytes);
      }
    for (int i = first; i < last; ++i) {
      float* score = scratch.score + i * score_width();
      const int seen = first_position + i / heads + 1 - start;
      if constexpr (std::is_same_v<C, int8_t>)
        for (int j = 0; j < width; j += kLanes)
          store(score + j, __builtin_convertvector(load_as<VecI>(score + j), VecF) *
                               splat(scratch.query_unit[i]) * load(key_scale + j));
      hide(score, num_blocks, std::max(0, seen - window), std::min(seen, in_tile));
      VecF top = load(score);
      for (int j = kLanes; j < width; j += kLanes) top = larger(top, load(score + j));
      const float peak = std::max(sums.highest[i], max_lanes(top));
      scratch.rescale[i] = sums.highest[i] - peak;
      sums.highest[i] = peak;
    }
    for (int i = first / kLanes * kLanes; i < last; i += kLanes)
      store(scratch.rescale + i, exp2_below_one(load(scratch.rescale + i)));
    for (int i = first; i < last; ++i) {
      float* score = scratch.score + i * score_width();
      float* weights = scratch.score + i * weight_words();  // at or before it
      const VecF peak = splat(sums.highest[i]);
      VecF total = {};
      for (int j = 0; j < width; j += kLanes) {
        const VecF weight = exp2_below_one(load(score + j) - peak);
        total += weight;
        // A scale that was never written may be anything.
        if constexpr (std::is_same_v<C, int8_t>)
          store(score + j, weight > VecF{} ? weight * load(value_scale + j) : VecF{});
        else
          Element<C>::put(weight, j, weights);
      }
      scratch.weight_unit[i] = 1.0f;
      if constexpr (std::is_same_v<C, int8_t>)
        scratch.weight_unit[i] = Element<C>::factors(score, width, weights);
      sums.total[i] = sums.total[i] * scratch.rescale[i] + sum_lanes(total);
    }
  }

  // A row sees positions [hidden, valid) of the tile, at least one. Other lanes (padding, memory
  // never written) weigh nothing.
  void hide(float* score, int num_blocks, int hidden, int valid) const {
    const int size = shape.block_size, padded = shape.padded_block();
    constexpr float nothing = -std::numeric_limits<float>::infinity();
    for (int i = 0; i < hidden; ++i) score[i / size * padded + i % size] = nothing;
    for (int block = size == padded ? valid / size : 0; block < num_blocks; ++block)
      for (int i = std::clamp(valid - block * size, 0, size); i < padded; ++i)
        score[block * padded + i] = nothing;
  }
};

}  // namespace penstock
