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

constexpr int kCounterWords = 32;  // 128 bytes: a cache line

// Counters of one ring; zero when the kernel starts.
template <int Depth>
struct L2Ring {
  u32 full[Depth * kCounterWords];
  u32 empty[Depth * kCounterWords];
};

template <int Vectors, int Depth>
struct L2Queue {
  static constexpr int kVectors = Vectors;
  static constexpr u32 kBytes = Depth * Vectors * kGroupThreads * 16;
  L2Ring<Depth>* ring;
  U4* slots;
  u32 writers;  // how many warpgroups write a part of each entry, and how many read it
  u32 readers;
  u32 barrier;  // named barrier of the warpgroup that calls

  KITSUNE_DEVICE U4* at(u32 n, int i) const {
    return slots + (n % Depth * Vectors + i) * kGroupThreads + thread_id() % kGroupThreads;
  }
  KITSUNE_DEVICE void wait(const u32* counter, u32 value) const {
    if (thread_id() % kGroupThreads == 0) wait_ge(counter, value);
    bar_sync(barrier, kGroupThreads);
  }
  KITSUNE_DEVICE void signal(u32* counter) const {
    bar_sync(barrier, kGroupThreads);
    if (thread_id() % kGroupThreads == 0) red_add_release(counter, 1);
  }

  KITSUNE_DEVICE void wr_acquire(u32 n) const {
    if (n >= Depth) wait(&ring->empty[n % Depth * kCounterWords], n / Depth * readers);
  }
  KITSUNE_DEVICE void push(u32 n, int i, U4 v) const { st_global(at(n, i), v); }
  KITSUNE_DEVICE void wr_release(u32 n) const { signal(&ring->full[n % Depth * kCounterWords]); }

  KITSUNE_DEVICE void rd_acquire(u32 n) const { wait(&ring->full[n % Depth * kCounterWords], (n / Depth + 1) * writers); }
  KITSUNE_DEVICE U4 pop(u32 n, int i) const { return ld_l2(at(n, i)); }
  KITSUNE_DEVICE void rd_release(u32 n) const { signal(&ring->empty[n % Depth * kCounterWords]); }
};

}  // namespace kitsune
