// Rows too short for a strip, which strips have several of, and folds of such rows, sixteen at a time: with every kernel table.
#include <cmath>
#include <limits>

#include "kitsune_cpu/strips.h"
#include "strip_rows.h"
#include "strips_check.h"

namespace kitsune::cpu::test {
namespace {

int64_t elements(const std::vector<int64_t>& extents) {
  int64_t n = 1;
  for (int64_t e : extents) n *= e;
  return n;
}

// Row-major strides over the loops for which `has` has a bit (bit 0: the rows), as an operand of so many elements.
Operand over(unsigned has, int64_t index, DType type, const std::vector<int64_t>& extents, Array* array, int64_t rows) {
  std::vector<int64_t> strides(extents.size(), 0);
  int64_t dense = 1;
  for (size_t d = extents.size(); d-- > 0;)
    if ((has >> (d + 1) & 1) != 0) strides[d] = dense, dense *= extents[d];
  *array = {type, (has & 1) != 0 ? dense * rows : dense};
  return operand(Space::kIn, index, type, 0, (has & 1) != 0 ? dense : 0, strides);
}

// A state in place, times something of each row, plus something that all rows have, in the lanes where a bool of the row says so.
Program mixed(const std::vector<int64_t>& extents, int64_t rows, int64_t tile, DType narrow, unsigned each, unsigned repeated) {
  const unsigned all = (2u << extents.size()) - 1;
  Vector v{extents, false, {}, {}, {}};
  std::vector<Array> inputs(5);
  const unsigned has[] = {all, each, repeated, each, each};
  const DType types[] = {F32, F32, F32, BOOL, narrow};
  for (int64_t i = 0; i < 5; ++i) {
    const auto k = static_cast<size_t>(i);
    v.loads.push_back(over(has[k], i, types[k], extents, &inputs[k], rows));
    v.code.push_back(micro(Opcode::op_load, compute_type(types[k]), i, i));
  }
  v.code.push_back(micro(Opcode::op_mul, F32, 5, 0, 1));
  v.code.push_back(micro(Opcode::op_add, F32, 6, 5, 2));
  v.code.push_back(micro(Opcode::op_select, F32, 7, 3, 6, 0));
  v.code.push_back(micro(Opcode::op_add, F32, 8, 7, 4));
  v.code.push_back(micro(Opcode::op_exp, F32, 9, 8));
  v.code.push_back(micro(Opcode::op_sub, F32, 10, 9, 1));
  v.code.push_back(micro(Opcode::op_mul, F32, 11, 10, 6));
  v.code.push_back(micro(Opcode::op_mul, F32, 12, 11, 11));
  v.code.push_back(micro(Opcode::op_add, F32, 13, 12, 5));
  v.code.push_back(micro(Opcode::op_mul, F32, 14, 13, 13));
  v.code.push_back(micro(Opcode::op_add, F32, 15, 14, 10));
  v.code.push_back(micro(Opcode::op_store, F32, 0, 0, 15));
  const int64_t row = elements(extents);
  Array out;
  Operand to = over(all, 0, F32, extents, &out, rows);
  to.ref.space = Space::kOut;
  v.stores.push_back(to);
  Program p = kitsune::cpu::test::program({rows}, tile, inputs, {{F32, row * rows}}, {v}, 0);
  return p;
}

// Whether `extents` in a tile of rows are joined, of a state, of what each row has, and of what all rows have.
bool joined(const std::vector<int64_t>& extents, int64_t tile, unsigned each, unsigned repeated) {
  const unsigned all = (2u << extents.size()) - 1;
  std::vector<std::vector<int64_t>> strides;
  Array unused;
  for (unsigned has : {all, each, repeated}) strides.push_back(byte_strides(over(has, 0, F32, extents, &unused, tile)));
  Nest nest = make_nest(extents, strides);
  simplify(nest);
  return short_rows(nest, {4, 4, 4}, 3, tile, kernels().strips->strip).has_value();
}

void test_mixed() {
  unsigned seed = 1;
  for (const std::vector<int64_t>& extents :
       std::vector<std::vector<int64_t>>{{2}, {3}, {4}, {7}, {8}, {16}, {3, 5}, {4, 8}, {2, 3, 2}, {6, 6}}) {
    const unsigned all = (2u << extents.size()) - 1, last = 1u << extents.size();
    for (unsigned each : {1u, all & ~last})
      for (unsigned repeated : {last, all & ~1u})
        for (DType narrow : {BF16, F32}) {
          if (elements(extents) * 2 <= kernels().strips->strip)
            CHECK(joined(extents, 512, each, repeated), "[%s] rows of %lld are no strips", kernels().isa,
                  static_cast<long long>(elements(extents)));
          for (int64_t tile : {512, 259})
            compare_without("short rows", one_part(mixed(extents, 771, tile, narrow, each, repeated)), seed++);
        }
  }
}

// Rows of `row` elements, of arrays in which they are `pitch` apart, and of others in which they are not, chosen by bools and
// scaled with a number for each.
Program pitched(int64_t row, int64_t pitch, int64_t rows, int64_t tile, DType narrow, bool out_apart) {
  const int64_t out_pitch = out_apart ? pitch : row;
  Vector v{{row}, false, {}, {}, {}};
  const std::vector<int64_t> pitches{row, pitch, pitch, 1, 0};
  const DType types[] = {F32, narrow, BOOL, F32, F32};
  std::vector<Array> inputs;
  for (int64_t i = 0; i < 5; ++i) {
    const auto k = static_cast<size_t>(i);
    inputs.push_back({types[k], pitches[k] == 0 ? row : pitches[k] * rows});
    v.loads.push_back(operand(Space::kIn, i, types[k], 0, pitches[k], {pitches[k] == 1 ? 0 : 1}));
    v.code.push_back(micro(Opcode::op_load, compute_type(types[k]), i, i));
  }
  v.code.push_back(micro(Opcode::op_mul, F32, 5, 0, 3));
  v.code.push_back(micro(Opcode::op_add, F32, 6, 5, 1));
  v.code.push_back(micro(Opcode::op_select, F32, 7, 2, 6, 4));
  v.code.push_back(micro(Opcode::op_store, F32, 0, 0, 7));
  v.stores.push_back(operand(Space::kOut, 0, F32, 0, out_pitch, {1}));
  return program({rows}, tile, inputs, {{F32, out_pitch * rows}}, {v}, 0);
}

// Rows of exactly one strip, of more and of fewer: whether they lie apart, and what is computed of them.
void test_rows_that_lie_apart() {
  const int64_t strip = kernels().strips->strip;
  auto apart = [&](int64_t row, int64_t pitch) {
    Nest nest = make_nest({row}, {{4 * row, 4}, {4 * pitch, 4}, {4, 0}, {0, 4}});
    return lie_apart(nest, {4, 4, 4, 4}, row);
  };
  CHECK(apart(strip, strip + 1), "%s", "rows with an element between them");
  CHECK(!apart(strip, strip), "%s", "dense rows, a number for each, and a row for all");
  unsigned seed = 1;
  for (int64_t row : {strip - 1, strip, strip + 1})
    for (int64_t pitch : {row, row + 3, 4 * row})
      for (int64_t tile : {1, 16, 39})
        for (DType narrow : {F32, BF16})
          for (bool out_apart : {false, true})
            compare_without("rows apart", one_part(pitched(row, pitch, 77, tile, narrow, out_apart)), seed++);
}

// What lies further apart than a strip is long stays with the loops over blocks.
void test_far_apart() {
  const Operand column = operand(Space::kIn, 0, F32, 0, 1, {1000}), dense = operand(Space::kOut, 0, F32, 0, 16, {1});
  Nest nest = make_nest({16}, {byte_strides(column), byte_strides(dense)});
  CHECK(!short_rows(nest, {4, 4}, 1, 512, 128), "columns are no window of a strip");
  nest = make_nest({16}, {byte_strides(dense), byte_strides(column)});
  CHECK(!short_rows(nest, {4, 4}, 1, 512, 128), "what is written is dense");
}

void test_folds() {
  std::mt19937 rng(5);
  for (int64_t n = 1; n <= 70; ++n)
    for (int how : {0, 1, 2}) {
      const FoldShortFn fold = kernels().fold_short(how, F32, n);
      if (fold == nullptr) continue;
      for (int64_t count : {1, 3, 16, 37}) {
        const int64_t row = n + count % 3;
        std::vector<float> x(static_cast<size_t>(count * row)), got(static_cast<size_t>(count + 1), 77.0f);
        for (float& v : x) v = static_cast<float>(rng() % 2001) / 1000.0f - 1.0f;
        x[static_cast<size_t>(rng() % x.size())] = 0.0f, x[static_cast<size_t>(rng() % x.size())] = -0.0f;
        if (how != 0 && n % 5 == 0)
          x[static_cast<size_t>(rng() % static_cast<uint32_t>(n))] = std::numeric_limits<float>::quiet_NaN();
        fold(count, n, x.data(), row, got.data());
        for (int64_t r = 0; r < count; ++r) {
          const float* at = x.data() + r * row;
          double want = how == 0 ? 0.0 : at[0], size = 0;
          for (int64_t k = 0; k < n; ++k) {
            want = how == 0                                ? want + at[k]
                   : std::isnan(want) || std::isnan(at[k]) ? NAN
                   : how == 1                              ? std::fmax(want, at[k])
                                                           : std::fmin(want, at[k]);
            size += std::fabs(at[k]);
          }
          const double here = got[static_cast<size_t>(r)];
          const bool right =
              how == 0 ? std::fabs(here - want) <= 1e-6 * size : here == want || (std::isnan(here) && std::isnan(want));
          CHECK(right, "[%s] fold %d of row %lld of %lld: %g, not %g", kernels().isa, how, static_cast<long long>(r),
                static_cast<long long>(n), here, want);
        }
        CHECK(got.back() == 77.0f, "fold %d writes behind its rows", how);
      }
    }
}

}  // namespace
}  // namespace kitsune::cpu::test

int main() {
  using namespace kitsune::cpu;
  using namespace kitsune::cpu::test;
  const char* names[8];
  const int count = available_isas(names, 8);
  test_far_apart();
  for (int i = 0; i < count; ++i) {
    set_isa(names[i]);
    test_mixed();
    test_rows_that_lie_apart();
    test_folds();
  }
  std::printf("short rows: %d checks failed\n", failures);
  return failures == 0 ? 0 : 1;
}
