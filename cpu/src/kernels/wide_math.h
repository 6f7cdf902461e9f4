// Elementary functions evaluated in double for a float result: vectors of kDoubles lanes holding floats (so every float denormal is
// normal here, and the final rounding to float makes denormal results and overflow right). Relative error below 1e-9 (0.02 ulp of
// f32).
//
// Polynomials: interpolation at Chebyshev nodes in 40-digit arithmetic, unless a comment says otherwise. All functions are
// branch-free.
#pragma once

#include "simd.h"

namespace kitsune::cpu::KITSUNE_ISA::wide {

constexpr double kInfinity = __builtin_inf();
constexpr double kNaN = __builtin_nan("");
constexpr double kRoundMagic = 0x1.8p52;  // adding it rounds to an integer, in the low bits of the sum
constexpr double kPi = 3.14159265358979323846, kHalfPi = 1.57079632679489661923;

KITSUNE_INLINE VD choose(VL mask, VD yes, VD no) { return mask ? yes : no; }

template <int N>
KITSUNE_INLINE VD polynomial(VD x, const double (&c)[N]) {
  VD y = splat<VD>(c[N - 1]);
  KITSUNE_UNROLL
  for (int i = N - 2; i >= 0; --i) y = y * x + c[i];
  return y;
}

// e^x = 2^n e^r, |r| <= ln 2 / 2, with e^r - 1 from its Taylor series. The argument is held where a float's exponential is decided.
struct Exponential {
  VD scale;     // 2^n
  VD fraction;  // e^r - 1
};

KITSUNE_INLINE Exponential split_exp(VD x) {
  static const double c[] = {1.0, 1.0 / 2, 1.0 / 6, 1.0 / 24, 1.0 / 120, 1.0 / 720, 1.0 / 5040, 1.0 / 40320, 1.0 / 362880};
  x = choose((VL)(x < -300.0), splat<VD>(-300.0), x);
  x = choose((VL)(x > 300.0), splat<VD>(300.0), x);
  VD t = x * 1.44269504088896340736 + kRoundMagic;
  VD n = t - kRoundMagic;
  VD r = x - n * 0.69314718055994530942;
  VUL bits = ((VUL)t + 1023) << 52;  // the low bits of t hold n
  return {(VD)bits, polynomial(r, c) * r};
}

KITSUNE_INLINE VD exp(VD x) {
  Exponential e = split_exp(x);
  return e.scale * e.fraction + e.scale;
}

KITSUNE_INLINE VD expm1(VD x) {
  Exponential e = split_exp(x);
  VD r = e.scale * e.fraction + (e.scale - 1.0);
  return choose((VL)(x == 0.0), x, r);
}

// log x for normal x: x = 2^e m, sqrt(1/2) <= m < sqrt(2), log m = 2 atanh((m - 1) / (m + 1)). Zero, negative and infinite x
// included.
KITSUNE_INLINE VD log(VD x) {
  static const double c[] = {2.0, 2.0 / 3, 2.0 / 5, 2.0 / 7, 2.0 / 9, 2.0 / 11, 2.0 / 13, 2.0 / 15};
  VL offset = (VL)((VUL)x - 0x3fe6a09e667f3bcd);  // bits of sqrt(1/2)
  VL exponent = offset >> 52;
  VD m = (VD)((VUL)x - ((VUL)offset & 0xfff0000000000000));
  VD e = (VD)(exponent + 0x4338000000000000) - kRoundMagic;  // exact int64 -> double for small integers
  VD f = (m - 1.0) / (m + 1.0);
  VD r = e * 0.69314718055994530942 + f * polynomial(f * f, c);
  r = choose((VL)(x == kInfinity), x, r);
  r = choose((VL)(x == 0.0), splat<VD>(-kInfinity), r);
  return choose((VL)(x >= 0.0), r, splat<VD>(kNaN));
}

// log(1 + x): log of the rounded sum u, corrected by what the rounding lost, (x - (u - 1)) / u.
KITSUNE_INLINE VD log1p(VD x) {
  VD u = x + 1.0;
  VD r = log(u) + (x - (u - 1.0)) / u;
  r = choose((VL)(u == kInfinity), u, r);
  r = choose((VL)(u == 0.0), splat<VD>(-kInfinity), r);
  return choose((VL)(x == 0.0), x, r);
}

// atan(t) / t for 0 <= t <= 1 as a polynomial in t^2 (relative error 2e-12).
KITSUNE_INLINE VD atan_unit(VD t) {
  static const double c[] = {0.9999999999981967,   -0.333333332624797,     0.19999995340385063, -0.14285592394282529,
                             0.11109428364330506,  -0.09076798876650477,   0.07614250199003121, -0.06366092236096826,
                             0.050455577528416146, -0.03526772086942244,   0.01993744283625617, -0.008241899893996813,
                             0.002162794422156479, -0.00026660196719267425};
  return t * polynomial(t * t, c);
}

KITSUNE_INLINE VD atan2(VD y, VD x) {
  VD ay = abs_vector(y), ax = abs_vector(x);
  VL steep = (VL)(ay > ax);
  VD small = choose(steep, ax, ay), large = choose(steep, ay, ax);
  VD t = small / large;
  t = choose((VL)(small == large), splat<VD>(1.0), t);  // inf / inf
  t = choose((VL)(large == 0.0), large, t);             // 0 / 0
  VD r = atan_unit(t);
  r = choose(steep, kHalfPi - r, r);
  r = choose((VL)x < 0, kPi - r, r);  // the sign bit, so that -0 counts as negative
  r = copy_sign(r, y);
  return choose((VL)((x == x) & (y == y)), r, x + y);
}

KITSUNE_INLINE VD atan(VD x) { return atan2(x, splat<VD>(1.0)); }
KITSUNE_INLINE VD asin(VD x) { return atan2(x, square_root((1.0 - x) * (1.0 + x))); }
KITSUNE_INLINE VD acos(VD x) { return atan2(square_root((1.0 - x) * (1.0 + x)), x); }

KITSUNE_INLINE VD sinh(VD x) {
  VD m = expm1(abs_vector(x));
  return copy_sign((m + m / (m + 1.0)) * 0.5, x);
}

KITSUNE_INLINE VD cosh(VD x) {
  VD e = exp(abs_vector(x));
  return (e + 1.0 / e) * 0.5;
}

KITSUNE_INLINE VD asinh(VD x) {
  VD a = abs_vector(x), s = a * a;
  VD r = log1p(a + s / (1.0 + square_root(1.0 + s)));
  return copy_sign(choose((VL)(a == kInfinity), a, r), x);
}

KITSUNE_INLINE VD acosh(VD x) {
  VD d = x - 1.0;
  VD r = log1p(d + square_root(d * (x + 1.0)));
  return choose((VL)(x >= 1.0), r, splat<VD>(kNaN));
}

KITSUNE_INLINE VD atanh(VD x) {
  VD a = abs_vector(x);
  VD r = log1p(2.0 * a / (1.0 - a)) * 0.5;
  r = choose((VL)(a == 1.0), splat<VD>(kInfinity), r);
  return copy_sign(choose((VL)(a <= 1.0), r, splat<VD>(kNaN)), x);
}

KITSUNE_INLINE VD cbrt(VD x) {
  VD a = abs_vector(x);
  VD r = exp(log(a) * (1.0 / 3));
  r = choose((VL)(a == kInfinity), a, r);
  return choose((VL)((a == 0.0) | (a != a)), x, copy_sign(r, x));
}

// erfc(t) = e^(-t^2) g(t) / (1 + t), g a polynomial in (t - 2) / (t + 2) over 0 <= t <= 11 (relative error 4e-12), by which point a
// float has underflowed; erfc(-t) = 2 - erfc(t).
KITSUNE_INLINE VD erfc(VD x) {
  static const double c[] = {0.7661870289332483,     -0.25997483699180246,    0.037813897997347294,    0.042536348852210866,
                             -0.025243544955242975,  -0.000518260280412604,   0.003937653814237075,    0.00014449911674287028,
                             -0.0007061276391076435, -0.0001389657505699594,  0.00011584178091442406,  5.86960503123019e-05,
                             -7.244241075464282e-06, -1.3057865213815438e-05, -3.0148437042765445e-06, 6.7716414251973e-08};
  VD t = abs_vector(x);
  t = choose((VL)(t > 11.0), splat<VD>(11.0), t);
  VD r = exp(-t * t) * polynomial((t - 2.0) / (t + 2.0), c) / (1.0 + t);
  return choose((VL)(x < 0.0), 2.0 - r, r);
}

// |x| less than 1e6: x - n pi/2 with pi/2 in two pieces, the first of 33 bits, so that n times it is exact for n < 2^20 (Cody &
// Waite).
constexpr double kReducible = 1e6;
constexpr double kHalfPiHigh = 1.57079632673412561417, kHalfPiLow = 6.07710050650619224932e-11;

struct Reduced {
  VD n, r;
};

KITSUNE_INLINE Reduced reduce_half_pi(VD x) {
  VD t = x * 0.63661977236758134308 + kRoundMagic;
  VD n = t - kRoundMagic;
  VD r = x - n * kHalfPiHigh;
  return {n, r - n * kHalfPiLow};
}

// tan for |x| < kReducible, from the Taylor series of sine and cosine on |r| <= pi/4 (1e-10).
KITSUNE_INLINE VD tan(VD x) {
  static const double sc[] = {1.0, -1.0 / 6, 1.0 / 120, -1.0 / 5040, 1.0 / 362880, -1.0 / 39916800};
  static const double cc[] = {1.0, -1.0 / 2, 1.0 / 24, -1.0 / 720, 1.0 / 40320, -1.0 / 3628800};
  Reduced d = reduce_half_pi(x);
  VD s2 = d.r * d.r, s = d.r * polynomial(s2, sc), c = polynomial(s2, cc);
  VL odd = -((VL)(d.n + kRoundMagic) & 1);
  return choose(odd, -c, s) / choose(odd, s, c);
}

// x p(w) for w = -log(1 - x^2), after M. Giles, "Approximating the erfinv function", GPU Computing Gems 2 (2011): p is a polynomial
// in w below 6.25 and one in its square root up to 16, beyond which no float below 1 lies (relative errors 7e-10 and 1e-10).
KITSUNE_INLINE VD erf_inv(VD x) {
  static const double near[] = {1.6536545626831018,      0.7504943076479735,      -0.058922568674619855,  -0.022604096452093554,
                                0.017808404971306167,    -0.0041401807208026244,  -0.0012720206273548224, 0.001242690309433873,
                                -0.00026338021427306914, -0.00013508115521994958, 9.204976990374106e-05,  1.578797297689218e-06,
                                -1.0903444602052149e-05};
  static const double far[] = {3.0838856104922217,    0.7539442286766354,     0.003021141080453693,  -0.001582600191291763,
                               0.0007882751758680385, -0.0004002905691450704, 0.0001698450015514036, -4.824614749538211e-05,
                               2.008683688414997e-06, 6.1248540214801495e-06, -2.299988228193476e-06};
  VD w = -log((1.0 - x) * (1.0 + x));
  VD p = choose((VL)(w < 6.25), polynomial(w * (1 / 3.125) - 1.0, near), polynomial((square_root(w) - 3.25) * (1 / 0.75), far));
  return x * choose((VL)(w == kInfinity), w, p);
}

// x^y for x > 0 or x = +0 and finite y; the caller mends the rest.
KITSUNE_INLINE VD pow_positive(VD x, VD y) {
  VD r = exp(y * log(x));
  r = choose((VL)(x == 0.0), choose((VL)(y > 0.0), splat<VD>(0.0), splat<VD>(kInfinity)), r);
  return choose((VL)((y == 0.0) | (x == 1.0)), splat<VD>(1.0), r);
}

}  // namespace kitsune::cpu::KITSUNE_ISA::wide
