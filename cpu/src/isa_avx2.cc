// The kernels for x86-64 with AVX2, FMA and F16C.
// Flags, on x86-64 only: -mavx2 -mfma -mf16c
#if defined(__x86_64__)
#if !defined(__AVX2__) || !defined(__FMA__) || !defined(__F16C__)
#error "compile this file with -mavx2 -mfma -mf16c"
#endif
#define KITSUNE_ISA avx2
#define KITSUNE_ISA_NAME "avx2"
#include "kernels/table.h"
#endif
