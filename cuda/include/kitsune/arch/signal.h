// Counters in global memory, by which CTAs of a grid tell each other that data is there.
//
// Comes in: u32 counters. Goes out: release and acquire at gpu scope. Invariant: what a thread wrote before red_add_release (and
// what was ordered before it, by block barriers for instance) is visible after a wait_ge that saw the addition, through ld_l2. Bulk
// copies of such data need fence_proxy_async_global on both sides as well.
#pragma once

#include "kitsune/arch/device.h"

namespace kitsune::arch {

KITSUNE_DEVICE void red_add_release(u32* p, u32 v) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(global_address(p)), "r"(v) : "memory");
}

// Returns the old value.
KITSUNE_DEVICE u32 atomic_add_acq_rel(u32* p, u32 v) {
  u32 old;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(old) : "l"(global_address(p)), "r"(v) : "memory");
  return old;
}

KITSUNE_DEVICE u32 ld_acquire(const u32* p) {
  u32 v;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(global_address(p)) : "memory");
  return v;
}

KITSUNE_DEVICE void fence_gpu() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

// Blocks until *p - v >= 0 as i32: counters may wrap. The polls are relaxed and one acquire follows, because every acquire
// invalidates the SM's whole L1 (CCTL.IVALL), which the other warps are using.
KITSUNE_DEVICE void wait_ge(const u32* p, u32 v) {
  u32 seen;
  do {
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(global_address(p)) : "memory");
  } while (static_cast<i32>(seen - v) < 0);
#if KITSUNE_SM == 900
  // A relaxed read and then an acquire fence is an acquire pattern ("PTX ISA, Memory Consistency Model, Release and Acquire
  // Patterns"). It is a CCTL.IVALL alone; fence.acq_rel would add a MEMBAR.
  asm volatile("fence.acquire.gpu;" ::: "memory");
#else
  ld_acquire(p);  // fence.acquire needs sm_90; the counter only grows, so a second read will do
#endif
}

}  // namespace kitsune::arch
