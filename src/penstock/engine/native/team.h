// Threads of one parallel region that walk through its phases together.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

namespace penstock {

struct alignas(64) Counter {
  std::atomic<int64_t> next{0};
};

// Task counters of a team, two sets: while one phase draws from one set, the other is cleared.
struct Team {
  explicit Team(int most_threads) : most(most_threads), counters(new Counter[2 * most_threads]) {}
  int most;
  std::unique_ptr<Counter[]> counters;
};

// A thread's view of the team, alive for one parallel region.
class Worker {
 public:
  Worker(Team& team, int id, int size) : id(id), size(size), team_(team) {}

  const int id, size;

  void barrier() {
    if (size > 1) {
#pragma omp barrier
    }
  }

  // Run task(i) for every i in [0, total), then wait for the others. A thread starts with its own
  // contiguous share, whose rows stay in its cache, and then takes what others have left: a core
  // that the system takes away for a while delays only the task in hand.
  template <class Task>
  void for_each(int64_t total, Task&& task) {
    if (size == 1) {
      for (int64_t i = 0; i < total; ++i) task(i);
      return;
    }
    Counter* set = team_.counters.get() + (phase_ & 1) * team_.most;
    for (int step = 0; step < size; ++step) {
      const int owner = (id + step) % size;
      const int64_t first = total * owner / size;
      const int64_t end = total * (owner + 1) / size;
      for (;;) {
        const int64_t i = first + set[owner].next.fetch_add(1, std::memory_order_relaxed);
        if (i >= end) break;
        task(i);
      }
    }
    barrier();
    // Nobody draws from this set again before the next barrier.
    set[id].next.store(0, std::memory_order_relaxed);
    ++phase_;
  }

 private:
  Team& team_;
  int phase_ = 0;
};

}  // namespace penstock
