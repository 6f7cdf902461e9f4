// The executor against the naive reference, the scheduler under many threads and calls, and the parser against damaged words.
#include <atomic>
#include <chrono>
#include <thread>

#include "executor_check.h"

namespace kitsune::cpu::test {
namespace {

constexpr DType F32 = DType::kF32, F64 = DType::kF64, BF16 = DType::kBF16, I32 = DType::kI32, BOOL = DType::kBool;

// dense -> relu -> (multicast: the next stage, and a skip) -> dense -> add + row sum + column-sum sink, then a phase that reads the
// sink.
Program residual_pipeline(int64_t rows, int64_t tile_rows, int64_t depth) {
  constexpr int64_t K = 12, N = 20;
  Program p{};
  p.name = "residual";
  p.axes = {rows};
  p.tile_rows = tile_rows;
  p.inputs = {{F32, rows * K}, {F32, K * N}, {F32, N}, {F32, N * N}};
  p.outputs = {{F32, rows * N}, {F32, rows}, {F32, N}, {F32, rows}};
  p.preps = {weight(1, F32, K, N), dense(2, F32, F32, {N}, {1}), weight(3, F32, N, N)};
  p.sinks = {{Reduction::kSum, F32, N, 2}};
  p.queues = {{0, {1, 2}, depth, tile_rows * N * 4}, {1, {2}, depth + 1, tile_rows * N * 4}};
  auto queue = [](int64_t q) { return operand(Space::kQueue, q, F32, 0, N, {1}); };
  auto scratch = operand(Space::kScratch, 0, F32, 0, N, {1});
  p.stages.push_back(
      {"first",
       0,
       0,
       {Matmul{operand(Space::kIn, 0, F32, 0, K, {0}), 1, 1, 0, 1, Activation::kRelu, operand(Space::kQueue, 0, F32, 0, N, {0})}}});
  p.stages.push_back({"second",
                      0,
                      0,
                      {Matmul{operand(Space::kQueue, 0, F32, 0, N, {0}), 1, 1, 2, -1, Activation::kNone,
                              operand(Space::kQueue, 1, F32, 0, N, {0})}}});
  Vector add{{N}, true, {queue(0), queue(1)}, {operand(Space::kOut, 0, F32, 0, N, {1}), scratch}, {}};
  add.code = {micro(Opcode::op_load, F32, 0, 0), micro(Opcode::op_load, F32, 1, 1), micro(Opcode::op_add, F32, 2, 0, 1),
              micro(Opcode::op_store, F32, 0, 0, 2), micro(Opcode::op_store, F32, 0, 1, 2)};
  p.stages.push_back(
      {"third",
       0,
       tile_rows * N * 4,
       {add, Reduce{Reduction::kSum, {}, {N}, scratch, operand(Space::kOut, 1, F32, 0, 1, {})}, Accumulate{0, {N}, {}, scratch}}});
  Vector after{{},
               false,
               {operand(Space::kOut, 1, F32, 0, 1, {}), operand(Space::kOut, 2, F32, 3, 0, {})},
               {operand(Space::kOut, 3, F32, 0, 1, {})},
               {}};
  after.code = {micro(Opcode::op_load, F32, 0, 0), micro(Opcode::op_load, F32, 1, 1), micro(Opcode::op_sub, F32, 0, 0, 1),
                micro(Opcode::op_store, F32, 0, 0, 0)};
  p.stages.push_back({"after the sink", 1, 0, {after}});
  return p;
}

void test_pipelines() {
  for (int64_t rows : {1, 5, 8, 67, 1021})
    for (int64_t depth : {1, 2, 5}) compare("residual pipeline", residual_pipeline(rows, 8, depth), 1e-4, 3, false, {1, 2, 64});
}

void test_concurrent_calls() {
  std::vector<int64_t> words = encode(residual_pipeline(301, 4, 2));
  Executable exe(parse(words.data(), words.size()));
  ThreadPool pool(2);
  Arrays want(exe.program(), 9);
  ThreadPool alone(1);
  CHECK(exe.run(want.in_pointers.data(), want.out_pointers.data(), alone).empty(), "the call alone fails");
  std::atomic<int> wrong{0};
  std::vector<std::thread> callers;
  for (int c = 0; c < 16; ++c)
    callers.emplace_back([&] {
      for (int i = 0; i < 3; ++i) {
        Arrays got(exe.program(), 9);
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
  int64_t num_threads() const override { return 8; }
  void schedule(std::function<void()> task) override { tasks.push_back(std::move(task)); }
};

void test_stalled_pool() {
  StalledPool pool;
  std::vector<int64_t> words = encode(residual_pipeline(67, 8, 2));
  {
    Executable exe(parse(words.data(), words.size()));
    Arrays a(exe.program(), 5);
    CHECK(exe.run(a.in_pointers.data(), a.out_pointers.data(), pool).empty(), "a call without helpers fails");
  }
  CHECK(!pool.tasks.empty(), "no helper was asked for");
  for (auto& task : pool.tasks) task();  // the executable and the arrays are gone: these must touch neither
}

// A random layout of a value over (rows, *extents): dense, padded, transposed, reversed or broadcast.
Operand random_layout(std::mt19937& rng, Space space, int64_t index, DType t, int64_t rows, const std::vector<int64_t>& extents,
                      bool write, int64_t* elements) {
  std::vector<int64_t> all = extents;
  all.insert(all.begin(), rows);
  std::vector<size_t> order(all.size());
  for (size_t d = 0; d < order.size(); ++d) order[d] = d;
  int kind = static_cast<int>(rng() % 5);
  if (kind == 1) std::shuffle(order.begin(), order.end(), rng);
  std::vector<int64_t> strides(all.size(), 0);
  int64_t step = kind == 2 ? 3 : 1, offset = static_cast<int64_t>(rng() % 3);
  for (size_t i = order.size(); i-- > 0;) {
    size_t d = order[i];
    if (kind == 3 && !write && rng() % 2) continue;  // broadcast
    strides[d] = step;
    if (kind == 4 && rng() % 2) {
      offset += step * (all[d] - 1);
      strides[d] = -step;
    }
    step *= all[d];
    if (kind == 2) step += static_cast<int64_t>(rng() % 3);
  }
  *elements = 4;
  int64_t high = offset;
  for (size_t d = 0; d < all.size(); ++d) high += std::max<int64_t>(0, strides[d] * (all[d] - 1));
  *elements = std::max(*elements, high + 1);
  return operand(space, index, t, offset, strides[0], {strides.begin() + 1, strides.end()});
}

std::vector<int64_t> random_extents(std::mt19937& rng, int64_t least) {
  std::vector<int64_t> extents;
  static constexpr int64_t kSizes[] = {1, 2, 3, 5, 16, 33, 70};
  for (int64_t d = static_cast<int64_t>(rng() % 3) + least; d > 0; --d) extents.push_back(kSizes[rng() % 7]);
  while (product(extents) > 350) extents.pop_back();  // the reference, under a sanitizer, sets the size
  return extents;
}

void test_vectors() {
  constexpr DType kTypes[] = {F32, BF16, F64, I32};
  for (unsigned seed = 1; seed <= 300; ++seed) {
    std::mt19937 rng(seed);
    int64_t rows = 1 + static_cast<int64_t>(rng() % 40), tile_rows = 1 + static_cast<int64_t>(rng() % 17), n;
    std::vector<int64_t> extents = random_extents(rng, 0);
    Program p = program({rows}, tile_rows, {}, {}, {});
    Vector v{extents, false, {}, {}, {}};
    for (int64_t i = 0; i < 3; ++i) {
      DType t = kTypes[rng() % 4];
      v.loads.push_back(random_layout(rng, Space::kIn, i, t, rows, extents, false, &n));
      p.inputs.push_back({t, n});
      v.code.push_back(micro(Opcode::op_load, compute_type(t), 10 + i, i));
      v.code.push_back(convert(F32, compute_type(t), i, 10 + i));
    }
    v.code.push_back(micro(Opcode::op_index, I32, 3, static_cast<int64_t>(rng() % (extents.size() + 1)), 1 + rng() % 2, 5));
    v.code.push_back(convert(F32, I32, 3, 3));
    v.code.push_back(micro(Opcode::op_const, F32, 4, 0, 0, 0, {0.25}));
    v.code.push_back(micro(Opcode::op_mul, F32, 1, 1, 4));
    v.code.push_back(micro(Opcode::op_add, F32, 5, 0, 1));
    v.code.push_back(micro(Opcode::op_max, F32, 6, 5, 2));
    v.code.push_back(micro(Opcode::op_lt, F32, 7, 0, 2));
    v.code.push_back(micro(Opcode::op_select, F32, 8, 7, 6, 3));
    v.code.push_back(micro(Opcode::op_sub, F32, 8, 8, 1));
    v.stores.push_back(random_layout(rng, Space::kOut, 0, F32, rows, extents, true, &n));
    p.outputs.push_back({F32, n});
    v.code.push_back(micro(Opcode::op_store, F32, 0, 0, 8));
    v.stores.push_back(random_layout(rng, Space::kOut, 1, BOOL, rows, extents, true, &n));
    p.outputs.push_back({BOOL, n});
    v.code.push_back(micro(Opcode::op_store, F32, 0, 1, 7));
    v.stores.push_back(random_layout(rng, Space::kOut, 2, BF16, rows, extents, true, &n));
    p.outputs.push_back({BF16, n});
    v.code.push_back(micro(Opcode::op_store, F32, 0, 2, 5));
    p.stages[0].body.push_back(v);
    compare(("vector " + std::to_string(seed)).c_str(), p, 1e-5, seed, true);
  }
}

// Updates of scratch in place: what is read after a write must be the new value, and what is read before it the old one.
void test_in_place() {
  constexpr int64_t N = 50;
  auto scratch = operand(Space::kScratch, 0, F32, 0, N, {1}), shifted = operand(Space::kScratch, 0, F32, 400, N, {1});
  auto in = operand(Space::kIn, 0, F32, 0, N, {1}), out = operand(Space::kOut, 0, F32, 0, N, {1});
  auto load = [](int64_t dst, int64_t a) { return micro(Opcode::op_load, F32, dst, a); };
  auto store = [](int64_t a, int64_t b) { return micro(Opcode::op_store, F32, 0, a, b); };
  Vector fill{{N}, true, {in}, {scratch, shifted}, {load(0, 0), store(0, 0), micro(Opcode::op_neg, F32, 1, 0), store(1, 1)}};
  Vector update{{N}, true, {scratch}, {scratch}, {load(0, 0), micro(Opcode::op_add, F32, 1, 0, 0), store(0, 1)}};
  Vector keep_old{
      {N},
      true,
      {scratch, shifted},
      {scratch, out},
      {load(0, 0), load(2, 1), micro(Opcode::op_mul, F32, 1, 0, 2), store(0, 1), micro(Opcode::op_add, F32, 3, 0, 1), store(1, 3)}};
  Vector swap{{N},
              true,
              {scratch, shifted},
              {scratch, shifted, operand(Space::kOut, 1, F32, 0, N, {1})},
              {load(0, 0), load(1, 1), store(0, 1), store(1, 0), micro(Opcode::op_sub, F32, 2, 0, 1), store(2, 2)}};
  Vector result{{N}, true, {scratch}, {operand(Space::kOut, 2, F32, 0, N, {1})}, {load(0, 0), store(0, 0)}};
  Array a{F32, 13 * N};
  compare("in place", program({13}, 8, {a}, {a, a, a}, {fill, update, keep_old, swap, result}, 800 * 4), 1e-6);
}

void test_copies() {
  for (unsigned seed = 1; seed <= 60; ++seed) {
    std::mt19937 rng(seed);
    std::vector<int64_t> axes;
    for (int d = static_cast<int>(rng() % 3); d >= 0; --d) axes.push_back(1 + static_cast<int64_t>(rng() % 6));
    std::vector<int64_t> extents = random_extents(rng, 0), all = axes;
    all.insert(all.end(), extents.begin(), extents.end());
    std::vector<size_t> order(all.size());
    for (size_t d = 0; d < order.size(); ++d) order[d] = d;
    if (rng() % 2) std::shuffle(order.begin(), order.end(), rng);
    std::vector<int64_t> strides(all.size());
    int64_t step = 1;
    for (size_t i = order.size(); i-- > 0; step *= all[order[i]]) strides[order[i]] = step;
    DType t = rng() % 2 ? F32 : BF16;
    int64_t row = product(extents), tile_rows = 1 + static_cast<int64_t>(rng() % 9);
    std::vector<int64_t> dense_strides(extents.size());
    int64_t inner = 1;
    for (size_t d = extents.size(); d-- > 0; inner *= extents[d]) dense_strides[d] = inner;
    std::vector<int64_t> axis_strides(strides.begin(), strides.begin() + static_cast<std::ptrdiff_t>(axes.size()));
    std::vector<int64_t> array_strides(strides.begin() + static_cast<std::ptrdiff_t>(axes.size()), strides.end());
    auto tile = operand(Space::kScratch, 0, t, 1, row, dense_strides);
    Gather g{{{Space::kIn, 0, 0, t}, axis_strides, extents, array_strides, tile}};
    Scatter back{{{Space::kOut, 0, 0, t}, axis_strides, extents, array_strides, tile}};
    Scatter flat{{{Space::kOut, 1, 0, t}, {}, extents, dense_strides, tile}};
    int64_t stride = row;
    for (size_t j = axes.size(); j-- > 0; stride *= axes[j]) flat.axis_strides.insert(flat.axis_strides.begin(), stride);
    Array a{t, step};
    compare(("copy " + std::to_string(seed)).c_str(),
            program(axes, tile_rows, {a}, {a, a}, {g, back, flat}, (tile_rows * row + 1) * 4), 0, seed);
  }
}

void test_matmuls() {
  for (DType t : {F32, BF16, F64})
    for (int64_t n : {1, 7, 32, 45})
      for (int64_t batch : {1, 3}) {
        constexpr int64_t R = 19, K = 13, M = 2;
        DType bias = t == F64 ? F64 : F32;
        Program p = program({R}, 8, {{t, R * M * batch * K}, {t, batch * K * n}, {t, n}}, {{t, R * M * batch * n}}, {});
        // The weight is stored as [k][batch][n]; its columns are two extents, the last one reversed.
        int64_t outer = n % 5 == 0 ? 5 : 1, last = n / outer;
        p.preps = {{PrepKind::kWeight, {Space::kIn, 1, last - 1, t}, t, {batch}, {n}, {K}, {batch * n}, {outer, last}, {last, -1}},
                   dense(2, t, bias, {n}, {1})};
        p.stages[0].body = {Matmul{operand(Space::kIn, 0, t, 0, batch * K, {K}), M, batch, 0, 1,
                                   n % 2 ? Activation::kRelu : Activation::kNone, operand(Space::kOut, 0, t, 0, batch * n, {n})}};
        compare("matmul", p, t == BF16 ? 0.01 : t == F32 ? 1e-5 : 1e-12);
      }
}

void test_weight_gradients() {
  for (DType t : {F32, BF16, F64})
    for (int64_t n : {1, 7, 45})
      for (int64_t batch : {1, 3}) {
        constexpr int64_t R = 23, K = 13, M = 2;
        DType sum = t == F64 ? F64 : F32;
        Program p = program({R}, 4, {{t, R * M * batch * K}, {t, R * M * batch * n}}, {{sum, batch * K * n}}, {});
        p.sinks = {{Reduction::kSum, sum, batch * K * n, 0}};
        p.stages[0].body = {AccumulateMatmul{0, M, batch, K, n, operand(Space::kIn, 0, t, 0, batch * K, {K}),
                                             operand(Space::kIn, 1, t, 0, batch * n, {n})}};
        compare("weight gradient", p, t == F64 ? 1e-12 : 1e-5, 1, false, {1, 2, 64});
      }
}

void test_reductions() {
  for (unsigned seed = 1; seed <= 120; ++seed) {
    std::mt19937 rng(seed);
    constexpr DType kTypes[] = {F32, BF16, F64, I32, BOOL};
    Reduction how = static_cast<Reduction>(seed % 9);
    bool logical = how == Reduction::kAnd || how == Reduction::kOr || how == Reduction::kXor, arg = how >= Reduction::kArgMax;
    DType t = logical ? kTypes[3 + rng() % 2] : kTypes[rng() % 4];
    int64_t rows = 1 + static_cast<int64_t>(rng() % 30), n, m;
    std::vector<int64_t> kept = random_extents(rng, 0),
                         reduced = arg ? std::vector<int64_t>{1 + static_cast<int64_t>(rng() % 300)} : random_extents(rng, 0);
    if (how == Reduction::kProd && product(reduced) > 8) reduced = {3};
    std::vector<int64_t> all = kept;
    all.insert(all.end(), reduced.begin(), reduced.end());
    Operand x = random_layout(rng, Space::kIn, 0, t, rows, all, false, &n);
    Operand out = random_layout(rng, Space::kOut, 0, arg ? I32 : t, rows, kept, true, &m);
    Program p =
        program({rows}, 1 + static_cast<int64_t>(rng() % 40), {{t, n}}, {{out.ref.dtype, m}}, {Reduce{how, kept, reduced, x, out}});
    compare(("reduce " + std::to_string(seed)).c_str(), p, t == BF16 ? 0.02 : 1e-5, seed, true);
    if (arg || (how == Reduction::kProd && is_float(t))) continue;
    // The same operand into a sink (exact: small integers).
    if (how == Reduction::kProd) continue;
    Program q =
        program({rows}, 1 + static_cast<int64_t>(rng() % 4), {{t, n}}, {{t, product(kept)}}, {Accumulate{0, kept, reduced, x}});
    q.sinks = {{how, t, product(kept), 0}};
    compare(("sink " + std::to_string(seed)).c_str(), q, 1e-5, seed, true);
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
    Arrays a(p, 4);
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
    std::mt19937 rng(seed);
    Cumulative how = static_cast<Cumulative>(seed % 5);
    constexpr DType kTypes[] = {F32, F64, BF16, I32};
    DType t = kTypes[rng() % (how == Cumulative::kLogSumExp ? 3 : 4)];
    int64_t rows = 1 + static_cast<int64_t>(rng() % 12), n, m;
    std::vector<int64_t> extents = random_extents(rng, 1);
    extents.back() = how == Cumulative::kProd ? 5 : 1 + static_cast<int64_t>(rng() % 300);
    Operand x = random_layout(rng, Space::kIn, 0, t, rows, extents, false, &n),
            out = random_layout(rng, Space::kOut, 0, t, rows, extents, true, &m);
    compare(("scan " + std::to_string(seed)).c_str(),
            program({rows}, 5, {{t, n}}, {{t, m}}, {Scan{how, rng() % 2 == 0, extents, x, out}}), t == BF16 ? 0.02 : 1e-5, seed,
            true);
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
  compare("sink of a pipeline", residual_pipeline(2003, 4, 3), 1e-3, 2, false, {1, 2, 5, 64});
}

bool rejected(const std::vector<int64_t>& words, std::string* why = nullptr) {
  try {
    Executable exe(parse(words.data(), words.size()));
    return false;
  } catch (const ProgramError& e) {
    if (why != nullptr) *why = e.what();
    return true;
  } catch (const std::bad_alloc&) {
    return true;
  }
}

double work(const Program& p) {
  double w = static_cast<double>(p.rows + p.tile_rows);
  for (const Ring& q : p.queues) w += static_cast<double>(q.depth) * static_cast<double>(q.entry_bytes);
  for (const auto* list : {&p.inputs, &p.outputs})
    for (const Array& a : *list) w += static_cast<double>(a.elements);
  for (const Stage& s : p.stages) w += static_cast<double>(s.scratch_bytes);
  return w;
}

// Every bit of every word, one at a time: as it is (the checksum finds it), and resealed (the validator rejects it, or it runs in
// bounds).
void test_damage() {
  Program small = residual_pipeline(13, 4, 2);
  std::vector<int64_t> words = encode(small);
  CHECK(!rejected(words), "the undamaged program is rejected");
  for (size_t n = 0; n < words.size(); ++n)
    CHECK(rejected({words.begin(), words.begin() + static_cast<std::ptrdiff_t>(n)}), "truncated to %zu words", n);
  int ran = 0;
  for (size_t w = 0; w < words.size(); ++w)
    for (int bit = 0; bit < 64; ++bit) {
      std::vector<int64_t> damaged = words;
      damaged[w] = static_cast<int64_t>(static_cast<uint64_t>(damaged[w]) ^ (uint64_t{1} << bit));
      CHECK(rejected(damaged), "bit %d of word %zu", bit, w);
      if (w < kHeaderWords) continue;
      reseal(damaged);
      try {
        Program p = parse(damaged.data(), damaged.size());
        if (work(p) > 1e5 || ran > 2000) continue;
        Executable exe(p);
        if (exe.estimated_ns() > 1e6) continue;
        Arrays a(p, 1);
        ThreadPool pool(1);
        exe.run(a.in_pointers.data(), a.out_pointers.data(), pool);
        ++ran;
      } catch (const ProgramError&) {
      } catch (const std::bad_alloc&) {
      }
    }
  CHECK(ran > 50, "only %d altered programs ran: the test does not test", ran);
}

void test_messages() {
  auto expect = [](const Program& p, const char* what) {
    std::string why;
    CHECK(rejected(encode(p), &why), "accepted, though %s", what);
    CHECK(why.find(what) != std::string::npos, "\"%s\" does not say \"%s\"", why.c_str(), what);
  };
  std::vector<int64_t> words = encode(residual_pipeline(13, 4, 2));
  words[9] ^= 1;
  std::string why;
  CHECK(rejected(words, &why) && why == "kitsune program: checksum mismatch: the attribute was truncated or altered", "%s",
        why.c_str());
  Program p = residual_pipeline(13, 4, 2);
  p.inputs[0].elements -= 1;
  expect(p, "stage 0 'first' instruction 0 (Matmul): x reads element 155 of input 0, which has 155");
  p = residual_pipeline(13, 4, 2);
  p.queues[0].consumers = {2};
  expect(p, "x reads queue 0, of which this stage is not the producer or a consumer");
  p = residual_pipeline(13, 4, 2);
  p.queues.push_back({2, {0}, 4, 64});
  expect(p, "the queues form a cycle");
  p = residual_pipeline(13, 4, 2);
  p.queues[0].depth = 0;
  expect(p, "depth is 0");
  p = residual_pipeline(13, 4, 2);
  std::get<Vector>(p.stages[2].body[0]).code[2].b = 9;
  expect(p, "operation 2 (add): register 9 has no value yet");
  p = residual_pipeline(13, 4, 2);
  p.stages[2].scratch_bytes = 16;
  expect(p, "of scratch, which has 4");
  p = residual_pipeline(13, 4, 2);
  std::get<Vector>(p.stages[2].body[0]).loads[0].row_stride = int64_t{1} << 62;
  expect(p, "stride");
  p = residual_pipeline(13, 4, 2);
  std::get<Vector>(p.stages[2].body[0]).extents = {int64_t{1} << 40, int64_t{1} << 40};
  expect(p, "more than 2**48");
  p = residual_pipeline(13, 4, 2);
  p.stages[1].phase = 1;
  expect(p, "different phases");
  p = residual_pipeline(13, 4, 2);
  p.outputs.push_back({F32, 4});
  expect(p, "output 4 is never written");
}

void section(const char* name, void (*test)()) {
  auto start = std::chrono::steady_clock::now();
  test();
  std::printf("  %-18s %6.2f s\n", name, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  std::fflush(stdout);
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
  section("in place", test_in_place);
  section("copies", test_copies);
  section("matmuls", test_matmuls);
  section("weight gradients", test_weight_gradients);
  section("reductions", test_reductions);
  section("nan", test_nan);
  section("scans", test_scans);
  section("sink bits", test_sink_bits);
  section("damage", test_damage);
  section("messages", test_messages);
  std::printf("executor (%s): %d checks failed\n", kitsune::cpu::kernels().isa, failures);
  return failures == 0 ? 0 : 1;
}
