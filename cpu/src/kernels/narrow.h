// C = act(X W + bias) where W has a column or a few: the value head of a network, a logit.
//
// Across a panel such a product uses as many lanes as W has columns. So vectors run along K instead, through rows of X as they lie
// and columns of W that are brought together once, and the lanes are added up in the end. Rows of C lie one after the other, which
// makes one long row of them for the activation.
#pragma once

#include "dots.h"
#include "micro_kernel.h"

namespace kitsune::cpu::KITSUNE_ISA {

constexpr int64_t kNarrowColumns = 4, kNarrowDepth = 1024;  // at most

#if defined(__AVX512F__)
// Fewer rows do not pay for the columns of W; of a short K the lanes take longer to add up than to multiply.
inline bool is_narrow(const GemmArgs& g) {
  return g.panel == Panel::kF32 && !g.adds && g.N <= kNarrowColumns && g.M >= 8 && g.ldc == g.N && g.K >= 16 * g.N &&
         g.K <= kNarrowDepth;
}

// sums[i * N + n] <- bias[n] + x[i] . w[n] for 4 rows; where there are fewer, the others are the last one again.
template <int N>
KITSUNE_INLINE void four_narrow_rows(const float* x, int64_t lda, int64_t rows, int64_t K, const float* w, int64_t w_next,
                                     const float* bias, DType rounds, float* sums) {
  VF sum[4][N] = {};
  const float* row[4];
  for (int i = 0; i < 4; ++i) row[i] = x + min_of<int64_t>(i, rows - 1) * lda;
  for (int64_t k = 0; k < K; k += kFloats) {
    const int64_t left = K - k;
    const __mmask16 mask = __mmask16(left >= kFloats ? 0xffff : (1 << left) - 1);
    VF v[4];
    KITSUNE_UNROLL
    for (int i = 0; i < 4; ++i) v[i] = some_floats(row[i] + k, mask);
    KITSUNE_UNROLL
    for (int n = 0; n < N; ++n) {
      const VF u = load_vector<VF>(w + n * w_next + k);
      KITSUNE_UNROLL
      for (int i = 0; i < 4; ++i) sum[i][n] += v[i] * u;
    }
  }
  KITSUNE_UNROLL
  for (int n = 0; n < N; ++n) {
    alignas(16) float of_rows[4];
    __m128 total = sums_of_four(sum[0][n], sum[1][n], sum[2][n], sum[3][n]);
    if (rounds == DType::kBF16) total = _mm512_castps512_ps128((__m512)ToBFloat16::apply((VF)_mm512_zextps128_ps512(total)));
    if (rounds == DType::kF16) total = _mm_cvtph_ps(_mm_cvtps_ph(total, _MM_FROUND_TO_NEAREST_INT));
    _mm_store_ps(of_rows, _mm_add_ps(total, _mm_set1_ps(bias[n])));
    KITSUNE_UNROLL
    for (int i = 0; i < 4; ++i) sums[i * N + n] = of_rows[i];
  }
}

template <int N>
void multiply_narrow_as(const GemmArgs& g, int64_t m0, int64_t rows, const float* x, int64_t lda) {
  constexpr int64_t kRows = 64;  // whose sums wait for their activation
  alignas(64) float w[N * kNarrowDepth], sums[kRows * N];
  const int64_t depth = (g.K + kFloats - 1) / kFloats * kFloats;
  for (int n = 0; n < N; ++n) {
    for (int64_t k = 0; k < g.K; ++k) w[n * depth + k] = static_cast<const float*>(g.w)[k * kPanelFloats + n];
    for (int64_t k = g.K; k < depth; ++k) w[n * depth + k] = 0;
  }
  float bias[N] = {};
  if (g.bias) __builtin_memcpy(bias, g.bias, sizeof bias);
  char* c = static_cast<char*>(g.c) + size_t(m0 * N) * kItemSize[int(g.c_dtype)];
  for (int64_t r = 0; r < rows; r += kRows) {
    const int64_t here = min_of(kRows, rows - r);
    for (int64_t i = 0; i < here; i += 4)
      four_narrow_rows<N>(x + (r + i) * lda, lda, here - i, g.K, w, depth, bias, g.rounds, sums + i * N);
    Block b{};
    b.c = c + size_t(r * N) * kItemSize[int(g.c_dtype)];
    b.columns = here * N;
    b.c_dtype = g.c_dtype, b.act = g.act, b.act_a = g.act_a, b.act_b = g.act_b, b.rounds = g.rounds;
    finish_rows(b, 1, kRows * N, sums);
  }
}

inline void multiply_narrow(const GemmArgs& g, int64_t m0, int64_t rows, const float* x, int64_t lda) {
  switch (g.N) {
    case 1: return multiply_narrow_as<1>(g, m0, rows, x, lda);
    case 2: return multiply_narrow_as<2>(g, m0, rows, x, lda);
    case 3: return multiply_narrow_as<3>(g, m0, rows, x, lda);
    default: return multiply_narrow_as<4>(g, m0, rows, x, lda);
  }
}
#else
inline bool is_narrow(const GemmArgs&) { return false; }
inline void multiply_narrow(const GemmArgs&, int64_t, int64_t, const float*, int64_t) {}
#endif

}  // namespace kitsune::cpu::KITSUNE_ISA
