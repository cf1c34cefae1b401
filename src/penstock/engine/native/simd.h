// Portable vectors: the compiler's vector extensions at the width of the instruction set.
//
// Every float operation whose rounding matters is written with these types rather than left to the
// auto-vectoriser: it may peel a loop by address, and a value would then depend on where it lies.
// Likewise a multiply-add is fused where `fused` says so and nowhere else: left to the compiler
// (-ffp-contract), a * b + c * d is rounded differently in different tile shapes.
#pragma once

#if defined(__FMA__) || defined(__AVX512F__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace penstock {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kRegisters = 32;
#else
constexpr int kRegisters = 16;
#endif

// Columns of one packed weight panel.
constexpr int kPanel = 2 * kLanes;

typedef float VecF __attribute__((vector_size(kLanes * 4)));
typedef int32_t VecI __attribute__((vector_size(kLanes * 4)));
typedef uint32_t VecU __attribute__((vector_size(kLanes * 4)));
typedef uint16_t VecH __attribute__((vector_size(kLanes * 2)));

struct Bf16 {
  uint16_t bits;
};

#define PENSTOCK_INLINE static inline __attribute__((always_inline))

// x - 0 is x for every x, -0 and NaN included, so this compiles to a bare broadcast.
PENSTOCK_INLINE VecF splat(float x) { return x - VecF{}; }
PENSTOCK_INLINE VecI splat_int(int32_t x) { return x + VecI{}; }

// a * b + c in one rounding, or in two on processors without the instruction.
PENSTOCK_INLINE VecF fused(VecF a, VecF b, VecF c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__FMA__)
  return _mm256_fmadd_ps(a, b, c);
#elif defined(__aarch64__)
  return vfmaq_f32(c, a, b);
#else
  return a * b + c;
#endif
}

// Have a running sum in a register here. Compilers otherwise reorder integer sums, compute all
// products first, and spill them.
template <class V>
PENSTOCK_INLINE void keep(V& sum) {
#if defined(__AVX512F__)
  asm("" : "+v"(sum));
#elif defined(__x86_64__)
  asm("" : "+x"(sum));
#elif defined(__aarch64__)
  asm("" : "+w"(sum));
#endif
}

template <class V, class T>
PENSTOCK_INLINE V load_as(const T* p) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

PENSTOCK_INLINE VecF load(const float* p) { return load_as<VecF>(p); }
PENSTOCK_INLINE VecF load(const Bf16* p) {
  return (VecF)(__builtin_convertvector(load_as<VecH>(p), VecU) << 16);
}
PENSTOCK_INLINE void store(float* p, VecF v) { std::memcpy(p, &v, sizeof v); }

PENSTOCK_INLINE float to_float(float x) { return x; }
PENSTOCK_INLINE float to_float(Bf16 x) {
  uint32_t bits = (uint32_t)x.bits << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

PENSTOCK_INLINE void convert(float x, float* out) { *out = x; }
// Round to nearest, ties to even; a NaN stays one.
PENSTOCK_INLINE void convert(float x, Bf16* out) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  if (x != x) {
    out->bits = 0x7fc0;
  } else {
    out->bits = (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
  }
}

// Lane sums and maxima by halving: one fixed order. A recursion, because compilers keep a loop's
// lanes in memory.
template <int kWidth, class Add>
PENSTOCK_INLINE float halve(const float* lane, Add&& add) {
  if constexpr (kWidth == 1) {
    return lane[0];
  } else {
    float half[kWidth / 2];
    for (int i = 0; i < kWidth / 2; ++i) half[i] = add(lane[i], lane[i + kWidth / 2]);
    return halve<kWidth / 2>(half, add);
  }
}
PENSTOCK_INLINE float sum_lanes(VecF v) {
  float lane[kLanes];
  store(lane, v);
  return halve<kLanes>(lane, [](float a, float b) { return a + b; });
}
PENSTOCK_INLINE float max_lanes(VecF v) {
  float lane[kLanes];
  store(lane, v);
  return halve<kLanes>(lane, [](float a, float b) { return a < b ? b : a; });
}
PENSTOCK_INLINE VecF larger(VecF a, VecF b) { return a < b ? b : a; }

// The lanes' sum or maximum, in any order. With masks, because the intrinsics without one warn.
template <class Join>
PENSTOCK_INLINE int32_t join_lanes(VecI v, Join&& join) {
#if defined(__AVX512F__)
  v = join(v, (VecI)_mm512_maskz_shuffle_i64x2(0xff, (__m512i)v, (__m512i)v, 0x4e));
  v = join(v, (VecI)_mm512_maskz_shuffle_i64x2(0xff, (__m512i)v, (__m512i)v, 0xb1));
  v = join(v, (VecI)_mm512_maskz_shuffle_epi32(0xffff, (__m512i)v, (_MM_PERM_ENUM)0x4e));
  v = join(v, (VecI)_mm512_maskz_shuffle_epi32(0xffff, (__m512i)v, (_MM_PERM_ENUM)0xb1));
  return v[0];
#else
  int32_t joined = v[0];
  for (int i = 1; i < kLanes; ++i) joined = join(joined, (int32_t)v[i]);
  return joined;
#endif
}
PENSTOCK_INLINE int32_t largest_lane(VecI v) {
  return join_lanes(v, [](auto a, auto b) { return a < b ? b : a; });
}
PENSTOCK_INLINE int32_t sum_lanes(VecI v) {
  return join_lanes(v, [](auto a, auto b) { return a + b; });
}

PENSTOCK_INLINE bool any(VecI mask) {
  uint64_t word[kLanes / 2];
  std::memcpy(word, &mask, sizeof word);
  uint64_t all = 0;
  for (uint64_t w : word) all |= w;
  return all != 0;
}

// 2^x with a relative error under 1e-7; exactly 0 below 2^-125 and capped at 2^127. NaN stays NaN.
// 2^f on [-1/2, 1/2] is the minimax polynomial of degree 6 in relative error.
PENSTOCK_INLINE VecF exp2_lanes(VecF x) {
  const VecF lowest = splat(-125.0f), highest = splat(127.0f);
  const VecF round_to_int = splat(12582912.0f);  // 1.5 * 2^23
  VecF y = x < lowest ? lowest : x;
  y = y > highest ? highest : y;
  VecF shifted = y + round_to_int;
  VecF f = y - (shifted - round_to_int);
  VecF p = splat(0x1.41d334p-13f);
  p = fused(p, f, splat(0x1.5f456ap-10f));
  p = fused(p, f, splat(0x1.3b2dbcp-7f));
  p = fused(p, f, splat(0x1.c6aed4p-5f));
  p = fused(p, f, splat(0x1.ebfbdap-3f));
  p = fused(p, f, splat(0x1.62e43p-1f));
  p = fused(p, f, splat(1.0f));
  VecF scaled = (VecF)((VecI)p + ((VecI)shifted << 23));
  return x < lowest ? VecF{} : scaled;
}

constexpr float kLog2E = 1.44269504088896340736f;

PENSTOCK_INLINE VecF sigmoid(VecF x) {
  return splat(1.0f) / (splat(1.0f) + exp2_lanes(x * splat(-kLog2E)));
}

PENSTOCK_INLINE VecF silu(VecF x) {
  return x / (splat(1.0f) + exp2_lanes(x * splat(-kLog2E)));
}

// x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2, as x sigmoid(2 ...): no small difference.
PENSTOCK_INLINE VecF gelu_tanh(VecF x) {
  constexpr float kSlope = -2 * kLog2E * 0.797884560802865356f;
  const VecF steepness = fused(x * x, splat(kSlope * 0.044715f), splat(kSlope));
  return x / (splat(1.0f) + exp2_lanes(x * steepness));
}

// gate sigmoid(1.702 gate) (up + 1), both clamped at 7, as gpt-oss has it. NaN stays NaN.
PENSTOCK_INLINE VecF clamped(VecF gate, VecF up) {
  const VecF most = splat(7.0f);
  gate = gate > most ? most : gate;
  up = up > most ? most : up < -most ? -most : up;
  return gate / (splat(1.0f) + exp2_lanes(gate * splat(-1.702f * kLog2E))) * (up + splat(1.0f));
}

// cap tanh(x / cap)
PENSTOCK_INLINE VecF softcap(VecF x, float cap) {
  const VecF grown = exp2_lanes(x * splat(2 * kLog2E / cap));
  return splat(cap) - splat(2 * cap) / (splat(1.0f) + grown);
}

PENSTOCK_INLINE int round_up(int n, int multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

// out = x / sqrt(mean(x^2) + eps) * weight over n values. All three are padded to a multiple of
// kLanes, x with zeros. Four running sums, then one fixed tree.
static __attribute__((noinline)) void rms_norm(const float* x, const float* weight, int n,
                                               float eps, float* out) {
  VecF sums[4] = {};
  const int padded = round_up(n, kLanes);
  int i = 0;
  for (; i + 4 * kLanes <= padded; i += 4 * kLanes)
    for (int j = 0; j < 4; ++j) {
      VecF v = load(x + i + j * kLanes);
      sums[j] = fused(v, v, sums[j]);
    }
  for (; i < padded; i += kLanes) {
    VecF v = load(x + i);
    sums[0] = fused(v, v, sums[0]);
  }
  float mean = sum_lanes((sums[0] + sums[1]) + (sums[2] + sums[3])) / (float)n;
  VecF scale = splat(1.0f / std::sqrt(mean + eps));
  for (i = 0; i < padded; i += kLanes) store(out + i, load(x + i) * scale * load(weight + i));
}

}  // namespace penstock
