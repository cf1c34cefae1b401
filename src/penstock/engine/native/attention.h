// Causal attention over the paged cache: online softmax over tiles of a fixed number of positions,
// always from position 0, so a row's arithmetic depends on nothing but its own position.
//
// Keys are stored [block][kv_head][head_dim][block_size] and values [block][kv_head][block_size]
// [head_dim] (last axes padded to whole vectors): both products are then sums of broadcast times
// vector, and the query heads that share a key head read it once.
#pragma once

#include <limits>

#include "gemm.h"

namespace penstock {

constexpr int kTilePositions = 128;
constexpr int kQueriesPerTask = 36;
// Rows up to which attention waits for memory rather than for the processor.
constexpr int kFewRows = 4;

struct AttentionShape {
  int head_dim, kv_heads, block_size;

  int padded_dim() const { return round_up(head_dim, kLanes); }
  int padded_block() const { return round_up(block_size, kLanes); }
  int tile_blocks() const {
    return block_size >= kTilePositions ? 1 : kTilePositions / block_size;
  }
  size_t key_head() const { return (size_t)head_dim * padded_block(); }
  size_t value_head() const { return (size_t)block_size * padded_dim(); }
};

struct AttentionScratch {
  float *query, *score, *sum, *highest, *total, *rescale;
};

// c[Rows][Vecs lanes] = rescale[Rows] * c + a x b (or just a x b without `rescale`), b being rows
// of `ldb` values in consecutive blocks of `block_rows` rows, `num_rows` in all. Few rows wait for
// memory, and blocks lie anywhere in it, so the hardware cannot foresee them: then the block after
// this one is fetched while this one is read, and `blocks` has one entry past the last.
template <int Rows, int Vecs, class T>
static __attribute__((noinline)) void blocked_kernel(const float* a, size_t lda, int a_block,
                                                     const T* const* blocks, int ldb,
                                                     int block_rows, int num_rows, int column,
                                                     const float* rescale, float* c, size_t ldc) {
  VecF sum[Rows][Vecs] = {};
  if (rescale)
    for (int r = 0; r < Rows; ++r)
      for (int j = 0; j < Vecs; ++j)
        sum[r][j] = load(c + r * ldc + column + j * kLanes) * splat(rescale[r]);
  for (int done = 0; done < num_rows; done += block_rows, ++blocks, a += a_block) {
    const T* b = blocks[0] + column;
    const char* ahead = (const char*)(blocks[1] + column);
    const int count = num_rows - done < block_rows ? num_rows - done : block_rows;
    for (int k = 0; k < count; ++k, b += ldb, ahead += ldb * sizeof(T)) {
      if (Rows <= kFewRows)
        for (size_t line = 0; line < Vecs * kLanes * sizeof(T); line += 64)
          __builtin_prefetch(ahead + line);
      VecF row[Vecs];
#pragma GCC unroll 8
      for (int j = 0; j < Vecs; ++j) row[j] = load(b + j * kLanes);
#pragma GCC unroll 12
      for (int r = 0; r < Rows; ++r) {
        VecF x = splat(a[r * lda + k]);
#pragma GCC unroll 8
        for (int j = 0; j < Vecs; ++j) sum[r][j] = fused(x, row[j], sum[r][j]);
      }
    }
  }
  for (int r = 0; r < Rows; ++r)
    for (int j = 0; j < Vecs; ++j) store(c + r * ldc + column + j * kLanes, sum[r][j]);
}

template <class T>
struct BlockedProduct {
  const float* a;
  size_t lda;
  int a_block;
  const T* const* blocks;
  int ldb, block_rows, num_rows;
  const float* rescale;
  float* c;
  size_t ldc;

  template <int Rows, int Vecs>
  PENSTOCK_INLINE void columns(const BlockedProduct& p, int row, int& column, int end) {
    for (; column + Vecs * kLanes <= end; column += Vecs * kLanes)
      blocked_kernel<Rows, Vecs, T>(p.a + row * p.lda, p.lda, p.a_block, p.blocks, p.ldb,
                                    p.block_rows, p.num_rows, column,
                                    p.rescale ? p.rescale + row : nullptr, p.c + row * p.ldc,
                                    p.ldc);
  }

  template <int Rows = kMaxRows>
  void rows(int row, int height, int end) const {
    if constexpr (Rows > 1)
      if (height < Rows) return rows<Rows - 1>(row, height, end);
    int column = 0;
    if constexpr (Rows * 8 <= 2 * kMaxRows) columns<Rows, 8>(*this, row, column, end);
    if constexpr (Rows * 4 <= 2 * kMaxRows) columns<Rows, 4>(*this, row, column, end);
    columns<Rows, 2>(*this, row, column, end);
    columns<Rows, 1>(*this, row, column, end);
  }

  // Rows [first, last), all columns; `width` is a multiple of kLanes.
  void run(int first, int last, int width) const {
    for_row_blocks(last - first, [&](int row, int height) { rows(first + row, height, width); });
  }
};

// Blocks of keys whose scores are computed side by side: a few queries with one block's positions
// are too few sums to keep the multiply-adds busy.
constexpr int blocks_at_once(int rows) { return rows == 1 ? 4 : rows <= 3 ? 2 : 1; }

// c[Rows][Blocks * padded_block] = a[Rows][dim] x keys of Blocks blocks, each [dim][padded_block];
// as many blocks after them are fetched meanwhile.
template <int Rows, int Blocks, int Vecs, class T>
static __attribute__((noinline)) void score_kernel(const float* a, int dim, const T* const* blocks,
                                                   int padded_block, int column, float* c,
                                                   size_t ldc) {
  VecF sum[Rows][Blocks][Vecs] = {};
  for (int k = 0, at = column; k < dim; ++k, at += padded_block) {
#pragma GCC unroll 4
    for (int b = 0; b < Blocks; ++b) {
      if (Rows <= kFewRows)
        for (size_t line = 0; line < Vecs * kLanes * sizeof(T); line += 64)
          __builtin_prefetch((const char*)(blocks[Blocks + b] + at) + line);
#pragma GCC unroll 4
      for (int j = 0; j < Vecs; ++j) {
        VecF key = load(blocks[b] + at + j * kLanes);
#pragma GCC unroll 4
        for (int r = 0; r < Rows; ++r)
          sum[r][b][j] = fused(splat(a[(size_t)r * dim + k]), key, sum[r][b][j]);
      }
    }
  }
  for (int r = 0; r < Rows; ++r)
    for (int b = 0; b < Blocks; ++b)
      for (int j = 0; j < Vecs; ++j)
        store(c + r * ldc + b * padded_block + column + j * kLanes, sum[r][b][j]);
}

template <class T>
struct Scores {
  const float* query;
  int dim;
  const T* const* blocks;
  int num_blocks, padded_block;
  float* score;
  size_t stride;

  // All columns of blocks from `block` on, Blocks at a time; returns where fewer are left.
  template <int Rows, int Blocks>
  int columns(int row, int block) const {
    for (; block + Blocks <= num_blocks; block += Blocks) {
      const float* a = query + (size_t)row * dim;
      float* c = score + row * stride + (size_t)block * padded_block;
      int column = 0;
      for (; column + 2 * kLanes <= padded_block; column += 2 * kLanes)
        score_kernel<Rows, Blocks, 2>(a, dim, blocks + block, padded_block, column, c, stride);
      for (; column < padded_block; column += kLanes)
        score_kernel<Rows, Blocks, 1>(a, dim, blocks + block, padded_block, column, c, stride);
    }
    return block;
  }

  template <int Rows = kMaxRows>
  void rows(int row, int height) const {
    if constexpr (Rows > 1)
      if (height < Rows) return rows<Rows - 1>(row, height);
    int block = 0;
    if constexpr (blocks_at_once(Rows) > 1) block = columns<Rows, blocks_at_once(Rows)>(row, 0);
    columns<Rows, 1>(row, block);
  }

  void run(int first, int last) const {
    for_row_blocks(last - first, [&](int row, int height) { rows(first + row, height); });
  }
};

// Turn one row of scores (base 2) into weights exp2(score - highest) and update the running
// maximum, total and the factor for earlier sums. The row sees positions [hidden, valid) of the tile,
// at least one. Other lanes (padding, memory never written) become 0.
static __attribute__((noinline)) void softmax_tile(float* score, const AttentionShape& shape,
                                                   int num_blocks, int hidden, int valid,
                                                   float* highest, float* total, float* rescale) {
  const int padded = shape.padded_block();
  for (int i = 0; i < hidden; ++i)
    score[i / shape.block_size * padded + i % shape.block_size] =
        -std::numeric_limits<float>::infinity();
  for (int block = 0; block < num_blocks; ++block) {
    int count = valid - block * shape.block_size;
    count = count < 0 ? 0 : count > shape.block_size ? shape.block_size : count;
    for (int i = count; i < padded; ++i)
      score[block * padded + i] = -std::numeric_limits<float>::infinity();
  }
  const int width = num_blocks * padded;
  VecF top = load(score);
  for (int i = kLanes; i < width; i += kLanes) top = larger(top, load(score + i));
  float peak = max_lanes(top);
  peak = *highest < peak ? peak : *highest;
  VecF sum = {};
  for (int i = 0; i < width; i += kLanes) {
    VecF weight = exp2_lanes(load(score + i) - splat(peak));
    store(score + i, weight);
    sum += weight;
  }
  *rescale = exp2_lanes(splat(*highest - peak))[0];
  *total = *total * *rescale + sum_lanes(sum);
  *highest = peak;
}

// One sequence's rows at consecutive positions from `first_position`, for `heads` query heads that
// share `kv_head`. `query` and `out` point at the first row's first head; queries are scaled by
// log2(e) / sqrt(head_dim) already. A row sees `window` positions, its own included. rows * heads is
// at most what the scratch was made for.
template <class T>
static void attend(const AttentionShape& shape, const T* keys, const T* values,
                   const int32_t* block_table, const float* query, float* out, size_t stride,
                   int first_position, int rows, int heads, int kv_head, int window,
                   const AttentionScratch& scratch) {
  const int dim = shape.head_dim, padded_dim = shape.padded_dim();
  const int block_size = shape.block_size, padded_block = shape.padded_block();
  const int tile = shape.tile_blocks() * block_size;
  const size_t score_stride = (size_t)shape.tile_blocks() * padded_block;
  const int queries = rows * heads;
  for (int i = 0; i < queries; ++i) {
    std::memcpy(scratch.query + (size_t)i * dim,
                query + (i / heads) * stride + (size_t)(i % heads) * dim, dim * sizeof(float));
    scratch.highest[i] = -std::numeric_limits<float>::infinity();
    scratch.total[i] = 0.0f;
  }
  std::memset(scratch.sum, 0, (size_t)queries * padded_dim * sizeof(float));

  const int length = first_position + rows;
  const int first_seen = first_position + 1 > window ? first_position + 1 - window : 0;
  for (int start = first_seen / tile * tile; start < length; start += tile) {
    const int in_tile = length - start < tile ? length - start : tile;
    const int num_blocks = (in_tile + block_size - 1) / block_size;
    const int first_row = start > first_position ? start - first_position : 0;
    // Behind these rows the window of each begins in a later tile.
    const int end_row = std::min(rows, start + tile + window - 1 - first_position);
    // Keys, then values, then the next tile's first keys: the order in which they are read.
    const T* blocks[2 * kTilePositions + 1];
    const T** value_blocks = blocks + num_blocks;
    const int first_block = start / block_size;
    auto head = [&](int block) { return (size_t)block_table[block] * shape.kv_heads + kv_head; };
    for (int j = 0; j < num_blocks; ++j) {
      blocks[j] = keys + head(first_block + j) * shape.key_head();
      value_blocks[j] = values + head(first_block + j) * shape.value_head();
    }
    const bool is_last = start + tile >= length;
    value_blocks[num_blocks] =
        is_last ? blocks[0] : keys + head(first_block + num_blocks) * shape.key_head();

    Scores<T>{scratch.query, dim, blocks, num_blocks, padded_block, scratch.score, score_stride}.run(
        first_row * heads, end_row * heads);
    for (int i = first_row * heads; i < end_row * heads; ++i) {
      const int seen = first_position + i / heads + 1 - start;
      softmax_tile(scratch.score + i * score_stride, shape, num_blocks, std::max(0, seen - window),
                   seen < in_tile ? seen : in_tile, scratch.highest + i, scratch.total + i,
                   scratch.rescale + i);
    }
    BlockedProduct<T> sums{scratch.score, score_stride, padded_block, value_blocks, padded_dim,
                           block_size, in_tile, scratch.rescale, scratch.sum, (size_t)padded_dim};
    // Rows on the diagonal stop at their own position: a weight of 0 would not hide a NaN.
    int row = first_row;
    for (; row < end_row && first_position + row + 1 < start + in_tile; ++row) {
      sums.num_rows = first_position + row + 1 - start;
      sums.run(row * heads, (row + 1) * heads, padded_dim);
    }
    sums.num_rows = in_tile;
    sums.run(row * heads, end_row * heads, padded_dim);
  }

  for (int i = 0; i < queries; ++i) {
    float* target = out + (i / heads) * stride + (size_t)(i % heads) * dim;
    const float* source = scratch.sum + (size_t)i * padded_dim;
    for (int j = 0; j < dim; ++j) target[j] = source[j] / scratch.total[i];
  }
}

}  // namespace penstock
