// Draws a token per row: Ops.sample of ops.py, without sorting the vocabulary.
//
// The filters keep the first tokens by rank: by logit, the lower id first on a tie. A rank is a
// 64-bit number here, the logit's bits made monotone above the complement of the id, so what a row
// keeps is all ranks from some "cut" up, but for min-p, which is a bound on the weight. A row goes
// through:
//
//   any           one pass for the largest logit, and for what is no number.
//   greedy        nothing more.
//   no filter     one pass for the weights
//                 exp((logit - largest) / temperature) and their sums by chunks; the draw adds up
//                 chunks, then tokens of one chunk.
//   top-k         one pass with a buffer of ranks above the k-th found so far; one to collect what
//                 is above the cut.
//   top-p alone   tokens below (1 - top_p) * total / vocab_size together hold less than 1 - top_p,
//                 so all that top-p keeps are above, mostly far above; these are collected, and
//                 the cut is found by partitioning.
//
// One thread draws a row. Weights are float32 and are added in double, as the oracle does.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <limits>
#include <new>

#include "cpu_likeliest.h"
#include "cpu_ops.h"
#include "cpu_program.h"
#include "cpu_team.h"

namespace octavo {
namespace {

constexpr int64_t kChunk = 256;  // weights of one partial sum; a multiple of kLanes
constexpr int64_t kLeastBuffer = 1024;

// A growing array of one thread; what it holds is plain data.
template <typename T>
class Buffer {
 public:
  ~Buffer() { std::free(memory_); }

  T* get(int64_t count) {
    if (count > size_) {
      int64_t size = 64;
      while (size < count) size *= 2;
      std::free(memory_);
      memory_ = static_cast<T*>(std::aligned_alloc(64, size * sizeof(T)));
      size_ = memory_ ? size : 0;
      if (!memory_) throw std::bad_alloc();
    }
    return memory_;
  }

 private:
  T* memory_ = nullptr;
  int64_t size_ = 0;
};

struct Candidate {
  uint64_t rank;
  double weight;
};

// Where a candidate's token is in its rank.
OCTAVO_INLINE int64_t token_of(uint64_t rank) { return int64_t(~uint32_t(rank)); }

OCTAVO_INLINE uint64_t rank_of(float logit, int64_t token) {
  logit += 0.0f;  // -0.0 ties with 0.0
  uint32_t bits;
  std::memcpy(&bits, &logit, sizeof bits);
  bits ^= bits >> 31 ? ~0u : 1u << 31;
  return uint64_t(bits) << 32 | uint32_t(~uint32_t(token));
}

// Philox4x32-10 (Salmon et al., SC 2011), as philox.py: the key is the seed, the counter is the
// position.
double philox_uniform(int64_t seed, int64_t position) {
  uint32_t key[2] = {uint32_t(seed), uint32_t(uint64_t(seed) >> 32)};
  uint32_t word[4] = {uint32_t(position), uint32_t(uint64_t(position) >> 32), 0, 0};
  for (int round = 0; round < 10; round++) {
    const uint64_t a = uint64_t(0xD2511F53u) * word[0], b = uint64_t(0xCD9E8D57u) * word[2];
    word[0] = uint32_t(b >> 32) ^ word[1] ^ key[0];
    word[1] = uint32_t(b);
    word[2] = uint32_t(a >> 32) ^ word[3] ^ key[1];
    word[3] = uint32_t(a);
    key[0] += 0x9E3779B9u;
    key[1] += 0xBB67AE85u;
  }
  const uint64_t bits = uint64_t(word[0] >> 5) << 26 | word[1] >> 6;
  return double(bits) * 0x1p-53;
}

// One row: its logits and what filters them.
struct Row {
  const float* logits;
  int64_t vocab_size;
  float temperature;
  int64_t top_k;  // 0: off; below vocab_size
  float top_p, min_p;
  double uniform;
};

OCTAVO_INLINE vfloat load_logits(const Row& row, int64_t i) {
  return load_left(row.logits + i, row.vocab_size - i);
}

int64_t argmax(const Row& row) {
  Likeliest likeliest;
  likeliest.clear();
  vint ids = ascending(0);
  for (int64_t i = 0; i < row.vocab_size; i += kLanes, ids += kLanes) {
    likeliest.add(load_logits(row, i), ids);
  }
  return likeliest.token();
}

thread_local Buffer<float> weight_buffer;
thread_local Buffer<double> sum_buffer;
thread_local Buffer<uint64_t> rank_buffer;
thread_local Buffer<Candidate> candidate_buffer, order_buffer;

// exp((logit - largest) / temperature), so that the largest weight is 1.
OCTAVO_INLINE vfloat weigh(const Row& row, vfloat logits, float largest) {
  return vexp((logits - largest) / row.temperature);
}

OCTAVO_INLINE double sum_wide(const float* values, int64_t count) {
  double sums[8] = {};
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    for (int j = 0; j < 8; j++) sums[j] += values[i + j];
  }
  double sum = 0;
  for (int j = 0; j < 8; j++) sum += sums[j];
  for (; i < count; i++) sum += values[i];
  return sum;
}

// All weights, those below `least` as zero, and their sums by chunks of kChunk → the sum of sums.
double weigh_all(const Row& row, float largest, float least, float* weights, double* sums) {
  double total = 0;
  for (int64_t begin = 0; begin < row.vocab_size; begin += kChunk) {
    const int64_t end = std::min(begin + kChunk, row.vocab_size);
    for (int64_t i = begin; i < end; i += kLanes) {
      const vfloat weight = weigh(row, load_logits(row, i), largest);
      store(weights + i, weight < least ? vfloat{} : weight);
    }
    total += sums[begin / kChunk] = sum_wide(weights + begin, end - begin);
  }
  return total;
}

// First token whose cumulative weight is above uniform * total.
int64_t draw_from_all(const Row& row, const float* weights, const double* sums, double total) {
  const double target = row.uniform * total;
  double before = 0;
  int64_t last = -1;  // with a weight: rounding may leave the target just out of reach
  for (int64_t begin = 0; begin < row.vocab_size; begin += kChunk) {
    const double sum = sums[begin / kChunk];
    if (!(before + sum > target) && begin + kChunk < row.vocab_size) {
      before += sum;
      continue;
    }
    const int64_t end = std::min(begin + kChunk, row.vocab_size);
    for (int64_t i = begin; i < end; i++) {
      before += weights[i];
      if (weights[i] > 0) last = i;
      if (before > target) return i;
    }
  }
  for (int64_t i = row.vocab_size - 1; last < 0 && i >= 0; i--) {
    if (weights[i] > 0) last = i;
  }
  return last;
}

// The k-th largest rank; 0 if fewer than k tokens have a weight.
uint64_t kth_rank(const Row& row, int64_t k) {
  const int64_t capacity = std::max(2 * k, kLeastBuffer);
  uint64_t* ranks = rank_buffer.get(capacity + kLanes);
  int64_t count = 0;
  float least = -INFINITY;  // only a higher logit can be among the first k: ids only rise
  const auto shrink = [&] {
    if (count < k) return;
    std::nth_element(ranks, ranks + k - 1, ranks + count, std::greater<uint64_t>());
    count = k;
    least = row.logits[token_of(ranks[k - 1])];
  };
  for (int64_t i = 0; i < row.vocab_size; i += kLanes) {
    const vint is_candidate = load_logits(row, i) > least;
    for (uint32_t lanes = true_lanes(is_candidate); lanes; lanes &= lanes - 1) {
      const int64_t token = i + __builtin_ctz(lanes);
      ranks[count++] = rank_of(row.logits[token], token);
    }
    if (count >= capacity) shrink();
  }
  shrink();
  return count < k ? 0 : ranks[k - 1];
}

// Tokens of rank `cut` and above, in the order of their ids → how many. -inf is never among them.
int64_t collect_ranks(const Row& row, float largest, uint64_t cut, Candidate* candidates) {
  const float least = cut ? row.logits[token_of(cut)] : std::numeric_limits<float>::lowest();
  int64_t count = 0;
  for (int64_t i = 0; i < row.vocab_size; i += kLanes) {
    const vfloat logits = load_logits(row, i);
    uint32_t lanes = true_lanes((vint)(logits >= least));
    if (!lanes) continue;
    const vfloat weight = weigh(row, logits, largest);
    for (; lanes; lanes &= lanes - 1) {
      const int j = __builtin_ctz(lanes);
      const uint64_t rank = rank_of(logits[j], i + j);
      if (rank >= cut) candidates[count++] = {rank, weight[j]};
    }
  }
  return count;
}

// Tokens of weight `least` and above, in the order of their ids → how many.
int64_t collect_weights(const Row& row, const float* weights, float least, Candidate* candidates) {
  int64_t count = 0;
  for (int64_t i = 0; i < row.vocab_size; i += kLanes) {
    const vint is_candidate = load(weights + i) >= least;
    for (uint32_t lanes = true_lanes(is_candidate); lanes; lanes &= lanes - 1) {
      const int64_t token = i + __builtin_ctz(lanes);
      candidates[count++] = {rank_of(row.logits[token], token), weights[token]};
    }
  }
  return count;
}

// Sum of the weights of `least` and above, nearly: by chunks, so that few roundings add up.
float mass_above(const Row& row, const float* weights, float least) {
  vfloat sums{};
  for (int64_t begin = 0; begin < row.vocab_size; begin += kChunk) {
    vfloat chunk{};
    for (int64_t i = begin; i < std::min(begin + kChunk, row.vocab_size); i += kLanes) {
      const vfloat weight = load(weights + i);
      chunk += weight >= least ? weight : vfloat{};
    }
    sums += chunk;
  }
  return sum(sums);
}

// A weight that all of the nucleus has, so that nothing below need be looked at. Peaked rows have
// their nucleus far above the bound that holds for any row; a few more passes find that out. Room
// is left for roundings.
float nucleus_bound(const Row& row, const float* weights, double total) {
  const double rest = 0.999 * (1.0 - double(row.top_p)) * total;
  const double needed = 1.0001 * double(row.top_p) * total;
  float bound = 1.0f / 64;
  for (; bound * double(row.vocab_size) > rest; bound /= 8) {
    if (mass_above(row, weights, bound) >= needed) return bound;
  }
  return float(rest / double(row.vocab_size));
}

// The rank of the last candidate that has less than `mass` before it. Reorders the candidates. On
// average a small multiple of `count` steps.
uint64_t cut_by_mass(Candidate* candidates, int64_t count, double mass) {
  Candidate *begin = candidates, *end = candidates + count;
  double before = 0;  // weight of what ranks above `begin`
  uint64_t cut = 0;
  while (begin < end) {
    const uint64_t a = begin->rank, b = begin[(end - begin) / 2].rank, c = end[-1].rank;
    const uint64_t pivot = std::max(std::min(a, b), std::min(std::max(a, b), c));
    const auto is_above = [=](const Candidate& x) { return x.rank > pivot; };
    const auto is_pivot = [=](const Candidate& x) { return x.rank == pivot; };
    Candidate* middle = std::partition(begin, end, is_above);
    double above = before;
    for (Candidate* x = begin; x < middle; x++) above += x->weight;
    if (above >= mass && begin < middle) {
      end = middle;
      continue;
    }
    // The pivot is kept. It may be anywhere behind the middle.
    std::swap(*middle, *std::find_if(middle, end, is_pivot));
    cut = pivot;
    before = above + middle->weight;
    begin = middle + 1;
    if (before >= mass) break;
  }
  return cut;
}

// Draws among candidates, which are in the order of their ids, of rank `cut` and above and weight
// `least` and above.
int64_t draw_from(const Candidate* candidates, int64_t count, uint64_t cut, double least,
                  double uniform) {
  const auto is_kept = [=](const Candidate& x) { return x.rank >= cut && x.weight >= least; };
  double total = 0;
  for (int64_t i = 0; i < count; i++) {
    if (is_kept(candidates[i])) total += candidates[i].weight;
  }
  double cumulative = 0;
  int64_t last = -1;
  for (int64_t i = 0; i < count; i++) {
    if (!is_kept(candidates[i])) continue;
    cumulative += candidates[i].weight;
    if (candidates[i].weight > 0) last = token_of(candidates[i].rank);
    if (cumulative > uniform * total) break;
  }
  return last;
}

int64_t draw_unfiltered(const Row& row, float largest) {
  float* weights = weight_buffer.get(row.vocab_size + kLanes);
  double* sums = sum_buffer.get(row.vocab_size / kChunk + 1);
  const double total = weigh_all(row, largest, row.min_p, weights, sums);
  return draw_from_all(row, weights, sums, total);
}

int64_t draw_filtered(const Row& row, float largest) {
  Candidate* candidates = candidate_buffer.get(row.top_k ? row.top_k : row.vocab_size);
  int64_t count;
  double total = 0;
  uint64_t cut = 0;
  if (row.top_k) {
    cut = kth_rank(row, row.top_k);
    count = collect_ranks(row, largest, cut, candidates);
    for (int64_t i = 0; i < count; i++) total += candidates[i].weight;
  } else {
    float* weights = weight_buffer.get(row.vocab_size + kLanes);
    double* sums = sum_buffer.get(row.vocab_size / kChunk + 1);
    total = weigh_all(row, largest, 0.0f, weights, sums);
    const float least = nucleus_bound(row, weights, total);
    count = collect_weights(row, weights, least, candidates);
  }
  if (row.top_p < 1.0f) {
    Candidate* order = order_buffer.get(count);
    std::copy(candidates, candidates + count, order);
    cut = std::max(cut, cut_by_mass(order, count, double(row.top_p) * total));
  }
  return draw_from(candidates, count, cut, row.min_p, row.uniform);
}

int64_t sample_row(const Row& row) {
  const int64_t most_likely = argmax(row);
  if (row.temperature == 0.0f || most_likely < 0) return most_likely;
  const float largest = row.logits[most_likely];
  const bool is_filtered = row.top_k || row.top_p < 1.0f;
  return is_filtered ? draw_filtered(row, largest) : draw_unfiltered(row, largest);
}

}  // namespace

void sample_part(const SampleArgs& a, const Team& team) {
  team.claim(*a.num_rows, 1, [&](int64_t i, int64_t) {
    Row row;
    row.logits = a.logits + i * a.logits_stride;
    row.vocab_size = a.vocab_size;
    row.temperature = a.temperature[i];
    row.top_k = a.top_k[i] > 0 && a.top_k[i] < a.vocab_size ? a.top_k[i] : 0;
    row.top_p = a.top_p[i];
    row.min_p = a.min_p[i];
    row.uniform = row.temperature == 0.0f ? 0.0 : philox_uniform(a.seed[i], a.position[i]);
    a.out[i] = sample_row(row);
  });
}

void likeliest_part(const LikeliestArgs& a, const Team& team) {
  const Likeliest* seen = static_cast<const Likeliest*>(a.likeliest);
  int64_t row, end;
  team.share(*a.num_rows, &row, &end);
  for (; row < end; row++) {
    Likeliest all = seen[row];
    for (int64_t rank = 1; rank < team.size; rank++) all.add(seen[rank * a.capacity + row]);
    a.out[row] = all.token();
  }
}

}  // namespace octavo

int64_t octavo_likeliest_size(int64_t num_threads, int64_t capacity) {
  return num_threads * capacity * int64_t(sizeof(octavo::Likeliest));
}
