// C = act(X W + bias), or act(C + X W + bias), over blocks of rows and panels of W: the loops around the micro-kernel, and the
// conversion of X where needed.
#pragma once

#include "micro_kernel.h"
#include "narrow.h"

namespace kitsune::cpu::KITSUNE_ISA {

// Rows of X that stay in the second-level cache while every panel of W passes by once.
constexpr int64_t kRowBlockBytes = 512 << 10;
constexpr int64_t kMaxRowBlock = 20 * kBlockRows;

inline size_t accumulator_bytes(Panel p) { return p == Panel::kF64 ? 8 : 4; }

inline DType multiplied_type(Panel p) { return p == Panel::kF64 ? DType::kF64 : p == Panel::kBF16 ? DType::kBF16 : DType::kF32; }

inline int64_t row_block(const GemmArgs& g) {
  int64_t element = int64_t(kItemSize[int(multiplied_type(g.panel))]);
  int64_t rows = kRowBlockBytes / (g.K * element) / kBlockRows * kBlockRows;
  return min_of(g.M, min_of(max_of(rows, int64_t(4) * kBlockRows), kMaxRowBlock));
}

inline size_t gemm_scratch_bytes(const GemmArgs& g) {
  if (g.x_dtype == multiplied_type(g.panel)) return 0;
  size_t bytes = size_t(row_block(g)) * size_t(g.K) * kItemSize[int(multiplied_type(g.panel))];
  return (bytes + 63) / 64 * 64;
}

// All rows of one block of X times one panel. The rows are shared out evenly (97 rows are 9 blocks of 10 or 11, not 8 of 12 and a
// lone 1).
template <class Step, int NV>
void multiply_panel(Block b, int64_t rows, size_t panel_bytes) {
  constexpr int64_t kUnit = kRowUnit<Step>;
  const int64_t blocks = (rows + kBlockRows - 1) / kBlockRows, units = (rows + kUnit - 1) / kUnit;
  const int64_t each = units / blocks, extra = units % blocks;
  size_t c_bytes = kItemSize[int(b.c_dtype)];
  // Panels come from the last-level cache where the weights of all layers do not fit the second; the hardware follows a stream only
  // within a page. Behind the last panel lies, as a rule, the next layer's first; past the end of memory a prefetch does nothing.
  const int64_t steps = max_of(b.K / Step::kDepth, int64_t(1)), share = (int64_t(panel_bytes) + blocks - 1) / blocks;
  b.next = static_cast<const char*>(b.w) + panel_bytes;
  b.next_step = (share + steps - 1) / steps;
  for (int64_t i = 0; i < blocks; ++i) {
    int64_t r = min_of(rows, kUnit * (each + (i < extra ? 1 : 0)));
    rows -= r;
    multiply_rows<Step, NV>(r, b);
    b.x = static_cast<const typename Step::X*>(b.x) + r * b.lda;
    b.c = static_cast<char*>(b.c) + size_t(r * b.ldc) * c_bytes;
    b.next += share;
  }
}

template <class Step>
void multiply_all_panels(const GemmArgs& g, int64_t m0, int64_t rows, const void* x, int64_t lda) {
  using S = typename Step::S;
  if constexpr (kSame<typename Step::X, float>) {
    if (is_narrow(g)) return multiply_narrow(g, m0, rows, static_cast<const float*>(x), lda);
  }
  constexpr int64_t kLanes = sizeof(typename Step::A) / sizeof(S), kWidth = kPanelVectors * kLanes;
  size_t c_bytes = kItemSize[int(g.c_dtype)], w_bytes = panel_bytes(g.panel, g.K);
  for (int64_t p = 0, n0 = 0; n0 < g.N; ++p, n0 += kWidth) {
    int64_t columns = min_of(kWidth, g.N - n0);
    alignas(64) S bias[kWidth] = {};
    if (g.bias) __builtin_memcpy(bias, static_cast<const S*>(g.bias) + n0, size_t(columns) * sizeof(S));
    const char* w = static_cast<const char*>(g.w) + size_t(p) * w_bytes;
    char* c = static_cast<char*>(g.c) + size_t(m0 * g.ldc + n0) * c_bytes;
    Block b{x, lda, w, g.K, bias, c, g.ldc, columns, g.c_dtype, g.act, g.act_a, g.act_b, nullptr, 0, g.adds, g.rounds, nullptr};
    if constexpr (kSame<S, float>) {
      static const float kZeros[kWidth] = {};
      if (g.rounds != DType::kF32) b.bias = kZeros, b.late = g.bias ? bias : nullptr;
    }
    if (columns > kLanes) {
      multiply_panel<Step, 2>(b, rows, w_bytes);
    } else {
      multiply_panel<Step, 1>(b, rows, w_bytes);
    }
  }
}

template <class Step>
void gemm_as(const GemmArgs& g) {
  using X = typename Step::X;
  const DType type = multiplied_type(g.panel);
  const int64_t block = row_block(g), blocks = (g.M + block - 1) / block;
  for (int64_t i = 0; i < blocks; ++i) {
    int64_t m0 = g.M * i / blocks, rows = g.M * (i + 1) / blocks - m0;
    const char* x = static_cast<const char*>(g.x) + size_t(m0 * g.lda) * kItemSize[int(g.x_dtype)];
    if (g.x_dtype == type) {
      multiply_all_panels<Step>(g, m0, rows, x, g.lda);
      continue;
    }
    LoadFn load = with_float<LoadFn>(g.x_dtype, [](auto tag) -> LoadFn { return &load_strided<X, typename decltype(tag)::type>; });
    for (int64_t r = 0; r < rows; ++r) {
      load(g.K, static_cast<X*>(g.scratch) + r * g.K, x + size_t(r * g.lda) * kItemSize[int(g.x_dtype)], 1);
    }
    multiply_all_panels<Step>(g, m0, rows, g.scratch, g.K);
  }
}

inline void gemm(const GemmArgs& g) {
  switch (g.panel) {
    case Panel::kF32: return gemm_as<F32Step>(g);
    case Panel::kF64: return gemm_as<F64Step>(g);
    case Panel::kBF16:
#if defined(KITSUNE_NATIVE_BF16)
      return gemm_as<BF16Step>(g);
#else
      return;  // panel_for never names it on this ISA
#endif
    case Panel::kTiles: return;  // amx.h
  }
}

}  // namespace kitsune::cpu::KITSUNE_ISA
