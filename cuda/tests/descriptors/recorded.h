// Kernels that record the descriptors which the device library hands to wgmma. Included before anything else of it.
//
// -DPLANT_...: a descriptor as an error would make it; the test must find each.
#pragma once

#include "kitsune/arch/arch.h"

namespace kitsune {

using namespace arch;

// Static: an inline variable would keep the library from being unloaded.
static u64* records = nullptr;  // of one CTA; thread 0 of each warpgroup writes its own
static u32 counts[4];
constexpr u32 kRecords = 512;

inline void record(u64 descriptor) {
  u32 group = thread_id() / 128;
  if (thread_id() % 128 == 0) records[group * kRecords + counts[group]++] = descriptor;
}
// The shared memory's address, and the start of the records of every warpgroup.
inline void start_records(u64* to, const void* shared) {
  if (thread_id() % 128) return;
  u32 group = thread_id() / 128;
  records = to;
  counts[group] = 0;
  records[group * kRecords + counts[group]++] = emulator::shared_offset(shared);
}

inline u64 planted_k128(const void* p) {
#if defined(PLANT_STRIDE)
  return desc_mn128(p, 16, 512);
#elif defined(PLANT_NO_SWIZZLE)
  return desc_k128(p) & ~(u64{3} << 62);
#else
  return desc_k128(p);
#endif
}
inline u64 planted_mn128(const void* p, u32 leading, u32 stride) {
#if defined(PLANT_SWAPPED)
  return desc_mn128(p, stride, leading);
#elif defined(PLANT_STRIDE)
  return desc_mn128(p, leading, 512);
#elif defined(PLANT_NO_SWIZZLE)
  return desc_mn128(p, leading, stride) & ~(u64{3} << 62);
#else
  return desc_mn128(p, leading, stride);
#endif
}
// What a planted error makes is recorded and not computed: the emulator would refuse some of it.
template <class T, int N>
void recorded_rs(float (&d)[N / 2], const u32 (&a)[4], u64 b, bool accumulate) {
#if defined(PLANT_STEP)
  record(b - (b & 7) + (b & 7) / 2);  // 16 bytes a step of K
#else
  record(b);
#endif
#if !defined(PLANTED)
  arch::wgmma_rs<T, N>(d, a, b, accumulate);
#endif
}
template <class T, int N, bool TransA, bool TransB>
void recorded_ss(float (&d)[N / 2], u64 a, u64 b, bool accumulate) {
  record(a);
  record(b);
#if !defined(PLANTED)
  arch::wgmma_ss<T, N, TransA, TransB>(d, a, b, accumulate);
#endif
}

}  // namespace kitsune

#define desc_k128 planted_k128
#define desc_mn128 planted_mn128
#define wgmma_rs recorded_rs
#define wgmma_ss recorded_ss

#include "kitsune/kitsune.h"
