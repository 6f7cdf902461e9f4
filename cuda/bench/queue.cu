// Microbenchmark of the queues: rings of warpgroups, each of which reads from its left neighbour and writes to its right one.
//
// Comes in: KITSUNE_BENCH_* (which queue, its entry and depth, members of a ring, warpgroups that multiply beside it) and
// Params::settings. Goes out: cycles of every warpgroup, and a checksum of all it has read, in order. Two ways to run: *stream*,
// every member writes Depth - 1 entries ahead of what it reads, for bandwidth; *token*, one entry goes round, for latency. The
// words that the host expects are in benchmarks/micro/kernels.py.
#include "kitsune/kitsune.h"

using namespace kitsune;

#define KITSUNE_BENCH_SMEM 0     // members are warpgroups of a CTA
#define KITSUNE_BENCH_CLUSTER 1  // CTAs of a cluster
#define KITSUNE_BENCH_L2 2       // CTAs of the grid

constexpr int kVectors = KITSUNE_BENCH_VECTORS;  // of 16 bytes a thread: an entry has 2 KiB for each
constexpr int kDepth = KITSUNE_BENCH_DEPTH;
constexpr u32 kMembers = KITSUNE_BENCH_MEMBERS;
constexpr u32 kMultipliers = KITSUNE_BENCH_MULTIPLIERS;
constexpr u32 kMembersHere = KITSUNE_BENCH_KIND == KITSUNE_BENCH_SMEM ? kMembers : 1;
constexpr u32 kGroups = kMembersHere + kMultipliers;
constexpr u32 kSlots = KITSUNE_BENCH_KIND == KITSUNE_BENCH_L2 ? 0 : kMembersHere * kDepth * kVectors * kGroupThreads;

// settings: entries a member writes, 1 for a token, batches of matrix products. slots and rings: of the L2's queues.
struct Params {
  const u32* settings;
  u32* checksums;
  U2* cycles;
  U4* slots;
  u32* rings;
};

constexpr u32 kStep = 2654435761u;  // Knuth's multiplier: neighbouring entries differ in all bits, as data does

KITSUNE_DEVICE U4 word(u32 k, u32 member) { return {k * kStep, member * 40503u, thread_id() % kGroupThreads, 0}; }

template <class Queue>
KITSUNE_DEVICE void write(const Queue& out, u32 n, u32 member) {
  out.wr_acquire(n);
  KITSUNE_UNROLL
  for (int i = 0; i < kVectors; ++i) out.push(n, i, word(n * kVectors + i, member));
  out.wr_release(n);
}

KITSUNE_DEVICE void add(u32& sum, U4 v) { sum = sum * 31 + v.x + v.y + v.z + v.w; }

template <class Queue>
KITSUNE_DEVICE u32 stream(const Queue& in, const Queue& out, u32 member, u32 entries) {
  u32 sum = 0;
  constexpr u32 lead = kDepth - 1;
  for (u32 n = 0; n < lead && n < entries; ++n) write(out, n, member);
  for (u32 n = 0; n < entries; ++n) {
    if (n + lead < entries) write(out, n + lead, member);
    in.rd_acquire(n);
    KITSUNE_UNROLL
    for (int i = 0; i < kVectors; ++i) add(sum, in.pop(n, i));
    in.rd_release(n);
  }
  return sum;
}

// What is written depends on what was read, as in a stage: a hop is a whole hand-off.
template <class Queue>
KITSUNE_DEVICE u32 token(const Queue& in, const Queue& out, u32 member, u32 entries) {
  u32 sum = 0;
  U4 v[kVectors];
  for (u32 n = 0; n < entries; ++n) {
    if (member == 0) write(out, n, 0);
    in.rd_acquire(n);
    KITSUNE_UNROLL
    for (int i = 0; i < kVectors; ++i) v[i] = in.pop(n, i);
    in.rd_release(n);
    if (member != 0) {
      out.wr_acquire(n);
      KITSUNE_UNROLL
      for (int i = 0; i < kVectors; ++i) out.push(n, i, {v[i].x, v[i].y, v[i].z, v[i].w + 1});
      out.wr_release(n);
    }
    KITSUNE_UNROLL
    for (int i = 0; i < kVectors; ++i) add(sum, v[i]);
  }
  return sum;
}

template <class Queue>
KITSUNE_DEVICE void circulate(const Params& p, const Queue& in, const Queue& out, u32 member) {
  u32 entries = ld_global(p.settings), group = block_id() * kGroups + thread_id() / kGroupThreads, t = thread_id() % kGroupThreads;
  u64 start = cycles();
  u32 sum = 0;
  if (!ld_global(p.settings + 1)) {
    sum = stream(in, out, member, entries);
  } else if constexpr (kVectors <= 32) {  // a token is kept in registers
    sum = token(in, out, member, entries);
  }
  u64 spent = cycles() - start;
  st_global(p.checksums + group * kGroupThreads + t, sum);
  if (t == 0) st_global(p.cycles + group, U2{static_cast<u32>(spent), static_cast<u32>(spent >> 32)});
}

struct Storage {
  Ring<kDepth> rings[kMembersHere];
  alignas(1024) u8 b[kMultipliers ? 16384 : 16];
  alignas(128) U4 slots[kSlots ? kSlots : 1];
};

#if KITSUNE_BENCH_MULTIPLIERS > 0

// Small integers, so that every sum is exact; not constant, because equal operands draw less power than data and clocks follow it.
KITSUNE_DEVICE float operand(u32 row, u32 k) { return static_cast<float>(static_cast<i32>((row * 7 + k * 13 + row * k) % 5) - 2); }

// 128 rows of 64 values of K, 128-byte swizzle.
KITSUNE_DEVICE void fill_b(u8* b) {
  for (u32 unit = thread_id(); unit < 128 * 8; unit += block_threads()) {
    u32 row = unit / 8, k = unit % 8 * 8, v[4];
    KITSUNE_UNROLL
    for (u32 i = 0; i < 4; ++i) v[i] = pack_bf16(operand(row, k + 2 * i), operand(row, k + 2 * i + 1));
    st_shared(reinterpret_cast<U4*>(b) + row * 8 + (unit % 8 ^ row % 8), U4{v[0], v[1], v[2], v[3]});
  }
  fence_proxy_async();
}

// Batches of 16 products of 64 x 128 x 16 back to back, as a stage issues them. 128 columns: two warpgroups of them keep the tensor
// cores busy, and their accumulators need no setmaxnreg.
KITSUNE_DEVICE void multiply(const Params& p, const u8* b) {
  u32 t = thread_id() % kGroupThreads, row = t / 32 * 16 + t % 32 / 4, k = t % 4 * 2,
      group = block_id() * kGroups + thread_id() / kGroupThreads;
  u32 a[4][4];
  KITSUNE_UNROLL
  for (u32 s = 0; s < 4; ++s) KITSUNE_UNROLL
  for (u32 i = 0; i < 4; ++i) {
    u32 r = row + i % 2 * 8, c = s * 16 + k + i / 2 * 8;
    a[s][i] = pack_bf16(operand(r, c), operand(r, c + 1));
  }
  float d[64] = {};
  u64 desc = desc_k128(b), start = cycles();
  u32 batches = ld_global(p.settings + 2);
  for (u32 n = 0; n < batches; ++n) {
    pin(d);
    wgmma_fence();
    KITSUNE_UNROLL
    for (int s = 0; s < 16; ++s) wgmma_rs<Bf16, 128>(d, a[s % 4], desc + 2 * (s % 4), true);
    wgmma_commit();
    wgmma_wait<0>();
    pin(d);
  }
  u64 spent = cycles() - start;
  i32 sum = 0;
  KITSUNE_UNROLL
  for (int i = 0; i < 64; ++i) sum += static_cast<i32>(d[i]);
  st_global(p.checksums + group * kGroupThreads + t, static_cast<u32>(sum));
  if (t == 0) st_global(p.cycles + group, U2{static_cast<u32>(spent), static_cast<u32>(spent >> 32)});
}

#endif

KITSUNE_KERNEL(kitsune_region, Params, p, kGroups * 128) {
  Storage& s = shared<Storage>();
  u32 group = thread_id() / kGroupThreads;
#if KITSUNE_BENCH_KIND == KITSUNE_BENCH_SMEM
  using Queue = SmemQueue<kVectors, kDepth>;
  if (thread_id() == 0) {
    for (u32 m = 0; m < kMembers; ++m) Queue::init(s.rings[m], 1, 1);
    fence_mbar_init();
  }
  block_sync();
  u32 member = group, right = (member + 1) % kMembers;
  constexpr u32 slots = kDepth * kVectors * kGroupThreads;
  circulate(p, Queue{&s.rings[member], s.slots + member * slots}, Queue{&s.rings[right], s.slots + right * slots}, member);
#elif KITSUNE_BENCH_KIND == KITSUNE_BENCH_CLUSTER
  using Queue = ClusterQueue<kVectors, kDepth>;
  u32 member = cluster_rank(), left = (member + kMembers - 1) % kMembers, right = (member + 1) % kMembers;
  if (thread_id() == 0) {
    Queue::init(s.rings[0], 1u << right);
    fence_mbar_init();
  }
#if KITSUNE_BENCH_MULTIPLIERS > 0
  fill_b(s.b);
#endif
  cluster_sync();
  if (group == 0) {
    Queue queue{&s.rings[0], s.slots, 1u << left, 1u << right, 1};  // one object: it reads from the left and writes to the right
    circulate(p, queue, queue, member);
  }
#if KITSUNE_BENCH_MULTIPLIERS > 0
  else {
    multiply(p, s.b);
  }
#endif
  cluster_sync();
#else
  using Queue = L2Queue<kVectors>;
  u32 member = block_id() % kMembers, first = block_id() - member, right = first + (member + 1) % kMembers;
  constexpr u32 slots = kDepth * Queue::kEntry, words = l2_ring_words(kDepth);
  Queue in{p.rings + block_id() * words, p.slots + block_id() * slots, kDepth, 1, 1, 1};
  Queue out{p.rings + right * words, p.slots + right * slots, kDepth, 1, 1, 1};
  (void)s, (void)group;
  circulate(p, in, out, member);
#endif
}
