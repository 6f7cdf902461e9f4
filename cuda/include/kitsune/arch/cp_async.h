// Copies of 16 bytes from global to own shared memory by the issuing thread, sm_80 and later (cp.async).
//
// Comes in: 16-byte aligned addresses. Goes out: completion by groups of the thread, or on an mbarrier. Invariant: after the wait
// the data is visible to the thread that issued the copies; other threads need a barrier after it.
#pragma once

#include "kitsune/arch/device.h"

namespace kitsune::arch {

// Copies src_bytes (0 to 16) and fills the rest with zeros. .cg bypasses L1: a tile is read once by a CTA.
KITSUNE_DEVICE void cp_async_16(void* dst, const void* src, u32 src_bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(dst)), "l"(global_address(src)), "r"(src_bytes)
               : "memory");
}

KITSUNE_DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Until at most N of this thread's latest groups are incomplete.
template <int N>
KITSUNE_DEVICE void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// One arrival of this thread when all its earlier copies have landed. noinc: it counts among the arrivals mbar_init was told of
// ("PTX ISA, cp.async.mbarrier.arrive"); without noinc it would be an extra one.
KITSUNE_DEVICE void cp_async_arrive(Mbar& bar) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(&bar)) : "memory");
}

}  // namespace kitsune::arch
