// Scalar arithmetic of the executor's own loops (scans, sums of strands), with the kernels' semantics: NaN wins, +0 > -0, and a
// denormal counts as a zero on threads that flush denormals, as XLA's do.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace kitsune::cpu {

// x, or the zero of its sign where x is denormal and this thread takes denormals for zeros: what arithmetic on x gives. On the
// bits, for a compiler knows that a number equal to 0 is 0.
template <class T>
T flushed(T x) {
  if constexpr (std::is_floating_point_v<T>) {
    using Bits = std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>;
    Bits bits;
    std::memcpy(&bits, &x, sizeof x);
    bits = x == 0 ? bits & ~(~Bits{0} >> 1) : bits;
    std::memcpy(&x, &bits, sizeof x);
  }
  return x;
}

// x rounded to float32, also to a denormal one on a thread that would flush it: constants keep their value wherever they are read.
inline float float_constant(double x) {
  if (!(std::fabs(x) < 0x1p-126)) return static_cast<float>(x);
  uint32_t bits = static_cast<uint32_t>(std::lrint(std::fabs(x) * 0x1p149)) | (std::signbit(x) ? 0x80000000u : 0u);
  float y;
  std::memcpy(&y, &bits, sizeof y);
  return y;
}

template <bool Maximum, class T>
T extremum(T a, T b) {
  if constexpr (std::is_floating_point_v<T>) {
    if (a != a) return a;
    if (b != b) return b;
    if (a == b) return flushed(std::signbit(a) == Maximum ? b : a);
  }
  return flushed((Maximum ? a > b : a < b) ? a : b);
}

}  // namespace kitsune::cpu
