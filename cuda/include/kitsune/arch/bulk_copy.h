// Copies by the async proxy: cp.async.bulk and TMA (cp.async.bulk.tensor), sm_90.
//
// Comes in: 16-byte aligned addresses and sizes that are multiples of 16 (TMA tiles: 128-byte aligned; swizzled ones 1024), issued
// by one thread. Goes out: loads and pushes complete on an mbarrier, stores and reductions in the thread's bulk groups. Invariant:
// the async proxy sees generic writes only after the fence of their state space, executed by the writing thread before the barrier
// that hands over to the issuing one; what it wrote itself is visible after the wait, without a fence ("PTX ISA, Async proxy").
#pragma once

#include "kitsune/arch/device.h"

namespace kitsune::arch {

// --- global -> shared

KITSUNE_DEVICE void bulk_load(void* dst, const void* src, u32 bytes, Mbar& bar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared_address(dst)),
               "l"(global_address(src)), "r"(bytes), "r"(shared_address(&bar))
               : "memory");
}

// Data and signal go to the same CTA-relative offsets in every CTA whose bit is set in the mask: each of them expects `bytes`.
KITSUNE_DEVICE void bulk_load_multicast(void* dst, const void* src, u32 bytes, Mbar& bar, u16 mask) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], %4;" ::"r"(
          shared_address(dst)),
      "l"(global_address(src)), "r"(bytes), "r"(shared_address(&bar)), "h"(mask)
      : "memory");
}

// x counts elements along the inner dimension of the tensor, y rows. The map lies in the kernel's parameter, where the tensormap
// proxy sees it as the launch left it; one in global memory would need fence.proxy.tensormap::generic.acquire first ("PTX ISA,
// membar / fence").
KITSUNE_DEVICE void tma_load_2d(const TensorMap& map, Mbar& bar, void* dst, i32 x, i32 y) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
                   shared_address(dst)),
               "l"(&map), "r"(x), "r"(y), "r"(shared_address(&bar))
               : "memory");
}

KITSUNE_DEVICE void tma_load_2d_multicast(const TensorMap& map, Mbar& bar, void* dst, i32 x, i32 y, u16 mask) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(shared_address(dst)),
      "l"(&map), "r"(x), "r"(y), "r"(shared_address(&bar)), "h"(mask)
      : "memory");
}

KITSUNE_DEVICE void bulk_prefetch_l2(const void* src, u32 bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(global_address(src)), "r"(bytes) : "memory");
}

// --- shared -> shared of the CTA `rank`. Both dst and bar are named by their addresses in the own CTA.

KITSUNE_DEVICE void bulk_push(void* dst, u32 rank, const void* src, u32 bytes, Mbar& bar) {
  asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   cluster_address(dst, rank)),
               "r"(shared_address(src)), "r"(bytes), "r"(cluster_address(&bar, rank))
               : "memory");
}

// --- shared -> global, in bulk groups

KITSUNE_DEVICE void bulk_store(void* dst, const void* src, u32 bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global_address(dst)), "r"(shared_address(src)),
               "r"(bytes)
               : "memory");
}

// The order of additions of several CTAs to one address is not fixed: sums of floats differ from run to run.
KITSUNE_DEVICE void bulk_reduce_add_f32(float* dst, const float* src, u32 bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(global_address(dst)),
               "r"(shared_address(src)), "r"(bytes)
               : "memory");
}

KITSUNE_DEVICE void tma_store_2d(const TensorMap& map, const void* src, i32 x, i32 y) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];" ::"l"(&map), "r"(x), "r"(y),
               "r"(shared_address(src))
               : "memory");
}

KITSUNE_DEVICE void tma_reduce_add_2d(const TensorMap& map, const void* src, i32 x, i32 y) {
  asm volatile("cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%0, {%1, %2}], [%3];" ::"l"(&map), "r"(x),
               "r"(y), "r"(shared_address(src))
               : "memory");
}

KITSUNE_DEVICE void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Until at most N of this thread's latest groups have sources still to be read: then the others' shared memory may be written
// again.
template <int N>
KITSUNE_DEVICE void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}

// Until at most N of this thread's latest groups are incomplete: the others' writes are visible to this thread.
template <int N>
KITSUNE_DEVICE void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(N) : "memory");
}

// --- proxy fences, both ways between the generic and the async proxy, restricted to one state space: the bare fence.proxy.async
// waits for every access of the thread to global memory as well (MEMBAR.ALL.GPU).

KITSUNE_DEVICE void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
KITSUNE_DEVICE void fence_proxy_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

}  // namespace kitsune::arch
