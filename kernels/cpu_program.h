// A program: ops in the order in which they run, each with the address of its arguments.
//
// One call runs all of it in one parallel region, with a barrier between two ops. Ops that do each token
// by itself need none between neighbours of the same num_tokens: a thread takes its tokens through all of them.
// So what one of these reads or writes for a token, another must not write for other tokens. Nothing is kept
// between calls, and several threads may run programs at once.
#pragma once

#include <cstdint>

#define OCTAVO_EXPORT extern "C" __attribute__((visibility("default")))

namespace octavo {

// Mirrored by cpu_structs.py's OpKind.
enum OpKind : int64_t {
  kEmbed = 0,
  kRmsNorm = 1,
  kGate = 2,
  kRotary = 3,
  kStoreKV = 4,
  kAttention = 5,
  kPackRows = 6,
  kLinear = 7,
  kSample = 8,
  kAdd = 9,
  kLikeliest = 10,
  kLayerNorm = 20,
  kGelu = 21,
  kRoute = 30,
  kSortExperts = 31,
  kCombine = 32,
  kClamp = 33,
};

enum RunResult : int64_t { kDone = 0, kOutOfMemory = 1 };

struct Instruction {
  int64_t kind;      // OpKind
  const void* args;  // that op's Args
};

// One line of the table that Python's mirrors are compared with: a field ("EmbedArgs.table", its
// offset and size), a struct ("EmbedArgs", 0, its size) or a kind ("OpKind.kEmbed", its number, 0).
struct LayoutEntry {
  const char* name;
  int64_t offset;
  int64_t size;
};

}  // namespace octavo

// Runs `count` instructions on `num_threads` threads, or as many as the OpenMP runtime grants. With
// kOutOfMemory, what an op needed for itself was not to be had, and nothing that was written counts.
OCTAVO_EXPORT int64_t octavo_run(const octavo::Instruction* program, int64_t count,
                                 int64_t num_threads);  // RunResult

// Points `entries` to the table; returns how many there are.
OCTAVO_EXPORT int64_t octavo_layout(const octavo::LayoutEntry** entries);

// Bytes that a PackRowsArgs needs for `out`.
OCTAVO_EXPORT int64_t octavo_packed_rows_size(int64_t kind, int64_t capacity, int64_t size);

// Bytes of LikeliestArgs' `likeliest`, aligned to 64.
OCTAVO_EXPORT int64_t octavo_likeliest_size(int64_t num_threads, int64_t capacity);
