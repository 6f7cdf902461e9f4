#include "reciprocal.h"

#include <cmath>
#include <cstdint>
#include <cstring>

namespace kitsune::cpu {
namespace {

constexpr int64_t kLeast = int64_t{1} << 23, kMost = int64_t{1} << 24;  // of a float's significand as an integer

// 1 / y modulo 2^64, of an odd number, by Newton's iteration.
uint64_t inverse_of_odd(uint64_t y) {
  uint64_t x = y;
  for (int k = 0; k < 6; ++k) x *= 2 - y * x;
  return x;
}

}  // namespace

std::optional<Reciprocal> reciprocal_of(float y) {
  if (!(std::fabs(y) >= 0x1p-20f && std::fabs(y) <= 0x1p40f)) return std::nullopt;
  int exponent;
  const auto integer = static_cast<int64_t>(std::ldexp(std::frexp(std::fabs(y), &exponent), 24));
  if (integer == kLeast) return std::nullopt;
  const double inverse = 1.0 / static_cast<double>(y);
  float high = static_cast<float>(inverse);
  if (std::fabs(static_cast<double>(high)) > std::fabs(inverse)) high = std::nextafter(high, 0.0f);
  const Reciprocal r{high, static_cast<float>(inverse - static_cast<double>(high))};

  // Before its last rounding the sum is within 2^-46 of the quotient, so only one that lies so near to the middle of two floats
  // can be rounded to the wrong one. With x and y as integers of 24 bits and an odd middle of 25 bits, 2^wide x - middle y = rest
  // is at most 8 then. There are few such x.
  int even = 0;
  while (((integer >> even) & 1) == 0) ++even;
  const uint64_t inverse_odd = inverse_of_odd(static_cast<uint64_t>(integer >> even));
  for (const int wide : {24, 25})  // quotients of 1 and more, and smaller ones
    for (int64_t rest = -8; rest <= 8; ++rest) {
      if (rest == 0 || even > 3 || rest % (int64_t{1} << even) != 0) continue;
      const uint64_t period = uint64_t{1} << (wide - even);
      const auto first =
          static_cast<int64_t>((uint64_t(0) - static_cast<uint64_t>(rest / (int64_t{1} << even)) * inverse_odd) & (period - 1));
      for (int64_t middle = first; middle < 2 * kMost; middle += static_cast<int64_t>(period)) {
        if (middle < kMost || middle % 2 == 0) continue;
        const int64_t x = (middle * integer + rest) >> wide;
        if (x < kLeast || x >= kMost) continue;
        const auto value = static_cast<float>(x);
        if (std::fma(value, r.high, value * r.low) != value / y) return std::nullopt;
      }
    }
  return r;
}

}  // namespace kitsune::cpu
