// AccumulateTaken and TakenDot: sums and products of rows that are read where a table has them, against the reference, with indices
// out of range, one segment with most rows, empty segments, tables of one row; and what the validator refuses.
#include "executor_check.h"
#include "structured_programs.h"

namespace kitsune::cpu::test {
namespace {

void test_values() {
  for (OutOfRange mode : {OutOfRange::kClip, OutOfRange::kFill})
    for (int64_t rows : {1, 10, 333, 3001})
      for (int64_t count : {1, 4, 700}) {
        const int64_t tile = rows > 1000 ? 400 : 8;
        auto both = [&](const char* name, DType t, int64_t table, int64_t width, int64_t factors, int64_t heads, double tolerance) {
          compare(name, taken_sums(t, rows, tile, count, table, width, factors, heads, mode), tolerance, 3, true, {1, 2, 3, 8});
        };
        for (int64_t factors : {0, 1, 8, 40, 80}) both("taken sums", F32, 3, 80, factors, 0, 1e-5);
        for (int64_t width : {1, 7, 16, 40, 64, 200}) both("taken sums of one factor", F32, 1, width, 1, 0, 1e-5);
        for (int64_t width : {3, 48, 192}) both("taken sums of three factors", F32, 4, width, 3, 0, 1e-5);
        both("taken sums of 24 factors", F32, 4, 72, 24, 0, 1e-5);
        for (int64_t heads : {1, 2, 8}) both("online taken sums", F32, 3, 64, heads, heads, 1e-5);
        both("online taken sums without factors", F32, 3, 12, 0, 4, 1e-5);
        both("taken sums of bfloat16", BF16, 3, 40, 8, 0, 1e-4);
        both("online taken sums of bfloat16", BF16, 3, 33, 3, 3, 1e-4);
      }
}

void test_products() {
  for (OutOfRange mode : {OutOfRange::kClip, OutOfRange::kFill})
    for (int64_t rows : {1, 333, 1001})
      for (bool both : {false, true})
        for (int64_t inner : {1, 3, 8, 16, 40, 77})
          for (int64_t heads : {1, 5, 8, 16}) {
            const int64_t tile = rows > 1000 ? 600 : 8;
            compare("taken products", taken_dots(F32, F32, rows, tile, 3, heads, inner, both, mode), 1e-5, 3, true, {1, 3});
            compare("taken products of bfloat16", taken_dots(BF16, BF16, rows, tile, 1, heads, inner, both, mode), 0.01, 3, true,
                    {1});
          }
}

void refuse(const char* says, void (*change)(TakenDot&)) {
  Program p = taken_dots(F32, F32, 21, 4, 5, 2, 3, false, OutOfRange::kFill);
  change(std::get<TakenDot>(p.stages[0].body[0]));
  std::vector<int64_t> words = encode(p);
  try {
    parse(words.data(), words.size());
    CHECK(false, "accepted, not refused with: %s", says);
  } catch (const ProgramError& e) {
    CHECK(std::string(e.what()).find(says) != std::string::npos, "refused with: %s, not: %s", e.what(), says);
  }
}

void test_refused_products() {
  refuse("x reads element 35 of input 3, which has 30", [](TakenDot& d) { d.x.rows = 6; });
  refuse("y reads element", [](TakenDot& d) { d.y.x.row_stride = 7; });
  refuse("of a row of y are not dense", [](TakenDot& d) { d.y.x.strides = {2}; });
  refuse("of a row of x are not dense", [](TakenDot& d) { d.x.x.strides = {}; });
  refuse("an index cannot be float32", [](TakenDot& d) { d.x.taken.ref = d.y.x.ref; });
  refuse("fill is one number", [](TakenDot& d) { d.x.fill = {}; });
  refuse("makes int32 of float32", [](TakenDot& d) { d.out.ref.dtype = I32; });
  refuse("makes float32 of float32 and bfloat16", [](TakenDot& d) { d.y.x.ref.dtype = BF16; });
  refuse("rows of out overlap", [](TakenDot& d) { d.out.row_stride = 1; });
  refuse("heads", [](TakenDot& d) { d.heads = 0; });
}

void expect(const char* says, void (*change)(Program&, AccumulateTaken&)) {
  Program p = taken_sums(F32, 21, 4, 3, 5, 6, 2, 3, OutOfRange::kFill);
  change(p, std::get<AccumulateTaken>(p.stages[0].body.back()));
  std::vector<int64_t> words = encode(p);
  try {
    parse(words.data(), words.size());
    CHECK(false, "accepted, not refused with: %s", says);
  } catch (const ProgramError& e) {
    CHECK(std::string(e.what()).find(says) != std::string::npos, "refused with: %s, not: %s", e.what(), says);
  }
}

void test_refused() {
  expect("x reads element 35 of input 3, which has 30", [](Program&, AccumulateTaken& a) { a.rows = 6; });
  expect("x reads element", [](Program&, AccumulateTaken& a) { a.x.ref.offset = 1; });
  expect("of a row of x are not dense", [](Program&, AccumulateTaken& a) { a.x.strides = {0}; });
  expect("strides", [](Program&, AccumulateTaken& a) { a.x.strides = {}; });
  expect("by sorted indices, one for each row", [](Program&, AccumulateTaken& a) { a.sorted = false; });
  expect("by sorted indices, one for each row", [](Program&, AccumulateTaken& a) { a.ordered = true; });
  expect("by sorted indices, one for each row", [](Program& p, AccumulateTaken&) { p.sinks[0].how = Reduction::kMax; });
  expect("by sorted indices, one for each row", [](Program&, AccumulateTaken& a) { a.index_extents = {1}, a.index.strides = {1}; });
  expect("by sorted indices, one for each row", [](Program&, AccumulateTaken& a) { a.x.row_stride = 0; });
  expect("an index cannot be float32", [](Program&, AccumulateTaken& a) { a.taken.ref.dtype = F32; });
  expect("reads element", [](Program&, AccumulateTaken& a) { a.taken.ref.offset = int64_t{1} << 20; });
  expect("4 factors do not share out a row", [](Program&, AccumulateTaken& a) { a.factors = 4; });
  expect("factors", [](Program&, AccumulateTaken& a) { a.factors = 7; });
  expect("factor reads element", [](Program&, AccumulateTaken& a) { a.factor.row_stride = 1 << 20; });
  expect("its factors are int32", [](Program&, AccumulateTaken& a) { a.factor.ref.dtype = I32; });
  expect("the factors of a row are not dense", [](Program&, AccumulateTaken& a) { a.factor.strides = {0}; });
  expect("4 heads do not share out a row", [](Program&, AccumulateTaken& a) { a.heads = 4; });
  expect("fill is one number", [](Program&, AccumulateTaken& a) { a.fill = {}; });
  expect("is fed twice", [](Program& p, AccumulateTaken& a) { p.stages[0].body.push_back(AccumulateTaken(a)); });
}

}  // namespace
}  // namespace kitsune::cpu::test

int main() {
  using namespace kitsune::cpu::test;
  section("values", test_values);
  section("products", test_products);
  section("refused", test_refused);
  section("refused products", test_refused_products);
  std::printf("taken: %d checks failed\n", failures);
  return failures == 0 ? 0 : 1;
}
