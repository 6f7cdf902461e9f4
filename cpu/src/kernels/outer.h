// C += X^T Y: the product of a weight gradient, X[R][M] and Y[R][N] as they lie in memory, R the rows of a tile.
//
// The contraction runs over rows, so a step of the micro-kernel needs one row of Y across the panel (packed first: R x panel floats
// stay in the first-level cache) and MR neighbours of one row of X: broadcast where they lie, from a copy in blocks of MR columns
// where there are many panels, or from interleaved pairs of rows for bf16.
#pragma once

#include "../checked.h"
#include "few_sums.h"
#include "gemm.h"

namespace kitsune::cpu::KITSUNE_ISA {

// Columns of X interleaved: whole units of those that are multiplied together.
inline int64_t interleaved_columns(int64_t M) {
#if defined(KITSUNE_NATIVE_BF16)
  return (M + kRowUnit<BF16Step> - 1) / kRowUnit<BF16Step> * kRowUnit<BF16Step>;
#else
  return M;
#endif
}

// Columns of X whose `rows` interleaved rows stay in the second-level cache for all panels. The interleaved gradients of a table
// with 50 257 tokens come from memory for each panel otherwise, at 0.42 of the rate of the products (Zen 4). Whole blocks.
constexpr size_t kPairBytes = size_t{512} << 10;
inline int64_t columns_together(int64_t rows, int64_t M) {
  const int64_t fitting = max_of(int64_t(kPairBytes / sizeof(BFloat16)) / max_of(rows, int64_t(1)), int64_t(8 * kBlockRows));
  const int64_t parts = (M + fitting - 1) / fitting, blocks = (M + kBlockRows - 1) / kBlockRows;
  return min_of(M, (blocks + parts - 1) / parts * kBlockRows);
}

struct OuterScratch {
  size_t panel, x, y, bytes;  // byte offsets: one panel of Y; X and Y converted, interleaved or in blocks, where they need it
};

// Is X copied, so that the rows of a block of its columns follow each other? As they lie, each is on a page of its own, and where
// they are a multiple of 1 KB apart they compete for the same few places of the first-level cache, again for every panel. A copy
// costs as much as a part of one panel.
constexpr int64_t kCopiedPanels = 12;
inline bool copies_blocks(const OuterArgs& g) {
  return g.dtype == multiplied_type(g.panel) && g.panel != Panel::kBF16 && g.M > kBlockRows &&
         panel_count(g.panel, g.N) >= kCopiedPanels;
}

inline OuterScratch outer_layout(const OuterArgs& g) {
  if (has_few_sums(g)) return {};
  Panel p = g.panel;
  size_t element = kItemSize[int(multiplied_type(p))], rows = size_t(padded_depth(p, g.R));
  bool converts = g.dtype != multiplied_type(p), interleaved = p == Panel::kBF16;
  OuterScratch s{};
  s.x = rounded_up(times(rows, size_t(panel_width(p)) * element), 64);
  const bool own_x = converts || interleaved || copies_blocks(g);
  const int64_t columns = interleaved ? columns_together(int64_t(rows), g.M) : g.M;
  s.y = plus(s.x, own_x ? rounded_up(times(times(rows, size_t(interleaved_columns(columns))), element), 64) : 0);
  s.bytes = plus(s.y, converts ? rounded_up(times(times(rows, size_t(g.N)), element), 64) : 0);
  return s;
}

inline size_t outer_scratch_bytes(const OuterArgs& g) { return outer_layout(g).bytes; }

// Rows of Y, columns [n0, n0 + columns), as a panel; the columns beyond are zeros.
template <class Step>
void pack_rows(const typename Step::X* y, int64_t ldy, int64_t R, int64_t columns, int64_t width, typename Step::X* out) {
  using X = typename Step::X;
  constexpr int64_t kDepth = Step::kDepth;
  if constexpr (kDepth == 4) return interleave_rows(y, ldy, R, columns, width, out);
  if (columns < width || R % kDepth)
    __builtin_memset(static_cast<void*>(out), 0, size_t((R + kDepth - 1) / kDepth * kDepth * width) * sizeof(X));
  if constexpr (kDepth == 1) {
    constexpr int64_t kWidth = kPanelVectors * kVectorBytes / int64_t(sizeof(X));
    if (columns == kWidth) {  // a copy of constant size is a few moves, any other a call
      for (int64_t r = 0; r < R; ++r)
        __builtin_memcpy(static_cast<void*>(out + r * kWidth), y + r * ldy, size_t(kWidth) * sizeof(X));
      return;
    }
    for (int64_t r = 0; r < R; ++r) __builtin_memcpy(static_cast<void*>(out + r * width), y + r * ldy, size_t(columns) * sizeof(X));
  } else {
    for (int64_t r = 0; r < R; r += kDepth) {
      const X* from = y + r * ldy;
      const X* below = r + 1 < R ? from + ldy : nullptr;
      if (columns == kPanelFloats) {
        join_pairs(kPanelFloats, from, below, out + r * width);
      } else {
        join_pairs(columns, from, below, out + r * width);
      }
    }
  }
}

#if defined(__AVX512BF16__)
// Pairs of rows of X side by side: (r, m) at ((r / 2) * M + m) * 2 + r % 2, so that one broadcast brings both.
inline void interleave_rows(const BFloat16* x, int64_t ldx, int64_t R, int64_t M, int64_t, BFloat16* out) {
  for (int64_t r = 0; r < R; r += 2) join_pairs(M, x + r * ldx, r + 1 < R ? x + (r + 1) * ldx : nullptr, out + r * M);
}
#endif

// Lanes of a vector that are really columns, and `to` += v, or `to` = v, in those; without masks, in all.
#if defined(__AVX512F__)
KITSUNE_INLINE __mmask16 first_lanes(int64_t n) { return __mmask16(n >= 16 ? 0xffff : n <= 0 ? 0 : (1 << n) - 1); }
KITSUNE_INLINE void add_lanes(float* to, VF v, __mmask16 mask) {
  _mm512_mask_storeu_ps(to, mask, _mm512_add_ps(_mm512_maskz_loadu_ps(mask, to), (__m512)v));
}
KITSUNE_INLINE void add_lanes(double* to, VD v, __mmask16 mask) {
  _mm512_mask_storeu_pd(to, __mmask8(mask), _mm512_add_pd(_mm512_maskz_loadu_pd(__mmask8(mask), to), (__m512d)v));
}
KITSUNE_INLINE void put_lanes(float* to, VF v, __mmask16 mask) { _mm512_mask_storeu_ps(to, mask, (__m512)v); }
KITSUNE_INLINE void put_lanes(double* to, VD v, __mmask16 mask) { _mm512_mask_storeu_pd(to, __mmask8(mask), (__m512d)v); }
#elif defined(KITSUNE_NEON)
KITSUNE_INLINE int64_t first_lanes(int64_t n) { return n; }
template <class S, class V>
KITSUNE_INLINE void add_lanes(S* to, V v, int64_t lanes) {
  constexpr int kLanes = sizeof(V) / sizeof(S);
  if (lanes >= kLanes) return store_vector(to, load_vector<V>(to) + v);
  for (int i = 0; i < kLanes - 1; ++i) {
    if (i < lanes) to[i] += v[i];
  }
}
template <class S, class V>
KITSUNE_INLINE void put_lanes(S* to, V v, int64_t lanes) {
  constexpr int kLanes = sizeof(V) / sizeof(S);
  if (lanes >= kLanes) return store_vector(to, v);
  for (int i = 0; i < kLanes - 1; ++i) {
    if (i < lanes) to[i] = v[i];
  }
}
#else
KITSUNE_INLINE int first_lanes(int64_t) { return 0; }
template <class S, class V>
KITSUNE_INLINE void add_lanes(S* to, V v, int) {
  store_vector(to, load_vector<V>(to) + v);
}
template <class S, class V>
KITSUNE_INLINE void put_lanes(S* to, V v, int) {
  store_vector(to, v);
}
#endif

#if !defined(KITSUNE_NEON)
// acc[i][j] += the sum over s of x[s * x_step + i] times the panel's vector j of row s.
template <class Step, int MR, int NV>
KITSUNE_INLINE void accumulate_outer(const typename Step::X* x, int64_t x_step, const char* panel, int64_t steps,
                                     typename Step::A (&acc)[MR][NV]) {
  for (int64_t s = 0; s < steps; ++s) {
    decltype(Step::weights(panel, s, 0)) wv[NV];
    KITSUNE_UNROLL
    for (int j = 0; j < NV; ++j) wv[j] = Step::weights(panel, s, j);
    const typename Step::X* row = x + s * x_step;
    KITSUNE_UNROLL
    for (int i = 0; i < MR; ++i) {
      auto xv = Step::rows(row + i * Step::kDepth);
      KITSUNE_UNROLL
      for (int j = 0; j < NV; ++j) acc[i][j] = Step::multiply_add(acc[i][j], xv, wv[j]);
    }
  }
}
#endif

// C[MR][NV vectors] += over `steps` of x[s * x_step + i * x_next] * panel row s; `first`: C = that.
//
// C, which a weight gradient of many layers keeps in the last-level cache, is added to at the end. The lines of the next block,
// which lie behind this one's, are asked for while this one is multiplied; past the end of memory a prefetch does nothing.
template <class Step, int MR, int NV>
__attribute__((noinline)) void outer_block(const typename Step::X* x, int64_t x_step, const char* panel, int64_t steps,
                                           typename Step::S* c, int64_t ldc, int64_t columns, bool first) {
  using V = typename Step::A;
  using S = typename Step::S;
  constexpr int64_t kLanes = sizeof(V) / sizeof(S), kWidth = NV * kLanes;
  V acc[MR][NV];
  KITSUNE_UNROLL
  for (int i = 0; i < MR; ++i) {
    KITSUNE_UNROLL
    for (int j = 0; j < NV; ++j) acc[i][j] = V{};
  }
  const S* line = c + MR * ldc;
#pragma GCC unroll 1
  for (int i = 0; i < MR; ++i, line += ldc) {
    __builtin_prefetch(line, 1);
    __builtin_prefetch(line + columns - 1, 1);
  }
  accumulate_outer<Step>(x, x_step, panel, steps, acc);
  if (kMaskedStores || columns == kWidth) {
    decltype(first_lanes(0)) lanes[NV];
    for (int j = 0; j < NV; ++j) lanes[j] = first_lanes(columns - j * kLanes);
    KITSUNE_UNROLL
    for (int i = 0; i < MR; ++i) {
      KITSUNE_UNROLL
      for (int j = 0; j < NV; ++j) {
        if (first) {
          put_lanes(c + j * kLanes, acc[i][j], lanes[j]);
        } else {
          add_lanes(c + j * kLanes, acc[i][j], lanes[j]);
        }
      }
      c += ldc;
    }
    return;
  }
  alignas(64) S sums[MR * kWidth];
  __builtin_memcpy(sums, &acc[0][0], sizeof sums);
  for (int i = 0; i < MR; ++i, c += ldc) {
    if (first) {
      __builtin_memcpy(c, sums + i * kWidth, size_t(columns) * sizeof(S));
    } else {
      for (int64_t j = 0; j < columns; ++j) c[j] += sums[i * kWidth + j];
    }
  }
}

template <class Step, int NV, int MR = kBlockRows>
KITSUNE_INLINE void outer_rows(int64_t m, const typename Step::X* x, int64_t x_step, const char* panel, int64_t steps,
                               typename Step::S* c, int64_t ldc, int64_t columns, bool first) {
  if constexpr (MR >= 1) {
    if (m == MR) return outer_block<Step, MR, NV>(x, x_step, panel, steps, c, ldc, columns, first);
    return outer_rows<Step, NV, MR - 1>(m, x, x_step, panel, steps, c, ldc, columns, first);
  }
}

// Y was made long before, in the forward pass, and is far away by now: each block asks for its share of the next panel's rows.
template <class X>
void prefetch_rows(const X* y, int64_t ldy, int64_t begin, int64_t end, int64_t columns) {
  constexpr int64_t kLine = 64 / int64_t(sizeof(X));
  for (int64_t r = begin; r < end; ++r) {
    for (int64_t j = 0; j < columns; j += kLine) __builtin_prefetch(y + r * ldy + j, 0, 2);
  }
}

// Columns [m0, m0 + m) of the rows of X, side by side: (r, i) at r * m + i.
template <class X>
void copy_columns(const X* x, int64_t ldx, int64_t R, int64_t m, X* out) {
  if (m == kBlockRows) {  // a copy of constant size is a few moves, any other a call
    for (int64_t r = 0; r < R; ++r) __builtin_memcpy(static_cast<void*>(out + r * kBlockRows), x + r * ldx, kBlockRows * sizeof(X));
    return;
  }
  for (int64_t r = 0; r < R; ++r)
    for (int64_t i = 0; i < m; ++i) out[r * m + i] = x[r * ldx + i];
}

// Columns of X: [begin, end).
struct ColumnRange {
  int64_t begin, end;
};

// The rows of C of `range`. x and y are of the multiplied type, x from the first of these columns on; x rows are `x_step` apart per
// step (a pair of rows for bf16, interleaved). With `blocks_of_x` each block of x is copied there while the first panel is
// multiplied.
template <class Step>
void outer_as(const OuterArgs& g, ColumnRange range, const typename Step::X* x, int64_t x_step, const typename Step::X* y,
              int64_t ldy, typename Step::X* blocks_of_x = nullptr) {
  using S = typename Step::S;
  constexpr int64_t kLanes = sizeof(typename Step::A) / sizeof(S), kWidth = kPanelVectors * kLanes;
  const int64_t steps = (g.R + Step::kDepth - 1) / Step::kDepth;
  char* panel = static_cast<char*>(g.scratch);
  for (int64_t n0 = 0; n0 < g.N; n0 += kWidth) {
    int64_t columns = min_of(kWidth, g.N - n0);
    const int64_t ldc = group_columns(g.N, n0);
    pack_rows<Step>(y + n0, ldy, g.R, columns, kWidth, reinterpret_cast<typename Step::X*>(panel));
    constexpr int64_t kUnit = kRowUnit<Step>;
    const int64_t M = range.end - range.begin;
    const int64_t blocks = (M + kBlockRows - 1) / kBlockRows, units = (M + kUnit - 1) / kUnit;
    const int64_t each = units / blocks, extra = units % blocks;
    int64_t ahead = min_of(kWidth, g.N - n0 - kWidth);  // columns of the next panel
    for (int64_t i = 0, m0 = 0; i < blocks; ++i) {
      if (ahead > 0) prefetch_rows(y + n0 + kWidth, ldy, g.R * i / blocks, g.R * (i + 1) / blocks, ahead);
      int64_t m = min_of(M - m0, kUnit * (each + (i < extra ? 1 : 0)));
      S* c = static_cast<S*>(g.c) + sum_offset(g.M, g.N, range.begin + m0, n0);
      const typename Step::X* from = x + m0 * Step::kDepth;
      int64_t step = x_step;
      if (blocks_of_x != nullptr) {
        typename Step::X* block = blocks_of_x + m0 * g.R;
        if (n0 == 0) copy_columns(from, x_step, g.R, m, block);
        from = block, step = m;
      }
      if (columns > kLanes) {
        outer_rows<Step, kPanelVectors>(m, from, step, panel, steps, c, ldc, columns, g.first);
      } else {
        outer_rows<Step, 1>(m, from, step, panel, steps, c, ldc, columns, g.first);
      }
      m0 += m;
    }
  }
}

template <class To>
const To* converted_rows(const void* from, DType dtype, int64_t ld, int64_t R, int64_t columns, void* out) {
  LoadFn load = with_float<LoadFn>(dtype, [](auto tag) -> LoadFn { return &load_strided<To, typename decltype(tag)::type>; });
  for (int64_t r = 0; r < R; ++r) {
    load(columns, static_cast<To*>(out) + r * columns, static_cast<const char*>(from) + size_t(r * ld) * kItemSize[int(dtype)], 1);
  }
  return static_cast<const To*>(out);
}

#if defined(KITSUNE_NATIVE_BF16)
inline void outer_of_pairs(const OuterArgs& g) {
  BFloat16* x = reinterpret_cast<BFloat16*>(static_cast<char*>(g.scratch) + outer_layout(g).x);
  const int64_t together = columns_together(padded_depth(g.panel, g.R), g.M);
  for (int64_t m = 0; m < g.M; m += together) {
    const int64_t columns = min_of(together, g.M - m), width = interleaved_columns(columns);
    interleave_rows(static_cast<const BFloat16*>(g.x) + m, g.ldx, g.R, columns, width, x);
    outer_as<BF16Step>(g, {m, m + columns}, x, BF16Step::kDepth * width, static_cast<const BFloat16*>(g.y), g.ldy);
  }
}
#endif

inline void outer(const OuterArgs& g) {
  if (has_few_sums(g)) return few_sums(g);
  OuterScratch at = outer_layout(g);
  char* scratch = static_cast<char*>(g.scratch);
  switch (g.panel) {
    case Panel::kF64:
      return outer_as<F64Step>(g, {0, g.M}, static_cast<const double*>(g.x), g.ldx, static_cast<const double*>(g.y), g.ldy,
                               copies_blocks(g) ? reinterpret_cast<double*>(scratch + at.x) : nullptr);
    case Panel::kBF16:
#if defined(KITSUNE_NATIVE_BF16)
      return outer_of_pairs(g);
#else
      return;  // panel_for never names it on this ISA
#endif
    case Panel::kTiles: return;  // amx_outer.h
    case Panel::kF32:
      if (g.dtype == DType::kF32)
        return outer_as<F32Step>(g, {0, g.M}, static_cast<const float*>(g.x), g.ldx, static_cast<const float*>(g.y), g.ldy,
                                 copies_blocks(g) ? reinterpret_cast<float*>(scratch + at.x) : nullptr);
      const float* x = converted_rows<float>(g.x, g.dtype, g.ldx, g.R, g.M, scratch + at.x);
      const float* y = converted_rows<float>(g.y, g.dtype, g.ldy, g.R, g.N, scratch + at.y);
      return outer_as<F32Step>(g, {0, g.M}, x, g.M, y, g.N);
  }
}

}  // namespace kitsune::cpu::KITSUNE_ISA
