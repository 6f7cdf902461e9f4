// Numbers by which many are divided, known when a program is planned, whose quotients take two multiplications.
#pragma once

#include <optional>

namespace kitsune::cpu {

struct Reciprocal {
  float high, low;  // of one sign; their sum is 1 / y to 2^-46 of it
};

// x / y, rounded, is fma(x, high, x * low) for each float x whose quotient is above 2^-60, for infinities, zeros and NaN
// (Brisebarre, Muller and Raina, "Accelerating correctly rounded floating-point division when the divisor is known in advance",
// 2004). Nothing where that is wrong for some x, which is so for one y of thirteen, or where y is a power of two, or not of a
// moderate magnitude.
std::optional<Reciprocal> reciprocal_of(float y);

}  // namespace kitsune::cpu
