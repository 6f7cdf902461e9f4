// Scalar functions with the semantics of JAX's operators, where those of C differ: NaN goes through max and min, integers divide by
// zero to all ones, shifts beyond the bits give zero, conversions saturate.
#pragma once

#include "kitsune/arch/arch.h"

namespace kitsune {

using namespace arch;

template <class V>
KITSUNE_DEVICE V lowest();
template <>
KITSUNE_DEVICE float lowest<float>() {
  return from_bits(0xff800000u);
}
template <>
KITSUNE_DEVICE i32 lowest<i32>() {
  return -2147483647 - 1;
}
template <>
KITSUNE_DEVICE u32 lowest<u32>() {
  return 0;
}
template <>
KITSUNE_DEVICE bool lowest<bool>() {
  return false;
}
template <class V>
KITSUNE_DEVICE V highest();
template <>
KITSUNE_DEVICE float highest<float>() {
  return from_bits(0x7f800000u);
}
template <>
KITSUNE_DEVICE i32 highest<i32>() {
  return 2147483647;
}
template <>
KITSUNE_DEVICE u32 highest<u32>() {
  return 0xffffffffu;
}
template <>
KITSUNE_DEVICE bool highest<bool>() {
  return true;
}
template <class V>
KITSUNE_DEVICE V ones() {
  return static_cast<V>(~V(0));
}
template <>
KITSUNE_DEVICE bool ones<bool>() {
  return true;
}

KITSUNE_DEVICE bool is_nan(float x) { return x != x; }
KITSUNE_DEVICE bool finite(float x) { return (bits(x) & 0x7f800000u) != 0x7f800000u; }

template <class V>
KITSUNE_DEVICE V maximum(V x, V y) {
  return x > y ? x : y;
}
template <>
KITSUNE_DEVICE float maximum(float x, float y) {
  return max_nan(x, y);
}
template <class V>
KITSUNE_DEVICE V minimum(V x, V y) {
  return x < y ? x : y;
}
template <>
KITSUNE_DEVICE float minimum(float x, float y) {
  return min_nan(x, y);
}
template <class V>
KITSUNE_DEVICE V clamp(V low, V x, V high) {
  return minimum(maximum(low, x), high);
}

KITSUNE_DEVICE float sign(float x) { return is_nan(x) || x == 0.0f ? x : x > 0.0f ? 1.0f : -1.0f; }
KITSUNE_DEVICE i32 sign(i32 x) { return (x > 0) - (x < 0); }
KITSUNE_DEVICE u32 sign(u32 x) { return x != 0; }
KITSUNE_DEVICE float magnitude(float x) { return fabsf(x); }
KITSUNE_DEVICE i32 magnitude(i32 x) { return x < 0 ? static_cast<i32>(0u - static_cast<u32>(x)) : x; }

KITSUNE_DEVICE float divide(float x, float y) { return x / y; }
// The same for a constant y, of 2**-60 to 2**60: no branch and no call for special cases. The remainder of x * RN(1 / y) is exact,
// so the correction rounds correctly (Markstein, "Computation of elementary functions on the IBM RISC System/6000", 1990), except
// that a quotient below 2**-60 may be one unit off.
KITSUNE_DEVICE float divide_by(float x, float y) {
  const float inverse = 1.0f / y;
  const float q = x * inverse, left = fmaf(-q, y, x);
  return left != 0.0f && fabsf(left) <= 3.402823466e38f ? fmaf(left, inverse, q) : q;  // keeps -0, infinities, NaN
}
KITSUNE_DEVICE i32 divide(i32 x, i32 y) {
  if (y == 0) return -1;
  return y == -1 ? static_cast<i32>(0u - static_cast<u32>(x)) : x / y;
}
KITSUNE_DEVICE u32 divide(u32 x, u32 y) { return y == 0 ? 0xffffffffu : x / y; }
KITSUNE_DEVICE float remainder_of(float x, float y) { return fmodf(x, y); }
KITSUNE_DEVICE i32 remainder_of(i32 x, i32 y) {
  if (y == 0) return x;
  return y == -1 ? 0 : x % y;
}
KITSUNE_DEVICE u32 remainder_of(u32 x, u32 y) { return y == 0 ? x : x % y; }

// Signed integers wrap.
KITSUNE_DEVICE i32 plus(i32 x, i32 y) { return static_cast<i32>(static_cast<u32>(x) + static_cast<u32>(y)); }
KITSUNE_DEVICE i32 minus(i32 x, i32 y) { return static_cast<i32>(static_cast<u32>(x) - static_cast<u32>(y)); }
KITSUNE_DEVICE i32 times(i32 x, i32 y) { return static_cast<i32>(static_cast<u32>(x) * static_cast<u32>(y)); }

KITSUNE_DEVICE i32 high_half(i32 x, i32 y) { return static_cast<i32>((static_cast<long long>(x) * y) >> 32); }
KITSUNE_DEVICE u32 high_half(u32 x, u32 y) { return static_cast<u32>((static_cast<unsigned long long>(x) * y) >> 32); }

// The place in IEEE 754's total order: -NaN < -inf < ... < -0 < 0 < ... < inf < NaN.
KITSUNE_DEVICE i32 total_order(float x) {
  const i32 b = static_cast<i32>(bits(x));
  return b < 0 ? b ^ 0x7fffffff : b;
}
template <class V>
KITSUNE_DEVICE V total_order(V x) {
  return x;
}

KITSUNE_DEVICE u32 shift_left(u32 x, u32 n) { return n < 32 ? x << n : 0; }
KITSUNE_DEVICE u32 shift_right(u32 x, u32 n) { return n < 32 ? x >> n : 0; }
KITSUNE_DEVICE i32 shift_right_sign(i32 x, u32 n) { return x >> (n < 32 ? n : 31); }

// Threefry-2x32 with 20 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), as jax.random uses it.
struct Words {
  u32 first, second;
};
KITSUNE_DEVICE Words threefry(u32 key0, u32 key1, u32 count0, u32 count1) {
  const u32 keys[3] = {key0, key1, key0 ^ key1 ^ 0x1BD11BDAu};
  constexpr u32 kRotations[8] = {13, 15, 26, 6, 17, 29, 16, 24};
  u32 x = count0 + key0, y = count1 + key1;
  KITSUNE_UNROLL
  for (u32 i = 0; i < 20; ++i) {
    const u32 r = kRotations[i % 8];
    x += y;
    y = x ^ (y << r | y >> (32 - r));
    if (i % 4 == 3) {
      const u32 n = i / 4 + 1;
      x += keys[n % 3];
      y += keys[(n + 1) % 3] + n;
    }
  }
  return {x, y};
}
KITSUNE_DEVICE u32 threefry_first(u32 k, u32 l, u32 x, u32 y) { return threefry(k, l, x, y).first; }
KITSUNE_DEVICE u32 threefry_second(u32 k, u32 l, u32 x, u32 y) { return threefry(k, l, x, y).second; }
KITSUNE_DEVICE u32 threefry_xor(u32 k, u32 l, u32 x, u32 y) {
  const Words words = threefry(k, l, x, y);
  return words.first ^ words.second;
}

// Element number `place` of the bits of the rbg key of these four words: Philox-4x32 with 10 rounds, as XLA counts with it
// (kitsune_jax/ops/pointwise.py).
KITSUNE_DEVICE u32 philox(u32 key0, u32 key1, u32 count0, u32 count1, u32 place) {
  const u32 n = place >> 2;
  u32 x0 = count0 + n;
  u32 carry = x0 < n;
  u32 x1 = count1 + carry;
  carry &= x1 < 1;
  u32 x2 = key0 + carry, x3 = key1 + (carry & (x2 < 1));
  KITSUNE_UNROLL
  for (u32 i = 0; i < 10; ++i) {
    const Halves first = product_halves(x0, 0xD2511F53u), second = product_halves(x2, 0xCD9E8D57u);
    x0 = second.high ^ x1 ^ (key0 + i * 0x9E3779B9u), x1 = second.low;
    x2 = first.high ^ x3 ^ (key1 + i * 0xBB67AE85u), x3 = first.low;
  }
  return place & 2 ? (place & 1 ? x3 : x2) : (place & 1 ? x1 : x0);
}

KITSUNE_DEVICE float round_away(float x) { return roundf(x); }
KITSUNE_DEVICE float round_even(float x) { return rintf(x); }

KITSUNE_DEVICE i32 to_i32(float x) {
  if (is_nan(x)) return 0;
  if (x >= 2147483648.0f) return 2147483647;
  return x <= -2147483648.0f ? -2147483647 - 1 : static_cast<i32>(x);
}
KITSUNE_DEVICE u32 to_u32(float x) {
  if (!(x > 0.0f)) return 0;
  return x >= 4294967296.0f ? 0xffffffffu : static_cast<u32>(x);
}

// 1 / (1 + e**-x) in a form that neither overflows nor loses small results.
KITSUNE_DEVICE float logistic(float x) {
  float e = expf(-fabsf(x));
  return (x < 0.0f ? e : 1.0f) / (1.0f + e);
}
// The same without a division, which has a branch for special cases: of a divisor of 1 to 2 an approximate reciprocal is within a
// unit in the last place.
KITSUNE_DEVICE float logistic_straight(float x) {
  float e = expf(-fabsf(x));
  return (x < 0.0f ? e : 1.0f) * fast_rcp(1.0f + e);
}
// Off by up to |x| 2^-23, relative: for results of 16 bits.
KITSUNE_DEVICE float exp_coarse(float x) { return fast_exp2(x * 1.4426950408889634f); }
// e^(x scale - from). The product of `from` is the same for all elements of a row.
KITSUNE_DEVICE float exp_coarse(float x, float scale, float from) {
  return fast_exp2(fmaf(x, scale * 1.4426950408889634f, -from * 1.4426950408889634f));
}
// For results of 8 significant bits: tanh.approx is good to 2**-11 (PTX ISA, tanh).
KITSUNE_DEVICE float tanh_coarse(float x) { return fast_tanh(x); }
KITSUNE_DEVICE float logistic_coarse(float x) { return fmaf(0.5f, fast_tanh(0.5f * x), 0.5f); }

template <class V>
KITSUNE_DEVICE float power(float x, V y) {
  return powf(x, static_cast<float>(y));
}
template <int Y>
KITSUNE_DEVICE float integer_power(float x) {
  if constexpr (Y < 0) {
    return 1.0f / integer_power<-Y>(x);
  } else if constexpr (Y == 0) {
    return 1.0f;
  } else if constexpr (Y == 1) {
    return x;
  } else {
    float half = integer_power<Y / 2>(x);
    return Y % 2 ? half * half * x : half * half;
  }
}
template <int Y>
KITSUNE_DEVICE i32 integer_power(i32 x) {
  u32 r = 1;
  for (int i = 0; i < Y; ++i) r *= static_cast<u32>(x);
  return static_cast<i32>(r);
}

}  // namespace kitsune
