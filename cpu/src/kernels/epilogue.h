// What a matrix product does to its sums before it stores them: the activations, each a functor on one vector of sums.
//
// Comes in: a vector of float32 (of float64 for kNone and kRelu) that is a sum of products plus the bias. Goes out: the same with
// the activation applied. Every gemm (FMA, VDPBF16PS, AMX, BFMMLA) takes its functor from with_activation.
//
// The functions that networks are made of are evaluated as a whole, because a pass for each operation of their definition costs
// more than half as much as the product before them: silu and both forms of gelu are x times a sigmoid of some kind, which one
// exponential of a negative number and one quotient give without cancellation. At most 4 ulp, as the functions of vector_math.h;
// gelu and silu of a negative number also have the error of their exponent's rounding, as the expression that users write has.
//
// Functors with kCoarse are for results that are rounded to bfloat16: their relative error is below 2^-13, 16 times less than that
// rounding, and they take up to a third less time.
#pragma once

#include "vector_math.h"

namespace kitsune::cpu::KITSUNE_ISA {

// x = n ln 2 + r for x <= 0, |r| <= ln 2 / 2 and an integer n >= -151. NaN stays.
struct Reduced {
  VF n, r;
};

// kTwoPieces: r with ln 2 in two pieces, for a relative error that does not grow with x; else it is 2e-9 |x|, where an FMA computes
// it.
template <bool kTwoPieces>
KITSUNE_INLINE Reduced reduce_negative(VF x) {
#if defined(__AVX512F__)
  x = (VF)_mm512_max_ps((__m512)splat<VF>(-104.0f), (__m512)x);  // of a NaN the second operand
#else
  x = choose(x < -104.0f, splat<VF>(-104.0f), x);  // below: rounds to 0
#endif
  VF n = (x * 1.44269504088896341f + kFloatMagic) - kFloatMagic;
#if defined(__FMA__) || defined(__aarch64__)
  if constexpr (!kTwoPieces) return {n, x - n * 0.69314718056f};
#endif
  VF r = x - n * 0.693359375f;  // n times the first is exact
  return {n, r - n * -2.12194440e-4f};
}

// e^x for x <= 0.
template <bool kCoarse, bool kTwoPieces = false>
KITSUNE_INLINE VF exp_of_negative(VF x) {
  // Minimax on |r| <= ln 2 / 2 (relative error 3e-9, coarse 5e-6), by Lawson's iteration in float64.
  static const float coarse[] = {1.0f, 1.0f, 5.0005120039e-1f, 1.6753531992e-1f, 4.1277673095e-2f};
  static const float c[] = {1.0f, 1.0f, 4.9999994039e-1f, 1.6666521132e-1f, 4.1668388993e-2f, 8.3687165752e-3f, 1.3814598788e-3f};
  Reduced reduced = reduce_negative < kTwoPieces && !kCoarse > (x);
  return scale_by_power(kCoarse ? polynomial(reduced.r, coarse) : polynomial(reduced.r, c), reduced.n);
}

// e^x - 1 for x <= 0.
template <bool kCoarse>
KITSUNE_INLINE VF expm1_of_negative(VF x) {
  // As above, with the relative error of e^r - 1: 1.3e-8, coarse 2e-5.
  static const float coarse[] = {1.0f, 5.0001651049e-1f, 1.6749644279e-1f, 4.1610002518e-2f};
  static const float c[] = {1.0f, 4.9999997020e-1f, 1.6666543484e-1f, 4.1667200625e-2f, 8.3665205166e-3f, 1.3882521307e-3f};
  Reduced reduced = reduce_negative<false>(x);
  VF scale = scale_by_power(splat<VF>(1.0f), reduced.n);
  VF slope = kCoarse ? polynomial(reduced.r, coarse) : polynomial(reduced.r, c);
  return scale * (slope * reduced.r) + (scale - 1.0f);
}

KITSUNE_INLINE VF minus_abs(VF x) { return (VF)((VI)x | INT32_MIN); }

// x / y for 1 <= y < 2^20: on AVX-512 by an approximate reciprocal (2^-14, coarse) and one Newton step (1.5 ulp), which takes half
// the time of the division.
template <bool kCoarse>
KITSUNE_INLINE VF divide(VF x, VF y) {
#if defined(__AVX512F__)
  VF guess = (VF)_mm512_rcp14_ps((__m512)y);
  if constexpr (kCoarse) return x * guess;
  return x * (guess + guess * (1.0f - y * guess));
#else
  return x / y;
#endif
}

struct NoActivation {
  template <class V>
  KITSUNE_INLINE V operator()(V v) const {
    return v;
  }
};

struct Relu {
  template <class V>
  KITSUNE_INLINE V operator()(V v) const {
    return v <= V{} ? V{} : v;  // NaN stays, -0 becomes 0
  }
};

// v where it is positive or 0 (or NaN), a v elsewhere.
struct LeakyRelu {
  float a;
  KITSUNE_INLINE VF operator()(VF v) const { return choose(v < 0.0f, v * a, v); }
};

// v where it is positive (or NaN), a (e^v - 1) elsewhere.
template <bool kCoarse>
struct Elu {
  float a;
  KITSUNE_INLINE VF operator()(VF v) const {
    VF minus_one = expm1_of_negative<kCoarse>(choose(v < 0.0f, v, VF{}));
    return choose(v <= 0.0f, copy_sign(minus_one, v) * a, v);
  }
};

// 1 / (1 + e^-v), from e^-|v| so that a very negative v gives its denormal value rather than 1 / inf.
template <bool kCoarse>
struct Logistic {
  KITSUNE_INLINE VF operator()(VF v) const {
    VF e = exp_of_negative<kCoarse, true>(minus_abs(v));
    return divide<kCoarse>(choose(v < 0.0f, e, splat<VF>(1.0f)), 1.0f + e);
  }
};

// v logistic(a v), a > 0.
template <bool kCoarse>
struct Silu {
  float a;
  KITSUNE_INLINE VF operator()(VF v) const {
    VF e = exp_of_negative<kCoarse>(minus_abs(v * a));
    return divide<kCoarse>(choose(v < 0.0f, v * e, v), 1.0f + e);
  }
};

// v (1 + tanh(z / 2)) / 2 = v logistic(z) for z = v (a + b v^2), a > 0, b > 0.
template <bool kCoarse>
struct GeluTanh {
  float a, b;
  KITSUNE_INLINE VF operator()(VF v) const {
    VF e = exp_of_negative<kCoarse>(minus_abs(v * (v * v * b + a)));
    return divide<kCoarse>(choose(v < 0.0f, v * e, v), 1.0f + e);
  }
};

// v erfc(-a v) / 2, a > 0.
template <bool kCoarse>
struct GeluErf {
  float a;
  KITSUNE_INLINE VF operator()(VF v) const {
    // e^(t^2) erfc(t) / 2 = (1 - p H(p)) / 2 with p = t / (t + 2.5): minimax over 0 <= t <= 10.2 (relative error 1e-8 (1 + t^2)),
    // by Lawson's iteration in float64. Beyond, erfc(t) is 0 in float32. Coarse: relative error 2e-5 (1 + t^2).
    static const float coarse[] = {1.4109973907f, -1.7246192694f, 1.1005024910f, -2.6460283995e-1f, -2.5127403438e-2f};
    static const float c[] = {1.4104735851f,     -1.7145202160f,    1.0374736786f,    -1.0022823513e-1f,
                              -1.9008031487e-1f, -1.1725062182e-2f, 1.0894124210e-1f, -4.0394101292e-2f};
    VF t = abs_vector(v * a);
    t = choose(t < 10.2f, t, splat<VF>(10.2f));
    VF p = divide<kCoarse>(t, t + 2.5f);
    VF half = exp_of_negative<kCoarse>(-(t * t)) * (0.5f - p * (kCoarse ? polynomial(p, coarse) : polynomial(p, c)));
    return v * choose(v < 0.0f, half, 1.0f - half);
  }
};

// (1 - e^-2|v|) / (1 + e^-2|v|) with the sign of v; without cancellation, as 1 - e^-2|v| is computed as such.
template <bool kCoarse>
struct Tanh {
  KITSUNE_INLINE VF operator()(VF v) const {
    VF minus_one = expm1_of_negative<kCoarse>(2.0f * minus_abs(v));
    return copy_sign(divide<kCoarse>(minus_one, 2.0f + minus_one), v);
  }
};

// Calls f with the functor of `kind`, whose parameters are a and b (GemmArgs::act_a, act_b); coarse where the results are bfloat16.
template <bool kCoarse = false, class F>
KITSUNE_INLINE void with_activation(Activation kind, float a, float b, F&& f) {
  switch (kind) {
    case Activation::kNone: return f(NoActivation{});
    case Activation::kRelu: return f(Relu{});
    case Activation::kLeakyRelu: return f(LeakyRelu{a});
    case Activation::kElu: return f(Elu<kCoarse>{a});
    case Activation::kLogistic: return f(Logistic<kCoarse>{});
    case Activation::kTanh: return f(Tanh<kCoarse>{});
    case Activation::kSilu: return f(Silu<kCoarse>{a});
    case Activation::kGeluTanh: return f(GeluTanh<kCoarse>{a, b});
    case Activation::kGeluErf: return f(GeluErf<kCoarse>{a});
  }
}

}  // namespace kitsune::cpu::KITSUNE_ISA
