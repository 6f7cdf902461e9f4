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

}  // namespace kitsune
