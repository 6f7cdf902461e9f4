// A warp-specialised pipeline as generated kernels have it: a producer warpgroup feeds a ring by TMA (multicast to a cluster of
// two), two consumer warpgroups run wgmma with A from shared memory and then, layer to layer, from registers, and store tiles by
// TMA. For inspection of its machine code; three wgmma shapes, so that its compile time stands for that of a large kernel.
#include "kitsune/arch/arch.h"

using namespace kitsune::arch;

constexpr int kStages = 3;
constexpr u32 kTileBytes = 128 * 64 * 2, kWeightBytes = 128 * 64 * 2;

struct Params {
  TensorMap x;
  TensorMap y;
  const u8* weights;
  u32* flags;
  float* sum;
};

struct Storage {
  alignas(1024) u8 tile[kStages][kTileBytes];
  alignas(1024) u8 weights[2][kWeightBytes];
  alignas(1024) u8 out[128 * 128];
  alignas(1024) u8 narrow[64 * 128 * 2];
  Mbar full[kStages], empty[kStages], loaded;
};

KITSUNE_DEVICE void produce(Storage& s, const Params& p, u32 tiles) {
  if (thread_id() != 0) return;
  mbar_expect_tx(s.loaded, 2 * kWeightBytes + sizeof(s.narrow));
  bulk_load(s.weights, p.weights, 2 * kWeightBytes, s.loaded);
  bulk_load(s.narrow, p.weights + 2 * kWeightBytes, sizeof(s.narrow), s.loaded);
  const u32 rank = cluster_rank();
  KITSUNE_NO_UNROLL
  for (u32 n = 0; n < tiles; ++n) {
    const u32 stage = n % kStages;
    mbar_wait_cluster(s.empty[stage], ((n / kStages) & 1) ^ 1);
    mbar_expect_tx(s.full[stage], kTileBytes);
    if (rank == 0) wait_ge(p.flags, n + 1);
    fence_proxy_async_global();
    tma_load_2d_multicast(p.x, s.full[stage], s.tile[stage] + rank * (kTileBytes / 2), 0, static_cast<i32>(n * 128 + rank * 64), 3);
  }
}

// One tile of 64 rows: 64 -> 128 columns by wgmma_ss, ReLU, 128 -> 64 by wgmma_rs.
KITSUNE_DEVICE void multiply(Storage& s, const u8* tile, float (&narrow)[32]) {
  float wide[64];
  KITSUNE_UNROLL
  for (int i = 0; i < 64; ++i) wide[i] = 0;
  pin(wide);
  wgmma_fence();
  KITSUNE_UNROLL
  for (int k = 0; k < 4; ++k) {
    wgmma_ss<Bf16, 128, false, false>(wide, desc_k128(tile) + 2 * k, desc_k128(s.weights[0]) + 2 * k, true);
  }
  wgmma_commit();
  wgmma_wait<0>();
  pin(wide);
  u32 a[8][4];
  KITSUNE_UNROLL
  for (int k = 0; k < 8; ++k) {
    KITSUNE_UNROLL
    for (int i = 0; i < 4; ++i) a[k][i] = pack_bf16(fmaxf(wide[8 * k + 2 * i], 0), fmaxf(wide[8 * k + 2 * i + 1], 0));
  }
  KITSUNE_UNROLL
  for (int i = 0; i < 32; ++i) narrow[i] = 0;
  pin(narrow);
  wgmma_fence();
  KITSUNE_UNROLL
  for (int k = 0; k < 8; ++k) wgmma_rs<Bf16, 64>(narrow, a[k], desc_k128(s.narrow + (k / 4) * 8192) + 2 * (k % 4), true);
  wgmma_commit();
  wgmma_wait<0>();
  pin(narrow);
}

// The 64 x 64 tile of this warpgroup as 128-byte-swizzled rows, stored by one thread.
KITSUNE_DEVICE void store_tile(Storage& s, const Params& p, const float (&narrow)[32], u32 group, u32 n) {
  u8* out = s.out + group * 8192;
  const u32 thread = thread_id() % 128, row = 16 * (thread / 32) + lane_id() % 16;
  if (thread == 0) bulk_wait_read<0>();
  bar_sync(1 + group, 128);
  KITSUNE_UNROLL
  for (int j = 0; j < 4; ++j) {
    u32 r[4];
    KITSUNE_UNROLL
    for (int i = 0; i < 4; ++i) r[i] = pack_bf16(narrow[8 * j + 2 * i], narrow[8 * j + 2 * i + 1]);
    stmatrix_x4(out + row * 128 + (((2 * j + lane_id() / 16) ^ (row % 8)) * 16), r);
  }
  fence_proxy_async();
  bar_sync(1 + group, 128);
  if (thread == 0) {
    tma_store_2d(p.y, out, 0, static_cast<i32>(n * 128 + group * 64));
    bulk_commit();
  }
}

KITSUNE_DEVICE void consume(Storage& s, const Params& p, u32 tiles, u32 group) {
  mbar_wait(s.loaded, 0);
  float gram[32];
  KITSUNE_UNROLL
  for (int i = 0; i < 32; ++i) gram[i] = 0;
  KITSUNE_NO_UNROLL
  for (u32 n = 0; n < tiles; ++n) {
    const u32 stage = n % kStages;
    mbar_wait(s.full[stage], (n / kStages) & 1);
    const u8* tile = s.tile[stage] + group * (kTileBytes / 2);
    float narrow[32];
    multiply(s, tile, narrow);
    pin(gram);
    wgmma_fence();
    KITSUNE_UNROLL
    for (int k = 0; k < 4; ++k) {
      wgmma_ss<Bf16, 64, true, true>(gram, desc_mn128(tile, 8192, 1024) + 128 * k, desc_mn128(tile, 8192, 1024) + 128 * k, true);
    }
    wgmma_commit();
    wgmma_wait<0>();
    pin(gram);
    if (thread_id() % 128 < 2) mbar_arrive_remote(s.empty[stage], thread_id() % 128);
    store_tile(s, p, narrow, group, n);
  }
  KITSUNE_UNROLL
  for (int i = 0; i < 32; ++i) st_global(p.sum + i * 256 + thread_id() - 128, gram[i]);
  if (thread_id() % 128 == 0) {
    bulk_wait<0>();
    fence_proxy_async_global();
    red_add_release(p.flags + 1, 1);
  }
}

KITSUNE_KERNEL(kitsune_region, Params, p, 384) {
  Storage& s = shared<Storage>();
  if (thread_id() == 0) {
    for (int i = 0; i < kStages; ++i) {
      mbar_init(s.full[i], 1);
      mbar_init(s.empty[i], 4);
    }
    mbar_init(s.loaded, 1);
    fence_mbar_init();
  }
  cluster_sync();
  const u32 tiles = ld_global(p.flags + 2), group = thread_id() / 128;
  if (group == 0) {
    reg_dec<40>();
    produce(s, p, tiles);
  } else {
    reg_inc<232>();
    consume(s, p, tiles, group - 1);
  }
  cluster_sync();
}
