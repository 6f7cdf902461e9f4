// C += X^T Y where X has few columns: a product of one row, or of a few, with a weight as it lies in memory (a token that is
// generated, the queries that share a head of keys).
//
// Such a product takes as long as Y takes to arrive. So Y is not packed: its rows are read once, in their order, some of them at a
// time, and added to C, which the first-level cache holds.
#pragma once

#include "gemm.h"
#include "rows.h"

namespace kitsune::cpu::KITSUNE_ISA {

constexpr int64_t kFewSums = 4;  // rows of C
constexpr int kJoinedRows = 8;   // rows of Y that are added to C in one pass over it

inline bool has_few_sums(const OuterArgs& g) { return g.M <= kFewSums && (g.panel == Panel::kF32 || g.panel == Panel::kBF16); }

template <class T>
KITSUNE_INLINE VF floats_of(const T* from) {
  if constexpr (kSame<T, float>) return load_vector<VF>(from);
#if defined(__AVX512F__)
  return some_floats(from, __mmask16(-1));
#else
#if defined(__AVX2__) && defined(__F16C__)
  const __m128i sixteen = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  if constexpr (kSame<T, BFloat16>) return (VF)_mm256_slli_epi32(_mm256_cvtepu16_epi32(sixteen), 16);
  if constexpr (kSame<T, Half>) return (VF)_mm256_cvtph_ps(sixteen);
#endif
  VF v;
  for (int i = 0; i < kFloats; ++i) v[i] = convert<float>(from[i]);
  return v;
#endif
}

// The same as add_joined for fewer columns than a vector has lanes: x[j * rows + m], of `rows` rows of C. Not inline, because
// compilers would unroll it for each number of rows.
template <class T, int J>
KITSUNE_ONCE void add_last_columns(const float* x, int rows, const T* y, int64_t ldy, float* c, int64_t next, int64_t columns) {
  for (int64_t n = 0; n < columns; ++n) {
    float column[J];
    for (int j = 0; j < J; ++j) column[j] = convert<float>(y[j * ldy + n]);
    for (int m = 0; m < rows; ++m) {
      float sum = c[m * next + n];
      for (int j = 0; j < J; ++j) sum += x[j * rows + m] * column[j];
      c[m * next + n] = sum;
    }
  }
}

// c[m][n] += the sum over j < J of x[j][m] * y[j][n], for M rows of C that are `next` apart.
template <class T, int M, int J>
KITSUNE_INLINE void add_joined(const float (&x)[J][M], const T* y, int64_t ldy, float* c, int64_t next, int64_t columns) {
  int64_t n = 0;
  for (; n + kFloats <= columns; n += kFloats) {
    VF row[J], sum[M];
    KITSUNE_UNROLL
    for (int j = 0; j < J; ++j) row[j] = floats_of(y + j * ldy + n);
    KITSUNE_UNROLL
    for (int m = 0; m < M; ++m) sum[m] = load_vector<VF>(c + m * next + n);
    KITSUNE_UNROLL
    for (int m = 0; m < M; ++m) {
      KITSUNE_UNROLL
      for (int j = 0; j < J; ++j) sum[m] += splat<VF>(x[j][m]) * row[j];
    }
    KITSUNE_UNROLL
    for (int m = 0; m < M; ++m) store_vector(c + m * next + n, sum[m]);
  }
  if (n < columns) add_last_columns<T, J>(&x[0][0], M, y + n, ldy, c + n, next, columns - n);
}

template <class T, int M, int J>
__attribute__((noinline)) void add_rows(const OuterArgs& g, int64_t r) {
  float x[J][M];
  const T *from = static_cast<const T*>(g.x) + r * g.ldx, *y = static_cast<const T*>(g.y) + r * g.ldy;
  for (int j = 0; j < J; ++j) {
    for (int m = 0; m < M; ++m) x[j][m] = convert<float>(from[j * g.ldx + m]);
  }
  float* c = static_cast<float*>(g.c);
  if constexpr (M == 1) return add_joined<T, M, J>(x, y, g.ldy, c, 0, g.N);  // one row of C lies together
  for (int64_t n = 0; n < g.N; n += kSumGroup)
    add_joined<T, M, J>(x, y + n, g.ldy, c + sum_offset(M, g.N, 0, n), group_columns(g.N, n), group_columns(g.N, n));
}

template <class T, int M>
void add_all_rows(const OuterArgs& g) {
  int64_t r = 0;
  for (; r + kJoinedRows <= g.R; r += kJoinedRows) add_rows<T, M, kJoinedRows>(g, r);
  for (; r < g.R; ++r) add_rows<T, M, 1>(g, r);
}

template <class T, int M = kFewSums>
void add_few_sums(const OuterArgs& g) {
  if constexpr (M >= 1) {
    if (g.M == M) return add_all_rows<T, M>(g);
    return add_few_sums<T, M - 1>(g);
  }
}

inline void few_sums(const OuterArgs& g) {
  if (g.first) __builtin_memset(g.c, 0, size_t(g.M * g.N) * sizeof(float));
  switch (g.dtype) {
    case DType::kF32: return add_few_sums<float>(g);
    case DType::kBF16: return add_few_sums<BFloat16>(g);
    default: return add_few_sums<Half>(g);
  }
}

}  // namespace kitsune::cpu::KITSUNE_ISA
