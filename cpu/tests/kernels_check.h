// The tests' CHECK: counts, prints the first failures with their values, and never stops.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>

namespace kitsune::cpu::test {

struct Counts {
  int64_t passed = 0, failed = 0;
};

inline Counts& counts() {
  static Counts c;
  return c;
}

__attribute__((format(printf, 2, 3))) inline bool check(bool ok, const char* format, ...) {
  if (ok) {
    ++counts().passed;
    return true;
  }
  if (++counts().failed <= 60) {
    va_list args;
    va_start(args, format);
    std::printf("FAILED ");
    std::vprintf(format, args);
    std::printf("\n");
    va_end(args);
  }
  return false;
}

template <class To, class From>
To bits_as(From x) {
  static_assert(sizeof(To) == sizeof(From));
  To y;
  std::memcpy(&y, &x, sizeof y);
  return y;
}

// A small deterministic generator (xorshift64*, Marsaglia and Vigna).
struct Random {
  uint64_t state = 0x9e3779b97f4a7c15;
  uint64_t next() {
    state ^= state >> 12;
    state ^= state << 25;
    state ^= state >> 27;
    return state * 0x2545f4914f6cdd1d;
  }
  double uniform() { return double(next() >> 11) * 0x1p-53; }  // [0, 1)
  double symmetric() { return 2 * uniform() - 1; }             // [-1, 1)
  int64_t below(int64_t n) { return int64_t(next() % uint64_t(n)); }
};

inline float bfloat16_value(uint16_t b) { return bits_as<float>(uint32_t(b) << 16); }

// The bits of x rounded (nearest, ties to even) to a 16-bit format, from the definition: scaled to an integer number of the
// format's spacing, which is 2^-fraction of the leading power of two, but at least that at `low`, the least normal exponent.
inline uint16_t reference_bits(double x, int fraction, int low) {
  const int exponent_bits = 15 - fraction;
  const uint16_t infinity = uint16_t(((1 << exponent_bits) - 1) << fraction), sign = std::signbit(x) ? 0x8000 : 0;
  if (x != x) return uint16_t(infinity | 1 << (fraction - 1));
  double a = std::fabs(x);
  if (std::isinf(a)) return infinity | sign;
  int e = a == 0 ? low : std::max(std::ilogb(a), low);
  int64_t units = int64_t(std::nearbyint(std::ldexp(a, fraction - e)));  // < 2^(fraction + 1), or equal
  int64_t bits = units + (int64_t(e - low) << fraction);                 // the implicit one carries into the exponent field
  return uint16_t(bits >= infinity ? infinity : bits) | sign;
}

inline uint16_t reference_half(double x) { return reference_bits(x, 10, -14); }
inline uint16_t reference_bfloat16(double x) { return reference_bits(x, 7, -126); }

inline double half_value(uint16_t h) {
  int e = (h >> 10) & 31, f = h & 1023;
  double a = e == 31 ? (f ? NAN : INFINITY) : e == 0 ? std::ldexp(f, -24) : std::ldexp(1024 + f, e - 25);
  return h & 0x8000 ? -a : a;
}

}  // namespace kitsune::cpu::test
