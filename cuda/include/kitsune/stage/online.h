// Sums of a segment softmax by sorted indices, in the pass that finds the largest score of each segment.
//
// Comes in: as for stage/segment.h, rows that were scaled by e^-top, and for each row its tops: the largest scores of its run among
// the 16 rows of its warp. Goes out: the sums of each segment, scaled by e^-(its largest score). Invariants: as there. What is kept
// of an open segment is a pair, its largest score so far and the sum that is scaled by it; two pairs add up at the larger score.
//
// Within a run nothing is scaled, because all of its rows have one top. So the pairs meet where runs are joined only: between
// warps, between tiles, and between lanes.
#pragma once

#include "kitsune/stage/segment.h"

namespace kitsune {

// What a sum that is scaled by e^-at is multiplied by to be scaled by e^-to. 0 stands for scores that are not finite, as in the
// factors of the rows.
KITSUNE_DEVICE float rescaling(float at, float to) {
  if (at == to || at == lowest<float>() || is_nan(to)) return 1.0f;
  return expf((finite(at) ? at : 0.0f) - (finite(to) ? to : 0.0f));
}

// Adds the pair (x, top) to (sum, at).
KITSUNE_DEVICE void add_scaled(float& sum, float& at, float x, float top) {
  const float to = maximum(at, top);
  sum = sum * rescaling(at, to) + x * rescaling(top, to);
  at = to;
}

// The largest scores, T for each row, of the runs of a warp's 16 rows.
template <int T>
struct RunTops {
  static constexpr u32 kEdges = kGroupThreads / 32 * 2;
  static constexpr u32 kPitch = T | 1;
  static constexpr u32 kBytes = (2 * kEdges * T + kTileRows * kPitch) * 4;
  u32* words;    // of this lane, in shared memory: two buffers of kEdges runs, then the rows of a tile
  u32 turn = 1;  // of the buffers: 0 in a lane's first tile, as in `Segments`

  KITSUNE_DEVICE u32* edge(u32 of, u32 k) const { return words + (of * kEdges + k) * T; }
  // Row r of this warp.
  KITSUNE_DEVICE u32* row(u32 r) const { return words + 2 * kEdges * T + (thread_id() % kGroupThreads / 32 * 16 + r) * kPitch; }

  // The warp's scratch rows hold the scores; they get the tops of their runs. Scores of rows without a segment do not count.
  KITSUNE_DEVICE void find(const Scratch& rows, const Runs& runs) {
    turn ^= 1;
    const u32 two = (runs.inside[0] ? 1u : 0) | (runs.inside[1] ? 1u << 8 : 0);
    const u32 inside = fold_lanes<Or, 4, 32>(two << lane_id() / 4);
    const u32 begun = inside & (0 - inside);  // the bit of the first row that has a segment
    const u32 end = runs.ends & (0 - begun);
    const u32 first = popc((end & (0 - end)) - 1);  // the last row of the first run
    const u32 warp = thread_id() % kGroupThreads / 32;
    KITSUNE_NO_UNROLL
    for (u32 c = lane_id(); c < T; c += 32) {
      float top[16], most = lowest<float>();
      KITSUNE_UNROLL
      for (u32 r = 0; r < 16; ++r) {
        const float score = from_word<float>(ld_shared(rows.base + r * rows.pitch + c));
        top[r] = most = inside >> r & 1 ? maximum(most, score) : most;
        if (runs.ends >> r & 1) most = lowest<float>();
      }
      KITSUNE_UNROLL
      for (u32 r = 16; r-- > 0;) {
        if (r < 15 && !(runs.ends >> r & 1)) top[r] = top[r + 1];
        st_shared(rows.base + r * rows.pitch + c, to_word(top[r]));
        st_shared(row(r) + c, to_word(top[r]));
      }
      if (runs.first >= 0) st_shared(edge(turn, 2 * warp) + c, ld_shared(row(first) + c));
      if (runs.last >= 0) st_shared(edge(turn, 2 * warp + 1) + c, to_word(top[15]));
    }
    syncwarp();
  }
};

// A result of rows of elements E, in tiles of width W; `Each` columns have one of the T tops of a row. `Finite`: 0 stands for a
// largest score that is not finite; else its sums are NaN.
template <class E, int W, int T, int Each, bool Finite>
struct OnlineSegments : Segments<Sum, float, E, W> {
  using Base = Segments<Sum, float, E, W>;
  using Base::barrier, Base::columns, Base::edge, Base::edge_id, Base::ended, Base::id, Base::kColumns, Base::kEdges, Base::kOwn;
  using Base::kWarps, Base::open, Base::partial, Base::partial_id, Base::turn, Base::warp, Base::worker, Base::workers;
  RunTops<T> tops;
  float open_top[kOwn];

  // Which top column c has.
  static KITSUNE_DEVICE int top_of(int c) { return c / Each < T ? c / Each : T - 1; }
  KITSUNE_DEVICE bool has_top(int c) const { return c < columns && c % Each == 0; }
  KITSUNE_DEVICE u32* partial_top(u32 k) const { return partial + workers * 2 * (W + 1) + static_cast<i64>(k) * T; }
  static KITSUNE_DEVICE int own(int i) { return static_cast<int>(thread_id() % kGroupThreads) + i * kGroupThreads; }

  KITSUNE_DEVICE void block(const Scratch& rows, const Runs& runs, int b) const {
    syncwarp();
    const u32* const column = rows.base + static_cast<int>(lane_id()) % kColumns;
    Base::walk(
        runs, b, [&](int r) { return from_word<float>(ld_shared(column + r * rows.pitch)); },
        [&](i32 segment, int c, float acc, int r) { put(segment, c, acc, from_word<float>(ld_shared(tops.row(r) + top_of(c)))); });
    syncwarp();
  }

  KITSUNE_DEVICE void join() {
    bar_sync(barrier, kGroupThreads);
    KITSUNE_NO_UNROLL
    for (u32 k = 0; k < kEdges; ++k) {
      const i32 next = static_cast<i32>(ld_shared(edge_id(k)));
      if (next < 0) continue;
      const bool other = next != id;
      if (other) close();
      id = next;
      KITSUNE_UNROLL
      for (int i = 0; i < kOwn; ++i) {
        const int c = own(i);
        if (c >= W) continue;
        const float x = from_word<float>(ld_shared(edge(k) + c));
        const float top = from_word<float>(ld_shared(tops.edge(turn, k) + top_of(c)));
        if (other)
          open[i] = x, open_top[i] = top;
        else
          add_scaled(open[i], open_top[i], x, top);
      }
    }
    turn ^= 1;
  }

  KITSUNE_DEVICE void store_partial(u8* arrived, u32* flag) { Base::store_partial(*this, arrived, flag); }
  KITSUNE_DEVICE void combine() {
    bar_sync(barrier, kGroupThreads);  // another sum by the same scores has read the tops of its own partial results
    Base::combine(*this);
  }

 private:
  friend Base;

  // Down 16 partial results: a thread has the pairs of one column of block b, and fetches eight at once, because each comes from
  // the L2 and the lanes that wait for the sums do nothing else meanwhile.
  template <class None, class At>
  KITSUNE_DEVICE void fold_rows(const Runs& runs, int b, None none, At at_row) const {
    constexpr int kAhead = 8;
    const int column = b * kColumns + static_cast<int>(lane_id()) % kColumns;
    const bool mine = static_cast<int>(lane_id()) < kColumns;
    float acc = 0.0f, at = lowest<float>();
    bool first = true;
    KITSUNE_NO_UNROLL
    for (int batch = 0; batch < 16; batch += kAhead) {
      float sum[kAhead], top[kAhead];
      KITSUNE_UNROLL
      for (int i = 0; i < kAhead; ++i) {
        if (none(batch + i)) continue;
        const u32 k = at_row(batch + i);
        sum[i] = from_word<float>(ld_l2(partial + static_cast<i64>(k) * W + column));
        top[i] = from_word<float>(ld_l2(partial_top(k) + top_of(column)));
      }
      KITSUNE_UNROLL
      for (int i = 0; i < kAhead; ++i) {
        const int r = batch + i;
        const i32 segment = Runs::row(runs.id, r);
        if (!none(r)) add_scaled(acc, at, sum[i], top[i]);
        if (!(runs.ends >> r & 1)) continue;
        if (segment >= 0) {
          if (mine && (first || r == 15)) {
            const u32 k = 2 * warp() + (first ? 0 : 1);
            st_shared(edge(k) + column, to_word(acc));
            if (has_top(column)) st_shared(tops.edge(turn, k) + top_of(column), to_word(at));
          } else if (mine && column < columns) {
            put(segment, column, acc, at);
          }
          first = false;
        }
        acc = 0.0f, at = lowest<float>();
      }
    }
  }

  KITSUNE_DEVICE void put(i32 segment, int column, float sum, float top) const {
    Base::put(segment, column, Finite || finite(top) ? sum : from_bits(0x7fc00000u));
  }

  KITSUNE_DEVICE void close() {
    if (id < 0) return;
    if (!ended) {
      put_partial(2 * worker);
      ended = true;
      return;
    }
    KITSUNE_UNROLL
    for (int i = 0; i < kOwn; ++i)
      if (own(i) < columns) put(id, own(i), open[i], open_top[i]);
  }

  KITSUNE_DEVICE void put_partial(u32 k) const {
    Base::put_partial(k);
    KITSUNE_UNROLL
    for (int i = 0; i < kOwn; ++i)
      if (id >= 0 && has_top(own(i))) st_global(partial_top(k) + top_of(own(i)), to_word(open_top[i]));
  }
};

}  // namespace kitsune
