// Scalar arithmetic of the executor's own loops (scans, sums of lanes), with the kernels' semantics: NaN wins, +0 > -0, and a
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
