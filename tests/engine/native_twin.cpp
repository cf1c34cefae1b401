// Prints the bits of products in every format: random file blocks, packed, times random rows.
// Compiled for several instruction sets, with PENSTOCK_PORTABLE, with PENSTOCK_TILES_PLAIN and with
// neither, it must print the same for the same vector width.
#include <cstdio>
#include <random>

#include "tuning.h"
#if defined(__SSE2__)
#include <immintrin.h>
#endif
#if defined(__AMX_INT8__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

using namespace penstock;

constexpr int kColumns = 2 * kPanel, kMostRows = 33, kStride = 640;
// Where it may, a size that ends within a block of 256.
template <class F>
constexpr int kSize = F::kArithmetic == Arithmetic::kBlocks256 ? 512 : kStride;

template <class F>
void print_bits(const Matrix& matrix, const std::vector<float>& rows, int height) {
  const Arithmetic arithmetic = F::kArithmetic;
  const size_t row_bytes = prepared_bytes(arithmetic, kSize<F>);
  std::vector<char> prepared(row_bytes * height);
  prepare(arithmetic, rows.data(), kStride, height, kSize<F>, prepared.data());
  alignas(64) float tile[kTileFloats];
  for (int panel = 0; panel < kColumns / kPanel; ++panel) {
    const char* at = (const char*)matrix.data + panel * panel_bytes(F::kind, kSize<F>);
    const size_t stride = codes_bytes(arithmetic) ? height : row_bytes;
    kernel_for<F>(height, 1)(prepared.data(), stride, height, at, kSize<F>, Ahead{}, tile);
    for (int r = 0; r < height; ++r) {
      uint64_t hash = 0;
      for (int i = 0; i < kPanel; ++i) {
        uint32_t bits;
        std::memcpy(&bits, tile + r * kTileStride + i, sizeof bits);
        hash = (hash ^ bits) * 0x9e3779b97f4a7c15ull;
      }
      std::printf("%d %d %d %016llx\n", (int)F::kind, panel, r, (unsigned long long)hash);
    }
  }
}

template <class F>
void print_format(std::mt19937& random, const std::vector<float>& rows) {
  const int blocks = kSize<F> / F::kBlock;
  std::vector<uint8_t> file((size_t)kColumns * blocks * F::kFileBytes);
  for (uint8_t& byte : file) byte = (uint8_t)random();
  // The first column's codes are the largest, as are the first two rows: sums must hold them.
  std::fill(file.begin(), file.begin() + (size_t)blocks * F::kFileBytes, 0xff);
  // Scales (and plain numbers) below 2, so that all is finite: not the exponent's highest bit.
  const int scale = F::kind == Kind::kQ6_K ? 208 : 0;
  for (size_t i = scale; i < file.size(); i += F::kFileBytes)
    for (int j = 1; j < 8 && i + j < file.size(); j += 2) file[i + j] &= 0xbf;
  if (F::kind == Kind::kMXFP4)
    for (size_t i = 0; i < file.size(); i += F::kFileBytes) file[i] = 112 + file[i] % 16;
  std::vector<const uint8_t*> columns(kColumns);
  for (int i = 0; i < kColumns; ++i) columns[i] = file.data() + (size_t)i * blocks * F::kFileBytes;
  columns[kColumns - 1] = nullptr;
  std::vector<uint8_t> packed(2 * panel_bytes(F::kind, kSize<F>));
  pack_matrix(F::kind, columns.data(), kColumns, kSize<F>, packed.data());
  const Matrix matrix{packed.data(), F::kind};
  if (kHasTiles) rows_for_tiles<F> = 2;
  tile_shape<PackedBlock<F>> = tile_shape<UnpackedBlock<F>> = {kMaxRows, 1};
  for (int height : {1, 3, kMaxRows / 2 + 1, kMaxRows, 17, kMostRows})
    if (height <= kMaxRows || F::kFileBytes != 4) print_bits<F>(matrix, rows, height);
  rows_for_tiles<F> = INT_MAX;
  // The highest one again, of two strips, and both unpacked in registers.
  tile_shape<UnpackedBlock<F>> = {kMaxRows, 2};
  print_bits<F>(matrix, rows, kMaxRows);
  packed_rows<F> = kMaxRows;
  for (int strips : {1, 2}) {
    tile_shape<PackedBlock<F>> = {kMaxRows, strips};
    print_bits<F>(matrix, rows, kMaxRows);
  }
}

// Negative control: a sum that is one too large in one place.
struct WrongTiles : PlainTiles {
  template <int tile>
  void store(void* to, size_t stride) const {
    PlainTiles::store<tile>(to, stride);
    ++*(int32_t*)to;
  }
};

#if defined(__SSE2__)
// Whether `task` computes with denormal numbers, which are slow on many processors.
template <class Task>
bool is_denormal(Task&& task) {
  _mm_setcsr(_mm_getcsr() & ~0x3fu);
  task();
  return _mm_getcsr() & 0x12;
}
#endif

int main() {
#if defined(__AMX_INT8__)
  if (syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* XTILEDATA */) != 0) return 2;
#endif
  if (!tiles_agree<Tiles>() || tiles_agree<WrongTiles>()) return 1;
  static_assert(kMaxRows > 4, "as packed_rows is 4, the highest tile is of unpacked blocks");
  std::mt19937 random(7);
  std::vector<float> rows(kMostRows * kStride);
  for (float& x : rows) x = (float)((int32_t)random() >> 8) * 0x1p-20f;
  std::fill(rows.begin(), rows.begin() + kStride, 1.0f);
  std::fill(rows.begin() + kStride, rows.begin() + 2 * kStride, -1.0f);
  print_format<Q8_0>(random, rows);
  print_format<Q4_0>(random, rows);
  print_format<Q4_1>(random, rows);
  print_format<Q5_0>(random, rows);
  print_format<Q5_1>(random, rows);
  print_format<Q4_K>(random, rows);
  print_format<Q5_K>(random, rows);
  print_format<Q6_K>(random, rows);
  print_format<Int8_32>(random, rows);
  print_format<Int8_128>(random, rows);
  print_format<Int4_32>(random, rows);
  print_format<Int4_128>(random, rows);
  print_format<Uint4_32>(random, rows);
  print_format<Uint4_128>(random, rows);
  print_format<Int8Rows>(random, rows);
  print_format<IQ4_NL>(random, rows);
  print_format<IQ4_XS>(random, rows);
  print_format<MXFP4>(random, rows);
#ifdef WITH_BF16
  print_format<BF16Pairs>(random, rows);
#endif
#if defined(__SSE2__)
  volatile float small = 1e-30f;
  if (is_denormal(tune) || !is_denormal([&] { small *= small; })) return 3;
#endif
}
