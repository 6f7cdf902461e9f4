// Float vectors rounded to a 16-bit type and widened again: the value that a store to that type and a load would give. And tables
// of something for every value of such a type.
//
// Every operator's result is rounded so where its dtype has 16 bits (targets/cpu/facts.py). Ties go to even; NaN stays NaN.
#pragma once

#include "scalar.h"

namespace kitsune::cpu::KITSUNE_ISA {

struct ToBFloat16 {
  using Storage = BFloat16;
  static constexpr DType kType = DType::kBF16;

  static KITSUNE_INLINE VF apply(VF v) {
#if defined(__AVX512BF16__)  // three instructions; it takes denormals for zeros, of which XLA's threads make none
    return (VF)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)v)), 16);
#else
    const VU u = (VU)v, nan = (VU)(v != v);  // whose bits may overflow into its sign
    return (VF)(((u + 0x7fffu + (u >> 16 & 1u)) | nan) & 0xffff0000u);
#endif
  }

  // The 16 bits of each rounded element. By integers, whose result is there sooner than that of a conversion.
  static KITSUNE_INLINE VU bits(VF v) {
    const VU u = (VU)v, nan = (VU)(v != v) & 0x7fc00000u;
    return ((u + 0x7fffu + (u >> 16 & 1u)) | nan) >> 16;
  }
  // The same of elements that have no more bits.
  static KITSUNE_INLINE VU bits_of_exact(VF v) { return (VU)v >> 16; }
};

struct ToFloat16 {
  using Storage = Half;
  static constexpr DType kType = DType::kF16;

  static KITSUNE_INLINE VF apply(VF v) {
#if defined(__AVX512F__)
    return (VF)_mm512_cvtph_ps(_mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
    return (VF)_mm256_cvtph_ps(_mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT));
#elif defined(KITSUNE_NEON)
    return (VF)vcvt_f32_f16(vcvt_f16_f32((float32x4_t)v));
#else
    for (int k = 0; k < kFloats; ++k) v[k] = to_float(to_half(v[k]));
    return v;
#endif
  }

  static KITSUNE_INLINE VU bits(VF v) {
#if defined(__AVX512F__)
    return (VU)_mm512_cvtepu16_epi32(_mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__) && defined(__AVX2__)
    return (VU)_mm256_cvtepu16_epi32(_mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT));
#else
    VU u;
    for (int k = 0; k < kFloats; ++k) u[k] = to_half(v[k]).bits;
    return u;
#endif
  }
  static KITSUNE_INLINE VU bits_of_exact(VF v) { return bits(v); }
};

// table[i] of 65 536 numbers, for indices below that.
KITSUNE_INLINE VF look_up(const float* table, VU i) {
#if defined(__AVX512F__)
  return (VF)_mm512_i32gather_ps((__m512i)i, table, 4);
#elif defined(__AVX2__)
  return (VF)_mm256_i32gather_ps(table, (__m256i)i, 4);
#else
  VF v;
  for (int k = 0; k < kFloats; ++k) v[k] = table[i[k]];
  return v;
#endif
}

struct NotRounded {
  static KITSUNE_INLINE VF apply(VF v) { return v; }
};

template <class Round>
constexpr bool kRounds = !kSame<Round, NotRounded>;

}  // namespace kitsune::cpu::KITSUNE_ISA
