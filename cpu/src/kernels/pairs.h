// Products of bfloat16 by the instructions that add up pairs of them (VDPBF16PS).
//
// The including unit has named KITSUNE_PAIR_BASE, the kernels that do everything else: they are those of a CPU that lacks only
// these instructions, so that nothing is compiled twice. The panels of pairs are theirs too: they lay them out and multiply none.
#pragma once

#include "dots.h"
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

// The table of the base with these products.
inline KernelTable pair_table(const char* isa) {
  KernelTable t = base();
  t.isa = isa;
  t.panel_for = &panel_for;
  t.gemm = &pair_gemm;
  t.outer = &pair_outer;
  t.dot = &pair_dot;
  return t;
}

}  // namespace KITSUNE_ISA
}  // namespace kitsune::cpu
