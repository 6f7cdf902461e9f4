// Products of bfloat16 by the instructions that add up pairs of them (VDPBF16PS).
//
// The including unit has named KITSUNE_PAIR_BASE, the kernels that do everything else: they are those of a CPU that lacks only
// these instructions, so that nothing is compiled twice. The panels of pairs are theirs too: they lay them out and multiply none.
#pragma once

#include "dots.h"
#include "exp_rows.h"
#include "gemm.h"
#include "outer.h"

namespace kitsune::cpu {

namespace KITSUNE_PAIR_BASE {
const KernelTable& table();
}

namespace KITSUNE_ISA {

inline const KernelTable& base() { return KITSUNE_PAIR_BASE::table(); }

inline void pair_gemm(const GemmArgs& g) { g.panel == Panel::kBF16 ? gemm_as<BF16Step>(g) : base().gemm(g); }

inline void pair_outer(const OuterArgs& g) { g.panel == Panel::kBF16 && !has_few_sums(g) ? outer_of_pairs(g) : base().outer(g); }

inline DotFn pair_dot(DType type) { return type == DType::kBF16 ? &dot_as<BFloat16> : base().dot(type); }

// float32 to bfloat16, two vectors at once. The instruction takes denormals for zeros: where there are any, the base rounds them.
inline void round_elements(int64_t n, void* to_, int64_t stride, const void* from_) {
  if (stride != 1) return base().store(DType::kBF16, DType::kF32)(n, to_, stride, from_);
  BFloat16* to = static_cast<BFloat16*>(to_);
  const float* from = static_cast<const float*>(from_);
  const StoreFn exact = base().store(DType::kBF16, DType::kF32);
  auto has_denormals = [](__m512 v) {  // VFPCLASSPS finds none where the thread takes them for zeros
    const __m512i bits = _mm512_castps_si512(v);
    const __mmask16 least = _mm512_testn_epi32_mask(bits, _mm512_set1_epi32(0x7f800000));
    return _mm512_mask_test_epi32_mask(least, bits, _mm512_set1_epi32(0x007fffff));
  };
  int64_t i = 0;
  for (; i + 2 * kFloats <= n; i += 2 * kFloats) {
    const __m512 low = _mm512_loadu_ps(from + i), high = _mm512_loadu_ps(from + i + kFloats);
    if (__builtin_expect(has_denormals(low) | has_denormals(high), 0))
      exact(2 * kFloats, to + i, 1, from + i);
    else
      _mm512_storeu_si512(to + i, (__m512i)_mm512_cvtne2ps_pbh(high, low));
  }
  if (i < n) exact(n - i, to + i, 1, from + i);
}

inline StoreFn pair_store(DType storage, DType compute) {
  return storage == DType::kBF16 && compute == DType::kF32 ? &round_elements : base().store(storage, compute);
}

// The table of the base with these products.
inline KernelTable pair_table(const char* isa) {
  KernelTable t = base();
  t.isa = isa;
  t.panel_for = &panel_for;
  t.gemm = &pair_gemm;
  t.outer = &pair_outer;
  t.dot = &pair_dot;
  t.exp_row = &exp_row_function;
  t.store = &pair_store;
  return t;
}

}  // namespace KITSUNE_ISA
}  // namespace kitsune::cpu
