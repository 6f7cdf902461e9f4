// Ring queues over the distributed shared memory of a cluster: the writer stores into the shared memory of the CTA that reads.
//
// The full barrier lies with the reader and counts bytes: st.async completes them as they land, so no fence and no staging buffer is
// needed. The empty barrier lies with the writer; the reader arrives there remotely. The reader announces the bytes of a slot's next
// use before it hands the slot back, and of the first Depth uses at the start: a write can so never come before it is expected.
//
// Several readers (multicast): the writer stores to each, at the same offset of every CTA's shared memory, and waits for all of them.
// Several writers (a many-to-one reduction): each stores its own vectors of the entry and has its own empty barrier, at one offset.
#pragma once

#include "kitsune/queue/smem.h"

#if KITSUNE_SM >= 900

namespace kitsune {

template <int Vectors, int Depth>
struct ClusterQueue {
  static constexpr int kVectors = Vectors;
  static constexpr u32 kEntryBytes = Vectors * kGroupThreads * 16;
  static constexpr u32 kBytes = Depth * kEntryBytes;
  Ring<Depth>* ring;  // at the same offset in every CTA that takes part
  U4* slots;          // likewise
  u32 writers;        // masks of cluster ranks
  u32 readers;
  u32 barrier;        // named barrier of the warpgroup that calls

  // By one thread of every CTA, before the cluster's first barrier.
  static KITSUNE_DEVICE void init(Ring<Depth>& ring, u32 writers, u32 readers) {
    ring.init(1, popc(readers));
    if (readers >> cluster_rank() & 1)
      for (int s = 0; s < Depth; ++s) mbar_expect_tx(ring.full[s], kEntryBytes);
    (void)writers;
  }
  KITSUNE_DEVICE U4* at(u32 n, int i) const { return slots + (n % Depth * Vectors + i) * kGroupThreads + thread_id() % kGroupThreads; }

  KITSUNE_DEVICE void wr_acquire(u32 n) const { ring->wait_empty_cluster(n); }
  KITSUNE_DEVICE void push(u32 n, int i, U4 v) const {
    for (u32 left = readers, r = 0; left; left >>= 1, ++r)
      if (left & 1) st_async(at(n, i), r, v, ring->full[n % Depth]);
  }
  KITSUNE_DEVICE void wr_release(u32) const {}  // the stores release their bytes themselves

  KITSUNE_DEVICE void rd_acquire(u32 n) const { ring->wait_full_cluster(n); }
  KITSUNE_DEVICE U4 pop(u32 n, int i) const { return ld_shared(at(n, i)); }
  KITSUNE_DEVICE void rd_release(u32 n) const {
    bar_sync(barrier, kGroupThreads);  // all of the warpgroup have read
    u32 t = thread_id() % kGroupThreads;
    if (t != 0) return;
    mbar_expect_tx(ring->full[n % Depth], kEntryBytes);
    for (u32 left = writers, r = 0; left; left >>= 1, ++r)
      if (left & 1) mbar_arrive_remote(ring->empty[n % Depth], r);
  }
};

}  // namespace kitsune

#endif
