// The tests' CHECK: counts, prints the first failures with their values, and never stops.
#pragma once

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
  double uniform() { return double(next() >> 11) * 0x1p-53; }             // [0, 1)
  double symmetric() { return 2 * uniform() - 1; }                        // [-1, 1)
  int64_t below(int64_t n) { return int64_t(next() % uint64_t(n)); }
};

inline float bfloat16_value(uint16_t b) { return bits_as<float>(uint32_t(b) << 16); }

// A slow, obvious rounding of x to a format of `fraction` explicit bits and least exponent `low` (f16: 10, -14; bf16: 7, -126).
double round_to_format(double x, int fraction, int low, double largest);

// binary16 to double, from the definition of the format.
double half_value(uint16_t h);

}  // namespace kitsune::cpu::test
