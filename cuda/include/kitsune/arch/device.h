// How device code is declared, and addresses of the state spaces.
//
// Comes in: generic pointers. Goes out: the macros of every kernel, and the addresses that PTX instructions take. Invariant: a
// shared address is a 32-bit offset into the shared::cluster window, in which the CTA's own shared::cta window lies ("PTX ISA,
// State Spaces, Shared State Space"), so the same address serves instructions of both.
#pragma once

#include "kitsune/arch/types.h"

#define KITSUNE_DEVICE __device__ __forceinline__
#define KITSUNE_UNROLL _Pragma("unroll")
#define KITSUNE_NO_UNROLL _Pragma("unroll 1")
#define KITSUNE_CONSTANT __constant__ const  // a table that the whole grid reads

// A kernel has ONE parameter, a struct by value: __grid_constant__ lets its address be taken (a tensor map in it is used in place)
// without a copy in local memory. One CTA a SM: pipelines take all the shared memory, so ptxas may give a thread all the registers.
#define KITSUNE_KERNEL(name, Params, p, threads) \
  extern "C" __global__ void __launch_bounds__(threads, 1) name(const __grid_constant__ Params p)

namespace kitsune::arch {

KITSUNE_DEVICE u32 shared_address(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }
KITSUNE_DEVICE u64 global_address(const void* p) { return static_cast<u64>(__cvta_generic_to_global(p)); }

#if KITSUNE_SM == 900
// The address of the same object in the shared memory of the cluster's CTA `rank`.
KITSUNE_DEVICE u32 cluster_address(const void* p, u32 rank) {
  u32 address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(p)), "r"(rank));
  return address;
}
#endif

}  // namespace kitsune::arch
