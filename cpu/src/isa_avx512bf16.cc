// The kernels for x86-64 with AVX-512 F, BW, DQ, VL and BF16.
// Flags, on x86-64 only: -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512bf16 -mfma -mf16c -mprefer-vector-width=512
#if defined(__x86_64__)
#if !defined(__AVX512BF16__) || !defined(__AVX512BW__) || !defined(__AVX512DQ__) || !defined(__AVX512VL__)
#error "compile this file with -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512bf16 -mfma -mf16c -mprefer-vector-width=512"
#endif
#define KITSUNE_ISA avx512bf16
#define KITSUNE_ISA_NAME "avx512bf16"
#include "kernels/table.h"
#endif
