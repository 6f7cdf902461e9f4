// Valid programs with a few words altered: the validator refuses them with a sentence, or they run within their arrays. Meant for
// the sanitizers, which see every access outside of memory and every overflow; runs without them as well.
//
// test_fuzz [first] [count]: mutations are numbered, and each is drawn from its number alone.
#include <unistd.h>

#include <csignal>
#include <cstdlib>

#include "batch_programs.h"
#include "word_reader.h"

namespace kitsune::cpu::test {
namespace {

constexpr int kMutations = 150000;
constexpr double kMostSeconds = 20;
constexpr unsigned kMostSecondsOfOne = 20;

volatile unsigned at = 0;  // the mutation at hand

void on_alarm(int) {
  std::fprintf(stderr, "mutation %u runs for ever\n", at);
  std::_Exit(3);
}

#if defined(__SANITIZE_ADDRESS__)
extern "C" void __sanitizer_set_death_callback(void (*)());
void on_death() { std::fprintf(stderr, "this was mutation %u: test_fuzz %u 1\n", at, at); }
#endif

std::vector<std::vector<int64_t>> corpus() {
  std::vector<std::vector<int64_t>> all;
  auto add = [&](const auto& x) { all.push_back(encode(x)); };
  for (int64_t depth : {1, 3}) add(residual_call(37, 8, depth));
  for (DType t : {F32, BF16, F64}) {
    add(matmul(t, 45, 3));
    add(matmul(t, 7, 1));
    if (t != F64) add(matmul(t, 7, 1, Product::kBest, Activation::kGeluTanh));
    add(weight_gradient(t, 7, 3));
    add(weight_gradient(t, 45, 1));
  }
  for (Product product : {Product::kWidened, Product::kDots, Product::kTiles}) {
    add(matmul(BF16, 45, 1, product));
    add(weight_gradient(BF16, 45, 1, product));
  }
  for (unsigned seed = 1; seed <= 12; ++seed) {
    add(random_vector(seed));
    add(random_copy(seed));
    add(random_reduction(seed, false));
    add(random_scan(seed));
    if (seed % 9 != 3 && seed % 9 < 7) add(random_reduction(seed, true));
  }
  add(in_place());
  for (bool reverse : {false, true}) add(batched_loop(reverse ? F32 : BF16, 3, 2, 11, 4, reverse));
  add(nested_loops(11, 4));
  for (OutOfRange mode : {OutOfRange::kClip, OutOfRange::kFill}) {
    add(segments(Reduction::kSum, F32, I32, 10, 4, 3, mode));
    add(segments(Reduction::kMax, I32, DType::kU64, 10, 4, 3, mode));
  }
  for (DType t : {F32, BF16, F64}) add(row_products(t, 5, 2));
  for (int64_t workers : {1, 3}) add(batch_sums(workers == 1 ? F32 : BF16, 2, 3, 10, 4, workers));
  for (int64_t M : {64, 70}) add(sums_in_parts(F32, 2, 10, 4, M, 32));
  for (bool straight : {false, true}) {
    add(ordered_segments(Reduction::kSum, F32, 21, 4, 3, straight, F32));
    add(ordered_segments(Reduction::kMax, I32, 21, 4, 5, straight, I32));
    add(ordered_segments(Reduction::kProd, BF16, 21, 4, 5, straight, F32));
    add(online_sums(straight ? F32 : BF16, 21, 4, 5, 2, 3, straight));
  }
  for (OutOfRange mode : {OutOfRange::kClip, OutOfRange::kFill}) {
    add(taken_sums(F32, 21, 4, 3, 5, 6, 2, 3, mode));
    add(taken_dots(F32, BF16, 21, 4, 5, 2, 3, mode == OutOfRange::kFill, mode));
    add(taken_sums(BF16, 21, 4, 5, 2, 6, 0, 0, mode));
    add(selection(F32, 5, 2, 3, 6, 1, mode));
    add(selection(BF16, 5, 2, 7, 3, 3, mode));
  }
  add(two_phases());
  return all;
}

std::vector<int64_t> mutate(std::vector<int64_t> w, std::mt19937& rng) {
  constexpr int64_t kValues[] = {0,
                                 1,
                                 -1,
                                 2,
                                 3,
                                 7,
                                 8,
                                 15,
                                 63,
                                 64,
                                 255,
                                 256,
                                 1 << 10,
                                 1 << 16,
                                 1 << 20,
                                 1 << 24,
                                 INT32_MAX,
                                 int64_t{1} << 32,
                                 int64_t{1} << 40,
                                 int64_t{1} << 44,
                                 int64_t{1} << 47,
                                 int64_t{1} << 48,
                                 int64_t{1} << 62,
                                 INT64_MAX,
                                 INT64_MIN};
  auto place = [&] { return kHeaderWords + rng() % (w.size() - kHeaderWords); };
  for (int edits = rng() % 3 == 0 ? 2 + static_cast<int>(rng() % 2) : 1; edits > 0 && w.size() > kHeaderWords + 8; --edits) {
    size_t k = place();
    switch (rng() % 8) {
      case 0: w[k] = static_cast<int64_t>(static_cast<uint64_t>(w[k]) ^ (uint64_t{1} << rng() % 64)); break;
      case 1: w[k] = kValues[rng() % (sizeof kValues / sizeof *kValues)]; break;
      case 2: w[k] = w[place()]; break;
      case 3: w[k] = static_cast<int64_t>(static_cast<uint64_t>(w[k]) * (rng() % 2 ? 2 : 0x7FFFFFFFu)); break;
      case 4: std::swap(w[k], w[place()]); break;
      case 5: {  // a list that is longer or shorter than it says
        size_t n = 1 + rng() % 4;
        if (rng() % 2)
          w.insert(w.begin() + static_cast<std::ptrdiff_t>(k), n, w[k]);
        else
          w.erase(w.begin() + static_cast<std::ptrdiff_t>(k), w.begin() + static_cast<std::ptrdiff_t>(std::min(w.size(), k + n)));
        break;
      }
      default: w[k] = static_cast<int64_t>(static_cast<uint64_t>(w[k]) + rng() % 7 - 3);
    }
  }
  return w;
}

// Arrays of exactly their size: a sanitizer sees the first byte beyond.
struct Exact {
  std::vector<std::unique_ptr<char[]>> memory;
  std::vector<const void*> ins;
  std::vector<void*> outs;
  Exact(const Call& c, std::mt19937& rng) {
    for (int64_t i = 0; i < c.operands; ++i) ins.push_back(fresh(c.arrays[i], &rng));
    for (int64_t i = 0; i < c.results; ++i) outs.push_back(fresh(c.arrays[c.operands + i], nullptr));
  }
  char* fresh(const Array& a, std::mt19937* rng) {
    size_t bytes = static_cast<size_t>(a.elements) * item_size(a.dtype);
    memory.push_back(std::unique_ptr<char[]>(new char[bytes]()));
    for (size_t i = 0; rng != nullptr && i < bytes; ++i)
      memory.back()[i] = static_cast<char>(a.dtype == BOOL ? (*rng)() % 2 : (*rng)() % 256);
    return memory.back().get();
  }
};

bool small(const Executable& exe) {
  double bytes = static_cast<double>(exe.memory_bytes()), tiles = 0;
  for (const Array& a : exe.call().arrays) bytes += static_cast<double>(a.elements) * static_cast<double>(item_size(a.dtype));
  for (const Part& x : exe.call().parts)
    tiles += static_cast<double>(x.program.tiles) * static_cast<double>(x.program.stages.size());
  return bytes < 16e6 && exe.estimated_ns() < 2e5 && tiles < 2000;
}

void test_mutations(unsigned first, unsigned count) {
  std::vector<std::vector<int64_t>> programs = corpus();
  for (const std::vector<int64_t>& words : programs) Executable(parse(words.data(), words.size()));  // throws if it is not valid
  auto start = std::chrono::steady_clock::now();
  ThreadPool one(1), three(3);
#if defined(__SANITIZE_THREAD__)
  ThreadPool& several = one;  // tiles of an altered program may write to the same place: a race of the program, not of the executor
#else
  ThreadPool& several = three;
#endif
  int refused = 0, large = 0, ran = 0;
  unsigned done = 0;
  for (; done < count; ++done) {
    double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    if (first == 0 && seconds > kMostSeconds) break;  // of the run that is part of the tests
    at = first + done;
    alarm(kMostSecondsOfOne);
    std::mt19937 rng(at);
    std::vector<int64_t> words = mutate(programs[rng() % programs.size()], rng);
    reseal(words);
    try {
      Executable exe(parse(words.data(), words.size()));
      if (!small(exe)) {
        ++large;
        continue;
      }
      Exact a(exe.call(), rng);
      ThreadPool& pool = rng() % 4 == 0 ? several : one;
      exe.run(a.ins.data(), a.outs.data(), pool);
      ++ran;
    } catch (const ProgramError& e) {
      CHECK(is_utf8(e.what()) && std::strlen(e.what()) > 20, "mutation %u: \"%s\" is no message", at, e.what());
      ++refused;
    }
  }
  alarm(0);
  std::printf("  %u mutations: %d refused, %d too large to run, %d ran\n", done, refused, large, ran);
  CHECK(count < 1000 || ran > static_cast<int>(done) / 10, "only %d of %u altered programs ran: the test does not test", ran, done);
}

// What the fuzzer has found: a copy of an output onto itself, one element further.
void test_copy_onto_itself() {
  Program p = program({1}, 1, {}, {{F32, 6}}, {});
  p.stages[0].body = {StridedLoad{{{Space::kOut, 0, 0, F32}, {0}, {5}, {1}, operand(Space::kOut, 0, F32, 1, 5, {1})}}};
  std::vector<int64_t> words = encode(p);
  Executable exe(parse(words.data(), words.size()));
  Arrays a(exe.call(), 1);
  for (int i = 0; i < 6; ++i) set(F32, &a.outs[0][static_cast<size_t>(i) * 4], i);
  ThreadPool pool(1);
  CHECK(exe.run(a.in_pointers.data(), a.out_pointers.data(), pool).empty(), "the copy fails");
  CHECK(get(F32, &a.outs[0][20]) == 4 && get(F32, &a.outs[0][4]) == 0, "the copy is wrong");
}

}  // namespace
}  // namespace kitsune::cpu::test

int main(int argc, char** argv) {
  using namespace kitsune::cpu::test;
  std::signal(SIGALRM, on_alarm);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_set_death_callback(on_death);
#endif
#if defined(KITSUNE_UNSEEN)
  if (std::string(" " KITSUNE_UNSEEN " ").find(std::string(" isa_") + kitsune::cpu::kernels().isa + " ") != std::string::npos)
    return std::printf("fuzz: the sanitizers do not see the kernels of %s\n", kitsune::cpu::kernels().isa), 2;
#endif
  unsigned first = argc > 1 ? static_cast<unsigned>(std::strtoul(argv[1], nullptr, 10)) : 0;
  unsigned count = argc > 2 ? static_cast<unsigned>(std::strtoul(argv[2], nullptr, 10)) : kMutations;
  test_copy_onto_itself();
  test_mutations(first, count);
  std::printf("fuzz (%s): %d checks failed\n", kitsune::cpu::kernels().isa, failures);
  return failures == 0 ? 0 : 1;
}
