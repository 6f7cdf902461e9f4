// e^(x factor - shift) of a row and its sum: the middle of a softmax in one pass.
#pragma once

#include "rounding.h"
#include "vector_math.h"

namespace kitsune::cpu::KITSUNE_ISA {

// e^x; where the CPU has no instruction that scales by a power of two, results below the normal numbers are 0, as XLA's threads,
// which flush them, have it.
// kCoarse: with a relative error of 2^-17, for results that are rounded to bfloat16.
template <bool kCoarse>
KITSUNE_INLINE VF exp_of_scores(VF x) {
#if defined(__AVX512F__)
  if constexpr (kCoarse) {              // 2^u: the instruction that scales takes the whole part of u, infinite or not
    constexpr int kMinusFloor = 1 | 8;  // and no exception
    static const float c[] = {1.0000026226f, 6.9300383329e-1f, 2.4144275486e-1f, 5.2011460066e-2f, 1.3534167781e-2f};
    const VF u = x * 1.44269504088896341f;
    return scale_by_power(polynomial((VF)_mm512_reduce_ps((__m512)u, kMinusFloor), c), u);
  }
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

// A vector of elements of x as floats, and the reverse, of float or bfloat16; `mask`: which of them there are.
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
constexpr bool kNarrowRows = true;

template <class T>
KITSUNE_INLINE VF load_some(const T* x, __mmask16 mask) {
  if constexpr (kSame<T, float>) return (VF)_mm512_maskz_loadu_ps(mask, x);
  return (VF)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, x)), 16);
}

template <class T>
KITSUNE_INLINE void store_some(T* to, VF v, __mmask16 mask) {
  if constexpr (kSame<T, float>) {
    _mm512_mask_storeu_ps(to, mask, (__m512)v);
  } else {
#if defined(__AVX512BF16__)
    _mm256_mask_storeu_epi16(to, mask, (__m256i)_mm512_cvtneps_pbh((__m512)v));
#else
    _mm256_mask_storeu_epi16(to, mask, _mm512_cvtepi32_epi16((__m512i)ToBFloat16::bits(v)));
#endif
  }
}

// out[j] <- e^(x[j] factor - shift) for j < n, and their sum; `out` may be `x`, if both have one type. Rounded results have 17 bits
// before they are rounded to 8.
template <class X, class Out>
float exp_row(int64_t n, const void* x_, float factor, float shift, void* out_) {
  constexpr int kVectors = 4;
  const X* x = static_cast<const X*>(x_);
  Out* out = static_cast<Out*>(out_);
  const VF scale = splat<VF>(factor), from = splat<VF>(shift);
  auto value = [&](VF v) { return exp_of_scores<kSame<Out, BFloat16>>(v * scale - from); };
  VF sum[kVectors] = {};
  int64_t j = 0;
  for (; j + kVectors * kFloats <= n; j += kVectors * kFloats) {
    VF e[kVectors];
    KITSUNE_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      e[v] = value(load_some(x + j + v * kFloats, 0xffff));
      sum[v] += e[v];
    }
    KITSUNE_UNROLL
    for (int v = 0; v < kVectors; v += 2) {
#if defined(__AVX512BF16__)
      if constexpr (kSame<Out, BFloat16>) {
        _mm512_storeu_si512(out + j + v * kFloats, (__m512i)_mm512_cvtne2ps_pbh((__m512)e[v + 1], (__m512)e[v]));
        continue;
      }
#endif
      store_some(out + j + v * kFloats, e[v], 0xffff);
      store_some(out + j + (v + 1) * kFloats, e[v + 1], 0xffff);
    }
  }
  for (; j < n; j += kFloats) {
    const int64_t left = n - j;
    const __mmask16 mask = __mmask16(left >= kFloats ? 0xffff : (1 << left) - 1);
    const VF e = value(load_some(x + j, mask));
    store_some(out + j, e, mask);
    sum[0] = (VF)_mm512_mask_add_ps((__m512)sum[0], mask, (__m512)sum[0], (__m512)e);
  }
  return _mm512_reduce_add_ps((__m512)((sum[0] + sum[1]) + (sum[2] + sum[3])));
}
#else
constexpr bool kNarrowRows = false;

template <class X, class Out>
float exp_row(int64_t n, const void* x_, float factor, float shift, void* out_) {
  static_assert(kSame<X, float> && kSame<Out, float>);
  constexpr int kVectors = 4;
  const float* x = static_cast<const float*>(x_);
  float* out = static_cast<float*>(out_);
  const VF scale = splat<VF>(factor), from = splat<VF>(shift);
  VF sum[kVectors] = {};
  int64_t j = 0;
  for (; j + kVectors * kFloats <= n; j += kVectors * kFloats) {
    KITSUNE_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      const VF e = exp_of_scores<false>(load_vector<VF>(x + j + v * kFloats) * scale - from);
      store_vector(out + j + v * kFloats, e);
      sum[v] += e;
    }
  }
  for (; j < n; j += kFloats) {
    const int64_t here = min_of(int64_t(kFloats), n - j);
    alignas(64) float some[kFloats] = {};
    __builtin_memcpy(some, x + j, size_t(here) * sizeof(float));
    store_vector(some, exp_of_scores<false>(load_vector<VF>(some) * scale - from));
    __builtin_memcpy(out + j, some, size_t(here) * sizeof(float));
    for (int64_t i = here; i < kFloats; ++i) some[i] = 0;
    sum[0] += load_vector<VF>(some);
  }
  const VF all = (sum[0] + sum[1]) + (sum[2] + sum[3]);
  float total = 0;
  for (int i = 0; i < kFloats; ++i) total += all[i];
  return total;
}
#endif

// Of x and results that are float or bfloat16; nullptr: there is no code for these.
inline ExpRowFn exp_row_function(DType x, DType out) {
  if (x == DType::kF32 && out == DType::kF32) return &exp_row<float, float>;
  if constexpr (kNarrowRows) {
    if (x == DType::kF32 && out == DType::kBF16) return &exp_row<float, BFloat16>;
    if (x == DType::kBF16 && out == DType::kF32) return &exp_row<BFloat16, float>;
    if (x == DType::kBF16 && out == DType::kBF16) return &exp_row<BFloat16, BFloat16>;
  }
  return nullptr;
}

}  // namespace kitsune::cpu::KITSUNE_ISA
