// What instructions of strips (strips.h) do to a vector: bit for bit as the loops over scalars (pointwise.h). A bool is a lane of
// ones or of zeros.
#pragma once

#include "vector_ops.h"

namespace kitsune::cpu::KITSUNE_ISA::strips {

#define KITSUNE_VECTOR_UNARY(name, T, result)    \
  struct name {                                  \
    static KITSUNE_INLINE VF apply(VF operand) { \
      const T x = (T)operand;                    \
      return (VF)(result);                       \
    }                                            \
  };
#define KITSUNE_VECTOR_BINARY(name, T, result)          \
  struct name {                                         \
    static KITSUNE_INLINE VF apply(VF left, VF right) { \
      const T x = (T)left, y = (T)right;                \
      return (VF)(result);                              \
    }                                                   \
  };

KITSUNE_VECTOR_UNARY(NegF, VF, -x)
KITSUNE_VECTOR_UNARY(AbsF, VF, abs_vector(x))
KITSUNE_VECTOR_UNARY(SignF, VF, choose(x > 0.0f, splat<VF>(1.0f), choose(x < 0.0f, splat<VF>(-1.0f), x + x)))
KITSUNE_VECTOR_UNARY(IsFiniteF, VF, abs_vector(x) <= 0x1.fffffep127f)
KITSUNE_VECTOR_UNARY(SqrtF, VF, square_root(x))
KITSUNE_VECTOR_UNARY(RsqrtF, VF, rsqrt(x))
KITSUNE_VECTOR_UNARY(SquareF, VF, x* x)
KITSUNE_VECTOR_UNARY(NegI, VU, 0u - x)
KITSUNE_VECTOR_UNARY(AbsI, VI, x < 0 ? (VI)(0u - (VU)x) : x)
KITSUNE_VECTOR_UNARY(NotI, VI, ~x)

KITSUNE_VECTOR_BINARY(AddF, VF, x + y)
KITSUNE_VECTOR_BINARY(SubF, VF, x - y)
KITSUNE_VECTOR_BINARY(MulF, VF, x* y)
KITSUNE_VECTOR_BINARY(DivF, VF, x / y)
KITSUNE_VECTOR_BINARY(EqF, VF, x == y)
KITSUNE_VECTOR_BINARY(NeF, VF, x != y)
KITSUNE_VECTOR_BINARY(LtF, VF, x < y)
KITSUNE_VECTOR_BINARY(LeF, VF, x <= y)

KITSUNE_VECTOR_BINARY(AddI, VU, x + y)
KITSUNE_VECTOR_BINARY(SubI, VU, x - y)
KITSUNE_VECTOR_BINARY(MulI, VU, x* y)
KITSUNE_VECTOR_BINARY(AndI, VU, x& y)
KITSUNE_VECTOR_BINARY(OrI, VU, x | y)
KITSUNE_VECTOR_BINARY(XorI, VU, x ^ y)
KITSUNE_VECTOR_BINARY(EqI, VU, x == y)
KITSUNE_VECTOR_BINARY(NeI, VU, x != y)
KITSUNE_VECTOR_BINARY(LtI, VI, x < y)
KITSUNE_VECTOR_BINARY(LeI, VI, x <= y)
KITSUNE_VECTOR_BINARY(LtU, VU, x < y)
KITSUNE_VECTOR_BINARY(LeU, VU, x <= y)
KITSUNE_VECTOR_BINARY(MaxI, VI, x > y ? x : y)
KITSUNE_VECTOR_BINARY(MinI, VI, x < y ? x : y)
KITSUNE_VECTOR_BINARY(MaxU, VU, x > y ? x : y)
KITSUNE_VECTOR_BINARY(MinU, VU, x < y ? x : y)
KITSUNE_VECTOR_BINARY(ShiftLeftI, VU, y < 32u ? x << (y & 31u) : VU{})
KITSUNE_VECTOR_BINARY(ShiftRightLogicalI, VU, y < 32u ? x >> (y & 31u) : VU{})
KITSUNE_VECTOR_BINARY(ShiftRightArithmeticI, VU, (VI)x >> (VI)(y < 32u ? y : VU{} + 31u))
KITSUNE_VECTOR_BINARY(SameB, VI, ~(x ^ y))

// The high halves of products of 32 bits: of lanes of even number, and of those behind them.
KITSUNE_INLINE VUL wide_product(VUL x, VUL y) {
#if defined(__AVX512F__)
  return (VUL)_mm512_mul_epu32((__m512i)x, (__m512i)y);
#elif defined(__AVX2__)
  return (VUL)_mm256_mul_epu32((__m256i)x, (__m256i)y);
#else
  return (x & 0xffffffffu) * (y & 0xffffffffu);
#endif
}
template <bool Signed>
struct MulHighI {
  static KITSUNE_INLINE VF apply(VF left, VF right) {
    const VU x = (VU)left, y = (VU)right;
    const VUL even = wide_product((VUL)x, (VUL)y), odd = wide_product((VUL)x >> 32, (VUL)y >> 32);
    VU r = (VU)(even >> 32 | (odd & 0xffffffff00000000u));
    if constexpr (Signed) r -= ((VU)((VI)x >> 31) & y) + ((VU)((VI)y >> 31) & x);
    return (VF)r;
  }
};

struct ExpF {
  static KITSUNE_INLINE VF apply(VF x) { return exp(x); }
};

template <bool Maximum>
struct ExtremumF {
  static KITSUNE_INLINE VF apply(VF x, VF y) {
    const VU ux = (VU)x, uy = (VU)y;
    VF r = choose(Maximum ? x > y : x < y, x, y);
    r = choose(r == 0.0f, (VF)((Maximum ? ux & uy : ux | uy) & 0x80000000u), r);
    return choose(x != x, x, r);
  }
};

struct Select {
  static KITSUNE_INLINE VF apply(VF predicate, VF on_false, VF on_true) {
    return (VF)(((VI)on_true & (VI)predicate) | ((VI)on_false & ~(VI)predicate));
  }
};
struct ClampF {
  static KITSUNE_INLINE VF apply(VF low, VF x, VF high) { return ExtremumF<false>::apply(ExtremumF<true>::apply(low, x), high); }
};
struct ClampI {
  static KITSUNE_INLINE VF apply(VF low, VF x, VF high) { return MinI::apply(MaxI::apply(low, x), high); }
};
struct ClampU {
  static KITSUNE_INLINE VF apply(VF low, VF x, VF high) { return MinU::apply(MaxU::apply(low, x), high); }
};

// Conversions.
KITSUNE_VECTOR_UNARY(BoolToF, VI, x&(VI)splat<VF>(1.0f))
KITSUNE_VECTOR_UNARY(BoolToI, VI, x & 1)
KITSUNE_VECTOR_UNARY(FToBool, VF, x != 0.0f)
KITSUNE_VECTOR_UNARY(IToBool, VI, x != 0)
KITSUNE_VECTOR_UNARY(IToF, VI, __builtin_convertvector(x, VF))
KITSUNE_VECTOR_UNARY(UToF, VU, __builtin_convertvector(x, VF))
KITSUNE_VECTOR_UNARY(Same, VF, x)
#undef KITSUNE_VECTOR_UNARY
#undef KITSUNE_VECTOR_BINARY

}  // namespace kitsune::cpu::KITSUNE_ISA::strips
