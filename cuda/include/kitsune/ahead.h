// Weights of the next kernel, asked for into the L2 when this one is about to end.
//
// Comes in: an array that nobody writes meanwhile, and which pieces of it to ask for. Goes out: nothing; the pieces are on their
// way while this kernel adds up its last sums, while the next one is launched, and while that one begins to read. Pieces are spread
// evenly over the array, because the next kernel then finds some of what it reads in the L2 all the way, and so reads from both at
// once; had it a whole beginning there, it would read that at the speed of the L2 and all the rest at the speed of memory.
// Invariant: no byte outside of the array is asked for, wherever it starts.
#pragma once

#include "kitsune/phases.h"

namespace kitsune {

constexpr u32 kLineBytes = 128;  // of the L2

// `Pieces` pieces of `Piece` bytes, of the `Bytes` bytes from byte `First` of the array on. By every consumer warpgroup of every
// CTA, which have a `share` of `shares` of them each.
template <i64 First, i64 Bytes, u32 Pieces, u32 Piece>
KITSUNE_DEVICE void fetch_ahead(const void* array, u32 share, u32 shares) {
  constexpr i64 kEvery = Bytes / Pieces / 16 * 16;  // bytes from one piece to the next
  static_assert(Piece % 16 == 0 && kEvery >= Piece && kEvery * (Pieces - 1) + Piece <= Bytes);
  const u8* const from = static_cast<const u8*>(array) + First;
  // Bulk copies take addresses and sizes that are multiples of 16; an array may start anywhere, because no copy is made of it.
  const u32 skipped = static_cast<u32>(-reinterpret_cast<u64>(from) % 16);
  const u32 thread = thread_id() % kGroupThreads;
  KITSUNE_NO_UNROLL
  for (u32 k = share; k < Pieces; k += shares) {
    const i64 at = k * kEvery + skipped;
    const u32 bytes = at + Piece <= Bytes ? Piece : static_cast<u32>(Bytes - at) / 16 * 16;
#if KITSUNE_SM >= 900
    if (thread == 0 && bytes > 0) bulk_prefetch_l2(from + at, bytes);
#else
    for (u32 line = thread * kLineBytes; line < bytes; line += kGroupThreads * kLineBytes) prefetch_l2(from + at + line);
#endif
  }
}

}  // namespace kitsune
