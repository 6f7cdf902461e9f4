// Rows that lie at offsets, folded in runs: into[r][0..width) <- the fold of the rows from + at[i], i in [start[r], start[r + 1]),
// in their order. No run is empty.
//
// A row that lies far from the one before it is asked for before its turn, because the hardware cannot guess where it is. Of rows
// in a cache kAheadBytes are under way. Rows in memory are asked for much earlier, and only as far as the second level, which has
// three times as many places for lines that are under way as the first one: 10^6 rows of 256 bytes in random order, read on two
// cores of a Xeon with AMX, took 23.5 ms with the first level alone and with nobody asking, and take 15.5 (in their own order 9.5).
#pragma once

#include "fold.h"

namespace kitsune::cpu::KITSUNE_ISA {

constexpr int64_t kAheadBytes = 4096, kFewestAhead = 4, kMostNear = 32;
constexpr int64_t kFarBytes = 16384, kFewestFar = 24, kNearBytes = 2048;  // of rows in memory: to the second level, to the first
constexpr int64_t kFetchedBytes = 1024;                                   // of a row; the hardware fetches the rest of a longer one

KITSUNE_INLINE int64_t rows_ahead(int64_t bytes) { return max_of(kFewestAhead, min_of(kMostNear, kAheadBytes / bytes)); }

// `Level`: the cache that the row is brought to.
template <int Write, int Level = 1>
KITSUNE_INLINE void fetch_row(const char* row, int64_t bytes) {
  for (int64_t b = 0, n = min_of(bytes, kFetchedBytes); b < n; b += 64) __builtin_prefetch(row + b, Write, Level == 1 ? 3 : 2);
}

// Asks for the rows behind row i.
struct Asking {
  const char* from;
  const int64_t* at;
  int64_t known, bytes, near, far;
  Asking(const void* rows, const int64_t* places, int64_t row_bytes, Ahead ahead)
      : from(static_cast<const char*>(rows)),
        at(places),
        known(ahead.known),
        bytes(max_of<int64_t>(row_bytes, 1)),
        near(ahead.far ? max_of<int64_t>(2, min_of(kMostNear, kNearBytes / bytes)) : rows_ahead(bytes)),
        far(ahead.far ? max_of(kFewestFar, min_of(kMostAhead, kFarBytes / bytes)) : known) {}
  KITSUNE_INLINE void behind(int64_t i) const {
    if (i + far < known) fetch_row<0, 2>(from + at[i + far], bytes);
    if (i + near < known) fetch_row<0>(from + at[i + near], bytes);
  }
};

struct Runs {
  int64_t count;
  const int64_t *start, *at;
  const char* from;
  int64_t width;
  void* const* into;
  Asking asking;
};

constexpr int64_t kMostColumns = 32;

// Columns [first, first + N), kept in an array that the compiler keeps in registers; of `columns` where N is 0.
template <class Op, class Acc, class From, int N>
void fold_columns(const Runs& x, int64_t first, int64_t columns) {
  const int64_t n = N > 0 ? N : columns;
  const char* from = x.from + first * int64_t(sizeof(From));
  const bool ask = first == 0 && x.asking.known > 0;
  for (int64_t r = 0; r < x.count; ++r) {
    Acc sum[N > 0 ? N : kMostColumns];
    for (int64_t j = 0; j < n; ++j) sum[j] = Identity<Op, Acc>::kValue;
    for (int64_t i = x.start[r]; i < x.start[r + 1]; ++i) {
      if (ask) x.asking.behind(i);
      From row[N > 0 ? N : kMostColumns];
      __builtin_memcpy(row, from + x.at[i], size_t(n) * sizeof(From));
      for (int64_t j = 0; j < n; ++j) sum[j] = Op::apply(sum[j], convert<Acc>(row[j]));
    }
    __builtin_memcpy(static_cast<Acc*>(x.into[r]) + first, sum, size_t(n) * sizeof(Acc));
  }
}

template <class Op, class Acc, class From>
void fold_pieces(const Runs& x) {
  for (int64_t first = 0, n = 0; first < x.width; first += n) {
    n = min_of(x.width - first, kMostColumns);
    if constexpr (kByWidth<Op, Acc>) {
      n = n >= 32 ? 32 : n >= 16 ? 16 : n >= 8 ? 8 : n >= 4 ? 4 : n >= 2 ? 2 : 1;
      switch (n) {
        case 32: fold_columns<Op, Acc, From, 32>(x, first, n); break;
        case 16: fold_columns<Op, Acc, From, 16>(x, first, n); break;
        case 8: fold_columns<Op, Acc, From, 8>(x, first, n); break;
        case 4: fold_columns<Op, Acc, From, 4>(x, first, n); break;
        case 2: fold_columns<Op, Acc, From, 2>(x, first, n); break;
        default: fold_columns<Op, Acc, From, 1>(x, first, n);
      }
    } else {
      fold_columns<Op, Acc, From, 0>(x, first, n);
    }
  }
}

#if defined(__AVX512F__)
KITSUNE_INLINE VF some_floats(const float* x, __mmask16 mask) { return (VF)_mm512_maskz_loadu_ps(mask, x); }
KITSUNE_INLINE VF some_floats(const BFloat16* x, __mmask16 mask) {
  return (VF)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, x)), 16);
}
KITSUNE_INLINE VF some_floats(const Half* x, __mmask16 mask) { return (VF)_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, x)); }

// Op of vectors of floats.
template <class Op>
KITSUNE_INLINE VF fold_vectors(VF x, VF y) {
  if constexpr (kSame<Op, Add>) {
    return x + y;
  } else if constexpr (kSame<Op, Mul>) {
    return x * y;
  } else {
    // VRANGEPS orders zeros by their sign, as Op does; of a number and a NaN it takes the number, so NaNs are made by an addition.
    constexpr int kWhich = 4 | (kSame<Op, Max> ? 1 : 0);  // the sign is that of the result
    const __m512 r = _mm512_range_ps((__m512)x, (__m512)y, kWhich);
    return (VF)_mm512_mask_add_ps(r, _mm512_cmp_ps_mask((__m512)x, (__m512)y, _CMP_UNORD_Q), (__m512)x, (__m512)y);
  }
}

// Folds of floats, V vectors of columns at a time, the last of them under a mask.
template <class Op, class From, int V>
void vector_columns(const Runs& x, int64_t first, __mmask16 last) {
  const char* from = x.from + first * int64_t(sizeof(From));
  const bool ask = first == 0 && x.asking.known > 0;
  for (int64_t r = 0; r < x.count; ++r) {
    VF sum[V];
    KITSUNE_UNROLL
    for (int v = 0; v < V; ++v) sum[v] = splat<VF>(Identity<Op, float>::kValue);
    for (int64_t i = x.start[r]; i < x.start[r + 1]; ++i) {
      if (ask) x.asking.behind(i);
      const From* row = reinterpret_cast<const From*>(from + x.at[i]);
      KITSUNE_UNROLL
      for (int v = 0; v < V; ++v)
        sum[v] = fold_vectors<Op>(sum[v], some_floats(row + v * kFloats, v == V - 1 ? last : __mmask16(-1)));
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

template <class Op, class From>
void vector_runs(const Runs& x) {
  constexpr int64_t kMostVectors = 8;
  for (int64_t first = 0; first < x.width; first += kMostVectors * kFloats) {
    const int64_t left = min_of(x.width - first, kMostVectors * kFloats);
    const int64_t vectors = (left + kFloats - 1) / kFloats;
    const __mmask16 last = __mmask16(0xffff >> (vectors * kFloats - left));
    switch (vectors) {
      case 1: vector_columns<Op, From, 1>(x, first, last); break;
      case 2: vector_columns<Op, From, 2>(x, first, last); break;
      case 3: vector_columns<Op, From, 3>(x, first, last); break;
      case 4: vector_columns<Op, From, 4>(x, first, last); break;
      case 5: vector_columns<Op, From, 5>(x, first, last); break;
      case 6: vector_columns<Op, From, 6>(x, first, last); break;
      case 7: vector_columns<Op, From, 7>(x, first, last); break;
      default: vector_columns<Op, From, 8>(x, first, last);
    }
  }
}
#endif

template <class Op, class Acc, class From>
void fold_runs(int64_t count, const int64_t* start, const int64_t* at, const void* from, int64_t width, Ahead ahead,
               void* const* into) {
  const Runs x{count, start, at, static_cast<const char*>(from), width, into, {from, at, width * int64_t(sizeof(From)), ahead}};
#if defined(__AVX512F__)
  if constexpr (kSame<Acc, float>) return vector_runs<Op, From>(x);
#endif
  fold_pieces<Op, Acc, From>(x);
}

}  // namespace kitsune::cpu::KITSUNE_ISA
