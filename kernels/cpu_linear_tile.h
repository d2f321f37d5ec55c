// What the kernels of products share: a tile's rows, loads, and stores.
#pragma once

#include <cstring>

#include "cpu_linear.h"

#define OCTAVO_NOINLINE __attribute__((noinline))

namespace octavo {
namespace {

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kRegisters = 32;
#else
constexpr int kRegisters = 16;
#endif

// The rows of a tile. Three share a pointer, so that the addresses of all of them stay in
// registers.
template <typename T, int R>
struct Rows {
  const T* base[(R + 2) / 3];
  int64_t stride;

  OCTAVO_INLINE Rows(const T* x, int64_t stride) : stride(stride) {
    for (int i = 0; i < (R + 2) / 3; i++) {
      base[i] = x + 3 * i * stride;
      asm("" : "+r"(base[i]));  // else the compiler derives one from another, and spills
    }
  }

  OCTAVO_INLINE const T* at(int row, int64_t k) const {
    return base[row / 3] + (row % 3) * stride + k;
  }
};

OCTAVO_INLINE vint load_words(const void* p) {
  vint v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

OCTAVO_INLINE vint splat_word(const void* p) {
#if defined(__AVX512F__)
  return (vint)_mm512_set1_epi32(*static_cast<const int*>(p));
#else
  int32_t word;
  std::memcpy(&word, p, 4);
  return vint{} + word;
#endif
}

OCTAVO_INLINE vfloat load_half(const uint16_t* p) {
#if defined(__AVX512F__)
  // maskz: GCC 12 takes the plain one's undefined source for a mistake
  return _mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__F16C__)
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  vbf16 half;
  std::memcpy(&half, p, sizeof half);
  const vint bits = __builtin_convertvector(half, vint);
  const vint magnitude = (bits & 0x7fff) << 13;
  // Moves the exponent's bias; exact for denormals too.
  vint value = (vint)((vfloat)magnitude * 0x1p112f);
  value = (bits & 0x7c00) == 0x7c00 ? magnitude | 0x7f800000 : value;
  return (vfloat)(value | (bits & 0x8000) << 16);
#endif
}

// Bytes of one panel's group: its numbers, and all of it.
template <int64_t kind>
constexpr int64_t kNumberBytes = kPanel * block_shape(kind).number_bytes;
template <int64_t kind>
constexpr int64_t kGroupBytes = kPanel * block_shape(kind).bytes();

// Factor `index` of the blocks in half a panel's group.
template <int64_t kind>
OCTAVO_INLINE vfloat load_factor(const char* group, int64_t index, int64_t half) {
  constexpr int64_t kBytes = block_shape(kind).factor_bytes;
  const char* at = group + kNumberBytes<kind> + (2 * index + half) * kLanes * kBytes;
  if constexpr (kBytes == 2)
    return load_half(reinterpret_cast<const uint16_t*>(at));
  else
    return load(reinterpret_cast<const float*>(at));
}

// Which rows a kernel computes next.
struct TileRows {
  int64_t row, count;
  bool is_first, is_only;  // of its block's tiles
};

// Calls kernel.tile<count>; a function each, called once a tile.
template <int R, typename Kernel>
OCTAVO_INLINE void run_tile(const Kernel& kernel, int64_t row, int64_t count, const char* panel,
                            float* out, int64_t out_stride) {
  if (count == R)
    kernel.template tile<R>(row, panel, out, out_stride);
  else if constexpr (R > 1)
    run_tile<R - 1>(kernel, row, count, panel, out, out_stride);
}

template <int R>
OCTAVO_INLINE void store_tile(const vfloat (&sums)[R][2], float* out, int64_t out_stride) {
#pragma GCC unroll 12
  for (int r = 0; r < R; r++) {
    store(out + r * out_stride, sums[r][0]);
    store(out + r * out_stride + kLanes, sums[r][1]);
  }
}

// How far ahead of its use a weight is asked for. The hardware's own guess stops at the end of a
// page.
constexpr int64_t kAhead = 4096;

// Asks for the `bytes` that come kAhead after `p`.
template <int64_t bytes>
OCTAVO_INLINE void fetch_ahead(const char* p) {
#pragma GCC unroll 32
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(p + kAhead + i);
}

constexpr int64_t kPairs = kGroup / 2;                // of a step
constexpr int64_t kTileBytes = kPairs * kLanes * 4;   // half a panel's step

}  // namespace
}  // namespace octavo
