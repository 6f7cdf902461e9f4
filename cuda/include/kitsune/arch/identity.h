// Who a thread is, and where the CTA's shared memory lies.
//
// Comes in: special registers. Goes out: indices within 1-D grids. Invariant: without clusters the rank is 0 and the size 1.
#pragma once

#include "kitsune/arch/device.h"

// The size is given at launch. Swizzled tiles need 1024-byte alignment: the 128-byte swizzle repeats every 8 rows of 128 bytes.
alignas(1024) extern __shared__ unsigned char kitsune_shared_memory[];

namespace kitsune::arch {

KITSUNE_DEVICE u32 thread_id() { return threadIdx.x; }
KITSUNE_DEVICE u32 block_threads() { return blockDim.x; }
KITSUNE_DEVICE u32 block_id() { return blockIdx.x; }
KITSUNE_DEVICE u32 grid_size() { return gridDim.x; }
KITSUNE_DEVICE u32 lane_id() { return threadIdx.x % 32; }

// Zero, and no compiler can know it: bit 31 of the mask of the lanes below this one.
KITSUNE_DEVICE u32 opaque_zero() {
  u32 below;
  asm volatile("mov.u32 %0, %%lanemask_lt;" : "=r"(below));
  return below >> 31;
}

#if KITSUNE_SM == 900
// Not volatile: the value never changes, so the compiler may keep it or read it again.
KITSUNE_DEVICE u32 cluster_rank() {
  u32 rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
KITSUNE_DEVICE u32 cluster_size() {
  u32 size;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  return size;
}
#else
KITSUNE_DEVICE u32 cluster_rank() { return 0; }
KITSUNE_DEVICE u32 cluster_size() { return 1; }
#endif

// The SM's clock, for measurements: it counts one SM's cycles, so differences are taken between reads of one CTA ("PTX ISA, Special
// Registers, %clock64"). Not called clock(): that is the C library's, on the host as on the device. The clobber keeps memory
// accesses on their side of it.
KITSUNE_DEVICE u64 cycles() {
  u64 now;
  asm volatile("mov.u64 %0, %%clock64;" : "=l"(now)::"memory");
  return now;
}

// The device's clock, the same on all SMs ("PTX ISA, Special Registers, %globaltimer"): it may stand still for a microsecond.
KITSUNE_DEVICE u64 nanoseconds() {
  u64 now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)::"memory");
  return now;
}

template <class S>
KITSUNE_DEVICE S& shared() {
  static_assert(alignof(S) <= 1024, "dynamic shared memory is aligned to 1024 bytes");
  return *reinterpret_cast<S*>(kitsune_shared_memory);
}

// The emulator's messages use the name; a device has no messages.
KITSUNE_DEVICE void name(const void*, const char*) {}

// From here on this thread works for a stage (the rank of its CTA in the instance) in a role (0: loader, 1 and more: a lane). The
// emulator's counts are told apart by it; a device has none.
KITSUNE_DEVICE void section(u32, u32) {}
// From here on it finishes: its last tile is done.
KITSUNE_DEVICE void finishing() {}

}  // namespace kitsune::arch
