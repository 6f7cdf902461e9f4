// The arch contract for the host: the functions of kitsune/arch with the same names, executed by fibers of the emulator.
//
// Comes in: kernel source compiled by the host compiler with KITSUNE_EMULATE. Goes out: calls of the runtime (runtime.h).
// Invariant: whatever compiles here means what it means on the device, or the launch fails with a message; what a device does not
// have at KITSUNE_SM=800 is not declared. Math functions are those of <math.h>.
#pragma once

#include "emulator/convert.h"
#include "emulator/math.h"
#include "emulator/runtime.h"

#define KITSUNE_DEVICE inline
#define KITSUNE_UNROLL
#define KITSUNE_NO_UNROLL
#define KITSUNE_CONSTANT const
// The limit of threads and the registers of a thread are exported beside the kernel, as a cubin has them: so the driver shim
// refuses what __launch_bounds__ would, and setmaxnreg hands around what a device would.
#define KITSUNE_KERNEL(name, Params, p, threads)                                                                                \
  extern "C" __attribute__((visibility("default"))) const unsigned name##_max_threads;                                          \
  extern "C" __attribute__((visibility("default"))) const unsigned name##_max_threads = threads;                                \
  extern "C" __attribute__((visibility("default"))) const unsigned name##_registers;                                            \
  extern "C" __attribute__((visibility("default"))) const unsigned name##_registers = kitsune::arch::kLaunchRegisters<threads>; \
  extern "C" __attribute__((visibility("default"))) void name(const Params& p)

namespace kitsune::arch {

namespace emu = ::kitsune::emulator;

// --- identity
inline u32 thread_id() { return emu::current->thread; }
inline u32 block_threads() { return emu::dimensions.block; }
inline u32 block_id() { return emu::current->block; }
inline u32 grid_size() { return emu::dimensions.grid; }
inline u32 lane_id() { return emu::current->lane; }
inline u32 opaque_zero() { return 0; }
inline u32 cluster_rank() { return emu::current->rank; }
inline u32 cluster_size() { return emu::dimensions.cluster; }
inline u64 cycles() { return emu::ticks(); }
inline u64 nanoseconds() { return emu::nanoseconds(); }
template <class S>
S& shared() {
  static_assert(alignof(S) <= 1024, "dynamic shared memory is aligned to 1024 bytes");
  return *static_cast<S*>(emu::shared_base(sizeof(S)));
}
inline void name(const void* p, const char* text) { emu::name_object(p, text); }
inline void section(u32 stage, u32 role) { emu::enter_section(stage, role); }
inline void finishing() { emu::finish_section(); }

// --- memory
namespace detail {
template <class T>
inline constexpr bool is_word = false;
template <>
inline constexpr bool is_word<u8> = true;
template <>
inline constexpr bool is_word<u16> = true;
template <>
inline constexpr bool is_word<u32> = true;
template <>
inline constexpr bool is_word<float> = true;
template <>
inline constexpr bool is_word<U2> = true;
template <>
inline constexpr bool is_word<U4> = true;

// memcpy: kernels look at one object as several types.
template <class T>
inline T get(const void* p) {
  static_assert(is_word<T>, "memory is accessed as u8, u16, u32, float, U2 or U4");
  T v;
  memcpy(&v, p, sizeof v);
  return v;
}
template <class T>
inline void put(void* p, const T& v) {
  static_assert(is_word<T>, "memory is accessed as u8, u16, u32, float, U2 or U4");
  memcpy(p, &v, sizeof v);
}
}  // namespace detail

template <class T>
inline T ld_shared(const T* p, const emu::Site& at = emu::site()) {
  emu::load_shared(p, sizeof(T), at);
  return detail::get<T>(p);
}
template <class T>
inline void st_shared(T* p, T v, const emu::Site& at = emu::site()) {
  emu::store_shared(p, sizeof(T), at);
  detail::put(p, v);
}
template <class T>
inline T ld_global(const T* p, const emu::Site& at = emu::site()) {
#if KITSUNE_PHASES
  emu::load_ordinary(p, sizeof(T), at);
#else
  emu::load_constant(p, sizeof(T), at);
#endif
  return detail::get<T>(p);
}
template <class T>
inline T ld_l2(const T* p, const emu::Site& at = emu::site()) {
  emu::load_global(p, sizeof(T), at);
  return detail::get<T>(p);
}
template <class T>
inline void st_global(T* p, T v, const emu::Site& at = emu::site()) {
  emu::store_global(p, sizeof(T), at);
  detail::put(p, v);
}

inline void red_add(float* p, float v, const emu::Site& at = emu::site()) {
  emu::add_global(p, sizeof(float), at);
  *p += v;
}
template <int N>
inline void red_add(float* p, const float (&v)[N], const emu::Site& at = emu::site()) {
  static_assert(N == 2 || N == 4);
#if KITSUNE_SM == 900
  emu::add_global(p, sizeof(v), at);
  for (int i = 0; i < N; ++i) p[i] += v[i];
#else
  for (int i = 0; i < N; ++i) red_add(p + i, v[i], at);
#endif
}

template <class T>
inline void red_max(T* p, T v, const emu::Site& at = emu::site()) {
  emu::add_global(p, sizeof(T), at);
  *p = *p > v ? *p : v;
}
template <class T>
inline void red_min(T* p, T v, const emu::Site& at = emu::site()) {
  emu::add_global(p, sizeof(T), at);
  *p = *p < v ? *p : v;
}

// On the device the compiler forgets where the pointer comes from (kitsune/arch/memory.h).
template <class T>
inline T* opaque(T* p) {
  return p;
}
inline u32 opaque(u32 v) { return v; }

// --- global synchronisation
inline void red_add_release(u32* p, u32 v) { emu::flag_add(p, v); }
inline u32 atomic_add_acq_rel(u32* p, u32 v) { return emu::flag_fetch_add(p, v); }
inline u32 ld_acquire(const u32* p) { return emu::flag_load(p); }
inline void wait_ge(const u32* p, u32 v) { emu::flag_wait(p, v); }
inline void fence_gpu() { emu::fence_wide("fence.acq_rel.gpu"); }

// --- mbarriers
inline void mbar_init(Mbar& bar, u32 arrivals) { emu::barrier_init(bar, arrivals); }
inline void fence_mbar_init() { emu::barrier_init_fence(); }
inline void mbar_arrive(Mbar& bar) { emu::barrier_arrive(bar, 0); }
inline void mbar_wait(Mbar& bar, u32 parity) { emu::barrier_wait(bar, parity, false); }

// --- asynchronous copies of single threads
inline void cp_async_16(void* dst, const void* src, u32 src_bytes, const emu::Site& at = emu::site()) {
  emu::thread_copy(dst, src, src_bytes, at);
}
inline void cp_async_commit() { emu::thread_copy_commit(); }
template <int N>
inline void cp_async_wait() {
  emu::thread_copy_wait(N);
}
inline void cp_async_arrive(Mbar& bar) { emu::thread_copy_arrive(bar); }

#if KITSUNE_SM == 900
template <class T>
inline void st_cluster(T* p, u32 rank, T v, const emu::Site& at = emu::site()) {
  detail::put(emu::remote_store(p, rank, sizeof(T), at), v);
}
template <class T>
inline T ld_cluster(const T* p, u32 rank, const emu::Site& at = emu::site()) {
  return detail::get<T>(emu::remote_load(p, rank, sizeof(T), at));
}
template <class Vector>  // U2 or U4
inline void st_async(Vector* p, u32 rank, Vector v, Mbar& bar, const emu::Site& at = emu::site()) {
  emu::store_async(p, rank, &v, sizeof(Vector), bar, at);
}
inline void fence_cluster() { emu::fence_wide("fence.acq_rel.cluster"); }
inline void mbar_expect_tx(Mbar& bar, u32 bytes) { emu::barrier_arrive(bar, bytes); }
inline void fence_release_own_shared() { emu::fence_release_own_shared(); }
inline void mbar_arrive_remote_relaxed(Mbar& bar, u32 rank) { emu::barrier_arrive_remote(bar, rank); }
inline void mbar_arrive_remote(Mbar& bar, u32 rank) {
  fence_release_own_shared();
  mbar_arrive_remote_relaxed(bar, rank);
}
inline void mbar_wait_cluster(Mbar& bar, u32 parity) { emu::barrier_wait(bar, parity, true); }

inline void bulk_load(void* dst, const void* src, u32 bytes, Mbar& bar) { emu::copy_load(dst, src, bytes, bar, 0); }
inline void bulk_load_multicast(void* dst, const void* src, u32 bytes, Mbar& bar, u16 mask) {
  emu::copy_load(dst, src, bytes, bar, mask);
}
inline void bulk_push(void* dst, u32 rank, const void* src, u32 bytes, Mbar& bar) { emu::copy_push(dst, rank, src, bytes, bar); }
inline void bulk_store(void* dst, const void* src, u32 bytes) { emu::copy_store(dst, src, bytes, false); }
inline void bulk_reduce_add_f32(float* dst, const float* src, u32 bytes) { emu::copy_store(dst, src, bytes, true); }
inline void bulk_commit() { emu::bulk_group_commit(); }
template <int N>
inline void bulk_wait_read() {
  emu::bulk_group_wait(N, true);
}
template <int N>
inline void bulk_wait() {
  emu::bulk_group_wait(N, false);
}
inline void bulk_prefetch_l2(const void* src, u32 bytes) { emu::copy_prefetch(src, bytes); }
inline void tma_load_2d(const TensorMap& map, Mbar& bar, void* dst, i32 x, i32 y) { emu::tile_load(map, bar, dst, x, y, 0); }
inline void tma_load_2d_multicast(const TensorMap& map, Mbar& bar, void* dst, i32 x, i32 y, u16 mask) {
  emu::tile_load(map, bar, dst, x, y, mask);
}
inline void tma_store_2d(const TensorMap& map, const void* src, i32 x, i32 y) { emu::tile_store(map, src, x, y, false); }
inline void tma_reduce_add_2d(const TensorMap& map, const void* src, i32 x, i32 y) { emu::tile_store(map, src, x, y, true); }
inline void fence_proxy_async() { emu::proxy_fence(false); }
inline void fence_proxy_async_global() { emu::proxy_fence(true); }
inline void cluster_arrive() { emu::cluster_barrier_arrive(); }
inline void cluster_wait() { emu::cluster_barrier_wait(); }
inline void cluster_sync() {
  cluster_arrive();
  cluster_wait();
}
#endif

// --- matrices
namespace detail {
template <class T>
struct operand;
template <>
struct operand<Bf16> {
  static constexpr emu::Operand value = emu::Operand::bf16;
};
template <>
struct operand<F16> {
  static constexpr emu::Operand value = emu::Operand::f16;
};
template <>
struct operand<Tf32> {
  static constexpr emu::Operand value = emu::Operand::tf32;
};
}  // namespace detail

template <class T>
inline void mma(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  emu::warp_mma(detail::operand<T>::value, c, a, b);
}
inline void ldmatrix_x4(u32 (&r)[4], const void* row, const emu::Site& at = emu::site()) { emu::matrix_load(r, row, false, at); }
inline void ldmatrix_x4_trans(u32 (&r)[4], const void* row, const emu::Site& at = emu::site()) {
  emu::matrix_load(r, row, true, at);
}

#if KITSUNE_SM == 900
inline void stmatrix_x4(void* row, const u32 (&r)[4], const emu::Site& at = emu::site()) { emu::matrix_store(row, r, at); }

template <class T, int N>
inline void wgmma_rs(float (&d)[N / 2], const u32 (&a)[4], u64 desc_b, bool accumulate) {
  static_assert(N % 8 == 0 && N >= 8 && N <= 256, "N is a multiple of 8 up to 256");
  emu::wgmma(d, {N, detail::operand<T>::value, false, false, accumulate, a, 0, desc_b});
}
template <class T, int N, bool TransA, bool TransB>
inline void wgmma_ss(float (&d)[N / 2], u64 desc_a, u64 desc_b, bool accumulate) {
  static_assert(N % 8 == 0 && N >= 8 && N <= 256, "N is a multiple of 8 up to 256");
  static_assert(detail::operand<T>::value != emu::Operand::tf32 || !(TransA || TransB), "tf32 operands are K-major");
  emu::wgmma(d, {N, detail::operand<T>::value, TransA, TransB, accumulate, nullptr, desc_a, desc_b});
}
inline void wgmma_fence() { emu::wgmma_register_fence(); }
inline void wgmma_commit() { emu::wgmma_group_commit(); }
template <int N>
inline void wgmma_wait() {
  static_assert(N >= 0 && N <= 7, "wgmma.wait_group takes 0 to 7");
  emu::wgmma_group_wait(N);
}
template <int N>
inline void pin(float (&)[N]) {}
template <int N>
inline void pin(u32 (&)[N]) {}
// The device's bits, so that arithmetic on descriptors means the same (kitsune/arch/wgmma.h explains them).
inline u64 desc_mn128(const void* p, u32 lbo_bytes, u32 sbo_bytes) {
  return static_cast<u64>((emu::shared_offset(p) & 0x3ffff) >> 4) | static_cast<u64>(lbo_bytes >> 4) << 16 |
         static_cast<u64>(sbo_bytes >> 4) << 32 | u64{1} << 62;
}
inline u64 desc_k128(const void* p) { return desc_mn128(p, 16, 1024); }
#endif

// --- conversions
inline u32 bits(float v) { return emu::bit_cast<u32>(v); }
inline float from_bits(u32 v) { return emu::bit_cast<float>(v); }
inline u32 popc(u32 v) { return static_cast<u32>(__builtin_popcount(v)); }
inline u32 clz(u32 v) { return v ? static_cast<u32>(__builtin_clz(v)) : 32; }
struct Halves {
  u32 low, high;
};
inline Halves product_halves(u32 x, u32 y) {
  const unsigned long long p = static_cast<unsigned long long>(x) * y;
  return {static_cast<u32>(p), static_cast<u32>(p >> 32)};
}
inline u16 to_bf16(float v) { return emu::float_to_bf16(v); }
inline u16 to_f16(float v) { return emu::float_to_f16(v); }
inline float from_bf16(u16 v) { return emu::bf16_to_float(v); }
inline float from_f16(u16 v) { return emu::f16_to_float(v); }
inline u32 pack_bf16(float lo, float hi) { return to_bf16(lo) | static_cast<u32>(to_bf16(hi)) << 16; }
inline u32 pack_f16(float lo, float hi) { return to_f16(lo) | static_cast<u32>(to_f16(hi)) << 16; }
inline float bf16_lo(u32 v) { return from_bits(v << 16); }
inline float bf16_hi(u32 v) { return from_bits(v & 0xffff0000u); }
inline float f16_lo(u32 v) { return from_f16(static_cast<u16>(v)); }
inline float f16_hi(u32 v) { return from_f16(static_cast<u16>(v >> 16)); }
inline u32 to_tf32(float v) { return emu::float_to_tf32(v); }
inline float add_rounded(float x, float y) { return x + y; }
inline float mul_rounded(float x, float y) { return x * y; }
// max.NaN and min.NaN: a NaN wins, and +0 is greater than -0 (PTX ISA, max).
inline float max_nan(float x, float y) {
  if (x != x || y != y) return from_bits(0x7fffffffu);
  return x > y || (x == y && !__builtin_signbit(x)) ? x : y;
}
inline float min_nan(float x, float y) {
  if (x != x || y != y) return from_bits(0x7fffffffu);
  return x < y || (x == y && __builtin_signbit(x)) ? x : y;
}
inline float fast_exp2(float v) { return exp2f(v); }
inline float fast_rcp(float v) { return 1.0f / v; }
inline float fast_tanh(float v) { return from_bits(bits(tanhf(v)) & 0xfffff000u); }  // off by up to 2^-11, as on a device
inline float fast_rsqrt(float v) { return 1.0f / sqrtf(v); }

// --- warps, barriers
inline u32 shfl_xor(u32 v, u32 mask) { return emu::shuffle(v, lane_id() ^ mask); }
inline float shfl_xor(float v, u32 mask) { return from_bits(emu::shuffle(bits(v), lane_id() ^ mask)); }
inline u32 shfl(u32 v, u32 lane) { return emu::shuffle(v, lane); }
inline float shfl(float v, u32 lane) { return from_bits(emu::shuffle(bits(v), lane)); }
inline void syncwarp() { emu::warp_sync(); }
inline void bar_sync(u32 id, u32 threads) { emu::named_barrier(id, threads, true); }
inline void bar_arrive(u32 id, u32 threads) { emu::named_barrier(id, threads, false); }
inline void block_sync() { emu::block_barrier(); }

template <int N>
inline void reg_dec() {
  static_assert(N % 8 == 0 && N >= 24 && N <= 256, "setmaxnreg takes multiples of 8 from 24 to 256");
#if KITSUNE_SM == 900
  emu::set_registers(N, false);
#endif
}
template <int N>
inline void reg_inc() {
  static_assert(N % 8 == 0 && N >= 24 && N <= 256, "setmaxnreg takes multiples of 8 from 24 to 256");
#if KITSUNE_SM == 900
  emu::set_registers(N, true);
#endif
}

}  // namespace kitsune::arch
