// The kernels for x86-64 with AVX-512 F, BW, DQ and VL.
// Flags, on x86-64 only: -mavx512f -mavx512bw -mavx512dq -mavx512vl -mfma -mf16c -mprefer-vector-width=512
#if defined(__x86_64__)
#if !defined(__AVX512F__) || !defined(__AVX512BW__) || !defined(__AVX512DQ__) || !defined(__AVX512VL__)
#error "compile this file with -mavx512f -mavx512bw -mavx512dq -mavx512vl -mfma -mf16c -mprefer-vector-width=512"
#endif
#define KITSUNE_ISA avx512
#define KITSUNE_ISA_NAME "avx512"
#include "kernels/table.h"
#endif
