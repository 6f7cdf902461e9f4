// The element types: C++ type of each DType, rounding to and from the 16-bit floats, and conversion with XLA's semantics.
#pragma once

#include "simd.h"

namespace kitsune::cpu::KITSUNE_ISA {

struct Bool {  // distinct from uint8_t so that templates can tell them apart; storage is a byte, 0 or 1
  uint8_t byte;
};
struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

template <class T>
struct TypeTraits {
  static constexpr bool kFloating = false, kBool = false, kSixteen = false;
};
template <>
struct TypeTraits<Bool> {
  static constexpr bool kFloating = false, kBool = true, kSixteen = false;
};
template <>
struct TypeTraits<float> {
  static constexpr bool kFloating = true, kBool = false, kSixteen = false;
};
template <>
struct TypeTraits<double> : TypeTraits<float> {};
template <>
struct TypeTraits<Half> {
  static constexpr bool kFloating = true, kBool = false, kSixteen = true;
};
template <>
struct TypeTraits<BFloat16> : TypeTraits<Half> {};

template <class A, class B>
struct Same {
  static constexpr bool kValue = false;
};
template <class A>
struct Same<A, A> {
  static constexpr bool kValue = true;
};
template <class A, class B>
constexpr bool kSame = Same<A, B>::kValue;

template <class T>
struct Unsigned {
  using type = T;
};
template <>
struct Unsigned<int8_t> {
  using type = uint8_t;
};
template <>
struct Unsigned<int16_t> {
  using type = uint16_t;
};
template <>
struct Unsigned<int32_t> {
  using type = uint32_t;
};
template <>
struct Unsigned<int64_t> {
  using type = uint64_t;
};
template <class T>
using UnsignedOf = typename Unsigned<T>::type;

template <class T>
constexpr bool kSigned = T(-1) < T(0);

template <class T>
constexpr T max_value() {
  return kSigned<T> ? T((UnsignedOf<T>(1) << (sizeof(T) * 8 - 1)) - 1) : T(-1);
}
template <class T>
constexpr T min_value() {
  return kSigned<T> ? T(UnsignedOf<T>(1) << (sizeof(T) * 8 - 1)) : T(0);
}

template <class To, class From>
KITSUNE_INLINE To bit_cast(From x) {
  static_assert(sizeof(To) == sizeof(From), "same size");
  To y;
  __builtin_memcpy(&y, &x, sizeof y);
  return y;
}

// ---- 16-bit floats. All branch-free, so that loops over them vectorise; NaN stays NaN (quiet).
//
// XLA's threads run with denormals flushed (FTZ and DAZ of MXCSR set), and a denormal f16 is a normal number of f32. So no
// conversion may take one through a denormal float on its way: what is not yet normal is only ever touched as an integer.

KITSUNE_INLINE float to_float(BFloat16 x) { return bit_cast<float>(uint32_t(x.bits) << 16); }

KITSUNE_INLINE BFloat16 to_bfloat16(float x) {
  uint32_t u = bit_cast<uint32_t>(x);
  uint32_t rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  return {uint16_t((u & 0x7fffffff) > 0x7f800000 ? (u >> 16) | 0x40 : rounded)};
}

KITSUNE_INLINE float to_float(Half x) {
  uint32_t magnitude = x.bits & 0x7fff;
  uint32_t bits = (magnitude << 13) + (uint32_t(112) << 23);  // 112 = 127 - 15
  // Below 2^-14: with f16's least exponent and a leading one, less that one; both are normal numbers.
  uint32_t denormal = bit_cast<uint32_t>(bit_cast<float>(bits + (uint32_t(1) << 23)) - 0x1p-14f);
  bits = magnitude < 0x400 ? denormal : bits;
  bits += magnitude >= 0x7c00 ? uint32_t(112) << 23 : 0;  // infinity and NaN: f32's largest exponent
  bits |= magnitude > 0x7c00 ? 0x400000 : 0;
  return bit_cast<float>(bits | uint32_t(x.bits & 0x8000) << 16);
}

KITSUNE_INLINE Half to_half(float x) {
  uint32_t u = bit_cast<uint32_t>(x), sign = (u >> 16) & 0x8000, a = u & 0x7fffffff;
  uint32_t normal = (a + 0xfff + ((a >> 13) & 1) - (uint32_t(112) << 23)) >> 13;  // 112 = 127 - 15
  // Below 2^-14: adding 0.5 puts the unit of a float's last place at 2^-24, the spacing of f16's denormals.
  uint32_t denormal = bit_cast<uint32_t>(bit_cast<float>(a) + 0.5f) - 0x3f000000;
  uint32_t bits = a < 0x38800000 ? denormal : normal;
  bits = a >= 0x477ff000 ? 0x7c00 : bits;  // rounds to 2^16 or beyond
  bits = a > 0x7f800000 ? 0x7e00 | ((a >> 13) & 0x3ff) : bits;
  return {uint16_t(bits | sign)};
}

// double -> float rounded to odd: rounding the result again to 16 bits is then as good as one rounding (Boldo & Melquiond 2008).
// Where denormals are flushed, so is a result below f32's normal numbers (up to its last bit, which no 16-bit type can hold).
KITSUNE_INLINE float to_float_odd(double x) {
  float f = float(x);
  uint32_t bits = bit_cast<uint32_t>(f);
  double back = double(f);
  bool inexact = back != x && x == x;
  bool away = __builtin_fabs(back) > __builtin_fabs(x);
  uint32_t odd = (bits - (away ? 1 : 0)) | 1;
  return bit_cast<float>(inexact ? odd : bits);
}

// ---- convert<To>(x): float -> integer truncates and saturates, NaN -> 0; to bool is != 0; integers wrap.

template <class To, class From>
KITSUNE_INLINE To float_to_integer(From x) {
  // 2^(bits-1) (or 2^bits) is exact in either float type, and so are comparisons with it; the cast below is then always in range.
  constexpr From kEnd = From(uint64_t(1) << (sizeof(To) * 8 - 1)) * (kSigned<To> ? From(1) : From(2));
  constexpr From kBegin = kSigned<To> ? -kEnd : From(0);
  From inside = x > kBegin ? x : kBegin;  // NaN -> kBegin, replaced below
  inside = inside < kEnd ? inside : From(0);
  To result = To(inside);
  result = x >= kEnd ? max_value<To>() : result;
  return x == x ? result : To(0);
}

template <class To, class From>
KITSUNE_INLINE To convert(From x) {
  if constexpr (kSame<To, From>) {
    return x;
  } else if constexpr (TypeTraits<From>::kBool) {
    return convert<To>(uint8_t(x.byte != 0));
  } else if constexpr (kSame<From, Half> || kSame<From, BFloat16>) {
    return convert<To>(to_float(x));
  } else if constexpr (TypeTraits<To>::kBool) {
    return Bool{uint8_t(x != From(0))};
  } else if constexpr (kSame<To, Half> && kSame<From, double>) {
    return to_half(to_float_odd(x));
  } else if constexpr (kSame<To, BFloat16> && kSame<From, double>) {
    return to_bfloat16(to_float_odd(x));
  } else if constexpr (kSame<To, Half>) {
    return to_half(float(x));
  } else if constexpr (kSame<To, BFloat16>) {
    return to_bfloat16(float(x));
  } else if constexpr (TypeTraits<From>::kFloating && !TypeTraits<To>::kFloating) {
    return float_to_integer<To>(x);
  } else {
    return To(x);
  }
}

// Calls f with a value of the C++ type of `t`: f(TypeTag<T>{}).
template <class T>
struct TypeTag {
  using type = T;
};

template <class R, class F>
KITSUNE_INLINE R with_type(DType t, F f) {
  switch (t) {
    case DType::kBool: return f(TypeTag<Bool>{});
    case DType::kI8: return f(TypeTag<int8_t>{});
    case DType::kI16: return f(TypeTag<int16_t>{});
    case DType::kI32: return f(TypeTag<int32_t>{});
    case DType::kI64: return f(TypeTag<int64_t>{});
    case DType::kU8: return f(TypeTag<uint8_t>{});
    case DType::kU16: return f(TypeTag<uint16_t>{});
    case DType::kU32: return f(TypeTag<uint32_t>{});
    case DType::kU64: return f(TypeTag<uint64_t>{});
    case DType::kF16: return f(TypeTag<Half>{});
    case DType::kBF16: return f(TypeTag<BFloat16>{});
    case DType::kF32: return f(TypeTag<float>{});
    case DType::kF64: return f(TypeTag<double>{});
  }
  return R{};
}

// The same for operands of products, all of which are floats (program_check.cc).
template <class R, class F>
KITSUNE_INLINE R with_float(DType t, F f) {
  switch (t) {
    case DType::kF16: return f(TypeTag<Half>{});
    case DType::kBF16: return f(TypeTag<BFloat16>{});
    case DType::kF32: return f(TypeTag<float>{});
    case DType::kF64: return f(TypeTag<double>{});
    default: return R{};
  }
}

}  // namespace kitsune::cpu::KITSUNE_ISA
