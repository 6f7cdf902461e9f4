// When each lane ran which tile, and how long it waited for what: the kernels that are generated while a timeline is recorded.
//
// Comes in: the buffer that cuda/src/timeline.h makes, and calls in a stamped kernel around tiles and waits. Goes out: records in
// that buffer. Invariants: only stamped kernels include this header, so the others are what they are without it; one thread of a
// lane records, its state is in shared memory, so no register lives from one stamp to the next; a record that finds no room is
// counted and left out; nothing waits.
//
// Records have the SM's clock, which is read in a few cycles and counts each of them. The device's clock in nanoseconds may tick as
// seldom as once a microsecond, but is the same on all SMs: every chunk of records has both clocks at its start and at its end, and
// the host lays a line through those pairs (kitsune_jax/profiling/kernel_timeline.py).
#pragma once

#include "kitsune/pipeline.h"

namespace kitsune {

constexpr u32 kTimelineKernels = 1020;
constexpr u32 kChunkRecords = 32;  // three of them are the chunk's head

// The buffer: this head, then `chunks` chunks, of which lanes take one after the other.
struct TimelineHead {
  u32 on, chunks, taken, dropped;
  u32 lanes[kTimelineKernels];  // that have started, of all launches of a kernel
};
static_assert(sizeof(TimelineHead) == 4096);

enum class Stamp : u32 { kTile, kCombine, kQueue, kWeights, kExchange, kResident, kPhase };

// The state of a lane, of which thread 0 alone knows.
struct Recorder {
  TimelineHead* head;  // null: nothing is recorded
  U4* chunk;
  u32 used, dropped, launch, kernel, phase;
  u32 begin;      // of the tile
  u32 waited[2];  // cycles in the tile: for weights, and for other CTAs' columns
};
static_assert(sizeof(Recorder) <= 64);

KITSUNE_DEVICE bool records() { return thread_id() % kGroupThreads == 0; }
KITSUNE_DEVICE u32 stamp() { return static_cast<u32>(cycles()); }

// Of the calling lane. They are the first thing in shared memory.
KITSUNE_DEVICE Recorder& recorder() { return (&shared<Recorder>())[thread_id() / kGroupThreads - 1]; }

KITSUNE_DEVICE U4 both_clocks() {
  const u64 cycle = cycles(), time = nanoseconds();
  return {static_cast<u32>(cycle), static_cast<u32>(cycle >> 32), static_cast<u32>(time), static_cast<u32>(time >> 32)};
}

KITSUNE_DEVICE void end_chunk(const Recorder& r) {
  if (r.chunk == nullptr) return;
  st_global(r.chunk, U4{r.used, r.kernel, r.launch, block_id() << 8 | (thread_id() / kGroupThreads - 1)});
  st_global(r.chunk + 2, both_clocks());
}

KITSUNE_DEVICE void next_chunk(Recorder& r) {
  end_chunk(r);
  const u32 n = atomic_add_acq_rel(&r.head->taken, 1);
  r.chunk = n < r.head->chunks ? reinterpret_cast<U4*>(r.head + 1) + static_cast<i64>(n) * kChunkRecords : nullptr;
  r.used = r.chunk == nullptr ? kChunkRecords : 3;
  if (r.chunk != nullptr) st_global(r.chunk + 1, both_clocks());
}

// Takes another chunk where this one has no room for so many.
KITSUNE_DEVICE void reserve(Recorder& r, u32 records) {
  if (r.chunk != nullptr && r.used + records > kChunkRecords) next_chunk(r);
}

KITSUNE_DEVICE void put_record(Recorder& r, Stamp what, u32 stage, u32 number, u32 begin, u32 end) {
  if (r.used < kChunkRecords)
    st_global(r.chunk + r.used++, U4{begin, end, static_cast<u32>(what) << 24 | r.phase << 12 | stage, number});
  else
    ++r.dropped;
}

// By all threads of a lane, before its first tile and behind its last.
template <int Lanes>
KITSUNE_DEVICE void begin_timeline(TimelineHead* head, u64 kernel) {
  if (!records()) return;
  Recorder& r = recorder();
  r = {};
  r.used = kChunkRecords;
  if (head == nullptr || ld_global(&head->on) == 0) return;
  r.head = head, r.kernel = static_cast<u32>(kernel);
  // Launches of a kernel follow one another, so all lanes of one have started before any of the next.
  r.launch = atomic_add_acq_rel(&head->lanes[r.kernel], 1) / (grid_size() * Lanes);
  next_chunk(r);
}
KITSUNE_DEVICE void end_timeline() {
  if (!records()) return;
  const Recorder& r = recorder();
  if (r.head == nullptr) return;
  end_chunk(r);
  if (r.dropped > 0) red_add_release(&r.head->dropped, r.dropped);
}

KITSUNE_DEVICE void begin_phase(u32 phase) {
  if (records()) recorder().phase = phase;
}

// Around a tile, which makes up to `most` records.
KITSUNE_DEVICE void begin_tile(u32 most) {
  if (!records()) return;
  Recorder& r = recorder();
  reserve(r, most);
  r.waited[0] = r.waited[1] = 0;
  r.begin = stamp();
}
KITSUNE_DEVICE void end_tile(u32 stage, i64 tile, i64 tiles) {
  if (!records()) return;
  Recorder& r = recorder();
  const u32 end = stamp(), number = tile < tiles ? static_cast<u32>(tile) : ~0u;
  put_record(r, Stamp::kTile, stage, number, r.begin, end);
  for (u32 k = 0; k < 2; ++k)
    if (r.waited[k] > 0) put_record(r, k == 0 ? Stamp::kWeights : Stamp::kExchange, stage, number, r.waited[k], end);
}

// A wait outside of a tile begins.
KITSUNE_DEVICE u32 begin_wait() {
  if (records()) reserve(recorder(), 1);
  return stamp();
}
// Since `begin`.
KITSUNE_DEVICE void end_wait(Stamp what, u32 number, u32 begin) {
  if (records()) put_record(recorder(), what, 0, number, begin, stamp());
}
KITSUNE_DEVICE void begin_combine() {
  if (!records()) return;
  reserve(recorder(), 1);
  recorder().begin = stamp();
}
KITSUNE_DEVICE void end_combine(u32 stage) {
  if (records()) put_record(recorder(), Stamp::kCombine, stage, 0, recorder().begin, stamp());
}

// A queue between stages, each of whose waits is a record.
template <class Queue>
struct TimedQueue : Queue {
  u32 number;

  KITSUNE_DEVICE void wr_acquire(u32 n) const {
    const u32 begin = stamp();
    Queue::wr_acquire(n);
    end_wait(Stamp::kQueue, number, begin);
  }
  KITSUNE_DEVICE void rd_acquire(u32 n) const {
    const u32 begin = stamp();
    Queue::rd_acquire(n);
    end_wait(Stamp::kQueue, number, begin);
  }
};
template <class Queue>
KITSUNE_DEVICE TimedQueue<Queue> timed(const Queue& queue, u32 number) {
  return {queue, number};
}

// A ring whose reader waits many times in a tile: the sum is a record.
template <class Queue, u32 What>
struct SummedWaits : Queue {
  template <class At>
  KITSUNE_DEVICE void rd_acquire(const At& at) const {
    const u32 begin = stamp();
    Queue::rd_acquire(at);
    if (records()) recorder().waited[What] += stamp() - begin;
  }
};

}  // namespace kitsune
