// Microbenchmark of streamed weights: chunks from the L2 into the shared memory of every CTA of a cluster, each fetched once a
// cluster.
//
// Comes in: KITSUNE_BENCH_* (chunk bytes, depth, cluster) and a buffer of weights that fits the L2. Goes out: cycles of every CTA,
// and of each consumer a checksum over one vector a thread of every chunk, another part of the chunk each time.
#include "kitsune/kitsune.h"

using namespace kitsune;

constexpr int kBytes = KITSUNE_BENCH_BYTES;
constexpr int kDepth = KITSUNE_BENCH_DEPTH;
constexpr int kCluster = KITSUNE_BENCH_CLUSTER_SIZE;
constexpr int kLanes = 2;

// settings: rounds over the weights, chunks in them.
struct Params {
  const u32* settings;
  const u8* weights;
  u32* checksums;
  U2* cycles;
};

struct Storage {
  Ring<kDepth> ring;
  alignas(1024) u8 slots[kDepth * kBytes];
};

KITSUNE_KERNEL(kitsune_region, Params, p, (1 + kLanes) * 128) {
  using Queue = WeightQueue<kDepth, kBytes, kLanes, kCluster>;
  Storage& s = shared<Storage>();
  if (thread_id() == 0) {
    Queue::init(s.ring);
    fence_mbar_init();
  }
#if KITSUNE_SM >= 900
  cluster_sync();
#else
  block_sync();
#endif
  Queue queue{&s.ring, s.slots};
  typename Queue::At at;
  u32 rounds = ld_global(p.settings), chunks = ld_global(p.settings + 1), t = thread_id() % kGroupThreads;
  u64 start = cycles();
  if (thread_id() < kGroupThreads) {
    if (fetches())
      for (u32 r = 0; r < rounds; ++r) {
        const u8* from = p.weights;
        stream_weights(queue, at, from, chunks, kBytes);
      }
  } else {
    u32 sum = 0, lane = thread_id() / kGroupThreads - 1;
    for (u32 n = 0; n < rounds * chunks; ++n, at.advance()) {
      queue.rd_acquire(at);
      constexpr u32 parts = kBytes / (16 * kGroupThreads);
      U4 v = ld_shared(reinterpret_cast<const U4*>(queue.entry(at)) + (n / chunks + n) % parts * kGroupThreads + t);
      sum = sum * 31 + v.x + v.y + v.z + v.w;
      syncwarp();  // one lane releases for the warp
      queue.rd_finish();
      queue.rd_release(at);
    }
    u64 spent = cycles() - start;
    st_global(p.checksums + (block_id() * kLanes + lane) * kGroupThreads + t, sum);
    if (lane == 0 && t == 0) st_global(p.cycles + block_id(), U2{static_cast<u32>(spent), static_cast<u32>(spent >> 32)});
  }
#if KITSUNE_SM >= 900
  cluster_sync();
#endif
}
