// A ring of tiles by cp.async and mma.sync, as the portable path has it: warps 0 to 3 load and multiply, completion by mbarriers.
// For inspection of its machine code.
#include "kitsune/arch/arch.h"

using namespace kitsune::arch;

constexpr int kStages = 3;

struct Params {
  const u8* x;
  float* y;
  u32* flags;
};

struct Storage {
  alignas(1024) u8 tile[kStages][64 * 128];
  alignas(1024) u8 weights[64 * 128];
  Mbar full[kStages];
};

// 64 rows of 128 bytes, 128-byte swizzle; 128 threads copy 4 chunks of 16 bytes each.
KITSUNE_DEVICE void load(u8* dst, const u8* src) {
  KITSUNE_UNROLL
  for (u32 i = 0; i < 4; ++i) {
    const u32 chunk = i * 128 + thread_id(), row = chunk / 8, column = chunk % 8;
    cp_async_16(dst + row * 128 + (column ^ (row % 8)) * 16, src + chunk * 16, 16);
  }
}

KITSUNE_DEVICE void multiply(const u8* tile, const u8* weights, float (&c)[8][4]) {
  const u32 warp = thread_id() / 32, lane = lane_id();
  KITSUNE_UNROLL
  for (u32 k = 0; k < 4; ++k) {
    u32 a[4];
    const u32 row = 16 * warp + lane % 16;
    ldmatrix_x4(a, tile + row * 128 + ((2 * k + lane / 16) ^ (row % 8)) * 16);
    KITSUNE_UNROLL
    for (u32 j = 0; j < 4; ++j) {
      u32 b[4];
      const u32 column = 16 * j + lane % 16;
      ldmatrix_x4(b, weights + column * 128 + ((2 * k + lane / 16) ^ (column % 8)) * 16);
      mma<Bf16>(c[2 * j], a, {b[0], b[2]});
      mma<Bf16>(c[2 * j + 1], a, {b[1], b[3]});
    }
  }
}

KITSUNE_KERNEL(kitsune_region, Params, p, 128) {
  Storage& s = shared<Storage>();
  if (thread_id() == 0) {
    for (int i = 0; i < kStages; ++i) mbar_init(s.full[i], 128);
    fence_mbar_init();
  }
  block_sync();
  const u32 tiles = ld_global(p.flags);
  load(s.weights, p.x);
  KITSUNE_UNROLL
  for (u32 n = 0; n < kStages; ++n) {
    load(s.tile[n], p.x + (n + 1) * 8192);
    cp_async_arrive(s.full[n]);
  }
  KITSUNE_NO_UNROLL
  for (u32 n = 0; n < tiles; ++n) {
    const u32 stage = n % kStages;
    mbar_wait(s.full[stage], (n / kStages) & 1);
    float c[8][4] = {};
    multiply(s.tile[stage], s.weights, c);
    block_sync();
    load(s.tile[stage], p.x + (n + 1 + kStages) * 8192);
    cp_async_arrive(s.full[stage]);
    KITSUNE_UNROLL
    for (u32 i = 0; i < 32; ++i) st_global(p.y + (n * 32 + i) * 128 + thread_id(), c[i / 4][i % 4]);
  }
  cp_async_wait<0>();
  if (thread_id() == 0) red_add_release(p.flags + 1, 1);
}
