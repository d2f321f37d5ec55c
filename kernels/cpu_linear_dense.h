// Products with float32 and bfloat16 weights, without AMX.
#pragma once

#include <vector>

#include "cpu_linear_tile.h"

namespace octavo {
namespace {

// ---- float32 ------------------------------------------------------------------------------------

class Float32Kernel {
 public:
  static constexpr int64_t kRows = kRegisters == 32 ? 12 : 6;
  static constexpr int64_t kRowStep = 1;
  static constexpr bool kPanelsFirst = false;

  Float32Kernel(const LinearArgs& a, const WeightLayout&)
      : x_(static_cast<const float*>(a.x)), stride_(a.x_stride), size_(a.in_features) {}

  int64_t row_bytes() const { return size_ * 4; }
  void prepare(const TileRows&) {}

  void run(int64_t row, int64_t count, const char* panel, float* out, int64_t out_stride) const {
    run_tile<kRows>(*this, row, count, panel, out, out_stride);
  }

  template <int R>
  OCTAVO_NOINLINE void tile(int64_t row, const char* panel, float* out, int64_t out_stride) const {
    const Rows<float, R> rows(x_ + row * stride_, stride_);
    const float* w = reinterpret_cast<const float*>(panel);
    vfloat sums[R][2] = {};
    for (int64_t k = 0; k < size_; k++, w += kPanel) {
      fetch_ahead<kPanel * 4>(reinterpret_cast<const char*>(w));
      const vfloat w0 = load(w), w1 = load(w + kLanes);
#pragma GCC unroll 12
      for (int r = 0; r < R; r++) {
        const vfloat x = splat(*rows.at(r, k));
        sums[r][0] = fma(x, w0, sums[r][0]);
        sums[r][1] = fma(x, w1, sums[r][1]);
      }
    }
    store_tile<R>(sums, out, out_stride);
  }

 private:
  const float* x_;
  int64_t stride_;
  int64_t size_;
};

// ---- bfloat16 -----------------------------------------------------------------------------------

#if defined(__AVX512BF16__)

class Bfloat16Kernel {
 public:
  static constexpr int64_t kRows = 12;
  static constexpr int64_t kRowStep = 1;
  static constexpr bool kPanelsFirst = false;

  Bfloat16Kernel(const LinearArgs& a, const WeightLayout& layout)
      : packed_(kRowsBfloat16, a.capacity, a.in_features), x_(a.x), steps_(layout.steps) {}

  int64_t row_bytes() const { return packed_.padded * 2; }
  void prepare(const TileRows&) {}

  void run(int64_t row, int64_t count, const char* panel, float* out, int64_t out_stride) const {
    run_tile<kRows>(*this, row, count, panel, out, out_stride);
  }

  template <int R>
  OCTAVO_NOINLINE void tile(int64_t row, const char* panel, float* out, int64_t out_stride) const {
    const bf16* first = packed_.bf16_row(x_, row);
    const Rows<bf16, R> rows(first, packed_.bf16_row(x_, row + 1) - first);
    vfloat sums[R][2] = {};
    for (int64_t step = 0; step < steps_; step++, panel += 2 * kTileBytes) {
#pragma GCC unroll 4
      for (int64_t pair = 0; pair < kPairs; pair++) {
        const char* w = panel + pair * kLanes * 4;
        __builtin_prefetch(w + kAhead);
        __builtin_prefetch(w + kAhead + kTileBytes);
        const __m512bh w0 = (__m512bh)load_words(w), w1 = (__m512bh)load_words(w + kTileBytes);
#pragma GCC unroll 12
        for (int r = 0; r < R; r++) {
          const __m512bh x = (__m512bh)splat_word(rows.at(r, step * kGroup + pair * 2));
          sums[r][0] = _mm512_dpbf16_ps(sums[r][0], w0, x);
          sums[r][1] = _mm512_dpbf16_ps(sums[r][1], w1, x);
        }
      }
    }
    store_tile<R>(sums, out, out_stride);
  }

 private:
  PackedRows packed_;
  const void* x_;
  int64_t steps_;
};

#else

// Without a dot product of bfloat16: a tile's rows become float32 once for all its panels.
class Bfloat16Kernel {
 public:
  static constexpr int64_t kRows = kRegisters == 32 ? 12 : 4;
  static constexpr int64_t kRowStep = 1;
  static constexpr bool kPanelsFirst = false;

  Bfloat16Kernel(const LinearArgs& a, const WeightLayout& layout)
      : packed_(kRowsBfloat16, a.capacity, a.in_features),
        x_(a.x),
        steps_(layout.steps),
        wide_(scratch(kRows * packed_.padded)) {}

  int64_t row_bytes() const { return packed_.padded * 2; }

  void prepare(const TileRows& rows) {
    for (int64_t r = 0; r < rows.count; r++) {
      const bf16* x = packed_.bf16_row(x_, rows.row + r);
      float* wide = wide_ + r * packed_.padded;
      for (int64_t k = 0; k < packed_.padded; k++) wide[k] = to_float(x[k]);
    }
  }

  void run(int64_t row, int64_t count, const char* panel, float* out, int64_t out_stride) const {
    run_tile<kRows>(*this, row, count, panel, out, out_stride);
  }

  template <int R>
  OCTAVO_NOINLINE void tile(int64_t, const char* panel, float* out, int64_t out_stride) const {
    const Rows<float, R> rows(wide_, packed_.padded);
    vfloat sums[R][2] = {};
    for (int64_t step = 0; step < steps_; step++, panel += 2 * kTileBytes) {
      for (int64_t pair = 0; pair < kPairs; pair++) {
        const char* w = panel + pair * kLanes * 4;
        __builtin_prefetch(w + kAhead);
        __builtin_prefetch(w + kAhead + kTileBytes);
        const vint w0 = load_words(w), w1 = load_words(w + kTileBytes);
        add<R>(sums, rows, step * kGroup + pair * 2, (vfloat)(w0 << 16), (vfloat)(w1 << 16));
        add<R>(sums, rows, step * kGroup + pair * 2 + 1, (vfloat)(w0 & kUpper),
               (vfloat)(w1 & kUpper));
      }
    }
    store_tile<R>(sums, out, out_stride);
  }

 private:
  static constexpr int32_t kUpper = -65536;  // the upper half of a word

  template <int R>
  OCTAVO_INLINE static void add(vfloat (&sums)[R][2], const Rows<float, R>& rows, int64_t k,
                                vfloat w0, vfloat w1) {
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
      const vfloat x = splat(*rows.at(r, k));
      sums[r][0] = fma(x, w0, sums[r][0]);
      sums[r][1] = fma(x, w1, sums[r][1]);
    }
  }

  static float* scratch(size_t size) {
    static thread_local std::vector<float> memory;
    if (memory.size() < size) memory.resize(size);
    return memory.data();
  }

  PackedRows packed_;
  const void* x_;
  int64_t steps_;
  float* wide_;
};

#endif

}  // namespace
}  // namespace octavo
