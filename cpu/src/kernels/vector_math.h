// Elementary functions of float vectors on the hot path of networks: exp, exp2, log, tanh, logistic, erf, sin, cos, rsqrt.
//
// Branch-free except sin, cos and tan beyond |x| = 1e6 (rare: libm's full reduction, lane by lane). At most 4 ulp over all floats,
// denormals included where the thread does not flush them; infinities and NaN as in C. Polynomials without a note are Cephes'
// (S. L. Moshier, single precision library).
//
// XLA's threads flush denormals. There a function takes a denormal for the zero of its sign, and only those that near 0 are their
// operand (tanh, sin, tan, expm1) hand it on, as XLA's do.
#pragma once

#include "libm.h"
#include "wide_math.h"

namespace kitsune::cpu::KITSUNE_ISA {

KITSUNE_INLINE VF choose(VI mask, VF yes, VF no) { return mask ? yes : no; }

template <int N>
KITSUNE_INLINE VF polynomial(VF x, const float (&c)[N]) {
  VF y = splat<VF>(c[N - 1]);
  KITSUNE_UNROLL
  for (int i = N - 2; i >= 0; --i) y = y * x + c[i];
  return y;
}

constexpr float kFloatMagic = 0x1.8p23f;  // adding it rounds to an integer, in the low bits of the sum
constexpr float kFloatInfinity = __builtin_inff();

// y 2^n for an integer n in [-150, 130]; the result may be denormal, rounded once, or overflow.
KITSUNE_INLINE VF scale_by_power(VF y, VF n) {
#if defined(__AVX512F__)
  return (VF)_mm512_scalef_ps((__m512)y, (__m512)n);
#else
  VI i = (VI)((VU)(n + kFloatMagic) - (VU)splat<VF>(kFloatMagic));
  VU half = (VU)(i >> 1);
  return y * (VF)((half + 127) << 23) * (VF)(((VU)i - half + 127) << 23);
#endif
}

// e^r for |r| <= ln 2 / 2.
KITSUNE_INLINE VF exp_reduced(VF r) {
  static const float c[] = {5.0000001201e-1f, 1.6666665459e-1f, 4.1665795894e-2f,
                            8.3334519073e-3f, 1.3981999507e-3f, 1.9875691500e-4f};
  return polynomial(r, c) * (r * r) + r + 1.0f;
}

KITSUNE_INLINE VF exp(VF x) {
  x = choose(x < -104.0f, splat<VF>(-104.0f), x);  // below: rounds to 0. NaN compares false and stays
  x = choose(x > 89.0f, splat<VF>(89.0f), x);      // above: overflows
  VF n = (x * 1.44269504088896341f + kFloatMagic) - kFloatMagic;
  VF r = x - n * 0.693359375f;  // ln 2 in two pieces; n times the first is exact
  r = r - n * -2.12194440e-4f;
  return scale_by_power(exp_reduced(r), n);
}

KITSUNE_INLINE VF exp2(VF x) {
  x = choose(x < -151.0f, splat<VF>(-151.0f), x);
  x = choose(x > 129.0f, splat<VF>(129.0f), x);
  VF n = (x + kFloatMagic) - kFloatMagic;
  return scale_by_power(exp_reduced((x - n) * 0.693147180559945309f), n);
}

KITSUNE_INLINE VF log(VF x) {
  static const float c[] = {3.3333331174e-1f,  -2.4999993993e-1f, 2.0000714765e-1f,  -1.6668057665e-1f, 1.4249322787e-1f,
                            -1.2420140846e-1f, 1.1676998740e-1f,  -1.1514610310e-1f, 7.0376836292e-2f};
  VI denormal = x < 0x1p-126f;
  VF s = choose(denormal, x * 0x1p25f, x);
  VI offset = (VI)((VU)s - 0x3f3504f3);  // bits of sqrt(1/2)
  VI exponent = (offset >> 23) - (denormal & 25);
  VF f = (VF)((VU)s - ((VU)offset & 0xff800000)) - 1.0f;
  VF e = __builtin_convertvector(exponent, VF);
  VF f2 = f * f;
  VF r = f * f2 * polynomial(f, c);
  r = r + e * -2.12194440e-4f;
  r = r - 0.5f * f2;
  r = (f + r) + e * 0.693359375f;
  r = choose(x == kFloatInfinity, x, r);
  r = choose(x == 0.0f, splat<VF>(-kFloatInfinity), r);
  return choose(x >= 0.0f, r, splat<VF>(__builtin_nanf("")));
}

// ---- Functions made of e^x for x <= 0, which needs fewer cases.
//
// With kCoarse the relative error is below 2^-13 (and takes less time), for results that are then rounded to bfloat16.

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

// e^r: minimax on |r| <= ln 2 / 2 (relative error 5e-6), by Lawson's iteration in float64.
constexpr float kCoarseExp[] = {1.0f, 1.0f, 5.0005120039e-1f, 1.6753531992e-1f, 4.1277673095e-2f};

// e^x for x <= 0.
template <bool kCoarse, bool kTwoPieces = false>
KITSUNE_INLINE VF exp_of_negative(VF x) {
  // As kCoarseExp, with a relative error of 3e-9.
  static const float c[] = {1.0f, 1.0f, 4.9999994039e-1f, 1.6666521132e-1f, 4.1668388993e-2f, 8.3687165752e-3f, 1.3814598788e-3f};
  Reduced reduced = reduce_negative < kTwoPieces && !kCoarse > (x);
  return scale_by_power(kCoarse ? polynomial(reduced.r, kCoarseExp) : polynomial(reduced.r, c), reduced.n);
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

// 1 / (1 + e^-x), from e^-|x| so that very negative x gives its denormal value rather than 1 / inf.
template <bool kCoarse>
KITSUNE_INLINE VF logistic_as(VF x) {
  VF e = exp_of_negative<kCoarse, true>(minus_abs(x));
  return divide<kCoarse>(choose(x < 0.0f, e, splat<VF>(1.0f)), 1.0f + e);
}

KITSUNE_INLINE VF logistic(VF x) { return logistic_as<false>(x); }

// (1 - e^-2|x|) / (1 + e^-2|x|) with the sign of x; without cancellation, as 1 - e^-2|x| is computed as such.
template <bool kCoarse>
KITSUNE_INLINE VF tanh_as(VF x) {
  VF minus_one = expm1_of_negative<kCoarse>(2.0f * minus_abs(x));
  return copy_sign(divide<kCoarse>(minus_one, 2.0f + minus_one), x);
}

KITSUNE_INLINE VF tanh(VF x) { return choose(x == 0.0f, x, tanh_as<false>(x)); }

// x P(x^2) below 0.93; 1 - e^(-t Q(t)) above, Q fitted to -log(erfc t) / t over [0.9, 4] (9e-8, weighted by erfc t <= 0.2).
KITSUNE_INLINE VF erf(VF x) {
  static const float small_c[] = {0.1283791665624985f,   -0.3761263296126926f,   0.1128368306936103f,   -0.026858688451197224f,
                                  0.005199235030261142f, -0.000812203866262259f, 8.282021688411657e-05f};
  static const float large_c[] = {1.1288887673613623f,  0.634194741922897f,      0.1077922315537649f,    -0.025093434597504297f,
                                  0.00428439239058539f, -0.0004940896084840745f, 3.376522548815964e-05f, -1.0118451902870421e-06f};
  VF a = abs_vector(x), s = x * x;
  VF t = choose(a > 4.0f, splat<VF>(4.0f), a);  // erf(4) rounds to 1; NaN stays
  VF large = copy_sign(1.0f - exp(-t * polynomial(t, large_c)), x);
  VF small = x * polynomial(s, small_c) + x;
  return choose(a < 0.93f, small, large);
}

KITSUNE_INLINE VF rsqrt(VF x) { return 1.0f / square_root(x); }

// ---- sine and cosine

// Replaces the lanes of *y under the mask by libm's value: computed in double for one operand, in float for two.
using DoubleFunction = double (*)(double);
using FloatFunction2 = float (*)(float, float);

inline __attribute__((noinline)) void mend_scalars(const int32_t* mask, const float* x, float* y, DoubleFunction f) {
  for (int i = 0; i < kFloats; ++i) {
    if (mask[i]) y[i] = float(f(double(x[i])));
  }
}

inline __attribute__((noinline)) void mend_scalars(const int32_t* mask, const float* x, const float* y, float* r,
                                                   FloatFunction2 f) {
  for (int i = 0; i < kFloats; ++i) {
    if (mask[i]) r[i] = f(x[i], y[i]);
  }
}

KITSUNE_INLINE void mend_lanes(VI mask, VF x, VF* y, DoubleFunction f) {
  int32_t m[kFloats];
  float in[kFloats], out[kFloats];
  store_vector(m, mask);
  store_vector(in, x);
  store_vector(out, *y);
  mend_scalars(m, in, out, f);
  *y = load_vector<VF>(out);
}

KITSUNE_INLINE void mend_lanes(VI mask, VF x, VF y, VF* r, FloatFunction2 f) {
  int32_t m[kFloats];
  float in[kFloats], in2[kFloats], out[kFloats];
  store_vector(m, mask);
  store_vector(in, x);
  store_vector(in2, y);
  store_vector(out, *r);
  mend_scalars(m, in, in2, out, f);
  *r = load_vector<VF>(out);
}

// x = n pi/2 + r, |r| <= pi/4 (and a little more, where x is near the middle between two multiples); the low bits of q are n's.
struct Quarter {
  VF r;
  VI q;
};

KITSUNE_INLINE Quarter reduce_half_pi(VF x) {
#if defined(__AVX512F__)
  // Up to here the first difference is exact, and rounding the second one is r's whole error: the three pieces have 73 bits.
  if (__builtin_expect(!any(~(abs_vector(x) < 8192.0f)), 1)) {
    VF t = x * 0.636619772367581343f + kFloatMagic;
    const __m512 n = (__m512)(t - kFloatMagic);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0x1.921fb6p+0f), (__m512)x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-0x1.777a5cp-25f), r);
    return {(VF)_mm512_fnmadd_ps(n, _mm512_set1_ps(-0x1.ee59dap-50f), r), (VI)t};
  }
#endif
  // The reduction in double keeps r's relative error at 2^-24 even next to a multiple of pi/2.
  wide::Reduced low = wide::reduce_half_pi(widen(low_half(x))), high = wide::reduce_half_pi(widen(high_half(x)));
  return {join(narrow(low.r), narrow(high.r)), join(__builtin_convertvector(low.n, HI), __builtin_convertvector(high.n, HI))};
}

// Of r in x = n pi/2 + r; the low bits of q are n's.
struct Circle {
  VF sine, cosine;
  VI q;
};

KITSUNE_INLINE Circle circle(Quarter x) {
  static const float sc[] = {-1.6666654611e-1f, 8.3321608736e-3f, -1.9515295891e-4f};
  static const float cc[] = {4.166664568298827e-2f, -1.388731625493765e-3f, 2.443315711809948e-5f};
  const VF r = x.r, s = r * r;
  return {r + r * (s * polynomial(s, sc)), 1.0f - 0.5f * s + s * s * polynomial(s, cc), x.q};
}

template <bool Cosine>
KITSUNE_INLINE VF sin_or_cos(VF x, const Circle& at) {
  const VI q = Cosine ? at.q + 1 : at.q;
  VF y = choose((q & 1) != 0, at.cosine, at.sine);
  y = (VF)((VU)y ^ (((VU)q & 2) << 30));
  if constexpr (!Cosine) y = choose(x == 0.0f, x, y);
  VI beyond = ~(abs_vector(x) < float(wide::kReducible));  // NaN and infinities too
  if (__builtin_expect(any(beyond), 0)) mend_lanes(beyond, x, &y, Cosine ? libm_cos : libm_sin);
  return y;
}

KITSUNE_INLINE VF sin(VF x) { return sin_or_cos<false>(x, circle(reduce_half_pi(x))); }
KITSUNE_INLINE VF cos(VF x) { return sin_or_cos<true>(x, circle(reduce_half_pi(x))); }
// The bits of both.
KITSUNE_INLINE void sin_and_cos(VF x, VF* sine, VF* cosine) {
  if (!any(~(abs_vector(x) < 0.78f))) {  // n is 0 and r is x; the angles of a pole stay here
    const Circle near = circle({x, VI{}});
    *sine = choose(x == 0.0f, x, near.sine);
    *cosine = near.cosine;
    return;
  }
  const Circle at = circle(reduce_half_pi(x));
  *sine = sin_or_cos<false>(x, at);
  *cosine = sin_or_cos<true>(x, at);
}

// ---- functions evaluated in double

template <VD (*F)(VD)>
KITSUNE_INLINE VF through_double(VF x) {
  return join(narrow(F(widen(low_half(x)))), narrow(F(widen(high_half(x)))));
}

template <VD (*F)(VD, VD)>
KITSUNE_INLINE VF through_double(VF x, VF y) {
  return join(narrow(F(widen(low_half(x)), widen(low_half(y)))), narrow(F(widen(high_half(x)), widen(high_half(y)))));
}

KITSUNE_INLINE VF tan(VF x) {
  VF y = choose(x == 0.0f, x, through_double<wide::tan>(x));
  VI beyond = ~(abs_vector(x) < float(wide::kReducible));
  if (__builtin_expect(any(beyond), 0)) mend_lanes(beyond, x, &y, libm_tan);
  return y;
}

KITSUNE_INLINE VF expm1(VF x) { return choose(x == 0.0f, x, through_double<wide::expm1>(x)); }

// Lanes that hold a denormal (of either sign), whether or not this thread takes it for a zero.
KITSUNE_INLINE VI denormal_lanes(VF x) {
  VU magnitude = (VU)abs_vector(x);
  return (VI)(magnitude - 1u < 0x007fffffu);
}

// Of a denormal operand, pow and atan2 have no value that follows from the operand alone: it depends on which steps of the
// computation flush it. XLA calls libm's float functions, so that those lanes do too.

// Negative bases (-0 among them), denormals, NaN and infinities go to libm; the rest is exp(y log x).
KITSUNE_INLINE VF pow(VF x, VF y) {
  VF r = through_double<wide::pow_positive>(x, y);
  VI special = ((VI)x < 0) | ~(x < kFloatInfinity) | ~(abs_vector(y) < kFloatInfinity) | denormal_lanes(x) | denormal_lanes(y);
  if (__builtin_expect(any(special), 0)) mend_lanes(special, x, y, &r, libm_powf);
  return r;
}

KITSUNE_INLINE VF atan2(VF y, VF x) {
  VF r = through_double<wide::atan2>(y, x);
  VI special = denormal_lanes(y) | denormal_lanes(x);
  if (__builtin_expect(any(special), 0)) mend_lanes(special, y, x, &r, libm_atan2f);
  return r;
}

}  // namespace kitsune::cpu::KITSUNE_ISA
