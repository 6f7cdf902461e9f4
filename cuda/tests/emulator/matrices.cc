// wgmma of every operand type and orientation, and stmatrix / ldmatrix, against a plain triple loop.

#include "check.h"

namespace {

using namespace check;

template <class T>
struct Element {
  typedef u16 type;
  static u16 encode(float v) { return sizeof(T) && is_f16() ? to_f16(v) : to_bf16(v); }
  static constexpr bool is_f16();
};
template <>
constexpr bool Element<Bf16>::is_f16() {
  return false;
}
template <>
constexpr bool Element<F16>::is_f16() {
  return true;
}
template <>
struct Element<Tf32> {
  typedef u32 type;
  static u32 encode(float v) { return to_tf32(v); }
};

// d = a * b^T, a is 64 x K, b is N x K, K one 128-byte row.
template <class T, int N>
struct Shared {
  alignas(1024) u8 a[64 * 128];
  alignas(1024) u8 b[(N + 63) / 64 * 64 * 128];
};

enum class From { registers, shared };

template <class T, int N, From A, bool TransA, bool TransB>
void product(const u8* a, const u8* b, float* y, u32 b_bytes) {
  typedef typename Element<T>::type E;
  constexpr u32 kStep = 32 / sizeof(E), kSteps = 4;
  auto& s = shared<Shared<T, N>>();
  u32 t = thread_id(), lane = lane_id(), row = t / 32 * 16 + lane / 4;
  for (u32 i = t * 4; i < sizeof s.a; i += 512)
    st_shared(reinterpret_cast<u32*>(s.a + i), ld_global(reinterpret_cast<const u32*>(a + i)));
  for (u32 i = t * 4; i < b_bytes; i += 512)
    st_shared(reinterpret_cast<u32*>(s.b + i), ld_global(reinterpret_cast<const u32*>(b + i)));
  fence_proxy_async();
  block_sync();
  float d[N / 2];
  for (float& v : d) v = 1;
  u32 fragments[kSteps][4];
  for (u32 k = 0; k < kSteps; ++k)
    for (u32 i = 0; i < 4; ++i) {
      u32 column = sizeof(E) == 2 ? lane % 4 * 2 + 8 * (i >> 1) : lane % 4 + 4 * (i >> 1);
      fragments[k][i] = ld_shared(reinterpret_cast<u32*>(s.a + swizzled(row + 8 * (i & 1), (k * kStep + column) * sizeof(E))));
    }
  wgmma_fence();
  for (u32 k = 0; k < kSteps; ++k) {
    // MN-major: 16 values of K are two groups of 8 rows, 2048 bytes.
    u64 db = TransB ? desc_mn128(s.b + 2048 * k, 8192, 1024) : desc_k128(s.b) + 2 * k;
    if constexpr (A == From::registers)
      wgmma_rs<T, N>(d, fragments[k], db, true);
    else
      wgmma_ss<T, N, TransA, TransB>(d, TransA ? desc_mn128(s.a + 2048 * k, 8192, 1024) : desc_k128(s.a) + 2 * k, db, true);
  }
  wgmma_commit();
  wgmma_wait<0>();
  for (u32 i = 0; i < N / 2; ++i) st_global(y + (row + (i >> 1 & 1) * 8) * N + lane % 4 * 2 + (i & 1) + i / 4 * 8, d[i]);
}

// Lays rows x K as 128-byte rows; transposed: K rows of 64 columns, blocks of 64 columns one after the other.
template <class E>
std::vector<u8> lay(const std::vector<float>& from, u32 rows, u32 depth, bool transposed, E (*encode)(float)) {
  std::vector<u8> to((rows + 63) / 64 * 64 * 128);
  for (u32 r = 0; r < rows; ++r)
    for (u32 k = 0; k < depth; ++k) {
      E e = encode(from[r * depth + k]);
      u32 at = transposed ? r / 64 * 8192 + swizzled(k, r % 64 * 2) : swizzled(r, k * sizeof(E));
      memcpy(&to[at], &e, sizeof e);
    }
  return to;
}

template <class T, int N, From A, bool TransA, bool TransB>
Result trial(u64 seed, bool& right) {
  typedef typename Element<T>::type E;
  constexpr u32 kDepth = 128 / sizeof(E);
  std::vector<float> a(64 * kDepth), b(N * kDepth), y(64 * N, NAN);
  Integers integers;
  for (float& v : a) v = integers.next(3);
  for (float& v : b) v = integers.next(3);
  auto a_bytes = lay<E>(a, 64, kDepth, TransA, Element<T>::encode), b_bytes = lay<E>(b, N, kDepth, TransB, Element<T>::encode);
  use(a_bytes, "a");
  use(b_bytes, "b");
  use(y, "y");
  Result r = launch({1, 128, 1, sizeof(Shared<T, N>)}, seed, [&] {
    product<T, N, A, TransA, TransB>(a_bytes.data(), b_bytes.data(), y.data(), static_cast<u32>(b_bytes.size()));
  });
  right = true;
  for (u32 i = 0; i < 64; ++i)
    for (u32 j = 0; j < N; ++j) {
      float sum = 1;
      for (u32 k = 0; k < kDepth; ++k) sum += a[i * kDepth + k] * b[j * kDepth + k];
      right &= y[i * N + j] == sum;
    }
  return r;
}

// stmatrix writes what ldmatrix reads; .trans reads the transpose of each 8 x 8 matrix.
struct Matrices {
  alignas(16) u16 m[4][8][8];
};
Result matrix_trial(u64 seed, bool& right) {
  std::vector<u32> y(32 * 8);
  use(y, "y");
  Result result = launch({1, 32, 1, sizeof(Matrices)}, seed, [&] {
    auto& s = shared<Matrices>();
    u32 l = lane_id(), r[4], back[4];
    for (u32 i = 0; i < 4; ++i) r[i] = (i * 64 + l * 2) | (i * 64 + l * 2 + 1) << 16;
    stmatrix_x4(s.m[l / 8][l % 8], r);
    syncwarp();
    ldmatrix_x4(back, s.m[l / 8][l % 8]);
    for (u32 i = 0; i < 4; ++i) st_global(&y[l * 8 + i], back[i]);
    ldmatrix_x4_trans(back, s.m[l / 8][l % 8]);
    for (u32 i = 0; i < 4; ++i) st_global(&y[l * 8 + 4 + i], back[i]);
  });
  right = true;
  for (u32 l = 0; l < 32; ++l)
    for (u32 i = 0; i < 4; ++i) {
      right &= y[l * 8 + i] == ((i * 64 + l * 2) | (i * 64 + l * 2 + 1) << 16);
      u32 row = l % 4 * 2, column = l / 4;
      right &= y[l * 8 + 4 + i] == ((i * 64 + row * 8 + column) | (i * 64 + (row + 1) * 8 + column) << 16);
    }
  return result;
}

// Accumulators of two products in flight; the older group is waited for first.
Result two_groups(u64 seed, bool& right) {
  std::vector<float> y(2 * 64 * 64, NAN);
  use(y, "y");
  struct S {
    alignas(1024) u8 a[8192];
  };
  Result r = launch({1, 128, 1, sizeof(S)}, seed, [&] {
    auto& s = shared<S>();
    u32 t = thread_id(), lane = lane_id(), row = t / 32 * 16 + lane / 4;
    for (u32 i = t * 2; i < 4096; i += 256) {
      u32 v = pack_bf16(i / 64 == i % 64 ? 1.0f : 0.0f, i / 64 == i % 64 + 1 ? 1.0f : 0.0f);  // the identity
      st_shared(reinterpret_cast<u32*>(s.a + swizzled(i / 64, i % 64 * 2)), v);
    }
    fence_proxy_async();
    block_sync();
    float d[2][32];
    wgmma_fence();
    for (u32 g = 0; g < 2; ++g) {
      for (u32 k = 0; k < 4; ++k)
        for (u32 again = 0; again <= g; ++again)
          wgmma_ss<Bf16, 64, false, false>(d[g], desc_k128(s.a) + 2 * k, desc_k128(s.a) + 2 * k, k + again > 0);
      wgmma_commit();
    }
    wgmma_wait<1>();
    for (u32 i = 0; i < 32; ++i) d[0][i] *= 3;
    wgmma_wait<0>();
    for (u32 g = 0; g < 2; ++g)
      for (u32 i = 0; i < 32; ++i)
        st_global(&y[g * 4096 + (row + (i >> 1 & 1) * 8) * 64 + lane % 4 * 2 + (i & 1) + i / 4 * 8], d[g][i]);
  });
  right = true;
  for (u32 i = 0; i < 4096; ++i)
    right &= y[i] == (i / 64 == i % 64 ? 3.0f : 0.0f) && y[4096 + i] == (i / 64 == i % 64 ? 2.0f : 0.0f);
  return r;
}

Case all[] = {
    {"correct rs bf16", trial<Bf16, 64, From::registers, false, false>},
    {"correct rs f16", trial<F16, 256, From::registers, false, false>},
    {"correct rs tf32", trial<Tf32, 32, From::registers, false, false>},
    {"correct ss bf16", trial<Bf16, 24, From::shared, false, false>},
    {"correct ss tf32", trial<Tf32, 128, From::shared, false, false>},
    {"correct ss bf16, B MN-major", trial<Bf16, 128, From::shared, false, true>},
    {"correct ss f16, A MN-major", trial<F16, 64, From::shared, true, false>},
    {"correct ss f16, both MN-major", trial<F16, 256, From::shared, true, true>},
    {"correct stmatrix and ldmatrix", matrix_trial},
    {"correct two groups in flight", two_groups},
};

}  // namespace
