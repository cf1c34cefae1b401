// Threads that share out the phases of a job, and never wait for a thread that is not running.
//
// A barrier of all threads is only as fast as the slowest to be scheduled: with one more busy
// process than cores, a step of thirty phases took a hundred times as long. Here a phase ends when
// its tasks are done, whoever did them. A thread that the system held back finds nothing left to
// do, runs through the phases that passed without it and joins in again; the caller does not wait
// for it even at the end. Only a task in hand can be waited for.
#pragma once

#include <sched.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
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

// Waiting that costs nothing to resume at first, and later leaves the core to whoever wants it.
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
  static constexpr int kSpins = 1000, kYields = 1000;
  int turns_ = 0;
};

struct Phase {
  alignas(64) std::atomic<int64_t> next{0};
  alignas(64) std::atomic<int64_t> done{0};
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
    Phase& phase = job_.phases_[phase_++];
    // A few shares each: neighbouring tasks use the same rows.
    const int64_t share = total / (8 * size) + 1;
    int64_t count = 0;
    while (phase.next.load(std::memory_order_relaxed) < total) {
      const int64_t first = phase.next.fetch_add(share, std::memory_order_relaxed);
      const int64_t end = first + share < total ? first + share : total;
      for (int64_t i = first; i < end; ++i, ++count) task(i);
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
  // The process's pool; it outlives everything, so that threads may sleep in it at exit.
  static Pool& instance() {
    static Pool& pool = *new Pool;
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

  // Whether no late thread is still in a job that has ended.
  static bool is_idle(const Job& job) { return job.inside_.load() == 0; }

 private:
  void post(Job& job, int num_phases) {
    if ((int)job.phases_.size() < num_phases) job.phases_ = std::vector<Phase>(num_phases);
    for (int i = 0; i < num_phases; ++i) {
      job.phases_[i].next.store(0, std::memory_order_relaxed);
      job.phases_[i].done.store(0, std::memory_order_relaxed);
    }
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
