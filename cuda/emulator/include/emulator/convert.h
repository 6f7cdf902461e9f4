// Number formats of tensor cores on the host: bit casts, bfloat16, half and tf32.
//
// Comes in and goes out: values. Invariant: the rounding of PTX's cvt (nearest even; ties away for tf32) and its canonical NaN.
#pragma once

#include <string.h>

#include "kitsune/arch/types.h"

namespace kitsune::emulator {

using namespace arch;

template <class To, class From>
inline To bit_cast(const From& v) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &v, sizeof to);
  return to;
}

inline bool is_nan_bits(u32 v) { return (v & 0x7fffffffu) > 0x7f800000u; }

inline u16 float_to_bf16(float f) {
  u32 v = bit_cast<u32>(f);
  if (is_nan_bits(v)) return 0x7fff;  // PTX ISA, cvt: a NaN becomes the canonical one
  return static_cast<u16>((v + 0x7fffu + (v >> 16 & 1)) >> 16);
}
inline float bf16_to_float(u16 h) { return bit_cast<float>(static_cast<u32>(h) << 16); }

inline u16 float_to_f16(float f) {
  u32 v = bit_cast<u32>(f), sign = v >> 16 & 0x8000u, magnitude = v & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0x7fff;
  if (magnitude >= 0x477ff000u) return static_cast<u16>(sign | 0x7c00u);  // 65520 and more round to infinity
  if (magnitude < 0x38800000u) {  // below 2^-14: subnormal. Adding 1/2 places the last bit of half at the last bit of float
    float shifted = bit_cast<float>(magnitude) + 0.5f;
    return static_cast<u16>(sign | (bit_cast<u32>(shifted) - 0x3f000000u));
  }
  u32 odd = magnitude >> 13 & 1;
  return static_cast<u16>(sign | ((magnitude - 0x38000000u + 0xfffu + odd) >> 13));
}
inline float f16_to_float(u16 h) {
  u32 sign = static_cast<u32>(h & 0x8000u) << 16, exponent = h >> 10 & 31, fraction = h & 0x3ffu;
  if (exponent == 31) return bit_cast<float>(sign | 0x7f800000u | fraction << 13);
  if (exponent) return bit_cast<float>(sign | (exponent + 112) << 23 | fraction << 13);
  float v = static_cast<float>(fraction) * 0x1p-24f;
  return sign ? -v : v;
}

// cvt.rna: to nearest, ties away from zero.
inline u32 float_to_tf32(float f) {
  u32 v = bit_cast<u32>(f);
  if (is_nan_bits(v)) return 0x7fffffffu;
  if ((v & 0x7f800000u) == 0x7f800000u) return v;
  return (v + 0x1000u) & 0xffffe000u;
}
// The tensor core does not look at the lower 13 bits.
inline float tf32_to_float(u32 v) { return bit_cast<float>(v & 0xffffe000u); }

}  // namespace kitsune::emulator
