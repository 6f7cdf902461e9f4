// The executor against the naive reference, and the scheduler under many threads and calls.
#include <array>
#include <atomic>
#include <chrono>
#include <thread>

#include "batch_programs.h"
#include "executor_check.h"
#include "segments.h"

namespace kitsune::cpu::test {
namespace {

constexpr Product kProducts[] = {Product::kWidened, Product::kDots, Product::kTiles};

void test_pipelines() {
  for (int64_t rows : {1, 5, 8, 67, 1021})
    for (int64_t depth : {1, 2, 5}) compare("residual pipeline", residual_call(rows, 8, depth), 1e-4, 3, false, {1, 2, 64});
}

void test_concurrent_calls() {
  std::vector<int64_t> words = encode(residual_call(301, 4, 2));
  Executable exe(parse(words.data(), words.size()));
  ThreadPool pool(2);
  Arrays want(exe.call(), 9);
  ThreadPool alone(1);
  CHECK(exe.run(want.in_pointers.data(), want.out_pointers.data(), alone).empty(), "the call alone fails");
  std::atomic<int> wrong{0};
  std::vector<std::thread> callers;
  for (int c = 0; c < 16; ++c)
    callers.emplace_back([&] {
      for (int i = 0; i < 3; ++i) {
        Arrays got(exe.call(), 9);
        bool ok = exe.run(got.in_pointers.data(), got.out_pointers.data(), pool).empty() && got.outs == want.outs;
        if (!ok) ++wrong;
      }
    });
  for (std::thread& t : callers) t.join();
  CHECK(wrong == 0, "%d of 48 concurrent calls differ", wrong.load());
}

// A pool that is busy for ever, as far as the call can tell.
class StalledPool final : public Pool {
 public:
  std::vector<std::function<void()>> tasks;
  int64_t num_threads(double) const override { return 8; }
  void schedule(std::function<void()> task) override { tasks.push_back(std::move(task)); }
};

void test_stalled_pool() {
  StalledPool pool;
  std::vector<int64_t> words = encode(residual_call(67, 8, 2));
  {
    Executable exe(parse(words.data(), words.size()));
    Arrays a(exe.call(), 5);
    CHECK(exe.run(a.in_pointers.data(), a.out_pointers.data(), pool).empty(), "a call without helpers fails");
  }
  CHECK(!pool.tasks.empty(), "no helper was asked for");
  std::mt19937 rng(3);
  words = encode(random_phases(rng, 7, 1, std::vector<int64_t>(7, int64_t{1} << 16), true));
  {
    Executable exe(parse(words.data(), words.size()));
    Arrays a(exe.call(), 5);
    const size_t before = pool.tasks.size();
    CHECK(exe.run(a.in_pointers.data(), a.out_pointers.data(), pool).empty(), "parts together without helpers fail");
    CHECK(pool.tasks.size() == before + 7, "%zu helpers were asked for, not 7 for all parts", pool.tasks.size() - before);
  }
  for (auto& task : pool.tasks) task();  // the executables and the arrays are gone: these must touch neither
}

void test_vectors() {
  for (unsigned seed = 1; seed <= 300; ++seed)
    compare(("vector " + std::to_string(seed)).c_str(), random_vector(seed), 1e-5, seed, true);
}

void test_phases() { compare("phases", two_phases(), 0.02, 1, true); }

// Arrays between phases share memory; each must keep what is in it until its last reader is done.
void test_arrays_between_phases() {
  std::mt19937 rng(7);
  // Small integers, at most doubled 15 times, stay exact.
  for (int64_t phases : {1, 2, 5, 40, 100})
    for (int64_t reach : {1, 3, 1000})
      for (bool together : {false, true})
        compare("arrays between phases", random_phases(rng, phases, reach, {5, 333, 64, 1, 17, 256, 1000}, together), 0,
                static_cast<unsigned>(phases), true, {1, 3, 64});
  auto memory = [&](int64_t phases) {
    std::vector<int64_t> words = encode(random_phases(rng, phases, 1, {1 << 20}));
    return Executable(parse(words.data(), words.size())).memory_bytes();
  };
  CHECK(memory(60) == memory(4), "60 phases take %zu bytes, 4 take %zu", memory(60), memory(4));
  CHECK(memory(60) < size_t{9} << 20, "two arrays of 4 MiB take %zu bytes", memory(60));
  // Parts that run together: all that a phase of seven reads is there until the last of them is done, beside all that they write.
  std::vector<int64_t> words = encode(random_phases(rng, 21, 1, std::vector<int64_t>(7, 40'000), true));
  const size_t together = Executable(parse(words.data(), words.size())).memory_bytes();
  CHECK(together >= 14 * 160'000, "two phases of seven arrays of 160 000 bytes lie in %zu", together);
}

void test_in_place() { compare("in place", in_place(), 1e-6); }

void test_copies() {
  for (unsigned seed = 1; seed <= 60; ++seed) compare(("copy " + std::to_string(seed)).c_str(), random_copy(seed), 0, seed);
}

void test_matmuls() {
  for (DType t : {F32, BF16, F64})
    for (int64_t n : {1, 7, 32, 45})
      for (int64_t batch : {1, 3}) compare("matmul", matmul(t, n, batch), t == BF16 ? 0.01 : t == F32 ? 1e-5 : 1e-12);
  for (int act = 0; act < kNumActivations; ++act)
    for (DType t : {F32, BF16})
      compare("matmul with an activation", matmul(t, 45, 3, Product::kBest, Activation(act)), t == BF16 ? 0.01 : 1e-5);
  for (int64_t n : {1, 7, 32, 45})
    for (Space space : {Space::kScratch, Space::kOut}) compare("sum of products", sum_of_products(n, space), 1e-5);
  for (Product product : kProducts) compare("matmul by choice", matmul(BF16, 45, 3, product), 0.01);
}

void test_weight_gradients() {
  for (DType t : {F32, BF16, F64})
    for (int64_t n : {1, 7, 45})
      for (int64_t batch : {1, 3})
        for (int64_t again : {0, 1, 2})
          compare("weight gradient", weight_gradient(t, n, batch, Product::kBest, again), t == F64 ? 1e-12 : 1e-5, 1, false,
                  {1, 2, 64});
  for (Product product : kProducts)
    compare("weight gradient by choice", weight_gradient(BF16, 45, 3, product), 1e-5, 1, false, {1, 2, 64});
}

void test_reductions() {
  for (unsigned seed = 1; seed <= 120; ++seed) {
    Program p = random_reduction(seed, false);
    const Reduce& r = std::get<Reduce>(p.stages[0].body[0]);
    compare(("reduce " + std::to_string(seed)).c_str(), p, r.x.ref.dtype == BF16 ? 0.02 : 1e-5, seed, true);
    if (r.how >= Reduction::kArgMax || r.how == Reduction::kProd) continue;
    compare(("sink " + std::to_string(seed)).c_str(), random_reduction(seed, true), 1e-5, seed, true);  // exact: small integers
  }
}

void test_nan() {
  constexpr int64_t R = 40, N = 37;
  for (Reduction how : {Reduction::kMax, Reduction::kMin, Reduction::kArgMax, Reduction::kSum}) {
    bool arg = how == Reduction::kArgMax;
    Program p =
        program({R}, 16, {{F32, R * N}}, {{arg ? I32 : F32, R}},
                {Reduce{how, {}, {N}, operand(Space::kIn, 0, F32, 0, N, {1}), operand(Space::kOut, 0, arg ? I32 : F32, 0, 1, {})}});
    Executable exe(parse(encode(p).data(), encode(p).size()));
    Arrays a(exe.call(), 4);
    for (int64_t r = 0; r < R; r += 2) set(F32, &a.ins[0][static_cast<size_t>((r * N + r % N) * 4)], NAN);
    ThreadPool pool(1);
    CHECK(exe.run(a.in_pointers.data(), a.out_pointers.data(), pool).empty(), "a reduction of NaN fails");
    for (int64_t r = 0; r < R; ++r) {
      double got = get(arg ? I32 : F32, &a.outs[0][static_cast<size_t>(r) * 4]);
      if (r % 2 == 0)
        CHECK(arg ? got == static_cast<double>(r % N) : std::isnan(got), "NaN in row %d is lost: %g", static_cast<int>(r), got);
      if (r % 2 == 1) CHECK(!std::isnan(got), "NaN leaks into row %d", static_cast<int>(r));
    }
  }
}

void test_scans() {
  for (unsigned seed = 1; seed <= 60; ++seed) {
    Program p = random_scan(seed);
    compare(("scan " + std::to_string(seed)).c_str(), p, p.inputs[0].dtype == BF16 ? 0.02 : 1e-5, seed, true);
  }
}

void test_loops() {
  for (int64_t rows : {1, 7, 24, 61}) {
    for (DType t : {F32, BF16})
      for (bool reverse : {false, true})
        compare("batched loop", batched_loop(t, 3, 2, rows, 8, reverse), t == BF16 ? 0.02 : 1e-5, 3, false, {1, 2, 3, 8});
    compare("nested loops", nested_loops(rows, 8), 1e-5, 4, false, {1, 2, 3, 8});
  }
}

void test_indices() {
  for (Reduction how : {Reduction::kSum, Reduction::kMax, Reduction::kMin, Reduction::kProd})
    for (int64_t rows : {1, 10, 333})
      for (OutOfRange mode : {OutOfRange::kClip, OutOfRange::kFill}) {
        // Small numbers: indices from -4 to 4 into 3 rows. Products of more of them than a few are no longer exact.
        if (how == Reduction::kProd && rows > 10) continue;
        compare("segments", segments(how, F32, I32, rows, 8, 3, mode), 1e-5, 3, true, {1, 2, 3, 8});
        compare("segments of int32", segments(how, I32, DType::kI8, rows, 8, 3, mode), 0, 5, true, {1, 2, 3, 8});
        compare("segments of float64", segments(how, F64, DType::kI64, rows, 8, 3, mode), 1e-12, 5, true, {1, 3});
        compare("segments of bfloat16", segments(how, BF16, DType::kI8, rows, 8, 3, mode), 0.01, 5, true, {1, 3});
      }
}

void test_segments() {
  for (Reduction how : {Reduction::kSum, Reduction::kMax, Reduction::kMin})
    for (int64_t rows : {1, 10, 333, 3001})
      for (bool straight : {false, true}) {
        const int64_t tile = rows > 1000 ? 400 : 8;
        compare("sorted segments", ordered_segments(how, F32, rows, tile, 4, straight, F32), 1e-6, 3, true, {1, 2, 3, 8});
        compare("online sums", online_sums(F32, rows, tile, 4, 1 + straight, 7, straight), 1e-5, 3, true, {1, 2, 3, 8});
        compare("narrow online sums", online_sums(F32, rows, tile, 300, 8, 1, straight), 1e-5, 3, true, {1, 3});
        compare("online sums of bfloat16", online_sums(BF16, rows, tile, 40, 2, 9, straight), 0.01, 5, false, {1, 3});
        compare("sorted segments of float64", ordered_segments(how, F64, rows, tile, 4, straight, F64), 1e-12, 4, false, {1, 3});
        compare("sorted segments of bfloat16", ordered_segments(how, BF16, rows, tile, 4, straight, BF16), 0.01, 5, false, {1, 3});
        compare("sorted segments of int32", ordered_segments(how, I32, rows, tile, 700, straight, I32), 0, 5, true, {1, 3});
        compare("rounded segments", ordered_segments(how, F32, rows, tile, 9, straight, BF16), 0.01, 6, false, {1, 3});
      }
}

// Small results are finished in one piece, large ones in 256 at most; rows of the identity are copied, and nothing behind them.
void test_pieces() {
  CHECK(segment_piece(1000, 4) >= 1000, "4 kB of results are finished in %lld rows at a time", (long long)segment_piece(1000, 4));
  CHECK(segment_piece(100000, 512) * kSegmentJobs >= 100000 && segment_piece(100000, 512) < 1000, "51 MB are shared out badly");
  CHECK(segment_piece(5, 0) >= 5 && segment_piece(3, 1 << 20) == 1, "rows of no byte, or of a megabyte");
  for (size_t bytes : {1, 3, 4, 28, 4096, 5000})
    for (int64_t n : {-1, 0, 1, 2, 7, 700, 3001}) {
      std::string row(bytes, '\0'), want;
      for (size_t b = 0; b < bytes; ++b) row[b] = static_cast<char>(b * 7 + 1);
      for (int64_t i = 0; i < n; ++i) want += row;
      std::string got(want.size() + 9, '.');
      fill_rows(got.data(), n, row.data(), bytes);
      CHECK(got == want + std::string(9, '.'), "%lld rows of %zu bytes", (long long)n, bytes);
    }
}

// Batches that strands share, that are theirs alone, and that end where tiles do.
void test_batch_sums() {
  for (DType t : {F32, BF16, F64})
    for (auto [outer, inner, rows] : {std::array<int64_t, 3>{1, 1, 1}, {1, 1, 333}, {3, 1, 40}, {2, 3, 17}, {1, 7, 8}, {4, 8, 21}})
      for (int64_t workers : {1, 2, 3, 8})
        compare("sums of batches", batch_sums(t, outer, inner, rows, 8, workers), t == BF16 ? 0.02 : 1e-5, 3, false, {1, 2, 3, 8});
  for (DType t : {F32, BF16})
    for (auto [M, part] : {std::pair<int64_t, int64_t>{32, 32}, {96, 32}, {101, 32}, {130, 64}})
      for (int64_t rows : {1, 23, 200})
        compare("sums in parts", sums_in_parts(t, 3, rows, 8, M, part), t == BF16 ? 0.02 : 1e-5, 4, false, {1, 2, 3, 8});
}

void test_selections() {
  for (OutOfRange mode : {OutOfRange::kClip, OutOfRange::kFill})
    for (int64_t inner : {1, 3, 17})
      for (int64_t rows : {1, 9})
        for (auto [count, indices] : {std::pair<int64_t, int64_t>{1, 1}, {3, 20}, {40, 3}}) {
          compare("selection", selection(F32, rows, 4, count, indices, inner, mode), 1e-6, 2);
          compare("selection of bfloat16", selection(BF16, rows, 4, count, indices, inner, mode), 0.02, 3);
          compare("selection of float64", selection(F64, rows, 4, count, indices, inner, mode), 1e-12, 4);
          compare("selection of int8", selection(DType::kI8, rows, 4, count, indices, inner, mode), 0, 5);
        }
}

void test_row_products() {
  for (DType t : {F32, BF16, F64})
    for (int64_t rows : {1, 9, 40}) compare("row products", row_products(t, rows, 8), t == BF16 ? 0.02 : 1e-5, 2, false, {1, 2, 3});
  for (DType t : {F32, BF16, F64})
    for (int64_t k : {2, 16, 33, 128})
      for (int64_t m : {2, 7, 27}) {
        const double tolerance = t == BF16 ? 0.02 : 1e-5;
        compare("row products along K", row_products_along(t, t, 6, m, 5, k, false), tolerance, 2);
        compare("row products of a matrix and itself", row_products_along(t, t, 6, m, m, k, true), tolerance, 3);
        if (t == BF16) compare("row products to float32", row_products_along(t, F32, 6, m, 70, k, false), 1e-5, 4);
      }
}

// Sums of numbers of very different size, whose result depends on the order: the same bits for any number of threads.
void test_sink_bits() {
  constexpr int64_t N = 24;
  for (int64_t rows : {64, 3001}) {
    Program single =
        program({rows}, 4, {{F32, rows * N}}, {{F32, N}}, {Accumulate{0, {N}, {}, operand(Space::kIn, 0, F32, 0, N, {1})}});
    single.sinks = {{Reduction::kSum, F32, N, 0}};
    compare("sink bits", single, 1e-5, 2, false, {1, 2, 5, 64});
  }
  compare("indexed sink", segments(Reduction::kSum, F32, I32, 3001, 4, 3, OutOfRange::kClip), 1e-4, 2, false, {1, 2, 5, 64});
  compare("sink of a pipeline", residual_call(2003, 4, 3), 1e-3, 2, false, {1, 2, 5, 64});
}

}  // namespace
}  // namespace kitsune::cpu::test

int main(int argc, char** argv) {
  using namespace kitsune::cpu::test;
  if (argc > 1 && !kitsune::cpu::set_isa(argv[1])) return std::printf("this CPU cannot run %s\n", argv[1]), 2;
  section("pipelines", test_pipelines);
  section("concurrent calls", test_concurrent_calls);
  section("stalled pool", test_stalled_pool);
  section("vectors", test_vectors);
  section("phases", test_phases);
  section("arrays between phases", test_arrays_between_phases);
  section("in place", test_in_place);
  section("copies", test_copies);
  section("matmuls", test_matmuls);
  section("weight gradients", test_weight_gradients);
  section("reductions", test_reductions);
  section("nan", test_nan);
  section("scans", test_scans);
  section("loops", test_loops);
  section("indices", test_indices);
  section("segments", test_segments);
  section("pieces of segments", test_pieces);
  section("sums of batches", test_batch_sums);
  section("selections", test_selections);
  section("row products", test_row_products);
  section("sink bits", test_sink_bits);
  std::printf("executor (%s): %d checks failed\n", kitsune::cpu::kernels().isa, failures);
  return failures == 0 ? 0 : 1;
}
