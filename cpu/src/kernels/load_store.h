// Moving rows between storage and registers: conversion of dense or strided arrays. A stride is in elements and may be 0 or
// negative.
#pragma once

#include "scalar.h"

namespace kitsune::cpu::KITSUNE_ISA {

// One loop per pair of types, called by everything that converts. It knows types, its callers may not.
template <class To, class From>
__attribute__((noinline)) void convert_elements(int64_t n, void* dst_, const void* src_) {
  To* dst = static_cast<To*>(dst_);
  const From* src = static_cast<const From*>(src_);
  KITSUNE_INDEPENDENT
  for (int64_t i = 0; i < n; ++i) dst[i] = convert<To>(src[i]);
}

#if defined(__F16C__)
// The hardware conversions (VCVTPH2PS, VCVTPS2PH) round to nearest even and keep f16's denormals and NaN, as the software ones do.
template <>
__attribute__((noinline)) inline void convert_elements<float, Half>(int64_t n, void* dst_, const void* src_) {
  float* dst = static_cast<float*>(dst_);
  const Half* src = static_cast<const Half*>(src_);
  int64_t i = 0;
#if defined(__AVX512F__)
  for (; i + 16 <= n; i += 16) _mm512_storeu_ps(dst + i, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)(src + i))));
  const __mmask16 rest = __mmask16((1u << (n - i)) - 1);
  if (rest) _mm512_mask_storeu_ps(dst + i, rest, _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(rest, src + i)));
#else
  for (; i + 8 <= n; i += 8) _mm256_storeu_ps(dst + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(src + i))));
  for (; i < n; ++i) dst[i] = to_float(src[i]);
#endif
}

template <>
__attribute__((noinline)) inline void convert_elements<Half, float>(int64_t n, void* dst_, const void* src_) {
  Half* dst = static_cast<Half*>(dst_);
  const float* src = static_cast<const float*>(src_);
  int64_t i = 0;
#if defined(__AVX512F__)
  constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT;
  for (; i + 16 <= n; i += 16) _mm256_storeu_si256((__m256i*)(dst + i), _mm512_cvtps_ph(_mm512_loadu_ps(src + i), kNearest));
  const __mmask16 rest = __mmask16((1u << (n - i)) - 1);
  if (rest) _mm256_mask_storeu_epi16(dst + i, rest, _mm512_cvtps_ph(_mm512_maskz_loadu_ps(rest, src + i), kNearest));
#else
  for (; i + 8 <= n; i += 8) {
    _mm_storeu_si128((__m128i*)(dst + i), _mm256_cvtps_ph(_mm256_loadu_ps(src + i), _MM_FROUND_TO_NEAREST_INT));
  }
  for (; i < n; ++i) dst[i] = to_half(src[i]);
#endif
}
#elif defined(KITSUNE_NEON)
// FCVTL and FCVTN, likewise; FPCR.FZ does not concern the f16 side of a conversion (FPCR.FZ16 does not either).
template <>
__attribute__((noinline)) inline void convert_elements<float, Half>(int64_t n, void* dst_, const void* src_) {
  float* dst = static_cast<float*>(dst_);
  const Half* src = static_cast<const Half*>(src_);
  int64_t i = 0;
  for (; i + 4 <= n; i += 4) store_vector(dst + i, vcvt_f32_f16((float16x4_t)load_vector<uint16x4_t>(src + i)));
  for (; i < n; ++i) dst[i] = to_float(src[i]);
}

template <>
__attribute__((noinline)) inline void convert_elements<Half, float>(int64_t n, void* dst_, const void* src_) {
  Half* dst = static_cast<Half*>(dst_);
  const float* src = static_cast<const float*>(src_);
  int64_t i = 0;
  for (; i + 4 <= n; i += 4) store_vector(dst + i, vcvt_f16_f32(load_vector<float32x4_t>(src + i)));
  for (; i < n; ++i) dst[i] = to_half(src[i]);
}
#endif

template <class To, class From>
KITSUNE_INLINE void convert_dense(int64_t n, To* dst, const From* src) {
  convert_elements<To, From>(n, dst, src);
}

// Elements of a strided array are moved to and from a dense chunk by size alone, so that only the dense loops know the types.
constexpr int64_t kChunk = 256;

template <int Size>
struct BitsOfSize;
template <>
struct BitsOfSize<1> : TypeTag<uint8_t> {};
template <>
struct BitsOfSize<2> : TypeTag<uint16_t> {};
template <>
struct BitsOfSize<4> : TypeTag<uint32_t> {};
template <>
struct BitsOfSize<8> : TypeTag<uint64_t> {};

template <int Size>
__attribute__((noinline)) void gather_elements(int64_t n, void* dst_, const void* src_, int64_t stride) {
  using U = typename BitsOfSize<Size>::type;
  char* dst = static_cast<char*>(dst_);
  const char* src = static_cast<const char*>(src_);
  for (int64_t i = 0; i < n; ++i) __builtin_memcpy(dst + i * Size, src + i * stride * Size, sizeof(U));
}

template <int Size>
__attribute__((noinline)) void scatter_elements(int64_t n, void* dst_, int64_t stride, const void* src_) {
  char* dst = static_cast<char*>(dst_);
  const char* src = static_cast<const char*>(src_);
  for (int64_t i = 0; i < n; ++i) __builtin_memcpy(dst + i * stride * Size, src + i * Size, Size);
}

template <int Size>
__attribute__((noinline)) void fill_elements(int64_t n, void* dst_, const void* value) {
  using U = typename BitsOfSize<Size>::type;
  U* dst = static_cast<U*>(dst_);
  U one;
  __builtin_memcpy(&one, value, Size);
  for (int64_t i = 0; i < n; ++i) dst[i] = one;
}

// What knows of the types their sizes, or nothing, and is compiled for all of them together.
using ConvertElements = void (*)(int64_t n, void* dst, const void* src);
using GatherElements = void (*)(int64_t n, void* dst, const void* src, int64_t stride);
using ScatterElements = void (*)(int64_t n, void* dst, int64_t stride, const void* src);

KITSUNE_ONCE inline void load_chunks(int64_t n, char* dst, int64_t to_bytes, const char* src, int64_t from_bytes, int64_t stride,
                                     GatherElements gather, ConvertElements convert_all) {
  alignas(64) char chunk[kChunk * 8];
  for (int64_t i = 0; i < n; i += kChunk) {
    const int64_t count = min_of(kChunk, n - i);
    gather(count, chunk, src + i * stride * from_bytes, stride);
    convert_all(count, dst + i * to_bytes, chunk);
  }
}

KITSUNE_ONCE inline void store_chunks(int64_t n, char* dst, int64_t to_bytes, int64_t stride, const char* src, int64_t from_bytes,
                                      ConvertElements convert_all, ScatterElements scatter) {
  alignas(64) char chunk[kChunk * 8];
  for (int64_t i = 0; i < n; i += kChunk) {
    const int64_t count = min_of(kChunk, n - i);
    convert_all(count, chunk, src + i * from_bytes);
    scatter(count, dst + i * stride * to_bytes, stride, chunk);
  }
}

template <class To, class From>
void load_strided(int64_t n, void* dst, const void* src, int64_t stride) {
  if (stride == 0) {
    if (n <= 0) return;
    const To one = convert<To>(*static_cast<const From*>(src));
    fill_elements<sizeof(To)>(n, dst, &one);
  } else if constexpr (kSame<To, From>) {
    if (stride == 1)
      __builtin_memcpy(dst, src, size_t(n) * sizeof(To));
    else
      gather_elements<sizeof(To)>(n, dst, src, stride);
  } else {
    if (stride == 1) return convert_elements<To, From>(n, dst, src);
    load_chunks(n, static_cast<char*>(dst), sizeof(To), static_cast<const char*>(src), sizeof(From), stride,
                &gather_elements<sizeof(From)>, &convert_elements<To, From>);
  }
}

// With stride 0 the last element stays.
template <class To, class From>
void store_strided(int64_t n, void* dst, int64_t stride, const void* src) {
  if constexpr (kSame<To, From>) {
    if (stride == 1)
      __builtin_memcpy(dst, src, size_t(n) * sizeof(To));
    else
      scatter_elements<sizeof(To)>(n, dst, stride, src);
  } else {
    if (stride == 1) return convert_elements<To, From>(n, dst, src);
    store_chunks(n, static_cast<char*>(dst), sizeof(To), stride, static_cast<const char*>(src), sizeof(From),
                 &convert_elements<To, From>, &scatter_elements<sizeof(To)>);
  }
}

template <class To, class From>
void convert_vector(int64_t n, void* dst, const void* a, const void*, const void*, const void*, const double*) {
  convert_elements<To, From>(n, dst, a);
}

// The types for which a conversion is compiled. Of an integer that is made of another one, or of a bool, the sign does not matter;
// that of the other one does where bits are added.
template <class To, class From>
constexpr bool kAddsBits = TypeTraits<To>::kFloating || (!TypeTraits<To>::kBool && sizeof(To) > sizeof(From));

template <class T, bool SignMatters>
struct WithoutSign : Unsigned<T> {};
template <class T>
struct WithoutSign<T, true> : TypeTag<T> {};
template <class To, class From>
using CompiledTo = typename WithoutSign<To, TypeTraits<From>::kFloating>::type;
template <class To, class From>
using CompiledFrom = typename WithoutSign<From, kAddsBits<To, From>>::type;

inline bool is_compute_type(DType t) { return t != DType::kF16 && t != DType::kBF16; }

// Copies of elements, by their size.
inline LoadFn copying_load(DType t) {
  switch (kItemSize[int(t)]) {
    case 1: return &load_strided<uint8_t, uint8_t>;
    case 2: return &load_strided<uint16_t, uint16_t>;
    case 4: return &load_strided<uint32_t, uint32_t>;
    default: return &load_strided<uint64_t, uint64_t>;
  }
}

inline StoreFn copying_store(DType t) {
  switch (kItemSize[int(t)]) {
    case 1: return &store_strided<uint8_t, uint8_t>;
    case 2: return &store_strided<uint16_t, uint16_t>;
    case 4: return &store_strided<uint32_t, uint32_t>;
    default: return &store_strided<uint64_t, uint64_t>;
  }
}

// Copies, and conversions between floats that programs ask for or that two steps would round twice. Other pairs of types take a
// copy and a conversion (executor_internal.h: Loader, Storer).
inline LoadFn load_function(DType compute, DType storage) {
  if (compute == storage && is_compute_type(compute)) return copying_load(compute);
  if (compute == DType::kF32 && storage == DType::kF16) return &load_strided<float, Half>;
  if (compute == DType::kF32 && storage == DType::kBF16) return &load_strided<float, BFloat16>;
  return compute == DType::kF64 && storage == DType::kF32 ? &load_strided<double, float> : nullptr;
}

inline StoreFn store_function(DType storage, DType compute) {
  if (compute == storage && is_compute_type(compute)) return copying_store(compute);
  if (compute == DType::kF32 && storage == DType::kF16) return &store_strided<Half, float>;
  if (compute == DType::kF32 && storage == DType::kBF16) return &store_strided<BFloat16, float>;
  if (compute == DType::kF64 && storage == DType::kF16) return &store_strided<Half, double>;
  if (compute == DType::kF64 && storage == DType::kBF16) return &store_strided<BFloat16, double>;
  return compute == DType::kF64 && storage == DType::kF32 ? &store_strided<float, double> : nullptr;
}

inline VectorFn convert_function(DType to, DType from) {
  if (!is_compute_type(to) || !is_compute_type(from)) return nullptr;
  return with_type<VectorFn>(to, [from](auto to_tag) {
    return with_type<VectorFn>(from, [](auto from_tag) -> VectorFn {
      using To = typename decltype(to_tag)::type;
      using From = typename decltype(from_tag)::type;
      if constexpr (TypeTraits<To>::kSixteen || TypeTraits<From>::kSixteen) {
        return nullptr;
      } else {
        return &convert_vector<CompiledTo<To, From>, CompiledFrom<To, From>>;
      }
    });
  });
}

}  // namespace kitsune::cpu::KITSUNE_ISA
