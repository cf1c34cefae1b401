// Threads that share out the phases of a job, and never wait for a thread that is not running.
//
// A barrier of all threads is only as fast as the slowest to be scheduled: with one more busy
// process than cores, a step of thirty phases took a hundred times as long. Here a phase ends when
// its tasks are done, by any threads. A delayed thread skips the phases that passed without it; the
// caller does not wait for it even at the end. Only a started task is waited for.
#pragma once

#include <sched.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace penstock {

inline void pause_briefly() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Spins at first, to resume fast, and later yields the core.
class Patience {
 public:
  void wait() {
    if (++turns_ < kSpins)
      pause_briefly();
    else
      sched_yield();
  }
  bool exhausted() const { return turns_ >= kSpins + kYields; }

 private:
  static constexpr int kSpins = 1000, kYields = 4000;
  int turns_ = 0;
};

// Tasks taken from a range, from either end.
class alignas(64) Range {
 public:
  void reset() { taken_.store(0, std::memory_order_relaxed); }

  // The next task from the front (or the back) of [first, end); -1 if all are taken.
  int64_t take(int64_t first, int64_t end, bool from_back) {
    uint64_t taken = taken_.load(std::memory_order_relaxed);
    for (;;) {
      const int64_t front = taken & 0xffffffff, back = taken >> 32;
      if (front + back >= end - first) return -1;
      const uint64_t one_more = taken + (from_back ? 1ull << 32 : 1);
      if (taken_.compare_exchange_weak(taken, one_more, std::memory_order_relaxed))
        return from_back ? end - 1 - back : first + front;
    }
  }

 private:
  std::atomic<uint64_t> taken_{0};
};

struct alignas(64) Phase {
  std::atomic<int64_t> done{0};
};

class Worker;

// What the threads of one call share. Jobs are recycled, never freed, and what a late thread may
// still look at (phases, plans) belongs to the job.
class Job {
 public:
  virtual ~Job() = default;
  virtual void run(Worker& worker) = 0;

 private:
  friend class Pool;
  friend class Worker;
  std::vector<Phase> phases_;
  std::vector<Range> ranges_;  // of each phase, one for each thread
  std::atomic<int> inside_{0};
  std::atomic<uint64_t> number_{0};
  int threads_ = 1;
};

// One thread's way through a job.
class Worker {
 public:
  Worker(Job& job, int id) : id(id), size(job.threads_), job_(job) {}

  const int id, size;

  // Run task(i) once for every i in [0, total) in some thread; on return all of them are done.
  // Every thread passes through the same sequence of calls.
  template <class Task>
  void for_each(int64_t total, Task&& task) {
    if (size == 1) {
      for (int64_t i = 0; i < total; ++i) task(i);
      return;
    }
    Phase& phase = job_.phases_[phase_];
    Range* ranges = &job_.ranges_[(size_t)phase_ * size];
    ++phase_;
    // Its own share from front to back, which is how weights lie in memory and rows in its cache;
    // then what others have left, from the back.
    int64_t count = 0;
    for (int step = 0; step < size; ++step) {
      const int owner = (id + step) % size;
      const int64_t first = total * owner / size, end = total * (owner + 1) / size;
      for (int64_t i; (i = ranges[owner].take(first, end, step > 0)) >= 0; ++count) task(i);
    }
    if (count) phase.done.fetch_add(count, std::memory_order_release);
    Patience patience;
    while (phase.done.load(std::memory_order_acquire) < total) patience.wait();
  }

 private:
  Job& job_;
  int phase_ = 0;
};

class Pool {
 public:
  // The pool of the cores that the calling thread may use, as they were at its first call: helpers
  // inherit them. Pools outlive everything, so that threads may sleep in them at exit.
  static Pool& instance() {
    thread_local Pool& pool = of_own_cores();
    return pool;
  }

  // Have `job` run by this thread and up to threads - 1 others; `num_phases` bounds its calls of
  // for_each. Calls from several threads share the pool's.
  void run(Job& job, int threads, int num_phases) {
    job.threads_ = threads;
    if (threads > 1) post(job, num_phases);
    Worker worker(job, 0);
    job.run(worker);
    if (threads > 1) {
      Job* mine = &job;
      current_.compare_exchange_strong(mine, nullptr);
    }
  }

  // True if no late thread is still in a job that has ended.
  static bool is_idle(const Job& job) { return job.inside_.load() == 0; }

 private:
  static Pool& of_own_cores() {
    static std::mutex& mutex = *new std::mutex;
    static auto& pools = *new std::map<std::string, Pool*>;
    std::string cores;
#ifdef __linux__
    cpu_set_t set;
    CPU_ZERO(&set);
    sched_getaffinity(0, sizeof set, &set);
    cores.assign(reinterpret_cast<const char*>(&set), sizeof set);
#endif
    std::lock_guard<std::mutex> lock(mutex);
    Pool*& pool = pools[cores];
    if (!pool) pool = new Pool;
    return *pool;
  }

  void post(Job& job, int num_phases) {
    if ((int)job.phases_.size() < num_phases) job.phases_ = std::vector<Phase>(num_phases);
    const int num_ranges = num_phases * job.threads_;
    if ((int)job.ranges_.size() < num_ranges) job.ranges_ = std::vector<Range>(num_ranges);
    for (int i = 0; i < num_phases; ++i) job.phases_[i].done.store(0, std::memory_order_relaxed);
    for (int i = 0; i < num_ranges; ++i) job.ranges_[i].reset();
    while (helpers_.load(std::memory_order_relaxed) < job.threads_ - 1) start_helper(job.threads_);
    job.number_.store(++posted_);
    current_.store(&job);
    if (sleepers_.load() > 0) {
      std::lock_guard<std::mutex> lock(mutex_);
      wake_.notify_all();
    }
  }

  void start_helper(int threads) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (helpers_ >= threads - 1) return;
    std::thread([this, id = ++helpers_] { help(id); }).detach();
  }

  void help(int id) {
    uint64_t last = 0;
    for (;;) {
      Job& job = await_job(last);
      job.inside_.fetch_add(1);
      // Entered while it is still the current job, it cannot be recycled before this thread leaves.
      if (current_.load() == &job) {
        last = job.number_.load();
        if (id < job.threads_) {
          Worker worker(job, id);
          job.run(worker);
        }
      }
      job.inside_.fetch_sub(1);
    }
  }

  // The current job, once it is another than number `last`.
  Job& await_job(uint64_t last) {
    for (Patience patience; !patience.exhausted(); patience.wait())
      if (Job* job = fresh(last)) return *job;
    std::unique_lock<std::mutex> lock(mutex_);
    ++sleepers_;
    Job* job = nullptr;
    wake_.wait(lock, [&] { return (job = fresh(last)) != nullptr; });
    --sleepers_;
    return *job;
  }

  Job* fresh(uint64_t last) {
    Job* job = current_.load();
    return job && job->number_.load() != last ? job : nullptr;
  }

  std::atomic<Job*> current_{nullptr};
  std::atomic<uint64_t> posted_{0};
  std::atomic<int> helpers_{0}, sleepers_{0};
  std::mutex mutex_;
  std::condition_variable wake_;
};

}  // namespace penstock
