// The kernels for AArch64: NEON, which all of its CPUs have, with multiplications by a lane and the hardware's f16 conversions.
// Flags: none beyond the common ones.
#if defined(__aarch64__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
#define KITSUNE_ISA neon
#define KITSUNE_ISA_NAME "neon"
#define KITSUNE_NEON
#if !defined(__clang__)
#pragma GCC optimize("no-schedule-insns")  // moved up, the loads of a block's operands would push its sums out of the registers
#endif
#include "kernels/table.h"
#endif
