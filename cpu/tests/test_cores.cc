// Many cores: what a call takes of memory, and of the pool, on 16 to 192 of them. Threads are real; there are more than cores.
#include <map>
#include <mutex>
#include <thread>

#include "executor_internal.h"
#include "executor_memory.h"
#include "programs.h"

namespace kitsune::cpu::test {
namespace {

constexpr size_t kMiB = size_t{1} << 20;

// X^T dY over `rows` rows: partial sums of width x width floats.
Program gradient(int64_t rows, int64_t tile_rows, int64_t width, int64_t workers, DType dtype = F32) {
  Operand x = operand(Space::kIn, 0, dtype, 0, width, {width}), y = operand(Space::kIn, 1, dtype, 0, width, {width});
  Program p = program({rows}, tile_rows, {{dtype, rows * width}, {dtype, rows * width}}, {{dtype, width * width}},
                      {AccumulateMatmul{0, 1, 1, width, width, x, y}});
  p.sinks = {{Reduction::kSum, F32, width * width, 0}};
  p.workers = workers;
  return p;
}

size_t memory(const Program& p) {
  std::vector<int64_t> words = encode(p);
  return Executable(parse(words.data(), words.size())).memory_bytes();
}

// The partial sums that a call keeps of a gradient: what it takes beyond the same call on one tile, which keeps one.
int64_t strands(int64_t rows, int64_t tile_rows, int64_t width, int64_t workers) {
  size_t more = memory(gradient(rows, tile_rows, width, workers)) - memory(gradient(1, tile_rows, width, workers));
  return 1 + static_cast<int64_t>(more / align_up(static_cast<size_t>(width * width) * 4));
}

void test_partial_sums() {
  for (int64_t workers : {2, 16, 64, 192}) {
    int n = static_cast<int>(workers);
    // 10 s of work: every worker has a partial sum, even where they take 768 MiB together (the arrays are 8 GB).
    CHECK(strands(1000000, 96, 1024, workers) >= workers, "%d workers have %d", n,
          static_cast<int>(strands(1000000, 96, 1024, workers)));
    // 20 ms of work: 4 MiB for each of 192 workers would take longer to add up than it saves.
    CHECK(strands(2000, 8, 1024, workers) <= 32, "%d workers have %d", n, static_cast<int>(strands(2000, 8, 1024, workers)));
    // 40 ms of work: a second one for a worker would not pay for being added up.
    if (workers == 2)
      CHECK(strands(4000, 64, 1024, workers) == 2, "there are %d", static_cast<int>(strands(4000, 64, 1024, workers)));
    // Less than a microsecond.
    CHECK(strands(64, 1, 8, workers) == 1, "%d workers have %d", n, static_cast<int>(strands(64, 1, 8, workers)));
    // Small sums of much work: some for every worker, and all of them together small.
    CHECK(strands(1000000, 96, 64, workers) >= workers, "%d workers have %d", n,
          static_cast<int>(strands(1000000, 96, 64, workers)));
    CHECK(memory(gradient(1000000, 96, 64, workers)) <= 8 * kMiB, "%d workers take %zu bytes", n,
          memory(gradient(1000000, 96, 64, workers)));
    // Never more than what is in proportion to the arrays.
    for (int64_t width : {8, 64, 512, 4096})
      for (int64_t rows : {100, 10000, 1000000}) {
        Program p = gradient(rows, 8, width, workers);
        size_t arrays = static_cast<size_t>((2 * rows * width + width * width) * 4);
        CHECK(memory(p) <= 256 * kMiB + arrays + 8 * kMiB, "%d rows of %d: %zu bytes", static_cast<int>(rows),
              static_cast<int>(width), memory(p));
      }
  }
}

// Sums have 32 bits, and 16-bit arrays let as many workers have some as float32 ones do.
void test_partial_sums_of_16_bits() {
  for (DType dtype : {F32, DType::kBF16, DType::kF16})
    CHECK(memory(gradient(1024, 512, 8192, 2, dtype)) >= 512 * kMiB, "%d: %zu bytes", static_cast<int>(dtype),
          memory(gradient(1024, 512, 8192, 2, dtype)));
}

// Counts what each thread asks for.
class CountingPool final : public Pool {
 public:
  explicit CountingPool(int64_t threads) : pool_(threads) {}
  int64_t num_threads(double ns) const override { return pool_.num_threads(ns); }
  void schedule(std::function<void()> task) override {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      ++asked_[std::this_thread::get_id()];
    }
    pool_.schedule(std::move(task));
  }
  int64_t all() {
    std::lock_guard<std::mutex> lock(mutex_);
    int64_t n = 0;
    for (const auto& [_, asked] : asked_) n += asked;
    return n;
  }
  int64_t by_caller() {
    std::lock_guard<std::mutex> lock(mutex_);
    return asked_[std::this_thread::get_id()];
  }

 private:
  std::mutex mutex_;
  std::map<std::thread::id, int64_t> asked_;
  ThreadPool pool_;
};

// Runs `p` on `threads` threads, compares with one thread, and returns what was asked of the pool: by all, by the caller.
std::pair<int64_t, int64_t> asked(const Program& p, int64_t threads) {
  std::vector<int64_t> words = encode(p);
  Executable exe(parse(words.data(), words.size()));
  Arrays want(exe.call(), 3), got(exe.call(), 3);
  ThreadPool alone(1);
  CountingPool pool(threads);
  CHECK(exe.run(want.in_pointers.data(), want.out_pointers.data(), alone).empty(), "one thread fails");
  std::string error = exe.run(got.in_pointers.data(), got.out_pointers.data(), pool);
  CHECK(error.empty(), "%d threads fail: %s", static_cast<int>(threads), error.c_str());
  CHECK(got.outs == want.outs, "%d threads give other bits than one", static_cast<int>(threads));
  return {pool.all(), pool.by_caller()};
}

Program relu_layers(int64_t rows, int64_t tile_rows, int64_t scratch_bytes = 0) {
  constexpr int64_t N = 16;
  Vector v{{N}, true, {operand(Space::kIn, 0, F32, 0, N, {1})}, {operand(Space::kOut, 0, F32, 0, N, {1})}, {}};
  v.code = {micro(Opcode::op_load, F32, 0, 0), micro(Opcode::op_add, F32, 1, 0, 0), micro(Opcode::op_store, F32, 0, 0, 1)};
  return program({rows}, tile_rows, {{F32, rows * N}}, {{F32, rows * N}}, {v}, scratch_bytes);
}

void test_helpers() {
  for (int64_t threads : {64, 192}) {
    CHECK(asked(relu_layers(5, 8), threads).first == 0, "one tile asks for helpers");
    CHECK(asked(relu_layers(40, 8), threads).first <= 4, "five tiles ask for more than four helpers");
    auto [all, caller] = asked(relu_layers(threads * 40, 8), threads);
    CHECK(all <= threads - 1, "%d helpers for %d threads", static_cast<int>(all), static_cast<int>(threads));
    CHECK(caller >= 1 && caller <= 4, "the caller itself asks for %d helpers", static_cast<int>(caller));
  }
  for (int64_t workers : {2, 64, 192})
    for (int64_t threads : {64, 192}) asked(gradient(3001, 8, 24, workers), threads);
}

// Temporary memory of all threads together.
void test_scratch() {
  int64_t most = asked(relu_layers(192 * 8, 8, 128 * kMiB), 192).first;
  CHECK(most <= 8, "%d helpers with 128 MiB each", static_cast<int>(most));
  for (size_t threads : {1, 2, 16, 192, 1024})
    CHECK(kept_scratch(threads) * threads <= 8192 * kMiB, "%zu threads keep too much", threads);
  CHECK(kept_scratch(192) >= 8 * kMiB, "a thread keeps less than its cache holds");
}

// Tasks of a pool that runs them at once, inside of schedule.
class InlinePool final : public Pool {
 public:
  int64_t deepest = 0;
  int64_t num_threads(double) const override { return 192; }
  void schedule(std::function<void()> task) override {
    deepest = std::max(deepest, ++depth_);
    task();
    --depth_;
  }

 private:
  int64_t depth_ = 0;
};

void test_inline_pool() {
  Program p = relu_layers(3001, 8);
  std::vector<int64_t> words = encode(p);
  Executable exe(parse(words.data(), words.size()));
  Arrays a(exe.call(), 3);
  InlinePool pool;
  CHECK(exe.run(a.in_pointers.data(), a.out_pointers.data(), pool).empty(), "a call fails");
  CHECK(pool.deepest == 1, "tasks nest %d deep", static_cast<int>(pool.deepest));
}

}  // namespace
}  // namespace kitsune::cpu::test

int main() {
  using namespace kitsune::cpu::test;
  section("partial sums", test_partial_sums);
  section("partial sums of 16-bit arrays", test_partial_sums_of_16_bits);
  section("helpers", test_helpers);
  section("scratch", test_scratch);
  section("inline pool", test_inline_pool);
  std::printf("cores: %d checks failed\n", failures);
  return failures == 0 ? 0 : 1;
}
