// The C library's functions that kernels call, and those that CUDA has and it has not, by their C names.
//
// Comes in and goes out: floats. Invariant: the accurate function, as for every other one of <math.h> that kernels call.
#pragma once

// <math.h> of the C library alone: libstdc++ puts <cmath> in its place, half of all that a kernel would include.
#ifdef _GLIBCXX_INCLUDE_NEXT_C_HEADERS
#include <math.h>
#else
#define _GLIBCXX_INCLUDE_NEXT_C_HEADERS
#include <math.h>
#undef _GLIBCXX_INCLUDE_NEXT_C_HEADERS
#endif

inline float rsqrtf(float x) { return static_cast<float>(1.0 / sqrt(static_cast<double>(x))); }
inline float erfinvf(float y) {
  if (!(fabsf(y) < 1.0f)) return y == 1.0f ? INFINITY : y == -1.0f ? -INFINITY : NAN;
  // Winitzki's closed form is good to 2e-3 (S. Winitzki 2008, "A handy approximation for the error function and its inverse");
  // three Newton steps on erf in double square that error each.
  const double w = log(1.0 - static_cast<double>(y) * y), a = 0.147, t = 2.0 / (3.14159265358979323846 * a) + w / 2.0;
  double x = copysign(sqrt(sqrt(t * t - w / a) - t), static_cast<double>(y));
  for (int i = 0; i < 3; ++i) x -= (erf(x) - y) / (1.1283791670955126 * exp(-x * x));
  return static_cast<float>(x);
}
