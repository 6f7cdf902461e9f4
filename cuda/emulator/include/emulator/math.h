// Functions that CUDA has and <cmath> has not, by their C names.
//
// Comes in and goes out: floats. Invariant: the accurate function, as for every other one of <cmath> that kernels call.
#pragma once

#include <cmath>

inline float rsqrtf(float x) { return static_cast<float>(1.0 / std::sqrt(static_cast<double>(x))); }
inline float erfinvf(float y) {
  if (!(std::fabs(y) < 1.0f)) return y == 1.0f ? INFINITY : y == -1.0f ? -INFINITY : NAN;
  // Winitzki's closed form is good to 2e-3 (S. Winitzki 2008, "A handy approximation for the error function and its inverse");
  // three Newton steps on erf in double square that error each.
  const double w = std::log(1.0 - static_cast<double>(y) * y), a = 0.147, t = 2.0 / (3.14159265358979323846 * a) + w / 2.0;
  double x = std::copysign(std::sqrt(std::sqrt(t * t - w / a) - t), static_cast<double>(y));
  for (int i = 0; i < 3; ++i) x -= (std::erf(x) - y) / (1.1283791670955126 * std::exp(-x * x));
  return static_cast<float>(x);
}
