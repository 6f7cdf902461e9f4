// A pool of std::threads, for running programs without XLA (tests, and `_cpu.run`).
#pragma once

#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

#include "kitsune_cpu/executor.h"

namespace kitsune::cpu {

// `threads` counts the caller: threads - 1 are started, or as many as the system has room for. The destructor runs what is still
// queued, then joins.
class ThreadPool final : public Pool {
 public:
  explicit ThreadPool(int64_t threads) : count_(threads) {
    try {
      for (int64_t i = 1; i < threads; ++i) threads_.emplace_back([this] { loop(); });
    } catch (const std::exception&) {  // no memory or no thread left: a call depends on its caller alone
    }
  }
  ~ThreadPool() override {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stop_ = true;
    }
    wake_.notify_all();
    for (std::thread& t : threads_) t.join();
  }
  int64_t num_threads(double) const override { return count_; }
  void schedule(std::function<void()> task) override {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      tasks_.push_back(std::move(task));
    }
    wake_.notify_one();
  }

 private:
  void loop() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      wake_.wait(lock, [this] { return stop_ || !tasks_.empty(); });
      if (tasks_.empty()) return;
      std::function<void()> task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      task();
      lock.lock();
    }
  }

  int64_t count_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::function<void()>> tasks_;
  bool stop_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace kitsune::cpu
