// The order of a stream against std::stable_sort, on pools of several sizes, a busy one and one that runs tasks at once.
#include <algorithm>
#include <numeric>

#include "executor_check.h"
#include "kitsune_cpu/order.h"

namespace kitsune::cpu::test {
namespace {

// A pool that never runs a task, or runs it inside of schedule.
class OddPool final : public Pool {
 public:
  explicit OddPool(bool at_once) : at_once_(at_once) {}
  std::vector<std::function<void()>> tasks;
  int64_t num_threads(double) const override { return 5; }
  void schedule(std::function<void()> task) override {
    if (at_once_) return task();
    tasks.push_back(std::move(task));
  }

 private:
  bool at_once_;
};

template <class T>
void test_ids(DType type, const std::vector<T>& ids, int64_t n, const char* name) {
  const int64_t rows = static_cast<int64_t>(ids.size());
  auto key = [&](int32_t i) {
    const T id = ids[static_cast<size_t>(i)];
    const bool inside = !(id < T{0}) && static_cast<uint64_t>(id) < static_cast<uint64_t>(n);
    return inside ? static_cast<int64_t>(id) : n;
  };
  std::vector<int32_t> want(ids.size());
  std::iota(want.begin(), want.end(), 0);
  std::stable_sort(want.begin(), want.end(), [&](int32_t a, int32_t b) { return key(a) < key(b); });
  auto check = [&](Pool& pool, const char* how) {
    std::vector<int32_t> got(ids.size() + 1, -7);
    const std::string error = order_by(type, ids.data(), rows, n, got.data(), pool);
    CHECK(error.empty(), "%s: %s", name, error.c_str());
    CHECK(std::equal(want.begin(), want.end(), got.begin()), "%s, %d rows, n %lld: other than stable_sort (%s)", name,
          static_cast<int>(rows), static_cast<long long>(n), how);
    CHECK(got.back() == -7, "%s: wrote beyond the end (%s)", name, how);
  };
  for (int64_t threads : {1, 2, 7}) {
    ThreadPool pool(threads);
    check(pool, "threads");
  }
  OddPool busy(false), inline_pool(true);
  check(busy, "a busy pool");
  check(inline_pool, "a pool that runs tasks at once");
  for (auto& task : busy.tasks) task();  // the ids are still there, but the work is not: these find it done
}

template <class T>
void test_type(DType type) {
  std::mt19937_64 rng(static_cast<uint64_t>(type) + 1);
  for (int64_t rows : {0, 1, 2, 1000, 8191, 16384, 70001})
    for (int64_t n : {int64_t{0}, int64_t{1}, int64_t{7}, int64_t{2048}, int64_t{131072}, kMostOrderKeys}) {
      std::vector<T> ids(static_cast<size_t>(rows));
      const int64_t span = n + n / 4 + 2;
      for (T& id : ids) id = static_cast<T>(static_cast<int64_t>(rng() % static_cast<uint64_t>(span)) - n / 8);
      test_ids(type, ids, n, "random ids");
      std::sort(ids.begin(), ids.end(), [&](T a, T b) { return static_cast<uint64_t>(a) < static_cast<uint64_t>(b); });
      test_ids(type, ids, n, "sorted ids");
      if (rows > 3) std::swap(ids[static_cast<size_t>(rows / 2)], ids[static_cast<size_t>(rows - 1)]);
      test_ids(type, ids, n, "ids with one out of order");
      for (size_t i = 0; i < ids.size(); i += 2) ids[i] = T{1};
      test_ids(type, ids, n, "half of the ids alike");
    }
}

void test_types() {
  test_type<int8_t>(DType::kI8);
  test_type<uint8_t>(DType::kU8);
  test_type<int16_t>(DType::kI16);
  test_type<uint16_t>(DType::kU16);
}
void test_wide_types() {
  test_type<int32_t>(DType::kI32);
  test_type<uint32_t>(DType::kU32);
  test_type<int64_t>(DType::kI64);
  test_type<uint64_t>(DType::kU64);
}

}  // namespace
}  // namespace kitsune::cpu::test

int main() {
  using namespace kitsune::cpu::test;
  section("narrow ids", test_types);
  section("wide ids", test_wide_types);
  std::printf("order: %d checks failed\n", failures);
  return failures == 0 ? 0 : 1;
}
