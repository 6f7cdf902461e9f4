// The kernels for x86-64 with AMX-TILE and AMX-BF16: those of isa_avx512bf16.cc, with products of bfloat16 on tiles.
// Flags, on x86-64 only: -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512bf16 -mamx-tile -mamx-bf16 -mfma -mf16c
// -mprefer-vector-width=512
#if defined(__x86_64__)
#if !defined(__AMX_TILE__) || !defined(__AMX_BF16__) || !defined(__AVX512BF16__)
#error "compile this file with the flags of isa_avx512bf16.cc and -mamx-tile -mamx-bf16"
#endif
#define KITSUNE_ISA amx
#define KITSUNE_TILE_BASE avx512bf16
#include "kernels/amx_instructions.h"
#include "kernels/amx_outer.h"

namespace kitsune::cpu::amx {
const KernelTable& table();
const KernelTable& table() {
  static const KernelTable made = tile_table("amx");
  return made;
}
}  // namespace kitsune::cpu::amx
#endif
