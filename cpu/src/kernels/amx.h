// Products of bfloat16 on tiles: C = act(X W + bias), and the panels of W that they want.
//
// The including unit has named KITSUNE_TILE_BASE, the kernels that do everything else, and included the tile instructions (or the
// model of them). A thread's tiles belong to whoever configured them last, so nothing is assumed about them at the start of a call:
// the first product of a thread configures them, and end_of_call releases them. Within a call nobody else uses the thread.
#pragma once

#include "gemm.h"

namespace kitsune::cpu {

namespace KITSUNE_TILE_BASE {
const KernelTable& table();
}

namespace KITSUNE_ISA {

constexpr int64_t kTileRows = 16;                 // of every tile; also the columns of a tile of C
constexpr int64_t kTileDepth = 32;                // bfloat16 numbers in a row of a tile of X: k runs over them
constexpr int64_t kTileBytes = 1024;              // 16 rows of 64 bytes
constexpr int64_t kTileWords = kTileBytes / 4;    // floats, or pairs of bfloat16
constexpr int64_t kTilePanel = 2 * kTileRows;     // columns of a panel: two tiles
constexpr int64_t kBlockOfTiles = 2 * kTileRows;  // rows that are multiplied at once, where there are as many

inline const KernelTable& base() { return KITSUNE_TILE_BASE::table(); }

inline int64_t tile_steps(int64_t K) { return (K + kTileDepth - 1) / kTileDepth; }

// ---- The tiles of this thread. All are whole: what is shorter is padded, so one configuration serves a whole call. Products use
// all eight: on a Xeon (family 6, model 167) that is 1.3 times as fast as four. An Emerald Rapids ran eight live ones at half the
// speed of four while the core's other hyperthread was busy, because it renames tiles; it has not run these blocks.

static thread_local bool tiles_configured = false;

KITSUNE_INLINE void need_tiles() {
  if (tiles_configured) return;
  static constexpr TileConfig kConfig{1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};
  tile_configure(kConfig);
  tiles_configured = true;
}

inline void end_of_call() {
  if (!tiles_configured) return;
  tile_release();
  tiles_configured = false;
}

// ---- Panels: for each 32 rows of W two tiles, of 16 columns each, with pairs of rows interleaved: element (k, n) of a panel is at
// bfloat16 (k / 32 * 2 + n / 16) * 512 + k % 32 / 2 * 32 + n % 16 * 2 + k % 2. K is padded to 32 and N to 32, with zeros.

// A product smaller than a tile in one direction would multiply mostly padding: pairs or f32 are faster there.
inline Panel tile_panel_for(DType weight, Product product, const ProductShape& s) {
  const bool wanted = weight == DType::kBF16 && (product == Product::kBest || product == Product::kTiles);
  if (wanted && s.M >= kTileRows && s.N >= kTileRows && s.K >= kTileDepth) return Panel::kTiles;
  return base().panel_for(weight, product, s);
}

inline int64_t tile_panel_count(Panel p, int64_t N) {
  return p == Panel::kTiles ? (N + kTilePanel - 1) / kTilePanel : base().panel_count(p, N);
}

inline int64_t tile_panel_bytes(int64_t K) { return tile_steps(K) * 2 * kTileBytes; }

inline size_t tile_packed_bytes(Panel p, int64_t K, int64_t N) {
  if (p != Panel::kTiles) return base().packed_bytes(p, K, N);
  return size_t(tile_panel_count(p, N)) * size_t(tile_panel_bytes(K));
}

constexpr BFloat16 kZeroRow[kTileRows] = {};

// One row of a tile of W: 16 columns of two rows as pairs; columns from n on are zeros.
KITSUNE_INLINE void pair_rows(uint32_t* to, const BFloat16* a, const BFloat16* b, int64_t n) {
#if defined(__AVX512BW__) && defined(__AVX512VL__)
  const __mmask16 mask = n >= kTileRows ? __mmask16(0xffff) : __mmask16((1u << n) - 1);
  const __m512i low = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, a));
  const __m512i high = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, b));
  _mm512_store_si512(to, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
#else
  for (int64_t j = 0; j < kTileRows; ++j) to[j] = j < n ? uint32_t(a[j].bits) | uint32_t(b[j].bits) << 16 : 0;
#endif
}

// The tile of rows [k0, k0 + 32) and columns [n0, n0 + 16), where the columns are not neighbours in memory: in a transposed weight
// the rows are, so that a column's pairs are words.
inline void pack_scattered(const PackSource& s, int64_t k0, int64_t n0, uint32_t* tile) {
  const BFloat16* src = static_cast<const BFloat16*>(s.src);
  const int64_t depth = min_of(kTileDepth, s.K - k0), columns = min_of(kTileRows, s.N - n0);
  alignas(64) uint32_t words[kTileWords];  // by column
  if (depth < kTileDepth || columns < kTileRows) __builtin_memset(words, 0, sizeof words);
  const int64_t* k_offset = s.k_offset + k0;
  bool dense = true;
  for (int64_t k = 1; k < depth; ++k) dense &= k_offset[k] == k_offset[0] + k;
  for (int64_t j = 0; j < columns; ++j) {
    const BFloat16* column = src + s.n_offset[n0 + j];
    if (n0 + kTileRows + j < s.N) __builtin_prefetch(src + s.n_offset[n0 + kTileRows + j] + k_offset[0]);  // the next tile's
    char* to = reinterpret_cast<char*>(words + j * kTileRows);
    if (dense && depth == kTileDepth) {
      __builtin_memcpy(to, column + k_offset[0], kTileDepth * sizeof(BFloat16));
    } else {
      for (int64_t k = 0; k < depth; ++k)
        __builtin_memcpy(to + k * int64_t(sizeof(BFloat16)), column + k_offset[k], sizeof(BFloat16));
    }
  }
  transpose_words(words, tile);
}

inline void pack_tile(const PackSource& s, int64_t k0, int64_t n0, uint32_t* tile) {
  const int64_t columns = min_of(kTileRows, s.N - n0);
  if (columns <= 0) {
    __builtin_memset(tile, 0, kTileBytes);
    return;
  }
  for (int64_t j = 1; j < columns; ++j)
    if (s.n_offset[n0 + j] != s.n_offset[n0] + j) return pack_scattered(s, k0, n0, tile);
  const BFloat16* src = static_cast<const BFloat16*>(s.src) + s.n_offset[n0];
  for (int64_t k = k0; k < k0 + kTileDepth; k += 2, tile += kTileRows) {
    for (int64_t next = k + kTileDepth; next < min_of(k + kTileDepth + 2, s.K); ++next) __builtin_prefetch(src + s.k_offset[next]);
    const BFloat16* a = k < s.K ? src + s.k_offset[k] : kZeroRow;
    const BFloat16* b = k + 1 < s.K ? src + s.k_offset[k + 1] : kZeroRow;
    pair_rows(tile, a, b, columns);
  }
}

inline void tile_pack(Panel p, const PackSource& s, int64_t begin, int64_t end, void* out) {
  if (p != Panel::kTiles) return base().pack(p, s, begin, end, out);
  const int64_t bytes = tile_panel_bytes(s.K);
  for (int64_t k0 = 0; k0 < s.K; k0 += kTileDepth) {  // outside, because the panels' parts of a row follow each other in memory
    for (int64_t p = begin; p < end; ++p) {
      uint32_t* to = reinterpret_cast<uint32_t*>(static_cast<char*>(out) + p * bytes) + k0 / kTileDepth * 2 * kTileWords;
      pack_tile(s, k0, p * kTilePanel, to);
      pack_tile(s, k0, p * kTilePanel + kTileRows, to + kTileWords);
    }
  }
}

// ---- The rows of X. A tile of X is loaded where it lies, but for what a load would read beyond its rows and columns: the columns
// after the last whole 32, and all of an X of fewer than 16 rows, are copied beside zeros.
struct TileSource {
  const BFloat16* rows;
  int64_t lda;
  int64_t steps;         // whole ones
  const BFloat16* tail;  // rows of 32, or nullptr
};

inline int64_t tile_copied_rows(const GemmArgs& g) { return g.M < kTileRows ? kTileRows : g.K % kTileDepth ? g.M : 0; }
inline int64_t tile_copied_width(const GemmArgs& g) { return g.M < kTileRows ? tile_steps(g.K) * kTileDepth : kTileDepth; }

inline size_t tile_gemm_scratch_bytes(const GemmArgs& g) {
  if (g.panel != Panel::kTiles) return base().gemm_scratch_bytes(g);
  return size_t(tile_copied_rows(g)) * size_t(tile_copied_width(g)) * sizeof(BFloat16);
}

inline TileSource tile_source(const GemmArgs& g) {
  const BFloat16* x = static_cast<const BFloat16*>(g.x);
  const int64_t copied = tile_copied_rows(g), width = tile_copied_width(g);
  if (copied == 0) return {x, g.lda, g.K / kTileDepth, nullptr};
  BFloat16* out = static_cast<BFloat16*>(g.scratch);
  const int64_t first = g.M < kTileRows ? 0 : g.K / kTileDepth * kTileDepth, columns = g.K - first;
  for (int64_t r = 0; r < copied; ++r) {
    const int64_t n = r < g.M ? columns : 0;
    __builtin_memcpy(static_cast<void*>(out + r * width), x + (r < g.M ? r * g.lda + first : 0), size_t(n) * sizeof(BFloat16));
    __builtin_memset(static_cast<void*>(out + r * width + n), 0, size_t(width - n) * sizeof(BFloat16));
  }
  if (g.M < kTileRows) return {out, width, width / kTileDepth, nullptr};
  return {x, g.lda, g.K / kTileDepth, out};
}

// ---- Sums of a finished block on their way to C.

struct TileSums {
  float* from = nullptr;  // rows of kTilePanel
  char* c = nullptr;
  int64_t columns = 0, rows = 0;
  const float* late = nullptr;  // of rounded sums: kTilePanel numbers that are added behind the rounding; nullptr: none
};

// A vector of sums, with the bias that the tiles did not begin with because the sums are rounded before it is added. Without one
// the activation rounds them, or what they are stored as.
template <class Round>
KITSUNE_INLINE VF with_late_bias(const float* from, const float* late, int64_t j) {
  VF v = load_vector<VF>(from + j);
  if constexpr (kRounds<Round>) {
    if (late != nullptr) v = Round::apply(v) + load_vector<VF>(late + j);
  }
  return v;
}

template <class C, class Round, class F>
KITSUNE_INLINE void store_sums_row(C* to, const float* from, const float* late, int64_t columns, const F& activation) {
#if defined(__AVX512F__)
  if constexpr (!kSame<C, double>) {
    VF low = activation(with_late_bias<Round>(from, late, 0));
    if (columns <= kFloats) return store_lanes(to, low, columns);
    VF high = activation(with_late_bias<Round>(from, late, kFloats));
#if defined(__AVX512BF16__)
    if constexpr (kSame<C, BFloat16>) {
      if (columns == kTilePanel) {
        _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low));
        return;
      }
      const __mmask32 mask = ~__mmask32{0} >> (kTilePanel - columns);
      _mm512_mask_storeu_epi16(to, mask, (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low));
      return;
    }
#endif
    store_lanes(to, low, kFloats);
    return store_lanes(to + kFloats, high, columns - kFloats);
  }
#endif
  alignas(64) float row[kTilePanel];
  for (int64_t j = 0; j < columns; j += kFloats) store_vector(row + j, activation(with_late_bias<Round>(from, late, j)));
  if constexpr (kSame<C, float>) {
    __builtin_memcpy(to, row, size_t(columns) * sizeof(float));
  } else {
    convert_dense(columns, to, static_cast<const float*>(row));
  }
}

template <class C>
__attribute__((noinline)) void store_sums(const GemmArgs& g, TileSums& s, int64_t count) {
  with_rounding(g.rounds, [&](auto round) {
    using Round = decltype(round);
    with_activation<C, Round>(g.act, g.act_a, g.act_b, [&](auto activation) {
      for (int64_t r = 0; r < count; ++r) {
        store_sums_row<C, Round>(reinterpret_cast<C*>(s.c), s.from, s.late, s.columns, activation);
        s.from += kTilePanel;
        s.c += size_t(g.ldc) * sizeof(C);
      }
    });
  });
  s.rows -= count;
}

using StoreSums = void (*)(const GemmArgs&, TileSums&, int64_t count);

inline StoreSums store_sums_as(DType c) {
  switch (c) {
    case DType::kBF16: return &store_sums<BFloat16>;
    case DType::kF16: return &store_sums<Half>;
    case DType::kF64: return &store_sums<double>;
    default: return &store_sums<float>;
  }
}

// ---- The product.

// What a block multiplies by: one panel, and the share of the next one that it asks for meanwhile.
struct TilePanel {
  const char* w;
  const char* next;
  int64_t next_lines;  // for each step of k
};

// What a block's sums begin with, and where they go: rows of kTilePanel floats, `stride` bytes apart; 0: one row for all. From
// nullptr: with zeros.
struct TileBlock {
  const float* from;
  int64_t from_stride;
  float* to;
  int64_t to_stride;
};

// Rows [m, m + 16 MT) of X times NT tiles of a panel, added to what is in `b.from`, into `b.to`, while the epilogue of an earlier
// block runs between the steps: the tile unit works beside the vector units. Two blocks earlier, because sums that were stored a
// moment ago are not in the cache yet. Two rows of tiles halve what is loaded for each product: where X and W come from the second
// level of the cache, that takes longer than the product.
template <int MT, int NT>
__attribute__((noinline)) void tile_block(const GemmArgs& g, const TileSource& x, int64_t m, const TilePanel& panel,
                                          const TileBlock& b, StoreSums store, TileSums& earlier) {
  const char *w = panel.w, *next = panel.next;
  auto lower = [](auto* first, int64_t stride) { return reinterpret_cast<decltype(first)>(uintptr_t(first) + kTileRows * stride); };
  if (b.from == nullptr) {
    tile_zero<0>(), tile_zero<1>(), tile_zero<2>(), tile_zero<3>();
  } else {
    tile_load<0>(b.from, b.from_stride);
    if constexpr (NT > 1) tile_load<1>(b.from + kTileRows, b.from_stride);
    if constexpr (MT > 1) {
      tile_load<2>(lower(b.from, b.from_stride), b.from_stride);
      if constexpr (NT > 1) tile_load<3>(lower(b.from, b.from_stride) + kTileRows, b.from_stride);
    }
  }
  const int64_t all = x.steps + (x.tail != nullptr), share = (earlier.rows + all - 1) / all;
  auto step = [&](const BFloat16* a, int64_t stride) {
    tile_load<4>(a, stride);
    tile_load<6>(w, 64);
    tile_multiply<0, 4, 6>();
    if constexpr (NT > 1) {
      tile_load<7>(w + kTileBytes, 64);
      tile_multiply<1, 4, 7>();
    }
    if constexpr (MT > 1) {
      tile_load<5>(lower(a, stride), stride);
      tile_multiply<2, 5, 6>();
      if constexpr (NT > 1) tile_multiply<3, 5, 7>();
    }
    w += 2 * kTileBytes;
    for (int64_t i = 0; i < panel.next_lines; ++i, next += 64) __builtin_prefetch(next, 0, 2);
    if (earlier.rows > 0) store(g, earlier, min_of(share, earlier.rows));
  };
  constexpr int64_t kItem = sizeof(BFloat16);
  const BFloat16* a = x.rows + m * x.lda;
  for (int64_t s = 0; s < x.steps; ++s, a += kTileDepth) step(a, x.lda * kItem);
  if (x.tail != nullptr) step(x.tail + m * kTileDepth, kTileDepth * kItem);
  tile_store<0>(b.to, b.to_stride);
  if constexpr (NT > 1) tile_store<1>(b.to + kTileRows, b.to_stride);
  if constexpr (MT > 1) {
    tile_store<2>(lower(b.to, b.to_stride), b.to_stride);
    if constexpr (NT > 1) tile_store<3>(lower(b.to, b.to_stride) + kTileRows, b.to_stride);
  }
}

// The sums that are in `rows` x `columns` of C, plus the bias, as rows of kTilePanel.
inline void load_sums(const float* c, int64_t ldc, int64_t rows, int64_t columns, const float* bias, float* sums) {
  for (int64_t r = 0; r < kBlockOfTiles; ++r, sums += kTilePanel) {
    for (int64_t j = 0; j < kTilePanel; ++j) sums[j] = bias[j] + (r < rows && j < columns ? c[r * ldc + j] : 0.0f);
  }
}

__attribute__((noinline)) inline void gemm_on_tiles(const GemmArgs& g) {
  need_tiles();
  const TileSource x = tile_source(g);
  const StoreSums store = store_sums_as(g.c_dtype);
  const int64_t c_bytes = int64_t(kItemSize[int(g.c_dtype)]), panel_bytes = tile_panel_bytes(g.K);
  const int64_t blocks = (g.M + kBlockOfTiles - 1) / kBlockOfTiles;
  // Panels come from the last-level cache where the weights of all layers do not fit the second. Past the end of memory a prefetch
  // does nothing.
  const int64_t block_bytes = (panel_bytes + blocks - 1) / blocks, steps = tile_steps(g.K);
  const bool rounds = g.rounds != DType::kF32;
  const bool in_c = g.adds && g.bias == nullptr && g.act == Activation::kNone;  // whole tiles of sums are loaded and stored in C
  alignas(64) float ring[3][kBlockOfTiles * kTilePanel];
  alignas(64) float biases[3][kTilePanel];  // of this panel and of the two before it, whose sums may still wait
  TileSums earlier, last;
  int turn = 0;
  for (int64_t n0 = 0; n0 < g.N; n0 += kTilePanel) {
    const int64_t columns = min_of(kTilePanel, g.N - n0);
    const int64_t panel = n0 / kTilePanel;
    float* const bias = biases[panel % 3];
    for (int64_t j = 0; j < kTilePanel; ++j) bias[j] = g.bias && j < columns ? static_cast<const float*>(g.bias)[n0 + j] : 0.0f;
    const char* w = static_cast<const char*>(g.w) + panel * panel_bytes;
    TilePanel p{w, w + panel_bytes, (block_bytes / 64 + steps - 1) / steps};
    for (int64_t m0 = 0, rows; m0 < g.M; m0 += rows, p.next += block_bytes) {
      rows = min_of(g.M - m0, g.M < kBlockOfTiles ? kTileRows : kBlockOfTiles);
      // The last rows that are not whole tiles are multiplied together with some before them, which are not stored again.
      const int64_t high = rows > kTileRows ? kBlockOfTiles : kTileRows, m = max_of(min_of(m0, g.M - high), int64_t(0));
      float* sums = ring[turn];
      TileBlock b{rounds || g.bias == nullptr ? nullptr : bias, 0, sums, kTilePanel * 4};
      float* const c = static_cast<float*>(g.c) + m * g.ldc + n0;  // of sums that are added to
      const bool in_place = in_c && m == m0 && m + high <= g.M && columns % kTileRows == 0;
      if (in_place) {
        b = {c, g.ldc * 4, c, g.ldc * 4};
      } else if (g.adds) {
        load_sums(c, g.ldc, min_of(high, g.M - m), columns, bias, sums);
        b.from = sums, b.from_stride = kTilePanel * 4;
      }
      if (high > kTileRows)
        columns > kTileRows ? tile_block<2, 2>(g, x, m, p, b, store, earlier) : tile_block<2, 1>(g, x, m, p, b, store, earlier);
      else
        columns > kTileRows ? tile_block<1, 2>(g, x, m, p, b, store, earlier) : tile_block<1, 1>(g, x, m, p, b, store, earlier);
      earlier = last;
      if (in_place) {
        last = {};
        continue;
      }
      last = {sums + (m0 - m) * kTilePanel, static_cast<char*>(g.c) + (m0 * g.ldc + n0) * c_bytes, columns, rows,
              rounds && g.bias != nullptr ? bias : nullptr};
      turn = turn == 2 ? 0 : turn + 1;
    }
  }
  if (earlier.rows > 0) store(g, earlier, earlier.rows);
  if (last.rows > 0) store(g, last, last.rows);
}

inline void tile_gemm(const GemmArgs& g) { g.panel == Panel::kTiles ? gemm_on_tiles(g) : base().gemm(g); }

}  // namespace KITSUNE_ISA
}  // namespace kitsune::cpu
