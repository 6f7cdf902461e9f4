// Rearranging the columns of a tile (reshapes of rows, transposes, unaligned slices, paddings): a warp writes its 16 rows to shared
// memory and reads them back in another order. Only the warp's own rows take part, so a warp barrier is enough.
#pragma once

#include "kitsune/stage/sink.h"

namespace kitsune {

// 16 rows of `pitch` words. The pitch is odd, so that the rows of a quad's neighbours lie in different banks.
struct Scratch {
  u32* base;  // of this warp
  int pitch;

  static KITSUNE_DEVICE Scratch at(u8* shared, int pitch) {
    return {reinterpret_cast<u32*>(shared) + thread_id() % kGroupThreads / 32 * 16 * pitch, pitch};
  }
  KITSUNE_DEVICE u32* word(const Lane& lane, int h, int column) const { return base + (lane.row % 16 + 8 * h) * pitch + column; }
  KITSUNE_DEVICE void put(const Lane& lane, int h, int column, u32 v) const { st_shared(word(lane, h, column), v); }
  KITSUNE_DEVICE u32 get(const Lane& lane, int h, int column) const { return ld_shared(word(lane, h, column)); }
};

// The fold of Count columns of a row, Step apart from `column` on.
template <class How, class V, int Count, int Step>
KITSUNE_DEVICE V fold_scratch(const Scratch& rows, const Lane& lane, int h, int column) {
  V acc = How::template identity<V>();
  KITSUNE_UNROLL
  for (int i = 0; i < Count; ++i) acc = How::fold(acc, from_word<V>(rows.get(lane, h, column + i * Step)));
  return acc;
}

// The sum of the columns of a row in list number `list`: from `columns[first[list]]` up to where the next list begins.
template <class V>
KITSUNE_DEVICE V sum_listed(const Scratch& rows, const Lane& lane, int h, const float* first, const float* columns, int list) {
  const u32 end = bits(ld_global(first + list + 1));
  V sum = V(0);
  KITSUNE_NO_UNROLL
  for (u32 i = bits(ld_global(first + list)); i < end; ++i)
    sum = Sum::fold(sum, from_word<V>(rows.get(lane, h, static_cast<int>(bits(ld_global(columns + i))))));
  return sum;
}

}  // namespace kitsune
