// Weight gradients C += X^T Y against double references: awkward shapes, every type, strides; nothing outside is touched.
#pragma once

#include "kernels_gemm_test.h"

namespace kitsune::cpu::test {

struct OuterCase {
  int64_t R, M, N;
  DType type;
  bool strided;
  Product product = Product::kBest;
};

// `first`: C is written, and what was there is NaN.
inline void test_outer_into(const OuterCase& t, bool first, Random& random) {
  const KernelTable& kt = kernels();
  const int64_t ldx = t.M + (t.strided ? 3 : 0), ldy = t.N + (t.strided ? 7 : 0);
  const DType sum = t.type == DType::kF64 ? DType::kF64 : DType::kF32;
  const int64_t xs = (t.R - 1) * ldx + t.M, ys = (t.R - 1) * ldy + t.N, cs = t.M * t.N, guard = 64;
  Guarded x(size_t(xs) * item_size(t.type)), y(size_t(ys) * item_size(t.type));
  for (int64_t i = 0; i < xs; ++i) set_element(x.get(), t.type, i, i % ldx < t.M ? random.symmetric() : NAN);
  for (int64_t i = 0; i < ys; ++i) set_element(y.get(), t.type, i, i % ldy < t.N ? random.symmetric() : NAN);
  std::vector<char> c(size_t(cs + 2 * guard) * item_size(sum), char(0x5a));
  char* c0 = c.data() + size_t(guard) * item_size(sum);
  std::vector<double> before(size_t(t.M * t.N));
  for (int64_t i = 0; i < t.M * t.N; ++i) {
    set_element(c0, sum, i, first ? NAN : random.symmetric());
    before[size_t(i)] = first ? 0 : element(c0, sum, i);
  }
  OuterArgs args{t.R, t.M, t.N, x.get(), y.get(), t.type, kt.panel_for(t.type, t.product, {t.M, t.N, t.R}), ldx, ldy, c0, nullptr};
  AlignedBuffer scratch(kt.outer_scratch_bytes(args));
  std::memset(scratch.data, 0xff, kt.outer_scratch_bytes(args));  // NaN, as every type
  args.scratch = scratch.data;
  args.first = first;
  kt.outer(args);
  end_of_call(kt);
  const double step = sum == DType::kF64 ? 0x1p-53 : 0x1p-24;
  int64_t wrong = 0, touched = 0;
  for (int64_t i = 0; i < 2 * guard; ++i) {
    const char* p = c0 + (i < guard ? i - guard : cs + i - guard) * int64_t(item_size(sum));
    for (size_t b = 0; b < item_size(sum); ++b) touched += p[b] != 0x5a;
  }
  for (int64_t i = 0; i < cs; ++i) {
    const int64_t m = i / t.N, n = i % t.N, at = sum_offset(t.M, t.N, m, n);
    double want = before[size_t(at)], size = std::fabs(want);
    for (int64_t r = 0; r < t.R; ++r) {
      double product = element(x.get(), t.type, r * ldx + m) * element(y.get(), t.type, r * ldy + n);
      want += product;
      size += std::fabs(product);
    }
    wrong += !(std::fabs(element(c0, sum, at) - want) <= (t.R + 2) * step * size);
  }
  check(wrong == 0 && touched == 0,
        "outer [%s] R %ld M %ld N %ld type %d strided %d product %d first %d: %ld wrong, %ld bytes outside touched", kt.isa,
        long(t.R), long(t.M), long(t.N), int(t.type), t.strided, int(t.product), first, long(wrong), long(touched));
}

inline void test_outer_case(const OuterCase& t, Random& random) {
  for (bool first : {false, true}) test_outer_into(t, first, random);
}

inline void test_outer() {
  Random random;
  const int64_t sizes[] = {1, 2, 15, 16, 17, 33, 50, 70};
  const DType types[] = {DType::kBF16, DType::kF32, DType::kBF16, DType::kF16, DType::kBF16, DType::kF64};
  int64_t turn = 0;
  for (int64_t R : {1, 2, 3, 31, 32, 45, 97})
    for (int64_t M : sizes)
      for (int64_t N : sizes) {
        test_outer_case({R, M, N, types[turn % 6], turn % 2 == 0, Product(turn / 2 % kNumProducts)}, random);
        ++turn;
      }
  for (DType type : {DType::kF32, DType::kBF16, DType::kF16, DType::kF64})
    for (int64_t M = 1; M <= 26; ++M) test_outer_case({6, M, 34, type, true}, random);  // every remainder of the blocks
  // Panels enough for blocks of X to be copied, on the widest vectors too; not a whole one in the end, and blocks of two heights.
  for (DType type : {DType::kF32, DType::kF64, DType::kF16})
    for (int64_t R : {1, 7, 33})
      for (int64_t M : {12, 13, 25, 47}) test_outer_case({R, M, 401, type, R == 7}, random);
  // Columns of X that are interleaved in parts, equal ones or not.
  for (int64_t M : {2047, 2048, 4100, 6001}) test_outer_case({M == 2048 ? 257 : 131, M, 33, DType::kBF16, M % 2 == 0}, random);
  for (int i = 0; i < kNumProducts; ++i) test_outer_case({128, 80, 96, DType::kBF16, false, Product(i)}, random);
}

}  // namespace kitsune::cpu::test
