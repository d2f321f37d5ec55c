// Runs programs. See cpu_program.h.
#include "cpu_program.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstddef>

#include "cpu_ops.h"
#include "cpu_threads.h"

namespace octavo {
namespace {

bool is_child = false;
const int child_handler = pthread_atfork(nullptr, nullptr, [] { is_child = true; });

// On a cache line of its own: all threads write it.
struct alignas(64) Counter {
  std::atomic<int64_t> next{0};
};

// What the threads of a run share.
struct Shared {
  Counter counters[2];
  Barrier barrier;
  std::atomic<bool> is_out_of_memory{false};
};

template <typename Args>
const Args& as(const void* args) {
  return *static_cast<const Args*>(args);
}

// Tokens begin .. end - 1 of an op that does each token by itself.
void run_tokens(const Instruction& step, int64_t begin, int64_t end) {
  switch (step.kind) {
    case kEmbed:
      return embed_rows(as<EmbedArgs>(step.args), begin, end);
    case kRmsNorm:
      return rms_norm_rows(as<RmsNormArgs>(step.args), begin, end);
    case kAdd:
      return add_rows(as<AddArgs>(step.args), begin, end);
    case kLayerNorm:
      return layer_norm_rows(as<LayerNormArgs>(step.args), begin, end);
    case kGelu:
      return gelu_rows(as<GeluArgs>(step.args), begin, end);
    case kGate:
      return gate_rows(as<GateArgs>(step.args), begin, end);
    case kRotary:
      return rotary_rows(as<RotaryArgs>(step.args), begin, end);
    case kStoreKV:
      return store_kv(as<StoreKVArgs>(step.args), begin, end);
    case kPackRows:
      return pack_rows(as<PackRowsArgs>(step.args), begin, end);
    case kRoute:
      return route_rows(as<RouteArgs>(step.args), begin, end);
    case kCombine:
      return combine_rows(as<CombineArgs>(step.args), begin, end);
    case kClamp:
      return clamp_rows(as<ClampArgs>(step.args), begin, end);
  }
}

// Number of tokens of such an op, null for any other.
const int64_t* num_tokens(const Instruction& step) {
  switch (step.kind) {
    case kEmbed:
      return as<EmbedArgs>(step.args).num_tokens;
    case kRmsNorm:
      return as<RmsNormArgs>(step.args).num_tokens;
    case kAdd:
      return as<AddArgs>(step.args).num_tokens;
    case kLayerNorm:
      return as<LayerNormArgs>(step.args).num_tokens;
    case kGelu:
      return as<GeluArgs>(step.args).num_tokens;
    case kGate:
      return as<GateArgs>(step.args).num_tokens;
    case kRotary:
      return as<RotaryArgs>(step.args).num_tokens;
    case kStoreKV:
      return as<StoreKVArgs>(step.args).num_tokens;
    case kPackRows:
      return as<PackRowsArgs>(step.args).num_tokens;
    case kRoute:
      return as<RouteArgs>(step.args).num_tokens;
    case kCombine:
      return as<CombineArgs>(step.args).num_tokens;
    case kClamp:
      return as<ClampArgs>(step.args).num_tokens;
    default:
      return nullptr;
  }
}

void run_part(const Instruction& step, const Team& team) {
  switch (step.kind) {
    case kAttention:
      return attention_part(as<AttentionArgs>(step.args), team);
    case kLinear:
      return linear_part(as<LinearArgs>(step.args), team);
    case kSample:
      return sample_part(as<SampleArgs>(step.args), team);
    case kLikeliest:
      return likeliest_part(as<LikeliestArgs>(step.args), team);
    case kSortExperts:
      return sort_experts_part(as<SortExpertsArgs>(step.args), team);
  }
}

// Runs ops first .. end - 1 on this thread's tokens, a few at a time, so that what one op writes is
// still near when the next reads it.
void run_tokenwise(const Instruction* first, const Instruction* end, const Team& team) {
  constexpr int64_t kTokens = 4;
  int64_t token, last;
  team.share(*num_tokens(*first), &token, &last);
  for (; token < last; token += kTokens) {
    for (const Instruction* step = first; step < end; step++)
      run_tokens(*step, token, std::min(token + kTokens, last));
  }
}

// The end of the ops that run without a barrier between them: neighbours that do each token by
// itself, or one other op.
int64_t end_of_run(const Instruction* program, int64_t begin, int64_t count) {
  const int64_t* tokens = num_tokens(program[begin]);
  int64_t end = begin + 1;
  while (tokens && end < count && num_tokens(program[end]) == tokens) end++;
  return end;
}

// Ops first .. end - 1. Nothing that an op throws may leave the parallel region, and only memory makes one throw.
void try_run(const Instruction* first, const Instruction* end, const Team& team, Shared& shared) {
  try {
    if (num_tokens(*first))
      run_tokenwise(first, end, team);
    else
      run_part(*first, team);
  } catch (...) {
    shared.is_out_of_memory.store(true, std::memory_order_relaxed);
  }
}

// Two counters take turns. While one op uses one of them, nobody touches the other: it belonged to
// the op before, which all threads have left, and belongs to the op after, which none enters before
// the barrier. So one thread zeroes it in between, and one barrier between two ops is enough.
//
// After an op that lacked memory, nothing is computed: others would read what it did not write. All
// threads still meet at every barrier.
void run_share(const Instruction* program, int64_t count, Shared& shared, int64_t rank,
               int64_t size) {
  int64_t turn = 0;
  for (int64_t i = 0, end; i < count; i = end, turn = 1 - turn) {
    if (i > 0) shared.barrier.wait(size);
    if (rank == 0) shared.counters[1 - turn].next.store(0, std::memory_order_relaxed);
    end = end_of_run(program, i, count);
    if (shared.is_out_of_memory.load(std::memory_order_relaxed)) continue;
    try_run(program + i, program + end, Team{rank, size, &shared.counters[turn].next}, shared);
  }
}

#define FIELD(type, name) \
  { #type "." #name, offsetof(type, name), sizeof(type::name) }
#define STRUCT(type) \
  { #type, 0, sizeof(type) }
#define KIND(name) \
  { "OpKind." #name, name, 0 }

const LayoutEntry kLayout[] = {
    KIND(kEmbed),
    KIND(kRmsNorm),
    KIND(kGate),
    KIND(kRotary),
    KIND(kStoreKV),
    KIND(kAttention),
    KIND(kPackRows),
    KIND(kLinear),
    KIND(kSample),
    KIND(kAdd),
    KIND(kLikeliest),
    KIND(kLayerNorm),
    KIND(kGelu),
    KIND(kRoute),
    KIND(kSortExperts),
    KIND(kCombine),
    KIND(kClamp),

    STRUCT(Instruction),
    FIELD(Instruction, kind),
    FIELD(Instruction, args),

    STRUCT(EmbedArgs),
    FIELD(EmbedArgs, num_tokens),
    FIELD(EmbedArgs, token_ids),
    FIELD(EmbedArgs, table),
    FIELD(EmbedArgs, dtype),
    FIELD(EmbedArgs, hidden),
    FIELD(EmbedArgs, out),
    FIELD(EmbedArgs, out_stride),

    STRUCT(RmsNormArgs),
    FIELD(RmsNormArgs, num_tokens),
    FIELD(RmsNormArgs, x),
    FIELD(RmsNormArgs, x_stride),
    FIELD(RmsNormArgs, residual),
    FIELD(RmsNormArgs, residual_stride),
    FIELD(RmsNormArgs, weight),
    FIELD(RmsNormArgs, eps),
    FIELD(RmsNormArgs, size),
    FIELD(RmsNormArgs, num_heads),
    FIELD(RmsNormArgs, head_stride),
    FIELD(RmsNormArgs, out),
    FIELD(RmsNormArgs, out_stride),

    STRUCT(AddArgs),
    FIELD(AddArgs, num_tokens),
    FIELD(AddArgs, x),
    FIELD(AddArgs, x_stride),
    FIELD(AddArgs, factor),
    FIELD(AddArgs, size),
    FIELD(AddArgs, residual),
    FIELD(AddArgs, out),
    FIELD(AddArgs, out_stride),

    STRUCT(LayerNormArgs),
    FIELD(LayerNormArgs, num_tokens),
    FIELD(LayerNormArgs, x),
    FIELD(LayerNormArgs, x_stride),
    FIELD(LayerNormArgs, residual),
    FIELD(LayerNormArgs, residual_stride),
    FIELD(LayerNormArgs, weight),
    FIELD(LayerNormArgs, bias),
    FIELD(LayerNormArgs, eps),
    FIELD(LayerNormArgs, size),
    FIELD(LayerNormArgs, out),
    FIELD(LayerNormArgs, out_stride),

    STRUCT(GeluArgs),
    FIELD(GeluArgs, num_tokens),
    FIELD(GeluArgs, x),
    FIELD(GeluArgs, x_stride),
    FIELD(GeluArgs, size),
    FIELD(GeluArgs, is_tanh),
    FIELD(GeluArgs, out),
    FIELD(GeluArgs, out_stride),

    STRUCT(GateArgs),
    FIELD(GateArgs, num_tokens),
    FIELD(GateArgs, x),
    FIELD(GateArgs, x_stride),
    FIELD(GateArgs, size),
    FIELD(GateArgs, kind),
    FIELD(GateArgs, out),
    FIELD(GateArgs, out_stride),

    STRUCT(RotaryArgs),
    FIELD(RotaryArgs, num_tokens),
    FIELD(RotaryArgs, heads),
    FIELD(RotaryArgs, token_stride),
    FIELD(RotaryArgs, head_stride),
    FIELD(RotaryArgs, num_heads),
    FIELD(RotaryArgs, head_dim),
    FIELD(RotaryArgs, rotary_dim),
    FIELD(RotaryArgs, positions),
    FIELD(RotaryArgs, cos_sin),

    STRUCT(StoreKVArgs),
    FIELD(StoreKVArgs, num_tokens),
    FIELD(StoreKVArgs, k),
    FIELD(StoreKVArgs, v),
    FIELD(StoreKVArgs, token_stride),
    FIELD(StoreKVArgs, head_stride),
    FIELD(StoreKVArgs, slots),
    FIELD(StoreKVArgs, key),
    FIELD(StoreKVArgs, value),
    FIELD(StoreKVArgs, dtype),
    FIELD(StoreKVArgs, block_size),
    FIELD(StoreKVArgs, num_kv_heads),
    FIELD(StoreKVArgs, head_dim),

    STRUCT(AttentionArgs),
    FIELD(AttentionArgs, num_rows),
    FIELD(AttentionArgs, query_start_loc),
    FIELD(AttentionArgs, seq_lens),
    FIELD(AttentionArgs, block_tables),
    FIELD(AttentionArgs, table_stride),
    FIELD(AttentionArgs, q),
    FIELD(AttentionArgs, q_token_stride),
    FIELD(AttentionArgs, q_head_stride),
    FIELD(AttentionArgs, key),
    FIELD(AttentionArgs, value),
    FIELD(AttentionArgs, dtype),
    FIELD(AttentionArgs, block_size),
    FIELD(AttentionArgs, num_q_heads),
    FIELD(AttentionArgs, num_kv_heads),
    FIELD(AttentionArgs, head_dim),
    FIELD(AttentionArgs, scale),
    FIELD(AttentionArgs, window),
    FIELD(AttentionArgs, soft_cap),
    FIELD(AttentionArgs, out),
    FIELD(AttentionArgs, out_stride),

    STRUCT(PackRowsArgs),
    FIELD(PackRowsArgs, num_tokens),
    FIELD(PackRowsArgs, x),
    FIELD(PackRowsArgs, x_stride),
    FIELD(PackRowsArgs, sources),
    FIELD(PackRowsArgs, num_sources),
    FIELD(PackRowsArgs, size),
    FIELD(PackRowsArgs, kind),
    FIELD(PackRowsArgs, capacity),
    FIELD(PackRowsArgs, out),

    STRUCT(LinearArgs),
    FIELD(LinearArgs, num_tokens),
    FIELD(LinearArgs, x),
    FIELD(LinearArgs, x_stride),
    FIELD(LinearArgs, capacity),
    FIELD(LinearArgs, row_kind),
    FIELD(LinearArgs, weight),
    FIELD(LinearArgs, kind),
    FIELD(LinearArgs, in_features),
    FIELD(LinearArgs, out_features),
    FIELD(LinearArgs, bias),
    FIELD(LinearArgs, out),
    FIELD(LinearArgs, out_stride),
    FIELD(LinearArgs, group_starts),
    FIELD(LinearArgs, num_groups),
    FIELD(LinearArgs, weight_stride),
    FIELD(LinearArgs, likeliest),

    STRUCT(RouteArgs),
    FIELD(RouteArgs, num_tokens),
    FIELD(RouteArgs, logits),
    FIELD(RouteArgs, logits_stride),
    FIELD(RouteArgs, num_experts),
    FIELD(RouteArgs, top_k),
    FIELD(RouteArgs, is_renormalised),
    FIELD(RouteArgs, experts),
    FIELD(RouteArgs, weights),

    STRUCT(SortExpertsArgs),
    FIELD(SortExpertsArgs, num_tokens),
    FIELD(SortExpertsArgs, experts),
    FIELD(SortExpertsArgs, num_experts),
    FIELD(SortExpertsArgs, top_k),
    FIELD(SortExpertsArgs, num_rows),
    FIELD(SortExpertsArgs, starts),
    FIELD(SortExpertsArgs, tokens),
    FIELD(SortExpertsArgs, rows),

    STRUCT(CombineArgs),
    FIELD(CombineArgs, num_tokens),
    FIELD(CombineArgs, x),
    FIELD(CombineArgs, x_stride),
    FIELD(CombineArgs, rows),
    FIELD(CombineArgs, weights),
    FIELD(CombineArgs, top_k),
    FIELD(CombineArgs, size),
    FIELD(CombineArgs, out),
    FIELD(CombineArgs, out_stride),

    STRUCT(LikeliestArgs),
    FIELD(LikeliestArgs, num_rows),
    FIELD(LikeliestArgs, likeliest),
    FIELD(LikeliestArgs, capacity),
    FIELD(LikeliestArgs, out),

    STRUCT(ClampArgs),
    FIELD(ClampArgs, num_tokens),
    FIELD(ClampArgs, x),
    FIELD(ClampArgs, x_stride),
    FIELD(ClampArgs, size),
    FIELD(ClampArgs, limit),

    STRUCT(SampleArgs),
    FIELD(SampleArgs, num_rows),
    FIELD(SampleArgs, logits),
    FIELD(SampleArgs, logits_stride),
    FIELD(SampleArgs, vocab_size),
    FIELD(SampleArgs, temperature),
    FIELD(SampleArgs, top_k),
    FIELD(SampleArgs, top_p),
    FIELD(SampleArgs, min_p),
    FIELD(SampleArgs, seed),
    FIELD(SampleArgs, position),
    FIELD(SampleArgs, out),
};

}  // namespace

bool is_forked() { return is_child; }

}  // namespace octavo

int64_t octavo_run(const octavo::Instruction* program, int64_t count, int64_t num_threads) {
  octavo::Shared shared;
  octavo::run_team(num_threads, [&](int64_t rank, int64_t size) {
    octavo::run_share(program, count, shared, rank, size);
  });
  return shared.is_out_of_memory ? octavo::kOutOfMemory : octavo::kDone;
}

int64_t octavo_layout(const octavo::LayoutEntry** entries) {
  *entries = octavo::kLayout;
  return sizeof octavo::kLayout / sizeof octavo::kLayout[0];
}

int64_t octavo_packed_rows_size(int64_t kind, int64_t capacity, int64_t size) {
  return octavo::PackedRows(kind, capacity, size).bytes;
}
