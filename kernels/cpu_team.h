// The threads that compute one op together, and how they share its work.
//
// An op's function is called by every thread of the team and does this thread's part. Whoever runs ops puts a
// barrier between two of them and sets the counter back to zero; an op itself never waits.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace octavo {

struct Team {
  int64_t rank;
  int64_t size;
  std::atomic<int64_t>* next;  // first piece that nobody has claimed; zero when an op begins

  // This thread's share of `count` pieces, contiguous: every thread knows it without asking.
  void share(int64_t count, int64_t* begin, int64_t* end) const {
    *begin = count * rank / size;
    *end = count * (rank + 1) / size;
  }

  // Calls `work(begin, end)` for pieces of [0, count), `chunk` at a time, as threads get to them.
  template <typename Work>
  void claim(int64_t count, int64_t chunk, Work work) const {
    for (;;) {
      const int64_t begin = next->fetch_add(chunk, std::memory_order_relaxed);
      if (begin >= count) return;
      work(begin, std::min(begin + chunk, count));
    }
  }
};

}  // namespace octavo
