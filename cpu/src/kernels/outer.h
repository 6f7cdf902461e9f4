// C += X^T Y: the product of a weight gradient, X[R][M] and Y[R][N] as they lie in memory, R the rows of a tile.
//
// The contraction runs over rows, so a step of the micro-kernel needs one row of Y across the panel (packed first: R x panel floats
// stay in the first-level cache) and MR neighbours of one row of X (broadcast where they lie, or from interleaved pairs of rows for
// bf16).
#pragma once

#include "gemm.h"

namespace kitsune::cpu::KITSUNE_ISA {

inline Panel outer_panel(DType x) { return panel_for(x); }

struct OuterScratch {
  size_t panel, x, y, bytes;  // byte offsets: one panel of Y; X and Y converted or interleaved, where they need it
};

inline OuterScratch outer_layout(const OuterArgs& g) {
  auto up = [](size_t n) { return (n + 63) / 64 * 64; };
  Panel p = outer_panel(g.dtype);
  size_t element = kItemSize[int(multiplied_type(p))], rows = size_t(padded_depth(p, g.R));
  bool converts = g.dtype != multiplied_type(p), pairs = p == Panel::kBF16;
  OuterScratch s{};
  s.x = up(panel_bytes(p, g.R));
  s.y = s.x + (converts || pairs ? up(rows * size_t(g.M) * element) : 0);
  s.bytes = s.y + (converts ? up(rows * size_t(g.N) * element) : 0);
  return s;
}

inline size_t outer_scratch_bytes(const OuterArgs& g) { return outer_layout(g).bytes; }

// Rows of Y, columns [n0, n0 + columns), as a panel; the columns beyond are zeros.
template <class Step, bool Pairs>
void pack_rows(const typename Step::X* y, int64_t ldy, int64_t R, int64_t columns, int64_t width, typename Step::X* out) {
  using X = typename Step::X;
  if (columns < width || (Pairs && R % 2))
    __builtin_memset(static_cast<void*>(out), 0, size_t((R + Pairs) / (1 + Pairs) * (1 + Pairs) * width) * sizeof(X));
  if constexpr (!Pairs) {
    for (int64_t r = 0; r < R; ++r) __builtin_memcpy(static_cast<void*>(out + r * width), y + r * ldy, size_t(columns) * sizeof(X));
  } else {
    for (int64_t r = 0; r < R; ++r) {
      X* to = out + panel_offset<true>(r, 0, width);
      const X* from = y + r * ldy;
      for (int64_t j = 0; j < columns; ++j) to[2 * j] = from[j];
    }
  }
}

#if defined(__AVX512BF16__)
// Pairs of rows of X side by side: (r, m) at ((r / 2) * M + m) * 2 + r % 2, so that one broadcast brings both.
inline void interleave_rows(const BFloat16* x, int64_t ldx, int64_t R, int64_t M, BFloat16* out) {
  for (int64_t r = 0; r < R; r += 2) {
    const BFloat16* a = x + r * ldx;
    const BFloat16* b = a + ldx;
    uint32_t* to = reinterpret_cast<uint32_t*>(out + r * M);
    if (r + 1 < R) {
      for (int64_t m = 0; m < M; ++m) to[m] = uint32_t(a[m].bits) | uint32_t(b[m].bits) << 16;
    } else {
      for (int64_t m = 0; m < M; ++m) to[m] = a[m].bits;
    }
  }
}
#endif

// C[MR][NV vectors] += over `steps` of x[s * x_step + i * x_next] * panel row s.
template <class Step, int MR, int NV>
__attribute__((noinline)) void outer_block(const typename Step::X* x, int64_t x_step, const char* panel, int64_t steps,
                                           typename Step::S* c, int64_t ldc, int64_t columns) {
  using V = typename Step::A;
  using S = typename Step::S;
  constexpr int64_t kLanes = sizeof(V) / sizeof(S), kWidth = NV * kLanes;
  V acc[MR][NV];
  alignas(64) S edge[MR * kWidth];
  const bool whole = columns == kWidth;
  if (!whole) {
    for (int i = 0; i < MR; ++i) __builtin_memcpy(edge + i * kWidth, c + i * ldc, size_t(columns) * sizeof(S));
  }
  const S* from = whole ? c : edge;
  const int64_t pitch = whole ? ldc : kWidth;
  KITSUNE_UNROLL
  for (int i = 0; i < MR; ++i) {
    KITSUNE_UNROLL
    for (int j = 0; j < NV; ++j) acc[i][j] = load_vector<V>(from + i * pitch + j * kLanes);
  }
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
  S* to = whole ? c : edge;
  KITSUNE_UNROLL
  for (int i = 0; i < MR; ++i) {
    KITSUNE_UNROLL
    for (int j = 0; j < NV; ++j) store_vector(to + i * pitch + j * kLanes, acc[i][j]);
  }
  if (!whole) {
    for (int i = 0; i < MR; ++i) __builtin_memcpy(c + i * ldc, edge + i * kWidth, size_t(columns) * sizeof(S));
  }
}

template <class Step, int NV, int MR = kBlockRows>
KITSUNE_INLINE void outer_rows(int64_t m, const typename Step::X* x, int64_t x_step, const char* panel, int64_t steps,
                               typename Step::S* c, int64_t ldc, int64_t columns) {
  if constexpr (MR >= 1) {
    if (m == MR) return outer_block<Step, MR, NV>(x, x_step, panel, steps, c, ldc, columns);
    return outer_rows<Step, NV, MR - 1>(m, x, x_step, panel, steps, c, ldc, columns);
  }
}

// x and y are of the multiplied type; x rows are `x_step` apart per step (a pair of rows for bf16, interleaved).
template <class Step>
void outer_as(const OuterArgs& g, const typename Step::X* x, int64_t x_step, const typename Step::X* y, int64_t ldy) {
  using S = typename Step::S;
  constexpr bool kPairs = Step::kDepth == 2;
  constexpr int64_t kLanes = sizeof(typename Step::A) / sizeof(S), kWidth = kPanelVectors * kLanes;
  const int64_t steps = (g.R + Step::kDepth - 1) / Step::kDepth;
  char* panel = static_cast<char*>(g.scratch);
  for (int64_t n0 = 0; n0 < g.N; n0 += kWidth) {
    int64_t columns = min_of(kWidth, g.N - n0);
    pack_rows<Step, kPairs>(y + n0, ldy, g.R, columns, kWidth, reinterpret_cast<typename Step::X*>(panel));
    int64_t blocks = (g.M + kBlockRows - 1) / kBlockRows, each = g.M / blocks, extra = g.M % blocks;
    for (int64_t i = 0, m0 = 0; i < blocks; ++i) {
      int64_t m = each + (i < extra ? 1 : 0);
      S* c = static_cast<S*>(g.c) + m0 * g.ldc + n0;
      outer_rows<Step, kPanelVectors>(m, x + m0 * Step::kDepth, x_step, panel, steps, c, g.ldc, columns);
      m0 += m;
    }
  }
}

template <class To>
const To* converted_rows(const void* from, DType dtype, int64_t ld, int64_t R, int64_t columns, void* out) {
  LoadFn load = with_type<LoadFn>(dtype, [](auto tag) -> LoadFn { return &load_strided<To, typename decltype(tag)::type>; });
  for (int64_t r = 0; r < R; ++r) {
    load(columns, static_cast<To*>(out) + r * columns, static_cast<const char*>(from) + size_t(r * ld) * kItemSize[int(dtype)], 1);
  }
  return static_cast<const To*>(out);
}

inline void outer(const OuterArgs& g) {
  OuterScratch at = outer_layout(g);
  char* scratch = static_cast<char*>(g.scratch);
  switch (outer_panel(g.dtype)) {
    case Panel::kF64: return outer_as<F64Step>(g, static_cast<const double*>(g.x), g.ldx, static_cast<const double*>(g.y), g.ldy);
    case Panel::kBF16: {
#if defined(__AVX512BF16__)
      BFloat16* x = reinterpret_cast<BFloat16*>(scratch + at.x);
      interleave_rows(static_cast<const BFloat16*>(g.x), g.ldx, g.R, g.M, x);
      return outer_as<BF16Step>(g, x, 2 * g.M, static_cast<const BFloat16*>(g.y), g.ldy);
#else
      return;  // panel_for never names it on this ISA
#endif
    }
    case Panel::kF32:
      if (g.dtype == DType::kF32)
        return outer_as<F32Step>(g, static_cast<const float*>(g.x), g.ldx, static_cast<const float*>(g.y), g.ldy);
      const float* x = converted_rows<float>(g.x, g.dtype, g.ldx, g.R, g.M, scratch + at.x);
      const float* y = converted_rows<float>(g.y, g.dtype, g.ldy, g.R, g.N, scratch + at.y);
      return outer_as<F32Step>(g, x, g.M, y, g.N);
  }
}

}  // namespace kitsune::cpu::KITSUNE_ISA
