// The tile instructions of AMX that the kernels use, as functions. cpu/tests/tile_model.h has the same ones in plain C++.
//
// Own asm, because the macros of compilers' headers do not say that memory is read and written: GCC moves ordinary stores across
// them. None of these may run before the operating system has given permission, nor but for tile_configure before that (SIGILL).
#pragma once

#include "simd.h"

namespace kitsune::cpu::KITSUNE_ISA {

struct alignas(64) TileConfig {  // as LDTILECFG reads it
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};

// Zeroes all tiles.
KITSUNE_INLINE void tile_configure(const TileConfig& c) { asm volatile("ldtilecfg %0" ::"m"(c) : "memory"); }
KITSUNE_INLINE void tile_release() { asm volatile("tilerelease" ::: "memory"); }

template <int T>
KITSUNE_INLINE void tile_zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(T));
}

// Rows `stride` bytes apart; a stride of 0 repeats one row.
template <int T>
KITSUNE_INLINE void tile_load(const void* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(T) : "memory");
}

template <int T>
KITSUNE_INLINE void tile_store(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(T) : "memory");
}

// C[m][n] += sum over k of A[m][2 k] * B[k][2 n] + A[m][2 k + 1] * B[k][2 n + 1], C of float, A and B of bfloat16.
template <int C, int A, int B>
KITSUNE_INLINE void tile_multiply() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}

}  // namespace kitsune::cpu::KITSUNE_ISA
