// Reductions: folding an array, strided or not, into one accumulator, and folding rows into an array of accumulators.
//
// Elements are converted to the accumulator's type in chunks that stay in the first-level cache, then folded in several independent
// vectors. Floating sums so carry 4 x kFloats partial sums per chunk (64 on AVX-512), added up as a tree, and chunks add up in
// double: the error is that of pairwise summation.
#pragma once

#include "load_store.h"
#include "pointwise.h"

namespace kitsune::cpu::KITSUNE_ISA {

// The indices into REDUCTIONS of bytecode.py.
enum Reduction : int { kSum, kMax, kMin, kProduct, kAnd, kOr, kXor, kReductions };

constexpr int64_t kFoldChunk = 512;
// Bytes between what is folded and what is asked for: rows follow each other, and the hardware does not look beyond a page.
constexpr int64_t kFoldAhead = 2048;

template <class Op, class T>
struct Identity;
template <class T>
struct Identity<Add, T> {
  static constexpr T kValue = T(0);
};
template <class T>
struct Identity<Mul, T> {
  static constexpr T kValue = T(1);
};
template <class T>
struct Identity<And, T> {
  static constexpr T kValue = T(-1);
};
template <class T>
struct Identity<Or, T> : Identity<Add, T> {};
template <class T>
struct Identity<Xor, T> : Identity<Add, T> {};
template <bool Maximum>
struct ExtremumIdentity {
  template <class T>
  static constexpr T of() {
    if constexpr (TypeTraits<T>::kFloating) {
      return Maximum ? -T(__builtin_inff()) : T(__builtin_inff());
    } else {
      return Maximum ? min_value<T>() : max_value<T>();
    }
  }
};
template <class T>
struct Identity<Max, T> {
  static constexpr T kValue = ExtremumIdentity<true>::of<T>();
};
template <class T>
struct Identity<Min, T> {
  static constexpr T kValue = ExtremumIdentity<false>::of<T>();
};

#if defined(__AVX512F__)
// The sum of n floats, in the order of fold_dense. Rows are often shorter than its lanes, which compilers then keep in memory.
KITSUNE_INLINE float sum_dense(int64_t n, const float* x) {
  __m512 lanes[4] = {_mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps()};
  for (; n >= 64; n -= 64, x += 64) {
    KITSUNE_UNROLL
    for (int v = 0; v < 4; ++v) lanes[v] = _mm512_add_ps(lanes[v], _mm512_loadu_ps(x + 16 * v));
  }
  if (n > 0) {
    KITSUNE_UNROLL
    for (int v = 0; v < 4; ++v) {
      const int64_t left = n - 16 * v;
      const __mmask16 mask = __mmask16(left >= 16 ? 0xffff : left <= 0 ? 0 : (1 << left) - 1);
      lanes[v] = _mm512_mask_add_ps(lanes[v], mask, lanes[v], _mm512_maskz_loadu_ps(mask, x + 16 * v));
    }
  }
  return _mm512_reduce_add_ps(_mm512_add_ps(_mm512_add_ps(lanes[0], lanes[2]), _mm512_add_ps(lanes[1], lanes[3])));
}

// The largest, or smallest, of n floats. False: that is zero, or something is a NaN, and the loop over scalars has to find it,
// which knows which of them wins.
template <bool Maximum>
KITSUNE_INLINE bool extremum_dense(int64_t n, const float* x, float* result) {
  const __m512 first = _mm512_set1_ps(ExtremumIdentity<Maximum>::template of<float>());
  __m512 lanes[4] = {first, first, first, first};
  __mmask16 nan[4] = {0, 0, 0, 0};
  auto fold = [&](int v, __m512 here) {
    lanes[v] = Maximum ? _mm512_max_ps(here, lanes[v]) : _mm512_min_ps(here, lanes[v]);  // the second one where `here` is NaN
    nan[v] |= _mm512_cmp_ps_mask(here, here, _CMP_UNORD_Q);
  };
  for (; n >= 64; n -= 64, x += 64) {
    KITSUNE_UNROLL
    for (int v = 0; v < 4; ++v) {
      _mm_prefetch(reinterpret_cast<const char*>(x + 16 * v) + kFoldAhead, _MM_HINT_T0);
      fold(v, _mm512_loadu_ps(x + 16 * v));
    }
  }
  if (n > 0) {
    KITSUNE_UNROLL
    for (int v = 0; v < 4; ++v) {
      const int64_t left = n - 16 * v;
      const __mmask16 mask = __mmask16(left >= 16 ? 0xffff : left <= 0 ? 0 : (1 << left) - 1);
      fold(v, _mm512_mask_loadu_ps(first, mask, x + 16 * v));
    }
  }
  if constexpr (Maximum)
    *result = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_max_ps(lanes[0], lanes[2]), _mm512_max_ps(lanes[1], lanes[3])));
  else
    *result = _mm512_reduce_min_ps(_mm512_min_ps(_mm512_min_ps(lanes[0], lanes[2]), _mm512_min_ps(lanes[1], lanes[3])));
  return (nan[0] | nan[1] | nan[2] | nan[3]) == 0 && *result != 0.0f;
}

// The same of bfloat16 numbers, as integers in their order: below zero the bits but the sign are turned. NaN lies beyond the
// infinities on either side.
template <bool Maximum>
KITSUNE_INLINE bool extremum_of_bits(int64_t n, const BFloat16* x, float* result) {
  constexpr int16_t kInfinity = 0x7f80, kMinusInfinity = -0x7f81;
  const __m512i magnitude = _mm512_set1_epi16(0x7fff);
  __m512i most[2], least[2];
  for (int v = 0; v < 2; ++v) most[v] = _mm512_set1_epi16(kMinusInfinity), least[v] = _mm512_set1_epi16(kInfinity);
  auto ordered = [&](__m512i bits) {  // bits ^ (bits >> 15 & magnitude)
    return _mm512_ternarylogic_epi32(bits, _mm512_srai_epi16(bits, 15), magnitude, 0x78);
  };
  for (; n >= 64; n -= 64, x += 64) {
    KITSUNE_UNROLL
    for (int v = 0; v < 2; ++v) {
      _mm_prefetch(reinterpret_cast<const char*>(x + 32 * v) + kFoldAhead, _MM_HINT_T0);
      const __m512i here = ordered(_mm512_loadu_si512(x + 32 * v));
      most[v] = _mm512_max_epi16(most[v], here);
      least[v] = _mm512_min_epi16(least[v], here);
    }
  }
  KITSUNE_UNROLL
  for (int v = 0; v < 2; ++v) {
    const int64_t left = n - 32 * v;
    if (left <= 0) break;
    const __mmask32 mask = __mmask32(left >= 32 ? ~0u : (1u << left) - 1);
    const __m512i here = ordered(_mm512_maskz_loadu_epi16(mask, x + 32 * v));
    most[v] = _mm512_mask_max_epi16(most[v], mask, most[v], here);
    least[v] = _mm512_mask_min_epi16(least[v], mask, least[v], here);
  }
  // VPHMINPOSUW finds the least of eight unsigned numbers.
  auto smallest = [](__m512i lanes, int16_t flip, auto less) {
    const __m256i half = less(_mm512_castsi512_si256(lanes), _mm512_extracti64x4_epi64(lanes, 1));
    const __m128i a = _mm256_castsi256_si128(half), b = _mm256_extracti128_si256(half, 1), turned = _mm_set1_epi16(flip);
    const __m128i first = _mm_minpos_epu16(_mm_xor_si128(a, turned)), second = _mm_minpos_epu16(_mm_xor_si128(b, turned));
    const int x = _mm_extract_epi16(first, 0), y = _mm_extract_epi16(second, 0);
    return int16_t((x < y ? x : y) ^ flip);
  };
  const int16_t top =
      smallest(_mm512_max_epi16(most[0], most[1]), 0x7fff, [](__m256i a, __m256i b) { return _mm256_max_epi16(a, b); });
  const int16_t bottom =
      smallest(_mm512_min_epi16(least[0], least[1]), INT16_MIN, [](__m256i a, __m256i b) { return _mm256_min_epi16(a, b); });
  const int16_t found = Maximum ? top : bottom;
  *result = to_float(BFloat16{uint16_t(found ^ (found >> 15 & 0x7fff))});
  return top <= kInfinity && bottom >= kMinusInfinity && *result != 0.0f;
}
#endif

// Folds n dense elements: 4 vectors' worth of lanes, then a tree over the lanes.
template <class Op, class T>
T fold_dense(int64_t n, const T* x) {
#if defined(__AVX512F__)
  if constexpr (kSame<Op, Add> && kSame<T, float>) return sum_dense(n, x);
  if constexpr ((kSame<Op, Max> || kSame<Op, Min>) && kSame<T, float>) {
    float found;
    if (extremum_dense<kSame<Op, Max>>(n, x, &found)) return found;
  }
#endif
  constexpr int kLanes = 4 * kVectorBytes / int(sizeof(T));
  T lanes[kLanes];
  for (int j = 0; j < kLanes; ++j) lanes[j] = Identity<Op, T>::kValue;
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int j = 0; j < kLanes; ++j) lanes[j] = Op::apply(lanes[j], x[i + j]);
  }
  for (int64_t j = 0; i + j < n; ++j) lanes[j] = Op::apply(lanes[j], x[i + j]);
  for (int width = kLanes / 2; width >= 1; width /= 2) {
    for (int j = 0; j < width; ++j) lanes[j] = Op::apply(lanes[j], lanes[j + width]);
  }
  return lanes[0];
}

// Chunk totals of floating sums and products are combined in double.
template <class Op, class Acc>
struct Total {
  using type = Acc;
};
template <>
struct Total<Add, float> {
  using type = double;
};
template <>
struct Total<Mul, float> {
  using type = double;
};

// `load` turns elements of `element_bytes` into accumulators; nullptr: they are accumulators already.
template <class Op, class Acc>
KITSUNE_ONCE void fold_chunks(int64_t n, const char* src, int64_t stride, Acc* acc, LoadFn load, int64_t element_bytes) {
  using T = typename Total<Op, Acc>::type;
  T total = T(*acc);
  alignas(64) Acc chunk[kFoldChunk];
  for (int64_t i = 0; i < n; i += kFoldChunk, src += kFoldChunk * stride * element_bytes) {
    int64_t count = min_of(kFoldChunk, n - i);
    if (load) load(count, chunk, src, stride);
    total = Op::apply(total, T(fold_dense<Op>(count, load ? chunk : reinterpret_cast<const Acc*>(src))));
  }
  *acc = Acc(total);
}

template <class Op, class Acc>
KITSUNE_ONCE void fold_row_chunks(int64_t n, const char* src, int64_t stride, Acc* acc, LoadFn load, int64_t element_bytes) {
  alignas(64) Acc chunk[kFoldChunk];
  for (int64_t i = 0; i < n; i += kFoldChunk, src += kFoldChunk * stride * element_bytes) {
    int64_t count = min_of(kFoldChunk, n - i);
    if (load) load(count, chunk, src, stride);
    const Acc* x = load ? chunk : reinterpret_cast<const Acc*>(src);
    Acc* to = acc + i;
    KITSUNE_INDEPENDENT
    for (int64_t j = 0; j < count; ++j) to[j] = Op::apply(to[j], x[j]);
  }
}

template <class Op, class Acc, class From>
void fold_strided(int64_t n, const void* src, int64_t stride, void* acc) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
  if constexpr ((kSame<Op, Max> || kSame<Op, Min>) && kSame<From, BFloat16>) {
    float found;
    if (n > 0 && stride == 1 && extremum_of_bits<kSame<Op, Max>>(n, static_cast<const BFloat16*>(src), &found)) {
      Acc* to = static_cast<Acc*>(acc);
      *to = Op::apply(*to, Acc(found));
      return;
    }
  }
#endif
  LoadFn load = kSame<Acc, From> && stride == 1 ? nullptr : &load_strided<Acc, From>;
  fold_chunks<Op, Acc>(n, static_cast<const char*>(src), stride, static_cast<Acc*>(acc), load, sizeof(From));
}

template <class Op, class Acc, class From>
void fold_row_strided(int64_t n, const void* src, int64_t stride, void* acc) {
  LoadFn load = kSame<Acc, From> && stride == 1 ? nullptr : &load_strided<Acc, From>;
  fold_row_chunks<Op, Acc>(n, static_cast<const char*>(src), stride, static_cast<Acc*>(acc), load, sizeof(From));
}

// Bools fold as bytes 0/1: or for sum and max, and for product and min.
constexpr int kByteFolds[] = {kMax, kMax, kMin, kMin, kAnd, kOr, kXor};

template <class From, class Acc, class WideAcc, class Result, class F>
Result with_operation(int how, bool wide, F f) {
  auto by = [&](auto op, auto acc) { return f(op, acc, TypeTag<From>{}); };
  if constexpr (!kSame<Acc, WideAcc>) {
    if (wide && how == kSum) return by(TypeTag<Add>{}, TypeTag<WideAcc>{});
    if (wide && how == kProduct) return by(TypeTag<Mul>{}, TypeTag<WideAcc>{});
  }
  if constexpr (TypeTraits<Acc>::kFloating) {
    switch (how) {
      case kSum: return by(TypeTag<Add>{}, TypeTag<Acc>{});
      case kProduct: return by(TypeTag<Mul>{}, TypeTag<Acc>{});
      default: break;
    }
  } else {  // the bits of these are the same for both signs
    using U = UnsignedOf<Acc>;
    auto unsigned_by = [&](auto op) { return f(op, TypeTag<U>{}, TypeTag<U>{}); };
    switch (how) {
      case kSum: return unsigned_by(TypeTag<Add>{});
      case kProduct: return unsigned_by(TypeTag<Mul>{});
      case kAnd: return unsigned_by(TypeTag<And>{});
      case kOr: return unsigned_by(TypeTag<Or>{});
      case kXor: return unsigned_by(TypeTag<Xor>{});
      default: break;
    }
  }
  switch (how) {
    case kMax: return by(TypeTag<Max>{}, TypeTag<Acc>{});
    case kMin: return by(TypeTag<Min>{}, TypeTag<Acc>{});
    default: return Result{};
  }
}

// f with tags of the operation, of the accumulator's type and of the elements'; Result{} where there is no such fold. `wide`: sums
// and products of floats are folded in double. `Wide`: the accumulators that `wide` may ask for, float where nobody does.
template <class Result, class Wide = double, class F>
Result with_fold(int how, DType storage, bool wide, F f) {
  if (how < 0 || how >= kReductions) return Result{};
  return with_type<Result>(storage, [&](auto tag) -> Result {
    using T = typename decltype(tag)::type;
    if constexpr (kSame<T, double>) {
      return with_operation<double, double, double, Result>(how, wide, f);
    } else if constexpr (TypeTraits<T>::kFloating) {
      return with_operation<T, float, Wide, Result>(how, wide, f);
    } else if constexpr (TypeTraits<T>::kBool) {
      return with_operation<uint8_t, uint8_t, uint8_t, Result>(kByteFolds[how], wide, f);
    } else {
      return with_operation<T, T, T, Result>(how, wide, f);
    }
  });
}

// Folds by index: there are no logical ones.
template <class Result, class Wide, class F>
Result with_fold_by_index(int how, DType storage, bool wide, F f) {
  return with_fold<Result, Wide>(how, storage, wide, [&](auto op, auto acc, auto from) -> Result {
    using Op = typename decltype(op)::type;
    if constexpr (kSame<Op, And> || kSame<Op, Or> || kSame<Op, Xor>) {
      return Result{};
    } else {
      return f(op, acc, from);
    }
  });
}

inline FoldFn fold_function(int how, DType storage, bool wide) {
  return with_fold<FoldFn>(how, storage, wide, [](auto op, auto acc, auto from) -> FoldFn {
    return &fold_strided<typename decltype(op)::type, typename decltype(acc)::type, typename decltype(from)::type>;
  });
}

inline FoldRowFn fold_row_function(int how, DType storage, bool wide) {
  return with_fold<FoldRowFn>(how, storage, wide, [](auto op, auto acc, auto from) -> FoldRowFn {
    return &fold_row_strided<typename decltype(op)::type, typename decltype(acc)::type, typename decltype(from)::type>;
  });
}

// Folds of rows for which each common width has code of its own: sums in float, double and 32-bit integers, and extrema of floats.
// Others, such as products, or sums of bytes, have a loop over the columns.
template <class Op, class Acc>
constexpr bool kByWidth =
    (kSame<Acc, float> && !kSame<Op, Mul>) || (kSame<Op, Add> && (kSame<Acc, double> || kSame<Acc, uint32_t>));

}  // namespace kitsune::cpu::KITSUNE_ISA
