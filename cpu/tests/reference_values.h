// Elements of arrays as doubles, for the reference.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "kitsune_cpu/program.h"

namespace kitsune::cpu::test {

using Bytes = std::vector<char>;

inline double get(DType t, const char* p) {
  auto as = [p](auto v) { return std::memcpy(&v, p, sizeof v), static_cast<double>(v); };
  switch (t) {
    case DType::kBool: return as(uint8_t{});
    case DType::kI8: return as(int8_t{});
    case DType::kI32: return as(int32_t{});
    case DType::kI64: return as(int64_t{});
    case DType::kU32: return as(uint32_t{});
    case DType::kF32: return as(float{});
    case DType::kF64: return as(double{});
    case DType::kBF16: {
      uint16_t half;
      std::memcpy(&half, p, 2);
      uint32_t bits = uint32_t{half} << 16;
      float v;
      std::memcpy(&v, &bits, 4);
      return v;
    }
    case DType::kF16: {
      uint16_t bits;
      std::memcpy(&bits, p, 2);
      const int exponent = bits >> 10 & 31, fraction = bits & 1023;
      double v = exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(1024 + fraction, exponent - 25);
      if (exponent == 31) v = fraction == 0 ? INFINITY : NAN;
      return bits >> 15 != 0 ? -v : v;
    }
    default: throw std::logic_error("the reference does not know this type");
  }
}

inline void set(DType t, char* p, double x) {
  auto as = [p, x](auto v) { v = static_cast<decltype(v)>(x), std::memcpy(p, &v, sizeof v); };
  switch (t) {
    case DType::kBool: return as(uint8_t{});
    case DType::kI8: return as(int8_t{});
    case DType::kI32: return as(int32_t{});
    case DType::kI64: return as(int64_t{});
    case DType::kU32: return x = static_cast<uint32_t>(static_cast<int64_t>(x)), as(uint32_t{});
    case DType::kF32: return as(float{});
    case DType::kF64: return as(double{});
    case DType::kBF16: {
      float v = static_cast<float>(x);
      uint32_t bits;
      std::memcpy(&bits, &v, 4);
      bits = std::isnan(v) ? 0x7FC00000u : bits + 0x7FFF + ((bits >> 16) & 1);
      uint16_t half = static_cast<uint16_t>(bits >> 16);
      std::memcpy(p, &half, 2);
      return;
    }
    case DType::kF16: {
      const double size = std::fabs(x);
      unsigned bits = 0x7C00;  // infinity
      if (std::isnan(x)) {
        bits = 0x7E00;
      } else if (size < 65520) {
        const int exponent = size == 0 ? -14 : std::max(std::ilogb(size), -14);
        bits =
            static_cast<unsigned>(std::nearbyint(std::ldexp(size, 10 - exponent))) + (static_cast<unsigned>(exponent + 14) << 10);
      }
      const auto half = static_cast<uint16_t>(bits | (std::signbit(x) ? 0x8000u : 0u));
      std::memcpy(p, &half, 2);
      return;
    }
    default: throw std::logic_error("the reference does not know this type");
  }
}

inline double identity(Reduction how, DType t) {
  if (how == Reduction::kSum || how == Reduction::kProd) return how == Reduction::kProd;
  if (how == Reduction::kAnd) return t == DType::kBool ? 1 : -1;
  if (how == Reduction::kOr || how == Reduction::kXor) return 0;
  const double lowest = is_float(t) ? -INFINITY : -2147483648.0, highest = is_float(t) ? INFINITY : 2147483647.0;
  return how == Reduction::kMax ? lowest : highest;
}
inline double fold(Reduction how, double a, double b) {
  if (how != Reduction::kSum && how != Reduction::kProd && (std::isnan(a) || std::isnan(b))) return NAN;
  switch (how) {
    case Reduction::kSum: return a + b;
    case Reduction::kProd: return a * b;
    case Reduction::kMax: return std::max(a, b);
    case Reduction::kMin: return std::min(a, b);
    case Reduction::kAnd: return static_cast<double>(static_cast<int64_t>(a) & static_cast<int64_t>(b));
    case Reduction::kOr: return static_cast<double>(static_cast<int64_t>(a) | static_cast<int64_t>(b));
    default: return static_cast<double>(static_cast<int64_t>(a) ^ static_cast<int64_t>(b));
  }
}

// Calls f(index) for every index of a nest of loops, the last one fastest.
template <class F>
void loop(const std::vector<int64_t>& extents, F f) {
  std::vector<int64_t> index(extents.size(), 0);
  for (int64_t left = product(extents); left > 0; --left) {
    f(index);
    for (size_t d = extents.size(); d-- > 0;) {
      if (++index[d] < extents[d]) break;
      index[d] = 0;
    }
  }
}
inline std::vector<int64_t> joined(std::vector<int64_t> a, const std::vector<int64_t>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

}  // namespace kitsune::cpu::test
