// Special functions too rare to vectorise: scalar double code from published formulas, used for float (rounded) and double alike.
//
// DLMF is the NIST Digital Library of Mathematical Functions, https://dlmf.nist.gov. Arguments outside a function's domain give NaN
// or the infinity that SciPy and XLA give.
#pragma once

#include <math.h>  // lgamma_r

#include "simd.h"

namespace kitsune::cpu::KITSUNE_ISA::special {

constexpr double kNaN = __builtin_nan("");
constexpr double kInfinity = __builtin_inf();
constexpr double kEpsilon = 0x1p-53;
constexpr double kPi = 3.14159265358979323846;

inline double lgamma(double x) {
  int sign;
  return ::lgamma_r(x, &sign);  // lgamma itself writes the global signgam
}

// psi(x): reflection (DLMF 5.5.4) for x < 0, recurrence (5.5.2) up to x >= 10, then the asymptotic series (5.11.2). The recurrence
// cancels near the positive root, so around it psi is a Taylor series: psi^(n)(x0) = (-1)^(n+1) n! zeta(n + 1, x0) (5.15.1).
inline double digamma(double x) {
  if (x == 0) return __builtin_copysign(kInfinity, -x);
  if (!(x > -kInfinity)) return kNaN;
  if (x < 0) {
    double fraction = x - __builtin_rint(x);  // from the nearest integer: exact, also just below 0
    if (fraction == 0) return kNaN;
    return digamma(1 - x) - kPi / __builtin_tan(kPi * fraction);
  }
  if (x == kInfinity) return x;
  constexpr double kRoot = 0x1.762d86356be3fp+0, kRootLow = 9.54999542996569772e-17;  // the root is their sum
  double from_root = (x - kRoot) - kRootLow;
  if (__builtin_fabs(from_root) < 0.05) {
    static const double c[] = {0.9676722454476211704,  -0.4427631689835921061,  0.2584997609556510106,  -0.1639427054424065275,
                               0.1078240506912623658,  -0.0721995612564547109,  0.04880428816414310723, -0.03316112647484735929,
                               0.02259764823221810466, -0.01542476590494895914, 0.01053879161661217539};
    double sum = 0;
    for (int i = 10; i >= 0; --i) sum = sum * from_root + c[i];
    return sum * from_root;
  }
  double shift = 0;
  for (; x < 10; x += 1) shift += 1 / x;
  double s = 1 / (x * x);
  static const double b[] = {1.0 / 12, -1.0 / 120, 1.0 / 252, -1.0 / 240, 1.0 / 132, -691.0 / 32760, 1.0 / 12};  // B_2k / 2k
  double series = 0;
  for (int i = 6; i >= 0; --i) series = (series + b[i]) * s;
  return __builtin_log(x) - 0.5 / x - series - shift;
}

// Newton-Halley on erf(y) = x (on erfc for x near 1, where erf has lost its digits) from Winitzki's approximation (2008), 2e-3 off.
inline double erf_inv(double x) {
  if (!(x >= -1 && x <= 1)) return kNaN;
  if (x == 0) return x;
  double a = __builtin_fabs(x), complement = 1 - a;
  if (complement == 0) return __builtin_copysign(kInfinity, x);
  constexpr double kA = 0.147;
  double l = __builtin_log(complement * (1 + a)), h = 2 / (kPi * kA) + l / 2;
  double y = a < 1e-4 ? a * 0.88622692545275801365 : __builtin_sqrt(__builtin_sqrt(h * h - l / kA) - h);
  for (int i = 0; i < 3; ++i) {
    double error = a < 0.5 ? __builtin_erf(y) - a : complement - __builtin_erfc(y);
    double step = error / (1.12837916709551257390 * __builtin_exp(-y * y));  // 2 / sqrt(pi)
    y -= step / (1 + y * step);
  }
  return __builtin_copysign(y, x);
}

// e^-|x| I_nu(x), nu = 0 or 1: the power series (DLMF 10.25.2; positive terms, so nothing cancels) up to |x| = 30, beyond it the
// asymptotic series (10.40.1).
template <int Nu>
inline double bessel_ie(double x) {
  if (x != x) return x;
  double a = __builtin_fabs(x), r;
  if (a <= 30) {
    double quarter = a * a / 4, term = Nu ? a / 2 : 1, sum = term;
    for (int k = 1; term > sum * kEpsilon; ++k) {
      term *= quarter / (double(k) * (k + Nu));
      sum += term;
    }
    r = sum * __builtin_exp(-a);
  } else {
    double term = 1, sum = 1;
    for (int k = 1; k < 30 && __builtin_fabs(term) > kEpsilon; ++k) {
      double odd = 2 * k - 1;
      term *= -(4.0 * Nu * Nu - odd * odd) / (8 * k * a);
      sum += term;
    }
    r = a == kInfinity ? 0 : sum / (__builtin_sqrt(2 * kPi) * __builtin_sqrt(a));  // 2 pi a may overflow
  }
  return Nu ? __builtin_copysign(r, x) : r;
}

// e^-x x^a / Gamma(a), the factor in front of both expansions of the incomplete gamma function. For a beyond 100 the exponent's
// large parts are taken out first: with mu = (x - a) / a it is a (log1p(mu) - mu), and Gamma(a) is Stirling's (DLMF 5.11.1).
inline double gamma_factor(double a, double x) {
  if (a < 100) return __builtin_exp(a * __builtin_log(x) - x - lgamma(a));
  double mu = (x - a) / a, difference;
  if (__builtin_fabs(mu) < 0.1) {  // log1p(mu) - mu by its series, sum of (-1)^(k+1) mu^k / k from k = 2
    double power = -mu * mu, sum = 0;
    for (int k = 2; k < 40 && __builtin_fabs(power) > kEpsilon * kEpsilon * mu * mu; ++k) {
      sum += power / k;
      power *= -mu;
    }
    difference = sum;
  } else {
    difference = __builtin_log1p(mu) - mu;
  }
  double stirling = 1 / (12 * a) - 1 / (360 * a * a * a) + 1 / (1260 * a * a * a * a * a);
  return __builtin_exp(a * difference - stirling) * __builtin_sqrt(a / (2 * kPi));
}

// The lower series (DLMF 8.11.4), for x < a + 1.
inline double gamma_series(double a, double x) {
  double term = 1 / a, sum = term;
  for (double k = a + 1; term > sum * kEpsilon; k += 1) {
    term *= x / k;
    sum += term;
  }
  return sum * gamma_factor(a, x);
}

// The upper continued fraction (DLMF 8.9.2), by Lentz's method, for x >= a + 1.
inline double gamma_fraction(double a, double x) {
  constexpr double kTiny = 1e-300;
  double b = x + 1 - a, c = 1 / kTiny, d = 1 / b, h = d;
  for (int i = 1; i < 100000; ++i) {
    double an = -i * (i - a);
    b += 2;
    d = an * d + b;
    d = 1 / (__builtin_fabs(d) < kTiny ? kTiny : d);
    c = b + an / c;
    c = __builtin_fabs(c) < kTiny ? kTiny : c;
    h *= d * c;
    if (__builtin_fabs(d * c - 1) < 2 * kEpsilon) break;
  }
  return h * gamma_factor(a, x);
}

// Regularised incomplete gamma functions P(a, x) and Q(a, x) = 1 - P. Edge cases as XLA: P(0, x) = 1 for x > 0 and NaN at (0, 0).
template <bool Upper>
inline double igamma_either(double a, double x) {
  if (!(a >= 0) || !(x >= 0) || (a == 0 && x == 0)) return kNaN;
  double lower;
  if (a == 0 || x == kInfinity) {
    if (a == kInfinity) return kNaN;
    lower = 1;
  } else if (x == 0 || a == kInfinity) {
    lower = 0;
  } else if (x < a + 1) {
    lower = gamma_series(a, x);
  } else {
    double upper = gamma_fraction(a, x);
    return Upper ? upper : 1 - upper;
  }
  return Upper ? 1 - lower : lower;
}

inline double igamma(double a, double x) { return igamma_either<false>(a, x); }
inline double igammac(double a, double x) { return igamma_either<true>(a, x); }

// Hurwitz zeta(s, q) for s > 1 by Euler-Maclaurin summation (DLMF 25.11.9, after 12 explicit terms, or as many as make q + N
// large).
inline double zeta(double s, double q) {
  if (s == 1) return kInfinity;
  if (!(s > 1) || q != q) return kNaN;
  if (q <= 0) {
    if (q == __builtin_floor(q)) return s == 2 * __builtin_floor(s / 2) ? kInfinity : kNaN;
    if (s != __builtin_floor(s)) return kNaN;  // a negative number to a fractional power
  }
  if (q == kInfinity) return 0;
  double sum = 0, base = q;
  for (int n = 0; n < 12 || base < 12; ++n, base += 1) {
    double term = __builtin_pow(base, -s);
    sum += term;
    if (base > 0 && term < sum * kEpsilon * 1e-3) return sum;
  }
  double power = __builtin_pow(base, -s);
  sum += power * base / (s - 1) + power / 2;
  // B_2k / (2k)! s (s + 1) ... (s + 2k - 2) base^(-s - 2k + 1)
  static const double b[] = {1.0 / 12,
                             -1.0 / 720,
                             1.0 / 30240,
                             -1.0 / 1209600,
                             1.0 / 47900160,
                             -691.0 / 1307674368000.0,
                             1.0 / 74724249600.0,
                             -3617.0 / 10670622842880000.0};
  double factor = s * power / base;
  for (int k = 0; k < 8; ++k) {
    double term = b[k] * factor;
    sum += term;
    if (__builtin_fabs(term) < __builtin_fabs(sum) * kEpsilon) break;
    factor *= (s + 2 * k + 1) * (s + 2 * k + 2) / (base * base);
  }
  return sum;
}

// psi^(n)(x) = (-1)^(n + 1) n! zeta(n + 1, x) (DLMF 5.15.1), psi itself for n = 0.
inline double polygamma(double n, double x) {
  if (n == 0) return digamma(x);
  if (!(n > 0) || n != __builtin_floor(n)) return kNaN;
  double sign = n == 2 * __builtin_floor(n / 2) ? -1 : 1;
  double z = zeta(n + 1, x);
  if (n <= 150) return sign * __builtin_tgamma(n + 1) * z;
  return sign * __builtin_exp(lgamma(n + 1) + __builtin_log(z));
}

// I_x(a, b) by the continued fraction DLMF 8.17.22 (Lentz's method) on the side of (a + 1) / (a + b + 2) where it converges fast.
inline double incomplete_beta(double a, double b, double x) {
  if (!(a > 0) || !(b > 0) || !(x >= 0) || !(x <= 1)) return kNaN;
  if (x == 0 || x == 1) return x;
  bool swap = x > (a + 1) / (a + b + 2);
  double log_factor = a * __builtin_log(x) + b * __builtin_log1p(-x) + lgamma(a + b) - lgamma(a) - lgamma(b);
  if (swap) {
    double t = a;
    a = b;
    b = t;
    x = 1 - x;
  }
  constexpr double kTiny = 1e-300;
  double c = 1, d = 1 - (a + b) * x / (a + 1);
  d = 1 / (__builtin_fabs(d) < kTiny ? kTiny : d);
  double h = d;
  for (int m = 1; m < 10000; ++m) {
    for (int odd = 0; odd < 2; ++odd) {
      double an =
          odd ? -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)) : m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m));
      d = 1 + an * d;
      d = 1 / (__builtin_fabs(d) < kTiny ? kTiny : d);
      c = 1 + an / c;
      c = __builtin_fabs(c) < kTiny ? kTiny : c;
      h *= d * c;
    }
    if (__builtin_fabs(d * c - 1) < 2 * kEpsilon) break;
  }
  double r = __builtin_exp(log_factor) * h / a;
  return swap ? 1 - r : r;
}

}  // namespace kitsune::cpu::KITSUNE_ISA::special
