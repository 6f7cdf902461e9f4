// Sums into the rows of a table of any size by indices in any order: every thread adds its part of a row to the result itself.
//
// Comes in: tiles, and for every row the index of the table's row that it is added to; rows without one (beyond the stream, or an
// index out of range) are left out. Goes out: the sums, in a result of floats that holds zeros when the kernel starts. Invariants:
// no index leads outside of the table; which of two additions comes first is not known, so the last bits of a sum may differ from
// run to run. No shared memory, no partial results: the L2 adds.
#pragma once

#include "kitsune/global.h"

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

}  // namespace kitsune
