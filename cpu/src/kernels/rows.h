// Rows that lie at offsets: copied together and apart, folded in runs, folded into the rows of a table.
//
// An offset counts bytes. Rows are dense. A row that lies far from the one before it is asked for before its turn (runs.h).
#pragma once

#include "runs.h"

namespace kitsune::cpu::KITSUNE_ISA {

// Calls f with the number of bytes as a constant where rows of so many are common, else with 0.
template <class F>
KITSUNE_INLINE void with_size(int64_t bytes, F f) {
  switch (bytes) {
#define KITSUNE_SIZE(n) \
  case n: return f(TypeTag<char[n]>{});
    KITSUNE_SIZE(1)
    KITSUNE_SIZE(2)
    KITSUNE_SIZE(4)
    KITSUNE_SIZE(8)
    KITSUNE_SIZE(12)
    KITSUNE_SIZE(16)
    KITSUNE_SIZE(32)
    KITSUNE_SIZE(64)
    KITSUNE_SIZE(128)
    KITSUNE_SIZE(256)
    KITSUNE_SIZE(512)
#undef KITSUNE_SIZE
    default: return f(TypeTag<char>{});
  }
}

// Copies whole vectors, then the last one again where it ends: no call, as memcpy of an unknown size is one.
KITSUNE_INLINE void copy_bytes(char* to, const char* from, int64_t bytes) {
  if (bytes < kVectorBytes) return void(__builtin_memmove(to, from, size_t(bytes)));  // an altered program may copy onto itself
  int64_t b = 0;
  for (; b + kVectorBytes <= bytes; b += kVectorBytes) store_vector(to + b, load_vector<VI>(from + b));
  if (b < bytes) store_vector(to + bytes - kVectorBytes, load_vector<VI>(from + bytes - kVectorBytes));
}

// Row i, `bytes` long: to + i * step <- from + at[i].
inline void gather_rows(int64_t n, const int64_t* at, const void* from_, void* to_, int64_t step, int64_t bytes) {
  const char* from = static_cast<const char*>(from_);
  char* to = static_cast<char*>(to_);
  const int64_t ahead = rows_ahead(bytes);
  with_size(bytes, [&](auto size) {
    using Size = typename decltype(size)::type;
    for (int64_t i = 0; i < n; ++i) {
      if (i + ahead < n) fetch_row<0>(from + at[i + ahead], sizeof(Size) > 1 || bytes == 1 ? int64_t(sizeof(Size)) : bytes);
      if (sizeof(Size) > 1 || bytes == 1)
        __builtin_memcpy(to + i * step, from + at[i], sizeof(Size));
      else
        copy_bytes(to + i * step, from + at[i], bytes);
    }
  });
}

// Row i: to + at[i] <- from + i * step.
inline void scatter_rows(int64_t n, const int64_t* at, const void* from_, int64_t step, void* to_, int64_t bytes) {
  const char* from = static_cast<const char*>(from_);
  char* to = static_cast<char*>(to_);
  const int64_t ahead = rows_ahead(bytes);
  with_size(bytes, [&](auto size) {
    using Size = typename decltype(size)::type;
    for (int64_t i = 0; i < n; ++i) {
      if (i + ahead < n) fetch_row<1>(to + at[i + ahead], sizeof(Size) > 1 || bytes == 1 ? int64_t(sizeof(Size)) : bytes);
      if (sizeof(Size) > 1 || bytes == 1)
        __builtin_memcpy(to + at[i], from + i * step, sizeof(Size));
      else
        copy_bytes(to + at[i], from + i * step, bytes);
    }
  });
}

// ---- Narrow rows: every row stores the fold of its run so far, so that no branch depends on where runs end.

template <class Op, class Acc>
KITSUNE_INLINE void fill_between(int64_t index, int64_t width, Acc* table, int64_t* filled) {
  for (int64_t e = (*filled + 1) * width; e < index * width; ++e) table[e] = Identity<Op, Acc>::kValue;
}

template <class Op, class Acc, class From, int N>
void fold_narrow_columns(int64_t n, const int64_t* index, const int64_t* at, const char* from, int64_t width, int64_t first,
                         Acc* table) {
  Acc sum[N];
  for (int j = 0; j < N; ++j) sum[j] = Identity<Op, Acc>::kValue;
  int64_t last = -1;
  for (int64_t i = 0; i < n; ++i) {
    From row[N];
    __builtin_memcpy(row, from + at[i] + first * int64_t(sizeof(From)), sizeof row);
    for (int j = 0; j < N; ++j) sum[j] = Op::apply(index[i] == last ? sum[j] : Identity<Op, Acc>::kValue, convert<Acc>(row[j]));
    last = index[i];
    __builtin_memcpy(table + last * width + first, sum, sizeof sum);
  }
}

template <class Op, class Acc, class From>
void fold_narrow(int64_t n, const int64_t* index, const int64_t* at, const void* from_, int64_t width, void* table_,
                 int64_t* filled) {
  const char* from = static_cast<const char*>(from_);
  Acc* table = static_cast<Acc*>(table_);
  for (int64_t i = 0; i < n; ++i) {
    if (index[i] > *filled + 1) fill_between<Op>(index[i], width, table, filled);
    *filled = max_of(*filled, index[i]);
  }
#if defined(__AVX512F__)
  if constexpr (kSame<Acc, float>) {
    const __mmask16 mask = __mmask16((1u << width) - 1);
    const VF identity = splat<VF>(Identity<Op, float>::kValue);
    auto fold = [&](auto columns) {  // their number, or 0: stores under a mask take several times as long as others
      constexpr size_t kColumns = sizeof(typename decltype(columns)::type) - 1;
      VF sum = identity;
      int64_t last = -1;
      for (int64_t i = 0; i < n; ++i) {
        const VF row = some_floats(reinterpret_cast<const From*>(from + at[i]), mask);
        const __mmask16 goes_on = __mmask16(-int(index[i] == last));
        sum = fold_vectors<Op>((VF)_mm512_mask_mov_ps((__m512)identity, goes_on, (__m512)sum), row);
        last = index[i];
        if constexpr (kColumns > 0)
          __builtin_memcpy(table + last * int64_t(kColumns), &sum, kColumns * sizeof(float));
        else
          _mm512_mask_storeu_ps(table + last * width, mask, (__m512)sum);
      }
    };
    switch (width) {
      case 1: return fold(TypeTag<char[2]>{});
      case 2: return fold(TypeTag<char[3]>{});
      case 4: return fold(TypeTag<char[5]>{});
      case 8: return fold(TypeTag<char[9]>{});
      case 16: return fold(TypeTag<char[17]>{});
      default: return fold(TypeTag<char[1]>{});
    }
  }
#endif
  for (int64_t first = 0; first < width;) {
    const int64_t left = width - first;
    int64_t m = 1;
    if constexpr (kByWidth<Op, Acc>) {
      m = left >= 8 ? 8 : left >= 4 ? 4 : left >= 2 ? 2 : 1;
      switch (m) {
        case 8: fold_narrow_columns<Op, Acc, From, 8>(n, index, at, from, width, first, table); break;
        case 4: fold_narrow_columns<Op, Acc, From, 4>(n, index, at, from, width, first, table); break;
        case 2: fold_narrow_columns<Op, Acc, From, 2>(n, index, at, from, width, first, table); break;
        default: break;
      }
    }
    if (m == 1) fold_narrow_columns<Op, Acc, From, 1>(n, index, at, from, width, first, table);
    first += m;
  }
}

// ---- A table: row i, from + at[i], is folded into the row table + to[i] of accumulators.

template <class Op, class Acc, class From>
void fold_into_table(int64_t n, const int64_t* at, const int64_t* to, const void* from_, int64_t width, void* table_) {
  const char* from = static_cast<const char*>(from_);
  char* table = static_cast<char*>(table_);
  const int64_t bytes = width * int64_t(sizeof(Acc)), ahead = rows_ahead(bytes);
  auto fold = [&](auto columns) {
    constexpr int64_t kColumns = sizeof(typename decltype(columns)::type);
    for (int64_t i = 0; i < n; ++i) {
      if (i + ahead < n) fetch_row<1>(table + to[i + ahead], bytes);
      const From* row = reinterpret_cast<const From*>(from + at[i]);
      Acc* into = reinterpret_cast<Acc*>(table + to[i]);
      const int64_t m = kColumns > 1 ? kColumns : width;
      KITSUNE_INDEPENDENT
      for (int64_t j = 0; j < m; ++j) into[j] = Op::apply(into[j], convert<Acc>(row[j]));
    }
  };
  if constexpr (kByWidth<Op, Acc>) {
    switch (width) {
      case 4: return fold(TypeTag<char[4]>{});
      case 8: return fold(TypeTag<char[8]>{});
      case 16: return fold(TypeTag<char[16]>{});
      case 32: return fold(TypeTag<char[32]>{});
      case 64: return fold(TypeTag<char[64]>{});
      default: break;
    }
  }
  fold(TypeTag<char>{});
}

// ---- Elements of a row at indices: out[i] <- row[at[i]], or 0 where at[i] is below 0.

template <class U>
void take_elements(int64_t n, const int32_t* at, const void* row_, void* out_) {
  const U* row = static_cast<const U*>(row_);
  U* out = static_cast<U*>(out_);
  int64_t i = 0;
#if defined(__AVX512F__)
  if constexpr (sizeof(U) == 4) {
    for (; i < n; i += 16) {
      const int64_t left = n - i;
      const __mmask16 lanes = __mmask16(left >= 16 ? 0xffff : (1 << left) - 1);
      const __m512i index = _mm512_maskz_loadu_epi32(lanes, at + i);
      const __mmask16 inside = _mm512_mask_cmpge_epi32_mask(lanes, index, _mm512_setzero_si512());
      _mm512_mask_storeu_epi32(out + i, lanes, _mm512_mask_i32gather_epi32(_mm512_setzero_si512(), inside, index, row, 4));
    }
  }
#endif
  for (; i < n; ++i) out[i] = at[i] < 0 ? U(0) : row[at[i]];
}

// ---- By type.

inline FoldRunsFn fold_runs_function(int how, DType storage) {
  return with_fold_by_index<FoldRunsFn, float>(how, storage, false, [](auto op, auto acc, auto from) -> FoldRunsFn {
    return &fold_runs<typename decltype(op)::type, typename decltype(acc)::type, typename decltype(from)::type>;
  });
}

inline FoldNarrowFn fold_narrow_function(int how, DType storage) {
  return with_fold_by_index<FoldNarrowFn, float>(how, storage, false, [](auto op, auto acc, auto from) -> FoldNarrowFn {
    return &fold_narrow<typename decltype(op)::type, typename decltype(acc)::type, typename decltype(from)::type>;
  });
}

inline FoldTableFn fold_table_function(int how, DType storage, bool wide) {
  return with_fold_by_index<FoldTableFn, double>(how, storage, wide, [](auto op, auto acc, auto from) -> FoldTableFn {
    return &fold_into_table<typename decltype(op)::type, typename decltype(acc)::type, typename decltype(from)::type>;
  });
}

inline TakeFn take_function(int64_t item) {
  return item == 1   ? &take_elements<uint8_t>
         : item == 2 ? &take_elements<uint16_t>
         : item == 4 ? &take_elements<uint32_t>
                     : &take_elements<uint64_t>;
}

}  // namespace kitsune::cpu::KITSUNE_ISA
