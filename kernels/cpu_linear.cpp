// Products with packed weights: out[m][n] = sum over k of x[m][k] * w[n][k], plus a bias.
//
// A kernel computes a tile: a few rows by one panel of columns (cpu_linear.h), along the whole of
// k, in registers. Every element is summed in one order, k upwards, whatever tile it falls in: rows
// never share an accumulator, and no path is chosen by the number of rows. Threads claim blocks of
// rows by runs of panels.
//
//   weight     instructions: the first that the compiler's target has       rows arrive as
//   float32    fused multiply-add                                           float32
//   bfloat16   AMX (TDPBF16PS); VDPBF16PS; float32 fused multiply-add       bfloat16
//   grouped    VPDPBUSD; VPMADDUBSW, VPMADDWD; plain integers               int8 in groups of 32
//
// AMX and VDPBF16PS add in different orders; which of them runs is fixed for the life of the
// process.
#include "cpu_amx.h"
#include "cpu_linear.h"
#include "cpu_threads.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <vector>

#define OCTAVO_NOINLINE __attribute__((noinline))

namespace octavo {
namespace {

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kRegisters = 32;
#else
constexpr int kRegisters = 16;
#endif

constexpr int64_t kMaxRows = 32;  // of any kernel's tile

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

// ---- float32 ------------------------------------------------------------------------------------

class Float32Kernel {
 public:
  static constexpr int64_t kRows = kRegisters == 32 ? 12 : 6;
  static constexpr int64_t kRowStep = 1;

  Float32Kernel(const LinearArgs& a, const WeightLayout&)
      : x_(static_cast<const float*>(a.x)), stride_(a.x_stride), size_(a.in_features) {}

  int64_t row_bytes() const { return size_ * 4; }
  void prepare(int64_t, int64_t, bool) {}

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

constexpr int64_t kPairs = kGroup / 2;                // of a step
constexpr int64_t kTileBytes = kPairs * kLanes * 4;   // half a panel's step

#if defined(__AVX512BF16__)

class Bfloat16Kernel {
 public:
  static constexpr int64_t kRows = 12;
  static constexpr int64_t kRowStep = 1;

  Bfloat16Kernel(const LinearArgs& a, const WeightLayout& layout)
      : packed_(kRowsBfloat16, a.capacity, a.in_features), x_(a.x), steps_(layout.steps) {}

  int64_t row_bytes() const { return packed_.padded * 2; }
  void prepare(int64_t, int64_t, bool) {}

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

  Bfloat16Kernel(const LinearArgs& a, const WeightLayout& layout)
      : packed_(kRowsBfloat16, a.capacity, a.in_features),
        x_(a.x),
        steps_(layout.steps),
        wide_(scratch(kRows * packed_.padded)) {}

  int64_t row_bytes() const { return packed_.padded * 2; }

  void prepare(int64_t row, int64_t count, bool) {
    for (int64_t r = 0; r < count; r++) {
      const bf16* x = packed_.bf16_row(x_, row + r);
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

class AmxBfloat16Kernel {
 public:
  static constexpr int64_t kRows = 32;
  static constexpr int64_t kRowStep = 16;

  AmxBfloat16Kernel(const LinearArgs& a, const WeightLayout& layout)
      : packed_(kRowsBfloat16, a.capacity, a.in_features), x_(a.x), steps_(layout.steps) {}

  int64_t row_bytes() const { return packed_.padded * 2; }

  void prepare(int64_t, int64_t count, bool is_cold) {
    tiles_.set_rows(count);
    is_cold_ = is_cold;
  }

  void run(int64_t row, int64_t count, const char* panel, float* out, int64_t out_stride) const {
    if (count <= 16)
      tile<false>(row, panel, out, out_stride);
    else
      tile<true>(row, panel, out, out_stride);
  }

 private:
  template <bool two>
  OCTAVO_NOINLINE void tile(int64_t row, const char* panel, float* out, int64_t out_stride) const {
    const bf16* x = packed_.bf16_row(x_, row);
    const int64_t stride = (packed_.bf16_row(x_, row + 1) - x) * 2;
    const bf16* lower = packed_.bf16_row(x_, row + 16);
    _tile_zero(0);
    _tile_zero(1);
    if (two) {
      _tile_zero(2);
      _tile_zero(3);
    }
    for (int64_t step = 0; step < steps_; step++, panel += 2 * kTileBytes) {
      if (is_cold_) fetch_ahead<2 * kTileBytes>(panel);
      if (two && step < 16) fetch_sums(out + 2 * step * out_stride, out_stride);
      _tile_loadd(4, x + step * kGroup, stride);
      _tile_loadd(6, panel, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, panel + kTileBytes, 64);
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
  }

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
  int64_t steps_;
  Tiles tiles_;
  bool is_cold_ = true;
};

#endif

// ---- GGUF's groups ------------------------------------------------------------------------------

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
  return sum + (vint)even + (vint)odd;
#elif defined(__AVX2__) && !defined(__AVX512F__)
  const __m256i a = (__m256i)w, b = (__m256i)x;
  const __m256i even = _mm256_madd_epi16(_mm256_and_si256(a, _mm256_set1_epi16(255)),
                                         _mm256_srai_epi16(_mm256_slli_epi16(b, 8), 8));
  const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(a, 8), _mm256_srai_epi16(b, 8));
  return sum + (vint)even + (vint)odd;
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
  return (vint)_mm512_add_epi16((__m512i)sum, _mm512_maddubs_epi16((__m512i)w, (__m512i)x));
#elif defined(__AVX2__) && !defined(__AVX512F__)
  return (vint)_mm256_add_epi16((__m256i)sum, _mm256_maddubs_epi16((__m256i)w, (__m256i)x));
#else
  return add_products(sum, w, x);
#endif
}

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

// Bytes of one panel's group: its numbers, and all of it.
template <int64_t kind>
constexpr int64_t kNumberBytes = kPanel * (kind == kWeightQ8_0 ? kGroup : kGroup / 2);
template <int64_t kind>
constexpr int64_t kGroupBytes = kNumberBytes<kind> + kPanel * (kind == kWeightQ4_1 ? 4 : 2);

constexpr int64_t kQuadBytes = kPanel * 4;
constexpr int32_t kNibbles = 0x0f0f0f0f;

// What makes values of a panel's group of dot products.
template <int64_t kind>
struct Factors {
  vfloat d0, d1, m0, m1;

  OCTAVO_INLINE explicit Factors(const char* group) {
    const uint16_t* at = reinterpret_cast<const uint16_t*>(group + kNumberBytes<kind>);
    d0 = load_half(at);
    d1 = load_half(at + kLanes);
    if (kind == kWeightQ4_1) {
      m0 = load_half(at + 2 * kLanes);
      m1 = load_half(at + 3 * kLanes);
    }
  }

  // Adds to one row's sums. The dot products are of the stored numbers, which are never negative;
  // `sum_of_x` takes back what they were shifted by.
  OCTAVO_INLINE void add(vfloat (&sums)[2], vint dot0, vint dot1, float scale,
                         float sum_of_x) const {
    const vfloat product0 = __builtin_convertvector(dot0, vfloat);
    const vfloat product1 = __builtin_convertvector(dot1, vfloat);
    if (kind == kWeightQ4_1) {
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

  GroupedKernel(const LinearArgs& a, const WeightLayout& layout)
      : packed_(kRowsInt8, a.capacity, a.in_features),
        x_(a.x),
        groups_(layout.steps) {}

  int64_t row_bytes() const { return packed_.padded + packed_.groups * 8; }
  void prepare(int64_t, int64_t, bool) {}

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
      vint dots[R][2] = {};
      add_group<R>(dots, rows, group * kGroup, panel);
      const Factors<kind> factors(panel);
#pragma GCC unroll 6
      for (int r = 0; r < R; r++)
        factors.add(sums[r], dots[r][0], dots[r][1], *scales.at(r, group),
                    *sums_of_x.at(r, group));
    }
    store_tile<R>(sums, out, out_stride);
  }

 private:
  template <int R>
  OCTAVO_INLINE static void add_group(vint (&dots)[R][2], const Rows<int8_t, R>& rows, int64_t k,
                                      const char* numbers) {
#pragma GCC unroll 8
    for (int quad = 0; quad < (kind == kWeightQ8_0 ? 8 : 4); quad++) {
      const vint w0 = load_words(numbers + quad * kQuadBytes);
      const vint w1 = load_words(numbers + quad * kQuadBytes + kQuadBytes / 2);
      if (kind == kWeightQ8_0) {
        add_quad<R>(dots, rows, k + quad * 4, w0, w1);
      } else {
        add_quad<R>(dots, rows, k + quad * 4, w0 & kNibbles, w1 & kNibbles);
        add_quad<R>(dots, rows, k + 16 + quad * 4, (w0 >> 4) & kNibbles, (w1 >> 4) & kNibbles);
      }
    }
    if (kind == kWeightQ8_0) return;
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
        dots[r][half] = kind == kWeightQ8_0 ? add_products(dots[r][half], w, x)
                                            : add_small_products(dots[r][half], w, x);
      }
    }
  }

  PackedRows packed_;
  const void* x_;
  int64_t groups_;
};

// ---- the work and its threads -------------------------------------------------------------------

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Of one processor's second-level cache.
int64_t cache_bytes() {
#if defined(_SC_LEVEL2_CACHE_SIZE)
  static const int64_t size = std::max<int64_t>(sysconf(_SC_LEVEL2_CACHE_SIZE), 256 << 10);
  return size;
#else
  return 512 << 10;
#endif
}

// Rows and panels that a thread takes at once: a block of rows, a run of panels, and what they
// write, which all fit in the second-level cache together.
struct Plan {
  static constexpr int64_t kUnitsPerThread = 8;

  int64_t rows, panels;
  int64_t block, blocks;  // rows of a block
  int64_t run, runs;      // panels of a run
  int64_t tile;           // rows of a tile

  Plan(int64_t rows, const WeightLayout& layout, int64_t row_bytes, int64_t tile_rows,
       int64_t row_step, int64_t num_threads)
      : rows(rows), panels(layout.panels) {
    const int64_t fitting = cache_bytes() * 5 / 16 / std::max<int64_t>(row_bytes, 1);
    const int64_t most = std::max(fitting, tile_rows);
    block = divide_up(divide_up(rows, divide_up(rows, most)), tile_rows) * tile_rows;
    blocks = divide_up(rows, block);
    const int64_t tiles = divide_up(std::min(rows, block), tile_rows);
    tile = divide_up(divide_up(std::min(rows, block), tiles), row_step) * row_step;
    const int64_t fits = cache_bytes() * 7 / 32 / std::max<int64_t>(layout.panel_bytes, 1);
    const int64_t fair = panels * blocks / (kUnitsPerThread * num_threads);
    run = std::max<int64_t>(std::min(fits, fair), 1);
    runs = divide_up(panels, run);
  }
};

// One tile, with what a kernel does not do: the bias, and columns past the last.
template <typename Kernel>
void write_tile(const LinearArgs& a, const Kernel& kernel, int64_t row, int64_t count,
                const char* weight, int64_t column) {
  float* out = a.out + row * a.out_stride + column;
  const int64_t columns = std::min(kPanel, a.out_features - column);
  if (columns == kPanel && a.bias == nullptr) {
    kernel.run(row, count, weight, out, a.out_stride);
    return;
  }
  alignas(64) float buffer[kMaxRows * kPanel];
  kernel.run(row, count, weight, buffer, kPanel);
  for (int64_t r = 0; r < count; r++) {
    const float* from = buffer + r * kPanel;
    float* to = out + r * a.out_stride;
    if (a.bias == nullptr)
      std::copy(from, from + columns, to);
    else
      for (int64_t n = 0; n < columns; n++) to[n] = from[n] + a.bias[column + n];
  }
}

template <typename Kernel>
void product(const LinearArgs& a, const Team& team) {
  static_assert(Kernel::kRows <= kMaxRows, "write_tile's buffer");
  if (*a.num_tokens == 0 || a.out_features == 0) return;
  const WeightLayout layout(a.kind, a.out_features, a.in_features);
  Kernel kernel(a, layout);
  const Plan plan(*a.num_tokens, layout, kernel.row_bytes(), Kernel::kRows, Kernel::kRowStep,
                  team.size);
  const char* weight = static_cast<const char*>(a.weight);
  team.claim(plan.blocks * plan.runs, 1, [&](int64_t unit, int64_t) {
    const int64_t begin = unit / plan.runs * plan.block;
    const int64_t end = std::min(begin + plan.block, plan.rows);
    const int64_t first = unit % plan.runs * plan.run;
    const int64_t last = std::min(first + plan.run, plan.panels);
    for (int64_t row = begin; row < end; row += plan.tile) {
      const int64_t count = std::min(plan.tile, end - row);
      kernel.prepare(row, count, row == begin);
      for (int64_t panel = first; panel < last; panel++)
        write_tile(a, kernel, row, count, weight + panel * layout.panel_bytes, panel * kPanel);
    }
  });
}

// ---- packing ------------------------------------------------------------------------------------

// The rows of one panel: `rows[n]` for n < count. In a mapped file they may lie at any address.
struct Source {
  const char* first;
  int64_t stride;
  int64_t count;

  const char* row(int64_t n) const { return first + n * stride; }
};

void pack_float32(const Source& source, int64_t size, float* packed) {
  constexpr int64_t kStretch = 16;  // of a row at a time: a cache line
  for (int64_t begin = 0; begin < size; begin += kStretch) {
    const int64_t end = std::min(begin + kStretch, size);
    for (int64_t n = 0; n < source.count; n++)
      for (int64_t k = begin; k < end; k++)
        std::memcpy(packed + k * kPanel + n, source.row(n) + k * 4, 4);
  }
}

void pack_bfloat16(const Source& source, int64_t size, bf16* packed) {
  for (int64_t begin = 0; begin < size; begin += kGroup, packed += kPanel * kGroup) {
    const int64_t count = std::min(kGroup, size - begin);
    for (int64_t n = 0; n < source.count; n++) {
      const char* from = source.row(n) + begin * 2;
      bf16* to = packed + n / kLanes * kTileBytes / 2 + n % kLanes * 2;
      int64_t k = 0;
      for (; k + 1 < count; k += 2) std::memcpy(to + k * kLanes, from + k * 2, 4);
      if (k < count) std::memcpy(to + k * kLanes, from + k * 2, 2);
    }
  }
}

// A block of GGUF is d, m (Q4_1 only), then 16 or 32 bytes of numbers.
void pack_groups(const Source& source, int64_t kind, const WeightLayout& layout, char* packed) {
  const int64_t number_bytes = kind == kWeightQ8_0 ? kGroup : kGroup / 2;
  const int64_t num_factors = kind == kWeightQ4_1 ? 2 : 1;
  const int64_t block_bytes = num_factors * 2 + number_bytes;
  // q + 128 is a flip of the top bit.
  const uint32_t shift = kind == kWeightQ8_0 ? 0x80808080u : 0;
  for (int64_t group = 0; group < layout.steps; group++, packed += layout.step_bytes) {
    for (int64_t n = 0; n < source.count; n++) {
      const char* block = source.row(n) + group * block_bytes;
      for (int64_t i = 0; i < num_factors; i++)
        std::memcpy(packed + number_bytes * kPanel + (i * kPanel + n) * 2, block + 2 * i, 2);
      for (int64_t i = 0; i < number_bytes; i += 4) {
        uint32_t quad;
        std::memcpy(&quad, block + num_factors * 2 + i, 4);
        quad ^= shift;
        std::memcpy(packed + i * kPanel + n * 4, &quad, 4);
      }
    }
  }
}

void pack_panel(int64_t kind, const Source& source, int64_t in_features, const WeightLayout& layout,
                char* packed) {
  std::memset(packed, 0, layout.panel_bytes);
  if (kind == kWeightFloat32)
    pack_float32(source, in_features, reinterpret_cast<float*>(packed));
  else if (kind == kWeightBfloat16)
    pack_bfloat16(source, in_features, reinterpret_cast<bf16*>(packed));
  else
    pack_groups(source, kind, layout, packed);
}

}  // namespace

void linear_part(const LinearArgs& a, const Team& team) {
  switch (a.kind) {
    case kWeightFloat32: return product<Float32Kernel>(a, team);
    case kWeightBfloat16:
#if defined(OCTAVO_AMX)
      if (may_use_tiles()) return product<AmxBfloat16Kernel>(a, team);
#endif
      return product<Bfloat16Kernel>(a, team);
    case kWeightQ4_0: return product<GroupedKernel<kWeightQ4_0>>(a, team);
    case kWeightQ4_1: return product<GroupedKernel<kWeightQ4_1>>(a, team);
    case kWeightQ8_0: return product<GroupedKernel<kWeightQ8_0>>(a, team);
  }
}

}  // namespace octavo

int64_t octavo_packed_size(int64_t kind, int64_t out_features, int64_t in_features) {
  return octavo::WeightLayout(kind, out_features, in_features).bytes();
}

void octavo_pack_weight(int64_t kind, const void* source, int64_t source_stride,
                        int64_t out_features, int64_t in_features, void* packed,
                        int64_t num_threads) {
  using namespace octavo;
  const WeightLayout layout(kind, out_features, in_features);
  std::atomic<int64_t> next{0};
  run_team(num_threads, [&](int64_t rank, int64_t size) {
    Team{rank, size, &next}.claim(layout.panels, 1, [&](int64_t panel, int64_t) {
      const int64_t first = panel * kPanel;
      const Source rows{static_cast<const char*>(source) + first * source_stride, source_stride,
                        std::min(kPanel, out_features - first)};
      pack_panel(kind, rows, in_features, layout,
                 static_cast<char*>(packed) + panel * layout.panel_bytes);
    });
  });
}
