// Where the elements of a tile lie: the fragment layout that every stage, queue and epilogue shares.
//
// A tile is 64 rows by W columns and belongs to one warpgroup; warp w owns rows 16 w .. 16 w + 15. Thread (g, q) of a warp (lane
// 4 g + q) holds rows g and g + 8, the layout of wgmma's and mma.sync's accumulators, which is also that of their A operand for
// 16-bit types: a chain of matmuls never leaves the registers.
//
// The tensor core's column 8 j + 2 q + e of a block of B columns (B is 8, 16 or 32) is the tile's *logical* column
// (B / 4) q + 2 j + e. A thread so owns B / 4 neighbouring columns of each of its rows: global loads and stores are up to 16 bytes
// wide and need no shuffle. The weights are packed with the matching permutation of their rows and columns (targets/cuda/pack.py).
//
// Element k of a thread: pair i = k / 2 of row g + 8 (i & 1), 8-column group i / 2, and e = k & 1. A float tile is float[W / 2] in
// that order; a tile of 16-bit values is u32[W / 4], one pair to a register; a row scalar is float[2].
#pragma once

#include "kitsune/arch/arch.h"

namespace kitsune {

using namespace arch;

constexpr int kTileRows = 64;
constexpr int kGroupThreads = 128;  // a warpgroup
constexpr int kOwnRows = 256;       // of a tile whose threads have two rows each, a warpgroup apart

// Columns of a block of a tile of padded width W.
template <int W>
constexpr int kBlock = W < 32 ? W : 32;

// Columns that one thread owns in a block.
template <int W>
constexpr int kOwned = kBlock<W> / 4;

// The position of a thread in its tile.
struct Lane {
  u32 thread;  // within the warpgroup
  u32 q;       // within the quad that shares two rows
  u32 row;     // the first of its two rows; the other is row + 8

  static KITSUNE_DEVICE Lane mine() {
    u32 t = thread_id() % kGroupThreads, lane = t % 32;
    return {t, lane % 4, t / 32 * 16 + lane / 4};
  }
  // Of a tile of 32 rows: each thread has the first of its two rows, the other stays empty.
  static KITSUNE_DEVICE Lane with_one_row() {
    u32 t = thread_id() % kGroupThreads, lane = t % 32;
    return {t, lane % 4, t / 32 * 8 + lane / 4};
  }
  // Where there are no columns: a tile of kOwnRows rows, of which the thread shares none.
  static KITSUNE_DEVICE Lane with_own_rows() {
    u32 t = thread_id() % kGroupThreads;
    return {t, 0, t};
  }
};

// First logical column that a thread owns in block b of a tile of width W.
template <int W>
KITSUNE_DEVICE int first_column(const Lane& lane, int b) {
  return b * kBlock<W> + static_cast<int>(lane.q) * kOwned<W>;
}

}  // namespace kitsune
