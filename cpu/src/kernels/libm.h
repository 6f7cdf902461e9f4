// libm's functions as plain functions of this ISA's namespace, to be named as template arguments and pointers.
#pragma once

#include "simd.h"

namespace kitsune::cpu::KITSUNE_ISA {

#define KITSUNE_LIBM(name) \
  inline double libm_##name(double x) { return __builtin_##name(x); }
KITSUNE_LIBM(exp)
KITSUNE_LIBM(exp2)
KITSUNE_LIBM(expm1)
KITSUNE_LIBM(log)
KITSUNE_LIBM(log1p)
KITSUNE_LIBM(cbrt)
KITSUNE_LIBM(tanh)
KITSUNE_LIBM(sin)
KITSUNE_LIBM(cos)
KITSUNE_LIBM(tan)
KITSUNE_LIBM(asin)
KITSUNE_LIBM(acos)
KITSUNE_LIBM(atan)
KITSUNE_LIBM(sinh)
KITSUNE_LIBM(cosh)
KITSUNE_LIBM(asinh)
KITSUNE_LIBM(acosh)
KITSUNE_LIBM(atanh)
KITSUNE_LIBM(erf)
KITSUNE_LIBM(erfc)
#undef KITSUNE_LIBM
inline double libm_pow(double x, double y) { return __builtin_pow(x, y); }
inline double libm_atan2(double y, double x) { return __builtin_atan2(y, x); }
inline float libm_powf(float x, float y) { return __builtin_powf(x, y); }
inline float libm_fmodf(float x, float y) { return __builtin_fmodf(x, y); }
inline float libm_atan2f(float y, float x) { return __builtin_atan2f(y, x); }
inline double libm_logistic(double x) {
  double e = __builtin_exp(-__builtin_fabs(x));
  return (x < 0 ? e : 1) / (1 + e);
}

}  // namespace kitsune::cpu::KITSUNE_ISA
