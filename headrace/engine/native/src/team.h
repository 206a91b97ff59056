// A team of threads that run one function together and meet at barriers. The caller is thread 0.
//
// A thread that waits spins for some ten microseconds, since the others are nearly always about to come, and then sleeps:
// a team that shares its cores with others must not burn their time, and an idle one must cost nothing.
#pragma once
#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

class Team {
 public:
  using Function = void (*)(void* context, int thread);

  // cpus: one for each thread to be pinned to, or empty. The caller is pinned by its owner.
  Team(int num_threads, const std::vector<int>& cpus) : size_(num_threads) {
    for (int thread = 1; thread < num_threads; thread++) {
      threads_.emplace_back([this, thread] { work(thread); });
      if (!cpus.empty()) pin(threads_.back().native_handle(), cpus[thread]);
    }
  }

  ~Team() {
    function_ = nullptr;
    start();
    for (auto& thread : threads_) thread.join();
  }

  int size() const { return size_; }

  // Runs function(context, thread) on every thread and returns when all are through.
  void run(Function function, void* context) {
    function_ = function;
    context_ = context;
    start();
    function(context, 0);
    barrier();
  }

  // All threads of a running function wait here for each other.
  void barrier() {
    if (size_ == 1) return;
    uint32_t phase = phase_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size_ - 1) {
      arrived_.store(0, std::memory_order_relaxed);
      phase_.store(phase + 1, std::memory_order_release);
      phase_.notify_all();
    } else {
      wait_for_change(phase_, phase);
    }
  }

  static void pin(pthread_t thread, int cpu) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    pthread_setaffinity_np(thread, sizeof(set), &set);
  }

 private:
  void start() {
    if (size_ == 1) return;
    job_.fetch_add(1, std::memory_order_release);
    job_.notify_all();
  }

  void work(int thread) {
    uint32_t job = 0;
    for (;;) {
      wait_for_change(job_, job);
      job++;
      if (function_ == nullptr) return;
      function_(context_, thread);
      barrier();
    }
  }

  static void wait_for_change(std::atomic<uint32_t>& value, uint32_t old) {
    for (int i = 0; i < 400; i++) {
      if (value.load(std::memory_order_acquire) != old) return;
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
    }
    while (value.load(std::memory_order_acquire) == old) value.wait(old, std::memory_order_acquire);
  }

  const int size_;
  std::vector<std::thread> threads_;
  Function function_ = nullptr;
  void* context_ = nullptr;
  alignas(64) std::atomic<uint32_t> job_{0};
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<uint32_t> phase_{0};
};
