// The kernels for AArch64 with the bf16 instructions (FEAT_BF16).
// Flags, on AArch64 only: -march=armv8.2-a+bf16
#if defined(__aarch64__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
#if !defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#error "compile this file with -march=armv8.2-a+bf16"
#endif
#define KITSUNE_ISA neonbf16
#define KITSUNE_ISA_NAME "neonbf16"
#define KITSUNE_NEON
#if !defined(__clang__)
#pragma GCC optimize("no-schedule-insns")  // moved up, the loads of a block's operands would push its sums out of the registers
#endif
#include "kernels/table.h"
#endif
