// Reductions into the rows of a small table by indices in any order: every lane has a table of its own in shared memory.
//
// Comes in: tiles, and for every row the index of the table's row that it is folded into; rows without one (beyond the stream, or
// an index out of range) are left out. Goes out: the whole result, rows that nothing is folded into included. Invariants: no index
// leads outside of the table; a number of the table belongs to one thread, which folds the rows of a tile in their order, so equal
// inputs on as many lanes give equal bits. There are no atomic operations.
//
// A warp puts its 16 rows of a block of columns to its scratch rows, as for sorted indices (stage/segment.h). Then a thread goes
// down all 64 rows of the lane with one column, and folds those whose index has its group's remainder: 128 threads are 4 groups of
// 32 columns, or 16 groups of 8. At the end the tables of `kFanIn` lanes are folded by the one of them that comes last, and what
// they make by the lane that comes last of all.
#pragma once

#include "kitsune/stage/scratch.h"
#include "kitsune/stage/sink.h"

namespace kitsune {

// The index of the thread's two rows, -1 for none.
struct Members {
  i32 id[2];
  bool inside[2];

  template <class Index>
  static KITSUNE_DEVICE Members of(const Index (&index)[2], const bool (&valid)[2], i64 rows) {
    Members found;
    KITSUNE_UNROLL
    for (int h = 0; h < 2; ++h) {
      found.inside[h] = valid[h] && static_cast<i64>(index[h]) >= 0 && static_cast<i64>(index[h]) < rows;
      found.id[h] = found.inside[h] ? static_cast<i32>(index[h]) : -1;
    }
    return found;
  }
};

// A result of `Rows` rows of `columns` elements E, in tiles of width W, folded in V.
template <class How, class V, class E, int W, int Rows>
struct Table {
  static constexpr int kColumns = kBlock<W>;  // of a block
  static constexpr int kGroups = kGroupThreads / kColumns;
  static constexpr u32 kFanIn = 16;
  static constexpr u32 kWords = Rows * W, kQuads = kWords / 4;
  static_assert(W % 4 == 0, "a thread folds four words of tables at once");
  static constexpr u32 kBytes = (kWords + kTileRows) * 4;
  u32* words;  // of this lane, in shared memory: the table, then an index for each row of a tile
  void* out;   // the result
  int columns;
  u32* partial;  // a table for every lane of the grid
  u32 workers, worker, barrier;

  static KITSUNE_DEVICE u32 thread() { return thread_id() % kGroupThreads; }
  KITSUNE_DEVICE u32* id(u32 row) const { return words + kWords + row; }
  KITSUNE_DEVICE u32* of_lane(u32 lane) const { return partial + static_cast<i64>(lane) * kWords; }

  // In front of the tiles.
  KITSUNE_DEVICE void clear() const {
    for (u32 i = thread(); i < kWords; i += kGroupThreads) st_shared(words + i, to_word(How::template identity<V>()));
    bar_sync(barrier, kGroupThreads);
  }

  // In front of the blocks of a tile. The lane has met since it read the indices of the tile before.
  KITSUNE_DEVICE void begin(const Members& members) const {
    if (lane_id() % 4 == 0) {
      const u32 row = thread() / 32 * 16 + lane_id() / 4;
      st_shared(id(row), static_cast<u32>(members.id[0]));
      st_shared(id(row + 8), static_cast<u32>(members.id[1]));
    }
  }

  // Block b of a tile, whose elements the warps have put to their scratch rows.
  KITSUNE_DEVICE void block(const Scratch& rows, const Members&, int b) const {
    bar_sync(barrier, kGroupThreads);
    const int column = static_cast<int>(thread()) % kColumns, group = static_cast<int>(thread()) / kColumns;
    const u32* const first = rows.base - thread() / 32 * 16 * static_cast<u32>(rows.pitch) + column;
    u32* const mine = words + b * kColumns + column;
    KITSUNE_NO_UNROLL
    for (int r = 0; r < kTileRows; ++r) {
      const i32 row = static_cast<i32>(ld_shared(id(r)));
      if (row < 0 || row % kGroups != group) continue;
      const V x = from_word<V>(ld_shared(first + r * rows.pitch));
      st_shared(mine + row * W, to_word(How::fold(from_word<V>(ld_shared(mine + row * W)), x)));
    }
    bar_sync(barrier, kGroupThreads);
  }

  // After the blocks.
  KITSUNE_DEVICE void join() const {}

  // After the last tile: the lane's table, and where it is the last of its `kFanIn` lanes, the fold of theirs in the place of the
  // first one's. `arrived`: counters of these groups of lanes, each with a line of its own.
  KITSUNE_DEVICE void store_partial(u8* arrived, u32* flag) const {
    U4* const to = reinterpret_cast<U4*>(of_lane(worker));
    for (u32 q = thread(); q < kQuads; q += kGroupThreads) st_global(to + q, ld_shared(reinterpret_cast<const U4*>(words) + q));
    const u32 first = worker / kFanIn * kFanIn, left = workers - first;
    const u32 lanes = left < kFanIn ? left : kFanIn;
    const Finish group{reinterpret_cast<u32*>(arrived + worker / kFanIn * 128), flag, lanes, worker, barrier};
    if (!group.last()) return;
    KITSUNE_NO_UNROLL
    for (u32 q = thread(); q < kQuads; q += kGroupThreads) {
      V acc[4];
      fold(acc, q, first, lanes, 1);
      st_global(reinterpret_cast<U4*>(of_lane(first)) + q, {to_word(acc[0]), to_word(acc[1]), to_word(acc[2]), to_word(acc[3])});
    }
  }

  // The last lane's work, once those of all groups are there.
  KITSUNE_DEVICE void combine() const {
    using Bits = typename Element<E>::Bits;
    KITSUNE_NO_UNROLL
    for (u32 q = thread(); q < kQuads; q += kGroupThreads) {
      const int column = static_cast<int>(q * 4 % W);
      if (column >= columns) continue;
      V acc[4];
      fold(acc, q, 0, (workers + kFanIn - 1) / kFanIn, kFanIn);
      Bits* const row = static_cast<Bits*>(out) + static_cast<i64>(q * 4 / W) * columns;
      KITSUNE_UNROLL
      for (int i = 0; i < 4; ++i)
        if (column + i < columns) st_global(row + column + i, Element<E>::store(typename Element<E>::Value(acc[i])));
    }
  }

 private:
  // Four words, from word 4 q on, of `count` tables, those of lanes `first`, `first + step`, ...
  KITSUNE_DEVICE void fold(V (&acc)[4], u32 q, u32 first, u32 count, u32 step) const {
    KITSUNE_UNROLL
    for (int i = 0; i < 4; ++i) acc[i] = How::template identity<V>();
    KITSUNE_NO_UNROLL
    for (u32 k = 0; k < count; k += 4) {
      U4 v[4];  // fetched together
      KITSUNE_UNROLL
      for (u32 j = 0; j < 4; ++j)
        v[j] = ld_l2(reinterpret_cast<const U4*>(of_lane(first + (k + j < count ? k + j : k) * step)) + q);
      KITSUNE_UNROLL
      for (u32 j = 0; j < 4; ++j) {
        if (k + j >= count) continue;
        acc[0] = How::fold(acc[0], from_word<V>(v[j].x)), acc[1] = How::fold(acc[1], from_word<V>(v[j].y));
        acc[2] = How::fold(acc[2], from_word<V>(v[j].z)), acc[3] = How::fold(acc[3], from_word<V>(v[j].w));
      }
    }
  }
};

}  // namespace kitsune
