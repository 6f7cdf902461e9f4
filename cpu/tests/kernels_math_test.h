// Floats: every elementary function against long double over sweeps of all exponents; special values; the rare special functions.
#pragma once

#include <vector>

#include "kernels_check.h"
#include "kitsune_cpu/kernels.h"
#include "kitsune_cpu/opcodes.h"

namespace kitsune::cpu::test {

using Reference = long double (*)(long double);
using Reference2 = long double (*)(long double, long double);

inline long double reference_logistic(long double x) { return x < 0 ? expl(x) / (1 + expl(x)) : 1 / (1 + expl(-x)); }
inline long double reference_rsqrt(long double x) { return 1 / sqrtl(x); }

// Distance of y from `exact` in units of the last place of a float of that size.
inline double ulp_error(float y, long double exact) {
  float rounded = float(exact);
  if (exact != exact) return y != y ? 0 : INFINITY;
  if (y != y) return INFINITY;
  if (std::isinf(rounded) || std::isinf(y)) {
    if (y == rounded) return 0;
    // One of them overflowed: measured at the largest float, where half a unit more is what rounds to infinity.
    long double limit = 0x1p128L, a = std::isinf(y) ? std::copysign(limit, (long double)y) : y;
    long double b = std::isinf(exact) ? std::copysign(INFINITY, exact) : exact;
    return double(fabsl(a - b) / 0x1p104L);
  }
  int e = exact == 0 ? -126 : std::max(ilogbl(exact), -126);
  return double(fabsl((long double)y - exact) / ldexpl(1, e - 23));
}

// Floats of every exponent and both signs, `per_exponent` of each, plus the neighbours of exponents, halves and multiples of pi
// / 4.
inline std::vector<float> dense_floats(int per_exponent) {
  std::vector<float> x;
  Random random;
  for (uint32_t e = 0; e < 256; ++e) {
    for (int i = 0; i < per_exponent; ++i) {
      uint32_t f = i == 0 ? 0 : i == 1 ? 0x7fffff : i == 2 ? 1 : i == 3 ? 0x400000 : uint32_t(random.next() >> 41);
      x.push_back(bits_as<float>(e << 23 | f));
      x.push_back(bits_as<float>(0x80000000 | e << 23 | f));
    }
  }
  for (int i = 0; i < per_exponent * 20; ++i) {
    float m = float(i * 0.78539816339744830962);
    for (float v :
         {m, std::nextafter(m, 0.0f), std::nextafter(m, 1e30f), float(random.symmetric() * 100), float(random.symmetric() * 12)}) {
      x.push_back(v);
      x.push_back(-v);
    }
  }
  return x;
}

inline void check_ulps(const char* name, VectorFn f, const std::vector<float>& x, const std::vector<float>* z, Reference r1,
                       Reference2 r2, double limit) {
  if (!check(f != nullptr, "%s [%s]: no kernel", name, kernels().isa)) return;
  std::vector<float> y(x.size());
  f(int64_t(x.size()), y.data(), x.data(), z ? z->data() : nullptr, nullptr, nullptr, nullptr);
  double worst = -1;
  size_t where = 0, wrong_sign = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    long double exact = r1 ? r1(x[i]) : r2(x[i], (*z)[i]);
    double e = ulp_error(y[i], exact);
    if (e > worst) worst = e, where = i;
    if (y[i] == 0 && exact == 0 && std::signbit(y[i]) != std::signbit(exact)) ++wrong_sign, where = i;
  }
  check(worst <= limit, "%s [%s]: %.2f ulp at %a (%a): got %a, expected %La", name, kernels().isa, worst, double(x[where]),
        z ? double((*z)[where]) : 0.0, double(y[where]), r1 ? r1(x[where]) : r2(x[where], (*z)[where]));
  check(wrong_sign == 0, "%s [%s]: %zu zeros of the wrong sign, one at %a", name, kernels().isa, wrong_sign, double(x[where]));
}

// By the kernel for doubles, which test_special_functions holds against known values.
inline long double reference_erf_inv(long double x) {
  const double e = double(x);
  double y;
  kernels().vector(Opcode::op_erf_inv, DType::kF64)(1, &y, &e, nullptr, nullptr, nullptr, nullptr);
  return y;
}

inline void test_elementary() {
  struct Case {
    const char* name;
    Opcode op;
    Reference f;
    double limit;
  };
  const Case cases[] = {
      {"exp", Opcode::op_exp, expl, 2},
      {"exp2", Opcode::op_exp2, exp2l, 2},
      {"expm1", Opcode::op_expm1, expm1l, 1},
      {"log", Opcode::op_log, logl, 2},
      {"log1p", Opcode::op_log1p, log1pl, 1},
      {"sqrt", Opcode::op_sqrt, sqrtl, 0.5},
      {"rsqrt", Opcode::op_rsqrt, reference_rsqrt, 2},
      {"cbrt", Opcode::op_cbrt, cbrtl, 1},
      {"logistic", Opcode::op_logistic, reference_logistic, 4},
      {"tanh", Opcode::op_tanh, tanhl, 4},
      {"sin", Opcode::op_sin, sinl, 2},
      {"cos", Opcode::op_cos, cosl, 2},
      {"tan", Opcode::op_tan, tanl, 1},
      {"asin", Opcode::op_asin, asinl, 1},
      {"acos", Opcode::op_acos, acosl, 1},
      {"atan", Opcode::op_atan, atanl, 1},
      {"sinh", Opcode::op_sinh, sinhl, 1},
      {"cosh", Opcode::op_cosh, coshl, 1},
      {"asinh", Opcode::op_asinh, asinhl, 1},
      {"acosh", Opcode::op_acosh, acoshl, 1},
      {"atanh", Opcode::op_atanh, atanhl, 1},
      {"erf", Opcode::op_erf, erfl, 4},
      {"erfc", Opcode::op_erfc, erfcl, 1},
      {"erf_inv", Opcode::op_erf_inv, reference_erf_inv, 1},
  };
  std::vector<float> x = dense_floats(64);
  for (const Case& c : cases) {
    check_ulps(c.name, kernels().vector(c.op, DType::kF32), x, nullptr, c.f, nullptr, c.limit);
    VectorFn f64 = kernels().vector(c.op, DType::kF64);
    double in[3] = {0.25, 0.75, 1.5}, out[3];
    if (!check(f64 != nullptr, "%s f64: no kernel", c.name)) continue;
    f64(3, out, in, nullptr, nullptr, nullptr, nullptr);
    for (int i = 0; i < 3; ++i) {
      double exact = double(c.f(in[i]));
      check(out[i] == exact || std::fabs(out[i] - exact) <= 1e-15 * std::fabs(exact) || (exact != exact && out[i] != out[i]),
            "%s f64 at %g: %.17g, expected %.17g", c.name, in[i], out[i], exact);
    }
  }
  // Two arguments: every pairing of special values, and a random cloud.
  std::vector<float> a, b;
  const float values[] = {0.0f, -0.0f, 1.0f,   -1.0f,   0.5f,  2.0f,     -2.0f,     3.0f, -3.0f,
                          2.5f, -0.5f, 1e-40f, -1e-40f, 1e38f, INFINITY, -INFINITY, NAN,  1e9f};
  for (float u : values) {
    for (float v : values) a.push_back(u), b.push_back(v);
  }
  Random random;
  for (int i = 0; i < 20000; ++i) {
    a.push_back(float(std::exp(random.symmetric() * 60)) * (i % 8 ? 1.0f : -1.0f));
    b.push_back(float(random.symmetric() * (i % 2 ? 1.5 : 40)));
  }
  check_ulps("pow", kernels().vector(Opcode::op_pow, DType::kF32), a, &b, nullptr, powl, 1);
  check_ulps("atan2", kernels().vector(Opcode::op_atan2, DType::kF32), a, &b, nullptr, atan2l, 1);
  check_ulps("rem", kernels().vector(Opcode::op_rem, DType::kF32), a, &b, nullptr, fmodl, 0);
}

// Values from DLMF, SciPy 1.14 or closed forms; relative error in double.
inline void test_special_functions() {
  struct Case {
    const char* name;
    Opcode op;
    double a, b, c, expected, tolerance;
  };
  const double pi = 3.14159265358979323846, euler = 0.57721566490153286061;
  const Case cases[] = {
      {"lgamma", Opcode::op_lgamma, 0.5, 0, 0, 0.5 * std::log(pi), 1e-14},
      {"lgamma", Opcode::op_lgamma, -0.5, 0, 0, std::log(2 * std::sqrt(pi)), 1e-14},
      {"digamma", Opcode::op_digamma, 1, 0, 0, -euler, 1e-14},
      {"digamma", Opcode::op_digamma, 0.5, 0, 0, -euler - 2 * std::log(2.0), 1e-14},
      {"digamma", Opcode::op_digamma, -0.5, 0, 0, 2 - euler - 2 * std::log(2.0), 1e-13},
      {"digamma", Opcode::op_digamma, -1e-20, 0, 0, 1e20, 1e-14},
      {"digamma", Opcode::op_digamma, -2 - 0x1p-40, 0, 0, 0x1p40 + 0.92278433509846713939, 1e-12},
      {"digamma", Opcode::op_digamma, 1.46, 0, 0, -0.0015805619870834521, 1e-13},
      {"digamma", Opcode::op_digamma, 1.4375, 0, 0, -0.023613544005297899, 1e-13},
      {"erf_inv", Opcode::op_erf_inv, 0.5, 0, 0, 0.47693627620446987338, 1e-14},
      {"erf_inv", Opcode::op_erf_inv, -0.999, 0, 0, -2.3267537655135246, 1e-12},
      {"erf_inv", Opcode::op_erf_inv, 1e-12, 0, 0, 0.88622692545275801e-12, 1e-14},
      {"i0e", Opcode::op_bessel_i0e, 1, 0, 0, 1.2660658777520083356 * std::exp(-1.0), 1e-14},
      {"i0e", Opcode::op_bessel_i0e, 100, 0, 0, 0.03994437929909668265, 1e-13},
      {"i0e", Opcode::op_bessel_i0e, 1e308, 0, 0, 3.989422804014327e-155, 1e-14},
      {"i1e", Opcode::op_bessel_i1e, -1, 0, 0, -0.56515910399248502721 * std::exp(-1.0), 1e-14},
      {"igamma", Opcode::op_igamma, 1, 2, 0, 1 - std::exp(-2.0), 1e-14},
      {"igamma", Opcode::op_igamma, 0.5, 0.49, 0, std::erf(0.7), 1e-14},
      {"igammac", Opcode::op_igammac, 0.5, 9, 0, std::erfc(3.0), 1e-13},
      {"igammac", Opcode::op_igammac, 3, 5, 0, std::exp(-5.0) * (1 + 5 + 12.5), 1e-14},
      {"zeta", Opcode::op_zeta, 2, 1, 0, pi * pi / 6, 1e-14},
      {"zeta", Opcode::op_zeta, 4, 2, 0, pi * pi * pi * pi / 90 - 1, 1e-13},
      {"polygamma", Opcode::op_polygamma, 1, 0.5, 0, pi * pi / 2, 1e-14},
      {"polygamma", Opcode::op_polygamma, 2, 1, 0, -2 * 1.2020569031595942854, 1e-14},
      {"betainc", Opcode::op_regularized_incomplete_beta, 2, 3, 0.4, 0.5248, 1e-13},
      {"betainc", Opcode::op_regularized_incomplete_beta, 0.5, 0.5, 0.25, 2 / pi * std::asin(0.5), 1e-13},
      {"betainc", Opcode::op_regularized_incomplete_beta, 2, 3, 0.9, 0.9963, 1e-13},
  };
  for (const Case& c : cases) {
    VectorFn f = kernels().vector(c.op, DType::kF64);
    if (!check(f != nullptr, "%s: no kernel", c.name)) continue;
    double y;
    f(1, &y, &c.a, &c.b, &c.c, nullptr, nullptr);
    check(std::fabs(y - c.expected) <= c.tolerance * std::fabs(c.expected), "%s(%g, %g, %g) = %.17g, expected %.17g", c.name, c.a,
          c.b, c.c, y, c.expected);
  }
  // P + Q = 1 and erf_inv(erf(x)) = x where both are well conditioned, over a grid.
  VectorFn p = kernels().vector(Opcode::op_igamma, DType::kF64), q = kernels().vector(Opcode::op_igammac, DType::kF64);
  for (double a : {0.1, 1.0, 7.5, 99.0, 101.0, 1000.0, 1e5}) {
    for (double ratio : {0.5, 0.9, 0.999, 1.0, 1.001, 1.1, 2.0}) {
      double x = a * ratio, lower, upper;
      p(1, &lower, &a, &x, nullptr, nullptr, nullptr);
      q(1, &upper, &a, &x, nullptr, nullptr, nullptr);
      check(std::fabs(lower + upper - 1) < 1e-12 && lower >= 0 && upper >= 0, "igamma(%g, %g): %g + %g", a, x, lower, upper);
    }
  }
  VectorFn inverse = kernels().vector(Opcode::op_erf_inv, DType::kF64);
  for (double x = -2.5; x <= 2.5; x += 0.03125) {
    double e = std::erf(x), y;
    inverse(1, &y, &e, nullptr, nullptr, nullptr, nullptr);
    check(std::fabs(y - x) <= 1e-12 * std::fabs(x), "erf_inv(erf(%g)) = %.17g", x, y);
  }
}

}  // namespace kitsune::cpu::test
