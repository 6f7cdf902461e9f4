// Tiles that keep within a batch: which of them the lanes of a CTA take, and which blocks of a long dimension their rows see.
//
// The lanes of a CTA take neighbouring tiles of one batch, because they share what the loader brings (the keys and values of a
// head). Loader and consumers find both from the same numbers, so they agree without a word.
#pragma once

#include "kitsune/phases.h"

namespace kitsune {

// The first of the tiles (numbered through all batches) that the lanes of a CTA take in round n; `Tiles` behind the last round.
//
// With `Together` = 0 CTAs take tiles as they come. Else the tiles at the end of a batch have more work than those at its start
// (a causal mask), so CTAs take the tiles of `Together` batches at a time, those with most work first, and every other round in the
// opposite order: then all have about as much.
template <int Lanes, u32 Tiles, u32 BatchTiles, u32 Together>
KITSUNE_DEVICE u32 first_tile(Share share, u32 n) {
  if constexpr (Together == 0) {
    const u32 unit = n * share.blocks + share.block;
    return unit < Tiles / Lanes ? unit * Lanes : Tiles;
  } else {
    constexpr u32 kBatches = Tiles / BatchTiles, kUnits = BatchTiles / Lanes;
    const u32 unit = n * share.blocks + (n % 2 == 0 ? share.block : share.blocks - 1 - share.block);
    if (unit >= Tiles / Lanes) return Tiles;
    const u32 before = unit / (Together * kUnits) * Together, k = unit % (Together * kUnits);
    const u32 batches = kBatches - before < Together ? kBatches - before : Together;
    return ((before + k % batches) * kUnits + kUnits - 1 - k / batches) * Lanes;
  }
}

// The rows of a batch that the lanes of a CTA have together, from `first` to `last`.
struct BatchRows {
  u32 batch;
  i64 first, last;

  // `rows`: of a batch; its last tiles may have none of them.
  template <int Lanes, u32 BatchTiles>
  static KITSUNE_DEVICE BatchRows of(u32 tile, i64 rows) {
    const i64 first = static_cast<i64>(tile % BatchTiles) * kTileRows, end = first + Lanes * kTileRows;
    return {tile / BatchTiles, first, (end < rows ? end : rows) - 1};
  }
};

// Which blocks of a dimension some rows see: those from `begin` to `end`. All rows see all of the blocks from `whole` to `rest`;
// the others are edges.
struct SeenBlocks {
  i32 begin, whole, rest, end;

  // Of rows from `first` to `last` of a batch and `count` blocks of `Step` elements. A row's index x on a stream axis is the row
  // over `Inner`, modulo `Extent`; it sees the elements from x + Low (where there is a bound, `Below`) to x + High (`Above`).
  template <i64 Inner, i64 Extent, int Step, bool Below, i64 Low, bool Above, i64 High>
  static KITSUNE_DEVICE SeenBlocks of(i64 first, i64 last, i32 count) {
    const Indices at = Indices::of<Inner, Extent>(first, last);
    return between<Step, Below, Above>(at.first, at.last, count, Low, High);
  }

  // The same of bounds that are `sign` times `number` further on. All blocks are edges where some of the rows would see none of the
  // `Size` elements (`Guard` kRows), or where no row of the axis would see some element (kElements), and where indices that are
  // added to the number may wrap.
  enum Guarded { kRows, kElements };
  template <i64 Inner, i64 Extent, int Step, bool Below, i64 Low, bool Above, i64 High, Guarded Guard, i64 Size>
  static KITSUNE_DEVICE SeenBlocks shifted(i64 first, i64 last, i32 count, int sign, i32 number) {
    constexpr i32 kMost = 1 << 30;
    const Indices at = Indices::of<Inner, Extent>(first, last);
    const i64 low = Low + sign * static_cast<i64>(number), high = High + sign * static_cast<i64>(number);
    bool hidden = number > kMost || number < -kMost;
    if constexpr (Guard == kRows) hidden |= (Above && at.first + high < 0) || (Below && at.last + low > Size - 1);
    if constexpr (Guard == kElements) hidden |= (Below && low > 0) || (Above && Size - 1 - high > Extent - 1);
    if (hidden) return {0, count, count, count};
    return between<Step, Below, Above>(at.first, at.last, count, low, high);
  }

  KITSUNE_DEVICE i32 all_count() const { return end - begin; }
  KITSUNE_DEVICE i32 all_block(i32 k) const { return begin + k; }
  KITSUNE_DEVICE i32 whole_count() const { return rest - whole; }
  KITSUNE_DEVICE i32 whole_block(i32 k) const { return whole + k; }
  KITSUNE_DEVICE i32 edges_count() const { return all_count() - whole_count(); }
  KITSUNE_DEVICE i32 edges_block(i32 k) const { return begin + k < whole ? begin + k : begin + k + whole_count(); }

 private:
  // The least and the largest index of the rows on the axis.
  struct Indices {
    i64 first, last;

    template <i64 Inner, i64 Extent>
    static KITSUNE_DEVICE Indices of(i64 first, i64 last) {
      const i64 a = first / Inner, b = last / Inner;
      const bool wraps = b / Extent != a / Extent;
      return {wraps ? 0 : a % Extent, wraps ? Extent - 1 : b % Extent};
    }
  };

  template <int Step, bool Below, bool Above>
  static KITSUNE_DEVICE SeenBlocks between(i64 x, i64 y, i32 count, i64 low, i64 high) {
    SeenBlocks seen{0, 0, count, count};
    if constexpr (Below) {
      seen.begin = clamp(floor_over<Step>(x + low), 0, count);
      seen.whole = clamp(floor_over<Step>(y + low + Step - 1), seen.begin, count);
    }
    if constexpr (Above) {
      seen.end = clamp(floor_over<Step>(y + high) + 1, seen.begin, count);
      seen.rest = clamp(floor_over<Step>(x + high + 1), 0, seen.end);
    }
    if (seen.whole >= seen.rest) seen.whole = seen.rest = seen.end;
    return seen;
  }

  template <int Step>
  static KITSUNE_DEVICE i64 floor_over(i64 x) {
    return x >= 0 ? x / Step : -((-x + Step - 1) / Step);
  }
  static KITSUNE_DEVICE i32 clamp(i64 x, i32 least, i32 most) { return static_cast<i32>(x < least ? least : x > most ? most : x); }
};

}  // namespace kitsune
