// How the operands of BFMMLA are brought together in memory: the elements of four rows of bf16, column by column.
#pragma once

#include "load_store.h"

namespace kitsune::cpu::KITSUNE_ISA {

// Four rows of `columns` elements to four neighbours for each column: out[4 * j + i] is row[i][j].
KITSUNE_INLINE void interleave_four(const BFloat16* const (&row)[4], int64_t columns, BFloat16* out) {
  int64_t j = 0;
  for (; j + 8 <= columns; j += 8, out += 32) {
    uint16x8_t v[4];
    KITSUNE_UNROLL
    for (int i = 0; i < 4; ++i) v[i] = load_vector<uint16x8_t>(row[i] + j);
    uint32x4_t top_low = (uint32x4_t)vzip1q_u16(v[0], v[1]), top_high = (uint32x4_t)vzip2q_u16(v[0], v[1]);
    uint32x4_t bottom_low = (uint32x4_t)vzip1q_u16(v[2], v[3]), bottom_high = (uint32x4_t)vzip2q_u16(v[2], v[3]);
    store_vector(out, vzip1q_u32(top_low, bottom_low));
    store_vector(out + 8, vzip2q_u32(top_low, bottom_low));
    store_vector(out + 16, vzip1q_u32(top_high, bottom_high));
    store_vector(out + 24, vzip2q_u32(top_high, bottom_high));
  }
  for (; j < columns; ++j, out += 4) {
    for (int i = 0; i < 4; ++i) out[i] = row[i][j];
  }
}

// Rows four by four: (r, m) at ((r / 4) * width + m) * 4 + r % 4. Beyond R and M are zeros, up to a multiple of four and to
// `width`.
inline void interleave_rows(const BFloat16* x, int64_t ldx, int64_t R, int64_t M, int64_t width, BFloat16* out) {
  if (M < width || R % 4) __builtin_memset(static_cast<void*>(out), 0, size_t((R + 3) / 4 * 4 * width) * sizeof(BFloat16));
  int64_t r = 0;
  for (; r + 4 <= R; r += 4, out += 4 * width) {
    const BFloat16* const row[4] = {x + r * ldx, x + (r + 1) * ldx, x + (r + 2) * ldx, x + (r + 3) * ldx};
    interleave_four(row, M, out);
  }
  for (int64_t i = 0; r + i < R; ++i) {
    for (int64_t m = 0; m < M; ++m) out[4 * m + i] = x[(r + i) * ldx + m];
  }
}

}  // namespace kitsune::cpu::KITSUNE_ISA
