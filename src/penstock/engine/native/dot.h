// Products of small integers by the processor's best instruction. int32 sums are exact, so all give
// equal bits. PENSTOCK_PORTABLE takes plain C++ instead, for comparison.
#pragma once

#include "simd.h"

namespace penstock {

typedef int8_t VecS __attribute__((vector_size(kLanes)));
typedef int8_t VecS4 __attribute__((vector_size(4 * kLanes)));
typedef int8_t VecS2 __attribute__((vector_size(2 * kLanes)));
typedef int16_t VecH2 __attribute__((vector_size(4 * kLanes)));

#if defined(PENSTOCK_PORTABLE)
#define PENSTOCK_DOT_PLAIN
#elif defined(__AVX512VNNI__)
#define PENSTOCK_DOT_VNNI
#elif defined(__AVXVNNI__) && !defined(__AVX512F__)
#define PENSTOCK_DOT_AVXVNNI
#elif defined(__AVX512BW__)
#define PENSTOCK_DOT_AVX512
#elif defined(__AVX2__) && !defined(__AVX512F__)
#define PENSTOCK_DOT_AVX2
#elif defined(__ARM_FEATURE_MATMUL_INT8)
#define PENSTOCK_DOT_I8MM
#elif defined(__ARM_FEATURE_DOTPROD)
#define PENSTOCK_DOT_NEON
#else
#define PENSTOCK_DOT_PLAIN
#endif

// Without VNNI, products are summed by pairs in 16 bits.
#if defined(PENSTOCK_DOT_AVX512) || defined(PENSTOCK_DOT_AVX2)
constexpr bool kDotsByPairs = true;
#else
constexpr bool kDotsByPairs = false;
#endif

// Whether codes may be at most 127, because pairs of larger ones do not fit 16 bits or because
// bytes are signed: larger ones are multiplied with their signs.
#if defined(PENSTOCK_DOT_NEON)
constexpr bool kDotsSmallCodes = true;
#else
constexpr bool kDotsSmallCodes = kDotsByPairs;
#endif

// sum + the dot product of each lane's four unsigned codes with the four signed bytes of `a`; where
// they are summed by pairs, two sums of 16 bits in each lane. kSigned: of signed codes.
template <bool kSigned>
PENSTOCK_INLINE VecI add_dots(VecI sum, VecI codes, int32_t a) {
#if defined(PENSTOCK_DOT_VNNI)
  return (VecI)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, _mm512_set1_epi32(a));
#elif defined(PENSTOCK_DOT_AVXVNNI)
  return (VecI)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)codes, _mm256_set1_epi32(a));
#elif defined(PENSTOCK_DOT_AVX512)
  __m512i w = (__m512i)codes, x = _mm512_set1_epi32(a);
  if (kSigned) {  // signs go to `a`
    x = _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(w), __m512i{}, x);
    w = _mm512_abs_epi8(w);
  }
  return (VecI)_mm512_add_epi16((__m512i)sum, _mm512_maddubs_epi16(w, x));
#elif defined(PENSTOCK_DOT_AVX2)
  __m256i w = (__m256i)codes, x = _mm256_set1_epi32(a);
  if (kSigned) {
    x = _mm256_sign_epi8(x, w);
    w = _mm256_abs_epi8(w);
  }
  return (VecI)_mm256_add_epi16((__m256i)sum, _mm256_maddubs_epi16(w, x));
#elif defined(PENSTOCK_DOT_I8MM)
  return (VecI)vusdotq_s32((int32x4_t)sum, (uint8x16_t)codes, (int8x16_t)vdupq_n_s32(a));
#elif defined(PENSTOCK_DOT_NEON)
  return (VecI)vdotq_s32((int32x4_t)sum, (int8x16_t)codes, (int8x16_t)vdupq_n_s32(a));
#else
  const VecU bytes = (VecU)codes;
  for (int i = 0; i < 4; ++i)
    sum += (VecI)(bytes >> (8 * i) & 0xff) * (int32_t)(int8_t)((uint32_t)a >> (8 * i));
  return sum;
#endif
}

// sum + the dot product of each lane's two 16-bit numbers with those of `a`.
PENSTOCK_INLINE VecI dot_pairs(VecI sum, VecI pairs, VecI a) {
#if defined(PENSTOCK_DOT_VNNI)
  return (VecI)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)pairs, (__m512i)a);
#elif defined(PENSTOCK_DOT_AVXVNNI)
  return (VecI)_mm256_dpwssd_avx_epi32((__m256i)sum, (__m256i)pairs, (__m256i)a);
#elif defined(PENSTOCK_DOT_AVX512)
  return sum + (VecI)_mm512_madd_epi16((__m512i)pairs, (__m512i)a);
#elif defined(PENSTOCK_DOT_AVX2)
  return sum + (VecI)_mm256_madd_epi16((__m256i)pairs, (__m256i)a);
#else
  return sum + (pairs << 16 >> 16) * (a << 16 >> 16) + (pairs >> 16) * (a >> 16);
#endif
}

#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
constexpr bool kDotsBf16 = true;
#else
constexpr bool kDotsBf16 = false;
#endif

// sum + the products of each lane's two bfloat16 numbers with those of `a`, the second pair first.
PENSTOCK_INLINE VecF dot_bf16(VecF sum, VecU pairs, uint32_t a) {
#if defined(__AVX512BF16__) && !defined(PENSTOCK_PORTABLE)
  return (VecF)_mm512_dpbf16_ps((__m512)sum, (__m512bh)pairs,
                                (__m512bh)_mm512_set1_epi32((int32_t)a));
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC) && !defined(PENSTOCK_PORTABLE)
  // Not vbfdotq_f32, which has twice the rate but rounds to odd.
  const bfloat16x8_t w = (bfloat16x8_t)pairs, x = (bfloat16x8_t)vdupq_n_u32(a);
  return vbfmlalbq_f32(vbfmlaltq_f32(sum, w, x), w, x);
#else
  const VecU x = a + VecU{};
  sum = fused((VecF)(x & 0xffff0000u), (VecF)(pairs & 0xffff0000u), sum);
  return fused((VecF)(x << 16), (VecF)(pairs << 16), sum);
#endif
}

// Of every byte of `codes`, each below 16, that byte of the table.
PENSTOCK_INLINE VecI look_up(const uint8_t* table, VecI codes) {
#if defined(__AVX512BW__) && !defined(PENSTOCK_PORTABLE)
  const __m512i values = _mm512_maskz_broadcast_i32x4(0xffff, load_as<__m128i>(table));
  return (VecI)_mm512_shuffle_epi8(values, (__m512i)codes);
#elif defined(__AVX2__) && !defined(PENSTOCK_PORTABLE)
  const __m256i values = _mm256_broadcastsi128_si256(load_as<__m128i>(table));
  return (VecI)_mm256_shuffle_epi8(values, (__m256i)codes);
#elif defined(__aarch64__) && !defined(PENSTOCK_PORTABLE)
  return (VecI)vqtbl1q_u8(load_as<uint8x16_t>(table), (uint8x16_t)codes);
#else
  uint8_t bytes[4 * kLanes];
  std::memcpy(bytes, &codes, sizeof bytes);
  for (uint8_t& byte : bytes) byte = table[byte];
  return load_as<VecI>(bytes);
#endif
}

// Two bytes for each lane, each widened to 16 bits. Written out: compilers take a converted vector
// of bytes apart. With a mask, because the intrinsics without one warn.
PENSTOCK_INLINE VecI load_byte_pairs(const int8_t* p) {
#if defined(__AVX512BW__) && !defined(PENSTOCK_PORTABLE)
  return (VecI)_mm512_maskz_cvtepi8_epi16(~0u, load_as<__m256i>(p));
#elif defined(__AVX2__) && !defined(PENSTOCK_PORTABLE)
  return (VecI)_mm256_cvtepi8_epi16(load_as<__m128i>(p));
#else
  return (VecI)__builtin_convertvector(load_as<VecS2>(p), VecH2);
#endif
}

// One float16 number for each lane.
PENSTOCK_INLINE VecF load_half(const uint16_t* p) {
#if defined(__AVX512F__) && !defined(PENSTOCK_PORTABLE)
  return _mm512_maskz_cvtph_ps(0xffff, load_as<__m256i>(p));  // as in load_byte_pairs
#elif defined(__F16C__) && !defined(PENSTOCK_PORTABLE)
  return _mm256_cvtph_ps(load_as<__m128i>(p));
#elif defined(__aarch64__) && !defined(PENSTOCK_PORTABLE)
  return vcvt_f32_f16(load_as<float16x4_t>(p));
#else
  const VecU bits = __builtin_convertvector(load_as<VecH>(p), VecU);
  // Exponents differ by 112; what is infinite or NaN stays so.
  const VecF size = (VecF)((bits & 0x7fff) << 13) * splat(0x1p112f);
  const VecU special = (VecU)((bits & 0x7c00) == 0x7c00) & 0x7f800000;
  return (VecF)((VecU)size | special | (bits & 0x8000) << 16);
#endif
}

PENSTOCK_INLINE float half_to_float(uint16_t half) {
  const uint32_t bits = (uint32_t)(half & 0x7fff) << 13;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  value *= 0x1p112f;
  if ((half & 0x7c00) == 0x7c00) value = half & 0x3ff ? NAN : INFINITY;
  return half & 0x8000 ? -value : value;
}

}  // namespace penstock
