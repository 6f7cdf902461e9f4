#include "rounds.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <utility>

#include "pause.h"

namespace kitsune::cpu {
namespace {

class Rounds {
 public:
  Rounds(int64_t workers, std::vector<int64_t> counts, const std::function<void(size_t, int64_t)>& unit)
      : workers_(workers), counts_(std::move(counts)), unit_(unit) {
    skip_empty();
  }

  // Takes units until the last round is over. `unit_` is used only while a unit runs, and the caller stays until none does.
  void join() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (round_ < counts_.size()) {
      if (next_ == counts_[round_]) {
        const size_t seen = round_;
        lock.unlock();
        for (int i = 0; i < kSpins && round_.load(std::memory_order_acquire) == seen; ++i) pause();
        lock.lock();
        wake_.wait(lock, [&] { return round_ != seen; });
        continue;
      }
      const size_t round = round_;
      // Guided: large pieces first, single units at the end.
      const int64_t begin = next_, n = std::max<int64_t>(1, (counts_[round] - begin) / (4 * workers_));
      next_ += n;
      lock.unlock();
      for (int64_t i = begin; i < begin + n; ++i) unit_(round, i);
      lock.lock();
      if ((done_ += n) < counts_[round]) continue;
      ++round_;
      skip_empty();
      wake_.notify_all();
    }
  }

 private:
  void skip_empty() {
    next_ = done_ = 0;
    while (round_ < counts_.size() && counts_[round_] == 0) ++round_;
  }

  const int64_t workers_;
  std::vector<int64_t> counts_;
  const std::function<void(size_t, int64_t)>& unit_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::atomic<size_t> round_{0};  // written under the mutex
  int64_t next_ = 0, done_ = 0;
};

}  // namespace

void run_rounds(Pool& pool, int64_t workers, std::vector<int64_t> counts, const std::function<void(size_t, int64_t)>& unit) {
  auto rounds = std::make_shared<Rounds>(workers, std::move(counts), unit);
  try {
    for (int64_t i = 1; i < workers; ++i) pool.schedule([rounds] { rounds->join(); });
  } catch (const std::exception&) {  // fewer helpers: the work does not depend on them
  }
  rounds->join();
}

}  // namespace kitsune::cpu
