// Products on Intel's AMX: rows of bfloat16 times weights of bfloat16, summed in float32.
//
// Weights of GGUF's groups become bfloat16 on their way: d * q + m, rounded once, is the very number that
// the same weight has when it is loaded as bfloat16. So it costs no quality that bfloat16 does not cost, and the
// products of both are bit-equal; what is saved is memory and its bandwidth.
#pragma once

#include <vector>

#include "cpu_amx.h"
#include "cpu_linear_tile.h"

namespace octavo {
namespace {

#if defined(OCTAVO_AMX)

// How a thread's tiles are used: two by two tiles of 16 rows by 16 columns, so that each that is
// loaded is used twice. 0, 1: sums of the first 16 rows; 2, 3: of the others. 4, 5: rows. 6, 7:
// weights.
class Tiles {
 public:
  Tiles() = default;
  ~Tiles() { _tile_release(); }  // a thread with live tiles costs more to switch
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;

  void set_rows(int64_t count) {
    if (count == count_) return;
    count_ = count;
    const uint8_t upper = uint8_t(std::min<int64_t>(count, 16)), lower = uint8_t(count - upper);
    const uint8_t rows[8] = {upper, upper, lower, lower, upper, lower, 16, 16};
    TileShapes shapes;
    for (int i = 0; i < 8; i++) shapes.set(i, rows[i], rows[i] > 0 ? 64 : 0);
    shapes.load();
  }

 private:
  int64_t count_ = 0;
};

// The rows of a product, and the tiles that they are multiplied in.
class AmxRows {
 public:
  AmxRows(const LinearArgs& a) : AmxRows({kRowsBfloat16, a.capacity, a.in_features}, a.x) {}
  AmxRows(const PackedRows& packed, const void* x) : packed_(packed), x_(x) {}

  int64_t bytes() const { return packed_.padded * 2; }
  void set_count(int64_t count) { tiles_.set_rows(count); }

  // Sums of up to 32 rows by one panel. `weights(step)` gives the address of that step's two tiles.
  template <bool two, typename Weights>
  OCTAVO_INLINE void multiply(int64_t row, int64_t steps, Weights weights, float* out,
                              int64_t out_stride) const {
    const bf16* x = packed_.bf16_row(x_, row);
    const int64_t stride = bytes();
    const bf16* lower = packed_.bf16_row(x_, row + 16);
    _tile_zero(0);
    _tile_zero(1);
    if (two) {
      _tile_zero(2);
      _tile_zero(3);
    }
    for (int64_t step = 0; step < steps; step++) {
      const char* tiles = weights(step);
      if (two && step < 16) fetch_sums(out + 2 * step * out_stride, out_stride);
      asm volatile("" ::: "memory");  // the intrinsics do not say that they read memory
      _tile_loadd(4, x + step * kGroup, stride);
      _tile_loadd(6, tiles, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, tiles + kTileBytes, 64);
      _tile_dpbf16ps(1, 4, 7);
      if (two) {
        _tile_loadd(5, lower + step * kGroup, stride);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
    }
    _tile_stored(0, out, out_stride * 4);
    _tile_stored(1, out + kLanes, out_stride * 4);
    if (two) {
      _tile_stored(2, out + 16 * out_stride, out_stride * 4);
      _tile_stored(3, out + 16 * out_stride + kLanes, out_stride * 4);
    }
    asm volatile("" ::: "memory");
  }

 private:
  // Asks for where two rows of sums will be stored: a store to memory that is far holds up those
  // behind it.
  OCTAVO_INLINE static void fetch_sums(const float* out, int64_t out_stride) {
    for (int64_t i = 0; i < 2; i++) {
      __builtin_prefetch(out + i * out_stride, 1);
      __builtin_prefetch(out + i * out_stride + kLanes, 1);
    }
  }

  PackedRows packed_;
  const void* x_;
  Tiles tiles_;
};

class AmxBfloat16Kernel {
 public:
  static constexpr int64_t kRows = 32;
  static constexpr int64_t kRowStep = 16;
  static constexpr bool kPanelsFirst = false;

  AmxBfloat16Kernel(const LinearArgs& a, const WeightLayout& layout)
      : rows_(a), steps_(layout.steps) {}

  int64_t row_bytes() const { return rows_.bytes(); }

  void prepare(const TileRows& rows) {
    rows_.set_count(rows.count);
    is_cold_ = rows.is_first;
  }

  void run(int64_t row, int64_t count, const char* panel, float* out, int64_t out_stride) {
    count <= 16 ? tile<false>(row, panel, out, out_stride) : tile<true>(row, panel, out, out_stride);
  }

 private:
  template <bool two>
  OCTAVO_NOINLINE void tile(int64_t row, const char* panel, float* out, int64_t out_stride) const {
    const auto weights = [&](int64_t step) {
      const char* tiles = panel + step * 2 * kTileBytes;
      if (is_cold_) fetch_ahead<2 * kTileBytes>(tiles);
      return tiles;
    };
    rows_.multiply<two>(row, steps_, weights, out, out_stride);
  }

  AmxRows rows_;
  int64_t steps_;
  bool is_cold_ = true;
};

// ---- GGUF's groups ------------------------------------------------------------------------------
//
// Of a half panel's group, 16 vectors of bfloat16 are wanted, one for each pair of k: [column][2]. Each is
// rounded from two vectors of float32, of 8 columns by 2 numbers of k: the numbers lie in the order of
// their lanes, so that nothing has to change places.
//
//   4 bits  [4][16 lanes] words: bits 4i .. 4i + 3 are the lane's number of vector 8 * row + i
//   8 bits  [8][16 lanes] words: byte i is the lane's number + 128 of vector 4 * row + i
//
// Words are loaded from one, two or three bytes further on, which saves a shift; the factors that follow
// the numbers make room for that.

constexpr __mmask16 kAllLanes = 0xffff;  // GCC 12 warns of the intrinsics without a mask

OCTAVO_INLINE vfloat permute(vint lanes, vfloat from) {
  return _mm512_maskz_permutexvar_ps(kAllLanes, (__m512i)lanes, from);
}

// Each of 8 columns' factors twice.
OCTAVO_INLINE vfloat twice(vfloat factors, int first) {
  vint lanes{};
  for (int i = 0; i < kLanes; i++) lanes[i] = first + i / 2;
  return permute(lanes, factors);
}

OCTAVO_INLINE void store_pair(char* to, vfloat low, vfloat high) {
  const __m512bh both = _mm512_maskz_cvtne2ps_pbh(0xffffffffu, high, low);
  std::memcpy(to, &both, sizeof both);
}

// The second byte of each word, plus kOffset. A byte at these bits of a float of 2^15 counts ones.
constexpr float kOffset = 32768;
OCTAVO_INLINE vfloat second_byte(vint words) {
  return (vfloat)((words & 0xff00) | 0x47000000);
}

// The factor `index` of half a panel's group, for vectors of its lower and of its upper 8 columns.
template <int64_t kind>
struct Twice {
  vfloat low, high;

  OCTAVO_INLINE Twice(const char* group, int64_t index, int64_t half) {
    const vfloat factors = load_factor<kind>(group, index, half);
    low = twice(factors, 0);
    high = twice(factors, 8);
  }
};

// 8 bits with a float16 scale. kOffset + 128 has 9 bits and d 11, so their product is exact, and what is left of
// kOffset's sum is d * q.
OCTAVO_INLINE void decode_q8_0(const char* group, int64_t half, char* to) {
  const char* numbers = group + half * kNumberBytes<kWeightQ8_0> / 2;
  const Twice<kWeightQ8_0> d(group, 0, half);
  const vfloat back_low = d.low * -(kOffset + 128), back_high = d.high * -(kOffset + 128);
#pragma GCC unroll 8
  for (int64_t row = 0; row < 8; row++, numbers += 64, to += 2 * 64) {
    const vint words = load_words(numbers);
    const vfloat first = second_byte(words << 8), second = second_byte(words);
    const vfloat third = second_byte(load_words(numbers + 1));
    const vfloat fourth = second_byte(load_words(numbers + 2));
    store_pair(to, fma(first, d.low, back_low), fma(second, d.high, back_high));
    store_pair(to + 64, fma(third, d.low, back_low), fma(fourth, d.high, back_high));
  }
}

// 8 bits with two scales and an offset. A scale may have more bits than decode_q8_0 has room for, so kOffset goes
// first.
OCTAVO_INLINE void decode_q8_f32(const char* group, int64_t half, char* to) {
  constexpr int64_t kind = kWeightQ8_F32;
  const char* numbers = group + half * kNumberBytes<kind> / 2;
  const Twice<kind> m(group, 2, half);
#pragma GCC unroll 2
  for (int64_t part = 0; part < 2; part++) {  // 16 of k
    const Twice<kind> d(group, part, half);
#pragma GCC unroll 4
    for (int64_t row = 0; row < 4; row++, numbers += 64, to += 2 * 64) {
      const vint words = load_words(numbers);
      const vfloat first = second_byte(words << 8) - (kOffset + 128);
      const vfloat second = second_byte(words) - (kOffset + 128);
      const vfloat third = second_byte(load_words(numbers + 1)) - (kOffset + 128);
      const vfloat fourth = second_byte(load_words(numbers + 2)) - (kOffset + 128);
      store_pair(to, fma(first, d.low, m.low), fma(second, d.high, m.high));
      store_pair(to + 64, fma(third, d.low, m.low), fma(fourth, d.high, m.high));
    }
  }
}

// 4 bits, with an offset if the kind has one.
template <int64_t kind>
OCTAVO_INLINE void decode_nibbles(const char* group, int64_t half, char* to) {
  constexpr bool kHasOffset = block_shape(kind).num_factors == 2;
  const char* numbers = group + half * kNumberBytes<kind> / 2;
  const Twice<kind> d(group, 0, half), m(group, kHasOffset, half);
  vfloat values{};  // of the 16 numbers that 4 bits hold
  for (int i = 0; i < kLanes; i++) values[i] = float(kHasOffset ? i : i - 8);
#pragma GCC unroll 4
  for (int64_t row = 0; row < 4; row++) {
#pragma GCC unroll 4
    for (int64_t i = 0; i < 4; i++) {
      const vint words = load_words(numbers + row * 64 + i);
      vfloat low = permute(words, values);  // looks at the lowest 4 bits of a lane
      vfloat high = permute(words >> 4, values);
      low = kHasOffset ? fma(low, d.low, m.low) : low * d.low;
      high = kHasOffset ? fma(high, d.high, m.high) : high * d.high;
      store_pair(to + (4 * row + i) * 64, low, high);
    }
  }
}

// Decodes a panel's group to the two tiles of a bfloat16 weight.
template <int64_t kind>
OCTAVO_INLINE void decode_group(const char* group, char* to) {
#pragma GCC unroll 2
  for (int64_t half = 0; half < 2; half++, to += kTileBytes) {
    if constexpr (kind == kWeightQ8_0)
      decode_q8_0(group, half, to);
    else if constexpr (kind == kWeightQ8_F32)
      decode_q8_f32(group, half, to);
    else
      decode_nibbles<kind>(group, half, to);
  }
}

template <int64_t kind>
class AmxGroupedKernel {
 public:
  static constexpr int64_t kRows = 32;
  static constexpr int64_t kRowStep = 16;
  static constexpr bool kPanelsFirst = true;

  AmxGroupedKernel(const LinearArgs& a, const WeightLayout& layout)
      : rows_(a), steps_(layout.steps), step_bytes_(layout.step_bytes) {}

  int64_t row_bytes() const { return rows_.bytes(); }

  void prepare(const TileRows& rows) {
    rows_.set_count(rows.count);
    is_alone_ = rows.is_only;
  }

  void run(int64_t row, int64_t count, const char* panel, float* out, int64_t out_stride) {
    count <= 16 ? tile<false>(row, panel, out, out_stride) : tile<true>(row, panel, out, out_stride);
  }

 private:
  static constexpr int64_t kStepBytes = 2 * kTileBytes;  // decoded

  // For a tile alone, a step is decoded while the one before it is multiplied; for several, all of the panel,
  // by the first of them.
  template <bool two>
  OCTAVO_NOINLINE void tile(int64_t row, const char* panel, float* out, int64_t out_stride) {
    if (is_alone_) {
      alignas(64) char decoded[2][kStepBytes];
      decode(panel, 0, decoded[0]);
      const auto weights = [&](int64_t step) {
        if (step + 1 < steps_) decode(panel, step + 1, decoded[(step + 1) % 2]);
        return decoded[step % 2];
      };
      rows_.multiply<two>(row, steps_, weights, out, out_stride);
      return;
    }
    char* decoded = scratch(steps_ * kStepBytes);
    if (panel != decoded_panel_) {
      for (int64_t step = 0; step < steps_; step++) decode(panel, step, decoded + step * kStepBytes);
      decoded_panel_ = panel;
    }
    const auto weights = [&](int64_t step) { return decoded + step * kStepBytes; };
    rows_.multiply<two>(row, steps_, weights, out, out_stride);
  }

  OCTAVO_INLINE void decode(const char* panel, int64_t step, char* to) const {
    const char* group = panel + step * step_bytes_;
    for (int64_t i = 0; i < step_bytes_; i += 64) {
      __builtin_prefetch(group + 2 * kAhead + i, 0, 2);  // into the second-level cache
      __builtin_prefetch(group + kAhead / 2 + i);
    }
    decode_group<kind>(group, to);
  }

  static char* scratch(size_t size) {
    static thread_local std::vector<char> memory;
    if (memory.size() < size + 64) memory.resize(size + 64);
    return memory.data() + (-reinterpret_cast<uintptr_t>(memory.data()) & 63);
  }

  AmxRows rows_;
  int64_t steps_, step_bytes_;
  bool is_alone_ = true;
  const char* decoded_panel_ = nullptr;
};

#endif

}  // namespace
}  // namespace octavo
