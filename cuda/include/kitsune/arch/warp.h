// Threads of a warp and of a CTA together: shuffles, named barriers, the register budget.
//
// Comes in: all 32 lanes of a warp (shuffles, syncwarp), or the warps that a barrier counts. Goes out: other lanes' values; order
// of the participants' memory accesses within the CTA. Invariant: the lanes of a warp execute each of these together.
#pragma once

#include "kitsune/arch/device.h"

namespace kitsune::arch {

KITSUNE_DEVICE float shfl_xor(float v, u32 mask) { return __shfl_xor_sync(~0u, v, mask); }
KITSUNE_DEVICE u32 shfl_xor(u32 v, u32 mask) { return __shfl_xor_sync(~0u, v, mask); }
KITSUNE_DEVICE float shfl(float v, u32 lane) { return __shfl_sync(~0u, v, lane); }
KITSUNE_DEVICE u32 shfl(u32 v, u32 lane) { return __shfl_sync(~0u, v, lane); }
KITSUNE_DEVICE void syncwarp() { __syncwarp(); }

// Named barriers 1 to 15, `threads` a multiple of 32 that counts those who sync and those who only arrive.
KITSUNE_DEVICE void bar_sync(u32 id, u32 threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
KITSUNE_DEVICE void bar_arrive(u32 id, u32 threads) { asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
// Barrier 0, all threads of the CTA.
KITSUNE_DEVICE void block_sync() { __syncthreads(); }

// Moves registers between warpgroups ("PTX ISA, setmaxnreg"): all warps of a warpgroup execute it, and reg_inc blocks until others
// have given enough back. The sum over warpgroups may not exceed what the launch allocated. ptxas honours it only in kernels with a
// known CTA size, which KITSUNE_KERNEL gives.
template <int N>
KITSUNE_DEVICE void reg_dec() {
  static_assert(N % 8 == 0 && N >= 24 && N <= 256, "setmaxnreg takes multiples of 8 from 24 to 256");
#if KITSUNE_SM == 900
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N) : "memory");
#endif
}
template <int N>
KITSUNE_DEVICE void reg_inc() {
  static_assert(N % 8 == 0 && N >= 24 && N <= 256, "setmaxnreg takes multiples of 8 from 24 to 256");
#if KITSUNE_SM == 900
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N) : "memory");
#endif
}

}  // namespace kitsune::arch
