// Folds of rows that are a few vectors long, sixteen at a time: acc[r] <- the fold of the n elements that lie at src + r * row.
//
// The lanes of one vector are folded in four steps, each of which uses half as many of them as the one before. Of sixteen rows, the
// halves that a step leaves unused hold those of other rows, so that all sixteen take the steps of about three.
#pragma once

#include "fold.h"
#include "strip_ops.h"

namespace kitsune::cpu::KITSUNE_ISA {

constexpr int64_t kLongestShortRow = 64;  // sum_dense adds the lanes of four vectors, and longer rows to the same lanes

#if defined(__AVX512F__)
struct SumOfRow {
  static constexpr float kNothing = 0.0f;
  static KITSUNE_INLINE __m512 apply(__m512 x, __m512 y) { return _mm512_add_ps(x, y); }
};
template <bool Maximum>
struct ExtremumOfRow {
  static constexpr float kNothing = Maximum ? -__builtin_inff() : __builtin_inff();
  static KITSUNE_INLINE __m512 apply(__m512 x, __m512 y) { return (__m512)strips::ExtremumF<Maximum>::apply((VF)x, (VF)y); }
};

// Lane r of the result is the fold of rows[r], with the lanes paired as _mm512_reduce_add_ps pairs them.
template <class Op>
KITSUNE_INLINE __m512 fold_sixteen(const __m512 (&rows)[16]) {
  __m512 half[8], quarter[4], eighth[2];
  KITSUNE_UNROLL
  for (int j = 0; j < 8; ++j) {  // of rows j and j + 4, of 8 + j and 12 + j: 8 lanes of each
    const __m512 a = rows[j % 4 + j / 4 * 8], b = rows[j % 4 + j / 4 * 8 + 4];
    half[j] = Op::apply(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
  }
  KITSUNE_UNROLL
  for (int j = 0; j < 4; ++j) {  // of rows j, j + 4, j + 8 and j + 12: 4 lanes of each
    const __m512 a = half[j], b = half[j + 4];
    quarter[j] = Op::apply(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
  }
  KITSUNE_UNROLL
  for (int j = 0; j < 2; ++j) {
    const __m512 a = quarter[2 * j], b = quarter[2 * j + 1];
    eighth[j] = Op::apply(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xee));
  }
  return Op::apply(_mm512_shuffle_ps(eighth[0], eighth[1], 0x88), _mm512_shuffle_ps(eighth[0], eighth[1], 0xdd));
}

// A row of up to V vectors as one, in the order of sum_dense; `last`: of its last vector.
template <class Op, int V>
KITSUNE_INLINE __m512 folded_row(const float* x, __mmask16 last) {
  const __m512 nothing = _mm512_set1_ps(Op::kNothing);
  __m512 v[4] = {nothing, nothing, nothing, nothing};
  KITSUNE_UNROLL
  for (int k = 0; k < V; ++k) v[k] = k < V - 1 ? _mm512_loadu_ps(x + 16 * k) : _mm512_mask_loadu_ps(nothing, last, x + 16 * k);
  if constexpr (V > 2) v[0] = Op::apply(v[0], v[2]);
  if constexpr (V > 3) v[1] = Op::apply(v[1], v[3]);
  if constexpr (V > 1) v[0] = Op::apply(v[0], v[1]);
  return v[0];
}

template <class Op, int V>
void fold_short_rows(int64_t count, int64_t n, const float* x, int64_t row, float* acc) {
  const __mmask16 last = __mmask16(0xffff >> (16 * V - n));
  for (int64_t r = 0; r < count; r += 16) {
    const int64_t here = min_of<int64_t>(16, count - r);
    __m512 rows[16];
    KITSUNE_UNROLL
    for (int j = 0; j < 16; ++j) rows[j] = folded_row<Op, V>(x + (r + min_of<int64_t>(j, here - 1)) * row, last);
    _mm512_mask_storeu_ps(acc + r, __mmask16(0xffff >> (16 - here)), fold_sixteen<Op>(rows));
  }
}

template <class Op>
void fold_short(int64_t count, int64_t n, const void* src, int64_t row, void* acc) {
  const auto* x = static_cast<const float*>(src);
  auto* to = static_cast<float*>(acc);
  switch ((n + 15) / 16) {
    case 1: return fold_short_rows<Op, 1>(count, n, x, row, to);
    case 2: return fold_short_rows<Op, 2>(count, n, x, row, to);
    case 3: return fold_short_rows<Op, 3>(count, n, x, row, to);
    default: return fold_short_rows<Op, 4>(count, n, x, row, to);
  }
}
#endif

// Of rows of 1 to `longest` elements; nullptr: there is no code for those.
inline FoldShortFn fold_short_function(int how, DType storage, int64_t longest) {
#if defined(__AVX512F__)
  if (storage == DType::kF32 && longest <= kLongestShortRow) {
    if (how == kSum) return &fold_short<SumOfRow>;
    if (how == kMax) return &fold_short<ExtremumOfRow<true>>;
    if (how == kMin) return &fold_short<ExtremumOfRow<false>>;
  }
#endif
  (void)how, (void)storage, (void)longest;
  return nullptr;
}

}  // namespace kitsune::cpu::KITSUNE_ISA
