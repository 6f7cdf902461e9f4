// Other CTAs of the cluster: their shared memory, and the cluster barrier, sm_90.
//
// Comes in: pointers into OWN shared memory, which name the same object in the CTA `rank`. Goes out: remote loads and stores.
// Invariant: a CTA must not exit while others may still touch its shared memory: cluster_sync comes last.
#pragma once

#include "kitsune/arch/memory.h"

namespace kitsune::arch {

template <class T>
KITSUNE_DEVICE void st_cluster(T* p, u32 rank, T v) {
  detail::store_cluster(cluster_address(p, rank), v);
}
template <class T>
KITSUNE_DEVICE T ld_cluster(const T* p, u32 rank) {
  T v;
  detail::load_cluster(v, cluster_address(p, rank));
  return v;
}

// A store that adds its bytes to the completed ones of rank's copy of the barrier; that completion releases it at cluster scope, so
// no fence goes before. It is performed in the generic proxy ("PTX ISA, st.async"): where wgmma or a bulk copy reads the data, the
// receiving threads execute fence_proxy_async after their wait.
KITSUNE_DEVICE void st_async(U4* p, u32 rank, U4 v, Mbar& bar) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
                   cluster_address(p, rank)),
               "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(cluster_address(&bar, rank))
               : "memory");
}

KITSUNE_DEVICE void st_async(U2* p, u32 rank, U2 v, Mbar& bar) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1, %2}, [%3];" ::"r"(cluster_address(p, rank)),
      "r"(v.x), "r"(v.y), "r"(cluster_address(&bar, rank))
      : "memory");
}

// Releases all earlier accesses to the cluster, stores to other CTAs' shared memory too, when a mbar_arrive_remote follows. Dear
// (MEMBAR.ALL.GPU and CCTL.IVALL): prefer st_async and bulk_push, which carry their signal with them.
KITSUNE_DEVICE void fence_cluster() { asm volatile("fence.acq_rel.cluster;" ::: "memory"); }

// All threads of all CTAs of the cluster. .aligned: the threads of a warp arrive together.
KITSUNE_DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
KITSUNE_DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
KITSUNE_DEVICE void cluster_sync() {
  cluster_arrive();
  cluster_wait();
}

}  // namespace kitsune::arch
