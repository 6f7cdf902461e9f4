#include "rounds.h"

#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <utility>

namespace kitsune::cpu {
namespace {

class Rounds {
 public:
  Rounds(std::vector<int64_t> counts, const std::function<void(size_t, int64_t)>& unit) : counts_(std::move(counts)), unit_(unit) {
    skip_empty();
  }

  // Takes units until the last round is over. `unit_` is used only while a unit runs, and the caller stays until none does.
  void join() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (round_ < counts_.size()) {
      if (next_ == counts_[round_]) {
        const size_t seen = round_;
        wake_.wait(lock, [&] { return round_ != seen; });
        continue;
      }
      const size_t round = round_;
      const int64_t i = next_++;
      lock.unlock();
      unit_(round, i);
      lock.lock();
      if (++done_ < counts_[round_]) continue;
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

  std::vector<int64_t> counts_;
  const std::function<void(size_t, int64_t)>& unit_;
  std::mutex mutex_;
  std::condition_variable wake_;
  size_t round_ = 0;
  int64_t next_ = 0, done_ = 0;
};

}  // namespace

void run_rounds(Pool& pool, int64_t workers, std::vector<int64_t> counts, const std::function<void(size_t, int64_t)>& unit) {
  auto rounds = std::make_shared<Rounds>(std::move(counts), unit);
  try {
    for (int64_t i = 1; i < workers; ++i) pool.schedule([rounds] { rounds->join(); });
  } catch (const std::exception&) {  // fewer helpers: the work does not depend on them
  }
  rounds->join();
}

}  // namespace kitsune::cpu
