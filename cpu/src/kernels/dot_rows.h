// Products of two rows that lie at offsets, by heads: the gradient of an edge's weight is one of the rows at its two ends.
#pragma once

#include "rows.h"

namespace kitsune::cpu::KITSUNE_ISA {

#if defined(__AVX512F__)
// The sums of the halves of four vectors, in their order: 8 numbers.
KITSUNE_INLINE __m256 sums_of_halves(VF a_, VF b_, VF c_, VF d_) {
  const __m512 a = (__m512)a_, b = (__m512)b_, c = (__m512)c_, d = (__m512)d_;
  const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
  // Each quarter has a quarter's sums of a, b, c, d.
  const __m512 all = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
  const __m512 both = _mm512_add_ps(all, _mm512_shuffle_f32x4(all, all, 0xb1));
  const __m128 first = _mm512_castps512_ps128(both), second = _mm512_extractf32x4_ps(both, 2);
  return _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_unpacklo_ps(first, second)), _mm_unpackhi_ps(first, second), 1);
}

template <class T>
KITSUNE_INLINE void dot_heads(const T* x, const T* y, int64_t heads, int64_t inner, float* out) {
  if (inner == 8 && heads % 8 == 0) {
    for (int64_t h = 0; h < heads; h += 8, x += 64, y += 64) {
      VF product[4];
      KITSUNE_UNROLL
      for (int v = 0; v < 4; ++v)
        product[v] = some_floats(x + v * kFloats, __mmask16(-1)) * some_floats(y + v * kFloats, __mmask16(-1));
      _mm256_storeu_ps(out + h, sums_of_halves(product[0], product[1], product[2], product[3]));
    }
    return;
  }
  for (int64_t h = 0; h < heads; ++h, x += inner, y += inner) {
    VF sum = {};
    for (int64_t k = 0; k < inner; k += kFloats) {
      const int64_t left = inner - k;
      const __mmask16 mask = __mmask16(left >= kFloats ? 0xffff : (1 << left) - 1);
      sum += some_floats(x + k, mask) * some_floats(y + k, mask);
    }
    out[h] = _mm512_reduce_add_ps((__m512)sum);
  }
}
#else
template <class T>
KITSUNE_INLINE void dot_heads(const T* x, const T* y, int64_t heads, int64_t inner, float* out) {
  for (int64_t h = 0; h < heads; ++h, x += inner, y += inner) {
    float sums[8] = {};
    int64_t k = 0;
    for (; k + 8 <= inner; k += 8)
      for (int j = 0; j < 8; ++j) sums[j] += convert<float>(x[k + j]) * convert<float>(y[k + j]);
    for (int j = 0; k + j < inner; ++j) sums[j] += convert<float>(x[k + j]) * convert<float>(y[k + j]);
    for (int width = 4; width >= 1; width /= 2)
      for (int j = 0; j < width; ++j) sums[j] += sums[j + width];
    out[h] = sums[0];
  }
}
#endif

template <class T>
void dot_rows(int64_t n, const int64_t* x_at, const void* x_, const int64_t* y_at, const void* y_, int64_t heads, int64_t inner,
              float* out, int64_t step) {
  const char *x = static_cast<const char*>(x_), *y = static_cast<const char*>(y_);
  const int64_t bytes = heads * inner * int64_t(sizeof(T)), ahead = rows_ahead(bytes);
  for (int64_t i = 0; i < n; ++i) {
    if (i + ahead < n) {
      fetch_row<0>(x + x_at[i + ahead], bytes);
      fetch_row<0>(y + y_at[i + ahead], bytes);
    }
    dot_heads(reinterpret_cast<const T*>(x + x_at[i]), reinterpret_cast<const T*>(y + y_at[i]), heads, inner, out + i * step);
  }
}

inline DotRowsFn dot_rows_function(DType storage) {
  switch (storage) {
    case DType::kF32: return &dot_rows<float>;
    case DType::kBF16: return &dot_rows<BFloat16>;
    case DType::kF16: return &dot_rows<Half>;
    default: return nullptr;
  }
}

}  // namespace kitsune::cpu::KITSUNE_ISA
