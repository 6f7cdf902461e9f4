// Threefry-2x32 with 20 rounds, as jax.random counts with it: one word of the result, or both by exclusive or.
//
// J. K. Salmon, M. A. Moraes, R. O. Dror and D. E. Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
#pragma once

#include "simd.h"

namespace kitsune::cpu::KITSUNE_ISA {

template <int R>
KITSUNE_INLINE VU rotate_left(VU x) {
#if defined(__AVX512F__)
  return (VU)_mm512_rol_epi32((__m512i)x, R);
#else
  return x << R | x >> (32 - R);
#endif
}

// Vectors that are hashed side by side, because each round waits for the one before it: as many as there are registers for.
#if defined(__AVX512F__)
constexpr int kHashes = 4;
#else
constexpr int kHashes = 2;
#endif

template <int R>
KITSUNE_INLINE void threefry_round(VU (&x)[kHashes], VU (&y)[kHashes]) {
  KITSUNE_UNROLL
  for (int i = 0; i < kHashes; ++i) {
    x[i] += y[i];
    y[i] = rotate_left<R>(y[i]) ^ x[i];
  }
}

template <int A, int B, int C, int D>
KITSUNE_INLINE void threefry_rounds(VU (&x)[kHashes], VU (&y)[kHashes], const VU (&k)[kHashes], const VU (&l)[kHashes],
                                    uint32_t n) {
  threefry_round<A>(x, y);
  threefry_round<B>(x, y);
  threefry_round<C>(x, y);
  threefry_round<D>(x, y);
  KITSUNE_UNROLL
  for (int i = 0; i < kHashes; ++i) {
    x[i] += k[i];
    y[i] += l[i] + n;
  }
}

enum class Word { kFirst, kSecond, kXor };

template <Word W>
void map_threefry(int64_t n, void* dst, const void* a, const void* b, const void* c, const void* d, const double*) {
  constexpr int64_t kStep = kHashes * kFloats;
  auto hash = [](char* to, const char* key0, const char* key1, const char* count0, const char* count1) {
    VU x[kHashes], y[kHashes], k[kHashes], l[kHashes], m[kHashes];
    KITSUNE_UNROLL
    for (int i = 0; i < kHashes; ++i) {
      k[i] = load_vector<VU>(key0 + i * kVectorBytes);
      l[i] = load_vector<VU>(key1 + i * kVectorBytes);
      m[i] = k[i] ^ l[i] ^ 0x1BD11BDAu;
      x[i] = load_vector<VU>(count0 + i * kVectorBytes) + k[i];
      y[i] = load_vector<VU>(count1 + i * kVectorBytes) + l[i];
    }
    threefry_rounds<13, 15, 26, 6>(x, y, l, m, 1);
    threefry_rounds<17, 29, 16, 24>(x, y, m, k, 2);
    threefry_rounds<13, 15, 26, 6>(x, y, k, l, 3);
    threefry_rounds<17, 29, 16, 24>(x, y, l, m, 4);
    threefry_rounds<13, 15, 26, 6>(x, y, m, k, 5);
    KITSUNE_UNROLL
    for (int i = 0; i < kHashes; ++i)
      store_vector(to + i * kVectorBytes, W == Word::kFirst ? x[i] : W == Word::kSecond ? y[i] : x[i] ^ y[i]);
  };
  const void* from[4] = {a, b, c, d};
  int64_t i = 0;
  for (; i + kStep <= n; i += kStep) {
    auto at = [&](int k) { return static_cast<const char*>(from[k]) + 4 * i; };
    hash(static_cast<char*>(dst) + 4 * i, at(0), at(1), at(2), at(3));
  }
  if (i == n) return;
  char last[5][kStep * 4] = {};
  for (int k = 0; k < 4; ++k) __builtin_memcpy(last[k], static_cast<const char*>(from[k]) + 4 * i, size_t(n - i) * 4);
  hash(last[4], last[0], last[1], last[2], last[3]);
  __builtin_memcpy(static_cast<char*>(dst) + 4 * i, last[4], size_t(n - i) * 4);
}

}  // namespace kitsune::cpu::KITSUNE_ISA
