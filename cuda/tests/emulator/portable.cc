// The path for sm_80: cp.async, ldmatrix and mma.sync, mbarriers without transaction counts. Compiled with KITSUNE_SM=800.

#include "check.h"

namespace {

using namespace check;

enum Bug { kNone, kNoWait, kNoSync };

// y = a * b^T for a: 16 x 32, b: 8 x 32 (16-bit), rows of 64 bytes in shared memory.
struct Shared {
  alignas(16) u8 a[16 * 80];  // rows 80 bytes apart: no bank conflicts
  alignas(16) u8 b[8 * 80];
  Mbar full;
};

template <class T, int Bug, bool Barrier>
void product(const u8* a, const u8* b, float* y) {
  auto& s = shared<Shared>();
  u32 t = thread_id(), l = lane_id();
  if (t == 0) mbar_init(s.full, 64);
  block_sync();
  for (u32 i = t; i < 24 * 4; i += 64) {
    u32 row = i / 4, chunk = i % 4 * 16;
    cp_async_16(row < 16 ? s.a + row * 80 + chunk : s.b + (row - 16) * 80 + chunk,
                row < 16 ? a + row * 64 + chunk : b + (row - 16) * 64 + chunk, 16);
  }
  if (Barrier) {
    cp_async_arrive(s.full);
    if (Bug != kNoWait) mbar_wait(s.full, 0);
  } else {
    cp_async_commit();
    if (Bug != kNoWait) cp_async_wait<0>();
    if (Bug != kNoSync) block_sync();
  }
  if (t >= 32) {
    if (Bug == kNoWait && !Barrier) cp_async_wait<0>();
    return;
  }
  float c[4] = {};
  constexpr bool kTf32 = sizeof(T) && T::tf32;
  for (u32 k = 0; k < 2; ++k) {
    u32 fa[4], fb[4];
    if constexpr (kTf32) {
      for (u32 i = 0; i < 4; ++i)
        fa[i] = ld_shared(reinterpret_cast<u32*>(s.a + (l / 4 + 8 * (i & 1)) * 80 + (k * 8 + l % 4 + 4 * (i >> 1)) * 4));
      for (u32 i = 0; i < 2; ++i) fb[i] = ld_shared(reinterpret_cast<u32*>(s.b + l / 4 * 80 + (k * 8 + l % 4 + 4 * i) * 4));
    } else {
      ldmatrix_x4(fa, s.a + l % 16 * 80 + k * 32 + l / 16 * 16);
      u32 both[4];
      ldmatrix_x4(both, s.b + l % 8 * 80 + l / 8 * 16);  // all 32 values of K
      fb[0] = both[2 * k];
      fb[1] = both[2 * k + 1];
    }
    u32 pair[2] = {fb[0], fb[1]};
    mma<typename T::tag>(c, fa, pair);
  }
  for (u32 i = 0; i < 4; ++i) st_global(y + (l / 4 + 8 * (i >> 1)) * 8 + l % 4 * 2 + (i & 1), c[i]);
  if (Bug == kNoWait && !Barrier) cp_async_wait<0>();
}

struct B {
  typedef Bf16 tag;
  static constexpr bool tf32 = false;
  static u16 encode(float v) { return to_bf16(v); }
};
struct H {
  typedef F16 tag;
  static constexpr bool tf32 = false;
  static u16 encode(float v) { return to_f16(v); }
};
struct F {
  typedef Tf32 tag;
  static constexpr bool tf32 = true;
  static u32 encode(float v) { return to_tf32(v); }
};

template <class T, int Bug, bool Barrier>
Result trial(u64 seed, bool& right) {
  constexpr u32 kDepth = T::tf32 ? 16 : 32;
  std::vector<float> a(16 * kDepth), b(8 * kDepth), y(128, NAN);
  Integers integers;
  for (float& v : a) v = integers.next(3);
  for (float& v : b) v = integers.next(3);
  std::vector<decltype(T::encode(0))> a_in(a.size()), b_in(b.size());
  for (u32 i = 0; i < a.size(); ++i) a_in[i] = T::encode(a[i]);
  for (u32 i = 0; i < b.size(); ++i) b_in[i] = T::encode(b[i]);
  use(a_in, "a");
  use(b_in, "b");
  use(y, "y");
  auto* pa = reinterpret_cast<const u8*>(a_in.data());
  auto* pb = reinterpret_cast<const u8*>(b_in.data());
  Result r = launch({1, 64, 1, sizeof(Shared)}, seed, [&] { product<T, Bug, Barrier>(pa, pb, y.data()); });
  right = true;
  for (u32 i = 0; i < 16; ++i)
    for (u32 j = 0; j < 8; ++j) {
      float sum = 0;
      for (u32 k = 0; k < kDepth; ++k) sum += a[i * kDepth + k] * b[j * kDepth + k];
      right &= y[i * 8 + j] == sum;
    }
  return r;
}

// Bytes beyond src_bytes are zero.
Result fill_trial(u64 seed, bool& right) {
  std::vector<u32> x(8, 0xffffffff), y(8 * 4);
  use(x, "x");
  use(y, "y");
  struct S {
    U4 v[8];
  };
  Result r = launch({1, 32, 1, sizeof(S)}, seed, [&] {
    auto& s = shared<S>();
    u32 l = lane_id();
    if (l < 8) cp_async_16(&s.v[l], x.data(), 2 * l);
    cp_async_commit();
    cp_async_wait<0>();
    if (l < 8) st_global(reinterpret_cast<U4*>(&y[l * 4]), ld_shared(&s.v[l]));
  });
  right = true;
  for (u32 i = 0; i < 8 * 16; ++i) right &= reinterpret_cast<u8*>(y.data())[i] == (i % 16 < i / 16 * 2 ? 0xff : 0);
  return r;
}

Case all[] = {
    {"correct mma bf16", trial<B, kNone, false>},
    {"correct mma f16, copies arrive", trial<H, kNone, true>},
    {"correct mma tf32", trial<F, kNone, false>},
    {"correct zero fill", fill_trial},
    {"cp.async not waited for", trial<B, kNoWait, false>},
    {"cp.async without block_sync", trial<B, kNoSync, false>},
    {"cp.async barrier not waited for", trial<B, kNoWait, true>},
};

}  // namespace
