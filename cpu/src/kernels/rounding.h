// Float vectors rounded to a 16-bit type and widened again: the value that a store to that type and a load would give.
//
// Every operator's result is rounded so where its dtype has 16 bits (targets/cpu/facts.py). Ties go to even; NaN stays NaN.
#pragma once

#include "scalar.h"

namespace kitsune::cpu::KITSUNE_ISA {

struct ToBFloat16 {
  static KITSUNE_INLINE VF apply(VF v) {
#if defined(__AVX512BF16__)  // three instructions; it takes denormals for zeros, of which XLA's threads make none
    return (VF)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)v)), 16);
#else
    const VU u = (VU)v, nan = (VU)(v != v);  // whose bits may overflow into its sign
    return (VF)(((u + 0x7fffu + (u >> 16 & 1u)) | nan) & 0xffff0000u);
#endif
  }
};

struct ToFloat16 {
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
};

struct NotRounded {
  static KITSUNE_INLINE VF apply(VF v) { return v; }
};

template <class Round>
constexpr bool kRounds = !kSame<Round, NotRounded>;

}  // namespace kitsune::cpu::KITSUNE_ISA
