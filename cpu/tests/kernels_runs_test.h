// Runs of rows at offsets against double references: every float type and reduction, runs of one row and of many, NaN, infinities
// and zeros of both signs, rows asked for near and far ahead, where places beyond the last run are known as well.
#pragma once

#include <vector>

#include "kernels_gemm_test.h"

namespace kitsune::cpu::test {

// One column of a run. Zeros count by their sign, +0 above -0.
inline bool folded_right(int how, double got, const std::vector<double>& column, double step) {
  double want = how == 3 ? 1 : how == 0 ? 0 : column[0], size = 0;
  for (size_t i = 0; i < column.size(); ++i) {
    const double x = column[i];
    if (how == 0) want += x, size += std::fabs(x);
    if (how == 3) want *= x, size = std::fabs(want) * double(i + 1);
    if (how == 1 || how == 2) {
      const bool above = x > want || (x == 0 && want == 0 && std::signbit(want));
      const bool below = x < want || (x == 0 && want == 0 && std::signbit(x));
      if (x != x || (want == want && (how == 1 ? above : below))) want = x;
    }
  }
  if (want != want) return got != got;
  if (how == 1 || how == 2) return got == want && std::signbit(got) == std::signbit(want);
  return got == want || std::fabs(got - want) <= step * double(column.size()) * size;
}

inline void test_runs_case(int how, DType type, int64_t width, bool special, Random& random) {
  const KernelTable& kt = kernels();
  const int64_t rows = 150, used = 120, stride = width + 5;
  Guarded x(size_t((rows - 1) * stride + width) * item_size(type));
  const double odd[] = {NAN, INFINITY, -INFINITY, 0.0, -0.0, 0.0, -0.0, -0.0};
  for (int64_t i = 0; i < (rows - 1) * stride + width; ++i) {
    const bool inside = i % stride < width;
    const double number = how == 3 ? 1 + 0.25 * random.symmetric() : random.symmetric();
    set_element(x.get(), type, i, !inside ? NAN : special && random.below(2) == 0 ? odd[random.below(8)] : number);
  }
  std::vector<int64_t> at, start{0};
  for (int64_t i = 0; i < rows; ++i) at.push_back(random.below(rows) * stride * int64_t(item_size(type)));
  while (start.back() < used) start.push_back(std::min(used, start.back() + 1 + random.below(random.below(4) == 0 ? 40 : 3)));
  const int64_t runs = int64_t(start.size()) - 1;
  const DType sum = type == DType::kF64 ? DType::kF64 : DType::kF32;
  const double step = sum == DType::kF64 ? 0x1p-52 : 0x1p-23;
  const Ahead aheads[] = {{}, {used, false}, {used, true}, {rows, false}, {rows, true}};
  for (const Ahead& ahead : aheads) {
    std::vector<std::vector<char>> out(size_t(runs), std::vector<char>(size_t(width + 16) * item_size(sum), char(0x5a)));
    std::vector<void*> into;
    for (auto& row : out) into.push_back(row.data());
    kt.fold_runs(how, type)(runs, start.data(), at.data(), x.get(), width, ahead, into.data());
    int64_t wrong = 0, touched = 0;
    std::vector<double> column;
    for (int64_t r = 0; r < runs; ++r) {
      for (int64_t j = 0; j < width; ++j) {
        column.clear();
        for (int64_t i = start[size_t(r)]; i < start[size_t(r) + 1]; ++i)
          column.push_back(element(x.get() + at[size_t(i)], type, j));
        wrong += !folded_right(how, element(out[size_t(r)].data(), sum, j), column, step);
      }
      for (size_t b = size_t(width) * item_size(sum); b < out[size_t(r)].size(); ++b) touched += out[size_t(r)][b] != 0x5a;
    }
    check(wrong == 0 && touched == 0,
          "runs [%s] how %d type %d width %ld special %d known %ld far %d: %ld wrong, %ld bytes touched", kt.isa, how, int(type),
          long(width), special, long(ahead.known), ahead.far, long(wrong), long(touched));
  }
}

// Whole runs of narrow rows, straight into a table: no row of an index below the first one is touched, those in between get the
// identity.
inline void test_narrow_case(int how, DType type, int64_t width, bool special, Random& random) {
  const KernelTable& kt = kernels();
  const int64_t rows = 90, segments = 60, before = 4;
  const DType sum = type == DType::kF64 ? DType::kF64 : DType::kF32;
  Guarded x(size_t(rows * width) * item_size(type));
  const double odd[] = {NAN, INFINITY, -INFINITY, 0.0, -0.0, 0.0, -0.0, -0.0};
  for (int64_t i = 0; i < rows * width; ++i)
    set_element(x.get(), type, i, special && random.below(2) == 0 ? odd[random.below(8)] : 1 + 0.25 * random.symmetric());
  std::vector<int64_t> index, at;
  for (int64_t i = 0; i < rows; ++i) {
    index.push_back(before + random.below(segments - before));
    at.push_back(i * width * int64_t(item_size(type)));
  }
  std::sort(index.begin(), index.end());
  Guarded table(size_t(segments * width) * item_size(sum));
  for (int64_t i = 0; i < segments * width; ++i) set_element(table.get(), sum, i, 77);
  int64_t filled = before - 1;
  kt.fold_narrow(how, type)(rows, index.data(), at.data(), x.get(), width, table.get(), &filled);
  int64_t wrong = filled != index.back();
  const double identity[] = {0, -INFINITY, INFINITY, 1};
  std::vector<double> column;
  for (int64_t s = 0; s < segments; ++s)
    for (int64_t j = 0; j < width; ++j) {
      const double got = element(table.get(), sum, s * width + j);
      column.clear();
      for (int64_t i = 0; i < rows; ++i)
        if (index[size_t(i)] == s) column.push_back(element(x.get() + at[size_t(i)], type, j));
      if (!column.empty())
        wrong += !folded_right(how, got, column, sum == DType::kF64 ? 0x1p-52 : 0x1p-23);
      else
        wrong += got != (s < before || s > index.back() ? 77 : identity[how]);
    }
  check(wrong == 0, "narrow runs [%s] how %d type %d width %ld special %d: %ld wrong", kt.isa, how, int(type), long(width), special,
        long(wrong));
}

inline void test_runs() {
  Random random;
  const int64_t widths[] = {1, 2, 7, 16, 17, 31, 33, 64, 65, 100, 127, 128, 129, 300};
  for (int how : {0, 1, 2, 3})
    for (DType type : {DType::kF32, DType::kBF16, DType::kF16, DType::kF64})
      for (bool special : {false, true}) {
        if (special && (how == 0 || how == 3)) continue;
        for (int64_t width : widths) test_runs_case(how, type, width, special, random);
        for (int64_t width = 1; width <= kNarrow; ++width) test_narrow_case(how, type, width, special, random);
      }
}

}  // namespace kitsune::cpu::test
