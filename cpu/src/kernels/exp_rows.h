// e^(x factor - shift) of a row and its sum: the middle of a softmax in one pass.
#pragma once

#include "vector_math.h"

namespace kitsune::cpu::KITSUNE_ISA {

// e^x; where the CPU has no instruction that scales by a power of two, results below the normal numbers are 0, as XLA's threads,
// which flush them, have it.
KITSUNE_INLINE VF exp_of_scores(VF x) {
#if defined(__AVX512F__)
  const VF near = (VF)_mm512_min_ps((__m512)splat<VF>(89.0f), _mm512_max_ps((__m512)splat<VF>(-104.0f), (__m512)x));
  const VF n = (near * 1.44269504088896341f + kFloatMagic) - kFloatMagic;
  const VF r = near - n * 0.693359375f;
  return scale_by_power(exp_reduced(r - n * -2.12194440e-4f), n);
#elif defined(__AVX2__)
  // The power is added to the exponent of e^r, which lies in [0.7, 1.42]: in these bounds the sum is the exponent of a normal
  // number.
  constexpr float kLeast = -0x1.5d589ep+6f, kMost = 0x1.62e42ep+6f;  // ln 2^-126, ln 2^128
  const __m256 least = (__m256)splat<VF>(kLeast), most = (__m256)splat<VF>(kMost);
  const VF near = (VF)_mm256_min_ps(most, _mm256_max_ps(least, (__m256)x));  // of a NaN the second operand
  const VF shifted = near * 1.44269504088896341f + kFloatMagic;              // n in its low bits
  const VF n = shifted - kFloatMagic, r = near - n * 0.693359375f;
  const VU power = (VU)shifted << 23;
  const __m256 e = (__m256)((VU)exp_reduced(r - n * -2.12194440e-4f) + power);
  const __m256 beyond = (__m256)(x + kFloatInfinity);  // of NaN: NaN
  const __m256 kept = _mm256_andnot_ps(_mm256_cmp_ps((__m256)x, least, _CMP_LT_OQ), e);
  return (VF)_mm256_blendv_ps(kept, beyond, _mm256_cmp_ps((__m256)x, most, _CMP_NLE_UQ));
#else
  return exp(x);
#endif
}

// out[j] <- e^(x[j] factor - shift) for j < n, and their sum; `out` may be `x`.
inline float exp_row(int64_t n, const float* x, float factor, float shift, float* out) {
  constexpr int kVectors = 4;
  const VF scale = splat<VF>(factor), from = splat<VF>(shift);
  VF sum[kVectors] = {};
  int64_t j = 0;
  for (; j + kVectors * kFloats <= n; j += kVectors * kFloats) {
    KITSUNE_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      const VF e = exp_of_scores(load_vector<VF>(x + j + v * kFloats) * scale - from);
      store_vector(out + j + v * kFloats, e);
      sum[v] += e;
    }
  }
  for (; j < n; j += kFloats) {
    const int64_t here = min_of(int64_t(kFloats), n - j);
    alignas(64) float some[kFloats] = {};
    __builtin_memcpy(some, x + j, size_t(here) * sizeof(float));
    store_vector(some, exp_of_scores(load_vector<VF>(some) * scale - from));
    __builtin_memcpy(out + j, some, size_t(here) * sizeof(float));
    for (int64_t i = here; i < kFloats; ++i) some[i] = 0;
    sum[0] += load_vector<VF>(some);
  }
  const VF all = (sum[0] + sum[1]) + (sum[2] + sum[3]);
  float total = 0;
  for (int i = 0; i < kFloats; ++i) total += all[i];
  return total;
}

}  // namespace kitsune::cpu::KITSUNE_ISA
