// Ring queues whose entries lie in the shared memory of the CTA that reads them.
//
// All queues of this folder have one interface. Entry n goes through slot n % Depth; n counts from 0 and never skips:
//   writer: wr_acquire(n)  the slot is free     ... write ...   wr_release(n)  the entry is full
//   reader: rd_acquire(n)  the entry is full    ... read ...    rd_release(n)  the slot is free
// A writer that is Depth entries ahead of the slowest reader waits. Nothing else waits, so a chain of stages cannot deadlock as
// long as every skip connection is as deep as the path it bypasses (planning/stages.py).
//
// A phase bit tells uses of a slot apart: the full barrier of slot s completes its phase k when entry s + k Depth is written.
#pragma once

#include "kitsune/layout.h"

namespace kitsune {

// Full and empty barriers of a ring of Depth slots.
template <int Depth>
struct Ring {
  Mbar full[Depth];
  Mbar empty[Depth];

  // By one thread, before the barrier that starts the kernel's roles.
  KITSUNE_DEVICE void init(u32 full_arrivals, u32 empty_arrivals) {
    for (int s = 0; s < Depth; ++s) {
      mbar_init(full[s], full_arrivals);
      mbar_init(empty[s], empty_arrivals);
    }
  }
  static KITSUNE_DEVICE u32 slot(u32 n) { return n % Depth; }
  static KITSUNE_DEVICE u32 phase(u32 n) { return n / Depth & 1; }
  KITSUNE_DEVICE void wait_empty(u32 n) { mbar_wait(empty[slot(n)], phase(n) ^ 1); }
  KITSUNE_DEVICE void wait_full(u32 n) { mbar_wait(full[slot(n)], phase(n)); }
#if KITSUNE_SM >= 900
  // Where other CTAs arrive, or store.
  KITSUNE_DEVICE void wait_empty_cluster(u32 n) { mbar_wait_cluster(empty[slot(n)], phase(n) ^ 1); }
  KITSUNE_DEVICE void wait_full_cluster(u32 n) { mbar_wait_cluster(full[slot(n)], phase(n)); }
#endif
};

// Where a reader or writer of a ring is. It moves by one entry at a time, which costs less than finding slot and phase from a
// count, and keeps one register pair alive where counts would keep one per entry in flight.
template <int Depth>
struct Cursor {
  u32 slot = 0;
  u32 phase = 0;

  KITSUNE_DEVICE void advance() {
    const bool wraps = slot == Depth - 1;
    slot = wraps ? 0 : slot + 1;
    phase ^= wraps;
  }
};

#if KITSUNE_SM >= 900

// Chunks of weights on their way from global memory to the tensor cores: one loader thread writes by bulk copies, the consumer
// warpgroups of all CTAs of the cluster read. With a cluster each CTA's loader fetches its share of every chunk and multicasts it,
// so that a chunk is read from the L2 once per cluster.
template <int Depth, int SlotBytes, int Lanes, int Cluster>
struct WeightQueue {
  using At = Cursor<Depth>;
  Ring<Depth>* ring;
  u8* slots;

  static KITSUNE_DEVICE void init(Ring<Depth>& ring) { ring.init(1, 4 * Lanes * Cluster); }

  KITSUNE_DEVICE void wr_acquire(const At& at) const {
    if constexpr (Cluster == 1)
      mbar_wait(ring->empty[at.slot], at.phase ^ 1);
    else
      mbar_wait_cluster(ring->empty[at.slot], at.phase ^ 1);
  }

  // Fetches this CTA's share of the entry, `bytes` long; a multiple of 16 * Cluster.
  KITSUNE_DEVICE void wr_release(const At& at, const u8* from, u32 bytes) const {
    Mbar& full = ring->full[at.slot];
    mbar_expect_tx(full, bytes);
    u8* to = slots + at.slot * SlotBytes;
    if constexpr (Cluster == 1) {
      bulk_load(to, from, bytes, full);
    } else {
      const u32 share = bytes / Cluster, offset = cluster_rank() * share;
      bulk_load_multicast(to + offset, from + offset, share, full, (1u << Cluster) - 1);
    }
  }

  KITSUNE_DEVICE void rd_acquire(const At& at) const { mbar_wait(ring->full[at.slot], at.phase); }
  KITSUNE_DEVICE const u8* entry(const At& at) const { return slots + at.slot * SlotBytes; }

  // By every thread of a warp: what a warp has seen of wgmma says nothing about the other three. One rd_finish, which is dear, goes
  // before the rd_release of all entries that have been read by then.
  KITSUNE_DEVICE void rd_finish() const {
    if constexpr (Cluster > 1) fence_release_own_shared();
  }
  KITSUNE_DEVICE void rd_release(const At& at) const {
    const u32 lane = lane_id();
    if constexpr (Cluster == 1) {
      if (lane == 0) mbar_arrive(ring->empty[at.slot]);
    } else {
      if (lane < Cluster) mbar_arrive_remote_relaxed(ring->empty[at.slot], lane);
    }
  }
};

#else

// Without bulk copies a warp of the loader copies 16 bytes a thread, and the copies themselves arrive at the barrier.
template <int Depth, int SlotBytes, int Lanes, int Cluster>
struct WeightQueue {
  static_assert(Cluster == 1, "clusters need compute capability 9.0");
  using At = Cursor<Depth>;
  Ring<Depth>* ring;
  u8* slots;

  static KITSUNE_DEVICE void init(Ring<Depth>& ring) { ring.init(32, 4 * Lanes); }

  KITSUNE_DEVICE void wr_acquire(const At& at) const { mbar_wait(ring->empty[at.slot], at.phase ^ 1); }
  KITSUNE_DEVICE void wr_release(const At& at, const u8* from, u32 bytes) const {
    u8* to = slots + at.slot * SlotBytes;
    for (u32 i = lane_id() * 16; i < bytes; i += 32 * 16) cp_async_16(to + i, from + i, 16);
    cp_async_arrive(ring->full[at.slot]);
  }
  KITSUNE_DEVICE void rd_acquire(const At& at) const { mbar_wait(ring->full[at.slot], at.phase); }
  KITSUNE_DEVICE const u8* entry(const At& at) const { return slots + at.slot * SlotBytes; }
  KITSUNE_DEVICE void rd_finish() const { syncwarp(); }
  KITSUNE_DEVICE void rd_release(const At& at) const {
    if (lane_id() == 0) mbar_arrive(ring->empty[at.slot]);
  }
};

#endif

// Tiles between warpgroups of one CTA. An entry is a register image: vector i of thread t at 16 (128 i + t), which neither side
// needs to shuffle and no bank conflicts.
template <int Vectors, int Depth>
struct SmemQueue {
  static constexpr int kVectors = Vectors;
  static constexpr u32 kBytes = Depth * Vectors * kGroupThreads * 16;
  Ring<Depth>* ring;
  U4* slots;

  // `writers`, `readers`: warpgroups that write a part of each entry, and that read all of it.
  static KITSUNE_DEVICE void init(Ring<Depth>& ring, u32 writers, u32 readers) {
    ring.init(writers * kGroupThreads, readers * kGroupThreads);
  }
  KITSUNE_DEVICE U4* at(u32 n, int i) const {
    return slots + (n % Depth * Vectors + i) * kGroupThreads + thread_id() % kGroupThreads;
  }

  KITSUNE_DEVICE void wr_acquire(u32 n) const { ring->wait_empty(n); }
  KITSUNE_DEVICE void push(u32 n, int i, U4 v) const { st_shared(at(n, i), v); }
  KITSUNE_DEVICE void wr_release(u32 n) const { mbar_arrive(ring->full[n % Depth]); }
  KITSUNE_DEVICE void rd_acquire(u32 n) const { ring->wait_full(n); }
  KITSUNE_DEVICE U4 pop(u32 n, int i) const { return ld_shared(at(n, i)); }
  KITSUNE_DEVICE void rd_release(u32 n) const { mbar_arrive(ring->empty[n % Depth]); }
};

}  // namespace kitsune
