// grouped
#pragma once

#include "cpu_linear_tile.h"

namespace octavo {
namespace {

// ---- GGUF's groups ------------------------------------------------------------------------------

#if defined(__AVX2__)
// sum + products, in 32 or 16 bits each. Left to itself GCC 12 multiplies a whole group before it adds, and spills.
OCTAVO_INLINE vint add_now(vint sum, vint products) {
  asm("vpaddd %1, %0, %0" : "+v"(sum) : "v"(products));
  return sum;
}
OCTAVO_INLINE vint add_pairs_now(vint sum, vint products) {
  asm("vpaddw %1, %0, %0" : "+v"(sum) : "v"(products));
  return sum;
}
#endif

// sum + the products of four unsigned bytes of w and four signed bytes of x, in each lane.
OCTAVO_INLINE vint add_products(vint sum, vint w, vint x) {
#if defined(__AVX512VNNI__)
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(w), "v"(x));  // GCC 12 spills around the intrinsic
  return sum;
#elif defined(__AVXVNNI__)
  asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(w), "x"(x));
  return sum;
#elif defined(__AVX512BW__)
  const __m512i a = (__m512i)w, b = (__m512i)x;
  const __m512i even = _mm512_madd_epi16(_mm512_and_si512(a, _mm512_set1_epi16(255)),
                                         _mm512_srai_epi16(_mm512_slli_epi16(b, 8), 8));
  const __m512i odd = _mm512_madd_epi16(_mm512_srli_epi16(a, 8), _mm512_srai_epi16(b, 8));
  return add_now(add_now(sum, (vint)even), (vint)odd);
#elif defined(__AVX2__) && !defined(__AVX512F__)
  const __m256i a = (__m256i)w, b = (__m256i)x;
  const __m256i even = _mm256_madd_epi16(_mm256_and_si256(a, _mm256_set1_epi16(255)),
                                         _mm256_srai_epi16(_mm256_slli_epi16(b, 8), 8));
  const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(a, 8), _mm256_srai_epi16(b, 8));
  return add_now(add_now(sum, (vint)even), (vint)odd);
#else
  for (int shift = 0; shift < 32; shift += 8)
    sum += ((w >> shift) & 255) * ((x << (24 - shift)) >> 24);
  return sum;
#endif
}

// As add_products for w of at most 15, of which a group's 8 quads fit into 16 bits: where VPDPBUSD
// is missing, sums are pairs of 16 bits until finish_small adds them up.
OCTAVO_INLINE vint add_small_products(vint sum, vint w, vint x) {
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
  return add_products(sum, w, x);
#elif defined(__AVX512BW__)
  return add_pairs_now(sum, (vint)_mm512_maddubs_epi16((__m512i)w, (__m512i)x));
#elif defined(__AVX2__) && !defined(__AVX512F__)
  return add_pairs_now(sum, (vint)_mm256_maddubs_epi16((__m256i)w, (__m256i)x));
#else
  return add_products(sum, w, x);
#endif
}

// sum + the products of four bytes of w, of which 128 is taken, and four signed bytes of x from -127,
// in each lane.
#if defined(__AVX2__) && !defined(__AVX512F__) && !defined(__AVXVNNI__)
constexpr bool kHasShiftedProducts = true;
OCTAVO_INLINE vint add_shifted_products(vint sum, vint w, vint x) {
  const __m256i shifted = _mm256_xor_si256((__m256i)w, _mm256_set1_epi8(-128));
  const __m256i signed_x = _mm256_sign_epi8((__m256i)x, shifted);
  const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(shifted), signed_x);
  return add_now(sum, (vint)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
#else
constexpr bool kHasShiftedProducts = false;
OCTAVO_INLINE vint add_shifted_products(vint sum, vint w, vint x) { return add_products(sum, w, x); }
#endif

OCTAVO_INLINE vint finish_small(vint sum) {
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
  return sum;
#elif defined(__AVX512BW__)
  return (vint)_mm512_madd_epi16((__m512i)sum, _mm512_set1_epi16(1));
#elif defined(__AVX2__) && !defined(__AVX512F__)
  return (vint)_mm256_madd_epi16((__m256i)sum, _mm256_set1_epi16(1));
#else
  return sum;
#endif
}

constexpr int64_t kQuadBytes = kPanel * 4;
constexpr int32_t kNibbles = 0x0f0f0f0f;

// What makes values of a panel's group of dot products.
template <int64_t kind>
struct Factors {
  static constexpr bool kHasOffset = block_shape(kind).num_factors == 2;

  vfloat d0, d1, m0, m1;

  OCTAVO_INLINE explicit Factors(const char* group) {
    d0 = load_factor<kind>(group, 0, 0);
    d1 = load_factor<kind>(group, 0, 1);
    if (kHasOffset) {
      m0 = load_factor<kind>(group, 1, 0);
      m1 = load_factor<kind>(group, 1, 1);
    }
  }

  // Adds to one row's sums. The dot products are of the stored numbers, which are never negative;
  // `sum_of_x` takes back what they were shifted by.
  OCTAVO_INLINE void add(vfloat (&sums)[2], vint dot0, vint dot1, float scale,
                         float sum_of_x) const {
    const vfloat product0 = __builtin_convertvector(dot0, vfloat);
    const vfloat product1 = __builtin_convertvector(dot1, vfloat);
    if (kHasOffset) {
      sums[0] = fma(product0 * d0, splat(scale), fma(m0, splat(sum_of_x), sums[0]));
      sums[1] = fma(product1 * d1, splat(scale), fma(m1, splat(sum_of_x), sums[1]));
    } else {
      const vfloat shift = splat(sum_of_x) * (kind == kWeightQ8_0 ? -128.0f : -8.0f);
      sums[0] = fma(fma(product0, splat(scale), shift), d0, sums[0]);
      sums[1] = fma(fma(product1, splat(scale), shift), d1, sums[1]);
    }
  }
};

template <int64_t kind>
class GroupedKernel {
 public:
  static constexpr int64_t kRows = kRegisters == 32 ? 6 : 3;
  static constexpr int64_t kRowStep = 1;
  static constexpr bool kPanelsFirst = false;

  GroupedKernel(const LinearArgs& a, const WeightLayout& layout)
      : packed_(kRowsInt8, a.capacity, a.in_features),
        x_(a.x),
        groups_(layout.steps) {}

  int64_t row_bytes() const { return packed_.padded + packed_.groups * 8; }
  void prepare(const TileRows&) {}

  void run(int64_t row, int64_t count, const char* panel, float* out, int64_t out_stride) const {
    run_tile<kRows>(*this, row, count, panel, out, out_stride);
  }

  template <int R>
  OCTAVO_NOINLINE void tile(int64_t row, const char* panel, float* out, int64_t out_stride) const {
    const Rows<int8_t, R> rows(packed_.int8_row(x_, row), packed_.padded);
    const Rows<float, R> scales(packed_.scale_row(x_, row), packed_.groups);
    const Rows<float, R> sums_of_x(packed_.sum_row(x_, row), packed_.groups);
    vfloat sums[R][2] = {};
    for (int64_t group = 0; group < groups_; group++, panel += kGroupBytes<kind>) {
      fetch_ahead<kGroupBytes<kind>>(panel);
      if constexpr (kind == kWeightQ8_F32) {
        add_offsets<R>(sums, sums_of_x, group, panel);
        add_sixteen<R>(sums, rows, scales, group, 0, panel);
        add_sixteen<R>(sums, rows, scales, group, 1, panel);
      } else {
        vint dots[R][2] = {};
        add_group<R>(dots, rows, group * kGroup, panel);
        const Factors<kind> factors(panel);
#pragma GCC unroll 6
        for (int r = 0; r < R; r++)
          factors.add(sums[r], dots[r][0], dots[r][1], *scales.at(r, group),
                      *sums_of_x.at(r, group));
      }
    }
    store_tile<R>(sums, out, out_stride);
  }

 private:
  static constexpr bool kIsBytes = block_shape(kind).is_bytes();

  template <int R>
  OCTAVO_INLINE static void add_offsets(vfloat (&sums)[R][2], const Rows<float, R>& sums_of_x,
                                        int64_t group, const char* numbers) {
    const vfloat m0 = load_factor<kind>(numbers, 2, 0), m1 = load_factor<kind>(numbers, 2, 1);
#pragma GCC unroll 6
    for (int r = 0; r < R; r++) {
      const vfloat sum_of_x = splat(*sums_of_x.at(r, group));
      sums[r][0] = fma(m0, sum_of_x, sums[r][0]);
      sums[r][1] = fma(m1, sum_of_x, sums[r][1]);
    }
  }

  // The 16 of a group's k that share a scale. What the stored numbers are shifted by is taken back as integers:
  // there is no sum of so few of x beforehand.
  template <int R>
  OCTAVO_INLINE static void add_sixteen(vfloat (&sums)[R][2], const Rows<int8_t, R>& rows,
                                        const Rows<float, R>& scales, int64_t group, int64_t part,
                                        const char* numbers) {
    constexpr int32_t kShifts = int32_t(0x80808080);  // 128 four times
    const int64_t k = group * kGroup + part * 16;
    vint dots[R][2];
#pragma GCC unroll 6
    for (int r = 0; r < R; r++) {
      vint shift{};
#pragma GCC unroll 4
      for (int quad = 0; quad < (kHasShiftedProducts ? 0 : 4); quad++)
        shift = add_products(shift, vint{} + kShifts, splat_word(rows.at(r, k + quad * 4)));
      dots[r][0] = dots[r][1] = -shift;
    }
    asm volatile("" ::: "memory");  // else x is kept for what follows, and sums are spilled
#pragma GCC unroll 4
    for (int quad = 0; quad < 4; quad++) {
      const char* words = numbers + (part * 4 + quad) * kQuadBytes;
      add_quad<R>(dots, rows, k + quad * 4, load_words(words), load_words(words + kQuadBytes / 2));
    }
    const vfloat d0 = load_factor<kind>(numbers, part, 0), d1 = load_factor<kind>(numbers, part, 1);
#pragma GCC unroll 6
    for (int r = 0; r < R; r++) {
      const vfloat scale = splat(*scales.at(r, group));
      sums[r][0] = fma(__builtin_convertvector(dots[r][0], vfloat) * d0, scale, sums[r][0]);
      sums[r][1] = fma(__builtin_convertvector(dots[r][1], vfloat) * d1, scale, sums[r][1]);
    }
  }

  template <int R>
  OCTAVO_INLINE static void add_group(vint (&dots)[R][2], const Rows<int8_t, R>& rows, int64_t k,
                                      const char* numbers) {
#pragma GCC unroll 8
    for (int quad = 0; quad < (kIsBytes ? 8 : 4); quad++) {
      const vint w0 = load_words(numbers + quad * kQuadBytes);
      const vint w1 = load_words(numbers + quad * kQuadBytes + kQuadBytes / 2);
      if (kIsBytes) {
        add_quad<R>(dots, rows, k + quad * 4, w0, w1);
      } else {
        add_quad<R>(dots, rows, k + quad * 4, w0 & kNibbles, w1 & kNibbles);
        add_quad<R>(dots, rows, k + 16 + quad * 4, (w0 >> 4) & kNibbles, (w1 >> 4) & kNibbles);
      }
    }
    if (kIsBytes) return;
    for (int r = 0; r < R; r++)
      for (int half = 0; half < 2; half++) dots[r][half] = finish_small(dots[r][half]);
  }

  template <int R>
  OCTAVO_INLINE static void add_quad(vint (&dots)[R][2], const Rows<int8_t, R>& rows, int64_t k,
                                     vint w0, vint w1) {
#pragma GCC unroll 6
    for (int r = 0; r < R; r++) {
      const vint x = splat_word(rows.at(r, k));
      for (int half = 0; half < 2; half++) {
        const vint w = half == 0 ? w0 : w1;
        dots[r][half] = kind == kWeightQ8_F32 ? add_shifted_products(dots[r][half], w, x)
                        : kIsBytes            ? add_products(dots[r][half], w, x)
                                              : add_small_products(dots[r][half], w, x);
      }
    }
  }

  PackedRows packed_;
  const void* x_;
  int64_t groups_;
};

}  // namespace
}  // namespace octavo
