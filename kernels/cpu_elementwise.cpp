// Ops that treat every row, and mostly every element, by itself: embedding, norms, gates, rotary,
// and packing rows for a product. All rows go the same way through the same instructions.
#include <cmath>

#include "cpu_ops.h"
#include "cpu_vec.h"

namespace octavo {
namespace {

// Calls `vectors(i)` for whole vectors of [0, size), then `tail(i, count)` for what remains.
template <typename Vectors, typename Tail>
OCTAVO_INLINE void sweep(int64_t size, Vectors vectors, Tail tail) {
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) vectors(i);
  if (i < size) tail(i, int(size - i));
}

OCTAVO_INLINE void copy_row(const bf16* from, int64_t size, float* to) {
  sweep(
      size, [&](int64_t i) { store(to + i, load(from + i)); },
      [&](int64_t i, int count) {
        for (int64_t end = i + count; i < end; i++) to[i] = to_float(from[i]);
      });
}

// residual += x
OCTAVO_INLINE void add_row(const float* x, int64_t size, float* residual) {
  sweep(
      size, [&](int64_t i) { store(residual + i, load(x + i) + load(residual + i)); },
      [&](int64_t i, int count) {
        store_some(residual + i, load_some(x + i, count) + load_some(residual + i, count), count);
      });
}

OCTAVO_INLINE void multiply_row(const float* x, float factor, int64_t size, float* out) {
  sweep(
      size, [&](int64_t i) { store(out + i, load(x + i) * factor); },
      [&](int64_t i, int count) { store_some(out + i, load_some(x + i, count) * factor, count); });
}

OCTAVO_INLINE void add_scaled_row(const float* x, float factor, const float* residual, int64_t size,
                                  float* out) {
  sweep(
      size, [&](int64_t i) { store(out + i, load(x + i) * factor + load(residual + i)); },
      [&](int64_t i, int count) {
        store_some(out + i, load_some(x + i, count) * factor + load_some(residual + i, count),
                   count);
      });
}

// The sum of a row's numbers, each taken in by `add(v, sum)`, which takes zeros for nothing. Four partial
// sums a lane, so that additions need not wait for each other.
template <typename Add>
OCTAVO_INLINE float sum_of(const float* x, int64_t size, Add add) {
  vfloat sums[4] = {};
  int64_t i = 0;
  for (; i + 4 * kLanes <= size; i += 4 * kLanes)
    for (int j = 0; j < 4; j++) sums[j] = add(load(x + i + j * kLanes), sums[j]);
  for (; i < size; i += kLanes) {
    const int64_t left = size - i;
    sums[0] = add(load_some(x + i, int(left < kLanes ? left : kLanes)), sums[0]);
  }
  return sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

OCTAVO_INLINE float sum_of_squares(const float* x, int64_t size) {
  return sum_of(x, size, [](vfloat v, vfloat sum) { return fma(v, v, sum); });
}

OCTAVO_INLINE float sum_of_numbers(const float* x, int64_t size) {
  return sum_of(x, size, [](vfloat v, vfloat sum) { return v + sum; });
}

OCTAVO_INLINE void scale_row(const float* x, float scale, const float* weight, int64_t size,
                             float* out) {
  sweep(
      size, [&](int64_t i) { store(out + i, load(x + i) * scale * load(weight + i)); },
      [&](int64_t i, int count) {
        store_some(out + i, load_some(x + i, count) * scale * load_some(weight + i, count), count);
      });
}

// x / sqrt(mean(x^2) + eps) * weight
OCTAVO_INLINE void rms_norm_row(const float* x, float eps, const float* weight, int64_t size,
                                float* out) {
  const float mean = sum_of_squares(x, size) / float(size);
  scale_row(x, 1.0f / std::sqrt(mean + eps), weight, size, out);
}

template <typename Function>
OCTAVO_INLINE void map_row(const float* x, int64_t size, float* out, Function function) {
  sweep(
      size, [&](int64_t i) { store(out + i, function(load(x + i))); },
      [&](int64_t i, int count) {
        store_some(out + i, function(load_some(x + i, count)), count);
      });
}

// x / (1 + e^-u); 0 for u below -87, where it would be 1e-38 of x.
OCTAVO_INLINE vfloat sigmoid_times(vfloat x, vfloat u) {
  const vfloat gated = x * reciprocal(1.0f + vexp(-u));
  return u < -87.0f ? vfloat{} : gated;
}

OCTAVO_INLINE vfloat silu(vfloat x) { return sigmoid_times(x, x); }

// x / 2 * (1 + tanh(u)) = x * sigmoid(2u), u = sqrt(2 / pi) * (x + 0.044715 x^3)
OCTAVO_INLINE vfloat gelu_tanh(vfloat x) {
  const vfloat twice_u = x * (1.59576912160573f + 0.0713548162726009f * x * x);
  return sigmoid_times(x, twice_u);
}

// x times the normal distribution up to x. Its part below -u is e^(-u^2 / 2) times a smooth function, here a polynomial
// in 1 / (1 + 0.35 u) fitted to a relative error of 3e-8.
OCTAVO_INLINE vfloat gelu(vfloat x) {
  const vfloat u = vmin(splat(20.0f), (vfloat)((vint)x & 0x7fffffff));  // there it is 0; keeps NaN
  const vfloat t = reciprocal(0.35f * u + 1.0f);
  vfloat p = splat(-2.91461404e-2f);
  p = fma(p, t, splat(1.43972710e-1f));
  p = fma(p, t, splat(-2.55716324e-1f));
  p = fma(p, t, splat(1.59176514e-1f));
  p = fma(p, t, splat(-2.31114309e-2f));
  p = fma(p, t, splat(1.05508670e-1f));
  p = fma(p, t, splat(1.19832702e-1f));
  p = fma(p, t, splat(1.39861896e-1f));
  p = fma(p, t, splat(1.39621407e-1f));
  const vfloat half = 0.5f * u, square = u * half;
  const vfloat rounding = fma(u, half, -square);  // what a large square has lost
  const vfloat below = vexp(-square) * (1.0f - rounding) * (p * t);
  return x > 0.0f ? x * (1.0f - below) : x * below;
}

template <typename Activation>
OCTAVO_INLINE void gate_row(const float* x, const float* up, int64_t size, float* out,
                            Activation activation) {
  sweep(
      size, [&](int64_t i) { store(out + i, activation(load(x + i)) * load(up + i)); },
      [&](int64_t i, int count) {
        store_some(out + i, activation(load_some(x + i, count)) * load_some(up + i, count), count);
      });
}

OCTAVO_INLINE void rotate_head(float* first, float* second, const float* cos, const float* sin,
                               int64_t half) {
  sweep(
      half,
      [&](int64_t i) {
        const vfloat a = load(first + i), b = load(second + i);
        const vfloat c = load(cos + i), s = load(sin + i);
        store(first + i, a * c - b * s);
        store(second + i, b * c + a * s);
      },
      [&](int64_t i, int count) {
        const vfloat a = load_some(first + i, count), b = load_some(second + i, count);
        const vfloat c = load_some(cos + i, count), s = load_some(sin + i, count);
        store_some(first + i, a * c - b * s, count);
        store_some(second + i, b * c + a * s, count);
      });
}

OCTAVO_INLINE void pack_bf16_row(const float* x, int64_t size, int64_t padded, bf16* out) {
  sweep(
      size, [&](int64_t i) { store(out + i, load(x + i)); },
      [&](int64_t i, int count) {
        bf16 last[kLanes];
        store(last, load_some(x + i, count));
        std::memcpy(out + i, last, count * sizeof(bf16));
      });
  std::memset(out + size, 0, (padded - size) * sizeof(bf16));
}

void copy_padded_row(const float* x, int64_t size, int64_t padded, float* out) {
  std::memcpy(out, x, size * sizeof(float));
  std::memset(out + size, 0, (padded - size) * sizeof(float));
}

constexpr int kGroupVectors = kGroup / kLanes;

// Largest magnitude of a group, as its bits: these order as the numbers do, NaN above infinity.
OCTAVO_INLINE int32_t largest_bits(const vfloat* x) {
  vint most{};
  for (int j = 0; j < kGroupVectors; j++) {
    const vint bits = (vint)x[j] & 0x7fffffff;
    most = bits > most ? bits : most;
  }
  int32_t lanes[kLanes], result = 0;
  std::memcpy(lanes, &most, sizeof lanes);
  for (int i = 0; i < kLanes; i++) result = lanes[i] > result ? lanes[i] : result;
  return result;
}

// Nearest integer, ties to even, for |x| < 2^22: past 1.5 * 2^23 a float has no fraction bits.
OCTAVO_INLINE vint round_even(vfloat x) {
  const float shift = 12582912.0f;
  return (vint)(x + shift) - (vint)splat(shift);
}

// Packs the `count` values at x, and zeros after them.
OCTAVO_INLINE void pack_int8_group(const float* x, int64_t count, int8_t* q, float* scale,
                                   float* scaled_sum) {
  vfloat values[kGroupVectors] = {};
  std::memcpy(values, x, count * sizeof(float));
  const int32_t bits = largest_bits(values);
  float most;
  std::memcpy(&most, &bits, sizeof most);
  const float unit = most / 127.0f;
  if (!(unit > 0.0f && most < INFINITY)) {
    *scale = *scaled_sum = most < INFINITY ? 0.0f : NAN;
    std::memset(q, 0, kGroup);
    return;
  }
  vint total{};
  for (int j = 0; j < kGroupVectors; j++) {
    // A unit that is denormal is inexact: then a quotient may pass 127.
    const vfloat quotient = vmin(vmax(values[j] / unit, splat(-127.0f)), splat(127.0f));
    const vint rounded = round_even(quotient);
    total += rounded;
    typedef int8_t narrow __attribute__((vector_size(kLanes)));
    const narrow bytes = __builtin_convertvector(rounded, narrow);
    std::memcpy(q + j * kLanes, &bytes, sizeof bytes);
  }
  int32_t lanes[kLanes], sum_q = 0;
  std::memcpy(lanes, &total, sizeof lanes);
  for (int i = 0; i < kLanes; i++) sum_q += lanes[i];
  *scale = unit;
  *scaled_sum = unit * float(sum_q);
}

void pack_int8_row(const float* x, int64_t size, int8_t* q, float* scales, float* sums) {
  for (int64_t group = 0; group * kGroup < size; group++) {
    const int64_t at = group * kGroup, left = size - at;
    pack_int8_group(x + at, left < kGroup ? left : kGroup, q + at, scales + group, sums + group);
  }
}

}  // namespace

void embed_rows(const EmbedArgs& a, int64_t begin, int64_t end) {
  for (int64_t token = begin; token < end; token++) {
    const int64_t at = a.token_ids[token] * a.hidden;
    float* out = a.out + token * a.out_stride;
    if (a.dtype == kBfloat16)
      copy_row(static_cast<const bf16*>(a.table) + at, a.hidden, out);
    else
      std::memcpy(out, static_cast<const float*>(a.table) + at, a.hidden * sizeof(float));
  }
}

void rms_norm_rows(const RmsNormArgs& a, int64_t begin, int64_t end) {
  for (int64_t token = begin; token < end; token++) {
    const float* x = a.x + token * a.x_stride;
    if (a.residual) {
      float* residual = a.residual + token * a.residual_stride;
      add_row(x, a.size, residual);
      x = residual;
    }
    float* out = a.out + token * a.out_stride;
    for (int64_t head = 0; head < a.num_heads; head++, x += a.head_stride, out += a.head_stride) {
      rms_norm_row(x, a.eps, a.weight, a.size, out);
    }
  }
}

void layer_norm_rows(const LayerNormArgs& a, int64_t begin, int64_t end) {
  for (int64_t token = begin; token < end; token++) {
    const float* x = a.x + token * a.x_stride;
    float* out = a.out + token * a.out_stride;
    if (a.residual) {
      float* residual = a.residual + token * a.residual_stride;
      add_row(x, a.size, residual);
      x = residual;
    }
    const float mean = sum_of_numbers(x, a.size) / float(a.size);
    map_row(x, a.size, out, [&](vfloat v) { return v - mean; });
    rms_norm_row(out, a.eps, a.weight, a.size, out);
    if (a.bias) add_row(a.bias, a.size, out);
  }
}

void gelu_rows(const GeluArgs& a, int64_t begin, int64_t end) {
  for (int64_t token = begin; token < end; token++) {
    const float* x = a.x + token * a.x_stride;
    float* out = a.out + token * a.out_stride;
    if (a.is_tanh)
      map_row(x, a.size, out, [](vfloat v) { return gelu_tanh(v); });
    else
      map_row(x, a.size, out, [](vfloat v) { return gelu(v); });
  }
}

void add_rows(const AddArgs& a, int64_t begin, int64_t end) {
  for (int64_t token = begin; token < end; token++) {
    const float* x = a.x + token * a.x_stride;
    float* out = a.out + token * a.out_stride;
    if (a.residual)
      add_scaled_row(x, a.factor, a.residual + token * a.out_stride, a.size, out);
    else
      multiply_row(x, a.factor, a.size, out);
  }
}

void clamp_rows(const ClampArgs& a, int64_t begin, int64_t end) {
  const vfloat most = splat(a.limit), least = splat(-a.limit);
  const auto clamp = [&](vfloat v) { return vmin(most, vmax(least, v)); };
  for (int64_t token = begin; token < end; token++) {
    float* x = a.x + token * a.x_stride;
    sweep(
        a.size, [&](int64_t i) { store(x + i, clamp(load(x + i))); },
        [&](int64_t i, int count) { store_some(x + i, clamp(load_some(x + i, count)), count); });
  }
}

void gate_rows(const GateArgs& a, int64_t begin, int64_t end) {
  for (int64_t token = begin; token < end; token++) {
    const float* x = a.x + token * a.x_stride;
    float* out = a.out + token * a.out_stride;
    if (a.kind == kGeluGate)
      gate_row(x, x + a.size, a.size, out, [](vfloat v) { return gelu_tanh(v); });
    else
      gate_row(x, x + a.size, a.size, out, [](vfloat v) { return silu(v); });
  }
}

void rotary_rows(const RotaryArgs& a, int64_t begin, int64_t end) {
  const int64_t half = a.rotary_dim / 2;
  for (int64_t token = begin; token < end; token++) {
    const float* cos = a.cos_sin + a.positions[token] * a.rotary_dim;
    for (int64_t head = 0; head < a.num_heads; head++) {
      float* first = a.heads + token * a.token_stride + head * a.head_stride;
      rotate_head(first, first + half, cos, cos + half, half);
    }
  }
}

void pack_rows(const PackRowsArgs& a, int64_t begin, int64_t end) {
  const PackedRows layout(a.kind, a.capacity, a.size);
  for (int64_t token = begin; token < end; token++) {
    const float* x = a.x + (a.sources ? a.sources[token] : token) * a.x_stride;
    if (a.kind == kRowsFloat32)
      copy_padded_row(x, a.size, layout.padded, const_cast<float*>(layout.float_row(a.out, token)));
    else if (a.kind == kRowsInt8)
      pack_int8_row(x, a.size, const_cast<int8_t*>(layout.int8_row(a.out, token)),
                    const_cast<float*>(layout.scale_row(a.out, token)),
                    const_cast<float*>(layout.sum_row(a.out, token)));
    else
      pack_bf16_row(x, a.size, layout.padded, const_cast<bf16*>(layout.bf16_row(a.out, token)));
  }
}

}  // namespace octavo
