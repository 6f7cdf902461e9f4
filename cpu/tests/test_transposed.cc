// Copies with rows as columns, against the same programs without them: every bit must agree, with every kernel table.
#include "strips_check.h"

namespace kitsune::cpu::test {
namespace {

// A copy of [rows, *extents] from a layout in which one of the loops is innermost to another, in tiles that do not divide the rows.
Program copy(unsigned seed) {
  std::mt19937 rng(seed);
  auto any = [&](int64_t n) { return static_cast<int64_t>(rng() % static_cast<uint32_t>(n)); };
  constexpr DType kTypes[] = {F32, BF16, DType::kF16, I32, BOOL, F64};
  const DType type = kTypes[any(6)];
  const int64_t rows = 1 + any(200), tile = 1 + any(90);
  std::vector<int64_t> sizes{rows};
  for (int64_t d = 1 + any(3); d > 0; --d) sizes.push_back(any(3) == 0 ? 1 + any(5) : 1 + any(60));
  auto layout = [&](Space space) {
    std::vector<size_t> order(sizes.size());
    for (size_t d = 0; d < order.size(); ++d) order[d] = d;
    std::shuffle(order.begin(), order.end(), rng);
    std::vector<int64_t> strides(sizes.size());
    int64_t stride = any(5) == 0 ? 2 : 1;
    for (size_t d : order) strides[d] = stride, stride *= sizes[d] + (any(4) == 0 ? 3 : 0);
    return std::pair(operand(space, 0, type, any(4), strides[0], {strides.begin() + 1, strides.end()}), stride + 4);
  };
  const auto [from, read] = layout(Space::kIn);
  const auto [to, written] = layout(Space::kOut);
  Program p = program({rows}, tile, {{type, read}}, {{type, written}}, {}, 0);
  const DType held = compute_type(type);
  p.stages[0].body.push_back(Vector{{sizes.begin() + 1, sizes.end()},
                                    false,
                                    {from},
                                    {to},
                                    {micro(Opcode::op_load, held, 0, 0), micro(Opcode::op_store, held, 0, 0, 0)}});
  return p;
}

}  // namespace
}  // namespace kitsune::cpu::test

int main() {
  using namespace kitsune::cpu;
  const char* names[8];
  const int count = available_isas(names, 8);
  for (int k = 0; k < count; ++k) {
    set_isa(names[k]);
    for (unsigned seed = 0; seed < 80; ++seed)
      test::compare_without("copy", test::one_part(test::copy(seed)), seed, [](KernelTable& table) { table.transpose = nullptr; });
  }
  std::printf("transposed: %d checks failed\n", test::failures);
  return test::failures == 0 ? 0 : 1;
}
