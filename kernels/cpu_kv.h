// The layout of the KV cache of the native op set: where a token's keys and values lie in their
// block.
//
// A layer has two tensors, keys and values, whose first dimension is the block; a block of either
// is contiguous. Both are made of 32-bit words. A word holds one number of a float32 cache, and two
// of a bf16 cache, the first in the lower half (`per_word`):
//
//   keys    [num_kv_heads][head_dim / per_word][block_size]   a word: a token, one dimension or two
//   values  [num_kv_heads][block_size / per_word][head_dim]   a word: a dimension, one token or two
//
// Why so: a vector of neighbouring words of keys belongs to neighbouring tokens, and of values to
// neighbouring dimensions. Each lane sums for its own token (scores) or its own dimension (output),
// over one line of memory at a time: there are no horizontal sums, and what lies in one token's
// slot meets no other token's score. Pairs are what VDPBF16PS multiplies; a processor without it
// splits a word with a shift and a mask.
//
// With an odd head_dim or block_size, the second half of the last words of a bf16 cache belongs to
// nobody. Of keys it is zero (stores write it); of values it is never read.
#pragma once

#include <cstdint>

#include "cpu_vec.h"

namespace octavo {

typedef uint32_t vword __attribute__((vector_size(kLanes * 4)));

struct KVLayout {
  int64_t per_word;  // 1: float32, 2: bf16
  int64_t block_size, num_kv_heads, head_dim;

  int64_t key_steps() const { return (head_dim + per_word - 1) / per_word; }
  int64_t value_steps() const { return (block_size + per_word - 1) / per_word; }

  // Index of the first word of one head's keys in one block; step i of token t is word i *
  // block_size + t from there.
  int64_t keys(int64_t block, int64_t head) const {
    return (block * num_kv_heads + head) * key_steps() * block_size;
  }

  // Likewise for values; dimension d of step t is word t * head_dim + d from there.
  int64_t values(int64_t block, int64_t head) const {
    return (block * num_kv_heads + head) * value_steps() * head_dim;
  }
};

// Writes one head of one token, `k` and `v` of head_dim floats, at `offset` of a block.
inline void store_token(const KVLayout& layout, float* keys, float* values, int64_t offset,
                        const float* k, const float* v) {
  const int64_t dim = layout.head_dim;
  for (int64_t i = 0; i < dim; i++) keys[i * layout.block_size + offset] = k[i];
  std::memcpy(values + offset * dim, v, dim * sizeof(float));
}

// Rounds `count` floats; zeros after them, up to a multiple of kLanes.
OCTAVO_INLINE void round_to_bf16(const float* from, int64_t count, bf16* to) {
  for (int64_t i = 0; i < count; i += kLanes) {
    const int64_t left = count - i;
    store(to + i, left < kLanes ? load_some(from + i, int(left)) : load(from + i));
  }
}

// Writes the lower (0) or upper (1) halves of `count` neighbouring words and nothing of the others,
// which another thread may be writing. `from` is readable up to a multiple of kLanes.
OCTAVO_INLINE void store_halves(bf16* words, int64_t half, const bf16* from, int64_t count) {
  int64_t i = 0;
#if defined(__AVX512BW__)
  const __mmask32 mask = half ? 0xaaaaaaaau : 0x55555555u;
  for (; i + kLanes <= count; i += kLanes) {
    vbf16 narrow;
    std::memcpy(&narrow, from + i, sizeof narrow);
    const vword both = __builtin_convertvector(narrow, vword) * 0x10001u;
    _mm512_mask_storeu_epi16(words + 2 * i, mask, (__m512i)both);
  }
#endif
  for (; i < count; i++) words[2 * i + half] = from[i];
}

// As above, rounded.
inline void store_token(const KVLayout& layout, bf16* keys, bf16* values, int64_t offset,
                        const float* k, const float* v) {
  constexpr int64_t kPart = 64;
  bf16 part[kPart];
  for (int64_t begin = 0; begin < layout.head_dim; begin += kPart) {
    const int64_t left = layout.head_dim - begin, count = left < kPart ? left : kPart;
    round_to_bf16(k + begin, count, part);
    for (int64_t i = 0; i < count; i += 2) {
      std::memcpy(keys + ((begin + i) / 2 * layout.block_size + offset) * 2, part + i, 4);
    }
    round_to_bf16(v + begin, count, part);
    store_halves(values + (offset / 2 * layout.head_dim + begin) * 2, offset % 2, part, count);
  }
}

}  // namespace octavo
