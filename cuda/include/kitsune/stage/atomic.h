// Sums, maxima and minima in the rows of a table of any size by indices in any order: the L2 folds, by atomic operations.
//
// Comes in: tiles, and for every row the index of the table's row that it is folded into; rows without one (beyond the stream, or
// an index out of range) are left out. Goes out: the result, which holds the fold of nothing when the kernel starts; of 16-bit
// numbers in floats. Invariants: no index leads outside of the table. Which of two rows comes first is not known: the last bits of
// a sum may differ from run to run, a maximum or a minimum has the same bits in all. There are no partial results.
//
// A thread adds its part of a row itself, four floats at once. Maxima and minima are of one number at a time, so a warp puts its 16
// rows of a block of columns to its scratch rows, as for sorted indices (stage/segment.h), and a thread goes down them with one
// column: the numbers that a warp sends to the L2 together are neighbours, and rows with the same index one after the other are
// folded on the way.
#pragma once

#include "kitsune/stage/scratch.h"

namespace kitsune {

// Where the sums of a thread's row lie, null where it has none.
template <class Index>
KITSUNE_DEVICE float* summed_row(void* table, Index index, bool valid, i64 rows, i64 columns) {
  const i64 i = static_cast<i64>(index);
  return valid && i >= 0 && i < rows ? static_cast<float*>(table) + i * columns : nullptr;
}

// C columns of a row from `column` on, `Bytes` at a time; the row's columns end between two of these.
template <int C, int Bytes>
KITSUNE_DEVICE void add_to_row(float* row, int column, int columns, const float (&in)[C]) {
  constexpr int kEach = Bytes / 4;
  KITSUNE_UNROLL
  for (int i = 0; i < C / kEach; ++i) {
    if (row == nullptr || column + i * kEach >= columns) continue;
    if constexpr (kEach == 1) {
      red_add(row + column + i, in[i]);
    } else {
      float part[kEach];
      KITSUNE_UNROLL
      for (int k = 0; k < kEach; ++k) part[k] = in[i * kEach + k];
      red_add(row + column + i * kEach, part);
    }
  }
}

// The number at `p` becomes its fold with `v`, where `on`. Floats of one sign are ordered as the integers of their bits, those
// below zero the other way round; a float with its sign bit is a negative i32, and a u32 above all others. So a maximum is one of
// integers, or a minimum of unsigned ones, by the sign of `v` alone, and +0 is larger than -0. A NaN becomes the largest of these
// integers, with the sign that makes it win.
template <class V>
KITSUNE_DEVICE void red_fold(Max, V* p, V v, bool on) {
  if (on) red_max(p, v);
}
template <class V>
KITSUNE_DEVICE void red_fold(Min, V* p, V v, bool on) {
  if (on) red_min(p, v);
}
KITSUNE_DEVICE void red_fold(Max, float* p, float v, bool on) {
  const i32 b = is_nan(v) ? 0x7fffffff : static_cast<i32>(bits(v));
  if (on && b >= 0) red_max(reinterpret_cast<i32*>(p), b);
  if (on && b < 0) red_min(reinterpret_cast<u32*>(p), static_cast<u32>(b));
}
KITSUNE_DEVICE void red_fold(Min, float* p, float v, bool on) {
  const i32 b = is_nan(v) ? -1 : static_cast<i32>(bits(v));
  if (on && b >= 0) red_min(reinterpret_cast<i32*>(p), b);
  if (on && b < 0) red_max(reinterpret_cast<u32*>(p), static_cast<u32>(b));
}

// The rows of a tile in a result of `columns` numbers V to a row; tiles have width W.
template <class How, class V, int W>
struct FoldedRows {
  static constexpr int kColumns = kBlock<W>, kGroups = 32 / kColumns, kRows = 16 / kGroups;  // of a group of threads
  V* out;
  int columns;
  i32 mine[2];  // the index of each of the thread's two rows, -1 for none
  i32 id;       // that of row `lane_id() % 16` of the warp

  template <class Index>
  static KITSUNE_DEVICE FoldedRows of(void* out, int columns, const Index (&index)[2], const bool (&valid)[2], i64 rows) {
    FoldedRows found{static_cast<V*>(out), columns, {-1, -1}, -1};
    KITSUNE_UNROLL
    for (int h = 0; h < 2; ++h) {
      const i64 i = static_cast<i64>(index[h]);
      if (valid[h] && i >= 0 && i < rows) found.mine[h] = static_cast<i32>(i);
    }
    const i32 upper = of_lane(found.mine[0], lane_id() % 8 * 4), lower = of_lane(found.mine[1], lane_id() % 8 * 4);
    found.id = lane_id() % 16 < 8 ? upper : lower;
    return found;
  }

  // Block b of a tile, whose elements the warp has put to its scratch rows.
  KITSUNE_DEVICE void block(const Scratch& rows, int b) const {
    syncwarp();
    const int own = static_cast<int>(lane_id()) % kColumns, first = static_cast<int>(lane_id()) / kColumns * kRows;
    const int column = b * kColumns + own;
    i32 open = -1;
    V acc = How::template identity<V>();
    KITSUNE_UNROLL
    for (int k = 0; k < kRows; ++k) {
      const i32 next = of_lane(id, static_cast<u32>(first + k));
      const V x = from_word<V>(ld_shared(rows.base + (first + k) * rows.pitch + own));
      close(open, column, acc, next != open);
      acc = next != open ? x : How::fold(acc, x);
      open = next;
    }
    close(open, column, acc, true);
    syncwarp();
  }

  // A tile of one number to a row.
  KITSUNE_DEVICE void row(const Lane& lane, int h, V x) const { red_fold(How(), out + mine[h], x, mine[h] >= 0 && lane.q == 0); }

 private:
  static KITSUNE_DEVICE i32 of_lane(i32 v, u32 lane) { return static_cast<i32>(shfl(static_cast<u32>(v), lane)); }
  KITSUNE_DEVICE void close(i32 row, int column, V acc, bool ends) const {
    red_fold(How(), out + static_cast<i64>(row) * columns + column, acc, ends && row >= 0 && column < columns);
  }
};

}  // namespace kitsune
