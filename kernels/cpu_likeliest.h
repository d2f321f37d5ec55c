// The largest of many logits, found vector by vector, by several threads if need be.
#pragma once

#include <cmath>

#include "cpu_vec.h"

namespace octavo {

// Bit j: lane j of a comparison is true.
OCTAVO_INLINE uint32_t true_lanes(vint is_true) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)is_true, (__m512i)is_true);
#elif defined(__AVX__)
  return _mm256_movemask_ps((__m256)is_true);
#else
  uint32_t lanes = 0;
  for (int j = 0; j < kLanes; j++) lanes |= uint32_t(is_true[j] & 1) << j;
  return lanes;
#endif
}

// What has been seen of a row's logits, lane by lane. Ids come in ascending order.
struct Likeliest {
  vfloat best;
  vint id, is_nan;

  OCTAVO_INLINE void clear() {
    best = splat(-INFINITY);
    id = is_nan = vint{};
  }

  // Logits of the tokens `ids`.
  OCTAVO_INLINE void add(vfloat logits, vint ids) {
    const vint is_better = logits > best;
    is_nan |= logits != logits;
    best = is_better ? logits : best;
    id = is_better ? ids : id;
  }

  // What another has seen, of other tokens.
  OCTAVO_INLINE void add(const Likeliest& other) {
    const vint is_better = (other.best > best) | ((other.best == best) & (other.id < id));
    is_nan |= other.is_nan;
    best = is_better ? other.best : best;
    id = is_better ? other.id : id;
  }

  // The token with the largest logit, the lowest id on a tie; -1 if it is not finite, or any logit is NaN.
  int64_t token() const {
    int winner = 0;
    for (int j = 1; j < kLanes; j++) {
      const bool is_first = best[j] == best[winner] && id[j] < id[winner];
      if (best[j] > best[winner] || is_first) winner = j;
    }
    return std::isfinite(best[winner]) && !true_lanes(is_nan) ? id[winner] : -1;
  }
};

OCTAVO_INLINE vint ascending(int64_t first) {
  vint ids{};
  for (int j = 0; j < kLanes; j++) ids[j] = int32_t(first) + j;
  return ids;
}

// The first `count` logits, and what is less than any after them.
OCTAVO_INLINE vfloat load_left(const float* logits, int64_t count) {
  if (count >= kLanes) return load(logits);
  vfloat v = splat(-INFINITY);
  if (count > 0) std::memcpy(&v, logits, count * sizeof(float));
  return v;
}

}  // namespace octavo
