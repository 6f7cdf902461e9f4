// ExpRows: exponentials of rows and their sums, against the reference; and what the validator refuses.
#include "executor_check.h"
#include "structured_programs.h"

namespace kitsune::cpu::test {
namespace {

void test_values() {
  for (bool summed : {false, true})
    for (int64_t rows : {1, 13, 1001})
      for (int64_t heads : {1, 3})
        for (int64_t n : {1, 7, 16, 31, 64, 200, 517}) {
          const int64_t tile = rows > 1000 ? 300 : 8;
          compare("exponentials", exponentials(F32, F32, rows, tile, heads, n, summed), 1e-5, 3, true, {1, 3});
          compare("exponentials of bfloat16", exponentials(BF16, BF16, rows, tile, heads, n, summed), 0.01, 3, true, {1});
          compare("exponentials as bfloat16", exponentials(F32, BF16, rows, tile, heads, n, summed), 0.01, 3, true, {1});
        }
}

void refuse(const char* says, void (*change)(Program&, ExpRows&)) {
  Program p = exponentials(BF16, BF16, 21, 4, 2, 5, true);
  change(p, std::get<ExpRows>(p.stages[0].body[0]));
  std::vector<int64_t> words = encode(p);
  try {
    parse(words.data(), words.size());
    CHECK(false, "accepted, not refused with: %s", says);
  } catch (const ProgramError& e) {
    CHECK(std::string(e.what()).find(says) != std::string::npos, "refused with: %s, not: %s", e.what(), says);
  }
}

void test_refused() {
  refuse("n is 0", [](Program&, ExpRows& e) { e.n = 0; });
  refuse("x reads element", [](Program&, ExpRows& e) { e.x.row_stride = 11; });
  refuse("shift reads element", [](Program&, ExpRows& e) { e.shift.row_stride = 3; });
  refuse("out writes element", [](Program&, ExpRows& e) { e.out.ref.offset = 1; });
  refuse("sums writes element", [](Program&, ExpRows& e) { e.sums[0].ref.offset = 1; });
  refuse("the sums of a row have one place", [](Program&, ExpRows& e) { e.sums.push_back(Operand(e.sums[0])); });
  refuse("the elements of a row are not dense", [](Program&, ExpRows& e) { e.x.strides = {5, 0}; });
  refuse("shift and sums are float32", [](Program&, ExpRows& e) { e.shift.ref = e.x.ref; });
  refuse("makes bfloat16 of int32", [](Program& p, ExpRows& e) { p.inputs[0].dtype = e.x.ref.dtype = I32; });
}

}  // namespace
}  // namespace kitsune::cpu::test

int main() {
  using namespace kitsune::cpu::test;
  section("values", test_values);
  section("refused", test_refused);
  std::printf("exponentials of rows: %d checks failed\n", failures);
  return failures == 0 ? 0 : 1;
}
