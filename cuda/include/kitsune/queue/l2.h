// Ring queues in global memory that stay in the L2: between any two CTAs that run at the same time.
//
// The paper's queue (arXiv 2502.18403): one thread per warpgroup waits and signals, every counter has a cache line of its own, and
// each side meets at a named barrier around it. Counters of a slot only grow, so they need no reset between uses: the k-th use is
// full when every writer has added 1 k times. A counter per slot, not per queue: with several readers a sum over slots could hide
// the slowest.
//
// Memory order: the barrier orders the warpgroup's stores before thread 0's release, which is cumulative (PTX ISA, memory
// consistency model); entries are read with ld.relaxed from the L2, because the L1 is not coherent.
#pragma once

#include "kitsune/layout.h"

namespace kitsune {

constexpr u32 kCounterWords = 32;  // 128 bytes: a cache line

// The counters of a ring: `depth` that count writers, then as many that count readers. Zero when the kernel starts.
KITSUNE_DEVICE constexpr u32 l2_ring_words(u32 depth) { return 2 * depth * kCounterWords; }

// The depth is not a template parameter, so that stages which differ in it alone run the same code. Where it is a literal the
// compiler sees it all the same; else a tile pays a division, which a tile's work hides.
template <int Vectors>
struct L2Queue {
  static constexpr int kVectors = Vectors;
  static constexpr u32 kEntry = Vectors * kGroupThreads;  // U4s of a slot
  u32* counters;
  U4* slots;
  u32 depth;
  u32 writers;  // how many warpgroups write a part of each entry, and how many read it
  u32 readers;
  u32 barrier;  // named barrier of the warpgroup that calls

  // In 64 bits, so that vector i is a constant distance away: in 32 it might wrap, and every vector would take an address of its
  // own.
  KITSUNE_DEVICE U4* at(u32 n, int i) const {
    return slots + static_cast<i64>(n % depth * kEntry + thread_id() % kGroupThreads) + i * kGroupThreads;
  }
  KITSUNE_DEVICE u32* full(u32 n) const { return counters + n % depth * kCounterWords; }
  KITSUNE_DEVICE u32* empty(u32 n) const { return counters + (depth + n % depth) * kCounterWords; }
  KITSUNE_DEVICE void wait(const u32* counter, u32 value) const {
    if (thread_id() % kGroupThreads == 0) wait_ge(counter, value);
    bar_sync(barrier, kGroupThreads);
  }
  KITSUNE_DEVICE void signal(u32* counter) const {
    bar_sync(barrier, kGroupThreads);
    if (thread_id() % kGroupThreads == 0) red_add_release(counter, 1);
  }

  KITSUNE_DEVICE void wr_acquire(u32 n) const {
    if (n >= depth) wait(empty(n), n / depth * readers);
  }
  KITSUNE_DEVICE void push(u32 n, int i, U4 v) const { st_global(at(n, i), v); }
  KITSUNE_DEVICE void wr_release(u32 n) const { signal(full(n)); }

  KITSUNE_DEVICE void rd_acquire(u32 n) const { wait(full(n), (n / depth + 1) * writers); }
  KITSUNE_DEVICE U4 pop(u32 n, int i) const { return ld_l2(at(n, i)); }
  KITSUNE_DEVICE void rd_release(u32 n) const { signal(empty(n)); }
};

// One of the rings that `pipeline`s have beside each other: their counters from `counters` on, their entries from `slots` on.
template <int Vectors>
KITSUNE_DEVICE L2Queue<Vectors> l2_queue(u8* counters, u8* slots, u32 depth, u32 writers, u32 readers, u32 pipeline, u32 barrier) {
  return {reinterpret_cast<u32*>(counters) + pipeline * l2_ring_words(depth),
          reinterpret_cast<U4*>(slots) + static_cast<i64>(pipeline) * (depth * L2Queue<Vectors>::kEntry),
          depth,
          writers,
          readers,
          barrier};
}

}  // namespace kitsune
