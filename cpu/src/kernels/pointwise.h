// What each opcode does to one element: arithmetic, comparisons, shifts, rounding. Semantics are lax's (see bytecode.py); all code
// is branch-free where it can be, so that the loops over it vectorise.
#pragma once

#include "scalar.h"

namespace kitsune::cpu::KITSUNE_ISA {

// The operation of one or two numbers that an opcode stands for. A specialisation needs no line in vector_ops.h:
//   template <> struct Operation<Opcode::op_name> { static float apply(float x); static double apply(double x); };
// If `apply` is a template, it must compile for all types of integers and floats.
template <Opcode>
struct Operation;

template <class T>
struct Bits;
template <>
struct Bits<float> {
  using type = uint32_t;
  static constexpr int kMantissa = 23, kExponent = 8;
};
template <>
struct Bits<double> {
  using type = uint64_t;
  static constexpr int kMantissa = 52, kExponent = 11;
};

// x, or the zero of its sign where x is denormal and this thread takes denormals for zeros (only there does one equal 0). What
// merely selects or recognises its operand, and would hand a denormal on, so gives what arithmetic on it gives.
template <class T>
KITSUNE_INLINE T flushed(T x) {
  using U = typename Bits<T>::type;
  U u = bit_cast<U>(x);
  return bit_cast<T>(U(x == T(0) ? u & ~(U(-1) >> 1) : u));
}

// The unsigned type at least as wide as int, so that small types are not promoted to (overflowing) int.
template <class T>
struct Wrap {
  using type = uint32_t;
};
template <>
struct Wrap<int64_t> {
  using type = uint64_t;
};
template <>
struct Wrap<uint64_t> {
  using type = uint64_t;
};
template <class T>
using WrapOf = typename Wrap<T>::type;

#define KITSUNE_UNARY(name, floating, integer) \
  struct name {                                \
    template <class T>                         \
    static KITSUNE_INLINE T apply(T x) {       \
      if constexpr (TypeTraits<T>::kFloating)  \
        return floating;                       \
      else                                     \
        return T(integer);                     \
    }                                          \
  };

KITSUNE_UNARY(Neg, -x, WrapOf<T>(0) - WrapOf<T>(x))
// The sum of zeros is the zero of their sign, and that of denormals where they are flushed (and so are neither above nor below 0).
KITSUNE_UNARY(Sign, x > T(0) ? T(1) : x < T(0) ? T(-1) : x + x, (x > T(0)) - (kSigned<T> && x < T(0)))
KITSUNE_UNARY(Square, x* x, WrapOf<T>(x) * WrapOf<T>(x))
#undef KITSUNE_UNARY

struct Abs {
  template <class T>
  static KITSUNE_INLINE T apply(T x) {
    if constexpr (TypeTraits<T>::kFloating) {
      using U = typename Bits<T>::type;
      return bit_cast<T>(U(bit_cast<U>(x) & (U(-1) >> 1)));
    } else {
      return kSigned<T> && x < T(0) ? T(WrapOf<T>(0) - WrapOf<T>(x)) : x;
    }
  }
};

struct Floor {
  static KITSUNE_INLINE float apply(float x) { return __builtin_floorf(x); }
  static KITSUNE_INLINE double apply(double x) { return __builtin_floor(x); }
};
struct Ceil {
  static KITSUNE_INLINE float apply(float x) { return __builtin_ceilf(x); }
  static KITSUNE_INLINE double apply(double x) { return __builtin_ceil(x); }
};
struct RoundAway {  // halves away from zero
  template <class T>
  static KITSUNE_INLINE T apply(T x) {
    T a = Abs::apply(x), f = Floor::apply(a);
    T r = a - f >= T(0.5) ? f + T(1) : f;
    using U = typename Bits<T>::type;
    U sign = bit_cast<U>(x) & ~(U(-1) >> 1);
    return a == a ? bit_cast<T>(U(bit_cast<U>(r) | sign)) : x;
  }
};
struct RoundEven {
  static KITSUNE_INLINE float apply(float x) { return __builtin_rintf(x); }
  static KITSUNE_INLINE double apply(double x) { return __builtin_rint(x); }
};
struct Sqrt {
  static KITSUNE_INLINE float apply(float x) { return __builtin_sqrtf(x); }
  static KITSUNE_INLINE double apply(double x) { return __builtin_sqrt(x); }
};
struct Rsqrt {
  static KITSUNE_INLINE float apply(float x) { return 1.0f / __builtin_sqrtf(x); }
  static KITSUNE_INLINE double apply(double x) { return 1.0 / __builtin_sqrt(x); }
};

struct IsFinite {
  template <class T>
  static KITSUNE_INLINE Bool apply(T x) {
    return {uint8_t(Abs::apply(x) <= (kSame<T, float> ? T(0x1.fffffep127) : T(0x1.fffffffffffffp1023)))};
  }
};

struct Not {
  template <class T>
  static KITSUNE_INLINE T apply(T x) {
    if constexpr (TypeTraits<T>::kBool)
      return {uint8_t(x.byte ^ 1)};
    else
      return T(~x);
  }
};

struct PopCount {
  template <class T>
  static KITSUNE_INLINE T apply(T x) {
    return T(__builtin_popcountll(uint64_t(UnsignedOf<T>(x))));
  }
};
struct CountLeadingZeros {
  template <class T>
  static KITSUNE_INLINE T apply(T x) {
    constexpr int kBits = sizeof(T) * 8;
    uint64_t u = uint64_t(UnsignedOf<T>(x));
    return T(u == 0 ? kBits : __builtin_clzll(u) - (64 - kBits));
  }
};

#define KITSUNE_ARITHMETIC(name, op)            \
  struct name {                                 \
    template <class T>                          \
    static KITSUNE_INLINE T apply(T x, T y) {   \
      if constexpr (TypeTraits<T>::kFloating)   \
        return x op y;                          \
      else                                      \
        return T(WrapOf<T>(x) op WrapOf<T>(y)); \
    }                                           \
  };
KITSUNE_ARITHMETIC(Add, +)
KITSUNE_ARITHMETIC(Sub, -)
KITSUNE_ARITHMETIC(Mul, *)
#undef KITSUNE_ARITHMETIC

struct Div {
  template <class T>
  static KITSUNE_INLINE T apply(T x, T y) {
    if constexpr (TypeTraits<T>::kFloating) {
      return x / y;
    } else {
      if (y == T(0)) return T(-1);
      if (kSigned<T> && y == T(-1)) return T(WrapOf<T>(0) - WrapOf<T>(x));  // min / -1 wraps to min
      return T(x / y);
    }
  }
};
struct Rem {  // the sign of the dividend
  static KITSUNE_INLINE float apply(float x, float y) { return __builtin_fmodf(x, y); }
  static KITSUNE_INLINE double apply(double x, double y) { return __builtin_fmod(x, y); }
  template <class T>
  static KITSUNE_INLINE T apply(T x, T y) {
    if (y == T(0)) return x;
    if (kSigned<T> && y == T(-1)) return T(0);
    return T(x % y);
  }
};

// IEEE 754-2019 maximum and minimum: NaN wins, and +0 > -0. Of a result that equals 0 only the sign counts, for it may be a
// denormal that this thread takes for a zero; the other operand is then a zero too, or of the sign that does not count in it.
template <bool Maximum>
struct Extremum {
  template <class T>
  static KITSUNE_INLINE T apply(T x, T y) {
    if constexpr (TypeTraits<T>::kFloating) {
      using U = typename Bits<T>::type;
      constexpr U kSign = ~(U(-1) >> 1);
      U ux = bit_cast<U>(x), uy = bit_cast<U>(y);
      T r = (Maximum ? x > y : x < y) ? x : y;
      r = r == T(0) ? bit_cast<T>(U((Maximum ? ux & uy : ux | uy) & kSign)) : r;
      return x != x ? x : r;
    } else {
      return (Maximum ? x > y : x < y) ? x : y;
    }
  }
};
using Max = Extremum<true>;
using Min = Extremum<false>;

struct NextAfter {
  static KITSUNE_INLINE float apply(float x, float y) { return __builtin_nextafterf(x, y); }
  static KITSUNE_INLINE double apply(double x, double y) { return __builtin_nextafter(x, y); }
};

__extension__ typedef __int128 Signed128;
__extension__ typedef unsigned __int128 Unsigned128;

struct MultiplyHigh {  // the high half of the product in twice the width
  template <class Wide, class T>
  static KITSUNE_INLINE T in(T x, T y) {
    return T((Wide(x) * Wide(y)) >> (sizeof(T) * 8));
  }
  template <class T>
  static KITSUNE_INLINE T apply(T x, T y) {
    if constexpr (sizeof(T) < 8)
      return kSigned<T> ? in<int64_t>(x, y) : in<uint64_t>(x, y);
    else
      return kSigned<T> ? in<Signed128>(x, y) : in<Unsigned128>(x, y);
  }
};

#define KITSUNE_LOGIC(name, op)               \
  struct name {                               \
    template <class T>                        \
    static KITSUNE_INLINE T apply(T x, T y) { \
      return T(x op y);                       \
    }                                         \
  };
KITSUNE_LOGIC(And, &)
KITSUNE_LOGIC(Or, |)
KITSUNE_LOGIC(Xor, ^)
#undef KITSUNE_LOGIC

// An amount outside [0, bits), a negative one included, shifts everything out.
struct ShiftLeft {
  template <class T>
  static KITSUNE_INLINE T apply(T x, T y) {
    WrapOf<T> amount = WrapOf<T>(UnsignedOf<T>(y));
    return amount < sizeof(T) * 8 ? T(WrapOf<T>(UnsignedOf<T>(x)) << (amount & (sizeof(T) * 8 - 1))) : T(0);
  }
};
struct ShiftRightLogical {
  template <class T>
  static KITSUNE_INLINE T apply(T x, T y) {
    WrapOf<T> amount = WrapOf<T>(UnsignedOf<T>(y));
    return amount < sizeof(T) * 8 ? T(WrapOf<T>(UnsignedOf<T>(x)) >> (amount & (sizeof(T) * 8 - 1))) : T(0);
  }
};
template <class T>
struct SignedOf {
  using type = T;
};
template <>
struct SignedOf<uint8_t> {
  using type = int8_t;
};
template <>
struct SignedOf<uint16_t> {
  using type = int16_t;
};
template <>
struct SignedOf<uint32_t> {
  using type = int32_t;
};
template <>
struct SignedOf<uint64_t> {
  using type = int64_t;
};
struct ShiftRightArithmetic {  // on the bits: an unsigned type's top bit counts as the sign, as in XLA
  template <class T>
  static KITSUNE_INLINE T apply(T x, T y) {
    UnsignedOf<T> amount = UnsignedOf<T>(y);
    UnsignedOf<T> clipped = amount < sizeof(T) * 8 ? amount : UnsignedOf<T>(sizeof(T) * 8 - 1);
    return T(typename SignedOf<T>::type(x) >> clipped);
  }
};

#define KITSUNE_COMPARISON(name, op)             \
  struct name {                                  \
    template <class T>                           \
    static KITSUNE_INLINE Bool apply(T x, T y) { \
      return {uint8_t(x op y)};                  \
    }                                            \
  };
KITSUNE_COMPARISON(Eq, ==)
KITSUNE_COMPARISON(Ne, !=)
KITSUNE_COMPARISON(Lt, <)
KITSUNE_COMPARISON(Le, <=)
#undef KITSUNE_COMPARISON

// The place of a float in IEEE 754's total order, as an integer of its width: -NaN < -inf < ... < -0 < 0 < ... < inf < NaN.
template <class T>
KITSUNE_INLINE auto total_order(T x) {
  using U = typename Bits<T>::type;
  U u = bit_cast<U>(x);
  return typename SignedOf<U>::type(u ^ ((U(0) - (u >> (sizeof(T) * 8 - 1))) >> 1));
}
template <class Compare>
struct TotalOrder {
  template <class T>
  static KITSUNE_INLINE Bool apply(T x, T y) {
    return Compare::apply(total_order(x), total_order(y));
  }
};

struct Clamp {
  template <class T>
  static KITSUNE_INLINE T apply(T low, T x, T high) {
    return Min::apply(Max::apply(low, x), high);
  }
};

// x^y for the integer y = imm[0] by repeated squaring; a negative y of a float is 1 / x^|y|, as lax does.
template <class T>
KITSUNE_INLINE T integer_power(T x, int64_t y) {
  uint64_t remaining = y < 0 ? uint64_t(0) - uint64_t(y) : uint64_t(y);
  T result = T(1), base = x;
  for (; remaining; remaining >>= 1) {
    if (remaining & 1) result = Mul::apply(result, base);
    base = Mul::apply(base, base);
  }
  return y < 0 ? Div::apply(T(1), result) : result;
}

// Rounds to a float of `exponent` and `mantissa` bits and back, as XLA's reduce-precision: nearest even, overflow to infinity,
// numbers below the smaller format's normal range to zero.
template <class T>
KITSUNE_INLINE T reduce_precision(T x, int exponent, int mantissa) {
  using U = typename Bits<T>::type;
  constexpr int kMantissa = Bits<T>::kMantissa, kExponent = Bits<T>::kExponent;
  constexpr U kBias = (U(1) << (kExponent - 1)) - 1, kExponentMask = ((U(1) << kExponent) - 1) << kMantissa;
  U u = bit_cast<U>(x), r = u;
  if (mantissa < kMantissa) {
    int drop = kMantissa - mantissa;
    U last = U(1) << drop;
    r += ((r >> drop) & 1) + (last >> 1) - 1;
    r &= ~(last - 1);
  }
  if (exponent < kExponent) {
    U bias = (U(1) << (exponent - 1)) - 1;
    U field = r & kExponentMask, sign = u & ~(U(-1) >> 1);
    r = field > ((kBias + bias) << kMantissa) ? sign | kExponentMask : r;
    r = field <= ((kBias - bias) << kMantissa) ? sign : r;
  }
  return x == x ? bit_cast<T>(r) : x;
}

}  // namespace kitsune::cpu::KITSUNE_ISA
