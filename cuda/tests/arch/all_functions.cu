// Calls every function of the arch contract once, so that each one compiles for the architecture at hand. Never run: the order of
// the calls means nothing. Every value reaches a store, so none is optimised away.
#include "kitsune/arch/arch.h"

using namespace kitsune::arch;

struct Params {
  u32* words;
  float* floats;
  TensorMap map;
};

struct Storage {
  alignas(1024) u8 tile[32768];
  alignas(16) u32 words[1024];
  Mbar bar;
};

KITSUNE_DEVICE u32 use_memory(Storage& s, const Params& p) {
  u32 sum = 0;
  const u32 at = thread_id();
  st_shared(reinterpret_cast<u16*>(s.words) + at, static_cast<u16>(at));
  st_shared(s.words + at, at);
  st_shared(reinterpret_cast<float*>(s.words) + at, 1.0f);
  st_shared(reinterpret_cast<U2*>(s.words) + at, U2{at, at});
  st_shared(reinterpret_cast<U4*>(s.words) + at, U4{at, at, at, at});
  sum += ld_shared(reinterpret_cast<const u16*>(s.words) + at) + ld_shared(s.words + at);
  sum += bits(ld_shared(reinterpret_cast<const float*>(s.words) + at));
  sum += ld_shared(reinterpret_cast<const U2*>(s.words) + at).y + ld_shared(reinterpret_cast<const U4*>(s.words) + at).w;
  st_shared(reinterpret_cast<u8*>(s.words) + at, static_cast<u8>(at));
  st_global(reinterpret_cast<u8*>(p.words) + at, ld_global(opaque(reinterpret_cast<const u8*>(p.words)) + at));
  st_global(p.words + opaque(p.words[0]), 1u);
  sum += ld_global(reinterpret_cast<const u16*>(p.words) + at) + ld_global(p.words + at) + bits(ld_global(p.floats + at));
  sum += ld_global(reinterpret_cast<const U2*>(p.words) + at).y + ld_global(reinterpret_cast<const U4*>(p.words) + at).w;
  sum += ld_l2(reinterpret_cast<const u16*>(p.words) + at) + ld_l2(p.words + at) + bits(ld_l2(p.floats + at));
  sum += ld_l2(reinterpret_cast<const U2*>(p.words) + at).y + ld_l2(reinterpret_cast<const U4*>(p.words) + at).w;
  st_global(reinterpret_cast<u16*>(p.words) + at, static_cast<u16>(sum));
  st_global(p.floats + at, from_bits(sum));
  st_global(reinterpret_cast<U2*>(p.words) + at, U2{sum, sum});
  st_global(reinterpret_cast<U4*>(p.words) + at, U4{sum, sum, sum, sum});
  red_add(p.floats + at, 1.0f);
  red_add(p.floats + 2 * at, {1.0f, 2.0f});
  red_add(p.floats + 4 * at, {1.0f, 2.0f, 3.0f, 4.0f});
  red_add_release(p.words, 1);
  sum += atomic_add_acq_rel(p.words, 1) + ld_acquire(p.words);
  wait_ge(p.words, 2);
  fence_gpu();
  return sum;
}

KITSUNE_DEVICE float use_convert(float v, u32 w) {
  float sum = from_bits(pack_bf16(v, v)) + from_bits(pack_f16(v, v)) + from_bits(to_tf32(v)) + from_bits(bits(v));
  sum += bf16_lo(w) + bf16_hi(w) + f16_lo(w) + f16_hi(w);
  sum += from_bf16(to_bf16(v)) + from_f16(to_f16(v));
  sum += add_rounded(v, sum) + mul_rounded(v, sum);
  sum += max_nan(v, sum) + min_nan(v, sum);
  sum += fast_exp2(v) + fast_rcp(v) + fast_tanh(v) + fast_rsqrt(v);
  sum += expf(v) + logf(v) + tanhf(v) + erff(v) + sqrtf(v) + fmaf(v, v, v) + fabsf(v) + floorf(v);
  const Halves halves = product_halves(w, w + 1);
  return sum + static_cast<float>(popc(w) + clz(w) + (halves.low ^ halves.high));
}

KITSUNE_DEVICE float use_warp(Storage& s, const Params& p) {
  u32 a[4], b[4];
  ldmatrix_x4(a, s.tile + 16 * lane_id() + opaque_zero());
  ldmatrix_x4_trans(b, s.tile + 16 * lane_id());
  float c[4] = {};
  const u32 half[2] = {b[0] + b[1], b[2] + b[3]};
  mma<Bf16>(c, a, half);
  mma<F16>(c, a, half);
  mma<Tf32>(c, a, half);
  syncwarp();
  cp_async_16(s.tile + 16 * thread_id(), p.floats + 4 * thread_id(), 8);
  cp_async_commit();
  cp_async_wait<0>();
  cp_async_arrive(s.bar);
  bar_arrive(1, 128);
  bar_sync(1, 128);
  const float x = shfl_xor(c[0], 1) + shfl(c[1], 0);
  return x + c[2] + c[3] + static_cast<float>(shfl_xor(a[0], 2) + shfl(a[1], 1));
}

#if KITSUNE_SM == 900
KITSUNE_DEVICE void use_copies(Storage& s, const Params& p) {
  mbar_expect_tx(s.bar, 64);
  bulk_load(s.tile, p.floats, 64, s.bar);
  bulk_load_multicast(s.tile, p.floats, 64, s.bar, 3);
  bulk_push(s.tile, 1, s.tile, 64, s.bar);
  fence_proxy_async();
  fence_proxy_async_global();
  bulk_store(p.floats, s.tile, 64);
  bulk_reduce_add_f32(p.floats, reinterpret_cast<const float*>(s.tile), 64);
  bulk_prefetch_l2(p.floats, 64);
  tma_load_2d(p.map, s.bar, s.tile, 0, 0);
  tma_load_2d_multicast(p.map, s.bar, s.tile, 0, 0, 3);
  tma_store_2d(p.map, s.tile, 0, 0);
  tma_reduce_add_2d(p.map, s.tile, 0, 0);
  bulk_commit();
  bulk_wait_read<1>();
  bulk_wait<0>();
}

KITSUNE_DEVICE u32 use_cluster(Storage& s) {
  st_cluster(reinterpret_cast<u16*>(s.words), 1, static_cast<u16>(1));
  st_cluster(s.words, 1, 1u);
  st_cluster(reinterpret_cast<float*>(s.words), 1, 1.0f);
  st_cluster(reinterpret_cast<U2*>(s.words), 1, U2{1, 1});
  st_cluster(reinterpret_cast<U4*>(s.words), 1, U4{1, 1, 1, 1});
  st_async(reinterpret_cast<U4*>(s.words), 1, U4{2, 2, 2, 2}, s.bar);
  st_async(reinterpret_cast<U2*>(s.words), 1, U2{2, 2}, s.bar);
  fence_cluster();
  mbar_arrive_remote(s.bar, 1);
  fence_release_own_shared();
  mbar_arrive_remote_relaxed(s.bar, 1);
  mbar_wait_cluster(s.bar, 0);
  cluster_arrive();
  cluster_wait();
  cluster_sync();
  u32 sum = ld_cluster(reinterpret_cast<const u16*>(s.words), 1) + ld_cluster(s.words, 1);
  sum += bits(ld_cluster(reinterpret_cast<const float*>(s.words), 1));
  return sum + ld_cluster(reinterpret_cast<const U2*>(s.words), 1).y + ld_cluster(reinterpret_cast<const U4*>(s.words), 1).w;
}

KITSUNE_DEVICE float use_wgmma(Storage& s) {
  float d[32] = {};
  u32 a[4] = {1, 2, 3, 4};
  pin(d);
  wgmma_fence();
  wgmma_rs<Bf16, 64>(d, a, desc_k128(s.tile), true);
  wgmma_ss<Bf16, 64, true, true>(d, desc_mn128(s.tile, 8192, 1024), desc_mn128(s.tile, 8192, 1024), true);
  wgmma_commit();
  wgmma_wait<0>();
  pin(d);
  stmatrix_x4(s.tile + 16 * lane_id(), a);
  float sum = 0;
  KITSUNE_UNROLL
  for (int i = 0; i < 32; ++i) sum += d[i];
  return sum;
}
#endif

KITSUNE_KERNEL(kitsune_region, Params, p, 256) {
  Storage& s = shared<Storage>();
  name(&s.bar, "bar");
  section(0, 1);
  finishing();
  if (thread_id() == 0) {
    mbar_init(s.bar, 256);
    fence_mbar_init();
  }
  block_sync();
  mbar_arrive(s.bar);
  // A warpgroup that gives registers up must need few, or ptxas ignores both requests.
  if (thread_id() < 128) {
    reg_dec<40>();
    return;
  }
  reg_inc<208>();
  mbar_wait(s.bar, 0);
  u32 sum = use_memory(s, p) + block_id() + grid_size() + block_threads() + cluster_rank() + cluster_size() +
            static_cast<u32>(cycles()) + static_cast<u32>(nanoseconds());
  float v = use_convert(from_bits(sum), sum) + use_warp(s, p);
#if KITSUNE_SM == 900
  use_copies(s, p);
  sum += use_cluster(s);
  v += use_wgmma(s);
#endif
  KITSUNE_NO_UNROLL
  for (int i = 0; i < 4; ++i) st_global(p.floats + 4 * thread_id() + i, v);
  st_global(p.words + thread_id(), sum);
}
