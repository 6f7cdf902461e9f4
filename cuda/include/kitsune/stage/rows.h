// Staged rows: tiles of an array whose rows would take many narrow accesses, brought to shared memory as they lie. Rows whose pitch
// allows 16 bytes at once are not staged (`is_staged` in targets/cuda/frame_ir.py).
//
// Comes in: an array of C columns without gaps, so that a tile is one piece of memory and starts on a multiple of 64 bytes. Goes
// out: addresses of the lane's rows, for `load_row` with `kStaged`. A lane has two buffers: while it works on a tile, the next one
// is on its way, by one bulk copy (before sm_90, 16 bytes a thread at a time). So the array is read once, however often a stage
// needs it, and without narrow accesses.
//
// A tile that goes beyond the array, and arrays that do not start on 16 bytes, are copied element by element, with zeros for rows
// that are not there. Only the last tile of a lane can be such a tile of an array that is copied in bulk, so the phases of the
// barriers go on without a gap.
//
// Rows of more than 64 bytes whose pitch allows 16 bytes at once come through a ring of tiles instead, which all lanes of the CTA
// share (`TileRing`).
#pragma once

#include "kitsune/global.h"

namespace kitsune {

template <class Bits, int C>
struct StagedRows {
  static constexpr u32 kRow = C * sizeof(Bits);
  static constexpr u32 kTile = kTileRows * kRow;
  const u8* array;
  u8* buffers;
  Mbar* landed;  // of each buffer

  static KITSUNE_DEVICE void init(Mbar (&landed)[2]) {
    mbar_init(landed[0], 1);
    mbar_init(landed[1], 1);
  }

  // Comes before the lane asks for the tile after next: all of its threads have read the tile before, and sees to it that what
  // they copied themselves is visible to all.
  static KITSUNE_DEVICE void turn(u32 barrier) {
#if KITSUNE_SM < 900
    cp_async_wait<0>();
#endif
    bar_sync(barrier, kGroupThreads);
  }

  KITSUNE_DEVICE u8* buffer(u32 n) const { return buffers + n % 2 * kTile; }
  KITSUNE_DEVICE bool in_bulk(i64 tile, i64 rows) const {
    return (tile + 1) * kTileRows <= rows && reinterpret_cast<u64>(array) % 16 == 0;
  }

  // Sends for the lane's n-th tile; one that is not there is zeros.
  KITSUNE_DEVICE void fetch(const Lane& lane, u32 n, i64 tile, i64 rows) const {
    const i64 first = tile * kTileRows;
    const u8* const from = array + first * kRow;
    if (in_bulk(tile, rows)) {
#if KITSUNE_SM >= 900
      if (lane.thread == 0) {
        mbar_expect_tx(landed[n % 2], kTile);
        bulk_load(buffer(n), from, kTile, landed[n % 2]);
      }
#else
      KITSUNE_NO_UNROLL
      for (u32 i = lane.thread * 16; i < kTile; i += kGroupThreads * 16) cp_async_16(buffer(n) + i, from + i, 16);
      cp_async_commit();
#endif
    } else {
      const i64 left = first < rows ? rows - first : 0;
      const int elements = static_cast<int>(left < kTileRows ? left : kTileRows) * C;
      KITSUNE_NO_UNROLL
      for (int i = lane.thread; i < kTileRows * C; i += kGroupThreads)
        st_shared(reinterpret_cast<Bits*>(buffer(n)) + i,
                  i < elements ? ld_global(reinterpret_cast<const Bits*>(from) + i) : Bits(0));
    }
  }

  // Until the n-th tile is there, which was sent for before the last turn.
  KITSUNE_DEVICE void wait(u32 n, i64 tile, i64 rows) const {
#if KITSUNE_SM >= 900
    if (in_bulk(tile, rows)) mbar_wait(landed[n % 2], n / 2 & 1);
#else
    (void)n, (void)tile, (void)rows;
#endif
  }
  KITSUNE_DEVICE const u8* row(u32 n, u32 r) const { return buffer(n) + r * kRow; }
};

#if KITSUNE_SM >= 900

// A ring of `Depth` entries of `Bytes` bytes: an entry has the rows of one or several arrays for one tile, array after array. One
// thread of the loader fills entries in the order of the tiles of its CTA, as far ahead as the ring is deep, so the bytes that are
// on their way do not depend on what the lanes are doing. Entry i is the tile of lane i % Lanes in round i / Lanes.
//
// There are as many full barriers as are a multiple of the lanes, so that a lane shares none with others: of a barrier whose last
// phase was another lane's it could not tell whether that has ended, and would take the parity of the one before it for its own.
template <int Depth, u32 Bytes, int Lanes>
struct TileRing {
  static constexpr u32 kFull = (Depth + Lanes - 1) / Lanes * Lanes;
  struct Barriers {
    Mbar full[kFull];
    Mbar empty[Depth];
  };
  Barriers* barriers;
  u8* entries;

  static KITSUNE_DEVICE void init(Barriers& barriers) {
    for (u32 k = 0; k < kFull; ++k) mbar_init(barriers.full[k], 1);
    for (u32 k = 0; k < Depth; ++k) mbar_init(barriers.empty[k], kGroupThreads / 32);
  }
  KITSUNE_DEVICE u8* entry(u32 i) const { return entries + i % Depth * Bytes; }
  KITSUNE_DEVICE Mbar& full(u32 i) const { return barriers->full[i % kFull]; }
  KITSUNE_DEVICE Mbar& empty(u32 i) const { return barriers->empty[i % Depth]; }

  // By the loader's thread: waits until entry i is free, and expects the rows of `tile` that lie within the stream, `row_bytes` of
  // all arrays together that are copied in rows, and `box_bytes` of the others: a box is as large at the stream's end. Returns the
  // number of rows. 0: the tile is beyond the stream, and no lane will ask for it.
  KITSUNE_DEVICE u32 begin(u32 i, i64 tile, i64 rows, u32 row_bytes, u32 box_bytes = 0) const {
    mbar_wait(empty(i), i / Depth & 1 ^ 1);
    const i64 left = rows - tile * kTileRows;
    if (left <= 0) {
      mbar_arrive(full(i));
      for (int warp = 0; warp < kGroupThreads / 32; ++warp) mbar_arrive(empty(i));
      return 0;
    }
    const u32 count = left < kTileRows ? static_cast<u32>(left) : kTileRows;
    mbar_expect_tx(full(i), count * row_bytes + box_bytes);
    return count;
  }
  // The rows of one array, to byte `at` of entry i.
  KITSUNE_DEVICE void fetch(u32 i, u32 at, const void* array, i64 tile, u32 count, u32 row_bytes) const {
    const u8* const from = static_cast<const u8*>(array) + tile * kTileRows * row_bytes;
    bulk_load(entry(i) + at, from, count * row_bytes, full(i));
  }
  // The same of an array by its tensor map, as `boxes` boxes. Rows beyond the stream are zeros there.
  KITSUNE_DEVICE void fetch_boxes(u32 i, u32 at, const TensorMap& map, i64 tile, u32 boxes) const {
    KITSUNE_UNROLL
    for (u32 b = 0; b < boxes; ++b)
      tma_load_2d(map, full(i), entry(i) + at + b * kBoxBytes, b * kBoxColumns, static_cast<i32>(tile) * kTileRows);
  }

  // By a lane.
  KITSUNE_DEVICE void rd_acquire(u32 i) const { mbar_wait(full(i), i / kFull & 1); }
  KITSUNE_DEVICE void rd_release(u32 i) const {
    syncwarp();  // all threads of the warp have read
    if (lane_id() == 0) mbar_arrive(empty(i));
  }
  // Row r of the array at byte `at` of entry i. One beyond the stream has the address of the tile's first row, whose values are
  // used as little as those of any row that is not valid.
  KITSUNE_DEVICE const u8* row(u32 i, u32 at, u32 r, u32 row_bytes, bool valid) const {
    return entry(i) + at + (valid ? r : 0) * row_bytes;
  }
  // Row r of the array in boxes there.
  KITSUNE_DEVICE const u8* box_row(u32 i, u32 at, u32 r) const { return entry(i) + at + r * (kBoxBytes / kTileRows); }
};

#endif

}  // namespace kitsune
