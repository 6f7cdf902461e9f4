// Ring queues over the distributed shared memory of a cluster: the writer stores into the shared memory of the CTA that reads.
//
// The full barrier lies with the reader and counts bytes: st.async completes them as they land, so no fence and no staging buffer
// is needed. The empty barrier lies with the writer; the reader arrives there remotely. The reader announces an entry's bytes when
// it asks for it. They may have landed by then: the phase cannot complete before its one arrival, which is that announcement, and
// until then the transaction count is below zero ("PTX ISA, mbarrier, tracking asynchronous operations").
//
// Several readers (multicast): the writer stores to each, at the same offset of every CTA's shared memory, and waits for all of
// them. Several writers (a many-to-one reduction): each stores its own vectors of the entry and has its own empty barrier, at one
// offset.
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
  u32 barrier;  // named barrier of the warpgroup that calls

  // By one thread of every CTA, before the cluster's first barrier.
  static KITSUNE_DEVICE void init(Ring<Depth>& ring, u32 readers) { ring.init(1, popc(readers)); }
  KITSUNE_DEVICE U4* at(u32 n, int i) const {
    return slots + (n % Depth * Vectors + i) * kGroupThreads + thread_id() % kGroupThreads;
  }

  KITSUNE_DEVICE void wr_acquire(u32 n) const { ring->wait_empty_cluster(n); }
  KITSUNE_DEVICE void push(u32 n, int i, U4 v) const {
    for (u32 left = readers, r = 0; left; left >>= 1, ++r)
      if (left & 1) st_async(at(n, i), r, v, ring->full[n % Depth]);
  }
  // To one of the readers, where each gets vectors of its own.
  KITSUNE_DEVICE void push_to(u32 n, int i, U4 v, u32 reader) const { st_async(at(n, i), reader, v, ring->full[n % Depth]); }
  KITSUNE_DEVICE void wr_release(u32) const {}  // the stores release their bytes themselves

  KITSUNE_DEVICE void rd_acquire(u32 n) const {
    if (thread_id() % kGroupThreads == 0) mbar_expect_tx(ring->full[n % Depth], kEntryBytes);
    ring->wait_full_cluster(n);
  }
  KITSUNE_DEVICE U4 pop(u32 n, int i) const { return ld_shared(at(n, i)); }
  KITSUNE_DEVICE void rd_release(u32 n) const {
    bar_sync(barrier, kGroupThreads);  // all of the warpgroup have read
    if (thread_id() % kGroupThreads != 0) return;
    for (u32 left = writers, r = 0; left; left >>= 1, ++r)
      if (left & 1) mbar_arrive_remote(ring->empty[n % Depth], r);
  }
};

}  // namespace kitsune

#endif
