// Every op of the native op set: its arguments, and the function that does one thread's part of it.
//
// An Args struct is plain C, mirrored field by field in cpu_structs.py. `num_tokens` and the other
// pointers to a single number are live cells: a recorded program reads them anew each time it runs.
// Strides count elements. Activations are float32; what an op reads and writes must not overlap
// unless its comment says so. `<op>_rows` does tokens begin .. end - 1, each by itself; `<op>_part` is called
// by every thread of a team; see cpu_team.h.
//
// A row's result is bit-equal whatever the other rows are, how many, and how many threads share
// them.
#pragma once

#include <cstdint>

#include "cpu_team.h"

namespace octavo {

// ---- elementwise (cpu_elementwise.cpp) ----------------------------------------------------------

enum FloatType : int64_t { kFloat32 = 0, kBfloat16 = 1 };

// Rows of an embedding table, as float32.
struct EmbedArgs {
  const int64_t* num_tokens;
  const int64_t* token_ids;  // [num_tokens]
  const void* table;         // [vocab_size, hidden] of `dtype`
  int64_t dtype;             // FloatType
  int64_t hidden;
  float* out;  // [num_tokens, hidden]
  int64_t out_stride;
};
void embed_rows(const EmbedArgs& a, int64_t begin, int64_t end);

// x / sqrt(mean(x^2) + eps) * weight, of each head by itself. `out` may be x.
struct RmsNormArgs {
  const int64_t* num_tokens;
  const float* x;  // [num_tokens, num_heads, size]
  int64_t x_stride;
  float* residual;  // [num_tokens, size] or null; else x, one head, is added to it, and the norm is of the sum
  int64_t residual_stride;
  const float* weight;  // [size]
  float eps;
  int64_t size;
  int64_t num_heads;
  int64_t head_stride;  // of x and of out
  float* out;           // [num_tokens, num_heads, size]
  int64_t out_stride;
};
void rms_norm_rows(const RmsNormArgs& a, int64_t begin, int64_t end);

// (x - mean(x)) / sqrt(variance(x) + eps) * weight + bias. `out` may be x.
struct LayerNormArgs {
  const int64_t* num_tokens;
  const float* x;  // [num_tokens, size]
  int64_t x_stride;
  float* residual;  // as in RmsNormArgs
  int64_t residual_stride;
  const float* weight;  // [size]
  const float* bias;    // [size] or null
  float eps;
  int64_t size;
  float* out;  // [num_tokens, size]
  int64_t out_stride;
};
void layer_norm_rows(const LayerNormArgs& a, int64_t begin, int64_t end);

// GELU without a gate: the normal distribution's, or its tanh approximation. `out` may be x.
struct GeluArgs {
  const int64_t* num_tokens;
  const float* x;  // [num_tokens, size]
  int64_t x_stride;
  int64_t size;
  int64_t is_tanh;
  float* out;  // [num_tokens, size]
  int64_t out_stride;
};
void gelu_rows(const GeluArgs& a, int64_t begin, int64_t end);

// factor * x, or factor * x + residual. `out` may be x or the residual.
struct AddArgs {
  const int64_t* num_tokens;
  const float* x;  // [num_tokens, size]
  int64_t x_stride;
  float factor;
  int64_t size;
  const float* residual;  // [num_tokens, size], rows as far apart as those of out; or null
  float* out;             // [num_tokens, size]
  int64_t out_stride;
};
void add_rows(const AddArgs& a, int64_t begin, int64_t end);

// Numbers within -limit .. limit, in place; NaN stays.
struct ClampArgs {
  const int64_t* num_tokens;
  float* x;  // [num_tokens, size]
  int64_t x_stride;
  int64_t size;
  float limit;
};
void clamp_rows(const ClampArgs& a, int64_t begin, int64_t end);

enum GateKind : int64_t { kSiluGate = 0, kGeluGate = 1 };  // gelu: the tanh approximation

// activation(x[:, :size]) * x[:, size:]
struct GateArgs {
  const int64_t* num_tokens;
  const float* x;  // [num_tokens, 2 * size]
  int64_t x_stride;
  int64_t size;
  int64_t kind;  // GateKind
  float* out;    // [num_tokens, size]
  int64_t out_stride;
};
void gate_rows(const GateArgs& a, int64_t begin, int64_t end);

// Rotates the first `rotary_dim` of every head in place, in halves (NeoX): element i goes with
// element i + rotary_dim / 2.
struct RotaryArgs {
  const int64_t* num_tokens;
  float* heads;  // [num_tokens, num_heads, head_dim]
  int64_t token_stride;
  int64_t head_stride;
  int64_t num_heads;
  int64_t head_dim;
  int64_t rotary_dim;        // even, at most head_dim
  const int64_t* positions;  // [num_tokens]
  const float* cos_sin;      // [max_position, rotary_dim]: cosines, then sines
};
void rotary_rows(const RotaryArgs& a, int64_t begin, int64_t end);

// ---- KV cache and attention (cpu_attention.cpp) -------------------------------------------------

// Writes keys and values to their slots, and nothing else: what a block held before stays in its other slots, which
// attention never lets a token see.
struct StoreKVArgs {
  const int64_t* num_tokens;
  const float* k;  // [num_tokens, num_kv_heads, head_dim]
  const float* v;
  int64_t token_stride;  // of k and of v
  int64_t head_stride;
  const int64_t* slots;  // [num_tokens]; -1: skip
  void* key;             // the layer's cache, in the layout that cpu_attention.cpp describes
  void* value;
  int64_t dtype;  // FloatType, of the cache
  int64_t block_size;
  int64_t num_kv_heads;
  int64_t head_dim;
};
void store_kv(const StoreKVArgs& a, int64_t begin, int64_t end);

// Causal grouped-query attention of a flat batch of rows over paged keys and values.
struct AttentionArgs {
  const int64_t* num_rows;
  const int32_t* query_start_loc;  // [num_rows + 1]
  const int32_t* seq_lens;         // [num_rows]
  const int32_t* block_tables;     // [num_rows, table_stride]
  const int64_t* table_stride;     // a live cell
  const float* q;                  // [num_tokens, num_q_heads, head_dim]
  int64_t q_token_stride;
  int64_t q_head_stride;
  const void* key;
  const void* value;
  int64_t dtype;  // FloatType, of the cache
  int64_t block_size;
  int64_t num_q_heads;
  int64_t num_kv_heads;
  int64_t head_dim;
  float scale;
  int64_t window;  // 0: none
  float soft_cap;  // 0: none
  float* out;      // [num_tokens, num_q_heads, head_dim], heads contiguous
  int64_t out_stride;
};
void attention_part(const AttentionArgs& a, const Team& team);

// ---- products (cpu_linear.cpp) ------------------------------------------------------------------

enum RowKind : int64_t { kRowsFloat32 = 0, kRowsBfloat16 = 1, kRowsInt8 = 2 };

// Prepares activations for a product.
struct PackRowsArgs {
  const int64_t* num_tokens;
  const float* x;  // [num_tokens, size]
  int64_t x_stride;
  const int32_t* sources;  // [num_tokens] or null; else row i is made of x's row sources[i]
  int64_t num_sources;     // rows of x that `sources` may name
  int64_t size;            // in_features of the product
  int64_t kind;            // RowKind
  int64_t capacity;        // most rows that `out` has room for: places the sections below
  void* out;               // aligned to 64 bytes
};
void pack_rows(const PackRowsArgs& a, int64_t begin, int64_t end);

// What `PackRowsArgs::out` holds; rows are padded with zeros to `padded`, a multiple of kGroup.
//   kRowsFloat32:   float [capacity][padded]
//   kRowsBfloat16:  bf16 [capacity][padded]
//   kRowsInt8:      s8 [capacity][padded], then float scale [capacity][groups], then float
//                   scaled_sum [capacity][groups]; each begins at a multiple of 64 bytes.
// A group of 32 values x is q = round(x / scale), ties to even, with scale = largest |x| / 127 and
// scaled_sum = scale * sum(q). A group that holds NaN or infinity has q = 0, and NaN for its
// scale and scaled_sum.
constexpr int64_t kGroup = 32;

struct PackedRows {
  int64_t padded;  // elements of a row
  int64_t groups;  // padded / kGroup
  int64_t scales_at, sums_at, bytes;  // offsets from the beginning; int8 only, and the whole size

  PackedRows(int64_t kind, int64_t capacity, int64_t size)
      : padded((size + kGroup - 1) / kGroup * kGroup), groups(padded / kGroup) {
    const int64_t bytes_each = kind == kRowsInt8 ? 1 : kind == kRowsBfloat16 ? 2 : 4;
    const int64_t values = align(capacity * padded * bytes_each);
    const int64_t floats = kind == kRowsInt8 ? align(capacity * groups * 4) : 0;
    scales_at = values;
    sums_at = values + floats;
    bytes = values + 2 * floats;
  }

  const float* float_row(const void* rows, int64_t row) const {
    return static_cast<const float*>(rows) + row * padded;
  }
  const uint16_t* bf16_row(const void* rows, int64_t row) const {
    return static_cast<const uint16_t*>(rows) + row * padded;
  }
  const int8_t* int8_row(const void* rows, int64_t row) const {
    return static_cast<const int8_t*>(rows) + row * padded;
  }
  const float* scale_row(const void* rows, int64_t row) const {
    const char* at = static_cast<const char*>(rows) + scales_at;
    return reinterpret_cast<const float*>(at) + row * groups;
  }
  const float* sum_row(const void* rows, int64_t row) const {
    const char* at = static_cast<const char*>(rows) + sums_at;
    return reinterpret_cast<const float*>(at) + row * groups;
  }

 private:
  static int64_t align(int64_t bytes) { return (bytes + 63) / 64 * 64; }
};

enum WeightKind : int64_t {
  kWeightFloat32 = 0,
  kWeightBfloat16 = 1,
  kWeightQ4_0 = 2,  // GGUF's blocks of 32 along in_features
  kWeightQ4_1 = 3,
  kWeightQ8_0 = 4,
  kWeightQ4_F32 = 5,  // blocks of 32 that GGUF's K-quants fit into, see cpu_linear.h
  kWeightQ8_F32 = 6,
};

// x times a packed weight, plus a bias. With `group_starts`, rows group_starts[g] .. group_starts[g + 1] - 1 are
// multiplied by the weight that lies g * weight_stride bytes behind `weight`.
struct LinearArgs {
  const int64_t* num_tokens;
  const void* x;     // float32 [num_tokens, in_features] for kWeightFloat32, else PackedRows
  int64_t x_stride;  // of float32 rows
  int64_t capacity;  // as in the PackRowsArgs that wrote x
  int64_t row_kind;  // RowKind of x, for which `weight` was packed
  const void* weight;
  int64_t kind;  // WeightKind
  int64_t in_features;
  int64_t out_features;
  const float* bias;  // [out_features] or null
  float* out;         // [num_tokens, out_features]
  int64_t out_stride;
  const int32_t* group_starts;  // [num_groups + 1], from 0 to num_tokens, or null: one weight for all
  int64_t num_groups;
  int64_t weight_stride;
  void* likeliest;  // instead of `out`: what LikeliestArgs reads, written whole; or null
};
void linear_part(const LinearArgs& a, const Team& team);

// ---- mixtures of experts (cpu_experts.cpp) ------------------------------------------------------

// Each token's experts: those of its `top_k` largest logits, the lowest id where two are equal; and what their
// results are weighed by, the softmax over all logits or, renormalised, over the chosen. See Ops.routed_experts.
struct RouteArgs {
  const int64_t* num_tokens;
  const float* logits;  // [num_tokens, num_experts]
  int64_t logits_stride;
  int64_t num_experts;
  int64_t top_k;  // at most num_experts
  int64_t is_renormalised;
  int32_t* experts;  // [num_tokens, top_k], by descending logit
  float* weights;    // [num_tokens, top_k]
};
void route_rows(const RouteArgs& a, int64_t begin, int64_t end);

// Sorts the pairs of tokens and experts by expert; pairs of one expert by token. A row is a place in that order.
struct SortExpertsArgs {
  const int64_t* num_tokens;
  const int32_t* experts;  // [num_tokens, top_k]
  int64_t num_experts;
  int64_t top_k;
  int64_t* num_rows;  // num_tokens * top_k: a live cell for what computes the rows
  int32_t* starts;    // [num_experts + 1]: first row of each expert, and the end
  int32_t* tokens;    // [num_rows]: whose row it is
  int32_t* rows;      // [num_tokens, top_k]: where that pair went
};
void sort_experts_part(const SortExpertsArgs& a, const Team& team);

// Each token's rows, weighed and added up in the order of `weights`.
struct CombineArgs {
  const int64_t* num_tokens;
  const float* x;  // [num_tokens * top_k, size]
  int64_t x_stride;
  const int32_t* rows;   // [num_tokens, top_k]
  const float* weights;  // [num_tokens, top_k]
  int64_t top_k;
  int64_t size;
  float* out;  // [num_tokens, size]
  int64_t out_stride;
};
void combine_rows(const CombineArgs& a, int64_t begin, int64_t end);

// ---- sampling (cpu_sampling.cpp) ----------------------------------------------------------------

// Draws one token per row; see Ops.sample.
struct SampleArgs {
  const int64_t* num_rows;
  const float* logits;  // [num_rows, vocab_size]
  int64_t logits_stride;
  int64_t vocab_size;
  const float* temperature;  // [num_rows]; 0: greedy
  const int64_t* top_k;      // 0: off
  const float* top_p;        // 1: off
  const float* min_p;        // 0: off
  const int64_t* seed;
  const int64_t* position;
  int64_t* out;  // [num_rows]
};
void sample_part(const SampleArgs& a, const Team& team);

// The token with the largest logit per row, or -1: SampleArgs' of temperature 0, without logits in memory. Comes right
// after a product with `likeliest`, in one program.
struct LikeliestArgs {
  const int64_t* num_rows;
  const void* likeliest;  // [threads][capacity] of Likeliest (cpu_likeliest.h), octavo_likeliest_size bytes
  int64_t capacity;       // as in LinearArgs
  int64_t* out;           // [num_rows]
};
void likeliest_part(const LikeliestArgs& a, const Team& team);

}  // namespace octavo
