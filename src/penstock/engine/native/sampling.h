// Greedy and coupled (Gumbel) sampling of a row of logits.
//
// The noise is engine/sampling/noise.py's, integers bit for bit: see there for its definition.
#pragma once

#include <algorithm>
#include <limits>

#include "simd.h"

namespace penstock {

PENSTOCK_INLINE uint64_t mix64(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

constexpr int kDraftSalt = 1;  // noise.py's Salt.DRAFT

// How one row is sampled; temperature 0 is greedy and needs no key. is_drawn: from the drafter's own
// distribution, and not as a guess at the target's sample.
struct RowSampling {
  double temperature;
  uint32_t key_low, key_high;
  bool is_drawn;

  // A temperature under 1e-10 decides as 1e-10 does, and keeps clear of infinities.
  static RowSampling make(double temperature, uint64_t seed, uint64_t position, int salt) {
    if (temperature > 0 && temperature < 1e-10) temperature = 1e-10;
    const uint64_t golden = 0x9E3779B97F4A7C15ull;
    uint64_t key = mix64(mix64(seed + golden) + golden * (4 * position + (uint64_t)salt + 1));
    return {temperature, (uint32_t)key, (uint32_t)(key >> 32), salt == kDraftSalt};
  }
};

// The best token so far, the lowest id on ties. Values are double, so that adding noise to a large
// logit makes no ties.
struct Best {
  double value = -std::numeric_limits<double>::infinity();
  int32_t token = 0;

  void offer(double candidate, int32_t id) {
    if (candidate > value) {
      value = candidate;
      token = id;
    }
  }
};

template <class U>
PENSTOCK_INLINE U noise_hash(U token, U low, U high) {
  U x = token * 0x9E3779B1u + low;
  x = (x ^ (x >> 16)) * 0x21F0AAADu + high;
  x = (x ^ (x >> 15)) * 0x735A2D97u;
  return x ^ (x >> 16);
}

static inline float gumbel(uint32_t hash) {
  float v = ((float)hash + 0.5f) * 0x1p-32f;
  const float largest_below_one = 1.0f - 0x1p-24f;
  v = v < largest_below_one ? v : largest_below_one;
  return -std::log(-std::log1p(-v));
}

// An upper bound of the Gumbel noise without a logarithm: -log(-log1p(-v)) <= -log(v), and the bits
// of a float, read as an integer, bound log2 of it from below.
PENSTOCK_INLINE VecF gumbel_bound(VecU hash) {
  VecU even = hash >> 1;  // conversion of unsigned lanes is slow before AVX-512
  VecF v = __builtin_convertvector((VecI)even, VecF) * splat(0x1p-31f) + splat(0x1p-33f);
  VecF log2_v = __builtin_convertvector((VecI)v, VecF) * splat(0x1p-23f) - splat(127.0f);
  return log2_v * splat(-0.693147f) + splat(0.01f);
}

PENSTOCK_INLINE VecI lane_index() {
  VecI lane;
  for (int i = 0; i < kLanes; ++i) lane[i] = i;
  return lane;
}

constexpr int kScan = 4 * kLanes;

// The token that `row` samples from logits[0, count). The exact noise takes two logarithms, so it
// is computed only where its bound could win: for about a dozen tokens of 4,096. A logit of
// -inf never wins; -1 where they are not finite: one is NaN or +inf, or all are -inf.
static __attribute__((noinline)) int32_t sample_row(const float* logits, int count,
                                                    const RowSampling& row) {
  const bool greedy = row.temperature == 0;
  const VecU low = (VecU)splat_int((int32_t)row.key_low);
  const VecU high = (VecU)splat_int((int32_t)row.key_high);
  const VecF inverse = splat(greedy ? 1.0f : (float)(1 / row.temperature));
  const VecF never = splat(-std::numeric_limits<float>::infinity());
  const VecF largest = splat(std::numeric_limits<float>::max());
  Best best;
  VecI finite = ~VecI{};
  for (int first = 0; first < count; first += kScan) {
    const int size = count - first < kScan ? count - first : kScan;
    alignas(64) float padded[kScan];
    const float* piece = logits + first;
    if (size < kScan) {
      std::fill(std::copy(piece, piece + size, padded), padded + kScan,
                -std::numeric_limits<float>::infinity());
      piece = padded;
    }
    VecF bound[4];
    VecI promising = {};
    for (int j = 0; j < 4; ++j) {
      const VecF logit = load(piece + j * kLanes);
      finite &= logit <= largest;
      bound[j] = logit * inverse;
      if (!greedy) {
        VecU token = (VecU)(lane_index() + splat_int(first + j * kLanes));
        VecF slack = (bound[j] < VecF{} ? -bound[j] : bound[j]) * splat(1e-6f);
        bound[j] += slack + gumbel_bound(noise_hash(token, low, high));
      }
      promising |= (bound[j] >= splat((float)best.value)) & (logit > never);
    }
    if (!any(promising)) continue;
    for (int i = 0; i < size; ++i) {
      if (!(bound[i / kLanes][i % kLanes] >= best.value)) continue;
      const int32_t id = first + i;
      const float noise =
          greedy ? 0.0f : gumbel(noise_hash((uint32_t)id, row.key_low, row.key_high));
      best.offer(greedy ? piece[i] : piece[i] / row.temperature + noise, id);
    }
  }
  if (any(~finite) || best.value == -std::numeric_limits<double>::infinity()) return -1;
  return best.token;
}

// The probability of the token that `row` sampled, at its temperature (1 where it is greedy); of the
// likeliest one where the token was drawn: there it must not depend on which one that was.
static __attribute__((noinline)) float confidence_of(const float* logits, int count,
                                                     const RowSampling& row, int32_t token) {
  const float lowest = -std::numeric_limits<float>::infinity();
  alignas(64) float tail[kLanes];
  const int whole = count / kLanes * kLanes;
  std::fill(std::copy(logits + whole, logits + count, tail), tail + kLanes, lowest);
  VecF highest = load(tail);
  for (int i = 0; i < whole; i += kLanes) highest = larger(highest, load(logits + i));
  const float top = max_lanes(highest);
  const VecF scale = splat(kLog2E * (float)(row.temperature == 0 ? 1 : 1 / row.temperature));
  VecF sum = exp2_lanes((load(tail) - splat(top)) * scale);
  for (int i = 0; i < whole; i += kLanes)
    sum += exp2_lanes((load(logits + i) - splat(top)) * scale);
  const float chosen = row.is_drawn ? top : logits[token];
  return exp2_lanes((splat(chosen) - splat(top)) * scale)[0] / sum_lanes(sum);
}

}  // namespace penstock
