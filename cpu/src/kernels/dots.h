// Products of small matrices that are used once: Y is read as it lies, because packing it would cost as much as the product.
//
// Where K is contiguous in both, a vector runs along K, and its lanes are added up in the end. Where N is contiguous in Y, a vector
// runs along N. Both keep blocks of results in registers.
#pragma once

#include "load_store.h"
#include "rows.h"

namespace kitsune::cpu::KITSUNE_ISA {

#if defined(__AVX512F__)
constexpr int kDotRows = 4, kDotColumns = 4;  // of a block whose vectors run along K: 16 sums
// Vectors along N: few rows take more of them, so that more of a row of Y is read at once.
constexpr int kSpreadRows = 6, kSpreadVectors = 4, kFewRows = 2, kWideVectors = 8;

// Vectors along K of one type, and their product.
template <class T>
struct AlongK {
  static constexpr int kStep = kFloats;
  static KITSUNE_INLINE VF load(const T* x, __mmask32 mask) { return some_floats(x, __mmask16(mask)); }
  static KITSUNE_INLINE VF multiply_add(VF sum, VF x, VF y) { return (VF)_mm512_fmadd_ps((__m512)x, (__m512)y, (__m512)sum); }
};
#if defined(__AVX512BF16__)
template <>
struct AlongK<BFloat16> {
  static constexpr int kStep = 2 * kFloats;
  static KITSUNE_INLINE __m512bh load(const BFloat16* x, __mmask32 mask) { return (__m512bh)_mm512_maskz_loadu_epi16(mask, x); }
  static KITSUNE_INLINE VF multiply_add(VF sum, __m512bh x, __m512bh y) { return (VF)_mm512_dpbf16_ps((__m512)sum, x, y); }
};
#endif

// The sums of the lanes of four vectors.
KITSUNE_INLINE __m128 sums_of_four(VF a_, VF b_, VF c_, VF d_) {
  const __m512 a = (__m512)a_, b = (__m512)b_, c = (__m512)c_, d = (__m512)d_;
  const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
  const __m512 all = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
  return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}

// c[i][j] <- x[i] . y[j] for `rows` i and kDotColumns j, of which `columns` are stored.
template <class T, int Rows>
KITSUNE_INLINE void dot_block(const DotArgs& d, const T* x, const T* y, int64_t columns, float* c, int64_t ldc) {
  using A = AlongK<T>;
  VF sum[Rows][kDotColumns] = {};
  const T* column[kDotColumns];
  for (int j = 0; j < kDotColumns; ++j) column[j] = y + min_of<int64_t>(j, columns - 1) * d.y_n;
  for (int64_t k = 0; k < d.k; k += A::kStep) {
    const int64_t left = d.k - k;
    const __mmask32 mask = left >= A::kStep ? ~__mmask32(0) : __mmask32((uint64_t(1) << left) - 1);
    decltype(A::load(y, mask)) v[kDotColumns];
    KITSUNE_UNROLL
    for (int j = 0; j < kDotColumns; ++j) v[j] = A::load(column[j] + k, mask);
    KITSUNE_UNROLL
    for (int i = 0; i < Rows; ++i) {
      const auto u = A::load(x + i * d.ldx + k, mask);
      KITSUNE_UNROLL
      for (int j = 0; j < kDotColumns; ++j) sum[i][j] = A::multiply_add(sum[i][j], u, v[j]);
    }
  }
  const __mmask8 stored = __mmask8((1u << columns) - 1);
  KITSUNE_UNROLL
  for (int i = 0; i < Rows; ++i) _mm_mask_storeu_ps(c + i * ldc, stored, sums_of_four(sum[i][0], sum[i][1], sum[i][2], sum[i][3]));
}

// Where x and y are one matrix, the blocks above the diagonal mirror those below it.
template <class T>
void dot_along_k(const DotArgs& d, float* c, int64_t ldc) {
  const T *x = static_cast<const T*>(d.x), *y = static_cast<const T*>(d.y);
  // Rows of y come from memory once: all rows of x meet them while they are near.
  for (int64_t j = 0; j < d.n; j += kDotColumns) {
    const int64_t columns = min_of<int64_t>(kDotColumns, d.n - j);
    for (int64_t i = d.symmetric ? j / kDotRows * kDotRows : 0; i < d.m; i += kDotRows) {
      const int64_t rows = min_of<int64_t>(kDotRows, d.m - i);
      const T *from = x + i * d.ldx, *to = y + j * d.y_n;
      float* out = c + i * ldc + j;
      switch (rows) {
        case 4: dot_block<T, 4>(d, from, to, columns, out, ldc); break;
        case 3: dot_block<T, 3>(d, from, to, columns, out, ldc); break;
        case 2: dot_block<T, 2>(d, from, to, columns, out, ldc); break;
        default: dot_block<T, 1>(d, from, to, columns, out, ldc);
      }
    }
  }
  if (!d.symmetric) return;
  for (int64_t i = 0; i < d.m; ++i)
    for (int64_t j = i + 1; j < d.n; ++j) c[i * ldc + j] = c[j * ldc + i];
}

template <class T, int Rows, int Vectors = kSpreadVectors>
KITSUNE_INLINE void spread_block(const DotArgs& d, const float* x, const T* y, int64_t columns, float* c, int64_t ldc) {
  VF sum[Rows][Vectors] = {};
  __mmask16 mask[Vectors];
  for (int v = 0; v < Vectors; ++v) {
    const int64_t left = columns - v * kFloats;
    mask[v] = __mmask16(left >= kFloats ? 0xffff : left <= 0 ? 0 : (1u << left) - 1);
  }
  for (int64_t k = 0; k < d.k; ++k) {
    VF row[Vectors];
    KITSUNE_UNROLL
    for (int v = 0; v < Vectors; ++v) row[v] = some_floats(y + k * d.y_k + v * kFloats, mask[v]);
    KITSUNE_UNROLL
    for (int i = 0; i < Rows; ++i) {
      const VF u = splat<VF>(x[i * d.k + k]);
      KITSUNE_UNROLL
      for (int v = 0; v < Vectors; ++v) sum[i][v] += u * row[v];
    }
  }
  KITSUNE_UNROLL
  for (int i = 0; i < Rows; ++i) {
    KITSUNE_UNROLL
    for (int v = 0; v < Vectors; ++v)
      if (mask[v] != 0) _mm512_mask_storeu_ps(c + i * ldc + v * kFloats, mask[v], (__m512)sum[i][v]);
  }
}

// `x` is dense, and of float32 already.
template <class T>
void dot_along_n(const DotArgs& d, const float* x, float* c, int64_t ldc) {
  if (d.m <= kFewRows) {
    constexpr int64_t kWide = kWideVectors * kFloats;
    for (int64_t j = 0; j < d.n; j += kWide) {
      const T* y = static_cast<const T*>(d.y) + j;
      if (d.m == 2)
        spread_block<T, 2, kWideVectors>(d, x, y, min_of(kWide, d.n - j), c + j, ldc);
      else
        spread_block<T, 1, kWideVectors>(d, x, y, min_of(kWide, d.n - j), c + j, ldc);
    }
    return;
  }
  constexpr int64_t kColumns = kSpreadVectors * kFloats;
  for (int64_t j = 0; j < d.n; j += kColumns)
    for (int64_t i = 0; i < d.m; i += kSpreadRows) {
      const int64_t columns = min_of(kColumns, d.n - j);
      const T* y = static_cast<const T*>(d.y) + j;
      const float* from = x + i * d.k;
      float* out = c + i * ldc + j;
      switch (min_of<int64_t>(kSpreadRows, d.m - i)) {
        case 6: spread_block<T, 6>(d, from, y, columns, out, ldc); break;
        case 5: spread_block<T, 5>(d, from, y, columns, out, ldc); break;
        case 4: spread_block<T, 4>(d, from, y, columns, out, ldc); break;
        case 3: spread_block<T, 3>(d, from, y, columns, out, ldc); break;
        case 2: spread_block<T, 2>(d, from, y, columns, out, ldc); break;
        default: spread_block<T, 1>(d, from, y, columns, out, ldc);
      }
    }
}

template <class T>
void dot_as(const DotArgs& d) {
  float* scratch = static_cast<float*>(d.scratch);
  const bool straight = d.c_dtype == DType::kF32;
  float* c = straight ? static_cast<float*>(d.c) : scratch + d.m * d.k;
  const int64_t ldc = straight ? d.ldc : d.n;
  if (d.y_k == 1) {
    dot_along_k<T>(d, c, ldc);
  } else {
    for (int64_t i = 0; i < d.m; ++i)
      for (int64_t k = 0; k < d.k; ++k) scratch[i * d.k + k] = convert<float>(static_cast<const T*>(d.x)[i * d.ldx + k]);
    dot_along_n<T>(d, scratch, c, ldc);
  }
  if (straight) return;
  for (int64_t i = 0; i < d.m; ++i) {
    if (d.c_dtype == DType::kBF16)
      convert_dense(d.n, static_cast<BFloat16*>(d.c) + i * d.ldc, static_cast<const float*>(c + i * ldc));
    else
      convert_dense(d.n, static_cast<Half*>(d.c) + i * d.ldc, static_cast<const float*>(c + i * ldc));
  }
}

inline DotFn dot_function(DType type) {
  switch (type) {
    case DType::kF32: return &dot_as<float>;
    case DType::kBF16: return &dot_as<BFloat16>;
    case DType::kF16: return &dot_as<Half>;
    default: return nullptr;
  }
}
#else
inline DotFn dot_function(DType) { return nullptr; }
#endif

}  // namespace kitsune::cpu::KITSUNE_ISA
