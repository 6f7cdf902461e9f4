// The vector types of one ISA, on GCC/Clang vector extensions, and the few operations the extensions lack.
//
// Every header of this folder is compiled once per ISA, with that ISA's flags, into the namespace kitsune::cpu::KITSUNE_ISA, which
// the including translation unit names. Nothing inline may be shared between those units: the linker would keep one copy, perhaps
// the one with instructions this CPU lacks. So these headers call builtins and extern "C" functions only, never inline std::
// functions.
#pragma once

#ifndef KITSUNE_ISA
#error "define KITSUNE_ISA (a namespace name) and KITSUNE_ISA_NAME (a string) before including the kernels"
#endif

#include <stddef.h>
#include <stdint.h>

#include "kitsune_cpu/kernels.h"
#include "kitsune_cpu/opcodes.h"

#if defined(__x86_64__) || defined(__i386__)
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC 12's own _mm512_undefined_ps
#pragma GCC diagnostic ignored "-Wuninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#else
#include <immintrin.h>
#endif
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

// The ISAs whose bf16 products are instructions of their own (BF16Step in micro_kernel.h or neon.h).
#if defined(__AVX512BF16__) || (defined(KITSUNE_NEON) && defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC))
#define KITSUNE_NATIVE_BF16
#endif

#define KITSUNE_INLINE inline __attribute__((always_inline))
// KITSUNE_ONCE: of a function that is compiled once and called. GCC would make a copy for each constant that it is called with.
#if defined(__clang__)
#define KITSUNE_ONCE __attribute__((noinline))
#pragma clang diagnostic ignored "-Wpass-failed"  // KITSUNE_INDEPENDENT is a permission: loops around fmod and the like stay scalar
#define KITSUNE_UNROLL _Pragma("clang loop unroll(full)")
#define KITSUNE_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define KITSUNE_ONCE __attribute__((noinline, noclone))
#define KITSUNE_UNROLL _Pragma("GCC unroll 32")
#define KITSUNE_INDEPENDENT _Pragma("GCC ivdep")
#endif

namespace kitsune::cpu::KITSUNE_ISA {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif

template <class T, int Bytes>
struct VectorOf {
  typedef T type __attribute__((vector_size(Bytes)));
};
template <class T>
using Vec = typename VectorOf<T, kVectorBytes>::type;

using VF = Vec<float>;
using VI = Vec<int32_t>;
using VD = Vec<double>;
using VL = Vec<int64_t>;
using VU = Vec<uint32_t>;  // for arithmetic on the bits of floats, which may wrap
using VUL = Vec<uint64_t>;
using HF = VectorOf<float, kVectorBytes / 2>::type;  // as many floats as VD has doubles
using HI = VectorOf<int32_t, kVectorBytes / 2>::type;

constexpr int kFloats = kVectorBytes / 4;
constexpr int kDoubles = kVectorBytes / 8;

template <class V>
KITSUNE_INLINE V load_vector(const void* p) {
  V v;
  __builtin_memcpy(&v, p, sizeof(V));
  return v;
}

template <class V>
KITSUNE_INLINE void store_vector(void* p, V v) {
  __builtin_memcpy(p, &v, sizeof(V));
}

// x - 0 is x for every x (x + 0 would lose the sign of -0), so compilers reduce this to a broadcast.
template <class V, class T>
KITSUNE_INLINE V splat(T x) {
  return x - V{};
}

template <class T>
KITSUNE_INLINE T min_of(T a, T b) {
  return b < a ? b : a;
}

template <class T>
KITSUNE_INLINE T max_of(T a, T b) {
  return a < b ? b : a;
}

// Is any lane of a comparison's result set?
KITSUNE_INLINE bool any(VI mask) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#elif defined(__AVX2__)
  return _mm256_movemask_ps((__m256)mask) != 0;
#else
  int32_t folded = 0;
  for (int i = 0; i < kFloats; ++i) folded |= mask[i];
  return folded != 0;
#endif
}

KITSUNE_INLINE VD square_root(VD x) {
#if defined(__AVX512F__)
  return (VD)_mm512_sqrt_pd((__m512d)x);
#elif defined(__AVX2__)
  return (VD)_mm256_sqrt_pd((__m256d)x);
#elif defined(__SSE2__)
  return (VD)_mm_sqrt_pd((__m128d)x);
#elif defined(__aarch64__)
  return (VD)vsqrtq_f64((float64x2_t)x);
#else
  VD r;
  for (int i = 0; i < kDoubles; ++i) r[i] = __builtin_sqrt(x[i]);
  return r;
#endif
}

KITSUNE_INLINE VF square_root(VF x) {
#if defined(__AVX512F__)
  return (VF)_mm512_sqrt_ps((__m512)x);
#elif defined(__AVX2__)
  return (VF)_mm256_sqrt_ps((__m256)x);
#elif defined(__SSE2__)
  return (VF)_mm_sqrt_ps((__m128)x);
#elif defined(__aarch64__)
  return (VF)vsqrtq_f32((float32x4_t)x);
#else
  VF r;
  for (int i = 0; i < kFloats; ++i) r[i] = __builtin_sqrtf(x[i]);
  return r;
#endif
}

template <class V>
KITSUNE_INLINE V abs_vector(V x);

template <>
KITSUNE_INLINE VF abs_vector(VF x) {
  return (VF)((VI)x & INT32_MAX);
}

template <>
KITSUNE_INLINE VD abs_vector(VD x) {
  return (VD)((VL)x & INT64_MAX);
}

KITSUNE_INLINE VF copy_sign(VF magnitude, VF sign) { return (VF)(((VI)magnitude & INT32_MAX) | ((VI)sign & INT32_MIN)); }
KITSUNE_INLINE VD copy_sign(VD magnitude, VD sign) { return (VD)(((VL)magnitude & INT64_MAX) | ((VL)sign & INT64_MIN)); }

// The two halves of a float vector, and the vector of two halves: in registers (through memory, the wide reload of two narrow
// stores would wait for them to reach the cache).
#if defined(__AVX512F__)
#define KITSUNE_LOW_LANES 0, 1, 2, 3, 4, 5, 6, 7
#define KITSUNE_HIGH_LANES 8, 9, 10, 11, 12, 13, 14, 15
#elif defined(__AVX2__)
#define KITSUNE_LOW_LANES 0, 1, 2, 3
#define KITSUNE_HIGH_LANES 4, 5, 6, 7
#else
#define KITSUNE_LOW_LANES 0, 1
#define KITSUNE_HIGH_LANES 2, 3
#endif
KITSUNE_INLINE HF low_half(VF x) { return __builtin_shufflevector(x, x, KITSUNE_LOW_LANES); }
KITSUNE_INLINE HF high_half(VF x) { return __builtin_shufflevector(x, x, KITSUNE_HIGH_LANES); }
KITSUNE_INLINE VF join(HF low, HF high) { return __builtin_shufflevector(low, high, KITSUNE_LOW_LANES, KITSUNE_HIGH_LANES); }
KITSUNE_INLINE VI join(HI low, HI high) { return __builtin_shufflevector(low, high, KITSUNE_LOW_LANES, KITSUNE_HIGH_LANES); }

// kDoubles floats as doubles, and back. GCC makes two instructions and a join of a conversion to or from 64 bytes.
#if defined(__AVX512F__)
KITSUNE_INLINE VD widen(HF x) { return (VD)_mm512_cvtps_pd((__m256)x); }
KITSUNE_INLINE HF narrow(VD x) { return (HF)_mm512_cvtpd_ps((__m512d)x); }
#else
KITSUNE_INLINE VD widen(HF x) { return __builtin_convertvector(x, VD); }
KITSUNE_INLINE HF narrow(VD x) { return __builtin_convertvector(x, HF); }
#endif

}  // namespace kitsune::cpu::KITSUNE_ISA
