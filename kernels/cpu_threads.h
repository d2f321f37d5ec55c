// Teams of threads, from the OpenMP runtime that the process has.
//
// They are asked for by the interface that GCC turns `#pragma omp parallel` into, which libgomp,
// Intel's runtime and LLVM's all answer to. A pragma would mean the runtime of whichever compiler
// reads it: Clang's is LLVM's, which beside the libgomp that torch brings would be a second set of
// threads. So the compiler is told nothing of OpenMP, and need not have any.
#pragma once

#include <cstdint>

extern "C" {
void GOMP_parallel(void (*function)(void*), void* data, unsigned num_threads, unsigned flags);
int omp_get_thread_num();
int omp_get_num_threads();
}

namespace octavo {

// Whether this process is a fork of the one that loaded the library. libgomp's threads stay behind,
// and a region that counts on them would wait for ever. In cpu_program.cpp.
bool is_forked();

// Calls `work(rank, size)` in each thread of a team of `num_threads`, or of as many as there are:
// within another parallel region, and in a fork, the caller's alone. `work` must not throw.
template <typename Work>
void run_team(int64_t num_threads, const Work& work) {
  if (num_threads <= 1 || is_forked()) return work(0, 1);
  const auto part = [](void* data) {
    (*static_cast<const Work*>(data))(omp_get_thread_num(), omp_get_num_threads());
  };
  GOMP_parallel(part, const_cast<Work*>(&work), unsigned(num_threads), 0);
}

}  // namespace octavo
