// Packed weights: how they lie in memory, and the functions that pack them.
//
// A weight [out_features, in_features] is cut into panels of kPanel output columns, each with the
// whole of in_features, one after the other. A panel is two halves of kLanes columns. Columns past
// out_features are zero.
//
//   float32   [k][2][kLanes]. k is padded to a multiple of 32 with zeros.
//   bfloat16  [k / 32][2][16 pairs][kLanes][2]: each [16][kLanes][2] is a tile of AMX, each row
//             of it a vector for VDPBF16PS. k is padded to a multiple of 32 with zeros.
//   grouped   [k / 32] of: numbers, then float16 scale d [2][kLanes], then, for Q4_1 only, float16
//             offset m [2][kLanes]
//     Q4_0, Q4_1  [4][2][kLanes][4] bytes: byte i of quad j is q of k = 4j + i in its lower half,
//                 of k = 16 + 4j + i in its upper one
//     Q8_0        [8][2][kLanes][4] bytes: q + 128 of k = 4j + i
//
// The grouped kinds are GGUF's blocks in another order: value = d * q + m (Q4_1), d * (q - 8)
// (Q4_0), d * q (Q8_0). Where there is AMX, their numbers lie as cpu_linear_amx.h says.
#pragma once

#include <cstdint>

#include "cpu_ops.h"
#include "cpu_program.h"
#include "cpu_vec.h"

namespace octavo {

constexpr int64_t kPanel = 2 * kLanes;

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
      case kWeightQ4_0: return kGroup / 2 + 2;
      case kWeightQ4_1: return kGroup / 2 + 4;
      default: return kGroup + 2;
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
