// The threads that compute one op together, and how they share its work.
//
// An op's function is called by every thread of the team and does this thread's part. Whoever runs ops puts a
// barrier between two of them and sets the counter back to zero; an op itself never waits.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <thread>
#endif

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

// Where threads wait for each other. They spin at first, since the others are seldom late. A thread that has waited for
// a while sleeps: then one that another process keeps from running may have its processor.
class Barrier {
 public:
  // Waits for the others of a team of `size`.
  void wait(int64_t size) {
    if (size == 1) return;
    const int32_t turn = turn_.load(std::memory_order_relaxed);
    if (num_arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size) {
      num_arrived_.store(0, std::memory_order_relaxed);
      turn_.store(turn + 1, std::memory_order_seq_cst);
      if (num_sleepers_.load(std::memory_order_seq_cst) > 0) wake(int(size));
      return;
    }
    for (int i = 0; i < kSpins; i++) {
      if (turn_.load(std::memory_order_acquire) != turn) return;
      pause();
    }
    num_sleepers_.fetch_add(1, std::memory_order_seq_cst);
    while (turn_.load(std::memory_order_seq_cst) == turn) sleep_during(turn);
    num_sleepers_.fetch_sub(1, std::memory_order_relaxed);
  }

 private:
  static constexpr int kSpins = 1000;

  static void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }

#if defined(__linux__)
  void sleep_during(int32_t turn) {
    syscall(SYS_futex, &turn_, FUTEX_WAIT_PRIVATE, turn, nullptr, nullptr, 0);
  }
  void wake(int size) { syscall(SYS_futex, &turn_, FUTEX_WAKE_PRIVATE, size, nullptr, nullptr, 0); }
#else
  void sleep_during(int32_t) { std::this_thread::yield(); }
  void wake(int) {}
#endif

  alignas(64) std::atomic<int32_t> num_arrived_{0};
  alignas(64) std::atomic<int32_t> turn_{0};
  std::atomic<int32_t> num_sleepers_{0};
};

}  // namespace octavo
