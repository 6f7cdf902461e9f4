// Register images in shared memory: a tile that does not fit the registers, kept by the very threads that made it.
//
// Vector i of thread t lies at 16 (128 i + t): no thread reads what another wrote, so no barrier is needed, and a warp's accesses
// are conflict-free. The same image is what queues carry.
#pragma once

#include "kitsune/layout.h"

namespace kitsune {

// Vectors of a tile's image: 16-bit values of width W take W / 4 words a thread, 32-bit values W / 2.
template <int W, int Bits>
constexpr int kImageVectors = (W * Bits / 64 + 3) / 4;

struct Image {
  U4* base;  // this thread's vector 0

  static KITSUNE_DEVICE Image at(u8* shared) { return {reinterpret_cast<U4*>(shared) + thread_id() % kGroupThreads}; }
  KITSUNE_DEVICE U4 get(int i) const { return ld_shared(base + i * kGroupThreads); }
  KITSUNE_DEVICE void put(int i, U4 v) const { st_shared(base + i * kGroupThreads, v); }
};

// Words [4 i, 4 i + 4) of a tile as an image's vector, zero beyond its end.
template <int Words>
KITSUNE_DEVICE U4 image_vector(const u32 (&words)[Words], int i) {
  U4 v;
  v.x = words[4 * i];
  v.y = 4 * i + 1 < Words ? words[4 * i + 1] : 0;
  v.z = 4 * i + 2 < Words ? words[4 * i + 2] : 0;
  v.w = 4 * i + 3 < Words ? words[4 * i + 3] : 0;
  return v;
}

template <int Words>
KITSUNE_DEVICE void from_image_vector(u32 (&words)[Words], int i, U4 v) {
  words[4 * i] = v.x;
  if (4 * i + 1 < Words) words[4 * i + 1] = v.y;
  if (4 * i + 2 < Words) words[4 * i + 2] = v.z;
  if (4 * i + 3 < Words) words[4 * i + 3] = v.w;
}

}  // namespace kitsune
