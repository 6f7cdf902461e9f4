// Reductions into the rows of a table by sorted indices: runs of rows with equal indices are folded in shared memory.
//
// Comes in: tiles in the order of the stream, consecutive ones for a lane, and for every row the index of its *segment*, which
// never decreases; rows without one (beyond the stream, or an index out of range) are left out. Goes out: each segment folded into
// its row of the result, of which segments without rows are not touched. Invariants: no index leads outside of the result, also
// where indices decrease after all; equal inputs on as many lanes give equal bits.
//
// A warp walks down its 16 rows, a thread to a column. What begins and ends among them is a whole segment and goes to the result.
// The first and the last run of each warp are joined by the lane, which carries the segment that its latest tile has left open.
// What a lane finds first and what it has at the end may go on in other lanes: both are partial results. Those of `kFanIn` lanes
// are the 64 rows of one more tile, which the one of them that comes last folds in the order of the lanes (`Finish` in
// stage/sink.h) while other lanes still work. That leaves two partial results for each such group, one tile or few for the lane
// that comes last of all, while everybody waits.
#pragma once

#include "kitsune/stage/scratch.h"
#include "kitsune/stage/sink.h"

namespace kitsune {

// The runs of equal indices among the 16 rows of a warp.
struct Runs {
  i32 id;           // of row `lane_id() % 16`: that of the latest row that has one, -1 before the first such row
  u32 ends;         // bit r: row r is the last of its run
  i32 first, last;  // of the first run and of the last one, -1 where there is no such run, or no second one
  bool inside[2];   // have the thread's two rows a segment?

  // `mine`: the index of row `lane_id() % 16`, -1 for none.
  static KITSUNE_DEVICE Runs of(i32 mine) {
    Runs runs{mine, 0, -1, -1, {false, false}};
    const u32 r = lane_id() % 16;
    KITSUNE_UNROLL
    for (u32 back = 1; back < 16; back *= 2) {
      const i32 other = row(runs.id, (r - back) % 16);
      if (r >= back && other > runs.id) runs.id = other;
    }
    const i32 next = row(runs.id, (r + 1) % 16);
    const bool ends = r == 15 || next != runs.id;
    runs.ends = fold_lanes<Or, 1, 16>(ends ? 1u << r : 0);
    runs.last = row(runs.id, 15);
    // The first run begins in the first row that has a segment: of the rows before it no index is larger than -1.
    runs.first = static_cast<i32>(fold_lanes<Min, 1, 16>(runs.id < 0 ? 0x7fffffffu : static_cast<u32>(runs.id)));
    if (runs.last < 0) runs.first = -1;
    if (runs.last == runs.first) runs.last = -1;
    return runs;
  }
  // `index`: of the thread's two rows, in a result of `rows` rows.
  template <class Index>
  static KITSUNE_DEVICE Runs of(const Index (&index)[2], const bool (&valid)[2], i64 rows) {
    bool inside[2];
    i32 id[2];
    KITSUNE_UNROLL
    for (int h = 0; h < 2; ++h) {
      inside[h] = valid[h] && static_cast<i64>(index[h]) >= 0 && static_cast<i64>(index[h]) < rows;
      id[h] = inside[h] ? static_cast<i32>(index[h]) : -1;
    }
    const i32 upper = row_of_quads(id[0]), lower = row_of_quads(id[1]);
    Runs runs = of(lane_id() % 16 < 8 ? upper : lower);
    runs.inside[0] = inside[0], runs.inside[1] = inside[1];
    return runs;
  }
  // What the thread of row r of the warp has.
  static KITSUNE_DEVICE i32 row(i32 v, u32 r) { return static_cast<i32>(shfl(static_cast<u32>(v), r)); }

 private:
  static KITSUNE_DEVICE i32 row_of_quads(i32 v) { return static_cast<i32>(shfl(static_cast<u32>(v), lane_id() % 8 * 4)); }
};

// A result of rows of `columns` elements E, in tiles of width W, folded in V.
template <class How, class V, class E, int W>
struct Segments {
  static constexpr int kWarps = kGroupThreads / 32;
  static constexpr int kColumns = kBlock<W>;                            // of a block
  static constexpr int kOwn = (W + kGroupThreads - 1) / kGroupThreads;  // columns that a thread carries
  static constexpr u32 kEdges = kWarps * 2;                             // runs of a tile that are joined
  static constexpr u32 kFanIn = kTileRows / 2;                          // lanes whose partial results are folded first
  u32* edges;  // of this lane, in shared memory: two buffers of kEdges rows of W words, then two of kEdges indices
  void* out;   // the result
  int columns;
  u32* partial;  // two rows of W words for every lane of the grid, then two indices for each
  u32 workers, worker, barrier;
  V open[kOwn];  // the segment that the latest tile has left open
  i32 id = -1;
  bool ended = false;  // has a segment ended in this lane? The first one may have begun in another.
  u32 turn = 0;

  static constexpr u32 kBytes = 2 * kEdges * (W + 1) * 4;

  KITSUNE_DEVICE u32* edge(u32 k) const { return edges + (turn * kEdges + k) * W; }
  KITSUNE_DEVICE u32* edge_id(u32 k) const { return edges + 2 * kEdges * W + turn * kEdges + k; }
  KITSUNE_DEVICE u32* partial_id(u32 k) const { return partial + workers * 2 * W + k; }
  static KITSUNE_DEVICE u32 warp() { return thread_id() % kGroupThreads / 32; }

  // In front of the blocks of a tile.
  KITSUNE_DEVICE void begin(const Runs& runs) const {
    if (lane_id() == 0) {
      st_shared(edge_id(2 * warp()), static_cast<u32>(runs.first));
      st_shared(edge_id(2 * warp() + 1), static_cast<u32>(runs.last));
    }
  }

  // Block b of a tile, whose elements the warp has put to its scratch rows; those of rows without a segment change nothing.
  KITSUNE_DEVICE void block(const Scratch& rows, const Runs& runs, int b) const {
    syncwarp();
    const u32* const column = rows.base + static_cast<int>(lane_id()) % kColumns;
    walk(
        runs, b, [&](int r) { return from_word<V>(ld_shared(column + r * rows.pitch)); },
        [&](i32 segment, int c, V acc, int) { put(segment, c, acc); });
    syncwarp();
  }

  // After the blocks.
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
        const int c = static_cast<int>(thread_id() % kGroupThreads) + i * kGroupThreads;
        if (c < W) {
          const V x = from_word<V>(ld_shared(edge(k) + c));
          open[i] = other ? x : How::fold(open[i], x);
        }
      }
    }
    turn ^= 1;  // the next tile's runs go to the other buffer, so that nobody need wait until all have read these
  }

  // After the last tile: what is left is this lane's other partial result. `arrived`: counters of the groups of `kFanIn` lanes,
  // each with a line of its own. The last lane of a group folds the partial results of the group in the place of the first lane's.
  KITSUNE_DEVICE void store_partial(u8* arrived, u32* flag) { store_partial(*this, arrived, flag); }

  // The last lane's work, once the partial results of all groups are there.
  KITSUNE_DEVICE void combine() { combine(*this); }

 protected:
  // Row `k` of the partial results of lanes `first`, `first + step`, ...: each has two.
  static KITSUNE_DEVICE u32 place(u32 k, u32 first, u32 step) { return 2 * (first + k / 2 * step) + k % 2; }

  // `Self`: this, or a class with another `fold_rows`, `join`, `close` and `put_partial`.
  template <class Self>
  static KITSUNE_DEVICE void store_partial(Self& self, u8* arrived, u32* flag) {
    left(self);
    const u32 first = self.worker / kFanIn * kFanIn, rest = self.workers - first, lanes = rest < kFanIn ? rest : kFanIn;
    const Finish group{reinterpret_cast<u32*>(arrived + self.worker / kFanIn * 128), flag, lanes, self.worker, self.barrier};
    if (!group.last()) return;
    self.worker = first, self.id = -1, self.ended = false;
    fold_partials(self, first, lanes, 1);
    left(self);
  }
  template <class Self>
  static KITSUNE_DEVICE void combine(Self& self) {
    self.id = -1, self.ended = true;
    fold_partials(self, 0, (self.workers + kFanIn - 1) / kFanIn, kFanIn);
    self.close();
  }

  // The open segment is the lane's second partial result, or its only one.
  template <class Self>
  static KITSUNE_DEVICE void left(const Self& self) {
    const u32 k = 2 * self.worker + (self.ended ? 1 : 0);
    self.put_partial(k);
    if (thread_id() % kGroupThreads == 0 && !self.ended) st_global(self.partial_id(k + 1), static_cast<u32>(-1));
  }

  // The partial results of `lanes` lanes in their order, as the rows of tiles.
  template <class Self>
  static KITSUNE_DEVICE void fold_partials(Self& self, u32 first, u32 lanes, u32 step) {
    KITSUNE_NO_UNROLL
    for (u32 from = 0; from < 2 * lanes; from += 16 * kWarps) {
      const u32 mine = from + 16 * warp(), row = mine + lane_id() % 16;
      const i32 index = row < 2 * lanes ? static_cast<i32>(ld_l2(self.partial_id(place(row, first, step)))) : -1;
      const Runs runs = Runs::of(index);
      self.begin(runs);
      KITSUNE_NO_UNROLL
      for (int b = 0; b < W / kColumns; ++b)
        self.fold_rows(
            runs, b, [&](int r) { return Runs::row(index, r) < 0; }, [&](int r) { return place(mine + r, first, step); });
      self.join();
    }
  }

  // `none`: has row r no segment? `at`: its partial result.
  template <class None, class At>
  KITSUNE_DEVICE void fold_rows(const Runs& runs, int b, None none, At at) const {
    const u32* const column = partial + b * kColumns + lane_id() % kColumns;
    walk(
        runs, b,
        [&](int r) { return none(r) ? How::template identity<V>() : from_word<V>(ld_l2(column + static_cast<i64>(at(r)) * W)); },
        [&](i32 segment, int c, V acc, int) { put(segment, c, acc); });
  }

  // Down the 16 rows: a thread has the elements of one column of block b, and fetches four at once. `whole`: of a run that begins
  // and ends among them, with its segment, the column, its fold and its last row.
  template <class Load, class Whole>
  KITSUNE_DEVICE void walk(const Runs& runs, int b, Load load, Whole whole) const {
    const int column = b * kColumns + static_cast<int>(lane_id());
    const bool mine = static_cast<int>(lane_id()) < kColumns;
    V acc = How::template identity<V>();
    bool first = true;
    KITSUNE_UNROLL
    for (int batch = 0; batch < 16; batch += 4) {
      V v[4];
      KITSUNE_UNROLL
      for (int r = 0; r < 4; ++r) v[r] = load(batch + r);
      KITSUNE_UNROLL
      for (int r = batch; r < batch + 4; ++r) {
        const i32 segment = Runs::row(runs.id, r);
        acc = How::fold(acc, v[r - batch]);
        if (runs.ends >> r & 1) {
          if (segment >= 0) {
            if (mine && (first || r == 15)) st_shared(edge(2 * warp() + (first ? 0 : 1)) + column, to_word(acc));
            if (mine && !first && r != 15 && column < columns) whole(segment, column, acc, r);
            first = false;
          }
          acc = How::template identity<V>();
        }
      }
    }
  }

  KITSUNE_DEVICE void put(i32 segment, int column, V v) const {
    st_global(static_cast<typename Element<E>::Bits*>(out) + static_cast<i64>(segment) * columns + column,
              Element<E>::store(typename Element<E>::Value(v)));
  }

  // The open segment is over.
  KITSUNE_DEVICE void close() {
    if (id < 0) return;
    if (!ended) {
      put_partial(2 * worker);
      ended = true;
      return;
    }
    KITSUNE_UNROLL
    for (int i = 0; i < kOwn; ++i) {
      const int c = static_cast<int>(thread_id() % kGroupThreads) + i * kGroupThreads;
      if (c < columns) put(id, c, open[i]);
    }
  }

  KITSUNE_DEVICE void put_partial(u32 k) const {
    KITSUNE_UNROLL
    for (int i = 0; i < kOwn; ++i) {
      const int c = static_cast<int>(thread_id() % kGroupThreads) + i * kGroupThreads;
      if (c < W && id >= 0) st_global(partial + static_cast<i64>(k) * W + c, to_word(open[i]));
    }
    if (thread_id() % kGroupThreads == 0) st_global(partial_id(k), static_cast<u32>(id));
  }
};

}  // namespace kitsune
