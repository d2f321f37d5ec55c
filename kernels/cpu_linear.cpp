// Products with packed weights: out[m][n] = sum over k of x[m][k] * w[n][k], plus a bias.
//
// A kernel computes a tile: a few rows by one panel of columns (cpu_linear.h), along the whole of
// k, in registers. Every element is summed in one order, k upwards, whatever tile it falls in: rows
// never share an accumulator, and no path is chosen by the number of rows. Threads claim blocks of
// rows by runs of panels.
//
//   weight     instructions: the first that the compiler's target has       rows arrive as
//   float32    fused multiply-add                                           float32
//              (of which AMX rules out what is not the likeliest: cpu_linear_screen.h)
//   bfloat16   AMX (TDPBF16PS); VDPBF16PS; float32 fused multiply-add       bfloat16
//   grouped    AMX (TDPBF16PS)                                              bfloat16
//              VPDPBUSD; VPMADDUBSW, VPMADDWD; plain integers               int8 in groups of 32
//
// These add in different orders; which of them runs is fixed for the life of the process.
#include "cpu_likeliest.h"
#include "cpu_linear_amx.h"
#include "cpu_linear_dense.h"
#include "cpu_linear_grouped.h"
#include "cpu_linear_screen.h"
#include "cpu_threads.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>

namespace octavo {
namespace {

constexpr int64_t kMaxRows = 32;  // of any kernel's tile

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
  int64_t block = 0, blocks = 0;  // rows of a block
  int64_t run = 0, runs = 0;      // panels of a run
  int64_t tile = 0;               // rows of a tile

  Plan(int64_t rows, const WeightLayout& layout, int64_t row_bytes, int64_t tile_rows,
       int64_t row_step, int64_t num_threads)
      : rows(rows), panels(layout.panels) {
    if (rows == 0) return;
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

  int64_t units() const { return blocks * runs; }
};

// Rows that are multiplied by one weight.
struct Group {
  int64_t begin, end;
  const char* weight;
};

int64_t num_groups(const LinearArgs& a) { return a.group_starts ? a.num_groups : 1; }

Group group_at(const LinearArgs& a, int64_t index) {
  const char* weight = static_cast<const char*>(a.weight);
  if (!a.group_starts) return {0, *a.num_tokens, weight};
  return {a.group_starts[index], a.group_starts[index + 1], weight + index * a.weight_stride};
}

// What this thread has seen of each row's logits, or null.
Likeliest* likeliest_of(const LinearArgs& a, const Team& team) {
  return a.likeliest ? static_cast<Likeliest*>(a.likeliest) + team.rank * a.capacity : nullptr;
}

// Looks at a tile's logits, `columns` of them in each row of kPanel.
void note_likeliest(Likeliest* rows, int64_t count, const float* logits, int64_t column, int64_t columns) {
  const vint ids = ascending(column);
  for (int64_t r = 0; r < count; r++, logits += kPanel) {
    rows[r].add(load_left(logits, columns), ids);
    rows[r].add(load_left(logits + kLanes, columns - kLanes), ids + kLanes);
  }
}

// One tile, with what a kernel does not do: the bias, columns past the last, and to keep the likeliest alone.
template <typename Kernel>
void write_tile(const LinearArgs& a, Kernel& kernel, Likeliest* likeliest, int64_t row,
                int64_t count, const char* weight, int64_t column) {
  const int64_t columns = std::min(kPanel, a.out_features - column), at = row * a.out_stride + column;
  if (columns == kPanel && a.bias == nullptr && likeliest == nullptr) {
    kernel.run(row, count, weight, a.out + at, a.out_stride);
    return;
  }
  alignas(64) float buffer[kMaxRows * kPanel];
  kernel.run(row, count, weight, buffer, kPanel);
  for (int64_t r = 0; a.bias && r < count; r++) {
    for (int64_t n = 0; n < columns; n++) buffer[r * kPanel + n] += a.bias[column + n];
  }
  if (likeliest) return note_likeliest(likeliest + row, count, buffer, column, columns);
  for (int64_t r = 0; r < count; r++) {
    std::copy(buffer + r * kPanel, buffer + r * kPanel + columns, a.out + at + r * a.out_stride);
  }
}

#if defined(OCTAVO_AMX)
// Multiplies in float32 only rows that may have their largest result here.
void write_tile(const LinearArgs& a, AmxScreenKernel& screen, Likeliest* likeliest, int64_t row, int64_t count,
                const char* weight, int64_t column) {
  const int64_t columns = std::min(kPanel, a.out_features - column);
  alignas(64) float buffer[kMaxRows * kPanel];
  screen.run(row, count, weight, buffer, kPanel);
  const auto is_wanted = [&](int64_t r) { return screen.may_be_largest(row + r, buffer + r * kPanel); };
  for (int64_t begin = 0; begin < count;) {
    int64_t end = begin;
    while (end < std::min(begin + Float32Kernel::kRows, count) && is_wanted(end)) end++;
    if (end > begin) {
      float* sums = buffer + begin * kPanel;
      screen.run_exactly(row + begin, end - begin, weight, sums, kPanel);
      note_likeliest(likeliest + row + begin, end - begin, sums, column, columns);
    }
    for (int64_t r = row + begin; r < row + end; r++) screen.set_largest(r, largest(likeliest[r].best));
    begin = std::max(end, begin + 1);
  }
}
#endif

// Unit `unit` of a group's plan.
template <typename Kernel>
void multiply_unit(const LinearArgs& a, Kernel& kernel, Likeliest* likeliest,
                   const WeightLayout& layout, const Group& group, const Plan& plan, int64_t unit) {
  const int64_t begin = group.begin + unit / plan.runs * plan.block;
  const int64_t end = std::min(begin + plan.block, group.end);
  const int64_t first = unit % plan.runs * plan.run;
  const int64_t last = std::min(first + plan.run, plan.panels);
  const auto write = [&](int64_t row, int64_t panel) {
    write_tile(a, kernel, likeliest, row, std::min(plan.tile, end - row),
               group.weight + panel * layout.panel_bytes, panel * kPanel);
  };
  const auto prepare = [&](int64_t row) {
    kernel.prepare({row, std::min(plan.tile, end - row), row == begin, begin + plan.tile >= end});
  };
  if (Kernel::kPanelsFirst) {
    for (int64_t panel = first; panel < last; panel++) {
      for (int64_t row = begin; row < end; row += plan.tile) prepare(row), write(row, panel);
    }
  } else {
    for (int64_t row = begin; row < end; row += plan.tile) {
      prepare(row);
      for (int64_t panel = first; panel < last; panel++) write(row, panel);
    }
  }
}

// Threads claim units of all groups, which lie one group's after the other's. Those that a thread gets ascend, so
// it finds their groups by going on from where it was.
template <typename Kernel>
void product(const LinearArgs& a, const Team& team) {
  static_assert(Kernel::kRows <= kMaxRows, "write_tile's buffer");
  if (*a.num_tokens == 0 || a.out_features == 0) return;
  const WeightLayout layout(a.kind, a.out_features, a.in_features);
  Kernel kernel(a, layout);
  Likeliest* likeliest = likeliest_of(a, team);
  for (int64_t row = 0; likeliest && row < *a.num_tokens; row++) likeliest[row].clear();
  const auto plan_of = [&](const Group& group) {
    return Plan(group.end - group.begin, layout, kernel.row_bytes(), Kernel::kRows,
                Kernel::kRowStep, team.size);
  };
  int64_t count = 0;
  for (int64_t index = 0; index < num_groups(a); index++) count += plan_of(group_at(a, index)).units();
  int64_t index = 0, before = 0;  // the group at hand, and the units of those before it
  Group group = group_at(a, 0);
  Plan plan = plan_of(group);
  team.claim(count, 1, [&](int64_t unit, int64_t) {
    while (unit >= before + plan.units()) {
      before += plan.units();
      group = group_at(a, ++index);
      plan = plan_of(group);
    }
    multiply_unit(a, kernel, likeliest, layout, group, plan, unit - before);
  });
}

// How rows best reach a product with weights of `kind`, of GGUF's groups as integers or numbers.
int64_t best_row_kind(int64_t kind) {
  if (kind == kWeightFloat32) return kRowsFloat32;
  if (kind == kWeightBfloat16) return kRowsBfloat16;
#if defined(OCTAVO_AMX)
  if (may_use_tiles()) return kRowsBfloat16;
#endif
  return kRowsInt8;
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

// Where number k of column n goes among a group's numbers: as cpu_linear.h says, or as AMX wants it. A byte
// or a nibble.
int64_t number_at(bool is_bytes, bool is_tiled, int64_t n, int64_t k) {
  const int64_t half = n / kLanes, column = n % kLanes;
  if (is_tiled) {
    const int64_t vector = k / 2 * 2 + column / 8, lane = column % 8 * 2 + k % 2;
    if (is_bytes)
      return half * kGroup * kLanes + (vector / 4 * kLanes + lane) * 4 + vector % 4;
    return half * kGroup * kLanes + (vector / 8 * kLanes + lane) * 8 + vector % 8;
  }
  if (is_bytes) return k / 4 * 4 * kPanel + n * 4 + k % 4;
  return ((k % 16 / 4 * kPanel + n) * 4 + k % 4) * 2 + k / 16;
}

void pack_groups(const Source& source, int64_t kind, bool is_tiled, const WeightLayout& layout,
                 char* packed) {
  const BlockShape shape = block_shape(kind);
  const int64_t factor_bytes = shape.factor_bytes;
  constexpr uint8_t kTopBit = 128;  // flipped, it is q + 128
  int32_t at[kPanel * kGroup];
  for (int64_t i = 0; i < kPanel * kGroup; i++) {
    at[i] = int32_t(number_at(shape.is_bytes(), is_tiled, i / kGroup, i % kGroup));
  }
  for (int64_t group = 0; group < layout.steps; group++, packed += layout.step_bytes) {
    for (int64_t n = 0; n < source.count; n++) {
      const char* block = source.row(n) + group * shape.bytes();
      for (int64_t i = 0; i < shape.num_factors; i++)
        std::memcpy(packed + shape.number_bytes * kPanel + (i * kPanel + n) * factor_bytes,
                    block + i * factor_bytes, factor_bytes);
      const uint8_t* numbers =
          reinterpret_cast<const uint8_t*>(block) + shape.num_factors * factor_bytes;
      const int32_t* to = at + n * kGroup;
      for (int64_t k = 0; k < kGroup; k++) {
        if (shape.is_bytes())
          packed[to[k]] = char(numbers[k] ^ kTopBit);
        else
          packed[to[k] / 2] |= char((numbers[k % 16] >> k / 16 * 4 & 15) << to[k] % 2 * 4);
      }
    }
  }
}

void pack_panel(int64_t kind, int64_t row_kind, const Source& source, int64_t in_features, const WeightLayout& layout,
                char* packed) {
  std::memset(packed, 0, layout.panel_bytes);
  if (kind == kWeightFloat32)
    pack_float32(source, in_features, reinterpret_cast<float*>(packed));
  else if (kind == kWeightBfloat16)
    pack_bfloat16(source, in_features, reinterpret_cast<bf16*>(packed));
  else
    pack_groups(source, kind, row_kind == kRowsBfloat16, layout, packed);
}

}  // namespace

namespace {

template <int64_t kind>
void grouped_product(const LinearArgs& a, const Team& team) {
#if defined(OCTAVO_AMX)
  if (a.row_kind == kRowsBfloat16) return product<AmxGroupedKernel<kind>>(a, team);
#endif
  product<GroupedKernel<kind>>(a, team);
}

}  // namespace

void linear_part(const LinearArgs& a, const Team& team) {
  switch (a.kind) {
    case kWeightFloat32:
#if defined(OCTAVO_AMX)
      if (AmxScreenKernel::is_for(a) && may_use_tiles())
        return product<AmxScreenKernel>(a, team);
#endif
      return product<Float32Kernel>(a, team);
    case kWeightBfloat16:
#if defined(OCTAVO_AMX)
      if (may_use_tiles()) return product<AmxBfloat16Kernel>(a, team);
#endif
      return product<Bfloat16Kernel>(a, team);
    case kWeightQ4_0: return grouped_product<kWeightQ4_0>(a, team);
    case kWeightQ4_1: return grouped_product<kWeightQ4_1>(a, team);
    case kWeightQ8_0: return grouped_product<kWeightQ8_0>(a, team);
    case kWeightQ4_F32: return grouped_product<kWeightQ4_F32>(a, team);
    case kWeightQ8_F32: return grouped_product<kWeightQ8_F32>(a, team);
  }
}

}  // namespace octavo

int64_t octavo_row_kind(int64_t kind) { return octavo::best_row_kind(kind); }

int64_t octavo_packed_size(int64_t kind, int64_t out_features, int64_t in_features) {
  return octavo::WeightLayout(kind, out_features, in_features).bytes();
}

void octavo_pack_weight(int64_t kind, int64_t row_kind, const void* source, int64_t source_stride,
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
      pack_panel(kind, row_kind, rows, in_features, layout,
                 static_cast<char*>(packed) + panel * layout.panel_bytes);
    });
  });
}
