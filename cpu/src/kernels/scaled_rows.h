// Rows that lie at offsets, multiplied by numbers of their own and added up in runs: a sum over the edges of a node that reads the
// rows of other nodes where they are. fold_runs of rows.h is the same without the factors.
//
// Elements are shared out evenly among a row's factors: of 64 elements and 8 factors, the first 8 take the first one. A vector of
// elements reads the few factors that its lanes take as one vector and spreads them by a permutation.
#pragma once

#include "rows.h"

namespace kitsune::cpu::KITSUNE_ISA {

struct ScaledRuns {
  int64_t count;
  const int64_t *start, *at;
  const char* from;
  int64_t width;
  const int64_t* row;
  const float* factor;
  int64_t step, factors;
  void* const* into;
  Asking asking;
  int64_t inner() const { return width / factors; }
};

#if defined(__AVX512F__)
template <class From, int V, bool OneFactor>
void scaled_columns(const ScaledRuns& x, int64_t first, __mmask16 last) {
  const int64_t inner = x.inner();
  int64_t base[V];
  __m512i lane[V];
  __mmask16 there[V];
  for (int v = 0; v < V && !OneFactor; ++v) {
    const int64_t column = first + v * kFloats;
    base[v] = column / inner;
    int32_t lanes[kFloats];
    for (int64_t j = 0; j < kFloats; ++j) lanes[j] = int32_t(min_of(column + j, x.width - 1) / inner - base[v]);
    lane[v] = _mm512_loadu_si512(lanes);
    const int64_t left = x.factors - base[v];
    there[v] = __mmask16(left >= kFloats ? 0xffff : (1 << left) - 1);
  }
  const char* from = x.from + first * int64_t(sizeof(From));
  const bool ask = first == 0 && x.asking.known > 0;
  for (int64_t r = 0; r < x.count; ++r) {
    VF sum[V] = {};
    for (int64_t i = x.start[r]; i < x.start[r + 1]; ++i) {
      if (ask) x.asking.behind(i);
      const From* row = reinterpret_cast<const From*>(from + x.at[i]);
      const float* factor = x.factor + x.row[i] * x.step;
      KITSUNE_UNROLL
      for (int v = 0; v < V; ++v) {
        const VF value = some_floats(row + v * kFloats, v == V - 1 ? last : __mmask16(-1));
        if constexpr (OneFactor)
          sum[v] += value * splat<VF>(*factor);
        else
          sum[v] += value * (VF)_mm512_permutexvar_ps(lane[v], _mm512_maskz_loadu_ps(there[v], factor + base[v]));
      }
    }
    float* into = static_cast<float*>(x.into[r]) + first;
    KITSUNE_UNROLL
    for (int v = 0; v < V - 1; ++v) store_vector(into + v * kFloats, sum[v]);
    if (last == __mmask16(-1))
      store_vector(into + (V - 1) * kFloats, sum[V - 1]);
    else
      _mm512_mask_storeu_ps(into + (V - 1) * kFloats, last, (__m512)sum[V - 1]);
  }
}

template <class From, bool OneFactor>
void scaled_runs(const ScaledRuns& x) {
  constexpr int64_t kMostVectors = 4;
  for (int64_t first = 0; first < x.width; first += kMostVectors * kFloats) {
    const int64_t left = min_of(x.width - first, kMostVectors * kFloats);
    const int64_t vectors = (left + kFloats - 1) / kFloats;
    const __mmask16 last = __mmask16(0xffff >> (vectors * kFloats - left));
    switch (vectors) {
      case 1: scaled_columns<From, 1, OneFactor>(x, first, last); break;
      case 2: scaled_columns<From, 2, OneFactor>(x, first, last); break;
      case 3: scaled_columns<From, 3, OneFactor>(x, first, last); break;
      default: scaled_columns<From, 4, OneFactor>(x, first, last);
    }
  }
}
#else
// Columns [first, first + N).
template <class From, int N>
void scaled_columns(const ScaledRuns& x, int64_t first) {
  const int64_t inner = x.inner();
  int64_t taken[N];
  for (int j = 0; j < N; ++j) taken[j] = (first + j) / inner;
  const bool same = taken[0] == taken[N - 1];
  const char* from = x.from + first * int64_t(sizeof(From));
  const bool ask = first == 0 && x.asking.known > 0;
  for (int64_t r = 0; r < x.count; ++r) {
    float sum[N] = {};
    for (int64_t i = x.start[r]; i < x.start[r + 1]; ++i) {
      if (ask) x.asking.behind(i);
      From row[N];
      __builtin_memcpy(row, from + x.at[i], sizeof row);
      const float* factor = x.factor + x.row[i] * x.step;
      const float one = factor[taken[0]];
      if (same)
        for (int j = 0; j < N; ++j) sum[j] += convert<float>(row[j]) * one;
      else
        for (int j = 0; j < N; ++j) sum[j] += convert<float>(row[j]) * factor[taken[j]];
    }
    __builtin_memcpy(static_cast<float*>(x.into[r]) + first, sum, sizeof sum);
  }
}

template <class From>
void scaled_pieces(const ScaledRuns& x) {
  for (int64_t first = 0; first < x.width;) {
    const int64_t left = x.width - first;
    const int64_t n = left >= 16 ? 16 : left >= 8 ? 8 : left >= 4 ? 4 : 1;
    switch (n) {
      case 16: scaled_columns<From, 16>(x, first); break;
      case 8: scaled_columns<From, 8>(x, first); break;
      case 4: scaled_columns<From, 4>(x, first); break;
      default: scaled_columns<From, 1>(x, first);
    }
    first += n;
  }
}
#endif

template <class From>
void fold_scaled(int64_t count, const int64_t* start, const int64_t* at, const void* from, int64_t width, const int64_t* row,
                 const float* factor, int64_t step, int64_t factors, Ahead ahead, void* const* into) {
  const Asking asking(from, at, width * int64_t(sizeof(From)), ahead);
  const ScaledRuns x{count, start, at, static_cast<const char*>(from), width, row, factor, step, factors, into, asking};
#if defined(__AVX512F__)
  if (factors == 1) return scaled_runs<From, true>(x);
  scaled_runs<From, false>(x);
#else
  scaled_pieces<From>(x);
#endif
}

inline FoldScaledFn fold_scaled_function(DType storage) {
  switch (storage) {
    case DType::kF32: return &fold_scaled<float>;
    case DType::kBF16: return &fold_scaled<BFloat16>;
    case DType::kF16: return &fold_scaled<Half>;
    default: return nullptr;
  }
}

}  // namespace kitsune::cpu::KITSUNE_ISA
