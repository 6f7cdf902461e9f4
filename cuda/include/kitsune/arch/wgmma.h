// Warpgroup-wide matmuls that run beside their issuer, sm_90a.
//
// Comes in: operands as descriptors of 128-byte-swizzled tiles in shared memory, or A as fragments in registers (those of mma.h:
// warp w of the warpgroup holds rows 16w to 16w+15). Goes out: the 64 x N float accumulators. With g = lane / 4 and t = lane % 4,
// thread (w, lane) holds D[16w + g + 8i][8j + 2t + e] in d[4j + 2i + e] ("PTX ISA, Register Fragments for
// wgmma.mma_async.m64nNk16"). Invariant: between the first wgmma that names them and the wgmma_wait that retires the last, nobody
// touches the accumulators, nor the A registers, nor writes the tiles. The compiler knows only half of this, so a sequence is
// always
//   pin(d); wgmma_fence(); wgmma_*(d, ...) ...; wgmma_commit(); wgmma_wait<n>(); pin(d);
// without the pins it moves plain uses of d across the fence or the wait, and ptxas then serialises every wgmma of the kernel
// (warnings C7508 to C7520 in its log). Where A comes from registers, wait for 0 groups before they are loaded again: some releases
// of ptxas remove copies of A made after a wgmma_wait<1> (CUDA 13 release notes, "Data Race in WGMMA A/B Register Copy
// Propagation"). No register of A may be a constant that ptxas knows: 13.5 uses such registers for something else between the wgmma
// and the wait that retires it, so a zero is opaque_zero(). The package's lint of machine code finds both.
#pragma once

#include "kitsune/arch/device.h"

namespace kitsune::arch {

template <int N>
KITSUNE_DEVICE void pin(float (&d)[N]) {
  KITSUNE_UNROLL
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i]));
}
template <int N>
KITSUNE_DEVICE void pin(u32 (&a)[N]) {
  KITSUNE_UNROLL
  for (int i = 0; i < N; ++i) asm volatile("" : "+r"(a[i]));
}

// Orders earlier accesses to accumulators, A registers and (after fence_proxy_async) shared memory before the next wgmma.
KITSUNE_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
KITSUNE_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Until at most N of the latest groups are unfinished. ptxas makes 7 of any larger N: the instruction cannot count further.
template <int N>
KITSUNE_DEVICE void wgmma_wait() {
  static_assert(N >= 0 && N <= 7, "wgmma.wait_group takes 0 to 7");
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

namespace detail {

// "PTX ISA, Matrix Descriptor Format": bits 0-13 address, 16-29 leading and 32-45 stride dimension byte offset, each in units of
// 16 bytes; 49-51 base offset (0: the 8-row patterns start at multiples of 1024); 62-63 swizzle mode (1: 128 bytes).
KITSUNE_DEVICE u64 descriptor128(const void* p, u32 leading_bytes, u32 stride_bytes) {
  return static_cast<u64>((shared_address(p) & 0x3ffff) >> 4) | static_cast<u64>(leading_bytes >> 4) << 16 |
         static_cast<u64>(stride_bytes >> 4) << 32 | u64{1} << 62;
}

}  // namespace detail

// K-major: rows of 128 bytes (64 16-bit or 32 Tf32 values of K), groups of 8 rows 1024 bytes apart; p is 1024-byte aligned. The
// next k step of 32 bytes is the descriptor + 2. Swizzled K-major layouts do not use the leading offset; its customary value is 1.
KITSUNE_DEVICE u64 desc_k128(const void* p) { return detail::descriptor128(p, 16, 1024); }

// MN-major (16-bit types): rows of 64 values of M or N, one row a value of K. lbo_bytes is the stride between blocks of 64 values
// of M or N, sbo_bytes the stride between groups of 8 values of K (1024 where they follow each other).
KITSUNE_DEVICE u64 desc_mn128(const void* p, u32 lbo_bytes, u32 sbo_bytes) {
  return detail::descriptor128(p, lbo_bytes, sbo_bytes);
}

namespace detail {
template <class T>
constexpr bool no_instance = false;
}

// d = A * B, or += where `accumulate`. A comes from registers, B is K-major. The instances are specialisations.
template <class T, int N>
KITSUNE_DEVICE void wgmma_rs(float (&d)[N / 2], const u32 (&a)[4], u64 desc_b, bool accumulate) {
  static_assert(detail::no_instance<T>, "no wgmma_rs of this type and N: add it to scripts/gen_wgmma.py");
}
// TransA, TransB: the operand is MN-major.
template <class T, int N, bool TransA, bool TransB>
KITSUNE_DEVICE void wgmma_ss(float (&d)[N / 2], u64 desc_a, u64 desc_b, bool accumulate) {
  static_assert(detail::no_instance<T>, "no wgmma_ss of this type, N and orientation: add it to scripts/gen_wgmma.py");
}

}  // namespace kitsune::arch

#include "kitsune/arch/wgmma_instances.h"
