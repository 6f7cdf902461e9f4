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
//
// `All`: every CTA of a cluster of so many writes and reads (an exchange), else 0. Code for ranks that the compiler knows is
// straight. A loop over the bits of a mask took about 64 cycles for each bit up to the highest (H200, 2026-11-26: rings of 2, 4, 8
// and 16 CTAs moved 10.0, 6.7, 3.7 and 2.0 bytes a cycle and CTA), in an LSTM of eight CTAs a tenth of a step. Now it visits only
// set bits.
#pragma once

#include "kitsune/queue/smem.h"

#if KITSUNE_SM >= 900

namespace kitsune {

// The rows of a thread that an entry has: both, or the first, whose words are pairs of values or values (layout.h).
enum class Held { kTwoRows, kOneRowOfPairs, kOneRowOfWords };

template <Held>
struct HeldVector {
  using Type = U2;
};
template <>
struct HeldVector<Held::kTwoRows> {
  using Type = U4;
};

template <int Vectors, int Depth, int All = 0, Held Rows = Held::kTwoRows>
struct ClusterQueue {
  using Vector = typename HeldVector<Rows>::Type;
  static constexpr int kVectors = Vectors;
  static constexpr u32 kEntryBytes = Vectors * kGroupThreads * sizeof(Vector);
  static constexpr u32 kBytes = Depth * kEntryBytes;
  Ring<Depth>* ring;  // at the same offset in every CTA that takes part
  Vector* slots;      // likewise
  u32 writers;        // masks of cluster ranks
  u32 readers;
  u32 barrier;  // named barrier of the warpgroup that calls

  // f(rank) of every CTA in the mask.
  template <class F>
  static KITSUNE_DEVICE void for_each(u32 mask, F f) {
    if constexpr (All > 0) {
      KITSUNE_UNROLL
      for (u32 r = 0; r < All; ++r) f((cluster_rank() + r) % All);  // each CTA to another one at a time
    } else {
      for (; mask; mask &= mask - 1) f(31 - clz(mask & (0 - mask)));
    }
  }

  // By one thread of every CTA, before the cluster's first barrier.
  static KITSUNE_DEVICE void init(Ring<Depth>& ring, u32 readers) { ring.init(1, popc(readers)); }
  KITSUNE_DEVICE Vector* at(u32 n, int i) const {
    return slots + (n % Depth * Vectors + i) * kGroupThreads + thread_id() % kGroupThreads;
  }

  static KITSUNE_DEVICE Vector held(U4 v) {
    if constexpr (Rows == Held::kTwoRows)
      return v;
    else if constexpr (Rows == Held::kOneRowOfPairs)
      return {v.x, v.z};
    else
      return {v.x, v.y};
  }

  KITSUNE_DEVICE void wr_acquire(u32 n) const { ring->wait_empty_cluster(n); }
  KITSUNE_DEVICE void push(u32 n, int i, U4 v) const {
    for_each(readers, [&](u32 r) { st_async(at(n, i), r, held(v), ring->full[n % Depth]); });
  }
  // To one of the readers, where each gets vectors of its own.
  KITSUNE_DEVICE void push_to(u32 n, int i, U4 v, u32 reader) const { st_async(at(n, i), reader, held(v), ring->full[n % Depth]); }
  KITSUNE_DEVICE void wr_release(u32) const {}  // the stores release their bytes themselves

  KITSUNE_DEVICE void rd_acquire(u32 n) const {
    if (thread_id() % kGroupThreads == 0) mbar_expect_tx(ring->full[n % Depth], kEntryBytes);
    ring->wait_full_cluster(n);
  }
  KITSUNE_DEVICE U4 pop(u32 n, int i) const {
    const Vector v = ld_shared(at(n, i));
    if constexpr (Rows == Held::kTwoRows)
      return v;
    else if constexpr (Rows == Held::kOneRowOfPairs)
      return {v.x, 0, v.y, 0};
    else
      return {v.x, v.y, 0, 0};
  }
  KITSUNE_DEVICE void rd_release(u32 n) const {
    bar_sync(barrier, kGroupThreads);  // all of the warpgroup have read
    const u32 rank = thread_id() % kGroupThreads;
    if (rank < 32 && writers >> rank & 1) mbar_arrive_remote(ring->empty[n % Depth], rank);
  }
};

}  // namespace kitsune

#endif
