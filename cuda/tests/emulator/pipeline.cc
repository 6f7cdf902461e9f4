// A weight-stationary pipeline over a cluster: CTA r holds layer r, tiles of 64 rows flow from one to the next through rings.
// Loads, pushes, wgmma, mbarriers, named barriers; and the ways to get them wrong.

#include "check.h"

namespace {

using namespace check;

enum Bug {
  kNone,
  kNoFullWait,
  kWrongParity,
  kDepthOffByOne,
  kNoProxyFence,
  kNoStagingWait,
  kMissingRemoteArrive,
  kNoBarrierBeforePush,
  kWeightsNotAwaited,
  kExitWithoutClusterSync,
  kReadBeforeWait,
  kNoCommit,
  kNoWgmmaFence,
  kExpectTooMuch,
  kExpectTooLittle,
  kNoInitFence,
  kArriveTwice,
  kNoWarpSync,
};

constexpr u32 kWidth = 64, kRanks = 3, kTileBytes = 64 * kWidth * 2;

template <int Depth>
struct Shared {
  alignas(1024) u8 weights[kTileBytes];
  alignas(1024) u8 ring[Depth][kTileBytes];
  alignas(1024) u8 staging[kTileBytes];
  Mbar weights_full, full[Depth], empty[Depth], next_empty[Depth], staging_free;
};

struct Params {
  const u8 *x, *w;  // tiles as they lie in shared memory
  float* y;
  u32 tiles;
};

template <int Depth, int Bug>
void setup(Shared<Depth>& s) {
  mbar_init(s.weights_full, 1);
  for (int i = 0; i < Depth; ++i) {
    mbar_init(s.full[i], 1);
    mbar_init(s.empty[i], 1);
    mbar_init(s.next_empty[i], 1);
  }
  mbar_init(s.staging_free, 1);
  name(s.weights, "weights");
  name(s.ring, "ring");
  name(s.staging, "staging");
  name(s.full, "full");
  name(s.empty, "empty");
  name(s.next_empty, "next_empty");
  name(&s.staging_free, "staging_free");
  if (Bug != kNoInitFence) fence_mbar_init();
}

template <int Depth, int Bug>
void produce(const Params& p, Shared<Depth>& s) {
  u32 rank = cluster_rank();
  mbar_expect_tx(s.weights_full, kTileBytes);
  bulk_load(s.weights, p.w + rank * kTileBytes, kTileBytes, s.weights_full);
  for (u32 n = 0; n < p.tiles; ++n) {
    u32 slot = n % Depth;
    if (rank == 0) mbar_wait(s.empty[slot], (n / Depth & 1) ^ 1);
    // A later CTA announces the bytes that its predecessor pushes.
    if (rank != 0 && n >= Depth) mbar_wait(s.empty[slot], (n / Depth & 1) ^ 1);
    mbar_expect_tx(s.full[slot],
                   kTileBytes + (Bug == kExpectTooMuch && n == 2 ? 64 : 0) - (Bug == kExpectTooLittle && n == 2 ? 64 : 0));
    if (rank == 0) bulk_load(s.ring[slot], p.x + n * kTileBytes, kTileBytes, s.full[slot]);
  }
}

template <int Depth, int Bug>
void consume(const Params& p, Shared<Depth>& s) {
  u32 rank = cluster_rank(), t = thread_id() % 128, lane = lane_id();
  bool first = rank == 0, last = rank == kRanks - 1;
  if (Bug != kWeightsNotAwaited) mbar_wait(s.weights_full, 0);
  float d[kWidth / 2];
  for (u32 n = 0; n < p.tiles; ++n) {
    u32 slot = n % Depth, parity = n / Depth & 1;
    if (Bug != kNoFullWait) mbar_wait(s.full[slot], Bug == kWrongParity ? parity ^ 1 : parity);
    if (!first && t == 0) mbar_arrive_remote(s.staging_free, rank - 1);
    if (Bug != kNoWgmmaFence) wgmma_fence();
    for (u32 k = 0; k < 4; ++k)
      wgmma_ss<Bf16, kWidth, false, false>(d, desc_k128(s.ring[slot]) + 2 * k, desc_k128(s.weights) + 2 * k, k > 0);
    if (Bug != kNoCommit) wgmma_commit();
    if (Bug == kReadBeforeWait) d[3] *= 2;
    wgmma_wait<0>();
    bar_sync(2, 128);
    if (t == 0) {
      mbar_arrive(s.empty[slot]);
      if (Bug == kArriveTwice && n == 1) mbar_arrive(s.empty[slot]);
      if (!first && !(Bug == kMissingRemoteArrive && n == 2)) mbar_arrive_remote(s.next_empty[slot], rank - 1);
    }
    u32 row = t / 32 * 16 + lane / 4, column = lane % 4 * 2;
    if (last) {
      for (u32 j = 0; j < kWidth / 8; ++j)
        for (u32 i = 0; i < 2; ++i) {
          float* y = p.y + (n * 64 + row + 8 * i) * kWidth + 8 * j + column;
          st_global(reinterpret_cast<U2*>(y), U2{bits(d[4 * j + 2 * i]), bits(d[4 * j + 2 * i + 1])});
        }
      continue;
    }
    if (n > 0 && Bug != kNoStagingWait) mbar_wait(s.staging_free, (n - 1) & 1);
    for (u32 j = 0; j < kWidth / 8; ++j)
      for (u32 i = 0; i < 2; ++i) {
        u32 v = pack_bf16(fmaxf(d[4 * j + 2 * i], 0), fmaxf(d[4 * j + 2 * i + 1], 0));
        st_shared(reinterpret_cast<u32*>(s.staging + swizzled(row + 8 * i, (8 * j + column) * 2)), v);
      }
    if (Bug != kNoProxyFence) fence_proxy_async();
    if (Bug == kNoWarpSync) {
      if (t >= 32) bar_arrive(1, 128);
      if (t < 32) bar_sync(1, 128);
    } else if (Bug != kNoBarrierBeforePush) {
      bar_sync(1, 128);
    }
    if (t == 0) {
      if (!(Bug == kDepthOffByOne && n == Depth)) mbar_wait(s.next_empty[slot], parity ^ 1);
      bulk_push(s.ring[slot], rank + 1, s.staging, kTileBytes, s.full[slot]);
    }
  }
  // The producer's last entries are waited for, so that all that is in flight has landed.
  if (!last && t == 0) mbar_wait(s.staging_free, (p.tiles - 1) & 1);
}

template <int Depth, int Bug>
void kernel(const Params& p) {
  auto& s = shared<Shared<Depth>>();
  if (thread_id() == 0) setup<Depth, Bug>(s);
  cluster_sync();
  if (thread_id() < 128) {
    reg_dec<40>();
    if (thread_id() == 0) produce<Depth, Bug>(p, s);
  } else if (thread_id() < 256) {
    reg_inc<232>();
    consume<Depth, Bug>(p, s);
  } else {
    reg_dec<40>();
  }
  if (Bug != kExitWithoutClusterSync) cluster_sync();
}

template <int Depth, int Bug>
Result trial(u64 seed, bool& right) {
  constexpr u32 kTiles = 6;
  std::vector<float> x(kTiles * 64 * kWidth), w(kRanks * kWidth * kWidth), y(x.size(), NAN);
  std::vector<u8> x_tiles(kTiles * kTileBytes), w_tiles(kRanks * kTileBytes);
  Integers integers;
  for (float& v : x) v = integers.next(2);
  for (float& v : w) v = integers.next(1);
  auto lay = [](std::vector<u8>& to, const std::vector<float>& from) {
    for (u32 i = 0; i < from.size(); ++i) {
      u16 h = to_bf16(from[i]);
      memcpy(to.data() + i / 4096 * kTileBytes + swizzled(i / 64 % 64, i % 64 * 2), &h, 2);
    }
  };
  lay(x_tiles, x);
  lay(w_tiles, w);
  use(x_tiles, "x");
  use(w_tiles, "w");
  use(y, "y");
  Params p{x_tiles.data(), w_tiles.data(), y.data(), kTiles};
  Result r = launch({kRanks, 384, kRanks, sizeof(Shared<Depth>)}, seed, [&] { kernel<Depth, Bug>(p); });
  right = true;
  for (u32 i = 0; i < kTiles * 64; ++i) {
    float h[kWidth];
    memcpy(h, &x[i * kWidth], sizeof h);
    for (u32 layer = 0; layer < kRanks; ++layer) {
      float next[kWidth];
      for (u32 n = 0; n < kWidth; ++n) {
        next[n] = 0;
        for (u32 k = 0; k < kWidth; ++k) next[n] += h[k] * w[(layer * kWidth + n) * kWidth + k];
        if (layer + 1 < kRanks) next[n] = from_bf16(to_bf16(fmaxf(next[n], 0)));
      }
      memcpy(h, next, sizeof h);
    }
    right &= !memcmp(h, &y[i * kWidth], sizeof h);
  }
  return r;
}

Case all[] = {
    {"correct, depth 2", trial<2, kNone>},
    {"correct, depth 1", trial<1, kNone>},
    {"correct, depth 3", trial<3, kNone>},
    {"correct, clocks of warps", [](u64 seed, bool& right) { return with_warp_clocks(trial<2, kNone>, seed, right); }},
    {"no wait for staging, clocks of warps",
     [](u64 seed, bool& right) { return with_warp_clocks(trial<2, kNoStagingWait>, seed, right); }},
    {"no wait on full", trial<2, kNoFullWait>},
    {"wrong parity", trial<2, kWrongParity>},
    {"ring depth off by one", trial<1, kDepthOffByOne>},
    {"no proxy fence", trial<2, kNoProxyFence>},
    {"no wait for staging", trial<2, kNoStagingWait>},
    {"missing remote arrive", trial<2, kMissingRemoteArrive>},
    {"no barrier before push", trial<2, kNoBarrierBeforePush>},
    {"weights not awaited", trial<2, kWeightsNotAwaited>},
    {"exit without cluster_sync", trial<2, kExitWithoutClusterSync>},
    {"accumulators touched before wait", trial<2, kReadBeforeWait>},
    {"no wgmma commit", trial<2, kNoCommit>},
    {"no wgmma fence", trial<2, kNoWgmmaFence>},
    {"expect_tx too large", trial<2, kExpectTooMuch>},
    {"expect_tx too small", trial<2, kExpectTooLittle>},
    {"no fence_mbar_init", trial<2, kNoInitFence>},
    {"too many arrivals", trial<2, kArriveTwice>},
};

}  // namespace
