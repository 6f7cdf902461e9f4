// The kernels for x86-64 with AVX-512 F, BW, DQ, VL and BF16: those of isa_avx512.cc, with products of bfloat16 in pairs.
// Flags, on x86-64 only: -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512bf16 -mfma -mf16c -mprefer-vector-width=512
#if defined(__x86_64__)
#if !defined(__AVX512BF16__) || !defined(__AVX512BW__) || !defined(__AVX512DQ__) || !defined(__AVX512VL__)
#error "compile this file with -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512bf16 -mfma -mf16c -mprefer-vector-width=512"
#endif
#define KITSUNE_ISA avx512bf16
#define KITSUNE_PAIR_BASE avx512
#include "kernels/pairs.h"

namespace kitsune::cpu::avx512bf16 {
const KernelTable& table();
const KernelTable& table() {
  static const KernelTable made = pair_table("avx512bf16");
  return made;
}
}  // namespace kitsune::cpu::avx512bf16
#endif
