// Folds of what a Vector makes, added up in registers, against the same programs with a pass for each: of small whole numbers,
// whose sums are exact in every order, all must agree, with every kernel table.
#include "executor_internal.h"
#include "strips_check.h"

namespace kitsune::cpu::test {
namespace {

// One or two sums over the rows, and perhaps the first dimensions, of x y and |x|, in tiles that need not divide the rows. `only`:
// nothing else reads what is summed; without it that is stored.
Program sums(unsigned seed, bool only) {
  std::mt19937 rng(seed);
  auto any = [&](int64_t n) { return static_cast<int64_t>(rng() % static_cast<uint32_t>(n)); };
  constexpr DType kTypes[] = {F32, BF16, DType::kF16};
  const DType type = kTypes[any(3)];
  const int64_t rows = 1 + any(150), tile = 1 + any(70);
  const int64_t widths[] = {1, 3, 8, 16, 24, 48, 64, 100, 128, 256, 257, 320, 1 + any(400)};
  std::vector<int64_t> extents{widths[any(13)]};
  if (any(3) == 0) extents.insert(extents.begin(), 1 + any(4));
  const int64_t row = product(extents), pitch = row + (any(3) == 0 ? 16 : 0), items = any(2) == 0 ? 1 : 2;
  std::vector<int64_t> dense(extents.size(), 1);
  for (size_t d = extents.size() - 1; d-- > 0;) dense[d] = dense[d + 1] * extents[d + 1];
  Operand x = operand(Space::kIn, 0, type, 0, row, dense), y = operand(Space::kIn, 1, type, 0, row, dense);
  const bool by_row = any(3) == 0;
  if (by_row) y = operand(Space::kIn, 1, type, 0, 1, std::vector<int64_t>(extents.size(), 0));
  Program p = program({rows}, tile, {{type, rows * row}, {type, by_row ? rows : rows * row}}, {}, {}, 2 * tile * pitch * 4);
  Vector v{extents, false, {x, y}, {}, {micro(Opcode::op_load, F32, 0, 0), micro(Opcode::op_load, F32, 1, 1)}};
  v.code.push_back(micro(Opcode::op_mul, F32, 2, 0, 1));
  v.code.push_back(micro(Opcode::op_abs, F32, 3, 0));
  std::vector<Instruction> folds;
  for (int64_t k = 0; k < items; ++k) {
    const Operand value = operand(Space::kScratch, 0, F32, k * tile * pitch, pitch, dense);
    v.stores.push_back(value);
    v.code.push_back(micro(Opcode::op_store, F32, 0, k, 2 + k));
    const size_t kept = static_cast<size_t>(any(static_cast<int64_t>(extents.size()) + 1)), reduced = extents.size() - kept;
    Accumulate a{k, {extents.begin() + static_cast<std::ptrdiff_t>(reduced), extents.end()}, {}, value};
    a.reduced.assign(extents.begin(), extents.begin() + static_cast<std::ptrdiff_t>(reduced));
    std::rotate(a.x.strides.begin(), a.x.strides.begin() + static_cast<std::ptrdiff_t>(reduced), a.x.strides.end());
    a.only = only;
    p.outputs.push_back({F32, product(a.kept)});
    p.sinks.push_back({Reduction::kSum, F32, product(a.kept), k});
    folds.push_back(std::move(a));
  }
  p.stages[0].body.push_back(std::move(v));
  for (Instruction& fold : folds) p.stages[0].body.push_back(std::move(fold));
  return p;
}

std::vector<Bytes> results(const Call& call, unsigned seed, size_t* steps) {
  std::vector<int64_t> words = encode(call);
  Executable exe(parse(words.data(), words.size()));
  const Plan plan(exe.call().parts[0].program, kernels());
  *steps = plan.stages[0].steps.size();
  Arrays arrays(exe.call(), seed, true);
  ThreadPool pool(2);
  const std::string error = exe.run(arrays.in_pointers.data(), arrays.out_pointers.data(), pool);
  CHECK(error.empty(), "%s", error.c_str());
  return arrays.outs;
}

// Returns whether the folds were added up in registers.
bool summed_alike(unsigned seed) {
  size_t steps = 0, stored_steps = 0;
  const Call call = one_part(sums(seed, true));
  const std::vector<Bytes> got = results(call, seed, &steps), want = results(one_part(sums(seed, false)), seed, &stored_steps);
  for (size_t o = 0; o < want.size(); ++o)
    CHECK(got[o] == want[o], "sums [%s], seed %u: result %zu differs", kernels().isa, seed, o);
  return steps < stored_steps;
}

}  // namespace
}  // namespace kitsune::cpu::test

int main() {
  using namespace kitsune::cpu;
  const char* names[8];
  const int count = available_isas(names, 8);
  for (int k = 0; k < count; ++k) {
    set_isa(names[k]);
    int in_registers = 0;
    for (unsigned seed = 0; seed < 300; ++seed) in_registers += test::summed_alike(seed);
    CHECK(kernels().strips == nullptr || in_registers >= 100, "[%s] only %d of 300 programs were summed in registers", names[k],
          in_registers);
  }
  std::printf("summed: %d checks failed\n", test::failures);
  return test::failures == 0 ? 0 : 1;
}
