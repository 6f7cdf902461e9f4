// Weight gradients C += X^T Y against double references: awkward shapes, every type, rows with gaps; nothing outside is touched.
#pragma once

#include "kernels_gemm_test.h"

namespace kitsune::cpu::test {

struct OuterCase {
  int64_t R, M, N;
  DType dtype;
  Product product;
};

// X and Y lie at the very end of their allocations, with NaN between their rows; C has a guard value in and around its rows.
inline void test_outer_case(const OuterCase& t, Random& random) {
  const KernelTable& kt = kernels();
  const Panel panel = kt.panel_for(t.dtype, t.product, {t.M, t.N, t.R});
  const int64_t ldx = t.M + 3, ldy = t.N + 1, ldc = t.N + 2, guard = 32;
  const DType sum_type = panel == Panel::kF64 ? DType::kF64 : DType::kF32;
  const int64_t x_elements = (t.R - 1) * ldx + t.M, y_elements = (t.R - 1) * ldy + t.N, c_elements = t.M * ldc + 2 * guard;
  std::unique_ptr<char[]> x(new char[size_t(x_elements) * item_size(t.dtype)]),
      y(new char[size_t(y_elements) * item_size(t.dtype)]);
  std::unique_ptr<char[]> c(new char[size_t(c_elements) * item_size(sum_type)]);
  for (int64_t i = 0; i < x_elements; ++i) set_element(x.get(), t.dtype, i, i % ldx < t.M ? random.symmetric() : NAN);
  for (int64_t i = 0; i < y_elements; ++i) set_element(y.get(), t.dtype, i, i % ldy < t.N ? random.symmetric() : NAN);
  for (int64_t i = 0; i < c_elements; ++i) set_element(c.get(), sum_type, i, 0.25);

  OuterArgs args{t.R, t.M,    t.N, x.get(), y.get(), t.dtype, panel, ldx, ldy, c.get() + size_t(guard) * item_size(sum_type),
                 ldc, nullptr};
  AlignedBuffer scratch(kt.outer_scratch_bytes(args));
  std::memset(scratch.data, 0xff, kt.outer_scratch_bytes(args));  // NaN in every type
  args.scratch = scratch.data;
  kt.outer(args);

  int64_t wrong = 0, touched = 0;
  double worst = 0;
  const double step = sum_type == DType::kF64 ? 0x1p-53 : 0x1p-24;
  for (int64_t i = 0; i < c_elements; ++i) {
    const int64_t m = (i - guard) / ldc, n = (i - guard) % ldc;
    const double got = element(c.get(), sum_type, i);
    if (i < guard || m >= t.M || n >= t.N) {
      touched += got != 0.25;
      continue;
    }
    double sum = 0.25, size = 0.25;
    for (int64_t r = 0; r < t.R; ++r) {
      double product = element(x.get(), t.dtype, r * ldx + m) * element(y.get(), t.dtype, r * ldy + n);
      sum += product;
      size += std::fabs(product);
    }
    if (!(std::fabs(got - sum) <= double(t.R + 2) * step * size)) ++wrong, worst = std::max(worst, std::fabs(got - sum));
  }
  check(wrong == 0 && touched == 0,
        "outer [%s] R %ld M %ld N %ld type %d product %d: %ld wrong (by %g), %ld elements outside touched", kt.isa, long(t.R),
        long(t.M), long(t.N), int(t.dtype), int(t.product), long(wrong), worst, long(touched));
}

inline void test_outer() {
  Random random;
  int64_t turn = 0;
  const DType types[] = {DType::kF32, DType::kBF16, DType::kF16, DType::kF64};
  for (int64_t R : {1, 2, 3, 4, 5, 31, 130}) {
    for (int64_t M : {1, 2, 3, 11, 13, 25, 50}) {
      for (int64_t N : {1, 2, 3, 5, 8, 31, 33, 70}) {
        test_outer_case({R, M, N, types[turn++ % 4], Product::kBest}, random);
        if (turn % 3 == 0) test_outer_case({R, M, N, DType::kBF16, turn % 2 ? Product::kWidened : Product::kDots}, random);
      }
    }
  }
  for (DType type : types) {
    for (int64_t M = 1; M <= 26; ++M) test_outer_case({6, M, 34, type, Product::kBest}, random);  // every remainder of the blocks
  }
}

}  // namespace kitsune::cpu::test
