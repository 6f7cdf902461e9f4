// Reductions over the stream: accumulated in registers by every worker, combined once at the end in a fixed order.
//
// Every warp writes one row of partial results; the warpgroup that finishes last adds the rows up, always in the same order, so
// equal inputs give equal bits whichever warpgroup that is. The counter that tells who is last is zero when the kernel starts.
#pragma once

#include "kitsune/global.h"
#include "kitsune/stage/reduce.h"

namespace kitsune {

// Where a kernel's sinks meet. `arrived` and `flag` are one word each, in global and in shared memory.
struct Finish {
  u32* arrived;
  u32* flag;    // of this warpgroup
  u32 workers;  // warpgroups that have partial results
  u32 worker;   // this one
  u32 barrier;  // its named barrier

  // This warp's row of a sink's partial results.
  KITSUNE_DEVICE u32 row() const { return worker * 4 + thread_id() % kGroupThreads / 32; }

  // After all partial results of this warpgroup are stored: true in the last one.
  KITSUNE_DEVICE bool last() const {
    bar_sync(barrier, kGroupThreads);
    if (thread_id() % kGroupThreads == 0) st_shared(flag, atomic_add_acq_rel(arrived, 1));
    bar_sync(barrier, kGroupThreads);
    return ld_shared(flag) == workers - 1;
  }
};

// The words of a value in a row of partial results.
KITSUNE_DEVICE u32 to_word(float v) { return bits(v); }
KITSUNE_DEVICE u32 to_word(i32 v) { return static_cast<u32>(v); }
KITSUNE_DEVICE u32 to_word(u32 v) { return v; }
KITSUNE_DEVICE u32 to_word(bool v) { return v ? 1 : 0; }
template <class V>
KITSUNE_DEVICE V from_word(u32 w) {
  return static_cast<V>(w);
}
template <>
KITSUNE_DEVICE float from_word<float>(u32 w) {
  return from_bits(w);
}
template <>
KITSUNE_DEVICE bool from_word<bool>(u32 w) {
  return w != 0;
}

// One number. `acc`: this thread's part; `Columns`: whether the threads of a quad have different parts, or copies of one.
template <class How, bool Columns, class V>
KITSUNE_DEVICE void store_partial(u32* partial, const Finish& at, V acc) {
  acc = fold_lanes<How, 4, 32>(acc);
  if constexpr (Columns) acc = fold_lanes<How, 1, 4>(acc);
  if (lane_id() == 0) st_global(partial + at.row(), to_word(acc));
}

// A vector of W columns: acc in the order of the thread's columns, block by block.
template <class How, int W, class V>
KITSUNE_DEVICE void store_partial(u32* partial, const Finish& at, const Lane& lane, const V (&acc)[W / 4]) {
  KITSUNE_UNROLL
  for (int i = 0; i < W / 4; ++i) {
    V v = fold_lanes<How, 4, 32>(acc[i]);
    int column = first_column<W>(lane, i / kOwned<W>) + i % kOwned<W>;
    if (lane_id() < 4) st_global(partial + at.row() * W + column, to_word(v));
  }
}

// A value's 8 columns of a thread, folded over the 16 rows of its warp. The eight threads with the same columns halve them three
// times, so that each ends with one: a thread of row group g with column g. A sum of W columns then takes W / 32 registers of a
// thread, and not W / 4.
template <class How, class V>
KITSUNE_DEVICE V fold_rows(const V (&own)[8]) {
  V half[4], pair[2];
  const u32 group = lane_id() / 4;
  KITSUNE_UNROLL
  for (int i = 0; i < 4; ++i) half[i] = How::fold(group & 4 ? own[4 + i] : own[i], exchange(group & 4 ? own[i] : own[4 + i], 16));
  KITSUNE_UNROLL
  for (int i = 0; i < 2; ++i)
    pair[i] = How::fold(group & 2 ? half[2 + i] : half[i], exchange(group & 2 ? half[i] : half[2 + i], 8));
  return How::fold(group & 1 ? pair[1] : pair[0], exchange(group & 1 ? pair[0] : pair[1], 4));
}

// A vector of W columns that `fold_rows` has folded block by block.
template <class How, int W, class V>
KITSUNE_DEVICE void store_partial(u32* partial, const Finish& at, const Lane& lane, const V (&acc)[W / 32]) {
  KITSUNE_UNROLL
  for (int b = 0; b < W / 32; ++b) st_global(partial + at.row() * W + first_column<W>(lane, b) + lane_id() / 4, to_word(acc[b]));
}

// The last warpgroup's work on a sink of `columns` numbers in rows of `width`. Each row is a trip to the L2, so where there are few
// columns (a loss), a warp takes one, and each of its lanes every 32nd row; else thread t takes columns t, t + 128, ...
template <class How, class V, class E>
KITSUNE_DEVICE void combine(void* out, const u32* partial, const Finish& at, int columns, int width) {
  constexpr int kFew = 16;
  using Bits = typename Element<E>::Bits;
  const int thread = thread_id() % kGroupThreads;
  const u32 rows = at.workers * 4;
  auto folded = [&](int c, u32 first, u32 step) {
    V acc = How::template identity<V>();
    for (u32 p = first; p < rows; p += step) acc = How::fold(acc, from_word<V>(ld_l2(partial + p * width + c)));
    return acc;
  };
  auto store = [&](int c, V acc) { st_global(static_cast<Bits*>(out) + c, Element<E>::store(typename Element<E>::Value(acc))); };
  if (columns <= kFew) {
    for (int c = thread / 32; c < columns; c += kGroupThreads / 32) {
      V acc = fold_lanes<How, 1, 32>(folded(c, thread % 32, 32));
      if (lane_id() == 0) store(c, acc);
    }
  } else {
    for (int c = thread; c < columns; c += kGroupThreads) store(c, folded(c, 0, 1));
  }
}

}  // namespace kitsune
