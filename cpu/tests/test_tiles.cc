// Programs on tiles, end to end on the models of the instructions (amx_models.h), and who gets the kernels with tiles.
#include <atomic>

#include "amx_models.h"
#include "cpu_features.h"
#include "executor_check.h"
#include "programs.h"

namespace kitsune::cpu::test {
namespace {

template <class F>
void on_each_model(F f) {
  for (int i = 0; i < models().count; ++i) {
    set_kernels(&models().all[i]->table);
    f(*models().all[i]);
  }
  set_kernels(nullptr);
}

// Small whole numbers, whose sums are exact in whatever order.
void test_programs() {
  on_each_model([](const Model&) {
    for (int64_t rows : {1, 16, 67, 301})
      for (int64_t tile_rows : {16, 48}) compare("tiles", tile_network(rows, tile_rows), 1e-3, 3, true, {1, 2, 5});
    for (Product product : {Product::kBest, Product::kWidened, Product::kDots, Product::kTiles}) {
      Call c = tile_network(67, 32);
      Program& p = c.parts[0].program;
      p.preps[0].product = product;
      std::get<AccumulateMatmul>(p.stages[1].body[1]).product = product;
      compare("tiles beside other products", c, 1e-3, 4, true, {1, 3});
    }
    for (int64_t n : {1, 45}) compare("small products", matmul(BF16, n, 3), 0.01);
    for (int64_t n : {1, 45}) compare("small gradients", weight_gradient(BF16, n, 3), 1e-5);
  });
}

// Each thread that multiplies on tiles configures them once in a call, and nobody holds them afterwards.
void test_once_per_thread_and_call() {
  on_each_model([](const Model& model) {
    std::vector<int64_t> words = encode(tile_network(301, 16).parts[0].program);
    Executable exe(parse(words.data(), words.size()));
    for (int64_t threads : {1, 2, 5}) {
      for (int call = 0; call < 3; ++call) {
        const int64_t before = *model.configured;
        {
          Arrays a(exe.call(), 5);
          ThreadPool pool(threads);
          CHECK(exe.run(a.in_pointers.data(), a.out_pointers.data(), pool).empty(), "%s: a call fails", model.table.isa);
          CHECK(!model.holds_tiles(), "%s: the caller still holds tiles", model.table.isa);
        }
        const int64_t configured = *model.configured - before;
        CHECK(configured >= 1 && configured <= threads, "%s: %lld configurations in a call on %lld threads", model.table.isa,
              static_cast<long long>(configured), static_cast<long long>(threads));
        CHECK(*model.released == *model.configured, "%s: tiles are not released", model.table.isa);
      }
    }
    words = encode(residual_pipeline(67, 8, 2));  // of float32
    Executable plain(parse(words.data(), words.size()));
    const int64_t before = *model.configured;
    Arrays a(plain.call(), 5);
    ThreadPool pool(2);
    CHECK(plain.run(a.in_pointers.data(), a.out_pointers.data(), pool).empty(), "%s: a call fails", model.table.isa);
    CHECK(*model.configured == before, "%s: a program without tiles configures them", model.table.isa);
  });
}

// ---- The dispatch, on machines that answer as these do.

struct Machine {
  uint32_t leaves = 0x20, palettes = 1, tile_bytes = 64, tiles = 8, tile_rows = 16;
  uint32_t one_c = 1u << 27 | 1u << 28 | 1u << 12 | 1u << 29;                           // OSXSAVE, AVX, FMA, F16C
  uint32_t seven_a = 1, seven_b = 1u << 5 | 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31;  // AVX2; AVX512F, DQ, BW, VL
  uint32_t seven_d = 1u << 22 | 1u << 24, more_a = 1u << 5;                             // AMX-BF16, AMX-TILE; AVX512_BF16
  uint64_t state = 0x600e7;
  bool permits = true;
};
Machine machine;
int asked = 0;

CpuidAnswer answer(uint32_t leaf, uint32_t subleaf) {
  const Machine& m = machine;
  if (leaf > m.leaves) return {};
  if (leaf == 0) return {m.leaves, 0, 0, 0};
  if (leaf == 1) return {0, 0, m.one_c, 0};
  if (leaf == 7 && subleaf == 0) return {m.seven_a, m.seven_b, 0, m.seven_d};
  if (leaf == 7 && subleaf == 1) return {m.more_a, 0, 0, 0};
  if (leaf == 0x1d && subleaf == 0) return {m.palettes, 0, 0, 0};
  if (leaf == 0x1d && subleaf == 1) return {8192 << 16 | 8192 / 8, m.tiles << 16 | m.tile_bytes, m.tile_rows, 0};
  return {};
}

uint64_t answer_state() { return machine.state; }
bool answer_permission() { return ++asked, machine.permits; }

void expect(const Machine& m, const char* best, int questions, const char* what) {
  machine = m, asked = 0;
  const Isas isas = isas_for(features({&answer, &answer_state, &answer_permission}));
  CHECK(std::string(isas.names[0]) == best, "%s: %s, expected %s", what, isas.names[0], best);
  CHECK(asked == questions, "%s: permission asked %d times, expected %d", what, asked, questions);
  CHECK(std::string(isas.names[isas.count - 1]) == "generic", "%s: no generic kernels", what);
}

void test_dispatch() {
  Machine m;
  expect(m, "amx", 1, "AMX with permission");
  machine = m;
  const Isas all = isas_for(features({&answer, &answer_state, &answer_permission}));
  const char* names[] = {"amx", "avx512bf16", "avx512", "avx2", "generic"};
  CHECK(all.count == 5, "%d tables", all.count);
  for (int i = 0; i < all.count && i < 5; ++i) CHECK(std::string(all.names[i]) == names[i], "table %d is %s", i, all.names[i]);
  Features arm;
  arm.neon = true;
  CHECK(std::string(isas_for(arm).names[0]) == "neon" && isas_for(arm).count == 2, "tables of Arm without bf16");
  arm.neonbf16 = true;
  CHECK(std::string(isas_for(arm).names[0]) == "neonbf16" && isas_for(arm).count == 3, "tables of Arm with bf16");
  auto with = [](auto change) {
    Machine other;
    change(other);
    return other;
  };
  expect(with([](Machine& x) { x.permits = false; }), "avx512bf16", 1, "AMX without permission");
  expect(with([](Machine& x) { x.state = 0xe7; }), "avx512bf16", 0, "an operating system that knows no tiles");
  expect(with([](Machine& x) { x.state = 0x200e7; }), "avx512bf16", 0, "an operating system that saves the configuration only");
  expect(with([](Machine& x) { x.seven_d = 1u << 24; }), "avx512bf16", 0, "AMX without bfloat16");
  expect(with([](Machine& x) { x.seven_d = 1u << 22; }), "avx512bf16", 0, "AMX-BF16 without tiles");
  expect(with([](Machine& x) { x.palettes = 0; }), "avx512bf16", 0, "no palette");
  expect(with([](Machine& x) { x.tile_rows = 8; }), "avx512bf16", 0, "tiles of eight rows");
  expect(with([](Machine& x) { x.tile_bytes = 32; }), "avx512bf16", 0, "tiles of 32 bytes");
  expect(with([](Machine& x) { x.tiles = 4; }), "avx512bf16", 0, "four tiles");
  expect(with([](Machine& x) { x.leaves = 0x1c; }), "avx512bf16", 0, "no leaf of tiles");
  expect(with([](Machine& x) { x.more_a = 0; }), "avx512", 0, "AMX without AVX512_BF16");
  expect(with([](Machine& x) { x.seven_a = 0; }), "avx512", 0, "leaf 7 has no second part");
  expect(with([](Machine& x) { x.seven_b &= ~(1u << 31); }), "avx2", 0, "AVX-512 without VL");
  expect(with([](Machine& x) { x.state = 0x60007; }), "avx2", 0, "an operating system that does not save AVX-512");
  expect(with([](Machine& x) { x.one_c &= ~(1u << 29); }), "generic", 0, "no F16C");
  expect(with([](Machine& x) { x.one_c &= ~(1u << 27); }), "generic", 0, "no XGETBV");
  expect(with([](Machine& x) { x.state = 0x3; }), "generic", 0, "an operating system that does not save AVX");
  expect(with([](Machine& x) { x.leaves = 1; }), "generic", 0, "an old CPU");
}

// The machine at hand answers as the compiler's runtime says, and twice the same.
void test_this_cpu() {
  const Features f = features_of_this_cpu(), again = features_of_this_cpu();
#if defined(__x86_64__)
  __builtin_cpu_init();
  CHECK(f.avx2 == (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")), "AVX2");
  CHECK(f.avx512 == (f.avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                     __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")),
        "AVX-512");
#endif
  CHECK(f.amx == again.amx, "permission is given or refused once and for all");
  const char* names[8];
  const Isas isas = isas_for(f);
  const int count = available_isas(names, 8);
  CHECK(count == isas.count, "%d tables, expected %d", count, isas.count);
  for (int i = 0; i < count && i < isas.count; ++i) CHECK(std::string(names[i]) == isas.names[i], "table %d is %s", i, names[i]);
}

}  // namespace
}  // namespace kitsune::cpu::test

int main() {
  using namespace kitsune::cpu::test;
  section("programs", test_programs);
  section("once", test_once_per_thread_and_call);
  section("dispatch", test_dispatch);
  section("this CPU", test_this_cpu);
  std::printf("tiles: %d checks failed\n", failures);
  return failures == 0 ? 0 : 1;
}
