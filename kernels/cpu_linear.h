// Packed weights: how they lie in memory, and the functions that pack them.
//
// A weight [out_features, in_features] is cut into panels of kPanel output columns, each with the
// whole of in_features, one after the other. A panel is two halves of kLanes columns. Columns past
// out_features are zero.
//
//   float32   [k][2][kLanes]. k is padded to a multiple of 32 with zeros.
//   bfloat16  [k / 32][2][16 pairs][kLanes][2]: each [16][kLanes][2] is a tile of AMX, each row
//             of it a vector for VDPBF16PS. k is padded to a multiple of 32 with zeros.
//   grouped   [k / 32] of: numbers, then a block's factors, each [2][kLanes]
//     4 bits  [4][2][kLanes][4] bytes: byte i of quad j is q of k = 4j + i in its lower half,
//             of k = 16 + 4j + i in its upper one
//     8 bits  [8][2][kLanes][4] bytes: q + 128 of k = 4j + i
//
// The grouped kinds are blocks of 32 along in_features in another order. A block is its factors, then its
// numbers: 16 bytes, which hold q of k in their lower halves and of 16 + k in their upper ones, or 32 signed bytes.
//
//   kind     factors              value
//   Q4_0     float16 d            d * (q - 8)
//   Q4_1     float16 d, m         d * q + m
//   Q8_0     float16 d            d * q
//   Q4_F32   float32 d, m         d * q + m
//   Q8_F32   float32 d[2], m      d[k / 16] * q + m
//
// The first three are GGUF's own. The others hold what GGUF's K-quants stand for: a scale there is the product of a
// float16 and a whole number of 8 bits at most, which float32 holds exactly, as it does d * q. So one rounding is left,
// when m is added, which is that of dequantising.
//
// Where there is AMX, the numbers lie as cpu_linear_amx.h says.
#pragma once

#include <cstdint>

#include "cpu_ops.h"
#include "cpu_program.h"
#include "cpu_vec.h"

namespace octavo {

constexpr int64_t kPanel = 2 * kLanes;

// A block of one of the grouped kinds.
struct BlockShape {
  int64_t number_bytes;
  int64_t num_factors;
  int64_t factor_bytes;  // of one

  constexpr int64_t bytes() const { return number_bytes + num_factors * factor_bytes; }
  constexpr bool is_bytes() const { return number_bytes == kGroup; }  // else nibbles
};

constexpr BlockShape block_shape(int64_t kind) {
  switch (kind) {
    case kWeightQ4_0: return {kGroup / 2, 1, 2};
    case kWeightQ4_1: return {kGroup / 2, 2, 2};
    case kWeightQ8_0: return {kGroup, 1, 2};
    case kWeightQ4_F32: return {kGroup / 2, 2, 4};
    default: return {kGroup, 3, 4};
  }
}

struct WeightLayout {
  int64_t panels;
  int64_t steps;        // along in_features: groups of 32
  int64_t step_bytes;   // of one panel
  int64_t panel_bytes;

  WeightLayout(int64_t kind, int64_t out_features, int64_t in_features)
      : panels((out_features + kPanel - 1) / kPanel),
        steps((in_features + kGroup - 1) / kGroup),
        step_bytes(kPanel * bytes_per_column(kind)),
        panel_bytes(steps * step_bytes) {}

  int64_t bytes() const { return panels * panel_bytes; }

 private:
  static int64_t bytes_per_column(int64_t kind) {
    switch (kind) {
      case kWeightFloat32: return 4 * kGroup;
      case kWeightBfloat16: return 2 * kGroup;
      default: return block_shape(kind).bytes();
    }
  }
};

}  // namespace octavo

// The RowKind that products with weights of `kind` best read on this processor.
OCTAVO_EXPORT int64_t octavo_row_kind(int64_t kind);

// Bytes that octavo_pack_weight fills.
OCTAVO_EXPORT int64_t octavo_packed_size(int64_t kind, int64_t out_features,
                                         int64_t in_features);

// Packs `source` for rows of `row_kind`, which is octavo_row_kind's, or kRowsInt8 for the grouped kinds: rows of float32, of bfloat16, or of GGUF blocks, `source_stride` bytes apart. For
// the grouped kinds in_features is a multiple of 32. `packed` is aligned to 64 bytes.
OCTAVO_EXPORT void octavo_pack_weight(int64_t kind, int64_t row_kind, const void* source, int64_t source_stride,
                                      int64_t out_features, int64_t in_features, void* packed,
                                      int64_t num_threads);
