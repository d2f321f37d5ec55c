// Which results of a product with float32 weights can be the largest of their row, found by Intel's AMX.
//
// Rows and weights rounded to bfloat16 are multiplied in a fraction of the time. By Cauchy and Schwarz the sums are
// off by no more than a known share of |x| |w|, the norms of the row and of the column. A row whose results in a panel
// are not above its largest so far, off as they may be, needs no product of float32 with that panel: of equals the first
// wins, and a thread's columns ascend. So the largest, which is taken from products of float32 alone, is the one that they
// all would have had.
#pragma once

#include <cmath>
#include <vector>

#include "cpu_likeliest.h"
#include "cpu_linear_amx.h"
#include "cpu_linear_dense.h"

namespace octavo {
namespace {

#if defined(OCTAVO_AMX)

// Multiplies rounded rows by rounded weights.
class AmxScreenKernel {
 public:
  static constexpr int64_t kRows = 32;
  static constexpr int64_t kRowStep = 16;
  static constexpr bool kPanelsFirst = true;
  static constexpr int64_t kLeastRows = 16;  // fewer take no longer than weights take from memory

  static bool is_for(const LinearArgs& a) {
    return a.likeliest && a.bias == nullptr && *a.num_tokens >= kLeastRows;
  }

  AmxScreenKernel(const LinearArgs& a, const WeightLayout& layout)
      : size_(a.in_features),
        packed_(kRowsBfloat16, *a.num_tokens, size_),
        rounded_(*a.num_tokens * packed_.padded),
        errors_(*a.num_tokens),
        largest_(*a.num_tokens, -INFINITY),
        tiles_(packed_.groups * 2 * kTileBytes + 64),
        rows_(packed_, rounded_.data()),
        exact_(a, layout) {
    for (int64_t row = 0; row < *a.num_tokens; row++) {
      const float* x = static_cast<const float*>(a.x) + row * a.x_stride;
      for (int64_t k = 0; k < size_; k++) rounded_[row * packed_.padded + k] = to_bf16(x[k]);
      errors_[row] = error_of(x);
    }
  }

  int64_t row_bytes() const { return rows_.bytes(); }
  void prepare(const TileRows& rows) { rows_.set_count(rows.count); }

  void run(int64_t row, int64_t count, const char* panel, float* out, int64_t out_stride) {
    if (panel != panel_) round_weights(panel);
    count <= 16 ? multiply<false>(row, out, out_stride) : multiply<true>(row, out, out_stride);
  }

  // Whether a result of this row and the panel that was multiplied last can be larger than any before: `sums` are
  // those of the rounded, [kPanel].
  OCTAVO_INLINE bool may_be_largest(int64_t row, const float* sums) const {
    const vfloat error = splat(errors_[row]), largest = splat(largest_[row]);
    const vint is_less = (fma(error, norms_[0], load(sums)) <= largest) &
                         (fma(error, norms_[1], load(sums + kLanes)) <= largest);
    return true_lanes(is_less) != (1u << kLanes) - 1;  // NaN is not less
  }

  // Results of the numbers as they are.
  void run_exactly(int64_t row, int64_t count, const char* panel, float* out, int64_t out_stride) const {
    exact_.run(row, count, panel, out, out_stride);
  }

  void set_largest(int64_t row, float result) { largest_[row] = result; }

 private:
  // For a row x, columns w and k numbers, sums are off by at most (kRounding + k * kAdding) |x| |w|. kRounding: a
  // number rounded to 8 bits is off by 2^-8 of itself, so a product of two by 2^-7 + 2^-16. kAdding: more than the
  // roundings of both products, and of the norms, make for each k (Higham, Accuracy and Stability of Numerical
  // Algorithms, section 3.1).
  static constexpr float kRounding = 0.0079f, kAdding = 4e-7f;
  // Added to norms: more than numbers too small to be squared make of them, and what AMX flushes to zero of sums.
  static constexpr float kTiny = 1e-15f;
  // A smaller |x| times |w| is finite, and so are all sums: a column of more than 1.8e19 has an infinite norm, with
  // which nothing is ruled out.
  static constexpr float kHuge = 1e18f;

  float error_of(const float* x) const {
    double squares = 0;
    for (int64_t k = 0; k < size_; k++) squares += double(x[k]) * x[k];
    const float norm = float(std::sqrt(squares));
    return norm < kHuge ? (norm + kTiny) * (kRounding + kAdding * float(size_)) : INFINITY;
  }

  char* tiles() { return tiles_.data() + (-reinterpret_cast<uintptr_t>(tiles_.data()) & 63); }

  template <bool two>
  OCTAVO_INLINE void multiply(int64_t row, float* out, int64_t out_stride) {
    const auto weights = [&](int64_t step) { return tiles() + step * 2 * kTileBytes; };
    rows_.multiply<two>(row, packed_.groups, weights, out, out_stride);
  }

  // A panel's float32 to tiles of bfloat16, to the nearest; and the norms of its columns.
  OCTAVO_NOINLINE void round_weights(const char* panel) {
    constexpr int32_t kUpper = -65536;  // the upper half of a word
    panel_ = panel;
    vfloat squares[2][2] = {};  // of the even and odd k of each half
    const float* w = reinterpret_cast<const float*>(panel);
    for (int64_t pair = 0; pair < packed_.padded / 2; pair++, w += 2 * kPanel) {
      char* to = tiles() + pair / kPairs * 2 * kTileBytes + pair % kPairs * 64;
      for (int64_t i = 0; i < 2 * kPanel * 4; i += 64) {
        __builtin_prefetch(reinterpret_cast<const char*>(w) + 2 * kAhead + i, 0, 2);  // into the second-level cache
        __builtin_prefetch(reinterpret_cast<const char*>(w) + kAhead / 2 + i);
      }
#pragma GCC unroll 2
      for (int64_t half = 0; half < 2; half++, to += kTileBytes) {
        const vfloat even = load(w + half * kLanes), odd = load(w + kPanel + half * kLanes);
        squares[half][0] = fma(even, even, squares[half][0]);
        squares[half][1] = fma(odd, odd, squares[half][1]);
        const __m512i half_unit = _mm512_set1_epi32(0x8000);
        const __m512i lower = _mm512_maskz_srli_epi32(
            kEveryLane, _mm512_add_epi32((__m512i)even, half_unit), 16);
        const vint both = ((vint)_mm512_add_epi32((__m512i)odd, half_unit) & kUpper) | (vint)lower;
        std::memcpy(to, &both, sizeof both);
      }
    }
    for (int half = 0; half < 2; half++)
      norms_[half] = _mm512_maskz_sqrt_ps(kEveryLane, squares[half][0] + squares[half][1]) + kTiny;
  }

  int64_t size_;
  PackedRows packed_;
  std::vector<bf16> rounded_;
  std::vector<float> errors_;   // of each row: how far sums are off, for a column whose norm is 1
  std::vector<float> largest_;  // result of each row so far
  const char* panel_ = nullptr;  // that was rounded last
  std::vector<char> tiles_;      // of it
  vfloat norms_[2];              // of its columns
  AmxRows rows_;
  Float32Kernel exact_;
};

#endif

}  // namespace
}  // namespace octavo
