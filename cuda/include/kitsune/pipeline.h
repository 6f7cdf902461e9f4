// The roles of a CTA and what they share: a loader warp that brings weights, consumer warpgroups that run stages on tiles.
//
// A generated kernel is: barriers initialised by one thread, one rendezvous, then every warpgroup takes its role until its tiles
// are done (a persistent kernel). The loader gives most of its registers to the consumers.
#pragma once

#include "kitsune/batches.h"
#include "kitsune/phases.h"
#include "kitsune/queue/cluster.h"
#include "kitsune/queue/l2.h"
#include "kitsune/queue/smem.h"
#include "kitsune/stage/atomic.h"
#include "kitsune/stage/gradient.h"
#include "kitsune/stage/image.h"
#include "kitsune/stage/matmul.h"
#include "kitsune/stage/online.h"
#include "kitsune/stage/reduce.h"
#include "kitsune/stage/row_product.h"
#include "kitsune/stage/rows.h"
#include "kitsune/stage/scratch.h"
#include "kitsune/stage/segment.h"
#include "kitsune/stage/sink.h"
#include "kitsune/stage/table.h"

namespace kitsune {

// Registers of a thread in each role, from two lanes on. Together the roles may have what the launch gives, or setmaxnreg.inc waits
// for ever: one thread of each warpgroup has 504 with two lanes (24 + 2 * 240) and 512 with three (32 + 3 * 160). The loader's code
// fits 24, the least that setmaxnreg takes. More for it and less for two consumers (40 + 2 * 232) makes ptxas serialise wgmma
// (C7512).
template <int Lanes>
constexpr int kLoaderRegisters = Lanes == 3 ? 32 : 24;
template <int Lanes>
constexpr int kConsumerRegisters = Lanes == 3 ? 160 : 240;
template <int Lanes>
constexpr bool kRolesFitLaunch =
    kLoaderRegisters<Lanes> + Lanes * kConsumerRegisters<Lanes> <= (1 + Lanes) * kLaunchRegisters<(1 + Lanes) * kGroupThreads>;
static_assert(kRolesFitLaunch<2> && kRolesFitLaunch<3>, "setmaxnreg.inc would wait for registers that no launch has");

template <int Lanes>
KITSUNE_DEVICE void become_loader() {
  if constexpr (Lanes > 1) reg_dec<kLoaderRegisters<Lanes>>();
}
template <int Lanes>
KITSUNE_DEVICE void become_consumer() {
  if constexpr (Lanes > 1) reg_inc<kConsumerRegisters<Lanes>>();
}

// Lanes of a CTA that take turns at the tensor core: a turn is handed on from lane to lane, from the last to the first again, so
// each barrier counts the lane that waits and the one before it. Ids behind those of the lanes and of `phases.h`.
constexpr u32 kTurns = 8;
template <int Lanes>
KITSUNE_DEVICE void take_turn(u32 lane) {
  bar_sync(kTurns + lane, 2 * kGroupThreads);
}
template <int Lanes>
KITSUNE_DEVICE void give_turn(u32 lane) {
  bar_arrive(kTurns + (lane + 1) % Lanes, 2 * kGroupThreads);
}

// Threads of the loader's warp that fetch: bulk copies take one, cp.async all.
KITSUNE_DEVICE bool fetches() {
#if KITSUNE_SM >= 900
  return thread_id() == 0;
#else
  return thread_id() < 32;
#endif
}

// The thread that fills the ring of tiles, in a warp of its own: it waits for lanes to read while the other one waits for weights.
KITSUNE_DEVICE bool fetches_tiles() { return thread_id() == 32; }

// Weights that stay: `full` completes once all of `total` bytes are there.
KITSUNE_DEVICE void init_resident(Mbar& full) {
#if KITSUNE_SM >= 900
  mbar_init(full, 1);
#else
  mbar_init(full, 32);
#endif
}
KITSUNE_DEVICE void expect_resident(Mbar& full, u32 total) {
#if KITSUNE_SM >= 900
  mbar_expect_tx(full, total);
#else
  (void)full, (void)total;
#endif
}
KITSUNE_DEVICE void fetch_resident(u8* to, const u8* from, u32 bytes, Mbar& full) {
#if KITSUNE_SM >= 900
  bulk_load(to, from, bytes, full);
#else
  for (u32 i = lane_id() * 16; i < bytes; i += 32 * 16) cp_async_16(to + i, from + i, 16);
  (void)full;
#endif
}
KITSUNE_DEVICE void finish_resident(Mbar& full) {
#if KITSUNE_SM < 900
  cp_async_arrive(full);
#else
  (void)full;
#endif
}

// `chunks` entries of `bytes` each through a queue of weights; `at` and `from` go on to what follows them.
template <class Queue>
KITSUNE_DEVICE void stream_weights(const Queue& queue, typename Queue::At& at, const u8*& from, u32 chunks, u32 bytes) {
  KITSUNE_NO_UNROLL
  for (u32 c = 0; c < chunks; ++c, from += bytes) {
    queue.wr_acquire(at);
    queue.wr_release(at, from, bytes);
    at.advance();
  }
}

// Brings rows that a worker needs next into the L2 while it works on others. By one thread; rows lie together.
KITSUNE_DEVICE void prefetch_tile(const void* array, i64 row, i64 rows, u32 row_bytes) {
#if KITSUNE_SM >= 900
  if (row + kTileRows <= rows) bulk_prefetch_l2(static_cast<const u8*>(array) + row * row_bytes, kTileRows * row_bytes);
#else
  (void)array, (void)row, (void)rows, (void)row_bytes;
#endif
}

// Tiles of the worker that has most: where all take part in every round.
KITSUNE_DEVICE u32 rounds_of(u32 workers, u32 tiles) { return opaque(tiles / workers + (tiles % workers != 0)); }

}  // namespace kitsune
