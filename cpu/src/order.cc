// The order of a stream, and rounds of work on a pool for it and for other work that is no tile program.
#include "kitsune_cpu/order.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "executor_memory.h"
#include "huge_pages.h"
#include "pause.h"
#include "rounds.h"

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

namespace {

constexpr int kMostDigitBits = 11;     // as many open ends of output as the first-level cache and the TLB bear
constexpr int64_t kLeastBlock = 8192;  // rows that pay for a thread
constexpr int64_t kMostBlocks = 64;
constexpr double kNsPerRow = 3;

// A pass sorts by one digit of the keys: every block counts its digits, one thread turns counts into places, every block moves its
// rows. Between two passes a row is its key and its position in 64 bits.
//
// Where two digits make a key and there are rows enough for each value of it, the first pass is by the upper digit: its rows of one
// digit fit a core's cache, so they are sorted there by the lower digit, and a row in between is the lower digit and the position,
// in 32 bits if these suffice. 10^6 ids below 10^5 took one core 3.3 to 6.7 ms, and 9.1 to 12.4 in two passes over all rows (Xeon
// with AMX).
class Sort {
 public:
  Sort(int64_t rows, int64_t n, int64_t workers, int32_t* out) : rows_(rows), n_(static_cast<uint64_t>(n)), out_(out) {
    int bits = 1;
    while (bits < 32 && (n_ >> bits) != 0) ++bits;
    passes_ = (bits + kMostDigitBits - 1) / kMostDigitBits;
    digit_bits_ = (bits + passes_ - 1) / passes_;
    blocks_ = std::clamp<int64_t>(rows / kLeastBlock, 1, std::min(kMostBlocks, 2 * workers));
    for (int64_t b = 0; b < blocks_; ++b) sorted_.push_back(1);
    counts_.resize(static_cast<size_t>(blocks_) << digit_bits_);
    within_ = passes_ == 2 && int64_t{1} << bits <= 2 * rows;
    low_bits_ = bits - digit_bits_;
    while (rows >> position_bits_ != 0) ++position_bits_;
    const size_t bytes = static_cast<size_t>(rows) * (within_ && narrow() ? sizeof(uint32_t) : sizeof(uint64_t));
    for (int k = 0; k < std::min(2, passes_ - 1); ++k) pairs_[k] = CachedBlock(bytes, "the order of a stream");
  }

  template <class T>
  void run(const T* ids, Pool& pool, int64_t workers) {
    if (within_) return narrow() ? run_within<uint32_t>(ids, pool, workers) : run_within<uint64_t>(ids, pool, workers);
    std::vector<int64_t> counts;
    for (int p = 0; p < passes_; ++p) counts.insert(counts.end(), {blocks_, 1, blocks_});
    run_rounds(pool, workers, std::move(counts), [&](size_t round, int64_t b) {
      const int pass = static_cast<int>(round / 3);
      if (round % 3 == 1) return add_up(pass);
      auto work = [&](auto row) { round % 3 == 0 ? count(pass, b, row) : move(pass, b, row); };
      if (pass > 0) {
        const uint64_t* pairs = from(pass);
        return work([pairs](int64_t i) { return pairs[i]; });
      }
      if (round == 0) check_sorted(ids, b);
      const uint64_t n = n_;
      work([ids, n](int64_t i) { return key(ids[i], n) << 32 | static_cast<uint64_t>(i); });
    });
  }

 private:
  bool narrow() const { return low_bits_ + position_bits_ <= 32; }

  template <class Row, class T>
  void run_within(const T* ids, Pool& pool, int64_t workers) {
    const int low = low_bits_, position = position_bits_;
    const int64_t digits = int64_t{1} << digit_bits_, groups = std::min<int64_t>(digits, kMostBlocks);
    Row* const between = reinterpret_cast<Row*>(pairs_[0].data());
    run_rounds(pool, workers, {blocks_, 1, blocks_, groups}, [&](size_t round, int64_t b) {
      if (round == 1) return add_up(0);
      if (round == 3) return sort_digits(between, digits * b / groups, digits * (b + 1) / groups);
      const int64_t begin = first(b), end = first(b + 1);
      const uint64_t n = n_;
      uint32_t* const places = counts_of(b);
      if (round == 0) {
        check_sorted(ids, b);
        std::fill_n(places, digits, 0);
        for (int64_t i = begin; i < end; ++i) ++places[key(ids[i], n) >> low];
      } else if (in_order_) {
        for (int64_t i = begin; i < end; ++i) out_[i] = static_cast<int32_t>(i);
      } else {
        const uint64_t below = (uint64_t{1} << low) - 1;
        for (int64_t i = begin; i < end; ++i) {
          const uint64_t k = key(ids[i], n);
          between[places[k >> low]++] = static_cast<Row>((k & below) << position | static_cast<uint64_t>(i));
        }
      }
    });
  }

  // By the lower digit, the rows of each upper digit in [begin, end): the last block has left the end of each.
  template <class Row>
  void sort_digits(const Row* between, int64_t begin, int64_t end) {
    if (in_order_) return;
    const uint32_t* const ends = counts_of(blocks_ - 1);
    const int low = low_bits_, position = position_bits_;
    const Row positions = static_cast<Row>((uint64_t{1} << position) - 1);
    uint32_t places[size_t{1} << kMostDigitBits];
    for (int64_t d = begin; d < end; ++d) {
      const uint32_t from = d == 0 ? 0 : ends[d - 1], to = ends[d];
      if (from == to) continue;
      std::fill_n(places, size_t{1} << low, 0);
      for (uint32_t i = from; i < to; ++i) ++places[between[i] >> position];
      uint32_t at = from;
      for (size_t k = 0; k < size_t{1} << low; ++k) at += std::exchange(places[k], at);
      for (uint32_t i = from; i < to; ++i) out_[places[between[i] >> position]++] = static_cast<int32_t>(between[i] & positions);
    }
  }

  // An id below 0 or beyond n - 1 comes last.
  template <class T>
  static uint64_t key(T id, uint64_t n) {
    return std::min(static_cast<uint64_t>(id), n);
  }
  int64_t first(int64_t block) const { return rows_ * block / blocks_; }
  uint32_t* counts_of(int64_t block) { return counts_.data() + (static_cast<size_t>(block) << digit_bits_); }
  size_t digit(int pass, uint64_t row) const { return (row >> (32 + pass * digit_bits_)) & ((size_t{1} << digit_bits_) - 1); }
  const uint64_t* from(int pass) const { return reinterpret_cast<const uint64_t*>(pairs_[(pass - 1) % 2].data()); }

  // Is no key of the block below the one before it? The first one is compared with the last of the block before.
  template <class T>
  void check_sorted(const T* ids, int64_t b) {
    bool sorted = true;
    for (int64_t i = std::max<int64_t>(1, first(b)), end = first(b + 1); i < end && sorted;) {
      const int64_t stop = std::min<int64_t>(end, i + 1024);
      for (; i < stop; ++i) sorted &= key(ids[i - 1], n_) <= key(ids[i], n_);
    }
    sorted_[static_cast<size_t>(b)] = sorted;
  }

  template <class Row>
  void count(int pass, int64_t b, Row row) {
    if (pass == 0 ? sorted_[static_cast<size_t>(b)] && blocks_ == 1 : in_order_) return;
    uint32_t* counts = counts_of(b);
    std::fill_n(counts, size_t{1} << digit_bits_, 0);
    for (int64_t i = first(b), end = first(b + 1); i < end; ++i) ++counts[digit(pass, row(i))];
  }

  // Of every block and digit: the place of its first row.
  void add_up(int pass) {
    if (pass == 0) in_order_ = std::all_of(sorted_.begin(), sorted_.end(), [](char s) { return s != 0; });
    if (in_order_) return;
    uint32_t at = 0;
    for (size_t d = 0; d < size_t{1} << digit_bits_; ++d)
      for (int64_t b = 0; b < blocks_; ++b) {
        uint32_t& count = counts_of(b)[d];
        at += std::exchange(count, at);
      }
  }

  template <class Row>
  void move(int pass, int64_t b, Row row) {
    const int64_t begin = first(b), end = first(b + 1);
    if (in_order_) {
      if (pass == 0)
        for (int64_t i = begin; i < end; ++i) out_[i] = static_cast<int32_t>(i);
      return;
    }
    uint32_t* places = counts_of(b);
    if (pass + 1 == passes_) {
      for (int64_t i = begin; i < end; ++i) {
        const uint64_t r = row(i);
        out_[places[digit(pass, r)]++] = static_cast<int32_t>(r);
      }
    } else {
      uint64_t* to = reinterpret_cast<uint64_t*>(pairs_[pass % 2].data());
      for (int64_t i = begin; i < end; ++i) {
        const uint64_t r = row(i);
        to[places[digit(pass, r)]++] = r;
      }
    }
  }

  int64_t rows_;
  uint64_t n_;
  int32_t* out_;
  int passes_, digit_bits_;
  bool within_;  // are the rows of an upper digit sorted by the lower one, each for itself?
  int low_bits_, position_bits_ = 1;
  int64_t blocks_;
  bool in_order_ = false;
  std::vector<char> sorted_;      // by block
  std::vector<uint32_t> counts_;  // by block, then digit
  CachedBlock pairs_[2];
};

template <class T>
void sort(const void* ids, int64_t rows, int64_t n, int32_t* out, Pool& pool) {
  const int64_t workers = std::max<int64_t>(1, pool.num_threads(kNsPerRow * static_cast<double>(rows)));
  Sort sort(rows, n, workers, out);
  sort.run(static_cast<const T*>(ids), pool, workers);
}

}  // namespace

std::string order_by(DType type, const void* ids, int64_t rows, int64_t n, int32_t* out, Pool& pool) {
  try {
    advise_huge_pages(out, static_cast<size_t>(rows) * sizeof *out);
    switch (type) {
      case DType::kI8: sort<int8_t>(ids, rows, n, out, pool); break;
      case DType::kI16: sort<int16_t>(ids, rows, n, out, pool); break;
      case DType::kI32: sort<int32_t>(ids, rows, n, out, pool); break;
      case DType::kI64: sort<int64_t>(ids, rows, n, out, pool); break;
      case DType::kU8: sort<uint8_t>(ids, rows, n, out, pool); break;
      case DType::kU16: sort<uint16_t>(ids, rows, n, out, pool); break;
      case DType::kU32: sort<uint32_t>(ids, rows, n, out, pool); break;
      case DType::kU64: sort<uint64_t>(ids, rows, n, out, pool); break;
      default: return "kitsune: ids are integers";
    }
    return "";
  } catch (const std::exception& e) {
    return std::string("kitsune: out of memory while ordering a stream: ") + e.what();
  }
}

}  // namespace kitsune::cpu
