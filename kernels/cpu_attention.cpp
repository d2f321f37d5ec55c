// Attention over paged keys and values, and the writes to them. cpu_kv.h has the layout and the
// reasons for it.
//
// One kernel for decode, chunked prefill and prefix hits: a query token at position p sees the keys
// 0 .. p of its row (the last `window` of them with a sliding window), wherever they were stored. A
// work item is a few neighbouring query tokens of one row and the query heads of one KV head; each
// pair of a token and a head is a "line" here. All lines of an item share every load of keys and
// values. An item has three phases:
//
//   scores    line x key, tiles of up to kTileLines lines and kTileVectors vectors of keys
//   softmax   per line, in float32, over the whole line of scores; weights replace scores in place
//   output    line x dimension, tiles alike, over the keys in order; divided by the sum of the
//             weights at the end
//
// With AVX-512-BF16, a bf16 cache is multiplied by queries and weights that are rounded to bf16 and
// summed in float32; elsewhere all factors are float32. Where there is AMX, and blocks are made of
// whole tiles, tiles are multiplied. That adds in another order, so it is done for all tokens or
// for none: the shape of the cache decides.
//
// The output of a line is bit-equal whatever shares its item, its chunk or its batch: every score
// is one chain of additions over the dimensions; the weights are summed in lanes by position in the
// row; every output is one chain over the words of values that the token sees, and words that it
// sees in part are masked. What a token does not see is selected away or skipped, not multiplied by
// zero, so it may be anything, NaN too, and nobody need clear a block. Only a tile multiplies by
// zero what some of its lines do not see; where that is not finite, tokens are done one by one.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <new>
#include <type_traits>

#include "cpu_amx.h"
#include "cpu_kv.h"
#include "cpu_ops.h"
#include "cpu_team.h"
#include "cpu_vec.h"

namespace octavo {
namespace {

constexpr int kTileLines = 6;
constexpr int kTileVectors = 4;
constexpr int64_t kItemLines = 12;    // of an item, where vectors are multiplied
constexpr int64_t kBaseStep = 32;     // an item's scores begin at a multiple of this position
constexpr int64_t kAheadTokens = 32;  // how far keys and values are asked for before they are read
static_assert(kTileLines * kTileVectors <= 24, "sums must stay in registers");

OCTAVO_INLINE vword load_words(const uint32_t* p) {
  vword v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

// The first `count` words; the rest is zero and not read.
OCTAVO_INLINE vword load_words(const uint32_t* p, int count) {
#if defined(__AVX512F__)
  return (vword)_mm512_maskz_loadu_epi32(__mmask16((1u << count) - 1), p);
#else
  if (count == kLanes) return load_words(p);
  vword v{};
  for (int i = 0; i < count; i++) v[i] = p[i];
  return v;
#endif
}

constexpr int64_t kLineWords = 16;  // of a line of memory

// Asks for the line that holds a word: blocks lie anywhere, so the processor cannot guess the next.
OCTAVO_INLINE void prefetch(const uint32_t* word) { __builtin_prefetch(word); }

// How a cache's words are multiplied by factors, which are a query's dimensions or tokens' weights.
//
//   kMaxItemLines     lines of an item, at most, unless one token has more
//   kMultipliesTiles  a line's weights are also multiplied by what only other lines of its item see
//   Tiles             what one thread holds while it works on an op

struct Float32Cache {
  typedef float Factor;
  static constexpr int kPerWord = 1;
  static constexpr int64_t kMaxItemLines = kItemLines;
  static constexpr bool kMultipliesTiles = false;
  struct Tiles {};

  static OCTAVO_INLINE vfloat add(vfloat sum, vword words, const Factor* factor) {
    return fma((vfloat)words, splat(factor[0]), sum);
  }
};

#if defined(__AVX512BF16__)
struct Bf16Cache {
  typedef bf16 Factor;
  static constexpr int kPerWord = 2;
  static constexpr int64_t kMaxItemLines = kItemLines;
  static constexpr bool kMultipliesTiles = false;
  struct Tiles {};

  static OCTAVO_INLINE vfloat add(vfloat sum, vword words, const Factor* factor) {
    int32_t pair;
    std::memcpy(&pair, factor, sizeof pair);
    return _mm512_dpbf16_ps(sum, (__m512bh)words, (__m512bh)_mm512_set1_epi32(pair));
  }
};
#else
struct Bf16Cache {
  typedef float Factor;
  static constexpr int kPerWord = 2;
  static constexpr int64_t kMaxItemLines = kItemLines;
  static constexpr bool kMultipliesTiles = false;
  struct Tiles {};

  static OCTAVO_INLINE vfloat add(vfloat sum, vword words, const Factor* factor) {
    sum = fma((vfloat)(words << 16), splat(factor[0]), sum);
    return fma((vfloat)(words & 0xffff0000u), splat(factor[1]), sum);
  }
};
#endif

#if defined(OCTAVO_AMX)
constexpr int64_t kTileRows = 16;

// A bf16 cache whose blocks are made of whole AMX tiles. The layout is the one that tiles want: 16
// steps of 16 neighbouring words, which are multiplied by rows of factors, one row a line.
struct Bf16TileCache {
  typedef bf16 Factor;
  static constexpr int kPerWord = 2;
  static constexpr int64_t kMaxItemLines = kTileRows;
  static constexpr bool kMultipliesTiles = true;

  static bool can_hold(int64_t block_size, int64_t head_dim) {
    return block_size % kTileRows == 0 && head_dim % (2 * kTileRows) == 0 && may_use_tiles();
  }

  // 0 .. 3: sums. 4: queries, 5: weights. 6: keys, 7: values.
  class Tiles {
   public:
    explicit Tiles(int64_t block_size) : value_steps(block_size % (2 * kTileRows) ? 8 : 16) {}
    ~Tiles() { _tile_release(); }  // a thread with live tiles costs more to switch
    Tiles(const Tiles&) = delete;
    Tiles& operator=(const Tiles&) = delete;

    void set_lines(int64_t lines) {
      if (lines == lines_) return;
      lines_ = lines;
      TileShapes shapes;
      for (int i = 0; i < 4; i++) shapes.set(i, lines, 64);
      shapes.set(4, lines, 64);
      shapes.set(5, lines, value_steps * 4);
      shapes.set(6, kTileRows, 64);
      shapes.set(7, value_steps, 64);
      shapes.load();
    }

    const int64_t value_steps;  // of one tile of values; it lies in one block

   private:
    int64_t lines_ = 0;
  };
};
#endif

// Memory of one thread for one item; grows to the largest that was asked for.
class Scratch {
 public:
  ~Scratch() { std::free(memory_); }

  void* get(int64_t bytes) {
    if (bytes > size_) {
      int64_t size = 4096;
      while (size < bytes) size *= 2;
      std::free(memory_);
      memory_ = std::aligned_alloc(64, size);
      size_ = memory_ ? size : 0;
      if (!memory_) throw std::bad_alloc();
    }
    return memory_;
  }

 private:
  void* memory_ = nullptr;
  int64_t size_ = 0;
};

thread_local Scratch item_scratch;
thread_local Scratch order_scratch;

constexpr int64_t round_up(int64_t n, int64_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

// Keys that one line sees: positions first .. end - 1.
struct Span {
  int64_t first, end;
};

// A vector of keys of neighbouring tokens of one block.
struct KeyVector {
  const uint32_t* words;
  const uint32_t* ahead;  // the words of a later vector
  int64_t position;       // of the first token in the row
  int count;
};

// One item: what its phases share. `Cache` says how words are multiplied.
template <typename Cache>
struct Item {
  typedef typename Cache::Factor Factor;

  KVLayout layout;
  const uint32_t *keys, *values;  // of the layer
  const int32_t* blocks;          // of the row
  int64_t kv_head;
  int64_t num_lines;
  Factor* queries;  // [num_lines][query_stride], zero past head_dim
  int64_t query_stride;
  float* scores;  // [num_lines][score_stride], from position `base`; weights() replace them
  int64_t score_stride;
  int64_t base;
  Span* spans;  // [num_lines]
  float* sums;  // [num_lines], of the weights
  float** outs;  // [num_lines]
  typename Cache::Tiles* tiles;  // of this thread

  const uint32_t* block_keys(int64_t b) const { return keys + layout.keys(blocks[b], kv_head); }
  const uint32_t* block_values(int64_t b) const {
    return values + layout.values(blocks[b], kv_head);
  }

  Factor* weights(int64_t line) const {
    return reinterpret_cast<Factor*>(scores + line * score_stride);
  }
};

// Scores of R lines and C vectors of keys.
template <typename Cache, int R, int C>
void score_tile(const Item<Cache>& item, int64_t line, const KeyVector* vectors) {
  vfloat sums[R][C] = {};
  const int64_t steps = item.layout.key_steps(), stride = item.layout.block_size;
  const typename Cache::Factor* query = item.queries + line * item.query_stride;
  for (int64_t i = 0; i < steps; i++) {
    vword words[C];
#pragma GCC unroll 8
    for (int c = 0; c < C; c++) {
      const uint32_t* from = vectors[c].words + i * stride;
      words[c] = C == 1 ? load_words(from, vectors[c].count) : load_words(from);
      prefetch(vectors[c].ahead + i * stride);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
#pragma GCC unroll 8
      for (int c = 0; c < C; c++) {
        sums[r][c] =
            Cache::add(sums[r][c], words[c], query + r * item.query_stride + i * Cache::kPerWord);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) {
    float* to = item.scores + (line + r) * item.score_stride - item.base;
#pragma GCC unroll 8
    for (int c = 0; c < C; c++) store(to + vectors[c].position, sums[r][c]);
  }
}

// All ones in the halves of a word of values that hold tokens of `span`, where the word's first
// token is `position` and its block ends before `block_end`.
template <typename Cache>
OCTAVO_INLINE uint32_t visible(Span span, int64_t position, int64_t block_end) {
  const int64_t end = std::min(span.end, block_end);
  uint32_t mask = 0;
  for (int j = 0; j < Cache::kPerWord; j++) {
    const uint32_t part = Cache::kPerWord == 1 ? ~0u : 0xffffu << (16 * j);
    if (position + j >= span.first && position + j < end) mask |= part;
  }
  return mask;
}

// Output of R lines in C vectors of dimensions, the first at `dim`. With C == 1, only `count` of
// its dimensions exist.
template <typename Cache, int R, int C>
void output_tile(const Item<Cache>& item, int64_t line, int64_t dim, int count) {
  typedef typename Cache::Factor Factor;
  constexpr int64_t kPer = Cache::kPerWord;
  const int64_t block_size = item.layout.block_size, head_dim = item.layout.head_dim;
  Span any = item.spans[line], all = any;  // seen by some line, by every line
  for (int r = 1; r < R; r++) {
    const Span span = item.spans[line + r];
    any = {std::min(any.first, span.first), std::max(any.end, span.end)};
    all = {std::max(all.first, span.first), std::min(all.end, span.end)};
  }
  const Factor* weights = item.weights(line) - item.base;
  const int64_t weight_stride = item.score_stride * sizeof(float) / sizeof(Factor);
  const int64_t last = (any.end - 1) / block_size, ahead_blocks = kAheadTokens / block_size + 1;
  vfloat sums[R][C] = {};
  for (int64_t b = any.first / block_size; b <= last; b++) {
    const int64_t start = b * block_size, stop = start + block_size;
    const uint32_t* values = item.block_values(b) + dim;
    const uint32_t* ahead = item.block_values(std::min(b + ahead_blocks, last)) + dim;
    // Words begin .. end - 1 of this block have a token that is seen; from whole_begin to
    // whole_end, all are by all.
    const int64_t begin = (std::max(any.first, start) - start) / kPer;
    const int64_t end = (std::min(any.end, stop) - start + kPer - 1) / kPer;
    const int64_t whole_begin = (std::max(all.first, start) - start + kPer - 1) / kPer;
    const int64_t whole_end = (std::min(all.end, stop) - start) / kPer;
    for (int64_t t = begin; t < end;) {
      vword words[C];
      if (t >= whole_begin && t < whole_end) {
        const Factor* weight = weights + start;
        for (; t < whole_end; t++) {
#pragma GCC unroll 8
          for (int c = 0; c < C; c++) {
            const uint32_t* from = values + t * head_dim + c * kLanes;
            words[c] = C == 1 ? load_words(from, count) : load_words(from);
            prefetch(ahead + t * head_dim + c * kLanes);
          }
#pragma GCC unroll 8
          for (int r = 0; r < R; r++) {
#pragma GCC unroll 8
            for (int c = 0; c < C; c++) {
              sums[r][c] = Cache::add(sums[r][c], words[c], weight + r * weight_stride + t * kPer);
            }
          }
        }
      } else {
#pragma GCC unroll 8
        for (int c = 0; c < C; c++) {
          const uint32_t* from = values + t * head_dim + c * kLanes;
          words[c] = C == 1 ? load_words(from, count) : load_words(from);
        }
        const int64_t position = start + t * kPer;
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
          const uint32_t mask = visible<Cache>(item.spans[line + r], position, stop);
          if (!mask) continue;
          Factor factors[kPer];
          for (int j = 0; j < kPer; j++) {
            const bool is_seen = mask >> (16 * j) & 1;
            factors[j] = is_seen ? weights[r * weight_stride + position + j] : Factor(0);
          }
#pragma GCC unroll 8
          for (int c = 0; c < C; c++) sums[r][c] = Cache::add(sums[r][c], words[c] & mask, factors);
        }
        t++;
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) {
    const vfloat scale = splat(1.0f / item.sums[line + r]);
    float* to = item.outs[line + r] + dim;
    if (C == 1) {
      store_some(to, sums[r][0] * scale, count);
    } else {
#pragma GCC unroll 8
      for (int c = 0; c < C; c++) store(to + c * kLanes, sums[r][c] * scale);
    }
  }
}

// The tiles of R = 1 .. kTileLines lines, with C vectors.
template <typename Cache, int C>
constexpr void (*kScoreTiles[])(const Item<Cache>&, int64_t, const KeyVector*) = {
    score_tile<Cache, 1, C>, score_tile<Cache, 2, C>, score_tile<Cache, 3, C>,
    score_tile<Cache, 4, C>, score_tile<Cache, 5, C>, score_tile<Cache, 6, C>};
template <typename Cache, int C>
constexpr void (*kOutputTiles[])(const Item<Cache>&, int64_t, int64_t, int) = {
    output_tile<Cache, 1, C>, output_tile<Cache, 2, C>, output_tile<Cache, 3, C>,
    output_tile<Cache, 4, C>, output_tile<Cache, 5, C>, output_tile<Cache, 6, C>};

// Calls work(line, count) for tiles of at most `most` lines that are as even as can be.
template <typename Work>
void for_tiles(int64_t num_lines, int64_t most, Work work) {
  const int64_t num_tiles = (num_lines + most - 1) / most;
  for (int64_t i = 0; i < num_tiles; i++) {
    const int64_t begin = num_lines * i / num_tiles, end = num_lines * (i + 1) / num_tiles;
    work(begin, end - begin);
  }
}

template <typename Cache>
void score_vectors(const Item<Cache>& item, const KeyVector* vectors, int count) {
  for_tiles(item.num_lines, kTileLines, [&](int64_t line, int64_t lines) {
    if (count == kTileVectors) {
      kScoreTiles<Cache, kTileVectors>[lines - 1](item, line, vectors);
    } else {
      for (int i = 0; i < count; i++) kScoreTiles<Cache, 1>[lines - 1](item, line, vectors + i);
    }
  });
}

// Position of the first key of the first vector that holds a key of `span`.
int64_t first_vector(const KVLayout& layout, Span span) {
  const int64_t in_block = span.first % layout.block_size;
  return span.first - in_block + in_block / kLanes * kLanes;
}

// Scores of all lines with the keys of `span` and of the vectors that these lie in.
template <typename Cache>
void compute_scores(const Item<Cache>& item, Span span) {
  const int64_t block_size = item.layout.block_size;
  KeyVector vectors[kTileVectors];
  int count = 0;
  const auto flush = [&] {
    score_vectors(item, vectors, count);
    count = 0;
  };
  for (int64_t position = first_vector(item.layout, span); position < span.end;) {
    const int64_t b = position / block_size, offset = position % block_size;
    const int64_t later = std::min(position + kAheadTokens, span.end - 1);
    const uint32_t* ahead = item.block_keys(later / block_size) + later % block_size;
    const int width = int(std::min<int64_t>(kLanes, block_size - offset));
    // A vector cut short by its block's end also writes where the next one will, so it goes alone,
    // in order.
    if (width < kLanes) flush();
    vectors[count++] = {item.block_keys(b) + offset, ahead, position, width};
    if (width < kLanes || count == kTileVectors) flush();
    position += width;
  }
  flush();
}

OCTAVO_INLINE vfloat vtanh(vfloat x) { return 1.0f - 2.0f / (vexp(x * 2.0f) + 1.0f); }

OCTAVO_INLINE void store_factors(float* to, vfloat v) { store(to, v); }
[[maybe_unused]] OCTAVO_INLINE void store_factors(bf16* to, vfloat v) { store(to, v); }

constexpr int kStepVectors = int(kBaseStep) / kLanes;

template <typename Factor>
OCTAVO_INLINE void store_step(Factor* to, const vfloat (&v)[kStepVectors]) {
#if defined(__AVX512BF16__)
  if constexpr (sizeof(Factor) == 2) {
    const __m512bh both = _mm512_maskz_cvtne2ps_pbh(0xffffffffu, v[1], v[0]);
    std::memcpy(to, &both, sizeof both);
    return;
  }
#endif
  for (int j = 0; j < kStepVectors; j++) store_factors(to + j * kLanes, v[j]);
}

// Turns the line's scores into weights, exp(score - the largest), and returns their sum. Steps of
// kBaseStep begin at multiples of that position in the row, so that the order of the sum depends on
// nothing but what the line sees.
template <typename Cache>
float softmax(const Item<Cache>& item, int64_t line, float scale, float soft_cap) {
  float* scores = item.scores + line * item.score_stride;
  typedef typename Cache::Factor Factor;
  Factor* weights = item.weights(line);
  const int first = int(item.spans[line].first - item.base);
  const int end = int(item.spans[line].end - item.base);
  const int begin = first / int(kBaseStep) * int(kBaseStep);
  vint lane{};
  for (int i = 0; i < kLanes; i++) lane[i] = i;
  const auto select = [&](int k, vfloat v, vfloat otherwise) {
    const vint at = lane + k;
    return ((at >= first) & (at < end)) ? v : otherwise;
  };
  // Calls work(k, whether all of the step is seen) for each step.
  const auto for_steps = [&](auto work) {
    int k = begin;
    if (k < first) work(k, std::false_type()), k += kBaseStep;
    for (; k + kBaseStep <= end; k += kBaseStep) work(k, std::true_type());
    if (k < end) work(k, std::false_type());
  };
  if (soft_cap != 0.0f) {
    for (int k = begin; k < end; k += kLanes) {
      store(scores + k, vtanh(load(scores + k) * (scale / soft_cap)) * soft_cap);
    }
    scale = 1.0f;
  }
  vfloat most[kStepVectors];
  for (int j = 0; j < kStepVectors; j++) most[j] = splat(-INFINITY);
  for_steps([&](int k, auto is_whole) {
#pragma GCC unroll 8
    for (int j = 0; j < kStepVectors; j++) {
      const int at = k + j * kLanes;
      vfloat v = load(scores + at);
      if (!is_whole) v = select(at, v, most[j]);
      most[j] = vmax(v, most[j]);
    }
  });
  for (int j = 1; j < kStepVectors; j++) most[0] = vmax(most[j], most[0]);
  const float factor = scale * 1.44269504088896341f, offset = -largest(most[0]) * factor;
  vfloat totals[kStepVectors] = {};
  for_steps([&](int k, auto is_whole) {
    vfloat step[kStepVectors];
#pragma GCC unroll 8
    for (int j = 0; j < kStepVectors; j++) {
      const int at = k + j * kLanes;
      step[j] = exp2_below_zero(fma(load(scores + at), splat(factor), splat(offset)));
      if (!is_whole) step[j] = select(at, step[j], vfloat{});
      totals[j] += step[j];
    }
    store_step(weights + k, step);
  });
  if (Cache::kMultipliesTiles) {  // by values that other lines of the tile see
    const int64_t stop = round_up(item.spans[item.num_lines - 1].end - item.base, kBaseStep);
    std::fill(weights, weights + begin, Factor(0));
    std::fill(weights + round_up(end, kBaseStep), weights + stop, Factor(0));
  }
  for (int j = 1; j < kStepVectors; j++) totals[0] += totals[j];
  return sum(totals[0]);
}

// Ask for what the first kAheadTokens tokens of `span` have.
template <typename Cache>
void prefetch_keys(const Item<Cache>& item, Span span) {
  const int64_t block_size = item.layout.block_size, steps = item.layout.key_steps();
  const int64_t end = std::min(span.end, span.first + kAheadTokens);
  for (int64_t position = first_vector(item.layout, span); position < end;) {
    const int64_t offset = position % block_size;
    const uint32_t* words = item.block_keys(position / block_size) + offset;
    for (int64_t i = 0; i < steps; i++) prefetch(words + i * block_size);
    position += std::min(kLineWords, block_size - offset);
  }
}

template <typename Cache>
void prefetch_values(const Item<Cache>& item, Span span) {
  constexpr int64_t kPer = Cache::kPerWord;
  const int64_t block_size = item.layout.block_size, head_dim = item.layout.head_dim;
  const int64_t end = std::min(span.end, span.first + kAheadTokens);
  for (int64_t position = span.first; position < end;) {
    const int64_t b = position / block_size, start = b * block_size;
    const int64_t stop = std::min(end, start + block_size);
    const uint32_t* values = item.block_values(b);
    const int64_t words = (stop - start + kPer - 1) / kPer * head_dim;
    for (int64_t i = (position - start) / kPer * head_dim; i < words; i += kLineWords) {
      prefetch(values + i);
    }
    position = stop;
  }
}

// Outputs of all lines. Whether it could be done; false only for tiles.
template <typename Cache>
bool compute_output(const Item<Cache>& item) {
  const int64_t head_dim = item.layout.head_dim;
  for_tiles(item.num_lines, kTileLines, [&](int64_t line, int64_t lines) {
    int64_t dim = 0;
    for (; dim + kTileVectors * kLanes <= head_dim; dim += kTileVectors * kLanes) {
      kOutputTiles<Cache, kTileVectors>[lines - 1](item, line, dim, kLanes);
    }
    for (; dim < head_dim; dim += kLanes) {
      const int count = int(std::min<int64_t>(kLanes, head_dim - dim));
      kOutputTiles<Cache, 1>[lines - 1](item, line, dim, count);
    }
  });
  return true;
}

#if defined(OCTAVO_AMX)

// The twins of compute_scores and compute_output for tiles.

void compute_scores(const Item<Bf16TileCache>& item, Span span) {
  const int64_t block_size = item.layout.block_size, row_bytes = block_size * 4;
  const int64_t dim_tiles = item.layout.head_dim / (2 * kTileRows);
  const int64_t query_bytes = item.query_stride * sizeof(bf16);
  const int64_t score_bytes = item.score_stride * sizeof(float);
  for_tiles(item.num_lines, kTileRows, [&](int64_t line, int64_t lines) {
    item.tiles->set_lines(lines);
    const bf16* queries = item.queries + line * item.query_stride;
    float* scores = item.scores + line * item.score_stride - item.base;
    int64_t position = first_vector(item.layout, span);
    while (position < span.end) {
      const int64_t left = (span.end - position + kTileRows - 1) / kTileRows;
      const int count = int(std::min<int64_t>(left, kTileVectors));
      const uint32_t* keys[kTileVectors];
      for (int c = 0; c < count; c++) {
        const int64_t at = position + c * kTileRows;
        keys[c] = item.block_keys(at / block_size) + at % block_size;
        if (lines > kTileRows / 2) continue;  // many lines take long enough
        const int64_t later = std::min(at + kAheadTokens, span.end - 1) / kTileRows * kTileRows;
        const uint32_t* ahead = item.block_keys(later / block_size) + later % block_size;
        for (int64_t i = 0; i < item.layout.key_steps(); i++) prefetch(ahead + i * block_size);
      }
      asm volatile("" ::: "memory");  // the intrinsics do not say that they read memory
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
      for (int64_t i = 0; i < dim_tiles; i++) {
        const int64_t words = i * kTileRows * block_size;
        _tile_loadd(4, queries + i * 2 * kTileRows, query_bytes);
        _tile_loadd(6, keys[0] + words, row_bytes);
        _tile_dpbf16ps(0, 4, 6);
        if (count > 1) {
          _tile_loadd(6, keys[1] + words, row_bytes);
          _tile_dpbf16ps(1, 4, 6);
        }
        if (count > 2) {
          _tile_loadd(6, keys[2] + words, row_bytes);
          _tile_dpbf16ps(2, 4, 6);
        }
        if (count > 3) {
          _tile_loadd(6, keys[3] + words, row_bytes);
          _tile_dpbf16ps(3, 4, 6);
        }
      }
      float* to = scores + position;
      _tile_stored(0, to, score_bytes);
      if (count > 1) _tile_stored(1, to + kTileRows, score_bytes);
      if (count > 2) _tile_stored(2, to + 2 * kTileRows, score_bytes);
      if (count > 3) _tile_stored(3, to + 3 * kTileRows, score_bytes);
      asm volatile("" ::: "memory");
      position += count * kTileRows;
    }
  });
}

constexpr int64_t kSeenWidth = kTileVectors * kTileRows;

// Copies `steps` rows of `width` words of values, the first token at `position`, without the tokens
// that no line sees, to rows of kSeenWidth words. Returns whether those that only some lines see
// are finite.
bool copy_seen(const uint32_t* from, int64_t stride, int64_t steps, int64_t width, int64_t position,
               Span any, Span all, uint32_t* to) {
  uint32_t is_infinite = 0;
  for (int64_t t = 0; t < steps; t++) {
    const int64_t token = position + 2 * t;
    const uint32_t seen = visible<Bf16TileCache>(any, token, token + 2);
    const uint32_t by_some = seen & ~visible<Bf16TileCache>(all, token, token + 2);
    for (int64_t i = 0; i < width; i++) {
      const uint32_t word = seen ? from[t * stride + i] & seen : 0;
      to[t * kSeenWidth + i] = word;
      is_infinite |= (word & by_some & 0x7f80u) == 0x7f80u;
      is_infinite |= (word & by_some & 0x7f800000u) == 0x7f800000u;
    }
  }
  return !is_infinite;
}

// False if there is a value that is infinite or NaN and that only some lines see: a tile would show
// it to all.
bool compute_output(const Item<Bf16TileCache>& item) {
  const int64_t block_size = item.layout.block_size, head_dim = item.layout.head_dim;
  const int64_t steps = item.tiles->value_steps, tokens = 2 * steps;
  const Span early = item.spans[0], late = item.spans[item.num_lines - 1];
  const Span any{early.first, late.end}, all{late.first, early.end};
  const int64_t last = (any.end - 1) / block_size, ahead_blocks = kAheadTokens / block_size + 1;
  const int64_t weight_bytes = item.score_stride * sizeof(float);
  alignas(64) uint32_t seen[kTileRows * kSeenWidth];
  alignas(64) float sums[kTileRows * kSeenWidth];
  bool is_done = true;
  for_tiles(item.num_lines, kTileRows, [&](int64_t line, int64_t lines) {
    item.tiles->set_lines(lines);
    const bf16* weights = item.weights(line) - item.base;
    for (int64_t dim = 0; dim < head_dim; dim += kSeenWidth) {
      const int64_t width = std::min(kSeenWidth, head_dim - dim);
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
      for (int64_t at = any.first / tokens * tokens; at < any.end; at += tokens) {
        const int64_t b = at / block_size, step = at % block_size / 2;
        const uint32_t* values = item.block_values(b) + step * head_dim + dim;
        int64_t row_bytes = head_dim * 4;
        if (lines <= kTileRows / 2) {
          const uint32_t* ahead = item.block_values(std::min(b + ahead_blocks, last)) + dim;
          for (int64_t t = step; t < step + steps; t++) {
            for (int64_t i = 0; i < width; i += kLineWords) prefetch(ahead + t * head_dim + i);
          }
        }
        if (at < all.first || at + tokens > all.end) {
          is_done &= copy_seen(values, head_dim, steps, width, at, any, all, seen);
          values = seen;
          row_bytes = kSeenWidth * 4;
        }
        asm volatile("" ::: "memory");
        _tile_loadd(5, weights + at, weight_bytes);
        _tile_loadd(7, values, row_bytes);
        _tile_dpbf16ps(0, 5, 7);
        _tile_loadd(7, values + kTileRows, row_bytes);
        _tile_dpbf16ps(1, 5, 7);
        if (width < kSeenWidth) continue;
        _tile_loadd(7, values + 2 * kTileRows, row_bytes);
        _tile_dpbf16ps(2, 5, 7);
        _tile_loadd(7, values + 3 * kTileRows, row_bytes);
        _tile_dpbf16ps(3, 5, 7);
      }
      _tile_stored(0, sums, kSeenWidth * 4);
      _tile_stored(1, sums + kTileRows, kSeenWidth * 4);
      _tile_stored(2, sums + 2 * kTileRows, kSeenWidth * 4);
      _tile_stored(3, sums + 3 * kTileRows, kSeenWidth * 4);
      asm volatile("" ::: "memory");
      for (int64_t r = 0; r < lines; r++) {
        const vfloat scale = splat(1.0f / item.sums[line + r]);
        const float* from = sums + r * kSeenWidth;
        float* to = item.outs[line + r] + dim;
        for (int64_t i = 0; i < width; i += kLanes) store(to + i, load(from + i) * scale);
      }
    }
  });
  return is_done;
}

#endif

// Copies one query of `size` floats as factors, zeros up to a multiple of kLanes.
template <typename Factor>
void load_query(const float* query, int64_t size, Factor* to) {
  for (int64_t i = 0; i < size; i += kLanes) {
    const int count = int(std::min<int64_t>(kLanes, size - i));
    store_factors(to + i, load_some(query + i, count));
  }
}

// Query tokens token .. token + num_tokens - 1 of the batch, the first at `position` of row `row`,
// and one KV head.
template <typename Cache>
void attend(const AttentionArgs& a, typename Cache::Tiles* tiles, int64_t row, int64_t kv_head,
            int64_t token, int64_t num_tokens, int64_t position) {
  typedef typename Cache::Factor Factor;
  const int64_t group = a.num_q_heads / a.num_kv_heads;
  Item<Cache> item;
  item.tiles = tiles;
  item.layout = {Cache::kPerWord, a.block_size, a.num_kv_heads, a.head_dim};
  item.keys = static_cast<const uint32_t*>(a.key);
  item.values = static_cast<const uint32_t*>(a.value);
  item.blocks = a.block_tables + row * *a.table_stride;
  item.kv_head = kv_head;
  item.num_lines = num_tokens * group;
  const auto first_seen = [&](int64_t p) {
    return a.window ? std::max<int64_t>(0, p + 1 - a.window) : 0;
  };
  const Span span{first_seen(position), position + num_tokens};
  item.base = first_vector(item.layout, span) / kBaseStep * kBaseStep;
  item.query_stride = round_up(a.head_dim, kLanes);
  // One vector more than is seen, since the last may begin anywhere; an odd number of them, so that
  // lines do not compete for the same places of a cache.
  const int64_t seen_vectors = round_up(span.end - item.base, kBaseStep) / kLanes;
  item.score_stride = (seen_vectors | 1) * kLanes;

  const int64_t query_bytes = round_up(item.num_lines * item.query_stride * sizeof(Factor), 64);
  const int64_t score_bytes = item.num_lines * item.score_stride * sizeof(float);
  const int64_t line_bytes = sizeof(Span) + sizeof(float*) + sizeof(float);
  char* memory = static_cast<char*>(
      item_scratch.get(query_bytes + score_bytes + item.num_lines * line_bytes));
  item.scores = reinterpret_cast<float*>(memory);
  item.queries = reinterpret_cast<Factor*>(memory + score_bytes);
  item.spans = reinterpret_cast<Span*>(memory + score_bytes + query_bytes);
  item.outs = reinterpret_cast<float**>(item.spans + item.num_lines);
  item.sums = reinterpret_cast<float*>(item.outs + item.num_lines);

  for (int64_t i = 0; i < num_tokens; i++) {
    for (int64_t j = 0; j < group; j++) {
      const int64_t line = i * group + j, head = kv_head * group + j;
      item.spans[line] = {first_seen(position + i), position + i + 1};
      item.outs[line] = a.out + (token + i) * a.out_stride + head * a.head_dim;
      load_query(a.q + (token + i) * a.q_token_stride + head * a.q_head_stride, a.head_dim,
                 item.queries + line * item.query_stride);
    }
  }
  prefetch_keys(item, span);
  compute_scores(item, span);
  prefetch_values(item, span);
  for (int64_t line = 0; line < item.num_lines; line++) {
    item.sums[line] = softmax(item, line, a.scale, a.soft_cap);
  }
  if (compute_output(item)) return;
  for (int64_t i = 0; i < num_tokens; i++) {
    attend<Cache>(a, tiles, row, kv_head, token + i, 1, position + i);
  }
}

// Rows in the order of their work: those with the most keys first, by powers of two, then as they
// come.
const int32_t* longest_first(const int32_t* seq_lens, int64_t num_rows) {
  int32_t* order = static_cast<int32_t*>(order_scratch.get(num_rows * sizeof(int32_t)));
  int64_t starts[33] = {};
  const auto bucket = [&](int64_t row) { return __builtin_clz(uint32_t(seq_lens[row]) | 1); };
  for (int64_t row = 0; row < num_rows; row++) starts[bucket(row) + 1]++;
  for (int i = 1; i < 33; i++) starts[i] += starts[i - 1];
  for (int64_t row = 0; row < num_rows; row++) order[starts[bucket(row)]++] = int32_t(row);
  return order;
}

template <typename Cache>
void attention(const AttentionArgs& a, const Team& team, typename Cache::Tiles* tiles) {
  const int64_t num_rows = *a.num_rows, group = a.num_q_heads / a.num_kv_heads;
  const int64_t item_tokens = std::max<int64_t>(1, Cache::kMaxItemLines / group);
  const auto query_len = [&](int64_t row) {
    return a.query_start_loc[row + 1] - a.query_start_loc[row];
  };
  const auto num_items = [&](int64_t row) {
    return (query_len(row) + item_tokens - 1) / item_tokens * a.num_kv_heads;
  };
  int64_t total = 0;
  for (int64_t row = 0; row < num_rows; row++) total += num_items(row);
  const int32_t* order = longest_first(a.seq_lens, num_rows);
  int64_t nth = 0, before = 0;  // this thread's place: row order[nth] begins with item `before`
  // One row's KV heads lie side by side, so where there is enough for everybody a thread takes them all.
  const int64_t chunk = total >= 8 * team.size * a.num_kv_heads ? a.num_kv_heads : 1;
  const auto work = [&](int64_t piece) {
    while (piece >= before + num_items(order[nth])) before += num_items(order[nth++]);
    const int64_t row = order[nth], items = num_items(row);
    const int64_t kv_head = (piece - before) % a.num_kv_heads;
    // The last tokens, which see the most keys, come first.
    const int64_t later = (piece - before) / a.num_kv_heads;
    const int64_t begin = (items / a.num_kv_heads - 1 - later) * item_tokens;
    const int64_t count = std::min(item_tokens, query_len(row) - begin);
    const int64_t position = a.seq_lens[row] - query_len(row) + begin;
    attend<Cache>(a, tiles, row, kv_head, a.query_start_loc[row] + begin, count, position);
  };
  team.claim(total, chunk, [&](int64_t begin, int64_t end) {
    for (int64_t piece = begin; piece < end; piece++) work(piece);
  });
}

template <typename Number>
void store_tokens(const StoreKVArgs& a, int64_t begin, int64_t end) {
  const KVLayout layout{4 / int64_t(sizeof(Number)), a.block_size, a.num_kv_heads, a.head_dim};
  for (int64_t token = begin; token < end; token++) {
    if (a.slots[token] < 0) continue;
    const int64_t block = a.slots[token] / a.block_size, offset = a.slots[token] % a.block_size;
    for (int64_t head = 0; head < a.num_kv_heads; head++) {
      const int64_t from = token * a.token_stride + head * a.head_stride;
      store_token(layout, static_cast<Number*>(a.key) + layout.keys(block, head) * layout.per_word,
                  static_cast<Number*>(a.value) + layout.values(block, head) * layout.per_word,
                  offset, a.k + from, a.v + from);
    }
  }
}

}  // namespace

void store_kv(const StoreKVArgs& a, int64_t begin, int64_t end) {
  a.dtype == kBfloat16 ? store_tokens<bf16>(a, begin, end) : store_tokens<float>(a, begin, end);
}

void attention_part(const AttentionArgs& a, const Team& team) {
  if (a.dtype == kFloat32) {
    Float32Cache::Tiles none;
    return attention<Float32Cache>(a, team, &none);
  }
#if defined(OCTAVO_AMX)
  if (Bf16TileCache::can_hold(a.block_size, a.head_dim)) {
    Bf16TileCache::Tiles tiles(a.block_size);
    return attention<Bf16TileCache>(a, team, &tiles);
  }
#endif
  Bf16Cache::Tiles none;
  attention<Bf16Cache>(a, team, &none);
}

}  // namespace octavo
