// Copies of every kind: multicast, st_async, remote loads and stores, bulk stores and reductions, TMA tiles with the 128-byte
// swizzle.

#include "check.h"

namespace {

using namespace check;

enum Bug {
  kNone,
  kNoStoreFence,
  kNoReadWait,
  kSourceReusedEarly,
  kNoClusterFence,
  kNoReleaseFence,
  kNarrowWait,
  kMaskBeyond,
  kNoCommit,
  kOutOfBounds
};

constexpr u32 kWords = 1024;  // of one CTA's block

std::vector<u32> numbers(u32 count, u32 salt) {
  std::vector<u32> v(count);
  for (u32 i = 0; i < count; ++i) v[i] = i * 2654435761u + salt;
  return v;
}

// --- each CTA loads half of a block and multicasts it; both read all of it.
struct Multicast {
  alignas(1024) u32 block[2][kWords];
  Mbar full[2], empty[2];
};
template <int Bug>
void multicast(const u32* x, u32* y, u32 rounds) {
  auto& s = shared<Multicast>();
  u32 rank = cluster_rank(), half = kWords / 2;
  if (thread_id() == 0) {
    for (u32 i = 0; i < 2; ++i) {
      mbar_init(s.full[i], 1);
      mbar_init(s.empty[i], 2 * 3);  // three reading warps in each of two CTAs
    }
    fence_mbar_init();
  }
  cluster_sync();
  for (u32 n = 0; n < rounds; ++n) {
    u32 slot = n % 2, parity = n / 2 & 1;
    if (thread_id() == 0) {
      mbar_wait(s.empty[slot], parity ^ 1);
      mbar_expect_tx(s.full[slot], kWords * 4);
      bulk_load_multicast(s.block[slot] + rank * half, x + n * kWords + rank * half, half * 4, s.full[slot],
                          Bug == kMaskBeyond ? 7 : 3);
    }
    if (thread_id() >= 32) {
      mbar_wait(s.full[slot], parity);
      for (u32 i = thread_id() - 32; i < kWords; i += 96)
        st_global(y + (n * 2 + rank) * kWords + i, ld_shared(s.block[slot] + i) + rank);
      if (Bug != kSourceReusedEarly) syncwarp();
      if (Bug != kNoReleaseFence) fence_release_own_shared();
      if (lane_id() < 2) mbar_arrive_remote_relaxed(s.empty[slot], lane_id());
    }
  }
  cluster_sync();
}
template <int Bug>
Result multicast_trial(u64 seed, bool& right) {
  constexpr u32 kRounds = 5;
  auto x = numbers(kRounds * kWords, 7);
  std::vector<u32> y(2 * kRounds * kWords);
  use(x, "x");
  use(y, "y");
  Result r = launch({2, 128, 2, sizeof(Multicast)}, seed, [&] { multicast<Bug>(x.data(), y.data(), kRounds); });
  right = true;
  for (u32 i = 0; i < y.size(); ++i) right &= y[i] == x[i / (2 * kWords) * kWords + i % kWords] + i / kWords % 2;
  return r;
}

// --- CTA 0 gives a block to CTA 1: by st_async, or by ordinary remote stores.
struct Neighbour {
  alignas(16) U4 block[256];
  Mbar full, go;
};
template <bool Async, int Bug>
void neighbour(const U4* x, U4* y) {
  auto& s = shared<Neighbour>();
  u32 t = thread_id();
  if (t == 0) {
    mbar_init(s.full, Async ? 1 : 4);
    mbar_init(s.go, 1);
    fence_mbar_init();
  }
  cluster_sync();
  if (cluster_rank() == 0) {
    for (u32 i = t; i < 256; i += 128) {
      if (Async)
        st_async(&s.block[i], 1, ld_global(x + i), s.full);
      else
        st_cluster(&s.block[i], 1, ld_global(x + i));
    }
    if (!Async) {
      syncwarp();
      if (Bug != kNoClusterFence) fence_cluster();
      if (lane_id() == 0) mbar_arrive_remote(s.full, 1);
    }
  } else {
    if (Async && t == 0) mbar_expect_tx(s.full, sizeof s.block);
    if (Async || Bug == kNarrowWait)
      mbar_wait(s.full, 0);
    else
      mbar_wait_cluster(s.full, 0);
    for (u32 i = t; i < 256; i += 128) st_global(y + i, ld_shared(&s.block[i]));
    st_shared(&s.block[t], U4{t, t, t, t});
  }
  cluster_sync();
  if (cluster_rank() == 0) st_global(y + 256 + t, ld_cluster(&s.block[t], 1));
  cluster_sync();
}
template <bool Async, int Bug>
Result neighbour_trial(u64 seed, bool& right) {
  auto x = numbers(1024, 3);
  std::vector<u32> y(1024 + 512);
  use(x, "x");
  use(y, "y");
  auto* from = reinterpret_cast<const U4*>(x.data());
  auto* to = reinterpret_cast<U4*>(y.data());
  Result r = launch({2, 128, 2, sizeof(Neighbour)}, seed, [&] { neighbour<Async, Bug>(from, to); });
  right = true;
  for (u32 i = 0; i < 1024; ++i) right &= y[i] == x[i];
  for (u32 i = 0; i < 512; ++i) right &= y[1024 + i] == i / 4;
  return r;
}

// --- shared memory -> global: a store, and a sum over all CTAs.
struct Store {
  alignas(128) float block[2][256];
};
template <int Bug>
void store(float* y, float* sum) {
  auto& s = shared<Store>();
  u32 t = thread_id(), b = block_id();
  for (u32 n = 0; n < 4; ++n) {
    u32 slot = n % 2;
    if (t == 0 && Bug != kNoReadWait) bulk_wait_read<1>();
    block_sync();
    for (u32 i = t; i < 256; i += 64) st_shared(&s.block[slot][i], static_cast<float>(b * 1000 + n * 256 + i));
    if (Bug != kNoStoreFence) fence_proxy_async();
    block_sync();
    if (t == 0) {
      bulk_store(y + (b * 4 + n) * 256 + (Bug == kOutOfBounds && b == 2 && n == 3 ? 16 : 0), s.block[slot], 1024);
      bulk_reduce_add_f32(sum, s.block[slot], 1024);
      if (Bug != kNoCommit) bulk_commit();
    }
  }
  if (t == 0) bulk_wait<0>();
}
template <int Bug>
Result store_trial(u64 seed, bool& right) {
  std::vector<float> y(3 * 4 * 256), sum(256, 1);
  use(y, "y");
  use(sum, "sum");
  Result r = launch({3, 64, 1, sizeof(Store)}, seed, [&] { store<Bug>(y.data(), sum.data()); });
  right = true;
  for (u32 i = 0; i < 256; ++i) {
    float expected = 1;
    for (u32 b = 0; b < 3; ++b)
      for (u32 n = 0; n < 4; ++n) {
        float v = static_cast<float>(b * 1000 + n * 256 + i);
        expected += v;
        right &= y[(b * 4 + n) * 256 + i] == v;
      }
    right &= sum[i] == expected;
  }
  return r;
}

// --- TMA: a 100 x 90 matrix in 64 x 32 boxes, through swizzled shared memory, transposed block by block on the way.
struct Tile {
  alignas(1024) u16 in[32 * 64];
  alignas(1024) u16 out[32 * 64];
  alignas(1024) float ones[32 * 32];
  Mbar full;
};
void tile(const kitsune::emulator::TensorMap& x, const kitsune::emulator::TensorMap& y, const kitsune::emulator::TensorMap& count) {
  auto& s = shared<Tile>();
  u32 t = thread_id();
  if (t == 0) {
    mbar_init(s.full, 1);
    fence_mbar_init();
  }
  block_sync();
  u32 n = 0;
  for (i32 row = 0; row < 90; row += 32)
    for (i32 column = 0; column < 100; column += 64, ++n) {
      if (t == 0) {
        mbar_expect_tx(s.full, sizeof s.in);
        tma_load_2d(x, s.full, s.in, column, row);
      }
      mbar_wait(s.full, n & 1);
      for (u32 i = t; i < 32 * 64; i += 64) {
        u32 at = swizzled(i / 64, i % 64 * 2) / 2;
        st_shared(&s.out[at], static_cast<u16>(ld_shared(&s.in[at]) + 1));
      }
      for (u32 i = t; i < 32 * 32; i += 64) st_shared(&s.ones[i], 1.0f);
      fence_proxy_async();
      block_sync();
      if (t == 0) {
        tma_store_2d(y, s.out, column, row);
        tma_reduce_add_2d(count, s.ones, column / 2, row);
        bulk_commit();
        bulk_wait_read<0>();
      }
      block_sync();
    }
}
Result tile_trial(u64 seed, bool& right) {
  using kitsune::emulator::make_tensor_map;
  using kitsune::emulator::TileType;
  constexpr u32 kPitch = 104;
  std::vector<u16> x(90 * kPitch), y(90 * kPitch, 0xbeef);
  std::vector<float> count(90 * 52, 1);
  for (u32 i = 0; i < x.size(); ++i) x[i] = static_cast<u16>(i * 31);
  use(x, "x");
  use(y, "y");
  use(count, "count");
  auto map_x = make_tensor_map(x.data(), TileType::b16, 100, 90, kPitch * 2, 64, 32, true);
  auto map_y = make_tensor_map(y.data(), TileType::b16, 100, 90, kPitch * 2, 64, 32, true);
  auto map_count = make_tensor_map(count.data(), TileType::f32, 50, 90, 52 * 4, 32, 32, false);
  Result r = launch({1, 64, 1, sizeof(Tile)}, seed, [&] { tile(map_x, map_y, map_count); });
  right = true;
  for (u32 i = 0; i < 90; ++i) {
    for (u32 j = 0; j < kPitch; ++j) right &= y[i * kPitch + j] == (j < 100 ? static_cast<u16>(x[i * kPitch + j] + 1) : 0xbeef);
    for (u32 j = 0; j < 52; ++j) right &= count[i * 52 + j] == (j < 50 ? 2.0f : 1.0f);
  }
  return r;
}

Case all[] = {
    {"correct multicast", multicast_trial<kNone>},
    {"multicast slot released without its fence", multicast_trial<kNoReleaseFence>},
    {"multicast slot released without syncwarp", multicast_trial<kSourceReusedEarly>},
    {"multicast mask beyond the cluster", multicast_trial<kMaskBeyond>},
    {"correct st_async", neighbour_trial<true, kNone>},
    {"correct st_cluster", neighbour_trial<false, kNone>},
    {"st_cluster without fence_cluster", neighbour_trial<false, kNoClusterFence>},
    {"st_cluster and a wait of cta scope", neighbour_trial<false, kNarrowWait>},
    {"correct bulk store and reduction", store_trial<kNone>},
    {"bulk store without proxy fence", store_trial<kNoStoreFence>},
    {"bulk store source reused unread", store_trial<kNoReadWait>},
    {"bulk store without commit", store_trial<kNoCommit>},
    {"bulk store out of bounds", store_trial<kOutOfBounds>},
    {"correct tma tiles", tile_trial},
};

}  // namespace
