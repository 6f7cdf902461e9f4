// mbarriers in shared memory: arrivals, transaction counts, waits.
//
// Comes in: Mbar objects of the own CTA, and ranks of CTAs of the cluster. Goes out: release at arrivals, acquire at waits.
// Invariant: the scope is the CTA's, unless a name says cluster or remote. Every function is executed by single threads.
#pragma once

#include "kitsune/arch/device.h"

namespace kitsune::arch {

KITSUNE_DEVICE void mbar_init(Mbar& bar, u32 arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(&bar)), "r"(arrivals) : "memory");
}

KITSUNE_DEVICE void mbar_arrive(Mbar& bar) {
  // The state that arrive returns is not used, because waits name the phase by its parity; before sm_90 it has to go somewhere.
#if KITSUNE_SM == 900
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&bar)) : "memory");
#else
  asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared.b64 state, [%0];\n}" ::"r"(shared_address(&bar)) : "memory");
#endif
}

#if KITSUNE_SM == 900

// Makes initialised barriers visible to the cluster and to the async proxy, together with the cluster_sync or block_sync that
// follows ("PTX ISA, membar / fence": .mbarrier_init).
KITSUNE_DEVICE void fence_mbar_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// Default semantics, acquire.cta: arrivals of the own CTA, and bytes completed by asynchronous copies, whoever issued them.
// try_wait suspends the thread for a time that the hardware chooses, hence the loop.
KITSUNE_DEVICE void mbar_wait(Mbar& bar, u32 parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "wait:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra wait;\n"
      "}" ::"r"(shared_address(&bar)),
      "r"(parity)
      : "memory");
}

// One arrival, and `bytes` that copies will complete in this phase.
KITSUNE_DEVICE void mbar_expect_tx(Mbar& bar, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&bar)), "r"(bytes) : "memory");
}

// An arrival on rank's copy of the barrier: "I have finished with my shared memory, you may write to it". It orders this thread's
// earlier reads AND writes of its OWN shared memory (and what barriers ordered before them) before whatever follows a
// mbar_wait_cluster on it. This is the manual's pattern "release local shared memory via generic proxy" ("PTX ISA, membar / fence",
// examples): it costs MEMBAR.ALL.CTA and FENCE.VIEW.ASYNC. arrive.release.cluster would drain every access of the thread to global
// memory too (MEMBAR.ALL.GPU), and the default arrive.release.cta has no effect beyond the CTA.
// It does NOT release stores to global memory or to other CTAs' shared memory (st_cluster): put fence_cluster before it, use
// st_async, or meet at cluster_sync.
//
// In two parts, because one fence serves several arrivals: what comes before the fence is what they order.
KITSUNE_DEVICE void fence_release_own_shared() { asm volatile("fence.release.sync_restrict::shared::cta.cluster;" ::: "memory"); }
KITSUNE_DEVICE void mbar_arrive_remote_relaxed(Mbar& bar, u32 rank) {
  asm volatile("mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%0];" ::"r"(cluster_address(&bar, rank)) : "memory");
}
KITSUNE_DEVICE void mbar_arrive_remote(Mbar& bar, u32 rank) {
  fence_release_own_shared();
  mbar_arrive_remote_relaxed(bar, rank);
}

// The wait for remote arrivals. Objects in shared memory that were released to it are visible afterwards, and may be written
// again; objects in global memory are not covered. The manual's pattern "acquire local shared memory via generic proxy": the
// fence costs nothing, where try_wait.acquire.cluster would invalidate L1 at every poll (CCTL.IVALL).
KITSUNE_DEVICE void mbar_wait_cluster(Mbar& bar, u32 parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "wait:\n"
      "mbarrier.try_wait.parity.relaxed.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra wait;\n"
      "}\n"
      "fence.acquire.sync_restrict::shared::cluster.cluster;" ::"r"(shared_address(&bar)),
      "r"(parity)
      : "memory");
}

#else

// Without clusters and the async proxy, the block_sync that follows makes initialised barriers visible.
KITSUNE_DEVICE void fence_mbar_init() { asm volatile("" ::: "memory"); }

// try_wait needs sm_90: test_wait does not suspend, the loop polls.
KITSUNE_DEVICE void mbar_wait(Mbar& bar, u32 parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "wait:\n"
      "mbarrier.test_wait.parity.shared.b64 done, [%0], %1;\n"
      "@!done bra wait;\n"
      "}" ::"r"(shared_address(&bar)),
      "r"(parity)
      : "memory");
}

#endif

}  // namespace kitsune::arch
