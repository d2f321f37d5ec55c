// Mixtures of experts: which experts a token goes to, the order in which experts take their rows, and the sum of
// what they give. Between these, experts are ordinary products of grouped rows (cpu_linear.cpp).
#include <algorithm>
#include <cmath>

#include "cpu_ops.h"
#include "cpu_vec.h"

namespace octavo {
namespace {

// The largest logits first. One that is NaN counts as less than any other.
void choose(const float* logits, int64_t count, int64_t top_k, int32_t* chosen) {
  const auto key = [&](int64_t id) { return std::isnan(logits[id]) ? -INFINITY : logits[id]; };
  int64_t num_chosen = 0;
  for (int64_t id = 0; id < count; id++) {
    int64_t place = num_chosen;
    while (place > 0 && key(id) > key(chosen[place - 1])) place--;
    if (place == top_k) continue;
    num_chosen = std::min(num_chosen + 1, top_k);
    for (int64_t i = num_chosen - 1; i > place; i--) chosen[i] = chosen[i - 1];
    chosen[place] = int32_t(id);
  }
}

// The sum of e^(logit - largest).
float sum_of_exponentials(const float* logits, int64_t count, float largest) {
  vfloat total{};
  for (int64_t i = 0; i < count; i += kLanes) {
    float some[kLanes];
    for (int64_t lane = 0; lane < kLanes; lane++)
      some[lane] = i + lane < count ? logits[i + lane] - largest : -1000.0f;
    total += vexp(load(some));
  }
  return sum(total);
}

// weights[j] = e^(logits[chosen[j]] - the largest), and their sum.
float exponentials_of_chosen(const float* logits, const int32_t* chosen, int64_t top_k,
                             float* weights) {
  const float largest = logits[chosen[0]];
  float total = 0.0f;
  for (int64_t j = 0; j < top_k; j++) total += weights[j] = std::exp(logits[chosen[j]] - largest);
  return total;
}

}  // namespace

void route_rows(const RouteArgs& a, int64_t begin, int64_t end) {
  for (int64_t token = begin; token < end; token++) {
    const float* logits = a.logits + token * a.logits_stride;
    int32_t* chosen = a.experts + token * a.top_k;
    float* weights = a.weights + token * a.top_k;
    choose(logits, a.num_experts, a.top_k, chosen);
    float total = exponentials_of_chosen(logits, chosen, a.top_k, weights);
    if (!a.is_renormalised)
      total = sum_of_exponentials(logits, a.num_experts, logits[chosen[0]]);
    for (int64_t j = 0; j < a.top_k; j++) weights[j] /= total;
  }
}

// Counting; one thread's work, for it is little beside the products that it sorts for.
void sort_experts_part(const SortExpertsArgs& a, const Team& team) {
  if (team.rank != 0) return;
  const int64_t num_rows = *a.num_tokens * a.top_k;
  *a.num_rows = num_rows;
  int32_t* next = a.starts + 1;  // of each expert's rows; where its rows end once all are placed
  std::fill(a.starts, a.starts + a.num_experts + 1, 0);
  for (int64_t pair = 0; pair < num_rows; pair++) {
    const int32_t expert = a.experts[pair];
    if (expert + 1 < a.num_experts) next[expert + 1]++;
  }
  for (int64_t expert = 1; expert < a.num_experts; expert++) next[expert] += next[expert - 1];
  for (int64_t pair = 0; pair < num_rows; pair++) {
    const int32_t row = next[a.experts[pair]]++;
    a.rows[pair] = row;
    a.tokens[row] = int32_t(pair / a.top_k);
  }
}

void combine_rows(const CombineArgs& a, int64_t begin, int64_t end) {
  for (int64_t token = begin; token < end; token++) {
    const int32_t* rows = a.rows + token * a.top_k;
    const float* weights = a.weights + token * a.top_k;
    float* out = a.out + token * a.out_stride;
    for (int64_t i = 0; i < a.size; i += kLanes) {
      const int count = int(std::min<int64_t>(kLanes, a.size - i));
      vfloat total{};
      for (int64_t j = 0; j < a.top_k; j++)
        total = fma(load_some(a.x + rows[j] * a.x_stride + i, count), splat(weights[j]), total);
      store_some(out + i, total, count);
    }
  }
}

}  // namespace octavo
