// C += X^T Y on tiles: the product of a weight gradient. X and Y are packed first, X transposed, padded to whole tiles with zeros.
#pragma once

#include "../checked.h"
#include "amx.h"

namespace kitsune::cpu::KITSUNE_ISA {

struct TileOuterScratch {
  size_t x, y, bytes;  // byte offsets of the tiles of X^T, and of Y: (tile of 16 columns, step of 32 rows)
};

inline TileOuterScratch tile_outer_layout(const OuterArgs& g) {
  const size_t steps = size_t(tile_steps(g.R)), across = size_t((g.M + kTileRows - 1) / kTileRows);
  const size_t along = size_t((g.N + kTileRows - 1) / kTileRows);
  TileOuterScratch s{};
  s.y = times(times(steps, across), size_t(kTileBytes));
  s.bytes = plus(s.y, times(times(steps, along), size_t(kTileBytes)));
  return s;
}

inline size_t tile_outer_scratch_bytes(const OuterArgs& g) {
  return g.panel == Panel::kTiles ? tile_outer_layout(g).bytes : base().outer_scratch_bytes(g);
}

// Rows [r, r + 32) of 16 columns as pairs, as they are a tile of Y; rows from R on are zeros.
KITSUNE_INLINE void pair_tile(const BFloat16* y, int64_t ldy, int64_t r, int64_t R, int64_t columns, uint32_t* tile) {
  for (int64_t i = r; i < r + kTileDepth; i += 2, tile += kTileRows) {
    pair_rows(tile, i < R ? y + i * ldy : kZeroRow, i + 1 < R ? y + (i + 1) * ldy : kZeroRow, columns);
  }
}

// All of X or Y, a tile of 16 columns after the other; for each, its steps of 32 rows. A tile of X^T is the transpose of the pairs.
template <bool Transposed>
__attribute__((noinline)) void pack_all_tiles(const BFloat16* x, int64_t ldx, int64_t R, int64_t columns, uint32_t* out) {
  alignas(64) uint32_t pairs[kTileWords];
  for (int64_t m = 0; m < columns; m += kTileRows) {
    for (int64_t r = 0; r < R; r += kTileDepth, out += kTileWords) {
      pair_tile(x + m, ldx, r, R, columns - m, Transposed ? pairs : out);
      if constexpr (Transposed) transpose_words(pairs, out);
    }
  }
}

// Rows and columns of one block of C, up to 16 x 32.
struct OuterBlock {
  float* c;
  int64_t ldc, rows, columns;
  bool whole() const { return rows == kTileRows && columns % kTileRows == 0; }
  void prefetch() const {
    for (int64_t i = 0; i < rows; ++i) {
      __builtin_prefetch(c + i * ldc, 1);
      __builtin_prefetch(c + i * ldc + columns - 1, 1);
    }
  }
};

// A whole block of C is loaded into the tiles and stored from them; of another the sums are, and the part that is C is added to, or
// written where it is the first.
template <int NT>
__attribute__((noinline)) void outer_tile_block(const char* x, const char* y, int64_t steps, const OuterBlock& b, bool first) {
  alignas(64) float edge[kTileRows * kTilePanel];
  const bool whole = b.whole();
  if (whole && !first) {
    tile_load<0>(b.c, b.ldc * 4);
    if constexpr (NT > 1) tile_load<1>(b.c + kTileRows, b.ldc * 4);
  } else {
    tile_zero<0>();
    if constexpr (NT > 1) tile_zero<1>();
  }
  for (int64_t s = 0; s < steps; ++s, x += kTileBytes, y += kTileBytes) {
    tile_load<3>(y, 64);
    tile_load<2>(x, 64);
    tile_multiply<0, 2, 3>();
    if constexpr (NT > 1) {
      tile_load<3>(y + steps * kTileBytes, 64);
      tile_multiply<1, 2, 3>();
    }
  }
  float* to = whole ? b.c : edge;
  const int64_t stride = whole ? b.ldc : kTilePanel;
  tile_store<0>(to, stride * 4);
  if constexpr (NT > 1) tile_store<1>(to + kTileRows, stride * 4);
  if (whole) return;
  for (int64_t i = 0; i < b.rows; ++i) {
    float* c = b.c + i * b.ldc;
    if (first) {
      __builtin_memcpy(c, edge + i * kTilePanel, size_t(b.columns) * sizeof(float));
    } else {
      for (int64_t j = 0; j < b.columns; ++j) c[j] += edge[i * kTilePanel + j];
    }
  }
}

__attribute__((noinline)) inline void outer_on_tiles(const OuterArgs& g) {
  need_tiles();
  const TileOuterScratch at = tile_outer_layout(g);
  char *x = static_cast<char*>(g.scratch) + at.x, *y = static_cast<char*>(g.scratch) + at.y;
  pack_all_tiles<true>(static_cast<const BFloat16*>(g.x), g.ldx, g.R, g.M, reinterpret_cast<uint32_t*>(x));
  pack_all_tiles<false>(static_cast<const BFloat16*>(g.y), g.ldy, g.R, g.N, reinterpret_cast<uint32_t*>(y));
  const int64_t steps = tile_steps(g.R), column = steps * kTileBytes;
  auto block = [&](int64_t m, int64_t n) -> OuterBlock {
    return {static_cast<float*>(g.c) + sum_offset(g.M, g.N, m, n), group_columns(g.N, n), min_of(kTileRows, g.M - m),
            min_of(kTilePanel, g.N - n)};
  };
  for (int64_t n = 0; n < g.N; n += kTilePanel) {
    for (int64_t m = 0; m < g.M; m += kTileRows) {
      const OuterBlock b = block(m, n);
      if (m + kTileRows < g.M)  // C's lines, which many layers keep in the last-level cache, arrive while this block is multiplied
        block(m + kTileRows, n).prefetch();
      else if (n + kTilePanel < g.N)
        block(0, n + kTilePanel).prefetch();
      const char *a = x + m / kTileRows * column, *from = y + n / kTileRows * column;
      b.columns > kTileRows ? outer_tile_block<2>(a, from, steps, b, g.first) : outer_tile_block<1>(a, from, steps, b, g.first);
    }
  }
}

inline void tile_outer(const OuterArgs& g) { g.panel == Panel::kTiles ? outer_on_tiles(g) : base().outer(g); }

// The table of the base with products on tiles.
inline KernelTable tile_table(const char* isa) {
  KernelTable t = base();
  t.isa = isa;
  t.panel_for = &tile_panel_for;
  t.packed_bytes = &tile_packed_bytes;
  t.panel_count = &tile_panel_count;
  t.pack = &tile_pack;
  t.gemm_scratch_bytes = &tile_gemm_scratch_bytes;
  t.gemm = &tile_gemm;
  t.outer_scratch_bytes = &tile_outer_scratch_bytes;
  t.outer = &tile_outer;
  t.end_of_call = &end_of_call;
  return t;
}

}  // namespace kitsune::cpu::KITSUNE_ISA
