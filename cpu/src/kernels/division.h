// Quotients and remainders of 32-bit integers, and remainders of floats, in vectors. All are exact.
#pragma once

#include "vector_math.h"

namespace kitsune::cpu::KITSUNE_ISA {

using HU = VectorOf<uint32_t, kVectorBytes / 2>::type;

// ---- integers, by magnitude, in double

constexpr double kInteger = 0x1p52;  // adding it to a number below 2^32 rounds to an integer, in the low bits of the sum

KITSUNE_INLINE VD magnitude_of(HU x) {
  const VUL bits = (VUL)splat<VD>(kInteger);
  return (VD)(__builtin_convertvector(x, VUL) | bits) - kInteger;
}

struct HalfDivision {
  HU quotient, rest;
};

// x = n y + r for integers 0 <= x < 2^32 and 0 < y < 2^32; `inverse` is 1 / y, rounded. n is first the integer nearest to the
// quotient, or next to a tie either neighbour of it; n y and r are exact.
KITSUNE_INLINE HalfDivision divide_half(VD x, VD y, VD inverse) {
  VD n = (x * inverse + kInteger) - kInteger;
  VD r = x - n * y;
  const VL over = (VL)(r < 0.0);
  n = n - (VD)(over & (VL)splat<VD>(1.0));
  r = r + (VD)(over & (VL)y);
  return {__builtin_convertvector((VUL)(n + kInteger), HU), __builtin_convertvector((VUL)(r + kInteger), HU)};
}

// A divisor, prepared.
struct Divisor {
  VU value, magnitude, zero;  // `zero`: lanes where it is
  VD low, high, inverse_low, inverse_high;
};

template <bool Signed>
KITSUNE_INLINE VU magnitude_of(VU x) {
  if constexpr (!Signed) return x;
  const VU sign = (VU)((VI)x >> 31);
  return (x ^ sign) - sign;
}

template <bool Signed>
KITSUNE_INLINE Divisor divisor(VU y) {
  Divisor d;
  d.value = y, d.zero = (VU)(y == 0u);
  d.magnitude = magnitude_of<Signed>(y) | (d.zero & 1u);
  d.low = magnitude_of((HU)low_half((VF)d.magnitude)), d.high = magnitude_of((HU)high_half((VF)d.magnitude));
  d.inverse_low = 1.0 / d.low, d.inverse_high = 1.0 / d.high;
  return d;
}

// As Div and Rem (pointwise.h): x / 0 is -1, x % 0 is x, and the least integer divided by -1 is itself.
template <bool Signed, bool Rest>
KITSUNE_INLINE VU divided(VU x, const Divisor& d) {
  const VU m = magnitude_of<Signed>(x);
  const HalfDivision low = divide_half(magnitude_of((HU)low_half((VF)m)), d.low, d.inverse_low);
  const HalfDivision high = divide_half(magnitude_of((HU)high_half((VF)m)), d.high, d.inverse_high);
  VU r = (VU)(Rest ? join((HF)low.rest, (HF)high.rest) : join((HF)low.quotient, (HF)high.quotient));
  if constexpr (Signed) {
    const VU sign = (VU)((VI)(Rest ? x : x ^ d.value) >> 31);
    r = (r ^ sign) - sign;
  }
  return (r & ~d.zero) | ((Rest ? x : VU{} - 1u) & d.zero);
}

// Number: b is one number.
template <bool Signed, bool Rest, bool Number>
void map_divided(int64_t n, void* dst, const void* a, const void* b, const void*, const void*, const double*) {
  uint32_t* to = static_cast<uint32_t*>(dst);
  const uint32_t *x = static_cast<const uint32_t*>(a), *y = static_cast<const uint32_t*>(b);
  Divisor d{};
  if constexpr (Number) d = divisor<Signed>(VU{} + *y);
  int64_t i = 0;
  for (; i + kFloats <= n; i += kFloats) {
    if constexpr (!Number) d = divisor<Signed>(load_vector<VU>(y + i));
    store_vector(to + i, divided<Signed, Rest>(load_vector<VU>(x + i), d));
  }
  if (i == n) return;
  VU v{}, w{};
  __builtin_memcpy(&v, x + i, size_t(n - i) * 4);
  if constexpr (!Number) {
    __builtin_memcpy(&w, y + i, size_t(n - i) * 4);
    d = divisor<Signed>(w);
  }
  v = divided<Signed, Rest>(v, d);
  __builtin_memcpy(to + i, &v, size_t(n - i) * 4);
}

// ---- floats

// c - a b, rounded once.
KITSUNE_INLINE VF minus_product(VF c, VF a, VF b) {
#if defined(__AVX512F__)
  return (VF)_mm512_fnmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (VF)_mm256_fnmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (VF)vfmsq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return join(narrow(widen(low_half(c)) - widen(low_half(a)) * widen(low_half(b))),
              narrow(widen(high_half(c)) - widen(high_half(a)) * widen(high_half(b))));
#endif
}

#if defined(__AVX512F__)
// x / y for many x and one y of a moderate magnitude, rounded exactly, in less than half of the time that dividing takes. `high` is
// 1 / y, rounded, and `low` what that leaves, so q is off by less than a unit in its last place. Then x - q y is exact, and q plus
// `high` times it is rounded as the quotient is (Markstein, "Computation of elementary functions on the IBM RISC System/6000
// processor", 1990). That holds where nothing overflows and no rest is subnormal: for quotients above 2^-60 that are not NaN.
struct Inverse {
  __m512 y, high, low;
  bool moderate;  // y's magnitude

  explicit KITSUNE_INLINE Inverse(VF of) : y((__m512)of) {
    const float one = of[0], inverse = 1.0f / one, magnitude = __builtin_fabsf(one);
    high = _mm512_set1_ps(inverse);
    low = _mm512_mul_ps(_mm512_fnmadd_ps(high, y, _mm512_set1_ps(1.0f)), high);
    moderate = magnitude >= 0x1p-20f && magnitude <= 0x1p40f;
  }

  // Takes the lanes in which this is not the quotient out of `right`. With kZeros zeros are divided as well.
  template <bool kZeros>
  KITSUNE_INLINE VF divide(VF numerator, __mmask16* right) const {
    const __m512 x = (__m512)numerator, q = _mm512_fmadd_ps(x, high, _mm512_mul_ps(x, low));
    __m512 quotient = _mm512_fmadd_ps(_mm512_fnmadd_ps(q, y, x), high, q);
    __mmask16 found = _mm512_cmp_ps_mask((__m512)abs_vector((VF)quotient), _mm512_set1_ps(0x1p-60f), _CMP_GE_OQ);
    if constexpr (kZeros) {
      const __mmask16 zeros = _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_EQ_OQ);
      quotient = _mm512_mask_mul_ps(quotient, zeros, x, high);  // which gives them their sign
      found = __mmask16(found | zeros);
    }
    *right = __mmask16(*right & found);
    return (VF)quotient;
  }
};
#endif

// fmod. With n the integer part of |x| / |y|, |x| - n |y| is a float, so that rounding once is exact. The rounded quotient may have
// reached the next integer. Large quotients, tiny divisors, infinities and NaN go to libm.
KITSUNE_INLINE VF remainder(VF x, VF y) {
  constexpr float kMost = 0x1p22f, kLeast = 0x1p-100f;
  const VF ax = abs_vector(x), ay = abs_vector(y), q = ax / ay;
  const VI special = ~((q < kMost) & (ay >= kLeast));
  const VF n = __builtin_convertvector(__builtin_convertvector(choose(special, VF{}, q), VI), VF);
  VF r = minus_product(ax, n, ay);
  r = choose(r < 0.0f, minus_product(ax, n - 1.0f, ay), r);
  r = choose(n == 0.0f, x, copy_sign(r, x));
  if (__builtin_expect(any(special), 0)) mend_lanes(special, x, y, &r, libm_fmodf);
  return r;
}

}  // namespace kitsune::cpu::KITSUNE_ISA
