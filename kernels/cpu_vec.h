// Vectors of floats as the processor has them: 16 with AVX-512, 8 with AVX, 4 elsewhere (SSE, NEON).
//
// GNU vector extensions, so that one source builds for every processor that GCC and Clang know; intrinsics
// only where an instruction has no other spelling. Everything is inline; no state.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define OCTAVO_INLINE __attribute__((always_inline)) inline

namespace octavo {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float vfloat __attribute__((vector_size(kLanes * 4)));
typedef int32_t vint __attribute__((vector_size(kLanes * 4)));
typedef uint16_t bf16;  // the upper half of a float32
typedef uint16_t vbf16 __attribute__((vector_size(kLanes * 2)));

#if defined(__AVX512F__)
constexpr __mmask16 kEveryLane = 0xffff;  // GCC 12 warns of the intrinsics that have no mask
#endif

OCTAVO_INLINE vfloat load(const float* p) {
  vfloat v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

OCTAVO_INLINE void store(float* p, vfloat v) { std::memcpy(p, &v, sizeof v); }

// Minus zero, which the compiler knows to change nothing; plus zero would make -0 a 0, so it is computed.
OCTAVO_INLINE vfloat splat(float x) { return x - vfloat{}; }

// The first `count` floats, zeros after them. 0 <= count <= kLanes.
OCTAVO_INLINE vfloat load_some(const float* p, int count) {
#if defined(__AVX512F__)
  return _mm512_maskz_loadu_ps(__mmask16((1u << count) - 1), p);
#else
  vfloat v{};
  std::memcpy(&v, p, count * sizeof(float));
  return v;
#endif
}

OCTAVO_INLINE void store_some(float* p, vfloat v, int count) {
#if defined(__AVX512F__)
  _mm512_mask_storeu_ps(p, __mmask16((1u << count) - 1), v);
#else
  std::memcpy(p, &v, count * sizeof(float));
#endif
}

OCTAVO_INLINE vfloat fma(vfloat a, vfloat b, vfloat c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__FMA__)
  return _mm256_fmadd_ps(a, b, c);
#elif defined(__aarch64__)
  return (vfloat)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

// The second where either is NaN.
OCTAVO_INLINE vfloat vmax(vfloat a, vfloat b) {
#if defined(__AVX512F__)
  return _mm512_maskz_max_ps(kEveryLane, a, b);
#else
  return a > b ? a : b;
#endif
}

OCTAVO_INLINE vfloat vmin(vfloat a, vfloat b) {
#if defined(__AVX512F__)
  return _mm512_maskz_min_ps(kEveryLane, a, b);
#else
  return a < b ? a : b;
#endif
}

// Sums pairwise, always in the same order: lane i with lane i + n / 2, and so on.
OCTAVO_INLINE float sum(vfloat v) {
  float lanes[kLanes];
  store(lanes, v);
  for (int n = kLanes / 2; n > 0; n /= 2)
    for (int i = 0; i < n; i++) lanes[i] += lanes[i + n];
  return lanes[0];
}

OCTAVO_INLINE float largest(vfloat v) {
  float lanes[kLanes];
  store(lanes, v);
  float most = lanes[0];
  for (int i = 1; i < kLanes; i++) most = lanes[i] > most ? lanes[i] : most;
  return most;
}

OCTAVO_INLINE float to_float(bf16 x) {
  uint32_t bits = uint32_t(x) << 16;
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}

// Round to nearest, ties to even; NaN stays NaN.
OCTAVO_INLINE bf16 to_bf16(float f) {
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return bf16((bits >> 16) | 0x40);
  return bf16((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

OCTAVO_INLINE vfloat load(const bf16* p) {
  vbf16 narrow;
  std::memcpy(&narrow, p, sizeof narrow);
  return (vfloat)(__builtin_convertvector(narrow, vint) << 16);
}

OCTAVO_INLINE void store(bf16* p, vfloat v) {
#if defined(__AVX512BF16__)
  __m256bh narrow = _mm512_cvtneps_pbh(v);  // flushes denormals, which no value here is meant to be
  std::memcpy(p, &narrow, sizeof narrow);
#else
  vint bits = (vint)v;
  vint rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  vint is_nan = (vint)(v != v);
  rounded = is_nan ? ((bits >> 16) | 0x40) : rounded;
  vbf16 narrow = __builtin_convertvector(rounded, vbf16);
  std::memcpy(p, &narrow, sizeof narrow);
#endif
}

// 1 / x for x from 1e-37 to 1e37, relative error below 2e-7.
OCTAVO_INLINE vfloat reciprocal(vfloat x) {
#if defined(__AVX512F__)
  const vfloat guess = _mm512_maskz_rcp14_ps(kEveryLane, x);
  return guess * fma(-x, guess, splat(2.0f));  // one step of Newton's method
#else
  return 1.0f / x;
#endif
}

// e to the power of x, relative error below 2e-7 (Cody-Waite reduction, degree 6); 0 below -104, inf above 89.
OCTAVO_INLINE vfloat vexp(vfloat x) {
#if defined(__AVX512F__)
  x = vmin(splat(104.0f), vmax(splat(-104.0f), x));  // keeps NaN
  vfloat n = _mm512_maskz_roundscale_ps(kEveryLane, x * 1.44269504088896341f, 0);  // to the nearest
#else
  vfloat n = x * 1.44269504088896341f;
  vint k = __builtin_convertvector(n + (n > 0.0f ? splat(0.5f) : splat(-0.5f)), vint);
  n = __builtin_convertvector(k, vfloat);
#endif
  vfloat r = fma(n, splat(-0.693359375f), x);
  r = fma(n, splat(2.12194440e-4f), r);
  vfloat p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = fma(p, r * r, r + 1.0f);
#if defined(__AVX512F__)
  return _mm512_maskz_scalef_ps(kEveryLane, p, n);
#else
  const vfloat scaled = p * (vfloat)((k + 127) << 23);
  return x < -87.0f ? splat(0.0f) : (x > 88.0f ? splat(INFINITY) : scaled);
#endif
}

// 2 to the power of x, which is not above 0, relative error below 3e-7 (degree 6).
OCTAVO_INLINE vfloat exp2_below_zero(vfloat x) {
#if defined(__AVX512F__)
  const vfloat r = _mm512_maskz_reduce_ps(kEveryLane, x, 0);  // x less the nearest integer
  vfloat p = splat(1.535336188319500e-4f);
  p = fma(p, r, splat(1.339887440266574e-3f));
  p = fma(p, r, splat(9.618437357674640e-3f));
  p = fma(p, r, splat(5.550332471162809e-2f));
  p = fma(p, r, splat(2.402264791363012e-1f));
  p = fma(p, r, splat(6.931472028550421e-1f));
  p = fma(p, r, splat(1.0f));
  return _mm512_maskz_scalef_ps(kEveryLane, p, x - r);
#else
  return vexp(x * 0.693147180559945f);
#endif
}

}  // namespace octavo
